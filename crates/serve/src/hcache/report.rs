//! The report of a page-store server, schema 1: what `hcache stat -o json` prints.
//!
//! Sizes are in bytes or pages, times in seconds, according to the name; counters rise from the start of
//! their store, client or pool.

use std::collections::BTreeMap;

use plimsoll_flow::{PageCount, PageSize};
use plimsoll_hcache::{
    ClientStats, Counters, PoolKind, PoolStats, SharedPoolStats, Sharing, StoreStats,
};
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use serde::{Deserialize, Serialize};

use super::ghosts::Ghosts;
use crate::prediction::hit_ratios;

/// Points of a client's curve.
const POINTS: usize = 100;
/// Capacities for which hit ratios are predicted, as multiples of the client's present pages.
const RATIOS: [f64; 3] = [0.75, 1.0, 1.25];

/// A store and its clients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The store as a whole.
    pub store: StoreReport,
    /// Counters of the server, by name.
    pub server: BTreeMap<String, u64>,
    /// How hit ratios are predicted; `null` with `--no-ghost`.
    pub ghosts: Option<GhostsReport>,
    /// The clients of the store, by number.
    pub clients: Vec<ClientReport>,
    /// Its shared pools, by number.
    #[serde(default)]
    pub shared_pools: Vec<SharedPoolReport>,
}

/// The store as a whole, and its server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoreReport {
    /// Statistics of the store.
    #[serde(flatten)]
    pub stats: StoreStats,
    /// Threads that serve.
    pub workers: u64,
    /// Whether pages are compressed.
    pub compression: bool,
    /// Which pages are stored once.
    pub sharing: Sharing,
    /// Name of the policy by which pages are evicted.
    pub eviction: String,
}

/// How hit ratios are predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GhostsReport {
    /// One in so many pages is modelled.
    pub one_in: u32,
    /// Pages from one point of a curve to the next.
    pub segment_pages: u64,
    /// Memory reserved for curves, part of the store's metadata.
    pub memory_bytes: u64,
    /// Events of clients for whose curve there was no memory.
    pub unseen_events: u64,
}

/// One client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClientReport {
    /// Statistics of the client.
    #[serde(flatten)]
    pub stats: ClientStats,
    /// Its private pools.
    pub pools: Vec<PoolReport>,
    /// Hit ratios at other capacities, smallest first; `null` while it got too little. Its present pages are those of its
    /// private pools and of the shared ones that it uses.
    pub expected: Option<Vec<HitPrediction>>,
    /// Share of its gets that miss by the pages it may have; present if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub curve: Option<CurveJson>,
}

/// The hit ratio of a client at another capacity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HitPrediction {
    /// Multiple of the client's present pages.
    pub ratio: f64,
    /// The capacity in pages.
    pub size_pages: u64,
    /// Share of gets that would hit, 0.0 to 1.0, over all gets of the client so far. At the present size it is the share that did,
    /// within the band of the curve.
    pub hit_ratio: f64,
}

/// A pool of several clients. Its pages are charged to the pool itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SharedPoolReport {
    /// As of any pool.
    #[serde(flatten)]
    pub pool: PoolReport,
    /// Its current target, in bytes: the sum of its clients' parts.
    pub target_bytes: u64,
    /// Memory of its pages, in bytes.
    pub used_bytes: u64,
}

/// One pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in `PoolStats`")]
pub struct PoolReport {
    pub id: u32,
    pub kind: PoolAccess,
    /// Clients that use it.
    pub members: Vec<u32>,
    pub capacity_pages: Option<u64>,
    pub pages: u64,
    pub compressed_pages: u64,
    pub objects: u64,
    /// Time since its oldest page came to its place in its queue; under LRU, since it was last used.
    pub oldest_age_seconds: Option<f64>,
    pub age_seconds: f64,
    pub counters: Counters,
}

/// Who may use a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolAccess {
    /// One client.
    Private,
    /// All clients that have its key.
    Shared,
}

/// The server around the store.
#[derive(Debug, Clone)]
pub struct Surroundings {
    /// Threads that serve.
    pub workers: u64,
    /// Whether pages are compressed.
    pub compression: bool,
    /// Which pages are stored once.
    pub sharing: Sharing,
    /// Name of the policy by which pages are evicted.
    pub eviction: String,
    /// Counters of the server.
    pub server: BTreeMap<String, u64>,
}

