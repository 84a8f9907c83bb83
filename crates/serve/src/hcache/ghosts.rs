//! Hit ratios of each client of a store at other capacities, from ghost lists or miniatures.
//!
//! Under a policy that is a stack algorithm (LRU) a client has a ghost list. Under any other it has miniatures (`miniatures.rs`), which play
//! the policy itself at several sizes. What follows is about the list, unless it is said of both.
//!
//! A client's own memory lies in front of the store: a page it puts has just left that memory, a page it gets
//! is on its way back. So the order of its puts is an LRU list without contents, and a get whose page is at
//! depth `d` of it hits in every store that gives the client more than `d` pages. That is a
//! [`GhostBuffer`] behind a cache of unknown size, which is counted as none.
//! It does not depend on the present capacity, and so predicts smaller and larger ones alike.
//!
//! For both, the store reports a sample of its pages, chosen by hash; sizes are scaled up accordingly (\[Waldspurger15\]).
//! The band is that of the list, not of the sample.
//!
//! Both count in the store's capacity: [`settle`](Ghosts::settle) reserves memory before a client gets one.
//!
//! Unlike in the store, a page that is taken out leaves no free space to the pages before it. That is exact where each
//! page that comes back evicts another, and optimistic while a client grows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use plimsoll_estimator::{GhostBuffer, GhostError, GhostOptions};
use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, PageNumber};
use plimsoll_hcache::{
    ClientId, Error, Event, EventKind, EvictionPolicyRow, Miniature, Observer, Store,
};

use super::miniatures::{Miniatures, POINTS_OF_REACH};
use crate::prediction::lock;

/// Default limit of the pages in a ghost list: 0.4 MiB.
const GHOST_PAGES: u64 = 8192;
/// Default limit of the pages in the largest miniature: 0.6 MiB for all of them at most.
const MINIATURE_PAGES: u64 = 2048;
/// By default, miniatures model at most one in so many pages, so that those of two clients or more fit into the share of a
/// small store.
const MINIATURE_ONE_IN: u64 = 8;
/// Steps of a client's curve, at most.
const SEGMENTS: u64 = 512;
/// One in so many bytes of the capacity may be ghost lists.
const MEMORY_SHARE: u64 = 16;
/// Ghost lists for which memory is reserved before their clients connect.
const SPARE: usize = 2;

/// The sizes of the ghost lists or miniatures of a store.
#[derive(Debug, Clone, Copy)]
pub struct GhostPlan {
    /// One in so many pages is modelled, a power of two.
    pub one_in: u32,
    /// The policy that they model.
    eviction: &'static EvictionPolicyRow,
    /// Sizes of a list, in sampled pages; of miniatures the largest is `ghost`.
    options: GhostOptions,
}

impl GhostPlan {
    /// Plans curves of a policy up to `reach_pages` that model one in `one_in` pages (a power of two) or, if that is `None`,
    /// as many as a list of 8192 pages or a miniature of 2048 holds.
    pub fn new(
        eviction: &'static EvictionPolicyRow,
        reach_pages: u64,
        one_in: Option<u32>,
    ) -> Self {
        let (pages, points, least_one_in) = if eviction.is_stack {
            (GHOST_PAGES, SEGMENTS, 1)
        } else {
            (MINIATURE_PAGES, POINTS_OF_REACH, MINIATURE_ONE_IN)
        };
        let fitting = reach_pages.div_ceil(pages).next_power_of_two();
        let fitting = fitting.max(least_one_in);
        let one_in = one_in.unwrap_or(u32::try_from(fitting).unwrap_or(1 << 31));
        let ghost = reach_pages.div_ceil(one_in.into()).max(1);
        Self {
            one_in,
            eviction,
            options: GhostOptions {
                direct: PageCount(0),
                ghost: PageCount(ghost),
                segment: PageCount(ghost.div_ceil(points)),
            },
        }
    }

    /// Pages from one point of a curve to the next.
    pub fn segment_pages(&self) -> u64 {
        self.options.segment.0 * u64::from(self.one_in)
    }

    fn make(&self) -> Result<Model, GhostError> {
        if self.eviction.is_stack {
            return Ok(Model::List(Box::new(GhostBuffer::new(self.options)?)));
        }
        let pages = self.options.ghost;
        let reach = u32::try_from(pages.0).ok();
        let reach = reach.filter(|&pages| pages <= Miniature::MOST_PAGES);
        let reach = reach.ok_or(GhostError::TooLarge {
            pages,
            max: PageCount(Miniature::MOST_PAGES.into()),
        })?;
        Ok(Model::Miniatures(Miniatures::new(self.eviction, reach)))
    }
}

