"""The TCP sockets of our network namespace that somebody listens on, from /proc/net.

It knows inodes and ports; whose a socket is, the descriptors of processes tell.
"""

from __future__ import annotations

#: TCP_LISTEN (include/net/tcp_states.h), as /proc/net/tcp writes it. A connection that is over, in TIME_WAIT, is none.
_LISTEN = "0A"


def listening() -> dict[int, int]:
    """The inode of every socket that is listened on, with its port, of IPv4 and IPv6 (proc_net_tcp(5))."""
    found = {}
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(path, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except FileNotFoundError:
            continue  # A kernel without IPv6.
        for row in rows:
            if row[3] == _LISTEN:
                found[int(row[9])] = int(row[1].rpartition(":")[2], 16)
    return found
