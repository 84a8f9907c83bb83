//! Keys on the kernel's command line, each taken out once.

use std::collections::BTreeMap;

/// Why the command line is no run. Each variant names the key without its prefix.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SettingsError {
    /// A key without which there is nothing to run.
    #[error("plimsoll.{key} is missing: expected {expected}")]
    Missing {
        key: &'static str,
        expected: &'static str,
    },
    /// A value that cannot be.
    #[error("plimsoll.{key}={value}: expected {expected}")]
    Value {
        key: &'static str,
        value: String,
        expected: &'static str,
    },
    /// A duplicate key, or one that contradicts another.
    #[error("plimsoll.{key} is given twice, or with an equivalent key")]
    Twice { key: String },
    /// A key that the workload does not use.
    #[error("plimsoll.{key} is unknown, or of no use to workload {workload}")]
    Unused { key: String, workload: String },
}

/// The keys given, each taken out when it is used.
pub struct Keys<'text>(BTreeMap<&'text str, &'text str>);

impl<'text> Keys<'text> {
    /// Reads the words of a command line that begin with `plimsoll.`.
    pub fn of(text: &'text str) -> Result<Self, SettingsError> {
        let mut keys = BTreeMap::new();
        for word in text.split_ascii_whitespace() {
            let Some(word) = word.strip_prefix("plimsoll.") else {
                continue;
            };
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            if keys.insert(key, value).is_some() {
                return Err(SettingsError::Twice { key: key.into() });
            }
        }
        Ok(Self(keys))
    }

    /// Takes a value through `read`, or nothing if the key is absent.
    pub fn take<T>(
        &mut self,
        key: &'static str,
        expected: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, SettingsError> {
        let Some(value) = self.0.remove(key) else {
            return Ok(None);
        };
        let value = read(value).ok_or_else(|| SettingsError::Value {
            key,
            value: value.into(),
            expected,
        })?;
        Ok(Some(value))
    }

    /// Takes a whole number within `range`.
    pub fn number(
        &mut self,
        key: &'static str,
        expected: &'static str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<u64>, SettingsError> {
        self.take(key, expected, |value| {
            value.parse().ok().filter(|number| range.contains(number))
        })
    }

    /// Takes all keys that begin with `prefix`, without it.
    pub fn take_all(&mut self, prefix: &str) -> Vec<(String, String)> {
        let mut taken = Vec::new();
        self.0.retain(|key, value| match key.strip_prefix(prefix) {
            Some(rest) => {
                taken.push((rest.to_owned(), (*value).to_owned()));
                false
            }
            None => true,
        });
        taken
    }

    /// Takes zipf's exponent.
    pub fn alpha(&mut self) -> Result<f64, SettingsError> {
        let alpha = self.take("alpha", "a number from 0 to 16", |value| {
            value
                .parse()
                .ok()
                .filter(|alpha: &f64| (0.0..=16.0).contains(alpha))
        })?;
        Ok(alpha.unwrap_or(1.0))
    }

    /// Refuses a key that nobody took.
    pub fn none_left(self, workload: &str) -> Result<(), SettingsError> {
        match self.0.into_keys().next() {
            None => Ok(()),
            Some(key) => Err(SettingsError::Unused {
                key: key.into(),
                workload: workload.into(),
            }),
        }
    }
}
