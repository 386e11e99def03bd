//! Running compiled kernels: devices, buffers, launches, streams, the artifact cache and benchmarks.
//!
//! This crate is the only place of Tilewright that talks to the CUDA driver, the file system and the environment. It
//! knows compiled code by its [`Manifest`](tilewright_codegen::target::Manifest) alone, and nothing of how it was made.
//!
//! A launch, from the outside in:
//!
//! 1. [`Device::best`] picks a GPU where a driver answers, else the CPU.
//! 2. [`Cache`] finds the [`Artifact`](tilewright_codegen::target::Artifact) of an earlier compilation, or stores a new one.
//! 3. [`Device::load`] hands the code to the driver or links it into this process: a [`CompiledKernel`].
//! 4. [`CompiledKernel::launch`] checks the arguments against the manifest and starts the grid.
//!
//! Environment variables are read once, in [`mod@env`], which lists them all.

// It panics where standard error is full: see `terminal::say`.
#![cfg_attr(not(test), warn(clippy::print_stderr))]

pub mod autotune;
pub mod bench;
mod buffer;
pub mod cache;
mod device;
mod element;
pub mod env;
mod error;
pub mod kernel;
mod launch;
pub mod pool;
pub mod prelude;
pub mod probe;
mod stream;
pub mod terminal;
pub mod trace;
pub mod watch;

pub use buffer::{Buffer, Strided, View, ViewMut, elements};
pub use cache::Cache;
pub use device::{Device, DeviceInfo, expect_host_memory, is_plenty, reserve_host_memory};
pub use element::{Dtype, Element, F8E4M3, F8E5M2};
pub use error::{CudaFailure, Error, Result};
pub use kernel::{Grid, LaunchConfig};
pub use launch::{CompiledKernel, LaunchArg, Resources};
pub use stream::{Event, Stream};

/// The CUDA bindings that this crate uses, for callers that hand it streams or pointers of their own.
pub use cudarc;

// `#[kernel]` names this crate from inside it too.
extern crate self as tilewright_runtime;

/// What `#[kernel]` and `#[device_fn]` expand to; not for use by hand.
#[doc(hidden)]
pub mod __private {
    pub use crate::autotune;
    pub use crate::kernel;
    pub use crate::{CompiledKernel, Device, Element, Grid, LaunchConfig, Result};
    pub use tilewright_codegen::lang;
    pub use tilewright_codegen::target::Schedule;
}
