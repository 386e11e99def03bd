//! A schedule written by hand: the text of the function at stage *schedule*, as `--emit schedule` writes it, with other
//! placements, or with the ops of a block in another order.
//!
//! Only placements and order are taken, so that the kernel stays the one that was recorded, whatever the text says.

use crate::ir::{BlockId, Effects, Func, Op, OpId, Stage, Value};
use crate::text;
use crate::verify::verify;
use std::collections::HashMap;

/// Whether [`CompileOptions::loops`](crate::target::CompileOptions::loops) is the text of a function, and not what a solver found.
pub fn is_text(loops: &str) -> bool {
    loops.contains("kernel @")
}

/// Gives the ops of a scheduled function the placements and the order of a text.
///
/// # Errors
/// A text that is not that of the function but for placements and order; a schedule that breaks a dependence. The function
/// is unchanged.
pub fn apply(func: &mut Func, given: &str) -> Result<(), String> {
    let given = text::parse_file("schedule", given)
        .map_err(|e| format!("line {}, column {}: {}", e.line, e.column, e.message))?;
    // In the text's own numbering of layouts.
    let own =
        text::parse(&text::print(func)).map_err(|e| format!("internal compiler error: {e}; please report this"))?;
    // What is assumed of arguments may differ: it is the launch's.
    let args = |func: &Func| -> Vec<String> {
        let types = func.block(func.body).params.iter().map(|&v| func.ty(v).to_string());
        func.args.iter().zip(types).map(|(arg, ty)| format!("{}: {ty}", arg.name)).collect()
    };
    let (own_args, given_args) = (args(&own), args(&given));
    if let Some(other) = given_args.iter().find(|arg| !own_args.contains(arg)) {
        return Err(format!("the kernel has no argument `{other}`: its arguments are {}", own_args.join(", ")));
    }
    if own_args != given_args {
        return Err(format!("the arguments of the kernel are {}", own_args.join(", ")));
    }
    let layouts = own.layouts.len().max(given.layouts.len());
    if let Some(n) = (0..layouts).find(|&n| own.layouts.get(n) != given.layouts.get(n)) {
        return Err(format!(
            "#l{n} is another layout than the kernel's: it is for other types, tiles or numbers of warps"
        ));
    }
    let mut matching = Matching { own: &own, given: &given, values: HashMap::new(), ops: HashMap::new() };
    matching.block(own.body, given.body)?;
    // Its ops have the lines of the text.
    verify(&given, Stage::Schedule).map_err(|errors| errors.first().map(ToString::to_string).unwrap_or_default())?;

    let numbers: HashMap<OpId, OpId> = own.walk().into_iter().zip(func.walk()).collect();
    let ops: HashMap<OpId, OpId> = matching.ops.into_iter().map(|(given, own)| (given, numbers[&own])).collect();
    let mut scheduled = func.clone();
    for (&id, &own) in &ops {
        scheduled.set_place(own, given.op(id).place);
    }
    let regions = given.walk().into_iter().flat_map(|id| given.op(id).regions.clone());
    for block in std::iter::once(given.body).chain(regions) {
        let order: Vec<OpId> = given.block(block).ops.iter().map(|id| ops[id]).collect();
        scheduled.set_ops(func.parent_block(ops[&given.terminator(block)]), &order);
    }
    *func = scheduled;
    Ok(())
}

/// Finds the ops of a function in a text of it.
struct Matching<'f> {
    own: &'f Func,
    given: &'f Func,
    /// Of the text, and the function's own.
    values: HashMap<Value, Value>,
    ops: HashMap<OpId, OpId>,
}

impl Matching<'_> {
    fn block(&mut self, own: BlockId, given: BlockId) -> Result<(), String> {
        let (own, given) = (self.own.block(own), self.given.block(given));
        self.values.extend(given.params.iter().copied().zip(own.params.iter().copied()));
        let mut rest = own.ops.clone();
        for &id in &given.ops {
            let Some(at) = rest.iter().position(|&candidate| self.is_same(candidate, id)) else {
                let line = self.given.op(id).loc.line;
                return Err(format!("line {line}: the kernel has no `{}`", text::print_op(self.given, id)));
            };
            let found = rest.remove(at);
            if let Some(&passed) = rest[..at].iter().find(|&&other| !may_pass(self.own, found, other)) {
                let line = self.given.op(id).loc.line;
                return Err(format!(
                    "line {line}: the `{}` has to stay behind `{}`",
                    self.given.op(id).op.mnemonic(),
                    text::print_op(self.own, passed)
                ));
            }
            self.ops.insert(id, found);
            let (data, same) = (self.given.op(id), self.own.op(found));
            self.values.extend(data.results.iter().copied().zip(same.results.iter().copied()));
            for (&given, &own) in data.regions.iter().zip(&same.regions) {
                self.block(own, given)?;
            }
        }
        match rest.first() {
            None => Ok(()),
            Some(&missing) => {
                let last = given.ops.last().map_or(1, |&id| self.given.op(id).loc.line);
                Err(format!("up to line {last}, `{}` is missing", text::print_op(self.own, missing)))
            }
        }
    }

    /// Whether an op of the function is that of the text, except for regions.
    fn is_same(&self, own: OpId, given: OpId) -> bool {
        let (a, b) = (self.own.op(own), self.given.op(given));
        let types = |func: &Func, values: &[Value]| values.iter().map(|&v| func.ty(v).clone()).collect::<Vec<_>>();
        let operands = b.operands.iter().map(|v| self.values.get(v));
        a.op == b.op
            && a.operands.len() == b.operands.len()
            && a.operands.iter().zip(operands).all(|(own, given)| given == Some(own))
            && types(self.own, &a.results) == types(self.given, &b.results)
            && a.regions.len() == b.regions.len()
    }
}

/// Whether an op may run before one that precedes it and that it does not use: one of the two leaves memory alone, or both
/// only read it. Results of `wgmma` are waited for where they are used, whatever the order.
fn may_pass(func: &Func, id: OpId, other: OpId) -> bool {
    let reads_at_most = |id: OpId| {
        let is_free = matches!(func.op(id).op, Op::LocalAlloc | Op::Wgmma { .. } | Op::WgmmaWait { .. });
        is_free || matches!(func.effects(id), Effects::Pure | Effects::Read)
    };
    let is_pure = |id: OpId| func.effects(id) == Effects::Pure || func.op(id).op == Op::LocalAlloc;
    is_pure(id) || is_pure(other) || reads_at_most(id) && reads_at_most(other)
}
