//! One GPU as a device.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUgraphMem_attribute as GraphMemory};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use tilewright_codegen::target::GpuArch;

use super::DeviceInfo;
use super::driver::{driver_version, gpu_count};
use crate::error::{CudaFailure, Error, ErrorContext, Result};

pub(crate) struct Cuda {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) arch: GpuArch,
    pub(crate) info: DeviceInfo,
    /// `GPU 0 (NVIDIA H200)`.
    pub(crate) label: String,
    recent: Mutex<VecDeque<Arc<str>>>,
    /// Maximum peak, in bytes, of the intervals that ended with a trim of the pools, since the last
    /// [`Cuda::reset_pool_peak`].
    peak_before: AtomicU64,
}

/// Number of launches that an error message names.
const RECENT_LAUNCHES: usize = 6;

impl Cuda {
    pub(super) fn new(ordinal: usize) -> Result<Cuda> {
        driver_version()?;
        let count = gpu_count()?;
        if ordinal >= count {
            return Err(Error::NoSuchGpu { ordinal, count });
        }
        let context = CudaContext::new(ordinal).context(&format!("opening GPU {ordinal}"))?;
        // SAFETY: our buffers are ordered by their stream; nothing here relies on cudarc's event tracking.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().context(&format!("opening a stream on GPU {ordinal}"))?;
        Cuda::from_stream(stream)
    }

    /// # Safety
    /// As for [`Device::with_cuda_stream`](super::Device::with_cuda_stream).
    pub(super) unsafe fn with_stream(&self, handle: u64) -> Cuda {
        let handle = std::ptr::with_exposed_provenance_mut::<c_void>(handle as usize).cast();
        Cuda {
            context: self.context.clone(),
            // SAFETY: the caller's promise; all work of this device is queued on the stream.
            stream: unsafe { self.context.wrap_borrowed_stream(handle) },
            arch: self.arch,
            info: self.info.clone(),
            label: self.label.clone(),
            recent: Mutex::default(),
            peak_before: AtomicU64::new(0),
        }
    }

    pub(super) fn from_stream(stream: Arc<CudaStream>) -> Result<Cuda> {
        let context = stream.context().clone();
        let ordinal = context.ordinal();
        let info = query_info(&context).context(&format!("querying the properties of GPU {ordinal}"))?;
        let info = DeviceInfo { driver_version: Some(driver_version()?), ..info };
        let label = format!("GPU {ordinal} ({})", info.name);
        let (major, minor) = info.compute_capability.unwrap_or((0, 0));
        let arch = GpuArch::for_compute_capability(major, minor).ok_or_else(|| Error::UnsupportedGpu {
            device: label.clone(),
            major,
            minor,
        })?;
        let cuda =
            Cuda { context, stream, arch, info, label, recent: Mutex::default(), peak_before: AtomicU64::new(0) };
        cuda.keep_freed_memory()?;
        Ok(cuda)
    }

