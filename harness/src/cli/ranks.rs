//! Command-line arguments of distributed training, shared by `train` and `profile`.

use std::sync::Arc;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};

use super::value_parsers::bucket_mb;
use super::{CliError, Result};
use crate::dist;
use crate::dist::comm::{Communicator, Dtype};
use crate::dist::ddp::{DdpOptions, GradSync, NCCL_CTAS};
use crate::dist::rank::Environment;
use crate::dist::sharded::Mode;
use crate::train::{DataParallelOptions, RankSettings};

/// Parses a form of gradient synchronization.
pub fn grad_sync() -> impl TypedValueParser<Value = GradSync> {
    let help = |form| match form {
        GradSync::Naive => "One all-reduce for each parameter, after backward",
        GradSync::Flat => "One all-reduce for all parameters, after backward",
        GradSync::Overlap => "One all-reduce for each parameter, during backward",
        GradSync::Bucketed => "One all-reduce for each bucket, during backward",
    };
    let known = GradSync::ALL.map(|form| PossibleValue::new(form.name()).help(help(form)));
    PossibleValuesParser::new(known).try_map(|name| {
        GradSync::ALL.into_iter().find(|form| form.name() == name).ok_or("an unknown form of gradient synchronization")
    })
}

/// Options of data-parallel training. The ranks are started by `tilewright launch`, torchrun, mpirun or srun.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Distributed training (tilewright launch, torchrun, mpirun, srun)")]
pub struct RankOptions {
    /// Form of gradient synchronization; bucketed by default
    #[arg(long, value_name = "FORM", value_parser = grad_sync())]
    pub ddp: Option<GradSync>,
    /// Maximum bucket size in megabytes (10⁶ bytes). Default: 25; between GPUs, larger for large models
    #[arg(long, value_name = "MB", value_parser = bucket_mb)]
    pub bucket_mb: Option<f64>,
    /// Communication dtype of gradients: bf16 or f16, or f32 for no rounding. Sums are accumulated in f32
    #[arg(long, alias = "wire", value_name = "TYPE", value_parser = comm_dtype)]
    pub comm_dtype: Option<Dtype>,
    /// Maximum number of CTAs (SMs) of NCCL during the backward pass (overlap and bucketed). Default: 24; 0 leaves it
    /// to NCCL
    #[arg(long, value_name = "N")]
    pub nccl_ctas: Option<u32>,
    /// Use copy engines for communication during the backward pass, between GPUs of one host (overlap and bucketed).
    /// Two ranks with --clip 0 then also hold a buffer for the peer's gradients
    #[arg(long)]
    pub copy_engines: bool,
    /// SMs reserved for communication: matmuls use this many SMs fewer while gradients are in flight. auto: as many as
    /// NCCL uses
    #[arg(long, alias = "leave-sms", value_name = "N", value_parser = reserve_sms)]
    pub reserve_sms: Option<ReserveSms>,
    /// Optimizer-state sharding (ZeRO-1)
    #[arg(long, value_enum, value_name = "MODE")]
    pub shard: Option<Shard>,
}

/// A value of `--shard`: a mode, or `none`, which overrides the mode of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard(pub Option<Mode>);

impl ValueEnum for Shard {
    fn value_variants<'a>() -> &'a [Shard] {
        &[Shard(None), Shard(Some(Mode::Broadcast)), Shard(Some(Mode::Zero1))]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self.0 {
            None => Some(PossibleValue::new("none").help("The optimizer state is replicated on every rank")),
            Some(mode) => mode.to_possible_value(),
        }
    }
}

/// Converts a bucket size from megabytes to bytes.
pub fn bucket_bytes_of(bucket_mb: f64) -> usize {
    (bucket_mb * 1e6) as usize
}

/// Parses a communication dtype.
pub fn comm_dtype(word: &str) -> Result<Dtype, String> {
    match word {
        "bf16" => Ok(Dtype::Bf16),
        "f16" => Ok(Dtype::F16),
        "f32" => Ok(Dtype::F32),
        _ => Err("expected bf16, f16 or f32".into()),
    }
}

/// A value of `--reserve-sms`: `None` for as many SMs as NCCL uses, or a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReserveSms(pub Option<u32>);

/// Parses `auto` or a number.
pub fn reserve_sms(word: &str) -> Result<ReserveSms, String> {
    match word {
        "auto" => Ok(ReserveSms(None)),
        _ => word.parse().map(|number| ReserveSms(Some(number))).map_err(|_| "expected auto or a number".into()),
    }
}

impl RankOptions {
    /// The first option that has an effect with several ranks only.
    pub fn of_several_ranks(&self) -> Option<&'static str> {
        let options = [
            ("--bucket-mb", self.bucket_mb.is_some()),
            ("--comm-dtype", self.comm_dtype.is_some()),
            ("--nccl-ctas", self.nccl_ctas.is_some()),
            ("--copy-engines", self.copy_engines),
            ("--reserve-sms", self.reserve_sms.is_some()),
        ];
        options.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }

    /// Returns the data-parallel options: from the command line, else from `before` (the checkpoint), else the
    /// defaults.
    pub fn data_parallel_options(&self, comm: Arc<Communicator>, before: Option<RankSettings>) -> DataParallelOptions {
        let usual = DdpOptions::default();
        let begins = RankSettings { form: usual.form, bucket_bytes: None, comm_dtype: None, shard: None };
        let before = before.unwrap_or(begins);
        let ddp = DdpOptions {
            form: self.ddp.unwrap_or(before.form),
            bucket_bytes: self.bucket_mb.map(bucket_bytes_of).or(before.bucket_bytes),
            comm_dtype: self
                .comm_dtype
                .map_or(before.comm_dtype, |comm_dtype| (comm_dtype != Dtype::F32).then_some(comm_dtype)),
            nccl_ctas: self.nccl_ctas.unwrap_or(NCCL_CTAS),
            copy_engines: self.copy_engines,
            reserve_sms: self.reserve_sms.and_then(|reserve| reserve.0),
            ..usual
        };
        DataParallelOptions { comm, ddp, shard: self.shard.map_or(before.shard, |shard| shard.0) }
    }

    /// Connects to the other ranks, for a model on `device`. `None` if no launcher started this process and no option
    /// needs a communicator; with such an option, the world has one rank.
    ///
    /// # Errors
    /// The rendezvous fails.
    pub fn connect(&self, device: &candle_core::Device) -> Result<Option<Arc<Communicator>>> {
        let environment = Environment::get().map_err(|error| CliError::Failure(error.to_string()))?;
        if environment.rank_info.is_none() && self.ddp.is_none() && self.shard.is_none() {
            return Ok(None);
        }
        let comm = dist::connect_for(&environment, device).map_err(|error| CliError::Failure(error.to_string()))?;
        Ok(Some(Arc::new(comm)))
    }
}

/// Returns the local rank of this process, which is the ordinal of its GPU.
pub fn local_rank() -> Option<usize> {
    Environment::get().ok()?.rank_info.map(|info| info.local_rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_takes_the_modes_and_none() {
        let modes = Shard::value_variants().iter().filter_map(|shard| shard.0).collect::<Vec<_>>();
        assert_eq!(modes, Mode::value_variants(), "every mode is a value of --shard");
        let read = |word: &str| Shard::from_str(word, false).map(|shard| shard.0);
        assert_eq!([read("none"), read("zero1")], [Ok(None), Ok(Some(Mode::Zero1))]);
        assert!(read("zero2").is_err());
    }
}
