//! Profiles many ranks: compute time, communication time, and the overlap of both per rank.
//!
//! - On the CPU, a rank computes in all phases but [`Phase::Data`], except while it waits for other ranks ([`WAIT`]).
//!   It communicates from the start to the end of each collective, including the wait for the slowest rank.
//! - On a GPU, a rank communicates in the activities of the streams of collectives (NCCL, copy engines), and computes
//!   in those of all other streams.
//!
//! Communication is *overlapped* while the rank also computes, else *exposed*. Only times inside the measured steps
//! count. Each rank creates its own [`RankProfile`]; [`gather`] collects them. Events are on the clock of rank 0:
//! clocks are aligned by the common end of barriers ([`clock_offset`]).

use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tilewright::kernels::rank_sum::RANK_SUM;
use tilewright::trace::cupti::ActivityKind;
use tilewright::trace::{Activity, Phase, SpanEvent, Trace};

use super::chrome::{self, Placement};
use super::intervals::{Intervals, difference, intersection, total, union};
use super::{STEP, milliseconds};
use crate::dist::comm::handle::WAIT;
use crate::dist::comm::{Communicator, Record, Result};
use crate::report::plot::Bar;
use crate::report::{Axis, Cell, Column, Plot, Table};

/// Totals of one rank over the measured steps, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankProfile {
    pub rank: usize,
    /// Time of each step.
    pub steps: Vec<u64>,
    pub computing: u64,
    pub communicating: u64,
    /// The part of `communicating` that overlaps with compute.
    pub overlapped: u64,
    /// Number of collectives of all steps, and bytes of their buffers.
    pub collectives: usize,
    pub bytes: usize,
    /// Events for [`chrome::file`].
    pub events: Vec<Value>,
}

impl RankProfile {
    /// Share of communication that overlaps with compute; `None` without communication.
    pub fn overlapped_share(&self) -> Option<f64> {
        (self.communicating > 0).then(|| self.overlapped as f64 / self.communicating as f64)
    }

    /// Creates the profile from the recording of the rank and its collectives. `started` is the time 0 of the
    /// recording. `offset` (ns) is the clock of rank 0 minus the clock of this rank.
    pub fn new(rank: usize, trace: &Trace, records: &[Record], started: Instant, offset: i64) -> RankProfile {
        let since = |at: Instant| at.saturating_duration_since(started).as_nanos() as u64;
        let named = |name: &'static str| trace.spans.iter().filter(move |s| trace.nodes[s.node as usize].name == name);
        let times = |spans: &mut dyn Iterator<Item = &SpanEvent>| -> Intervals {
            union(spans.map(|span| (span.start_ns, span.end_ns)).collect())
        };
        let steps: Vec<u64> = named(STEP).map(|span| span.end_ns - span.start_ns).collect();
        let measured = times(&mut named(STEP));
        let collective = |record: &Record| (since(record.started), since(record.ended));
        let inside = |record: &&Record| !intersection(&[collective(record)], &measured).is_empty();
        let (computing, communicating) = if trace.activities.is_empty() {
            let computes = |span: &&SpanEvent| trace.begins_phase(span.node).is_some_and(|phase| phase != Phase::Data);
            let phases = times(&mut trace.spans.iter().filter(computes));
            (difference(&phases, &times(&mut named(WAIT))), union(records.iter().map(collective).collect()))
        } else {
            let communication = communication_streams(trace);
            let of = |communicates: bool| {
                let activities = trace.activities.iter().filter(|a| communication.contains(&a.stream) == communicates);
                union(activities.map(|activity| (activity.start_ns, activity.end_ns)).collect())
            };
            (of(false), of(true))
        };
        let (computing, communicating) = (intersection(&computing, &measured), intersection(&communicating, &measured));
        let counted: Vec<&Record> = records.iter().filter(inside).collect();
        let placement = Placement { host: 2 * rank as u32 + 1, gpu: 2 * rank as u32 + 2, rank: Some(rank), offset };
        let mut events = chrome::events(trace, &placement);
        events.extend(collectives(&counted, &placement, collective, !trace.activities.is_empty()));
        RankProfile {
            rank,
            steps,
            computing: total(&computing),
            communicating: total(&communicating),
            overlapped: total(&intersection(&computing, &communicating)),
            collectives: counted.len(),
            bytes: counted.iter().map(|record| record.bytes()).sum(),
            events,
        }
    }
}

