#!/bin/sh
# Makes the guest of lab/programs: target/guest/debian-programs, a Debian with the programs (once, a minute or two), and
# target/guest/debian-programs.img, an ext4 file system of it with our jobs and the marker.
set -eu

cd "$(dirname "$0")/../.."
debian=target/guest/debian-programs
packages='busybox hpcc redis-server redis-tools sqlite3 stress-ng sysbench libvips-tools x264 xz-utils'

say() { printf '    %s\n' "$*" >&2; }
die() {
    printf 'lab programs: %s\n' "$*" >&2
    exit 1
}

# install FOLDER: a minimal Debian with the packages, whose services are not started.
install() {
    debootstrap --variant=minbase bookworm "$1" "${MIRROR:-http://deb.debian.org/debian}"
    printf '#!/bin/sh\nexit 101\n' >"$1/usr/sbin/policy-rc.d"
    chmod 755 "$1/usr/sbin/policy-rc.d"
    echo force-unsafe-io >"$1/etc/dpkg/dpkg.cfg.d/unsafe-io"
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive chroot "$1" apt-get install -y -q --no-install-recommends $packages
    rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/usr/share/doc "$1"/usr/share/locale "$1"/usr/share/man
    chroot "$1" apt-get clean
}

if [ "$(cat "$debian/packages" 2>/dev/null)" != "$packages" ]; then
    [ "$(id -u)" = 0 ] || die "only root can make $debian (debootstrap)"
    say "making a Debian guest in $debian"
    rm -rf "$debian" "$debian.part" "$debian.img"
    mkdir -p "$debian.part"
    install "$debian.part" >"$debian.log" 2>&1 || die "no Debian guest: $(tail -n 3 "$debian.log")"
    echo "$packages" >"$debian.part/packages"
    mv "$debian.part" "$debian"
fi
if [ -z "$(find "$debian.img" -newer lab/programs/jobs.sh -newer lab/programs/mark.c -newer lab/programs/build.sh 2>/dev/null)" ]; then
    gcc -O2 -Wall -Werror -static -o "$debian/usr/bin/mark" lab/programs/mark.c
    cp lab/programs/jobs.sh "$debian/jobs.sh"
    rm -f "$debian.img"
    truncate -s 1536M "$debian.img.part"
    mke2fs -q -t ext4 -b 4096 -d "$debian" "$debian.img.part"
    mv "$debian.img.part" "$debian.img"
fi
