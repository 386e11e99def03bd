//! `tilewright list`: lists the kernels with their arguments and constants.

use std::io::Write;

use clap::Args;
use serde::Serialize;
use tilewright_codegen::lang::kernel::{ConstDefault, ConstValue, ElemDef, KernelDef, ParamDef, ParamKind};

use crate::output::to_json;
use crate::{Kernels, Result};

#[derive(Args)]
pub struct Arguments {
    /// Only this kernel, with its full description
    kernel: Option<String>,
    /// Print the names only, one in a line
    #[arg(long, conflicts_with_all = ["json", "kernel"])]
    names: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Kernel {
    name: &'static str,
    doc: String,
    source: String,
    type_parameters: Vec<TypeParameter>,
    parameters: Vec<Parameter>,
    tensors: Vec<Tensor>,
    constants: Vec<Constant>,
}

/// A tensor in the signature: which of the parameters are its strides and extents.
#[derive(Serialize)]
struct Tensor {
    /// The parameter with its memory.
    name: &'static str,
    extents: Vec<&'static str>,
    strides: &'static [&'static str],
}

#[derive(Serialize)]
struct TypeParameter {
    name: &'static str,
    bound: &'static str,
    members: Vec<&'static str>,
}

#[derive(Serialize)]
struct Parameter {
    name: &'static str,
    /// `in`, `out`, `inout` or `scalar`.
    kind: &'static str,
    /// An element type, or the name of a type parameter.
    #[serde(rename = "type")]
    ty: String,
    /// Whether the kernel is specialized for the alignment of the argument, and for the value 1.
    specialized: bool,
}

#[derive(Serialize)]
struct Constant {
    name: &'static str,
    #[serde(rename = "type")]
    ty: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<String>,
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let chosen: Vec<&KernelDef> = match &arguments.kernel {
        Some(name) => vec![kernels.find(name)?],
        None => kernels.defs().to_vec(),
    };
    if arguments.names {
        return Ok(chosen.iter().try_for_each(|def| writeln!(out, "{}", def.name))?);
    }
    let kernels: Vec<Kernel> = chosen.into_iter().map(describe).collect();
    if arguments.json {
        writeln!(out, "{}", to_json(&kernels))?;
        return Ok(());
    }
    for (index, kernel) in kernels.iter().enumerate() {
        if index > 0 {
            writeln!(out)?;
        }
        print(kernel, arguments.kernel.is_some(), out)?;
    }
    Ok(())
}

fn print(kernel: &Kernel, whole: bool, out: &mut dyn Write) -> Result<()> {
    let generics: Vec<String> = kernel.type_parameters.iter().map(|t| format!("{}: {}", t.name, t.bound)).collect();
    let generics = if generics.is_empty() { String::new() } else { format!("<{}>", generics.join(", ")) };
    writeln!(out, "{}{generics}", kernel.name)?;
    let doc: Vec<&str> = match whole {
        true => kernel.doc.lines().collect(),
        false => kernel.doc.lines().take_while(|line| !line.trim().is_empty()).collect(),
    };
    for line in doc {
        writeln!(out, "{}", format!("  {line}").trim_end())?;
    }
    // Strides and extents come with the tensors.
    let of_tensor = |name| kernel.tensors.iter().any(|t| t.strides.contains(&name) || t.extents.contains(&name));
    let arguments = kernel.parameters.iter().filter(|p| !of_tensor(p.name)).map(|p| {
        let extents = kernel.tensors.iter().find(|t| t.name == p.name).map(|t| match t.extents[..] {
            [only] => format!("({only},)"),
            _ => format!("({})", t.extents.join(", ")),
        });
        match (p.kind, extents) {
            ("in", None) => format!("{}: In<{}>", p.name, p.ty),
            ("out", None) => format!("{}: Out<{}>", p.name, p.ty),
            ("inout", None) => format!("{}: InOut<{}>", p.name, p.ty),
            ("in", Some(extents)) => format!("{}: Tensor<{}, {extents}>", p.name, p.ty),
            ("out", Some(extents)) => format!("{}: TensorMut<{}, {extents}>", p.name, p.ty),
            ("inout", Some(extents)) => format!("{}: TensorInOut<{}, {extents}>", p.name, p.ty),
            _ => format!("{}: {}", p.name, p.ty),
        }
    });
    list("arguments", arguments.collect(), out)?;
    let constants = kernel.constants.iter().map(|c| match &c.default {
        Some(default) => format!("{}: {} = {default}", c.name, c.ty),
        None => format!("{}: {}", c.name, c.ty),
    });
    list("constants", constants.collect(), out)
}