impl Report {
    /// The report of a store and its server.
    pub fn new(mut stats: StoreStats, ghosts: Option<&Ghosts>, surroundings: Surroundings) -> Self {
        let age_seconds = stats.age_seconds;
        let shared_pools = std::mem::take(&mut stats.shared_pools);
        let clients = std::mem::take(&mut stats.clients)
            .into_iter()
            .map(|client| ClientReport::new(client, &shared_pools, age_seconds, ghosts))
            .collect();
        let shared_pools = shared_pools.iter().map(|shared| SharedPoolReport {
            pool: PoolReport::new(&shared.pool, age_seconds),
            target_bytes: shared.target_bytes,
            used_bytes: shared.used_bytes,
        });
        Self {
            schema: SCHEMA,
            store: StoreReport {
                stats,
                workers: surroundings.workers,
                compression: surroundings.compression,
                sharing: surroundings.sharing,
                eviction: surroundings.eviction,
            },
            server: surroundings.server,
            ghosts: ghosts.map(|ghosts| GhostsReport {
                one_in: ghosts.plan().one_in,
                segment_pages: ghosts.plan().segment_pages(),
                memory_bytes: ghosts.memory_bytes(),
                unseen_events: ghosts.unseen_events(),
            }),
            clients,
            shared_pools: shared_pools.collect(),
        }
    }
}

impl ClientReport {
    fn new(
        mut client: ClientStats,
        shared_pools: &[SharedPoolStats],
        store_age_seconds: f64,
        ghosts: Option<&Ghosts>,
    ) -> Self {
        let used = shared_pools.iter().map(|shared| &shared.pool);
        let used = used.filter(|pool| pool.members.contains(&client.id));
        let present_pages = client.pages + used.map(|pool| pool.pages).sum::<u64>();
        let curve = ghosts.and_then(|ghosts| Some((ghosts.plan(), ghosts.curve(client.id)?)));
        let expected = curve
            .as_ref()
            .filter(|_| present_pages > 0)
            .and_then(|(plan, curve)| {
                // The curve has steps of whole segments: a size is rounded up, or a loop that just fits would miss.
                let present = present_pages.next_multiple_of(plan.segment_pages());
                let sizes = RATIOS.map(|ratio| PageCount(present).scaled(ratio));
                let [less, _, more] = hit_ratios(curve, sizes)?;
                // What was counted says more than the line between two sizes, unless the client had other memory before.
                let band = curve.at(sizes[1]);
                let counted = client.counters.hit_ratio().unwrap_or_default();
                let now = counted.clamp(1.0 - band.high, 1.0 - band.low);
                let hit_ratios = [less.min(now), now, more.max(now)];
                let at = |index: usize| HitPrediction {
                    ratio: RATIOS[index],
                    size_pages: sizes[index].0,
                    hit_ratio: hit_ratios[index],
                };
                Some((0..RATIOS.len()).map(at).collect())
            });
        let curve = curve.map(|(_, curve)| {
            CurveJson::new(
                &*client.name,
                PageSize::FOUR_KIB,
                Some(PageCount(present_pages)),
                &curve.thinned(POINTS),
            )
        });
        let pools = std::mem::take(&mut client.pools);
        Self {
            stats: client,
            pools: pools
                .iter()
                .map(|pool| PoolReport::new(pool, store_age_seconds))
                .collect(),
            expected,
            curve,
        }
    }
}

