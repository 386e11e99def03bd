//! The manifest file of compiled code, `manifest.json`. `docs/ahead-of-time.md` explains the fields.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tilewright_codegen::analysis::bounds;
use tilewright_codegen::compiler_id;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::target::{ArgDesc, Artifact, Code, CompileOptions, HostCpu, Manifest};

use super::{cpu, ir_hash};
use crate::error::{Error, Result};

/// Version of the format; incremented when the meaning of a field changes.
const FORMAT: u32 = 1;
/// Version of the format of kernels whose blocks run several programs, which readers of version 1 refuse.
const FORMAT_OF_REPLICAS: u32 = 2;
/// That of kernels whose programs are shared by the blocks of a cluster.
const FORMAT_OF_CLUSTERS: u32 = 3;

/// What a program that launches compiled code needs to know, and how the code was compiled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Version of the format.
    pub format: u32,
    /// The version of the compiler, and of its LLVM.
    pub compiler: String,
    #[serde(flatten)]
    pub manifest: Manifest,
    /// Access and element type of the memory arguments, by name.
    pub memory: BTreeMap<String, MemoryArg>,
    /// The values of the kernel's constants.
    pub constants: BTreeMap<String, serde_json::Value>,
    /// The element types of the kernel's type parameters.
    pub types: BTreeMap<String, DType>,
    pub options: CompileOptions,
    /// What the kernel's `assume`s require of the arguments of a launch, and where they are. For people: launches from
    /// Rust check the footprint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumes: Vec<String>,
    /// The names of the files next to this one, by kind.
    pub files: BTreeMap<String, String>,
    /// The BLAKE3 hash of the code (`ptx` or `obj`) as hexadecimal digits. Empty in manifests of earlier versions.
    #[serde(default)]
    pub code_hash: String,
    /// The BLAKE3 hash of the kernel's Tile IR as recorded. Empty in manifests of earlier versions.
    #[serde(default)]
    pub ir_hash: String,
    /// The CPU of native code. `None` for GPUs, and in manifests of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<HostCpu>,
}

/// How a kernel accesses the memory of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryArg {
    pub access: Access,
    /// Type of the elements.
    #[serde(rename = "type")]
    pub elem: DType,
}

/// The access of a kernel to the memory of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Reads.
    In,
    /// Writes.
    Out,
    /// Reads and writes.
    InOut,
}

