//! OpenMetrics text, the format in which Prometheus reads metrics; used by all servers.
//!
//! The text consists of families of samples, each preceded by its type, unit and help, and ends with `# EOF`
//! (OpenMetrics 1.0). A family without samples is left out: an unknown value is absent,
//! never zero.

use std::fmt::{self, Display, Write};

/// The type of a family, which determines the suffix of its samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A value that rises and falls.
    Gauge,
    /// A cumulative count; samples end in `_total`.
    Counter,
    /// Text in labels; samples end in `_info` and have the value 1.
    Info,
    /// Counts in cumulative buckets, which may fall; samples end in `_bucket`.
    GaugeHistogram,
}

impl Kind {
    /// The type's name, and the suffix of samples.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Gauge => ("gauge", ""),
            Self::Counter => ("counter", "_total"),
            Self::Info => ("info", "_info"),
            Self::GaugeHistogram => ("gaugehistogram", "_bucket"),
        }
    }
}

/// Families of one type, one per row `name: value, "help";`, as a slice of `(name, help, |of| value)`.
#[macro_export]
macro_rules! families {
    ($of:ident => $($name:ident: $value:expr, $help:literal;)*) => {
        &[$((stringify!($name), $help, |$of| $value)),*]
    };
}

/// Labels of a sample: their names, and values that are escaped when they are written.
pub type Labels<'a> = &'a [(&'a str, &'a dyn Display)];

/// A text being written.
#[derive(Debug)]
pub struct Exposition {
    prefix: &'static str,
    text: String,
}

impl Exposition {
    /// An empty text whose family names begin with `prefix`.
    pub fn new(prefix: &'static str) -> Self {
        Self {
            prefix,
            text: String::new(),
        }
    }

    /// Begins a family. If its name ends in a unit, that unit is declared.
    ///
    /// # Panics
    ///
    /// If the text already has the family, in builds with debug assertions.
    pub fn family<'a>(&'a mut self, kind: Kind, name: &'a str, help: &'a str) -> Family<'a> {
        debug_assert!(
            !self
                .text
                .contains(&format!("# TYPE {}{name} ", self.prefix)),
            "{name} twice"
        );
        Family {
            exposition: self,
            kind,
            name,
            help,
            has_head: false,
        }
    }

    /// Adds a family with one sample.
    pub fn single(
        &mut self,
        kind: Kind,
        (name, help): (&str, &str),
        labels: Labels<'_>,
        value: impl Display,
    ) {
        self.family(kind, name, help).sample(labels, value);
    }

    /// The complete text.
    pub fn finish(mut self) -> String {
        self.text.push_str("# EOF\n");
        self.text
    }
}

/// A family to which samples are added.
#[derive(Debug)]
pub struct Family<'a> {
    exposition: &'a mut Exposition,
    kind: Kind,
    name: &'a str,
    help: &'a str,
    has_head: bool,
}

impl Family<'_> {
    /// Adds a sample.
    pub fn sample(&mut self, labels: Labels<'_>, value: impl Display) {
        // Writing to a string cannot fail.
        let _ = self.write(labels, value);
    }

    fn write(&mut self, labels: Labels<'_>, value: impl Display) -> fmt::Result {
        let Exposition { prefix, text } = &mut *self.exposition;
        let (kind, ending) = self.kind.names();
        let name = self.name;
        if !self.has_head {
            self.has_head = true;
            writeln!(text, "# TYPE {prefix}{name} {kind}")?;
            let units = ["bytes", "seconds", "ratio"];
            let unit = units
                .into_iter()
                .find(|unit| name.ends_with(&format!("_{unit}")));
            if let Some(unit) = unit {
                writeln!(text, "# UNIT {prefix}{name} {unit}")?;
            }
            writeln!(text, "# HELP {prefix}{name} {}", self.help)?;
        }
        write!(text, "{prefix}{name}{ending}")?;
        for (index, (label, value)) in labels.iter().enumerate() {
            text.push(if index == 0 { '{' } else { ',' });
            let value = Escaped(&value.to_string()).to_string();
            write!(text, "{label}=\"{value}\"")?;
        }
        text.push_str(if labels.is_empty() { " " } else { "} " });
        writeln!(text, "{value}")
    }
}

/// A label's value with quotes, backslashes and line ends escaped.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                character => f.write_char(character)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_its_head_and_its_samples_and_one_without_samples_is_left_out() {
        let mut text = Exposition::new("x_");
        let mut family = text.family(Kind::Counter, "reads", "Reads.");
        family.sample(&[("vm", &"web"), ("disk", &0)], 7);
        family.sample(&[("vm", &"mail"), ("disk", &1)], 0.5);
        text.family(Kind::Gauge, "unknown", "Unknown.");
        text.single(Kind::Gauge, ("used_bytes", "Used."), &[], 4096);
        text.single(Kind::Info, ("build", "Build."), &[("version", &"1")], 1);
        let expected = "\
# TYPE x_reads counter
# HELP x_reads Reads.
x_reads_total{vm=\"web\",disk=\"0\"} 7
x_reads_total{vm=\"mail\",disk=\"1\"} 0.5
# TYPE x_used_bytes gauge
# UNIT x_used_bytes bytes
# HELP x_used_bytes Used.
x_used_bytes 4096
# TYPE x_build info
# HELP x_build Build.
x_build_info{version=\"1\"} 1
# EOF
";
        assert_eq!(text.finish(), expected);
    }

    #[test]
    fn a_label_cannot_be_left_by_its_value() {
        let mut text = Exposition::new("");
        text.single(Kind::Gauge, ("g", "G."), &[("name", &"a\"b\\c\nd")], 1);
        let line = "\ng{name=\"a\\\"b\\\\c\\nd\"} 1\n";
        assert!(text.finish().contains(line));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "reads twice")]
    fn a_family_is_written_once() {
        let mut text = Exposition::new("");
        text.single(Kind::Counter, ("reads", "Reads."), &[], 1);
        text.single(Kind::Counter, ("reads", "Reads."), &[], 1);
    }
}
