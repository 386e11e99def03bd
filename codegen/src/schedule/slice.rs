//! The slice of the kernel that the producer runs: the addresses of its loads, and the control flow around them.

use super::partitions::Plan;
use crate::analysis::memory_effects;
use crate::ir::{BinaryOp, BlockId, Def, Effects, Func, Op, OpId, Type, Value};
use std::collections::{BTreeSet, HashMap, HashSet};

/// A slice of a function.
pub struct Slice {
    /// Loads that the producer issues.
    pub loads: HashSet<OpId>,
    /// Ops to clone: pure ones, and loads of scalars from memory that the kernel does not write.
    pub ops: HashSet<OpId>,
    /// Loops and branches to clone.
    pub control: HashSet<OpId>,
    /// For the ops of `control`, the indices of the carried values or results to keep.
    pub carried: HashMap<OpId, BTreeSet<usize>>,
    /// The values of the slice that differ between the programs of a block ([`Plan::replicas`]), or between the CTAs of a
    /// cluster ([`Plan::ctas`]).
    varying: HashSet<Value>,
    /// Pointers and views that the kernel writes through.
    written: HashSet<Value>,
}

impl Slice {
    /// The slice for the loads of a plan.
    ///
    /// # Errors
    /// The op that the producer cannot run: one that computes a tile, reads memory that the kernel writes, or is a
    /// `while`.
    pub fn new(func: &Func, plan: &Plan) -> Result<Slice, String> {
        Slice::of_programs(func, plan, plan.turns.is_none())
    }

    /// As [`Slice::new`]. The programs of a block follow each other (`consecutive`), or take turns.
    ///
    /// # Errors
    /// As [`Slice::new`].
    pub fn of_programs(func: &Func, plan: &Plan, consecutive: bool) -> Result<Slice, String> {
        let mut slice = Slice {
            loads: plan.blocks.values().flat_map(|(_, list)| list.iter().map(|c| c.load)).collect(),
            ops: HashSet::new(),
            control: HashSet::new(),
            carried: HashMap::new(),
            varying: HashSet::new(),
            written: memory_effects::written_pointers(func),
        };
        let mut loads: Vec<OpId> = slice.loads.iter().copied().collect();
        loads.sort();
        for load in loads {
            let of = |op: String| {
                format!("the load at {} depends on {op}, which the producer cannot run", func.op(load).loc)
            };
            slice.keep_enclosing(func, load).map_err(of)?;
            slice.value(func, func.op(load).operands[0]).map_err(of)?;
        }
        if plan.replicas > 1 {
            slice.find_varying(func, &Op::ProgramId { axis: 0 }, if consecutive { plan.replicas } else { 1 });
        } else if plan.ctas > 1 {
            slice.find_varying(func, &Op::CtaRank { ctas: plan.ctas }, 1);
        }
        Ok(slice)
    }

    /// Whether a load of the producer differs between the programs of a block, or the CTAs of a cluster.
    pub fn varies(&self, func: &Func, load: OpId) -> bool {
        self.differs(func.op(load).operands[0])
    }

    /// Whether a value of the slice differs between the programs of a block, or the CTAs of a cluster.
    pub fn differs(&self, v: Value) -> bool {
        self.varying.contains(&v)
    }

    /// Whether a value of the slice that differs between the programs of a block is computed by ops alone, and not by
    /// loops or branches.
    pub fn is_computed_by_ops(&self, func: &Func, v: Value) -> bool {
        match func.def_op(v).filter(|id| self.ops.contains(id)) {
            _ if !self.differs(v) => true,
            Some(id) => func.op(id).operands.iter().all(|&v| self.is_computed_by_ops(func, v)),
            None => false,
        }
    }

    /// The loop or branch around a load that does not run equally often in all programs of a block, or CTAs of a cluster.
    pub fn varying_control(&self, func: &Func, load: OpId) -> Option<OpId> {
        let mut owners = std::iter::successors(func.parent_op(load), |&owner| func.parent_op(owner));
        owners.find(|&owner| {
            let bounds = if matches!(func.op(owner).op, Op::For { .. }) { 3 } else { 1 };
            func.op(owner).operands.iter().take(bounds).any(|&v| self.differs(v))
        })
    }

