//! Configuration files, and the position of errors in them.

use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;
use toml::Spanned;

use super::ConfigError;
use super::values::{Kind, RawValue};

/// Maximum size of a file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of characters of a value that an error repeats.
const SHOWN: usize = 60;

/// A file's text.
#[derive(Clone)]
pub(super) struct File {
    path: PathBuf,
    text: String,
}

/// The file at `path`, which must exist if it is `required`, and those of its drop-in directory, by name.
pub(super) fn files(path: &Path, required: bool) -> Result<Vec<File>, ConfigError> {
    let read_error = |path: &Path| {
        let path = path.to_owned();
        move |source| ConfigError::Read { path, source }
    };
    let mut files = Vec::new();
    match File::read(path) {
        Err(ConfigError::Read { source, .. })
            if !required && source.kind() == io::ErrorKind::NotFound => {}
        file => files.push(file?),
    }
    let mut directory = path.as_os_str().to_owned();
    directory.push(".d");
    let directory = PathBuf::from(directory);
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(files),
        entries => entries.map_err(read_error(&directory))?,
    };
    let mut additions = Vec::new();
    for entry in entries {
        let path = entry.map_err(read_error(&directory))?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            additions.push(path);
        }
    }
    additions.sort();
    for path in additions {
        files.push(File::read(&path)?);
    }
    Ok(files)
}

impl File {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let error = |source| ConfigError::Read {
            path: path.to_owned(),
            source,
        };
        let no_file = || ConfigError::NoFile {
            path: path.to_owned(),
            bytes_max: FILE_BYTES_MAX,
        };
        // Opening a pipe would wait for a writer.
        if !fs::metadata(path).map_err(error)?.is_file() {
            return Err(no_file());
        }
        let file = fs::File::open(path).map_err(error)?;
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1)
            .read_to_string(&mut text)
            .map_err(error)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(no_file());
        }
        Ok(Self::new(path, text))
    }

    /// A file with this text.
    pub(super) fn new(path: &Path, text: String) -> Self {
        Self {
            path: path.to_owned(),
            text,
        }
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Path and line of an offset in the text.
    pub(super) fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.path.display(), self.line(offset))
    }

    /// The value of `key`, of kind `K`.
    pub(super) fn value<K: Kind>(
        &self,
        key: &str,
        written: &Spanned<RawValue>,
    ) -> Result<K::Value, ConfigError> {
        K::read(written.get_ref())
            .map_err(|expected| self.value_error(key.to_owned(), written.span(), expected))
    }

    fn value_error(&self, key: String, span: Range<usize>, expected: String) -> ConfigError {
        ConfigError::Value {
            path: self.path.clone(),
            line: self.line(span.start),
            key,
            value: shortened(self.text.get(span).unwrap_or("?")),
            expected,
        }
    }

    /// Reads its keys.
    pub(super) fn parse<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        let document = toml::Deserializer::parse(&self.text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            ConfigError::Syntax {
                path: self.path.clone(),
                line: self.line(offset),
                message: error.message().replace('\n', ", "),
            }
        })?;
        serde_path_to_error::deserialize(document).map_err(|error| {
            // Values are wrapped to keep their spans, in fields that begin with a dollar.
            let keys = error.path().iter().filter_map(|segment| match segment {
                Segment::Map { key } if !key.starts_with('$') => Some(key.as_str()),
                _ => None,
            });
            let keys: Vec<_> = keys.map(str::to_owned).collect();
            self.key_error(&keys, &error.into_inner())
        })
    }

    fn key_error(&self, keys: &[String], error: &toml::de::Error) -> ConfigError {
        let span = error.span().unwrap_or_default();
        let message = error.message();
        // As serde words it: unknown field `a`, expected one of `b`, `c`.
        let unknown = message.strip_prefix("unknown field `");
        if let Some((written, known)) = unknown.and_then(|rest| rest.split_once("`, expected ")) {
            let mut section = keys.join(".");
            if keys.last().is_some_and(|last| last == written) {
                section = keys[..keys.len() - 1].join(".");
            }
            if !section.is_empty() {
                section.push('.');
            }
            let nearest = known
                .split('`')
                .skip(1)
                .step_by(2)
                .map(|known| (strsim::damerau_levenshtein(known, written), known))
                .filter(|(distance, known)| *distance <= 1 + known.len() / 4)
                .min_by_key(|(distance, _)| *distance);
            return ConfigError::UnknownKey {
                path: self.path.clone(),
                line: self.line(span.start),
                key: shortened(&format!("{section}{written}")),
                hint: nearest.map_or_else(String::new, |(_, known)| {
                    format!("; did you mean '{section}{known}'?")
                }),
            };
        }
        let key = keys.join(".");
        let expected = match message.rsplit_once(", expected ") {
            Some((_, "a sequence")) => format!("rules, each headed [[{key}]]"),
            Some((_, expected)) => expected.to_owned(),
            None => message.to_owned(),
        };
        self.value_error(key, span, expected)
    }

    /// The text of a line, counted from 1.
    pub(super) fn text_of(&self, line: usize) -> &str {
        let mut lines = self.text.lines();
        lines.nth(line.saturating_sub(1)).unwrap_or_default().trim()
    }

    /// The same file with this line empty; with `all_of_it` also those of the section that it begins.
    pub(super) fn without(&self, line: usize, all_of_it: bool) -> Self {
        let mut is_left_out = false;
        let lines = self.text.lines().zip(1..).map(|(text, number)| {
            let goes_on = all_of_it && !text.trim_start().starts_with('[');
            is_left_out = number == line || is_left_out && goes_on;
            if is_left_out { "" } else { text }
        });
        let lines: Vec<_> = lines.collect();
        Self::new(&self.path, lines.join("\n"))
    }

    fn line(&self, offset: usize) -> usize {
        let before = self.text.as_bytes().iter().take(offset);
        1 + before.filter(|&&byte| byte == b'\n').count()
    }
}

/// A text on one line and without control characters.
fn shortened(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown.replace(char::is_control, " ")
}
