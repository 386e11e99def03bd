//! The ranks of a benchmark: those that somebody started, else threads of this process.

use std::sync::{PoisonError, RwLock};

use candle_core::Device;
use clap::ValueEnum;

use crate::cli::{CliError, Result};
use crate::dist::comm::{CommError, Communicator, Options, threads};
use crate::dist::rank::{Environment, Place};
use crate::dist::rendezvous::{self, Job};
use crate::dist::{connect_for, launch};

/// What carries ranks that are threads of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Carrier {
    /// Shared memory
    Threads,
    /// Sockets
    Tcp,
}

/// Runs `f` on every rank of each world, for work on `device`: of the one that a launcher made, else of all carriers with all numbers of ranks. Gives what
/// rank 0 of each world found; on other ranks of a launcher nothing, for they have nothing to say.
///
/// # Errors
/// Ranks that do not find each other, and those of `f`.
pub fn each_world<R: Send>(
    device: &Device,
    carriers: &[Carrier],
    ranks: &[u16],
    f: impl Fn(Communicator) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let environment = Environment::get().map_err(failed)?;
    if environment.place.is_some() {
        let comm = connect_for(&environment, device).map_err(failed)?;
        let leads = comm.rank() == 0;
        let found = f(comm)?;
        return Ok(if leads { vec![found] } else { Vec::new() });
    }
    if ranks.contains(&0) {
        return Err(CliError::usage("a world of 0 ranks has nothing to measure", "--ranks counts from 1"));
    }
    if !device.is_cpu() {
        return Err(CliError::usage(
            "ranks that are threads of one process work on the CPU",
            "`tilewright launch --nproc N -- tilewright bench …` starts a rank for each GPU, --device cpu stays here",
        ));
    }
    let mut all = Vec::new();
    for &carrier in carriers {
        for &ranks in ranks {
            all.push(world(carrier, ranks.into(), environment.options, &f)?);
        }
    }
    Ok(all)
}

/// What a person reads.
pub fn failed(error: CommError) -> CliError {
    CliError::Failure(error.to_string())
}

fn world<R: Send>(
    carrier: Carrier,
    ranks: usize,
    options: Options,
    f: &(impl Fn(Communicator) -> Result<R> + Sync),
) -> Result<R> {
    let ready = match carrier {
        Carrier::Threads => threads::threads(ranks, options).map_err(failed)?.into_iter().map(Some).collect(),
        Carrier::Tcp => (0..ranks).map(|_| None).collect::<Vec<_>>(),
    };
    let job = Job::fresh("bench").map_err(failed)?;
    let port = launch::free_port().map_err(|error| CliError::Failure(format!("no free port: {error}")))?;
    let rank = |rank, ready: Option<Communicator>| {
        let master = ("127.0.0.1".to_string(), port);
        let place = Place { rank, world: ranks, local_rank: rank, local_world: ranks, master, started_by: "bench" };
        let comm = ready.map_or_else(|| rendezvous::connect(&place, &job, options), Ok).map_err(failed)?;
        f(comm)
    };
    // Ranks begin when all have a thread: nobody waits for one that will not come.
    let complete = RwLock::new(false);
    std::thread::scope(|scope| {
        let mut gate = complete.write().unwrap_or_else(PoisonError::into_inner);
        let start = |(number, ready)| {
            let (rank, complete) = (&rank, &complete);
            let body = move || match *complete.read().unwrap_or_else(PoisonError::into_inner) {
                true => rank(number, ready),
                false => Err(CliError::Failure(format!("rank {number} did not begin: another one has no thread"))),
            };
            let thread = std::thread::Builder::new().spawn_scoped(scope, body);
            thread.map_err(|error| CliError::Failure(format!("cannot start a thread for rank {number}: {error}")))
        };
        let running: Vec<_> = ready.into_iter().enumerate().map(start).collect::<Result<_>>()?;
        *gate = true;
        drop(gate);
        let panicked = |_| CliError::Failure("internal error: a rank panicked, please report".into());
        let found: Result<Vec<R>> = running.into_iter().map(|rank| rank.join().map_err(panicked)?).collect();
        found.map(|mut all| all.swap_remove(0))
    })
}
