//! Repeats work of fixed shapes, on a GPU as a CUDA graph, which launches the hundreds of kernels of a pass with one
//! call.
//!
//! The first run with given shapes is eager, and compiles and loads every kernel. The second run is captured. From then
//! on the graph is launched, with new inputs copied to the addresses of the captured inputs; all other memory is that
//! of the capture.

use candle_core::{Device, Result, Tensor};

/// Runs one kind of work, as a CUDA graph if possible.
pub struct GraphRunner {
    #[cfg(feature = "cuda")]
    state: cuda::State,
    fallback_reason: Option<String>,
}

impl GraphRunner {
    /// Creates a runner for work on this device. Runs nothing yet.
    pub fn new(device: &Device) -> GraphRunner {
        GraphRunner {
            #[cfg(feature = "cuda")]
            state: cuda::State::default(),
            fallback_reason: (!device.is_cuda()).then(|| "the CPU has no CUDA graphs".to_string()),
        }
    }

    /// Creates a runner that never captures, for this reason.
    pub fn disabled(reason: impl Into<String>) -> GraphRunner {
        let mut runner = GraphRunner::new(&Device::Cpu);
        runner.fallback_reason = Some(reason.into());
        runner
    }

    /// Why work runs eagerly, if it does: on the CPU, and after a failed capture.
    pub fn fallback_reason(&self) -> Option<&str> {
        self.fallback_reason.as_deref()
    }

    /// Runs `work` on `inputs`.
    ///
    /// The work must depend only on the elements of the inputs, on memory with constant addresses, on `key`, and on the
    /// shapes and dtypes of the inputs. A change of `key`, shapes, dtypes or the number of reserved SMs
    /// ([`crate::matmul::reserve_sms`]) starts a new capture. The work must not wait for the device, and must free what it
    /// allocates: results go to memory of the caller. A graph launch does not run the closure; it repeats only what the
    /// closure queued on the device.
    ///
    /// # Safety
    /// While this runner lives, the memory that the work uses, beside the inputs and what it allocates itself, is alive at
    /// the same addresses: every launch of the graph reads and writes there.
    ///
    /// # Errors
    /// Those of the work.
    pub unsafe fn run<E: From<candle_core::Error> + std::fmt::Display>(
        &mut self,
        key: &[u64],
        inputs: &[&Tensor],
        mut work: impl FnMut(&[Tensor]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        #[cfg(feature = "cuda")]
        if self.fallback_reason.is_none() {
            match self.state.run(key, inputs, &mut work)? {
                cuda::Outcome::Done => return Ok(()),
                cuda::Outcome::CannotCapture(why) => {
                    tracing::warn!("{why}: every step launches its kernels eagerly");
                    self.fallback_reason = Some(why);
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
    use crate::memory::{kernel_device, kernel_error};
    use crate::reserved_sms;

    /// Everything that a captured graph depends on.
    #[derive(Clone, PartialEq)]
    pub struct Key {
        work_key: Vec<u64>,
        /// SMs that matmuls leave free.
        reserved_sms: u32,
        inputs: Vec<(Vec<usize>, DType)>,
    }

    /// Progress towards a captured graph.
    #[derive(Default)]
    pub enum State {
        #[default]
        Cold,
        /// Work with this key has run, so all kernels are loaded.
        Warm(Key),
        Captured(Key, CapturedGraph),
    }

    /// A graph, and the inputs that it reads.
    pub struct CapturedGraph {
        graph: CudaGraph,
        inputs: Vec<Tensor>,
    }

    pub enum Outcome {
        Done,
        CannotCapture(String),
    }

    impl State {
        /// Advances by one run: launches the captured graph, captures it, or runs the work eagerly.
        pub fn run<E: From<Error> + std::fmt::Display>(
            &mut self,
            key: &[u64],
            inputs: &[&Tensor],
            work: &mut impl FnMut(&[Tensor]) -> std::result::Result<(), E>,
        ) -> std::result::Result<Outcome, E> {
            let Some(first) = inputs.first() else {
                return Ok(Outcome::CannotCapture("work without inputs cannot be captured".into()));
            };
            let shapes = inputs.iter().map(|input| (input.dims().to_vec(), input.dtype())).collect();
            let key = Key { work_key: key.to_vec(), reserved_sms: reserved_sms(), inputs: shapes };
            // Candle uploads shapes for some kernels; this keeps those of the warm run for the capture.
            let _uploads = first.device().as_cuda_device()?.enable_cuda_graph_htod_cache();
            match self {
                State::Captured(known, graph) if *known == key => {
                    graph.launch(inputs)?;
                    return Ok(Outcome::Done);
                }
                State::Warm(known) if *known == key => {}
                State::Cold | State::Warm(_) | State::Captured(..) => {
                    *self = State::Cold;
                    work(&contiguous(inputs)?)?;
                    *self = State::Warm(key);
                    return Ok(Outcome::Done);
                }
            }
            match CapturedGraph::new(inputs, work) {
                Ok(graph) => {
                    graph.launch(inputs)?;
                    *self = State::Captured(key, graph);
                    Ok(Outcome::Done)
                }
                Err(error) => Ok(Outcome::CannotCapture(format!("capturing a CUDA graph failed: {error}"))),
            }
        }
    }

    impl CapturedGraph {
        /// Captures the work without running it.
        fn new<E: From<Error> + std::fmt::Display>(
            inputs: &[&Tensor],
            work: &mut impl FnMut(&[Tensor]) -> std::result::Result<(), E>,
        ) -> Result<CapturedGraph> {
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
                Some(graph) => Ok(CapturedGraph { graph, inputs }),
                None => Err(Error::Msg("the stream captured nothing".into())),
            }
        }

        fn launch(&self, inputs: &[&Tensor]) -> Result<()> {
            for (captured, new) in self.inputs.iter().zip(inputs) {
                captured.slice_set(&new.contiguous()?, 0, 0)?;
            }
            self.graph.launch().map_err(|error| Error::Msg(format!("launching a CUDA graph failed: {error}")))
        }
    }
}
