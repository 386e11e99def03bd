//! Kernels that are compiled ahead of time, by [`AheadOfTime`] or `tilewright compile`.
//!
//! [`PrecompiledKernel`] launches code from files. A build script embeds code into a program by [`embed`], and the
//! program has it by [`include_kernels!`](crate::include_kernels): launches of the kernels' structs then use that code.
//!
//! A program needs the manifest and the code, and neither the source of the kernel nor LLVM. Manifests have the
//! kernel's access footprint, so a launch is checked as one of a kernel that is compiled at run time.

mod ahead;
mod cpu;
mod document;
mod embed;
#[doc(hidden)]
pub mod embedded;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Grid, KernelArg, ir_dtype, values};
use crate::launch::CompiledKernel;
use crate::stream::Stream;
use tilewright_codegen::ir::Func;
use tilewright_codegen::target::{ArgType, Artifact, Code, HostEntry, Manifest};
use tilewright_codegen::text;

pub use ahead::{AheadOfTime, AssumptionError, Compiled, assumptions, check_sizes, footprint};
pub use document::{Access, Document, MemoryArg};
pub use embed::embed;
pub use embedded::EmbeddedKernel;

pub use crate::launch::{TensorMapParameters, tensor_maps};

/// A kernel that was compiled ahead of time, on a device.
///
/// ```no_run
/// use tilewright_runtime::kernel::KernelArg;
/// use tilewright_runtime::precompiled::PrecompiledKernel;
/// use tilewright_runtime::prelude::*;
///
/// let device = Device::cuda(0)?;
/// // Written by: tilewright compile softmax_rows --target sm_80 --dtype f32 --set tile=512 -o out
/// let manifest = std::fs::read_to_string("out/manifest.json")?;
/// let code = std::fs::read("out/softmax_rows.ptx")?;
/// // SAFETY: both are of one compilation, by a compiler that this program trusts.
/// let softmax = unsafe { PrecompiledKernel::load(&device, &manifest, &code) }?;
/// let (rows, cols) = (1000, 300);
/// let x = Buffer::from_slice(&device, &vec![0.5f32; rows * cols])?;
/// let mut y = Buffer::<f32>::zeros(&device, rows * cols)?;
/// let mut args = [
///     KernelArg::In(&x),
///     KernelArg::Out(&mut y),
///     KernelArg::scalar(cols as i64),
///     KernelArg::scalar(cols as i32),
/// ];
/// softmax.launch(rows, &mut args)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrecompiledKernel {
    kernel: CompiledKernel,
    /// The arguments of a launch, in order.
    params: Vec<Param>,
}

/// An argument of a launch.
#[derive(Clone, Debug)]
struct Param {
    name: String,
    /// For memory; `None` for a number.
    memory: Option<MemoryArg>,
}

impl PrecompiledKernel {
    /// Loads code through the driver, or links it into this process. `manifest` is the text of `manifest.json`, `code`
    /// the PTX or the object file. Linking an object takes the feature `llvm`; [`PrecompiledKernel::linked`] does not.
    ///
    /// # Errors
    /// A manifest that cannot be read, code of another compilation than the manifest, code for another target than the
    /// device; and what the driver reports.
    ///
    /// # Safety
    /// The code is executed, and launches are checked by the manifest: both must be of a compiler that the caller
    /// trusts, unchanged. (The manifest's hash finds files that were mixed up, not files that were forged.) An object
    /// must be compiled for a CPU whose features this one has.
    pub unsafe fn load(device: &Device, manifest: &str, code: &[u8]) -> Result<PrecompiledKernel> {
        let document = Document::from_json(manifest)?;
        document.check_code(code)?;
        document.check_cpu()?;
        let manifest = document.manifest.clone();
        let code = match manifest.target.as_str() {
            "host" => Code::Object(code.to_vec()),
            _ => Code::Ptx(String::from_utf8(code.to_vec()).map_err(|_| Error::InvalidManifest {
                reason: format!("the code of `{}` for {} is not a text", manifest.kernel, manifest.target),
            })?),
        };
        PrecompiledKernel::new(document, device.load(&Artifact { manifest, code })?)
    }

    /// A kernel for the CPU whose object file is linked into this program by its build; `entry` is the function that
    /// the manifest names.
    ///
    /// # Errors
    /// A manifest that cannot be read, or one of code for a GPU.
    ///
    /// # Safety
    /// As for [`PrecompiledKernel::load`]; `entry` is the entry of the object that the manifest was written with.
    pub unsafe fn linked(manifest: &str, entry: HostEntry) -> Result<PrecompiledKernel> {
        let document = Document::from_json(manifest)?;
        document.check_cpu()?;
        let kernel = Device::cpu().load_linked(&document.manifest, entry)?;
        PrecompiledKernel::new(document, kernel)
    }

    /// The first kernel of that name that this program embeds and that runs on the device.
    ///
    /// # Errors
    /// There is none; a CPU without a feature that the code needs; and what the driver reports.
    pub fn embedded(device: &Device, kernel: &str) -> Result<PrecompiledKernel> {
        let (document, kernel) = embedded::load(device, kernel)?;
        PrecompiledKernel::new(document, kernel)
    }