/// GPU streams of collectives: those with NCCL kernels, those with peer-to-peer copies of copy engines, and those that
/// only reduce the contributions of ranks. (The compute stream may average gradients too.)
pub(super) fn communication_streams(trace: &Trace) -> Vec<u32> {
    let is_transfer = |name: &str| name.to_lowercase().contains("nccl") || name == "copy between GPUs";
    let is_kernel = |activity: &&Activity| matches!(activity.kind, ActivityKind::Kernel { .. });
    let mut streams: Vec<u32> = trace.activities.iter().map(|activity| activity.stream).collect();
    streams.sort_unstable();
    streams.dedup();
    streams.retain(|&stream| {
        let mut names = trace.activities.iter().filter(|activity| activity.stream == stream);
        let mut kernels = names.clone().filter(is_kernel).peekable();
        let only_adds = kernels.peek().is_some() && kernels.all(|kernel| kernel.kind.name().starts_with(RANK_SUM.name));
        only_adds || names.any(|activity| is_transfer(&activity.kind.name()))
    });
    streams
}

/// Trace events of collectives, as one track. On a GPU the track shows the host side.
fn collectives(
    records: &[&Record],
    placement: &Placement,
    times: impl Fn(&Record) -> (u64, u64),
    on_gpu: bool,
) -> Vec<Value> {
    /// Sorts the track after all threads.
    const TRACK: u32 = 10_000;
    let title = if on_gpu { "communication: host side" } else { "communication" };
    let mut events = vec![chrome::name("thread_name", placement.host, TRACK, title)];
    for record in records {
        let (start, end) = times(record);
        let waited = (record.started - record.called).as_secs_f64() * 1e6;
        events.push(json!({
            "ph": "X", "pid": placement.host, "tid": TRACK, "name": record.call.to_string(), "cat": "communication",
            "ts": placement.microseconds(start), "dur": (end - start) as f64 / 1e3,
            "args": { "bytes": record.bytes(), "number": record.seq, "queued (µs)": waited },
        }));
    }
    events
}

/// Measures the clock of rank 0 minus the clock of this rank, in nanoseconds: the median over several barriers of the
/// difference of both clocks when the barrier ends. `started` is time 0 of each rank. Do not call it for ranks that
/// share a clock: the result is then the difference of the barrier exits.
///
/// # Errors
/// Those of communication.
pub fn clock_offset(comm: &Communicator, started: Instant) -> Result<i64> {
    const SAMPLES: usize = 21;
    let (rank, world) = (comm.rank(), comm.world());
    let mut all = vec![0_i64; SAMPLES * world];
    for sample in 0..SAMPLES {
        comm.host().barrier()?;
        all[rank * SAMPLES + sample] = started.elapsed().as_nanos() as i64;
    }
    comm.host().all_gather(&mut all)?;
    let mut differences: Vec<i64> = (0..SAMPLES).map(|sample| all[sample] - all[rank * SAMPLES + sample]).collect();
    differences.sort_unstable();
    Ok(differences[SAMPLES / 2])
}

/// All-gathers the profiles of all ranks, in rank order. Every rank calls it.
///
/// # Errors
/// Those of communication.
pub fn gather(comm: &Communicator, own: &RankProfile) -> Result<Vec<RankProfile>> {
    use crate::dist::comm::CommError;

    let unreadable = |error: serde_json::Error| CommError::Setup(format!("cannot read the profile of a rank: {error}"));
    let bytes = serde_json::to_vec(own).map_err(unreadable)?;
    let (rank, world) = (comm.rank(), comm.world());
    let mut lengths = vec![0_u64; world];
    lengths[rank] = bytes.len() as u64;
    comm.all_gather(&mut lengths)?;
    let longest = lengths.iter().max().map_or(0, |&length| length as usize);
    let mut all = vec![0_u8; longest * world];
    all[rank * longest..][..bytes.len()].copy_from_slice(&bytes);
    comm.all_gather(&mut all)?;
    let read = |(rank, length): (usize, &u64)| {
        serde_json::from_slice(&all[rank * longest..][..*length as usize]).map_err(unreadable)
    };
    lengths.iter().enumerate().map(read).collect()
}

