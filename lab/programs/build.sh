#!/bin/sh
# Makes the guest of real programs: target/guest/debian-programs, a Debian with the programs (once, a few minutes), and
# target/guest/debian-programs.img, an ext4 file system of it with our jobs and the marker.
set -eu

cd "$(dirname "$0")/../.."
debian=target/guest/debian-programs
packages='busybox ccache dmsetup gcc glpk-utils hmmer hpcc libc6-dev libvips-tools make nginx-light perl postgresql povray
    quantlib-examples redis-server redis-tools sqlite3 stockfish stress-ng sysbench wrk x264 xapian-omega xapian-tools xsltproc xz-utils'

say() { printf '    %s\n' "$*" >&2; }
die() {
    printf 'lab programs: %s\n' "$*" >&2
    exit 1
}

# shellcheck source=packaging/mirror.sh
. packaging/mirror.sh

# install FOLDER: a minimal Debian with the packages, whose services are not started, and the sources of lua.
install() {
    debootstrap --variant=minbase bookworm "$1" "$mirror"
    printf '#!/bin/sh\nexit 101\n' >"$1/usr/sbin/policy-rc.d"
    chmod 755 "$1/usr/sbin/policy-rc.d"
    echo force-unsafe-io >"$1/etc/dpkg/dpkg.cfg.d/unsafe-io"
    echo "deb-src $mirror bookworm main" >"$1/etc/apt/sources.list.d/source.list"
    chroot "$1" apt-get update -q
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive chroot "$1" apt-get install -y -q --no-install-recommends $packages
    chroot "$1" sh -c 'cd /usr/src && apt-get -o APT::Sandbox::User=root source --download-only lua5.4'
    rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/usr/share/doc "$1"/usr/share/locale "$1"/usr/share/man
    chroot "$1" apt-get clean
}

if [ "$(cat "$debian/packages" 2>/dev/null)" != "$packages" ]; then
    [ "$(id -u)" = 0 ] || die "only root can make $debian (debootstrap)"
    mirror=$(mirror)
    [ -n "$mirror" ] || die "no mirror of Debian is known: set MIRROR"
    say "making a Debian guest in $debian"
    rm -rf "$debian" "$debian.part" "$debian.img"
    mkdir -p "$debian.part"
    install "$debian.part" >"$debian.log" 2>&1 || die "no Debian guest: $(tail -n 3 "$debian.log")"
    echo "$packages" >"$debian.part/packages"
    mv "$debian.part" "$debian"
fi
if [ ! -f "$debian.img" ] || [ -n "$(find lab/programs/init.sh lab/programs/jobs lab/programs/mark.c lab/programs/build.sh -newer "$debian.img")" ]; then
    gcc -O2 -Wall -Werror -static -o "$debian/usr/bin/mark" lab/programs/mark.c
    cp lab/programs/init.sh "$debian/init.sh"
    rm -rf "$debian/jobs"
    cp -r lab/programs/jobs "$debian/jobs"
    rm -f "$debian.img"
    # Blocks of a page each: others are not cached.
    truncate -s 2560M "$debian.img.part"
    mke2fs -q -t ext4 -b 4096 -d "$debian" "$debian.img.part"
    mv "$debian.img.part" "$debian.img"
fi
