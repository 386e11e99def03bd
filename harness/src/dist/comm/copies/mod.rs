//! Collectives that copy engines carry: which copies, waits and reductions each rank queues, as pure code.
//!
//! Kernels that communicate keep multiprocessors from kernels that compute. A GPU's copy engines move memory to other GPUs of the host
//! without any; what is left for multiprocessors is to add up.
//!
//! [`plan`] says what is queued, [`block`] where it lies, [`command`] with which addresses. `nccl::engines` hands it to the driver; the tests of this module run all ranks'
//! plans on the host, in any order that the driver may choose.

pub mod block;
pub mod command;
pub mod plan;
#[cfg(test)]
mod tests;

pub use block::Block;
pub use command::{Addresses, Command};
pub use plan::{Kind, Plan, Step};
