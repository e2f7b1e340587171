"""What the NVIDIA driver shows without NVML: device nodes and capabilities."""

from __future__ import annotations

#: Which capability node opens what (NVIDIA's MIG user guide, "/dev based nvidia-capabilities").
MINORS = "/proc/driver/nvidia-caps/mig-minors"


def nodes(minor: int | None, gpu_instance: int | None) -> list[str]:
    """The nodes that one has to open to use a GPU: its own, which bears its minor and not NVML's index, and for an
    instance of MIG a capability's too."""
    own = f"/dev/nvidia{minor}"
    return [own] if gpu_instance is None else [own, capability(minor, gpu_instance)]


def capability(minor: int | None, gpu_instance: int) -> str:
    """The path of the node that opens a GPU instance of MIG; one that cannot be where the driver does not tell."""
    wanted = f"gpu{minor}/gi{gpu_instance}/access"
    try:
        with open(MINORS, encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, number = line.strip().partition(" ")
                if name == wanted:
                    return f"/dev/nvidia-caps/nvidia-cap{number}"
    except OSError:
        pass
    return f"/dev/nvidia-caps/({wanted})"


def switched() -> bool:
    """Whether GPUs of this machine are joined by an NVSwitch, whose fabric a reset of one may break."""
    import glob

    return bool(glob.glob("/dev/nvidia-nvswitch*") or glob.glob("/proc/driver/nvidia-nvswitch"))


def traces() -> list[str]:
    """What on this machine speaks of an NVIDIA GPU: device nodes, the kernel module, devices on the PCI bus."""
    import glob

    found = glob.glob("/dev/nvidia*") + glob.glob("/proc/driver/nvidia") + glob.glob("/sys/module/nvidia")
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with open(path, encoding="ascii") as vendor, open(path[: -len("vendor")] + "class", encoding="ascii") as kind:
            # Vendor 0x10de is NVIDIA; class 0x03 is a display controller, which compute cards are too (pci.ids).
            if vendor.read().strip() == "0x10de" and kind.read().startswith("0x03"):
                found.append(path)
    return found