/// Table: compute and communication of every rank; `how` describes the parallelism.
pub fn table(profiles: &[RankProfile], how: &str, on_gpu: bool) -> Table {
    let columns = [
        Column::integer("rank"),
        Column::number("step").unit("ms").decimals(3),
        Column::number("computing").unit("ms").decimals(3),
        Column::number("communication").unit("ms").decimals(3),
        Column::number("overlapped").unit("ms").decimals(3),
        Column::number("exposed").unit("ms").decimals(3),
        Column::number("overlapped").unit("%").decimals(1),
        Column::number("collectives").decimals(1),
        Column::number("buffers").unit("MB").key("sent_mb").decimals(2),
    ];
    let title = format!("Overlap of communication and compute, per step: {how}");
    let mut table = Table::new("overlap", &title, columns);
    for profile in profiles {
        let steps = profile.steps.len().max(1) as f64;
        let ms = |ns: u64| Cell::from(milliseconds(ns) / steps);
        let times: Vec<f64> = profile.steps.iter().map(|&ns| milliseconds(ns)).collect();
        table.push([
            profile.rank.into(),
            Cell::statistics(&times),
            ms(profile.computing),
            ms(profile.communicating),
            ms(profile.overlapped),
            ms(profile.communicating - profile.overlapped),
            profile.overlapped_share().map(|share| 100.0 * share).into(),
            Cell::from(profile.collectives as f64 / steps),
            Cell::from(profile.bytes as f64 / 1e6 / steps),
        ]);
    }
    table.note(match on_gpu {
        true => {
            "Communication is the busy time of the streams of collectives, including the wait for the slowest rank; computing is that \
             of all other streams. Overlapped is the time of both."
        }
        false => {
            "Communication is the time of collectives, including the wait for the slowest rank; computing is the time of forward, \
             backward and optimizer without waits for other ranks. Overlapped is the time of both."
        }
    })
}

/// Bar plot: overlapped and exposed communication.
pub fn plot(profiles: &[RankProfile]) -> Plot {
    let bars = profiles.iter().flat_map(|profile| {
        let steps = profile.steps.len().max(1) as f64;
        let exposed = profile.communicating - profile.overlapped;
        [("overlapped", profile.overlapped), ("exposed", exposed)].map(|(group, ns)| Bar {
            name: format!("rank {}", profile.rank),
            group: group.to_string(),
            value: milliseconds(ns) / steps,
            error: None,
        })
    });
    Plot::bars("overlap", "Communication per step", Axis::linear("ms"), bars.collect())
}

