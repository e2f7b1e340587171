"""The root file system of a simulated GPU node, made from real Debian packages and kept between runs.

It knows how the layers are built, named after what went into them, locked while they are built or in
use, and removed when a newer recipe has replaced them. It never boots anything and never writes to a
layer that is finished: machine.py puts an overlay on top.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

DRIVER = Path(__file__).parent / "driver"

#: What install.sh finds in its environment, and every other command that works inside the root.
CLEAN_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/root",
}


class ImageError(Exception):
    """A layer could not be built; the text ends with what the failing command said."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides what is in the base layer; its repr is what the cache key is made of.

    A step that is not written down here, as data or as shell text, would change the root without
    changing its name, so build_base() does nothing beyond carrying these fields out.
    """

    release: str
    packages: tuple[str, ...]
    pip: tuple[str, ...]
    script: str
    #: Runs outside the new root, with its folder as $1, while mmdebstrap is at work: there apt has a network.
    hook: str = ""


PACKAGES = (
    # What boots: init, the bus, logind with PAM sessions, and user managers with a bus of their own.
    "systemd", "systemd-sysv", "dbus", "dbus-user-session", "libpam-systemd", "login", "passwd", "python3",
    # What builds the stand-in driver against the root's own libc.
    "gcc", "libc6-dev", "make",
    # What tests look around with.
    "iproute2", "procps", "util-linux",
)  # fmt: skip

#: What the product runs on, from the distribution as on a real node.
NEEDED = ("python3-psutil", "python3-systemd")

#: What some of its verbs run on, for whoever wants them.
WANTED = ("python3-rich", "python3-prometheus-client")

#: How one node asks another.
SSH = ("openssh-client", "openssh-server")

#: What people find the holders of a GPU with today, to be compared with; the last is gpustat's.
PEERS = ("psmisc", "lsof", "python3-blessed")

#: What people read the manual and complete a command line with.
COMFORT = ("man-db", "bash-completion")

#: Pure Python only: pip runs on the host's interpreter, whose ABI need not be the root's.
PIP = ("nvidia-ml-py==13.615.71", "gpustat==1.1.1", "nvitop==1.7.2")

#: Debian packages tomli only from bookworm on, where Python is 3.11 and has tomllib anyway.
PIP_BY_RELEASE: Mapping[str, tuple[str, ...]] = {"bullseye": ("tomli==2.0.1",)}

#: Runs in the new root. `set -e` is given by the caller.
SCRIPT = r"""
useradd --uid 5001 --create-home --shell /bin/bash model
useradd --uid 5002 --create-home --shell /bin/bash alice
useradd --uid 5003 --create-home --shell /bin/bash bench

# An empty machine-id is filled in for each boot and, unlike a missing one, is no first boot: a first
# boot would enable and disable units by preset and ask for a root password.
: > /etc/machine-id
rm -f /var/lib/dbus/machine-id
echo gpunode > /etc/hostname
printf '127.0.0.1 localhost gpunode\n::1 localhost\n' > /etc/hosts

# A server has no graphical target to wait for, and nobody logs in on a console here.
ln -sf /lib/systemd/system/multi-user.target /etc/systemd/system/default.target
for unit in getty.target getty@.service serial-getty@.service console-getty.service container-getty@.service \
    getty-static.service systemd-ask-password-wall.path systemd-ask-password-console.path \
    systemd-networkd.service systemd-networkd.socket systemd-networkd-wait-online.service \
    systemd-timesyncd.service systemd-firstboot.service systemd-update-done.service \
    systemd-journal-catalog-update.service ldconfig.service systemd-hwdb-update.service \
    systemd-udevd.service systemd-udev-trigger.service systemd-pstore.service \
    systemd-boot-system-token.service \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
    fstrim.timer systemd-tmpfiles-clean.timer
do
    ln -sf /dev/null /etc/systemd/system/$unit
done

