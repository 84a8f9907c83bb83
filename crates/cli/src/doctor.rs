//! `plimsoll doctor`: what this host can do, and why not.
//!
//! Whatever is found, the command itself succeeds. Not here: the examination (`plimsoll_observe::doctor`).

use std::io::Write;

use plimsoll_observe::doctor::{Chapter, Finding, examine, one_target};
use plimsoll_output::{TableOrJsonArg, cut, printable};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::vm::BackendView;
use serde::Serialize;

/// Check which features this host supports, or by which backends a VM, a process or a control group can be traced.
///
/// Without a target: reads the kernel's settings, tests features that only a test can verify, and checks the running
/// QEMU VMs. With a target: lists the tracing backends that can attach to it, and for each of the others the reason and what to
/// change. Changes nothing. The exit code is 0 whatever the result, and 1 if there is no such target.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// VM to assess, by process id, name or UUID; or process, by process id; or control group, by its path, by its name (a
    /// systemd unit's), or by the identifier of its container or pod
    #[arg(value_name = "PID|NAME|UUID|cgroup:PATH|cgroup:NAME")]
    target: Option<String>,
    #[command(flatten)]
    format: TableOrJsonArg,
}

/// The whole examination, as JSON gives it.
#[derive(Debug, Serialize)]
struct Examination {
    schema: u32,
    chapters: Vec<Chapter>,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if let Some(target) = &args.target {
        return run_for_target(target, args.format, out);
    }
    let schema = SCHEMA;
    let chapters = examine();
    let examination = Examination { schema, chapters };
    args.format
        .write(out, || table(&examination.chapters), &examination)
}

/// Characters of a subject that the table shows: one long name would widen all lines.
const SUBJECT_CHARACTERS: usize = 40;

/// The assessment of a target, as JSON shows it.
#[derive(Debug, Serialize)]
struct TargetReport<'a> {
    schema: u32,
    vm: &'a str,
    backends: &'a [BackendView],
}

fn run_for_target(target: &str, format: TableOrJsonArg, out: &mut dyn Write) -> anyhow::Result<()> {
    let assessment = one_target::examine(target)?;
    let report = TargetReport {
        schema: SCHEMA,
        vm: &assessment.name,
        backends: &assessment.backends,
    };
    format.write(out, || table(&[assessment.chapter()]), &report)
}

fn table(chapters: &[Chapter]) -> String {
    let mut table = String::new();
    // VMs and groups choose their names.
    let shown = |subject: &str| cut(&printable(subject), SUBJECT_CHARACTERS);
    let subjects = chapters.iter().flat_map(|chapter| &chapter.findings);
    let width = subjects
        .map(|finding| shown(&finding.subject).chars().count())
        .max();
    let width = width.unwrap_or(0);
    for (index, chapter) in chapters.iter().enumerate() {
        if index > 0 {
            table.push('\n');
        }
        table.push_str(&format!("{}\n", printable(&chapter.title)));
        for finding in &chapter.findings {
            let Finding {
                subject,
                verdict,
                found,
                advice,
            } = finding;
            let (subject, found) = (shown(subject), printable(found));
            table.push_str(&format!("  {verdict:<7}  {subject:<width$}  {found}\n"));
            if let Some(advice) = advice {
                table.push_str(&format!(
                    "  {:<7}  {:<width$}  -> {}\n",
                    "",
                    "",
                    printable(advice)
                ));
            }
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chapters() -> Vec<Chapter> {
        vec![
            Chapter {
                title: "Kernel".to_owned(),
                findings: vec![Finding::ok("kernel", "Linux 6.1")],
            },
            Chapter {
                title: "Virtual machines".to_owned(),
                findings: vec![Finding::no("VM web", "private memory", "share it")],
            },
        ]
    }

    #[test]
    fn the_table_has_a_line_for_each_finding_and_one_for_each_advice() {
        let expected = "Kernel\n  ok       kernel  Linux 6.1\n\nVirtual machines\n  \
                     no       VM web  private memory\n                   -> share it\n";
        assert_eq!(table(&chapters()), expected);
    }

    #[test]
    fn one_long_name_does_not_widen_all_lines() {
        let mut chapters = chapters();
        chapters[1].findings[0].subject = "VM ".to_owned() + &"x".repeat(250);
        let table = table(&chapters);
        let widest = table.lines().map(|line| line.chars().count()).max();
        assert!(widest < Some(2 * SUBJECT_CHARACTERS), "{table}");
        assert!(table.contains('…'), "{table}");
    }

    #[test]
    fn the_json_says_the_same_under_a_schema() {
        let (schema, chapters) = (SCHEMA, chapters());
        let json = serde_json::to_value(Examination { schema, chapters }).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(json["chapters"][0]["findings"][0]["verdict"], "ok");
        let advice = &json["chapters"][1]["findings"][0]["advice"];
        assert_eq!(advice, "share it");
    }
}
