//! No field is a `String` where its documentation lists the values it may have: that is an enum.

/// Fields of a text that are such strings.
pub fn listed_strings(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut doc = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix("///") {
            doc.push_str(words);
        } else if !line.starts_with("#[") {
            if let Some(name) = string_field(line)
                && ['`', '"'].iter().any(|&quote| lists_words(&doc, quote))
            {
                found.push(name.to_owned());
            }
            doc.clear();
        }
    }
    found
}

/// The name of the field that a line declares, if it is a string or may be one.
fn string_field(line: &str) -> Option<&str> {
    let (before, kind) = line.split_once(": ")?;
    let name = before.rsplit(' ').next()?;
    let string = matches!(kind.trim_end_matches(','), "String" | "Option<String>");
    string.then_some(name)
}

/// Whether a text has two quoted words that only a comma or an "or" parts.
fn lists_words(text: &str, quote: char) -> bool {
    let parts: Vec<_> = text.split(quote).collect();
    let is_word = |part: &str| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-".contains(c);
        part.starts_with(|c: char| c.is_ascii_lowercase()) && part.chars().all(plain)
    };
    // Every second part is quoted.
    parts.windows(3).skip(1).step_by(2).any(|three| {
        let between = matches!(three[1].trim(), "," | "or" | ", or");
        between && is_word(three[0]) && is_word(three[2])
    })
}

#[test]
fn a_string_with_its_values_in_its_documentation_is_seen() {
    let text = "
struct Move {
    /// `waiting`, `done`
    /// or `late`.
    #[serde(default)]
    pub state: String,
    /// `kvm` or `tcg`, if known.
    accelerator: Option<String>,
    /// The VM's name in libvirt, such as `web`.
    name: String,
    /// `running` or `paused`.
    phase: Phase,
}";
    assert_eq!(listed_strings(text), ["state", "accelerator"]);
}
