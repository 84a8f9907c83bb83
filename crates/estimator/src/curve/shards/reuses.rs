//! References of a sample of pages by the memory they need, and the curve that follows from them.
//!
//! A reference counts `1 / R` if its page was sampled at the rate `R` of that time, so that
//! the counts estimate those of the whole stream even if the rate falls later.
//! At `R = 1` a distance is exact and stored exactly. Otherwise sizes are put into
//! buckets, a power of two of them per doubling of the size; the size of a bucket
//! is the mean of the sizes in it.
//!
//! **Correction** (its purpose is stated in `shards`). Let `W` be the sum of the counts and `N` the length of the stream,
//! which `W` estimates and which is known. For two references to one page, the earlier at the rate `R`, the counts have
//! the covariance `1 / R - 1`; for different pages, none. The variance of `W` is therefore a sum over pairs of
//! references to one page, and the sample estimates how much of it belongs to the references that miss at a size. That
//! share of the surplus `W - N` is what the regression of the misses on `W` subtracts. The same with the number of
//! pages in place of the misses gives the share by which distances are too long.
//!
//! Source: the difference estimator of survey sampling with independently drawn pages (Särndal, Swensson, Wretman
//! 1992).
//! Not here: distances (`sampled_stack`), the band (`steps`).

use plimsoll_flow::Whole as _;

use crate::parts::steps::Steps;
use crate::parts::sys::prefetch;

/// A deficit of this many standard deviations or more is not attributed to the sampled pages;
/// one that is smaller by at least one deviation is wholly attributed to them.
const DEFICIT_DISMISSED: f64 = 3.5;

/// A reference to a sampled page at a rate below 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reference {
    /// Number of references of the stream that this one represents.
    pub(crate) count: f64,
    /// Covariance of this one's count with itself,
    pub(crate) own: f64,
    /// and twice those with its page's earlier references: with all of them, and with the far ones.
    pub(crate) with_earlier: f64,
    pub(crate) with_earlier_far: f64,
}

impl Reference {
    /// Returns a share of the reference.
    #[inline]
    pub(crate) fn times(self, share: f64) -> Self {
        Self {
            count: share * self.count,
            own: share * self.own,
            with_earlier: share * self.with_earlier,
            with_earlier_far: share * self.with_earlier_far,
        }
    }
}

/// References that need about the same size.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    count: f64,
    covariance: f64,
    /// Sum of their sizes, weighted by their counts.
    size_pages: f64,
}

impl Bucket {
    /// Returns `share` times as many, of the same sizes.
    fn scaled(self, share: f64) -> Self {
        Self {
            count: share * self.count,
            covariance: share * self.covariance,
            size_pages: share * self.size_pages,
        }
    }
}

/// Reuses of one size.
#[derive(Debug, Clone, Copy)]
struct AtSize {
    bucket: Bucket,
    /// Whether they are known only from the sample.
    is_far: bool,
}

/// References during bursts, by their counts and covariances: all, and the near ones.
#[derive(Debug, Clone, Copy, Default)]
struct Strata {
    count: f64,
    covariance: f64,
    near_count: f64,
    near_covariance: f64,
}

/// The references to one sample.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reuses {
    bucket_bits: u32,
    buckets: Vec<Bucket>,
    /// Sums over all far references, including first ones.
    count: f64,
    own: f64,
    covariance: f64,
    /// Near and far references during bursts.
    bursts: Strata,
}

/// Heterogeneity of the sampled pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spread {
    /// Number of equally popular pages that would have the same variance.
    pub(crate) effective_pages: f64,
    /// Share of the variance of the number of sampled pages not explained by the number of references; 0.0 to 1.0.
    pub(crate) unexplained: f64,
}

/// Data in addition to the counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream<'known> {
    /// Length of the whole stream.
    pub(crate) references: u64,
    /// Number of these made while all pages were sampled,
    pub(crate) exact_references: u64,
    /// and number during bursts.
    pub(crate) burst_references: u64,
    /// The exactly known reuses by distance.
    pub(crate) exact: &'known [u64],
    /// Shares of references during bursts whose distance is at least 0, 1, .. pages; the last
    /// is the share that is in the sample's counts.
    pub(crate) reaching: &'known [f64],
}

impl Stream<'_> {
    /// Number of references since bursts ended.
    fn after_bursts(&self) -> f64 {
        (self.references - self.exact_references) as f64 - self.burst_references as f64
    }

    /// Share of near ones among the references during bursts.
    fn near_share(&self) -> f64 {
        1.0 - self.reaching[self.reaching.len() - 1]
    }
}

/// Returns the part of the surplus of `estimated` over `expected` references that is attributed to the sampled pages.
///
/// A deficit that is unlikely given their own popularity indicates
/// hotter pages outside the sample; these hit everywhere, and nothing is attributed. A sample that lacks references by chance also has
/// less than its covariance, so that of as many as are expected counts.
fn own_surplus(estimated: f64, expected: f64, scale: f64, covariance: f64) -> f64 {
    let surplus = estimated - expected;
    let covariance = covariance * (expected / estimated).max(1.0);
    let deviations = surplus / (scale * covariance.sqrt()).max(f64::MIN_POSITIVE);
    surplus * (DEFICIT_DISMISSED + deviations).clamp(0.0, 1.0)
}

