//! Repeats work of fixed shapes, on a GPU as a CUDA graph, which launches the hundreds of kernels of a pass with one
//! call.
//!
//! The first run with given shapes is eager, and compiles and loads every kernel. The second run is captured. From then
//! on the graph is launched, with new inputs copied to the addresses of the captured inputs; all other memory is that
//! of the capture.

use candle_core::{Device, Result, Tensor};

/// Runs one kind of work, as a CUDA graph if possible.
pub struct Replay {
    #[cfg(feature = "cuda")]
    state: cuda::State,
    why_not: Option<String>,
}

impl Replay {
    /// Creates a runner for work on this device. Runs nothing yet.
    pub fn new(device: &Device) -> Replay {
        Replay {
            #[cfg(feature = "cuda")]
            state: cuda::State::default(),
            why_not: (!device.is_cuda()).then(|| "the CPU has no CUDA graphs".to_string()),
        }
    }

    /// Creates a runner that never captures, for this reason.
    pub fn never(why: impl Into<String>) -> Replay {
        let mut replay = Replay::new(&Device::Cpu);
        replay.why_not = Some(why.into());
        replay
    }

    /// Why work runs eagerly, if it does: on the CPU, and after a failed capture.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Runs `work` on `inputs`.
    ///
    /// The work must depend only on the elements of the inputs, on memory with constant addresses, on `key`, and on the
    /// shapes and dtypes of the inputs. A change of `key`, shapes, dtypes or the number of reserved SMs
    /// ([`super::leave_multiprocessors`]) starts a new capture. The work must not wait for the device, and must free
    /// what it allocates: results go to memory of the caller. A graph launch does not run the closure; it repeats only
    /// what the closure queued on the device.
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
                    tracing::warn!("{why}: every step launches its kernels eagerly");
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

    /// Everything that a captured graph depends on.
    #[derive(Clone, PartialEq)]
    pub struct Key {
        of_work: Vec<u64>,
        /// SMs that matmuls leave free.
        left: u32,
        inputs: Vec<(Vec<usize>, DType)>,
    }

    /// Progress towards a captured graph.
    #[derive(Default)]
    pub enum State {
        #[default]
        Cold,
        /// Work with this key has run, so all kernels are loaded.
        Warm(Key),
        Recorded(Key, Recording),
    }

    /// A graph, and the inputs that it reads.
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
                return Ok(Outcome::CannotRecord("work without inputs cannot be captured".into()));
            };
            let shapes = inputs.iter().map(|input| (input.dims().to_vec(), input.dtype())).collect();
            let key = Key { of_work: key.to_vec(), left: left_multiprocessors(), inputs: shapes };
            // Candle uploads shapes for some kernels; this keeps those of the warm run for the capture.
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
                Err(error) => Ok(Outcome::CannotRecord(format!("capturing a CUDA graph failed: {error}"))),
            }
        }
    }

    impl Recording {
        /// Captures the work without running it.
        fn new<E: From<Error> + std::fmt::Display>(
            inputs: &[&Tensor],
            work: &mut impl FnMut(&[Tensor]) -> std::result::Result<(), E>,
        ) -> Result<Recording> {
            let inputs = inputs.iter().map(|input| input.force_contiguous()).collect::<Result<Vec<_>>>()?;
            let device = inputs[0].device();
            // A graph allocates its own memory: release what the warm run left in the pool.
            let kernels = kernel_device(device)?;
            kernels.synchronize().and_then(|()| kernels.release_unused_memory()).map_err(kernel_error)?;
            let stream = device.as_cuda_device()?.cuda_stream();
            let failed = |error| Error::Msg(format!("{error}"));
            stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
            let outcome = work(&inputs);
            let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            // End the capture on every path: otherwise the stream refuses everything else.
            let graph = stream.end_capture(flags);
            outcome.map_err(|error| Error::Msg(error.to_string()))?;
            match graph.map_err(failed)? {
                Some(graph) => Ok(Recording { graph, inputs }),
                None => Err(Error::Msg("the stream captured nothing".into())),
            }
        }

        fn replay(&self, inputs: &[&Tensor]) -> Result<()> {
            for (kept, new) in self.inputs.iter().zip(inputs) {
                kept.slice_set(&new.contiguous()?, 0, 0)?;
            }
            self.graph.launch().map_err(|error| Error::Msg(format!("launching a CUDA graph failed: {error}")))
        }
    }
}