/// The model of one client's gets.
#[derive(Debug)]
enum Model {
    List(Box<GhostBuffer>),
    Miniatures(Miniatures),
}

impl Model {
    fn memory_bytes(&self) -> usize {
        match self {
            Self::List(list) => list.memory_bytes(),
            Self::Miniatures(all) => all.memory_bytes(),
        }
    }

    /// The curve, at sizes multiplied by `scale`.
    fn curve(&self, scale: u64) -> Result<MissRatioCurve, CurveError> {
        let curve = match self {
            Self::List(list) => list.curve()?,
            Self::Miniatures(all) => return all.curve(scale),
        };
        let points = curve.points().iter().map(|point| CurvePoint {
            size: PageCount(point.size.0.saturating_mul(scale)),
            ..*point
        });
        MissRatioCurve::new(points.collect(), curve.references())
    }

    fn observe(&mut self, event: &Event) {
        let list = match self {
            Self::List(list) => list,
            Self::Miniatures(all) => return all.observe(event),
        };
        let page = PageNumber(event.page);
        match event.kind {
            EventKind::Hit | EventKind::Missed => {
                // Depths count from the head of the list: no memory lies in front of it.
                list.set_cached(PageCount(0));
                list.missed(page);
            }
            EventKind::Kept => {
                // Back to the head, as in a store that is one LRU list.
                list.set_cached(PageCount(0));
                list.missed(page);
                list.evicted(page);
            }
            EventKind::Put => list.evicted(page),
            EventKind::Flushed => list.released(page),
        }
    }
}

/// The models of all clients.
#[derive(Debug)]
pub struct Ghosts {
    plan: GhostPlan,
    /// Bytes of one model.
    ghost_bytes: u64,
    inner: Mutex<Inner>,
    /// Allows one change of what is reserved at a time.
    reserving: Mutex<()>,
}

#[derive(Debug, Default)]
struct Inner {
    ghosts: BTreeMap<ClientId, Model>,
    /// Models for which memory is reserved, including those in use.
    granted: usize,
    unseen_events: u64,
}

impl Ghosts {
    /// Models by a plan, none yet.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if one cannot have these sizes.
    pub fn new(plan: GhostPlan) -> Result<Self, GhostError> {
        let ghost_bytes = plan.make()?.memory_bytes() as u64;
        Ok(Self {
            plan,
            ghost_bytes,
            inner: Mutex::default(),
            reserving: Mutex::default(),
        })
    }

