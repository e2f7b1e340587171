"""What may hang, answered in a child: about processes, users, patterns and files.

A process that is wedged, a mount whose server is gone, or a pattern that takes centuries hangs whoever asks; so a child
asks, and is abandoned when it does not answer. Questions and answers are plain values.
"""

from __future__ import annotations

from typing import Any

from .host import procfs


def answer(request: tuple[str, Any]) -> Any:
    """Those of procfs.slow, checkpoint.slow and executables.slow, by the verb that a request begins with."""
    verb, _ = request
    if verb == "file:executable":
        from .host import executables

        return executables.slow(request)
    if verb.startswith("file:"):
        from .host import checkpoint

        return checkpoint.slow(request)
    return procfs.slow(request)
