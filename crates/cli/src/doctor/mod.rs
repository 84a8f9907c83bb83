//! `plimsoll doctor`: what this host can do, and why not.
//!
//! Every finding is *ok*, *limited* or *no*, with what was found and, unless all
//! is well, what to do. Three sources, one file each:
//!
//! - [`kernel`]: what the kernel says of itself in files. They are taken under a
//!   root, so that tests can lay out a host of their own.
//! - [`trials`]: what only a try can tell, such as a system call or a guest.
//! - [`machines`]: each running QEMU VM and whether it can be traced.
//!
//! Nothing is changed, and whatever is found, the command itself succeeds.

pub mod kernel;
pub mod machines;
mod one_target;
pub mod trials;

use std::fmt;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use plimsoll_output::{TableOrJson, printable};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::vm::BackendView;
use plimsoll_vm::HostKernel;

/// Check which features this host supports, or by which backends a VM, a process or a control group can be traced.
///
/// Without a target: reads the kernel's settings, tests features that only a test can verify, and checks the running
/// QEMU VMs. With a target: lists the tracing backends that can attach to it, and for each of the others the reason and what to
/// change. Changes nothing. The exit code is 0 whatever the result, and 1 if there is no such target.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// VM to assess, by process id, name or UUID; or process, by process id; or control group, by its path
    #[arg(value_name = "PID|NAME|UUID|cgroup:PATH")]
    target: Option<String>,
    /// Output format
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    format: TableOrJson,
}

/// How far something can be used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, but not in every case or not at its best.
    Limited,
    /// It does not work.
    No,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::No => "no",
        })
    }
}

/// What was found about one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub subject: String,
    /// How far it can be used.
    pub verdict: Verdict,
    /// What was found, in a sentence or less.
    pub found: String,
    /// What that means or what to do about it; `None` if all is well.
    pub advice: Option<String>,
}

impl Finding {
    /// Reports that all is well with `subject`.
    pub fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self {
            subject: subject.into(),
            verdict: Verdict::Ok,
            found: found.into(),
            advice: None,
        }
    }

    /// Reports that `subject` works with limits.
    pub fn limited(
        subject: impl Into<String>,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            verdict: Verdict::Limited,
            advice: Some(advice.into()),
            ..Self::ok(subject, found)
        }
    }

    /// Reports that `subject` does not work.
    pub fn no(
        subject: impl Into<String>,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            verdict: Verdict::No,
            ..Self::limited(subject, found, advice)
        }
    }
}

/// Findings under one heading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chapter {
    /// What the findings are about.
    pub title: String,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// The whole examination, as JSON gives it.
#[derive(Debug, Serialize)]
struct Examination {
    schema: u32,
    chapters: Vec<Chapter>,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// Those of `out`; with a VM, why there is no such VM or why its process cannot be read.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if let Some(target) = &args.target {
        return run_for_target(target, args.format, out);
    }
    let mut chapters = kernel::examine(&HostKernel::read(Path::new("/")));
    chapters.push(trials::examine());
    chapters.push(machines::examine());
    match args.format {
        TableOrJson::Table => write_table(&chapters, out)?,
        TableOrJson::Json => {
            let schema = SCHEMA;
            serde_json::to_writer(&mut *out, &Examination { schema, chapters })?;
            writeln!(out)?;
        }
    }
    Ok(())
}

/// The assessment of a target, as JSON shows it.
#[derive(Debug, Serialize)]
struct TargetReport<'a> {
    schema: u32,
    vm: &'a str,
    backends: &'a [BackendView],
}

fn run_for_target(target: &str, format: TableOrJson, out: &mut dyn Write) -> anyhow::Result<()> {
    let assessment = one_target::examine(target)?;
    match format {
        TableOrJson::Table => write_table(&[assessment.chapter()], out)?,
        TableOrJson::Json => {
            let report = TargetReport {
                schema: SCHEMA,
                vm: &assessment.name,
                backends: &assessment.backends,
            };
            serde_json::to_writer(&mut *out, &report)?;
            writeln!(out)?;
        }
    }
    Ok(())
}

fn write_table(chapters: &[Chapter], out: &mut dyn Write) -> std::io::Result<()> {
    let subjects = chapters.iter().flat_map(|chapter| &chapter.findings);
    let width = subjects
        .map(|finding| finding.subject.chars().count())
        .max();
    let width = width.unwrap_or(0);
    for (index, chapter) in chapters.iter().enumerate() {
        if index > 0 {
            writeln!(out)?;
        }
        writeln!(out, "{}", printable(&chapter.title))?;
        for finding in &chapter.findings {
            let Finding {
                subject,
                verdict,
                found,
                advice,
            } = finding;
            writeln!(out, "  {verdict:<7}  {subject:<width$}  {found}")?;
            if let Some(advice) = advice {
                writeln!(out, "  {:<7}  {:<width$}  -> {advice}", "", "")?;
            }
        }
    }
    Ok(())
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
        let mut out = Vec::new();
        write_table(&chapters(), &mut out).unwrap();
        let table = "Kernel\n  ok       kernel  Linux 6.1\n\nVirtual machines\n  \
                     no       VM web  private memory\n                   -> share it\n";
        assert_eq!(String::from_utf8(out).unwrap(), table);
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
