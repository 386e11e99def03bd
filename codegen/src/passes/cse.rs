//! Common subexpression elimination.
//!
//! Does: replaces an op without effects and regions by an earlier op of the same block or of an enclosing one with the
//! same attributes, operands and result types.
//! Requires: a verified function.
//! Keeps: every computed value.
//! Does not: merge loads, nor ops in sibling regions, nor `reduce` and `scan`.

use crate::ir::{BlockId, Effects, Func, Op, OpId, Type, Value};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut pass = Pass { func, seen: HashMap::new(), changed: false };
    pass.block(pass.func.body);
    pass.changed
}

/// Ops with equal keys compute equal values.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    op: Op,
    operands: Vec<Value>,
    types: Vec<Type>,
}

struct Pass<'f> {
    func: &'f mut Func,
    /// The ops of this block and of enclosing ones so far.
    seen: HashMap<Rc<Key>, OpId>,
    changed: bool,
}

impl Pass<'_> {
    fn block(&mut self, block: BlockId) {
        let mut added = Vec::new();
        let mut duplicates = HashSet::new();
        for id in self.func.block(block).ops.clone() {
            let data = self.func.op(id);
            if data.op.effects() != Effects::Pure || !data.regions.is_empty() {
                for region in data.regions.clone() {
                    self.block(region);
                }
                continue;
            }
            let types = data.results.iter().map(|&v| self.func.ty(v).clone()).collect();
            let key = Rc::new(Key { op: data.op.clone(), operands: data.operands.clone(), types });
            match self.seen.entry(key.clone()) {
                Entry::Occupied(first) => {
                    let results = data.results.clone();
                    for (duplicate, first) in results.into_iter().zip(self.func.op(*first.get()).results.clone()) {
                        self.func.replace_uses(duplicate, first);
                    }
                    duplicates.insert(id);
                }
                Entry::Vacant(place) => {
                    place.insert(id);
                    added.push(key);
                }
            }
        }
        self.changed |= !duplicates.is_empty();
        self.func.retain_ops(block, |id| !duplicates.contains(id));
        for key in added {
            self.seen.remove(&key);
        }
    }
}
