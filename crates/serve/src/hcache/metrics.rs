//! A [`Report`] as OpenMetrics text, for Prometheus and its kin.
//!
//! Names begin with `plimsoll_hcache_`, are in base units, and end in `_total` where they count; what is a client's
//! has the labels `client` (its number) and `name`, what is a shared pool's the label `pool`.

use std::fmt::Display;

use plimsoll_hcache::Counters;
use plimsoll_protocol::families;
use plimsoll_protocol::openmetrics::{Exposition, Kind};

use super::report::{ClientReport, Report, SharedPoolReport};

/// A counter of the store and of each client: name, help, value.
type Counter = (&'static str, &'static str, fn(&Counters) -> u64);
/// A gauge of the store: name, help, value.
type StoreGauge = (&'static str, &'static str, fn(&Report) -> u64);
/// A gauge of each client: name, help, value.
type ClientGauge = (&'static str, &'static str, fn(&ClientReport) -> Option<f64>);
/// A gauge of each shared pool: name, help, value.
type SharedPoolGauge = (&'static str, &'static str, fn(&SharedPoolReport) -> u64);

const COUNTERS: &[Counter] = families! { c =>
    puts: c.puts, "Pages put.";
    puts_replaced: c.puts_replaced, "Puts that replaced a page.";
    puts_refused: c.puts_refused, "Puts that were refused.";
    gets: c.gets, "Pages requested.";
    hits: c.hits, "Gets that found their page.";
    flushes: c.flushes, "Flushes of pages, ranges, objects and pools.";
    flushed_pages: c.flushed_pages, "Pages dropped by flushes.";
    evicted_pages: c.evicted_pages, "Pages evicted to make room for others.";
    compressed_pages: c.compressed_pages, "Pages compressed.";
    decompressed_pages: c.decompressed_pages, "Pages decompressed.";
    incompressible_pages: c.incompressible_pages, "Pages that compression did not shrink, stored uncompressed.";
    shared_pages: c.shared_pages, "Puts of contents that the store had already.";
};

const STORE_GAUGES: &[StoreGauge] = families! { r =>
    capacity_bytes: r.store.stats.capacity_bytes, "Capacity of the store, metadata included.";
    max_capacity_bytes: r.store.stats.max_capacity_bytes, "Largest capacity that the store can be resized to.";
    used_bytes: r.store.stats.used_bytes, "Memory held, metadata included.";
    metadata_bytes: r.store.stats.metadata_bytes, "Memory of metadata.";
    compressed_frame_bytes: r.store.stats.compressed_frame_bytes, "Memory of compressed pages.";
    compressed_raw_bytes: r.store.stats.compressed_raw_bytes, "Size of the compressed pages before compression.";
    pages: r.store.stats.pages, "Pages in the store.";
    deduplicated_pages: r.store.stats.deduplicated_pages, "Pages without a frame of their own.";
    clients: r.clients.len() as u64, "Clients of the store.";
    workers: r.store.workers, "Threads that serve clients.";
};

const CLIENT_GAUGES: &[ClientGauge] = families! { c =>
    weight: Some(c.stats.weight.into()), "Share of the capacity relative to others'.";
    floor_bytes: Some(c.stats.floor_bytes as f64), "Memory that other clients cannot take from the client.";
    ceiling_bytes: c.stats.ceiling_bytes.map(|bytes| bytes as f64), "Limit of the client's memory.";
    target_bytes: Some(c.stats.target_bytes as f64), "Memory that the scheduler assigns to the client's private pools and ring.";
    used_bytes: Some(c.stats.used_bytes as f64), "Memory of the client's private pools and ring.";
    ring_bytes: Some(c.stats.outside_bytes as f64), "Memory of the client's ring.";
    pages: Some(c.stats.pages as f64), "Pages of the client's private pools.";
    pools: Some(c.pools.len() as f64), "Private pools of the client.";
    age_seconds: Some(c.stats.age_seconds), "Time since the client connected.";
    idle_seconds: Some(c.stats.idle_seconds), "Time since the client's last put or get.";
};

const SHARED_POOL_GAUGES: &[SharedPoolGauge] = families! { p =>
    clients: p.pool.members.len() as u64, "Clients that use the shared pool.";
    pages: p.pool.pages, "Pages of the shared pool.";
    target_bytes: p.target_bytes, "Memory that the scheduler assigns to the shared pool.";
    used_bytes: p.used_bytes, "Memory of the shared pool.";
};

/// Writes the report as OpenMetrics text.
pub fn text(report: &Report) -> String {
    let mut text = Exposition::new("plimsoll_hcache_");
    for &(name, help, value) in STORE_GAUGES {
        text.single(Kind::Gauge, (name, help), &[], value(report));
    }
    let store = &report.store.stats;
    let age = ("age_seconds", "Time since the store's start.");
    text.single(Kind::Gauge, age, &[], store.age_seconds);
    for &(name, help, count) in COUNTERS {
        text.single(Kind::Counter, (name, help), &[], count(&store.counters));
    }
    for (name, value) in &report.server {
        // An amount at this time has a unit; the others are counts.
        let (kind, help) = if name.ends_with("_bytes") {
            (Kind::Gauge, "Memory of the server outside the store.")
        } else {
            (Kind::Counter, "Counted by the server.")
        };
        text.single(kind, (&format!("server_{name}"), help), &[], value);
    }
    if let Some(ghosts) = &report.ghosts {
        let memory = ("ghosts_memory_bytes", "Memory reserved for curves.");
        text.single(Kind::Gauge, memory, &[], ghosts.memory_bytes);
        let help = "Events of clients for whose curve there was no memory.";
        let unseen = ("ghosts_unseen_events", help);
        text.single(Kind::Counter, unseen, &[], ghosts.unseen_events);
    }
    for &(name, help, value) in CLIENT_GAUGES {
        let name = format!("client_{name}");
        let mut family = text.family(Kind::Gauge, &name, help);
        for client in &report.clients {
            if let Some(value) = value(client) {
                family.sample(&labels(client), value);
            }
        }
    }
    for &(name, help, count) in COUNTERS {
        let name = format!("client_{name}");
        let mut family = text.family(Kind::Counter, &name, help);
        for client in &report.clients {
            family.sample(&labels(client), count(&client.stats.counters));
        }
    }
    let help = "Share of gets that would hit at that share of the client's pages.";
    let mut family = text.family(Kind::Gauge, "client_expected_hit_ratio", help);
    for client in &report.clients {
        let [id, name] = labels(client);
        for at in client.expected.iter().flatten() {
            family.sample(&[id, name, ("capacity_ratio", &at.ratio)], at.hit_ratio);
        }
    }
    for &(name, help, value) in SHARED_POOL_GAUGES {
        let name = format!("shared_pool_{name}");
        let mut family = text.family(Kind::Gauge, &name, help);
        for shared in &report.shared_pools {
            family.sample(&[("pool", &shared.pool.id)], value(shared));
        }
    }
    text.finish()
}

/// A client's labels. Its name is its own choice.
fn labels(client: &ClientReport) -> [(&str, &dyn Display); 2] {
    [("client", &client.stats.id.0), ("name", &client.stats.name)]
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
    fn every_family_is_there_with_its_samples() {
        let text = text(&example());
        assert!(text.matches("# TYPE ").count() > 45);
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
