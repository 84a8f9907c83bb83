//! Holds what ARCHITECTURE.md says of the crates: who may use whom, where unsafe code may stand,
//! that every crate takes the workspace's lints and uses what it depends on, that files of a crate do not use each other in
//! circles, that a field with few values is an enum, that the documentation names only files that exist, and that
//! no test reports itself as skipped without being counted.

mod circles;
mod fields;
mod paths;
mod units;
mod unused;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::{DependencyKind, MetadataCommand, Package};

/// Which of our crates each of our crates uses. What stands here and is not used is an error too.
const ALLOWED: &[(&str, &[&str])] = &[
    ("plimsoll-flow", &[]),
    ("plimsoll-source", &["plimsoll-flow"]),
    ("plimsoll-estimator", &["plimsoll-flow"]),
    ("plimsoll-trap", &["plimsoll-flow"]),
    (
        "plimsoll-observe",
        &[
            "plimsoll-flow",
            "plimsoll-estimator",
            "plimsoll-trap",
            "plimsoll-pagelog",
            "plimsoll-source",
            "plimsoll-actuator",
            "plimsoll-vm",
            "plimsoll-protocol",
            "plimsoll-output",
        ],
    ),
    ("plimsoll-pagelog", &["plimsoll-flow"]),
    ("plimsoll-vm", &["plimsoll-flow", "plimsoll-kvm-guest"]),
    ("plimsoll-hcache", &[]),
    ("plimsoll-ring", &["plimsoll-hcache"]),
    ("plimsoll-disk", &["plimsoll-flow", "plimsoll-hcache"]),
    ("plimsoll-driver", &["plimsoll-disk"]),
    ("plimsoll-output", &[]),
    ("plimsoll-plot", &["plimsoll-flow", "plimsoll-output"]),
    (
        "plimsoll-report",
        &[
            "plimsoll-flow",
            "plimsoll-estimator",
            "plimsoll-trap",
            "plimsoll-observe",
            "plimsoll-vm",
            "plimsoll-policy",
            "plimsoll-protocol",
            "plimsoll-output",
            "plimsoll-plot",
        ],
    ),
    (
        "plimsoll-top",
        &[
            "plimsoll-flow",
            "plimsoll-protocol",
            "plimsoll-output",
            "plimsoll-report",
        ],
    ),
    (
        "plimsoll-serve",
        &[
            "plimsoll-flow",
            "plimsoll-source",
            "plimsoll-estimator",
            "plimsoll-hcache",
            "plimsoll-ring",
            "plimsoll-disk",
            "plimsoll-vm",
            "plimsoll-protocol",
            "plimsoll-output",
        ],
    ),
    ("plimsoll-policy", &["plimsoll-flow"]),
    ("plimsoll-protocol", &["plimsoll-flow", "plimsoll-policy"]),
    ("plimsoll-fleet", &["plimsoll-protocol"]),
    (
        "plimsoll-actuator",
        &[
            "plimsoll-flow",
            "plimsoll-protocol",
            "plimsoll-ring",
            "plimsoll-vm",
        ],
    ),
    (
        "plimsoll-daemon",
        &[
            "plimsoll-flow",
            "plimsoll-output",
            "plimsoll-protocol",
            "plimsoll-policy",
            "plimsoll-actuator",
            "plimsoll-trap",
            "plimsoll-vm",
        ],
    ),
    (
        "plimsoll-bench",
        &[
            "plimsoll-flow",
            "plimsoll-fleet",
            "plimsoll-source",
            "plimsoll-estimator",
            "plimsoll-trap",
            "plimsoll-observe",
            "plimsoll-pagelog",
            "plimsoll-hcache",
            "plimsoll-ring",
            "plimsoll-disk",
            "plimsoll-driver",
            "plimsoll-actuator",
            "plimsoll-policy",
            "plimsoll-protocol",
            "plimsoll-daemon",
        ],
    ),
    (
        "plimsoll",
        &[
            "plimsoll-flow",
            "plimsoll-fleet",
            "plimsoll-source",
            "plimsoll-estimator",
            "plimsoll-trap",
            "plimsoll-actuator",
            "plimsoll-observe",
            "plimsoll-pagelog",
            "plimsoll-vm",
            "plimsoll-hcache",
            "plimsoll-ring",
            "plimsoll-disk",
            "plimsoll-policy",
            "plimsoll-protocol",
            "plimsoll-output",
            "plimsoll-plot",
            "plimsoll-report",
            "plimsoll-serve",
            "plimsoll-top",
        ],
    ),
    ("plimsoll-kvm-guest", &[]),
    (
        "plimsoll-rig",
        &[
            "plimsoll-flow",
            "plimsoll-kvm-guest",
            "plimsoll-protocol",
            "plimsoll-vm",
        ],
    ),
    (
        "plimsoll-lab",
        &[
            "plimsoll-flow",
            "plimsoll-source",
            "plimsoll-estimator",
            "plimsoll-trap",
            "plimsoll-pagelog",
            "plimsoll-vm",
            "plimsoll-actuator",
            "plimsoll-disk",
            "plimsoll-plot",
            "plimsoll-policy",
            "plimsoll-protocol",
            "plimsoll-migration",
            "plimsoll-observe",
            "plimsoll-output",
            "plimsoll-serve",
            "plimsoll-rig",
        ],
    ),
    ("plimsoll-migration", &["plimsoll-flow", "plimsoll-trap"]),
    (
        "plimsoll-python",
        &[
            "plimsoll-flow",
            "plimsoll-source",
            "plimsoll-estimator",
            "plimsoll-policy",
            "plimsoll-protocol",
        ],
    ),
    ("plimsoll-workload", &[]),
    ("plimsoll-rules", &[]),
    ("plimsoll-skip", &[]),
];

