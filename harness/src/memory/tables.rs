//! Tables and plots of a timeline.

use std::collections::BTreeMap;

use tilewright::trace::Phase;

use super::{Block, SETUP, Timeline, phase_name, span_path};
use crate::report::{Axis, Cell, Column, Plot, Point, Series, Table};

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// Table: the peak of each phase and of the whole recording, split by the phase that allocated the live blocks.
pub fn by_phase(timeline: &Timeline<'_>) -> Table {
    let names: Vec<&str> = std::iter::once(SETUP).chain(Phase::ALL.map(Phase::name)).collect();
    let columns = names
        .iter()
        .map(|name| Column::number(&format!("from {name}")).unit("MiB").key(&format!("of_{name}_mib")).decimals(2));
    let mut table = Table::new(
        "memory-peaks",
        "Peak memory, by the phase that allocated it",
        [Column::text("during"), Column::number("peak").unit("MiB").decimals(2)].into_iter().chain(columns),
    );
    let mut row = |during: &str, peak: super::Peak| {
        let mut of: BTreeMap<&str, u64> = BTreeMap::new();
        for block in timeline.blocks_at(peak.time_ns) {
            *of.entry(phase_name(timeline.trace, block.node)).or_default() += block.bytes;
        }
        let shares = names.iter().map(|name| match of.get(name) {
            Some(&bytes) => Cell::from(mib(bytes)),
            None => Cell::Empty,
        });
        table.push([Cell::from(during), Cell::from(mib(peak.bytes))].into_iter().chain(shares));
    };
    if let Some(start) = timeline.first_phase() {
        row("setup", super::Peak { bytes: timeline.live_at(start), time_ns: start });
    }
    for phase in Phase::ALL {
        if let Some(peak) = timeline.peak_of(phase) {
            row(phase.name(), peak);
        }
    }
    row("all", timeline.peak());
    let counted = timeline.trace.peak_bytes;
    let note = format!(
        "The allocator counted a peak of {:.2} MiB; the events explain {:.2} % of it.",
        mib(counted),
        100.0 * (1.0 - timeline.unaccounted())
    );
    table.note(note).without_empty_columns()
}

/// Table: the largest blocks. Blocks of equal size and span share a row.
pub fn largest(timeline: &Timeline<'_>, count: usize) -> Table {
    let mut kinds: BTreeMap<(u64, &'static str, String), Vec<&Block>> = BTreeMap::new();
    for block in &timeline.blocks {
        let phase = phase_name(timeline.trace, block.node);
        kinds.entry((block.bytes, phase, span_path(timeline.trace, block.node))).or_default().push(block);
    }
    let mut table = Table::new(
        "largest-allocations",
        "Largest allocations",
        [
            Column::number("size").unit("MiB").decimals(3),
            Column::integer("times"),
            Column::integer("at the peak").key("at_the_peak"),
            Column::text("phase"),
            Column::text("place"),
        ],
    )
    .note("Blocks of equal size and place share a row: how often they were allocated, and how many were live at the peak.");
    let peak = timeline.peak().time_ns;
    let at_peak =
        |blocks: &[&Block]| blocks.iter().filter(|b| b.from_ns <= peak && b.to_ns.is_none_or(|to| to > peak)).count();
    for ((bytes, phase, place), blocks) in kinds.iter().rev().take(count) {
        table.push([
            Cell::from(mib(*bytes)),
            Cell::from(blocks.len()),
            Cell::from(at_peak(blocks)),
            Cell::from(*phase),
            Cell::from(place.as_str()),
        ]);
    }
    table
}

/// Plot: live bytes over time, stacked by the phase that allocated them.
pub fn timeline_plot(timeline: &Timeline<'_>) -> Plot {
    // Subsample the changes to the resolution of a plot; keep the peak.
    let mut times: Vec<u64> = timeline.live.iter().map(|&(time, _)| time).collect();
    times.dedup();
    let every = times.len().div_ceil(700).max(1);
    let mut shown: Vec<u64> = times.iter().copied().step_by(every).collect();
    shown.extend([timeline.peak().time_ns, timeline.trace.end_ns]);
    shown.extend(
        timeline
            .trace
            .spans
            .iter()
            .filter_map(|span| timeline.trace.nodes[span.node as usize].phase.map(|_| span.end_ns)),
    );
    shown.sort_unstable();
    shown.dedup();
    let names = std::iter::once(SETUP).chain(Phase::ALL.map(Phase::name));
    let series = names.filter_map(|name| {
        let changes = changes_of(timeline, name);
        // Memory is a step function: each time has the value before it and the value from it on.
        let points = shown.iter().flat_map(|&time| {
            [live(&changes, time.saturating_sub(1)), live(&changes, time)]
                .map(|b| Point::from((time as f64 / 1e6, mib(b))))
        });
        (!changes.is_empty()).then(|| Series::new(name, points))
    });
    Plot::stack(
        "memory-timeline",
        "Memory over time, by the phase that allocated it",
        Axis::linear("ms"),
        Axis::linear("MiB"),
        series.collect(),
    )
}

/// (time, live bytes from then on) of the blocks that a phase allocated.
fn changes_of(timeline: &Timeline<'_>, phase: &str) -> Vec<(u64, u64)> {
    let of = timeline.blocks.iter().filter(|block| phase_name(timeline.trace, block.node) == phase);
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for block in of {
        changes.push((block.from_ns, block.bytes as i64));
        changes.extend(block.to_ns.map(|to| (to, -(block.bytes as i64))));
    }
    changes.sort_unstable_by_key(|&(time, _)| time);
    let sum = |bytes: &mut i64, (time, change): (u64, i64)| {
        *bytes += change;
        Some((time, u64::try_from(*bytes).unwrap_or(0)))
    };
    changes.into_iter().scan(0, sum).collect()
}

fn live(changes: &[(u64, u64)], time: u64) -> u64 {
    let next = changes.partition_point(|&(at, _)| at <= time);
    next.checked_sub(1).map_or(0, |last| changes[last].1)
}
