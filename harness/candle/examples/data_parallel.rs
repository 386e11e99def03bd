//! Trains a linear model on any number of processes, each with a part of every batch: all take the steps of one
//! process with the whole batch.
//!
//! ```sh
//! cargo build -p tilewright-candle --features dist --example data_parallel
//! tilewright launch --nproc 2 -- target/debug/examples/data_parallel    # or torchrun, mpirun, srun
//! target/debug/examples/data_parallel                                   # one process
//! ```
//!
//! Built with `--features cuda,nccl`, each process has a GPU of its own where there are any, and gradients go over NCCL.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use tilewright_candle::FusedAdamW;
use tilewright_candle::dist::ddp::DdpOptions;
use tilewright_candle::dist::rank::Environment;
use tilewright_candle::dist::{self, DistributedDataParallel};

/// Sequences in a batch, which the number of processes divides.
const BATCH: usize = 12;

/// The inputs of a step [BATCH, 4], and what the model should answer: the sum of each row.
fn batch(step: usize, device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
    let values: Vec<f32> = (0..BATCH * 4).map(|i| ((i * i * 7 + step * 13) as f32).sin()).collect();
    let x = Tensor::from_vec(values, (BATCH, 4), device)?;
    Ok((x.clone(), x.sum_keepdim(1)?))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let environment = Environment::get()?;
    let device = match &environment.rank_info {
        Some(info) if cfg!(feature = "nccl") => Device::cuda_if_available(info.local_rank)?,
        _ => Device::Cpu,
    };
    let comm = Arc::new(dist::connect_for(&environment, &device)?);
    let (rank, world) = (comm.rank(), comm.world());
    if !BATCH.is_multiple_of(world) {
        return Err(format!("expected a number of processes that divides {BATCH}, found {world}").into());
    }
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let model = candle_nn::linear(4, 1, builder)?;
    let ddp = DistributedDataParallel::new(&variables, comm.clone(), DdpOptions::default())?;
    let mut optimizer =
        FusedAdamW::from_var_map(&variables, ParamsAdamW { lr: 0.05, weight_decay: 0.0, ..Default::default() })?;
    let own = BATCH / world;
    for step in 0..200 {
        let (x, target) = batch(step, &device)?;
        let (x, target) = (x.narrow(0, rank * own, own)?, target.narrow(0, rank * own, own)?);
        let loss = (model.forward(&x)? - target)?.sqr()?.mean_all()?;
        optimizer.step(&ddp.backward(&loss)?)?;
    }
    let weights = model.weight().flatten_all()?.to_vec1::<f32>()?;
    if rank == 0 {
        println!("{world} processes, {:?}: weights {weights:.4?}", device.location());
    }
    // The model is the sum.
    if weights.iter().any(|w| (w - 1.0).abs() > 0.02) {
        return Err(format!("the weights are {weights:?}, expected 1").into());
    }
    Ok(())
}
