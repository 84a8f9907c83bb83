//! The page around the charts: one file that needs neither network nor script.

use std::fmt::Write as _;

use plimsoll_vm::Accelerator;

use crate::plot::Escaped;

use super::findings::Findings;
use super::pictures::Picture;
use super::recording::Recording;

const STYLE: &str = "\
body{margin:0;background:#f6f6f4;color:#1a1a1a;font:16px/1.5 Ubuntu,'Helvetica Neue',Helvetica,Arial,sans-serif}\
main{max-width:860px;margin:0 auto;padding:40px 24px 64px}\
h1{font-size:28px;font-weight:500;line-height:1.25;margin:0 0 12px}\
h2{font-size:19px;font-weight:500;margin:40px 0 12px}\
p{margin:0 0 12px;max-width:46em}\
.facts{display:flex;flex-wrap:wrap;gap:12px;margin:24px 0}\
.fact{flex:1 1 150px;background:#fff;border:1px solid #e4e4e4;padding:14px 16px}\
.fact b{display:block;font-size:24px;font-weight:500;line-height:1.2}\
.fact span{color:#555;font-size:14px}\
figure{margin:0 0 28px;background:#fff;border:1px solid #e4e4e4;padding:8px 16px 14px}\
figure svg{display:block;width:100%;height:auto}\
figcaption{color:#555;font-size:14px;padding:0 26px}\
table{border-collapse:collapse;width:100%;background:#fff;border:1px solid #e4e4e4;font-size:15px}\
th,td{text-align:left;padding:6px 14px;border-bottom:1px solid #eee;vertical-align:top}\
th{font-weight:500}td{font-variant-numeric:tabular-nums}\
tr:first-child>*{border-bottom:1px solid #bbb;font-weight:500}\
.sub{padding-left:32px;color:#555;font-weight:400}\
.wrong{color:#d55e00}";

/// Writes the page.
pub(super) fn html(recording: &Recording, findings: &Findings, pictures: &[Picture]) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>Plimsoll: two VMs traced live</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>Two running VMs, their memory traced from outside</h1>\n<p>{}</p>\n<p>{}</p>\n",
        Escaped(&introduction(recording)),
        Escaped(&host(recording)),
    );
    page += "<div class=\"facts\">\n";
    for (value, label, is_wrong) in facts(findings) {
        let class = if is_wrong { " class=\"wrong\"" } else { "" };
        let _ = writeln!(
            page,
            "<div class=\"fact\"><b{class}>{}</b><span>{}</span></div>",
            Escaped(&value),
            Escaped(&label)
        );
    }
    page += "</div>\n";
    for picture in pictures {
        let _ = write!(
            page,
            "<figure>\n{}<figcaption>{}</figcaption>\n</figure>\n",
            picture.svg,
            Escaped(&picture.caption)
        );
    }
    page += "<h2>Figures of this run</h2>\n<table>\n";
    for [what, steps, zipf] in &findings.rows {
        let class = if what.starts_with(' ') {
            " class=\"sub\""
        } else {
            ""
        };
        let _ = writeln!(
            page,
            "<tr><th{class}>{}</th><td>{}</td><td>{}</td></tr>",
            Escaped(what.trim_start()),
            Escaped(steps),
            Escaped(zipf)
        );
    }
    page += "</table>\n</main>\n</body>\n</html>\n";
    page
}

fn introduction(recording: &Recording) -> String {
    let (from, to) = recording.traced;
    format!(
        "Two VMs ran side by side. For {:.0} s Plimsoll, from outside and without their help, made a sample \
         of their pages inaccessible and recorded which were touched in what order. The guests told on their \
         consoles what they were doing, and verified every page they visited; that is the truth below.",
        (to - from).as_secs_f64()
    )
}

fn host(recording: &Recording) -> String {
    let how = match recording.detection.accelerator {
        Accelerator::Kvm => "under KVM",
        Accelerator::Tcg => {
            "under TCG: QEMU emulated their CPUs, so that their speed is not that of real hardware"
        }
    };
    format!(
        "Host: Linux {} with {} CPUs. The VMs ran {how}.",
        recording.kernel, recording.cpus
    )
}

/// The figures that stand first: value, what it is, whether it is bad.
fn facts(findings: &Findings) -> Vec<(String, String, bool)> {
    let sets = &findings.working_sets;
    let mut facts = vec![(
        format!("{} of {}", sets.good, sets.periods),
        "periods found the working set within 5 % of the truth".to_owned(),
        false,
    )];
    let distance = findings
        .zipf
        .curve
        .as_ref()
        .and_then(|curve| curve.distance);
    if let Some(distance) = distance {
        facts.push((
            format!("{:.3}", distance.mean_absolute_error),
            "mean error of the Zipf guest's miss-ratio curve against its closed form".to_owned(),
            false,
        ));
    }
    let overhead = findings
        .steps
        .overhead
        .mean
        .max(findings.zipf.overhead.mean);
    facts.push((
        format!("{:.2} %", overhead * 100.0),
        "of a VM's CPU time went into tracing (the higher of both), by the tracer's account"
            .to_owned(),
        false,
    ));
    facts.push((
        findings.mismatches.to_string(),
        "pages found wrong by the guests".to_owned(),
        findings.mismatches > 0,
    ));
    facts
}