/// Which others the tests of a crate use; all may use plimsoll-skip.
const ALLOWED_IN_TESTS: &[(&str, &[&str])] = &[
    ("plimsoll-daemon", &["plimsoll-protocol"]),
    ("plimsoll-estimator", &["plimsoll-source"]),
    ("plimsoll-disk", &["plimsoll-estimator", "plimsoll-driver"]),
    ("plimsoll-actuator", &["plimsoll-hcache", "plimsoll-rig"]),
    ("plimsoll", &["plimsoll-daemon", "plimsoll-rig"]),
    ("plimsoll-serve", &["plimsoll-driver"]),
];

/// Crates that may hold unsafe code, in files named `sys.rs` alone; the others forbid it.
const WITH_UNSAFE: &[&str] = &[
    "plimsoll-estimator",
    "plimsoll-trap",
    "plimsoll-pagelog",
    "plimsoll-hcache",
    "plimsoll-ring",
    "plimsoll-disk",
    "plimsoll-migration",
    "plimsoll-python",
    "plimsoll-workload",
];

/// Dependencies that a crate names for their features alone, which another crate's dependency of the same name then has too.
const FOR_FEATURES: &[(&str, &str)] = &[("plimsoll-disk", "uuid")];

/// The inputs of the rules for one crate.
struct Member {
    name: String,
    /// All dependencies, as the sources name them.
    identifiers: BTreeSet<String>,
    /// Names of the crates it uses to be built and run.
    uses: Vec<String>,
    /// Names of those that its tests use.
    tests_use: Vec<String>,
    /// The directory of its Cargo.toml.
    folder: PathBuf,
    /// Text of its Cargo.toml.
    manifest: String,
    /// Name and text of each source file.
    sources: Vec<(PathBuf, String)>,
    /// Those of `sources` that a target begins with.
    roots: Vec<PathBuf>,
}

impl Member {
    fn of(package: &Package) -> Self {
        let of_kind = |is_dev: bool| {
            let dependencies = package.dependencies.iter();
            let chosen = dependencies.filter(move |dependency| {
                (dependency.kind == DependencyKind::Development) == is_dev
            });
            let names: BTreeSet<_> = chosen.map(|dependency| dependency.name.clone()).collect();
            names.into_iter().collect::<Vec<_>>()
        };
        let identifiers = package.dependencies.iter().map(|dependency| {
            let name = dependency.rename.as_ref().unwrap_or(&dependency.name);
            name.replace('-', "_")
        });
        let folder = package.manifest_path.parent().unwrap();
        let mut sources = Vec::new();
        read_sources(folder.as_std_path(), &mut sources);
        let roots = package
            .targets
            .iter()
            .filter(|target| target.is_lib() || target.is_bin());
        Self {
            name: package.name.to_string(),
            identifiers: identifiers.collect(),
            uses: of_kind(false),
            tests_use: of_kind(true),
            folder: folder.as_std_path().to_owned(),
            manifest: fs::read_to_string(&package.manifest_path).unwrap(),
            sources,
            roots: roots.map(|root| root.src_path.clone().into()).collect(),
        }
    }

