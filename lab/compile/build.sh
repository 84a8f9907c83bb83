#!/bin/sh
# The workload, as the guest's process 1: compiles lua from Debian's sources with ccache, again and again from a cold page
# cache ([M08], table 1), then without ccache from a warm one (table 2), then checks every file of every package.
# Says on the console, a line each:
#   compile: step NAME reads PAGES writes PAGES gets N hits N      of the disk, in 4 KiB; of the target, 0 without one
#   compile: built SUM                                             of all objects and programs
#   compile: ccache HITS of CALLS                                  of the passes after the first
#   compile: cold but for PAGES                                    left in the page cache before such a pass
#   compile: status ..., compile: module ...                       counters of target and module at the end
#   compile: done, or compile: error ...
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C HOME=/build CCACHE_DIR=/build/ccache
exec >/dev/console 2>&1 </dev/null
passes=$(sed -n 's/.*compile.passes=\([0-9]*\).*/\1/p' /proc/cmdline)
group=/sys/fs/cgroup/build

end() {
    echo "compile: $*"
    sync
    mount -o remount,ro /
    echo o >/proc/sysrq-trigger
    sleep 60
}

# counts: pages read and written of the disk, gets and hits of the target.
counts() {
    # shellcheck disable=SC2046 # words
    set -- $(cat /sys/block/vda/stat) $(dmsetup status root 2>/dev/null)
    reads=$(($3 / 8))
    writes=$(($7 / 8))
    gets=0
    hits=0
    while [ $# -gt 1 ]; do
        case $1 in
        gets) gets=$2 ;;
        hits) hits=$2 ;;
        esac
        shift
    done
    echo "$reads $writes $gets $hits"
}

# step NAME COMMAND...: runs it, and says what the disk did meanwhile.
step() {
    name=$1
    shift
    before=$(counts)
    "$@" >/run/log 2>&1 || {
        tail -n 20 /run/log
        end "error in $name"
    }
    sync
    # shellcheck disable=SC2046,SC2086 # eight numbers
    set -- $before $(counts)
    echo "compile: step $name reads $(($5 - $1)) writes $(($6 - $2)) gets $(($7 - $3)) hits $(($8 - $4))"
}

# reset: as before each compilation of [M08]: "make clean", and an empty page cache; by reclaim, all at once, as if others
# had needed the memory.
reset() {
    make -C /build/lua/src clean >/run/log 2>&1
    sync
    # Fails, because there is less to reclaim.
    echo 64G 2>/dev/null >$group/memory.reclaim
    echo "compile: cold but for $(awk '$1 == "file" { print int($2 / 4096) }' $group/memory.stat) pages"
}

# compile COMPILER: without optimisation, which would take an emulated guest minutes and read the same.
compile() {
    make -C /build/lua/src linux CC="$1" MYCFLAGS='-g -O0'
}

# built: says one sum of all that was compiled and linked.
built() {
    echo "compile: built $(cd /build/lua/src && md5sum ./*.o liblua.a lua luac | md5sum)"
}

unpack() {
    mkdir -p /build/lua && tar -C /build/lua --strip-components=1 -xf /usr/src/lua5.4_*.orig.tar.gz
}

# Each file against the sum its package came with. The image is without documentation, which is all that some packages have.
check() {
    (cd / && cat /var/lib/dpkg/info/*.md5sums | md5sum --quiet --ignore-missing -c -)
}

mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir $group
echo $$ >$group/cgroup.procs

step unpack unpack
step first compile 'ccache gcc'
built
ccache --zero-stats >/run/log
pass=1
while [ "$pass" -le "$passes" ]; do
    reset
    step "cold-$pass" compile 'ccache gcc'
    built
    pass=$((pass + 1))
done
ccache --print-stats | awk '/^(direct|preprocessed)_cache_hit/ { hits += $2 } /^cache_miss/ { misses += $2 }
    END { print "compile: ccache", hits + 0, "of", hits + misses }'
make -C /build/lua/src clean >/run/log 2>&1
step warm compile gcc
built
step check check
echo "compile: status $(dmsetup status root 2>/dev/null)"
if [ -e /sys/module/plimsoll ]; then
    mount -t debugfs debugfs /sys/kernel/debug
    awk '{ printf " %s %s", $1, $2 } END { print "" }' /sys/kernel/debug/plimsoll/stats | sed 's/^/compile: module/'
fi
end 'done'
