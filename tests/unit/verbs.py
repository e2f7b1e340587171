"""What can be typed: the verbs and their options as the parser has them, for tests of what is written about them."""

from __future__ import annotations

import argparse

from gpuprestart import commandline


class _Typed:
    def __init__(self) -> None:
        # What parse() parses with: there is no other list of all verbs and options.
        parser = commandline._parser()
        (verbs,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        self.alone = _options(parser)
        self.verbs: dict[str, argparse.ArgumentParser] = verbs.choices


def _options(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(option for action in parser._actions for option in action.option_strings)


_TYPED = _Typed()

#: The options of the program without a verb.
ALONE = _TYPED.alone
#: The options of each verb, -h and --help included.
OPTIONS = {verb: _options(parser) for verb, parser in _TYPED.verbs.items()}
EVERY = frozenset().union(ALONE, *OPTIONS.values())
