//! TOML files, their tables and values, each with the place where it is written.

use std::fs;
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_protocol::size::{ByteSize, Interval, Share};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::ConfigError;

/// Most bytes of a file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Most letters of a value that an error repeats.
const SHOWN: usize = 60;

/// A file's text.
pub(super) struct File {
    path: PathBuf,
    text: String,
}

/// The file at `path`, which must exist if it was `asked` for, and those of its folder of additions, by name.
pub(super) fn files(path: &Path, asked: bool) -> Result<Vec<File>, ConfigError> {
    let read_error = |path: &Path| {
        let path = path.to_owned();
        move |source| ConfigError::Read { path, source }
    };
    let mut files = Vec::new();
    match File::read(path) {
        Err(ConfigError::Read { source, .. })
            if !asked && source.kind() == io::ErrorKind::NotFound => {}
        file => files.push(file?),
    }
    let mut folder = path.as_os_str().to_owned();
    folder.push(".d");
    let folder = PathBuf::from(folder);
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(files),
        entries => entries.map_err(read_error(&folder))?,
    };
    let mut additions = Vec::new();
    for entry in entries {
        let path = entry.map_err(read_error(&folder))?.path();
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
        // A pipe would wait for a writer when opened.
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

    /// A file of this text.
    pub(super) fn new(path: &Path, text: String) -> Self {
        Self {
            path: path.to_owned(),
            text,
        }
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads it as TOML.
    pub(super) fn parse(&self) -> Result<DeTable<'_>, ConfigError> {
        DeTable::parse(&self.text)
            .map(Spanned::into_inner)
            .map_err(|error| ConfigError::Syntax {
                path: self.path.clone(),
                line: self.line(error.span().map_or(0, |span| span.start)),
                message: error.message().replace('\n', ", "),
            })
    }

    fn line(&self, offset: usize) -> usize {
        let before = self.text.as_bytes().iter().take(offset);
        1 + before.filter(|&&byte| byte == b'\n').count()
    }
}

/// A table of a file.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    file: &'a File,
    /// What stands before its keys in a message: empty, `trace.` or `vm.`.
    prefix: &'static str,
    /// Where it begins in the file.
    offset: usize,
    keys: &'a DeTable<'a>,
}

impl<'a> Table<'a> {
    pub(super) fn whole(file: &'a File, keys: &'a DeTable<'a>) -> Self {
        Self {
            file,
            prefix: "",
            offset: 0,
            keys,
        }
    }

    /// File and line.
    pub(super) fn place(&self) -> String {
        let line = self.file.line(self.offset);
        format!("{}:{line}", self.file.path.display())
    }

    /// Refuses keys that are not `known`.
    pub(super) fn only(&self, known: &[&str]) -> Result<(), ConfigError> {
        let unknown = self
            .keys
            .keys()
            .filter(|key| !known.contains(&key.get_ref().as_ref()))
            .min_by_key(|key| key.span().start);
        let Some(key) = unknown else { return Ok(()) };
        let written = key.get_ref();
        let nearest = known
            .iter()
            .map(|known| (strsim::damerau_levenshtein(known, written), known))
            .filter(|(distance, known)| *distance <= 1 + known.len() / 4)
            .min_by_key(|(distance, _)| *distance);
        let prefix = self.prefix;
        Err(ConfigError::UnknownKey {
            path: self.file.path.clone(),
            line: self.file.line(key.span().start),
            key: shortened(&format!("{prefix}{written}")),
            hint: nearest.map_or_else(String::new, |(_, known)| {
                format!("; did you mean '{prefix}{known}'?")
            }),
        })
    }

