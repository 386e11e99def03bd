//! Data-parallel training of a run: every rank has the whole model and a shard of every batch.

use std::sync::Arc;

use candle_core::DType;
use serde::{Deserialize, Serialize};
use tilewright_candle::memory::kernel_device;

use super::{Result, Trainer, TrainerOptions, Update, gradient_dtype};
use crate::data::Shard;
use crate::dist::comm::{Communicator, Dtype, Reduce};
use crate::dist::ddp::{Ddp, DdpOptions, Exchange, GradSync, SyncStats};
use crate::dist::error::Error;
use crate::dist::sharded::{Mode, ShardedOptimizer};
use crate::params::{Param, Params};

/// Options of data-parallel training.
#[derive(Clone)]
pub struct DataParallelOptions {
    pub comm: Arc<Communicator>,
    pub ddp: DdpOptions,
    /// Sharding of the optimizer state; `None` replicates it.
    pub shard: Option<Mode>,
}

/// The settings of [`DataParallelOptions`] that a checkpoint stores: those that affect the result, not those that
/// depend on the machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankSettings {
    pub form: GradSync,
    pub bucket_bytes: Option<usize>,
    #[serde(alias = "wire")]
    pub comm_dtype: Option<Dtype>,
    pub shard: Option<Mode>,
}

impl DataParallelOptions {
    pub fn settings(&self) -> RankSettings {
        let DdpOptions { form, bucket_bytes, comm_dtype, .. } = self.ddp;
        RankSettings { form, bucket_bytes, comm_dtype, shard: self.shard }
    }
}

/// Gradient dtype of a rank: bf16 if gradients are sent in bf16 and computed in it ([`gradient_dtype`]). A sharded
/// optimizer needs f32.
pub fn data_parallel_gradient_dtype(
    params: &Params,
    data_parallel: &DataParallelOptions,
    micro_batches: usize,
) -> DType {
    match data_parallel.ddp.comm_dtype {
        Some(Dtype::Bf16) if data_parallel.shard.is_none() => gradient_dtype(params, micro_batches),
        _ => DType::F32,
    }
}

/// One rank's view of data-parallel training: the process group and its DDP.
pub struct DataParallel {
    ddp: Ddp,
    comm: Arc<Communicator>,
}

/// A rank's status after backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepStatus {
    /// Mean loss over the rank's sequences; after the reduction, over all sequences.
    pub loss: f64,
    /// Whether the rank has to stop; after the reduction, whether any rank has.
    pub stop: bool,
    /// Whether the rank's time limit has passed; after the reduction, whether that of any rank has.
    pub out_of_time: bool,
}

impl DataParallel {
    /// Broadcasts rank 0's parameters, and creates this rank's trainer, for steps of `batch` sequences over all ranks,
    /// with this number of micro-batches per rank.
    ///
    /// # Errors
    /// A batch that is not a multiple of the world size, ranks with other models, no memory.
    pub fn new(
        options: &DataParallelOptions,
        params: &Params,
        trainer: TrainerOptions,
        batch: usize,
        micro_batches: usize,
    ) -> Result<(DataParallel, Trainer)> {
        let comm = options.comm.clone();
        let world = comm.world();
        if !batch.is_multiple_of(world) {
            let (below, above) = (batch / world * world, batch.next_multiple_of(world));
            let fits = if below == 0 { format!("{above}") } else { format!("{below} or {above}") };
            return Err(Error::Misuse(format!(
                "a batch of {batch} sequences is not a multiple of the world size, {world}\n  help: use --batch {fits}"
            ))
            .into());
        }
        params.set_grad_dtype(data_parallel_gradient_dtype(params, options, micro_batches))?;
        let exchange = match options.shard {
            Some(Mode::Zero1) => Exchange::ReduceScatter,
            // AdamW averages while it reads, unless the whole gradient is needed first.
            None if trainer.clip.is_none() => Exchange::PeerGradients,
            _ => Exchange::AllReduce,
        };
        let ddp = Ddp::new(params, comm.clone(), DdpOptions { exchange, ..options.ddp })?;
        let device = kernel_device(params.device())?;
        let trainer = match options.shard {
            None => Trainer::new(params, trainer)?,
            Some(mode) => {
                let len = params.flat_len();
                let trained: Vec<_> = params.iter().filter(Param::requires_grad).map(|param| param.range()).collect();
                let optimizer = match mode {
                    Mode::Broadcast => {
                        ShardedOptimizer::by_parameters(device, comm.clone(), &trained, len, trainer.adamw)?
                    }
                    Mode::Zero1 => {
                        ShardedOptimizer::by_buckets(device, comm.clone(), ddp.buckets(), len, trainer.adamw)?
                    }
                };
                Trainer::sharded(params, trainer, optimizer)?
            }
        };
        Ok((DataParallel { ddp, comm }, trainer))
    }

    pub fn ddp(&self) -> &Ddp {
        &self.ddp
    }

    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Whether this is rank 0, which writes files and prints.
    pub fn is_rank0(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Whether [`DataParallel::finish_step`] updates parameters before all gradients have arrived.
    pub fn updates_by_bucket(&self, trainer: &Trainer) -> bool {
        self.ddp.overlaps_backward() && trainer.can_update_by_bucket()
    }

    /// Ends a step after backward: waits for gradients and updates parameters, bucket by bucket if
    /// [`DataParallel::updates_by_bucket`].
    ///
    /// # Errors
    /// Errors of communication and of [`Trainer::update`].
    pub fn finish_step(&self, trainer: &mut Trainer) -> Result<(SyncStats, Update)> {
        if self.updates_by_bucket(trainer) {
            return trainer.update_by_bucket(&self.ddp);
        }
        let sent = self.ddp.finish_gradient_synchronization()?;
        Ok((sent, trainer.update()?))
    }

    /// This rank's shard of a batch.
    pub fn shard(&self) -> Shard {
        Shard { rank: self.comm.rank(), world: self.comm.world() }
    }

    /// Fails if communication has failed: on a GPU that may become known after a collective reported success.
    ///
    /// # Errors
    /// The first error.
    pub fn check_comm(&self) -> Result<()> {
        match self.comm.failure() {
            Some(error) => Err(Error::from(error.clone()).into()),
            None => Ok(()),
        }
    }

    /// Reduces the status of all ranks.
    ///
    /// # Errors
    /// Errors of communication.
    pub fn reduce_status(&self, status: StepStatus) -> Result<StepStatus> {
        self.check_comm()?;
        let mut all = [status.loss, f64::from(u8::from(status.stop)), f64::from(u8::from(status.out_of_time))];
        self.comm.all_reduce(&mut all, Reduce::Sum).map_err(Error::from)?;
        let [loss, stop, out_of_time] = all;
        Ok(StepStatus { loss: loss / self.comm.world() as f64, stop: stop > 0.0, out_of_time: out_of_time > 0.0 })
    }

    /// Sum of a value over all ranks.
    ///
    /// # Errors
    /// Errors of communication.
    pub fn all_reduce_sum(&self, number: f64) -> Result<f64> {
        let mut sum = [number];
        self.comm.all_reduce(&mut sum, Reduce::Sum).map_err(Error::from)?;
        Ok(sum[0])
    }
}
