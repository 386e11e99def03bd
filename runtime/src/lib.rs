//! Runs compiled kernels: devices, buffers, launches, streams, the artifact cache and benchmarks.
//!
//! Of the libraries that compile and launch kernels, only this one uses the CUDA driver, the file system and the
//! environment; the compiler and the kernels do not. It knows compiled code only by its
//! [`Manifest`](tilewright_codegen::target::Manifest), not how the compiler generated it.
//!
//! The steps of a launch:
//!
//! 1. [`Device::best`] selects a GPU if a driver responds, else the CPU.
//! 2. [`Cache`] loads the [`Artifact`](tilewright_codegen::target::Artifact) of an earlier compilation, or stores a new
//!    one.
//! 3. [`Device::load`] loads the code through the driver or links it into this process: a [`CompiledKernel`].
//! 4. [`CompiledKernel::launch`] checks the arguments against the manifest and starts the grid.
//!
//! Environment variables are read once, in [`mod@env`], which lists all of them.

// It panics where standard error is full: see `terminal::print_stderr`.
#![cfg_attr(not(test), warn(clippy::print_stderr))]

pub mod autotune;
pub mod bench;
mod buffer;
pub mod cache;
mod device;
pub mod dump;
mod element;
pub mod env;
mod error;
pub mod escape;
pub mod kernel;
mod launch;
pub mod mx;
pub mod pool;
pub mod precompiled;
pub mod prelude;
pub mod probe;
#[cfg(feature = "solver")]
pub mod solver;
mod stream;
pub mod terminal;
pub mod trace;

pub use buffer::{Buffer, Strided, View, ViewMut, elements};
pub use cache::Cache;
pub use device::{Device, DeviceInfo, check_host_memory, has_ample_host_memory, reserve_host_memory};
pub use element::{Dtype, Element, F8E4M3, F8E5M2};
pub use error::{CudaFailure, Error, Result};
pub use kernel::{Grid, LaunchConfig, Tensor, TensorMut};
pub use launch::{CompiledKernel, LaunchArg, Resources};
pub use stream::{Event, Stream};

/// The CUDA bindings that this crate uses, for callers that pass it streams or pointers.
pub use cudarc;

// `#[kernel]` refers to this crate by name, inside it too.
extern crate self as tilewright_runtime;

/// Used by the expansion of `#[kernel]`; not for direct use.
#[doc(hidden)]
pub mod __private {
    pub use crate::autotune;
    pub use crate::kernel;
    pub use crate::precompiled::{AheadOfTime, embedded};
    pub use crate::{CompiledKernel, Device, Element, Grid, LaunchConfig, Result};
    pub use tilewright_codegen::lang;
    pub use tilewright_codegen::target::{HostHooks, Schedule, Target};
}
