//! Loads PTX through the driver, and launches it.
//!
//! The driver compiles PTX as a whole program and caches the machine code, so that a second process does not compile it
//! again. Our cache does not store machine code: the driver returns it only through its linker (`cuLinkComplete`),
//! which compiles PTX as relocatable code (CUDA Driver API, cuLinkAddData). `ptxas -c` does the same: it drops every
//! `setmaxnreg`, and uses 208 registers per thread for FlashAttention-2's forward kernel instead of 174.

use std::ffi::{CString, c_void};
use std::sync::Mutex;

use cudarc::driver::sys::{CUfunction_attribute as Attribute, CUjit_option as Jit};
use cudarc::driver::{CudaStream, DriverError, result, sys};
use smallvec::SmallVec;
use tilewright_codegen::target::{ArgType, GpuArch, Manifest, clocks};

use super::tensor_map::{TensorMap, TensorMaps};
use super::{Kernel, Slots};
use crate::device::Cuda;
use crate::error::{CudaFailure, Error, Result};

/// Maximum dynamic shared memory without a function attribute, in bytes.
const SHARED_WITHOUT_OPT_IN: u32 = 48 * 1024;

/// Bytes for each of the driver's two logs.
const LOG_BYTES: usize = 16 * 1024;

/// Resources of a kernel on the GPU, as reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes: spilled registers and local arrays.
    pub local_bytes: u32,
    /// Shared memory per block in bytes, static and dynamic.
    pub shared_bytes: u32,
    /// Threads per block.
    pub threads: u32,
    /// Occupancy: resident blocks per SM.
    pub blocks_per_sm: u32,
}

/// The entry function of a loaded module.
pub(super) struct Function {
    module: sys::CUmodule,
    function: sys::CUfunction,
    context: std::sync::Arc<cudarc::driver::CudaContext>,
    resources: Resources,
    log: String,
    tensor_maps: Mutex<TensorMaps>,
    /// The record of clocks, for code that takes one.
    clocks: Option<Clocks>,
}

/// A record of clocks on the GPU.
struct Clocks {
    /// Index of the argument.
    arg: usize,
    address: sys::CUdeviceptr,
}

// SAFETY: module and function are handles of the driver, which may be used from any thread that the context is bound
// to.
unsafe impl Send for Function {}
// SAFETY: as above; the tensor maps are behind a mutex.
unsafe impl Sync for Function {}

impl Function {
    pub(super) fn load(cuda: &Cuda, manifest: &Manifest, label: &str, ptx: &str) -> Result<Function> {
        check_target(cuda, manifest, label)?;
        let available = cuda.info.max_shared_bytes;
        if manifest.shared_bytes > available {
            return Err(Error::SharedMemory {
                kernel: label.to_string(),
                device: cuda.label.clone(),
                needed: manifest.shared_bytes,
                available,
            });
        }
        cuda.bind()?;
        let (module, log) = load_module(ptx).map_err(|(error, log)| Error::JitRejected {
            kernel: label.to_string(),
            device: cuda.label.clone(),
            failure: CudaFailure::from(error),
            log: if log.is_empty() { "(the driver gave no reason)".to_string() } else { log },
        })?;
        if !log.is_empty() {
            tracing::debug!("{label}: log of the driver's PTX compiler: {log}");
        }
        let mut loaded = Function {
            module,
            function: std::ptr::null_mut(),
            context: cuda.context.clone(),
            resources: Resources {
                registers: 0,
                local_bytes: 0,
                shared_bytes: 0,
                threads: manifest.threads,
                blocks_per_sm: 0,
            },
            log,
            tensor_maps: Mutex::default(),
            clocks: None,
        };
        loaded.prepare(cuda, manifest, label)?;
        if let Some(arg) = manifest.args.iter().position(|arg| arg.ty == ArgType::Clocks) {
            // SAFETY: the context is bound; the memory has this size, and is freed with the function.
            let address = unsafe {
                result::malloc_sync(clocks::BYTES)
                    .and_then(|address| result::memset_d8_sync(address, 0, clocks::BYTES).map(|()| address))
            };
            let address =
                address.map_err(|error| Error::cuda(format!("allocating the record of clocks of {label}"), error))?;
            loaded.clocks = Some(Clocks { arg, address });
        }
        Ok(loaded)
    }

