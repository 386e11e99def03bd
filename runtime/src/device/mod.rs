//! Devices that run kernels: one GPU, the CPU, or a GPU simulated on the CPU.

mod cpu;
mod cuda;
mod driver;
mod host_memory;
mod memory;
mod simulated;

use std::fmt;
use std::sync::Arc;

use tilewright_codegen::target::{CompileOptions, GpuArch, HostCpu, Target};

pub(crate) use cpu::Cpu;
pub(crate) use cuda::Cuda;
pub(crate) use driver::{driver_version, gpu_count};
pub(crate) use host_memory::{check_allocation, exit_out_of_memory};
pub use host_memory::{check_host_memory, has_ample_host_memory, reserve_host_memory};
pub(crate) use memory::{HostMemory, Memory};
pub(crate) use simulated::Simulated;

use crate::env::{DeviceChoice, Env};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// A GPU, the CPU, or a simulated GPU. Cloning is cheap and returns the same device, with the same stream.
///
/// Work on a GPU is asynchronous: launches and fills queue on the device's stream, in order; reading a buffer waits for
/// the work it depends on. Work on the CPU is complete when the call returns.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

pub(crate) enum Inner {
    Cpu(Cpu),
    Cuda(Cuda),
    Simulated(Simulated),
}

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The vendor's name for it.
    pub name: String,
    /// Compute capability, on a GPU.
    pub compute_capability: Option<(i32, i32)>,
    /// CUDA version of the driver as major × 1000 + minor × 10 (12.8 is 12080), on a GPU.
    pub driver_version: Option<i32>,
    /// Memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// Streaming multiprocessors (SMs) of a GPU, worker threads of the CPU.
    pub compute_units: u32,
    /// L2 cache of a GPU in bytes; 0 on the CPU.
    pub l2_bytes: u64,
    /// Maximum shared memory of one block, in bytes; 0 on the CPU.
    pub max_shared_bytes: u32,
}

