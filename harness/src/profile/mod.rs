//! Attributes the time of a training step to phases, spans and kernels.
//!
//! Code opens a [`span`] to appear in profiles; a step opens a [`phase`] around each of its parts. Both cost one atomic
//! load while nothing is recorded. [`Profile`] reads a recording of some steps:
//!
//! - [`tables`]: times by phase and by name, the share of matmuls, attention's softmax against its matmuls;
//! - [`chrome`]: a trace for Perfetto and Chrome;
//! - [`flame`]: a flame graph.
//!
//! [`ranks`] combines the recordings of many ranks with the interval arithmetic of [`intervals`].

pub mod chrome;
pub mod flame;
pub mod intervals;
pub mod ranks;
pub mod tables;

use tilewright::trace::{NodeId, SpanEvent, Trace};
pub use tilewright::trace::{Phase, Span, phase, root_span, span};

/// Name of the span around each measured step.
pub const STEP: &str = "step";

/// A recording of steps, read as a profile.
pub struct Profile<'a> {
    pub trace: &'a Trace,
    /// The spans of [`STEP`], in order.
    pub steps: Vec<SpanEvent>,
    /// GPU activities; on the CPU, the exclusive times of spans: without the spans inside them.
    pub items: Vec<Item>,
}

/// Total time and count of one kernel or span.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub node: NodeId,
    pub name: String,
    /// Nanoseconds.
    pub ns: u64,
    pub count: u64,
}

impl<'a> Profile<'a> {
    pub fn new(trace: &'a Trace) -> Profile<'a> {
        let named = |span: &&SpanEvent| trace.nodes[span.node as usize].name == STEP;
        let steps = trace.spans.iter().filter(named).copied().collect();
        let items = if trace.activities.is_empty() { exclusive_times(trace) } else { device_times(trace) };
        Profile { trace, steps, items }
    }

    /// Whether the items are GPU activities.
    pub fn on_gpu(&self) -> bool {
        !self.trace.activities.is_empty()
    }

    /// Total time of all steps in seconds.
    pub fn seconds(&self) -> f64 {
        self.steps.iter().map(|span| seconds(span.end_ns - span.start_ns)).sum()
    }

    /// Spans of a phase inside a step, in order.
    pub fn phase_spans(&self, phase: Phase) -> impl Iterator<Item = &SpanEvent> {
        self.trace.spans.iter().filter(move |span| {
            self.trace.begins_phase(span.node) == Some(phase)
                && self.steps.iter().any(|step| step.start_ns <= span.start_ns && span.end_ns <= step.end_ns)
        })
    }

    /// Milliseconds of a phase in each step.
    pub fn phase_times(&self, phase: Phase) -> Vec<f64> {
        let inside = |step: &SpanEvent, span: &SpanEvent| step.start_ns <= span.start_ns && span.end_ns <= step.end_ns;
        let time = |step: &SpanEvent| {
            let spans = self.phase_spans(phase).filter(|span| inside(step, span));
            spans.map(|span| milliseconds(span.end_ns - span.start_ns)).sum()
        };
        self.steps.iter().map(time).collect()
    }

    /// Milliseconds in which the GPU was busy with activities of this phase. Overlapping activities count once.
    pub fn busy(&self, phase: Phase) -> f64 {
        let of_phase = self.trace.activities.iter().filter(|a| self.trace.phase(a.node) == Some(phase));
        let (mut busy, mut until) = (0, 0);
        // Activities are sorted by start.
        for activity in of_phase {
            busy += activity.end_ns.saturating_sub(activity.start_ns.max(until));
            until = until.max(activity.end_ns);
        }
        milliseconds(busy)
    }

    /// Whether a node or one of its ancestors has this name.
    pub fn inside(&self, node: NodeId, name: &str) -> bool {
        self.trace.path(node).contains(&name)
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Exclusive time per node: the time of its spans without that of the spans inside them.
fn exclusive_times(trace: &Trace) -> Vec<Item> {
    let mut total = vec![0_u64; trace.nodes.len()];
    let mut inside = vec![0_u64; trace.nodes.len()];
    let mut count = vec![0_u64; trace.nodes.len()];
    for span in &trace.spans {
        let ns = span.end_ns - span.start_ns;
        total[span.node as usize] += ns;
        count[span.node as usize] += 1;
        inside[trace.nodes[span.node as usize].parent as usize] += ns;
    }
    let item = |(i, node): (usize, &tilewright::trace::Node)| Item {
        node: i as NodeId,
        name: node.name.clone(),
        // Concurrent threads can take longer in total than the span around them.
        ns: total[i].saturating_sub(inside[i]),
        count: count[i],
    };
    trace.nodes.iter().enumerate().skip(1).map(item).collect()
}

/// GPU time per node and activity name.
fn device_times(trace: &Trace) -> Vec<Item> {
    let mut items: std::collections::BTreeMap<(NodeId, String), (u64, u64)> = std::collections::BTreeMap::new();
    for activity in &trace.activities {
        let entry = items.entry((activity.node, activity.kind.name())).or_default();
        entry.0 += activity.end_ns - activity.start_ns;
        entry.1 += 1;
    }
    items.into_iter().map(|((node, name), (ns, count))| Item { node, name, ns, count }).collect()
}

#[cfg(test)]
mod tests;