impl Document {
    /// Describes `artifact`, which was compiled from `def` for these element types, constants and options. `files` are
    /// kinds and names. Native code is taken to be for this CPU ([`HostCpu::native`]): for another one, set
    /// [`Document::cpu`].
    pub fn new(
        def: &KernelDef,
        dtypes: &[DType],
        constants: &[(&str, ConstValue)],
        options: &CompileOptions,
        artifact: &Artifact,
        files: &[(&str, String)],
    ) -> Document {
        let memory = |kind: ParamKind| {
            let (access, elem) = match kind {
                ParamKind::In(elem) => (Access::In, elem),
                ParamKind::Out(elem) => (Access::Out, elem),
                ParamKind::InOut(elem) => (Access::InOut, elem),
                ParamKind::Scalar(_) | ParamKind::Constexpr { .. } => return None,
            };
            elem.resolve(dtypes).map(|elem| MemoryArg { access, elem })
        };
        let constant = |name: &str, kind: ParamKind| match kind {
            ParamKind::Constexpr { default, .. } => {
                let given = constants.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
                given.or(default.map(ConstValue::from)).map(|value| (name.to_string(), json(&value)))
            }
            ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) | ParamKind::Scalar(_) => None,
        };
        let code = match &artifact.code {
            Code::Ptx(text) => text.as_bytes(),
            Code::Object(bytes) => bytes,
        };
        let names: Vec<&str> = passed(&artifact.manifest).map(|arg| arg.name.as_str()).collect();
        let footprint = artifact.manifest.footprint.as_ref();
        Document {
            format: match &artifact.manifest {
                manifest if manifest.ctas_per_program > 1 => FORMAT_OF_CLUSTERS,
                manifest if manifest.programs_per_block > 1 => FORMAT_OF_REPLICAS,
                _ => FORMAT,
            },
            compiler: compiler_id().into(),
            manifest: artifact.manifest.clone(),
            memory: def.params.iter().filter_map(|p| memory(p.kind).map(|m| (p.name.to_string(), m))).collect(),
            constants: def.params.iter().filter_map(|p| constant(p.name, p.kind)).collect(),
            types: def.generics.iter().zip(dtypes).map(|(g, d)| (g.name.to_string(), *d)).collect(),
            options: options.clone(),
            assumes: footprint.map_or(Vec::new(), |footprint| footprint.assumed_conditions(&names)),
            files: files.iter().map(|(kind, name)| (kind.to_string(), name.clone())).collect(),
            code_hash: hash(code),
            ir_hash: recorded_hash(def, dtypes, constants, &artifact.manifest).unwrap_or_default(),
            cpu: (artifact.manifest.target == "host").then(HostCpu::native),
        }
    }

    /// The text of the file. The footprint, which has thousands of numbers, is in one line.
    pub fn to_json(&self) -> String {
        fn text<T>(text: serde_json::Result<T>) -> T {
            text.unwrap_or_else(|error| {
                panic!("internal compiler error: cannot serialize a manifest: {error}; please report this")
            })
        }
        let mut rest = self.clone();
        let footprint = rest.manifest.footprint.take();
        let rest = text(serde_json::to_string_pretty(&rest));
        match (footprint, rest.strip_suffix("\n}")) {
            (Some(footprint), Some(rest)) => {
                format!("{rest},\n  \"footprint\": {}\n}}\n", text(serde_json::to_string(&footprint)))
            }
            _ => rest + "\n",
        }
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// Text that is no manifest, a format of a later version, or a footprint that is not consistent.
    pub fn from_json(text: &str) -> Result<Document> {
        let invalid = |reason: String| Error::InvalidManifest { reason };
        let document: Document = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        match document.format {
            FORMAT..=FORMAT_OF_CLUSTERS => Ok(document),
            found => Err(invalid(format!(
                "its format is {found}: this version reads formats {FORMAT} to {FORMAT_OF_CLUSTERS}"
            ))),
        }
    }

    /// Checks that `code` is the code that this manifest was written with, if it has the hash.
    ///
    /// # Errors
    /// Other code.
    pub fn check_code(&self, code: &[u8]) -> Result<()> {
        if self.code_hash.is_empty() || self.code_hash == hash(code) {
            return Ok(());
        }
        let kernel = &self.manifest.kernel;
        Err(Error::InvalidManifest {
            reason: format!(
                "the code of `{kernel}` has BLAKE3 hash {}, and the manifest names {}: they are of different compilations, \
                 or one of them was changed",
                hash(code),
                self.code_hash
            ),
        })
    }

    /// Checks that this CPU has the features that native code needs, if the manifest names them.
    ///
    /// # Errors
    /// A feature that it does not have.
    pub(super) fn check_cpu(&self) -> Result<()> {
        match self.cpu.as_ref().and_then(cpu::missing) {
            Some(missing) => Err(Error::CpuFeatures { kernel: self.manifest.kernel.clone(), missing }),
            None => Ok(()),
        }
    }
}

/// What code with this manifest assumes about the arguments of a launch.
pub(super) fn specialization(manifest: &Manifest) -> Specialization {
    let args = passed(manifest).map(|arg| ArgSpec { divisible_by: arg.divisible_by, equal_to: arg.equal_to });
    Specialization { args: args.collect() }
}

/// The arguments that a launch gives.
pub(super) fn passed(manifest: &Manifest) -> impl Iterator<Item = &ArgDesc> {
    manifest.args.iter().filter(|arg| arg.ty.is_passed())
}

/// The hash of the kernel as it was recorded for code with this manifest; `None` if it cannot be recorded.
fn recorded_hash(
    def: &KernelDef,
    dtypes: &[DType],
    constants: &[(&str, ConstValue)],
    manifest: &Manifest,
) -> Option<String> {
    let mut func = def.record(dtypes, constants, &specialization(manifest)).ok()?;
    bounds::drop_unchecked_assumptions(&mut func);
    Some(ir_hash(&func))
}

fn hash(code: &[u8]) -> String {
    blake3::hash(code).to_hex().to_string()
}

pub(super) fn json(value: &ConstValue) -> serde_json::Value {
    match value {
        ConstValue::Int(n) => (*n).into(),
        ConstValue::Float(x) => (*x).into(),
        ConstValue::Bool(b) => (*b).into(),
        ConstValue::Variant(word) => word.clone().into(),
        ConstValue::Item(item) => item.name.into(),
    }
}
