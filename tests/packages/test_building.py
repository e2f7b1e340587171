"""What the packages are made of, without installing them: versions, times, licences, and what the linters say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packages import building
from tests.packages.building import ROOT, Packages
from tests.packages.fleet import FOUR_COMMANDS


def output(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_all_changelogs_are_of_this_version() -> None:
    version = building.version()
    assert re.fullmatch(rf"{re.escape(version)}-\d+", building.debian_version())
    spec = (ROOT / "packaging/rpm/gpuprestart.spec").read_text()
    assert re.findall(r"^\* .+ - (.+)$", spec, re.MULTILINE)[0] == building.debian_version()
    assert re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


def test_readme_has_the_four_commands() -> None:
    lines = "".join(f"    {command}\n" for command in FOUR_COMMANDS)
    assert f"\n\n{lines}\n" in (ROOT / "README.md").read_text()


def test_the_packages_are_of_this_version_and_no_architecture(packages: Packages) -> None:
    version = building.debian_version()
    assert packages.deb.name == f"gpuprestart_{version}_all.deb"
    assert packages.rpm.name == f"gpuprestart-{version}.noarch.rpm"
    assert output("dpkg-deb", "--field", packages.deb, "Version").strip() == version
    assert output("rpm", "-qp", "--queryformat=%{version}-%{release}", packages.rpm) == version


def test_a_package_built_twice_is_the_same_package(packages: Packages, tree: Path, tmp_path: Path) -> None:
    """In another folder, at another time, by somebody with another umask, time zone, language and home."""
    elsewhere = building.copy_tree(tmp_path / "somewhere/else")
    odd = {"TZ": "Pacific/Auckland", "LC_ALL": "C", "LANG": "de_DE.UTF-8", "HOME": str(tmp_path), "USER": "somebody"}
    again = building.packages(elsewhere, environment=odd, umask=0o077)
    assert again.deb.read_bytes() == packages.deb.read_bytes()
    assert again.rpm.read_bytes() == packages.rpm.read_bytes()
    archive = f"build/gpuprestart-{building.version()}.tar.gz"
    assert (elsewhere / archive).read_bytes() == (tree / archive).read_bytes()


def test_both_packages_have_the_same_program(packages: Packages, tmp_path: Path) -> None:
    """They differ in what their distributions keep elsewhere, and in nothing else."""
    output("dpkg-deb", "--extract", packages.deb, tmp_path / "deb")
    output(
        "rpm", "--root", tmp_path / "rpm", "--dbpath=/var/lib/rpm", "--install", "--nodeps", "--noscripts", packages.rpm
    )
    shutil.rmtree(tmp_path / "rpm/var")
    deb, rpm = _files(tmp_path / "deb"), _files(tmp_path / "rpm")
    assert {path for path in deb.keys() ^ rpm.keys() if not path.startswith("usr/share/")} == set()
    only_deb = {path for path in deb if path not in rpm}
    only_rpm = {path for path in rpm if path not in deb}
    assert only_deb == {
        "usr/share/doc/gpuprestart/README.md.gz",
        "usr/share/doc/gpuprestart/changelog.Debian.gz",
        "usr/share/doc/gpuprestart/changelog.gz",
        "usr/share/doc/gpuprestart/copyright",
        "usr/share/lintian/overrides/gpuprestart",
        "usr/share/python3/runtime.d/gpuprestart.rtupdate",
        "usr/share/zsh/vendor-completions/_gpuprestart",
    }
    assert only_rpm == {
        "usr/share/doc/gpuprestart/CHANGELOG.md",
        "usr/share/doc/gpuprestart/README.md",
        "usr/share/licenses/gpuprestart/LICENSE",
        "usr/share/licenses/gpuprestart/nvidia-ml-py",
        "usr/share/licenses/gpuprestart/tomli",
        "usr/share/zsh/site-functions/_gpuprestart",
    }
    assert {path for path in deb.keys() & rpm.keys() if deb[path] != rpm[path]} == set()
    assert {path for path in deb if "__pycache__" in path or path.endswith((".so", ".pyc"))} == set()


def _files(root: Path) -> dict[str, tuple[int, bytes]]:
    found = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): (path.stat().st_mode & 0o777, path.read_bytes()) for path in found}


def test_rpm_takes_it_into_a_root_of_its_own(packages: Packages, tmp_path: Path) -> None:
    """Without what is asked for and without scripts, for which there is nothing in that root."""
    root = ("--root", tmp_path / "root", "--dbpath=/var/lib/rpm")
    output("rpm", *root, "--install", "--nodeps", "--noscripts", packages.rpm)
    listed = output("rpm", *root, "--query", "--list", "gpuprestart").splitlines()
    assert listed == output("rpm", "-qlp", packages.rpm).splitlines()
    assert [path for path in listed if not (tmp_path / "root" / path[1:]).exists()] == []
    assert output("rpm", *root, "--verify", "--nodeps", "gpuprestart") == ""


def test_the_installed_policy_changes_nothing() -> None:
    lines = (ROOT / "units/policy.toml").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == []


def test_the_policy_is_the_administrator_s(packages: Packages) -> None:
    assert output("dpkg-deb", "--info", packages.deb, "conffiles") == "/etc/gpuprestart/policy.toml\n"
    assert output("rpm", "-qp", "--configfiles", packages.rpm) == "/etc/gpuprestart/policy.toml\n"
    flags = output("rpm", "-qp", "--queryformat=[%{filenames} %{fileflags:fflags}\n]", packages.rpm)
    assert "/etc/gpuprestart/policy.toml cn" in flags.splitlines()


def test_what_the_packages_ask_for(packages: Packages) -> None:
    deb = output("dpkg-deb", "--field", packages.deb, "Depends", "Recommends")
    assert "Depends: python3-psutil, systemd, python3:any (>= 3.9~)" in deb
    assert "Recommends: python3-rich, python3-systemd" in deb
    rpm = set(output("rpm", "-qpR", packages.rpm).splitlines())
    assert {"python3 >= 3.9", "python3-psutil", "systemd"} <= rpm
    ours = {"python3", "/usr/bin/python3", "/bin/sh", f"config(gpuprestart) = {building.debian_version()}"}
    assert rpm - ours - {"python3 >= 3.9", "python3-psutil", "systemd"} == {
        line for line in rpm if line.startswith("rpmlib(")
    }
    assert output("rpm", "-qp", "--recommends", packages.rpm) == "python3-rich\npython3-systemd\n"


def test_the_bundled_modules_are_those_that_are_pinned(packages: Packages) -> None:
    pinned = dict(re.findall(r"^(\S+)==(\S+) ", (ROOT / "packaging/bundle.txt").read_text(), re.MULTILINE))
    provides = output("rpm", "-qp", "--provides", packages.rpm)
    bundled = dict(re.findall(r"^bundled\(python3dist\((.+)\)\) = (.+)$", provides, re.MULTILINE))
    assert bundled == pinned and set(pinned) == {"nvidia-ml-py", "tomli"}


@pytest.mark.parametrize(
    "module, holder",
    [("nvidia-ml-py", "NVIDIA Corporation"), ("tomli", "Taneli Hukkinen")],
    ids=["nvidia-ml-py", "tomli"],
)
def test_the_copyright_file_has_the_licence_of_each_bundled_module(
    packages: Packages, tree: Path, module: str, holder: str
) -> None:
    licence = (tree / "build/bundle/licenses" / module).read_text()
    terms = licence[licence.index(holder) + len(holder) :].removeprefix(".  All rights reserved.")
    told = re.sub(r"^ \.?", "", (tree / "packaging/debian/copyright").read_text(), flags=re.MULTILINE)
    assert holder in told
    assert _words(terms) in _words(told)


def _words(text: str) -> str:
    return " ".join(text.split())


def test_lintian_has_nothing_to_say(packages: Packages) -> None:
    said = output("lintian", "--allow-root", "-EIL", "+pedantic", "--fail-on=error,warning,info,pedantic", packages.deb)
    assert said == ""


def test_rpmlint_has_nothing_to_say(packages: Packages) -> None:
    said = output("rpmlint", "--strict", "--config", ROOT / "packaging/rpm/rpmlint.toml", packages.rpm)
    assert "0 errors, 0 warnings" in said
