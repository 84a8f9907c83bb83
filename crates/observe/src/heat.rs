//! Heatmap data of a VM's RAM: pages touched in a period, counted in cells of equal size.

use std::collections::HashSet;

use plimsoll_flow::{PageCount, PageNumber};

/// Counts touched pages by their position in RAM.
#[derive(Debug)]
pub struct Heat {
    ram: PageCount,
    cells: u32,
    /// Tracked pages touched in this period.
    touched: HashSet<PageNumber>,
}

impl Heat {
    /// Counts in `cells` cells of `ram`; at least 1.
    pub fn new(ram: PageCount, cells: u32) -> Self {
        Self {
            ram,
            cells: cells.max(1),
            touched: HashSet::new(),
        }
    }

    /// Counts pages, each at most once per period.
    pub fn count(&mut self, pages: &[PageNumber]) {
        self.touched.extend(pages);
    }

    /// Returns the pages touched in each cell and starts the next period. A tracked page counts as `scale` pages.
    pub fn take(&mut self, scale: u32) -> Vec<u32> {
        let mut pages = vec![0_u32; self.cells as usize];
        for page in self.touched.drain() {
            let cell = u128::from(page.0) * u128::from(self.cells) / u128::from(self.ram.0.max(1));
            let last = pages.len() - 1;
            let cell = usize::try_from(cell).map_or(last, |cell| cell.min(last));
            pages[cell] = pages[cell].saturating_add(scale);
        }
        pages
    }
}
