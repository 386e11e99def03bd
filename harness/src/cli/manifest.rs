//! Writes `manifest.json`, which describes compiled code to the program that launches it. `docs/ahead-of-time.md`
//! explains the fields.

use std::collections::BTreeMap;

use serde::Serialize;
use tilewright::codegen::lang::kernel::{ConstValue, ParamKind};
use tilewright::codegen::target::{Artifact, CompileOptions, Manifest};

use super::compile::Request;
use super::doctor::to_json;

/// Version of the format; incremented when the meaning of a field changes.
const FORMAT: u32 = 1;

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

/// Returns the text of the manifest.
pub fn describe(request: &Request, artifact: &Artifact, files: &[(&str, String)]) -> String {
    let memory = |kind: ParamKind| {
        let (access, elem) = match kind {
            ParamKind::In(elem) => ("in", elem),
            ParamKind::Out(elem) => ("out", elem),
            ParamKind::InOut(elem) => ("inout", elem),
            ParamKind::Scalar(_) | ParamKind::Constexpr { .. } => return None,
        };
        elem.resolve(&request.dtypes).map(|dtype| Memory { access, elem: dtype.name() })
    };
    let constant = |name: &'static str, kind: ParamKind| match kind {
        ParamKind::Constexpr { default, .. } => {
            let given = request.constants.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
            given.or(default.map(ConstValue::from)).map(|value| (name, json(&value)))
        }
        ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) | ParamKind::Scalar(_) => None,
    };
    let def = request.def;
    to_json(&Document {
        format: FORMAT,
        compiler: tilewright::codegen::compiler_id(),
        manifest: &artifact.manifest,
        memory: def.params.iter().filter_map(|p| memory(p.kind).map(|m| (p.name, m))).collect(),
        constants: def.params.iter().filter_map(|p| constant(p.name, p.kind)).collect(),
        types: def.generics.iter().zip(&request.dtypes).map(|(g, d)| (g.name, d.name())).collect(),
        options: &request.options,
        files: files.iter().map(|(kind, name)| (*kind, name.as_str())).collect(),
    }) + "\n"
}

fn json(value: &ConstValue) -> serde_json::Value {
    match value {
        ConstValue::Int(n) => (*n).into(),
        ConstValue::Float(x) => (*x).into(),
        ConstValue::Bool(b) => (*b).into(),
        ConstValue::Word(word) => word.clone().into(),
    }
}
