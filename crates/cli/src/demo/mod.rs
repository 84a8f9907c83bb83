//! `plimsoll demo`: two VMs traced live, and a page of what was found.
//!
//! Two guests of ours run at once, one stepping through working sets of known size, one with Zipf
//! references of known law. Both are left alone for half a step, then traced from outside by the settings
//! of `plimsoll attach`, then left alone again. The guests' consoles tell the truth; the tracer sees
//! only their memory. Every figure on the page was measured in that run.
//!
//! | file | what it holds |
//! |---|---|
//! | `recording` | what a run leaves behind |
//! | `findings` | what follows from it: figures, tables, truths to hold curves against |
//! | `pictures` | the charts |
//! | `page` | the page around them |
//!
//! Not here: figures over many runs (`lab`).

mod findings;
mod page;
mod pictures;
mod recording;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use plimsoll_flow::{PageCount, WorkingSet};
use plimsoll_trap::{PeriodReport, TraceConfig};
use plimsoll_vm::{GuestConfig, GuestImage};

use crate::attach::{TracingArgs, stop_flag, working_set};
use crate::bail_usage;
use crate::experiment::{Observed, Subject, trace};
use crate::lab::curves::Law;
use crate::lab::steps::{STEPS_MIB, stepping_guest};
use crate::output::write_file;
use crate::plot::{grouped, svg_to_png};
use crate::size::Interval;

use findings::Findings;
use recording::{Recording, Watched};

/// Array of the guest with Zipf references.
const ZIPF_MIB: u64 = 192;
const ZIPF: Law = Law::Zipf(1.0);
/// RAM of a guest beyond its array.
const KERNEL_MIB: u64 = 96;
/// How often the guests' consoles are read.
const POLL: Duration = Duration::from_millis(200);
/// Longest wait for the stepping guest's audit of its pages.
const AUDIT_TIMEOUT: Duration = Duration::from_secs(20);
/// Pixels to a unit of the pictures.
const PNG_SCALE: f32 = 2.0;

/// Boot two VMs, trace them live, and draw what was found against the truth.
///
/// Takes about three minutes; Ctrl-C ends it early and draws what there is. Fails if
/// a guest found a page of its memory changed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder for the page and the pictures; made if it is not there
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    out: PathBuf,
    /// How long the stepping guest stays at each size
    #[arg(long, default_value = "20s")]
    step: Interval,
    #[command(flatten)]
    tracing: TracingArgs,
}

/// Runs the demo; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](crate::exit::UsageError) for settings that do not go together; no image of a
/// guest; why a guest did not come up or cannot be traced; nothing traced before Ctrl-C; and, with
/// the page written, pages that a guest found wrong. No guest is left.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let config = args.tracing.config()?;
    if args.step.get() < 3 * config.period {
        bail_usage!(
            "--step {}: a step must last three periods or more, so that whole periods lie within it",
            args.step
        );
    }
    let image = GuestImage::locate()?;
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder '{}'", args.out.display()))?;
    let stop = stop_flag()?;

    let recording = record(&image, &config, args.step.get(), &stop, out)?;
    let findings = Findings::of(&recording);
    let page = args.out.join("index.html");
    write_page(&args.out, &page, &recording, &findings)?;
    writeln!(out, "\n{}", findings.text())?;
    writeln!(out, "Page of results: {}", page.display())?;
    match findings.mismatches {
        0 => Ok(()),
        wrong => bail!("the guests found {wrong} pages of their memory wrong"),
    }
}