impl PoolReport {
    fn new(pool: &PoolStats, store_age_seconds: f64) -> Self {
        Self {
            id: pool.id.0,
            // The key admits others of the same group, so it stays in the store.
            kind: match pool.kind {
                PoolKind::PrivateExclusive => PoolAccess::Private,
                PoolKind::SharedInclusive { .. } => PoolAccess::Shared,
            },
            members: pool.members.iter().map(|client| client.0).collect(),
            capacity_pages: pool.capacity_pages,
            pages: pool.pages,
            compressed_pages: pool.compressed_pages,
            objects: pool.objects,
            oldest_age_seconds: pool.oldest_age.map(|age| age.as_secs_f64()),
            age_seconds: (store_age_seconds - pool.created.as_secs_f64()).max(0.0),
            counters: pool.counters,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::Duration;

    use plimsoll_hcache::{ClientId, PoolId};

    #[test]
    fn a_loop_that_fits_gains_nothing_from_more_memory_whatever_the_sample() {
        use crate::hcache::ghosts::GhostPlan;
        use plimsoll_hcache::{
            EVICTION_POLICIES, Event, EventKind, Observer as _, Store, StoreOptions,
        };

        const PAGES: u64 = 10_245;
        const ROUNDS: u64 = 10;
        let store = Store::new(StoreOptions::new(64 << 20)).unwrap();
        let ghosts = Ghosts::new(GhostPlan::new(EVICTION_POLICIES[0], 32_768, None)).unwrap();
        ghosts.settle(&store).unwrap();
        let client = ClientId(1);
        // More than one in 16: they fit into the miniature of 12288 pages, and not into that of 10240.
        let sample = 0..PAGES / 15;
        for round in 0..ROUNDS {
            for page in sample.clone() {
                let page = page.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let event = |kind| Event {
                    client,
                    page,
                    kind,
                    inclusive: true,
                };
                match round {
                    0 => ghosts.observe(&[event(EventKind::Missed), event(EventKind::Put)]),
                    _ => ghosts.observe(&[event(EventKind::Kept)]),
                }
            }
        }
        let mut stats = example().clients[0].stats.clone();
        stats.pages = PAGES;
        stats.counters.gets = ROUNDS * PAGES;
        stats.counters.hits = (ROUNDS - 1) * PAGES;
        let report = ClientReport::new(stats, &[], 1.0, Some(&ghosts));
        let expected = report.expected.unwrap();
        let [less, now, more] = [0, 1, 2].map(|index| expected[index].hit_ratio);
        assert!(less < 0.5, "{less}");
        assert!(
            (now - 0.9).abs() < 1e-9 && (more - now).abs() < 1e-9,
            "{now} {more}"
        );
    }

    /// A store with a busy client of an awkward name and an idle one.
    pub fn example() -> Report {
        let counters = Counters {
            puts: 2_345_678,
            gets: 2_000_000,
            hits: 1_500_000,
            evicted_pages: 9_999,
            ..Counters::default()
        };
        let pool = |id, kind, members: &[u32]| PoolStats {
            id: PoolId(id),
            kind,
            members: members.iter().map(|id| ClientId(*id)).collect(),
            capacity_pages: None,
            pages: 51_000,
            compressed_pages: 5,
            objects: 12,
            oldest_age: Some(Duration::from_secs(60)),
            created: Duration::from_secs(11),
            counters,
        };
        let client = |id, name: &str, counters| ClientStats {
            id: ClientId(id),
            name: name.to_owned(),
            group: 1000,
            weight: 100,
            floor_bytes: 1 << 20,
            ceiling_bytes: None,
            target_bytes: 400 << 20,
            used_bytes: 399 << 20,
            outside_bytes: 540 << 10,
            pages: 102_000,
            activity: 12.5,
            age_seconds: 7190.0,
            idle_seconds: 10.0,
            counters,
            pools: vec![pool(id + 1, PoolKind::PrivateExclusive, &[id])],
        };
        let stats = StoreStats {
            age_seconds: 7200.0,
            capacity_bytes: 512 << 20,
            max_capacity_bytes: 2 << 30,
            used_bytes: 500 << 20,
            metadata_bytes: 4 << 20,
            compressed_frame_bytes: 100 << 20,
            compressed_raw_bytes: 230 << 20,
            pages: 160_000,
            deduplicated_pages: 7,
            counters,
            clients: vec![
                client(1, "we\"b\\\n\u{1b}[2J of a long name", counters),
                client(2, "idle", Counters::default()),
            ],
            shared_pools: vec![SharedPoolStats {
                pool: pool(7, PoolKind::SharedInclusive { key: 0xfeed_beef }, &[1, 2]),
                target_bytes: 200 << 20,
                used_bytes: 199 << 20,
            }],
        };
        let surroundings = Surroundings {
            workers: 2,
            compression: true,
            sharing: Sharing::WithinClient,
            eviction: "s3-fifo".to_owned(),
            server: [("connections".to_owned(), 3)].into(),
        };
        let mut report = Report::new(stats, None, surroundings);
        report.clients[0].expected = Some(vec![
            expected(0.75, 0.669),
            expected(1.0, 0.75),
            expected(1.25, 0.75),
        ]);
        report
    }

    fn expected(ratio: f64, hit_ratio: f64) -> HitPrediction {
        HitPrediction {
            ratio,
            size_pages: PageCount(102_000).scaled(ratio).0,
            hit_ratio,
        }
    }

    #[test]
    fn json_survives_being_written_and_read_and_tells_no_key() {
        let report = example();
        let text = serde_json::to_string(&report).unwrap();
        assert!(text.starts_with(
            r#"{"schema":1,"store":{"age_seconds":7200.0,"capacity_bytes":536870912,"#
        ));
        assert!(text.contains(r#""idle_seconds":10.0"#) && text.contains(r#""sharing":"client""#));
        assert!(!text.contains("4276993775") && !text.contains("feedbeef"));
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }
}
