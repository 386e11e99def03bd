//! Collectives on copy engines: which copies, waits and reductions each rank queues. Contains no GPU code.
//!
//! Communication kernels occupy SMs that compute kernels could use. A GPU's copy engines transfer memory to other GPUs
//! of the host without SMs; only reductions need SMs.
//!
//! [`plan`] defines the steps, [`block`] the memory layout, [`command`] the addresses. `nccl::engines` submits the
//! commands to the driver. The tests of this module simulate all ranks' plans on the host, in any order that the driver
//! may choose.

pub mod block;
pub mod command;
pub mod plan;
#[cfg(test)]
mod tests;

pub use block::Block;
pub use command::{Addresses, Command};
pub use plan::{Kind, Plan, Step};
