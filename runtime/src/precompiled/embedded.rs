//! Kernels that this program embeds, and the launches that use them.
//!
//! A launch of a kernel's struct that finds no compiled variant in this process looks for an embedded one before it
//! compiles: the same kernel, element types, constants and options, and no assumption that this variant does not make.
//! That the kernels are the same is checked by the hash of their Tile IR, so that code of an older source is not used.

use std::sync::LazyLock;

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::target::{ArgDesc, Artifact, Code, CompileOptions, GpuArch, HostEntry};

use super::document::{json, passed, specialization};
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

    /// Whether every assumption of the code is one of `facts`.
    fn assumes_only(&self, facts: &Specialization) -> bool {
        passed(&self.document.manifest).count() == facts.args.len() && self.unmet(facts).next().is_none()
    }

    /// The arguments of which the code assumes more than `facts`.
    fn unmet<'a>(&'a self, facts: &'a Specialization) -> impl Iterator<Item = &'a ArgDesc> {
        let holds = |own: &ArgDesc, fact: &ArgSpec| {
            let divides = fact.divisible_by.is_multiple_of(own.divisible_by);
            let equal = own.equal_to.is_none_or(|value| fact.equal_to == Some(value));
            equal && (divides || own.equal_to.is_some())
        };
        let pairs = passed(&self.document.manifest).zip(&facts.args);
        pairs.filter(move |(own, fact)| !holds(own, fact)).map(|(own, _)| own)
    }

    /// Whether the kernel, recorded as it was for this code, is the one that this code is of.
    fn is_current(&self, def: &KernelDef, dtypes: &[DType], constants: &[(&str, ConstValue)]) -> bool {
        let recorded = kernel::record(def, dtypes, constants, &specialization(&self.document.manifest));
        recorded.is_ok_and(|func| ir_hash(&func) == self.document.ir_hash)
    }
}

/// What a launch needs of embedded code.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub def: &'a KernelDef,
    pub device: &'a Device,
    pub dtypes: &'a [DType],
    /// All of the kernel's.
    pub constants: &'a [(&'static str, ConstValue)],
    pub options: &'a CompileOptions,
    /// About the arguments.
    pub facts: &'a Specialization,
}

