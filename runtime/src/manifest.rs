//! The text of `manifest.json`, which describes compiled code to the program that launches it. `docs/ahead-of-time.md`
//! explains the fields.

use std::collections::BTreeMap;

use serde::Serialize;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, ParamKind};
use tilewright_codegen::target::{Artifact, CompileOptions, Manifest};

/// Version of the format; incremented when the meaning of a field changes.
pub const FORMAT: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    format: u32,
    /// The version of the compiler, and of its LLVM.
    compiler: &'static str,
    #[serde(flatten)]
    manifest: &'a Manifest,
    /// Access and element type of the memory arguments, by name.
    memory: BTreeMap<&'static str, Memory>,
    /// The values of the kernel's constants.
    constants: BTreeMap<&'static str, serde_json::Value>,
    /// The element types of the kernel's type parameters.
    types: BTreeMap<&'static str, &'static str>,
    options: &'a CompileOptions,
    /// The names of the files next to this one, by kind.
    files: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct Memory {
    /// `in`, `out` or `inout`.
    access: &'static str,
    #[serde(rename = "type")]
    elem: &'static str,
}

/// What an artifact was compiled from.
#[derive(Clone, Copy)]
pub struct Compilation<'a> {
    pub def: &'static KernelDef,
    /// The element type of each type parameter.
    pub dtypes: &'a [DType],
    pub constants: &'a [(&'static str, ConstValue)],
    pub options: &'a CompileOptions,
}

impl Compilation<'_> {
    /// Returns the text of the manifest of `artifact`, whose `files` are given by kind and name.
    pub fn manifest(&self, artifact: &Artifact, files: &[(&str, String)]) -> String {
        let memory = |kind: ParamKind| {
            let (access, elem) = match kind {
                ParamKind::In(elem) => ("in", elem),
                ParamKind::Out(elem) => ("out", elem),
                ParamKind::InOut(elem) => ("inout", elem),
                ParamKind::Scalar(_) | ParamKind::Constexpr { .. } => return None,
            };
            elem.resolve(self.dtypes).map(|dtype| Memory { access, elem: dtype.name() })
        };
        let constant = |name: &'static str, kind: ParamKind| match kind {
            ParamKind::Constexpr { default, .. } => {
                let given = self.constants.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
                given.or(default.map(ConstValue::from)).map(|value| (name, json(&value)))
            }
            ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) | ParamKind::Scalar(_) => None,
        };
        let def = self.def;
        let document = Document {
            format: FORMAT,
            compiler: tilewright_codegen::compiler_id(),
            manifest: &artifact.manifest,
            memory: def.params.iter().filter_map(|p| memory(p.kind).map(|m| (p.name, m))).collect(),
            constants: def.params.iter().filter_map(|p| constant(p.name, p.kind)).collect(),
            types: def.generics.iter().zip(self.dtypes).map(|(g, d)| (g.name, d.name())).collect(),
            options: self.options,
            files: files.iter().map(|(kind, name)| (*kind, name.as_str())).collect(),
        };
        serde_json::to_string_pretty(&document).unwrap_or_else(|error| format!("\"{error}\"")) + "\n"
    }
}

fn json(value: &ConstValue) -> serde_json::Value {
    match value {
        ConstValue::Int(n) => (*n).into(),
        ConstValue::Float(x) => (*x).into(),
        ConstValue::Bool(b) => (*b).into(),
        ConstValue::Variant(word) => word.clone().into(),
    }
}
