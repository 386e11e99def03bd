//! Queued training steps: forward, backward, clipping and AdamW, enqueued without synchronization and captured as one
//! CUDA graph on a GPU.

use candle_core::{DType, Tensor};

use super::learner::Announced;
use super::{LanguageModel, Learner, Result};
use crate::ops::replay::Replay;
use crate::optim::judge::found;
use crate::profile::{Phase, phase};

/// Enqueues the steps of one trainer.
pub struct WholeStep {
    replay: Replay,
    /// f32, one per micro-batch.
    losses: Option<Tensor>,
    mailbox: Mailbox,
}

/// A step in flight.
pub struct Queued {
    /// Its registration.
    pub announced: Announced,
    letter: Letter,
}

/// Outputs of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    numbers: Vec<f64>,
}

impl Found {
    /// Loss of each micro-batch.
    pub fn losses(&self) -> &[f64] {
        &self.numbers[found::LOSSES..]
    }

    /// All outputs, for [`Learner::settle`].
    pub fn numbers(&self) -> &[f64] {
        &self.numbers
    }
}

impl WholeStep {
    /// For steps of this trainer only.
    pub fn new(learner: &Learner) -> WholeStep {
        WholeStep { replay: Replay::new(learner.params().device()), losses: None, mailbox: Mailbox::default() }
    }

    /// Same, without a CUDA graph: every kernel is launched separately.
    pub fn one_by_one() -> WholeStep {
        WholeStep {
            replay: Replay::never("every kernel is launched separately"),
            losses: None,
            mailbox: Mailbox::default(),
        }
    }

    /// Why steps do not run as a CUDA graph, if they do not: see [`Replay::why_not`].
    pub fn why_not(&self) -> Option<&str> {
        self.replay.why_not()
    }

    /// Number of steps that may be in flight when another one is enqueued, so that a GPU never waits for the host.
    pub fn ahead(&self, learner: &Learner) -> usize {
        usize::from(learner.can_run_ahead() && learner.params().device().is_cuda())
    }

    /// Enqueues a step on tokens and targets, u32 [sequences, n], in micro-batches of `micro_batch` sequences. Its loss
    /// is the mean over all sequences.
    ///
    /// # Errors
    /// Errors of the model and of the launches.
    pub fn queue(
        &mut self,
        model: &dyn LanguageModel,
        learner: &mut Learner,
        [tokens, targets]: [&Tensor; 2],
        micro_batch: usize,
    ) -> Result<Queued> {
        let (windows, micro_batch) = (tokens.dim(0)?, micro_batch.max(1));
        let parts = windows.div_ceil(micro_batch);
        let losses = match &self.losses {
            Some(losses) if losses.elem_count() == parts => losses.clone(),
            _ => self.losses.insert(Tensor::zeros(parts, DType::F32, tokens.device())?).clone(),
        };
        let announced = learner.announce()?;
        let key = [learner.scale().factor().to_bits(), micro_batch as u64, learner.params().generation()];
        let work = |inputs: &[Tensor]| -> Result<()> {
            learner.begin()?;
            for (i, start) in (0..windows).step_by(micro_batch).enumerate() {
                let count = micro_batch.min(windows - start);
                let [tokens, targets] = [inputs[0].narrow(0, start, count)?, inputs[1].narrow(0, start, count)?];
                let loss = {
                    let _phase = phase(Phase::Forward);
                    let loss = model.loss(&tokens, &targets)?;
                    losses.slice_set(&loss.detach().reshape(1)?, 0, i)?;
                    loss
                };
                learner.backward(&loss, count as f64 / windows as f64)?;
            }
            learner.decide(&losses)
        };
        let queued = self.replay.run(&key, &[tokens, targets], work).and_then(|()| self.mailbox.post(learner.found()));
        match queued {
            Ok(letter) => Ok(Queued { announced, letter }),
            Err(error) => {
                learner.take_back(announced)?;
                Err(error)
            }
        }
    }
}

impl Queued {
    /// Waits for this step only, not for work enqueued after it. The result is for [`Learner::settle`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn wait(self) -> Result<(Announced, Found)> {
        Ok((self.announced, Found { numbers: self.letter.read()? }))
    }
}

/// An asynchronous readback of f64 values.
enum Letter {
    Here(Vec<f64>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Letter),
}

impl Letter {
    fn read(self) -> Result<Vec<f64>> {
        match self {
            Letter::Here(numbers) => Ok(numbers),
            #[cfg(feature = "cuda")]
            Letter::Cuda(letter) => Ok(letter.read()?),
        }
    }
}

/// Pinned host buffers, reused after a readback.
#[derive(Default)]
struct Mailbox {
    #[cfg(feature = "cuda")]
    free: std::rc::Rc<std::cell::RefCell<Vec<cuda::Page>>>,
}

impl Mailbox {
    /// Starts an asynchronous copy of f64 values to the host.
    fn post(&self, numbers: &Tensor) -> Result<Letter> {
        #[cfg(feature = "cuda")]
        if numbers.device().is_cuda() {
            return Ok(Letter::Cuda(cuda::post(&self.free, numbers)?));
        }
        Ok(Letter::Here(numbers.to_vec1()?))
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::cell::RefCell;
    use std::rc::Rc;

    use candle_core::cuda::cudarc::driver::{CudaEvent, PinnedHostSlice};
    use candle_core::{Error, Result, Storage, Tensor};

    /// Pinned host memory, the destination of a device-to-host copy.
    pub type Page = PinnedHostSlice<f64>;

    pub struct Letter {
        page: Option<Page>,
        arrived: CudaEvent,
        free: Rc<RefCell<Vec<Page>>>,
    }

    fn failed(error: impl std::fmt::Display) -> Error {
        Error::Msg(format!("reading back the outputs of a step: {error}"))
    }

    pub fn post(free: &Rc<RefCell<Vec<Page>>>, numbers: &Tensor) -> Result<Letter> {
        let stream = numbers.device().as_cuda_device()?.cuda_stream();
        let known = free.borrow_mut().pop().filter(|page| page.len() == numbers.elem_count());
        let mut page = match known {
            Some(page) => page,
            // SAFETY: the copy below initializes all of it before it is read.
            None => unsafe { stream.context().alloc_pinned_with_flags(numbers.elem_count(), 0) }.map_err(failed)?,
        };
        let (storage, layout) = numbers.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(failed("it is on another device"));
        };
        let source = storage.as_cuda_slice::<f64>()?.slice(layout.start_offset()..layout.start_offset() + page.len());
        stream.memcpy_dtoh(&source, &mut page).map_err(failed)?;
        let arrived = stream.record_event(None).map_err(failed)?;
        Ok(Letter { page: Some(page), arrived, free: free.clone() })
    }

    impl Letter {
        pub fn read(self) -> Result<Vec<f64>> {
            self.arrived.synchronize().map_err(failed)?;
            match &self.page {
                Some(page) => Ok(page.as_slice().map_err(failed)?.to_vec()),
                None => Err(failed("it was already read")),
            }
        }
    }

    impl Drop for Letter {
        fn drop(&mut self) {
            // The copy may still be in flight.
            if self.arrived.synchronize().is_ok()
                && let Some(page) = self.page.take()
            {
                self.free.borrow_mut().push(page);
            }
        }
    }
}
