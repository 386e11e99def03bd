//! Checks, before `tilewright run` launches a kernel, that the file's tensors have the shapes of the kernel's views.
//!
//! The launch itself refuses out-of-bounds accesses. This check finds tensors that are larger than the kernel's view of
//! them, or of another shape: such a run would succeed, probably with a wrong result.

use std::collections::BTreeMap;

use tilewright_codegen::ir::{BinaryOp, Def, Func, Op, Value};
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_runtime::LaunchArg;

use crate::{CliError, Result};

/// Checks that constants which tensor parameters give, such as `d` of `x: Tensor<T, (rows, d)>`, are the extents of the
/// tensors that have these shapes.
///
/// # Errors
/// A constant has another value than the extent.
pub fn check_constants(
    def: &KernelDef,
    constants: &[(&'static str, ConstValue)],
    shapes: &BTreeMap<&'static str, &[usize]>,
) -> Result<()> {
    for tensor in def.tensors {
        let Some(shape) = shapes.get(tensor.name) else { continue };
        for (axis, (&dim, extent)) in tensor.dims.iter().zip(*shape).enumerate() {
            let (dim, name) = (def.dims[dim], tensor.name);
            let value = constants.iter().find(|(known, _)| *known == dim).map(|(_, value)| value);
            if let Some(value) = value.filter(|value| **value != ConstValue::Int(*extent as i64)) {
                return Err(CliError::usage(
                    format!("the constant {dim} is {value}, and dimension {axis} of `{name}`, its extent, is {extent}"),
                    format!("omit it, or give {dim}={extent}"),
                ));
            }
        }
    }
    Ok(())
}

/// Checks each view of a whole tensor with the tensor's rank. Views whose base or shape does not follow from the
/// arguments are skipped.
///
/// # Errors
/// A view has another shape than its tensor.
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
                format!("tensor `{name}` has shape {shape:?}: kernel `{}` views it with shape {view:?}", func.name),
                "check that the shapes of the tensors and --arg are consistent",
            ));
        }
    }
    Ok(())
}

/// Returns the name of the argument, if the value is one.
fn argument(func: &Func, v: Value) -> Option<&str> {
    match func.value(v).def {
        Def::Param(block, index) if block == func.body => func.args.get(index).map(|arg| &*arg.name),
        _ => None,
    }
}

/// Evaluates an integer value from the scalar arguments; `None` if it depends on anything else.
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
