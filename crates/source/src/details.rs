//! What readers give besides pages and kinds, if they are asked for it.

use plimsoll_flow::ReferenceBatch;

use crate::{Grouping, Options};

/// Which details of its references a reader of single requests is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) times: bool,
    pub(crate) sizes: bool,
    pub(crate) groups: bool,
}

impl Wanted {
    /// For a format whose groups are these.
    pub(crate) fn of(options: &Options, groups: Grouping) -> Self {
        Self {
            times: options.times,
            sizes: options.sizes,
            groups: options.groups == Some(groups),
        }
    }

    /// Appends those of the reference that was pushed last.
    pub(crate) fn push(
        self,
        time_us: u64,
        size_bytes: u32,
        group: u32,
        batch: &mut ReferenceBatch,
    ) {
        let details = batch.details_mut();
        if self.times {
            details.times_us.push(time_us);
        }
        if self.sizes {
            details.sizes_bytes.push(size_bytes);
        }
        if self.groups {
            details.groups.push(group);
        }
    }
}
