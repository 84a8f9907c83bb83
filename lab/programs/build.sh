#!/bin/sh
# Makes the guest of real programs: target/guest/debian-programs, a Debian with the programs and databases (once, a few minutes),
# and target/guest/debian-programs.img, an ext4 file system of it with our jobs and the marker.
set -eu

cd "$(dirname "$0")/../.."
debian=target/guest/debian-programs
packages='busybox ccache dmsetup gcc glpk-utils hmmer hpcc libc6-dev libvips-tools make nginx-light perl postgresql povray
    quantlib-examples redis-server redis-tools sqlite3 stockfish stress-ng sysbench wrk x264 xapian-omega xapian-tools xsltproc xz-utils'

# TPC-H's data is made by tpchgen-cli (of Python's index), TPC-C's by go-tpc, which also runs its transactions; Debian's Go, too
# old for it, fetches a newer one.
tpch='tpchgen-cli==4.0.0'
tpcc='github.com/pingcap/go-tpc/cmd/go-tpc@v1.0.12'
toolchain='golang.org/toolchain@v0.0.1-go1.21.13.linux-amd64'

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

# databases FOLDER: the data of TPC-H at scale 0.02 and of TPC-C with one warehouse, a file for each table, and go-tpc.
databases() {
    work=$PWD/target/guest/databases
    rm -rf "$work" "$1/tpch" "$1/tpcc"
    python3 -m venv "$work/python"
    "$work/python/bin/pip" install -q --disable-pip-version-check "$tpch"
    "$work/python/bin/tpchgen-cli" csv -q -s 0.02 -o "$1/tpch"
    (
        export GOMODCACHE="$work/modules" GOCACHE="$work/cache" GOFLAGS=-modcacherw CGO_ENABLED=0
        go mod download "$toolchain"
        chmod -R a+x "$GOMODCACHE/$toolchain/bin" "$GOMODCACHE/$toolchain/pkg/tool"
        GOTOOLCHAIN=local GOBIN=$PWD/$1/usr/bin "$GOMODCACHE/$toolchain/bin/go" install -trimpath "$tpcc"
    )
    "$1/usr/bin/go-tpc" tpcc prepare -d postgres --warehouses 1 --output-type csv --output-dir "$1/tpcc"
    for file in "$1"/tpcc/test.*.0.csv; do
        table=${file#*/test.}
        mv "$file" "$1/tpcc/${table%.0.csv}.csv"
    done
    rm -rf "$work"
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
if [ "$(cat "$debian/databases" 2>/dev/null)" != "$tpch $tpcc" ]; then
    say "making the databases of $debian"
    rm -f "$debian.img"
    databases "$debian" >"$debian.log" 2>&1 || die "no databases: $(tail -n 3 "$debian.log")"
    echo "$tpch $tpcc" >"$debian/databases"
fi
if [ ! -f "$debian.img" ] || [ -n "$(find lab/programs -newer "$debian.img" ! -name README.md -type f)" ]; then
    gcc -O2 -Wall -Werror -static -o "$debian/usr/bin/mark" lab/programs/mark.c
    cp lab/programs/init.sh "$debian/init.sh"
    rm -rf "$debian/jobs" "$debian/postgresql"
    cp -r lab/programs/jobs lab/programs/postgresql "$debian"
    rm -f "$debian.img"
    # Blocks of a page each: others are not cached.
    truncate -s 2560M "$debian.img.part"
    mke2fs -q -t ext4 -b 4096 -d "$debian" "$debian.img.part"
    mv "$debian.img.part" "$debian.img"
fi
