//! Runs a function on every rank of a test world.

use std::net::TcpListener;
use std::time::Duration;

use tilewright_harness::dist::comm::{Communicator, Options, threads};
use tilewright_harness::dist::rank::RankInfo;
use tilewright_harness::dist::rendezvous::{self, Job};

/// Backends of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Threads,
    Tcp,
}

pub const KINDS: [Kind; 2] = [Kind::Threads, Kind::Tcp];

/// Timeouts of tests: long enough for a busy machine.
pub fn options() -> Options {
    Options { timeout: Duration::from_secs(60), start_timeout: Duration::from_secs(60) }
}

pub fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

pub fn rank_info(rank: usize, world: usize, port: u16) -> RankInfo {
    let master = ("127.0.0.1".to_string(), port);
    RankInfo { rank, world, local_rank: rank, local_world: world, master, started_by: "torchrun" }
}

/// Runs `f` on every rank, each on its own thread; returns the results by rank.
pub fn ranks<R: Send>(kind: Kind, world: usize, options: Options, f: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let mut ready = match kind {
        Kind::Threads => threads::threads(world, options).unwrap().into_iter().map(Some).collect(),
        Kind::Tcp => (0..world).map(|_| None).collect::<Vec<_>>(),
    };
    let (port, job) = (free_port(), Job::generate("test").unwrap());
    std::thread::scope(|scope| {
        let start = |(rank, ready): (usize, Option<Communicator>)| {
            let (f, job) = (&f, &job);
            scope.spawn(move || {
                let connect = || rendezvous::connect(&rank_info(rank, world, port), job, options).unwrap();
                f(ready.unwrap_or_else(connect))
            })
        };
        let threads: Vec<_> = ready.drain(..).enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
