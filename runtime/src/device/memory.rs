//! Untyped device memory: allocation, fills and copies by address.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use cudarc::driver::result;

use super::{Device, Inner, host_memory};
use crate::error::{Error, Result};

/// Alignment of host memory: a cache line, and the widest vector register.
const HOST_ALIGN: usize = 64;

/// Host memory, 64-byte aligned, zeroed at allocation (by the operating system, lazily, if it is large).
pub(crate) struct HostMemory {
    pointer: NonNull<u8>,
    bytes: usize,
}

// SAFETY: this is plain memory with one owner; `&self` only exposes its address.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn zeroed(bytes: usize) -> Result<HostMemory> {
        if bytes == 0 {
            return Ok(HostMemory::default());
        }
        // SAFETY: the layout's size is not zero.
        let pointer = HostMemory::layout(bytes)
            .and_then(|layout| NonNull::new(host_memory::with_handled_failure(|| unsafe { alloc_zeroed(layout) })));
        let pointer = pointer.ok_or(Error::HostMemory { requested: bytes as u64 })?;
        Ok(HostMemory { pointer, bytes })
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes, HOST_ALIGN).ok()
    }
}

impl Default for HostMemory {
    /// No memory: a well-aligned address that is never read.
    fn default() -> Self {
        #[repr(align(64))]
        struct Aligned;
        HostMemory { pointer: NonNull::<Aligned>::dangling().cast(), bytes: 0 }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.bytes > 0
            && let Some(layout) = HostMemory::layout(self.bytes)
        {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(self.pointer.as_ptr(), layout) };
        }
    }
}

/// Device memory, freed on drop. On a GPU it is ordered by the device's stream: work queued after the allocation can
/// use it, and it is freed after the work queued before its drop.
pub(crate) struct Memory {
    device: Device,
    address: u64,
    /// The owner on the CPU.
    _host: Option<HostMemory>,
}

impl Memory {
    /// Allocates `bytes` bytes: zeros on the CPU, unspecified contents on a GPU.
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Memory> {
        let (address, host) = match device.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => {
                let host = HostMemory::zeroed(bytes)?;
                (host.as_mut_ptr().expose_provenance() as u64, Some(host))
            }
            Inner::Cuda(_) if bytes == 0 => (0, None),
            Inner::Cuda(cuda) => (cuda.allocate(bytes)?, None),
        };
        Ok(Memory { device: device.clone(), address, _host: host })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Inner::Cuda(cuda) = self.device.inner()
            && self.address != 0
        {
            cuda.free(self.address);
        }
    }
}

/// The pointer to host memory at `address`.
///
/// # Safety
/// `address` must be that of host memory whose provenance was exposed.
unsafe fn host(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

impl Device {
    /// Sets `bytes` bytes to `value`.
    ///
    /// # Safety
    /// `address..address + bytes` is live memory of this device, and nothing else accesses it before this is done.
    pub(crate) unsafe fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        match self.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => {
                // SAFETY: the caller's promise.
                unsafe { host(address).write_bytes(value, bytes) };
                Ok(())
            }
            Inner::Cuda(cuda) => {
                cuda.bind()?;
                // SAFETY: the caller's promise; the stream is live.
                unsafe { result::memset_d8_async(address, value, bytes, cuda.stream.cu_stream()) }
                    .map_err(|error| cuda.failure(&format!("filling a buffer on {}", cuda.label), error))
            }
        }
    }

    /// Copies `source` to the device, and waits until `source` is no longer needed.
    ///
    /// # Safety
    /// As for [`Device::fill`], with `source.len()` bytes.
    pub(crate) unsafe fn write(&self, address: u64, source: &[u8]) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        match self.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => {
                // SAFETY: the caller's promise; `source` is a live borrow, so it does not overlap.
                unsafe { host(address).copy_from_nonoverlapping(source.as_ptr(), source.len()) };
                Ok(())
            }
            Inner::Cuda(cuda) => {
                cuda.bind()?;
                // SAFETY: the caller's promise; this waits for the copy, so it ends before `source` can be freed.
                unsafe { result::memcpy_htod_async(address, source, cuda.stream.cu_stream()) }
                    .map_err(|error| cuda.failure(&format!("copying to {}", cuda.label), error))?;
                cuda.synchronize(&cuda.stream)
            }
        }
    }

    /// Copies device memory to `target`, after the work queued on the device's stream, and waits for it.
    ///
    /// # Safety
    /// `address..address + target.len()` is live memory of this device, and nothing writes it meanwhile.
    pub(crate) unsafe fn read(&self, address: u64, target: &mut [u8]) -> Result<()> {
        if target.is_empty() {
            return Ok(());
        }
        match self.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => {
                // SAFETY: the caller's promise; `target` is an exclusive borrow, so it does not overlap.
                unsafe { target.as_mut_ptr().copy_from_nonoverlapping(host(address), target.len()) };
                Ok(())
            }
            Inner::Cuda(cuda) => {
                cuda.bind()?;
                // SAFETY: the caller's promise; this waits for the copy before `target` can be used.
                unsafe { result::memcpy_dtoh_async(target, address, cuda.stream.cu_stream()) }
                    .map_err(|error| cuda.failure(&format!("copying from {}", cuda.label), error))?;
                cuda.synchronize(&cuda.stream)
            }
        }
    }

    /// Copies `bytes` bytes within the device.
    ///
    /// # Safety
    /// Both ranges are live memory of this device and do not overlap, and nothing else writes either before this is
    /// done.
    pub(crate) unsafe fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        match self.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => {
                // SAFETY: the caller's promise.
                unsafe { host(target).copy_from_nonoverlapping(host(source), bytes) };
                Ok(())
            }
            Inner::Cuda(cuda) => {
                cuda.bind()?;
                // SAFETY: the caller's promise; the stream is live.
                unsafe { result::memcpy_dtod_async(target, source, bytes, cuda.stream.cu_stream()) }
                    .map_err(|error| cuda.failure(&format!("copying on {}", cuda.label), error))
            }
        }
    }
}
