//! Test suite for all backends: the exact result of every collective in every buffer.

use half::{bf16, f16};
use tilewright_harness::dist::comm::{CommError, Communicator, Dtype, Element, Reduce};

use crate::world::{KINDS, options, ranks};

/// No elements, fewer than ranks, several segments, and lengths that are not multiples of the world size.
const LENGTHS: [usize; 7] = [0, 1, 3, 64, 1000, 4097, 140_001];

/// Element `i` of rank `rank`: a pseudorandom number in [−0.5, 0.5) of 53 bits.
fn number(rank: usize, i: usize) -> f64 {
    let mixed =
        (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    (mixed >> 11) as f64 / (1u64 << 53) as f64 - 0.5
}

fn floats(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| number(rank, i) as f32 * 10.0).collect()
}

fn small(rank: usize, i: usize) -> i32 {
    ((i + 7 * rank) % 13) as i32
}

/// The sum in rank order, as documented.
fn summed(world: usize, n: usize) -> Vec<f32> {
    let mut sum = floats(0, n);
    for rank in 1..world {
        sum.iter_mut().zip(floats(rank, n)).for_each(|(sum, x)| *sum += x);
    }
    sum
}

/// Runs the whole suite on one rank. Sums have to be those in rank order, bit for bit.
pub fn check(comm: &Communicator) {
    let (rank, world) = (comm.rank(), comm.world());
    for n in LENGTHS {
        let mut data = floats(rank, n);
        comm.all_reduce(&mut data, Reduce::Sum).unwrap();
        assert_eq!(data, summed(world, n), "sum of {n}");

        let mut data = floats(rank, n);
        comm.all_reduce(&mut data, Reduce::Avg).unwrap();
        let expected: Vec<f32> = summed(world, n).iter().map(|sum| sum / world as f32).collect();
        assert_eq!(data, expected, "average of {n}");

        let mut data = floats(rank, n);
        comm.all_reduce(&mut data, Reduce::Max).unwrap();
        let most = |i| (0..world).map(|r| floats_at(r, i)).fold(f32::MIN, f32::max);
        assert_eq!(data, (0..n).map(most).collect::<Vec<_>>(), "maximum of {n}");

        let root = n % world;
        let mut data = floats(rank, n);
        comm.broadcast(&mut data, root).unwrap();
        assert_eq!(data, floats(root, n), "broadcast of {n}");

        let (whole, chunk) = (n * world, rank * n..(rank + 1) * n);
        let mut data = floats(rank, whole);
        comm.reduce_scatter(&mut data, Reduce::Sum).unwrap();
        assert_eq!(data[chunk.clone()], summed(world, whole)[chunk.clone()], "reduce_scatter of {n}");

        let mut data = vec![f32::NAN; whole];
        data[chunk].copy_from_slice(&floats(rank, n));
        comm.all_gather(&mut data).unwrap();
        let expected: Vec<f32> = (0..world).flat_map(|r| floats(r, n)).collect();
        assert_eq!(data, expected, "all_gather of {n}");

        check_comm_dtype(comm, n);
        comm.barrier().unwrap();
    }
    check_types(comm);
    check_asynchronous(comm);
    check_misuse(comm);
}

fn floats_at(rank: usize, i: usize) -> f32 {
    number(rank, i) as f32 * 10.0
}

/// Communication in bf16 and f16: contributions and results are rounded, the sum is f32.
fn check_comm_dtype(comm: &Communicator, n: usize) {
    let (rank, world) = (comm.rank(), comm.world());
    for comm_dtype in [Dtype::Bf16, Dtype::F16] {
        let round = |x: f32| match comm_dtype {
            Dtype::Bf16 => bf16::from_f32(x).to_f32(),
            _ => f16::from_f32(x).to_f32(),
        };
        let mut data = floats(rank, n);
        comm.all_reduce_as(&mut data, Reduce::Avg, comm_dtype).unwrap();
        let expected = |i| {
            let sum = (1..world).fold(round(floats_at(0, i)), |sum, r| sum + round(floats_at(r, i)));
            round(sum / world as f32)
        };
        assert_eq!(data, (0..n).map(expected).collect::<Vec<_>>(), "{comm_dtype:?}, {n}");
    }
}

