//! Compares the plugin's model in C with its twin in Rust: the same accesses must give the same records.
//!
//! The C code is built without QEMU, with the stubs in `qemu/pagelog/test`. Without a C compiler nothing is tested.

use plimsoll_skip::{Lack, skip};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use plimsoll_flow::PageNumber;
use plimsoll_pagelog::TlbShape;
use plimsoll_pagelog::mmu::{Config, Mmu};
use plimsoll_pagelog::record::Record;
use proptest::prelude::*;

/// The program, built once; `None` without a compiler.
fn model() -> Option<&'static Path> {
    static MODEL: OnceLock<Option<PathBuf>> = OnceLock::new();
    MODEL
        .get_or_init(|| {
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../qemu/pagelog");
            let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page-log-model");
            let built = Command::new("cc")
                .args(["-std=gnu11", "-O2", "-pthread", "-o"])
                .arg(&program)
                .args(["test/accesses.c", "model.c", "options.c"].map(|file| sources.join(file)))
                .status();
            match built {
                Ok(status) => {
                    assert!(status.success(), "the plugin's model does not build");
                    Some(program)
                }
                Err(error) => {
                    skip(Lack::Program, format_args!("no C compiler: {error}"));
                    None
                }
            }
        })
        .as_deref()
}

fn shape() -> impl Strategy<Value = TlbShape> {
    (0_u32..5, 1_u32..6)
        .prop_map(|(sets, ways)| TlbShape::new((1 << sets) * ways, ways).expect("a shape"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_plugins_model_tells_what_its_twin_tells(
        tlb in shape(),
        tlb2 in prop::option::of(shape()),
        filter_pages in prop::option::of(1_u32..40),
        accesses in prop_oneof![
            prop::collection::vec((0_u64..12, any::<bool>()), 1..1500),
            prop::collection::vec((0_u64..300, prop::bool::weighted(0.2)), 1..1500),
        ],
    ) {
        let Some(model) = model() else { return Ok(()) };
        let config = Config { tlb, tlb2, filter_pages, interval_references: None };
        let mut options = vec!["ring=none".to_owned(), format!("ram={}", 1_u64 << 30), format!("tlb={tlb}")];
        options.extend(tlb2.map(|tlb2| format!("tlb2={tlb2}")));
        options.extend(filter_pages.map(|pages| format!("filter={pages}")));
        options.push(format!("references={}", if filter_pages.is_some() { "on" } else { "off" }));

        // Frames are assigned in the order of the first accesses to pages, as in the twin.
        let (mut frames, mut lines) = (HashMap::new(), String::new());
        let (mut twin, mut expected) = (Mmu::new(&config), Vec::new());
        for &(page, write) in &accesses {
            let next = frames.len();
            let frame = *frames.entry(page).or_insert(next);
            writeln!(lines, "{page} {frame} {}", u8::from(write)).unwrap();
            twin.access(PageNumber(page), write, &mut expected).unwrap();
        }
        twin.count(&mut expected);
        expected.push(Record::End);

        let mut run = Command::new(model)
            .args(&options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut input = run.stdin.take().unwrap();
        let writing = std::thread::spawn(move || input.write_all(lines.as_bytes()));
        let output = run.wait_with_output().unwrap();
        writing.join().unwrap().unwrap();
        prop_assert!(output.status.success(), "{:?}", options);
        let words = output.stdout.as_chunks().0.iter().map(|&bytes| u64::from_le_bytes(bytes));
        let found: Vec<_> = words.map(|word| Record::decode(word).unwrap()).collect();
        prop_assert_eq!(found, expected);
    }
}
