//! Command-line arguments for the model and its device, shared by `train`, `generate` and the model benchmarks.

use candle_core::DType;
use clap::Args;
use tilewright::DeviceInfo;
use tilewright::env::{DeviceChoice, Env};

use super::device::DeviceArg;
use super::{CliError, Result};
use crate::model::{Attention, Config, Fusion, Norm, Precision};

/// Hyperparameters of a model. What is not given comes from `--size`, the checkpoint or the default.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Model")]
pub struct ModelOptions {
    /// Named model size: small, medium, large, xl or 2.7B. Default: a model that trains on a CPU in minutes
    #[arg(long)]
    pub size: Option<String>,
    /// Number of Transformer blocks
    #[arg(long)]
    pub layers: Option<usize>,
    /// Model dimension d_model: elements of the residual stream
    #[arg(long, alias = "width")]
    pub d_model: Option<usize>,
    /// Feed-forward dimension d_ff: elements inside a feed-forward layer
    #[arg(long, alias = "hidden")]
    pub d_ff: Option<usize>,
    #[arg(long)]
    pub heads: Option<usize>,
    /// Number of key/value heads (grouped-query attention), a divisor of --heads
    #[arg(long, value_name = "HEADS")]
    pub heads_kv: Option<usize>,
    /// Normalization: rms or layer
    #[arg(long)]
    pub norm: Option<Norm>,
    /// Attention implementation: naive, tiled or flash
    #[arg(long)]
    pub attention: Option<Attention>,
    /// Model parts, apart from attention, that Tilewright kernels compute: none, ops (one kernel per op) or blocks
    /// (fused blocks)
    #[arg(long)]
    pub fusion: Option<Fusion>,
    /// Precision of matmuls: f32, tf32x3 (three tf32 products, nearly as accurate as f32), tf32, bf16 or f16
    #[arg(long)]
    pub precision: Option<Precision>,
    /// Tie the embedding and the output head
    #[arg(long)]
    pub tied: bool,
    /// Activation checkpointing: keep only the inputs of blocks, and recompute the rest in the backward pass
    #[arg(long)]
    pub recompute: bool,
}

impl ModelOptions {
    /// Returns the default vocabulary size: 10000 for the named sizes, 1024 for the small model.
    pub fn default_vocabulary(&self) -> usize {
        if self.size.is_some() { 10_000 } else { 1024 }
    }

    /// Returns `base`, or the named size, with the given options applied.
    ///
    /// # Errors
    /// An unknown size, or hyperparameters that contradict each other.
    pub fn config(&self, base: Config) -> Result<Config> {
        let usage = |error: candle_core::Error| CliError::Usage(error.to_string());
        let mut config = match &self.size {
            None => base,
            Some(size) => {
                let named = Config::named(size, base.context).map_err(usage)?;
                Config { vocabulary: base.vocabulary, ..named }
            }
        };
        let set = |to: &mut usize, value: Option<usize>| *to = value.unwrap_or(*to);
        set(&mut config.layers, self.layers);
        set(&mut config.d_model, self.d_model);
        set(&mut config.d_ff, self.d_ff);
        if let Some(heads) = self.heads {
            (config.heads, config.heads_kv) = (heads, heads);
        }
        set(&mut config.heads_kv, self.heads_kv);
        config.norm = self.norm.unwrap_or(config.norm);
        config.attention = self.attention.unwrap_or(config.attention);
        // Fused blocks need flash attention: another attention without --fusion selects the ops.
        if config.attention != Attention::Flash && config.fusion == Fusion::Blocks {
            config.fusion = Fusion::Ops;
        }
        config.fusion = self.fusion.unwrap_or(config.fusion);
        config.precision = self.precision.unwrap_or(config.precision);
        config.tied |= self.tied;
        config.checkpoint |= self.recompute;
        config.check().map_err(usage)?;
        Ok(config)
    }
}

/// Opens the device for models: `choice`, else `TILEWRIGHT_DEVICE`, else a GPU if this build and this machine have one,
/// else the CPU.
///
/// # Errors
/// A GPU was requested, and this build or this machine has none.
pub fn model_device(choice: Option<DeviceArg>) -> Result<candle_core::Device> {
    // Tokenizers and the initialization of weights use the thread pool on every device.
    tilewright::pool::start();
    let choice = match (choice, Env::get()?.device) {
        (Some(choice), _) => Some(choice),
        (None, Some(DeviceChoice::Cpu)) => Some(DeviceArg::Cpu),
        (None, Some(DeviceChoice::Cuda(ordinal))) => Some(DeviceArg::Cuda(ordinal)),
        (None, None) => None,
    };
    match choice {
        Some(DeviceArg::Cpu) => Ok(candle_core::Device::Cpu),
        Some(DeviceArg::Cuda(ordinal)) => cuda(ordinal),
        // Each rank of a host has its own GPU.
        None => Ok(cuda(super::ranks::local_rank().unwrap_or(0)).unwrap_or(candle_core::Device::Cpu)),
    }
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: usize) -> Result<candle_core::Device> {
    // Fails with our own error before candle, which panics without a driver.
    tilewright::Device::cuda(ordinal)?;
    tilewright_candle::memory::open_cuda(ordinal).map_err(|error| CliError::Failure(error.to_string()))
}

#[cfg(not(feature = "cuda"))]
fn cuda(ordinal: usize) -> Result<candle_core::Device> {
    Err(CliError::Failure(format!(
        "GPU {ordinal} was requested, but this build of tilewright runs models on the CPU only\n  help: build it with \
        `--features tilewright-harness/cuda` (`make cuda-setup` installs what that needs), or use --device cpu"
    )))
}

/// Returns the name and properties of the device.
pub fn device_info(device: &candle_core::Device) -> Result<DeviceInfo> {
    let device =
        tilewright_candle::memory::kernel_device(device).map_err(|error| CliError::Failure(error.to_string()))?;
    Ok(device.info().clone())
}

/// Returns the peak rate of the device for the model's matmuls, in FLOP/s.
pub fn peak_flops(device: &candle_core::Device, precision: Precision) -> Result<f64> {
    let info = device_info(device)?;
    let name = (!device.is_cpu()).then_some(info.name.as_str());
    let dtype = match precision {
        Precision::F32 | Precision::Tf32x3 | Precision::Tf32 => DType::F32,
        Precision::Bf16 | Precision::F16 => precision.dtype(),
    };
    crate::train::peak_flops(device, name, dtype).map_err(|error| CliError::Failure(error.to_string()))
}
