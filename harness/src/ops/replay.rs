//! Work of a fixed shape again and again: on a GPU as a CUDA graph, which starts the hundreds of kernels of a pass at once.
//!
//! The first run of a shape goes as it always does, which compiles and loads every kernel. The second one is recorded, and from
//! then on the recording is replayed: with new inputs in the same place, and on the same memory of everything else.

use candle_core::{Device, Result, Tensor};

/// Runs work of one kind, by replay where that is possible.
pub struct Replay {
    #[cfg(feature = "cuda")]
    state: cuda::State,
    why_not: Option<String>,
}

impl Replay {
    /// For work on this device. Nothing runs yet.
    pub fn new(device: &Device) -> Replay {
        Replay {
            #[cfg(feature = "cuda")]
            state: cuda::State::default(),
            why_not: (!device.is_cuda()).then(|| "the CPU has no graphs".to_string()),
        }
    }

    /// Work that is never replayed, for this reason.
    pub fn never(why: impl Into<String>) -> Replay {
        let mut replay = Replay::new(&Device::Cpu);
        replay.why_not = Some(why.into());
        replay
    }

    /// Why work is not replayed, if it is not: on the CPU, and where recording has failed.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Runs `work` on `inputs`.
    ///
    /// The work must depend on nothing but the inputs' elements, memory that it always uses, and `key` with the inputs' shapes and
    /// types: a change of those, or of what products leave to others ([`super::leave_multiprocessors`]), is a new recording. It must not wait for the device, and what it allocates it must free: results go
    /// into memory of the caller. In a replay it does not run: only what it queued on the device happens again.
    ///
    /// # Errors
    /// Those of the work.
    pub fn run<E: From<candle_core::Error> + std::fmt::Display>(
        &mut self,
        key: &[u64],
        inputs: &[&Tensor],
        mut work: impl FnMut(&[Tensor]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        #[cfg(feature = "cuda")]
        if self.why_not.is_none() {
            match self.state.run(key, inputs, &mut work)? {
                cuda::Outcome::Done => return Ok(()),
                cuda::Outcome::CannotRecord(why) => {
                    tracing::warn!("{why}: every step starts its kernels one by one");
                    self.why_not = Some(why);
                }
            }
        }
        let _ = key;
        work(&contiguous(inputs)?)
    }
}

fn contiguous(inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    inputs.iter().map(|input| input.contiguous()).collect()
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::cuda::cudarc::driver::{CudaGraph, sys};
    use candle_core::{DType, Error, Result, Tensor};

    use super::contiguous;
    use crate::ops::left_multiprocessors;
    use crate::ops::memory::{kernel_device, kernel_error};

    /// What a recording depends on.
    #[derive(Clone, PartialEq)]
    pub struct Key {
        of_work: Vec<u64>,
        /// Multiprocessors that products leave to others.
        left: u32,
        inputs: Vec<(Vec<usize>, DType)>,
    }

    /// How far the way to a recording has come.
    #[derive(Default)]
    pub enum State {
        #[default]
        Cold,
        /// Work of this key has run, so that nothing is left to load.
        Warm(Key),
        Recorded(Key, Recording),
    }

    /// A graph, and the memory that it reads and writes.
    pub struct Recording {
        graph: CudaGraph,
        inputs: Vec<Tensor>,
    }

    pub enum Outcome {
        Done,
        CannotRecord(String),
    }

    impl State {
        pub fn run<E: From<Error> + std::fmt::Display>(
            &mut self,
            key: &[u64],
            inputs: &[&Tensor],
            work: &mut impl FnMut(&[Tensor]) -> std::result::Result<(), E>,
        ) -> std::result::Result<Outcome, E> {
            let Some(first) = inputs.first() else {
                return Ok(Outcome::CannotRecord("work without inputs is not recorded".into()));
            };
            let shapes = inputs.iter().map(|input| (input.dims().to_vec(), input.dtype())).collect();
            let key = Key { of_work: key.to_vec(), left: left_multiprocessors(), inputs: shapes };
            // Candle uploads shapes for some kernels: it keeps those of the warm run for the recording.
            let _uploads = first.device().as_cuda_device()?.enable_cuda_graph_htod_cache();
            match self {
                State::Recorded(known, recording) if *known == key => {
                    recording.replay(inputs)?;
                    return Ok(Outcome::Done);
                }
                State::Warm(known) if *known == key => {}
                State::Cold | State::Warm(_) | State::Recorded(..) => {
                    *self = State::Cold;
                    work(&contiguous(inputs)?)?;
                    *self = State::Warm(key);
                    return Ok(Outcome::Done);
                }
            }
            match Recording::new(inputs, work) {
                Ok(recording) => {
                    recording.replay(inputs)?;
                    *self = State::Recorded(key, recording);
                    Ok(Outcome::Done)
                }
                Err(error) => Ok(Outcome::CannotRecord(format!("recording a CUDA graph failed: {error}"))),
            }
        }
    }

    impl Recording {
        /// Records the work; none of it runs.
        fn new<E: From<Error> + std::fmt::Display>(
            inputs: &[&Tensor],
            work: &mut impl FnMut(&[Tensor]) -> std::result::Result<(), E>,
        ) -> Result<Recording> {
            let inputs = inputs.iter().map(|input| input.force_contiguous()).collect::<Result<Vec<_>>>()?;
            let device = inputs[0].device();
            // A graph has memory of its own: what the warm run needed would lie idle beside it.
            let kernels = kernel_device(device)?;
            kernels.synchronize().and_then(|()| kernels.release_unused_memory()).map_err(kernel_error)?;
            let stream = device.as_cuda_device()?.cuda_stream();
            let failed = |error| Error::Msg(format!("{error}"));
            stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
            let outcome = work(&inputs);
            let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            // Ended whatever happened: the stream would refuse everything else.
            let graph = stream.end_capture(flags);
            outcome.map_err(|error| Error::Msg(error.to_string()))?;
            match graph.map_err(failed)? {
                Some(graph) => Ok(Recording { graph, inputs }),
                None => Err(Error::Msg("the stream recorded nothing".into())),
            }
        }

        fn replay(&self, inputs: &[&Tensor]) -> Result<()> {
            for (kept, new) in self.inputs.iter().zip(inputs) {
                kept.slice_set(&new.contiguous()?, 0, 0)?;
            }
            self.graph.launch().map_err(|error| Error::Msg(format!("replaying a CUDA graph: {error}")))
        }
    }
}
