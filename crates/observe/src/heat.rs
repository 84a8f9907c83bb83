//! Heatmap data of a VM's RAM: pages touched in a period, counted in cells of equal size.

use std::collections::HashSet;

use plimsoll_flow::{PageCount, PageNumber};

/// Pages touched in a period, counted in cells of equal size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeatCells {
    /// RAM that the cells cover together.
    pub ram: PageCount,
    /// Pages touched in each cell, scaled up from the sample.
    pub pages: Vec<u32>,
}

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

    /// Returns the pages touched in each cell and starts the next period. A tracked page counts as `scale` pages, up to those
    /// that the cell has.
    pub fn take(&mut self, scale: u32) -> HeatCells {
        let mut pages = vec![0_u32; self.cells as usize];
        for page in self.touched.drain() {
            let cell = u128::from(page.0) * u128::from(self.cells) / u128::from(self.ram.0.max(1));
            let last = pages.len() - 1;
            let cell = usize::try_from(cell).map_or(last, |cell| cell.min(last));
            pages[cell] = pages[cell].saturating_add(scale);
        }
        // The tracked pages of a cell may be more than its share of them.
        for (cell, pages) in (0..).zip(&mut pages) {
            let has = self.first_page(cell + 1) - self.first_page(cell);
            *pages = u32::try_from(has).map_or(*pages, |has| has.min(*pages));
        }
        HeatCells {
            ram: self.ram,
            pages,
        }
    }

    /// The first page of a cell.
    fn first_page(&self, cell: u64) -> u64 {
        let page = (u128::from(cell) * u128::from(self.ram.0)).div_ceil(u128::from(self.cells));
        u64::try_from(page).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_counts_no_more_pages_than_it_has() {
        let mut heat = Heat::new(PageCount(10), 4);
        heat.count(&[0, 1, 2, 9, 9].map(PageNumber));
        assert_eq!(heat.take(1).pages, [3, 0, 0, 1]);
        // 3, 2, 3 and 2 pages.
        heat.count(&[0, 3, 4, 9].map(PageNumber));
        assert_eq!(heat.take(2).pages, [2, 2, 0, 2]);
        heat.count(&[0, 5].map(PageNumber));
        assert_eq!(heat.take(100).pages, [3, 0, 3, 0]);
        assert_eq!(heat.take(1).pages, [0; 4]);
    }
}
