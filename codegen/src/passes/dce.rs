//! Dead code elimination.
//!
//! Does: removes ops whose results are unused, and unused loop-carried values and branch results, including those that
//! only feed themselves.
//! Requires: a verified function.
//! Keeps: every write, output and synchronization, and the values that they use.
//! Does not: remove a loop with effects. It does remove a loop without effects that may not terminate.

use super::fold_carried::{drop_for, drop_if, drop_while};
use crate::ir::{BlockId, Def, Effects, Func, Op, OpId, Value};

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut live =
        Live { func, ops: vec![false; func.num_ops()], values: vec![false; func.num_values()], todo: Vec::new() };
    for id in func.walk() {
        match func.op(id).op.effects() {
            Effects::Write | Effects::Control => live.op(id),
            Effects::Pure | Effects::Read | Effects::Regions => {}
        }
    }
    while let Some(v) = live.todo.pop() {
        live.value(v);
    }
    let (ops, values) = (live.ops, live.values);
    sweep(func, &ops, &values)
}

struct Live<'f> {
    func: &'f Func,
    ops: Vec<bool>,
    values: Vec<bool>,
    /// Live values whose definitions have not been visited.
    todo: Vec<Value>,
}

impl<'f> Live<'f> {
    fn mark_live(&mut self, v: Value) {
        if !std::mem::replace(&mut self.values[v.0 as usize], true) {
            self.todo.push(v);
        }
    }

    fn mark_all_live(&mut self, values: &[Value]) {
        values.iter().for_each(|&v| self.mark_live(v));
    }

    /// Marks an op as live, with the operands that it needs for any of its results, and the ops that contain it.
    fn op(&mut self, id: OpId) {
        let data = self.func.op(id);
        if std::mem::replace(&mut self.ops[id.0 as usize], true) {
            return;
        }
        match data.op {
            // Their operands are live one by one, as results of the containing op are.
            Op::Yield | Op::Condition => return,
            Op::For { .. } => self.mark_all_live(&data.operands[..3]),
            Op::While => self.mark_live(self.end(data.regions[0])[0]),
            _ => {
                self.mark_all_live(&data.operands);
                if data.op != Op::If {
                    // The region of `reduce` and `scan` yields all results together.
                    data.regions.iter().for_each(|&region| self.mark_all_live(self.end(region)));
                }
            }
        }
        if let Some(owner) = self.func.parent_op(id) {
            self.op(owner);
        }
    }

    /// The operands of the terminator of a region.
    fn end(&self, region: BlockId) -> &'f [Value] {
        &self.func.op(self.func.terminator(region)).operands
    }

    /// Marks the definition of a live value.
    fn value(&mut self, v: Value) {
        match self.func.value(v).def {
            Def::Result(id, i) => {
                self.op(id);
                let data = self.func.op(id);
                match data.op {
                    Op::For { .. } => self.carried(data.operands[3 + i], self.end(data.regions[0])[i]),
                    Op::If => self.carried(self.end(data.regions[0])[i], self.end(data.regions[1])[i]),
                    Op::While => self.mark_live(self.end(data.regions[0])[1 + i]),
                    _ => {}
                }
            }
            Def::Param(block, i) => {
                let Some(owner) = self.func.owner(block) else { return };
                let data = self.func.op(owner);
                match data.op {
                    Op::For { .. } if i > 0 => self.carried(data.operands[2 + i], self.end(block)[i - 1]),
                    Op::While if block == data.regions[0] => {
                        self.carried(data.operands[i], self.end(data.regions[1])[i])
                    }
                    Op::While => self.mark_live(self.end(data.regions[0])[1 + i]),
                    _ => {}
                }
            }
        }
    }

    fn carried(&mut self, a: Value, b: Value) {
        self.mark_live(a);
        self.mark_live(b);
    }
}

/// Removes all ops and values that are not live.
fn sweep(func: &mut Func, ops: &[bool], values: &[bool]) -> bool {
    let mut changed = false;
    let walk = func.walk();
    let needed = |v: &Value| values[v.0 as usize];
    let either = |a: &[Value], b: &[Value]| a.iter().zip(b).map(|(a, b)| needed(a) || needed(b)).collect::<Vec<_>>();
    for &id in walk.iter().filter(|id| ops[id.0 as usize]) {
        let data = func.op(id);
        changed |= match data.op {
            Op::For { .. } => {
                let keep = either(&data.results, &func.block(data.regions[0]).params[1..]);
                drop_for(func, id, &keep)
            }
            Op::If => {
                let keep: Vec<bool> = data.results.iter().map(needed).collect();
                drop_if(func, id, &keep)
            }
            Op::While => {
                let keep_in: Vec<bool> = func.block(data.regions[0]).params.iter().map(needed).collect();
                let keep_out = either(&data.results, &func.block(data.regions[1]).params);
                drop_while(func, id, &keep_in, &keep_out)
            }
            _ => false,
        };
    }
    for block in blocks(func) {
        changed |= func.retain_ops(block, |id| ops[id.0 as usize]);
    }
    changed
}

/// The body and the regions of every op.
fn blocks(func: &Func) -> Vec<BlockId> {
    let regions = func.walk().into_iter().flat_map(|id| func.op(id).regions.clone());
    std::iter::once(func.body).chain(regions).collect()
}
