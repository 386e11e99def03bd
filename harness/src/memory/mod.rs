//! Where the memory of a training step goes.
//!
//! [`Timeline`] turns the events of a recording into blocks with a birth, an end and a place; [`snapshot`] writes them for
//! PyTorch's memory viewer; [`residual`] is the arithmetic of the residual stream.

pub mod residual;
pub mod snapshot;
mod tables;

use std::collections::HashMap;

use tilewright::trace::{NodeId, Phase, ROOT, Trace};

pub use tables::{by_phase, largest, timeline_plot};

/// Memory from its allocation to its release. Times are in nanoseconds since the recording started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub address: u64,
    pub bytes: u64,
    /// The span that asked for it.
    pub node: NodeId,
    pub from_ns: u64,
    /// None where it lived at the end.
    pub to_ns: Option<u64>,
}

/// All blocks of a recording. Releases of what was allocated before the recording are left out.
#[derive(Debug)]
pub struct Timeline<'a> {
    pub trace: &'a Trace,
    /// In the order of their allocation.
    pub blocks: Vec<Block>,
    /// Blocks as they begin (true) and end, in the order of the events.
    changes: Vec<(usize, bool)>,
    /// (time, bytes that live from then on), in order.
    live: Vec<(u64, u64)>,
    /// The most by which all events together, releases of older memory included, raised what lives.
    net_peak: i64,
}

/// The most that lived at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    pub bytes: u64,
    pub time_ns: u64,
}

impl<'a> Timeline<'a> {
    pub fn new(trace: &'a Trace) -> Timeline<'a> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut at: HashMap<u64, usize> = HashMap::new();
        let (mut changes, mut live) = (Vec::new(), Vec::new());
        let mut bytes = 0_u64;
        let (mut net, mut net_peak) = (0_i64, 0);
        for event in &trace.memory {
            net += if event.allocated { event.bytes as i64 } else { -(event.bytes as i64) };
            net_peak = net.max(net_peak);
            if event.allocated {
                at.insert(event.address, blocks.len());
                changes.push((blocks.len(), true));
                blocks.push(Block {
                    address: event.address,
                    bytes: event.bytes,
                    node: event.node,
                    from_ns: event.time_ns,
                    to_ns: None,
                });
                bytes += event.bytes;
            } else if let Some(index) = at.remove(&event.address) {
                blocks[index].to_ns = Some(event.time_ns);
                bytes -= blocks[index].bytes;
                changes.push((index, false));
            } else {
                continue;
            }
            live.push((event.time_ns, bytes));
        }
        Timeline { trace, blocks, changes, live, net_peak }
    }

    /// The peak of the whole recording.
    pub fn peak(&self) -> Peak {
        self.peak_between(0, u64::MAX)
    }

    /// The peak from one time to another, both included. What lived when it began counts.
    pub fn peak_between(&self, from_ns: u64, to_ns: u64) -> Peak {
        let mut peak = Peak { bytes: self.live_at(from_ns), time_ns: from_ns };
        for &(time_ns, bytes) in self.live.iter().filter(|(time, _)| (from_ns..=to_ns).contains(time)) {
            if bytes > peak.bytes {
                peak = Peak { bytes, time_ns };
            }
        }
        peak
    }

    /// Bytes that live at a time, what was allocated then included.
    pub fn live_at(&self, time_ns: u64) -> u64 {
        let next = self.live.partition_point(|&(time, _)| time <= time_ns);
        next.checked_sub(1).map_or(0, |last| self.live[last].1)
    }

    /// The blocks that live at a time.
    pub fn blocks_at(&self, time_ns: u64) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |block| block.from_ns <= time_ns && block.to_ns.is_none_or(|to| to > time_ns))
    }

    /// The peak while a phase was open, over all times that it was. None where it never was.
    pub fn peak_of(&self, phase: Phase) -> Option<Peak> {
        let open = self.trace.spans.iter().filter(|span| self.trace.begins_phase(span.node) == Some(phase));
        open.map(|span| self.peak_between(span.start_ns, span.end_ns)).max_by_key(|peak| peak.bytes)
    }

    /// When the first phase began: what lived before is the model's, its gradients' and the optimizer's.
    pub fn first_phase(&self) -> Option<u64> {
        let phases = self.trace.spans.iter().filter(|span| self.trace.nodes[span.node as usize].phase.is_some());
        phases.map(|span| span.start_ns).min()
    }

    /// By how much the events explain less than the peak that the allocator counted itself, as a share of it. They leave
    /// small blocks out. The allocator counts from the start, so that what is released of older memory is taken off here too.
    pub fn unaccounted(&self) -> f64 {
        match self.trace.peak_bytes {
            0 => 0.0,
            counted => (counted as f64 - self.net_peak as f64) / counted as f64,
        }
    }
}

/// The phase of a node in words: `setup` where there is none.
pub fn phase_name(trace: &Trace, node: NodeId) -> &'static str {
    trace.phase(node).map_or(SETUP, Phase::name)
}

/// What is allocated outside of all phases.
pub const SETUP: &str = "setup";

/// The names inside of the phase, for people: `block > attention`.
pub fn place(trace: &Trace, node: NodeId) -> String {
    let mut at = node;
    let mut names = Vec::new();
    while at != ROOT && trace.begins_phase(at).is_none() {
        names.push(trace.nodes[at as usize].name.as_str());
        at = trace.nodes[at as usize].parent;
    }
    names.reverse();
    names.join(" > ")
}

#[cfg(test)]
mod tests;
