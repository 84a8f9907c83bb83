//! The programs.

use crate::curves::Law;

/// A program that is watched.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    pub name: &'static str,
    pub kind: Kind,
}

/// How it is known what it touches.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// In closed form.
    Made(Made),
    /// By a trace of its references.
    Real(Real),
}

/// The workload of the guest, whose touches follow a law.
#[derive(Debug, Clone, Copy)]
pub struct Made {
    pub words: &'static str,
    /// How pages are chosen; `None` for one after the other.
    pub law: Option<Law>,
    /// Of the array; of a program that changes its working set, the largest.
    pub mib: u64,
    /// Whether it changes its working set, as its output says.
    pub is_changing: bool,
}

/// A program of Debian.
#[derive(Debug, Clone, Copy)]
pub struct Real {
    /// Files of the host that the guest has at its root.
    pub files: &'static [&'static str],
    /// Shell commands that start it, by the function `judged` and in the background, and set `pid`. `$b` is busybox.
    pub start: &'static str,
}

impl Program {
    /// Whether it only reads its array.
    pub fn only_reads(&self) -> bool {
        matches!(self.kind, Kind::Made(made) if !made.words.contains("write_ratio"))
    }

    /// Whether it changes its working set and says so.
    pub fn is_changing(&self) -> bool {
        matches!(self.kind, Kind::Made(made) if made.is_changing)
    }
}

const fn made(name: &'static str, words: &'static str, law: Option<Law>, mib: u64) -> Program {
    let kind = Kind::Made(Made {
        words,
        law,
        mib,
        is_changing: false,
    });
    Program { name, kind }
}

pub const MADE: [Program; 5] = [
    made(
        "one after the other, 64 MiB",
        "workload=sequential mib=64",
        None,
        64,
    ),
    made(
        "Zipf 1.0, 96 MiB",
        "workload=zipf mib=96",
        Some(Law::Zipf(1.0)),
        96,
    ),
    Program {
        name: "32, 96 and 64 MiB in turn",
        kind: Kind::Made(Made {
            words: "workload=steps steps_mib=32,96,64 step_ms=8000 seconds=0",
            law: None,
            mib: 96,
            is_changing: true,
        }),
    },
    made(
        "at random, 96 MiB",
        "workload=uniform mib=96",
        Some(Law::Uniform),
        96,
    ),
    made(
        "Zipf 0.6, half of it written, 96 MiB",
        "workload=zipf alpha=0.6 mib=96 write_ratio=0.5",
        Some(Law::Zipf(0.6)),
        96,
    ),
];
/// So many of them with `--quick`.
pub const QUICK_MADE: usize = 3;

pub const REAL: [Program; 4] = [
    // A hash table of 64 MiB that most nodes of the search read and write, and a network of 45 MiB.
    Program {
        name: "stockfish",
        kind: Kind::Real(Real {
            files: &["/usr/games/stockfish"],
            start: "{ echo 'setoption name Hash value 64'; echo 'go infinite'; while :; do $b sleep 1000; done; } | judged /stockfish > /dev/null &
pid=$!
",
        }),
    },
    // A client reads keys of all, another writes those of a tenth; many at a time, or changes between processes would take the time.
    Program {
        name: "redis",
        kind: Kind::Real(Real {
            files: &["/usr/bin/redis-server", "/usr/bin/redis-benchmark"],
            start: "judged /redis-server --port 0 --unixsocket /tmp/redis --save '' --appendonly no > /tmp/redis.log &
pid=$!
while [ ! -S /tmp/redis ]; do $b sleep 0.2; done
clients() { /redis-benchmark -s /tmp/redis -d 300 \"$@\" > /dev/null; }
clients -t set -r 150000 -n 450000 -P 50
clients -t get -r 150000 -n 2000000000 -c 4 -P 50 &
clients -t set -r 15000 -n 2000000000 -c 4 -P 10 &
",
        }),
    },
    // Rows are read by their keys and a few are written; a product of two random numbers is mostly small.
    Program {
        name: "sqlite",
        kind: Kind::Real(Real {
            files: &["/usr/bin/sqlite3"],
            start: "ask() {
echo 'CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT, body BLOB);'
echo 'WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)'
echo 'INSERT INTO rows SELECT i, hex(randomblob(8)), randomblob(300) FROM n;'
echo 'CREATE INDEX names ON rows (name);'
$b yes 'SELECT max(length(body)) FROM rows WHERE id = (abs(random()) % 200000) * (abs(random()) % 1000) / 1000;
SELECT count(*) FROM (SELECT id FROM rows WHERE name > hex(randomblob(8)) ORDER BY name LIMIT 20);
UPDATE rows SET body = randomblob(300) WHERE id = (abs(random()) % 20000);'
}
ask | judged /sqlite3 :memory: > /dev/null &
pid=$!
",
        }),
    },
    // Compresses the programs of the guest, again and again; they are larger than its dictionary of 4 MiB.
    Program {
        name: "xz",
        kind: Kind::Real(Real {
            files: &["/usr/bin/xz"],
            start: "while :; do $b cat /plimsoll /plimsoll-judge /workload; done | judged /xz -4 -T1 -c > /dev/null &
pid=$!
",
        }),
    },
];
/// So many of them with `--quick`.
pub const QUICK_REAL: usize = 1;
