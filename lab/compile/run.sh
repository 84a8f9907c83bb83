#!/bin/sh
# A Debian guest compiles lua with ccache, with the device-mapper target hcache under its root file system and without:
# README.md. `./dev lab compile` makes what it needs.
set -eu

cd "$(dirname "$0")/../.."
memory_mib=${MEMORY_MIB:-128}
capacity=${CAPACITY:-512M}
passes=${PASSES:-5}
kernel=target/guest/${KERNEL:-6.1}
plimsoll=${PLIMSOLL:-target/release/plimsoll}
debian=target/guest/debian-programs
out=target/lab/compile
timeout_s=3600
# Names of sockets are short, those of checkouts may not be.
sockets=$(mktemp -d)

say() { printf '    %s\n' "$*" >&2; }
die() {
    printf 'lab compile: %s\n' "$*" >&2
    exit 1
}

# initramfs FILE: busybox, modules, dmsetup with its libraries, and our two scripts.
initramfs() {
    tree=$out/initramfs
    mkdir -p "$tree/bin" "$tree/dev" "$tree/proc" "$tree/sys"
    cp /bin/busybox "$tree/bin"
    cp -r "$kernel/modules" "$tree"
    cp lab/compile/init lab/compile/build.sh "$tree"
    libraries=$(chroot "$debian" ldd /sbin/dmsetup | grep -o '/[^ ]*')
    for file in /sbin/dmsetup $libraries; do
        mkdir -p "$tree${file%/*}"
        cp -L "$debian$file" "$tree$file"
    done
    (cd "$tree" && find . | cpio --quiet -o -H newc) | gzip -1 >"$1"
    rm -rf "$tree"
}

# boot TARGET [OPTION...]: a guest on a new copy of the disk, with or without the target; what it says goes to TARGET.log,
# what it built to TARGET/.
boot() {
    target=$1
    shift
    disk=$out/$target.img
    log=$out/$target.log
    rm -rf "${out:?}/$target"
    cp --sparse=always "$debian.img" "$disk"
    status=0
    timeout --foreground "$timeout_s" "$plimsoll" run --name "compile-$target" --state "$sockets/$target" --disk "$disk" --cache-mode none "$@" -- \
        qemu-system-x86_64 -accel tcg,thread=single -cpu qemu64,-cx16 -m "$memory_mib" -display none -serial stdio -nodefaults \
        -no-user-config -no-reboot -kernel "$kernel/vmlinuz" -initrd "$out/initramfs.gz" \
        -append "console=ttyS0 quiet panic=-1 no_timer_check compile.target=$target compile.passes=$passes" \
        >"$log" 2>&1 </dev/null || status=$?
    if [ "$status" != 0 ] || ! grep -q '^compile: done' "$log"; then
        tail -n 30 "$log" >&2
        die "the guest with target '$target' failed (status $status): $log"
    fi
    e2fsck -fn "$disk" >"$out/e2fsck.log" 2>&1 || die "e2fsck: $(cat "$out/e2fsck.log")"
    mkdir "$out/$target"
    debugfs -R "rdump /build/lua $out/$target" "$disk" 2>/dev/null
    rm "$disk"
}

# table: the steps of both runs, side by side.
table() {
    tr -d '\r' <"$out/none.log" >"$out/none.txt"
    tr -d '\r' <"$out/hcache.log" >"$out/hcache.txt"
    awk '
        function change(without, with) { return without ? sprintf("%+.1f %%", 100 * (with - without) / without) : "-" }
        function hits(gets, hit) { return gets ? sprintf("%.1f %%", 100 * hit / gets) : "-" }
        function line(name, without, with, gets, hit) {
            printf "%-12s %10d %10d %10s %10d %10s\n", name, without, with, change(without, with), gets, hits(gets, hit)
        }
        # middle(OF): mean of the cold passes without the lowest and the highest.
        function middle(of,    i, sum, low, high) {
            low = high = of["cold-1"]
            for (i = 1; ("cold-" i) in of; i++) {
                sum += of["cold-" i]
                if (of["cold-" i] < low) low = of["cold-" i]
                if (of["cold-" i] > high) high = of["cold-" i]
            }
            return (sum - low - high) / (i - 3)
        }
        /^compile: step/ && FILENAME ~ /none.txt$/ { reads[$3] = $5 }
        /^compile: step/ && FILENAME ~ /hcache.txt$/ { order[++steps] = $3; with[$3] = $5; gets[$3] = $9; hit[$3] = $11 }
        END {
            printf "%-12s %10s %10s %10s %10s %10s\n", "pages read", "without", "with", "change", "gets", "hits"
            for (i = 1; i <= steps; i++) line(order[i], reads[order[i]], with[order[i]], gets[order[i]], hit[order[i]])
            line("cold, mean", middle(reads), middle(with), middle(gets), middle(hit))
        }' "$out/none.txt" "$out/hcache.txt"
    sed -n 's/^compile: ccache/ccache hits without the target:/p' "$out/none.txt"
    sed -n 's/^compile: ccache/ccache hits with the target:/p; s/^compile: status/the target:/p; s/^compile: module/the module:/p' \
        "$out/hcache.txt"
}

[ "$passes" -ge 3 ] || die "PASSES must be 3 or more"
server=
trap 'rm -rf "$sockets"; [ -z "$server" ] || kill "$server"' EXIT
trap 'exit 130' HUP INT TERM
rm -rf "$out"
mkdir -p "$out"
lab/programs/build.sh
initramfs "$out/initramfs.gz"

say "without the target (guest of $memory_mib MiB, emulated)"
boot none
say "with the target, over an hcache of $capacity"
"$plimsoll" hcache serve --socket "$sockets/server.sock" --capacity "$capacity" >"$out/server.log" 2>&1 &
server=$!
boot hcache --hcache "$sockets/server.sock"

diff -r "$out/none/lua" "$out/hcache/lua" >"$out/diff" || die "the two builds differ: $out/diff"
# Each compilation of both runs made the same.
sums=$(cat "$out/none.log" "$out/hcache.log" | tr -d '\r' | grep '^compile: built' | sort | uniq -c)
[ "$(echo "$sums" | awk '{ print $1 }')" = $((2 * passes + 4)) ] || die "compilations differ: $sums"
table
echo "every one of $((2 * passes + 4)) compilations made the same, and the same stands on both disks"
