//! Queued training steps: forward, backward, clipping and AdamW, enqueued without synchronization and captured as one
//! CUDA graph on a GPU.

use candle_core::{DType, Error, Tensor, TensorId};
use tilewright_candle::cuda_graph::GraphRunner;

use super::trainer::Registered;
use super::{LanguageModel, Result, Trainer};
use crate::optim::step_control::step_outputs;
use crate::profile::{Phase, phase};

/// Enqueues the steps of one trainer.
pub struct QueuedStep {
    runner: GraphRunner,
    /// Identifies the trainer whose steps these are: its inputs of step control.
    trainer: Option<TensorId>,
    /// f32, one per micro-batch.
    losses: Option<Tensor>,
    pinned_buffers: PinnedBuffers,
}

/// A step in flight.
pub struct StepHandle {
    /// Registration of the step, for [`Trainer::commit`].
    pub registered: Registered,
    readback: Readback,
}

/// Outputs of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    values: Vec<f64>,
}

impl StepResult {
    /// Loss of each micro-batch.
    pub fn losses(&self) -> &[f64] {
        &self.values[step_outputs::LOSSES..]
    }

    /// All outputs, for [`Trainer::commit`].
    pub fn values(&self) -> &[f64] {
        &self.values
    }
}

impl QueuedStep {
    /// Creates a runner for steps of `trainer` only.
    pub fn new(trainer: &Trainer) -> QueuedStep {
        QueuedStep {
            runner: GraphRunner::new(trainer.params().device()),
            trainer: None,
            losses: None,
            pinned_buffers: PinnedBuffers::default(),
        }
    }

    /// Same as [`QueuedStep::new`], without a CUDA graph: every kernel is launched separately.
    pub fn eager() -> QueuedStep {
        QueuedStep {
            runner: GraphRunner::disabled("every kernel is launched separately"),
            trainer: None,
            losses: None,
            pinned_buffers: PinnedBuffers::default(),
        }
    }

    /// Why steps do not run as a CUDA graph, if they do not: see [`GraphRunner::fallback_reason`].
    pub fn fallback_reason(&self) -> Option<&str> {
        self.runner.fallback_reason()
    }

    /// Number of steps that may be in flight when another one is enqueued, so that a GPU never waits for the host.
    pub fn max_in_flight(&self, trainer: &Trainer) -> usize {
        usize::from(trainer.can_run_ahead() && trainer.params().device().is_cuda())
    }

    /// Enqueues a step on tokens and targets, u32 [sequences, n], in micro-batches of `micro_batch` sequences. Its loss
    /// is the mean over all sequences.
    ///
    /// # Errors
    /// Another trainer than in the call before; errors of the model and of the launches.
    pub fn queue(
        &mut self,
        model: &dyn LanguageModel,
        trainer: &mut Trainer,
        [tokens, targets]: [&Tensor; 2],
        micro_batch: usize,
    ) -> Result<StepHandle> {
        let id = trainer.step_inputs().id();
        if *self.trainer.get_or_insert(id) != id {
            return Err(Error::Msg("a QueuedStep is for the steps of one trainer: create another one".into()).into());
        }
        let (sequences, micro_batch) = (tokens.dim(0)?, micro_batch.max(1));
        let parts = sequences.div_ceil(micro_batch);
        let losses = match &self.losses {
            Some(losses) if losses.elem_count() == parts => losses.clone(),
            _ => self.losses.insert(Tensor::zeros(parts, DType::F32, tokens.device())?).clone(),
        };
        let registered = trainer.register()?;
        let key = [trainer.scale().factor().to_bits(), micro_batch as u64, trainer.params().storage_version()];
        let work = |inputs: &[Tensor]| -> Result<()> {
            trainer.begin();
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
        // SAFETY: `self` holds the losses; all else that the work uses is of the trainer, which is the same in every call
        // and whose storage version is in the key.
        let queued = unsafe { self.runner.run(&key, &[tokens, targets], work) }
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
    /// Waits for this step only, not for work enqueued after it. The result is for [`Trainer::commit`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn wait(self) -> Result<(Registered, StepResult)> {
        Ok((self.registered, StepResult { values: self.readback.read()? }))
    }
}

/// An asynchronous readback of f64 values.
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

/// Pinned host buffers, reused after a readback.
#[derive(Default)]
struct PinnedBuffers {
    #[cfg(feature = "cuda")]
    free: std::rc::Rc<std::cell::RefCell<Vec<cuda::PinnedBuffer>>>,
}

impl PinnedBuffers {
    /// Starts an asynchronous copy of f64 values to the host.
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

    /// Pinned host memory, the destination of a device-to-host copy.
    pub type PinnedBuffer = PinnedHostSlice<f64>;

    pub struct Readback {
        buffer: Option<PinnedBuffer>,
        copied: CudaEvent,
        free: Rc<RefCell<Vec<PinnedBuffer>>>,
    }

    fn failed(error: impl std::fmt::Display) -> Error {
        Error::Msg(format!("reading back the outputs of a step: {error}"))
    }

    pub fn read_async(free: &Rc<RefCell<Vec<PinnedBuffer>>>, values: &Tensor) -> Result<Readback> {
        let stream = values.device().as_cuda_device()?.cuda_stream();
        let known = free.borrow_mut().pop().filter(|buffer| buffer.len() == values.elem_count());
        let mut buffer = match known {
            Some(buffer) => buffer,
            // SAFETY: the copy below initializes the whole buffer before it is read.
            None => unsafe { stream.context().alloc_pinned_with_flags(values.elem_count(), 0) }.map_err(failed)?,
        };
        let (storage, layout) = values.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(failed("the tensor is not on a CUDA device"));
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
                None => Err(failed("it was already read")),
            }
        }
    }

    impl Drop for Readback {
        fn drop(&mut self) {
            // The copy may still be in flight.
            if self.copied.synchronize().is_ok()
                && let Some(buffer) = self.buffer.take()
            {
                self.free.borrow_mut().push(buffer);
            }
        }
    }
}
