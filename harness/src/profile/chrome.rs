//! A recording as Chrome and Perfetto (ui.perfetto.dev) show it: the "Trace Event Format", JSON of complete events (`X`),
//! counters (`C`) and names (`M`), with times in microseconds.

use serde_json::{Value, json};
use tilewright::trace::Trace;
use tilewright::trace::cupti::ActivityKind;

const HOST: u32 = 1;
const GPU: u32 = 2;

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// The file's content.
pub fn trace(trace: &Trace) -> Value {
    let mut events = vec![name("process_name", HOST, 0, "host")];
    let mut threads: Vec<u32> = trace.spans.iter().map(|span| span.thread).collect();
    threads.sort_unstable();
    threads.dedup();
    events.extend(threads.iter().map(|&thread| name("thread_name", HOST, thread, &format!("thread {thread}"))));
    for span in &trace.spans {
        let phase = trace.phase(span.node).map_or("", tilewright::trace::Phase::name);
        events.push(json!({
            "ph": "X", "pid": HOST, "tid": span.thread, "name": trace.nodes[span.node as usize].name,
            "cat": if phase.is_empty() { "step" } else { phase },
            "ts": microseconds(span.start_ns), "dur": microseconds(span.end_ns - span.start_ns),
        }));
    }
    if !trace.activities.is_empty() {
        events.push(name("process_name", GPU, 0, "GPU"));
    }
    let mut streams: Vec<u32> = trace.activities.iter().map(|activity| activity.stream).collect();
    streams.sort_unstable();
    streams.dedup();
    events.extend(streams.iter().map(|&stream| name("thread_name", GPU, stream, &format!("stream {stream}"))));
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
        events.push(json!({
            "ph": "X", "pid": GPU, "tid": activity.stream, "name": activity.kind.name(), "cat": phase,
            "ts": microseconds(activity.start_ns), "dur": microseconds(activity.end_ns - activity.start_ns),
            "args": details,
        }));
    }
    let mut live = 0_i64;
    for event in &trace.memory {
        live += if event.allocated { event.bytes as i64 } else { -(event.bytes as i64) };
        let mib = live.max(0) as f64 / (1 << 20) as f64;
        events.push(json!({
            "ph": "C", "pid": HOST, "name": "memory (MiB)", "ts": microseconds(event.time_ns), "args": { "live": mib },
        }));
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

fn name(what: &str, pid: u32, tid: u32, name: &str) -> Value {
    json!({ "ph": "M", "pid": pid, "tid": tid, "name": what, "args": { "name": name } })
}
