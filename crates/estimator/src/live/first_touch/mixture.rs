//! The distribution of times to first touches, as a mixture of pages that are touched at random and in turn.
//!
//! A page that is touched at random, at a mean interval τ, has an exponential time to its next touch from a random
//! time on; a page of a loop, which is touched every θ, a uniform one up to θ. Both densities fall, and so does that of
//! any mixture; conversely every falling density is a mixture of uniform ones, so that none is excluded.
//!
//! **Estimate.** The likelihood is maximised over the weights of exponential components on a grid of means. Then one
//! uniform component after the other is added, the one that promises the largest gain, as long as the logarithm of the
//! likelihood gains more than [`GAIN_MIN`]. Without this limit the uniform components would follow every sample: the
//! estimate would be the least concave majorant of the empirical distribution, whose error is two to four times larger
//! (`docs/first-touch.md`).
//!
//! Source: \[Grenander56\] for the majorant, \[Turnbull76\] for the likelihood of censored times; the mixture is ours.
//! Cost: some hundred steps, each in proportion to cells times components: about 4 ms.

use super::cells::Cells;

/// Ratio of the means of neighbouring exponential components.
const MEANS_RATIO: f64 = 1.3;
/// The means range from the first edge, at least this share of the longest time, ..
const MEAN_MIN: f64 = 1e-7;
/// .. to this multiple of the longest time.
const MEAN_MAX: f64 = 20.0;
/// Minimum gain in the logarithm of the likelihood for which a uniform component is added. For n samples, Schwarz's
/// criterion requires (ln n) / 2, 3 to 4.5, of each parameter.
const GAIN_MIN: f64 = 4.0;
/// The gain is predicted by a quadratic approximation; a component is tried from this share of [`GAIN_MIN`] on.
const GAIN_TRIED: f64 = 0.7;
/// Maximum number of uniform components.
const UNIFORM_MAX: usize = 60;
/// Maximum number of rounds of three steps: from even weights, after each added component, and at the end.
const ROUNDS: [u32; 3] = [40, 15, 30];
/// Gain of a step in the logarithm of the likelihood below which they end.
const GAIN_OF_STEP: f64 = 1e-3;
/// Maximum length of a continued step, and the share of itself to which it may shrink a weight.
const LENGTH_MAX: f64 = 30.0;
const SHRINK_MAX: f64 = 0.05;
/// Distances in edges at which [`Mixture::loosen`] adds components, and the share of the weights that it spreads.
const NEIGHBOURS: [usize; 2] = [1, 3];
const LOOSE: f64 = 0.02;
/// Weight below which a component is dropped.
const WEIGHT_MIN: f64 = 1e-9;
/// Stands for a probability of 0, of which a logarithm is taken.
const NEARLY_ZERO: f64 = 1e-300;

/// A kind of pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Component {
    /// Never touched.
    Untouched,
    /// Touched at random, with this mean interval in seconds.
    Random(f64),
    /// Touched in turn, at this interval in seconds.
    Turn(f64),
}

impl Component {
    /// Share touched within a time.
    pub(super) fn share(&self, time: f64) -> f64 {
        match *self {
            Self::Untouched => 0.0,
            Self::Random(mean) => -(-time / mean).exp_m1(),
            Self::Turn(interval) => (time / interval).min(1.0),
        }
    }

    /// Slope of the share from a time on, per second.
    pub(super) fn slope(&self, time: f64) -> f64 {
        match *self {
            Self::Random(mean) => (-time / mean).exp() / mean,
            Self::Turn(interval) if time < interval => 1.0 / interval,
            Self::Untouched | Self::Turn(_) => 0.0,
        }
    }
}

/// Components with the probability that each gives to every cell.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    pub(super) components: Vec<Component>,
    /// Shares of the pages, in the order of the components.
    pub(super) weights: Vec<f64>,
    /// By component and cell.
    probabilities: Vec<Vec<f64>>,
}

