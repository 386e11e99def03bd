//! Structural rules: placement, arguments, arity, regions, terminators, dominance, stages.

use super::{Check, Rule, Violation, require, types};
use crate::ir::{BlockId, Def, Elem, Func, Op, OpId, Stage, Type, Value};

/// Terminator of a region.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Terminator {
    Return,
    Yield,
    Condition,
}

impl Terminator {
    fn name(self) -> &'static str {
        match self {
            Terminator::Return => "return",
            Terminator::Yield => "yield",
            Terminator::Condition => "condition",
        }
    }

    /// The terminator that an op is, if it is one.
    fn of(op: &Op) -> Option<Terminator> {
        [(Op::Return, Terminator::Return), (Op::Yield, Terminator::Yield), (Op::Condition, Terminator::Condition)]
            .into_iter()
            .find_map(|(terminator, end)| (*op == terminator).then_some(end))
    }
}

/// Required terminators of an op's regions, one per region.
fn region_terminators(op: &Op) -> &'static [Terminator] {
    match op {
        Op::For { .. } | Op::Reduce { .. } | Op::Scan { .. } => &[Terminator::Yield],
        Op::If | Op::WarpSpecialize { .. } => &[Terminator::Yield, Terminator::Yield],
        Op::While => &[Terminator::Condition, Terminator::Yield],
        Op::Unary(_)
        | Op::Binary(_)
        | Op::Cmp(_)
        | Op::ProgramId { .. }
        | Op::CtaRank { .. }
        | Op::DynamicIndex
        | Op::TakeIndex
        | Op::TakenIndex
        | Op::NumPrograms { .. }
        | Op::Constant { .. }
        | Op::Arange { .. }
        | Op::MakeView { .. }
        | Op::Advance
        | Op::LoadView { .. }
        | Op::StoreView { .. }
        | Op::AtomicView { .. }
        | Op::PtrAdd
        | Op::Load { .. }
        | Op::Store { .. }
        | Op::AtomicRmw { .. }
        | Op::AtomicCas { .. }
        | Op::SemaphoreWait
        | Op::Splat
        | Op::ExpandDims { .. }
        | Op::Broadcast
        | Op::Trans { .. }
        | Op::Reshape
        | Op::Join
        | Op::Split
        | Op::Gather { .. }
        | Op::Fma
        | Op::Select
        | Op::Cast
        | Op::Bitcast
        | Op::InlineAsm { .. }
        | Op::Dot { .. }
        | Op::Yield
        | Op::Condition
        | Op::Return
        | Op::Hint { .. }
        | Op::Assume
        | Op::DevicePrint { .. }
        | Op::DeviceAssert { .. }
        | Op::ConvertLayout
        | Op::LocalAlloc
        | Op::LocalLoad
        | Op::LocalStore
        | Op::LocalSlot
        | Op::LocalTrans { .. }
        | Op::AsyncCopy { .. }
        | Op::AsyncLoad { .. }
        | Op::AsyncCommit
        | Op::AsyncWait { .. }
        | Op::MmaSync { .. }
        | Op::FmaDot
        | Op::Wgmma { .. }
        | Op::WgmmaWait { .. }
        | Op::FenceAsyncShared
        | Op::BlockBarrier { .. }
        | Op::ClusterBarrier
        | Op::MbarrierAlloc { .. }
        | Op::MbarrierFree
        | Op::MbarrierExpect { .. }
        | Op::MbarrierArrive { .. }
        | Op::AsyncArrive { .. }
        | Op::MbarrierWait
        | Op::TmaLoad { .. }
        | Op::TmaStore { .. }
        | Op::PrefetchView { .. }
        | Op::PingpongWait
        | Op::PingpongArrive => &[],
    }
}

