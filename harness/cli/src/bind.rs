//! Derives scalar arguments of a kernel (strides, extents) from the shapes of its tensors and the names of its
//! parameters.
//!
//! A tensor parameter (`x: Tensor<T, (rows, d)>`) declares its strides and extents. For pointers (`x: In<T>`) only names
//! say that `x_stride_row` is a stride of `x`. All kernels of this repository follow this convention:
//!
//! - the strides of a tensor `x` are the scalars `x_stride_…`, in the order of its dimensions; what follows `x_stride_`
//!   names the dimension. (Those of `d_o` may be `do_stride_…`, and those of `partial_grad_w` may be
//!   `partial_stride_…`.)
//! - a scalar or constant named as a dimension is its extent: `d`, or `rows` for a dimension `row`; `d` also means a
//!   dimension `dim`. `n_q` is the extent of dimension `row` of `q`, or the length of a `q` with one dimension.
//!
//! A value that no name determines must be given on the command line.

use std::collections::BTreeMap;

use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};

use crate::choose::{self, suggest};
use crate::{CliError, Result};

/// Strides of one tensor among the kernel's parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Strides {
    /// One parameter per dimension.
    pub params: Vec<&'static str>,
    /// Name of each dimension, where its parameter has one.
    pub dims: Vec<Option<&'static str>>,
}

/// Returns the stride parameters of each memory parameter, by its name. A parameter without strides has no entry.
pub fn strides(def: &'static KernelDef) -> BTreeMap<&'static str, Strides> {
    let memory: Vec<&'static str> = def
        .params
        .iter()
        .filter(|p| matches!(p.kind, ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_)))
        .map(|p| p.name)
        .collect();
    let mut found: BTreeMap<&'static str, Strides> = BTreeMap::new();
    for tensor in def.tensors {
        let dims = tensor.dims.iter().map(|&dim| Some(def.dims[dim])).collect();
        found.insert(tensor.name, Strides { params: tensor.strides.to_vec(), dims });
    }
    let is_declared = |name: &str| def.tensors.iter().any(|t| t.strides.contains(&name));
    for param in def.params.iter().filter(|p| matches!(p.kind, ParamKind::Scalar(_)) && !is_declared(p.name)) {
        let Some((prefix, rest)) = param.name.split_once("_stride") else { continue };
        let dim = rest.strip_prefix('_').filter(|dim| !dim.is_empty());
        if dim.is_none() && !rest.is_empty() {
            continue;
        }
        if let Some(owner) = owner(prefix, &memory) {
            let strides = found.entry(owner).or_insert(Strides { params: Vec::new(), dims: Vec::new() });
            strides.params.push(param.name);
            strides.dims.push(dim);
        }
    }
    found
}

