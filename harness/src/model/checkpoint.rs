//! Activation checkpointing: blocks save only their input and recompute the rest in the backward pass (Chen et al.,
//! "Training deep nets with sublinear memory cost", 2016).

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, Var};
use tilewright_candle::graph::{record1, record2};
use tilewright_candle::memory::{OutputAlloc, for_float_type};

use super::Block;
use crate::params::{ParamUse, no_grad};

/// Runs the block, and saves nothing but its input and the block itself.
pub(super) fn apply(block: &Arc<Block>, x: &Tensor) -> Result<Tensor> {
    // These uses begin before those of the recomputation, so that a gradient is complete only when these finish.
    let uses: Vec<ParamUse> = block.params().filter_map(|param| param.begin_use()).collect();
    let input = x.detach();
    let y = no_grad(|| block.forward(&input))?;
    let anchor = block.qkv.anchor().as_tensor();
    let kept = block.clone();
    for_float_type!(x.dtype(), "a block", T => {
        record2("checkpoint", [x, anchor], OutputAlloc::<T>::copy_of(&y)?, y.shape(), move |[x, _], _, grad| {
            let input = Var::from_tensor(&x.detach())?;
            let y = kept.forward(&input)?;
            let mut grads = seed(&y, grad)?.backward()?;
            for param_use in &uses {
                param_use.finish()?;
            }
            Ok([grads.remove(&input), None])
        })
    })
}

/// A scalar of the autograd graph whose backward gives y the gradient `grad`.
fn seed(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let grad = grad.clone();
    let number = OutputAlloc::<f32>::copy_of(&Tensor::zeros((), DType::F32, y.device())?)?;
    record1("gradient", y, number, (), move |_, _, _| Ok([Some(grad.clone())]))
}
