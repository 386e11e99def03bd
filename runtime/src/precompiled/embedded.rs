//! Kernels that this program embeds, and the launches that use them.
//!
//! A launch of a kernel's struct that finds no compiled variant in this process looks for an embedded one before it
//! compiles: the same kernel, element types, constants and options, and no assumption that this variant does not make.
//! That the kernels are the same is checked by the hash of their Tile IR, so that code of an older source is not used.

use std::sync::LazyLock;

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::target::{ArgType, Artifact, Code, CompileOptions, GpuArch, HostEntry};

use super::document::json;
use super::{Document, ir_hash};
use crate::device::{Device, Inner};
use crate::error::{Error, Result};
use crate::kernel;
use crate::launch::CompiledKernel;

#[doc(hidden)]
pub use inventory;

/// Code in this program, with its manifest.
pub struct EmbeddedKernel {
    manifest: &'static str,
    code: EmbeddedCode,
}

enum EmbeddedCode {
    Ptx(&'static str),
    Linked(HostEntry),
}

inventory::collect!(EmbeddedKernel);

impl EmbeddedKernel {
    /// PTX, and the text of its manifest.
    ///
    /// # Safety
    /// That of [`PrecompiledKernel::load`](super::PrecompiledKernel::load).
    pub const unsafe fn ptx(manifest: &'static str, ptx: &'static str) -> EmbeddedKernel {
        EmbeddedKernel { manifest, code: EmbeddedCode::Ptx(ptx) }
    }

    /// Native code that is part of the program, and the text of its manifest.
    ///
    /// # Safety
    /// That of [`PrecompiledKernel::linked`](super::PrecompiledKernel::linked).
    pub const unsafe fn linked(manifest: &'static str, entry: HostEntry) -> EmbeddedKernel {
        EmbeddedKernel { manifest, code: EmbeddedCode::Linked(entry) }
    }
}

/// The function of that symbol, with the type of [`HostEntry`].
#[doc(hidden)]
#[macro_export]
macro_rules! embedded_entry {
    ($entry:ident) => {{
        unsafe extern "C" {
            fn $entry(
                args: *const *const ::core::ffi::c_void,
                pid: *const [i32; 3],
                num_programs: *const [i32; 3],
                arena: *mut u8,
                hooks: *const $crate::__private::HostHooks,
            ) -> i32;
        }
        $entry
    }};
}
#[doc(hidden)]
pub use crate::embedded_entry as entry;

/// An embedded kernel with its parsed manifest.
struct Parsed {
    document: Document,
    code: &'static EmbeddedCode,
}

static EMBEDDED: LazyLock<Vec<Parsed>> = LazyLock::new(|| {
    let parse = |kernel: &'static EmbeddedKernel| match Document::from_json(kernel.manifest) {
        Ok(document) => Some(Parsed { document, code: &kernel.code }),
        Err(error) => {
            tracing::warn!("an embedded kernel is ignored: {error}");
            None
        }
    };
    let mut found: Vec<Parsed> = inventory::iter::<EmbeddedKernel>.into_iter().filter_map(parse).collect();
    // The order of registration is not defined. Variants with more assumptions come first, then newer architectures.
    let assumptions = |parsed: &Parsed| {
        let args = parsed.document.manifest.args.iter();
        args.filter(|arg| arg.divisible_by > 1 || arg.equal_to.is_some()).count()
    };
    found.sort_by_cached_key(|parsed| {
        let Document { manifest, .. } = &parsed.document;
        std::cmp::Reverse((assumptions(parsed), manifest.target.clone(), manifest.entry.clone()))
    });
    found
});

impl Parsed {
    /// Whether the code is for this kind of device.
    fn is_for(&self, device: &Device) -> bool {
        match (self.code, device.inner()) {
            (EmbeddedCode::Linked(_), Inner::Cpu(_)) => true,
            (EmbeddedCode::Ptx(_), Inner::Cuda(cuda)) => {
                let capability = cuda.info.compute_capability.unwrap_or_default();
                self.document.manifest.target.parse::<GpuArch>().is_ok_and(|arch| arch.runs_on(capability))
            }
            _ => false,
        }
    }

    fn load(&self, device: &Device) -> Result<CompiledKernel> {
        let manifest = &self.document.manifest;
        self.document.check_cpu()?;
        match self.code {
            EmbeddedCode::Linked(entry) => device.load_linked(manifest, *entry),
            EmbeddedCode::Ptx(ptx) => {
                device.load(&Artifact { manifest: manifest.clone(), code: Code::Ptx((*ptx).to_string()) })
            }
        }
    }

    /// Whether this code is of the kernel with these types.
    fn is_of(&self, def: &KernelDef, dtypes: &[DType]) -> bool {
        let Document { manifest, types, .. } = &self.document;
        manifest.kernel == def.name
            && types.len() == dtypes.len()
            && def.generics.iter().zip(dtypes).all(|(generic, dtype)| types.get(generic.name) == Some(dtype))
    }

