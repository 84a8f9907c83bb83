//! A [`Report`] as a table for readers, within 100 columns.

use std::fmt::Write;

use plimsoll_flow::PageSize;
use plimsoll_hcache::Counters;
use plimsoll_output::{cut, duration, percent, printable, short, table};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::size::ByteSize;

use super::report::{ClientReport, Report};

/// Lines of a client's curve.
const CURVE_LINES: u64 = 16;

/// The report as lines. With an earlier one, puts and gets are rates a second since then, and hits those since then.
pub fn text(report: &Report, earlier: Option<&Report>, curves: bool) -> String {
    // A store that was restarted since counts anew.
    let age = report.store.stats.age_seconds;
    let earlier = earlier.filter(|earlier| earlier.store.stats.age_seconds <= age);
    let mut text = String::new();
    store(report, earlier, &mut text);
    clients(report, earlier, &mut text);
    shared_pools(report, &mut text);
    if curves {
        for client in &report.clients {
            let (id, name) = (client.stats.id.0, printable(&client.stats.name));
            match &client.curve {
                Some(json) => {
                    let _ = writeln!(text, "\nclient {id} {name}: hit ratio by share");
                    curve(json, &mut text);
                }
                None => {
                    let _ = writeln!(text, "\nclient {id} {name}: no curve {}", why(report));
                }
            }
        }
    }
    text
}

fn why(report: &Report) -> &'static str {
    if report.ghosts.is_some() {
        "yet"
    } else {
        "(the server runs with --no-ghost)"
    }
}

fn store(report: &Report, earlier: Option<&Report>, text: &mut String) {
    let store = &report.store.stats;
    let size = |bytes| ByteSize(bytes).rounded();
    let _ = write!(text, "capacity  {}", size(store.capacity_bytes));
    if store.max_capacity_bytes > store.capacity_bytes {
        let _ = write!(text, " (up to {})", size(store.max_capacity_bytes));
    }
    let _ = writeln!(
        text,
        ", used {} ({}), including metadata {}",
        size(store.used_bytes),
        percent(store.used_bytes as f64 / (store.capacity_bytes as f64).max(1.0)),
        size(store.metadata_bytes),
    );
    let _ = write!(text, "pages     {}", store.pages);
    if store.deduplicated_pages > 0 {
        let pages = store.deduplicated_pages;
        let _ = write!(text, ", {pages} without a frame of their own");
    }
    text.push('\n');
    if report.store.compression {
        let (raw, frames) = (store.compressed_raw_bytes, store.compressed_frame_bytes);
        let _ = if frames > 0 {
            let ratio = raw as f64 / frames as f64;
            writeln!(
                text,
                "LZ4       {} in {}, {ratio:.2} : 1",
                size(raw),
                size(frames)
            )
        } else {
            writeln!(text, "LZ4       nothing compressed")
        };
    }
    let rings_bytes: u64 = (report.clients.iter())
        .map(|client| client.stats.outside_bytes)
        .sum();
    if rings_bytes > 0 {
        let _ = writeln!(
            text,
            "rings     {}, part of what each client uses",
            size(rings_bytes)
        );
    }
    let counters = since(
        &store.counters,
        earlier.map(|earlier| &earlier.store.stats.counters),
    );
    let before_seconds = earlier.map_or(0.0, |earlier| earlier.store.stats.age_seconds);
    let _ = writeln!(
        text,
        "gets      {}, {} hit; {} puts, {} refused, {} evicted; in {}",
        short(counters.gets as f64),
        counters.hit_ratio().map_or("-".to_owned(), percent),
        short(counters.puts as f64),
        short(counters.puts_refused as f64),
        short(counters.evicted_pages as f64),
        duration(store.age_seconds - before_seconds),
    );
}