impl Mixture {
    /// The mixture that fits the observations.
    pub(super) fn fit(cells: &Cells) -> Self {
        let longest = cells.longest();
        let shortest = cells.edges[1].max(longest * MEAN_MIN);
        let means = std::iter::successors(Some(shortest), |mean| Some(mean * MEANS_RATIO));
        let means = means.take_while(|&mean| mean < longest * MEAN_MAX);
        let components: Vec<_> = std::iter::once(Component::Untouched)
            .chain(means.map(Component::Random))
            .collect();
        let counts: Vec<f64> = cells.cells.iter().map(|cell| cell.count).collect();
        let mut mixture = Self {
            weights: vec![1.0 / components.len() as f64; components.len()],
            probabilities: components.iter().map(|one| in_cells(one, cells)).collect(),
            components,
        };
        let mut best = mixture.improve(&counts, ROUNDS[0]);
        let turns = cells.edges[1..].iter().map(|&edge| Component::Turn(edge));
        let turns: Vec<_> = turns.map(|turn| (turn, in_cells(&turn, cells))).collect();
        for _ in 0..UNIFORM_MAX {
            let Some((turn, weight)) = mixture.next_turn(&counts, &turns) else {
                break;
            };
            let mut next = mixture.clone();
            next.add(turn, weight);
            let likelihood = next.improve(&counts, ROUNDS[1]);
            if likelihood - best < GAIN_MIN {
                break;
            }
            (mixture, best) = (next, likelihood);
            mixture.prune();
        }
        best = mixture.improve(&counts, ROUNDS[2]);
        mixture.prune();
        mixture.in_turn_only(&counts, best).unwrap_or(mixture)
    }

    /// The same without pages touched at random, if that loses less likelihood than a component must gain: in a loop they
    /// only follow how its samples happen to fall.
    fn in_turn_only(&self, counts: &[f64], likelihood: f64) -> Option<Self> {
        let mut other = self.clone();
        for (component, weight) in other.components.iter().zip(&mut other.weights) {
            if matches!(component, Component::Random(_)) {
                *weight = 0.0;
            }
        }
        if !other.mixed(&other.weights).iter().all(|&cell| cell > 0.0) {
            return None;
        }
        other.prune();
        let loses = likelihood - other.improve(counts, ROUNDS[1]);
        (loses < GAIN_MIN).then_some(other)
    }

    /// The uniform component of largest predicted gain, with a weight to begin with.
    fn next_turn<'a>(
        &self,
        counts: &[f64],
        turns: &'a [(Component, Vec<f64>)],
    ) -> Option<(&'a (Component, Vec<f64>), f64)> {
        let present = self.mixed(&self.weights);
        let gains = turns.iter().filter_map(|turn| {
            let (mut slope, mut curvature) = (0.0, 0.0);
            for ((one, all), count) in turn.1.iter().zip(&present).zip(counts) {
                let excess = one / all.max(NEARLY_ZERO) - 1.0;
                slope += count * excess;
                curvature += count * excess * excess;
            }
            let gain = slope * slope / (2.0 * curvature);
            (slope > 0.0 && gain > GAIN_MIN * GAIN_TRIED).then_some((turn, gain, slope / curvature))
        });
        let best = gains.reduce(|one, other| if other.1 > one.1 { other } else { one });
        best.map(|(turn, _, weight)| (turn, weight.clamp(1e-3, 0.5)))
    }

    /// Share of the pages touched within a time.
    pub(super) fn share(&self, time: f64) -> f64 {
        let weighted = self.components.iter().zip(&self.weights);
        weighted.map(|(one, weight)| weight * one.share(time)).sum()
    }

    fn add(&mut self, (component, probabilities): &(Component, Vec<f64>), weight: f64) {
        self.weights.iter_mut().for_each(|old| *old *= 1.0 - weight);
        self.components.push(*component);
        self.probabilities.push(probabilities.clone());
        self.weights.push(weight);
    }

    /// Probability of each cell.
    fn mixed(&self, weights: &[f64]) -> Vec<f64> {
        let mut mixed = vec![0.0; self.probabilities[0].len()];
        for (probabilities, &weight) in self.probabilities.iter().zip(weights) {
            if weight > 0.0 {
                for (sum, one) in mixed.iter_mut().zip(probabilities) {
                    *sum += weight * one;
                }
            }
        }
        mixed
    }

    /// Raises the likelihood of `counts` over the weights; returns its logarithm.
    ///
    /// Two steps of expectation maximisation, which are short, are continued by the step of \[Varadhan08\].
    pub(super) fn improve(&mut self, counts: &[f64], rounds: u32) -> f64 {
        let mut likelihood = f64::NEG_INFINITY;
        for _ in 0..rounds {
            let (one, before) = self.expect(counts, &self.weights);
            let (two, after) = self.expect(counts, &one);
            let far = farther(&self.weights, &one, &two);
            likelihood = after;
            self.weights = two;
            if after - before < GAIN_OF_STEP {
                break;
            }
            let (three, reached) = self.expect(counts, &far);
            if reached > after {
                likelihood = reached;
                self.weights = three;
            }
        }
        likelihood
    }

    /// A step of expectation maximisation from `weights`, with the logarithm of their likelihood.
    fn expect(&self, counts: &[f64], weights: &[f64]) -> (Vec<f64>, f64) {
        let mut mixed = self.mixed(weights);
        let total: f64 = counts.iter().sum();
        let mut likelihood = 0.0;
        for (one, count) in mixed.iter_mut().zip(counts) {
            let probability = one.max(NEARLY_ZERO);
            likelihood += count * probability.ln();
            *one = count / (probability * total);
        }
        let next = weights
            .iter()
            .zip(&self.probabilities)
            .map(|(&weight, probabilities)| {
                if weight == 0.0 {
                    return 0.0;
                }
                weight * dot(probabilities, &mixed)
            });
        (normalised(next.collect(), weights), likelihood)
    }

    /// Adds uniform components beside each, and gives every component at least a small weight, so that other counts can
    /// choose others.
    pub(super) fn loosen(&mut self, cells: &Cells) {
        for edge in 1..cells.edges.len() {
            let is_present = |edge: usize| {
                let turn = cells.edges.get(edge).map(|&edge| Component::Turn(edge));
                turn.is_some_and(|turn| self.components.contains(&turn))
            };
            let near = NEIGHBOURS
                .iter()
                .any(|by| is_present(edge + by) || edge.checked_sub(*by).is_some_and(&is_present));
            if near && !is_present(edge) {
                let turn = Component::Turn(cells.edges[edge]);
                self.add(&(turn, in_cells(&turn, cells)), 0.0);
            }
        }
        let even = LOOSE / self.weights.len() as f64;
        for weight in &mut self.weights {
            *weight = (1.0 - LOOSE) * *weight + even;
        }
    }

    /// Drops components without weight.
    fn prune(&mut self) {
        let mut kept = self.weights.iter().map(|&weight| weight > 0.0);
        self.components.retain(|_| kept.next().unwrap_or(false));
        let mut kept = self.weights.iter().map(|&weight| weight > 0.0);
        self.probabilities.retain(|_| kept.next().unwrap_or(false));
        self.weights.retain(|&weight| weight > 0.0);
        let sum: f64 = self.weights.iter().sum();
        self.weights.iter_mut().for_each(|weight| *weight /= sum);
    }
}

