//! What only the processor and the kernel can do: prefetching, and memory in huge pages.
//! One safe function each; elsewhere in this crate there is no unsafe code.
#![allow(unsafe_code)]

use plimsoll_flow::PageNumber;

use crate::parts::filter::{self, Criterion, Filter};

/// Asks for the cache line of `items[index]` ahead of its use. A hint: any index is allowed.
#[inline(always)]
pub(crate) fn prefetch<T>(items: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = items.as_ptr().wrapping_add(index).cast::<i8>();
        // SAFETY: a prefetch reads nothing that the program can see and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (items, index);
    }
}

/// Asks the kernel to back a large table by huge pages, so that a random access rarely needs a
/// page-table walk. A hint: where it is refused, the table works as before.
pub(crate) fn advise_huge<T>(items: &mut [T]) {
    if let Some((start, bytes)) = whole_huge_pages(items) {
        // SAFETY: the range lies within `items`, borrowed here, and the advice changes no contents.
        let _ =
            unsafe { rustix::mm::madvise(start.cast(), bytes, rustix::mm::Advice::LinuxHugepage) };
    }
}

/// Returns a table of `count` times one value, in huge pages if it is large.
///
/// The kernel chooses when a page is first touched, and memory that was freed and handed out again was
/// touched long ago, so it is given back first.
pub(crate) fn filled_huge<T: Clone>(value: T, count: usize) -> Vec<T> {
    let mut items = Vec::with_capacity(count);
    let spare = items.spare_capacity_mut();
    if let Some((start, bytes)) = whole_huge_pages(spare) {
        // SAFETY: the range lies within the spare capacity, private memory of the allocator that is
        // borrowed here and holds no value: nothing is lost if it reads as zeros.
        let _ =
            unsafe { rustix::mm::madvise(start.cast(), bytes, rustix::mm::Advice::LinuxDontNeed) };
        advise_huge(spare);
    }
    items.resize(count, value);
    items
}

/// Start and length in bytes of the huge pages that lie wholly within `items`, if any do.
fn whole_huge_pages<T>(items: &mut [T]) -> Option<(*mut u8, usize)> {
    const HUGE_PAGE_BYTES: usize = 2 << 20;
    let start = items.as_mut_ptr().cast::<u8>();
    let skip = start.align_offset(HUGE_PAGE_BYTES);
    let rest = size_of_val(items).checked_sub(skip)?;
    let whole = rest - rest % HUGE_PAGE_BYTES;
    (whole > 0).then(|| (start.wrapping_add(skip), whole))
}

/// The paths of the sampling filter that this machine can take, by name, the best one last.
#[cfg(test)]
pub(crate) fn filters() -> Vec<(&'static str, Filter)> {
    let mut filters: Vec<(&'static str, Filter)> = vec![("portable", filter::portable)];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") {
            filters.push(("avx2", filter_avx2));
        }
        if is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512f") {
            filters.push(("avx512", filter_avx512));
        }
    }
    filters
}

/// Returns the fastest path of the sampling filter that this machine can take.
pub(crate) fn best_filter() -> Filter {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512f") {
            return filter_avx512;
        }
        if is_x86_feature_detected!("avx2") {
            return filter_avx2;
        }
    }
    filter::portable
}

/// # Panics
///
/// Where the machine has no AVX-512.
#[cfg(target_arch = "x86_64")]
fn filter_avx512(pages: &[[PageNumber; 64]], criterion: Criterion, chosen: &mut [u64]) {
    assert!(is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512f"));
    // SAFETY: the only condition is that the machine has the features, asserted above.
    unsafe { filter::x86_64::avx512(pages, criterion, chosen) };
}

/// # Panics
///
/// Where the machine has no AVX2.
#[cfg(target_arch = "x86_64")]
fn filter_avx2(pages: &[[PageNumber; 64]], criterion: Criterion, chosen: &mut [u64]) {
    assert!(is_x86_feature_detected!("avx2"));
    // SAFETY: the only condition is that the machine has the feature, asserted above.
    unsafe { filter::x86_64::avx2(pages, criterion, chosen) };
}

/// Something to be done that gains from vector instructions, as the compiler finds them.
pub(crate) trait Work {
    /// What comes of it.
    type Output;

    /// Does it. Must be `#[inline(always)]`, and so must be what it calls: only what is compiled
    /// into [`vectorised`] is compiled for the processor at hand.
    fn run(self) -> Self::Output;
}

/// Does the work with the best instructions that this processor has.
#[inline]
pub(crate) fn vectorised<W: Work>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(
            enable = "avx512f,avx512bw,avx512vl,avx512vpopcntdq,avx2,bmi1,bmi2,popcnt"
        )]
        fn with_avx512<W: Work>(work: W) -> W::Output {
            work.run()
        }

        #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
        fn with_avx2<W: Work>(work: W) -> W::Output {
            work.run()
        }

        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("bmi1") && has!("bmi2") && has!("popcnt") {
            if has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512vpopcntdq") {
                // SAFETY: the processor has each of the features, as was just asked.
                return unsafe { with_avx512(work) };
            }
            // SAFETY: the processor has each of the features, as was just asked.
            return unsafe { with_avx2(work) };
        }
    }
    work.run()
}