    /// What the crate breaks, in words.
    fn violations(&self, ours: &[String]) -> Vec<String> {
        let mut found = Vec::new();
        if ALLOWED.iter().all(|(name, _)| *name != self.name) {
            found.push("is not in the table of allowed dependencies".to_owned());
        } else {
            let uses = self.uses.iter().filter(|name| ours.contains(name));
            found.extend(differences(uses, &row(ALLOWED, &self.name), "use"));
        }
        let uses = self.tests_use.iter();
        let uses = uses.filter(|name| ours.contains(name) && *name != "plimsoll-skip");
        let in_tests = row(ALLOWED_IN_TESTS, &self.name);
        found.extend(differences(uses, &in_tests, "use in its tests"));

        let unused = unused::unused(&self.identifiers, &self.sources);
        let unused = unused.filter(|name| !FOR_FEATURES.contains(&(&self.name, name)));
        found.extend(unused.map(|name| format!("depends on {name}, which no source names")));

        let product = self.folder.join("src");
        let circles = circles::circles(&product, &self.sources);
        let circles = circles.iter().map(|files| files.join(" "));
        found.extend(circles.map(|circle| format!("has a circle among its files: {circle}")));
        for (path, text) in &self.sources {
            let fields = fields::listed_strings(text).into_iter();
            let name = path.file_name().unwrap_or_default().display();
            let fields = fields.map(|field| format!("{name}:{field}"));
            found.extend(
                fields
                    .filter(|_| path.starts_with(&product))
                    .map(|field| format!("has an enum's values in the string {field}")),
            );
        }

        if !takes_workspace_lints(&self.manifest) {
            found.push("does not take the workspace's lints".to_owned());
        }
        // Only plimsoll-skip records that a test did not run; bench prints it among its own results.
        let may_print = ["plimsoll-skip", "plimsoll-bench"].contains(&self.name.as_str());
        let prints = |text: &str| text.contains(concat!("\"SKIP", "PED"));
        let printing = self
            .sources
            .iter()
            .filter(|(_, text)| prints(text) && !may_print);
        found.extend(printing.map(|(path, _)| {
            let path = path.display();
            format!("prints that a test is skipped in {path}: plimsoll_skip::skip counts it")
        }));
        let may_be_unsafe = WITH_UNSAFE.contains(&self.name.as_str());
        for (path, text) in &self.sources {
            let in_sys = path.file_name().is_some_and(|name| name == "sys.rs");
            if has_unsafe_code(text) && !(may_be_unsafe && in_sys) {
                found.push(format!("has unsafe code in {}", path.display()));
            }
            let forbids = text.lines().any(|line| line == "#![forbid(unsafe_code)]");
            if self.roots.contains(path) && !may_be_unsafe && !forbids {
                found.push(format!("does not forbid unsafe code in {}", path.display()));
            }
        }
        found
    }
}

/// What a table allows a crate.
fn row(table: &[(&str, &[&str])], name: &str) -> Vec<String> {
    let row = table.iter().find(|(of, _)| *of == name);
    let allowed = row.map_or(&[][..], |(_, allowed)| allowed);
    allowed.iter().map(|&name| name.to_owned()).collect()
}

/// What is done and not allowed, and what is allowed and not done.
fn differences<'a>(
    done: impl Iterator<Item = &'a String>,
    allowed: &[String],
    verb: &str,
) -> Vec<String> {
    let done: Vec<_> = done.collect();
    let forbidden = done.iter().filter(|what| !allowed.contains(what));
    let unused = allowed.iter().filter(|what| !done.contains(what));
    forbidden
        .map(|what| format!("may not {verb} {what}"))
        .chain(unused.map(|what| format!("may {verb} {what}, and does not: take it off the table")))
        .collect()
}

fn read_sources(folder: &Path, sources: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            read_sources(&path, sources);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            sources.push((path, text));
        }
    }
}

fn takes_workspace_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(str::trim);
    lines.any(|line| line == "[lints]")
        && lines
            .take_while(|line| !line.starts_with('['))
            .any(|line| line == "workspace = true")
}

/// Whether a text opens a block, function, trait or the like as unsafe, outside of line comments.
fn has_unsafe_code(text: &str) -> bool {
    text.lines().any(|line| {
        let code = line.split("//").next().unwrap_or_default();
        code.match_indices(concat!("uns", "afe")).any(|(at, word)| {
            let begins = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let rest = code[at + word.len()..].trim_start();
            let opens = ["{", "(", "fn ", "impl", "trait ", "extern"];
            begins && (rest.is_empty() || opens.iter().any(|next| rest.starts_with(next)))
        })
    })
}

#[test]
fn every_crate_keeps_to_the_architecture() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let members: Vec<_> = metadata.packages.iter().map(Member::of).collect();
    let ours: Vec<_> = members.iter().map(|member| member.name.clone()).collect();
    let violations: Vec<_> = members
        .iter()
        .flat_map(|member| {
            let found = member.violations(&ours).into_iter();
            found.map(|violation| format!("{} {violation}", member.name))
        })
        .collect();
    assert!(violations.is_empty(), "{violations:#?}");
    assert!(members.len() >= 6, "{ours:?}");
}

