//! Many ranks at one training: who they are, how they talk, and what they say.
//!
//! In reading order: [`rank`] says which of how many we are, [`comm`] has the collectives and the back ends that carry
//! them, [`rendezvous`] brings processes together that prove with a [`secret`] that they belong together, [`launch`] starts them, [`lifeline`]
//! ties them to it; [`buckets`] says which gradients travel together, [`ddp`] averages gradients, [`sharded`] shares the optimizer out;
//! [`watchdog`] ends a process in which a call hangs.

pub mod buckets;
pub mod comm;
pub mod ddp;
pub mod error;
pub mod launch;
pub mod lifeline;
pub mod rank;
pub mod rendezvous;
pub mod secret;
pub mod sharded;
pub mod watchdog;

use comm::{CommError, Communicator, Result};
use rank::{BackendKind, Environment};

/// The communicator of this process, as whoever started it wants it; of a world of one where nobody did.
///
/// # Errors
/// Variables that make no sense, ranks that do not come, a back end that is not built in or not there.
pub fn connect() -> Result<Communicator> {
    connect_to(&Environment::get()?)
}

/// [`connect`] with an environment that has been read.
///
/// # Errors
/// As [`connect`].
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
        // For host memory; `connect_for` has the GPUs.
        BackendKind::Nccl => rendezvous::connect(info, &environment.job, options),
    }
}

/// [`connect_to`] for a model on `device`: between GPUs NCCL carries gradients and parameters, and the host's back end all else.
///
/// # Errors
/// As [`connect_to`]; several ranks with GPUs in a build without NCCL, and NCCL asked for on the CPU.
pub fn connect_for(environment: &Environment, device: &candle_core::Device) -> Result<Communicator> {
    match device {
        candle_core::Device::Cpu if environment.backend == Some(BackendKind::Nccl) => Err(CommError::Setup(
            "NCCL carries memory of GPUs, and this model is on the CPU\n  help: unset TILEWRIGHT_COMM, or train on GPUs".into(),
        )),
        candle_core::Device::Cpu => connect_to(environment),
        #[cfg(all(feature = "nccl", feature = "cuda"))]
        candle_core::Device::Cuda(cuda) => {
            let alone = rank::RankInfo::single();
            let info = environment.rank_info.as_ref().unwrap_or(&alone);
            comm::nccl::connect(connect_to(environment)?, info, &environment.job, cuda.cuda_stream(), environment.options)
        }
        _ if environment.rank_info.as_ref().is_none_or(|info| info.world == 1) => {
            Err(CommError::Setup("one rank on a GPU has nobody to talk to: leave --ddp and --shard out".into()))
        }
        _ => absent("NCCL", "nccl"),
    }
}

fn absent(what: &str, feature: &str) -> Result<Communicator> {
    Err(CommError::Setup(format!(
        "this program was built without {what}\n  help: build it with --features tilewright-harness/{feature}, or unset TILEWRIGHT_COMM"
    )))
}
