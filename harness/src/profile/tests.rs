use tilewright::trace::cupti::ActivityKind;
use tilewright::trace::{Activity, Node};

use super::tables::{AttentionFlop, Class};
use super::*;
use crate::report::Report;

/// Two steps of forward (20 and 30 ms) and backward (40 and 50 ms), with attention inside of forward.
fn trace() -> Trace {
    let node = |parent, name: &str, phase| Node { parent, name: name.to_string(), phase };
    let nodes = vec![
        node(0, "", None),
        node(0, STEP, None),
        node(1, "forward", Some(Phase::Forward)),
        node(2, "attention", None),
        node(3, "scores", None),
        node(4, "matmul", None),
        node(3, "softmax", None),
        node(3, "values", None),
        node(1, "backward", Some(Phase::Backward)),
        node(8, "linear", None),
        node(9, "matmul", None),
    ];
    let ms = |ms: u64| ms * 1_000_000;
    let span = |node, start, end| SpanEvent { node, thread: 0, start_ns: ms(start), end_ns: ms(end) };
    let spans = vec![
        span(5, 1, 4),
        span(4, 0, 5),
        span(6, 5, 12),
        span(7, 12, 15),
        span(3, 0, 16),
        span(2, 0, 20),
        span(10, 25, 55),
        span(9, 22, 58),
        span(8, 20, 60),
        span(1, 0, 61),
        span(2, 100, 130),
        span(8, 130, 180),
        span(1, 100, 181),
    ];
    Trace { nodes, spans, end_ns: ms(200), ..Trace::default() }
}

#[test]
fn phases_add_up_to_the_steps() {
    let trace = trace();
    let profile = Profile::new(&trace);
    assert_eq!(profile.phase_times(Phase::Forward), [20.0, 30.0]);
    assert_eq!(profile.phase_times(Phase::Backward), [40.0, 50.0]);
    assert_eq!(profile.phase_times(Phase::Optimizer), [0.0, 0.0]);
    assert!((profile.seconds() - 0.142).abs() < 1e-12);
    // The exclusive times of all spans sum to the time of the outermost ones.
    let own: u64 = profile.items.iter().map(|item| item.ns).sum();
    assert!((own as f64 / 1e9 - profile.seconds()).abs() < 1e-12);
}

#[test]
fn tables_on_the_cpu() {
    let trace = trace();
    let profile = Profile::new(&trace);
    let attention = tables::attention(&profile, AttentionFlop::new(1, 2, 4, 128, 64)).unwrap();
    let report = Report::new("p", "P")
        .table(tables::phases(&profile))
        .table(tables::names(&profile, 5))
        .table(tables::classes(&profile))
        .table(attention);
    insta::assert_snapshot!(report.to_text());
}

/// The same spans, with GPU activities.
fn on_gpu() -> Trace {
    let kernel = |node, name: &str, start_ns, end_ns| {
        let name = name.to_string();
        let kind = ActivityKind::Kernel { name, grid: [1; 3], block: [32, 1, 1], registers: 32, shared_bytes: 0 };
        Activity { kind, node, start_ns, end_ns, stream: 7 }
    };
    let activities = vec![
        kernel(5, "sm90_xmma_gemm_bf16", 2_000_000, 5_000_000),
        kernel(6, "softmax_f32", 5_000_000, 9_000_000),
        kernel(6, "softmax_f32", 8_000_000, 11_000_000),
        kernel(10, "nvjet_hsh", 30_000_000, 50_000_000),
    ];
    Trace { activities, ..trace() }
}

#[test]
fn tables_on_a_gpu() {
    let trace = on_gpu();
    let profile = Profile::new(&trace);
    // Overlapping kernels count once.
    assert_eq!(profile.busy(Phase::Forward), 9.0);
    let report = Report::new("p", "P")
        .table(tables::phases(&profile))
        .table(tables::names(&profile, 5))
        .table(tables::classes(&profile));
    insta::assert_snapshot!(report.to_text());
}

#[test]
fn names_have_classes() {
    for (name, class) in [
        ("matmul", Class::Matmul),
        ("ampere_sgemm_128x64_tn", Class::Matmul),
        ("flash_attention_fwd", Class::Attention),
        ("rms_norm_bwd", Class::Norm),
        ("cross_entropy_fwd", Class::Loss),
        ("adamw", Class::Optimizer),
        ("swiglu_fwd", Class::Elementwise),
        ("copy to the GPU", Class::Memory),
        ("block", Class::Other),
    ] {
        assert_eq!(Class::of_name(name), class, "{name}");
    }
}

#[test]
fn chrome_trace_events_are_complete() {
    let value = chrome::trace(&on_gpu());
    let read: serde_json::Value = serde_json::from_str(&value.to_string()).unwrap();
    let events = read["traceEvents"].as_array().unwrap();
    let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(complete.len(), 13 + 4);
    for event in &complete {
        for key in ["name", "cat", "pid", "tid", "ts", "dur"] {
            assert!(!event[key].is_null(), "{key}: {event}");
        }
    }
    let softmax = complete.iter().find(|event| event["name"] == "softmax_f32").unwrap();
    assert_eq!(
        (softmax["ts"].as_f64(), softmax["dur"].as_f64(), &softmax["cat"]),
        (Some(5000.0), Some(4000.0), &"forward".into())
    );
    assert_eq!(softmax["args"]["span"], "step > forward > attention > softmax");
}

#[test]
fn the_flame_graph_has_the_stacks() {
    let trace = trace();
    let profile = Profile::new(&trace);
    let lines = flame::folded(&profile);
    assert!(lines.contains(&"forward;attention;softmax 7000".to_string()), "{lines:?}");
    assert!(lines.contains(&"backward;linear;matmul 30000".to_string()), "{lines:?}");
    let svg = flame::svg(&profile).unwrap();
    assert!(svg.contains("softmax") && svg.contains("backward"));
    assert!(
        flame::folded(&Profile::new(&on_gpu())).iter().any(|line| line == "forward;attention;softmax;softmax_f32 7000")
    );
    assert!(flame::svg(&Profile::new(&Trace { nodes: vec![], ..Trace::default() })).is_none());
}