/// Lines `PACKAGE FEATURES` of all that a build of some packages compiles.
fn compiled(selection: &[&str], edges: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--quiet", "--prefix", "none", "--edges", edges])
        .args(["--format", "{p} {f}"])
        .args(selection)
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    let lines = String::from_utf8(output.stdout).unwrap();
    let lines = lines.lines().map(|line| line.trim_end_matches(" (*)"));
    lines.map(|line| line.trim_end().to_owned()).collect()
}

/// A dependency whose features differ between two of these builds would be compiled twice.
#[test]
fn demo_benchmarks_and_tests_share_one_build_of_each_dependency() {
    let demo = [
        "-p",
        "plimsoll",
        "-p",
        "plimsoll-daemon",
        "-p",
        "plimsoll-lab",
    ];
    let bench = [&demo[..], &["-p", "plimsoll-bench"]].concat();
    // `./dev` builds the Python wheel apart from all others.
    let members = ["--workspace", "--exclude", "plimsoll-python"];
    let tests = compiled(&members, "normal,build,dev");
    for selection in [&demo[..], &bench] {
        let compiled = compiled(selection, "normal,build");
        let alone: Vec<_> = compiled.difference(&tests).collect();
        assert!(alone.is_empty(), "only with {selection:?}: {alone:#?}");
    }
}

/// A crate that breaks nothing.
fn source() -> Member {
    Member {
        name: "plimsoll-source".to_owned(),
        identifiers: BTreeSet::new(),
        uses: vec!["plimsoll-flow".to_owned(), "thiserror".to_owned()],
        tests_use: vec!["proptest".to_owned()],
        folder: PathBuf::from("crates/source"),
        manifest: "[lints]\nworkspace = true\n\n[dependencies]\n".to_owned(),
        sources: vec![(
            PathBuf::from("lib.rs"),
            "#![forbid(unsafe_code)]\n".to_owned(),
        )],
        roots: vec![PathBuf::from("lib.rs")],
    }
}

fn violations(member: &Member) -> Vec<String> {
    member.violations(&["plimsoll-flow", "plimsoll-estimator"].map(str::to_owned))
}

#[test]
fn a_forbidden_dependency_is_seen() {
    assert_eq!(violations(&source()), [""; 0]);
    let mut member = source();
    member.uses.push("plimsoll-estimator".to_owned());
    assert_eq!(violations(&member), ["may not use plimsoll-estimator"]);
    member.uses = source().uses;
    member.tests_use.push("plimsoll-estimator".to_owned());
    assert_eq!(
        violations(&member),
        ["may not use in its tests plimsoll-estimator"]
    );
    member.uses.clear();
    member.tests_use.clear();
    let unused = "may use plimsoll-flow, and does not: take it off the table";
    assert_eq!(violations(&member), [unused]);
    member.name = "plimsoll-stranger".to_owned();
    let unknown = "is not in the table of allowed dependencies";
    assert_eq!(violations(&member), [unknown]);
}

#[test]
fn lints_that_are_not_inherited_are_seen() {
    for manifest in [
        "[dependencies]\n",
        "[lints]\nworkspace = false\n",
        "[lints]\n[other]\nworkspace = true\n",
    ] {
        let mut member = source();
        member.manifest = manifest.to_owned();
        assert_eq!(violations(&member), ["does not take the workspace's lints"]);
    }
}

#[test]
fn unsafe_code_out_of_its_place_is_seen() {
    let block = concat!("let x = uns", "afe { f() };\n");
    for text in [
        block,
        concat!("pub uns", "afe fn f() {}\n"),
        concat!("#[uns", "afe(no_mangle)]\n"),
        concat!("uns", "afe\n{ f() }\n"),
    ] {
        let mut member = source();
        member
            .sources
            .push((PathBuf::from("sys.rs"), text.to_owned()));
        assert_eq!(violations(&member), ["has unsafe code in sys.rs"]);
        member.name = "plimsoll-trap".to_owned();
        assert_eq!(violations(&member), [""; 0]);
        member.sources[1].0 = PathBuf::from("tracer.rs");
        assert_eq!(violations(&member), ["has unsafe code in tracer.rs"]);
    }
    assert!(!has_unsafe_code(
        "// an unsafe { block } is not here\n#![forbid(unsafe_code)]\n"
    ));
    let mut member = source();
    member.sources[0].1.clear();
    assert_eq!(
        violations(&member),
        ["does not forbid unsafe code in lib.rs"]
    );
}