fn clients(report: &Report, earlier: Option<&Report>, text: &mut String) {
    if report.clients.is_empty() {
        text.push_str("no clients\n");
        return;
    }
    let (puts, gets) = match earlier {
        Some(_) => ("puts/s", "gets/s"),
        None => ("puts", "gets"),
    };
    let seconds = earlier.map_or(1.0, |earlier| {
        (report.store.stats.age_seconds - earlier.store.stats.age_seconds).max(f64::MIN_POSITIVE)
    });
    let rows = report.clients.iter().map(|client| {
        let before = earlier.map(|earlier| {
            let mut others = earlier.clients.iter();
            let same = others.find(|other| other.stats.id == client.stats.id);
            same.map_or_else(Counters::default, |same| same.stats.counters)
        });
        let counters = since(&client.stats.counters, before.as_ref());
        (client, &client.stats, counters)
    });
    text.push('\n');
    text.push_str(&table!(rows, |(client, stats, counters)| {
        Right "id": stats.id.0,
        Left "name": cut(&printable(&stats.name), 12),
        Right "uid": stats.group,
        Right "weight": stats.weight,
        Right "target": ByteSize(stats.target_bytes).rounded(),
        Right "used": ByteSize(stats.used_bytes).rounded(),
        Right "pages": stats.pages,
        Right "hit %": hits(&counters),
        Right puts: short(counters.puts as f64 / seconds),
        Right gets: short(counters.gets as f64 / seconds),
        Right "-25 %": change(client, 0.75),
        Right "+25 %": change(client, 1.25),
    }));
    if report
        .clients
        .iter()
        .any(|client| client.expected.is_some())
    {
        text.push_str("\n-25 %, +25 %: change of hit % with that much less or more memory\n");
    }
}

fn shared_pools(report: &Report, text: &mut String) {
    if report.shared_pools.is_empty() {
        return;
    }
    text.push('\n');
    text.push_str(&table!(&report.shared_pools, |shared| {
        Right "shared pool": shared.pool.id,
        Left "clients": {
            let members: Vec<_> = shared.pool.members.iter().map(u32::to_string).collect();
            cut(&members.join(" "), 24)
        },
        Right "target": ByteSize(shared.target_bytes).rounded(),
        Right "used": ByteSize(shared.used_bytes).rounded(),
        Right "pages": shared.pool.pages,
        Right "hit %": hits(&shared.pool.counters),
    }));
}

fn hits(counters: &Counters) -> String {
    let ratio = counters.hit_ratio();
    ratio.map_or("-".to_owned(), |ratio| format!("{:.1}", ratio * 100.0))
}

/// Change of the hit ratio at another share, in percentage points.
fn change(client: &ClientReport, ratio: f64) -> String {
    let at = |ratio: f64| {
        let mut all = client.expected.iter().flatten();
        all.find(|expected| expected.ratio == ratio)
            .map(|expected| expected.hit_ratio)
    };
    match (at(ratio), at(1.0)) {
        (Some(then), Some(now)) => format!("{:+.1}", (then - now) * 100.0 + 0.0),
        _ => "-".to_owned(),
    }
}

fn curve(json: &CurveJson, text: &mut String) {
    let last = json.points.last().map_or(0, |point| point.size_pages);
    let baseline = json.baseline_pages.unwrap_or(0);
    let step = (last / CURVE_LINES).max(1);
    let mut sizes: Vec<_> = (1..=CURVE_LINES).map(|line| line * step).collect();
    if baseline > 0 && !sizes.contains(&baseline) {
        sizes.push(baseline);
        sizes.sort_unstable();
    }
    for size in sizes {
        let misses = json.miss_ratio(size);
        let bytes = size.saturating_mul(PageSize::FOUR_KIB.bytes());
        let _ = writeln!(
            text,
            "{:>12} {:>8}{}",
            ByteSize(bytes).rounded(),
            percent(1.0 - misses),
            if size == baseline { "  now" } else { "" }
        );
    }
}

