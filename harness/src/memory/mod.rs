//! Attributes the memory of a training step to phases and spans.
//!
//! [`Timeline`] converts the events of a recording to blocks with an allocation time, a release time and a span;
//! [`snapshot`] writes the blocks for the memory viewer of PyTorch; [`residual`] computes the sizes of activations from
//! the model configuration.

pub mod residual;
pub mod snapshot;
mod tables;

use std::collections::HashMap;

use tilewright::trace::{NodeId, Phase, ROOT, Trace};

pub use tables::{by_phase, largest, timeline_plot};

/// A block of memory from its allocation to its release. Times are in nanoseconds since the start of the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub address: u64,
    pub bytes: u64,
    /// The span that allocated the block.
    pub node: NodeId,
    pub from_ns: u64,
    /// `None` if the block was live at the end of the recording.
    pub to_ns: Option<u64>,
}

/// All blocks of a recording. Releases of memory that was allocated before the recording are ignored.
#[derive(Debug)]
pub struct Timeline<'a> {
    pub trace: &'a Trace,
    /// In order of allocation.
    pub blocks: Vec<Block>,
    /// (block index, true for allocation and false for release), in order of the events.
    changes: Vec<(usize, bool)>,
    /// (time, live bytes from then on), in order.
    live: Vec<(u64, u64)>,
    /// Largest net increase of live bytes by all events, including releases of memory that is older than the recording.
    net_peak: i64,
}

/// Largest number of live bytes, and its time.
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

    /// The peak from one time to another, both inclusive. Blocks that were live at the start count.
    pub fn peak_between(&self, from_ns: u64, to_ns: u64) -> Peak {
        let mut peak = Peak { bytes: self.live_at(from_ns), time_ns: from_ns };
        for &(time_ns, bytes) in self.live.iter().filter(|(time, _)| (from_ns..=to_ns).contains(time)) {
            if bytes > peak.bytes {
                peak = Peak { bytes, time_ns };
            }
        }
        peak
    }

    /// Live bytes at a time, including blocks allocated at that time.
    pub fn live_at(&self, time_ns: u64) -> u64 {
        let next = self.live.partition_point(|&(time, _)| time <= time_ns);
        next.checked_sub(1).map_or(0, |last| self.live[last].1)
    }

    /// The live blocks at a time.
    pub fn blocks_at(&self, time_ns: u64) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |block| block.from_ns <= time_ns && block.to_ns.is_none_or(|to| to > time_ns))
    }

    /// The peak during all spans of a phase. None if the phase did not occur.
    pub fn peak_of(&self, phase: Phase) -> Option<Peak> {
        let open = self.trace.spans.iter().filter(|span| self.trace.begins_phase(span.node) == Some(phase));
        open.map(|span| self.peak_between(span.start_ns, span.end_ns)).max_by_key(|peak| peak.bytes)
    }

    /// Start of the first phase in nanoseconds. Blocks that are live then belong to the model, its gradients and the
    /// optimizer.
    pub fn first_phase(&self) -> Option<u64> {
        let phases = self.trace.spans.iter().filter(|span| self.trace.nodes[span.node as usize].phase.is_some());
        phases.map(|span| span.start_ns).min()
    }

    /// The fraction of the peak counted by the allocator that the events do not explain, because small blocks have no
    /// events. The allocator counts from the start of the recording and subtracts releases of older memory, as this
    /// function does.
    pub fn unaccounted(&self) -> f64 {
        match self.trace.peak_bytes {
            0 => 0.0,
            counted => (counted as f64 - self.net_peak as f64) / counted as f64,
        }
    }
}

/// Name of the phase of a node: `setup` outside of all phases.
pub fn phase_name(trace: &Trace, node: NodeId) -> &'static str {
    trace.phase(node).map_or(SETUP, Phase::name)
}

/// Name for allocations outside of all phases.
pub const SETUP: &str = "setup";

/// Names of the enclosing spans inside the phase, for display: `block > attention`.
pub fn span_path(trace: &Trace, node: NodeId) -> String {
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
