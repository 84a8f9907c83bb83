//! Values of the configuration, each with the range that it must lie in.

use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_flow::PageSize;
use plimsoll_policy::POLICIES;
use plimsoll_policy::registry::{PRESETS, SEARCHES};
use plimsoll_protocol::decision::Mode;
use plimsoll_protocol::size::{ByteSize, Interval, PerSecond, Share};
use plimsoll_trap::{BACKENDS, BackendSetting};
use plimsoll_vm::{AllowedUsers, GroupPattern};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Maximum number of patterns of control groups.
const PATTERNS_MAX: usize = 64;

/// A value as it is written in the file.
///
/// One type for all kinds, so that the code that reads files is compiled once.
pub(super) enum RawValue {
    Text(String),
    Whole(u64),
    Float(f64),
    Flag(bool),
    List(Vec<String>),
    Other,
}

impl RawValue {
    fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for RawValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = RawValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, text: &str) -> Result<RawValue, E> {
        Ok(RawValue::Text(text.to_owned()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<RawValue, E> {
        Ok(RawValue::Whole(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<RawValue, E> {
        Ok(u64::try_from(number).map_or(RawValue::Other, RawValue::Whole))
    }

    fn visit_i128<E>(self, _: i128) -> Result<RawValue, E> {
        Ok(RawValue::Other)
    }

    fn visit_u128<E>(self, _: u128) -> Result<RawValue, E> {
        Ok(RawValue::Other)
    }

    fn visit_f64<E>(self, number: f64) -> Result<RawValue, E> {
        Ok(RawValue::Float(number))
    }

    fn visit_bool<E>(self, flag: bool) -> Result<RawValue, E> {
        Ok(RawValue::Flag(flag))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RawValue, A::Error> {
        let mut words = Vec::new();
        while let Some(word) = list.next_element()? {
            words.push(word);
        }
        Ok(RawValue::List(words))
    }

    /// A table or a date, which no key accepts.
    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<RawValue, A::Error> {
        while table.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(RawValue::Other)
    }
}

/// A kind of value.
pub(super) trait Kind {
    /// The type of the value in memory.
    type Value;

    /// The accepted values, as the end of "expected".
    fn expected() -> String;

    /// The value, if it is accepted.
    fn of(written: &RawValue) -> Option<Self::Value>;

    /// What is expected instead of a value that is not accepted.
    fn refusal(_: &RawValue) -> String {
        Self::expected()
    }

    /// The value, or what is expected instead.
    fn read(written: &RawValue) -> Result<Self::Value, String> {
        Self::of(written).ok_or_else(|| Self::refusal(written))
    }
}

/// `auto` or `none` for no value, otherwise a value of `K`.
pub(super) struct Optional<K, const AUTO: bool>(PhantomData<K>);
pub(super) type OrNone<K> = Optional<K, false>;
pub(super) type OrAuto<K> = Optional<K, true>;

impl<K, const AUTO: bool> Optional<K, AUTO> {
    const WORD: &str = if AUTO { "auto" } else { "none" };
}

impl<K: Kind, const AUTO: bool> Kind for Optional<K, AUTO> {
    type Value = Option<K::Value>;

    fn expected() -> String {
        format!("{}, or \"{}\"", K::expected(), Self::WORD)
    }

    fn of(written: &RawValue) -> Option<Self::Value> {
        match written.text() {
            Some(word) if word == Self::WORD => Some(None),
            _ => K::of(written).map(Some),
        }
    }

    fn refusal(written: &RawValue) -> String {
        format!("{}, or \"{}\"", K::refusal(written), Self::WORD)
    }
}

/// `true` or `false`.
pub(super) struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn expected() -> String {
        "true or false".into()
    }

    fn of(written: &RawValue) -> Option<bool> {
        match written {
            RawValue::Flag(flag) => Some(*flag),
            _ => None,
        }
    }
}

/// Users of this host, by name or id.
pub(super) struct Users;

impl Kind for Users {
    type Value = AllowedUsers;

    fn expected() -> String {
        "a list of users of this host, such as [\"root\", \"libvirt-qemu\", \"1001\"]".into()
    }

    fn of(written: &RawValue) -> Option<AllowedUsers> {
        match written {
            RawValue::List(names) => AllowedUsers::of_names(names).ok(),
            _ => None,
        }
    }
}

/// Patterns of paths of control groups.
pub(super) struct Patterns;

impl Kind for Patterns {
    type Value = Vec<GroupPattern>;

    fn expected() -> String {
        format!(
            "a list of paths of control groups, at most {PATTERNS_MAX}, in which * stands within a name and ** for any number \
             of names, such as [\"system.slice/*.service\", \"**/docker-*.scope\"]"
        )
    }

    fn refusal(written: &RawValue) -> String {
        let expected = Self::expected();
        let RawValue::List(patterns) = written else {
            return expected;
        };
        let reasons = patterns.iter().map(|text| GroupPattern::new(text).err());
        match (1..).zip(reasons).find_map(|(nth, why)| Some((nth, why?))) {
            Some((nth, why)) => format!("{expected}; path {nth} {why}"),
            None => format!("{expected}; there are {}", patterns.len()),
        }
    }

    fn of(written: &RawValue) -> Option<Vec<GroupPattern>> {
        match written {
            RawValue::List(patterns) if patterns.len() <= PATTERNS_MAX => {
                let patterns = patterns.iter().map(|text| GroupPattern::new(text).ok());
                patterns.collect()
            }
            _ => None,
        }
    }
}

/// The UUID of a VM.
pub(super) struct Uuid;

impl Kind for Uuid {
    type Value = String;

    fn expected() -> String {
        "a UUID, such as \"c7a5fdbd-edaf-9455-926a-d65c16db1809\"".into()
    }

    fn of(written: &RawValue) -> Option<String> {
        written.text().and_then(plimsoll_vm::parse_uuid)
    }
}

/// A whole number from `MIN` to `MAX`.
pub(super) struct WholeNumber<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Kind for WholeNumber<MIN, MAX> {
    type Value = u64;

    fn expected() -> String {
        format!("a whole number from {MIN} to {MAX}")
    }

    fn of(written: &RawValue) -> Option<u64> {
        match written {
            RawValue::Whole(number) => Some(*number).filter(|number| (MIN..=MAX).contains(number)),
            _ => None,
        }
    }
}

/// A size from `MIN` to `MAX` bytes, in whole pages of 4 KiB.
pub(super) struct Size<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Kind for Size<MIN, MAX> {
    type Value = u64;

    fn expected() -> String {
        let (min, max) = (ByteSize(MIN), ByteSize(MAX));
        format!("a size from {min} to {max} in whole pages of 4 KiB, such as \"512M\" or \"2GiB\"")
    }

    fn of(written: &RawValue) -> Option<u64> {
        let bytes = match written {
            RawValue::Text(text) => text.parse::<ByteSize>().ok()?.0,
            RawValue::Whole(bytes) => *bytes,
            _ => return None,
        };
        ((MIN..=MAX).contains(&bytes) && bytes.is_multiple_of(PageSize::FOUR_KIB.bytes()))
            .then_some(bytes)
    }
}

/// A time from `MIN_MS` to `MAX_MS` milliseconds.
pub(super) struct Time<const MIN_MS: u64, const MAX_MS: u64>;

impl<const MIN_MS: u64, const MAX_MS: u64> Kind for Time<MIN_MS, MAX_MS> {
    type Value = Duration;

    fn expected() -> String {
        let (min, max) = (in_largest_unit(MIN_MS), in_largest_unit(MAX_MS));
        let examples = [500, 30_000, 2 * 3_600_000, 48 * 3_600_000];
        let accepted = examples
            .into_iter()
            .filter(|ms| (MIN_MS..=MAX_MS).contains(ms));
        let accepted = accepted
            .take(2)
            .map(|ms| format!("\"{}\"", in_largest_unit(ms)));
        let accepted: Vec<String> = accepted.collect();
        format!(
            "a time from {min} to {max}, such as {}",
            accepted.join(" or ")
        )
    }

    fn of(written: &RawValue) -> Option<Duration> {
        let time = written.text()?.parse::<Interval>().ok()?.get();
        let range = Duration::from_millis(MIN_MS)..=Duration::from_millis(MAX_MS);
        range.contains(&time).then_some(time)
    }
}

/// A wait of a VM, from 1 us to 10 s, in ms.
pub(super) struct Wait;

impl Kind for Wait {
    type Value = f64;

    fn expected() -> String {
        "a time from 1us to 10s, such as \"200us\" or \"1ms\"".to_owned()
    }

    fn of(written: &RawValue) -> Option<f64> {
        let time = written.text()?.parse::<Interval>().ok()?.get();
        let range = Duration::from_micros(1)..=Duration::from_secs(10);
        range.contains(&time).then_some(time.as_secs_f64() * 1e3)
    }
}

fn in_largest_unit(millis: u64) -> String {
    let units = [(3_600_000, "h"), (60_000, "m"), (1000, "s")];
    let unit = units
        .into_iter()
        .find(|(unit, _)| millis.is_multiple_of(*unit));
    let (unit, name) = unit.unwrap_or((1, "ms"));
    format!("{}{name}", millis / unit)
}

/// A range of shares: how it is described, and whether a share lies in it.
type ShareRange = (&'static str, fn(f64) -> bool);

const SHARE_RANGES: [ShareRange; 5] = [
    ("from 0 to 1", |share| share <= 1.0),
    ("of 0 or more, below 1", |share| share < 1.0),
    ("above 0 and below 1", |share| share > 0.0 && share < 1.0),
    ("above 0 and at most 1", |share| share > 0.0 && share <= 1.0),
    ("from 0% to 1000%", |share| share <= 10.0),
];
pub(super) const FROM_0_TO_1: usize = 0;
pub(super) const BELOW_1: usize = 1;
pub(super) const ABOVE_0_BELOW_1: usize = 2;
pub(super) const ABOVE_0_TO_1: usize = 3;
pub(super) const FROM_0_TO_10: usize = 4;

/// A share of 1 within one of the ranges above.
pub(super) struct ShareIn<const RANGE: usize>;

impl<const RANGE: usize> Kind for ShareIn<RANGE> {
    type Value = f64;

    fn expected() -> String {
        format!("a share {}, such as \"5%\" or 0.05", SHARE_RANGES[RANGE].0)
    }

    fn of(written: &RawValue) -> Option<f64> {
        let share: Share = match written {
            RawValue::Text(text) => text.parse().ok()?,
            RawValue::Whole(number) => number.to_string().parse().ok()?,
            RawValue::Float(number) => number.to_string().parse().ok()?,
            _ => return None,
        };
        Some(share.get()).filter(|&share| SHARE_RANGES[RANGE].1(share))
    }
}

/// A number of events per second, up to 10 million.
pub(super) struct EventRate;

impl Kind for EventRate {
    type Value = f64;

    fn expected() -> String {
        "a number per second from 0 to 10000000, such as \"20/s\"".to_owned()
    }

    fn of(written: &RawValue) -> Option<f64> {
        let rate = written.text()?.parse::<PerSecond>().ok()?.get();
        Some(rate).filter(|rate| *rate <= 1e7)
    }
}

/// A text that is not empty.
pub(super) struct Text;

impl Kind for Text {
    type Value = String;

    fn expected() -> String {
        "a text that is not empty".into()
    }

    fn of(written: &RawValue) -> Option<String> {
        let text = written.text()?;
        (!text.is_empty() && !text.contains('\0')).then(|| text.to_owned())
    }
}

/// An absolute path of at most `BYTES_MAX` bytes.
pub(super) struct AbsolutePath<const BYTES_MAX: usize>;
pub(super) type FilePath = AbsolutePath<4095>;
/// Sockets' paths are shorter: sockaddr_un.
pub(super) type SocketPath = AbsolutePath<107>;

impl<const BYTES_MAX: usize> Kind for AbsolutePath<BYTES_MAX> {
    type Value = PathBuf;

    fn expected() -> String {
        format!("a path that begins with / and has at most {BYTES_MAX} bytes")
    }

    fn of(written: &RawValue) -> Option<PathBuf> {
        let path = Text::of(written).filter(|path| path.len() <= BYTES_MAX)?;
        Some(PathBuf::from(path)).filter(|path| path.is_absolute())
    }
}

/// An address and a port.
pub(super) struct Address;

impl Kind for Address {
    type Value = SocketAddr;

    fn expected() -> String {
        "address and port, such as \"127.0.0.1:7373\" or \"[::1]:7373\"".into()
    }

    fn of(written: &RawValue) -> Option<SocketAddr> {
        written.text()?.parse().ok()
    }
}

/// A value that is written as one of a few words.
pub(super) trait Words {
    type Value;

    fn words() -> Vec<(&'static str, Self::Value)>;
}

/// One of the words of `W`.
pub(super) struct Word<W>(PhantomData<W>);

impl<W: Words> Kind for Word<W> {
    type Value = W::Value;

    fn expected() -> String {
        let words = W::words()
            .into_iter()
            .map(|(word, _)| format!("\"{word}\""));
        words.collect::<Vec<_>>().join(", ")
    }

    fn of(written: &RawValue) -> Option<W::Value> {
        let text = written.text()?;
        let mut words = W::words().into_iter();
        words
            .find(|(word, _)| *word == text)
            .map(|(_, value)| value)
    }
}

impl Words for Mode {
    type Value = Self;

    fn words() -> Vec<(&'static str, Self)> {
        vec![
            ("observe", Self::Observe),
            ("advise", Self::Advise),
            ("act", Self::Act),
        ]
    }
}

impl Words for BackendSetting {
    type Value = Self;

    /// The backends whose curves are suitable for decisions, and the choice among them.
    fn words() -> Vec<(&'static str, Self)> {
        let rows = BACKENDS
            .iter()
            .filter(|row| row.gives_curve() && row.observes_vms());
        let methods = rows.map(|row| Self::Method(row.method));
        let settings = methods.chain([Self::Auto]);
        settings.map(|setting| (setting.name(), setting)).collect()
    }
}

/// Whether curves come from caches; otherwise from traced RAM.
pub(super) struct CurveOrigin;

impl Words for CurveOrigin {
    type Value = bool;

    fn words() -> Vec<(&'static str, bool)> {
        vec![("traps", false), ("caches", true)]
    }
}

/// Whether VMs get their memory back when the daemon ends.
pub(super) struct AtExit;

impl Words for AtExit {
    type Value = bool;

    fn words() -> Vec<(&'static str, bool)> {
        vec![("give-back", true), ("keep", false)]
    }
}

/// The name of a policy or preset of the registry.
pub(super) struct PolicyName;

impl Words for PolicyName {
    type Value = &'static str;

    fn words() -> Vec<(&'static str, &'static str)> {
        let policies = POLICIES.iter().map(|row| row.name);
        let names = policies.chain(PRESETS.iter().map(|row| row.name));
        names.map(|name| (name, name)).collect()
    }
}

/// The name of a search of the registry.
pub(super) struct SearchName;

impl Words for SearchName {
    type Value = &'static str;

    fn words() -> Vec<(&'static str, &'static str)> {
        SEARCHES.iter().map(|row| (row.name, row.name)).collect()
    }
}
