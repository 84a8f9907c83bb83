//! Where a verb's result goes and in which form: `-o FORMAT`, `--out FILE`.
//!
//! A file is written beside its name and renamed into place, so that a reader
//! never meets half of it and a failed run leaves the old one. What exists and
//! is no ordinary file (a pipe, `/dev/stdout`) is written straight.

use std::fs::{self, File, Permissions};
use std::io::{IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use tempfile::NamedTempFile;

use crate::bail_usage;

/// Forms in which a verb with a picture gives its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns for a reader
    Table,
    /// Comma-separated values with a header line
    Csv,
    /// One JSON object with "schema": 1
    Json,
    /// A picture as scalable vector graphics
    Svg,
    /// The same picture as pixels
    Png,
}

/// Forms in which a verb without a picture gives its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum TextFormat {
    /// Columns for a reader
    #[default]
    Table,
    /// JSON with "schema": 1
    Json,
}

/// `-o` and `--out` of a verb that can draw.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct OutputArgs {
    /// Form of the result [default: by the ending of --out, else table]
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,
    /// File to write instead of standard output; replaced whole or not at all
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl OutputArgs {
    /// The form asked for, by name or by the file's ending.
    #[must_use]
    pub fn format(&self) -> Format {
        let ending = || {
            let ending = self.out.as_ref()?.extension()?.to_str()?;
            Format::from_str(ending, true).ok()
        };
        self.output.or_else(ending).unwrap_or(Format::Table)
    }

    /// The file to write instead of standard output, if one was named.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.out.as_deref()
    }

    /// Tells before the work what could not be written after it.
    ///
    /// # Errors
    ///
    /// [`UsageError`](crate::exit::UsageError) for a picture that would go to a terminal, and for
    /// a file in a folder that does not exist.
    pub fn check(&self) -> anyhow::Result<()> {
        let picture = matches!(self.format(), Format::Svg | Format::Png);
        match &self.out {
            None if picture && std::io::stdout().is_terminal() => {
                bail_usage!("a picture is not for a terminal: name a file with --out FILE")
            }
            Some(out) if !folder_of(out).is_dir() => {
                bail_usage!("--out {}: there is no such folder", out.display())
            }
            _ => Ok(()),
        }
    }

    /// Writes the result to the file asked for, or to `out`.
    ///
    /// # Errors
    ///
    /// The cause with the file's name; an older file of that name is then as it was.
    pub fn write(&self, content: &[u8], out: &mut dyn Write) -> anyhow::Result<()> {
        match &self.out {
            Some(path) => write_file(path, content),
            None => Ok(out.write_all(content)?),
        }
    }
}

/// Replaces the file at `path` by `content`, whole or not at all.
///
/// # Errors
///
/// The cause with the file's name; an older file of that name is then as it was.
pub fn write_file(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let mut file = AtomicFile::create(path)?;
    let written = file.write_all(content);
    written.with_context(|| cannot_write(path))?;
    file.persist()
}

/// A file being written that takes its name when it is whole; until then an older one of that name stays.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// Beside the file that it will replace.
    Beside(NamedTempFile, PathBuf),
    /// Straight into what is no ordinary file.
    Straight(File),
}

impl AtomicFile {
    /// Begins a file that will be at `path`.
    ///
    /// # Errors
    ///
    /// The cause with the file's name.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let place = || -> std::io::Result<Place> {
            if fs::metadata(path).is_ok_and(|old| !old.is_file()) {
                return Ok(Place::Straight(File::options().write(true).open(path)?));
            }
            // Through a symbolic link, so that the link stays and what it names is replaced.
            let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            let file = tempfile::Builder::new()
                .prefix(".plimsoll-")
                .permissions(Permissions::from_mode(0o666))
                .tempfile_in(folder_of(&target))?;
            Ok(Place::Beside(file, target))
        };
        Ok(Self {
            path: path.to_owned(),
            place: place().with_context(|| cannot_write(path))?,
        })
    }

    /// Gives the file its name.
    ///
    /// # Errors
    ///
    /// The cause with the file's name; an older file of that name is then as it was.
    pub fn persist(self) -> anyhow::Result<()> {
        if let Place::Beside(file, target) = self.place {
            file.persist(target)
                .with_context(|| cannot_write(&self.path))?;
        }
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match &mut self.place {
            Place::Beside(file, _) => file.write(bytes),
            Place::Straight(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match &mut self.place {
            Place::Beside(file, _) => file.flush(),
            Place::Straight(file) => file.flush(),
        }
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write '{}'", path.display())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(format: Option<Format>, out: Option<&str>) -> OutputArgs {
        OutputArgs {
            output: format,
            out: out.map(PathBuf::from),
        }
    }

    #[test]
    fn the_files_ending_stands_in_for_a_format() {
        assert_eq!(args(None, None).format(), Format::Table);
        assert_eq!(args(None, Some("a/b.PNG")).format(), Format::Png);
        assert_eq!(args(None, Some("a/b.txt")).format(), Format::Table);
        assert_eq!(args(Some(Format::Csv), Some("b.svg")).format(), Format::Csv);
    }

    #[test]
    fn a_file_is_replaced_whole_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("curve.csv");
        for content in ["first, and longer", "second"] {
            write_file(&path, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_and_what_it_names_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_file(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    }

    #[test]
    fn a_folder_is_not_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_file(folder.path(), b"x").unwrap_err();
        assert!(format!("{error:#}").contains("Is a directory"), "{error:#}");
        let lost = args(None, Some("/nonexistent/curve.csv"))
            .check()
            .unwrap_err();
        assert!(lost.to_string().contains("no such folder"), "{lost}");
    }
}