/// Checks the structural rules. The op of a violation is `None` if the function as a whole is at fault.
pub(super) fn check(func: &Func, stage: Stage) -> Vec<(Option<OpId>, Violation)> {
    let mut s = Structure {
        func,
        stage,
        block_seen: vec![false; func.num_blocks()],
        op_seen: vec![false; func.num_ops()],
        visible: vec![false; func.num_values()],
        violations: Vec::new(),
    };
    s.report(None, arguments(func));
    for &v in &func.block(func.body).params {
        s.report(None, types::well_formed(func, func.ty(v), stage));
    }
    s.block(func.body, Terminator::Return, None);
    if s.violations.is_empty() {
        let kept = func.check_kept_facts();
        s.report(None, kept.map_err(|message| Violation { rule: Rule::Placement, message }));
    }
    s.violations
}

fn arguments(func: &Func) -> Check {
    let name = &func.name;
    let is_name =
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !name.starts_with(|c: char| c.is_ascii_digit());
    require(is_name && !name.is_empty(), Rule::Arguments, || {
        format!("a kernel's name should have ASCII letters, digits and `_`, and not begin with a digit; found `{name}`")
    })?;
    let params = &func.block(func.body).params;
    require(params.len() == func.args.len(), Rule::Arguments, || {
        format!("the function has {} arguments, but its body has {} parameters", func.args.len(), params.len())
    })?;
    for (i, (arg, &v)) in func.args.iter().zip(params).enumerate() {
        let (name, ty) = (&arg.name, func.ty(v));
        let unique = !name.is_empty() && func.args[..i].iter().all(|other| other.name != *name);
        require(unique, Rule::Arguments, || format!("argument {i} should have a unique name, found `{name}`"))?;
        require(ty.is_scalar(), Rule::Arguments, || format!("argument `{name}` should be a scalar, found {ty}"))?;
        let integer = ty.dtype().is_some_and(|d| d.is_int());
        let pointer = ty.elem().is_some_and(|e| matches!(e, Elem::Ptr(_)));
        require(arg.divisible_by >= 1 && (arg.divisible_by == 1 || integer || pointer), Rule::Arguments, || {
            format!("argument `{name}`: divisible_by should be at least 1, and 1 for {ty}; found {}", arg.divisible_by)
        })?;
        require(arg.equal_to.is_none() || integer, Rule::Arguments, || {
            format!("argument `{name}`: equal_to requires an integer, found {ty}")
        })?;
        if let (Some(n), Some(dtype)) = (arg.equal_to, ty.dtype()) {
            let fits = super::shape::is_value(n, dtype);
            require(fits, Rule::Arguments, || format!("argument `{name}`: equal_to is {n}, not a value of {ty}"))?;
        }
    }
    Ok(())
}

struct Structure<'f> {
    func: &'f Func,
    stage: Stage,
    block_seen: Vec<bool>,
    op_seen: Vec<bool>,
    /// Values defined before the current op, in its block or an enclosing one.
    visible: Vec<bool>,
    violations: Vec<(Option<OpId>, Violation)>,
}

