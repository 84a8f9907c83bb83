//! How Plimsoll's programs present results, so that every verb, server and experiment does it alike.
//!
//! | module | content |
//! |---|---|
//! | [`args`] | `-o FORMAT` and `--out FILE` |
//! | [`columns`] | tables for readers, lines of CSV for programs |
//! | [`text`] | percentages, counts, durations, names from outside |
//! | [`time`] | local times |
//! | [`mod@file`] | files that are replaced whole or not at all |
//! | [`progress_bar`] | progress on standard error |
//! | [`stop`] | SIGINT, SIGTERM and SIGHUP, SIGTSTP, SIGXFSZ |
//! | [`mod@watch`] | repetition of a report |
//! | [`exit`] | exit codes, and the errors that choose them |
//!
//! Not here: pictures (crate `plot`, which brings a rasteriser and a font), and parsing and exact
//! writing of sizes, rates and intervals (crate `protocol`, module `size`).
#![forbid(unsafe_code)]

pub mod args;
pub mod columns;
pub mod exit;
pub mod file;
pub mod progress_bar;
pub mod stop;
pub mod text;
pub mod time;
pub mod watch;

pub use args::{
    Format, OutputArgs, TableOrJson, TableOrJsonArg, TextFormat, TextFormatArg, json_line,
    json_lines,
};
pub use columns::{Cell, Columns, Side, csv};
pub use file::{
    AtomicFile, cannot_write, create_log, directory_of, refuse_block_device, remove_at_signals,
    write_file,
};
pub use progress_bar::ReadingBar;
pub use stop::{daemon_stop_flag, ignore_suspension, outlive_file_size_limit, stop_flag};
pub use text::{
    cut, cut_front, cut_middle, duration, grouped, labelled, per_second, percent, printable,
    printable_path, ratio, short, short_percent,
};
pub use time::{local_time, time_of_day};
pub use watch::watch;
