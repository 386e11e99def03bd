//! Arguments that say which model, and on which device: what `train`, `generate` and the benchmarks of models share.

use candle_core::DType;
use clap::Args;
use tilewright::DeviceInfo;
use tilewright::env::{DeviceChoice, Env};

use super::run::Choice;
use super::{CliError, Result};
use crate::model::{Attention, Config, Fusion, Norm, Precision};

/// What a model is made of. What is not said is as the size, the checkpoint or the default has it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Model")]
pub struct ModelOptions {
    /// A size of the assignment: small, medium, large, xl or 2.7B; without it, a model that trains on a CPU in minutes
    #[arg(long)]
    pub size: Option<String>,
    /// Number of blocks
    #[arg(long)]
    pub layers: Option<usize>,
    /// Elements of the residual stream
    #[arg(long)]
    pub width: Option<usize>,
    /// Elements inside a feed-forward layer
    #[arg(long)]
    pub hidden: Option<usize>,
    #[arg(long)]
    pub heads: Option<usize>,
    /// Heads of keys and values, a divisor of the heads
    #[arg(long, value_name = "HEADS")]
    pub heads_kv: Option<usize>,
    /// Which norm: rms or layer
    #[arg(long)]
    pub norm: Option<Norm>,
    /// How attention is computed: naive, tiled or flash
    #[arg(long)]
    pub attention: Option<Attention>,
    /// What is computed by kernels of ours: none, ops or blocks
    #[arg(long)]
    pub fusion: Option<Fusion>,
    /// What products are in: f32, tf32x3 (f32 by three products of tf32, about as exact), tf32, bf16 or f16
    #[arg(long)]
    pub precision: Option<Precision>,
    /// Use the embedding as output head
    #[arg(long)]
    pub tied: bool,
    /// Keep only the inputs of blocks, and compute the rest again backward
    #[arg(long)]
    pub recompute: bool,
}

impl ModelOptions {
    /// Entries of a vocabulary of which nothing was said: of the sizes of the assignment, and of the small model.
    pub fn usual_vocabulary(&self) -> usize {
        if self.size.is_some() { 10_000 } else { 1024 }
    }

    /// `base`, or the named size, with everything that was said.
    ///
    /// # Errors
    /// An unknown size, numbers that do not fit together.
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
        set(&mut config.width, self.width);
        set(&mut config.hidden, self.hidden);
        if let Some(heads) = self.heads {
            (config.heads, config.heads_kv) = (heads, heads);
        }
        set(&mut config.heads_kv, self.heads_kv);
        config.norm = self.norm.unwrap_or(config.norm);
        config.attention = self.attention.unwrap_or(config.attention);
        // Whole blocks are for flash attention; whoever asks for another kind and says no more means the ops.
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

/// The device of models that was asked for; without a choice, where `TILEWRIGHT_DEVICE` says, else a GPU if this build and
/// this machine have one.
///
/// # Errors
/// A GPU was asked for, and this build or this machine has none.
pub fn model_device(choice: Option<Choice>) -> Result<candle_core::Device> {
    // Tokenizers and starting values want it, wherever the model is.
    tilewright::pool::start();
    let choice = match (choice, Env::get()?.device) {
        (Some(choice), _) => Some(choice),
        (None, Some(DeviceChoice::Cpu)) => Some(Choice::Cpu),
        (None, Some(DeviceChoice::Cuda(ordinal))) => Some(Choice::Cuda(ordinal)),
        (None, None) => None,
    };
    match choice {
        Some(Choice::Cpu) => Ok(candle_core::Device::Cpu),
        Some(Choice::Cuda(ordinal)) => cuda(ordinal),
        // Ranks of one host have a GPU each.
        None => Ok(cuda(super::ranks::local_rank().unwrap_or(0)).unwrap_or(candle_core::Device::Cpu)),
    }
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: usize) -> Result<candle_core::Device> {
    // Asks in our own words first: candle panics where there is no driver.
    tilewright::Device::cuda(ordinal)?;
    crate::ops::memory::open_cuda(ordinal).map_err(|error| CliError::Failure(error.to_string()))
}

#[cfg(not(feature = "cuda"))]
fn cuda(ordinal: usize) -> Result<candle_core::Device> {
    Err(CliError::Failure(format!(
        "GPU {ordinal} was asked for, and this build of tilewright has models on the CPU only\n  help: build it with \
         `--features tilewright-harness/cuda` (`make cuda-setup` makes what that needs), or use --device cpu"
    )))
}

/// What the device is, for people and for its peak rate.
pub fn device_info(device: &candle_core::Device) -> Result<DeviceInfo> {
    let device = crate::ops::memory::kernel_device(device).map_err(|error| CliError::Failure(error.to_string()))?;
    Ok(device.info().clone())
}

/// The peak rate of the device for the model's products, in FLOP/s.
pub fn peak(device: &candle_core::Device, precision: Precision) -> Result<f64> {
    let info = device_info(device)?;
    let name = (!device.is_cpu()).then_some(info.name.as_str());
    let dtype = match precision {
        Precision::F32 | Precision::Tf32x3 | Precision::Tf32 => DType::F32,
        Precision::Bf16 | Precision::F16 => precision.dtype(),
    };
    crate::train::peak(device, name, dtype).map_err(|error| CliError::Failure(error.to_string()))
}
