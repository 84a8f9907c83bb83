//! Checks that nothing a guest reads from its disk is wrong: under load, under stress, without a rule, after kills.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use plimsoll_vm::ConsoleEvent;

use super::lab::{Lab, PATIENCE, ensure_right};
use plimsoll_rig::{DiskGuest, GuestOutput, Setup};
use plimsoll_serve::disk::admin::report;

/// RAM and cache in MiB: both hold a part of 96 MiB of files.
const SPLITS_MIB: [(u64, u64); 2] = [(112, 24), (96, 40)];

/// Signed files in every order, at several shares of writes, splits, and both write modes.
pub(super) fn signed(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let kind = lab.guests[0];
    writeln!(
        lab.out,
        "signed: {}; 96 MiB of files, every page read is verified\n\
         order        writes          RAM + cache   pages read  of the disk  from cache  wrong    total",
        kind.text()
    )?;
    let mut total = 0;
    for order in lab.orders.clone() {
        for write_percent in [0, 10, 50] {
            for write in ["through", "delayed"] {
                for (ram_mib, cache_mib) in SPLITS_MIB {
                    let workload = format!(
                        "workload=disk-signed module=copy {} order={} write_percent={write_percent} \
                         files=192 file_kib=512 warmup=0 rounds={}",
                        kind.word(),
                        order.text(),
                        lab.rounds
                    );
                    let serve = format!("--cache {cache_mib}M --write {write} --verify");
                    let mut setup = Setup::new(&serve, &workload);
                    (setup.kernel, setup.memory_mib) = (kind.kernel(), ram_mib);
                    let mut guest = DiskGuest::start(&lab.program, &setup)?;
                    let told = guest.finish(PATIENCE)?;
                    let engine = report(&guest.admin(), false)?.machine.engine;
                    guest.check_image()?;
                    ensure_right(&told, &engine)?;
                    let reads = told.number("files", Some("measured"), "reads")?;
                    total += reads;
                    writeln!(
                        lab.out,
                        "{:<12} {write_percent:>3} % {write:<8} {ram_mib:>3} + {cache_mib:>2} MiB  {reads:>10}  \
                         {:>11}  {:>10}  {:>5}  {total:>7}",
                        order.text(),
                        engine.read_blocks,
                        engine.hits,
                        told.mismatches.unwrap_or_default() + engine.wrong_served,
                    )?;
                    lab.out.flush()?;
                }
            }
        }
    }
    writeln!(lab.out, "{total} pages read and verified, none wrong\n")?;
    Ok(())
}

/// A stressed guest of 128 MiB with swap on a cached disk; the daemon compares what it serves with storage.
fn stressed(lab: &Lab<'_>, vcpus: u32, rounds: u32, serve: &str, words: &str) -> Setup {
    let threads = 2 * vcpus;
    let workload = format!(
        "workload=disk-stress rounds={rounds} steps=50 threads={threads} swap=disk {words}"
    );
    let mut setup = Setup::new(&format!("--cache 48M --verify {serve}"), &workload);
    (setup.kernel, setup.memory_mib, setup.vcpus) = (lab.guests[0].kernel(), 128, vcpus);
    setup.swap_mib = 96;
    setup.queues = if vcpus > 1 { 2 } else { 1 };
    setup
}

/// Everything that files go through, in one and two CPUs, copied and lazy, with swap on a cached disk.
pub(super) fn stress(lab: &mut Lab<'_>, rounds: u32) -> anyhow::Result<()> {
    let all = lab.guests.clone();
    for kind in all.iter().copied() {
        lab.guests = vec![kind];
        writeln!(
            lab.out,
            "stress: {}; {rounds} rounds\n\
             CPUs  module     steps  pages read   evicted  migrated  from cache  wrong",
            kind.text()
        )?;
        for (vcpus, module) in [(1, "copy"), (1, "lazy"), (2, "copy"), (2, "lazy")] {
            let words = format!("module={module} {}", kind.word());
            let setup = stressed(lab, vcpus, rounds, "--write delayed", &words);
            let mut guest = DiskGuest::start(&lab.program, &setup)?;
            let told = guest.finish(PATIENCE)?;
            let engine = report(&guest.admin(), false)?.machine.engine;
            guest.check_image()?;
            ensure_right(&told, &engine)?;
            writeln!(
                lab.out,
                "{vcpus:>4}  {module:<6}  {:>8}  {:>10}  {:>8}  {:>8}  {:>10}  {:>5}",
                told.number("stress", None, "steps")?,
                told.number("stress", None, "reads")?,
                engine.evictions,
                engine.migrations,
                engine.hits,
                told.mismatches.unwrap_or_default() + engine.wrong_served,
            )?;
            lab.out.flush()?;
        }
        writeln!(lab.out)?;
    }
    lab.guests = all;
    Ok(())
}