impl Reuses {
    /// Creates counts with `2^bucket_bits` buckets per doubling of the size.
    pub(crate) fn new(bucket_bits: u32) -> Self {
        Self {
            bucket_bits,
            ..Self::default()
        }
    }

    /// Adds a reference during bursts, of which a share is near.
    #[inline]
    pub(crate) fn record_stratum(&mut self, reference: Reference, near_share: f64) {
        self.bursts.count += reference.count;
        self.bursts.near_count += near_share * reference.count;
        self.bursts.covariance += reference.own + reference.with_earlier;
        self.bursts.near_covariance += near_share * reference.with_earlier;
    }

    /// Adds a far reference; those without a size are first references.
    #[inline]
    pub(crate) fn record(&mut self, reference: Reference, size_pages: Option<f64>) {
        self.count += reference.count;
        self.own += reference.own;
        self.covariance += reference.own + reference.with_earlier_far;
        let Some(size_pages) = size_pages else {
            return;
        };
        let index = self.bucket_of(size_pages);
        if index >= self.buckets.len() {
            // Extended by one doubling of the size at a time.
            let buckets = (index + 1).next_multiple_of(1 << self.bucket_bits);
            self.buckets.reserve_exact(buckets - self.buckets.len());
            self.buckets.resize(buckets, Bucket::default());
        }
        let bucket = &mut self.buckets[index];
        bucket.count += reference.count;
        // The variances belong to the first references.
        bucket.covariance += reference.with_earlier_far;
        bucket.size_pages += reference.count * size_pages;
    }

    /// Prefetches the bucket of a size, so that a later [`record`](Self::record) does not wait for it.
    #[inline]
    pub(crate) fn prefetch(&self, size_pages: f64) {
        prefetch(&self.buckets, self.bucket_of(size_pages));
    }

    #[inline]
    fn bucket_of(&self, size_pages: f64) -> usize {
        let size = u64::whole(size_pages);
        let shift = (size | 1).ilog2().saturating_sub(self.bucket_bits);
        let bucket = (u64::from(shift) << self.bucket_bits) + (size >> shift);
        usize::try_from(bucket).expect("there are fewer than 2^17 buckets")
    }

    /// Bytes of heap allocated.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    /// Returns the share of far ones among `references` as estimated by the sample, one of `scale` equal ones.
    pub(crate) fn far_share(&self, references: f64, scale: f64) -> Option<f64> {
        let bursts = self.bursts;
        if bursts.count == 0.0 {
            return None;
        }
        let surplus = own_surplus(scale * bursts.count, references, scale, bursts.covariance);
        let share = 1.0 - bursts.near_covariance / bursts.covariance;
        let far_count = scale * (bursts.count - bursts.near_count);
        let far = (far_count - surplus * share) / references;
        Some(far.clamp(0.0, 1.0))
    }

    /// Whether no near reference was sampled during bursts.
    pub(crate) fn has_no_near(&self) -> bool {
        self.bursts.near_count == 0.0
    }

    /// Returns the relative difference between the references during bursts and the sample's estimate of them.
    pub(crate) fn surplus_share(&self, references: f64) -> f64 {
        (self.bursts.count / references.max(1.0) - 1.0)
            .abs()
            .min(1.0)
    }

    /// Returns the share of references that may be near ones to hot pages outside the sample: its deficit, and if no near
    /// reference is in it, as many more as its own number may exceed the expected one by chance.
    pub(crate) fn lacking_share(&self, references: f64) -> f64 {
        let bursts = self.bursts;
        let by_chance = if self.has_no_near() {
            bursts.covariance.sqrt()
        } else {
            0.0
        };
        ((references + by_chance - bursts.count) / references.max(1.0)).clamp(0.0, 1.0)
    }

    /// Returns the number of equally popular pages that would have the same variance as the sampled ones, and the
    /// share of the variance of the number of pages that remains when the surplus is known.
    ///
    /// `rate` is that of the sample, which has `pages` pages by its own estimate.
    pub(crate) fn spread(&self, rate: f64, pages: f64) -> Spread {
        let variance = pages * (1.0 - rate) / rate;
        let explained = self.own * self.own / (self.covariance * variance).max(f64::MIN_POSITIVE);
        let explained = explained.clamp(0.0, 1.0);
        Spread {
            effective_pages: pages * rate * explained,
            unexplained: 1.0 - explained,
        }
    }