/// The part of a recording that one thread wrote, for ranks that are threads of one process.
pub fn of_thread(trace: &Trace, thread: u32) -> Trace {
    Trace {
        nodes: trace.nodes.clone(),
        spans: trace.spans.iter().filter(|span| span.thread == thread).copied().collect(),
        end_ns: trace.end_ns,
        ..Trace::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tilewright::trace::Node;

    use super::*;
    use crate::dist::comm::{Options, Reduce, threads};

    const MS: u64 = 1_000_000;

    /// A step of 100 ms: forward until 20, backward until 60, a wait until 80, the optimizer until 100 with a wait of
    /// 5 ms.
    fn step() -> Trace {
        let node = |parent, name: &str, phase| Node { parent, name: name.to_string(), phase };
        let nodes = vec![
            node(0, "", None),
            node(0, STEP, None),
            node(1, "forward", Some(Phase::Forward)),
            node(1, "backward", Some(Phase::Backward)),
            node(1, WAIT, None),
            node(1, "optimizer", Some(Phase::Optimizer)),
            node(5, WAIT, None),
        ];
        let span = |node, start, end| SpanEvent { node, thread: 3, start_ns: start * MS, end_ns: end * MS };
        let spans =
            vec![span(2, 0, 20), span(3, 20, 60), span(4, 60, 80), span(6, 90, 95), span(5, 80, 100), span(1, 0, 100)];
        Trace { nodes, spans, end_ns: 120 * MS, ..Trace::default() }
    }

    /// Records of collectives at these times.
    fn records(times: &[(u64, u64)]) -> (Vec<Record>, Instant) {
        let comm = threads::threads(1, Options::default()).unwrap().remove(0);
        comm.start_trace();
        times.iter().for_each(|_| comm.all_reduce(&mut [0.0_f32; 250], Reduce::Avg).unwrap());
        let mut records = comm.take_trace();
        let epoch = records[0].called;
        for (record, &(start, end)) in records.iter_mut().zip(times) {
            (record.started, record.ended) = (epoch + Duration::from_millis(start), epoch + Duration::from_millis(end));
            record.called = record.started;
        }
        (records, epoch)
    }

    fn profile(trace: &Trace, times: &[(u64, u64)]) -> RankProfile {
        let (records, epoch) = records(times);
        RankProfile::new(1, trace, &records, epoch, 7 * MS as i64)
    }

    #[test]
    fn communication_during_compute_is_overlapped() {
        // Two overlap with backward, one partly with a wait of the optimizer, one is after the step.
        let found = profile(&step(), &[(30, 50), (40, 70), (88, 96), (105, 115)]);
        assert_eq!(found.steps, [100 * MS]);
        assert_eq!(found.computing, (60 + 15) * MS);
        assert_eq!(found.communicating, (40 + 8) * MS);
        assert_eq!(found.overlapped, (30 + 3) * MS);
        assert_eq!(found.overlapped_share(), Some(33.0 / 48.0));
        assert_eq!((found.collectives, found.bytes), (3, 3000));
        // Communication after backward, while the rank waits, is exposed.
        assert_eq!(profile(&step(), &[(60, 65), (65, 80)]).overlapped_share(), Some(0.0));
        assert_eq!(profile(&step(), &[(200, 300)]).overlapped_share(), None);
    }

    #[test]
    fn gpu_time_is_split_by_stream() {
        let activity = |name: &str, stream, start, end| Activity {
            kind: ActivityKind::Kernel {
                name: name.to_string(),
                grid: [1; 3],
                block: [32, 1, 1],
                registers: 32,
                shared_bytes: 0,
            },
            node: 3,
            start_ns: start * MS,
            end_ns: end * MS,
            stream,
        };
        let activities = vec![
            activity("matmul", 7, 10, 40),
            activity("cast_bf16", 13, 20, 22),
            activity("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 13, 22, 50),
            activity("rank_sum_bf16", 14, 49, 52),
            activity("rank_sum_bf16", 7, 41, 42),
            activity("adamw", 7, 50, 60),
        ];
        // The times at which the host queued the kernels do not matter.
        let found = profile(&Trace { activities, ..step() }, &[(60, 61)]);
        assert_eq!((found.computing, found.communicating, found.overlapped), (41 * MS, 32 * MS, 23 * MS));
        let lines: Vec<String> =
            found.events.iter().filter_map(|event| event["args"]["name"].as_str()).map(str::to_string).collect();
        for line in
            ["rank 1: host", "rank 1: GPU", "stream 7", "stream 13 (communication)", "stream 14 (communication)"]
        {
            assert!(lines.iter().any(|found| found == line), "{line}: {lines:?}");
        }
    }

    #[test]
    fn events_are_on_the_first_ranks_clock() {
        let found = profile(&step(), &[(30, 50)]);
        let complete: Vec<&Value> = found.events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(complete.len(), 6 + 1);
        let sent = complete.iter().find(|event| event["cat"] == "communication").unwrap();
        assert_eq!(
            (&sent["name"], sent["ts"].as_f64(), sent["dur"].as_f64()),
            (&"all_reduce(avg) of 250 f32".into(), Some(37_000.0), Some(20_000.0))
        );
        assert!(complete.iter().all(|event| event["pid"] == 3));
    }

    #[test]
    fn all_ranks_get_all_profiles() {
        let worlds = threads::threads(3, Options::default()).unwrap();
        let found: Vec<Vec<RankProfile>> = std::thread::scope(|scope| {
            let run = |comm: Communicator| {
                let (records, epoch) = records(&[(30, 50 + comm.rank() as u64)]);
                gather(&comm, &RankProfile::new(comm.rank(), &step(), &records, epoch, 0)).unwrap()
            };
            let threads: Vec<_> = worlds.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(found.iter().all(|all| *all == found[0]));
        let sent: Vec<(usize, u64)> = found[0].iter().map(|profile| (profile.rank, profile.communicating)).collect();
        assert_eq!(sent, [(0, 20 * MS), (1, 21 * MS), (2, 22 * MS)]);
    }

    #[test]
    fn clock_offset_aligns_clocks() {
        let began = Instant::now();
        let worlds = threads::threads(2, Options::default()).unwrap();
        let offsets: Vec<i64> = std::thread::scope(|scope| {
            let run = |comm: Communicator| {
                // Rank 1 starts its clock one second later.
                clock_offset(&comm, began + Duration::from_secs(comm.rank() as u64)).unwrap()
            };
            std::thread::sleep(Duration::from_millis(1100));
            let threads: Vec<_> = worlds.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(offsets[0], 0);
        assert!((offsets[1] - 1_000_000_000).abs() < 100 * MS as i64, "{offsets:?}");
    }

    #[test]
    fn of_thread_keeps_the_spans_of_one_thread() {
        let mut trace = step();
        trace.spans.push(SpanEvent { thread: 4, ..trace.spans[0] });
        assert_eq!(of_thread(&trace, 3).spans, step().spans);
        assert_eq!(of_thread(&trace, 4).spans.len(), 1);
    }
}