    /// Finds the entry, sets its maximum shared memory, and checks that a block fits.
    fn prepare(&mut self, cuda: &Cuda, manifest: &Manifest, label: &str) -> Result<()> {
        let operation = || format!("loading kernel {label} on {}", cuda.label);
        let entry = CString::new(manifest.entry.as_str()).unwrap_or_default();
        // SAFETY: the module is loaded and the context is bound.
        self.function = unsafe { result::module::get_function(self.module, entry) }
            .map_err(|error| Error::cuda(format!("finding the entry `{}` of {label}", manifest.entry), error))?;
        let attribute = |which| {
            // SAFETY: the function belongs to a loaded module.
            let value = unsafe { result::function::get_function_attribute(self.function, which) };
            value.map(|v| v.max(0) as u32).map_err(|error| Error::cuda(operation(), error))
        };
        if manifest.shared_bytes > SHARED_WITHOUT_OPT_IN {
            let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: as above.
            unsafe { result::function::set_function_attribute(self.function, which, manifest.shared_bytes as i32) }
                .map_err(|error| Error::cuda(operation(), error))?;
        }
        let registers = attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let available = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        if manifest.threads > available {
            return Err(Error::TooManyThreads {
                kernel: label.to_string(),
                device: cuda.label.clone(),
                needed: manifest.threads,
                available,
                registers,
            });
        }
        let fixed_shared = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        // SAFETY: as above.
        let blocks = unsafe {
            let (threads, shared) = (manifest.threads as i32, manifest.shared_bytes as usize);
            result::occupancy::max_active_block_per_multiprocessor(self.function, threads, shared)
        };
        self.resources = Resources {
            registers,
            local_bytes: attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: fixed_shared + manifest.shared_bytes,
            threads: manifest.threads,
            blocks_per_sm: blocks.map_err(|error| Error::cuda(operation(), error))?.max(0) as u32,
        };
        Ok(())
    }

    pub(super) fn resources(&self) -> &Resources {
        &self.resources
    }

    /// The bytes of the record of clocks, after all work of the GPU; empty if there is none.
    pub(super) fn clocks(&self) -> Result<Vec<u8>> {
        let Some(Clocks { address, .. }) = &self.clocks else { return Ok(Vec::new()) };
        let mut bytes = vec![0_u8; clocks::BYTES];
        // The launch may be on any stream of the context.
        let copied = self.context.synchronize().and_then(|()| {
            // SAFETY: the record has this many bytes, and no kernel of this context runs.
            unsafe { result::memcpy_dtoh_sync(&mut bytes, *address) }
        });
        copied.map_err(|error| Error::cuda("copying the record of clocks".to_string(), error))?;
        Ok(bytes)
    }

    pub(super) fn log(&self) -> &str {
        &self.log
    }

