"""Programs that serve the GPUs themselves and hold them open all day: pure, by executable.

A name proves nothing, since anybody may call a process Xorg; an executable that only root can write does. The list is
closed: what is not on it is judged by its owner like everybody else.
"""

from __future__ import annotations

from typing import Optional

from .model import Process

#: Base name of the executable -> what it is.
PROGRAMS = {
    "nvidia-persistenced": "NVIDIA persistence daemon",
    "nv-fabricmanager": "NVIDIA fabric manager",
    "nvlsm": "NVLink subnet manager",
    "nv-hostengine": "DCGM host engine",
    "dcgm-exporter": "DCGM exporter",
    "nvidia-cuda-mps-control": "MPS control daemon",
    "nvidia-cuda-mps-server": "MPS server",
    "nvidia-powerd": "NVIDIA power daemon",
    "nvidia-imex": "NVIDIA IMEX service",
    "Xorg": "display server",
    "Xwayland": "display server",
    "gnome-shell": "display server",
    "kwin_wayland": "display server",
    "kwin_x11": "display server",
    "weston": "display server",
    "sway": "display server",
    "nvtop": "GPU monitor",
    "nvidia_gpu_exporter": "GPU monitor",
    "gpud": "GPU monitor",
}


def recognise(process: Process) -> Optional[str]:
    """What kind of infrastructure the process is, or None. A deleted one is called otherwise."""
    if not process.exe or not process.exe_trusted:
        return None
    return PROGRAMS.get(process.exe.rpartition("/")[2])
