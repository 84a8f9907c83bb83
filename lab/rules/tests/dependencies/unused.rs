//! No crate depends on what none of its sources names.
//!
//! A source that is included by `#[path]` counts for the crate that includes it. A name in a comment does not count.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// Those of a crate's dependencies, named as in sources, that its sources do not use.
pub fn unused<'a>(
    identifiers: &'a BTreeSet<String>,
    sources: &[(PathBuf, String)],
) -> impl Iterator<Item = &'a str> {
    let mut named = BTreeSet::new();
    for (path, text) in sources {
        named.extend(words(text));
        for included in included(text) {
            let file = path.with_file_name(included);
            named.extend(words(&fs::read_to_string(file).unwrap_or_default()));
        }
    }
    let unused = identifiers
        .iter()
        .filter(move |name| !named.contains(*name));
    unused.map(String::as_str)
}

/// The identifiers of a text, outside of line comments.
fn words(text: &str) -> BTreeSet<String> {
    let code = text.lines().map(|line| line.split("//").next().unwrap());
    let words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
    words.map(str::to_owned).collect()
}

/// The files that a text includes by `#[path = "FILE"]`.
fn included(text: &str) -> impl Iterator<Item = &str> {
    let after = text.split("#[path = \"").skip(1);
    after.filter_map(|rest| rest.split('"').next())
}

#[test]
fn a_dependency_that_is_named_in_a_comment_alone_is_unused() {
    let identifiers = ["libc", "serde", "vm_memory"].map(str::to_owned);
    let text = "use serde::Serialize; // like libc\nfn f() { vm_memory::new(); }\n";
    let sources = [(PathBuf::from("lib.rs"), text.to_owned())];
    let identifiers = BTreeSet::from(identifiers);
    assert_eq!(unused(&identifiers, &sources).collect::<Vec<_>>(), ["libc"]);
}
