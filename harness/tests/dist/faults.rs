//! Failures of ranks inside one process: all other ranks get an error in time that names the rank and the operation.

use std::time::{Duration, Instant};

use tilewright_harness::dist::comm::{CommError, Options, Reduce, threads};
use tilewright_harness::dist::rendezvous::{self, Job};
use tilewright_harness::dist::secret::Access;

use crate::world::{KINDS, Kind, free_port, options, rank_info, ranks};

/// Timeouts of ranks that wait for one that hangs.
const SHORT: Options = Options { timeout: Duration::from_millis(400), start_timeout: Duration::from_millis(600) };
/// Tolerance for "immediately" and "in time" on a busy machine.
const SLACK: Duration = Duration::from_secs(20);

#[test]
fn mismatched_collectives_are_listed_on_all_ranks() {
    for kind in KINDS {
        let texts = ranks(kind, 3, options(), |comm| {
            comm.all_reduce(&mut [0.0_f32; 8], Reduce::Sum).unwrap();
            let outcome = match comm.rank() {
                0 => comm.all_reduce(&mut [0.0_f32; 100], Reduce::Sum),
                1 => comm.all_reduce(&mut [0.0_f32; 101], Reduce::Sum),
                _ => comm.broadcast(&mut [0_i32; 100], 2),
            };
            let error = outcome.unwrap_err();
            // Every later call fails without waiting.
            assert_eq!(comm.barrier().unwrap_err(), error);
            error.to_string()
        });
        for text in texts {
            let lines = [
                "the ranks disagree about collective 2:",
                "rank 0: all_reduce(sum) of 100 f32",
                "rank 1: all_reduce(sum) of 101 f32",
                "rank 2: broadcast(from rank 2) of 100 i32",
            ];
            assert!(lines.iter().all(|line| text.contains(line)), "{kind:?}: {text}");
        }
    }
}

#[test]
fn element_types_order_and_reductions_are_compared_too() {
    for kind in KINDS {
        let errors = ranks(kind, 2, options(), |comm| match comm.rank() {
            0 => comm.all_reduce(&mut [0.0_f32; 4], Reduce::Sum).unwrap_err(),
            _ => comm.all_reduce(&mut [0.0_f64; 4], Reduce::Sum).unwrap_err(),
        });
        assert!(errors.iter().all(|error| error.to_string().contains("of 4 f64")), "{errors:?}");
        let errors = ranks(kind, 2, options(), |comm| match comm.rank() {
            0 => comm.all_reduce(&mut [0.0_f32; 4], Reduce::Sum).unwrap_err(),
            _ => comm.all_reduce(&mut [0.0_f32; 4], Reduce::Avg).unwrap_err(),
        });
        assert!(errors.iter().all(|error| error.to_string().contains("all_reduce(avg)")), "{errors:?}");
        let errors = ranks(kind, 2, options(), |comm| {
            let order = if comm.rank() == 0 { [4, 8] } else { [8, 4] };
            order.iter().try_for_each(|&n| comm.all_reduce(&mut vec![0.0_f32; n], Reduce::Sum)).unwrap_err()
        });
        assert!(
            errors.iter().all(|error| error.to_string().contains("rank 1: all_reduce(sum) of 8 f32")),
            "{errors:?}"
        );
    }
}

#[test]
fn a_rank_that_hangs_is_named_after_the_timeout() {
    for kind in KINDS {
        let began = Instant::now();
        let (let_go, held) = std::sync::mpsc::channel::<()>();
        let (let_go, held) = (std::sync::Mutex::new(Some(let_go)), std::sync::Mutex::new(held));
        let waiting = std::sync::atomic::AtomicUsize::new(2);
        let texts = ranks(kind, 3, SHORT, |comm| {
            if comm.rank() == 1 {
                // Hangs until the others have their error.
                let _ = held.lock().unwrap().recv();
                return String::new();
            }
            let text = comm.all_reduce(&mut [0.0_f32; 10], Reduce::Sum).unwrap_err().to_string();
            if waiting.fetch_sub(1, std::sync::atomic::Ordering::SeqCst) == 1 {
                drop(let_go.lock().unwrap().take());
            }
            text
        });
        for text in [&texts[0], &texts[2]] {
            assert!(text.contains("waited 0.4 s for rank 1 at all_reduce(sum) of 10 f32"), "{kind:?}: {text}");
        }
        assert!(began.elapsed() >= SHORT.timeout && began.elapsed() < SLACK, "{:?}", began.elapsed());
    }
}

