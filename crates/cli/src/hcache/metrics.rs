//! A [`Report`] as OpenMetrics text, for Prometheus and its kin.
//!
//! Names begin with `plimsoll_hcache_`, are in base units, and end in `_total` where they count; what is a client's
//! has the labels `client` (its number) and `name`.

use std::fmt::{self, Write};

use plimsoll_hcache::Counters;

use super::report::{ClientReport, Report};
use crate::openmetrics::{self, Escaped};

/// A counter of the store and of each client.
type Counter = (&'static str, &'static str, fn(&Counters) -> u64);
/// A gauge of each client.
type ClientGauge = (&'static str, &'static str, fn(&ClientReport) -> Option<f64>);

const COUNTERS: [Counter; 12] = [
    ("puts", "Pages put.", |c| c.puts),
    ("puts_replaced", "Puts that replaced a page.", |c| {
        c.puts_replaced
    }),
    ("puts_refused", "Puts that were refused.", |c| {
        c.puts_refused
    }),
    ("gets", "Pages asked for.", |c| c.gets),
    ("hits", "Gets that found their page.", |c| c.hits),
    (
        "flushes",
        "Flushes of pages, ranges, objects and pools.",
        |c| c.flushes,
    ),
    ("flushed_pages", "Pages dropped by flushes.", |c| {
        c.flushed_pages
    }),
    ("evicted_pages", "Pages dropped for others.", |c| {
        c.evicted_pages
    }),
    ("compressed_pages", "Pages compressed.", |c| {
        c.compressed_pages
    }),
    ("decompressed_pages", "Pages decompressed.", |c| {
        c.decompressed_pages
    }),
    (
        "incompressible_pages",
        "Pages that did not shrink and stayed raw.",
        |c| c.incompressible_pages,
    ),
    (
        "shared_pages",
        "Puts whose content was there already.",
        |c| c.shared_pages,
    ),
];

const CLIENT_GAUGES: [ClientGauge; 9] = [
    (
        "weight",
        "Share of the capacity relative to others'.",
        |c| Some(c.weight.into()),
    ),
    (
        "floor_bytes",
        "What others cannot take from the client.",
        |c| Some(c.floor_bytes as f64),
    ),
    (
        "ceiling_bytes",
        "Most the client may hold, if limited.",
        |c| c.ceiling_bytes.map(|bytes| bytes as f64),
    ),
    (
        "target_bytes",
        "What the scheduler allots to the client.",
        |c| Some(c.target_bytes as f64),
    ),
    ("used_bytes", "What the client's pages take.", |c| {
        Some(c.used_bytes as f64)
    }),
    ("pages", "Pages charged to the client.", |c| {
        Some(c.pages as f64)
    }),
    ("pools", "Pools charged to the client.", |c| {
        Some(c.pools.len() as f64)
    }),
    ("age_seconds", "How long ago the client came.", |c| {
        Some(c.age_seconds)
    }),
    (
        "idle_seconds",
        "How long ago the client last put or got.",
        |c| Some(c.idle_seconds),
    ),
];

/// Writes the report as OpenMetrics text.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut text = String::new();
    // A string takes whatever is written to it.
    let _ = write(report, &mut text);
    text
}

