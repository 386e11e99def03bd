//! Forward and backward again and again: on a GPU as a CUDA graph, which starts the hundreds of kernels of a pass at once.
//!
//! The first pass of a shape runs as it always does, which compiles and loads every kernel. The second one is recorded, and
//! from then on the recording is replayed: with new tokens in the same place, and gradients added to the same flat tensor.
//! The optimizer is not part of it: its learning rate changes in every step, and it is a handful of launches.

use candle_core::{Result, Tensor};

use super::Transformer;

/// Runs forward and backward of a model, by replay where that is possible.
pub struct Replay {
    model: Transformer,
    #[cfg(feature = "cuda")]
    state: cuda::State,
    why_not: Option<String>,
}

impl Replay {
    /// For this model. Nothing runs yet.
    pub fn new(model: &Transformer) -> Replay {
        let why_not = (!model.params().device().is_cuda()).then(|| "the CPU has no graphs".to_string());
        Replay {
            model: model.clone(),
            #[cfg(feature = "cuda")]
            state: cuda::State::default(),
            why_not,
        }
    }

    /// Why passes are not replayed, if they are not: on the CPU, and where recording has failed.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Adds the gradient of factor · loss to the model's gradients, and returns the loss: see [`Transformer::loss`].
    ///
    /// While someone listens for finished gradients ([`crate::params::Params::on_grad_ready`]), nothing is replayed: a
    /// recording calls nobody.
    ///
    /// # Errors
    /// As [`Transformer::loss`].
    pub fn forward_backward(&mut self, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.why_not.is_none() && !self.model.params().has_listeners() {
            return match self.state.run(&self.model, tokens, targets, factor) {
                Ok(cuda::Outcome::Done(loss)) => Ok(loss),
                Ok(cuda::Outcome::CannotRecord(why)) => {
                    self.why_not = Some(why);
                    pass(&self.model, tokens, targets, factor)
                }
                Err(error) => Err(error),
            };
        }
        pass(&self.model, tokens, targets, factor)
    }
}

/// One pass as it always runs.
fn pass(model: &Transformer, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Tensor> {
    let loss = model.loss(tokens, targets)?;
    let scaled = if factor == 1.0 { loss.clone() } else { (&loss * factor)? };
    scaled.backward()?;
    Ok(loss.detach())
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::cuda::cudarc::driver::{CudaGraph, sys};
    use candle_core::{DType, Result, Tensor};

    use super::{Transformer, pass};

    /// What a recording depends on.
    #[derive(Clone, PartialEq)]
    pub struct Key {
        shape: Vec<usize>,
        factor: f64,
    }

    /// How far the way to a recording has come.
    #[derive(Default)]
    pub enum State {
        #[default]
        Cold,
        /// A pass of this key has run, so that nothing is left to load.
        Warm(Key),
        Recorded(Key, Recording),
    }

    /// A graph, and the memory that it reads and writes.
    pub struct Recording {
        graph: CudaGraph,
        tokens: Tensor,
        targets: Tensor,
        /// f32 [1].
        loss: Tensor,
    }

    pub enum Outcome {
        Done(Tensor),
        CannotRecord(String),
    }

    impl State {
        pub fn run(&mut self, model: &Transformer, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Outcome> {
            let key = Key { shape: tokens.dims().to_vec(), factor };
            // Candle uploads shapes for some kernels: it keeps those of the warm pass for the recording.
            let _uploads = tokens.device().as_cuda_device()?.enable_cuda_graph_htod_cache();
            match self {
                State::Recorded(known, recording) if *known == key => {
                    return recording.replay(tokens, targets).map(Outcome::Done);
                }
                State::Warm(known) if *known == key => {}
                State::Cold | State::Warm(_) | State::Recorded(..) => {
                    *self = State::Cold;
                    let loss = pass(model, tokens, targets, factor)?;
                    *self = State::Warm(key);
                    return Ok(Outcome::Done(loss));
                }
            }
            match Recording::new(model, tokens, targets, factor) {
                Ok(recording) => {
                    let loss = recording.replay(tokens, targets)?;
                    *self = State::Recorded(key, recording);
                    Ok(Outcome::Done(loss))
                }
                Err(error) => Ok(Outcome::CannotRecord(format!("recording a CUDA graph failed: {error}"))),
            }
        }
    }

    impl Recording {
        /// Records a pass; none of it runs.
        fn new(model: &Transformer, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Recording> {
            let stream = tokens.device().as_cuda_device()?.cuda_stream();
            let (tokens, targets) = (tokens.force_contiguous()?, targets.force_contiguous()?);
            let loss = Tensor::zeros(1, DType::F32, tokens.device())?;
            let failed = |error| candle_core::Error::Msg(format!("{error}"));
            stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
            // Everything that the pass allocates is freed in here too, and so belongs to the graph.
            let recorded = pass(model, &tokens, &targets, factor).and_then(|l| loss.slice_set(&l.reshape(1)?, 0, 0));
            let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            // Ended whatever happened: the stream would refuse everything else.
            let graph = stream.end_capture(flags);
            recorded?;
            match graph.map_err(failed)? {
                Some(graph) => Ok(Recording { graph, tokens, targets, loss }),
                None => Err(candle_core::Error::Msg("the stream recorded nothing".into())),
            }
        }

        fn replay(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
            self.tokens.slice_set(&tokens.contiguous()?, 0, 0)?;
            self.targets.slice_set(&targets.contiguous()?, 0, 0)?;
            self.graph.launch().map_err(|error| candle_core::Error::Msg(format!("replaying a pass: {error}")))?;
            // The next replay writes over it.
            self.loss.force_contiguous()?.reshape(())
        }
    }
}
