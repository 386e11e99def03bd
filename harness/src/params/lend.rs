//! The memory of gradients before there are any, for what forward leaves to backward.
//!
//! A gradient that is blank is written late in a step, and its memory lies idle until then. What a layer made of its input is read for
//! the last time before the gradient of its weight is written: so it may lie there, as long as it is not larger than the weight. PyTorch,
//! which allocates gradients on its way backward, uses that memory as often.

use std::sync::atomic::Ordering;

use candle_core::{DType, Error, Result, Shape, Tensor};

use super::{Param, grad_enabled};

/// A tensor, in memory of its own or in that of a gradient. Whoever writes that gradient drops this before.
pub struct Lent {
    tensor: Tensor,
    /// Whose gradient's memory it is, if it is any's.
    of: Option<Param>,
}

impl Lent {
    /// A tensor in memory of its own.
    pub fn own(tensor: Tensor) -> Lent {
        Lent { tensor, of: None }
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(param) = &self.of {
            param.lent().store(false, Ordering::Release);
        }
    }
}

impl Param {
    fn lent(&self) -> &std::sync::atomic::AtomicBool {
        &self.params.lent[self.id.0]
    }

    /// Whether something lies where its gradient will be.
    pub(super) fn is_lent(&self) -> bool {
        self.lent().load(Ordering::Acquire)
    }

    /// A tensor with unspecified values where the gradient will be. `None` where that is no memory to lend: inside
    /// [`no_grad`](super::no_grad), for a gradient that is not blank, is lent already, of another type or too small.
    pub fn lend_grad(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Option<Lent>> {
        let (shape, grads) = (shape.into(), self.params.grads());
        let fits = shape.elem_count() <= self.numel() && grads.dtype() == dtype;
        if !(fits && grad_enabled() && self.requires_grad() && self.is_blank()) {
            return Ok(None);
        }
        if self.lent().swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        // From here on the memory is given back whatever happens.
        let mut lent = Lent { tensor: grads, of: Some(self.clone()) };
        lent.tensor = lent.tensor.narrow(0, self.range().start, shape.elem_count())?.reshape(shape)?;
        Ok(Some(lent))
    }

    /// Fails while something lies where the gradient is to be written.
    pub(super) fn check_free(&self) -> Result<()> {
        if !self.is_lent() {
            return Ok(());
        }
        Err(Error::Msg(format!(
            "the gradient of `{}` is asked for, and a forward pass whose backward pass is to come keeps something in its memory\n  \
             help: run backward before the next forward, or begin with zero_grads instead of blank_grads",
            self.name()
        )))
    }
}
