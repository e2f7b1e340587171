"""What may hang, answered in a child: about processes, users, patterns and files.

A process that is wedged, a mount whose server is gone, or a pattern that takes centuries hangs whoever asks; so a child
asks, and is abandoned when it does not answer. Questions and answers are plain values.
"""

from __future__ import annotations

from typing import Any


def answer(request: tuple[str, Any]) -> Any:
    """Those of slow.answer, checkpoint.slow, executables.slow and textfile.put, by the verb a request begins with."""
    verb, argument = request
    if verb == "file:executable":
        from .host import executables

        return executables.slow(request)
    if verb == "file:metrics":
        return _publish(argument)
    if verb.startswith("file:"):
        from .host import checkpoint

        return checkpoint.slow(request)
    from .host import slow

    return slow.answer(request)


#: Milliseconds between two tries to lock a file of metrics.
AGAIN = 10


def _publish(question: dict[str, Any]) -> tuple[Any, ...]:
    """Merge metrics into their file while no other run does. Who waits for too long is abandoned, like who hangs."""
    import select
    from hashlib import sha256

    from .host import textfile
    from .host.locks import Denied, Locks

    lacking = textfile.load()
    if lacking:
        return ("package", lacking)
    # One lock for each file: what hangs in one must not keep others from theirs.
    name = f"metrics-{sha256(question['path'].encode()).hexdigest()[:16]}"
    locks = Locks()
    try:
        while locks.take([name], "the metrics of another run") is not None:
            select.poll().poll(AGAIN)
        return textfile.put(question)
    except Denied as error:
        return ("lock", str(error))
    finally:
        locks.release()
