//! Data-parallel training: [`DistributedDataParallel`] over a `VarMap`, ranks and collectives.
//!
//! Reading order:
//! - [`DistributedDataParallel`] is what a program uses, with the [`Communicator`] of [`connect_for`].
//! - [`rank`] reads this process's rank and world size from the environment.
//! - [`comm`] has the collectives and their backends.
//! - [`rendezvous`] connects the processes of a job, which authenticate each other with a [`secret`].
//! - [`flat`] is the trait of parameters whose gradients are in one tensor; [`buckets`] groups gradients into buckets,
//!   [`ddp`] averages them.
//! - [`watchdog`] ends a process in which a call hangs.

pub mod buckets;
pub mod comm;
pub mod ddp;
pub mod error;
pub mod flat;
pub mod rank;
pub mod rendezvous;
pub mod secret;
mod var_map;
pub mod watchdog;

pub use var_map::DistributedDataParallel;

use comm::{CommError, Communicator, Result};
use rank::{BackendKind, Environment};

/// Connects this process to the ranks that its launcher's environment variables describe. Without such variables the
/// world size is 1.
///
/// # Errors
/// Invalid variables, missing ranks, a backend that is not built in or not available.
pub fn connect() -> Result<Communicator> {
    connect_to(&Environment::get()?)
}

/// Same as [`connect`], with an environment that is already read.
///
/// # Errors
/// See [`connect`].
pub fn connect_to(environment: &Environment) -> Result<Communicator> {
    let options = environment.options;
    let Some(info) = &environment.rank_info else { return Communicator::single() };
    let by_mpi = cfg!(feature = "mpi") && info.started_by == "mpirun";
    let backend = environment.backend.unwrap_or(if by_mpi { BackendKind::Mpi } else { BackendKind::Tcp });
    match backend {
        BackendKind::Tcp => rendezvous::connect(info, &environment.job, options),
        #[cfg(feature = "mpi")]
        BackendKind::Mpi => comm::mpi::connect(options),
        #[cfg(not(feature = "mpi"))]
        BackendKind::Mpi => absent("MPI", "mpi"),
        // Host memory only; `connect_for` adds NCCL for the GPUs.
        BackendKind::Nccl => rendezvous::connect(info, &environment.job, options),
    }
}

/// Same as [`connect_to`], for a model on `device`. On GPUs, NCCL transfers gradients and parameters, and the host
/// backend everything else.
///
/// # Errors
/// See [`connect_to`]. Also several ranks with GPUs in a build without NCCL, and NCCL requested on the CPU.
pub fn connect_for(environment: &Environment, device: &candle_core::Device) -> Result<Communicator> {
    match device {
        candle_core::Device::Cpu if environment.backend == Some(BackendKind::Nccl) => Err(CommError::Setup(
            "NCCL transfers GPU memory only, and this model is on the CPU\n  help: unset TILEWRIGHT_COMM, or train on GPUs".into(),
        )),
        candle_core::Device::Cpu => connect_to(environment),
        #[cfg(all(feature = "nccl", feature = "cuda"))]
        candle_core::Device::Cuda(cuda) => {
            let alone = rank::RankInfo::single();
            let info = environment.rank_info.as_ref().unwrap_or(&alone);
            comm::nccl::connect(connect_to(environment)?, info, &environment.job, cuda.cuda_stream(), environment.options)
        }
        _ if environment.rank_info.as_ref().is_none_or(|info| info.world == 1) => {
            Err(CommError::Setup("there is only one rank on a GPU: leave --ddp and --shard out".into()))
        }
        _ => absent("NCCL", "nccl"),
    }
}

fn absent(what: &str, feature: &str) -> Result<Communicator> {
    Err(CommError::Setup(format!(
        "this program was built without {what}\n  help: build it with the feature {feature} of tilewright-candle (of tilewright-harness: --features tilewright-harness/{feature}), or unset TILEWRIGHT_COMM"
    )))
}