/// The rules of admission left out one at a time, with and without the check of contents.
pub(super) fn ablations(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    writeln!(
        lab.out,
        "ablations: {}; stress with a rule left out\n\
         left out               check of contents  from cache  refused by it  served wrong  guest",
        lab.guests[0].text()
    )?;
    for (name, serve, words) in [
        ("none", "", ""),
        ("notice of additions", "", "module.fault_no_add=1"),
        ("notice of migrations", "", "module.fault_no_migrate=1"),
        ("newest of its block", "--no-newest-check", ""),
        (
            "each 20th notice lost",
            "--no-newest-check",
            "module.fault_drop_every=20",
        ),
    ] {
        for (checked, option) in [("on", ""), ("off", "--no-hash-check")] {
            let words = format!("module=copy {words}");
            let setup = stressed(lab, 1, 12, &format!("{serve} {option}"), &words);
            let mut guest = DiskGuest::start(&lab.program, &setup)?;
            let ended = guest.finish(PATIENCE);
            let engine = report(&guest.admin(), false)?.machine.engine;
            let guest_found = match &ended {
                Ok(told) => format!("{} wrong", told.mismatches.unwrap_or_default()),
                Err(_) => "gave up".to_owned(),
            };
            writeln!(
                lab.out,
                "{name:<22} {checked:<17}  {:>10}  {:>13}  {:>12}  {guest_found}",
                engine.hits, engine.refused_mismatch, engine.wrong_served,
            )?;
            lab.out.flush()?;
            if checked == "on" {
                let told = ended?;
                ensure!(
                    told.mismatches == Some(0) && engine.wrong_served == 0,
                    "something wrong was served although contents were checked"
                );
            }
        }
    }
    writeln!(lab.out)?;
    Ok(())
}

/// Times within 400 ms that follow from a count, spread evenly by the golden ratio.
fn moment(count: u32) -> Duration {
    Duration::from_millis((u64::from(count) * 618_034 / 1000) % 400)
}

/// Daemon and QEMU killed `kills` times each while writes are delayed; after each death of a guest the next one
/// verifies all that was flushed.
pub(super) fn crash(lab: &mut Lab<'_>, kills: u32) -> anyhow::Result<()> {
    writeln!(
        lab.out,
        "crash: {}; writes delayed, a flush after at most 32\n\
         QEMU killed  daemon killed  writes flushed  blocks verified  newer  old  torn",
        lab.guests[0].text()
    )?;
    let serve = "--cache 24M --write delayed --dirty 50% --verify";
    let mut setup = Setup::new(serve, "");
    (setup.formatted, setup.memory_mib, setup.image_mib) = (false, 112, 64);
    setup.kernel = lab.guests[0].kernel();
    let mut guest = DiskGuest::prepare(&lab.program, &setup)?;
    let mut verified = 0;
    for number in 1..=kills {
        let direct = number % 2;
        let about = format!("workload=disk-crash module=copy seed={number}");
        guest.boot(&format!("{about} direct={direct}"))?;
        wait_for_flushes(&mut guest)?;
        thread::sleep(moment(2 * number));
        guest.kill_daemon();
        thread::sleep(moment(2 * number) / 4);
        guest.restart_daemon()?;
        wait_for_flushes(&mut guest)?;
        thread::sleep(moment(2 * number + 1));
        guest.kill_guest();
        let upto = guest.told().flushed.context("no flush was told")?;
        guest.boot(&format!("{about} verify=1 upto={upto}"))?;
        let told = guest.finish(PATIENCE)?;
        ensure_right(&told, &report(&guest.admin(), false)?.machine.engine)?;
        let of_crash = |told: &GuestOutput, key| told.number("crash", None, key);
        let (old, torn) = (of_crash(&told, "old")?, of_crash(&told, "torn")?);
        let blocks = of_crash(&told, "blocks")?;
        writeln!(
            lab.out,
            "{number:>11}  {number:>13}  {upto:>14}  {blocks:>15}  {:>5}  {old:>3}  {torn:>4}",
            of_crash(&told, "newer")?,
        )?;
        lab.out.flush()?;
        ensure!(blocks > 0 && old + torn == 0, "flushed writes are lost");
        verified += blocks;
    }
    guest.check_image()?;
    writeln!(lab.out, "{verified} blocks verified, none old or torn\n")?;
    Ok(())
}

/// Waits until the guest has flushed several times more: earlier lines may have waited.
fn wait_for_flushes(guest: &mut DiskGuest) -> anyhow::Result<()> {
    let mut flushes = 0;
    guest.listen(PATIENCE, |event| {
        flushes += u32::from(matches!(event, ConsoleEvent::Flushed { .. }));
        flushes == 20
    })
}
