//! Whole training steps, queued: forward, backward, clipping and AdamW, which a GPU replays as one CUDA graph.

use candle_core::{DType, Tensor};

use super::trainer::Registered;
use super::{LanguageModel, Result, Trainer};
use crate::ops::cuda_graph::GraphRunner;
use crate::optim::step_control::step_outputs;
use crate::profile::{Phase, phase};

/// Makes steps of one trainer without waiting for them.
pub struct QueuedStep {
    runner: GraphRunner,
    /// f32, one for each micro-batch.
    losses: Option<Tensor>,
    pinned_buffers: PinnedBuffers,
}

/// A step on its way.
pub struct StepHandle {
    /// What it was registered as.
    pub registered: Registered,
    readback: Readback,
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    values: Vec<f64>,
}

impl StepResult {
    /// The loss of each micro-batch.
    pub fn losses(&self) -> &[f64] {
        &self.values[step_outputs::LOSSES..]
    }

    /// All values, as [`Trainer::commit`] takes them.
    pub fn values(&self) -> &[f64] {
        &self.values
    }
}

impl QueuedStep {
    /// For steps of this trainer, alone.
    pub fn new(trainer: &Trainer) -> QueuedStep {
        QueuedStep {
            runner: GraphRunner::new(trainer.params().device()),
            losses: None,
            pinned_buffers: PinnedBuffers::default(),
        }
    }

    /// The same, never replayed: every kernel is started by itself.
    pub fn eager() -> QueuedStep {
        QueuedStep {
            runner: GraphRunner::disabled("every kernel is to be started by itself"),
            losses: None,
            pinned_buffers: PinnedBuffers::default(),
        }
    }

    /// Why steps are not replayed, if they are not: see [`GraphRunner::fallback_reason`].
    pub fn fallback_reason(&self) -> Option<&str> {
        self.runner.fallback_reason()
    }

    /// How many steps may be on their way when another one is queued: a GPU then never waits for the host.
    pub fn max_in_flight(&self, trainer: &Trainer) -> usize {
        usize::from(trainer.can_run_ahead() && trainer.params().device().is_cuda())
    }

    /// Queues a step on tokens and targets, u32 [sequences, n], of which `micro_batch` sequences run at a time. Its loss is the mean over
    /// all sequences.
    ///
    /// # Errors
    /// Those of the model and of the launches.
    pub fn queue(
        &mut self,
        model: &dyn LanguageModel,
        trainer: &mut Trainer,
        [tokens, targets]: [&Tensor; 2],
        micro_batch: usize,
    ) -> Result<StepHandle> {
        let (sequences, micro_batch) = (tokens.dim(0)?, micro_batch.max(1));
        let parts = sequences.div_ceil(micro_batch);
        let losses = match &self.losses {
            Some(losses) if losses.elem_count() == parts => losses.clone(),
            _ => self.losses.insert(Tensor::zeros(parts, DType::F32, tokens.device())?).clone(),
        };
        let registered = trainer.register()?;
        let key = [trainer.scale().factor().to_bits(), micro_batch as u64, trainer.params().storage_version()];
        let work = |inputs: &[Tensor]| -> Result<()> {
            trainer.begin()?;
            for (i, start) in (0..sequences).step_by(micro_batch).enumerate() {
                let count = micro_batch.min(sequences - start);
                let [tokens, targets] = [inputs[0].narrow(0, start, count)?, inputs[1].narrow(0, start, count)?];
                let loss = {
                    let _phase = phase(Phase::Forward);
                    let loss = model.loss(&tokens, &targets)?;
                    losses.slice_set(&loss.detach().reshape(1)?, 0, i)?;
                    loss
                };
                trainer.backward(&loss, count as f64 / sequences as f64)?;
            }
            trainer.enqueue(&losses)
        };
        let queued = self
            .runner
            .run(&key, &[tokens, targets], work)
            .and_then(|()| self.pinned_buffers.read_async(trainer.step_outputs()));
        match queued {
            Ok(readback) => Ok(StepHandle { registered, readback }),
            Err(error) => {
                trainer.roll_back(registered)?;
                Err(error)
            }
        }
    }
}

impl StepHandle {
    /// Waits for the step, and for nothing that was queued after it. What was found is for [`Trainer::commit`].
    ///
    /// # Errors
    /// Those of the device's work.
    pub fn wait(self) -> Result<(Registered, StepResult)> {
        Ok((self.registered, StepResult { values: self.readback.read()? }))
    }
}

/// Numbers on their way from the device.
enum Readback {
    Ready(Vec<f64>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Readback),
}

impl Readback {
    fn read(self) -> Result<Vec<f64>> {
        match self {
            Readback::Ready(values) => Ok(values),
            #[cfg(feature = "cuda")]
            Readback::Cuda(readback) => Ok(readback.read()?),
        }
    }
}

/// Host memory for letters, used again when one was read.
#[derive(Default)]
struct PinnedBuffers {
    #[cfg(feature = "cuda")]
    free: std::rc::Rc<std::cell::RefCell<Vec<cuda::PinnedBuffer>>>,
}

impl PinnedBuffers {
    /// Queues a copy of f64 values.
    fn read_async(&self, values: &Tensor) -> Result<Readback> {
        #[cfg(feature = "cuda")]
        if values.device().is_cuda() {
            return Ok(Readback::Cuda(cuda::read_async(&self.free, values)?));
        }
        Ok(Readback::Ready(values.to_vec1()?))
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::cell::RefCell;
    use std::rc::Rc;

    use candle_core::cuda::cudarc::driver::{CudaEvent, PinnedHostSlice};
    use candle_core::{Error, Result, Storage, Tensor};

    /// Memory that the GPU copies into by itself.
    pub type PinnedBuffer = PinnedHostSlice<f64>;

    pub struct Readback {
        buffer: Option<PinnedBuffer>,
        copied: CudaEvent,
        free: Rc<RefCell<Vec<PinnedBuffer>>>,
    }

    fn failed(error: impl std::fmt::Display) -> Error {
        Error::Msg(format!("reading what a step found: {error}"))
    }

    pub fn read_async(free: &Rc<RefCell<Vec<PinnedBuffer>>>, values: &Tensor) -> Result<Readback> {
        let stream = values.device().as_cuda_device()?.cuda_stream();
        let known = free.borrow_mut().pop().filter(|buffer| buffer.len() == values.elem_count());
        let mut buffer = match known {
            Some(buffer) => buffer,
            // SAFETY: the copy below fills all of it before anyone reads it.
            None => unsafe { stream.context().alloc_pinned_with_flags(values.elem_count(), 0) }.map_err(failed)?,
        };
        let (storage, layout) = values.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(failed("it lies on another device"));
        };
        let source = storage.as_cuda_slice::<f64>()?.slice(layout.start_offset()..layout.start_offset() + buffer.len());
        stream.memcpy_dtoh(&source, &mut buffer).map_err(failed)?;
        let copied = stream.record_event(None).map_err(failed)?;
        Ok(Readback { buffer: Some(buffer), copied, free: free.clone() })
    }

    impl Readback {
        pub fn read(self) -> Result<Vec<f64>> {
            self.copied.synchronize().map_err(failed)?;
            match &self.buffer {
                Some(buffer) => Ok(buffer.as_slice().map_err(failed)?.to_vec()),
                None => Err(failed("it was read before")),
            }
        }
    }

    impl Drop for Readback {
        fn drop(&mut self) {
            // The copy may still be on its way into the buffer.
            if self.copied.synchronize().is_ok()
                && let Some(buffer) = self.buffer.take()
            {
                self.free.borrow_mut().push(buffer);
            }
        }
    }
}