impl Structure<'_> {
    fn report(&mut self, op: Option<OpId>, check: Check) -> bool {
        let fine = check.is_ok();
        self.violations.extend(check.err().map(|b| (op, b)));
        fine
    }

    /// Checks a block of `owner`, which should have the terminator `end`.
    fn block(&mut self, block: BlockId, end: Terminator, owner: Option<OpId>) {
        let known = (block.0 as usize) < self.block_seen.len();
        let first = known && !std::mem::replace(&mut self.block_seen[block.0 as usize], true);
        // A block seen before may enclose this one: visiting it again might not terminate.
        if !self.report(owner, require(first, Rule::Placement, || "the region belongs to two ops".into())) {
            return;
        }
        let data = self.func.block(block);
        let mut defined = Vec::new();
        for (i, &v) in data.params.iter().enumerate() {
            self.define(owner, v, Def::Param(block, i), &mut defined);
        }
        for (i, &id) in data.ops.iter().enumerate() {
            if self.op(id, i + 1 == data.ops.len(), end, &mut defined) {
                continue;
            }
            break;
        }
        let ended = require(!data.ops.is_empty(), Rule::Terminator, || {
            format!("the region is empty, expected `{}` at its end", end.name())
        });
        self.report(owner, ended);
        for v in defined {
            self.visible[v.0 as usize] = false;
        }
    }

    fn define(&mut self, op: Option<OpId>, v: Value, def: Def, defined: &mut Vec<Value>) {
        let data = self.func.value(v);
        let check = require(data.def == def, Rule::Placement, || {
            format!("a value records the definition {:?}, but is defined as {def:?}", data.def)
        });
        self.report(op, check);
        self.visible[v.0 as usize] = true;
        defined.push(v);
    }

    /// Checks an op of a block; `false` if the rest of the block cannot be checked.
    fn op(&mut self, id: OpId, last: bool, end: Terminator, defined: &mut Vec<Value>) -> bool {
        let first = !std::mem::replace(&mut self.op_seen[id.0 as usize], true);
        if !self
            .report(Some(id), require(first, Rule::Placement, || "the op is in a block twice, or in two blocks".into()))
        {
            return false;
        }
        let data = self.func.op(id);
        self.report(Some(id), terminator(&data.op, last, end));
        self.report(Some(id), arity(self.func, id));
        self.report(Some(id), stage_legal(self.func, id, self.stage));
        for (i, &v) in data.operands.iter().enumerate() {
            let seen = self.visible[v.0 as usize];
            let check = require(seen, Rule::Dominance, || {
                format!("operand {i} is not defined here: its definition comes later, or is in another region")
            });
            self.report(Some(id), check);
        }
        let ends = region_terminators(&data.op);
        let check = require(data.regions.len() == ends.len(), Rule::Regions, || {
            format!("`{}` takes {} regions, found {}", data.op.mnemonic(), ends.len(), data.regions.len())
        });
        self.report(Some(id), check);
        for (&region, &end) in data.regions.iter().zip(ends) {
            self.block(region, end, Some(id));
        }
        for (i, &v) in data.results.iter().enumerate() {
            self.define(Some(id), v, Def::Result(id, i), defined);
        }
        true
    }
}

fn terminator(op: &Op, last: bool, end: Terminator) -> Check {
    let found = Terminator::of(op);
    require(found == last.then_some(end), Rule::Terminator, || match found {
        None => format!("expected `{}` at the end of the region", end.name()),
        Some(_) if last => format!("the region should end with `{}`", end.name()),
        Some(found) => format!("`{}` before the end of its region", found.name()),
    })
}

fn arity(func: &Func, id: OpId) -> Check {
    let data = func.op(id);
    let (min, max) = data.op.operand_range();
    let n = data.operands.len();
    require(n >= min && max.is_none_or(|max| n <= max), Rule::Arity, || match max {
        Some(max) if max == min => format!("`{}` takes {min} operands, found {n}", data.op.mnemonic()),
        Some(max) => format!("`{}` takes {min} to {max} operands, found {n}", data.op.mnemonic()),
        None => format!("`{}` takes at least {min} operands, found {n}", data.op.mnemonic()),
    })?;
    let (results, found) = (data.op.result_count(), data.results.len());
    require(results.is_none_or(|r| r == found), Rule::Arity, || {
        format!("`{}` gives {} results, found {found}", data.op.mnemonic(), results.unwrap_or(0))
    })
}

fn stage_legal(func: &Func, id: OpId, stage: Stage) -> Check {
    let data = func.op(id);
    require(data.op.stage() <= stage, Rule::StageLegal, || {
        format!("`{}` is legal from stage {:?} on, this is stage {stage:?}", data.op.mnemonic(), data.op.stage())
    })?;
    let params = data.regions.iter().flat_map(|&r| func.block(r).params.iter());
    let carried = params.chain(data.results.iter().filter(|_| !data.regions.is_empty()));
    for &v in carried {
        let view = matches!(func.ty(v), Type::View { .. });
        require(stage == Stage::Tile || !view, Rule::StageLegal, || {
            format!("a region has a view as parameter or result at stage {stage:?}")
        })?;
    }
    Ok(())
}