/// Boots the guests, traces them and listens to them.
fn record(
    image: &GuestImage,
    config: &TraceConfig,
    step: Duration,
    stop: &AtomicBool,
    out: &mut dyn Write,
) -> anyhow::Result<Recording> {
    writeln!(out, "Booting two VMs ...")?;
    out.flush()?;
    // The stepping guest last: its first step begins as soon as it is up.
    let mut zipf = Subject::boot(
        image,
        &GuestConfig {
            memory_mib: ZIPF_MIB + KERNEL_MIB,
            ..GuestConfig::new("zipf", &ZIPF.workload(ZIPF_MIB))
        },
    )?;
    let mut steps = Subject::boot(image, &stepping_guest("steps", &STEPS_MIB, step))?;
    let begin = Instant::now();
    let sizes: Vec<_> = STEPS_MIB.iter().map(u64::to_string).collect();
    writeln!(
        out,
        "  steps: scans {} MiB, {} s each\n  zipf:  visits {ZIPF_MIB} MiB, the page of rank i in proportion to 1/i\n\
         Running under {}; `plimsoll doctor` says why.",
        sizes.join(", "),
        step.as_secs_f64(),
        steps.accelerator().to_uppercase(),
    )?;

    let alone = step / 2;
    writeln!(out, "Left alone for {} s ...", alone.as_secs_f64())?;
    out.flush()?;
    let listen_until = |moment: Instant, steps: &mut Subject, zipf: &mut Subject| {
        while Instant::now() < moment && !stop.load(Ordering::Relaxed) {
            thread::sleep(POLL.min(moment.saturating_duration_since(Instant::now())));
            listen(&mut [&mut *steps, &mut *zipf], stop)?;
        }
        anyhow::Ok(())
    };
    listen_until(begin + alone, &mut steps, &mut zipf)?;

    let whole = step * u32::try_from(STEPS_MIB.len())?;
    // A period that has begun is finished, so half of one is left out on average.
    let limit = (begin + whole - alone)
        .saturating_duration_since(Instant::now())
        .saturating_sub(config.period / 2);
    let traced_from = Instant::now();
    let [of_steps, of_zipf] = trace_both([&mut steps, &mut zipf], config, limit, begin, stop, out)?;
    let traced_to = Instant::now();
    if of_steps.periods.is_empty() && of_zipf.periods.is_empty() {
        bail!("stopped before a period was traced: no page was written");
    }

    if !stop.load(Ordering::Relaxed) {
        writeln!(out, "Left alone again, until the last step is over ...")?;
        out.flush()?;
    }
    // The zipf guest is compared with itself beside the other one, not alone on the host.
    listen_until(begin + whole, &mut steps, &mut zipf)?;
    let end = Instant::now();
    while !steps.heard().is_done() && end.elapsed() < AUDIT_TIMEOUT && !stop.load(Ordering::Relaxed)
    {
        thread::sleep(POLL);
        listen(&mut [&mut steps, &mut zipf], stop)?;
    }
    Ok(Recording {
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
            .unwrap_or_default()
            .trim()
            .to_owned(),
        cpus: thread::available_parallelism().map_or(1, usize::from),
        detection: steps.detection().clone(),
        config: config.clone(),
        begin,
        traced: (traced_from, traced_to),
        end,
        steps: watched(&steps, of_steps),
        zipf: watched(&zipf, of_zipf),
        law: ZIPF,
        law_pages: PageCount(ZIPF_MIB * 256),
    })
}

fn watched(subject: &Subject, observed: Observed) -> Watched {
    Watched {
        vm: subject.vm.id.clone(),
        ram_bytes: subject.vm.ram.iter().map(|ram| ram.len_bytes).sum(),
        console: subject.heard().clone(),
        observed,
    }
}

/// Reads the guests' consoles. After Ctrl-C, which a terminal sends to the VMs too, their end is no error.
fn listen(subjects: &mut [&mut Subject], stop: &AtomicBool) -> anyhow::Result<()> {
    for subject in subjects {
        if let Err(error) = subject.listen() {
            // The VM may have heard of Ctrl-C before us.
            thread::sleep(POLL);
            if !stop.load(Ordering::Relaxed) {
                return Err(error.context(format!("guest {}", subject.vm.id)));
            }
        }
    }
    Ok(())
}

/// The stepping guest's place in a pair of guests.
const STEPPING: usize = 0;

/// A period as the one who prints hears of it.
struct News {
    guest: usize,
    start: Instant,
    end: Instant,
    working_set: Option<WorkingSet>,
    report: PeriodReport,
}