    /// Returns the curve. The sample is one of `scale` equal ones, to which the counts
    /// belong together, and has `pages` pages by its own estimate.
    pub(crate) fn steps(&self, stream: Stream<'_>, scale: f64, pages: f64) -> Steps {
        let others = (stream.references - stream.exact_references) as f64;
        let near_share = stream.near_share();
        let expected = others - stream.burst_references as f64 * near_share;
        let estimated = scale * self.count;
        let (mut surplus, mut shrink) = (0.0, 1.0);
        if self.covariance > 0.0 {
            surplus = own_surplus(estimated, expected, scale, self.covariance);
            shrink = (1.0 - surplus * self.own / self.covariance / pages).max(0.0);
        }
        // The known and the far references. Their number is known as well; a deficit not attributed to the sampled
        // pages consists of immediate hits, but not at sizes measured by the bursts.
        let mut known = stream.references as f64 - expected;
        let (mut far, mut covariance) = (estimated, self.covariance);
        let near = (stream.reaching.len() - 1) as f64;
        let after_bursts = stream.after_bursts() / expected.max(1.0);
        let mut steps = Steps::new();
        for (size, reuses) in self.by_size(stream, scale, shrink) {
            if reuses.is_far {
                far -= reuses.bucket.count;
            } else {
                known -= reuses.bucket.count;
            }
            covariance = (covariance - reuses.bucket.covariance).max(0.0);
            let share = if surplus == 0.0 {
                0.0
            } else {
                covariance / self.covariance
            };
            let sampled = far - surplus * share;
            let corrected = if size <= near && !reuses.is_far {
                // Bursts measure these sizes, but of the references while there were bursts alone.
                expected + (sampled - expected) * after_bursts
            } else {
                sampled
            };
            let size = u64::whole(size.round());
            let corrected = (known + corrected) / stream.references as f64;
            steps.down_to(size, corrected, 0.0);
        }
        steps
    }

    /// The reuses by the size at which they begin to hit, rising.
    fn by_size<'a>(
        &'a self,
        stream: Stream<'a>,
        scale: f64,
        shrink: f64,
    ) -> impl Iterator<Item = (f64, AtSize)> + 'a {
        let counted = |size: f64, count: f64| {
            let bucket = Bucket {
                count,
                ..Bucket::default()
            };
            let is_far = false;
            (size, AtSize { bucket, is_far })
        };
        let exact = (1_u64..).zip(stream.exact).filter(|&(_, &count)| count > 0);
        let exact = exact.map(move |(size, &count)| counted(size as f64, count as f64));
        let others = stream.burst_references as f64;
        let near = (1_u64..).zip(stream.reaching.windows(2));
        let near = near.map(move |(size, pair)| counted(size as f64, others * (pair[0] - pair[1])));
        let size_min = (stream.reaching.len() - 1) as f64;
        let buckets = self.buckets.iter().filter(|bucket| bucket.count > 0.0);
        let far = buckets.map(move |bucket| {
            // The half page is not part of the distance.
            let size = (bucket.size_pages / bucket.count - 0.5) * shrink + 0.5;
            // The covariance stays that of this sample alone, as its sum does.
            let bucket = Bucket {
                count: bucket.count * scale,
                ..*bucket
            };
            (size, bucket)
        });
        // After the bursts the sample does not resolve the sizes that they measured. As many of its references as were near
        // ones then are distributed over these.
        let unresolved = far.clone().filter(|(size, _)| *size < size_min);
        let unresolved = unresolved.fold(Bucket::default(), |sum, (_, bucket)| Bucket {
            count: sum.count + bucket.count,
            covariance: sum.covariance + bucket.covariance,
            size_pages: 0.0,
        });
        let near_share = stream.near_share();
        let near_after = (stream.after_bursts() * near_share).min(unresolved.count);
        let kept = if near_after > 0.0 {
            1.0 - near_after / unresolved.count
        } else {
            1.0
        };
        let is_far = true;
        let moved = (1_u64..).zip(stream.reaching.windows(2));
        let moved = moved.filter(move |_| kept < 1.0).map(move |(size, pair)| {
            let bucket = unresolved.scaled((1.0 - kept) * (pair[0] - pair[1]) / near_share);
            (size as f64, AtSize { bucket, is_far })
        });
        let far = far.map(move |(size, bucket)| {
            let share = if size < size_min { kept } else { 1.0 };
            let bucket = bucket.scaled(share);
            (size.max(size_min), AtSize { bucket, is_far })
        });
        let far = merged(moved, far).filter(|(_, at)| at.bucket.count > 0.0);
        let near = near.filter(|(_, at)| at.bucket.count > 0.0);
        merged(merged(exact, near), far)
    }
}

/// The items of two lists that rise by size, in the order of their sizes.
fn merged<T>(
    first: impl Iterator<Item = (f64, T)>,
    second: impl Iterator<Item = (f64, T)>,
) -> impl Iterator<Item = (f64, T)> {
    let (mut first, mut second) = (first.peekable(), second.peekable());
    std::iter::from_fn(move || match (first.peek(), second.peek()) {
        (Some((size, _)), Some((other, _))) if other < size => second.next(),
        (Some(_), _) => first.next(),
        (None, _) => second.next(),
    })
}
