//! Common subexpression elimination.
//!
//! Does: replaces an op without effects and regions by an earlier op of the same block or of an enclosing one with the
//! same attributes, operands and result types.
//! Requires: a verified function.
//! Keeps: every computed value.
//! Does not: merge loads, nor ops in sibling regions, nor `reduce` and `scan`.

use crate::ir::{BlockId, Effects, Func, OpId, Type, Value};
use std::collections::HashMap;

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut pass = Pass { func, seen: HashMap::new(), changed: false };
    pass.block(pass.func.body);
    pass.changed
}

/// Ops with equal keys compute equal values.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    /// The `Debug` form of the op with its attributes, which distinguishes −0 from 0; `==` on floats does not.
    op: String,
    operands: Vec<Value>,
    types: Vec<Type>,
}

struct Pass<'f> {
    func: &'f mut Func,
    seen: HashMap<Key, OpId>,
    changed: bool,
}

impl Pass<'_> {
    fn block(&mut self, block: BlockId) {
        let mut added = Vec::new();
        let mut kept = Vec::new();
        let mut duplicates = Vec::new();
        for id in self.func.block(block).ops.clone() {
            let data = self.func.op(id);
            if data.op.effects() != Effects::Pure || !data.regions.is_empty() {
                for region in data.regions.clone() {
                    self.block(region);
                }
                kept.push(id);
                continue;
            }
            let types = data.results.iter().map(|&v| self.func.ty(v).clone()).collect();
            let key = Key { op: format!("{:?}", data.op), operands: data.operands.clone(), types };
            match self.seen.get(&key) {
                Some(&first) => {
                    let pairs: Vec<(Value, Value)> =
                        data.results.iter().copied().zip(self.func.op(first).results.iter().copied()).collect();
                    for (duplicate, first) in pairs {
                        self.func.replace_uses(duplicate, first);
                    }
                    duplicates.push(id);
                    self.changed = true;
                }
                None => {
                    self.seen.insert(key.clone(), id);
                    added.push(key);
                    kept.push(id);
                }
            }
        }
        self.func.set_ops(block, &kept);
        duplicates.into_iter().for_each(|id| self.func.erase(id));
        for key in added {
            self.seen.remove(&key);
        }
    }
}
