//! Stores activations in gradient buffers that are not written yet.
//!
//! A lazily zeroed gradient ([`Params::lazy_zero_grads`](super::Params::lazy_zero_grads)) is first written late in the
//! backward pass; its buffer is unused until then. Backward reads the output of a linear layer for the last time before
//! it writes the gradient of the weight, so that output may alias the gradient buffer if it is no larger than the
//! weight. This saves as much memory as allocating gradients during backward, as PyTorch does.

use std::sync::atomic::Ordering;

use candle_core::{DType, Error, Result, Shape, Tensor};

use super::{Param, grad_enabled};

/// An activation saved for backward. It owns its memory or aliases the gradient buffer of a parameter. In the second
/// case it must be dropped before that gradient is written.
pub struct SavedActivation {
    tensor: Tensor,
    /// The parameter whose gradient buffer the tensor aliases, if any.
    aliased: Option<Param>,
}

impl SavedActivation {
    /// Wraps a tensor that owns its memory.
    pub fn owned(tensor: Tensor) -> SavedActivation {
        SavedActivation { tensor, aliased: None }
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for SavedActivation {
    fn drop(&mut self) {
        if let Some(param) = &self.aliased {
            param.grad_aliased().store(false, Ordering::Release);
        }
    }
}

impl Param {
    fn grad_aliased(&self) -> &std::sync::atomic::AtomicBool {
        &self.params.grad_aliased[self.id.0]
    }

    /// Whether a saved activation aliases the gradient buffer.
    pub(super) fn is_grad_aliased(&self) -> bool {
        self.grad_aliased().load(Ordering::Acquire)
    }

    /// Returns a tensor of unspecified values that aliases the gradient buffer. Returns `None` inside
    /// [`no_grad`](super::no_grad), for a frozen parameter, and if the gradient is not lazily zeroed, is aliased
    /// already, has another dtype or is too small.
    pub fn alias_grad(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Option<SavedActivation>> {
        let (shape, grads) = (shape.into(), self.params.grads());
        let fits = shape.elem_count() <= self.numel() && grads.dtype() == dtype;
        if !(fits && grad_enabled() && self.requires_grad() && self.is_lazy_zero()) {
            return Ok(None);
        }
        if self.grad_aliased().swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        // From here on, `Drop` releases the buffer on every path.
        let mut activation = SavedActivation { tensor: grads, aliased: Some(self.clone()) };
        activation.tensor = activation.tensor.narrow(0, self.range().start, shape.elem_count())?.reshape(shape)?;
        Ok(Some(activation))
    }

    /// Fails while a saved activation aliases the gradient buffer.
    pub(super) fn check_grad_not_aliased(&self) -> Result<()> {
        if !self.is_grad_aliased() {
            return Ok(());
        }
        Err(Error::Msg(format!(
            "cannot access the gradient of `{}`: its buffer holds an activation for a pending backward pass\n  \
             help: run backward before the next forward, or start the step with zero_grads instead of lazy_zero_grads",
            self.name()
        )))
    }
}
