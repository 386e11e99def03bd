//! How far a kernel's views reach, checked against the tensors before `tilewright run` runs it.

use std::collections::BTreeMap;

use tilewright::LaunchArg;
use tilewright::codegen::ir::{BinaryOp, Def, Func, Op, OpId, Value};

use super::{CliError, Result};

/// Fails where a view that the kernel makes of one of its arguments reaches beyond that tensor. Views whose base, shape or
/// strides depend on more than the arguments are passed over.
pub fn check(
    func: &Func,
    scalars: &BTreeMap<&'static str, LaunchArg>,
    elements: &BTreeMap<&'static str, usize>,
) -> Result<()> {
    for id in func.walk() {
        let data = func.op(id);
        if !matches!(data.op, Op::MakeView { .. }) {
            continue;
        }
        let Some((name, &available)) = argument(func, data.operands[0]).and_then(|name| elements.get_key_value(name))
        else {
            continue;
        };
        if let Some(view) = View::of(func, id, scalars)
            && let Some((first, last)) = view.reach()
            && (first < 0 || last >= available as i128)
        {
            let View { shape, strides } = view;
            let beyond = if first < 0 { first } else { last };
            return Err(CliError::usage(
                format!(
                    "`{name}` has {available} elements: kernel `{}` views it with shape {shape:?} and strides {strides:?}, which \
                     reaches element {beyond}",
                    func.name
                ),
                "do the shapes of the tensors fit together, and --arg to them?",
            ));
        }
    }
    Ok(())
}

struct View {
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl View {
    fn of(func: &Func, id: OpId, scalars: &BTreeMap<&'static str, LaunchArg>) -> Option<View> {
        let data = func.op(id);
        let rank = func.ty(data.results[0]).shape().len();
        let part = |k: usize| -> Option<Vec<i64>> {
            data.operands[1 + k * rank..][..rank].iter().map(|&v| number(func, v, scalars)).collect()
        };
        Some(View { shape: part(0)?, strides: part(1)? })
    }

    /// The first and the last element, counted from the base; nothing where the view is empty.
    fn reach(&self) -> Option<(i128, i128)> {
        let (mut first, mut last) = (0, 0);
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            if n <= 0 {
                return None;
            }
            let step = i128::from(n - 1) * i128::from(stride);
            first += step.min(0);
            last += step.max(0);
        }
        Some((first, last))
    }
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