    /// Queues the grid on `stream`. Does not allocate for up to 32 arguments and 8 tensor maps.
    ///
    /// # Safety
    /// The slots match the manifest that this function was loaded with; the rest is the contract of
    /// [`launch_on`](super::CompiledKernel::launch_on).
    pub(super) unsafe fn launch(
        &self,
        cuda: &Cuda,
        stream: &CudaStream,
        kernel: &Kernel,
        grid: [u32; 3],
        slots: &Slots,
    ) -> Result<()> {
        let manifest = &kernel.manifest;
        let maps: SmallVec<[TensorMap; 8]> = match manifest.tensor_maps.is_empty() {
            true => SmallVec::new(),
            false => {
                let mut cache = self.tensor_maps.lock().unwrap_or_else(|e| e.into_inner());
                let encode = |index| cache.get(manifest, index, slots, &kernel.label);
                (0..manifest.tensor_maps.len()).map(encode).collect::<Result<_>>()?
            }
        };
        let mut params: SmallVec<[*mut c_void; 32]> =
            slots.iter().map(|slot| slot as *const u64 as *mut c_void).collect();
        for (map, description) in maps.iter().zip(&manifest.tensor_maps) {
            params[description.arg] = map as *const TensorMap as *mut c_void;
        }
        cuda.bind()?;
        if let Some(Clocks { arg, address }) = &self.clocks {
            params[*arg] = std::ptr::from_ref(address).cast_mut().cast();
            // SAFETY: the record has this many bytes. Launches on several streams at the same time mix their clocks.
            unsafe { result::memset_d8_async(*address, 0, clocks::BYTES, stream.cu_stream()) }
                .map_err(|error| cuda.failure("clearing the record of clocks", error))?;
        }
        debug_assert!(manifest.args.iter().filter(|arg| arg.ty == ArgType::TensorMap).count() == maps.len());
        cuda.record_launch(&kernel.label);
        let [x, y, z] = grid;
        // SAFETY: every parameter points at a value of the declared size, which the driver copies before it returns;
        // the rest is the caller's promise.
        let outcome = unsafe {
            sys::cuLaunchKernel(
                self.function,
                x,
                y,
                z,
                manifest.threads,
                1,
                1,
                manifest.shared_bytes,
                stream.cu_stream(),
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        outcome.result().map_err(|error| cuda.failure(&format!("launching kernel {}", kernel.label), error))
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        let unloaded = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: it was allocated once and is freed once.
            let freed = self.clocks.as_ref().map_or(Ok(()), |of| unsafe { result::free_sync(of.address) });
            // SAFETY: the module was loaded once and is unloaded once.
            unsafe { result::module::unload(self.module) }.and(freed)
        });
        if let Err(error) = unloaded {
            tracing::debug!("unloading a module: {}", CudaFailure::from(error));
        }
    }
}

/// Checks that this device runs code for the manifest's architecture.
fn check_target(cuda: &Cuda, manifest: &Manifest, label: &str) -> Result<()> {
    let capability = cuda.info.compute_capability.unwrap_or((0, 0));
    match manifest.target.parse::<GpuArch>() {
        Ok(arch) if arch.runs_on(capability) => Ok(()),
        _ => Err(Error::WrongTarget {
            kernel: label.to_string(),
            device: cuda.label.clone(),
            expected: cuda.arch.name().to_string(),
            found: manifest.target.clone(),
        }),
    }
}

/// Compiles and loads PTX; returns the driver's info log, or an error with its error log.
fn load_module(ptx: &str) -> Result<(sys::CUmodule, String), (DriverError, String)> {
    let image = CString::new(ptx).map_err(|_| {
        (DriverError(sys::CUresult::CUDA_ERROR_INVALID_PTX), "the PTX contains a zero byte".to_string())
    })?;
    let (mut info, mut errors) = (vec![0_u8; LOG_BYTES], vec![0_u8; LOG_BYTES]);
    let mut options = [
        Jit::CU_JIT_INFO_LOG_BUFFER,
        Jit::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        Jit::CU_JIT_ERROR_LOG_BUFFER,
        Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    // Sizes are passed as values in place of pointers (CUDA Driver API, cuModuleLoadDataEx).
    let mut values = [
        info.as_mut_ptr().cast::<c_void>(),
        std::ptr::without_provenance_mut(LOG_BYTES),
        errors.as_mut_ptr().cast::<c_void>(),
        std::ptr::without_provenance_mut(LOG_BYTES),
    ];
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is zero-terminated; four options with four values of the documented kinds; the buffers outlive
    // the call.
    let outcome = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    let text = |log: &[u8]| {
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        String::from_utf8_lossy(&log[..end]).trim().to_string()
    };
    match outcome.result() {
        Ok(()) => Ok((module, text(&info))),
        Err(error) => Err((error, text(&errors))),
    }
}
