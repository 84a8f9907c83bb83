//! What is said of one VM on the command line, and shares that may be nothing or more than the whole.

use std::num::NonZeroU32;
use std::str::FromStr;

use crate::size::ByteSize;

/// A text that is not what an option takes; it names the text and says what is read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum OptionError {
    /// Not a share.
    #[error("'{0}' is not a share: write a number that is not negative, such as 5%, 0.05 or 0")]
    Share(String),
    /// Not of the form.
    #[error("'{0}' is not of the form NAME:KEY=VALUE,KEY=VALUE")]
    Form(String),
    /// Not a key.
    #[error("'{0}' is not one of min, max, shares, max-loss, baseline, current and working-set")]
    Key(String),
    /// A key twice.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// Not the key's value.
    #[error("{key}: {why}")]
    Value {
        /// The key.
        key: &'static str,
        /// What is wrong with the value.
        why: String,
    },
}

/// A share that is not negative: 0.05 of `5%`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Share(pub(super) f64);

impl FromStr for Share {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let (number, whole) = match text.strip_suffix('%') {
            Some(percent) => (percent, 100.0),
            None => (text, 1.0),
        };
        let share = number.trim().parse::<f64>().map(|share| share / whole);
        match share {
            Ok(share) if share >= 0.0 && share.is_finite() => Ok(Self(share)),
            _ => Err(OptionError::Share(text.to_owned())),
        }
    }
}

/// `--vm NAME:KEY=VALUE,...`: what holds for one VM.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct VmOption {
    /// The VM.
    pub(super) vm: String,
    /// It never gets less.
    pub(super) min: Option<ByteSize>,
    /// It never gets more.
    pub(super) max: Option<ByteSize>,
    /// Its proportional right.
    pub(super) shares: Option<NonZeroU32>,
    /// Most rise of its misses.
    pub(super) max_loss: Option<Share>,
    /// What its misses are measured by.
    pub(super) baseline: Option<ByteSize>,
    /// What it has.
    pub(super) current: Option<ByteSize>,
    /// What it uses by an estimate of its own.
    pub(super) working_set: Option<ByteSize>,
}

impl FromStr for VmOption {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let form = || OptionError::Form(text.to_owned());
        // A name may have colons; its keys have none.
        let (vm, keys) = text.rsplit_once(':').ok_or_else(form)?;
        if vm.is_empty() {
            return Err(form());
        }
        let mut option = Self {
            vm: vm.to_owned(),
            ..Self::default()
        };
        for pair in keys.split(',') {
            let (key, value) = pair.split_once('=').ok_or_else(form)?;
            match key.trim() {
                "min" => set("min", value, &mut option.min)?,
                "max" => set("max", value, &mut option.max)?,
                "shares" => set("shares", value, &mut option.shares)?,
                "max-loss" => set("max-loss", value, &mut option.max_loss)?,
                "baseline" => set("baseline", value, &mut option.baseline)?,
                "current" => set("current", value, &mut option.current)?,
                "working-set" => set("working-set", value, &mut option.working_set)?,
                key => return Err(OptionError::Key(key.to_owned())),
            }
        }
        Ok(option)
    }
}

fn set<T: FromStr<Err: ToString>>(
    key: &'static str,
    text: &str,
    place: &mut Option<T>,
) -> Result<(), OptionError> {
    let value = text
        .trim()
        .parse()
        .map_err(|error: T::Err| OptionError::Value {
            key,
            why: error.to_string(),
        })?;
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(OptionError::Twice(key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_as_percent_and_numbers() {
        let known = [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("250 %", 2.5)];
        for (text, share) in known {
            assert_eq!(text.parse(), Ok(Share(share)), "{text}");
        }
        for text in ["", "%", "-1%", "nan", "inf", "1e400", "5 percent"] {
            let error = text.parse::<Share>().unwrap_err().to_string();
            assert!(error.contains("not a share"), "{text}: {error}");
        }
    }

    #[test]
    fn what_holds_for_a_vm_is_read_key_by_key() {
        let text =
            "a:b:min=1M,max=2G,shares=3,max-loss=25%,baseline=512M,current=600M,working-set=9M";
        let size = |mib: u64| Some(ByteSize(mib << 20));
        let option = VmOption {
            vm: "a:b".to_owned(),
            min: size(1),
            max: size(2048),
            shares: NonZeroU32::new(3),
            max_loss: Some(Share(0.25)),
            baseline: size(512),
            current: size(600),
            working_set: size(9),
        };
        assert_eq!(text.parse(), Ok(option));
        for (text, said) in [
            ("web", "not of the form"),
            (":min=1M", "not of the form"),
            ("web:", "not of the form"),
            ("web:min", "not of the form"),
            ("web:mni=1M", "'mni' is none of min, max"),
            ("web:min=1M,min=2M", "min is given twice"),
            ("web:min=lots", "min: 'lots' is not a size"),
            ("web:shares=0", "shares: "),
            ("web:max-loss=-5%", "max-loss: '-5%' is not a share"),
        ] {
            let error = text.parse::<VmOption>().unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
