//! Tests of ranks with one GPU each, over NCCL: two ranks, and four with as many GPUs. With fewer than two GPUs the
//! tests report that they are skipped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use half::{bf16, f16};
use tilewright::cudarc::driver::{CudaContext, CudaStream};
use tilewright::{Buffer, Device};
use tilewright_harness::dist;
use tilewright_harness::dist::comm::{Call, CommError, Communicator, Dtype, Element, Op, Reduce, handle, nccl};
use tilewright_harness::dist::rank::Environment;

use crate::processes::{Ran, launch_test, others_name};

/// Whether this rank's collectives are overlapped, on copy engines where possible.
static COPIES: AtomicBool = AtomicBool::new(false);

/// A rank's GPU, and its communicator.
struct Rank {
    device: Device,
    comm: Communicator,
}

fn connect(environment: &Environment) -> Result<Rank, CommError> {
    let rank_info = environment.rank_info.as_ref().unwrap();
    let stream = stream(rank_info.local_rank);
    let device = Device::from_cuda_stream(stream.clone()).unwrap();
    let comm = nccl::connect(dist::connect_to(environment)?, rank_info, &environment.job, stream, environment.options)?;
    assert_eq!((comm.backend(), comm.rank(), comm.world()), ("nccl", rank_info.rank, rank_info.world));
    Ok(Rank { device, comm })
}

/// A stream like that of models: without event tracking, the program orders streams itself.
fn stream(ordinal: usize) -> Arc<CudaStream> {
    let context = CudaContext::new(ordinal).unwrap();
    // SAFETY: nothing is allocated yet.
    unsafe { context.disable_event_tracking() };
    context.new_stream().unwrap()
}

/// The program of a rank; the launcher runs only this test, in this test program.
#[test]
fn program_of_a_rank() {
    let Ok(what) = std::env::var("TILEWRIGHT_TEST_GPU_RANK") else { return };
    let (what, who) = what.split_once(':').unwrap_or((&what, ""));
    let (what, copies) = what.strip_suffix("-copies").map_or((what, false), |what| (what, true));
    COPIES.store(copies, Ordering::Relaxed);
    let mut environment = Environment::get().unwrap();
    if what == "hang" {
        environment.options.timeout = Duration::from_secs(3);
    }
    #[cfg(feature = "cuda")]
    if what == "train" {
        return train(&environment);
    }
    let connected = connect(&environment).and_then(|rank| rank.comm.set_overlap_copy_engines(copies).map(|()| rank));
    let outcome = connected.and_then(|rank| match what {
        "suite" => {
            suite(&rank);
            // Disabled, enabled twice, then as before.
            [false, true, true].into_iter().try_for_each(|on| rank.comm.set_overlap_copy_engines(on))?;
            rank.comm.set_overlap_copy_engines(copies)
        }
        "order" => {
            stays_in_order(&rank);
            Ok(())
        }
        "disagree" => {
            let count = if rank.comm.rank() == 1 { 11 } else { 10 };
            let mut data = Buffer::<f32>::zeros(&rank.device, count).unwrap();
            reduce(&rank.comm, &mut data, None)
        }
        _ => fail(rank, what, who),
    });
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(3);
    }
}

/// Training of the small model on the rank's GPU.
#[cfg(feature = "cuda")]
fn train(environment: &Environment) {
    let ordinal = environment.rank_info.as_ref().unwrap().local_rank;
    let device = tilewright_harness::ops::memory::open_cuda(ordinal).unwrap();
    let comm = dist::connect_for(environment, &device).unwrap();
    assert_eq!(comm.backend(), "nccl");
    crate::training::check(&device, comm);
}

/// Starts a collective on a whole buffer.
fn start<T: Element + tilewright::Element>(
    comm: &Communicator,
    data: &mut Buffer<T>,
    op: Op,
    comm_dtype: Option<Dtype>,
) -> Result<handle::Handle, CommError> {
    let call = Call { op, dtype: <T as Element>::DTYPE, count: data.len(), comm_dtype };
    // SAFETY: the caller keeps the buffer, and waits for the handle before it uses it.
    unsafe { start_at(comm, call, data.view_mut().address()) }
}

/// # Safety
/// See [`Communicator::start`].
unsafe fn start_at(comm: &Communicator, call: Call, address: u64) -> Result<handle::Handle, CommError> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match COPIES.load(Ordering::Relaxed) {
            true => comm.start_overlapped(call, address as *mut u8),
            false => comm.start(call, address as *mut u8),
        }
    }
}

