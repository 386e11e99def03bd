//! Whether the tensors of a file have the shapes that a kernel gives them, told before `tilewright run` runs it.
//!
//! The launch itself refuses what would leave a tensor. Here it is about tensors that are larger than what the kernel reads of
//! them, or cut in another way: such a run has a result, but hardly the one that was meant.

use std::collections::BTreeMap;

use tilewright::LaunchArg;
use tilewright::codegen::ir::{BinaryOp, Def, Func, Op, Value};

use super::{CliError, Result};

/// Fails where a view of a whole tensor, by as many dimensions as it has, is of another shape. Views whose base or shape
/// depends on more than the arguments are passed over.
pub fn check(
    func: &Func,
    scalars: &BTreeMap<&'static str, LaunchArg>,
    tensors: &BTreeMap<&'static str, Vec<usize>>,
) -> Result<()> {
    for id in func.walk() {
        let data = func.op(id);
        if !matches!(data.op, Op::MakeView { .. }) {
            continue;
        }
        let base = argument(func, data.operands[0]).and_then(|name| tensors.get_key_value(name));
        let rank = func.ty(data.results[0]).shape().len();
        let Some((name, shape)) = base.filter(|(_, shape)| shape.len() == rank) else { continue };
        let view: Option<Vec<i64>> = data.operands[1..=rank].iter().map(|&v| number(func, v, scalars)).collect();
        if let Some(view) = view
            && view.iter().zip(shape).any(|(&n, &extent)| n != extent as i64)
        {
            return Err(CliError::usage(
                format!(
                    "tensor `{name}` has shape {shape:?}: kernel `{}` reads it as one of shape {view:?}",
                    func.name
                ),
                "do the shapes of the tensors fit together, and --arg to them?",
            ));
        }
    }
    Ok(())
}

/// The name of the argument that a value is.
fn argument(func: &Func, v: Value) -> Option<&str> {
    match func.value(v).def {
        Def::Param(block, index) if block == func.body => func.args.get(index).map(|arg| &*arg.name),
        _ => None,
    }
}

/// An integer that the arguments determine.
fn number(func: &Func, v: Value, scalars: &BTreeMap<&'static str, LaunchArg>) -> Option<i64> {
    if let Some(n) = func.constant_int(v) {
        return Some(n);
    }
    if let Some(name) = argument(func, v) {
        return match *scalars.get(name)? {
            LaunchArg::I8(n) => Some(n.into()),
            LaunchArg::I16(n) => Some(n.into()),
            LaunchArg::I32(n) => Some(n.into()),
            LaunchArg::I64(n) => Some(n),
            LaunchArg::Ptr { .. } | LaunchArg::F32(_) | LaunchArg::F64(_) => None,
        };
    }
    let data = func.op(func.def_op(v)?);
    let operand = |i: usize| number(func, data.operands[i], scalars);
    match data.op {
        Op::Cast if func.ty(data.operands[0]).dtype()?.is_int() => operand(0),
        Op::Binary(BinaryOp::Add) => operand(0)?.checked_add(operand(1)?),
        Op::Binary(BinaryOp::Sub) => operand(0)?.checked_sub(operand(1)?),
        Op::Binary(BinaryOp::Mul) => operand(0)?.checked_mul(operand(1)?),
        _ => None,
    }
}
