//! Memory effects of a kernel: the pointers that it writes and reads through, traced back to the arguments.
//!
//! Written arguments are borrowed exclusively, so their memory overlaps that of no other argument: memory read through
//! pointers that share no underlying pointer with a written one does not change while the kernel runs.

use crate::ir::{Def, Effects, Elem, Func, Op, Type, Value};
use std::collections::HashSet;

/// Pointers and views that the kernel writes through, with all pointers and views that they derive from.
pub fn written_pointers(func: &Func) -> HashSet<Value> {
    let mut written = HashSet::new();
    for id in func.walk() {
        let data = func.op(id);
        match data.op {
            Op::LocalStore | Op::AsyncCopy { .. } | Op::AsyncLoad { .. } | Op::TmaLoad { .. } => {}
            // May write through any pointer operand.
            Op::InlineAsm { pure: false, .. } => {
                data.operands.iter().filter(|&&v| is_pointer(func, v)).for_each(|&v| mark(func, v, &mut written));
            }
            _ if data.op.effects() == Effects::Write => mark(func, data.operands[0], &mut written),
            _ => {}
        }
    }
    written
}

/// Pointers and views that the kernel reads through (atomics included), with all pointers and views that they derive
/// from.
pub fn read_pointers(func: &Func) -> HashSet<Value> {
    let mut read = HashSet::new();
    for id in func.walk() {
        let data = func.op(id);
        match data.op {
            Op::InlineAsm { .. } => {
                data.operands.iter().filter(|&&v| is_pointer(func, v)).for_each(|&v| mark(func, v, &mut read));
            }
            Op::Store { .. } | Op::StoreView { .. } | Op::TmaStore { op: None, .. } => {}
            _ if data.op.effects() != Effects::Pure => {
                let addresses = data.operands.first().filter(|&&v| is_pointer(func, v));
                addresses.into_iter().for_each(|&v| mark(func, v, &mut read));
            }
            _ => {}
        }
    }
    read
}

/// A pointer or view, and all pointers and views that it derives from.
pub fn underlying_pointers(func: &Func, v: Value) -> HashSet<Value> {
    let mut sources = HashSet::new();
    mark(func, v, &mut sources);
    sources
}

/// The arguments whose memory a pointer or view may access.
pub fn underlying_arguments(func: &Func, v: Value) -> HashSet<Value> {
    let is_argument = |v: &Value| matches!(func.value(*v).def, Def::Param(block, _) if block == func.body);
    underlying_pointers(func, v).into_iter().filter(is_argument).collect()
}

/// Whether other programs may wait for earlier stores of this one: at an atomic whose result it uses as a flag, or at
/// inline assembly, whose effects are unknown.
pub fn may_release_stores(func: &Func) -> bool {
    func.walk().iter().any(|&id| {
        matches!(
            func.op(id).op,
            Op::AtomicRmw { .. } | Op::AtomicCas { .. } | Op::SemaphoreWait | Op::InlineAsm { pure: false, .. }
        )
    })
}

pub fn is_pointer(func: &Func, v: Value) -> bool {
    matches!(func.ty(v).elem(), Some(Elem::Ptr(_))) || matches!(func.ty(v), Type::View { .. })
}

/// Adds a pointer or view, and all pointers and views that it derives from.
fn mark(func: &Func, v: Value, marked: &mut HashSet<Value>) {
    if !marked.insert(v) {
        return;
    }
    match func.value(v).def {
        Def::Result(id, index) => {
            let data = func.op(id);
            data.operands.iter().filter(|&&o| is_pointer(func, o)).for_each(|&o| mark(func, o, marked));
            for &r in &data.regions {
                if let Some(&last) = func.block(r).ops.last() {
                    let operands = &func.op(last).operands;
                    let skip = usize::from(matches!(func.op(last).op, Op::Condition));
                    if let Some(&y) = operands.get(index + skip) {
                        mark(func, y, marked);
                    }
                }
            }
        }
        Def::Param(block, index) => {
            // Loop-carried: the initial value, and the values that the loop yields.
            let Some(id) = func.owner(block) else { return };
            let data = func.op(id);
            let skip = match data.op {
                Op::For { .. } => 2,
                _ => 0,
            };
            if let Some(&init) = data.operands.get(index + skip) {
                mark(func, init, marked);
            }
            for &r in &data.regions {
                if let Some(&last) = func.block(r).ops.last() {
                    for &y in &func.op(last).operands {
                        if func.ty(y) == func.ty(v) {
                            mark(func, y, marked);
                        }
                    }
                }
            }
        }
    }
}