# Tests start sshd where they need one, and have services of that name of their own.
rm -f /lib/systemd/system/ssh*.service /lib/systemd/system/ssh*.socket /lib/systemd/system/rescue-ssh.target \
    /etc/init.d/ssh /etc/systemd/system/sshd.service /etc/systemd/system/*.wants/ssh.*

# The journal of a node lives as long as the node. Rate limits stay as systemd sets them: they are
# part of what is tested.
mkdir -p /etc/systemd/journald.conf.d
printf '[Journal]\nStorage=volatile\n' > /etc/systemd/journald.conf.d/node.conf

apt-get clean
rm -rf /var/lib/apt/lists/* /var/log/*.log /var/log/apt /var/log/journal
"""

#: What pip has brought, made ready.
PIP_SCRIPT = r"""
# pip leaves console scripts with the host's interpreter in their first line.
printf '#!/usr/bin/python3\nimport sys\nfrom gpustat.cli import main\nsys.exit(main())\n' \
    > /usr/local/bin/gpustat
printf '#!/usr/bin/python3\nimport sys\nfrom nvitop.cli import main\nsys.exit(main())\n' \
    > /usr/local/bin/nvitop
chmod 755 /usr/local/bin/gpustat /usr/local/bin/nvitop
rm -rf /usr/lib/python3/dist-packages/bin
# Compiled here, once and by the root's own interpreter: otherwise the first start in every fresh
# overlay would pay for it, and times measured on the node would be wrong.
python3 -m compileall -q /usr/lib/python3/dist-packages
"""

#: Nobody installs an rpm on Debian, but this is the rpm of RHEL 9, with the Python of RHEL 9: 4.16 and 3.9.
ARCHIVE_BY_RELEASE: Mapping[str, tuple[str, ...]] = {"bullseye": ("rpm",)}

#: What the product needs is not installed, but lies where apt on the node finds it, which has no network.
ARCHIVE_HOOK = """
chroot "$1" apt-get clean
chroot "$1" apt-get --quiet --yes --download-only install ARCHIVED
mkdir "$1/srv/archive"
mv "$1"/var/cache/apt/archives/*.deb "$1/srv/archive"
cd "$1/srv/archive"
dpkg-scanpackages . > Packages
"""

ARCHIVE_SCRIPT = r"""
rm -rf /etc/apt/sources.list.d
echo 'deb [trusted=yes] file:/srv/archive ./' > /etc/apt/sources.list
"""


def recipe(release: str, *, bare: bool = False) -> Recipe:
    """A node that runs the product; or a bare one, on which nothing was ever installed for it."""
    if not re.fullmatch(r"[a-z]+", release):
        raise ImageError(f"release {release!r} is not a Debian code name")
    if bare:
        script = SCRIPT + ARCHIVE_SCRIPT
        hook = ARCHIVE_HOOK.replace("ARCHIVED", " ".join(NEEDED + WANTED + ARCHIVE_BY_RELEASE.get(release, ())))
        return Recipe(release=release, packages=PACKAGES + COMFORT, pip=(), script=script, hook=hook)
    pip = PIP + PIP_BY_RELEASE.get(release, ())
    packages = PACKAGES + NEEDED + WANTED + SSH + PEERS
    return Recipe(release=release, packages=packages, pip=pip, script=SCRIPT + PIP_SCRIPT)


def cache_directory() -> Path:
    """Where layers are kept: the user's cache if one is named, else the system's, as tests run as root."""
    base = os.environ.get("XDG_CACHE_HOME")
    path = Path(base if base and os.path.isabs(base) else "/var/cache") / "gpuprestart"
    if set(str(path)) & set(":,\\ "):
        # These separate the words of overlayfs's mount options, and escaping differs between mount
        # programs.
        raise ImageError(f"the cache folder {str(path)!r} has a character that overlayfs cannot take (':,\\ ')")
    return path


@dataclasses.dataclass
class Layers:
    """Finished layers, topmost first, with the shared locks that keep them from being removed."""

    paths: list[Path]
    locks: list[IO[str]]

    def close(self) -> None:
        for lock in self.locks:
            lock.close()


def layers(
    *,
    release: str = "bookworm",
    driver: bool = True,
    bare: bool = False,
    say: Callable[[str], None] | None = None,
) -> Layers:
    """The read-only layers to boot from, built first if they are not there yet.

    Without `driver` it is the base alone, with `bare` that of a node on which the product never was. `say` is told
    before something slow starts.
    """
    say = say or (lambda _: None)
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    wanted = recipe(release, bare=bare)
    kind = f"{release}.bare" if bare else release
    base_name = f"root-{kind}-{_digest(repr(wanted).encode())}"
    held = Layers(paths=[], locks=[])
    # One lock for looking, building and removing: a second run that wants the same root waits for
    # the first one's build instead of making its own.
    with locked(cache / "lock") as lock:
        for scrap in cache.glob("building-*"):
            # Only the holder of the lock builds, so whatever lies here was interrupted. The lock is
            # handed down to the commands of a build: they too are over.
            _remove_tree(scrap)
        base = cache / base_name
        if not base.is_dir():
            say(f"building the Debian {release} root of the simulated node (about a minute, once)")
            with _aside(cache, base) as new:
                build_base(wanted, new, keep=lock)
        held.paths.insert(0, base)
        held.locks.append(_hold(cache, base_name))
        _remove_others(cache, f"root-{kind}-", base_name)
        if driver:
            driver_name = f"driver-{kind}-{_digest(base_name.encode() + _content(DRIVER))}"
            built = cache / driver_name
            if not built.is_dir():
                say("building the stand-in driver")
                with _aside(cache, built) as new:
                    build_driver(base, new, keep=lock)
            held.paths.insert(0, built)
            held.locks.append(_hold(cache, driver_name))
            _remove_others(cache, f"driver-{kind}-", driver_name)
    return held


def build_base(wanted: Recipe, target: Path, *, keep: IO[str]) -> None:
    """Carry a recipe out in the folder `target`."""
    hook = [f"--customize-hook=set -e{wanted.hook}"] if wanted.hook else []
    # A private mount namespace, so that /proc and /dev of a chroot cannot outlive an interrupted
    # build in the host's mount table.
    command(
        ["unshare", "--mount", "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase",
         f"--include={','.join(wanted.packages)}", *hook, wanted.release, str(target)],
        keep=keep,
    )  # fmt: skip
    # mmdebstrap makes the folder anew with the mode of a root folder; the copy of the host's
    # resolv.conf is none of the node's business.
    (target / "etc/resolv.conf").unlink(missing_ok=True)
    if wanted.pip:
        _install_by_pip(wanted.pip, target / "usr/lib/python3/dist-packages", keep=keep)
    command(["chroot", str(target), "/bin/sh", "-ec", wanted.script], keep=keep)


def _install_by_pip(packages: Sequence[str], modules: Path, *, keep: IO[str]) -> None:
    compiled = set(modules.rglob("*.so"))
    command(
        [*_pip(), "install", "--quiet", "--no-deps", "--no-compile", "--root-user-action=ignore",
         "--target", str(modules), *packages],
        keep=keep, env=os.environ,
    )  # fmt: skip
    for path in set(modules.rglob("*.so")) - compiled:
        raise ImageError(f"pip installed compiled code, of the host's ABI, into the root: {path.name}")


def build_driver(base: Path, target: Path, *, keep: IO[str]) -> None:
    """Let the driver install itself over `base` and keep what that added in the folder `target`."""
    # The writable half lies on a tmpfs: a cache that is itself on an overlay (a container's root)
    # could not serve as one. All mounts live and die with this one process's namespace. The options
    # are those that would leave something in the upper layer that is no plain copy of a file.
    script = """
        work=$1 base=$2 install=$3 target=$4
        mount -t tmpfs tmpfs "$work"
        mkdir -m 755 "$work/upper" "$work/work" "$work/root"
        options=lowerdir=$base,upperdir=$work/upper,workdir=$work/work
        mount -t overlay -o "$options,index=off,metacopy=off,redirect_dir=off" overlay "$work/root"
        mount -t proc proc "$work/root/proc"
        mount --bind /dev/null "$work/root/dev/null"
        "$install" "$work/root"
        cp -a "$work/upper/." "$target/"
    """
    with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as work:
        command(
            ["unshare", "--mount", "/bin/sh", "-ec", script, "sh",
             work, str(base), str(DRIVER / "install.sh"), str(target)],
            keep=keep,
        )  # fmt: skip


def command(argv: Sequence[str], *, keep: IO[str] | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run one command of a build to its end; its output is shown only if it fails.

    `keep` is a lock that is to stay held while the command lives, even if this process is killed.
    The command is ended if this process is interrupted.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=CLEAN_ENVIRONMENT if env is None else env,
            pass_fds=[] if keep is None else [keep.fileno()],
            start_new_session=True,
            umask=0o022,
        )
        try:
            status = process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if status != 0:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-3000:]
            raise ImageError(f"{' '.join(argv[:3])} … ended with status {status}:\n{tail}")


@contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """Hold the exclusive lock on a file, waiting for it as long as it takes."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _hold(cache: Path, name: str) -> IO[str]:
    """Mark a layer as in use until the file is closed, also in every process that inherits it."""
    file = open(cache / f"{name}.lock", "w")  # noqa: SIM115 (it is held, not used)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _remove_others(cache: Path, prefix: str, keep: str) -> None:
    """Remove layers of older recipes, except those that a node is running on at this moment."""
    for path in cache.glob(f"{prefix}*"):
        name = path.name
        if name == keep or name.endswith(".lock"):
            continue
        with open(cache / f"{name}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            # Renamed first, so that an interrupted removal cannot leave a half under a valid name.
            scrap = cache / f"building-{name}"
            path.rename(scrap)
            _remove_tree(scrap)
            os.unlink(cache / f"{name}.lock")


@contextmanager
def _aside(cache: Path, final: Path) -> Iterator[Path]:
    """A new folder beside its final place, moved there only if the work in it succeeded."""
    new = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        new.chmod(0o755)
        yield new
        new.chmod(0o755)
        new.rename(final)
    except BaseException:
        _remove_tree(new)
        raise


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        raise ImageError(f"{path} cannot be removed")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _content(directory: Path) -> bytes:
    """A digest of names, modes and contents of all files below a folder, so that any edit changes it."""
    total = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        # What interpreters and linters leave beside the sources is none of them.
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in name.parts):
            total.update(f"{name}\0{path.stat().st_mode:o}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.digest()


def _pip() -> list[str]:
    """A pip to run: our own interpreter's, or the system's where a virtual environment has none."""
    for python in (sys.executable, "/usr/bin/python3"):
        probe = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return [python, "-m", "pip"]
    raise ImageError("no pip to install nvidia-ml-py and gpustat into the root with (install python3-venv)")