    /// Makes this GPU's context current on the calling thread.
    pub(crate) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|error| Error::cuda(format!("selecting {}", self.label), error))
    }

    /// Records a launch, so that a later failure can name it.
    pub(crate) fn record_launch(&self, kernel: &Arc<str>) {
        let mut recent = self.recent.lock().unwrap_or_else(|e| e.into_inner());
        if recent.len() == RECENT_LAUNCHES {
            recent.pop_front();
        }
        recent.push_back(kernel.clone());
    }

    /// `error` with the launches that may have caused it, if it comes from running code.
    pub(crate) fn failure(&self, operation: &str, error: DriverError) -> Error {
        let failure = CudaFailure::from(error);
        let recent = self.recent.lock().unwrap_or_else(|e| e.into_inner());
        if !failure.is_sticky() || recent.is_empty() {
            return Error::Cuda { operation: operation.to_string(), failure };
        }
        let names: Vec<&str> = recent.iter().rev().map(|name| &**name).collect();
        Error::Cuda { operation: format!("{operation} (last launches, newest first: {})", names.join(", ")), failure }
    }

    pub(crate) fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        stream.synchronize().map_err(|error| self.failure(&format!("running kernels on {}", self.label), error))
    }

    /// Allocates on the device's stream. If memory is exhausted, waits for pending frees and tries once more.
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.bind()?;
        let attempt = || {
            // SAFETY: the stream is live; the memory's contents are only read as plain bytes.
            unsafe {
                match self.context.has_async_alloc() {
                    true => result::malloc_async(self.stream.cu_stream(), bytes),
                    false => result::malloc_sync(bytes),
                }
            }
        };
        let is_full = |error: &DriverError| error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let outcome = match attempt() {
            Err(error) if is_full(&error) => {
                self.synchronize(&self.stream)?;
                self.trim_pool()?;
                attempt()
            }
            other => other,
        };
        outcome.map_err(|error| {
            if is_full(&error)
                && let Ok((free, total)) = self.free_and_total()
            {
                return Error::OutOfMemory { device: self.label.clone(), requested: bytes as u64, free, total };
            }
            self.failure(&format!("allocating {bytes} bytes on {}", self.label), error)
        })
    }

    /// Frees memory of [`Cuda::allocate`] after the work that is queued on the stream now.
    pub(super) fn free(&self, address: u64) {
        let outcome = self.bind().and_then(|()| {
            // SAFETY: `address` came from `allocate` and its only owner is being dropped.
            let freed = unsafe {
                match self.context.has_async_alloc() {
                    true => result::free_async(address, self.stream.cu_stream()),
                    false => result::free_sync(address),
                }
            };
            freed.map_err(|error| self.failure("freeing a buffer", error))
        });
        if let Err(error) = outcome {
            tracing::debug!("{}: {error}", self.label);
        }
    }

    pub(super) fn free_and_total(&self) -> Result<(u64, u64)> {
        let (free, total) = self.context.mem_get_info().context(&format!("querying the memory of {}", self.label))?;
        Ok((free as u64, total as u64))
    }

    pub(super) fn trim_pool(&self) -> Result<()> {
        let Some(pool) = self.pool()? else { return Ok(()) };
        // Ends the interval over which the peaks of the pool and of graphs are added: memory freed before a trim is not
        // in use at a later peak.
        let peak = self.pool_peak()?;
        self.reset_pool_peak()?;
        self.peak_before.store(peak, Ordering::Relaxed);
        // SAFETY: the pool is the device's default pool, which lives as long as the driver.
        unsafe { result::mem_pool::trim_to(pool, 0) }
            .context(&format!("trimming the memory pool of {}", self.label))?;
        // SAFETY: the device is that of a live context.
        unsafe { sys::cuDeviceGraphMemTrim(self.context.cu_device()) }
            .result()
            .context(&format!("trimming the graph memory of {}", self.label))
    }

    /// Returns the bytes that the pool has in use now, including those of graphs, and restarts the peaks of both.
    pub(crate) fn reset_pool_peak(&self) -> Result<u64> {
        let Some(pool) = self.pool()? else { return Ok(0) };
        let mut zero = 0_u64;
        let place = &raw mut zero as *mut c_void;
        let (of_pool, of_graphs) =
            (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, GraphMemory::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH);
        // SAFETY: these attributes take a pointer to a u64, which must be zero (CUDA Driver API, cuMemPoolSetAttribute,
        // cuDeviceSetGraphMemAttribute).
        unsafe {
            result::mem_pool::set_attribute(pool, of_pool, place)
                .and_then(|()| sys::cuDeviceSetGraphMemAttribute(self.context.cu_device(), of_graphs, place).result())
        }
        .context(&format!("setting up the memory pool of {}", self.label))?;
        self.peak_before.store(0, Ordering::Relaxed);
        let [of_pool, of_graphs] = self.used_now()?;
        Ok(of_pool + of_graphs)
    }

    /// Bytes in use now: of the pool, and of graphs.
    fn used_now(&self) -> Result<[u64; 2]> {
        let of_pool = self.pool_bytes(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok([of_pool, self.graph_bytes(GraphMemory::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT)?])
    }

    /// Peak number of bytes that the pool had in use since [`Cuda::reset_pool_peak`], plus the peak of graphs, which
    /// have separate memory: the two peaks need not coincide, so the sum is an upper bound.
    pub(crate) fn pool_peak(&self) -> Result<u64> {
        // Peaks that were set to zero stay zero until the next allocation.
        let [pool_now, graphs_now] = self.used_now()?;
        let pool = self.pool_bytes(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?.max(pool_now);
        let graphs = self.graph_bytes(GraphMemory::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)?.max(graphs_now);
        Ok((pool + graphs).max(self.peak_before.load(Ordering::Relaxed)))
    }

    fn graph_bytes(&self, attribute: GraphMemory) -> Result<u64> {
        self.bind()?;
        let mut bytes = 0_u64;
        // SAFETY: all attributes of graph memory are a u64 (CUDA Driver API, cuDeviceGetGraphMemAttribute).
        unsafe {
            sys::cuDeviceGetGraphMemAttribute(self.context.cu_device(), attribute, &raw mut bytes as *mut c_void)
        }
        .result()
        .context(&format!("querying the graph memory of {}", self.label))?;
        Ok(bytes)
    }

    fn pool_bytes(&self, attribute: sys::CUmemPool_attribute) -> Result<u64> {
        let Some(pool) = self.pool()? else { return Ok(0) };
        let mut bytes = 0_u64;
        // SAFETY: the attributes that count bytes are a u64 (CUDA Driver API, cuMemPoolGetAttribute).
        unsafe { result::mem_pool::get_attribute(pool, attribute, &raw mut bytes as *mut c_void) }
            .context(&format!("querying the memory pool of {}", self.label))?;
        Ok(bytes)
    }

    /// Sets the pool's release threshold: by default the pool returns freed memory to the system at every
    /// synchronization, which makes the next allocation slow.
    fn keep_freed_memory(&self) -> Result<()> {
        let Some(pool) = self.pool()? else { return Ok(()) };
        let mut threshold = u64::MAX;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute takes a pointer to a u64 (CUDA Driver API, cuMemPoolSetAttribute).
        unsafe { result::mem_pool::set_attribute(pool, attribute, &raw mut threshold as *mut c_void) }
            .context(&format!("setting up the memory pool of {}", self.label))
    }

    fn pool(&self) -> Result<Option<sys::CUmemoryPool>> {
        if !self.context.has_async_alloc() {
            return Ok(None);
        }
        self.bind()?;
        // SAFETY: the device handle is that of a live context.
        let pool = unsafe { result::device::get_mem_pool(self.context.cu_device()) };
        pool.context(&format!("getting the memory pool of {}", self.label)).map(Some)
    }
}

fn query_info(context: &CudaContext) -> Result<DeviceInfo, DriverError> {
    let attribute = |which| context.attribute(which).map(|value| value.max(0) as u32);
    Ok(DeviceInfo {
        name: context.name()?,
        compute_capability: Some(context.compute_capability()?),
        driver_version: None,
        memory_bytes: context.total_mem()? as u64,
        compute_units: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        max_shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    })
}
