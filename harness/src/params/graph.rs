//! Connects parameters to the autograd graph: counted uses, and leaves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, Var};
use tilewright_candle::memory::{OutputAlloc, for_float_type};
use tilewright_candle::{GradSink, Weight, grad_enabled};

use super::{Callback, Param, ParamId};

/// One use of a parameter by an op that ran forward. The op accumulates its contribution to the gradient when it runs
/// backward, then calls [`ParamUse::finish`]. Dropping an unfinished use, for example at the end of an evaluation,
/// cancels it.
pub struct ParamUse {
    param: Param,
    finished: AtomicBool,
}

impl ParamUse {
    /// The parameter.
    pub fn param(&self) -> &Param {
        &self.param
    }

    /// Marks the contribution of this use as accumulated. The last use of a pass runs the callbacks of
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
        // Call clones of the list, because a callback may add or remove callbacks.
        let callbacks: Vec<Callback> = {
            let callbacks = self.param.params.callbacks.read().unwrap_or_else(PoisonError::into_inner);
            callbacks.iter().map(|(_, callback)| callback.clone()).collect()
        };
        callbacks.iter().try_for_each(|callback| callback(self.param.id()))
    }
}

impl Drop for ParamUse {
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

    /// Counts a use that will contribute to the gradient; `None` for a frozen parameter or inside [`no_grad`](super::no_grad).
    pub fn begin_use(&self) -> Option<ParamUse> {
        if !self.requires_grad() || !grad_enabled() {
            return None;
        }
        self.pending().fetch_add(1, Ordering::AcqRel);
        Some(ParamUse { param: self.clone(), finished: AtomicBool::new(false) })
    }

    /// A tracked variable that an op takes as an input if none of its other inputs is tracked, so that candle records
    /// the op. Ops return no gradient for it.
    pub fn anchor(&self) -> &Var {
        &self.params.anchor
    }

    /// Returns the value in `dtype` as a tensor of the autograd graph. Its backward accumulates the gradient of this
    /// use into [`Param::grad`]. For layers whose ops do not write the gradient themselves.
    ///
    /// For a frozen parameter, and inside [`no_grad`](super::no_grad), the result is not recorded, and in f32 it is a view.
    pub fn leaf(&self, dtype: DType) -> Result<Tensor> {
        match self.begin_use() {
            None => self.compute(dtype),
            Some(param_use) => self.anchor().apply_op1(Leaf { param_use, dtype }),
        }
    }
}

impl Weight for Param {
    fn name(&self) -> Option<&str> {
        Some(Param::name(self))
    }

    fn dims(&self) -> &[usize] {
        self.shape()
    }

    fn value(&self, dtype: DType) -> Result<Tensor> {
        self.compute(dtype)
    }

    fn graph_input(&self) -> &Tensor {
        if self.requires_grad() { self.anchor() } else { &self.params.values }
    }

    fn begin_use(&self) -> Option<Arc<dyn GradSink>> {
        Some(Arc::new(Param::begin_use(self)?))
    }
}

impl GradSink for ParamUse {
    fn grad_to_write(&self) -> Result<(Tensor, bool)> {
        self.param.grad_to_write()
    }

    fn add_grad(&self, gradient: &Tensor) -> Result<()> {
        self.param.add_grad(gradient)
    }

    fn finish(&self) -> Result<()> {
        ParamUse::finish(self)
    }
}

/// The identity on a parameter. Its input is the anchor, which gets no gradient.
struct Leaf {
    param_use: ParamUse,
    dtype: DType,
}

impl Leaf {
    fn value(&self) -> Result<(Storage, Shape)> {
        let value = self.param_use.param().compute(self.dtype)?;
        let storage = for_float_type!(self.dtype, "a parameter", T => {
            Ok(OutputAlloc::<T>::copy_of(&value)?.into_storage())
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
            (other, _) => Err(device_mismatch(&other)),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _: &candle_core::CudaStorage, _: &Layout) -> Result<(candle_core::CudaStorage, Shape)> {
        match self.value()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            (other, _) => Err(device_mismatch(&other)),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.param_use.param().add_grad(gradient)?;
        self.param_use.finish()?;
        Ok(None)
    }
}

fn device_mismatch(storage: &Storage) -> candle_core::Error {
    candle_core::Error::Msg(format!(
        "a parameter is on {:?}, and its anchor on another device",
        storage.device().location()
    ))
}
