//! Recordings of a program with the recording allocator. One test: a recording covers the whole process.

use std::hint::black_box;
use std::time::Duration;

use tilewright_runtime::trace::{CountingAllocator, Options, Phase, ROOT, Recording, Trace, phase, recording, span};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const KIB: usize = 1024;

fn step() {
    let weights = black_box(vec![0_u8; 100 * KIB]);
    {
        let _forward = phase(Phase::Forward);
        let kept = {
            let _layer = span("layer");
            let kept = black_box(vec![1_u8; 200 * KIB]);
            drop(black_box(vec![2_u8; 300 * KIB]));
            kept
        };
        std::thread::sleep(Duration::from_millis(20));
        // The allocations of a thread without a span belong to the span that is open.
        std::thread::scope(|scope| {
            scope.spawn(|| drop(black_box(vec![3_u8; 50 * KIB])));
        });
        drop(kept);
    }
    let _backward = phase(Phase::Backward);
    let _layer = span("layer");
    let mut grown: Vec<u8> = Vec::with_capacity(64 * KIB);
    grown.resize(128 * KIB, 4);
    drop((black_box(grown), weights));
}

fn record() -> Trace {
    let options = Options { spans: true, min_allocation_bytes: Some(16 * KIB), ..Options::default() };
    let recording = Recording::start(options).unwrap();
    step();
    recording.finish().unwrap()
}

#[test]
fn spans_and_allocations_are_recorded_with_their_places() {
    // No recording: nothing is stored, and nothing of it appears later.
    step();
    assert!(!recording());
    let outlives = {
        let unfinished = Recording::start(Options { spans: true, ..Options::default() }).unwrap();
        assert!(recording());
        let outlives = span("of another recording");
        drop(unfinished);
        outlives
    };
    assert!(!recording());
    let trace = record();
    drop(outlives);

    let spans: Vec<Vec<&str>> = trace.spans.iter().map(|span| trace.path(span.node)).collect();
    let expected: [&[&str]; 4] = [&["forward", "layer"], &["forward"], &["backward", "layer"], &["backward"]];
    assert_eq!(spans, expected);
    let forward = trace.spans[1];
    assert!(forward.end_ns - forward.start_ns >= 20_000_000 && forward.end_ns <= trace.end_ns, "{forward:?}");
    assert!(trace.spans[0].start_ns >= forward.start_ns && trace.spans[0].end_ns <= forward.end_ns);
    assert_eq!(trace.phase(trace.spans[2].node), Some(Phase::Backward));

    // Bytes in KiB, negative for releases, with the path of the span.
    let event = |e: &tilewright_runtime::trace::MemoryEvent| {
        let kib = (e.bytes / KIB as u64) as i64;
        (if e.allocated { kib } else { -kib }, trace.path(e.node).join("/"))
    };
    let events: Vec<(i64, String)> = trace.memory.iter().map(event).collect();
    let at = |kib: i64, place: &str| (kib, place.to_string());
    let expected = [
        at(100, ""),
        at(200, "forward/layer"),
        at(300, "forward/layer"),
        at(-300, "forward/layer"),
        at(50, "forward"),
        at(-50, "forward"),
        at(-200, "forward"),
        at(64, "backward/layer"),
        at(-64, "backward/layer"),
        at(128, "backward/layer"),
        at(-128, "backward/layer"),
        at(-100, "backward/layer"),
    ];
    assert_eq!(events, expected);
    assert_eq!(trace.memory[0].node, ROOT);
    // 100 + 200 + 300 KiB were in use at the same time. The peak counts from the start of the recording, and the test
    // runner's thread allocates and releases small blocks meanwhile: the peak may lie above or below by their bytes.
    let peak = trace.peak_bytes as usize;
    assert!(peak.abs_diff(600 * KIB) < 4 * KIB, "{peak}");

    root_spans_are_independent();
    another_thread_sees_what_is_open();
}

/// Two threads of one program, such as ranks: each has a separate outermost span, whatever the other one has open.
fn root_spans_are_independent() {
    use tilewright_runtime::trace::{root_span, thread_number};

    assert_eq!(thread_number(), None);
    for _ in 0..2 {
        let recording = Recording::start(Options { spans: true, ..Options::default() }).unwrap();
        let barrier = std::sync::Barrier::new(2);
        let work = || {
            barrier.wait();
            let _step = root_span("step");
            barrier.wait();
            let _forward = phase(Phase::Forward);
            barrier.wait();
            thread_number().unwrap()
        };
        let numbers = std::thread::scope(|scope| [scope.spawn(work), scope.spawn(work)].map(|t| t.join().unwrap()));
        let trace = recording.finish().unwrap();
        assert!(numbers == [0, 1] || numbers == [1, 0], "every recording counts its own threads: {numbers:?}");
        for number in numbers {
            let spans = trace.spans.iter().filter(|span| span.thread == number);
            let paths: Vec<Vec<&str>> = spans.clone().map(|span| trace.path(span.node)).collect();
            assert_eq!(paths, [vec!["step", "forward"], vec!["step"]]);
            let phases: Vec<Option<Phase>> = spans.map(|span| trace.phase(span.node)).collect();
            assert_eq!(phases, [Some(Phase::Forward), None]);
        }
    }
}

fn another_thread_sees_what_is_open() {
    use tilewright_runtime::trace::open_span_names;

    assert!(open_span_names().is_empty());
    let recording = Recording::start(Options { spans: true, ..Options::default() }).unwrap();
    let seen = || std::thread::spawn(open_span_names).join().unwrap();
    assert!(seen().is_empty());
    {
        let _phase = phase(Phase::Backward);
        let span = span("attention");
        assert_eq!(seen(), ["backward", "attention"]);
        drop(span);
        assert_eq!(seen(), ["backward"]);
    }
    assert!(seen().is_empty());
    recording.finish().unwrap();
    assert!(open_span_names().is_empty());
}