/// A sum; synchronizes the host.
fn reduce(comm: &Communicator, data: &mut Buffer<f32>, comm_dtype: Option<Dtype>) -> Result<(), CommError> {
    start(comm, data, Op::AllReduce(Reduce::Sum), comm_dtype)?.synchronize()?;
    comm.failure().map_or(Ok(()), |error| Err(error.clone()))
}

/// Small numbers that every type represents exactly, including their sums.
fn number(rank: usize, i: usize) -> u8 {
    ((i * 5 + 3 * rank) % 13) as u8
}

/// Every collective for one type, for uneven lengths and several megabytes.
fn collectives<T: Element + tilewright::Element + PartialEq + std::fmt::Debug>(rank: &Rank, of: impl Fn(f64) -> T) {
    let (comm, device) = (&rank.comm, &rank.device);
    let (me, world) = (comm.rank(), comm.world());
    for n in [1, 17, 4096, 1_000_003] {
        let whole = n * world;
        let fill = |r: usize, n: usize| (0..n).map(|i| of(number(r, i).into())).collect::<Vec<T>>();
        let run = |values: &[T], op| {
            let mut data = Buffer::from_slice(device, values).unwrap();
            start(comm, &mut data, op, None).unwrap().wait().unwrap();
            data.to_vec().unwrap()
        };
        let all = |i: usize| (0..world).map(move |r| f64::from(number(r, i)));
        let sums = |n: usize| (0..n).map(|i| of(all(i).sum())).collect::<Vec<T>>();
        assert_eq!(run(&fill(me, n), Op::AllReduce(Reduce::Sum)), sums(n), "sum of {n}");
        let most: Vec<T> = (0..n).map(|i| of(all(i).fold(0.0, f64::max))).collect();
        assert_eq!(run(&fill(me, n), Op::AllReduce(Reduce::Max)), most, "maximum of {n}");
        if <T as Element>::DTYPE.is_float() && world.is_power_of_two() {
            let averages: Vec<T> = (0..n).map(|i| of(all(i).sum::<f64>() / world as f64)).collect();
            assert_eq!(run(&fill(me, n), Op::AllReduce(Reduce::Avg)), averages, "average of {n}");
        }
        let mine = me * n..(me + 1) * n;
        let scattered = run(&fill(me, whole), Op::ReduceScatter(Reduce::Sum));
        assert_eq!(scattered[mine.clone()], sums(whole)[mine.clone()], "reduce-scatter of {n}");
        let mut chunks = vec![of(0.0); whole];
        chunks[mine].copy_from_slice(&fill(me, n));
        let gathered: Vec<T> = (0..world).flat_map(|r| fill(r, n)).collect();
        assert_eq!(run(&chunks, Op::AllGather), gathered, "all-gather of {n}");
        let root = n % world;
        assert_eq!(run(&fill(me, n), Op::Broadcast { root }), fill(root, n), "broadcast of {n}");
    }
}

fn suite(rank: &Rank) {
    collectives::<f32>(rank, |x| x as f32);
    collectives::<f64>(rank, |x| x);
    collectives::<bf16>(rank, bf16::from_f64);
    collectives::<f16>(rank, f16::from_f64);
    collectives::<i32>(rank, |x| x as i32);
    collectives::<i64>(rank, |x| x as i64);
    collectives::<u8>(rank, |x| x as u8);
    let (comm, n) = (&rank.comm, 100_003);
    for comm_dtype in [Dtype::Bf16, Dtype::F16] {
        let values: Vec<f32> = (0..n).map(|i| number(comm.rank(), i).into()).collect();
        let mut data = Buffer::from_slice(&rank.device, &values).unwrap();
        reduce(comm, &mut data, Some(comm_dtype)).unwrap();
        let sum = |i| (0..comm.world()).map(|r| f32::from(number(r, i))).sum::<f32>();
        assert_eq!(data.to_vec().unwrap(), (0..n).map(sum).collect::<Vec<_>>(), "sums sent as {comm_dtype:?}");
    }
    // Several segments on every lane, and a remainder.
    let values: Vec<f32> = (0..20_000_003).map(|i| number(comm.rank(), i).into()).collect();
    let mut data = Buffer::from_slice(&rank.device, &values).unwrap();
    reduce(comm, &mut data, None).unwrap();
    let sum = |i| (0..comm.world()).map(|r| f32::from(number(r, i))).sum::<f32>();
    assert!(data.to_vec().unwrap().into_iter().enumerate().all(|(i, found)| found == sum(i)), "many segments");
    // On the same memory, one after the other, without a wait between them.
    let values: Vec<f32> = (0..1_000_003).map(|i| number(comm.rank(), i).into()).collect();
    let mut data = Buffer::from_slice(&rank.device, &values).unwrap();
    let handles = [(); 3].map(|()| start(comm, &mut data, Op::AllReduce(Reduce::Sum), None).unwrap());
    handle::wait_all(&handles).unwrap();
    let often = |i| sum(i) * (comm.world() * comm.world()) as f32;
    assert!(data.to_vec().unwrap().into_iter().enumerate().all(|(i, found)| found == often(i)), "three times");
    for limit in [4, 1, 0, 4] {
        comm.set_overlap_max_ctas(limit).unwrap();
        let values: Vec<f32> = (0..n).map(|i| number(comm.rank(), i).into()).collect();
        let mut data = Buffer::from_slice(&rank.device, &values).unwrap();
        let call = Call { op: Op::AllReduce(Reduce::Sum), dtype: Dtype::F32, count: n, comm_dtype: None };
        // SAFETY: the buffer is not used before the handle is waited for.
        let handle = unsafe { comm.start_overlapped(call, data.view_mut().address() as *mut u8) };
        handle.unwrap().wait().unwrap();
        let sum = |i| (0..comm.world()).map(|r| f32::from(number(r, i))).sum::<f32>();
        assert_eq!(data.to_vec().unwrap(), (0..n).map(sum).collect::<Vec<_>>(), "on {limit} SMs");
    }
    // Collectives of host memory run concurrently.
    let mut sum = [comm.rank() as f64];
    comm.all_reduce(&mut sum, Reduce::Sum).unwrap();
    assert_eq!(sum[0], (0..comm.world()).sum::<usize>() as f64);
    comm.barrier().unwrap();
}

