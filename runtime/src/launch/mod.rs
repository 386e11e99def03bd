//! Compiled kernels on a device, and their launch.

mod arg;
mod bounds;
mod check;
mod cuda;
mod host;
mod simulated;
mod tensor_map;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use smallvec::SmallVec;
use tilewright_codegen::analysis::bounds::Footprint;
use tilewright_codegen::llvm::JitModule;
use tilewright_codegen::target::{Artifact, Code, HostEntry, Manifest, clocks};

pub use arg::LaunchArg;
pub(crate) use arg::Values;
pub use cuda::Resources;
pub use tensor_map::{TensorMapParameters, tensor_maps};

use crate::device::{Cuda, Device, Inner};
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::trace;

/// Values of the kernel's arguments, one 8-byte slot for each, in the manifest's order.
type Slots = SmallVec<[u64; 32]>;

/// An artifact that is loaded on a device and ready to run. Cloning is cheap.
#[derive(Clone)]
pub struct CompiledKernel {
    kernel: Arc<Kernel>,
    /// The device of launches: it has the memory that the code is loaded for, but its stream may be another one.
    device: Device,
}

struct Kernel {
    manifest: Manifest,
    /// "`matmul` (src/matmul.rs:12)", for messages.
    label: Arc<str>,
    /// Indices in the manifest of the arguments that the caller passes: all except the tensor maps.
    passed: Vec<usize>,
    code: Loaded,
    /// The device on which the code was loaded. Dropped after the code, which needs its context.
    _device: Device,
}

enum Loaded {
    Host(JitModule),
    /// Native code that the build of this program linked.
    Linked(HostEntry),
    Cuda(cuda::Function),
    Simulated(simulated::Code),
}

impl Device {
    /// Loads the code through the driver, or links it into this process.
    ///
    /// # Errors
    /// The artifact is for another target; its footprint is of another kernel; the driver rejects the PTX (its log is in
    /// the message); the kernel needs more shared memory or registers than the device has.
    pub fn load(&self, artifact: &Artifact) -> Result<CompiledKernel> {
        let manifest = artifact.manifest.clone();
        let label = label(&manifest);
        let code = match (&artifact.code, self.inner()) {
            (Code::Object(object), Inner::Cpu(_)) => Loaded::Host(JitModule::load(object, &manifest.entry)?),
            (Code::Ptx(ptx), Inner::Cuda(cuda)) => Loaded::Cuda(cuda::Function::load(cuda, &manifest, &label, ptx)?),
            (Code::Object(_), Inner::Cuda(_)) | (Code::Ptx(_), Inner::Cpu(_)) | (_, Inner::Simulated(_)) => {
                return Err(self.cannot_load(&manifest));
            }
        };
        self.check_footprint(&manifest)?;
        Ok(self.loaded(manifest, code))
    }

    /// Native code that is part of this program; `entry` is the entry that the manifest names.
    pub(crate) fn load_linked(&self, manifest: &Manifest, entry: HostEntry) -> Result<CompiledKernel> {
        match (manifest.target.as_str(), self.inner()) {
            ("host", Inner::Cpu(_)) => {
                self.check_footprint(manifest)?;
                Ok(self.loaded(manifest.clone(), Loaded::Linked(entry)))
            }
            _ => Err(self.cannot_load(manifest)),
        }
    }

    /// The error for code that this kind of device does not run.
    fn cannot_load(&self, manifest: &Manifest) -> Error {
        let (kernel, device, found) = (label(manifest), self.to_string(), manifest.target.clone());
        match self.inner() {
            Inner::Simulated(_) => Error::CompiledForSimulation { kernel, device, found },
            Inner::Cpu(_) | Inner::Cuda(_) => {
                Error::WrongTarget { kernel, device, expected: self.target().to_string(), found }
            }
        }
    }

    /// Checks that the footprint is of a kernel with these arguments: its evaluation refers to them by index.
    fn check_footprint(&self, manifest: &Manifest) -> Result<()> {
        let passed = check::passed_arguments(manifest).len();
        match manifest.footprint.as_ref().map(Footprint::argument_count) {
            Some(count) if count != passed => Err(Error::InvalidManifest {
                reason: format!("its footprint is of a kernel with {count} arguments: it lists {passed}"),
            }),
            Some(_) | None => Ok(()),
        }
    }

