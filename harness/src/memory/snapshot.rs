//! A snapshot that PyTorch's memory viewer (pytorch.org/memory_viz) opens.
//!
//! The viewer reads a pickle of a dictionary: `segments` are regions with their blocks at the end, `device_traces` the events
//! of each device in order. An allocation is `alloc`; a release is `free_requested` and `free_completed`. An event's
//! `frames` are the innermost first; its `category` decides its colour. Dropped into the viewer, "Active Memory Timeline"
//! shows blocks over events.

use serde::Serialize;

use super::{Block, Timeline, phase_name};

/// What the file holds.
#[derive(Serialize)]
pub struct Snapshot {
    segments: Vec<Segment>,
    device_traces: Vec<Vec<Event>>,
}

/// A region of memory and what lies in it at the end, without gaps.
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
    blocks: Vec<Part>,
}

#[derive(Serialize)]
struct Part {
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

/// A line of a stack trace. Ours are spans: the phase stands where a file would, the depth where its line would.
#[derive(Clone, Serialize)]
struct Frame {
    filename: &'static str,
    line: usize,
    name: String,
}

/// Regions that lie closer together than this are one.
const GAP: u64 = 1 << 20;

impl Snapshot {
    pub fn new(timeline: &Timeline<'_>) -> Snapshot {
        Snapshot { segments: segments(timeline), device_traces: vec![events(timeline)] }
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// None is known: all keys are strings and all values numbers, strings and lists.
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
        // Without any frame the viewer takes a block for one from before the recording.
        frames.push(Frame { filename, line: 0, name: filename.to_string() });
    }
    frames
}

fn events(timeline: &Timeline<'_>) -> Vec<Event> {
    // The viewer wants a category `unknown` where there are categories at all.
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

/// Regions around all addresses that were ever used.
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
    let free =
        |address: u64, size: u64| Part { address, size, requested_size: 0, state: "inactive", frames: Vec::new() };
    for block in live.iter().filter(|block| (from..to).contains(&block.address)) {
        if block.address > at {
            blocks.push(free(at, block.address - at));
        }
        blocks.push(Part {
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
