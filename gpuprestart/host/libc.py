"""What the kernel can be asked and Python has no words for: statx(2) and kcmp(2), by the C library.

statx(2) is told not to ask whoever serves a file system: a file on a network mount whose server is gone would hang the
whole run, and of what kind it is, whose and which, the kernel knows without asking.
"""

from __future__ import annotations

import os
import struct
from typing import Any

#: struct statx is 256 bytes: stx_uid is at 20, stx_mode at 28, stx_ino at 32, stx_rdev_major and _minor at 128,
#: stx_dev_major and _minor at 136 (include/uapi/linux/stat.h).
told: Any = None
_MODE = struct.Struct("H")
_UID = struct.Struct("I")
_INO = struct.Struct("Q")
_DEVICE = struct.Struct("II")

AT_FDCWD = -100
AT_STATX_DONT_SYNC = 0x4000
STATX_TYPE, STATX_MODE, STATX_UID, STATX_INO = 1, 2, 8, 0x100

#: SYS_kcmp by machine, from the kernel's system call tables.
_KCMP = {"x86_64": 312, "aarch64": 272, "ppc64le": 354, "s390x": 343}
_KCMP_FILES = 2

_library: Any = None


def library() -> Any:
    """The C library, loaded at the first use, and ``told`` with it, into which statx(2) writes."""
    global _library, told
    if _library is None:
        import ctypes

        _library = ctypes.CDLL(None)
        _library.syscall.restype = ctypes.c_long
        told = (ctypes.c_char * 256)()
    return _library


def kind(directory: int, path: bytes) -> tuple[int | None, int]:
    """The mode of a file and the device number that it stands for; None for one that is not there."""
    if not _statx(directory, path, STATX_TYPE):
        return None, 0
    (mode,) = _MODE.unpack_from(told, 28)
    return mode, os.makedev(*_DEVICE.unpack_from(told, 128))


def owner(directory: int, path: bytes) -> tuple[int, int] | None:
    """Whose a file is, and its mode."""
    if not _statx(directory, path, STATX_TYPE | STATX_MODE | STATX_UID):
        return None
    return (*_UID.unpack_from(told, 20), *_MODE.unpack_from(told, 28))


def identity(directory: int, path: bytes) -> tuple[int, int] | None:
    """The numbers of its device and inode, which no other file has."""
    if not _statx(directory, path, STATX_INO):
        return None
    return (os.makedev(*_DEVICE.unpack_from(told, 136)), *_INO.unpack_from(told, 32))


def _statx(directory: int, path: bytes, mask: int) -> bool:
    return bool(library().statx(directory, path, AT_STATX_DONT_SYNC, mask, told) == 0)


def kcmp_files(one: int, other: int) -> int:
    """kcmp(one, other, KCMP_FILES): 0 if both tasks have one descriptor table, -1 if the kernel does not tell."""
    number = _KCMP.get(os.uname().machine)
    if number is None:
        return -1
    return int(library().syscall(number, one, other, _KCMP_FILES, 0, 0))
