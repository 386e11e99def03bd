//! Tables and plots of a profile.

use std::collections::BTreeMap;

use super::{Item, Phase, Profile, milliseconds};
use crate::report::{Axis, Bar, Cell, Column, Plot, Table};

/// Kind of work of a kernel or span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Matmul,
    /// A fused attention kernel: matmuls and softmax.
    Attention,
    Softmax,
    Norm,
    Loss,
    Elementwise,
    Optimizer,
    Memory,
    Other,
}

impl Class {
    pub fn name(self) -> &'static str {
        match self {
            Class::Matmul => "matmuls",
            Class::Attention => "attention kernels",
            Class::Softmax => "softmax",
            Class::Norm => "norms",
            Class::Loss => "loss",
            Class::Elementwise => "elementwise",
            Class::Optimizer => "optimizer",
            Class::Memory => "copies and fills",
            Class::Other => "other, and between kernels",
        }
    }

    /// Classifies by substrings of the names of kernels of this repository, of candle and of cuBLAS.
    pub fn of_name(name: &str) -> Class {
        const WORDS: [(Class, &[&str]); 8] = [
            (Class::Attention, &["flash", "attention_fwd", "attention_bwd"]),
            (Class::Matmul, &["matmul", "gemm", "nvjet", "cutlass", "cublas", "splitk"]),
            (Class::Softmax, &["softmax"]),
            (Class::Norm, &["norm"]),
            (Class::Loss, &["cross_entropy", "loss"]),
            (Class::Optimizer, &["adam", "sum_squares", "clip"]),
            (Class::Memory, &["copy", "fill", "memcpy", "memset", "ucopy", "const_set"]),
            (
                Class::Elementwise,
                &[
                    "silu", "swiglu", "rope", "cast", "badd", "bsub", "bmul", "bdiv", "usqr", "usqrt", "uexp",
                    "affine", "where",
                ],
            ),
        ];
        let name = name.to_lowercase();
        let found = WORDS.iter().find(|(_, words)| words.iter().any(|word| name.contains(word)));
        found.map_or(Class::Other, |(class, _)| *class)
    }
}

/// Table: time of each phase per step, and the sum against the measured time of the step.
pub fn phases(profile: &Profile<'_>) -> Table {
    let steps = profile.steps.len().max(1) as f64;
    let step_ms: Vec<f64> = profile.steps.iter().map(|span| milliseconds(span.end_ns - span.start_ns)).collect();
    let mean = step_ms.iter().sum::<f64>() / steps;
    let mut table = Table::new(
        "phases",
        "Time per step by phase",
        [
            Column::text("phase"),
            Column::number("time").unit("ms").decimals(3),
            Column::number("share").unit("%").decimals(1),
            Column::number("GPU busy").unit("ms").decimals(3),
            Column::number("GPU activities").decimals(0),
        ],
    );
    let mut sum = 0.0;
    for phase in Phase::ALL {
        let times = profile.phase_times(phase);
        let total = times.iter().sum::<f64>();
        if total == 0.0 {
            continue;
        }
        sum += total / steps;
        let activities = profile.trace.activities.iter().filter(|a| profile.trace.phase(a.node) == Some(phase)).count();
        let on_gpu = |x: f64| if profile.on_gpu() { Cell::from(x / steps) } else { Cell::Empty };
        table.push([
            Cell::from(phase.name()),
            Cell::statistics(&times),
            Cell::from(100.0 * total / steps / mean),
            on_gpu(profile.busy(phase)),
            on_gpu(activities as f64),
        ]);
    }
    let share = 100.0 * sum / mean;
    table.push([Cell::from("sum"), Cell::from(sum), Cell::from(share), Cell::Empty, Cell::Empty]);
    table.push([Cell::from("step, measured"), Cell::statistics(&step_ms), Cell::from(100.0), Cell::Empty, Cell::Empty]);
    let note = match profile.on_gpu() {
        true => {
            "Time is measured on the host, from the start of a phase until the GPU has finished it. If the GPU is \
             busy for much less, the phase is launch-bound."
        }
        false => "Time of the calling thread, including waits for its worker threads.",
    };
    table.note(note).without_empty_columns()
}

