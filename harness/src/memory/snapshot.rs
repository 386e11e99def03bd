//! Writes a snapshot for the memory viewer of PyTorch (pytorch.org/memory_viz).
//!
//! The viewer reads a pickle of a dictionary: `segments` are regions with their blocks at the end, `device_traces` the
//! events of each device in order. An allocation is an `alloc` event; a release is `free_requested` and
//! `free_completed`. The `frames` of an event start with the innermost; its `category` selects its color. In the
//! viewer, "Active Memory Timeline" shows blocks over events.

use serde::Serialize;

use super::{Block, Timeline, phase_name};

/// Content of the file.
#[derive(Serialize)]
pub struct Snapshot {
    segments: Vec<Segment>,
    device_traces: Vec<Vec<Event>>,
}

/// A memory region and its blocks at the end, without gaps.
#[derive(Serialize)]
struct Segment {
    device: u32,
    address: u64,
    total_size: u64,
    allocated_size: u64,
    active_size: u64,
    stream: u64,
    segment_type: &'static str,
    frames: Vec<Frame>,
    blocks: Vec<SegmentBlock>,
}

#[derive(Serialize)]
struct SegmentBlock {
    address: u64,
    size: u64,
    requested_size: u64,
    state: &'static str,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct Event {
    action: &'static str,
    addr: u64,
    size: u64,
    stream: u64,
    time_us: u64,
    category: &'static str,
    frames: Vec<Frame>,
}

/// A frame of a stack trace. Here frames are spans: the phase takes the place of the file name, the depth that of the
/// line.
#[derive(Clone, Serialize)]
struct Frame {
    filename: &'static str,
    line: usize,
    name: String,
}

/// Largest gap in bytes between blocks of one region.
const GAP: u64 = 1 << 20;

impl Snapshot {
    pub fn new(timeline: &Timeline<'_>) -> Snapshot {
        Snapshot { segments: segments(timeline), device_traces: vec![events(timeline)] }
    }

    /// Serializes the file.
    ///
    /// # Errors
    /// None known: all keys are strings, and all values are numbers, strings and lists.
    pub fn to_pickle(&self) -> Result<Vec<u8>, serde_pickle::Error> {
        serde_pickle::to_vec(self, serde_pickle::SerOptions::new())
    }
}

fn frames(timeline: &Timeline<'_>, block: &Block) -> Vec<Frame> {
    let filename = phase_name(timeline.trace, block.node);
    let path = timeline.trace.path(block.node);
    let mut frames: Vec<Frame> =
        path.iter().enumerate().map(|(line, name)| Frame { filename, line, name: (*name).to_string() }).collect();
    frames.reverse();
    if frames.is_empty() {
        // The viewer treats a block without frames as older than the recording.
        frames.push(Frame { filename, line: 0, name: filename.to_string() });
    }
    frames
}

fn events(timeline: &Timeline<'_>) -> Vec<Event> {
    // The viewer requires a category `unknown` if there are categories.
    let first =
        Event { action: "snapshot", addr: 0, size: 0, stream: 0, time_us: 0, category: "unknown", frames: Vec::new() };
    let mut events = vec![first];
    for &(index, begins) in &timeline.changes {
        let block = &timeline.blocks[index];
        let mut event = |action, time_ns: u64, frames| {
            let category = phase_name(timeline.trace, block.node);
            let (addr, size, time_us) = (block.address, block.bytes, time_ns / 1000);
            events.push(Event { action, addr, size, stream: 0, time_us, category, frames });
        };
        if begins {
            event("alloc", block.from_ns, frames(timeline, block));
        } else {
            let to_ns = block.to_ns.unwrap_or(block.from_ns);
            event("free_requested", to_ns, Vec::new());
            event("free_completed", to_ns, Vec::new());
        }
    }
    events
}

/// Regions that cover all addresses ever used.
fn segments(timeline: &Timeline<'_>) -> Vec<Segment> {
    let mut ranges: Vec<(u64, u64)> = timeline.blocks.iter().map(|b| (b.address, b.address + b.bytes)).collect();
    ranges.sort_unstable();
    let mut regions: Vec<(u64, u64)> = Vec::new();
    for (from, to) in ranges {
        match regions.last_mut() {
            Some(last) if from <= last.1 + GAP => last.1 = last.1.max(to),
            Some(_) | None => regions.push((from, to)),
        }
    }
    let mut live: Vec<&Block> = timeline.blocks.iter().filter(|block| block.to_ns.is_none()).collect();
    live.sort_unstable_by_key(|block| block.address);
    regions.into_iter().map(|region| segment(timeline, region, &live)).collect()
}

fn segment(timeline: &Timeline<'_>, (from, to): (u64, u64), live: &[&Block]) -> Segment {
    let mut blocks = Vec::new();
    let mut at = from;
    let mut active = 0;
    let free = |address: u64, size: u64| SegmentBlock {
        address,
        size,
        requested_size: 0,
        state: "inactive",
        frames: Vec::new(),
    };
    for block in live.iter().filter(|block| (from..to).contains(&block.address)) {
        if block.address > at {
            blocks.push(free(at, block.address - at));
        }
        blocks.push(SegmentBlock {
            address: block.address,
            size: block.bytes,
            requested_size: block.bytes,
            state: "active_allocated",
            frames: frames(timeline, block),
        });
        active += block.bytes;
        at = block.address + block.bytes;
    }
    if to > at {
        blocks.push(free(at, to - at));
    }
    Segment {
        device: 0,
        address: from,
        total_size: to - from,
        allocated_size: active,
        active_size: active,
        stream: 0,
        segment_type: "large",
        frames: Vec::new(),
        blocks,
    }
}
