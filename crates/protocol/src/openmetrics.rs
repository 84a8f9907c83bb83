//! What all OpenMetrics texts have in common: the head of a family, and labels' values.

use std::fmt::{self, Write};

/// Begins a family: its type, the unit in which its name ends, and what it tells.
///
/// # Errors
/// Those of `text`.
pub fn head(text: &mut String, prefix: &str, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(text, "# TYPE {prefix}{name} {kind}")?;
    if let Some(unit) = ["bytes", "seconds", "ratio"]
        .into_iter()
        .find(|unit| name.ends_with(&format!("_{unit}")))
    {
        writeln!(text, "# UNIT {prefix}{name} {unit}")?;
    }
    writeln!(text, "# HELP {prefix}{name} {help}")
}

/// A label's value: quotes, backslashes and line ends are escaped.
#[derive(Debug, Clone, Copy)]
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}
