//! Steps of a long experiment: what was done is kept, and what is left is shown.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use plimsoll_output::write_file;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Steps, of which each is made once: a file in a directory keeps its result, so that a run that was cut off goes on there.
#[derive(Debug)]
pub struct Progress {
    folder: PathBuf,
    all: usize,
    done: usize,
    /// Those of them that this run made.
    made: u32,
    since: Instant,
}

impl Progress {
    /// Begins an experiment of `all` steps, made with `settings`, whose results are in the directory `folder`; it is
    /// created.
    ///
    /// # Errors
    ///
    /// That it cannot be created, or has results made with other settings, which are left as they are.
    pub fn begin(folder: &Path, settings: &str, all: usize) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create '{}'", folder.display()))?;
        let mut progress = Self {
            folder: folder.to_owned(),
            all: all + 1,
            done: 0,
            made: 0,
            since: Instant::now(),
        };
        let kept: String = progress.step("settings", || Ok(settings.to_owned()))?;
        anyhow::ensure!(
            kept == settings,
            "'{}' has measurements made with other settings ({kept}; now {settings}): name another directory with --state, or delete it",
            folder.display()
        );
        Ok(progress)
    }

    /// Returns the result that an earlier run kept as `name`, otherwise makes and keeps it.
    ///
    /// # Errors
    ///
    /// Those of `make`, and that a kept result is of another form.
    pub fn step<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        make: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let path = self.folder.join(name).with_extension("json");
        if let Ok(bytes) = fs::read(&path) {
            self.done += 1;
            return serde_json::from_slice(&bytes)
                .with_context(|| format!("'{}' is of another version: delete it", path.display()));
        }
        let left = match self.made {
            0 => String::new(),
            made => {
                let steps = (self.all - self.done) as f64 / f64::from(made);
                let left = self.since.elapsed().mul_f64(steps);
                format!(", about {} min left", left.as_secs() / 60 + 1)
            }
        };
        eprintln!("{} of {}: {name}{left}", self.done + 1, self.all);
        let result = make().with_context(|| format!("in {name}"))?;
        write_file(&path, &serde_json::to_vec(&result)?)?;
        self.done += 1;
        self.made += 1;
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_is_not_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let run = |make: fn() -> anyhow::Result<u32>| {
            let mut progress =
                Progress::begin(&folder.path().join("state"), "2 periods", 2).unwrap();
            progress.step("one-1", make)
        };
        assert!(run(|| anyhow::bail!("cut off")).is_err());
        assert_eq!(run(|| Ok(7)).unwrap(), 7);
        assert_eq!(run(|| unreachable!("it was made")).unwrap(), 7);
        let other = Progress::begin(&folder.path().join("state"), "4 periods", 2);
        let error = other.unwrap_err().to_string();
        assert!(error.contains("(2 periods; now 4 periods)"), "{error}");
        fs::write(folder.path().join("state/one-1.json"), "\"x\"").unwrap();
        let error = run(|| Ok(7)).unwrap_err();
        assert!(error.to_string().contains("delete it"), "{error}");
    }
}