/// Returns the memory parameter to which stride parameters with this prefix belong.
fn owner(prefix: &str, memory: &[&'static str]) -> Option<&'static str> {
    let exact = memory.iter().find(|name| **name == prefix);
    let joined = || memory.iter().find(|name| name.replace('_', "") == prefix);
    let begun = || {
        let mut longer = memory.iter().filter(|name| name.strip_prefix(prefix).is_some_and(|r| r.starts_with('_')));
        longer.next().filter(|_| longer.next().is_none())
    };
    exact.or_else(joined).or_else(begun).copied()
}

/// Known tensor shapes and numbers, and the extents that follow from them.
#[derive(Clone, Debug, Default)]
pub struct Extents {
    /// Shape of each tensor.
    shapes: BTreeMap<&'static str, Vec<usize>>,
    /// Names of each tensor's dimensions.
    dims: BTreeMap<&'static str, Vec<Option<&'static str>>>,
    /// Numbers by name: arguments and constants.
    numbers: BTreeMap<String, i64>,
}

impl Extents {
    /// Adds the shape of a tensor.
    pub fn add_tensor(&mut self, name: &'static str, shape: &[usize], strides: Option<&Strides>) {
        self.shapes.insert(name, shape.to_vec());
        let dims = strides.map_or(vec![None; shape.len()], |strides| strides.dims.clone());
        self.dims.insert(name, dims);
    }

    /// Adds the value of an argument or constant.
    pub fn add_number(&mut self, name: &str, value: i64) {
        self.numbers.insert(name.to_string(), value);
    }

    /// Returns the shape of a tensor, if it is known.
    pub fn shape(&self, tensor: &str) -> Option<&[usize]> {
        self.shapes.get(tensor).map(Vec::as_slice)
    }

    /// Returns the extent that the name of a parameter or dimension denotes; `None` for an unknown name.
    ///
    /// # Errors
    /// Two tensors have different extents for the name (the message has both), or the extent does not fit into an i64.
    pub fn of_name(&self, name: &str) -> Result<Option<i64>, String> {
        if let Some(&number) = self.numbers.get(name) {
            return Ok(Some(number));
        }
        let is_meant = |dim: &str| dim == name || name.strip_suffix('s') == Some(dim) || (name, dim) == ("d", "dim");
        let extents = self.dims.iter().flat_map(|(tensor, dims)| {
            dims.iter().enumerate().filter(|(_, dim)| dim.is_some_and(is_meant)).map(move |(axis, _)| (*tensor, axis))
        });
        let mut found: Option<(&str, usize)> = None;
        for (tensor, axis) in extents {
            let extent = self.shapes[tensor][axis];
            match found {
                Some((other, before)) if before != extent => {
                    return Err(format!("its extent is {before} in `{other}` and {extent} in `{tensor}`"));
                }
                Some(_) => {}
                None => found = Some((tensor, extent)),
            }
        }
        let of_rows = || name.strip_prefix("n_").and_then(|tensor| self.rows(tensor));
        let extent = found.map(|(_, extent)| extent).or_else(of_rows);
        extent
            .map(|extent| i64::try_from(extent).map_err(|_| format!("its extent is {extent}, which is too large")))
            .transpose()
    }

    /// The value of a constant, argument or extent: one of `known`, else what the name denotes.
    pub fn value(&self, known: &[(&'static str, ConstValue)], name: &str) -> Option<ConstValue> {
        choose::given(known, name).or_else(|| self.of_name(name).ok().flatten().map(ConstValue::Int))
    }

    /// Returns the extent of a tensor's dimension `row`, or of its only dimension.
    fn rows(&self, tensor: &str) -> Option<usize> {
        let shape = self.shapes.get(tensor)?;
        let axis = self.dims[tensor].iter().position(|dim| *dim == Some("row"));
        axis.or((shape.len() == 1).then_some(0)).map(|axis| shape[axis])
    }

    /// Evaluates an expression such as `rows/rows_tile*heads`: numbers and names, multiplied and divided from left to
    /// right, where `/` rounds up.
    ///
    /// # Errors
    /// An operand that is neither a number nor a known name, a divisor that is not positive, or overflow.
    pub fn evaluate(&self, text: &str) -> Result<i64, String> {
        let mut value: Option<i64> = None;
        let mut rest = text.trim();
        let mut operator = '*';
        loop {
            let end = rest.find(['*', '/']).unwrap_or(rest.len());
            let word = rest[..end].trim();
            let number = self.operand(word)?;
            let overflow = || format!("`{text}` is too large");
            value = Some(match (value, operator) {
                (None, _) => number,
                (Some(left), '/') if number > 0 => left.div_euclid(number) + i64::from(left.rem_euclid(number) != 0),
                (Some(_), '/') => return Err(format!("`{text}` divides by {number}: expected 1 or more")),
                (Some(left), _) => left.checked_mul(number).ok_or_else(overflow)?,
            });
            if end == rest.len() {
                return Ok(value.unwrap_or(number));
            }
            operator = if rest[end..].starts_with('/') { '/' } else { '*' };
            rest = &rest[end + 1..];
        }
    }

    fn operand(&self, word: &str) -> Result<i64, String> {
        if let Ok(number) = word.parse() {
            return Ok(number);
        }
        if let Some(number) = self.of_name(word).map_err(|why| format!("`{word}` is ambiguous: {why}"))? {
            return Ok(number);
        }
        let mut known: Vec<&str> = self.numbers.keys().map(String::as_str).collect();
        known.extend(self.dims.values().flatten().flatten());
        known.sort_unstable();
        known.dedup();
        Err(format!("`{word}` is neither a number nor a known name ({})", suggest(word, &known, "known are")))
    }

    /// Evaluates a list of extents such as `rows,d`. The name of a tensor denotes its shape.
    ///
    /// # Errors
    /// An element of the list that cannot be evaluated or is negative.
    pub fn evaluate_shape(&self, text: &str) -> Result<Vec<usize>, String> {
        if let Some(shape) = self.shape(text.trim()) {
            return Ok(shape.to_vec());
        }
        let extent = |part: &str| {
            let value = self.evaluate(part)?;
            usize::try_from(value).map_err(|_| format!("`{part}` is {value}: expected an extent, 0 or more"))
        };
        text.split(',').map(extent).collect()
    }
}

/// The assumptions that tensors are row-major, with rows of a multiple of 16 elements: the last stride is 1, the others and
/// the extent of a row are multiples of 16. Pointers are aligned to 16 bytes.
pub fn row_major(def: &'static KernelDef) -> Specialization {
    let mut specialization = Specialization::aligned_memory(def);
    let strides: Vec<Strides> = strides(def).into_values().collect();
    let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    for (param, assumed) in passed.zip(&mut specialization.args) {
        let is_extent_of_row = |of: &Strides| of.dims.len() > 1 && of.dims.last() == Some(&Some(param.name));
        if strides.iter().any(|of| of.params.last() == Some(&param.name)) {
            *assumed = ArgSpec { divisible_by: 1, equal_to: Some(1) };
        } else if strides.iter().any(|of| of.params.contains(&param.name) || is_extent_of_row(of)) {
            *assumed = ArgSpec { divisible_by: 16, equal_to: None };
        }
    }
    specialization
}

/// Returns the row-major strides of a dense tensor, in elements. Strides of an empty tensor saturate at `i64::MAX`.
pub fn dense_strides(shape: &[usize]) -> Vec<i64> {
    let shape: Vec<i64> = shape.iter().map(|&extent| i64::try_from(extent).unwrap_or(i64::MAX)).collect();
    tilewright_runtime::Strided::row_major(&shape).strides
}

/// Checks that the kernel takes as many strides of a tensor as the tensor has dimensions. Tensors without stride
/// parameters can have any rank.
///
/// # Errors
/// The numbers differ; the message has both.
pub fn check_rank(def: &KernelDef, tensor: &str, rank: usize, strides: Option<&Strides>) -> Result<()> {
    match strides {
        Some(strides) if strides.params.len() != rank => Err(CliError::usage(
            format!(
                "tensor `{tensor}` has {rank} dimensions: kernel `{}` takes {} strides of it",
                def.name,
                strides.params.len()
            ),
            format!("its strides are {}", strides.params.join(", ")),
        )),
        Some(_) | None => Ok(()),
    }
}

/// Checks that the tensors of a kernel have equal extents where their dimensions have the same name.
///
/// # Errors
/// Two different extents; the message has both tensors.
pub fn check_extents(def: &KernelDef, shapes: &BTreeMap<&'static str, &[usize]>) -> Result<()> {
    let mut found: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for tensor in def.tensors {
        let Some(shape) = shapes.get(tensor.name) else { continue };
        for (&dim, &extent) in tensor.dims.iter().zip(*shape) {
            let (name, known) = (def.dims[dim], (extent, tensor.name));
            let (expected, of) = *found.entry(name).or_insert(known);
            if expected != extent {
                return Err(CliError::usage(
                    format!(
                        "tensor `{}` has shape {shape:?}: `{name}` is {extent} there, and {expected} in `{of}`",
                        tensor.name
                    ),
                    format!("extents called `{name}` must be equal"),
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attention() -> Extents {
        let mut extents = Extents::default();
        let dims = vec![Some("head"), Some("row"), Some("dim")];
        let strides = Strides { params: vec!["a", "b", "c"], dims };
        extents.add_tensor("q", &[4, 100, 64], Some(&strides));
        extents.add_tensor("k", &[4, 70, 64], Some(&strides));
        extents.add_tensor("w", &[9], None);
        extents.add_number("q_tile", 32);
        extents
    }

    #[test]
    fn names_mean_extents() {
        let extents = attention();
        assert_eq!(extents.of_name("d"), Ok(Some(64)));
        assert_eq!(extents.of_name("heads"), Ok(Some(4)));
        assert_eq!(extents.of_name("n_q"), Ok(Some(100)));
        assert_eq!(extents.of_name("n_k"), Ok(Some(70)));
        assert_eq!(extents.of_name("n_w"), Ok(Some(9)));
        assert_eq!(extents.of_name("scale"), Ok(None));
        let message = extents.of_name("rows").unwrap_err();
        assert!(message.contains("70 in `k`") && message.contains("100 in `q`"), "{message}");
    }

    #[test]
    fn extents_beyond_an_i64_are_mistakes() {
        let mut extents = Extents::default();
        extents.add_tensor(
            "x",
            &[0, usize::MAX, 1 << 62],
            Some(&Strides { params: vec![], dims: vec![None, Some("d"), None] }),
        );
        assert!(extents.of_name("d").unwrap_err().contains("18446744073709551615"));
        assert_eq!(dense_strides(&[0, usize::MAX, 1 << 62]), [i64::MAX, 1 << 62, 1]);
    }

    #[test]
    fn expressions_divide_upwards() {
        let extents = attention();
        assert_eq!(extents.evaluate("n_q/q_tile"), Ok(4));
        assert_eq!(extents.evaluate("heads * 2"), Ok(8));
        assert_eq!(extents.evaluate("7"), Ok(7));
        assert_eq!(extents.evaluate_shape("heads,n_q"), Ok(vec![4, 100]));
        assert_eq!(extents.evaluate_shape("k"), Ok(vec![4, 70, 64]));
        for bad in ["", "n_q/0", "n_q/", "width", "9223372036854775807*2"] {
            assert!(extents.evaluate(bad).is_err(), "{bad}");
        }
        assert!(extents.evaluate_shape("-1").is_err());
        assert!(extents.evaluate("q_tiles").unwrap_err().contains("did you mean `q_tile`"));
    }

    #[test]
    fn strides_find_their_tensor() {
        let memory = ["x", "d_o", "partial_grad_w", "grad_x", "grad_y"];
        assert_eq!(owner("x", &memory), Some("x"));
        assert_eq!(owner("do", &memory), Some("d_o"));
        assert_eq!(owner("partial", &memory), Some("partial_grad_w"));
        assert_eq!(owner("grad", &memory), None, "two tensors begin so");
        assert_eq!(owner("y", &memory), None);
    }
}
