#!/usr/bin/python3
"""So many processes with so many open files each, ``argv[1]`` and ``argv[2]``, that wait to be ended together."""

import os
import signal
import sys

sys.path.insert(0, "/opt/simgpu")
from simgpu_process import notify  # noqa: E402

processes, files = int(sys.argv[1]), int(sys.argv[2])
# What a server has open: files, pipes and sockets, of which the search has to look at each.
kept = [os.open("/dev/null", os.O_RDWR) for _ in range(files // 3)]
kept += [end for _ in range(files // 6) for end in os.pipe()]
kept += [os.open("/etc/passwd", os.O_RDONLY) for _ in range(files - len(kept) - 3)]
for _ in range(processes - 1):
    if os.fork() == 0:
        signal.pause()
notify("READY=1")
signal.pause()