    fn loaded(&self, manifest: Manifest, code: Loaded) -> CompiledKernel {
        let passed = check::passed_arguments(&manifest);
        let label = label(&manifest).into();
        let kernel = Kernel { manifest, label, passed, code, _device: self.clone() };
        CompiledKernel { kernel: Arc::new(kernel), device: self.clone() }
    }
}

/// The kernel and its source location, for messages.
fn label(manifest: &Manifest) -> String {
    format!("`{}` ({})", manifest.kernel, manifest.source)
}

impl CompiledKernel {
    /// The kernel, with the footprint of its code. Launches check the assumptions that the code relies on, also about
    /// ranges.
    pub(crate) fn with_footprint(mut self, footprint: Footprint, assume_ranges: bool) -> CompiledKernel {
        let kernel = Arc::get_mut(&mut self.kernel).expect("internal compiler error: a kernel that is already shared");
        kernel.manifest.footprint = Some(footprint);
        if let Some(of) = &mut kernel.manifest.clocks_of {
            of.assume_ranges = assume_ranges;
        }
        self
    }

    /// The kernel, with launches on the stream of `device`, which is of the same GPU.
    pub(crate) fn on(self, device: &Device) -> CompiledKernel {
        CompiledKernel { device: device.clone(), ..self }
    }

    /// Checks a launch of code that was compiled ahead of time: number and types of the arguments, the assumptions about
    /// their values, and what [`kernel::launch`](crate::kernel::launch) proves, by the footprint in the manifest.
    ///
    /// # Errors
    /// What does not hold, or that the manifest has no footprint.
    pub fn check(&self, grid: [u32; 3], args: &[LaunchArg]) -> Result<()> {
        check::bind_arguments(&self.kernel, args)?;
        self.check_bounds(grid, args)
    }

    /// Proves that every access of a launch is in bounds of its argument's memory, and checks the kernel's
    /// preconditions. The arguments match the manifest.
    ///
    /// # Errors
    /// The access that may be out of bounds, or the violated precondition.
    pub(crate) fn check_bounds(&self, grid: [u32; 3], args: &[LaunchArg]) -> Result<()> {
        bounds::check(&self.kernel, args, grid)
    }

    /// Whether the code relies on an assumption about ranges that may not hold in this launch.
    pub(crate) fn violates_assumption(&self, grid: [u32; 3], args: &[LaunchArg]) -> bool {
        check::ranges(&self.kernel, grid, args).is_err()
    }

    /// The kernel and its source location, for messages.
    pub(crate) fn label(&self) -> &str {
        &self.kernel.label
    }

    /// Launches `grid` program instances on the device's stream: [`CompiledKernel::launch_on`].
    ///
    /// # Safety
    /// As for [`CompiledKernel::launch_on`].
    pub unsafe fn launch(&self, grid: [u32; 3], args: &[LaunchArg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(None, grid, args) }
    }

    /// Launches `grid` program instances (x, y, z) on `stream`. On the CPU they have run when this returns.
    ///
    /// `args` are the kernel's arguments in the manifest's order, without the tensor maps, which are encoded here. A
    /// grid with a zero extent does nothing, after the same checks.
    ///
    /// # Errors
    /// All failed checks before the launch: number and types of arguments, alignment, values and ranges that this
    /// variant of the kernel was compiled for, grid limits, tensors that no tensor map describes. On the CPU also a
    /// failed `device_assert`, which a GPU reports at [`Device::synchronize`].
    ///
    /// # Safety
    /// Every pointer argument must be the address of live memory of this kernel's device that holds what the kernel
    /// reads and writes through it, and stay so until the launch is done. Nothing else may write what the kernel reads,
    /// nor access what it writes, until then; work on other streams must be ordered by events.
    pub unsafe fn launch_on(&self, stream: &Stream, grid: [u32; 3], args: &[LaunchArg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(Some(stream), grid, args) }
    }

