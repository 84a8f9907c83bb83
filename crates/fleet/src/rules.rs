//! Which VMs belong together, which must not be on one host, on which hosts they may be, and which stay.
//!
//! ```toml
//! [[together]]
//! vms = ["web", "web-cache"]
//!
//! [[apart]]
//! vms = ["db-*"]
//!
//! [[on]]
//! vms = ["gpu-*"]
//! hosts = ["host-1", "host-2"]
//!
//! [[stay]]
//! vms = ["1c4a1f5e-0c4b-4b3c-9c75-0d9f2d1c0a11"]
//! ```
//!
//! A VM is given by its UUID or its name, a host by its name; `*` stands for any characters, `?` for one. Only what begins as a UUID
//! does, with eight characters and a dash, is compared with UUIDs, without regard to case: `d*` is for names alone.

use std::cmp::Reverse;

use serde::Deserialize;
use wildmatch::WildMatch;

use crate::fleet::{Fleet, Vm};

/// Rules as an operator writes them.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rules {
    /// VMs that must be on one host.
    pub together: Vec<VmGroup>,
    /// VMs of which no two may be on one host.
    pub apart: Vec<VmGroup>,
    /// VMs that may be on some hosts only.
    pub on: Vec<OnHosts>,
    /// VMs that are not moved. If their host is lost, they may run elsewhere.
    pub stay: Vec<VmGroup>,
}

/// Some VMs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmGroup {
    /// Their names or UUIDs.
    pub vms: Vec<String>,
}

/// Some VMs, and the hosts on which they may be.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnHosts {
    /// Names or UUIDs of the VMs.
    pub vms: Vec<String>,
    /// Names of the hosts.
    pub hosts: Vec<String>,
}

/// Why rules cannot be used. Nothing was planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RulesError {
    /// The text is malformed.
    #[error("the rules are malformed in line {line}: {message}")]
    Form {
        /// Its line, from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// A rule is for nobody: as a rule, a name is misspelt.
    #[error("rule {rule}: no {kind} is called {name:?}")]
    Nobody {
        /// The rule.
        rule: &'static str,
        /// What was looked for.
        kind: &'static str,
        /// Its name.
        name: String,
    },
}

/// Rules for the VMs of a fleet, by their numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resolved {
    /// VMs that move together, each VM in one of them.
    pub(crate) items: Vec<Vec<usize>>,
    /// For each VM, the groups of which only one may be on a host.
    pub(crate) apart: Vec<Vec<usize>>,
    /// For each VM, whether it may be on each host; empty if it may be anywhere.
    pub(crate) hosts: Vec<Vec<bool>>,
    /// For each VM, whether it is not moved, by a rule or because it migrates.
    pub(crate) stays: Vec<bool>,
}

impl Resolved {
    /// The same for VMs that move one by one.
    pub(crate) fn one_by_one(&self) -> Self {
        Self {
            items: (0..self.stays.len()).map(|vm| vec![vm]).collect(),
            ..self.clone()
        }
    }

    /// Whether a rule forbids that a VM is where it is now: on this host, without its group, or beside another one.
    pub(crate) fn is_broken_by(&self, vm: usize, fleet: &Fleet) -> bool {
        let host = |vm: usize| fleet.vms[vm].host;
        let is_forbidden = self.hosts[vm].get(host(vm)) == Some(&false);
        let mut groups = self
            .items
            .iter()
            .filter(|group| group.len() > 1 && group.contains(&vm));
        let is_parted = groups.any(|group| group.iter().any(|&other| host(other) != host(vm)));
        let mine = &self.apart[vm];
        let mut others =
            (0..fleet.vms.len()).filter(|&other| other != vm && host(other) == host(vm));
        let is_beside = !mine.is_empty()
            && others.any(|other| mine.iter().any(|group| self.apart[other].contains(group)));
        is_forbidden || is_parted || is_beside
    }
}

impl Rules {
    /// The rules in `text`.
    ///
    /// # Errors
    ///
    /// [`RulesError::Form`].
    pub fn parse(text: &str) -> Result<Self, RulesError> {
        toml::from_str(text).map_err(|error: toml::de::Error| {
            let before = text.get(..error.span().map_or(0, |span| span.start));
            RulesError::Form {
                line: 1 + before.unwrap_or_default().matches('\n').count(),
                message: error.message().to_owned(),
            }
        })
    }