    fn new(document: Document, kernel: CompiledKernel) -> Result<PrecompiledKernel> {
        let passed = document.manifest.args.iter().filter(|arg| arg.ty.is_passed());
        let params = passed.map(|arg| {
            let memory = document.memory.get(&arg.name).copied();
            match (arg.ty == ArgType::Ptr) == memory.is_some() {
                true => Ok(Param { name: arg.name.clone(), memory }),
                false => Err(Error::InvalidManifest {
                    reason: format!("`args` and `memory` disagree on whether `{}` is memory", arg.name),
                }),
            }
        });
        Ok(PrecompiledKernel { params: params.collect::<Result<_>>()?, kernel })
    }

    /// The compiler's description of the code.
    pub fn manifest(&self) -> &Manifest {
        self.kernel.manifest()
    }

    /// Launches `grid` program instances on the device's stream. `args` are the arguments in the order of the kernel's
    /// parameters, without the constants.
    ///
    /// # Errors
    /// Arguments of other types, on another device, or of other values than the code was compiled for; an access that
    /// may be out of bounds; a violated precondition or assumption; a manifest without a footprint. On the CPU also a
    /// failed `device_assert`.
    pub fn launch(&self, grid: impl Into<Grid>, args: &mut [KernelArg]) -> Result<()> {
        self.checked(None, grid.into(), args)
    }

    /// Like [`PrecompiledKernel::launch`], on `stream`.
    ///
    /// # Errors
    /// As there.
    pub fn launch_on(&self, stream: &Stream, grid: impl Into<Grid>, args: &mut [KernelArg]) -> Result<()> {
        self.checked(Some(stream), grid.into(), args)
    }

    /// Like [`PrecompiledKernel::launch`], on `stream` if there is one, without the proof that every access is in bounds
    /// of its argument's memory and without the check of preconditions.
    ///
    /// # Errors
    /// As there, without these.
    ///
    /// # Safety
    /// Every load, store and atomic of the kernel stays inside the memory of the argument that its address is computed
    /// from; every `multiple_of` in the kernel is true, and no index of its loops overflows.
    pub unsafe fn launch_unchecked(
        &self,
        stream: Option<&Stream>,
        grid: impl Into<Grid>,
        args: &mut [KernelArg],
    ) -> Result<()> {
        let grid = self.check_arguments(grid.into(), args)?;
        // SAFETY: as in `checked`, except for the bounds, which are the caller's promise.
        unsafe { self.start(stream, grid, args) }
    }

    fn checked(&self, stream: Option<&Stream>, grid: Grid, args: &mut [KernelArg]) -> Result<()> {
        let grid = self.check_arguments(grid, args)?;
        self.kernel.check(grid, &values(args))?;
        // SAFETY: each pointer comes from a borrow of live memory of this device, exclusive if the kernel writes it; later
        // uses of that memory are queued on the same stream, or wait for it. The accesses are in bounds: proved above, by
        // the manifest, which belongs to the code by the promise of `load` or `linked`.
        unsafe { self.start(stream, grid, args) }
    }

    /// # Safety
    /// That of [`CompiledKernel::launch_on`].
    unsafe fn start(&self, stream: Option<&Stream>, grid: [u32; 3], args: &[KernelArg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match stream {
                None => self.kernel.launch(grid, &values(args)),
                Some(stream) => self.kernel.launch_on(stream, grid, &values(args)),
            }
        }
    }

    /// Checks number, access, element type and device of the arguments, and converts the grid.
    fn check_arguments(&self, grid: Grid, args: &[KernelArg]) -> Result<[u32; 3]> {
        let kernel = || self.kernel.label().to_string();
        if args.len() != self.params.len() {
            return Err(Error::ArgCount { kernel: kernel(), expected: self.params.len(), found: args.len() });
        }
        for (Param { name, memory }, arg) in self.params.iter().zip(args) {
            let (found, on) = match arg {
                KernelArg::In(memory) => (Some((false, memory.dtype())), Some(memory.memory_device())),
                KernelArg::Out(memory) => (Some((true, memory.dtype())), Some(memory.memory_device())),
                KernelArg::Scalar(_) => (None, None),
                KernelArg::Absent if memory.is_some() => continue,
                KernelArg::Absent => (None, None),
            };
            let expected = memory.map(|MemoryArg { access, elem }| (access != Access::In, elem));
            if found.map(|(writes, dtype)| (writes, ir_dtype(dtype))) != expected {
                return Err(Error::PrecompiledArgument {
                    kernel: kernel(),
                    name: name.clone(),
                    expected: described(expected.map(|(writes, elem)| (writes, elem.to_string()))),
                    found: described(found.map(|(writes, dtype)| (writes, dtype.to_string()))),
                });
            }
            let device = self.kernel.device();
            if let Some(on) = on.filter(|on| *on != device) {
                return Err(Error::PrecompiledArgument {
                    kernel: kernel(),
                    name: name.clone(),
                    expected: format!("memory on {device}"),
                    found: format!("memory on {on}"),
                });
            }
        }
        grid.checked(&self.kernel.label())
    }
}

/// Identifies a kernel as recorded for types, constants and assumptions.
fn ir_hash(func: &Func) -> String {
    blake3::hash(text::print(func).as_bytes()).to_hex().to_string()
}

/// An argument in words: memory by whether the kernel writes it and its element type, or a number.
fn described(memory: Option<(bool, String)>) -> String {
    match memory {
        Some((true, elem)) => format!("memory of {elem} to write"),
        Some((false, elem)) => format!("memory of {elem} to read"),
        None => "a number".into(),
    }
}
