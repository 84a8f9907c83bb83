#!/bin/sh
# A job of real programs, as the guest's process 1; the kernel's word programs.job=NAME says which. Its input is made first,
# always the same; then it runs between two marks (mark.c). Says on the console, a line each:
#   programs: begin JOB
#   programs: end JOB status N elapsed_ms N cpu_ms N peak_kib N anon_kib N committed_kib N refaults N swapped_in N
#   programs: result JOB ...     what it computed, the same in every run
#   programs: done, or programs: error ...
# cpu_ms and peak_kib (page cache included) are those of the job's control group; anon_kib and committed_kib (of the whole
# guest) the largest that a look each second saw; refaults and pages swapped in are the guest's, between the marks.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C HOME=/job
exec >/dev/console 2>&1 </dev/null
group=/sys/fs/cgroup/job

off() {
    echo "programs: $*"
    echo o >/proc/sysrq-trigger
    sleep 60
}

# in_group COMMAND...: runs it in the job's control group.
in_group() {
    sh -c 'echo $$ >'$group'/cgroup.procs && exec "$@"' sh "$@"
}

# counters: elapsed and CPU milliseconds, refaults, pages swapped in.
counters() {
    awk '
        FILENAME == "/proc/uptime" { uptime = $1 * 1000 }
        $1 == "usage_usec" { cpu = $2 / 1000 }
        $1 ~ /^workingset_refault_/ { refaults += $2 }
        $1 == "pswpin" { swapped = $2 }
        END { printf "%d %d %d %d\n", uptime, cpu, refaults, swapped }' /proc/uptime $group/cpu.stat /proc/vmstat
}

# watch: keeps the largest sizes seen in /run/largest; without a process of its own but sleep.
watch() {
    anon=0
    committed=0
    while :; do
        while read -r name bytes; do
            [ "$name" != anon ] || [ $((bytes / 1024)) -le "$anon" ] || anon=$((bytes / 1024))
        done <$group/memory.stat
        while read -r name kib _; do
            [ "$name" != Committed_AS: ] || [ "$kib" -le "$committed" ] || committed=$kib
        done </proc/meminfo
        echo "$anon $committed" >/run/largest
        sleep 1
    done
}

begin() {
    watch &
    watcher=$!
    echo "programs: begin $job"
    before=$(counters)
    mark 1
}

# end STATUS
end() {
    mark 2
    after=$(counters)
    kill "$watcher"
    # shellcheck disable=SC2046,SC2086 # ten numbers
    set -- "$1" $before $after $(cat /run/largest)
    echo "programs: end $job status $1 elapsed_ms $(($6 - $2)) cpu_ms $(($7 - $3)) peak_kib $(($(cat $group/memory.peak) / 1024))" \
        "anon_kib ${10} committed_kib ${11} refaults $(($8 - $4)) swapped_in $(($9 - $5))"
    [ "$1" = 0 ] || {
        tail -n 20 /run/log
        off "error status $1"
    }
}

# timed COMMAND...: the job, all of it between the marks.
timed() {
    begin
    in_group "$@" >/run/log 2>&1
    end $?
}

result() {
    echo "programs: result $job $*"
}

# Linpack of HPC Challenge. It runs much else, which has no switch: only its HPL section is between the marks. It appends a
# line to its report where a section begins and ends, each time opened anew: the report is a pipe, read by us.
job_linpack() {
    cat >hpccinf.txt <<'INPUT'
HPLinpack benchmark input file
Linpack of one process
HPL.out      output file name (if any)
8            device out (6=stdout,7=stderr,file)
1            # of problems sizes (N)
1400         Ns
1            # of NBs
80           NBs
0            PMAP process mapping (0=Row-,1=Column-major)
1            # of process grids (P x Q)
1            Ps
1            Qs
16.0         threshold
1            # of panel fact
2            PFACTs (0=left, 1=Crout, 2=Right)
1            # of recursive stopping criterium
4            NBMINs (>= 1)
1            # of panels in recursion
2            NDIVs
1            # of recursive panel fact.
1            RFACTs (0=left, 1=Crout, 2=Right)
1            # of broadcast
1            BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM)
1            # of lookahead depth
1            DEPTHs (>=0)
2            SWAP (0=bin-exch,1=long,2=mix)
64           swapping threshold
0            L1 in (0=transposed,1=no-transposed) form
0            U  in (0=transposed,1=no-transposed) form
1            Equilibration (0=no,1=yes)
8            memory alignment in double (> 0)
INPUT
    mkfifo hpccoutf.txt
    exec 3<>hpccoutf.txt
    # One process without a network or a daemon.
    export OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_btl=self OMPI_MCA_plm=isolated OPENBLAS_NUM_THREADS=1
    {
        in_group hpcc >/run/log 2>&1
        echo 'End of hpcc.' >hpccoutf.txt
    } &
    passed=
    while read -r line <&3; do
        case $line in
        'Begin of HPL section.') begin ;;
        'End of HPL section.') break ;;
        'End of hpcc.') off "error hpcc has ended early: $(tail -n 3 /run/log)" ;;
        *"||Ax-b||_oo/"*) passed=${line##*= } ;;
        esac
    done
    case $passed in
    *PASSED) end 0 ;;
    *) end 1 ;;
    esac
    # shellcheck disable=SC2086 # without its many blanks
    result residual $passed
}

