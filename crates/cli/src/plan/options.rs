//! The settings of one VM on the command line.

use std::num::NonZeroU32;
use std::str::FromStr;

use plimsoll_protocol::size::{ByteSize, PerSecond, Share};

/// Why a text is no `--vm` option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum OptionError {
    /// Another form.
    #[error("'{0}' is not of the form NAME:KEY=VALUE,KEY=VALUE")]
    Form(String),
    /// An unknown key.
    #[error(
        "'{0}' is not one of min, max, shares, max-loss, max-misses, baseline, current and working-set"
    )]
    Key(String),
    /// A key twice.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// A value that the key does not accept.
    #[error("{key}: {why}")]
    Value {
        /// The key.
        key: &'static str,
        /// What is wrong with the value.
        why: String,
    },
}

/// `--vm NAME:KEY=VALUE,...`: the settings of one VM.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct VmOption {
    /// The VM.
    pub(super) vm: String,
    /// Minimum size.
    pub(super) min: Option<ByteSize>,
    /// Maximum size.
    pub(super) max: Option<ByteSize>,
    /// Weight in proportional sharing.
    pub(super) shares: Option<NonZeroU32>,
    /// Bound on the rise of its misses.
    pub(super) max_loss: Option<Share>,
    /// Bound on its misses per second.
    pub(super) max_misses: Option<PerSecond>,
    /// Size against which losses are measured.
    pub(super) baseline: Option<ByteSize>,
    /// Present size.
    pub(super) current: Option<ByteSize>,
    /// Sampled working set.
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
                "max-misses" => set("max-misses", value, &mut option.max_misses)?,
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
    fn what_holds_for_a_vm_is_read_key_by_key() {
        let text = "a:b:min=1M,max=2G,shares=3,max-loss=25%,max-misses=20/s,baseline=512M,current=600M,working-set=9M";
        let size = |mib: u64| Some(ByteSize(mib << 20));
        let option = VmOption {
            vm: "a:b".to_owned(),
            min: size(1),
            max: size(2048),
            shares: NonZeroU32::new(3),
            max_loss: "25%".parse().ok(),
            max_misses: "20/s".parse().ok(),
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
            ("web:mni=1M", "'mni' is not one of min, max"),
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
