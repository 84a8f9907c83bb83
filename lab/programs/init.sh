#!/bin/sh
# A job of real programs, as the guest's process 1; the kernel's words say which and how:
#   plimsoll.job=NAME       a file of /jobs
#   plimsoll.repeat=1       its work is done again and again until the guest is ended
#   plimsoll.rounds=N       so many times, after plimsoll.warmup=N times that are not measured, with a pause of plimsoll.pause_ms=N before and after
#   otherwise               once, between two marks (mark.c)
# A job's file defines
#   prepare     makes its input, always the same, and starts its services
#   work        the work, through in_group; what it prints goes to /run/log
#   outcome     prints what was computed, the same in every run
# and may define finish, which ends its services so that the disk can be checked, and run_once, if the marks are within the work. Says on the
# console, a line each:
#   programs: begin JOB
#   programs: round N status N           with plimsoll.repeat=1, whenever the work was done
#   programs: end JOB status N elapsed_ms N cpu_ms N peak_kib N anon_kib N committed_kib N refaults N swapped_in N
#   programs: result JOB ...             the outcome
#   programs: done, or programs: error ...
# and with plimsoll.rounds=N the lines phase, result and done of guest/workload/README.md, so that its disk is measured as that of a workload; the files
# visited are its rounds, the pages read all that came from disks, the mismatches rounds with another outcome than the first.
# cpu_ms and peak_kib (page cache included) are those of the job's control group; anon_kib and committed_kib (of the whole
# guest) the largest that a reading each second found; refaults and pages swapped in are the guest's, between the marks.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/games LC_ALL=C HOME=/job
exec >/dev/console 2>&1 </dev/null
group=/sys/fs/cgroup/job
module=/sys/kernel/debug/plimsoll/stats

off() {
    echo "programs: $*"
    echo o >/proc/sysrq-trigger
    sleep 60
}

# word KEY: the value of the kernel's word plimsoll.KEY=.
word() {
    sed -n "s/.*plimsoll\.$1=\([a-z0-9_-]*\).*/\1/p" /proc/cmdline
}

# in_group COMMAND...: runs it in the job's control group.
in_group() {
    sh -c 'echo $$ >'$group'/cgroup.procs && exec "$@"' sh "$@"
}

# as USER COMMAND...: the same, as a user.
as() {
    user=$1
    shift
    in_group setpriv --reuid="$user" --regid="$user" --init-groups "$@"
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

# watch: keeps the largest sizes found in /run/largest; without a process of its own but sleep.
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
    [ "$1" = 0 ] || fail "$1"
}

# fail STATUS: ends the guest with the end of the work's log.
fail() {
    tail -n 20 /run/log
    off "error status $1"
}

run_once() {
    begin
    work >/run/log 2>&1
    end $?
}

# repeat: the work again and again.
repeat() {
    echo "programs: begin $job"
    mark 1
    round=0
    while work >/run/log 2>&1; do
        echo "programs: round $round status 0"
        round=$((round + 1))
    done
    fail $?
}

finish() { :; }

# work_times N: the work so many times; counts in `wrong` how often its outcome is not the first one.
work_times() {
    for _ in $(seq "$1"); do
        work >/run/log 2>&1 || fail $?
        : "${first:=$(outcome)}"
        [ "$(outcome)" = "$first" ] || wrong=$((wrong + 1))
    done
}

# phase NAME
phase() {
    echo "plimsoll: phase name=$1 pause_ms=$pause_ms"
    sleep $((pause_ms / 1000))
}

# read_pages: those that came from disks.
read_pages() {
    awk '$1 == "pgpgin" { print int($2 / 4) }' /proc/vmstat
}

# measured: rounds of work on a disk of which the host reads the counters meanwhile, from a kernel whose complaints are counted.
measured() {
    pause_ms=$(word pause_ms)
    first=
    wrong=0
    rounds=$(word rounds)
    work_times "$(word warmup)"
    phase measured
    before=$(read_pages)
    work_times "$rounds"
    read=$(($(read_pages) - before))
    phase end
    finish >/run/log 2>&1 || fail $?
    sync
    mount -o remount,ro / || fail $?
    echo "plimsoll: result name=machine memory_kib=$(awk '$1 == "MemTotal:" { print $2 }' /proc/meminfo)"
    echo "plimsoll: result name=files phase=measured reads=$read writes=0 visits=$rounds"
    mount -t debugfs debugfs /sys/kernel/debug
    [ ! -f $module ] || echo "plimsoll: result name=plimsoll $(tr ' \n' '= ' <$module)"
    dmesg -l emerg,alert,crit,err | sed 's/^/plimsoll: kernel text=/'
    echo "plimsoll: result name=kernel complaints=$(dmesg -l emerg,alert,crit,err | wc -l)"
    echo "programs: result $job ${first:-none}"
    echo "plimsoll: done ops=$rounds ms=0 mismatches=$wrong"
}

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir $group
busybox ip link set lo up
mkdir -p /job
cd /job || off 'error no folder /job'
job=$(word job)
[ -n "$job" ] && [ -f "/jobs/$job" ] || off "error no job '$job'"
# shellcheck disable=SC1090 # which one is the kernel's word
. "/jobs/$job"
prepare >/run/log 2>&1 || {
    tail -n 20 /run/log
    off "error cannot prepare $job"
}
if [ "$(word repeat)" = 1 ]; then
    repeat
elif [ -n "$(word rounds)" ]; then
    measured
else
    run_once
    echo "programs: result $job $(outcome)"
fi
off 'done'
