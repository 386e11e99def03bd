//! Differentiates an op on candle's tensors. The test only compiles it.

use candle_core::{DType, Device, Var};
use tilewright_candle::rms_norm;

fn main() -> candle_core::Result<()> {
    let x = Var::randn(0f32, 1f32, (4, 64), &Device::Cpu)?;
    let weight = Var::ones(64, DType::F32, &Device::Cpu)?;
    let grads = rms_norm(&x, &weight, 1e-5)?.sqr()?.mean_all()?.backward()?;
    println!("{:?}", grads.get(&weight).map(|grad| grad.dims().to_vec()));
    Ok(())
}