    /// Whether the code was compiled with these constants, all of the kernel's.
    fn has_constants(&self, constants: &[(&str, ConstValue)]) -> bool {
        constants.iter().all(|(name, value)| self.document.constants.get(*name) == Some(&json(value)))
    }

    /// Whether the code was compiled with these options, of which native code has only the assertions.
    fn has_options(&self, options: &CompileOptions) -> bool {
        let own = &self.document.options;
        match self.code {
            EmbeddedCode::Linked(_) => own.debug_asserts == options.debug_asserts,
            EmbeddedCode::Ptx(_) => CompileOptions { ptx_version: own.ptx_version, ..options.clone() } == *own,
        }
    }

    /// What the code assumes about the arguments of a launch.
    fn specialization(&self) -> Specialization {
        let passed = self.document.manifest.args.iter().filter(|arg| arg.ty != ArgType::TensorMap);
        let args = passed.map(|arg| ArgSpec { divisible_by: arg.divisible_by, equal_to: arg.equal_to });
        Specialization { args: args.collect() }
    }

    /// Whether every assumption of the code is one of `facts`.
    fn assumes_only(&self, facts: &Specialization) -> bool {
        let own = self.specialization();
        let holds = |(own, fact): (&ArgSpec, &ArgSpec)| {
            let divides = fact.divisible_by.is_multiple_of(own.divisible_by);
            let equal = own.equal_to.is_none_or(|value| fact.equal_to == Some(value));
            equal && (divides || own.equal_to.is_some())
        };
        own.args.len() == facts.args.len() && own.args.iter().zip(&facts.args).all(holds)
    }

    /// Whether the kernel, recorded as it was for this code, is the one that this code is of.
    fn is_current(&self, def: &KernelDef, dtypes: &[DType], constants: &[(&str, ConstValue)]) -> bool {
        let recorded = kernel::record(def, dtypes, constants, &self.specialization());
        recorded.is_ok_and(|func| ir_hash(&func) == self.document.ir_hash)
    }
}

/// The embedded code for a launch with these facts about its arguments; `None` if there is none.
///
/// # Errors
/// A CPU without a feature that the code needs, and what the driver reports.
pub(crate) fn find(
    def: &KernelDef,
    device: &Device,
    dtypes: &[DType],
    constants: &[(&str, ConstValue)],
    options: &CompileOptions,
    facts: &Specialization,
) -> Result<Option<CompiledKernel>> {
    let found = EMBEDDED.iter().find(|parsed| {
        parsed.is_for(device)
            && parsed.is_of(def, dtypes)
            && parsed.has_constants(constants)
            && parsed.has_options(options)
            && parsed.assumes_only(facts)
            && parsed.is_current(def, dtypes, constants)
    });
    found.map(|parsed| parsed.load(device)).transpose()
}

/// The constants `tuned` and the options of the first embedded variant of a kernel on this device, among those with
/// the `known` constants.
pub(crate) fn configuration(
    def: &KernelDef,
    device: &Device,
    dtypes: &[DType],
    known: &[(&str, ConstValue)],
    tuned: &[&'static str],
) -> Option<(Vec<(&'static str, ConstValue)>, CompileOptions)> {
    let mut of_kernel = EMBEDDED
        .iter()
        .filter(|parsed| parsed.is_for(device) && parsed.is_of(def, dtypes) && parsed.has_constants(known));
    let Document { constants, options, .. } = &of_kernel.next()?.document;
    let value = |name: &&'static str| {
        let ty = def.params.iter().find(|p| p.name == *name).map(|p| p.kind)?;
        let value = match constants.get(*name)? {
            serde_json::Value::String(word) => ConstValue::Variant(word.clone()),
            value => ConstValue::from_text(&value.to_string()),
        };
        matches!(ty, ParamKind::Constexpr { .. }).then_some((*name, value))
    };
    Some((tuned.iter().map(value).collect::<Option<_>>()?, options.clone()))
}

/// The first embedded kernel of that name for the device.
pub(super) fn load(device: &Device, kernel: &str) -> Result<(Document, CompiledKernel)> {
    let of_name = || EMBEDDED.iter().filter(|parsed| parsed.document.manifest.kernel == kernel);
    let Some(parsed) = of_name().find(|parsed| parsed.is_for(device)) else {
        let targets: Vec<&str> = of_name().map(|parsed| parsed.document.manifest.target.as_str()).collect();
        let found = match targets.is_empty() {
            true => String::new(),
            false => format!("; it is embedded for {}", targets.join(", ")),
        };
        return Err(Error::NotEmbedded { kernel: kernel.to_string(), device: device.to_string(), found });
    };
    Ok((parsed.document.clone(), parsed.load(device)?))
}
