//! Checks that the simulator supports every instruction of a module. Support does not depend on operand values, so each
//! instruction is executed on zeros.

use super::callee::Callee;
use super::error::{SimError, UnsupportedCode, UnsupportedKind};
use super::machine::atomic;
use super::parse::{Inst, Line, Module, Ty};
use super::value;

/// Checks every instruction of a module.
///
/// # Errors
/// The first instruction that is not supported.
pub fn check(module: &Module) -> Result<(), SimError> {
    for (name, function) in &module.functions {
        for line in function.blocks.iter().flatten() {
            instruction(module, &line.inst).map_err(|what| unsupported(what, name, line))?;
        }
    }
    Ok(())
}

fn unsupported(what: UnsupportedKind, function: &str, line: &Line) -> SimError {
    let (instruction, source_loc) = (line.text.clone(), line.source_loc.to_string());
    SimError::Unsupported(Box::new(UnsupportedCode {
        kind: what,
        function: function.into(),
        line: line.number,
        instruction,
        source_loc,
    }))
}

fn instruction(module: &Module, inst: &Inst) -> Result<(), UnsupportedKind> {
    match inst {
        Inst::Binary { op, ty: Ty::Int(128), .. } => value::wide_binary(op, 0, 0).map(drop),
        Inst::Binary { op, ty, .. } => value::binary(op, ty, 0, 0).map(drop),
        Inst::Compare { predicate, ty, .. } => value::compare(predicate, ty, 0, 0).map(drop),
        Inst::FNeg { ty, .. } => value::dtype(ty).map(drop),
        Inst::Cast { op, from, to, .. } => cast(op, from, to),
        Inst::Gep { index_ty, .. } => value::int_bits(index_ty).map(drop),
        Inst::Load { ty, .. } | Inst::Store { ty, .. } => in_memory(ty),
        Inst::AtomicLoad { ty, .. } | Inst::CompareExchange { ty, .. } => scalar(ty),
        Inst::Atomic { op, ty, .. } => scalar(ty).and_then(|()| atomic(op, ty, 0, 0).map(drop)),
        Inst::Call { callee: Callee::Function(name), .. } => match module.functions.contains_key(name) {
            true => Ok(()),
            false => Err(UnsupportedKind::Function(name.clone())),
        },
        Inst::Call { callee: Callee::Pure(intrinsic), ty, args } => {
            let zeros: Vec<(&Ty, u64)> = args.iter().map(|(ty, _)| (ty, 0)).collect();
            intrinsic.evaluate(ty, &zeros).map(drop)
        }
        // Assembly is checked when it is parsed.
        Inst::Asm { .. }
        | Inst::Call { .. }
        | Inst::Select { .. }
        | Inst::ExtractElement { .. }
        | Inst::InsertElement { .. }
        | Inst::ExtractValue { .. }
        | Inst::Phi { .. }
        | Inst::Branch { .. }
        | Inst::BranchIf { .. }
        | Inst::Ret { .. }
        | Inst::Alloca => Ok(()),
    }
}

/// Accepts types that fit a 64-bit register.
fn scalar(ty: &Ty) -> Result<(), UnsupportedKind> {
    match ty {
        Ty::Int(..=64) | Ty::Half | Ty::BFloat | Ty::Float | Ty::Double | Ty::Ptr(_) => Ok(()),
        _ => Err(UnsupportedKind::Type(ty.to_string())),
    }
}

/// Accepts scalars and vectors whose elements are whole bytes.
fn in_memory(ty: &Ty) -> Result<(), UnsupportedKind> {
    match ty {
        Ty::Vector(n, element) if *n > 0 && !matches!(**element, Ty::Int(bits) if bits % 8 != 0) => scalar(element),
        _ => scalar(ty),
    }
}

fn cast(op: &str, from: &Ty, to: &Ty) -> Result<(), UnsupportedKind> {
    let unsupported = || UnsupportedKind::Instruction(format!("{op} {from} to {to}"));
    let wide = |ty: &Ty| *ty == Ty::Int(128);
    match (from, to) {
        (Ty::Vector(..), _) | (_, Ty::Vector(..)) => {
            in_memory(from)?;
            in_memory(to)?;
            if op == "bitcast" && from.bytes() == to.bytes() { Ok(()) } else { Err(unsupported()) }
        }
        (Ty::Int(..=64), to) if wide(to) && ["zext", "sext"].contains(&op) => Ok(()),
        (from, Ty::Int(..=64)) if wide(from) && op == "trunc" => Ok(()),
        _ if wide(from) || wide(to) => Err(unsupported()),
        _ => value::cast(op, from, 0, to).map(drop),
    }
}
