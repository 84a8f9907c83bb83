//! Times of day and dates in the local time zone.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// A local time, `2026-11-22 11:31:55`; `-` if no calendar has it.
pub fn local_time(unix_ms: u64) -> String {
    formatted(unix_ms, "%Y-%m-%d %H:%M:%S")
}

/// The local time of day, `11:31:55`; `-` if no calendar has it.
pub fn time_of_day(unix_ms: u64) -> String {
    formatted(unix_ms, "%H:%M:%S")
}

fn formatted(unix_ms: u64, format: &str) -> String {
    let time = i64::try_from(unix_ms)
        .ok()
        .and_then(|ms| Timestamp::from_millisecond(ms).ok());
    time.map_or_else(
        || "-".to_owned(),
        |time| {
            let local = time.to_zoned(TimeZone::system());
            local.strftime(format).to_string()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_beyond_all_calendars_is_not_known() {
        assert_eq!(local_time(u64::MAX), "-");
        assert_eq!(
            local_time(1_795_347_115_000).len(),
            "2026-11-22 11:31:55".len()
        );
    }
}