    /// Models that there may be in a store of that capacity, at most.
    fn ghosts_max(&self, capacity_bytes: u64) -> usize {
        let most = capacity_bytes / MEMORY_SHARE / self.ghost_bytes;
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// The sizes of the models.
    pub fn plan(&self) -> GhostPlan {
        self.plan
    }

    /// Bytes reserved for models.
    pub fn memory_bytes(&self) -> u64 {
        self.lock().granted as u64 * self.ghost_bytes
    }

    /// Events of clients that had no model (yet).
    pub fn unseen_events(&self) -> u64 {
        self.lock().unseen_events
    }

    /// Drops the models of clients that disconnected, and reserves memory for new ones. To be called at the start and about once a
    /// second.
    ///
    /// # Errors
    ///
    /// The store's, if it cannot spare the memory; then no model is added.
    pub fn settle(&self, store: &Store) -> Result<(), Error> {
        let _reserving = lock(&self.reserving);
        let known: BTreeSet<_> = self.lock().ghosts.keys().copied().collect();
        // A client that connects from here on is not in `known`, and keeps its model.
        let present: BTreeSet<_> = store.stats().clients.iter().map(|c| c.id).collect();
        let ghosts_max = self.ghosts_max(store.capacity_bytes());
        let wanted = (present.len() + SPARE).min(ghosts_max);
        let granted = {
            let mut inner = self.lock();
            inner
                .ghosts
                .retain(|id, _| present.contains(id) || !known.contains(id));
            let granted = wanted.max(inner.ghosts.len());
            if granted == inner.granted {
                return Ok(());
            }
            // The store always accounts for at least what is in use.
            inner.granted = inner.granted.min(granted);
            granted
        };
        store.set_outside_bytes(granted as u64 * self.ghost_bytes)?;
        self.lock().granted = granted;
        Ok(())
    }

    /// Changes the store's capacity. Where that takes room from models, the newest are dropped, and no pages in their place.
    ///
    /// # Errors
    ///
    /// [`Store::resize`]'s; all models are kept then.
    pub fn resize(&self, store: &Store, capacity_bytes: u64) -> Result<(), Error> {
        let _reserving = lock(&self.reserving);
        loop {
            let kept = {
                let mut inner = self.lock();
                inner.granted = inner.granted.min(self.ghosts_max(capacity_bytes));
                inner.granted
            };
            match store.resize_with_outside(capacity_bytes, kept as u64 * self.ghost_bytes) {
                Ok(()) => break,
                // Of a capacity that is almost too small for pages, models have less than their share.
                Err(Error::CapacityTooSmall { .. }) if kept > 0 => self.lock().granted = kept - 1,
                Err(error) => return Err(error),
            }
        }
        let mut inner = self.lock();
        while inner.ghosts.len() > inner.granted {
            inner.ghosts.pop_last();
        }
        Ok(())
    }

    /// The curve of a client since it connected: the share of its gets that miss by the pages of the store that it may
    /// hold. `None` for a client without gets or without a model.
    pub fn curve(&self, client: ClientId) -> Option<MissRatioCurve> {
        let inner = self.lock();
        let model = inner.ghosts.get(&client)?;
        model.curve(self.plan.one_in.into()).ok()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

impl Observer for Ghosts {
    fn observe(&self, events: &[Event]) {
        let mut inner = self.lock();
        for event in events {
            match inner.model_of(event.client, &self.plan) {
                Some(model) => model.observe(event),
                None => inner.unseen_events += 1,
            }
        }
    }
}

impl Inner {
    /// The client's model, made now if there is memory for it.
    fn model_of(&mut self, client: ClientId, plan: &GhostPlan) -> Option<&mut Model> {
        if !self.ghosts.contains_key(&client) {
            if self.ghosts.len() >= self.granted {
                return None;
            }
            self.ghosts.insert(client, plan.make().ok()?);
        }
        self.ghosts.get_mut(&client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_hcache::{
        ClientOptions, EVICTION_POLICIES, Handle, LRU, PAGE_BYTES, PoolOptions, StoreOptions,
    };
    use proptest::prelude::*;

    const CLIENT: ClientId = ClientId(1);

    fn event(kind: EventKind, page: u64) -> Event {
        Event {
            client: CLIENT,
            page,
            kind,
            inclusive: kind == EventKind::Kept,
        }
    }

    /// Ghosts that reach to so many pages, with memory set aside for any.
    fn ghosts(reach_pages: u64, one_in: u32) -> Ghosts {
        let ghosts = Ghosts::new(GhostPlan::new(LRU, reach_pages, Some(one_in))).unwrap();
        ghosts.lock().granted = 2;
        ghosts
    }

    #[test]
    fn a_loop_hits_from_its_own_size_on() {
        let ghosts = ghosts(400, 1);
        for round in 0..10 {
            for page in 0..100 {
                let found = if round > 0 {
                    EventKind::Hit
                } else {
                    EventKind::Missed
                };
                ghosts.observe(&[event(found, page), event(EventKind::Put, page)]);
            }
        }
        let curve = ghosts.curve(CLIENT).unwrap();
        assert_eq!(curve.references(), 1000);
        assert_eq!(curve.miss_ratio(PageCount(99)), 1.0);
        assert_eq!(curve.miss_ratio(PageCount(100)), 0.1);
        assert_eq!(
            curve.at(PageCount(300)),
            CurvePoint::exact(PageCount(300), 0.1)
        );
        assert_eq!(ghosts.curve(ClientId(2)), None);
    }

    #[test]
    fn flushed_pages_are_known_to_no_store() {
        let ghosts = ghosts(8, 1);
        for page in 0..4 {
            ghosts.observe(&[event(EventKind::Put, page)]);
        }
        ghosts.observe(&[event(EventKind::Flushed, 3), event(EventKind::Missed, 3)]);
        ghosts.observe(&[event(EventKind::Hit, 2)]);
        let curve = ghosts.curve(CLIENT).unwrap();
        assert_eq!(
            (
                curve.miss_ratio(PageCount(1)),
                curve.miss_ratio(PageCount(8))
            ),
            (0.5, 0.5)
        );
    }

    #[test]
    fn a_shared_pools_page_stays_when_it_is_got() {
        let ghosts = ghosts(8, 1);
        for page in 0..3 {
            ghosts.observe(&[event(EventKind::Missed, page), event(EventKind::Put, page)]);
        }
        for page in [0, 0, 2, 0] {
            ghosts.observe(&[event(EventKind::Kept, page)]);
        }
        let curve = ghosts.curve(CLIENT).unwrap();
        let hits = [1, 2, 3].map(|size| 7.0 * (1.0 - curve.miss_ratio(PageCount(size))));
        // At depths 2, 0, 1, 1.
        assert_eq!(hits.map(f64::round), [1.0, 3.0, 4.0]);
    }

    #[test]
    fn sizes_are_those_of_all_pages_when_a_sample_is_seen() {
        let ghosts = ghosts(4096, 16);
        for _ in 0..5 {
            for page in 0..100 {
                ghosts.observe(&[event(EventKind::Missed, page), event(EventKind::Put, page)]);
            }
        }
        let curve = ghosts.curve(CLIENT).unwrap();
        assert_eq!(curve.miss_ratio(PageCount(1599)), 1.0);
        assert_eq!(curve.miss_ratio(PageCount(1600)), 0.2);
    }

    #[test]
    fn a_plan_keeps_ghosts_small_and_reaches_as_far_as_asked() {
        for (reach_pages, one_in, ghost, segment) in [
            (512, 1, 512, 1),
            (8192, 1, 8192, 16),
            (8193, 2, 4097, 9),
            (262_144, 32, 8192, 16),
            (0, 1, 1, 1),
        ] {
            let plan = GhostPlan::new(LRU, reach_pages, None);
            assert_eq!((plan.one_in, plan.options.ghost.0), (one_in, ghost));
            assert_eq!(plan.segment_pages(), segment * u64::from(one_in));
        }
        let plan = GhostPlan::new(LRU, 1 << 20, Some(16));
        assert_eq!((plan.one_in, plan.options.ghost.0), (16, 1 << 16));
        for row in EVICTION_POLICIES {
            assert!(GhostPlan::new(row, u64::MAX, None).one_in.is_power_of_two());
            let plan = GhostPlan::new(row, 1 << 22, None);
            let bytes = plan.make().unwrap().memory_bytes();
            assert!(bytes < 700 << 10, "{row:?}: {bytes}");
        }
    }

    #[test]
    fn a_ghost_is_made_only_from_memory_set_aside_and_goes_with_its_client() {
        let store = Store::new(StoreOptions::new(16 << 20)).unwrap();
        let ghosts = Ghosts::new(GhostPlan::new(LRU, 8192, None)).unwrap();
        // 434 KiB each, of a sixteenth of 16 MiB.
        assert_eq!(ghosts.ghosts_max(16 << 20), 2);
        let put = |client| {
            let kind = EventKind::Put;
            ghosts.observe(&[Event {
                client,
                page: 1,
                kind,
                inclusive: false,
            }]);
        };
        let clients: Vec<_> = (0..3)
            .map(|_| store.create_client(ClientOptions::new("c")).unwrap())
            .collect();
        put(clients[0].id());
        assert_eq!((ghosts.unseen_events(), ghosts.memory_bytes()), (1, 0));
        ghosts.settle(&store).unwrap();
        assert_eq!(ghosts.memory_bytes(), 2 * ghosts.ghost_bytes);
        for client in &clients {
            put(client.id());
        }
        assert_eq!((ghosts.unseen_events(), ghosts.lock().ghosts.len()), (2, 2));
        let last = clients.into_iter().next_back().unwrap();
        ghosts.settle(&store).unwrap();
        put(last.id());
        assert_eq!((ghosts.unseen_events(), ghosts.lock().ghosts.len()), (2, 1));
        drop(last);
        ghosts.settle(&store).unwrap();
        assert_eq!(ghosts.lock().ghosts.len(), 0);
    }

    #[test]
    fn the_memory_of_ghosts_follows_the_capacity() {
        let mut options = StoreOptions::new(16 << 20);
        options.max_capacity_bytes = 64 << 20;
        let store = Store::new(options).unwrap();
        let ghosts = Ghosts::new(GhostPlan::new(LRU, 8192, None)).unwrap();
        let clients: Vec<_> = (0..4)
            .map(|_| store.create_client(ClientOptions::new("c")).unwrap())
            .collect();
        // Of four clients; 434 KiB each, of a sixteenth of the capacity.
        for (capacity_bytes, modelled) in [(16 << 20, 2), (64 << 20, 4), (16 << 20, 2)] {
            ghosts.resize(&store, capacity_bytes).unwrap();
            assert!(ghosts.lock().ghosts.len() <= modelled);
            assert!(ghosts.memory_bytes() <= capacity_bytes / MEMORY_SHARE);
            ghosts.settle(&store).unwrap();
            for client in &clients {
                ghosts.observe(&[Event {
                    client: client.id(),
                    page: 1,
                    kind: EventKind::Put,
                    inclusive: false,
                }]);
            }
            assert_eq!(ghosts.lock().ghosts.len(), modelled);
            assert!(ghosts.memory_bytes() <= capacity_bytes / MEMORY_SHARE);
        }
    }

    #[test]
    fn a_smaller_capacity_takes_from_ghosts_and_not_from_pages() {
        let ghosts = Ghosts::new(GhostPlan::new(LRU, 8192, None)).unwrap();
        let ghosts = std::sync::Arc::new(ghosts);
        let mut options = StoreOptions::new(64 << 20);
        options.observer = Some(std::sync::Arc::<Ghosts>::clone(&ghosts));
        let store = Store::new(options).unwrap();
        let clients: Vec<_> = (0..8)
            .map(|_| store.create_client(ClientOptions::new("c")).unwrap())
            .collect();
        ghosts.settle(&store).unwrap();
        let fill = || {
            for client in &clients {
                let pool = client.create_pool(PoolOptions::private()).unwrap();
                for index in 0..1024 {
                    let page = Handle {
                        pool,
                        object: 0,
                        index,
                    };
                    client.put(page, &[7; PAGE_BYTES]).unwrap();
                }
            }
        };
        fill();
        assert_eq!(ghosts.lock().ghosts.len(), clients.len());
        ghosts.resize(&store, 6 << 20).unwrap();
        let after_shrink = store.stats().pages;
        ghosts.settle(&store).unwrap();
        fill();
        let full = store.stats().pages;
        // Beside the models of 8 clients there would be room for less than half as many.
        assert!(full * PAGE_BYTES as u64 > (6 << 20) / 10 * 9, "{full}");
        assert!(after_shrink + full / 50 > full, "{after_shrink} of {full}");
        // Of the least capacity, all is the store's.
        let Err(Error::CapacityTooSmall { least_bytes, .. }) = ghosts.resize(&store, 1) else {
            panic!("a byte is too little");
        };
        ghosts.settle(&store).unwrap();
        ghosts.resize(&store, least_bytes).unwrap();
        assert!(ghosts.memory_bytes() <= least_bytes / MEMORY_SHARE);
    }

    proptest! {
        /// A client that fetches a page and gives another back, as a memory that is full does.
        #[test]
        fn the_curve_is_that_of_stores_of_every_size(
            pages in prop::collection::vec(0_u64..40, 1..400),
            memory in 1_usize..8,
        ) {
            let ghosts = ghosts(64, 1);
            let mut misses = [0_u32; 41];
            let mut gets = 0;
            let mut own = std::collections::VecDeque::new();
            let mut stores = vec![Vec::new(); misses.len()];
            for page in pages {
                if let Some(place) = own.iter().position(|&other| other == page) {
                    own.remove(place);
                    own.push_back(page);
                    continue;
                }
                gets += 1;
                ghosts.observe(&[event(EventKind::Missed, page)]);
                for (misses, store) in misses.iter_mut().zip(&mut stores) {
                    match store.iter().position(|&other| other == page) {
                        Some(place) => drop(store.remove(place)),
                        None => *misses += 1,
                    }
                }
                own.push_back(page);
                if own.len() > memory {
                    let given: u64 = own.pop_front().unwrap();
                    ghosts.observe(&[event(EventKind::Put, given)]);
                    for (size, store) in stores.iter_mut().enumerate() {
                        store.push(given);
                        if store.len() > size {
                            store.remove(0);
                        }
                    }
                }
            }
            let curve = ghosts.curve(CLIENT).unwrap();
            for (size, misses) in misses.iter().enumerate() {
                let expected = f64::from(*misses) / f64::from(gets);
                prop_assert_eq!(curve.miss_ratio(PageCount(size as u64)), expected);
            }
        }
    }
}
