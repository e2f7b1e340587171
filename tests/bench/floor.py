#!/usr/bin/python3
"""The least that a program in Python can do to look at GPUs: the memory and the processes of each, once."""

import pynvml

pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    devices = [device]
    try:
        if pynvml.nvmlDeviceGetMigMode(device)[0]:
            count = pynvml.nvmlDeviceGetMaxMigDeviceCount(device)
            devices = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number) for number in range(count)]
    except pynvml.NVMLError:
        pass
    for each in devices:
        pynvml.nvmlDeviceGetMemoryInfo(each)
        pynvml.nvmlDeviceGetComputeRunningProcesses(each)
        pynvml.nvmlDeviceGetGraphicsRunningProcesses(each)
pynvml.nvmlShutdown()