fn write(report: &Report, text: &mut String) -> fmt::Result {
    let store = &report.store;
    let gauges = [
        (
            "capacity_bytes",
            "Bound of the store.",
            store.capacity_bytes,
        ),
        (
            "max_capacity_bytes",
            "What the store can be resized to.",
            store.max_capacity_bytes,
        ),
        (
            "used_bytes",
            "Memory held, metadata included.",
            store.used_bytes,
        ),
        ("metadata_bytes", "Of it metadata.", store.metadata_bytes),
        (
            "compressed_frame_bytes",
            "Memory of compressed pages.",
            store.compressed_frame_bytes,
        ),
        (
            "compressed_raw_bytes",
            "What compressed pages would take raw.",
            store.compressed_raw_bytes,
        ),
        ("pages", "Pages in the store.", store.pages),
        ("dirty_pages", "Of them dirty.", store.dirty_pages),
        (
            "deduplicated_pages",
            "Pages without a frame of their own.",
            store.deduplicated_pages,
        ),
        (
            "clients",
            "Clients of the store.",
            report.clients.len() as u64,
        ),
        ("workers", "Threads that serve.", store.workers),
    ];
    for (name, help, value) in gauges {
        head(text, name, "gauge", help)?;
        writeln!(text, "{PREFIX}{name} {value}")?;
    }
    head(
        text,
        "age_seconds",
        "gauge",
        "How long ago the store began.",
    )?;
    writeln!(text, "{PREFIX}age_seconds {}", store.age_seconds)?;
    for (name, help, count) in COUNTERS {
        head(text, name, "counter", help)?;
        writeln!(text, "{PREFIX}{name}_total {}", count(&store.counters))?;
    }
    for (name, value) in &report.server {
        let name = format!("server_{name}");
        // What is an amount now has its unit; the rest counts.
        if name.ends_with("_bytes") {
            head(text, &name, "gauge", "Held by the server beside the store.")?;
            writeln!(text, "{PREFIX}{name} {value}")?;
        } else {
            head(text, &name, "counter", "Counted by the server.")?;
            writeln!(text, "{PREFIX}{name}_total {value}")?;
        }
    }
    if let Some(ghosts) = &report.ghosts {
        let name = "ghosts_memory_bytes";
        head(text, name, "gauge", "Memory set aside for curves.")?;
        writeln!(text, "{PREFIX}{name} {}", ghosts.memory_bytes)?;
        let name = "ghosts_unseen_events";
        let help = "Events of clients for whose curve there was no memory.";
        head(text, name, "counter", help)?;
        writeln!(text, "{PREFIX}{name}_total {}", ghosts.unseen_events)?;
    }
    for (name, help, value) in CLIENT_GAUGES {
        head(text, &format!("client_{name}"), "gauge", help)?;
        for client in &report.clients {
            if let Some(value) = value(client) {
                writeln!(text, "{PREFIX}client_{name}{{{}}} {value}", Labels(client))?;
            }
        }
    }
    for (name, help, count) in COUNTERS {
        head(text, &format!("client_{name}"), "counter", help)?;
        for client in &report.clients {
            let count = count(&client.counters);
            writeln!(
                text,
                "{PREFIX}client_{name}_total{{{}}} {count}",
                Labels(client)
            )?;
        }
    }
    let name = "client_expected_hit_ratio";
    let help = "Share of gets that would hit at that share of the client's pages.";
    head(text, name, "gauge", help)?;
    for client in &report.clients {
        for expected in client.expected.iter().flatten() {
            writeln!(
                text,
                "{PREFIX}{name}{{{},capacity_ratio=\"{}\"}} {}",
                Labels(client),
                expected.ratio,
                expected.hit_ratio
            )?;
        }
    }
    text.push_str("# EOF\n");
    Ok(())
}

const PREFIX: &str = "plimsoll_hcache_";

fn head(text: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    openmetrics::head(text, PREFIX, name, kind, help)
}

/// A client's labels. Its name is its own choice.
struct Labels<'a>(&'a ClientReport);

impl fmt::Display for Labels<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClientReport { id, name, .. } = self.0;
        write!(f, "client=\"{id}\",name=\"{}\"", Escaped(name))
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::example;
    use super::*;

    #[test]
    fn a_clients_name_cannot_leave_its_label() {
        let text = text(&example());
        let line = "plimsoll_hcache_client_puts_total{client=\"1\",name=\"we\\\"b\\\\\\n\u{1b}[2J of a long name\"} 2345678\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn every_sample_follows_its_family() {
        let text = text(&example());
        let mut family = "";
        let mut families = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap();
                assert!(!families.contains(&family), "{family} twice");
                families.push(family);
            } else if !line.starts_with('#') {
                let name = line.split(['{', ' ']).next().unwrap();
                assert!(
                    name.strip_suffix("_total").unwrap_or(name) == family,
                    "{line}"
                );
            }
        }
        assert!(families.len() > 45);
        assert!(text.contains("\nplimsoll_hcache_capacity_bytes 536870912\n"));
        assert!(text.contains("\nplimsoll_hcache_server_connections_total 3\n"));
        assert!(text.contains("name=\"idle\"} 0\n"));
        assert!(text.contains(",capacity_ratio=\"0.75\"} 0.669\n"));
        assert!(
            !text.contains("client_ceiling_bytes{"),
            "no limit is no sample"
        );
        assert!(text.ends_with("\n# EOF\n"));
    }
}
