//! Sampling rates as people write them.

/// Returns a rate, above 0 and at most 1, as `1/128` where that is exact, otherwise as the shorter of `2/3` and `0.3`. The text
/// reads back as the same number.
pub fn rate_text(rate: f64) -> String {
    let parts = (1.0 / rate).round();
    if parts > 1.0 && parts < 1e15 && 1.0 / parts == rate {
        return format!("1/{parts}");
    }
    let decimal = rate.to_string();
    let fraction = |whole: u32| {
        let part = (rate * f64::from(whole)).round();
        (part / f64::from(whole) == rate).then(|| format!("{part}/{whole}"))
    };
    match (3..=1000).find_map(fraction) {
        Some(text) if text.len() < decimal.len() => text,
        _ => decimal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_written_in_few_characters() {
        let rates = [
            1.0,
            0.3,
            1.0 / 128.0,
            2.0 / 3.0,
            0.75,
            5.0 / 128.0,
            0.1 + 0.2,
        ];
        let texts = [
            "1",
            "0.3",
            "1/128",
            "2/3",
            "3/4",
            "5/128",
            "0.30000000000000004",
        ];
        assert_eq!(rates.map(rate_text), texts);
    }
}