impl Device {
    /// The GPU with this ordinal, counted from 0 among those that `CUDA_VISIBLE_DEVICES` leaves visible.
    ///
    /// It gets a new stream, and the device's memory pool keeps freed memory for reuse.
    ///
    /// # Errors
    /// No driver, no such GPU, or a GPU older than compute capability 8.0.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Ok(Device(Arc::new(Inner::Cuda(Cuda::new(ordinal)?))))
    }

    /// The GPU of `stream`, on which launches and copies are then queued: this orders kernels with another library's
    /// work.
    ///
    /// # Errors
    /// A GPU older than compute capability 8.0, or a driver that does not respond.
    pub fn from_cuda_stream(stream: Arc<cudarc::driver::CudaStream>) -> Result<Device> {
        Ok(Device(Arc::new(Inner::Cuda(Cuda::from_stream(stream)?))))
    }

    /// This GPU with another library's stream, on which launches and copies are queued. The handle is a `CUstream` of the
    /// GPU's primary context, which the CUDA runtime and thereby PyTorch use; 0 is the legacy default stream. Makes no call
    /// of the driver, so it works while the stream is captured in a graph. `None` on the CPU and a simulated GPU.
    ///
    /// # Safety
    /// The handle is a stream of this GPU's primary context, and stays one as long as the device or a copy of it is in use.
    pub unsafe fn with_cuda_stream(&self, handle: u64) -> Option<Device> {
        match self.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => None,
            // SAFETY: the caller's promise.
            Inner::Cuda(cuda) => Some(Device(Arc::new(Inner::Cuda(unsafe { cuda.with_stream(handle) })))),
        }
    }

    /// This machine's CPU: the grid of a kernel runs on rayon's thread pool.
    pub fn cpu() -> Device {
        Device(Arc::new(Inner::Cpu(Cpu::new())))
    }

    /// A GPU of this architecture, simulated thread by thread on the CPU: for tests of kernels without a GPU.
    ///
    /// Kernels are compiled as for a real GPU. A launch reports, with the line of the kernel, errors that a GPU shows
    /// only in some runs: data races in shared memory and between programs, misaligned or out-of-bounds accesses,
    /// missing waits for asynchronous copies, and deadlocks. It is some thousand times slower than a GPU: use small
    /// shapes. Buffers are host memory; the output of `device_print` is discarded.
    ///
    /// ```no_run
    /// use tilewright_codegen::target::GpuArch;
    /// use tilewright_runtime::Device;
    ///
    /// let device = Device::simulated(GpuArch::Sm90a);
    /// ```
    pub fn simulated(arch: GpuArch) -> Device {
        Device::simulated_with_seed(arch, 1)
    }

    /// Like [`Device::simulated`], with programs and threads in a random order from `seed`. A GPU may run them in any
    /// such order.
    pub fn simulated_with_seed(arch: GpuArch, seed: u64) -> Device {
        Device(Arc::new(Inner::Simulated(Simulated::new(arch, seed))))
    }

    /// The device that `TILEWRIGHT_DEVICE` names; without it, GPU 0 if a driver responds and that GPU is supported,
    /// else the CPU.
    ///
    /// # Errors
    /// An invalid `TILEWRIGHT_DEVICE`, or a device that it names and that does not work. Without the variable this
    /// never fails.
    pub fn best() -> Result<Device> {
        match Env::get()?.device {
            Some(DeviceChoice::Cpu) => Ok(Device::cpu()),
            Some(DeviceChoice::Cuda(ordinal)) => Device::cuda(ordinal),
            None => Ok(Device::cuda(0).unwrap_or_else(|error| {
                tracing::debug!("running on the CPU: {error}");
                Device::cpu()
            })),
        }
    }

    /// Whether this is a GPU; false for a simulated one.
    pub fn is_cuda(&self) -> bool {
        matches!(*self.0, Inner::Cuda(_))
    }

    /// Whether this is a simulated GPU.
    pub fn is_simulated(&self) -> bool {
        matches!(*self.0, Inner::Simulated(_))
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        match &*self.0 {
            Inner::Cpu(cpu) => &cpu.info,
            Inner::Cuda(cuda) => &cuda.info,
            Inner::Simulated(simulated) => &simulated.info,
        }
    }

    /// The target to compile for.
    pub fn target(&self) -> Target {
        match &*self.0 {
            Inner::Cpu(cpu) => Target::Host(cpu.host_cpu().clone()),
            Inner::Cuda(cuda) => Target::Nvptx(cuda.arch),
            Inner::Simulated(simulated) => Target::Nvptx(simulated.arch),
        }
    }

    /// The GPU architecture to compile for; `None` on the CPU.
    pub fn gpu_arch(&self) -> Option<GpuArch> {
        match &*self.0 {
            Inner::Cpu(_) => None,
            Inner::Cuda(cuda) => Some(cuda.arch),
            Inner::Simulated(simulated) => Some(simulated.arch),
        }
    }

    /// The CPU to compile native code for; `None` for a real or simulated GPU.
    pub fn host_cpu(&self) -> Option<&HostCpu> {
        match &*self.0 {
            Inner::Cpu(cpu) => Some(cpu.host_cpu()),
            Inner::Cuda(_) | Inner::Simulated(_) => None,
        }
    }

    /// The newest PTX version that the driver accepts, as major × 10 + minor; `None` without a driver: on the CPU and
    /// on a simulated GPU.
    pub fn max_ptx_version(&self) -> Option<u32> {
        self.info().driver_version.map(driver::ptx_version_of_driver)
    }

    /// `options` with the PTX version limited to what the driver accepts.
    pub fn limit_ptx_version(&self, options: &CompileOptions) -> CompileOptions {
        let mut options = options.clone();
        if let Some(newest) = self.max_ptx_version() {
            options.ptx_version = options.ptx_version.min(newest);
        }
        options
    }

    /// Waits until all work on the device's stream is done.
    ///
    /// # Errors
    /// A failure of that work, for example a failed `device_assert`; after most such errors the driver rejects further
    /// work in this process.
    pub fn synchronize(&self) -> Result<()> {
        match &*self.0 {
            Inner::Cpu(_) | Inner::Simulated(_) => Ok(()),
            Inner::Cuda(cuda) => cuda.synchronize(&cuda.stream),
        }
    }

    /// The default stream of launches and copies.
    pub fn stream(&self) -> Stream {
        Stream::default_of(self)
    }

    /// A new stream of this device. The caller orders work between streams, with [`Stream::wait`].
    pub fn new_stream(&self) -> Result<Stream> {
        Stream::new(self)
    }

    /// Returns memory that freed buffers and graphs left in the device's pools to the system.
    pub fn release_unused_memory(&self) -> Result<()> {
        match &*self.0 {
            Inner::Cpu(_) | Inner::Simulated(_) => Ok(()),
            Inner::Cuda(cuda) => cuda.trim_pool(),
        }
    }

    /// Calls [`check_host_memory`] if the device's memory is host memory. A GPU reports a lack of memory at the
    /// allocation.
    ///
    /// # Errors
    /// Those of [`check_host_memory`].
    pub fn check_memory(&self, bytes: f64) -> Result<()> {
        if self.is_cuda() { Ok(()) } else { check_host_memory(bytes) }
    }

    /// Free and total memory in bytes, now; `None` if the device's memory is host memory.
    pub fn free_and_total_memory(&self) -> Result<Option<(u64, u64)>> {
        match &*self.0 {
            Inner::Cpu(_) | Inner::Simulated(_) => Ok(None),
            Inner::Cuda(cuda) => cuda.free_and_total().map(Some),
        }
    }

    /// Restarts [`Device::peak_memory`]; returns the bytes that are allocated now, `None` on the CPU.
    pub fn reset_peak_memory(&self) -> Result<Option<u64>> {
        match &*self.0 {
            Inner::Cpu(_) | Inner::Simulated(_) => Ok(None),
            Inner::Cuda(cuda) => cuda.reset_pool_peak().map(Some),
        }
    }

    /// Peak number of allocated bytes since [`Device::reset_peak_memory`], including those of CUDA graphs; `None` on
    /// the CPU. Graphs have separate memory: their peak and the peak of other memory are added, separately for each
    /// interval between calls of [`Device::release_unused_memory`]. Unused memory of the pool, the driver's memory and
    /// that of other processes do not count.
    pub fn peak_memory(&self) -> Result<Option<u64>> {
        match &*self.0 {
            Inner::Cpu(_) | Inner::Simulated(_) => Ok(None),
            Inner::Cuda(cuda) => cuda.pool_peak().map(Some),
        }
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }
}

