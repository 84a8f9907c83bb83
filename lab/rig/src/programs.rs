//! A guest that runs a job of lab/programs again and again.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use plimsoll_vm::QemuVm;

use crate::{Guest, GuestConfig, ProgramsImage};

/// Longest time that an emulated guest takes to make a job's input, on a busy host.
const PREPARATION_MAX: Duration = Duration::from_secs(600);

/// The jobs of lab/programs.
pub const JOBS: [&str; 22] = [
    "gcc",
    "glpsol",
    "hmmer",
    "linpack",
    "nginx",
    "perl",
    "postgresql",
    "povray",
    "quantlib",
    "redis",
    "sqlite",
    "stockfish",
    "stress",
    "sysbench",
    "tpcc",
    "tpch",
    "tpch-light",
    "vips",
    "x264",
    "xapian",
    "xsltproc",
    "xz",
];

/// A guest with a real program, which it runs until it is ended.
#[derive(Debug)]
pub struct ProgramGuest {
    /// The guest itself.
    pub guest: Guest,
    /// The VM as its tracer finds it.
    pub vm: QemuVm,
    rounds: u64,
}

/// What a console line of lab/programs/init.sh reports.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Begun,
    Round,
    Failed(String),
    Other,
}

impl Progress {
    fn parse(line: &str) -> Self {
        let report = line.strip_prefix("programs: ").unwrap_or_default();
        match report.split_once(' ') {
            Some(("begin", _)) => Self::Begun,
            Some(("round", _)) => Self::Round,
            Some(("error", what)) => Self::Failed(what.to_owned()),
            _ => Self::Other,
        }
    }
}

impl ProgramGuest {
    /// Configures a guest of 512 MiB that runs the job `job` until it is ended.
    pub fn config(job: &str) -> GuestConfig {
        GuestConfig {
            memory_mib: 512,
            ..GuestConfig::new(job, &format!("job={job} repeat=1"))
        }
    }

    /// Boots a guest and waits until its program begins.
    ///
    /// # Errors
    ///
    /// Why it did not begin; no guest is left.
    pub fn boot(image: &ProgramsImage, config: &GuestConfig) -> anyhow::Result<Self> {
        let name = &config.name;
        let mut guest = Guest::start(image, config)
            .with_context(|| format!("cannot start the guest of {name}"))?;
        let vm = guest.vm()?;
        let mut started = Self {
            guest,
            vm,
            rounds: 0,
        };
        let deadline = Instant::now() + PREPARATION_MAX;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match started.take_line(left)? {
                Some(Progress::Begun) => return Ok(started),
                Some(_) => {}
                None => bail!("the program of {name} did not begin within {PREPARATION_MAX:?}"),
            }
        }
    }

    /// Takes a console line, if one comes within `patience`.
    fn take_line(&mut self, patience: Duration) -> anyhow::Result<Option<Progress>> {
        let Some(line) = self.guest.next_line(patience)? else {
            return Ok(None);
        };
        let progress = Progress::parse(&line.text);
        match &progress {
            Progress::Round => self.rounds += 1,
            Progress::Failed(what) => bail!("the job {} failed: {what}", self.guest.name()),
            Progress::Begun | Progress::Other => {}
        }
        Ok(Some(progress))
    }

    /// Number of times that the program has come to its end.
    ///
    /// # Errors
    ///
    /// That the program failed, or the guest ended.
    pub fn rounds(&mut self) -> anyhow::Result<u64> {
        while self.take_line(Duration::ZERO)?.is_some() {}
        Ok(self.rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_is_a_file_and_every_file_is_a_job() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../programs/jobs");
        let files = std::fs::read_dir(folder).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, JOBS);
    }

    #[test]
    fn lines_of_a_job_are_distinguished_from_others() {
        let parsed = Progress::parse;
        assert_eq!(parsed("programs: begin redis"), Progress::Begun);
        assert_eq!(parsed("programs: round 3 status 0"), Progress::Round);
        let failed = Progress::Failed("status 1".to_owned());
        assert_eq!(parsed("programs: error status 1"), failed);
        assert_eq!(parsed("programs: result xz 00"), Progress::Other);
        assert_eq!(parsed("[    0.1] programs: begin"), Progress::Other);
    }
}
