#!/usr/bin/python3
"""The least that it takes to end these processes: SIGTERM to each, and wait until all are gone."""

import os
import select
import signal
import sys

poll = select.poll()
waiting = {}
for word in sys.argv[1:]:
    descriptor = os.pidfd_open(int(word))
    waiting[descriptor] = int(word)
    poll.register(descriptor, select.POLLIN)
for descriptor in waiting:
    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
while waiting:
    for descriptor, _ in poll.poll():
        poll.unregister(descriptor)
        del waiting[descriptor]
