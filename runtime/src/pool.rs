//! The pool of threads that kernels on the CPU, tokenizers and starting values share: rayon's global one.

use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Once};
use std::thread;

use rayon::{ThreadBuilder, ThreadPoolBuilder};

/// Starts rayon's global pool, unless the program has started it: a thread for each processor, or as many as `RAYON_NUM_THREADS` says.
///
/// Where the system refuses some of them (a limit on processes, no memory for stacks) the pool has those that it gave, and where it
/// refuses all, work runs on the calling thread. Rayon would panic at its first use instead. Cheap after the first call.
pub fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| start_with(wanted()));
}

/// As many threads as rayon would start.
fn wanted() -> usize {
    let said = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok()).filter(|&n: &usize| n > 0);
    let processors = || thread::available_parallelism().map_or(1, usize::from);
    said.unwrap_or_else(processors).min(rayon::max_num_threads())
}

/// Threads are started first and wait for their place in the pool: a pool that cannot start one of its threads gives up for good.
fn start_with(wanted: usize) {
    let (places, taken) = channel::<ThreadBuilder>();
    let taken = Arc::new(Mutex::new(taken));
    let mut started = 0;
    while started < wanted {
        let taken = taken.clone();
        let body = move || {
            let place = taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
            // Without a place the pool was there already.
            place.into_iter().for_each(ThreadBuilder::run);
        };
        match thread::Builder::new().name(format!("pool {started}")).spawn(body) {
            Ok(_) => started += 1,
            Err(error) => {
                tracing::warn!("the system starts {started} of {wanted} threads for work on the CPU: {error}");
                break;
            }
        }
    }
    let built = match started {
        0 => ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global(),
        threads => {
            let give = move |place| places.send(place).map_err(|_| io::Error::other("the thread has ended"));
            ThreadPoolBuilder::new().num_threads(threads).spawn_handler(give).build_global()
        }
    };
    if let Err(error) = built {
        tracing::debug!("the pool of threads is the program's own: {error}");
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
