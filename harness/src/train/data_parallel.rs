//! A run's other ranks: each has the whole model and its share of every batch.

use std::sync::Arc;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::{Result, Trainer, TrainerOptions, Update, gradient_dtype};
use crate::data::Shard;
use crate::dist::comm::{Communicator, Dtype, Reduce};
use crate::dist::ddp::{Ddp, DdpOptions, Exchange, Form, Synchronized};
use crate::dist::error::Error;
use crate::dist::sharded::{Mode, ShardedOptimizer};
use crate::ops::memory::kernel_device;
use crate::params::{Param, Params};

/// How ranks work together.
#[derive(Clone)]
pub struct DataParallelOptions {
    pub comm: Arc<Communicator>,
    pub ddp: DdpOptions,
    /// Whether each rank has a part of the optimizer's state only.
    pub shard: Option<Mode>,
}

/// What of [`DataParallelOptions`] a checkpoint remembers: how ranks share the work, not what depends on the machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankSettings {
    pub form: Form,
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

/// The type in which a rank keeps its gradients: bf16 where they are rounded to it on their way anyway, and are made in it
/// ([`gradient_dtype`]). An optimizer that is shared out takes f32.
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

/// All ranks of a run, as one of them sees them.
pub struct DataParallel {
    ddp: Ddp,
    comm: Arc<Communicator>,
}

/// What all ranks say after a step's backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepStatus {
    /// Mean loss over the rank's windows; over all windows after the count.
    pub loss: f64,
    /// The rank was told to stop, or its time is over: after the count, some rank.
    pub stop: bool,
    pub out_of_time: bool,
}

impl DataParallel {
    /// Gives all ranks rank 0's parameters, and makes the trainer of this one, for steps of `batch` windows of all ranks in so many
    /// micro-batches of each.
    ///
    /// # Errors
    /// A batch that the ranks do not divide, ranks with other models, no memory.
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
                "a batch of {batch} windows does not divide into {world} ranks\n  help: --batch {fits} does"
            ))
            .into());
        }
        params.keep_grads(data_parallel_gradient_dtype(params, options, micro_batches))?;
        let exchange = match options.shard {
            Some(Mode::Zero1) => Exchange::ReduceScatter,
            // AdamW averages as it reads, unless the whole gradient is wanted first.
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

    /// Whether this rank writes files and speaks.
    pub fn is_rank0(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Whether [`DataParallel::finish_step`] updates parameters before all gradients are there.
    pub fn updates_by_bucket(&self, trainer: &Trainer) -> bool {
        self.ddp.is_eager() && trainer.can_update_by_bucket()
    }

    /// The end of a step after backward: waits for gradients, and updates parameters, where it can while gradients still travel.
    ///
    /// # Errors
    /// Those of communication and of [`Trainer::update`].
    pub fn finish_step(&self, trainer: &mut Trainer) -> Result<(Synchronized, Update)> {
        if self.updates_by_bucket(trainer) {
            return trainer.update_by_bucket(&self.ddp);
        }
        let sent = self.ddp.finish_gradient_synchronization()?;
        Ok((sent, trainer.update()?))
    }

    /// This rank's share of a batch.
    pub fn shard(&self) -> Shard {
        Shard { rank: self.comm.rank(), world: self.comm.world() }
    }

    /// Fails if communication has: on a GPU that may come to light after a collective seemed to be fine.
    ///
    /// # Errors
    /// The first one.
    pub fn check_comm(&self) -> Result<()> {
        match self.comm.failure() {
            Some(error) => Err(Error::from(error.clone()).into()),
            None => Ok(()),
        }
    }

    /// Counts what all ranks say.
    ///
    /// # Errors
    /// Those of communication.
    pub fn reduce_status(&self, status: StepStatus) -> Result<StepStatus> {
        self.check_comm()?;
        let mut all = [status.loss, f64::from(u8::from(status.stop)), f64::from(u8::from(status.out_of_time))];
        self.comm.all_reduce(&mut all, Reduce::Sum).map_err(Error::from)?;
        let [loss, stop, out_of_time] = all;
        Ok(StepStatus { loss: loss / self.comm.world() as f64, stop: stop > 0.0, out_of_time: out_of_time > 0.0 })
    }

    /// The sum of a number over all ranks.
    ///
    /// # Errors
    /// Those of communication.
    pub fn all_reduce_sum(&self, number: f64) -> Result<f64> {
        let mut sum = [number];
        self.comm.all_reduce(&mut sum, Reduce::Sum).map_err(Error::from)?;
        Ok(sum[0])
    }
}
