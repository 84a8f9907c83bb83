//! What a test says and does where it cannot run.
//!
//! A test that lacks something (a guest to boot, root's rights, a program) calls [`skip`] with the kind of what is
//! missing and the reason, and returns. That a test did not run is thus never silent:
//!
//! - The reason is printed as `SKIPPED: ...`, and added as a line to the file that `PLIMSOLL_SKIPPED` names, if any.
//!   `./dev test` ends with that list and its length. No other code of a test prints that word, which a rule checks.
//! - `PLIMSOLL_TESTS_MUST_RUN` lists kinds, separated by commas, whose absence fails the test; `all` is every kind.
//!
//! Tests that boot guests call [`guests_wanted`] first: `cargo test` alone boots none.
//!
//! Beside it, [`longer`] is how `./dev soak` makes campaigns longer, and [`write_program`] is how a test makes a program.
//!
//! Not here: how to find out what is missing.

#![forbid(unsafe_code)]

use std::env;
use std::fmt::{self, Display};
use std::fs::{self, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Lists kinds whose absence fails a test.
const MUST_RUN: &str = "PLIMSOLL_TESTS_MUST_RUN";
/// Names the file to which each skip adds a line.
const SKIPPED: &str = "PLIMSOLL_SKIPPED";
/// Multiplies the length of campaigns.
const LONGER: &str = "PLIMSOLL_TESTS_LONGER";
/// Is set where tests may boot guests.
const GUESTS: &str = "PLIMSOLL_TESTS_GUESTS";

/// What a test lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// A guest that can be booted and, where a test needs it, traced.
    Live,
    /// Rights that only root has.
    Root,
    /// A swap file that can be turned on, or its absence.
    Swap,
    /// What this kernel must be able to do with userfaultfd(2).
    Userfaultfd,
    /// KVM.
    Kvm,
    /// A program that is not part of the project.
    Program,
    /// Files that are not part of the project, such as recorded traces.
    Data,
    /// What only some hosts have, such as free huge pages, AppArmor, or enough idle time to compare times.
    Host,
}

impl Lack {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::Live,
        Self::Root,
        Self::Swap,
        Self::Userfaultfd,
        Self::Kvm,
        Self::Program,
        Self::Data,
        Self::Host,
    ];

    /// The name by which `PLIMSOLL_TESTS_MUST_RUN` lists it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Root => "root",
            Self::Swap => "swap",
            Self::Userfaultfd => "userfaultfd",
            Self::Kvm => "kvm",
            Self::Program => "program",
            Self::Data => "data",
            Self::Host => "host",
        }
    }
}

impl Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Records that the current test, or a part of it, does not run because a `kind` of thing is missing. The test returns
/// after it.
///
/// # Panics
///
/// If `PLIMSOLL_TESTS_MUST_RUN` lists the kind, or something that is no kind; if the file `PLIMSOLL_SKIPPED` cannot be
/// written.
#[track_caller]
pub fn skip(kind: Lack, why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a thread of a test");
    // Tests of two programs may have one name.
    let program = env::current_exe().unwrap_or_default();
    let program = program_name(&program.file_stem().unwrap_or_default().to_string_lossy());
    let line = format!("SKIPPED: {program}: {test} ({kind}): {why}\n");
    print!("{line}");
    if let Some(file) = env::var_os(SKIPPED) {
        let written = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&file)
            .and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{SKIPPED}: {}: {error}", file.display()));
    }
    let must_run = env::var(MUST_RUN).unwrap_or_default();
    assert!(
        !lists(&must_run, kind),
        "{MUST_RUN} lists {kind}, which is missing: {why}"
    );
}

/// The name of a test program without the checksum that cargo appends to it.
fn program_name(stem: &str) -> String {
    let is_checksum = |text: &str| text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    match stem.rsplit_once('-') {
        Some((name, checksum)) if is_checksum(checksum) => name.to_owned(),
        _ => stem.to_owned(),
    }
}

/// Whether a list of kinds has this one.
fn lists(must_run: &str, kind: Lack) -> bool {
    let words = must_run.split(',').map(str::trim);
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    for word in &words {
        let known = *word == "all" || Lack::ALL.iter().any(|kind| kind.name() == *word);
        assert!(
            known,
            "{MUST_RUN}: {word:?} is no kind of what a test needs"
        );
    }
    words.contains(&"all") || words.contains(&kind.name())
}

/// Whether tests may boot guests: where `PLIMSOLL_TESTS_GUESTS` is set. Skips the test otherwise.
#[track_caller]
pub fn guests_wanted() -> bool {
    let wanted = env::var_os(GUESTS).is_some();
    if !wanted {
        skip(
            Lack::Live,
            format_args!("guests are booted by `./dev test live disk`, or with {GUESTS}=1"),
        );
    }
    wanted
}

/// How many times a campaign is to do what it does: `count`, multiplied by `PLIMSOLL_TESTS_LONGER` where that is set.
///
/// # Panics
///
/// If that variable is not a number.
pub fn longer(count: usize) -> usize {
    let Some(factor) = env::var_os(LONGER) else {
        return count;
    };
    let number = factor
        .to_str()
        .and_then(|factor| factor.parse::<usize>().ok());
    count * number.unwrap_or_else(|| panic!("{LONGER}={} is no number", factor.display()))
}

/// Writes a program that everybody may execute, through another process. A program that is open for writing cannot be executed
/// (`ETXTBSY`), and a process that another thread starts meanwhile would keep a file of this one open until it executes its own.
///
/// # Panics
///
/// If it cannot be written.
pub fn write_program(path: impl AsRef<Path>, contents: impl AsRef<[u8]>) {
    let path = path.as_ref();
    let mut writer = Command::new("tee")
        .arg("--")
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = writer.stdin.take().unwrap();
    stdin.write_all(contents.as_ref()).unwrap();
    drop(stdin);
    assert!(writer.wait().unwrap().success(), "{}", path.display());
    fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_listed_by_its_name_or_with_all_others() {
        assert!(lists("swap, live", Lack::Live));
        assert!(!lists("swap,root", Lack::Live));
        assert!(!lists("", Lack::Live));
        for kind in Lack::ALL {
            assert!(lists("all", kind));
            assert!(lists(kind.name(), kind));
        }
    }

    #[test]
    fn a_program_is_named_without_its_checksum() {
        assert_eq!(program_name("live-0123456789abcdef"), "live");
        assert_eq!(
            program_name("plimsoll_trap-0123456789abcdef"),
            "plimsoll_trap"
        );
        assert_eq!(program_name("a-test"), "a-test");
    }

    #[test]
    #[should_panic(expected = "\"lives\" is no kind")]
    fn a_word_that_is_no_kind_is_refused() {
        lists("lives", Lack::Live);
    }
}
