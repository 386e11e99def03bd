//! Runs a benchmark on every rank: the ranks of a launcher, else threads of this process.

use std::sync::{PoisonError, RwLock};

use candle_core::Device;
use clap::ValueEnum;

use crate::cli::{CliError, Result};
use crate::dist::comm::{CommError, Communicator, Options, threads};
use crate::dist::rank::{Environment, RankInfo};
use crate::dist::rendezvous::{self, Job};
use crate::dist::{connect_for, launch};

/// The communication backend of ranks that are threads of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CommBackend {
    /// Shared memory
    Threads,
    /// Sockets
    Tcp,
}

/// Runs `f` on every rank of each process group, for work on `device`: the group of the launcher, else one for every
/// combination of backend and world size. Returns the result of rank 0 of each group; on other ranks of a launcher,
/// nothing.
///
/// # Errors
/// The rendezvous fails, or `f` fails.
pub fn for_each_process_group<R: Send>(
    device: &Device,
    backends: &[CommBackend],
    world_sizes: &[u16],
    f: impl Fn(Communicator) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let environment = Environment::get().map_err(comm_failure)?;
    if environment.rank_info.is_some() {
        let comm = connect_for(&environment, device).map_err(comm_failure)?;
        let is_rank0 = comm.rank() == 0;
        let found = f(comm)?;
        return Ok(if is_rank0 { vec![found] } else { Vec::new() });
    }
    if world_sizes.contains(&0) {
        return Err(CliError::usage("--ranks has a world of 0 ranks", "numbers of ranks must be at least 1"));
    }
    if !device.is_cpu() {
        return Err(CliError::usage(
            "ranks that are threads of one process run on the CPU only",
            "use `tilewright launch --nproc N -- tilewright bench …` for one rank per GPU, or --device cpu",
        ));
    }
    let mut all = Vec::new();
    for &backend in backends {
        for &world in world_sizes {
            all.push(run_group(backend, world.into(), environment.options, &f)?);
        }
    }
    Ok(all)
}

/// Converts an error of communication to a command's error.
pub fn comm_failure(error: CommError) -> CliError {
    CliError::Failure(error.to_string())
}

fn run_group<R: Send>(
    backend: CommBackend,
    world: usize,
    options: Options,
    f: &(impl Fn(Communicator) -> Result<R> + Sync),
) -> Result<R> {
    let ready = match backend {
        CommBackend::Threads => threads::threads(world, options).map_err(comm_failure)?.into_iter().map(Some).collect(),
        CommBackend::Tcp => (0..world).map(|_| None).collect::<Vec<_>>(),
    };
    let job = Job::generate("bench").map_err(comm_failure)?;
    let port = launch::free_port().map_err(|error| CliError::Failure(format!("no free port: {error}")))?;
    let rank = |rank, ready: Option<Communicator>| {
        let master = ("127.0.0.1".to_string(), port);
        let rank_info = RankInfo { rank, world, local_rank: rank, local_world: world, master, started_by: "bench" };
        let comm = ready.map_or_else(|| rendezvous::connect(&rank_info, &job, options), Ok).map_err(comm_failure)?;
        f(comm)
    };
    // Ranks start when all have a thread, so that none waits for a rank whose thread could not be created.
    let all_spawned = RwLock::new(false);
    std::thread::scope(|scope| {
        let mut guard = all_spawned.write().unwrap_or_else(PoisonError::into_inner);
        let start = |(number, ready)| {
            let (rank, all_spawned) = (&rank, &all_spawned);
            let body = move || match *all_spawned.read().unwrap_or_else(PoisonError::into_inner) {
                true => rank(number, ready),
                false => Err(CliError::Failure(format!("rank {number} did not start: another rank has no thread"))),
            };
            let thread = std::thread::Builder::new().spawn_scoped(scope, body);
            thread.map_err(|error| CliError::Failure(format!("cannot start a thread for rank {number}: {error}")))
        };
        let running: Vec<_> = ready.into_iter().enumerate().map(start).collect::<Result<_>>()?;
        *guard = true;
        drop(guard);
        let panicked = |_| CliError::Failure("internal error: a rank panicked; please report this".into());
        let found: Result<Vec<R>> = running.into_iter().map(|rank| rank.join().map_err(panicked)?).collect();
        found.map(|mut all| all.swap_remove(0))
    })
}
