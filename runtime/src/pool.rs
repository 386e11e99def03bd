//! The global rayon thread pool, shared by kernels on the CPU, tokenizers and parameter initialization.

use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Once};
use std::thread;

use rayon::{ThreadBuilder, ThreadPoolBuilder};

/// Starts rayon's global pool, unless the program has started it: one thread per CPU, or the number in
/// `RAYON_NUM_THREADS`.
///
/// If the system cannot start some of the threads (a limit on processes, no memory for stacks), the pool has the
/// others; if it cannot start any, work runs on the calling thread. Rayon by itself would panic at its first use. Cheap
/// after the first call.
pub fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| start_with(wanted()));
}

/// Maximum number of threads: each takes two megabytes of address space for its stack, and a larger number is probably
/// a typing error.
const MAX_THREADS: usize = 1024;

/// The number of threads that rayon would start, within the limit.
fn wanted() -> usize {
    let requested =
        std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok()).filter(|&n: &usize| n > 0);
    let processors = || thread::available_parallelism().map_or(1, usize::from);
    requested.unwrap_or_else(processors).min(MAX_THREADS)
}

/// Threads are started first and wait for a slot in the pool: rayon permanently fails to build a pool if one of its
/// threads cannot start.
fn start_with(wanted: usize) {
    let (sender, receiver) = channel::<ThreadBuilder>();
    let receiver = Arc::new(Mutex::new(receiver));
    let mut started = 0;
    while started < wanted {
        let receiver = receiver.clone();
        let body = move || {
            let slot = receiver.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
            // Without a slot the thread ends: the global pool existed already.
            slot.into_iter().for_each(ThreadBuilder::run);
        };
        match thread::Builder::new().name(format!("pool {started}")).spawn(body) {
            Ok(_) => started += 1,
            Err(error) => {
                tracing::warn!("only {started} of {wanted} worker threads of the CPU pool could be started: {error}");
                break;
            }
        }
    }
    let built = match started {
        0 => ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global(),
        threads => {
            let spawn = move |slot| sender.send(slot).map_err(|_| io::Error::other("the thread has ended"));
            ThreadPoolBuilder::new().num_threads(threads).spawn_handler(spawn).build_global()
        }
    };
    if let Err(error) = built {
        tracing::debug!("the program has already built the thread pool: {error}");
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_pool_works_and_starts_once() {
        use rayon::prelude::*;
        super::start();
        super::start();
        assert_eq!((0..1000_u64).into_par_iter().sum::<u64>(), 499_500);
        assert_eq!(rayon::current_num_threads(), super::wanted());
    }
}
