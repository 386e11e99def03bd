//! Formulas for the cost of training on many devices: memory, communication, batch sizes. `docs/distributed.md` derives
//! them.
//!
//! - [`memory`]: bytes of model state and activations, and the number of devices that hold them.
//! - [`fsdp`]: bytes per device when N devices shard the state, and the batch size from which training is
//!   compute-bound.
//! - [`ddp`]: cost of gradient buckets, from latency and bandwidth of a collective.

pub mod ddp;
pub mod fsdp;
pub mod memory;