/// Prints `title  a, b, c`, wrapped at 100 columns.
fn list(title: &str, items: Vec<String>, out: &mut dyn Write) -> Result<()> {
    const WIDTH: usize = 100;
    if items.is_empty() {
        return Ok(());
    }
    let mut line = format!("  {title}  ");
    let indent = " ".repeat(line.len());
    let last = items.len() - 1;
    for (index, item) in items.into_iter().enumerate() {
        let item = if index == last { item } else { format!("{item}, ") };
        if line.len() + item.trim_end().len() > WIDTH && line.len() > indent.len() {
            writeln!(out, "{}", line.trim_end())?;
            line.clone_from(&indent);
        }
        line.push_str(&item);
    }
    writeln!(out, "{line}")?;
    Ok(())
}

/// Replaces rustdoc's links, `[text](target)` and [`name`], by their texts.
fn without_links(doc: &str) -> String {
    let mut plain = String::new();
    let mut rest = doc;
    while let Some(at) = rest.find('[') {
        plain.push_str(&rest[..at]);
        let (mut inside, after) = match rest[at + 1..].split_once(']') {
            Some(parts) if !parts.0.contains(['[', '\n']) => parts,
            _ => ("", ""),
        };
        let target = after.strip_prefix('(').and_then(|target| target.split_once(')'));
        let is_code = inside.starts_with('`') && inside.ends_with('`');
        (inside, rest) = match target {
            Some((_, after)) => (inside, after),
            None if is_code => (inside, after),
            None => ("[", &rest[at + 1..]),
        };
        plain.push_str(inside);
    }
    plain.push_str(rest);
    plain
}

fn describe(def: &KernelDef) -> Kernel {
    let type_name = |elem: ElemDef| match elem {
        ElemDef::Fixed(dtype) => dtype.name().to_string(),
        ElemDef::Generic(index) => def.generics.get(index).map_or("?", |g| g.name).to_string(),
    };
    let parameter = |p: &ParamDef| {
        let (kind, elem) = match p.kind {
            ParamKind::In(elem) => ("in", elem),
            ParamKind::Out(elem) => ("out", elem),
            ParamKind::InOut(elem) => ("inout", elem),
            ParamKind::Scalar(elem) => ("scalar", elem),
            ParamKind::Constexpr { .. } => return None,
        };
        Some(Parameter { name: p.name, kind, ty: type_name(elem), specialized: p.specialize })
    };
    let constant = |p: &ParamDef| match p.kind {
        ParamKind::Constexpr { ty, default } => Some(Constant {
            name: p.name,
            ty: ty.trim_end().to_string(),
            default: default.map(|d: ConstDefault| ConstValue::from(d).to_string()),
        }),
        ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) | ParamKind::Scalar(_) => None,
    };
    Kernel {
        name: def.name,
        doc: without_links(def.doc.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim()),
        source: format!("{}:{}", def.file, def.line),
        type_parameters: def
            .generics
            .iter()
            .map(|g| TypeParameter {
                name: g.name,
                bound: g.bound,
                members: g.members().iter().map(|d| d.name()).collect(),
            })
            .collect(),
        parameters: def.params.iter().filter_map(parameter).collect(),
        tensors: def
            .tensors
            .iter()
            .map(|t| Tensor {
                name: t.name,
                extents: t.dims.iter().map(|&dim| def.dims[dim]).collect(),
                strides: t.strides,
            })
            .collect(),
        constants: def.params.iter().filter_map(constant).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::without_links;

    #[test]
    fn links_become_their_texts() {
        for (doc, plain) in [
            ("adds ([`sum`](super::sum), and [why](https://a/b)), [`x`] too", "adds (`sum`, and why), `x` too"),
            (
                "q is [batch, heads, n_q, d], of [rows / 16, 16 · d_tile]",
                "q is [batch, heads, n_q, d], of [rows / 16, 16 · d_tile]",
            ),
            ("an open [ and an open [`x", "an open [ and an open [`x"),
            ("", ""),
        ] {
            assert_eq!(without_links(doc), plain);
        }
    }
}
