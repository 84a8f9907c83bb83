//! `plimsoll hcache stat`: the contents of a store by client, and predictions for other capacities.

use std::io::Write;

use anyhow::{Context as _, ensure};
use plimsoll_flow::PageSize;
use plimsoll_output::printable;
use plimsoll_plot::{Axis, Chart, Series, Unit};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_serve::hcache::{Report, metrics, table};

use super::{QUERY_MAX, SocketArgs, failure};
use crate::stat::{self, StatArgs, curve_of};

/// Show what a store holds, for whom, and the hit ratios predicted for other capacities.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    #[command(flatten)]
    stat: StatArgs,
    /// Include each client's curve: its hit ratio by its share of the store
    #[arg(long)]
    curves: bool,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.stat
        .run(args.curves, |curves| query(args, curves), out)
}

fn query(args: &Args, curves: bool) -> anyhow::Result<Report> {
    let text = plimsoll_ring::stats(&args.socket.socket, QUERY_MAX).map_err(failure)?;
    let mut report: Report =
        serde_json::from_str(&text).context("the server's report is not one of this version")?;
    let schema = report.schema;
    ensure!(
        schema == SCHEMA,
        "the server uses schema {schema}, this program {SCHEMA}"
    );
    if !curves {
        for client in &mut report.clients {
            client.curve = None;
        }
    }
    Ok(report)
}

impl stat::Report for Report {
    const CURVE_OPTION: &str = "--curves";

    fn table(&self, earlier: Option<&Self>, curves: bool) -> String {
        table::text(self, earlier, curves)
    }

    fn metrics(&self) -> String {
        metrics::text(self)
    }

    fn chart(&self) -> anyhow::Result<Chart> {
        let mut series = Vec::new();
        for client in &self.clients {
            if let Some(json) = &client.curve {
                let curve = curve_of(json)?;
                let last = curve.points().last().map_or(0, |point| point.size.0);
                let until = last.saturating_mul(PageSize::FOUR_KIB.bytes());
                let name = format!("{} {}", client.stats.id.0, printable(&client.stats.name));
                series.push(Series::of_curve(name, &curve, PageSize::FOUR_KIB, until));
            }
        }
        ensure!(
            !series.is_empty(),
            "there is no curve: no client got a page yet, or the server runs with --no-ghost"
        );
        let x = Axis::new("Memory of the store", Unit::Bytes);
        let y = Axis::new("Miss ratio", Unit::Share).up_to(1.0);
        let title = "Miss-ratio curves of the store's clients";
        let subtitle = "Ghost list of each client";
        Ok(Chart::new(title, subtitle, [x, y], series))
    }
}
