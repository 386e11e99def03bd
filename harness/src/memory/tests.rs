use std::process::Command;

use tilewright::trace::{MemoryEvent, Node, SpanEvent};

use super::residual::Sizes;
use super::snapshot::Snapshot;
use super::*;

const MIB: u64 = 1 << 20;

/// Setup keeps 4 MiB; forward keeps 2 and uses 3 temporarily; backward releases the 2 and uses 1.
fn trace() -> Trace {
    let node = |parent, name: &str, phase| Node { parent, name: name.to_string(), phase };
    let nodes = vec![
        node(0, "", None),
        node(0, "forward", Some(Phase::Forward)),
        node(1, "block", None),
        node(0, "backward", Some(Phase::Backward)),
    ];
    let event = |time_ns, address, bytes, allocated, node| MemoryEvent { time_ns, address, bytes, allocated, node };
    let memory = vec![
        event(5, 0x9000_0000, 7 * MIB, false, 0),
        event(10, 0x1000_0000, 4 * MIB, true, 0),
        event(20, 0x2000_0000, 2 * MIB, true, 2),
        event(30, 0x3000_0000, 3 * MIB, true, 1),
        event(40, 0x3000_0000, 3 * MIB, false, 1),
        event(60, 0x3000_0000, MIB, true, 3),
        event(61, 0x2000_0000, 2 * MIB, false, 3),
        event(80, 0x3000_0000, MIB, false, 3),
    ];
    let span = |node, start_ns, end_ns| SpanEvent { node, thread: 0, start_ns, end_ns };
    let spans = vec![span(2, 18, 22), span(1, 15, 50), span(3, 55, 90)];
    Trace { nodes, spans, memory, peak_bytes: 2 * MIB + MIB / 20, end_ns: 100, ..Trace::default() }
}

#[test]
fn peaks_are_found_in_their_phases() {
    let trace = trace();
    let timeline = Timeline::new(&trace);
    assert_eq!(timeline.blocks.len(), 4, "releases of older memory are ignored");
    assert_eq!(timeline.peak(), Peak { bytes: 9 * MIB, time_ns: 30 });
    assert_eq!(timeline.peak_of(Phase::Forward), Some(Peak { bytes: 9 * MIB, time_ns: 30 }));
    assert_eq!(timeline.peak_of(Phase::Backward), Some(Peak { bytes: 7 * MIB, time_ns: 60 }));
    assert_eq!(timeline.peak_of(Phase::Optimizer), None);
    assert_eq!((timeline.live_at(14), timeline.live_at(100)), (4 * MIB, 4 * MIB));
    assert_eq!(timeline.first_phase(), Some(15));
    // 7 MiB of older memory were released first, so live memory never rose by more than 2 MiB.
    assert!((timeline.unaccounted() - 0.05 / 2.05).abs() < 1e-6);
    for time in [10, 20, 30, 45, 60, 95] {
        let sum: u64 = timeline.blocks_at(time).map(|block| block.bytes).sum();
        assert_eq!(sum, timeline.live_at(time), "at {time}");
    }
}

#[test]
fn tables_say_what_lived_at_the_peak() {
    let trace = trace();
    let timeline = Timeline::new(&trace);
    let report = crate::report::Report::new("m", "M").table(by_phase(&timeline)).table(largest(&timeline, 3));
    insta::assert_snapshot!(report.to_text());
}

#[test]
fn the_plot_reaches_the_peak() {
    let trace = trace();
    let crate::report::plot::PlotKind::Stack { series, .. } = timeline_plot(&Timeline::new(&trace)).kind else {
        panic!()
    };
    assert_eq!(series.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["setup", "forward", "backward"]);
    let sum = |i: usize| series.iter().map(|s| s.points[i].y).sum::<f64>();
    let highest = (0..series[0].points.len()).map(sum).fold(0.0, f64::max);
    assert!((highest - 9.0).abs() < 1e-9, "{highest}");
}

#[test]
fn the_residual_stream_of_the_assignment() {
    let sizes = Sizes {
        batch: 4,
        context: 128,
        d_model: 2560,
        d_ff: 10240,
        heads: 32,
        layers: 32,
        vocabulary: 10_000,
        bytes: 4,
    };
    // 4 · 128 · 2560 · 4 bytes.
    assert_eq!(sizes.residual_mib(), 5.0);
    assert!(sizes.table().rows.iter().any(|row| row[2] == crate::report::Cell::Integer(4 * 32 * 128 * 128)));
}

/// Reads the pickle back with another implementation, and replays it as the viewer does.
#[test]
fn the_snapshot_reads_back() {
    let trace = trace();
    let timeline = Timeline::new(&trace);
    let pickle = Snapshot::new(&timeline).to_pickle().unwrap();
    let read: serde_json::Value = serde_pickle::from_slice(&pickle, serde_pickle::DeOptions::new()).unwrap();
    let events = read["device_traces"][0].as_array().unwrap();
    let mut live = std::collections::HashMap::new();
    let mut peak = 0;
    for event in events {
        let (address, size) = (event["addr"].as_u64().unwrap(), event["size"].as_u64().unwrap());
        match event["action"].as_str().unwrap() {
            "alloc" => {
                assert!(live.insert(address, size).is_none(), "{event}");
                assert!(!event["frames"].as_array().unwrap().is_empty());
            }
            "free_completed" => assert_eq!(live.remove(&address), Some(size), "{event}"),
            _ => {}
        }
        peak = peak.max(live.values().sum::<u64>());
    }
    assert_eq!(peak, 9 * MIB);
    let left: u64 = live.values().sum();
    let mut active = 0;
    for segment in read["segments"].as_array().unwrap() {
        let blocks = segment["blocks"].as_array().unwrap();
        let sizes: u64 = blocks.iter().map(|b| b["size"].as_u64().unwrap()).sum();
        assert_eq!(Some(sizes), segment["total_size"].as_u64(), "blocks fill their segment");
        active += segment["active_size"].as_u64().unwrap();
    }
    assert_eq!(active, left);
    let categories: Vec<&str> = events.iter().map(|event| event["category"].as_str().unwrap()).collect();
    assert!(categories.contains(&"unknown") && categories.contains(&"forward"), "{categories:?}");
}

/// Reads the pickle with Python, if there is one.
#[test]
fn python_reads_the_snapshot() {
    let trace = trace();
    let pickle = Snapshot::new(&Timeline::new(&trace)).to_pickle().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot.pickle");
    std::fs::write(&path, pickle).unwrap();
    let program = "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb')); \
                   print(len(s['device_traces'][0]), s['device_traces'][0][2]['frames'][0]['name'], len(s['segments']))";
    match Command::new("python3").arg("-c").arg(program).arg(&path).output() {
        Err(_) => println!("skipped: there is no python3"),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(text.trim(), "11 block 3", "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
