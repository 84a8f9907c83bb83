//! Numbers, durations and names from outside, as tables and sentences show them.

use std::path::Path;

/// A share of 1 as a percentage with one decimal: `97.7 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A share of 1 as a percentage with at most two decimals, none needless: `5 %`, `0.98 %`.
pub fn short_percent(share: f64) -> String {
    format!("{} %", grouped((share * 1e4).round() / 100.0))
}

/// A ratio around 1: two decimals below 100, none above.
pub fn ratio(ratio: f64) -> String {
    if ratio >= 100.0 {
        format!("{ratio:.0}")
    } else {
        format!("{ratio:.2}")
    }
}

/// A number per second in at most six characters: `0.35`, `7.2`, `140`, `2.3M`.
pub fn per_second(rate: f64) -> String {
    match rate {
        0.0 => "0".to_owned(),
        rate if rate < 0.005 => "<0.01".to_owned(),
        rate if rate < 1.0 => format!("{rate:.2}"),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate => short(rate),
    }
}

/// A count in at most six characters: `9999`, `2.3M`.
pub fn short(count: f64) -> String {
    for (unit, name) in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")] {
        if count >= unit {
            let unit = if name == "k" { 1e3 } else { unit };
            return format!("{:.1}{name}", count / unit);
        }
    }
    format!("{count:.0}")
}

/// Writes a number with at most six decimals, none needless, and from 10 000 on in groups of three
/// digits, separated by spaces that do not break.
pub fn grouped(number: f64) -> String {
    let text = format!("{number:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (sign, digits) = match text.strip_prefix('-') {
        Some("0") => ("", "0"),
        Some(digits) => ("\u{2212}", digits),
        None => ("", text),
    };
    let (whole, fraction) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
    if whole.len() < 5 {
        return format!("{sign}{whole}{fraction}");
    }
    let mut spaced = String::from(sign);
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            spaced.push('\u{a0}');
        }
        spaced.push(digit);
    }
    spaced + fraction
}

/// Lines of a label and its value, which begins in the column `width`.
pub fn labelled<'a>(width: usize, lines: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let lines = lines.into_iter();
    lines
        .map(|(label, value)| format!("{label:<width$}{value}\n"))
        .collect()
}

/// A duration in its largest unit of which there are at least two: `119 s`, `2 min`, `3 h`, `4 d`.
pub fn duration(seconds: f64) -> String {
    for (unit, name) in [(86_400.0, "d"), (3600.0, "h"), (60.0, "min")] {
        if seconds >= 2.0 * unit {
            return format!("{:.0} {name}", seconds / unit);
        }
    }
    format!("{seconds:.0} s")
}

/// A text from outside without characters that could move a terminal's cursor, or reorder or hide the text around them.
pub fn printable(text: &str) -> String {
    text.replace(is_unprintable, "\u{fffd}")
}

/// Whether a character is a control character, or one that has no width or sets the direction of text.
pub(crate) fn is_unprintable(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// A path as [`printable`] text.
pub fn printable_path(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

/// At most `characters` characters from the beginning of a text; a cut one ends with `…`.
pub fn cut(text: &str, characters: usize) -> String {
    if text.chars().count() <= characters {
        return text.to_owned();
    }
    let begin: String = text.chars().take(characters.saturating_sub(1)).collect();
    begin + "…"
}

/// At most `characters` characters from both ends of a text, with `…` between them where it is cut: names often differ at their ends
/// alone.
pub fn cut_middle(text: &str, characters: usize) -> String {
    let count = text.chars().count();
    if count <= characters {
        return text.to_owned();
    }
    let kept = characters.saturating_sub(1);
    let begin: String = text.chars().take(kept.div_ceil(2)).collect();
    let end: String = text.chars().skip(count - kept / 2).collect();
    format!("{begin}…{end}")
}

/// At most `characters` characters from the end of a text, which is the more telling end of a path.
pub fn cut_front(text: &str, characters: usize) -> String {
    let count = text.chars().count();
    if count <= characters {
        return text.to_owned();
    }
    let end: String = text.chars().skip(count - characters + 1).collect();
    format!("…{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_keep_what_matters_of_them() {
        assert_eq!([1.0, 99.999, 1234.5].map(ratio), ["1.00", "100.00", "1234"]);
    }

    #[test]
    fn percentages_and_counts_keep_the_digits_that_matter() {
        assert_eq!(percent(0.9766), "97.7 %");
        assert_eq!(
            [0.0098, 0.25, 1.0, 0.0, 0.05125].map(short_percent),
            ["0.98 %", "25 %", "100 %", "0 %", "5.13 %"]
        );
        assert_eq!(
            [0.0, 9999.0, 12_345.0, 2.3e6, 4e12].map(short),
            ["0", "9999", "12.3k", "2.3M", "4.0T"]
        );
        assert_eq!(
            [-0.0, 9999.5, 12_345.0, -1e6].map(grouped),
            ["0", "9999.5", "12\u{a0}345", "\u{2212}1\u{a0}000\u{a0}000"]
        );
    }

    #[test]
    fn durations_have_the_largest_unit_of_which_there_are_two() {
        assert_eq!(
            [0.0, 119.0, 120.0, 7200.0, 172_800.0].map(duration),
            ["0 s", "119 s", "2 min", "2 h", "2 d"]
        );
    }

    #[test]
    fn names_are_cut_and_cannot_move_the_cursor() {
        assert_eq!(printable("web\u{1b}[2J"), "web\u{fffd}[2J");
        // As `bew`, and another VM's text after it backwards.
        assert_eq!(printable("\u{202e}web"), "\u{fffd}web");
        assert_eq!(printable_path(Path::new("a/b\n")), "a/b\u{fffd}");
        assert_eq!(cut_middle("instance-0000001a", 17), "instance-0000001a");
        assert_eq!(cut_middle("instance-0000001a", 14), "instanc…00001a");
        assert_eq!(cut_middle("instance-0000001a", 1), "…");
        assert_eq!(cut(&"x".repeat(24), 24), "x".repeat(24));
        assert_eq!(cut(&"x".repeat(25), 24), "x".repeat(23) + "…");
        assert_eq!(cut_front("/var/lib/images/web.raw", 8), "…web.raw");
    }
}