    /// Launches on `stream`, or on the device's stream if it is `None`.
    ///
    /// # Safety
    /// As for [`CompiledKernel::launch_on`].
    unsafe fn launch_with(&self, stream: Option<&Stream>, grid: [u32; 3], args: &[LaunchArg]) -> Result<()> {
        let kernel = &*self.kernel;
        let slots = check::bind_arguments(kernel, args)?;
        let blocks = check::grid(kernel, grid)?;
        check::ranges(kernel, grid, args)?;
        if grid.contains(&0) {
            return Ok(());
        }
        let _span = trace::span_of(&kernel.manifest.kernel);
        let on_host = |entry: HostEntry| {
            // SAFETY: the arguments match the manifest, which describes the entry; the rest is the caller's promise.
            let outcome = unsafe { host::run_grid(entry, &slots, grid, kernel.manifest.arena_bytes) };
            outcome.map_err(|failure| failure.into_error(&kernel.label))
        };
        match (&kernel.code, self.device.inner()) {
            (Loaded::Host(module), _) => on_host(module.entry()),
            (Loaded::Linked(entry), _) => on_host(*entry),
            (Loaded::Cuda(function), Inner::Cuda(cuda)) => {
                let stream = match stream {
                    None => &cuda.stream,
                    Some(stream) => self.stream_of_same_gpu(cuda, stream)?,
                };
                // SAFETY: as above.
                unsafe { function.launch(cuda, stream, kernel, blocks, &slots) }
            }
            (Loaded::Simulated(code), Inner::Simulated(simulated)) => {
                // SAFETY: as above.
                unsafe { simulated::run_grid(simulated, code, kernel, blocks, args, &slots) }
            }
            (Loaded::Cuda(_), Inner::Cpu(_) | Inner::Simulated(_))
            | (Loaded::Simulated(_), Inner::Cpu(_) | Inner::Cuda(_)) => {
                unreachable!("internal compiler error: code was loaded on another kind of device; please report this")
            }
        }
    }

    /// The compiler's description of the code.
    pub fn manifest(&self) -> &Manifest {
        &self.kernel.manifest
    }

    /// The device that the code is loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Registers, spills and occupancy, as reported by the driver; `None` on the CPU.
    pub fn resources(&self) -> Option<&Resources> {
        match &self.kernel.code {
            Loaded::Host(_) | Loaded::Linked(_) | Loaded::Simulated(_) => None,
            Loaded::Cuda(function) => Some(function.resources()),
        }
    }

    /// The clocks that the last launch recorded ([`LaunchConfig::clocks`]), of each warpgroup of the block; waits for the
    /// GPU. Empty for code that records none, as on the CPU, before its first launch, and if the grid has no such block.
    ///
    /// [`LaunchConfig::clocks`]: crate::LaunchConfig::clocks
    ///
    /// # Errors
    /// Failures of kernels that were queued before.
    pub fn clocks(&self) -> Result<Vec<Vec<clocks::Event>>> {
        Ok(clocks::decode(&match &self.kernel.code {
            Loaded::Host(_) | Loaded::Linked(_) => Vec::new(),
            Loaded::Simulated(code) => code.clocks(),
            Loaded::Cuda(function) => function.clocks()?,
        }))
    }

    /// Output of the driver's PTX compiler; empty on the CPU.
    pub fn jit_log(&self) -> &str {
        match &self.kernel.code {
            Loaded::Host(_) | Loaded::Linked(_) | Loaded::Simulated(_) => "",
            Loaded::Cuda(function) => function.log(),
        }
    }
}

impl CompiledKernel {
    fn stream_of_same_gpu<'s>(&self, cuda: &Cuda, stream: &'s Stream) -> Result<&'s Arc<CudaStream>> {
        let other = stream.cuda_stream().filter(|other| other.context().cu_ctx() == cuda.context.cu_ctx());
        other.ok_or_else(|| Error::DifferentDevices {
            what: "a launch on a stream",
            left: self.device.to_string(),
            right: stream.device().to_string(),
        })
    }
}

impl fmt::Debug for CompiledKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompiledKernel({} on {})", self.kernel.label, self.device)
    }
}
