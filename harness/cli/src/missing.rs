//! What a command line lacks of a launch: tensors, and the types and constants that follow from them.

use std::collections::BTreeMap;

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, ElemDef, KernelDef, ParamKind};
use tilewright_runtime::escape::printable;

use crate::bind::Strides;
use crate::run::{Source, memory_params};
use crate::tensors::Tensor;
use crate::{CliError, Result, choose};

/// The tensors that a command line gives.
pub struct CommandLine<'a> {
    pub def: &'static KernelDef,
    /// Those that the kernel has parameters for.
    pub given: &'a BTreeMap<&'static str, Tensor>,
    pub source: &'a Source,
    /// The names of all of them.
    pub names: &'a [String],
}

impl CommandLine<'_> {
    /// Checks that every type parameter has an element type.
    ///
    /// # Errors
    /// The missing tensor that would have the type, else the type parameter.
    pub fn complete_types(&self, types: Vec<Option<DType>>, constants: &[(&str, ConstValue)]) -> Result<Vec<DType>> {
        let unknown = types.iter().position(Option::is_none).map(ElemDef::Generic);
        let is_unknown = |_: &str, elem: ElemDef| Some(elem) == unknown;
        choose::complete_dtypes(self.def, types).map_err(|error| self.or_missing(error, constants, &is_unknown))
    }

    /// Checks that every constant without a default has a value.
    ///
    /// # Errors
    /// The missing tensor with a dimension that would give the value, else the constants.
    pub fn check_constants(
        &self,
        constants: &[(&str, ConstValue)],
        strides: &BTreeMap<&'static str, Strides>,
    ) -> Result<()> {
        let missing = choose::missing_constants(self.def, constants);
        let needed = missing.iter().filter_map(|name| choose::heuristic_needs(self.def, constants, name));
        let wanted: Vec<&'static str> = missing.iter().copied().chain(needed).collect();
        let has_dim = |name: &str, _: ElemDef| {
            strides.get(name).is_some_and(|strides| strides.dims.iter().flatten().any(|dim| wanted.contains(dim)))
        };
        choose::check_complete(self.def, constants).map_err(|error| self.or_missing(error, constants, &has_dim))
    }

    /// The error about a missing tensor that `has_it`, else `error`.
    fn or_missing(
        &self,
        error: CliError,
        constants: &[(&str, ConstValue)],
        has_it: &dyn Fn(&str, ElemDef) -> bool,
    ) -> CliError {
        let is_other = |(name, elem): (&'static str, ElemDef)| {
            (!has_it(name, elem) || self.def.is_left_out(name, |flag| choose::given(constants, flag))).then_some(name)
        };
        let others: Vec<&'static str> =
            memory_params(self.def).map(|(param, elem)| (param.name, elem)).filter_map(is_other).collect();
        self.check_tensors(&others).err().unwrap_or(error)
    }

    /// Checks that every tensor that the kernel reads is given.
    ///
    /// # Errors
    /// The first tensor that is neither given nor in `unread`.
    pub fn check_tensors(&self, unread: &[&'static str]) -> Result<()> {
        let missing = memory_params(self.def).find(|(param, _)| {
            let read = !matches!(param.kind, ParamKind::Out(_)) && !unread.contains(&param.name);
            read && !self.given.contains_key(param.name)
        });
        let Some((param, _)) = missing else { return Ok(()) };
        let shown: Vec<String> = self.names.iter().map(|name| printable(name)).collect();
        let names: Vec<&str> = shown.iter().map(String::as_str).collect();
        let (name, kernel) = (param.name, self.def.name);
        let (message, help) = match self.source {
            Source::File(file) => (
                format!("{file} has no tensor `{name}`, which `{kernel}` reads"),
                choose::suggest(name, &names, "the file has"),
            ),
            Source::Shapes(file) => {
                let in_file = file.as_ref().map(|file| format!(", or a tensor `{name}` in {file}")).unwrap_or_default();
                (
                    format!("kernel `{kernel}` reads the tensor `{name}`, which is not given"),
                    format!("--shape {name}=… in numbers{in_file}; {}", choose::suggest(name, &names, "given are")),
                )
            }
        };
        Err(CliError::usage(message, help))
    }
}
