//! Files of curves and of recorded inputs.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use plimsoll_flow::{LogErrors, PageSize};
use plimsoll_protocol::curve_json::{CurveJson, CurvesBy, PointJson, SCHEMA};
use plimsoll_protocol::plan::PlanInputs;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use plimsoll_output::bail_usage;

/// Largest file.
const FILE_BYTES_MAX: u64 = 1 << 28;

/// A VM's curve and its file.
#[derive(Debug)]
pub(super) struct CurveFile {
    /// The file's name in errors.
    pub(super) file: String,
    /// The VM.
    pub(super) vm: String,
    /// Its curve; `None` if its trace was too short for one.
    pub(super) curve: Option<CurveJson>,
}

impl CurveFile {
    /// The VM's memory while it was observed.
    pub(super) fn baseline_bytes(&self) -> Option<u64> {
        let curve = self.curve.as_ref()?;
        Some(curve.baseline_pages?.saturating_mul(curve.page_bytes))
    }
}

/// A document in a file: a curve, a line of `attach`, or another object that contains a curve, or one of each device.
#[derive(Debug, Deserialize)]
struct Document {
    schema: u32,
    vm: Option<String>,
    /// What `curves` are of: devices, or intervals of time.
    by: Option<CurvesBy>,
    curves: Option<Vec<Part>>,
    /// A line of `attach` about one period.
    period: Option<u64>,
    /// The last line of `attach`.
    #[serde(default, rename = "final")]
    is_final: bool,
    curve: Option<CurveJson>,
    page_bytes: Option<u64>,
    references: Option<u64>,
    baseline_pages: Option<u64>,
    points: Option<Vec<PointJson>>,
    #[serde(default)]
    uncertain_pages: u64,
    #[serde(default)]
    log_errors_permille: Vec<LogErrors>,
}

/// A device or interval of `mrc`.
#[derive(Debug, Deserialize)]
struct Part {
    name: Option<String>,
    curve: Option<CurveJson>,
}

/// Reads the curves of all files; each VM has one.
pub(super) fn read_curves(paths: &[PathBuf]) -> anyhow::Result<Vec<CurveFile>> {
    let mut found: Vec<CurveFile> = Vec::new();
    for path in paths {
        let file = name(path);
        let before = found.len();
        let mut periods = false;
        for document in documents::<Document>(path)? {
            if document.period.is_some() && !document.is_final {
                periods = true;
                continue;
            }
            for (vm, curve) in curves_of(document, &file)? {
                if let Some(other) = found.iter().find(|other| other.vm == vm) {
                    bail_usage!(
                        "'{file}' has a curve of VM {vm}, and so has '{}'",
                        other.file
                    );
                }
                found.push(CurveFile {
                    file: file.clone(),
                    vm,
                    curve,
                });
            }
        }
        if found.len() == before {
            let why = if periods {
                "has periods of a trace but not its last line: the trace had not ended"
            } else {
                "has no curve: it is empty"
            };
            bail!("'{file}' {why}");
        }
    }
    Ok(found)
}

/// The VMs of a document, each with its curve.
fn curves_of(
    mut document: Document,
    file: &str,
) -> anyhow::Result<Vec<(String, Option<CurveJson>)>> {
    let Some(parts) = document.curves.take() else {
        let vm = document.vm.clone();
        let vm = vm.with_context(|| format!("'{file}' has a curve without 'vm'"))?;
        let curve = curve_of(document, &vm).with_context(|| format!("'{file}', VM {vm}"))?;
        return Ok(vec![(vm, curve)]);
    };
    if document.by != Some(CurvesBy::Device) {
        bail!("'{file}' has curves of intervals, of which a VM has one: see `mrc` without --every");
    }
    let curves = parts.into_iter().map(|part| {
        let curve = part.curve;
        let curve = curve.with_context(|| {
            let name = part
                .name
                .map_or_else(String::new, |name| format!(" ({name})"));
            format!(
                "'{file}' has a device without a curve{name}: none of its references was sampled"
            )
        })?;
        let vm = curve.vm.clone();
        let checked = curve.to_curve();
        checked.with_context(|| format!("'{file}', VM {vm}"))?;
        Ok((vm, Some(curve)))
    });
    curves.collect()
}

fn curve_of(document: Document, vm: &str) -> anyhow::Result<Option<CurveJson>> {
    if document.schema != SCHEMA {
        bail!("schema {}, where {SCHEMA} is read", document.schema);
    }
    let curve = match (document.points, document.curve) {
        (Some(points), _) => {
            let missing = |field: &str| anyhow!("a curve without '{field}'");
            CurveJson {
                schema: document.schema,
                vm: vm.to_owned(),
                page_bytes: document.page_bytes.ok_or_else(|| missing("page_bytes"))?,
                references: document.references.ok_or_else(|| missing("references"))?,
                baseline_pages: document.baseline_pages,
                vcpu_seconds_per_second: None,
                uncertain_pages: document.uncertain_pages,
                log_errors_permille: document.log_errors_permille,
                points,
            }
        }
        (None, Some(curve)) => curve,
        (None, None) if document.is_final => return Ok(None),
        (None, None) => bail!("no curve: neither 'points' nor 'curve' is there"),
    };
    curve.to_curve()?;
    Ok(Some(curve))
}

/// The page size of all curves.
pub(super) fn page_bytes(found: &[CurveFile]) -> anyhow::Result<u64> {
    let mut known = found
        .iter()
        .filter_map(|found| Some((found, found.curve.as_ref()?.page_bytes)));
    let Some((first, expected)) = known.next() else {
        return Ok(PageSize::FOUR_KIB.bytes());
    };
    if let Some((other, found)) = known.find(|(_, bytes)| *bytes != expected) {
        bail_usage!(
            "'{}' counts in pages of {expected} bytes and '{}' in pages of {found}: one host has one page size",
            first.file,
            other.file
        );
    }
    Ok(expected)
}

/// Reads the recorded inputs of a decision.
pub(super) fn read_inputs(path: &Path) -> anyhow::Result<PlanInputs> {
    let mut inputs = documents(path)?;
    match (inputs.pop(), inputs.len()) {
        (Some(inputs), 0) => Ok(inputs),
        (None, _) => bail!("'{}' is empty", name(path)),
        (Some(_), others) => bail!(
            "'{}' contains the inputs of {} decisions: select one",
            name(path),
            others + 1
        ),
    }
}

/// Reads JSON values one after the other, to the file's end.
fn documents<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    let source: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        let file = File::open(path).with_context(|| format!("cannot read '{}'", name(path)))?;
        Box::new(file)
    };
    let mut source = source.take(FILE_BYTES_MAX + 1);
    let values = serde_json::Deserializer::from_reader(BufReader::new(&mut source));
    let values: Result<Vec<T>, _> = values.into_iter().collect();
    if source.limit() == 0 {
        bail!(
            "'{}' is larger than {} MiB; the last line of a long trace is enough",
            name(path),
            FILE_BYTES_MAX >> 20
        );
    }
    values.with_context(|| format!("cannot read '{}'", name(path)))
}

fn name(path: &Path) -> String {
    match path.to_str() {
        Some("-") => "standard input".to_owned(),
        _ => path.display().to_string(),
    }
}