/// Table: the `count` kernels or operations with the most time in each phase.
pub fn names(profile: &Profile<'_>, count: usize) -> Table {
    let steps = profile.steps.len().max(1) as f64;
    let (title, what) = match profile.on_gpu() {
        true => ("Kernels and copies by GPU time", "kernel"),
        false => ("Operations by exclusive time", "operation"),
    };
    let mut table = Table::new(
        "names",
        title,
        [
            Column::text("phase"),
            Column::text(what).key("name"),
            Column::number("calls per step").key("calls").decimals(1),
            Column::number("time per step").unit("ms").key("time_ms").decimals(3),
            Column::number("of the phase").unit("%").key("share_percent").decimals(1),
        ],
    );
    for phase in Phase::ALL {
        let mut by_name: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for item in of_phase(profile, phase) {
            let entry = by_name.entry(shown(item, phase)).or_default();
            entry.0 += item.ns;
            entry.1 += item.count;
        }
        let total: u64 = by_name.values().map(|(ns, _)| ns).sum();
        let mut rows: Vec<(&str, (u64, u64))> = by_name.into_iter().filter(|(_, (ns, _))| *ns > 0).collect();
        rows.sort_by_key(|(_, (ns, _))| std::cmp::Reverse(*ns));
        for (name, (ns, calls)) in rows.into_iter().take(count) {
            table.push([
                Cell::from(phase.name()),
                Cell::from(name),
                Cell::from(calls as f64 / steps),
                Cell::from(milliseconds(ns) / steps),
                Cell::from(100.0 * ns as f64 / total as f64),
            ]);
        }
    }
    table.note("(not named) is the time of a phase outside of all spans: in the backward pass, that of candle ops.")
}

/// Name for display. The exclusive time of a phase is the time outside of all named spans.
fn shown(item: &Item, phase: Phase) -> &str {
    if item.name == phase.name() { "(not named)" } else { &item.name }
}

fn of_phase<'p>(profile: &'p Profile<'_>, phase: Phase) -> impl Iterator<Item = &'p Item> {
    profile.items.iter().filter(move |item| profile.trace.phase(item.node) == Some(phase))
}

/// Table: time by kind of work in each phase.
pub fn classes(profile: &Profile<'_>) -> Table {
    let steps = profile.steps.len().max(1) as f64;
    let phases: Vec<Phase> = Phase::ALL.into_iter().filter(|&p| of_phase(profile, p).any(|item| item.ns > 0)).collect();
    let columns = phases.iter().flat_map(|phase| {
        [
            Column::number(phase.name()).unit("ms").decimals(3),
            Column::number(&format!("of {}", phase.name())).unit("%").decimals(1),
        ]
    });
    let whole = [Column::number("step").unit("ms").decimals(3), Column::number("of step").unit("%").decimals(1)];
    let mut table =
        Table::new("classes", "Time by kind of work", [Column::text("work")].into_iter().chain(columns).chain(whole));
    let mut sums: BTreeMap<Class, Vec<u64>> = BTreeMap::new();
    for (p, &phase) in phases.iter().enumerate() {
        for item in of_phase(profile, phase) {
            sums.entry(Class::of_name(&item.name)).or_insert_with(|| vec![0; phases.len()])[p] += item.ns;
        }
    }
    let totals: Vec<u64> = (0..phases.len()).map(|p| sums.values().map(|ns| ns[p]).sum()).collect();
    let all: u64 = totals.iter().sum();
    for (class, ns) in &sums {
        let pair = |ns: u64, of: u64| {
            let share = if of == 0 { Cell::Empty } else { Cell::from(100.0 * ns as f64 / of as f64) };
            [Cell::from(milliseconds(ns) / steps), share]
        };
        let mut row = vec![Cell::from(class.name())];
        row.extend(ns.iter().zip(&totals).flat_map(|(&ns, &of)| pair(ns, of)));
        row.extend(pair(ns.iter().sum(), all));
        table.push(row);
    }
    table
}

