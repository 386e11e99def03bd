//! Records ops in candle's autograd graph.
//!
//! Ops compute first, into their own memory, and are recorded afterwards: [`record1`], [`record2`] and [`record3`] turn
//! the result into a tensor whose backward is a closure. The closure owns what backward needs besides inputs and
//! result, such as the log-sum-exp of an attention. This way an op may have several internal results and any number of
//! parameters, and the same code serves every device.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor};
use tilewright::trace::span;

use crate::check::bad_argument;
use crate::memory::{Elem, OutputAlloc};

thread_local! {
    static GRAD_DISABLED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` without recording ops of this crate for backward: for evaluation and generation, which then keep no
/// activations.
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

/// Whether this thread records ops for backward: false inside [`no_grad`].
pub fn grad_enabled() -> bool {
    !GRAD_DISABLED.get()
}

/// Computes the gradients of the inputs from the inputs, the result and its gradient, which is contiguous. `None` for
/// an input without a gradient.
pub trait Backward<const N: usize>: Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]> {}
impl<const N: usize, F: Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]>> Backward<N> for F {}

/// Turns the result of an op of one input into a tensor, which is recorded if the input is tracked.
///
/// # Errors
/// The shape has another number of elements than the result.
pub fn record1<T: Elem>(
    name: &'static str,
    x: &Tensor,
    result: OutputAlloc<T>,
    shape: impl Into<Shape>,
    backward: impl Backward<1> + Send + Sync + 'static,
) -> Result<Tensor> {
    record1_any(name, x, AnyOutput::new(name, result, shape.into())?, backward)
}

/// As [`record1`], for two inputs: recorded if one of them is tracked.
pub fn record2<T: Elem>(
    name: &'static str,
    inputs: [&Tensor; 2],
    result: OutputAlloc<T>,
    shape: impl Into<Shape>,
    backward: impl Backward<2> + Send + Sync + 'static,
) -> Result<Tensor> {
    record2_any(name, inputs, AnyOutput::new(name, result, shape.into())?, backward)
}

/// As [`record1`], for three inputs: recorded if one of them is tracked.
pub fn record3<T: Elem>(
    name: &'static str,
    inputs: [&Tensor; 3],
    result: OutputAlloc<T>,
    shape: impl Into<Shape>,
    backward: impl Backward<3> + Send + Sync + 'static,
) -> Result<Tensor> {
    record3_any(name, inputs, AnyOutput::new(name, result, shape.into())?, backward)
}

/// The result of an op, of any element type.
pub(crate) struct AnyOutput {
    storage: Storage,
    shape: Shape,
}

impl AnyOutput {
    /// # Errors
    /// The shape has another number of elements than the memory.
    pub fn new<T: Elem>(name: &str, result: OutputAlloc<T>, shape: Shape) -> Result<AnyOutput> {
        if result.len() == shape.elem_count() {
            return Ok(AnyOutput { storage: result.into_storage(), shape });
        }
        let found = format!("memory of {} elements", result.len());
        Err(bad_argument(name, "an output", format!("the shape {:?}", shape.dims()), found))
    }

    pub fn into_tensor(self) -> Tensor {
        Tensor::from_storage(self.storage, self.shape, BackpropOp::none(), false)
    }
}

pub(crate) fn record1_any(
    name: &'static str,
    x: &Tensor,
    result: AnyOutput,
    backward: impl Backward<1> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !(grad_enabled() && x.track_op()) {
        return Ok(result.into_tensor());
    }
    x.apply_op1(Op::new(name, result, backward))
}

pub(crate) fn record2_any(
    name: &'static str,
    [a, b]: [&Tensor; 2],
    result: AnyOutput,
    backward: impl Backward<2> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !(grad_enabled() && (a.track_op() || b.track_op())) {
        return Ok(result.into_tensor());
    }
    a.apply_op2(b, Op::new(name, result, backward))
}

pub(crate) fn record3_any(
    name: &'static str,
    [a, b, c]: [&Tensor; 3],
    result: AnyOutput,
    backward: impl Backward<3> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !(grad_enabled() && (a.track_op() || b.track_op() || c.track_op())) {
        return Ok(result.into_tensor());
    }
    a.apply_op3(b, c, Op::new(name, result, backward))
}

/// Turns memory into a tensor that keeps `value` alive: candle holds it as long as the tensor, or a sum that it is an
/// operand of. `x` is tracked.
pub(crate) fn keep_alive<V: Send + Sync + 'static>(x: &Tensor, memory: AnyOutput, value: Arc<V>) -> Result<Tensor> {
    x.apply_op1(Op::new("keep_alive", memory, move |_: [&Tensor; 1], _: &Tensor, _: &Tensor| {
        let _ = &value;
        Ok([None])
    }))
}

struct Op<B> {
    name: &'static str,
    shape: Shape,
    /// Taken when candle asks for the result, which happens once.
    result: Mutex<Option<Storage>>,
    backward: B,
}

impl<B> Op<B> {
    fn new(name: &'static str, result: AnyOutput, backward: B) -> Op<B> {
        Op { name, shape: result.shape, result: Mutex::new(Some(result.storage)), backward }
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
///
/// # Errors
/// A gradient of another shape or dtype than its input.
fn tracked_gradients<const N: usize>(
    name: &str,
    inputs: [&Tensor; N],
    mut gradients: [Option<Tensor>; N],
) -> Result<[Option<Tensor>; N]> {
    for (i, (input, slot)) in inputs.iter().zip(&mut gradients).enumerate() {
        if !input.track_op() {
            *slot = None;
        }
        let Some(gradient) = slot else { continue };
        if gradient.dims() != input.dims() || gradient.dtype() != input.dtype() {
            let say = |tensor: &Tensor| format!("{:?} of {}", tensor.dims(), tensor.dtype().as_str());
            let expected = format!("{}, as the input,", say(input));
            return Err(bad_argument(name, &format!("the gradient of input {i}"), expected, say(gradient)));
        }
    }
    Ok(gradients)
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
                let $gradients = (self.backward)(inputs, result, &gradient.contiguous()?)?;
                let $gradients = tracked_gradients(self.name, inputs, $gradients)?;
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
