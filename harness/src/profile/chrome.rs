//! Exports a recording for Chrome and Perfetto (ui.perfetto.dev) in the "Trace Event Format": JSON of complete events
//! (`X`), counters (`C`) and metadata (`M`), with times in microseconds.

use serde_json::{Value, json};
use tilewright::trace::Trace;
use tilewright::trace::cupti::ActivityKind;

use super::ranks::communication_streams;

/// Process ids and time offset of a recording in a combined trace.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Process ids for host and GPU events.
    pub host: u32,
    pub gpu: u32,
    /// Rank of the recording, if there are several.
    pub rank: Option<usize>,
    /// Nanoseconds added to its times.
    pub offset: i64,
}

impl Placement {
    /// Placement of the only recording in a trace.
    pub const ALONE: Placement = Placement { host: 1, gpu: 2, rank: None, offset: 0 };

    pub(super) fn microseconds(&self, ns: u64) -> f64 {
        (ns as i64 + self.offset) as f64 / 1e3
    }

    fn named(&self, what: &str) -> String {
        self.rank.map_or(what.to_string(), |rank| format!("rank {rank}: {what}"))
    }
}

/// Content of the trace file of one recording.
pub fn trace(trace: &Trace) -> Value {
    file(events(trace, &Placement::ALONE))
}

/// Content of a trace file with these events.
pub fn file(events: Vec<Value>) -> Value {
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

/// The events of one recording.
pub fn events(trace: &Trace, placement: &Placement) -> Vec<Value> {
    let host = placement.host;
    let mut events = process(host, &placement.named("host"));
    let mut threads: Vec<u32> = trace.spans.iter().map(|span| span.thread).collect();
    threads.sort_unstable();
    threads.dedup();
    events.extend(threads.iter().map(|&thread| name("thread_name", host, thread, &format!("thread {thread}"))));
    for span in &trace.spans {
        let phase = trace.phase(span.node).map_or("", tilewright::trace::Phase::name);
        events.push(json!({
            "ph": "X", "pid": host, "tid": span.thread, "name": trace.nodes[span.node as usize].name,
            "cat": if phase.is_empty() { "step" } else { phase },
            "ts": placement.microseconds(span.start_ns), "dur": microseconds(span.end_ns - span.start_ns),
        }));
    }
    events.extend(device_events(trace, placement));
    let mut live = 0_i64;
    for event in &trace.memory {
        live += if event.allocated { event.bytes as i64 } else { -(event.bytes as i64) };
        let mib = live.max(0) as f64 / (1 << 20) as f64;
        events.push(json!({
            "ph": "C", "pid": host, "name": "memory (MiB)", "ts": placement.microseconds(event.time_ns),
            "args": { "live": mib },
        }));
    }
    events
}

/// GPU activities, one track per stream.
fn device_events(trace: &Trace, placement: &Placement) -> Vec<Value> {
    let gpu = placement.gpu;
    if trace.activities.is_empty() {
        return Vec::new();
    }
    let mut events = process(gpu, &placement.named("GPU"));
    let sends = communication_streams(trace);
    let mut streams: Vec<u32> = trace.activities.iter().map(|activity| activity.stream).collect();
    streams.sort_unstable();
    streams.dedup();
    events.extend(streams.iter().map(|stream| {
        let what = if sends.contains(stream) { " (communication)" } else { "" };
        name("thread_name", gpu, *stream, &format!("stream {stream}{what}"))
    }));
    for activity in &trace.activities {
        let details = match &activity.kind {
            ActivityKind::Kernel { grid, block, registers, shared_bytes, .. } => json!({
                "grid": grid, "block": block, "registers": registers, "shared bytes": shared_bytes,
                "span": trace.path(activity.node).join(" > "),
            }),
            ActivityKind::Copy { bytes, .. } | ActivityKind::Fill { bytes } => {
                json!({ "bytes": bytes, "span": trace.path(activity.node).join(" > ") })
            }
        };
        let phase = trace.phase(activity.node).map_or("other", tilewright::trace::Phase::name);
        let category = if sends.contains(&activity.stream) { "communication" } else { phase };
        events.push(json!({
            "ph": "X", "pid": gpu, "tid": activity.stream, "name": activity.kind.name(), "cat": category,
            "ts": placement.microseconds(activity.start_ns), "dur": microseconds(activity.end_ns - activity.start_ns),
            "args": details,
        }));
    }
    events
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// Metadata events that name a process and sort processes by id.
fn process(pid: u32, called: &str) -> Vec<Value> {
    let order = json!({ "ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": { "sort_index": pid } });
    vec![name("process_name", pid, 0, called), order]
}

pub(super) fn name(what: &str, pid: u32, tid: u32, name: &str) -> Value {
    json!({ "ph": "M", "pid": pid, "tid": tid, "name": what, "args": { "name": name } })
}