    /// The value of `key`, if it is there.
    pub(super) fn get(&self, key: &'static str) -> Option<Value<'a>> {
        self.keys.get(key).map(|value| Value {
            file: self.file,
            prefix: self.prefix,
            key,
            value,
        })
    }
}

/// A value, and where it stands.
#[derive(Clone, Copy)]
pub(super) struct Value<'a> {
    file: &'a File,
    prefix: &'static str,
    key: &'static str,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Value<'a> {
    /// File and line.
    pub(super) fn place(&self) -> String {
        let line = self.file.line(self.value.span().start);
        format!("{}:{line}", self.file.path.display())
    }

    /// An error that says what is `expected`.
    pub(super) fn refuse(&self, expected: impl Into<String>) -> ConfigError {
        let written = self.file.text.get(self.value.span()).unwrap_or("?");
        ConfigError::Value {
            path: self.file.path.clone(),
            line: self.file.line(self.value.span().start),
            key: format!("{}{}", self.prefix, self.key),
            value: shortened(written),
            expected: expected.into(),
        }
    }

    /// A table; its keys are called `prefix` and their name.
    pub(super) fn table(&self, prefix: &'static str) -> Result<Table<'a>, ConfigError> {
        match self.value.get_ref() {
            DeValue::Table(keys) => Ok(Table {
                file: self.file,
                prefix,
                offset: self.value.span().start,
                keys,
            }),
            _ => Err(self.refuse(format!("a section: write [{}]", self.key))),
        }
    }

    /// Tables, each headed by the key in double brackets.
    pub(super) fn tables(&self, prefix: &'static str) -> Result<Vec<Table<'a>>, ConfigError> {
        let expected = || self.refuse(format!("rules, each headed [[{}]]", self.key));
        let DeValue::Array(items) = self.value.get_ref() else {
            return Err(expected());
        };
        let tables = items.iter().map(|item| match item.get_ref() {
            DeValue::Table(keys) => Ok(Table {
                file: self.file,
                prefix,
                offset: item.span().start,
                keys,
            }),
            _ => Err(expected()),
        });
        tables.collect()
    }

    /// Whether it is the text `word`.
    pub(super) fn is(&self, word: &str) -> bool {
        self.value.get_ref().as_str() == Some(word)
    }

    /// `None` for `"none"`, else what `read` makes of it.
    pub(super) fn or_none<T>(
        &self,
        read: impl FnOnce(&Self) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        if self.is("none") {
            return Ok(None);
        }
        read(self).map(Some)
    }

    pub(super) fn bool(&self) -> Result<bool, ConfigError> {
        let value = self.value.get_ref().as_bool();
        value.ok_or_else(|| self.refuse("true or false"))
    }

    pub(super) fn text(&self) -> Result<String, ConfigError> {
        match self.value.get_ref().as_str() {
            Some(text) if !text.is_empty() && !text.contains('\0') => Ok(text.to_owned()),
            _ => Err(self.refuse("a text that is not empty")),
        }
    }

    pub(super) fn path(&self) -> Result<PathBuf, ConfigError> {
        let path = self.text().map(PathBuf::from);
        path.ok()
            .filter(|path| path.is_absolute())
            .ok_or_else(|| self.refuse("a path that begins with /"))
    }

    /// A path that a socket can have.
    pub(super) fn socket(&self) -> Result<PathBuf, ConfigError> {
        let path = self.path()?;
        if path.as_os_str().len() > 107 {
            return Err(self.refuse("a path of at most 107 bytes, as sockets have"));
        }
        Ok(path)
    }

    /// One of the words in `choices`.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let chosen = choices.iter().find(|(word, _)| self.is(word));
        chosen.map(|(_, choice)| *choice).ok_or_else(|| {
            let words: Vec<_> = choices
                .iter()
                .map(|(word, _)| format!("\"{word}\""))
                .collect();
            self.refuse(words.join(", "))
        })
    }

    pub(super) fn integer(&self, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        let read = self.whole_number().filter(|number| range.contains(number));
        read.ok_or_else(|| {
            let (least, most) = range.into_inner();
            self.refuse(format!("a whole number from {least} to {most}"))
        })
    }

    /// A size in bytes, a multiple of 4 KiB.
    pub(super) fn size(&self, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        let text = self.value.get_ref().as_str();
        let read = match text {
            Some(text) => text.parse().ok().map(|ByteSize(bytes)| bytes),
            None => self.whole_number(),
        };
        let fits = |bytes: &u64| range.contains(bytes) && bytes.is_multiple_of(4096);
        read.filter(fits).ok_or_else(|| {
            let (least, most) = (ByteSize(*range.start()), ByteSize(*range.end()));
            self.refuse(format!(
                "a size from {least} to {most} in whole pages of 4 KiB, such as \"512M\" or \"2GiB\""
            ))
        })
    }

    pub(super) fn time(&self, range: RangeInclusive<Duration>) -> Result<Duration, ConfigError> {
        let read: Option<Interval> = self
            .value
            .get_ref()
            .as_str()
            .and_then(|text| text.parse().ok());
        let read = read.map(Interval::get).filter(|time| range.contains(time));
        read.ok_or_else(|| {
            self.refuse(format!(
                "a time from {} to {}, such as \"500ms\", \"30s\", \"5m\" or \"2h\"",
                spoken(*range.start()),
                spoken(*range.end())
            ))
        })
    }

    /// A share of 1 for which `fits` holds; `range` says which those are.
    pub(super) fn share(
        &self,
        range: &str,
        fits: impl FnOnce(&f64) -> bool,
    ) -> Result<f64, ConfigError> {
        let read: Option<Share> = match self.value.get_ref() {
            DeValue::String(text) => text.parse().ok(),
            DeValue::Float(number) => number.as_str().parse().ok(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
            _ => None,
        };
        let read = read.map(Share::get).filter(fits);
        read.ok_or_else(|| self.refuse(format!("a share {range}, such as \"5%\" or 0.05")))
    }

    fn whole_number(&self) -> Option<u64> {
        let number = self.value.get_ref().as_integer()?;
        u64::from_str_radix(number.as_str(), number.radix()).ok()
    }
}

/// A time in its largest whole unit.
fn spoken(time: Duration) -> String {
    let millis = time.as_millis();
    let units = [(3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
    let unit = units
        .into_iter()
        .find(|(unit, _)| millis.is_multiple_of(*unit));
    let (unit, name) = unit.unwrap_or((1, "ms"));
    format!("{}{name}", millis / unit)
}

/// A written text on one line and without what a terminal would obey.
fn shortened(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown.replace(char::is_control, " ")
}
