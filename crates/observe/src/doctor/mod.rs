//! What a host can do for tracing, and by which backends a target can be traced.
//!
//! Every finding is *ok*, *limited* or *no*, with what was found and, unless all
//! is well, what to do. Three sources, one file each:
//!
//! - [`kernel`]: the settings and features that the kernel shows in files. They are read under a
//!   root, so that tests can lay out a host of their own.
//! - [`trials`]: what only a trial shows, such as a system call or a guest.
//! - [`machines`]: each running QEMU VM and whether it can be traced.
//!
//! [`one_target`] is the assessment of one VM, process or control group. Nothing is changed.

pub mod kernel;
pub mod machines;
pub mod one_target;
pub mod trials;

use std::fmt;
use std::path::Path;

use plimsoll_vm::HostKernel;
use serde::Serialize;

/// Examines this host.
pub fn examine() -> Vec<Chapter> {
    let mut chapters = kernel::examine(&HostKernel::read(Path::new("/")));
    chapters.push(trials::examine());
    chapters.push(machines::examine());
    chapters
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
    /// What was examined.
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