/// Traces both guests, each in a thread of its own, and prints a row for each period.
fn trace_both(
    mut subjects: [&mut Subject; 2],
    config: &TraceConfig,
    limit: Duration,
    begin: Instant,
    stop: &AtomicBool,
    out: &mut dyn Write,
) -> anyhow::Result<[Observed; 2]> {
    writeln!(
        out,
        "Traced from outside for {:.0} s, periods of {} s:\n\n  \
         time  VM     working set  true size    rate  references  overhead",
        limit.as_secs_f64(),
        config.period.as_secs_f64(),
    )?;
    out.flush()?;
    let vms = subjects.each_ref().map(|subject| subject.vm.clone());
    thread::scope(|scope| {
        let (sender, news) = mpsc::channel();
        let threads = [0, 1].map(|guest| {
            let (sender, vm) = (sender.clone(), &vms[guest]);
            scope.spawn(move || {
                let observed = trace(vm, config.clone(), limit, stop, &mut |traced| {
                    // Nobody listens only when printing failed, and then the end is near.
                    let _ = sender.send(News {
                        guest,
                        start: traced.start,
                        end: traced.end,
                        working_set: traced.period.working_set,
                        report: traced.period.report,
                    });
                });
                if observed.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                observed.with_context(|| format!("VM {} is not traced", vm.id))
            })
        });
        drop(sender);
        let mut print = || -> anyhow::Result<()> {
            loop {
                let heard = news.recv_timeout(POLL);
                listen(&mut subjects.each_mut().map(|subject| &mut **subject), stop)?;
                match heard {
                    Ok(period) => {
                        let subject = &subjects[period.guest];
                        // Only the stepping guest's size is its working set.
                        let truth = (period.guest == STEPPING).then(|| subject.heard().steps());
                        let truth = truth.unwrap_or_default();
                        print_row(&subject.vm.id.0, &truth, &period, begin, out)?;
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
        };
        let printed = print();
        if printed.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        let [steps, zipf] = threads.map(|thread| {
            let joined = thread.join();
            joined.unwrap_or_else(|_| Err(anyhow!("a tracer's thread came to a bad end")))
        });
        let observed = [steps?, zipf?];
        printed?;
        Ok(observed)
    })
}

fn print_row(
    name: &str,
    steps: &[(Instant, PageCount)],
    news: &News,
    begin: Instant,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let truth: Vec<_> = recording::sizes_during(steps, news.start, news.end)
        .into_iter()
        .map(|pages| (pages.0 / 256).to_string())
        .collect();
    let truth = if truth.is_empty() {
        "-".to_owned()
    } else {
        truth.join(" > ") + " MiB"
    };
    writeln!(
        out,
        "{:>4.0} s  {name:<5}  {:>11}  {truth:>13}  1/{:<5} {:>8}  {:>6.2} %",
        (news.end - begin).as_secs_f64(),
        working_set(news.working_set),
        news.report.scale,
        grouped(news.report.traps as f64),
        news.report.overhead_ratio * 100.0,
    )?;
    Ok(out.flush()?)
}

/// Writes the pictures, then the page that shows them.
fn write_page(
    folder: &Path,
    page: &Path,
    recording: &Recording,
    findings: &Findings,
) -> anyhow::Result<()> {
    let pictures = pictures::all(recording, findings);
    for picture in &pictures {
        let png = svg_to_png(&picture.svg, PNG_SCALE)?;
        write_file(&folder.join(picture.name).with_extension("png"), &png)?;
    }
    write_file(page, page::html(recording, findings, &pictures).as_bytes())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_step_too_short_for_whole_periods_is_refused_before_anything_is_done() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("page");
        let out = page.to_str().unwrap();
        let line = ["demo", "--out", out, "--step", "5s", "--period", "2s"];
        let mut text = Vec::new();
        let error = run(&Cli::parse_from(line).args, &mut text).unwrap_err();
        assert!(
            error.downcast_ref::<crate::exit::UsageError>().is_some(),
            "{error}"
        );
        assert!(text.is_empty() && !page.exists());
    }

    #[test]
    fn a_run_becomes_a_page_with_its_pictures_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let recording = recording::made_up::recording(&[(64 * 256, 64 * 256)], 16);
        let findings = Findings::of(&recording);
        let page = folder.path().join("index.html");
        write_page(folder.path(), &page, &recording, &findings).unwrap();
        let html = fs::read_to_string(&page).unwrap();
        assert_eq!(html.matches("<figure>").count(), 3, "no curve was traced");
        assert_eq!(html.matches("<svg xmlns").count(), 3);
        assert!(html.contains("&lt;6.1&gt;") && !html.contains("<6.1>"));
        let fetched = ["<script", "<link", "src=", "href=", "url("];
        assert!(fetched.iter().all(|word| !html.contains(word)), "{html}");
        for name in ["working-set", "overhead", "speed"] {
            assert!(
                folder.path().join(name).with_extension("png").exists(),
                "{name}"
            );
        }
    }
}