fn check_types(comm: &Communicator) {
    fn one<T: Element + PartialEq + std::fmt::Debug>(comm: &Communicator, from: fn(i32) -> T) {
        let n = 1001;
        let sum = |i| from((0..comm.world()).map(|r| small(r, i)).sum());
        let mut data: Vec<T> = (0..n).map(|i| from(small(comm.rank(), i))).collect();
        comm.all_reduce(&mut data, Reduce::Sum).unwrap();
        assert_eq!(data, (0..n).map(sum).collect::<Vec<_>>(), "{}", T::DTYPE.name());
    }
    one::<f64>(comm, f64::from);
    one::<bf16>(comm, |x| bf16::from_f32(x as f32));
    one::<f16>(comm, |x| f16::from_f32(x as f32));
    one::<i32>(comm, |x| x);
    one::<i64>(comm, i64::from);
    one::<u8>(comm, |x| x as u8);
    one::<u32>(comm, |x| x as u32);
    one::<u64>(comm, |x| x as u64);
}

/// Several collectives in flight, waited for in another order.
fn check_asynchronous(comm: &Communicator) {
    let lengths = [5_usize, 100_000, 1, 70_000, 12];
    let started: Vec<_> =
        lengths.iter().map(|&n| comm.start_all_reduce(floats(comm.rank(), n), Reduce::Sum).unwrap()).collect();
    for (pending, &n) in started.into_iter().zip(&lengths).rev() {
        assert_eq!(pending.wait().unwrap(), summed(comm.world(), n));
    }
    // A collective that is not waited for still runs.
    drop(comm.start_broadcast(floats(comm.rank(), 50_000), 0).unwrap());
    let last = comm.start_all_gather(vec![comm.rank() as i64; comm.world()]).unwrap();
    assert_eq!(last.wait().unwrap(), (0..comm.world() as i64).collect::<Vec<_>>());
}

/// Invalid calls fail immediately and send nothing: the communicator stays usable.
fn check_misuse(comm: &Communicator) {
    let said = |outcome: Result<(), CommError>| match outcome {
        Err(CommError::Misuse(text)) => text,
        other => panic!("{other:?}"),
    };
    let text = said(comm.all_reduce(&mut [1_i32, 2], Reduce::Avg));
    assert!(text.contains("all_reduce(avg) of 2 i32") && text.contains("integers have no average"), "{text}");
    let text = said(comm.broadcast(&mut [1.0_f32], comm.world()));
    assert!(text.contains("there is no rank"), "{text}");
    if comm.world() > 1 {
        let text = said(comm.all_gather(&mut vec![0.0_f32; comm.world() + 1]));
        assert!(text.contains("does not divide"), "{text}");
    }
    comm.barrier().unwrap();
}

#[test]
fn all_collectives_on_threads_and_sockets() {
    for kind in KINDS {
        for world in [1, 2, 3, 4] {
            ranks(kind, world, options(), |comm| check(&comm));
        }
    }
}

/// The caller's work overlaps with the collective.
#[test]
fn collectives_overlap_with_computation() {
    for kind in KINDS {
        let early = ranks(kind, 2, options(), |comm| {
            let pending = comm.start_all_reduce(vec![1.0_f32; 100_000], Reduce::Sum).unwrap();
            let began = std::time::Instant::now();
            while !pending.is_done() && began.elapsed().as_secs() < 60 {
                std::thread::yield_now();
            }
            pending.is_done() && pending.wait().unwrap() == vec![2.0; 100_000]
        });
        assert_eq!(early, [true, true], "{kind:?}");
    }
}

#[test]
fn traces_record_calls_and_times() {
    let traces = ranks(KINDS[0], 2, options(), |comm| {
        comm.barrier().unwrap();
        comm.start_trace();
        comm.all_reduce(&mut [1.0_f32; 10], Reduce::Sum).unwrap();
        comm.broadcast(&mut [1_u8; 3], 1).unwrap();
        (comm.take_trace(), comm.take_trace().len())
    });
    for (trace, rest) in traces {
        let calls: Vec<String> = trace.iter().map(|record| record.call.to_string()).collect();
        assert_eq!(calls, ["all_reduce(sum) of 10 f32", "broadcast(from rank 1) of 3 u8"]);
        assert!(trace.iter().all(|r| r.called <= r.started && r.started <= r.ended), "{trace:?}");
        assert_eq!((trace[0].bytes(), trace[0].seq, rest), (40, 2, 0));
    }
}