job_redis() {
    in_group redis-server --save '' --appendonly no --bind 127.0.0.1 --daemonize yes >/run/log 2>&1
    until redis-cli ping >/run/log 2>&1; do sleep 0.1; done
    # Values of 400 bytes under the names that redis-benchmark asks for.
    awk 'BEGIN { for (i = 0; i < 400; i++) value = value i % 10
        for (i = 0; i < 100000; i++) printf "SET key:%012d %s\r\n", i, value }' | redis-cli --pipe >/run/log
    timed redis-benchmark -q -c 20 -P 8 -r 100000 -n 60000 -d 400 -t set,get
    result "keys $(redis-cli dbsize)"
}

job_sqlite() {
    sqlite3 data.db >/run/log <<'SQL'
PRAGMA journal_mode = off;
CREATE TABLE item (id INTEGER PRIMARY KEY, owner INTEGER, price INTEGER, name TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)
    INSERT INTO item SELECT i, (i * 7919) % 10007, (i * 104729) % 9973, printf('item %08d of the table', (i * 15485863) % 1000003) FROM n;
SQL
    cat >queries.sql <<'SQL'
PRAGMA cache_size = -32768;
CREATE INDEX by_owner ON item (owner);
CREATE INDEX by_name ON item (name);
SELECT owner % 10, count(*), sum(price) FROM item GROUP BY 1;
SELECT count(*), sum(a.price - b.price) FROM item a JOIN item b ON a.owner = b.owner WHERE a.id < 20000 AND b.id > 100000;
UPDATE item SET price = price + 1 WHERE owner % 3 = 0;
SELECT name, price FROM item ORDER BY price DESC, name LIMIT 10;
DELETE FROM item WHERE name LIKE '%7 of%';
SELECT count(*), sum(price) FROM item;
SQL
    timed sqlite3 data.db '.read queries.sql'
    result "$(md5sum </run/log)"
}

job_xz() {
    tar -C / --sort=name --mtime=@0 -cf - usr/lib/x86_64-linux-gnu | head -c 12M >input
    timed sh -c 'xz -6 -T1 -c input >output'
    result "$(md5sum <output)"
}

job_sysbench() {
    timed sysbench memory --threads=1 --time=0 --rand-seed=1 --memory-block-size=32M --memory-total-size=96M \
        --memory-oper=write --memory-access-mode=rnd run
    result "$(sed -n 's/^Total operations: \([0-9]*\).*/blocks \1/p' /run/log)"
}

job_stress() {
    timed stress-ng --vm 1 --vm-bytes 96M --vm-keep --vm-method incdec --vm-ops 80000 --seed 1 --verify --metrics-brief --timeout 0
    result "$(awk '/ vm / { print "operations", $5 }' /run/log)"
}

job_vips() {
    vips perlin picture.v 2048 2048 --cell-size 64 --seed 1
    vips colourspace picture.v input.v labq
    timed vips im_benchmarkn input.v output.v 1
    result "$(md5sum <output.v)"
}

job_x264() {
    # 60 frames of 640 x 360 in I420 (540 rows of 640 bytes), each a window 8 rows further down a high picture.
    vips perlin picture.v 640 1012 --cell-size 48 --seed 1 --uchar
    vips rawsave picture.v picture.raw
    frame=0
    while [ $frame -lt 60 ]; do
        dd if=picture.raw bs=640 skip=$((frame * 8)) count=540 2>/dev/null
        frame=$((frame + 1))
    done >input.yuv
    timed x264 --quiet --threads 1 --demuxer raw --input-res 640x360 --fps 25 --preset veryfast -o output.264 input.yuv
    result "$(md5sum <output.264)"
}

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir $group
busybox ip link set lo up
mkdir -p /job
cd /job || off 'error no folder /job'
job=$(sed -n 's/.*programs.job=\([a-z0-9]*\).*/\1/p' /proc/cmdline)
case $job in
linpack | redis | sqlite | xz | sysbench | stress | vips | x264) "job_$job" ;;
*) off "error no job '$job'" ;;
esac
off 'done'
