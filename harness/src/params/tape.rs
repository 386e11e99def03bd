//! How gradients reach the flat tensor: uses, which are counted, and leaves.

use std::cell::Cell;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, Var};

use super::{Callback, Param, ParamId};
use crate::ops::memory::{Fresh, for_float_type};

thread_local! {
    static GRAD_DISABLED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with nothing on the tape: for evaluation and generation, which then keep no activations.
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            GRAD_DISABLED.set(self.0);
        }
    }
    let _restore = Restore(GRAD_DISABLED.replace(true));
    f()
}

/// Whether this thread records ops for backward: not inside [`no_grad`].
pub fn grad_enabled() -> bool {
    !GRAD_DISABLED.get()
}

/// One use of a parameter by an op that ran forward. The op adds its part of the gradient when it runs backward, then calls
/// [`Use::finish`]. Dropping an unfinished use, as the end of an evaluation does, takes it back.
pub struct Use {
    param: Param,
    finished: AtomicBool,
}

impl Use {
    /// The parameter.
    pub fn param(&self) -> &Param {
        &self.param
    }

    /// Says that this use's gradient has been added. The last use of a pass calls the callbacks of
    /// [`Params::on_grad_ready`](super::Params::on_grad_ready).
    ///
    /// # Errors
    /// Those of the callbacks.
    pub fn finish(&self) -> Result<()> {
        if self.finished.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        if self.param.pending().fetch_sub(1, Ordering::AcqRel) != 1 {
            return Ok(());
        }
        // Called on copies: a callback may add or remove callbacks.
        let callbacks: Vec<Callback> = {
            let callbacks = self.param.params.callbacks.read().unwrap_or_else(PoisonError::into_inner);
            callbacks.iter().map(|(_, callback)| callback.clone()).collect()
        };
        callbacks.iter().try_for_each(|callback| callback(self.param.id()))
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        if !*self.finished.get_mut() {
            self.param.pending().fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Param {
    fn pending(&self) -> &std::sync::atomic::AtomicUsize {
        let ParamId(id) = self.id;
        &self.params.pending[id]
    }

    /// Counts a use that will add to the gradient; `None` for a frozen parameter, or without a tape.
    pub fn begin_use(&self) -> Option<Use> {
        if !self.requires_grad() || !grad_enabled() {
            return None;
        }
        self.pending().fetch_add(1, Ordering::AcqRel);
        Some(Use { param: self.clone(), finished: AtomicBool::new(false) })
    }

    /// A variable that ops take as an input to be on the tape even where no other input is. They return no gradient for it.
    pub fn anchor(&self) -> &Var {
        &self.params.anchor
    }

    /// The value in `dtype` on the tape, as a tensor of its own: its backward adds the gradient of this use to
    /// [`Param::grad`]. For layers without an op that does so itself.
    ///
    /// A frozen parameter, or one inside [`no_grad`], comes without a tape, and for f32 without a copy.
    pub fn leaf(&self, dtype: DType) -> Result<Tensor> {
        match self.begin_use() {
            None => self.compute(dtype),
            Some(using) => self.anchor().apply_op1(Leaf { using, dtype }),
        }
    }
}

/// The identity on a parameter. Its input is the anchor, which takes no gradient.
struct Leaf {
    using: Use,
    dtype: DType,
}

impl Leaf {
    fn value(&self) -> Result<(Storage, Shape)> {
        let value = self.using.param().compute(self.dtype)?;
        let storage = for_float_type!(self.dtype, "a parameter", T => {
            Ok(Fresh::<T>::copy_of(&value)?.into_storage())
        })?;
        Ok((storage, value.shape().clone()))
    }
}

impl CustomOp1 for Leaf {
    fn name(&self) -> &'static str {
        "parameter"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.value()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            (other, _) => Err(elsewhere(&other)),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _: &candle_core::CudaStorage, _: &Layout) -> Result<(candle_core::CudaStorage, Shape)> {
        match self.value()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            (other, _) => Err(elsewhere(&other)),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.using.param().add_grad(gradient)?;
        self.using.finish()?;
        Ok(None)
    }
}

fn elsewhere(storage: &Storage) -> candle_core::Error {
    candle_core::Error::Msg(format!("a parameter lies on {:?}, its anchor elsewhere", storage.device().location()))
}
