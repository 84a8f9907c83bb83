#!/bin/sh
# Real programs in a Debian guest, on plain TCG and under the page log's plugin: README.md. Arguments: the ways to run them,
# of plain, walks and references (all); JOBS in the environment: which.
set -eu

cd "$(dirname "$0")/../.."
memory_mib=${MEMORY_MIB:-512}
interval=${INTERVAL:-20M}
jobs=${JOBS:-linpack redis sqlite xz sysbench stress vips x264}
kernel=target/guest/${KERNEL:-6.1}
plimsoll=${PLIMSOLL:-target/release/plimsoll}
image=target/guest/debian-programs.img
out=target/lab/programs
timeout_s=1800
hz=$(getconf CLK_TCK)

say() { printf '    %s\n' "$*" >&2; }
die() {
    printf 'lab programs: %s\n' "$*" >&2
    exit 1
}

# cpu_ms PID: user and system time that a process has taken.
cpu_ms() {
    awk -v hz="$hz" '{ print int(($14 + $15) * 1000 / hz) }' "/proc/$1/stat"
}

# guest JOB COMMAND...: boots a guest, QEMU started through COMMAND if given.
guest() {
    job=$1
    shift
    exec timeout --foreground "$timeout_s" "$@" qemu-system-x86_64 -accel tcg,thread=single -cpu qemu64,-cx16 -m "$memory_mib" \
        -machine memory-backend=ram -object "memory-backend-memfd,id=ram,size=${memory_mib}M,share=on" \
        -drive "file=$image,format=raw,if=none,id=disk,snapshot=on" -device nvme,drive=disk,serial=programs \
        -display none -serial stdio -nodefaults -no-user-config -no-reboot -pidfile "$scratch/pid" -kernel "$kernel/vmlinuz" \
        -append "root=/dev/nvme0n1 rw init=/init.sh console=ttyS0 quiet panic=-1 no_timer_check transparent_hugepage=never plimsoll.job=$job"
}

# boot JOB WAY: runs a job; what the guest says, with QEMU's own CPU time in front of each line of ours, goes to JOB-WAY.log.
boot() {
    name=$1-$2
    log=$out/$name.pagelog
    rm -f "$scratch/pid"
    case $2 in
    plain) set -- "$1" ;;
    walks) set -- "$1" "$plimsoll" run --page-log "$log" --interval "$interval" --between-marks -- ;;
    references) set -- "$1" "$plimsoll" run --page-log "$log" --interval "$interval" --between-marks --references -- ;;
    esac
    guest "$@" >"$scratch/console" 2>"$out/$name.err" </dev/null &
    child=$!
    while IFS= read -r line; do
        case $line in
        programs:*) echo "$(cpu_ms "$(cat "$scratch/pid")") $line" ;;
        *) echo "$line" ;;
        esac
    done <"$scratch/console" | tr -d '\r' >"$out/$name.log"
    status=0
    wait "$child" || status=$?
    child=
    if [ "$status" != 0 ] || ! grep -q ' programs: done$' "$out/$name.log"; then
        tail -n 20 "$out/$name.log" "$out/$name.err" >&2
        die "$name failed (status $status): $out/$name.log"
    fi
}

# figures JOB WAY: s of QEMU's CPU between the marks; of a log, millions of instructions, records, bytes.
figures() {
    awk '
        $3 == "begin" { begin = $1 }
        $3 == "end" { end = $1 }
        /^page log: / {
            for (i = 4; i <= NF; i++) {
                if ($i ~ /^records/) records = $(i - 1)
                if ($i ~ /^bytes/) bytes = $(i - 1)
                if ($i == "M" && $(i + 1) == "instructions") millions = $(i - 1)
            }
        }
        END { print (end - begin) / 1000, millions + 0, records + 0, bytes + 0 }' "$out/$1-$2.log"
}

# table WAY...: of each job and way, CPU seconds, as a multiple of those of plain TCG, and MIPS; plain TCG tells no
# instructions: those of another way stand for them.
table() {
    for job in $jobs; do
        for way; do
            echo "$job $way $(figures "$job" "$way")"
        done
    done | awk '
        { job[NR] = $1; way[NR] = $2; cpu[NR] = $3; millions[NR] = $4; records[NR] = $5; bytes[NR] = $6 }
        $2 == "plain" { plain[$1] = $3 }
        $4 > 0 { of[$1] = $4 }
        END {
            printf "%-10s %-12s %8s %8s %8s %12s %10s\n", "emulated", "way", "CPU s", "times", "MIPS", "records", "log, MB"
            for (i = 1; i <= NR; i++) {
                ran = millions[i] ? millions[i] : of[job[i]]
                printf "%-10s %-12s %8.2f %8s %8s %12s %10s\n", job[i], way[i], cpu[i],
                    plain[job[i]] ? sprintf("%.2f", cpu[i] / plain[job[i]]) : "-",
                    ran ? sprintf("%.0f", ran / cpu[i]) : "-",
                    records[i] ? records[i] : "-", records[i] ? sprintf("%.1f", bytes[i] / 1e6) : "-"
            }
        }'
}

for way in "$@"; do
    case $way in
    plain | walks | references) ;;
    *) die "'$way' is none of plain, walks, references" ;;
    esac
done
[ $# -gt 0 ] || set -- plain walks references
lab/programs/build.sh
scratch=$(mktemp -d)
child=
trap '[ -z "$child" ] || kill "$child"; rm -rf "$scratch"' EXIT
trap 'exit 130' HUP INT TERM
mkfifo "$scratch/console"
mkdir -p "$out"
for job in $jobs; do
    for way; do
        rm -f "$out/$job-$way".*
        say "$job, $way (guest of $memory_mib MiB, emulated)"
        boot "$job" "$way"
    done
    [ "$(cat "$out/$job"-*.log | sed -n 's/.* programs: result //p' | sort -u | wc -l)" = 1 ] || die "results of $job differ: $out/$job-*.log"
done
table "$@"
for job in $jobs; do
    log=$out/$job-references.pagelog
    [ -f "$log" ] || continue
    echo
    echo "$job: working set by each estimator, from $log"
    "$plimsoll" wss "$log" --estimator all
done
