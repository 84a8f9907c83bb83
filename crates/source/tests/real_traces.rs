//! Reads real traces to the last reference.
//!
//! They are not part of the repository: `PLIMSOLL_TRACES` is their directory, by default `target/traces`. Without them the tests print SKIPPED.

use plimsoll_skip::{Lack, skip};
use std::path::{Path, PathBuf};

use plimsoll_flow::{AccessKind, PageNumber, PageSize, ReferenceBatch, Source};
use plimsoll_source::{Compression, Format, Options, Trace, WriteOptions, open, read, write};

fn trace_file(name: &str) -> Option<PathBuf> {
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/traces");
    let folder = std::env::var_os("PLIMSOLL_TRACES").map_or(usual, PathBuf::from);
    let path = folder.join(name);
    if path.exists() {
        return Some(path);
    }
    skip(
        Lack::Data,
        format_args!("no {name} in {}; set PLIMSOLL_TRACES", folder.display()),
    );
    None
}

fn references(mut trace: Trace) -> Vec<(PageNumber, AccessKind)> {
    let mut batch = ReferenceBatch::new();
    let mut all = Vec::new();
    while trace.next_batch(&mut batch).unwrap() {
        all.extend(
            batch
                .iter()
                .map(|reference| (reference.page, reference.kind)),
        );
    }
    all
}

#[test]
fn cloud_physics_is_the_same_as_csv_and_as_oracle_general() {
    let (Some(csv), Some(oracle)) = (
        trace_file("cloudPhysicsIO.csv"),
        trace_file("cloudPhysicsIO.oracleGeneral.bin"),
    ) else {
        return;
    };
    let options = Options {
        page_column: Some("lbn".parse().unwrap()),
        ..Options::default()
    };
    let csv = open(&csv, &options).unwrap();
    assert_eq!(csv.format(), Format::CSV);
    let csv = references(csv);
    let oracle = open(&oracle, &Options::default()).unwrap();
    assert_eq!(oracle.format(), Format::ORACLE_GENERAL);
    let oracle = references(oracle);
    assert_eq!(csv.len(), 113_872);
    let of_kind = |kind| csv.iter().filter(|reference| reference.1 == kind).count();
    assert_eq!(of_kind(AccessKind::Read), 46_974);
    assert_eq!(of_kind(AccessKind::Write), 66_898);
    assert!(
        csv.iter()
            .map(|reference| reference.0)
            .eq(oracle.iter().map(|reference| reference.0))
    );
}

#[test]
fn cloud_physics_as_vscsi_is_the_same_requests_as_csv_and_as_oracle_general() {
    let (Some(vscsi), Some(csv), Some(oracle)) = (
        trace_file("cloudPhysicsIO.vscsi"),
        trace_file("cloudPhysicsIO.csv"),
        trace_file("cloudPhysicsIO.oracleGeneral.bin"),
    ) else {
        return;
    };
    let sector = Options {
        page_size: PageSize::new(512).unwrap(),
        ..Options::default()
    };
    let trace = open(&vscsi, &sector).unwrap();
    assert_eq!(trace.format(), Format::VSCSI);
    let sectors = references(trace);
    // Also recognised by its content alone.
    let bytes = std::fs::read(&vscsi).unwrap();
    let trace = read(&bytes[..], "vscsi", &sector).unwrap();
    assert_eq!(trace.format(), Format::VSCSI);
    assert!(references(trace) == sectors);

    // The CSV contains the length in bytes, which our `csv` ignores, so it is parsed here.
    let text = std::fs::read_to_string(&csv).unwrap();
    let mut starts = Vec::new();
    let mut expected = Vec::new();
    for line in text.lines().skip(1) {
        let [_, _, op, size, block] = line.split(',').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let kind = match op {
            "28" | "88" => AccessKind::Read,
            "2a" | "8a" => AccessKind::Write,
            _ => panic!("{line}"),
        };
        let (size, block): (u64, u64) = (size.parse().unwrap(), block.parse().unwrap());
        starts.push((PageNumber(block), kind));
        let blocks = block..block + size / 512;
        expected.extend(blocks.map(|block| (PageNumber(block), kind)));
    }
    assert!(sectors == expected);

    // The object formats have the first sector of each request.
    let by_csv = Options {
        page_column: Some("lbn".parse().unwrap()),
        ..Options::default()
    };
    assert!(references(open(&csv, &by_csv).unwrap()) == starts);
    let of_pages = |references: &[(PageNumber, AccessKind)]| -> Vec<PageNumber> {
        references.iter().map(|reference| reference.0).collect()
    };
    let oracle = references(open(&oracle, &Options::default()).unwrap());
    assert!(of_pages(&oracle) == of_pages(&starts));
}

#[test]
fn the_future_we_write_is_the_one_lib_cache_sim_wrote() {
    let Some(path) = trace_file("cloudPhysicsIO.oracleGeneral.bin") else {
        return;
    };
    let theirs = std::fs::read(&path).unwrap();
    let mut ours = Vec::new();
    let options = WriteOptions {
        format: Format::ORACLE_GENERAL,
        compression: Compression::Plain,
        page_size: PageSize::default(),
    };
    let mut writer = write(&mut ours, "ours", &options).unwrap();
    let mut trace = open(&path, &Options::default()).unwrap();
    let mut batch = ReferenceBatch::new();
    while trace.next_batch(&mut batch).unwrap() {
        writer.write(&batch).unwrap();
    }
    writer.finish().unwrap();
    // The time and the objects' sizes of block I/O are not known here.
    let known = |bytes: &[u8]| -> Vec<[Vec<u8>; 2]> {
        let fields = |record: &[u8]| [record[4..12].to_vec(), record[16..24].to_vec()];
        bytes.chunks(24).map(fields).collect()
    };
    assert!(known(&ours) == known(&theirs));
}

#[test]
fn the_lirs_traces_are_told_by_content_and_read_whole() {
    // 2_pools has 100 002 lines, of which two are the phase mark `*`.
    for (name, count) in [("sprite.trace.gz", 133_996), ("2_pools.trace.gz", 100_000)] {
        let Some(path) = trace_file(name) else {
            continue;
        };
        let trace = open(&path, &Options::default()).unwrap();
        assert_eq!(trace.format(), Format::IDS);
        assert_eq!(trace.compression(), Compression::Gzip);
        let progress = trace.progress();
        assert_eq!(references(trace).len(), count, "{name}");
        assert_eq!(Some(progress.read_bytes()), progress.total_bytes());
    }
}

#[test]
fn a_binary_trace_of_no_format_of_ours_is_refused() {
    let Some(path) = trace_file("web07.trace.xz") else {
        return;
    };
    let error = open(&path, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("unknown format"), "{error}");
    assert!(
        error.ends_with(
            &Format::all()
                .map(Format::name)
                .collect::<Vec<_>>()
                .join(", ")
        ),
        "{error}"
    );
}