/// FLOP of the parts of unfused attention in one forward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionFlop {
    pub scores: f64,
    pub softmax: f64,
    pub values: f64,
}

impl AttentionFlop {
    /// FLOP of `layers` layers of [batch, heads, n, d]: two per multiply-add; for the softmax five per element (row
    /// maximum, difference, exponential, sum, quotient). The masked half of the scores counts too.
    pub fn new(layers: usize, batch: usize, heads: usize, n: usize, d: usize) -> AttentionFlop {
        let rows = (layers * batch * heads * n) as f64;
        let (n, d) = (n as f64, d as f64);
        AttentionFlop { scores: rows * 2.0 * n * d, softmax: rows * 5.0 * n, values: rows * 2.0 * n * d }
    }
}

/// Table: softmax against matmuls in forward attention; `None` if no softmax was recorded, as with fused attention.
pub fn attention(profile: &Profile<'_>, flop: AttentionFlop) -> Option<Table> {
    let steps = profile.steps.len().max(1) as f64;
    let forward = |name: &str| -> f64 {
        let inside = |item: &&Item| profile.inside(item.node, "attention") && profile.inside(item.node, name);
        let ns: u64 = of_phase(profile, Phase::Forward).filter(inside).map(|item| item.ns).sum();
        milliseconds(ns) / steps
    };
    let parts = [
        ("scores: Q·Kᵀ, scale, mask", forward("scores"), flop.scores),
        ("softmax", forward("softmax"), flop.softmax),
        ("weights · V", forward("values"), flop.values),
    ];
    if parts[1].1 == 0.0 {
        return None;
    }
    let mut table = Table::new(
        "attention",
        "Attention, forward: softmax against matmuls",
        [
            Column::text("part"),
            Column::number("time per step").unit("ms").key("time_ms").decimals(3),
            Column::number("operations").unit("GFLOP").key("gflop").significant(4),
            Column::number("rate").unit("GFLOP/s").significant(3),
        ],
    )
    .note(format!(
        "The softmax takes {:.2} times as long as the matmuls for {:.3} times the FLOP: it is memory-bound, because it reads \
         and writes the matrix of scores several times.",
        parts[1].1 / (parts[0].1 + parts[2].1),
        flop.softmax / (flop.scores + flop.values),
    ));
    for (name, ms, flop) in parts {
        table.push([Cell::from(name), Cell::from(ms), Cell::from(flop / 1e9), Cell::from(flop / 1e6 / ms)]);
    }
    Some(table)
}

/// Bar plot: the `count` names with the most time over all phases.
pub fn plot(profile: &Profile<'_>, count: usize) -> Plot {
    let steps = profile.steps.len().max(1) as f64;
    let mut by_name: BTreeMap<(&str, Phase), u64> = BTreeMap::new();
    for phase in Phase::ALL {
        for item in of_phase(profile, phase) {
            *by_name.entry((shown(item, phase), phase)).or_default() += item.ns;
        }
    }
    let mut rows: Vec<((&str, Phase), u64)> = by_name.into_iter().collect();
    rows.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
    let bar = |((name, phase), ns): ((&str, Phase), u64)| Bar {
        // Names of C++ kernels exceed the page width.
        name: name.chars().take(48).collect(),
        group: phase.name().to_string(),
        value: milliseconds(ns) / steps,
        error: None,
    };
    let bars = rows.into_iter().filter(|(_, ns)| *ns > 0).take(count).map(bar).collect();
    let title = if profile.on_gpu() { "GPU time per step" } else { "Exclusive time of operations per step" };
    Plot::bars("names", title, Axis::linear("ms"), bars)
}