impl fmt::Display for Device {
    /// `GPU 0 (NVIDIA H200)`, or `the CPU`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Inner::Cpu(_) => f.write_str("the CPU"),
            Inner::Cuda(cuda) => f.write_str(&cuda.label),
            Inner::Simulated(simulated) => write!(f, "a {} GPU", simulated.info.name),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self})")
    }
}

/// Two handles are equal if they access the same memory in the same order: the CPU, the same stream of the same GPU, or
/// one simulated GPU.
impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        match (&*self.0, &*other.0) {
            (Inner::Cpu(_), Inner::Cpu(_)) => true,
            (Inner::Cuda(a), Inner::Cuda(b)) => {
                a.stream.cu_stream() == b.stream.cu_stream() && a.context.cu_ctx() == b.context.cu_ctx()
            }
            (Inner::Simulated(_), Inner::Simulated(_)) => Arc::ptr_eq(&self.0, &other.0),
            (Inner::Cpu(_) | Inner::Cuda(_) | Inner::Simulated(_), _) => false,
        }
    }
}

impl Eq for Device {}

/// Checks that both are the same device.
pub(crate) fn same_device(what: &'static str, left: &Device, right: &Device) -> Result<()> {
    if left == right {
        return Ok(());
    }
    Err(Error::DifferentDevices { what, left: left.to_string(), right: right.to_string() })
}