/// The embedded code for a launch; `None` if there is none.
///
/// # Errors
/// A CPU without a feature that the code needs, and what the driver reports.
pub(crate) fn find(wanted: &Wanted) -> Result<Option<CompiledKernel>> {
    let Wanted { def, device, dtypes, constants, options, facts } = *wanted;
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

/// Why [`find`] has no code for a launch: the embedded variants of the kernel, and how the nearest one differs.
pub(crate) fn explain(wanted: &Wanted) -> String {
    explain_among(&EMBEDDED, wanted)
}

fn explain_among(embedded: &[Parsed], wanted: &Wanted) -> String {
    /// A program may embed many.
    const LISTED: usize = 8;
    let (name, device) = (wanted.def.name, wanted.device);
    let variants: Vec<&Parsed> = embedded.iter().filter(|parsed| parsed.document.manifest.kernel == name).collect();
    let with_differences = variants.iter().map(|parsed| (parsed, parsed.differences(wanted)));
    let nearest = with_differences.min_by_key(|(parsed, differences)| (!parsed.is_for(device), differences.len()));
    let Some((nearest, differences)) = nearest else {
        return format!(
            "note: this program embeds no variant of `{name}`\n  \
             help: pass it to `embed` in the build script, and put `include_kernels!();` into the crate"
        );
    };
    let mut lines: Vec<String> = variants.iter().take(LISTED).map(|parsed| parsed.description()).collect();
    if variants.len() > LISTED {
        lines.push(format!("and {} more", variants.len() - LISTED));
    }
    format!(
        "note: no embedded variant of `{name}` fits this launch on {device}; these are embedded:\n    {}\n  \
         note: the nearest is `{}`: {}\n  \
         help: pass a variant for this launch to `embed` in the build script, or launch with an embedded one's values",
        lines.join("\n    "),
        nearest.description(),
        differences.join("; ")
    )
}

impl Parsed {
    /// Target, types, constants and assumptions.
    fn description(&self) -> String {
        let Document { manifest, types, constants, .. } = &self.document;
        let types = types.iter().map(|(name, dtype)| format!("{name} = {dtype}"));
        let constants = constants.iter().map(|(name, value)| format!("{name} = {}", shown(value)));
        let assumed = passed(manifest).filter_map(assumption).map(|text| format!("assumes {text}"));
        let parts = std::iter::once(manifest.target.clone()).chain(types).chain(constants).chain(assumed);
        parts.collect::<Vec<_>>().join(", ")
    }

    /// Why this code of the kernel does not fit the launch.
    fn differences(&self, wanted: &Wanted) -> Vec<String> {
        let Wanted { def, device, dtypes, constants, options, facts } = *wanted;
        let Document { manifest, types, constants: own_constants, .. } = &self.document;
        let mut differences = Vec::new();
        let mut differs = |name: &str, own: Option<String>, wanted: String| match own {
            Some(own) if own == wanted => {}
            Some(own) => differences.push(format!("{name} is {own}, the launch has {wanted}")),
            None => differences.push(format!("it has no {name}, the launch has {wanted}")),
        };
        for (generic, dtype) in def.generics.iter().zip(dtypes) {
            differs(generic.name, types.get(generic.name).map(DType::to_string), dtype.to_string());
        }
        for (name, value) in constants {
            differs(name, own_constants.get(*name).map(shown), shown(&json(value)));
        }
        if !self.has_options(options) {
            let fields = |options| serde_json::to_value(options).unwrap_or_default();
            let (own, wanted) = (fields(&self.document.options), fields(options));
            let names = wanted.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
            let matters = |name: &&str| match self.code {
                EmbeddedCode::Linked(_) => *name == "debug_asserts",
                EmbeddedCode::Ptx(_) => *name != "ptx_version",
            };
            for name in names.filter(matters) {
                differs(name, Some(own.get(name).map_or("none".into(), shown)), shown(&wanted[name]));
            }
        }
        if !self.is_for(device) {
            differences.push(format!("it is for {}, the launch is on {device}", manifest.target));
        }
        let unmet = self.unmet(facts).filter_map(assumption);
        differences
            .extend(unmet.map(|text| format!("it assumes {text}, which does not hold for the launch's argument")));
        if differences.is_empty() {
            differences.push("it is of another version of the kernel's source: build the program again".into());
        }
        differences
    }
}

/// A value without the quotes of JSON.
fn shown(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

/// What code assumes about an argument.
fn assumption(arg: &ArgDesc) -> Option<String> {
    match arg.equal_to {
        Some(value) => Some(format!("{} = {value}", arg.name)),
        None => (arg.divisible_by > 1).then(|| format!("{} % {}", arg.name, arg.divisible_by)),
    }
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

#[cfg(all(test, feature = "llvm"))]
mod tests {
    use super::*;
    use crate::precompiled::AheadOfTime;
    use crate::prelude::*;
    use tilewright_codegen::target::HostHooks;

    /// y = x
    #[kernel]
    fn copied<T: Float>(x: In<T>, y: Out<T>, n: i32, #[constexpr] tile: usize) {
        let i = program_id(0) * tile + arange(0, tile);
        store(y + i, load(x + i, mask = i < n), mask = i < n);
    }

    unsafe extern "C" fn entry(
        _: *const *const std::ffi::c_void,
        _: *const [i32; 3],
        _: *const [i32; 3],
        _: *mut u8,
        _: *const HostHooks,
    ) -> i32 {
        0
    }

    fn parsed(compilation: &AheadOfTime) -> Parsed {
        static LINKED: EmbeddedCode = EmbeddedCode::Linked(entry);
        static PTX: EmbeddedCode = EmbeddedCode::Ptx("");
        let document = compilation.compile().unwrap().document;
        let code = if document.manifest.target == "host" { &LINKED } else { &PTX };
        Parsed { document, code }
    }

    #[test]
    fn a_launch_that_nothing_embedded_fits_names_the_variants_and_the_difference() {
        let native = |tile: usize| Copied::<f32>::compile_for(HostCpu::native()).constant("tile", tile);
        let sm80 = Copied::<bf16>::compile_for(GpuArch::Sm80).constant("tile", 8usize);
        let embedded = [parsed(&native(4)), parsed(&native(512).assume("n % 16")), parsed(&sm80)];
        let (device, options) = (Device::cpu(), CompileOptions::default());
        let aligned = Specialization::aligned_memory(&COPIED);
        let explained = |embedded: &[Parsed], dtype, tile, options: &CompileOptions| {
            let constants = [("tile", ConstValue::Int(tile))];
            let (dtypes, facts) = ([dtype], &aligned);
            let wanted =
                Wanted { def: &COPIED, device: &device, dtypes: &dtypes, constants: &constants, options, facts };
            explain_among(embedded, &wanted)
        };
        let text = explained(&embedded, DType::F32, 8, &options);
        let listed = "host, T = f32, tile = 512, assumes x % 16, assumes y % 16, assumes n % 16\n";
        for words in [
            listed,
            "sm_80, T = bf16, tile = 8",
            "tile = 4, assumes x % 16, assumes y % 16`: tile is 4, the launch has 8\n",
        ] {
            assert!(text.contains(words), "`{words}` in {text}");
        }
        // The difference in the constant and the target, in an assumption, in a type, in an option, and in the source.
        for (embedded, dtype, tile, debug_asserts, words) in [
            (&embedded[1..2], DType::F32, 512, true, "it assumes n % 16, which does not hold"),
            (&embedded[..1], DType::BF16, 4, true, "T is f32, the launch has bf16\n"),
            (&embedded[..1], DType::F32, 4, false, "debug_asserts is true, the launch has false\n"),
            (&embedded[..1], DType::F32, 4, true, "of another version of the kernel's source"),
            (&embedded[2..], DType::BF16, 8, true, "it is for sm_80, the launch is on "),
            (&embedded[..0], DType::F32, 4, true, "this program embeds no variant of `copied`"),
        ] {
            let options = CompileOptions { debug_asserts, ..options.clone() };
            let text = explained(embedded, dtype, tile, &options);
            assert!(text.contains(words), "`{words}` in {text}");
        }
    }
}