/// The host waits for nothing: each collective starts after the copy that fills its slice, and the copy that reads it
/// comes after the collective, many times over.
fn stays_in_order(rank: &Rank) {
    let (comm, device) = (&rank.comm, &rank.device);
    let (slices, each, rounds) = (8, 2_000_000, 20);
    let sources: Vec<Buffer<f32>> = (0..rounds)
        .map(|round| Buffer::from_slice(device, &vec![(round + comm.rank()) as f32; slices * each]).unwrap())
        .collect();
    let mut data = Buffer::<f32>::zeros(device, slices * each).unwrap();
    let mut results = Vec::new();
    comm.start_trace();
    let timer = comm.start_timer().unwrap().expect("a GPU has a compute stream");
    for source in &sources {
        let mut handles = Vec::new();
        for slice in (0..slices).map(|slice| slice * each..(slice + 1) * each) {
            let mut part = data.slice_mut(slice.clone()).unwrap();
            part.copy_from(source.slice(slice).unwrap()).unwrap();
            let call = Call { op: Op::AllReduce(Reduce::Sum), dtype: Dtype::F32, count: each, comm_dtype: None };
            // SAFETY: the slice is not used before its handle is waited for.
            handles.push(unsafe { start_at(comm, call, part.address()).unwrap() });
        }
        handle::wait_all(&handles).unwrap();
        results.push(data.try_clone().unwrap());
    }
    let mut timer = timer;
    timer.stop().unwrap();
    for (round, result) in results.iter().enumerate() {
        let expected: usize = (0..comm.world()).map(|r| round + r).sum();
        assert!(result.to_vec().unwrap().iter().all(|&x| x == expected as f32), "round {round}");
    }
    let records = comm.take_trace();
    assert_eq!(records.len(), slices * rounds);
    let seconds: f64 = records.iter().map(|record| record.seconds()).sum();
    let whole = timer.seconds().unwrap();
    assert!(seconds > 0.0 && seconds <= whole, "{seconds} s of collectives in {whole} s");
}

/// Runs collectives until rank `who` does `what`.
fn fail(rank: Rank, what: &str, who: &str) -> Result<(), CommError> {
    let (comm, chosen) = (&rank.comm, rank.comm.rank().to_string() == who);
    let mut data = Buffer::<f32>::from_slice(&rank.device, &vec![1.0; 10_000]).unwrap();
    let mut load = Buffer::<f32>::zeros(&rank.device, 100_000_000).unwrap();
    let source = Buffer::<f32>::zeros(&rank.device, 100_000_000).unwrap();
    if what == "kill-late-two" {
        comm.set_overlap_max_ctas(4)?;
    }
    for step in 1.. {
        if chosen && step == 5 {
            match what {
                // SAFETY: ends this process.
                "kill" => drop(unsafe { libc::kill(std::process::id() as i32, libc::SIGKILL) }),
                // The other ranks' kernels wait for this rank's when it ends, after a long queue of work.
                "kill-late" | "kill-late-two" => {
                    (0..20_000).for_each(|_| load.copy_from(source.view()).unwrap());
                    let handle = start(comm, &mut data, Op::AllReduce(Reduce::Sum), None)?;
                    handle.wait()?;
                    // SAFETY: as above.
                    unsafe { libc::kill(std::process::id() as i32, libc::SIGKILL) };
                }
                "hang" => std::thread::sleep(Duration::from_secs(600)),
                "leave" => return Ok(()),
                _ => std::panic::resume_unwind(Box::new("thrown")),
            }
        }
        reduce(comm, &mut data, None)?;
    }
    Ok(())
}

