//! Parameters whose gradients are in one flat tensor.

use std::any::Any;
use std::ops::Range;

use candle_core::{Device, Result, Tensor};

/// Alignment of parameters in the flat gradient, in elements: 256 bytes in f32, 128 bytes in bf16 and f16.
pub const ALIGNMENT: usize = 64;

/// Identifies a parameter by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// A parameter of [`FlatParams`].
#[derive(Clone, Debug, PartialEq)]
pub struct FlatParam {
    pub name: String,
    pub shape: Vec<usize>,
    /// Elements of the gradient in the flat tensor. The ranges of parameters are in order; each begins at a multiple of
    /// [`ALIGNMENT`], and the padding between them is zero.
    pub range: Range<usize>,
    /// Whether it has a gradient.
    pub requires_grad: bool,
}

/// Runs once per backward pass and parameter, when its gradient is complete.
pub type GradReady = Box<dyn Fn(ParamId) -> Result<()> + Send + Sync>;

/// Parameters as [`Ddp`](super::ddp::Ddp) averages their gradients: one flat tensor of gradients, on one device.
pub trait FlatParams: Send + Sync {
    /// The device of parameters and gradients.
    fn device(&self) -> &Device;

    /// The parameters, by their id.
    fn parameters(&self) -> Vec<FlatParam>;

    /// Number of elements of the flat tensor, padding included: a multiple of [`ALIGNMENT`].
    fn flat_len(&self) -> usize;

    /// The gradients: [flat_len], f32 or bf16. The tensor stays the same while a callback is registered.
    fn grads(&self) -> Tensor;

    /// The contiguous tensors, f32, bf16 or f16, that all ranks begin with.
    fn values(&self) -> Vec<Tensor>;

    /// Reacts to other contents of [`FlatParams::values`].
    ///
    /// # Errors
    /// Those of the reaction.
    fn values_changed(&self) -> Result<()>;

    /// On a GPU, moves the gradients to memory that other processes can map (CUDA IPC), if no callback is registered.
    /// Returns whether it is shareable.
    ///
    /// # Errors
    /// The device is out of memory.
    fn make_grads_ipc_shareable(&self) -> Result<bool>;

    /// Registers a callback, until the result is dropped. It runs on the thread of the backward pass; its error ends the
    /// pass.
    fn on_grad_ready(&self, callback: GradReady) -> Box<dyn Any + Send + Sync>;
}
