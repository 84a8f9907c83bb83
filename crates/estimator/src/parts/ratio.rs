//! Error of a ratio of two counts, such as events per second, by blocks of the time in which they were counted.
//!
//! How much the blocks differ shows how steady the ratio is, whatever the cause: chance, or a load that varies. Blocks must be
//! longer than what makes them differ, because their errors are taken to be independent.
//!
//! Source: the linearised variance of a ratio of means (survey sampling), with Student's quantile.

use super::steps::student;

/// Half-width of the 95 % band of the sum of all first numbers over that of all second ones, 0.0 or more, by those of each
/// block; `None` below two blocks, or if the second ones are all 0.
#[must_use]
pub fn ratio_error(blocks: &[[f64; 2]]) -> Option<f64> {
    let count = blocks.len() as f64;
    let sum = |at: usize| blocks.iter().map(|block| block[at]).sum::<f64>();
    let (over, under) = (sum(0), sum(1));
    if blocks.len() < 2 || under <= 0.0 {
        return None;
    }
    let ratio = over / under;
    let squares = blocks
        .iter()
        .map(|[over, under]| (over - ratio * under).powi(2));
    let variance = squares.sum::<f64>() * count / (count - 1.0);
    Some(student(count - 1.0) * variance.sqrt() / under)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::uniform;

    #[test]
    fn what_is_steady_has_no_error_and_what_was_seen_once_an_unknown_one() {
        assert_eq!(
            ratio_error(&[[10.0, 2.0], [5.0, 1.0], [40.0, 8.0]]),
            Some(0.0)
        );
        assert_eq!(ratio_error(&[[10.0, 2.0]]), None);
        assert_eq!(ratio_error(&[[0.0, 0.0], [0.0, 0.0]]), None);
        // Rates of 1000 and of 100 in turn.
        let blocks = [[1000.0, 1.0], [100.0, 1.0]].repeat(4);
        let error = 2.365 * (450.0_f64.powi(2) * 8.0 / 7.0 / 8.0).sqrt();
        assert!((ratio_error(&blocks).unwrap() - error).abs() < 1e-9);
    }

    #[test]
    fn the_band_holds_the_share_of_coins_in_95_percent() {
        let held = (0..1000).filter(|&seed| {
            let mut coins = uniform(5, seed).map(|coin| f64::from(u8::from(coin > 0)));
            let blocks: Vec<_> = (0..12)
                .map(|block| {
                    let tosses = 50 + block;
                    [coins.by_ref().take(tosses).sum(), tosses as f64]
                })
                .collect();
            let of = |at: usize| blocks.iter().map(|block| block[at]).sum::<f64>();
            (of(0) / of(1) - 0.8).abs() <= ratio_error(&blocks).unwrap()
        });
        assert!((930..=970).contains(&held.count()));
    }
}
