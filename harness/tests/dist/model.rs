//! A small model for data-parallel training, with a parameter that is used twice, a frozen one, and one that no loss
//! depends on; and its training on one rank.

use candle_core::{Device, Result, Tensor};
use tilewright_harness::ops::{cross_entropy, linear, memory, rms_norm, silu};
use tilewright_harness::optim::{AdamW, AdamWOptions, ComputeWeights, ParamGroup};
use tilewright_harness::params::{Init, ParamSpec, Params};

pub const D_IN: usize = 24;
const D_HIDDEN: usize = 40;
const CLASSES: usize = 10;
/// Rows of the whole batch; a multiple of 1, 2, 3 and 4.
pub const BATCH: usize = 24;

/// [`params_on`] the CPU.
pub fn params(seed: u64) -> Params {
    params_on(&Device::Cpu, seed)
}

/// Initialized parameters; different seeds per rank show that all ranks get rank 0's.
pub fn params_on(device: &Device, seed: u64) -> Params {
    let frozen = ParamSpec { frozen: true, ..ParamSpec::matrix("frozen", &[D_HIDDEN, D_HIDDEN], 0.2) };
    let specs = vec![
        ParamSpec::matrix("in", &[D_HIDDEN, D_IN], 0.3),
        frozen,
        ParamSpec::matrix("shared", &[D_HIDDEN, D_HIDDEN], 0.2),
        ParamSpec::vector("norm", D_HIDDEN, Init::Ones),
        ParamSpec::matrix("unused", &[7, 5], 0.3),
        ParamSpec::matrix("out", &[CLASSES, D_HIDDEN], 0.3),
    ];
    Params::new(specs, device, seed).unwrap()
}

/// Mean loss of some rows of the step's batch.
pub fn loss(params: &Params, step: usize, rows: std::ops::Range<usize>) -> Result<Tensor> {
    let number = |i: usize, salt: u64| {
        let mixed = (i as u64 + salt * 1_000_003 + step as u64 * 7_919 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 11
    };
    let unit = |n: u64| n as f64 / (1u64 << 53) as f64;
    let input = |i: usize| 2.0 * unit(number(i, 1)) as f32 - 1.0;
    let values: Vec<f32> = (rows.start * D_IN..rows.end * D_IN).map(input).collect();
    // Matmuls compute gradients in their dtype.
    let x = Tensor::from_vec(values, (rows.len(), D_IN), params.device())?.to_dtype(params.grads().dtype())?;
    let targets: Vec<u32> = rows.clone().map(|i| (number(i, 2) % CLASSES as u64) as u32).collect();
    let targets = Tensor::from_vec(targets, rows.len(), params.device())?;
    let param = |name: &str| params.get(name);
    let x = linear(&x, &param("in")?)?;
    let x = linear(&silu(&x)?, &param("shared")?)?;
    let x = linear(&x, &param("frozen")?)?;
    let x = linear(&silu(&x)?, &param("shared")?)?;
    let x = rms_norm(&x, &param("norm")?, 1e-5)?;
    cross_entropy(&linear(&x, &param("out")?)?, &targets)
}

/// Parameter groups: no decay for the norm; the frozen parameter is in no group.
pub fn groups(params: &Params) -> Vec<ParamGroup> {
    let trained = params.iter().filter(|param| param.requires_grad());
    let group = |param: tilewright_harness::params::Param| ParamGroup {
        range: param.range(),
        weight_decay: if param.decay() { 0.1 } else { 0.0 },
        lr_scale: 1.0,
    };
    trained.map(group).collect()
}

pub const OPTIONS: AdamWOptions = AdamWOptions { beta1: 0.9, beta2: 0.95, eps: 1e-4 };
pub const RATE: f64 = 1e-2;

/// An optimizer of all parameters.
pub fn adamw(params: &Params) -> AdamW {
    let device = memory::kernel_device(params.device()).unwrap();
    AdamW::new(device, 0..params.flat_len(), OPTIONS).unwrap()
}

/// A step of `adamw` with the current gradients.
pub fn update(params: &Params, adamw: &mut AdamW) {
    let gradients = params.grads();
    let gradients = memory::Read::<f32>::new(&gradients).unwrap();
    memory::write::<f32, _>(params.values(), |_, values| {
        adamw
            .step(values, gradients.view()?, ComputeWeights::None, &groups(params), RATE, 1.0)
            .map_err(memory::kernel_error)
    })
    .unwrap();
}

/// All values, including padding.
pub fn values(params: &Params) -> Vec<f32> {
    params.values().to_vec1().unwrap()
}

/// [`alone_on`] the CPU.
pub fn alone(steps: usize) -> Vec<Vec<f32>> {
    alone_on(&Device::Cpu, steps)
}

/// Training in one process on whole batches: the values after each step.
pub fn alone_on(device: &Device, steps: usize) -> Vec<Vec<f32>> {
    let params = params_on(device, 1);
    let mut adamw = adamw(&params);
    let step = |step| {
        params.zero_grads().unwrap();
        loss(&params, step, 0..BATCH).unwrap().backward().unwrap();
        update(&params, &mut adamw);
        values(&params)
    };
    (0..steps).map(step).collect()
}

/// ‖a − b‖ / ‖b‖ in f64.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    (difference / b.iter().map(|&b| square(b.into())).sum::<f64>()).sqrt()
}
