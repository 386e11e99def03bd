//! Which memory a kernel writes, and which it reads: the pointers that its accesses go through, back to the arguments.
//!
//! Arguments that are written are borrowed exclusively, so that memory of different arguments does not overlap: what is read
//! through pointers that have no source in common with these does not change while the kernel runs.

use crate::ir::{Def, Effects, Elem, Func, Op, Type, Value};
use std::collections::HashSet;

/// Pointers and views through which something is written, with everything that they are made of.
pub fn through(func: &Func) -> HashSet<Value> {
    let mut written = HashSet::new();
    for id in func.walk() {
        let data = func.op(id);
        match data.op {
            Op::LocalStore | Op::AsyncCopy { .. } | Op::TmaLoad { .. } => {}
            // It may write through any pointer that it gets.
            Op::InlineAsm { pure: false, .. } => {
                data.operands.iter().filter(|&&v| is_pointer(func, v)).for_each(|&v| mark(func, v, &mut written));
            }
            _ if data.op.effects() == Effects::Write => mark(func, data.operands[0], &mut written),
            _ => {}
        }
    }
    written
}

/// Pointers and views through which something is read, atomics included, with everything that they are made of.
pub fn read_through(func: &Func) -> HashSet<Value> {
    let mut read = HashSet::new();
    for id in func.walk() {
        let data = func.op(id);
        match data.op {
            Op::InlineAsm { .. } => {
                data.operands.iter().filter(|&&v| is_pointer(func, v)).for_each(|&v| mark(func, v, &mut read));
            }
            Op::Store { .. } | Op::StoreView { .. } => {}
            _ if data.op.effects() != Effects::Pure => {
                let addresses = data.operands.first().filter(|&&v| is_pointer(func, v));
                addresses.into_iter().for_each(|&v| mark(func, v, &mut read));
            }
            _ => {}
        }
    }
    read
}

/// A pointer or view, and everything that it is made of.
pub fn sources(func: &Func, v: Value) -> HashSet<Value> {
    let mut sources = HashSet::new();
    mark(func, v, &mut sources);
    sources
}

fn is_pointer(func: &Func, v: Value) -> bool {
    matches!(func.ty(v).elem(), Some(Elem::Ptr(_))) || matches!(func.ty(v), Type::View { .. })
}

/// Everything that an address is computed from, as far as pointers and views go.
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
            // A carried value: the initial value, and what the loop yields.
            for id in func.walk() {
                let data = func.op(id);
                if data.regions.contains(&block) {
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
    }
}
