"""Lays the modules that the packages bring along into a folder, each with the licence under which it may be passed on.

It takes wheels that pip has fetched and checked against bundle.txt, and keeps of them what the program imports. It
knows no version and no address.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

#: What is imported of each wheel. nvidia-ml-py also has a module `example`, and nothing here needs metadata.
WANTED = {"nvidia_ml_py": re.compile(r"pynvml\.py"), "tomli": re.compile(r"tomli/\w+\.py")}


def main(wheels: Path, target: Path) -> None:
    for name, wanted in WANTED.items():
        (wheel,) = wheels.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {member: archive.read(member) for member in archive.namelist()}
        for member, content in files.items():
            if wanted.fullmatch(member):
                _write(target / "modules" / member, content)
        _write(target / "licenses" / name.replace("_", "-"), _licence(files))


def _licence(files: dict[str, bytes]) -> bytes:
    """The file that says so, or else, as with nvidia-ml-py, the comment that the module begins with."""
    for member, content in files.items():
        if re.search(r"\.dist-info/licenses/[^/]+$", member):
            return content
    head = files["pynvml.py"].removeprefix(b"#####\n").partition(b"\n#####\n")[0]
    text = [line[1:].removeprefix(b" ") for line in head.splitlines()]
    if not any(line.startswith(b"Redistribution") for line in text):
        raise SystemExit("pynvml.py no longer begins with its licence")
    return b"\n".join(text) + b"\n"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
