#!/bin/sh
# Installs what the simulated node, building the test environment, and building the packages need from the
# distribution: on Debian and Ubuntu, as root, and only what is missing. It changes nothing else on the machine.
set -eu

# A command tells whether a package is needed more honestly than dpkg does: whoever has the tool from
# elsewhere is left alone. Where a package brings no command, a file of it is looked for.
missing=
need() {
    case $2 in
    /*) for file in $2; do [ -e "$file" ] && return; done ;;
    *) command -v "$2" >/dev/null 2>&1 && return ;;
    esac
    missing="$missing $1"
}

need mmdebstrap mmdebstrap
need systemd-container systemd-nspawn
# Ubuntu does not trust Debian's archive out of the box, and mmdebstrap needs the keys to check the root.
need debian-archive-keyring '/usr/share/keyrings/debian-archive-keyring.*'
need util-linux unshare
need mount mount
# mmdebstrap asks gpg which keys belong to an archive.
need gpg gpg
need make make
# systemd-python is built from source.
need gcc gcc
need pkg-config pkg-config
need libsystemd-dev '/usr/include/systemd/sd-journal.h'
# What makes the packages, and the archive of the nodes on which they are installed; what has something to say of them.
need dpkg-dev dpkg-buildpackage
need debhelper dh
need dh-python dh_python3
need rpm rpmbuild
need lintian lintian
need rpmlint rpmlint
need ca-certificates '/etc/ssl/certs/ca-certificates.crt'
# The manual is set, and the completions are asked, by the programs that will.
need man-db man
need groff-base groff
need zsh zsh
need fish fish
need python3-venv python3
# Debian and Ubuntu split ensurepip and the headers off the interpreter; other builds of Python, first in
# PATH, have their own.
if command -v python3 >/dev/null 2>&1; then
    python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
    python3 -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing="$missing python3-dev"
else
    missing="$missing python3-dev"
fi

if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    echo "$0: not root, and these packages are missing:$missing (run it as root, or install them)" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "$0: no apt-get here (Debian or Ubuntu is needed), and these are missing:$missing" >&2
    exit 1
fi

echo "installing:$missing" >&2
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086 # the list is made of words
if ! { apt-get -q update && apt-get -q -y install --no-install-recommends $missing; } >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "$0: apt-get could not install:$missing" >&2
    exit 1
fi
