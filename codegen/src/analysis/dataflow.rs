//! Forward dataflow analysis of values over structured control flow.
//!
//! An analysis gives facts about the result of an op from facts about its operands ([`Forward::transfer`]). The
//! framework follows control flow: the facts of all branches meet in the results of an `if`; values that a `for`
//! carries are iterated to a fixed point. Nothing is known about the values that a `while` carries.

use super::lattice::Lattice;
use crate::ir::{BlockId, Func, Op, OpId, Value};

/// A forward analysis of a function.
pub trait Forward {
    type Fact: Lattice;

    /// Facts about the only result of an op without regions; `None` if nothing is known. Must be monotone.
    fn transfer(&self, facts: &Facts<Self::Fact>, id: OpId) -> Option<Self::Fact>;

    /// Facts about the index of a `for`.
    fn index(&self, facts: &Facts<Self::Fact>, id: OpId) -> Option<Self::Fact>;

    /// Facts about a carried value to start from, given those about its initial value. Drops facts that many iterations
    /// could weaken step by step, so that the fixed point is reached soon.
    fn carried(&self, param: Value, init: Self::Fact) -> Self::Fact;
}

/// Facts about the values of a function.
pub struct Facts<F> {
    /// By value number; `None` if nothing is known.
    of_values: Vec<Option<F>>,
}

impl<F: Lattice> Facts<F> {
    /// Analyzes a function, given facts about its arguments.
    pub fn of(func: &Func, analysis: &impl Forward<Fact = F>, arguments: Vec<Option<F>>) -> Facts<F> {
        let mut facts = Facts { of_values: vec![None; func.num_values()] };
        for (&v, fact) in func.block(func.body).params.iter().zip(arguments) {
            facts.set(v, fact);
        }
        facts.block(func, analysis, func.body);
        facts
    }

    /// Facts about a value; `None` if nothing is known, as about values created after the analysis.
    pub fn get(&self, v: Value) -> Option<&F> {
        self.of_values.get(v.0 as usize)?.as_ref()
    }

    fn set(&mut self, v: Value, fact: Option<F>) {
        self.of_values[v.0 as usize] = fact;
    }

    /// Facts at a join of two values.
    fn meet(&self, a: Value, b: Value) -> Option<F> {
        Some(self.get(a)?.meet(self.get(b)?))
    }

    fn block(&mut self, func: &Func, analysis: &impl Forward<Fact = F>, block: BlockId) {
        for &id in &func.block(block).ops {
            let data = func.op(id);
            if let Op::For { .. } = data.op {
                self.for_loop(func, analysis, id);
                continue;
            }
            for &region in &data.regions {
                self.block(func, analysis, region);
            }
            match (&data.op, &data.results[..], &data.regions[..]) {
                (Op::If, results, &[yes, no]) => {
                    let [yes, no] = [yes, no].map(|side| &func.op(func.terminator(side)).operands);
                    for ((&result, &yes), &no) in results.iter().zip(yes).zip(no) {
                        let fact = self.meet(yes, no);
                        self.set(result, fact);
                    }
                }
                (_, &[result], []) => {
                    let fact = analysis.transfer(self, id);
                    self.set(result, fact);
                }
                _ => {}
            }
        }
    }

    fn for_loop(&mut self, func: &Func, analysis: &impl Forward<Fact = F>, id: OpId) {
        let data = func.op(id);
        let body = data.regions[0];
        let params = &func.block(body).params;
        let index = analysis.index(self, id);
        self.set(params[0], index);
        for (&param, &init) in params[1..].iter().zip(&data.operands[3..]) {
            let fact = self.get(init).cloned().map(|fact| analysis.carried(param, fact));
            self.set(param, fact);
        }
        loop {
            self.block(func, analysis, body);
            let mut changed = false;
            for (&param, &next) in params[1..].iter().zip(&func.op(func.terminator(body)).operands) {
                let met = self.meet(param, next);
                changed |= met.as_ref() != self.get(param);
                self.set(param, met);
            }
            if !changed {
                break;
            }
        }
        for (&result, &param) in data.results.iter().zip(&params[1..]) {
            let fact = self.get(param).cloned();
            self.set(result, fact);
        }
    }
}