/// World sizes for which there are GPUs; 2 if there are none, so that [`on_gpus`] reports that it skips the test.
fn worlds() -> impl Iterator<Item = usize> {
    let there = [4, 2].into_iter().find(|&gpus| Device::cuda(gpus - 1).is_ok()).unwrap_or(2);
    [2, 4].into_iter().filter(move |&ranks| ranks <= there)
}

/// Runs on `ranks` GPUs if they exist.
fn on_gpus(ranks: usize, what: &str) -> Option<Ran> {
    if Device::cuda(ranks - 1).is_err() {
        println!("skipped: {what} over NCCL needs {ranks} GPUs");
        return None;
    }
    Some(launch_test(ranks, "nccl::program_of_a_rank", ("TILEWRIGHT_TEST_GPU_RANK", what)))
}

#[test]
fn all_collectives_between_gpus() {
    for ranks in worlds() {
        for what in ["suite", "order"] {
            let Some(ran) = on_gpus(ranks, what) else { continue };
            assert_eq!(ran.code, Some(0), "{}", ran.text);
            assert_eq!(ran.text.matches("test result: ok. 1 passed").count(), ranks, "{}", ran.text);
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn training_on_gpus_gives_the_weights_of_training_on_one() {
    for ranks in worlds() {
        let Some(ran) = on_gpus(ranks, "train") else { continue };
        assert_eq!(ran.code, Some(0), "{}", ran.text);
    }
}

#[test]
fn mismatched_collectives_are_listed_on_all_ranks() {
    let Some(ran) = on_gpus(2, "disagree") else { return };
    assert_eq!(ran.code, Some(1), "{}", ran.text);
    assert_eq!(ran.text.matches("rank 1: all_reduce(sum) of 11 f32").count() / 2, 1, "{}", ran.text);
}

#[test]
fn a_killed_rank_ends_all() {
    // The last one has two NCCL communicators; the second one is idle while a kernel of the first one hangs.
    for what in ["kill:1", "kill-late:1", "kill-late-two:1"] {
        let Some(ran) = on_gpus(2, what) else { return };
        others_name(&ran, 2, 1, &[]);
        assert!(ran.text.contains("rank 1 failed first: it ended by signal 9 (SIGKILL)"), "{}", ran.text);
    }
}

#[test]
fn a_panic_or_a_drop_aborts_all_ranks() {
    let Some(ran) = on_gpus(2, "throw:0") else { return };
    others_name(&ran, 2, 0, &["aborted: it panicked"]);
    let Some(ran) = on_gpus(2, "leave:1") else { return };
    others_name(&ran, 2, 1, &["has ended"]);
}

#[test]
fn a_hanging_rank_is_named_and_ended() {
    let Some(ran) = on_gpus(2, "hang:0") else { return };
    others_name(&ran, 2, 0, &["waited 3 s"]);
}

#[test]
fn copy_engines_run_collectives() {
    for ranks in worlds() {
        for what in ["suite-copies", "order-copies"] {
            let Some(ran) = on_gpus(ranks, what) else { continue };
            assert_eq!(ran.code, Some(0), "{}", ran.text);
            assert_eq!(ran.text.matches("test result: ok. 1 passed").count(), ranks, "{}", ran.text);
        }
    }
}

#[test]
fn copy_engines_do_not_wait_for_a_rank_that_is_gone() {
    // The second one ends while streams wait, after a long queue of work.
    for what in ["kill-copies:1", "kill-late-copies:1"] {
        let Some(ran) = on_gpus(2, what) else { return };
        others_name(&ran, 2, 1, &[]);
        assert!(ran.text.contains("rank 1 failed first: it ended by signal 9 (SIGKILL)"), "{}", ran.text);
    }
    for (what, at_fault, words) in [
        ("throw-copies:0", 0, "aborted: it panicked"),
        ("leave-copies:1", 1, "has ended"),
        ("hang-copies:0", 0, "waited 3 s"),
    ] {
        let Some(ran) = on_gpus(2, what) else { return };
        others_name(&ran, 2, at_fault, &[words]);
    }
}
