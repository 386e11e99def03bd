//! Expands elementary functions of f64 for targets that have them in f32 only.
//!
//! Does: replaces `exp`, `exp2`, `log`, `log2`, `sin`, `cos`, `tanh` and `erf` of f64 by arithmetic
//! ([`crate::functions::double`]), also in combining functions.
//! Requires: a verified function, stage *tile*.
//! Keeps: results to two units in the last place.
//! Does not: touch functions of other types, or those that have an instruction.

use crate::functions::{Formula, double};
use crate::ir::{Builder, DType, Func, Op};

/// Runs the pass.
pub fn run(func: &mut Func) {
    for id in func.walk() {
        let data = func.op(id);
        let (Op::Unary(op), &[x]) = (&data.op, &data.operands[..]) else { continue };
        if func.ty(x).dtype() != Some(DType::F64) {
            continue;
        }
        let (op, loc, result) = (*op, data.loc.clone(), func.result(id));
        let mut builder = Builder::before(func, id, loc);
        let formula = Formula::new(&mut builder);
        let Some(expanded) = double::unary(op, formula.value(x)).map(|e| e.v) else { continue };
        func.replace_uses(result, expanded);
        func.erase(id);
    }
}
