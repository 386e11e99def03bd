//! A kernel of your own as a differentiable op: y = max(x, 0)² (So et al., "Primer", 2021), in a model that is trained.
//!
//! Run: `cargo run -p tilewright-candle --example custom_op`

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use tilewright::prelude::*;
use tilewright_candle::custom::{Output, custom_op};
use tilewright_candle::memory::{OutputAlloc, Read, kernel_error};
use tilewright_candle::{FusedAdamW, nn};

/// Elements per program.
const TILE: usize = 1024;

/// y = max(x, 0)².
#[kernel]
fn relu_squared(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let at = program_id(0) * tile + arange(0, tile);
    let positive = maximum(load(x + at, mask = at < n), 0.0);
    store(y + at, positive * positive, mask = at < n);
}

/// grad_x = 2 · max(x, 0) · grad_y.
#[kernel]
fn relu_squared_bwd(x: In<f32>, grad_y: In<f32>, grad_x: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let at = program_id(0) * tile + arange(0, tile);
    let positive = maximum(load(x + at, mask = at < n), 0.0);
    store(grad_x + at, positive * load(grad_y + at, mask = at < n) * 2.0, mask = at < n);
}

/// The op. It reads x as a slice, so a tensor with strides is copied first, by an op of candle that has a gradient.
fn relu_squared_op(x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let n = x.elem_count();
    let forward = |inputs: &[&Tensor]| {
        let mut y = OutputAlloc::<f32>::new(inputs[0].device(), n)?;
        let x = Read::<f32>::new(inputs[0])?;
        ReluSquared { x: &x.view()?, y: &mut y.view()?, n: n as i32, tile: TILE }
            .launch(x.device(), n.div_ceil(TILE))
            .map_err(kernel_error)?;
        // x is an input, which backward gets anyway: nothing else is saved.
        Ok((vec![Output::new(y, inputs[0].shape())?], ()))
    };
    let outputs = custom_op("relu_squared", &[&x], forward, move |pass| {
        let mut grad_x = OutputAlloc::<f32>::new(pass.inputs[0].device(), n)?;
        let (x, grad_y) = (Read::<f32>::new(&pass.inputs[0])?, Read::<f32>::new(&pass.grads[0])?);
        ReluSquaredBwd { x: &x.view()?, grad_y: &grad_y.view()?, grad_x: &mut grad_x.view()?, n: n as i32, tile: TILE }
            .launch(x.device(), n.div_ceil(TILE))
            .map_err(kernel_error)?;
        Ok(vec![Some(grad_x.into_tensor(pass.inputs[0].shape()))])
    })?;
    Ok(outputs[0].clone())
}

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    // The gradient, against that of the same formula in candle's ops.
    let x = candle_core::Var::randn(0_f32, 1.0, (7, 300), &device)?;
    let found = relu_squared_op(&x.t()?)?.sum_all()?.backward()?;
    let expected = x.relu()?.sqr()?.sum_all()?.backward()?;
    let gradient = |grads: &candle_core::backprop::GradStore| {
        grads.get(&x).cloned().ok_or_else(|| candle_core::Error::Msg("no gradient of x".into()))
    };
    let difference = (gradient(&found)? - gradient(&expected)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
    println!("largest difference of gradients: {difference:e}");
    assert!(difference < 1e-6);

    // A network with the op learns y = x₁ · x₂.
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let (first, second) = (nn::linear(2, 64, vb.pp("first"))?, nn::linear(64, 1, vb.pp("second"))?);
    let mut optimizer = FusedAdamW::from_var_map(&variables, ParamsAdamW { lr: 1e-2, ..Default::default() })?;
    let inputs = Tensor::rand(-1_f32, 1.0, (512, 2), &device)?;
    let targets = (inputs.narrow(1, 0, 1)? * inputs.narrow(1, 1, 1)?)?;
    let (mut before, mut after) = (0.0, 0.0);
    for step in 0..200 {
        let y = second.forward(&relu_squared_op(&first.forward(&inputs)?)?)?;
        let loss = (y - &targets)?.sqr()?.mean_all()?;
        optimizer.backward_step(&loss)?;
        after = loss.to_scalar::<f32>()?;
        if step == 0 {
            before = after;
        }
    }
    println!("loss before and after 200 steps: {before:.4}, {after:.6}");
    assert!(after < before / 50.0);
    Ok(())
}
