//! Records ops in candle's autograd graph.
//!
//! Ops compute first, into their own memory, and are recorded afterwards: [`record1`], [`record2`] and [`record3`] turn
//! the result into a tensor whose backward is a closure. The closure owns what backward needs besides inputs and
//! result, such as the log-sum-exp of an attention. This way an op may have several internal results and any number of
//! parameters, and the same code serves every device.

use std::sync::{Mutex, PoisonError};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor};

use super::memory::{Elem, OutputAlloc};
use crate::params::grad_enabled;
use crate::profile::span;

/// Computes the gradients of the inputs from the inputs, the result and its gradient, which is contiguous. `None` for
/// an input without a gradient.
pub trait Backward<const N: usize>: Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]> {}
impl<const N: usize, F: Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]>> Backward<N> for F {}

/// Turns the result of an op of one input into a tensor, which is recorded if the input is tracked.
pub fn record1<T: Elem>(
    name: &'static str,
    x: &Tensor,
    result: OutputAlloc<T>,
    shape: impl Into<Shape>,
    backward: impl Backward<1> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !(grad_enabled() && x.track_op()) {
        return Ok(result.into_tensor(shape));
    }
    x.apply_op1(Op::new(name, result, shape.into(), backward))
}

/// As [`record1`], for two inputs: recorded if one of them is tracked.
pub fn record2<T: Elem>(
    name: &'static str,
    [a, b]: [&Tensor; 2],
    result: OutputAlloc<T>,
    shape: impl Into<Shape>,
    backward: impl Backward<2> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !(grad_enabled() && (a.track_op() || b.track_op())) {
        return Ok(result.into_tensor(shape));
    }
    a.apply_op2(b, Op::new(name, result, shape.into(), backward))
}

/// As [`record1`], for three inputs: recorded if one of them is tracked.
pub fn record3<T: Elem>(
    name: &'static str,
    [a, b, c]: [&Tensor; 3],
    result: OutputAlloc<T>,
    shape: impl Into<Shape>,
    backward: impl Backward<3> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !(grad_enabled() && (a.track_op() || b.track_op() || c.track_op())) {
        return Ok(result.into_tensor(shape));
    }
    a.apply_op3(b, c, Op::new(name, result, shape.into(), backward))
}

struct Op<B> {
    name: &'static str,
    shape: Shape,
    /// Taken when candle asks for the result, which happens once.
    result: Mutex<Option<Storage>>,
    backward: B,
}

impl<B> Op<B> {
    fn new<T: Elem>(name: &'static str, result: OutputAlloc<T>, shape: Shape, backward: B) -> Op<B> {
        Op { name, shape, result: Mutex::new(Some(result.into_storage())), backward }
    }

    fn take(&self) -> Result<Storage> {
        let storage = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        storage.ok_or_else(|| {
            candle_core::Error::Msg(format!("internal error: the op {} was applied twice, please report", self.name))
        })
    }

    fn take_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.take()? {
            Storage::Cpu(storage) => Ok((storage, self.shape.clone())),
            other => Err(self.device_mismatch(&other)),
        }
    }

    #[cfg(feature = "cuda")]
    fn take_cuda(&self) -> Result<(candle_core::CudaStorage, Shape)> {
        match self.take()? {
            Storage::Cuda(storage) => Ok((storage, self.shape.clone())),
            other => Err(self.device_mismatch(&other)),
        }
    }

    fn device_mismatch(&self, storage: &Storage) -> candle_core::Error {
        let message = format!(
            "the result of {} is on {:?}, and its input on another device",
            self.name,
            storage.device().location()
        );
        candle_core::Error::Msg(message)
    }
}

/// Drops the gradients of inputs that are not tracked.
fn tracked_gradients<const N: usize>(inputs: [&Tensor; N], gradients: [Option<Tensor>; N]) -> [Option<Tensor>; N] {
    let mut tracked = inputs.iter().map(|input| input.track_op());
    gradients.map(|gradient| gradient.filter(|_| tracked.next().unwrap_or(false)))
}

macro_rules! custom_op {
    ($trait:ident, $n:literal, ($($input:ident),*), ($($layout:ident),*), $returned:ty, |$gradients:ident| $give:expr) => {
        impl<B: Backward<$n> + Send + Sync> $trait for Op<B> {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(&self, $($input: &CpuStorage, $layout: &Layout),*) -> Result<(CpuStorage, Shape)> {
                let _ = ($($input, $layout),*);
                self.take_cpu()
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(
                &self,
                $($input: &candle_core::CudaStorage, $layout: &Layout),*
            ) -> Result<(candle_core::CudaStorage, Shape)> {
                let _ = ($($input, $layout),*);
                self.take_cuda()
            }

            fn bwd(&self, $($input: &Tensor),*, result: &Tensor, gradient: &Tensor) -> Result<$returned> {
                let _span = span(self.name);
                let inputs = [$($input),*];
                let $gradients = tracked_gradients(inputs, (self.backward)(inputs, result, &gradient.contiguous()?)?);
                Ok($give)
            }
        }
    };
}
custom_op!(CustomOp1, 1, (a), (la), Option<Tensor>, |gradients| {
    let [a] = gradients;
    a
});
custom_op!(CustomOp2, 2, (a, b), (la, lb), (Option<Tensor>, Option<Tensor>), |gradients| gradients.into());
custom_op!(CustomOp3, 3, (a, b, c), (la, lb, lc), (Option<Tensor>, Option<Tensor>, Option<Tensor>), |gradients| {
    gradients.into()
});

/// Wraps storage as a tensor outside of the autograd graph.
pub fn untracked(storage: Storage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}
