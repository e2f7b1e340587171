"""What the service manager is told while we run: a status line, and that more time is needed.

Both answer whether the message was sent. It is not where NotifyAccess= keeps the socket from us, or without
systemd-python; that is no error, and nothing here raises.
"""

from __future__ import annotations


def notify_status(text: str) -> bool:
    """STATUS=, which is one line: what follows a line end would be another assignment, such as MAINPID=."""
    return _notify("STATUS=" + " ".join(text.split()))


def extend_timeout(usec: int) -> bool:
    """EXTEND_TIMEOUT_USEC=: the start may take this long from now, whatever TimeoutStartSec= says."""
    return _notify(f"EXTEND_TIMEOUT_USEC={max(0, usec)}")


def _notify(state: str) -> bool:
    try:
        # The library's call itself: its module systemd.daemon loads what is for sockets as well.
        from systemd._daemon import notify

        return bool(notify(state.encode("utf-8", "backslashreplace").decode()))
    except (ImportError, OSError, ValueError):
        return False