/// The counts since `earlier`, or since the start.
fn since(now: &Counters, earlier: Option<&Counters>) -> Counters {
    let Some(earlier) = earlier else { return *now };
    Counters {
        puts: now.puts.saturating_sub(earlier.puts),
        puts_refused: now.puts_refused.saturating_sub(earlier.puts_refused),
        gets: now.gets.saturating_sub(earlier.gets),
        hits: now.hits.saturating_sub(earlier.hits),
        evicted_pages: now.evicted_pages.saturating_sub(earlier.evicted_pages),
        ..*now
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::example;
    use super::*;
    use plimsoll_protocol::curve_json::PointJson;

    #[test]
    fn the_table_is_the_documented_one() {
        let expected = "\
capacity  512 MiB (up to 2 GiB), used 500 MiB (97.7 %), including metadata 4 MiB
pages     160000, 7 without a frame of their own
LZ4       230 MiB in 100 MiB, 2.30 : 1
rings     1.05 MiB, part of what each client uses
gets      2.0M, 75.0 % hit; 2.3M puts, 0 refused, 9999 evicted; in 2 h

id  name           uid  weight   target     used   pages  hit %  puts  gets  -25 %  +25 %
 1  we\"b\\\u{fffd}\u{fffd}[2J …  1000     100  400 MiB  399 MiB  102000   75.0  2.3M  2.0M   -8.1   +0.0
 2  idle          1000     100  400 MiB  399 MiB  102000      -     0     0      -      -

-25 %, +25 %: change of hit % with that much less or more memory

shared pool  clients   target     used  pages  hit %
          7  1 2      200 MiB  199 MiB  51000   75.0
";
        assert_eq!(text(&example(), None, false), expected);
        assert!(expected.lines().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn a_store_that_was_restarted_counts_from_its_start() {
        let (mut earlier, now) = (example(), example());
        earlier.store.stats.age_seconds += 60.0;
        earlier.clients.pop();
        assert_eq!(text(&now, Some(&earlier), false), text(&now, None, false));
    }

    #[test]
    fn between_two_reports_counts_are_rates() {
        let (earlier, mut now) = (example(), example());
        now.store.stats.age_seconds += 2.0;
        let counters = &mut now.clients[0].stats.counters;
        counters.puts += 5_000;
        counters.gets += 400;
        counters.hits += 100;
        // One that came in between counts from its own start.
        now.clients[1].stats.id.0 = 3;
        now.clients[1].stats.counters.gets = 84;
        let text = text(&now, Some(&earlier), false);
        let words = |line: &str| -> Vec<String> {
            let line = text.lines().find(|other| other.contains(line)).unwrap();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(words("idle")[9..], ["0.0", "0", "42", "-", "-"]);
        assert_eq!(words("name")[7..11], ["hit", "%", "puts/s", "gets/s"]);
        assert!(text.contains("   25.0    2500     200   -8.1"), "{text}");
        assert!(
            text.contains("gets      0, - hit; 0 puts, 0 refused, 0 evicted; in 2 s\n"),
            "{text}"
        );
    }

    #[test]
    fn a_curve_is_a_line_for_each_size_with_the_present_one_among_them() {
        let point = |size_pages, miss_ratio| PointJson {
            size_pages,
            miss_ratio,
            low: miss_ratio,
            high: miss_ratio,
            misses: None,
        };
        let mut report = example();
        report.clients[0].curve = Some(CurveJson {
            schema: 1,
            vm: "web".to_owned(),
            page_bytes: 4096,
            references: 9,
            baseline_pages: Some(300),
            vcpu_seconds_per_second: None,
            uncertain_pages: 0,
            log_errors_permille: Vec::new(),
            points: vec![point(0, 1.0), point(256, 0.5), point(4096, 0.25)],
        });
        let text = text(&report, None, true);
        assert!(
            text.contains(
                "\n       1 MiB   50.0 %\n    1.17 MiB   50.0 %  now\n       2 MiB   50.0 %\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("      16 MiB   75.0 %\n\nclient 2 idle: no curve"),
            "{text}"
        );
    }
}