#[test]
fn a_dropped_communicator_is_noticed_immediately() {
    for kind in KINDS {
        let began = Instant::now();
        let texts = ranks(kind, 3, options(), |comm| {
            comm.barrier().unwrap();
            match comm.rank() {
                2 => String::new(),
                _ => comm.all_reduce(&mut [0.0_f32; 10], Reduce::Sum).unwrap_err().to_string(),
            }
        });
        for text in &texts[..2] {
            assert!(text.contains("rank 2") && text.contains("all_reduce(sum) of 10 f32"), "{kind:?}: {text}");
        }
        assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
    }
}

#[test]
fn a_panic_aborts_all_ranks() {
    for kind in KINDS {
        let began = Instant::now();
        let texts = ranks(kind, 3, options(), |comm| {
            if comm.rank() == 1 {
                let thrown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let _comm = comm;
                    // Not `panic!`, whose message in the output would look like a test failure.
                    std::panic::resume_unwind(Box::new("thrown"));
                }));
                return format!("{}", thrown.is_err());
            }
            comm.all_reduce(&mut [0.0_f32; 10], Reduce::Sum).unwrap_err().to_string()
        });
        assert_eq!(texts[1], "true");
        for text in [&texts[0], &texts[2]] {
            assert!(text.contains("rank 1 aborted: it panicked") && text.contains("all_reduce"), "{kind:?}: {text}");
        }
        assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
    }
}

#[test]
fn an_abort_carries_its_reason() {
    for kind in KINDS {
        let texts = ranks(kind, 2, options(), |comm| match comm.rank() {
            0 => {
                comm.abort("the disk is full");
                comm.barrier().unwrap_err().to_string()
            }
            _ => comm.barrier().unwrap_err().to_string(),
        });
        assert!(texts[1].contains("rank 0 aborted: the disk is full") && texts[1].contains("at barrier"), "{texts:?}");
        assert!(texts[0].contains("the disk is full"), "{texts:?}");
    }
}

fn start(rank: usize, world: usize, port: u16, job: &str) -> Result<(), CommError> {
    let job = Job { name: job.into(), access: Access::default() };
    rendezvous::connect(&rank_info(rank, world, port), &job, SHORT).map(|_| ())
}

/// Starts these ranks concurrently, and returns their results.
fn rendezvous_of(starts: &[(usize, usize, &str)]) -> Vec<Result<(), CommError>> {
    let port = free_port();
    std::thread::scope(|scope| {
        let threads: Vec<_> = starts.iter().map(|&(r, w, job)| scope.spawn(move || start(r, w, port, job))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn missing_ranks_are_named() {
    let began = Instant::now();
    for outcome in rendezvous_of(&[(0, 4, ""), (2, 4, "")]) {
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.contains("ranks 1 and 3 of 4 did not connect to 127.0.0.1:") && text.contains("within 0.6 s"),
            "{text}"
        );
    }
    let text = rendezvous_of(&[(1, 2, "")]).remove(0).unwrap_err().to_string();
    assert!(text.contains("no process answers at 127.0.0.1:") && text.contains("rank 0 has to run there"), "{text}");
    assert!(began.elapsed() < SLACK);
}

#[test]
fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let text = start(0, 2, port, "").unwrap_err().to_string();
    assert!(text.contains(&format!("port {port} on 127.0.0.1")) && text.contains("set MASTER_PORT"), "{text}");
}

#[test]
fn ranks_of_another_job_or_world_are_rejected() {
    let outcomes = rendezvous_of(&[(0, 2, "mine"), (1, 2, "other")]);
    let texts: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(texts[0].contains("rank 1 of 2 did not connect"), "{texts:?}");
    assert!(texts[1].contains("another job uses this port"), "{texts:?}");
    for outcome in rendezvous_of(&[(0, 2, ""), (1, 3, "")]) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 1 has world size 3, rank 0 has 2"), "{text}");
    }
    let texts: Vec<String> =
        rendezvous_of(&[(0, 3, ""), (1, 3, ""), (1, 3, "")]).into_iter().map(|o| o.unwrap_err().to_string()).collect();
    assert!(texts.iter().all(|text| text.contains("two processes claim rank 1")), "{texts:?}");
}

#[test]
fn an_empty_world_is_refused() {
    assert!(threads::threads(0, options()).is_err());
    let alone = ranks(Kind::Tcp, 1, options(), |comm| comm.all_reduce(&mut [1.0_f32], Reduce::Sum).is_ok());
    assert_eq!(alone, [true]);
}
