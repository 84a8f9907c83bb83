//! The methods, and what the guest runs to use them.

use std::time::Duration;

use super::program::{Kind, Program};

/// The kernel's own interfaces, as plimsoll-judge names them.
pub const INTERFACES: [&str; 8] = [
    "damon-default",
    "damon-tuned",
    "mglru",
    "clear-refs",
    "rss",
    "cgroup",
    "committed",
    "available",
];

/// Those that only read a file, and are read at the same time.
pub const READERS: [&str; 4] = ["rss", "cgroup", "committed", "available"];

/// Our backends, with their budgets in percent.
pub const OURS: [Ours; 5] = [
    Ours::new("idle", "idle", 1),
    Ours::new("idle at 10 %", "idle", 10),
    Ours::new("damon", "damon", 1),
    Ours::new("damon at 10 %", "damon", 10),
    Ours::new("write-scan", "write-scan", 1),
];

/// Time for which each of the kernel's interfaces is read again and again: a second is what truths are computed for.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// Length of a period of ours: the default.
pub const PERIOD_S: u32 = 5;

/// One of our backends at a budget.
#[derive(Debug)]
pub struct Ours {
    pub name: &'static str,
    pub backend: &'static str,
    pub budget_percent: u32,
}

impl Ours {
    pub const fn new(name: &'static str, backend: &'static str, budget_percent: u32) -> Self {
        Self {
            name,
            backend,
            budget_percent,
        }
    }
}

/// How much is measured by each method.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// Of the kernel's interfaces, a second each.
    pub estimates: u32,
    /// Of ours.
    pub periods: u32,
}

/// What begins every script.
const BEGINNING: &str = "b=/bin/busybox
$b mkdir -p /proc /sys /tmp /dev /cg /run
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
$b mount -t tmpfs tmp /tmp
$b mount -t debugfs debug /sys/kernel/debug
$b mount -t cgroup2 cg /cg
echo 1 > /proc/sys/kernel/printk
echo never > /sys/kernel/mm/transparent_hugepage/enabled
echo y > /sys/kernel/mm/lru_gen/enabled
echo +memory > /cg/cgroup.subtree_control
$b mkdir /cg/judged
judged() { exec $b sh -c 'echo $$ > /cg/judged/cgroup.procs; exec \"$@\"' sh \"$@\"; }
";

/// Waits until what is resident grows by less than 1 % in 5 s, for up to 5 minutes, and lets the host's trace see which pages are in
/// use.
const SETTLING: &str = "before=0
tries=0
while [ $tries -lt 60 ]; do
$b sleep 5
now=$($b awk '/^VmRSS/ { print $2 }' /proc/$pid/status)
[ $((now - before)) -ge $((now / 100)) ] || break
before=$now
tries=$((tries + 1))
done
/plimsoll-judge frames $pid
$b sleep 10
";

/// The script that the guest runs.
pub fn script(program: &Program, seed: u64, lengths: Lengths) -> String {
    let mut text = BEGINNING.to_owned();
    match program.kind {
        Kind::Made(made) => {
            let words = made.words.split(' ');
            let words: String = words.map(|word| format!(" plimsoll.{word}")).collect();
            text += &format!(
                "judged /workload{words} plimsoll.seed={seed} > /tmp/log 2>&1 &
pid=$!
while ! $b grep -q round /tmp/log; do $b sleep 0.2; done
/plimsoll-judge wake 2000 &
$b tail -f /tmp/log &
"
            );
        }
        Kind::Real(real) => {
            text += real.start;
            text += "/plimsoll-judge wake 2000 &\n";
            text += SETTLING;
        }
    }
    let list = match program.kind {
        Kind::Made(_) => "",
        Kind::Real(_) => "/plimsoll-judge frames $pid\n",
    };
    for interface in INTERFACES {
        let count = lengths.estimates;
        let interval = INTERVAL.as_millis();
        let run = format!("/plimsoll-judge {interface} $pid {interval} {count} 2>&1");
        if interface == READERS[0] || !READERS.contains(&interface) {
            text += list;
        }
        text += &match READERS.contains(&interface) {
            true => format!("echo begin {interface}\n{run} &\nreaders=\"$readers $!\"\n"),
            false => format!("echo begin {interface}\n{run}\n"),
        };
    }
    text += "wait $readers\n";
    for ours in &OURS {
        text += list;
        // As lines are printed: the truth is of that time. The console takes lines of up to 16 KiB; up to 1 KiB are written at
        // once, so that no line of the program falls into one.
        text += &format!(
            "echo begin {}\n/plimsoll attach $pid --backend {} --budget {}% --period {PERIOD_S}s --periods {} --curve -o json 2>&1 | $b fold -w 1000\n",
            ours.name, ours.backend, ours.budget_percent, lengths.periods
        );
    }
    text += list;
    text + "echo finished\n$b poweroff -f\n"
}

/// Names of all methods.
pub fn methods() -> impl Iterator<Item = &'static str> {
    OURS.iter().map(|ours| ours.name).chain(INTERFACES)
}

#[cfg(test)]
mod tests {
    use super::super::program::{MADE, REAL};
    use super::*;

    #[test]
    fn a_script_names_every_method_and_ends() {
        let lengths = Lengths {
            estimates: 2,
            periods: 1,
        };
        for program in MADE.iter().chain(&REAL) {
            let text = script(program, 7, lengths);
            for method in methods() {
                assert!(text.contains(&format!("begin {method}\n")), "{method}");
            }
            assert!(text.ends_with("poweroff -f\n"));
            let lists = text.matches("/plimsoll-judge frames $pid\n").count();
            match program.kind {
                Kind::Made(_) => assert!(text.contains("plimsoll.seed=7") && lists == 0),
                // Before settling, before each method that is not with others, and at the end.
                Kind::Real(real) => {
                    let all = 1 + methods().count() - (READERS.len() - 1) + 1;
                    assert!(text.contains(real.start) && lists == all, "{lists}");
                }
            }
        }
    }
}
