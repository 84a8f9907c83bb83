//! The actuators.
//!
//! [`ACTUATORS`] is the only list of them. A new actuator is a file with its [`ActuatorRow`] and a line in the list.

use crate::endpoints::{ActuatorRow, Endpoints, Role};
#[cfg(feature = "libvirt")]
use crate::libvirt;
use crate::{ActuatorError, DryRun, MemoryPart, balloon, disk_cache, fixed, hcache};

/// All actuators. Of one role, the first that a VM has is used, so one that every VM has is the last of its role.
pub static ACTUATORS: &[&ActuatorRow] = &[
    #[cfg(feature = "libvirt")]
    &libvirt::ROW,
    &balloon::ROW,
    &fixed::ROW,
    &disk_cache::ROW,
    &hcache::ROW,
];

/// Opens the first available actuator of this role. One that cannot be queried is skipped, and its error is added to
/// `failures`.
pub fn open(
    role: Role,
    endpoints: &Endpoints,
    failures: &mut Vec<ActuatorError>,
) -> Option<Box<dyn MemoryPart>> {
    let mut rows = ACTUATORS.iter().filter(|row| row.role == role);
    let part = rows.find_map(|row| {
        (row.open)(endpoints).unwrap_or_else(|error| {
            failures.push(error);
            None
        })
    })?;
    Some(if endpoints.dry_run {
        Box::new(DryRun::new(part))
    } else {
        part
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_always_there_is_the_last_of_its_role() {
        for (place, row) in ACTUATORS.iter().enumerate() {
            let opened = (row.open)(&Endpoints::default());
            let is_last = || {
                ACTUATORS[place + 1..]
                    .iter()
                    .all(|other| other.role != row.role)
            };
            assert!(!matches!(opened, Ok(Some(_))) || is_last(), "{}", row.name);
        }
    }
}