    /// The programs of a block differ by `program_id(0)`, but not by `program_id(0) / following` if that many follow each
    /// other; the CTAs of a cluster differ by their rank. `by` is the op that gives it.
    fn find_varying(&mut self, func: &Func, by: &Op, following: u32) {
        let is_id = |v: Value| func.def_op(v).is_some_and(|id| func.op(id).op == *by);
        let is_shared = |id: OpId| {
            let data = func.op(id);
            data.op == Op::Binary(BinaryOp::Div)
                && is_id(data.operands[0])
                && following > 1
                && func.constant_int(data.operands[1]) == Some(following.into())
        };
        let ops: Vec<OpId> = func.walk().into_iter().filter(|id| self.ops.contains(id)).collect();
        let mut control: Vec<OpId> = self.control.iter().copied().collect();
        control.sort();
        loop {
            let before = self.varying.len();
            for &id in &ops {
                let operands = &func.op(id).operands;
                let own = func.op(id).op == *by;
                if own || operands.iter().any(|&v| self.differs(v)) && !is_shared(id) {
                    self.varying.extend(&func.op(id).results);
                }
            }
            for &id in &control {
                self.find_varying_control(func, id);
            }
            if self.varying.len() == before {
                return;
            }
        }
    }

    fn find_varying_control(&mut self, func: &Func, id: OpId) {
        let data = func.op(id);
        let is_loop = matches!(data.op, Op::For { .. });
        let bounds = if is_loop { 3 } else { 1 };
        let all = data.operands[..bounds].iter().any(|&v| self.differs(v));
        for &i in self.carried.get(&id).into_iter().flatten() {
            let yields = |&region: &BlockId| func.op(func.terminator(region)).operands[i];
            let init = is_loop.then(|| data.operands[3 + i]);
            if all || data.regions.iter().map(yields).chain(init).any(|v| self.differs(v)) {
                self.varying.insert(data.results[i]);
                if is_loop {
                    self.varying.insert(func.block(data.regions[0]).params[1 + i]);
                }
            }
        }
        if is_loop && all {
            self.varying.insert(func.block(data.regions[0]).params[0]);
        }
    }

    /// Adds the control flow around an op.
    fn keep_enclosing(&mut self, func: &Func, id: OpId) -> Result<(), String> {
        func.parent_op(id).map_or(Ok(()), |owner| self.keep(func, owner))
    }

    fn keep(&mut self, func: &Func, id: OpId) -> Result<(), String> {
        if !self.control.insert(id) {
            return Ok(());
        }
        let data = func.op(id);
        match data.op {
            Op::For { .. } => data.operands[..3].iter().try_for_each(|&v| self.value(func, v))?,
            Op::If => self.value(func, data.operands[0])?,
            _ => return Err(describe(func, id)),
        }
        self.keep_enclosing(func, id)
    }

    /// Adds the definition of a value.
    fn value(&mut self, func: &Func, v: Value) -> Result<(), String> {
        match func.value(v).def {
            Def::Param(block, _) if block == func.body => Ok(()),
            Def::Param(block, i) => {
                let owner = func
                    .owner(block)
                    .expect("internal compiler error: a parameter of a detached block; please report this");
                self.keep(func, owner)?;
                if i == 0 { Ok(()) } else { self.carry(func, owner, i - 1) }
            }
            Def::Result(id, i) => match func.op(id).op {
                Op::For { .. } | Op::If => {
                    self.keep(func, id)?;
                    self.carry(func, id, i)
                }
                _ => self.scalar(func, id),
            },
        }
    }

    /// Adds a carried value of a loop, or a result of a branch.
    fn carry(&mut self, func: &Func, id: OpId, number: usize) -> Result<(), String> {
        if !self.carried.entry(id).or_default().insert(number) {
            return Ok(());
        }
        let data = func.op(id);
        if matches!(data.op, Op::For { .. }) {
            self.value(func, data.operands[3 + number])?;
        }
        data.regions.iter().try_for_each(|&region| {
            let last = func.terminator(region);
            self.value(func, func.op(last).operands[number])
        })
    }

    /// Whether both partitions can run the op, with the same results.
    fn is_repeatable(&self, func: &Func, id: OpId) -> bool {
        let data = func.op(id);
        match data.op {
            Op::Load { .. } => self.written.is_disjoint(&memory_effects::underlying_pointers(func, data.operands[0])),
            Op::DynamicIndex => true,
            _ => data.op.effects() == Effects::Pure,
        }
    }

    fn scalar(&mut self, func: &Func, id: OpId) -> Result<(), String> {
        let data = func.op(id);
        let scalar = data.results.iter().all(|&v| matches!(func.ty(v), Type::Scalar(_) | Type::View { .. }));
        if !scalar || !self.is_repeatable(func, id) || !data.regions.is_empty() {
            return Err(describe(func, id));
        }
        if !self.ops.insert(id) {
            return Ok(());
        }
        self.keep_enclosing(func, id)?;
        data.operands.iter().try_for_each(|&v| self.value(func, v))
    }
}

/// An op and its line, for messages.
fn describe(func: &Func, id: OpId) -> String {
    format!("the `{}` at {}", func.op(id).op.mnemonic(), func.op(id).loc)
}
