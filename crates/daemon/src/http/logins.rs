//! Requests and connections refused for want of credentials: a count for the metrics, and the addresses in the log, where
//! they take at most a line a minute.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time;
use tracing::warn;

/// Shortest time from one line in the log to the next.
const INTERVAL: Duration = Duration::from_mins(1);
/// Maximum number of addresses in a line.
const ADDRESSES_MAX: usize = 16;

/// Failed logins since the server's start.
#[derive(Debug, Default)]
pub(super) struct FailedLogins {
    counts: Mutex<Counts>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Counts {
    total: u64,
    /// Those that are not in the log yet, by address; of `None` are those of further addresses.
    new: BTreeMap<Option<IpAddr>, u64>,
}

impl FailedLogins {
    pub fn add(&self, address: Option<IpAddr>) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.total += 1;
        let has_room = counts.new.len() < ADDRESSES_MAX || counts.new.contains_key(&address);
        let place = address.filter(|_| has_room);
        *counts.new.entry(place).or_default() += 1;
        self.news.notify_one();
    }

    pub fn total(&self) -> u64 {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.total
    }

    /// Logs them as they come.
    pub async fn log(&self) {
        loop {
            self.news.notified().await;
            if let Some(line) = self.line() {
                warn!("{line}");
            }
            time::sleep(INTERVAL).await;
        }
    }

    /// A line with those that are not in the log yet.
    fn line(&self) -> Option<String> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let new = std::mem::take(&mut counts.new);
        let mut line = format!("failed logins: {}", new.values().sum::<u64>());
        // In this order `None` is the last one.
        for (number, (address, count)) in new.iter().rev().enumerate() {
            line += if number == 0 { "; from " } else { ", " };
            let _ = match address {
                Some(address) => write!(line, "{address} ({count})"),
                None => write!(line, "others ({count})"),
            };
        }
        (!new.is_empty()).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_addresses_with_their_counts_and_a_bound() {
        let logins = FailedLogins::default();
        assert_eq!(logins.line(), None);
        let address = |last: u8| Some(IpAddr::from([10, 0, 0, last]));
        for last in [2, 1, 2] {
            logins.add(address(last));
        }
        let line = logins.line().unwrap();
        assert_eq!(line, "failed logins: 3; from 10.0.0.2 (2), 10.0.0.1 (1)");
        assert_eq!(logins.line(), None);
        for last in 0..=255 {
            logins.add(address(last));
        }
        let line = logins.line().unwrap();
        assert!(line.starts_with("failed logins: 256; from "), "{line}");
        assert!(line.ends_with(", others (240)"), "{line}");
        assert!(line.len() < 1000);
        assert_eq!(logins.total(), 259);
    }
}
