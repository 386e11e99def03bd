//! What training on many devices costs, from formulas: memory, communication, batch sizes. `docs/distributed.md` derives them.
//!
//! - [`memory`]: bytes of a model's state and activations, and how many devices hold them.
//! - [`fsdp`]: bytes on each of N devices that share them, and the batch from which computing takes longer than communicating.
//! - [`ddp`]: what buckets cost, from the time of a call and the bandwidth.

pub mod ddp;
pub mod fsdp;
pub mod memory;