/// The sum of products. Of several sums, so that no addition waits for the one before.
fn dot(one: &[f64], other: &[f64]) -> f64 {
    const SUMS: usize = 8;
    let mut sums = [0.0; SUMS];
    let (ones, one) = one.as_chunks::<SUMS>();
    let (others, other) = other.as_chunks::<SUMS>();
    for (one, other) in ones.iter().zip(others) {
        for ((sum, one), other) in sums.iter_mut().zip(one).zip(other) {
            *sum += one * other;
        }
    }
    let rest = one.iter().zip(other).map(|(one, other)| one * other);
    sums.iter().sum::<f64>() + rest.sum::<f64>()
}

/// Weights with a sum of 1, those without effect 0; `before` if they have no sum, which only happens where cells are too
/// narrow for any component to have a probability in one.
fn normalised(mut weights: Vec<f64>, before: &[f64]) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    if sum.is_nan() || sum < WEIGHT_MIN {
        return before.to_vec();
    }
    for weight in &mut weights {
        *weight /= sum;
        if *weight < WEIGHT_MIN {
            *weight = 0.0;
        }
    }
    weights
}

/// The point to which two steps of expectation maximisation lead, by the change from the first to the second.
fn farther(start: &[f64], one: &[f64], two: &[f64]) -> Vec<f64> {
    let (mut steps, mut turns) = (0.0, 0.0);
    for ((start, one), two) in start.iter().zip(one).zip(two) {
        let (step, next) = (one - start, two - one);
        steps += step * step;
        turns += (next - step) * (next - step);
    }
    let length = if turns > 0.0 {
        (steps / turns).sqrt().clamp(1.0, LENGTH_MAX)
    } else {
        1.0
    };
    let weights = start.iter().zip(one).zip(two).map(|((start, one), two)| {
        let (step, next) = (one - start, two - one);
        let far = start + 2.0 * length * step + length * length * (next - step);
        far.max(two * SHRINK_MAX)
    });
    normalised(weights.collect(), two)
}

/// The probability of each cell by one component.
fn in_cells(component: &Component, cells: &Cells) -> Vec<f64> {
    let shares: Vec<f64> = cells
        .edges
        .iter()
        .map(|&edge| component.share(edge))
        .collect();
    let probability = |cell: &super::cells::Cell| {
        let upto = cell.to.map_or(1.0, |to| shares[to]);
        (upto - shares[cell.from]).max(0.0)
    };
    cells.cells.iter().map(probability).collect()
}