    /// The rules for a fleet's VMs.
    pub(crate) fn resolve(&self, fleet: &Fleet) -> Result<Resolved, RulesError> {
        let count = fleet.vms.len();
        let mut group_of: Vec<usize> = (0..count).collect();
        for rule in &self.together {
            let members = once_each(fleet, &vms(fleet, "together", &rule.vms)?);
            let joined = members.iter().map(|&vm| group_of[vm]).min();
            let old: Vec<usize> = members.iter().map(|&vm| group_of[vm]).collect();
            for group in &mut group_of {
                if old.contains(group) {
                    *group = joined.unwrap_or(*group);
                }
            }
        }
        let mut items: Vec<Vec<usize>> = vec![Vec::new(); count];
        for (vm, &group) in group_of.iter().enumerate() {
            items[group].push(vm);
        }
        items.retain(|item| !item.is_empty());
        let mut apart = vec![Vec::new(); count];
        for (group, rule) in self.apart.iter().enumerate() {
            for vm in vms(fleet, "apart", &rule.vms)? {
                apart[vm].push(group);
            }
        }
        let mut hosts = vec![Vec::new(); count];
        for rule in &self.on {
            let mut named = vec![false; fleet.hosts.len()];
            for name in &rule.hosts {
                let pattern = WildMatch::new(name);
                let mut is_found = false;
                for (host, named) in fleet.hosts.iter().zip(&mut named) {
                    let matches = pattern.matches(&host.name);
                    is_found |= matches;
                    *named |= matches;
                }
                if !is_found {
                    return Err(nobody("on", "host", name));
                }
            }
            for vm in vms(fleet, "on", &rule.vms)? {
                let of_vm: &mut Vec<bool> = &mut hosts[vm];
                of_vm.resize(fleet.hosts.len(), true);
                for (is_allowed, named) in of_vm.iter_mut().zip(&named) {
                    *is_allowed &= named;
                }
            }
        }
        let mut stays: Vec<bool> = fleet.vms.iter().map(|vm| vm.is_migrating).collect();
        for rule in &self.stay {
            for vm in vms(fleet, "stay", &rule.vms)? {
                stays[vm] = true;
            }
        }
        Ok(Resolved {
            items,
            apart,
            hosts,
            stays,
        })
    }
}

fn nobody(rule: &'static str, kind: &'static str, name: &str) -> RulesError {
    RulesError::Nobody {
        rule,
        kind,
        name: name.to_owned(),
    }
}

/// The VMs with one of each that migrates: that on the host of most others, whose group it stays in.
fn once_each(fleet: &Fleet, vms: &[usize]) -> Vec<usize> {
    let beside = |vm: usize| {
        let of_host = |&&other: &&usize| fleet.vms[other].host == fleet.vms[vm].host;
        vms.iter().filter(of_host).count()
    };
    let is_better = |other: usize, vm: usize| {
        fleet.vms[other].uuid == fleet.vms[vm].uuid
            && (beside(other), Reverse(other)) > (beside(vm), Reverse(vm))
    };
    let vms = vms.iter().copied();
    let once = vms.clone().filter(|&vm| {
        !(fleet.vms[vm].is_migrating && vms.clone().any(|other| is_better(other, vm)))
    });
    once.collect()
}

/// Whether UUIDs may be meant: by chance, a pattern of names would match some.
fn begins_as_uuid(pattern: &str) -> bool {
    let first = pattern.split_once('-').map(|(first, _)| first);
    let is_digit = |letter: char| letter == '?' || letter.is_ascii_hexdigit();
    first.is_some_and(|first| first.len() == 8 && first.chars().all(is_digit))
}

/// Numbers of the VMs that are meant, each once.
fn vms(fleet: &Fleet, rule: &'static str, names: &[String]) -> Result<Vec<usize>, RulesError> {
    let mut found: Vec<usize> = Vec::new();
    for name in names {
        let pattern = WildMatch::new(name);
        let of_uuid = begins_as_uuid(name).then(|| WildMatch::new_case_insensitive(name));
        let is_meant = |vm: &Vm| {
            let uuid = of_uuid.as_ref().zip(vm.uuid.as_deref());
            pattern.matches(&vm.name) || uuid.is_some_and(|(pattern, uuid)| pattern.matches(uuid))
        };
        let before = found.len();
        let meant = fleet.vms.iter().enumerate();
        found.extend(
            meant
                .filter(|(_, vm)| is_meant(vm))
                .map(|(number, _)| number),
        );
        if found.len() == before {
            return Err(nobody(rule, "VM", name));
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}
