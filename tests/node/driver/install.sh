#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds the stand-in NVML and installs it, with the programs that use it, into the root of a node:
#
#   install.sh ROOT                          by ROOT's own gcc, through chroot
#   install.sh --build-only DIR [FLAG…]      only the library, by the gcc found here; FLAGs as -DNO_V3
set -eu

here=$(dirname "$(readlink -f "$0")")
flags="-std=gnu11 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -pthread -Wl,-soname,libnvidia-ml.so.1"

if [ "${1-}" = --build-only ]; then
    dir=${2:?--build-only DIR}
    shift 2
    mkdir -p "$dir"
    # Built aside and renamed: a process that has the old one mapped must not see it change.
    # shellcheck disable=SC2086
    gcc $flags "$@" -o "$dir/.new" "$here/nvml.c"
    mv -f "$dir/.new" "$dir/libnvidia-ml.so.1"
    exit 0
fi

root=${1:?install.sh ROOT, or --build-only DIR}
case $(readlink -f "$root") in
    /) echo "install.sh: ROOT is the machine itself; a stand-in driver must not be installed there" >&2; exit 1 ;;
esac

install -d "$root/opt/simgpu" "$root/usr/local/bin" "$root/etc/systemd/system/basic.target.wants"
for file in simgpu.py simgpu_books.py simgpu_client.py simgpu_process.py simctl.py holder.py \
    model_server.py; do
    install -m 755 "$here/$file" "$root/opt/simgpu/$file"
done
install -m 644 "$here/nvml.c" "$root/opt/simgpu/nvml.c"
ln -sf /opt/simgpu/simctl.py "$root/usr/local/bin/simctl"
install -m 644 "$here/simgpu.service" "$root/etc/systemd/system/simgpu.service"
ln -sf ../simgpu.service "$root/etc/systemd/system/basic.target.wants/simgpu.service"

libdir=/usr/lib/$(chroot "$root" gcc -print-multiarch)
# shellcheck disable=SC2086
chroot "$root" gcc $flags -o "$libdir/libnvidia-ml.so.1" /opt/simgpu/nvml.c
# The same without the newest symbols, as older drivers are; a test bind-mounts one of them over the other.
for lacks in V3 "V3 V2" MEMORY_V2; do
    dir=/opt/simgpu/without-$(echo "$lacks" | tr 'A-Z ' 'a-z-')
    install -d "$root$dir"
    # shellcheck disable=SC2046,SC2086
    chroot "$root" gcc $flags $(printf -- '-DNO_%s ' $lacks) -o "$dir/libnvidia-ml.so.1" /opt/simgpu/nvml.c
done
# What a stray LD_LIBRARY_PATH or LD_PRELOAD would find instead: it answers as /run/simgpu/decoy says.
install -d "$root/opt/simgpu/decoy"
# shellcheck disable=SC2086
chroot "$root" gcc $flags -DSTATE_PATH='"/run/simgpu/decoy"' -o /opt/simgpu/decoy/libnvidia-ml.so.1 /opt/simgpu/nvml.c
chroot "$root" ldconfig
chroot "$root" ldconfig -p | grep -q 'libnvidia-ml.so.1 ' || {
    echo "install.sh: the linker does not find the library" >&2
    exit 1
}
chroot "$root" python3 -m compileall -q /opt/simgpu
