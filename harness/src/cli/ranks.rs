//! Arguments that say how ranks work together: what `train` and the benchmarks of ranks share.

use std::sync::Arc;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::numbers::bucket_mb;
use super::{CliError, Result};
use crate::dist;
use crate::dist::comm::{Communicator, Dtype};
use crate::dist::ddp::{DdpOptions, Form, NCCL_CTAS};
use crate::dist::rank::Environment;
use crate::dist::sharded::Mode;
use crate::train::{RankSettings, TeamOptions};

/// How ranks work together. They are started by `tilewright launch`, torchrun, mpirun or srun.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Ranks (tilewright launch, torchrun, mpirun, srun)")]
pub struct RankOptions {
    /// How gradients travel; bucketed
    #[arg(long, value_enum, value_name = "FORM")]
    pub ddp: Option<Form>,
    /// Most megabytes (10⁶ bytes) of a bucket; 25, between GPUs more for large models
    #[arg(long, value_name = "MB", value_parser = bucket_mb)]
    pub bucket_mb: Option<f64>,
    /// Round gradients to this type on their way: bf16 or f16, or f32 for as they are. Sums are f32
    #[arg(long, value_name = "TYPE", value_parser = wire)]
    pub wire: Option<Dtype>,
    /// Most multiprocessors that NCCL takes while backward goes on (overlap and bucketed); 24, and 0 is NCCL's own choice
    #[arg(long, value_name = "N")]
    pub nccl_ctas: Option<u32>,
    /// Let copy engines carry what is sent while backward goes on, between GPUs of one host (overlap and bucketed). Two ranks with --clip 0 have
    /// room for the other one's gradients beside their own then
    #[arg(long)]
    pub copy_engines: bool,
    /// For how many multiprocessors less matrix products are made while gradients travel; auto: as many as NCCL takes
    #[arg(long, value_name = "N", value_parser = leave_sms)]
    pub leave_sms: Option<LeaveSms>,
    /// Give each rank a part of the optimizer's state only
    #[arg(long, value_enum, value_name = "MODE")]
    pub shard: Option<Shard>,
}

/// A value of `--shard`: a mode, or `none`, which takes one back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard(pub Option<Mode>);

impl ValueEnum for Shard {
    fn value_variants<'a>() -> &'a [Shard] {
        &[Shard(None), Shard(Some(Mode::Broadcast)), Shard(Some(Mode::Zero1))]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self.0 {
            None => Some(PossibleValue::new("none").help("Every rank has all of it")),
            Some(mode) => mode.to_possible_value(),
        }
    }
}

/// Bytes of a bucket of so many megabytes.
pub fn bytes_of(bucket_mb: f64) -> usize {
    (bucket_mb * 1e6) as usize
}

/// A type that gradients may be rounded to.
pub fn wire(word: &str) -> Result<Dtype, String> {
    match word {
        "bf16" => Ok(Dtype::Bf16),
        "f16" => Ok(Dtype::F16),
        "f32" => Ok(Dtype::F32),
        _ => Err("expected bf16, f16 or f32".into()),
    }
}

/// A value of `--leave-sms`: as many as NCCL takes, or a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LeaveSms(pub Option<u32>);

/// `auto` or a number.
pub fn leave_sms(word: &str) -> Result<LeaveSms, String> {
    match word {
        "auto" => Ok(LeaveSms(None)),
        _ => word.parse().map(|number| LeaveSms(Some(number))).map_err(|_| "expected auto or a number".into()),
    }
}

impl RankOptions {
    /// How ranks work together: what was said, and else what was before, and else what is usual.
    pub fn team_of(&self, comm: Arc<Communicator>, before: Option<RankSettings>) -> TeamOptions {
        let usual = DdpOptions::default();
        let begins = RankSettings { form: usual.form, bucket_bytes: None, wire: None, shard: None };
        let before = before.unwrap_or(begins);
        let ddp = DdpOptions {
            form: self.ddp.unwrap_or(before.form),
            bucket_bytes: self.bucket_mb.map(bytes_of).or(before.bucket_bytes),
            wire: self.wire.map_or(before.wire, |wire| (wire != Dtype::F32).then_some(wire)),
            nccl_ctas: self.nccl_ctas.unwrap_or(NCCL_CTAS),
            copies: self.copy_engines,
            leave_sms: self.leave_sms.and_then(|leave| leave.0),
            ..usual
        };
        TeamOptions { comm, ddp, shard: self.shard.map_or(before.shard, |shard| shard.0) }
    }

    /// The other ranks of a model on `device`, if somebody started any or the options ask for a world of one.
    ///
    /// # Errors
    /// Ranks that do not find each other.
    pub fn connect(&self, device: &candle_core::Device) -> Result<Option<Arc<Communicator>>> {
        let environment = Environment::get().map_err(|error| CliError::Failure(error.to_string()))?;
        if environment.place.is_none() && self.ddp.is_none() && self.shard.is_none() {
            return Ok(None);
        }
        let comm = dist::connect_for(&environment, device).map_err(|error| CliError::Failure(error.to_string()))?;
        Ok(Some(Arc::new(comm)))
    }
}

/// This process's number among those of this host, which is that of its GPU.
pub fn local_rank() -> Option<usize> {
    Environment::get().ok()?.place.map(|place| place.local_rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_takes_the_modes_and_none() {
        let modes = Shard::value_variants().iter().filter_map(|shard| shard.0).collect::<Vec<_>>();
        assert_eq!(modes, Mode::value_variants(), "each mode can be said");
        let read = |word: &str| Shard::from_str(word, false).map(|shard| shard.0);
        assert_eq!([read("none"), read("zero1")], [Ok(None), Ok(Some(Mode::Zero1))]);
        assert!(read("zero2").is_err());
    }
}
