//! No file of a crate uses a file that uses it.
//!
//! What counts is `use crate::...` and `use super::...`, and paths that begin so, outside of tests. A file that only takes
//! its own submodules' items up, by `pub use child::...`, uses nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A file, as the path of its module below the crate's root.
type Module = Vec<String>;

/// The circles among a crate's files, each as the names of its modules. `root` is the directory of its sources.
pub fn circles(root: &Path, sources: &[(PathBuf, String)]) -> Vec<Vec<String>> {
    let mut files = BTreeMap::new();
    for (path, text) in sources {
        let Ok(below) = path.strip_prefix(root) else {
            continue;
        };
        files.insert(module(below), text.as_str());
    }
    let uses: BTreeMap<_, _> = files
        .iter()
        .map(|(module, text)| (module, uses(module, text, &files)))
        .collect();
    let mut circles = Vec::new();
    let mut placed = BTreeSet::new();
    for &module in uses.keys() {
        if placed.contains(module) {
            continue;
        }
        let onward = reached(module, &uses);
        let circle: Vec<_> = onward
            .iter()
            .filter(|other| reached(other, &uses).contains(module))
            .cloned()
            .collect();
        if !circle.is_empty() {
            placed.extend(circle.iter().cloned());
            circles.push(circle.iter().map(name).collect());
        }
    }
    circles
}

/// The module that a file holds; empty for the crate's root.
fn module(file: &Path) -> Module {
    let without = file.with_extension("");
    let words = without.iter().map(|word| word.to_str().unwrap().to_owned());
    let mut words: Module = words.collect();
    if matches!(
        words.last().map(String::as_str),
        Some("mod" | "lib" | "main")
    ) {
        words.pop();
    }
    words
}

fn name(module: &Module) -> String {
    if module.is_empty() {
        return "the root".to_owned();
    }
    module.join("::")
}

/// All files that a file reaches by one import or more.
fn reached(from: &Module, uses: &BTreeMap<&Module, BTreeSet<Module>>) -> BTreeSet<Module> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from.clone()];
    while let Some(module) = next.pop() {
        for used in &uses[&module] {
            if reached.insert(used.clone()) {
                next.push(used.clone());
            }
        }
    }
    reached
}

/// The files that one imports from.
fn uses(own: &Module, text: &str, files: &BTreeMap<Module, &str>) -> BTreeSet<Module> {
    let mut uses = BTreeSet::new();
    for import in imports(text) {
        let mut words = import.iter().map(String::as_str).peekable();
        let mut path = match words.next() {
            Some("crate") => Module::new(),
            Some("super") => {
                let mut above = own.clone();
                above.pop();
                while words.next_if_eq(&"super").is_some() {
                    above.pop();
                }
                above
            }
            _ => continue,
        };
        path.extend(words.map(str::to_owned));
        // The last words are items of the file.
        while !files.contains_key(&path) && path.pop().is_some() {}
        if path != *own {
            uses.insert(path);
        }
    }
    uses
}

/// The paths that a text imports or names, each as its words; those of a module of tests at its end are left out.
fn imports(text: &str) -> Vec<Vec<String>> {
    let code = text.lines().map(|line| line.split("//").next().unwrap());
    let code = code.collect::<Vec<_>>().join("\n");
    let code = match code.find("#[cfg(test)]\nmod ") {
        Some(tests) => &code[..tests],
        None => &code,
    };
    let mut imports = Vec::new();
    for statement in code.split(';') {
        let Some(at) = statement.rfind("use ") else {
            continue;
        };
        // At the beginning of a line, but for what says who may see it.
        let line = statement[..at].rsplit('\n').next().unwrap().trim();
        if line.is_empty() || line.starts_with("pub") {
            expand(&[], &statement[at + 4..], &mut imports);
        }
    }
    for first in ["crate::", "super::"] {
        for (at, _) in code.match_indices(first) {
            let is_path = |c: char| c.is_alphanumeric() || "_:".contains(c);
            let path = code[at..].split(|c| !is_path(c)).next().unwrap();
            let begins = !code[..at].ends_with(is_path);
            if begins {
                let words = path.split("::").filter(|word| !word.is_empty());
                imports.push(words.map(str::to_owned).collect());
            }
        }
    }
    imports
}

/// Adds the paths of one import, whose braces stand for several.
fn expand(before: &[String], tree: &str, paths: &mut Vec<Vec<String>>) {
    let (path, group) = match tree.split_once('{') {
        Some((path, rest)) => (path, rest.rsplit_once('}').map(|(group, _)| group)),
        None => (tree, None),
    };
    let words = path.split("::").map(str::trim);
    let words = words.map(|word| word.split(" as ").next().unwrap().trim());
    let mut path = before.to_vec();
    path.extend(words.filter(|word| !word.is_empty()).map(str::to_owned));
    let Some(group) = group else {
        paths.push(path);
        return;
    };
    let (mut depth, mut begin) = (0, 0);
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&path, &group[begin..at], paths);
                begin = at + 1;
            }
            _ => {}
        }
    }
    if !group[begin..].trim().is_empty() {
        expand(&path, &group[begin..], paths);
    }
}

/// Circles of a crate of these files.
fn circles_of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let files = files
        .iter()
        .map(|(path, text)| (Path::new("src").join(path), (*text).to_owned()));
    circles(Path::new("src"), &files.collect::<Vec<_>>())
}

#[test]
fn a_circle_over_several_files_is_seen() {
    let files = [
        ("lib.rs", "mod a;\npub use a::A;\n"),
        ("a.rs", "use crate::{\n    b::{self, C as D},\n    d,\n};\n"),
        ("b/mod.rs", "pub(crate) use super::c::X;\n"),
        ("c.rs", "fn f() -> crate::a::A {} // and more\n"),
        ("d.rs", "// use crate::a;\nfn f() {}\n"),
    ];
    assert_eq!(circles_of(&files), [["a", "b", "c"]]);
}

#[test]
fn imports_of_tests_and_of_children_make_no_circle() {
    let files = [
        ("lib.rs", "pub use a::A;\n"),
        ("a.rs", "use crate::b::B;\nuse super::Error;\n"),
        (
            "b.rs",
            "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n",
        ),
    ];
    assert!(circles_of(&files).is_empty());
}
