//! The documentation names only files and directories that exist.

use std::path::Path;

/// Directories of the repository with which a path in the documentation begins.
const TOP: &[&str] = &[
    "crates/",
    "docs/",
    "fuzz/",
    "guest/",
    "lab/",
    "packaging/",
    "qemu/",
    "web/",
];

/// Paths in a text, between backticks or as the target of a link, that do not exist below `root`. What has a place to fill in
/// (`crates/NAME`, `docs/*.md`, `{a,b}`) is no path.
pub fn missing_paths(text: &str, root: &Path) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let linked = text.split("](").skip(1);
    let linked = linked.filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    let paths = quoted.chain(linked).filter(|path| {
        let is_path = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-".contains(c);
        TOP.iter().any(|top| path.starts_with(top)) && path.chars().all(is_path)
    });
    let missing = paths.filter(|path| !root.join(path).exists());
    missing.map(str::to_owned).collect()
}

#[test]
fn paths_of_the_documentation_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut missing = Vec::new();
    for folder in ["", "docs"] {
        for entry in root.join(folder).read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ending| ending == "md") {
                let text = std::fs::read_to_string(&path).unwrap();
                let name = path.file_name().unwrap().display();
                let paths = missing_paths(&text, &root);
                missing.extend(paths.iter().map(|path| format!("{name}: {path}")));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn a_path_that_does_not_exist_is_found() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = "`lab/rules` and `lab/gone.rs`, `crates/NAME`, `cargo test`, [x](docs/gone.md)";
    assert_eq!(missing_paths(text, &root), ["lab/gone.rs", "docs/gone.md"]);
}
