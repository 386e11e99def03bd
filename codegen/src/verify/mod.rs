//! The verifier: invariants of every function of Tile IR.
//!
//! The rules are the variants of [`Rule`], in the order in which they are checked. Structural rules come first. If one
//! of them is violated, types are not checked, because type rules index operands and regions without bounds checks. A
//! violation in a function from the language surface or a pass is a compiler bug (the surface reports user errors
//! before); a function parsed from text may simply be invalid.

mod barriers;
mod control;
mod dot_and_reduce;
mod elementwise;
mod memory;
mod schedule;
mod shape;
mod shared;
mod structure;
#[cfg(test)]
mod tests;
mod types;

pub(crate) use control::{MAX_REPLICAS, MAX_STAGES, MAX_UNROLL};

use crate::ir::attr::attr_enum;
use crate::ir::{Func, Loc, Op, OpData, OpId, Stage, Type};
use crate::mma::Family;
use crate::text::print_op;
use std::fmt;

attr_enum! {
    /// The rules of the verifier.
    Rule {
        // Structure.

        /// Every op is in one block, every block belongs to one op, and the definition that a value records is its
        /// actual one. What the function keeps about parents and uses is what a recomputation finds.
        Placement = "placement",
        /// A kernel's name is one of PTX: ASCII letters, digits and `_`. It has one `Arg` per parameter, with a unique name.
        /// Arguments are scalars. `divisible_by` (at least 1) is for integers and pointers, `equal_to` a value of integers.
        Arguments = "arguments",
        /// The numbers of operands and results match the op table.
        Arity = "arity",
        /// `for`, `reduce` and `scan` have one region, `if`, `while` and `warp_specialize` two, other ops none.
        Regions = "regions",
        /// The kernel ends with `return`, the first region of `while` with `condition`, every other region with
        /// `yield`; these ops occur nowhere else.
        Terminator = "terminator",
        /// Operands are defined before the op, in its block or an enclosing one.
        Dominance = "dominance",
        /// Ops are legal from their own stage on. Shared memory, mbarriers and tokens are not legal at stage tile. From
        /// stage layout on, loops carry no views and branches yield none.
        StageLegal = "stage",

        // Types.

        /// Tiles and view blocks have at most 2^20 elements and 16 parts; after stage tile, extents are powers of two. The
        /// same holds for shared buffers, except for the first extent, which may count buffers.
        Extents = "extents",
        /// At stage tile, tiles have no layout. From stage layout on, they have a distributed layout of their shape
        /// that covers every element. Shared buffers have a shared layout of their shape or a larger one, or, in a ring, of the shape
        /// of one buffer.
        Layouts = "layouts",
        /// Attributes are in range: axes below the rank, complete permutations, ascending boundaries, literals in the
        /// range of their type.
        Attributes = "attributes",
        /// Operands have the types that the op requires.
        OperandTypes = "operand types",
        /// Results have the types that follow from operands and attributes.
        ResultTypes = "result types",
        /// Region parameters have the types of the values that the op passes.
        RegionParams = "region parameters",
        /// A region's terminator has operands of the types that the op requires.
        RegionResults = "region results",
        /// The region of `reduce` and `scan` contains only pure ops on scalars.
        CombineRegion = "combine region",

        // Schedules.

        /// Only ops in the body of a `for` have placements, from stage schedule on. No op runs before an op that it
        /// depends on, and a ring has enough buffers for the stages that it spans.
        Schedule = "schedule",
    }
}

/// A violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyError {
    pub rule: Rule,
    /// The op as text, without regions; the kernel's name if no op is at fault.
    pub op: String,
    /// Location in the user's source.
    pub loc: Loc,
    /// What was expected and found.
    pub message: String,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.loc.is_unknown() {
            write!(f, "{}: ", self.loc)?;
        }
        write!(f, "`{}`: {} (rule: {})", self.op, self.message, self.rule.name())
    }
}

impl std::error::Error for VerifyError {}

/// Checks a function against all rules of a stage.
///
/// # Errors
/// The violations in text order: all of structural rules or, if there are none, at most one of type rules per op.
pub fn verify(func: &Func, stage: Stage) -> Result<(), Vec<VerifyError>> {
    let mut violations = structure::check(func, stage);
    if violations.is_empty() {
        for id in func.walk() {
            let data = func.op(id);
            let mut of_types = data.results.iter().chain(data.regions.iter().flat_map(|&r| &func.block(r).params));
            let check = of_types
                .try_for_each(|&v| types::well_formed(func, func.ty(v), stage))
                .and_then(|()| op_types(&OpCx { func, data }));
            violations.extend(check.err().map(|b| (Some(id), b)));
        }
    }
    if violations.is_empty() {
        violations = schedule::check(func, stage);
    }
    if violations.is_empty() {
        return Ok(());
    }
    // Printing might not terminate if regions are not properly nested.
    let printable = violations.iter().all(|(_, b)| b.rule != Rule::Placement);
    let text = |id| if printable { print_op(func, id) } else { func.op(id).op.mnemonic().into() };
    let error = |(op, Violation { rule, message }): (Option<OpId>, Violation)| match op {
        Some(id) => VerifyError { rule, op: text(id), loc: func.op(id).loc.clone(), message },
        None => VerifyError { rule, op: format!("kernel @{}", func.name), loc: func.loc.clone(), message },
    };
    Err(violations.into_iter().map(error).collect())
}

/// The first stage in which every op and type of the function is legal.
pub fn stage_of(func: &Func) -> Stage {
    let mut stage = Stage::Tile;
    for id in func.walk() {
        let data = func.op(id);
        stage = stage.max(data.op.stage());
        if data.results.iter().any(|&v| func.ty(v).layout().is_some()) {
            stage = stage.max(Stage::Layout);
        }
        if data.place.is_some() {
            stage = stage.max(Stage::Schedule);
        }
    }
    stage
}

/// A violation without its op.
struct Violation {
    rule: Rule,
    message: String,
}

type Check = Result<(), Violation>;

/// Fails with this rule and message unless the condition holds.
fn require(condition: bool, rule: Rule, message: impl FnOnce() -> String) -> Check {
    if condition { Ok(()) } else { Err(Violation { rule, message: message() }) }
}

/// An op whose types are checked.
struct OpCx<'f> {
    func: &'f Func,
    data: &'f OpData,
}

impl<'f> OpCx<'f> {
    fn operands(&self) -> Vec<&'f Type> {
        self.data.operands.iter().map(|&v| self.func.ty(v)).collect()
    }

    fn results(&self) -> Vec<&'f Type> {
        self.data.results.iter().map(|&v| self.func.ty(v)).collect()
    }

    fn operand(&self, i: usize) -> &'f Type {
        self.func.ty(self.data.operands[i])
    }

    fn result(&self, i: usize) -> &'f Type {
        self.func.ty(self.data.results[i])
    }

    /// Types of the parameters of region `i`.
    fn params(&self, i: usize) -> Vec<&'f Type> {
        self.func.block(self.data.regions[i]).params.iter().map(|&v| self.func.ty(v)).collect()
    }

    /// Types of the operands of the terminator of region `i`.
    fn terminator_types(&self, i: usize) -> Vec<&'f Type> {
        let last = self.func.block(self.data.regions[i]).ops.last();
        last.map_or_else(Vec::new, |&id| self.func.op(id).operands.iter().map(|&v| self.func.ty(v)).collect())
    }

    /// Requires that operand `i`, which messages call `what`, has type `expected`.
    fn operand_is(&self, i: usize, what: &str, expected: &Type) -> Check {
        let found = self.operand(i);
        require(found == expected, Rule::OperandTypes, || format!("{what} should be {expected}, found {found}"))
    }

    /// Requires that operand `i`, which messages call `what`, satisfies `wanted`, which messages call `described`.
    fn operand_where(&self, i: usize, what: &str, described: &str, wanted: impl FnOnce(&Type) -> bool) -> Check {
        let found = self.operand(i);
        require(wanted(found), Rule::OperandTypes, || format!("{what} should be {described}, found {found}"))
    }

    fn result_is(&self, i: usize, expected: &Type) -> Check {
        let found = self.result(i);
        require(found == expected, Rule::ResultTypes, || format!("the result should be {expected}, found {found}"))
    }

    /// As [`OpCx::result_is`], ignoring layouts: for ops whose operand and result layouts may differ.
    fn result_is_ignoring_layout(&self, i: usize, expected: &Type) -> Check {
        let found = self.result(i);
        let same = found.with_layout(None) == expected.with_layout(None);
        require(same, Rule::ResultTypes, || format!("the result should be {expected}, found {found}"))
    }

    fn attribute(&self, condition: bool, message: impl FnOnce() -> String) -> Check {
        require(condition, Rule::Attributes, message)
    }
}

/// Requires that two lists of types are equal.
fn same_types(rule: Rule, what: &str, expected: &[&Type], found: &[&Type]) -> Check {
    let list = |types: &[&Type]| types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
    require(expected == found, rule, || format!("{what} should be ({}), found ({})", list(expected), list(found)))
}

/// The type rules, by op family.
fn op_types(cx: &OpCx) -> Check {
    match &cx.data.op {
        Op::Unary(op) => elementwise::unary(cx, *op),
        Op::Binary(op) => elementwise::binary(cx, *op),
        Op::Cmp(op) => elementwise::cmp(cx, *op),
        Op::Fma => elementwise::fma(cx),
        Op::Select => elementwise::select(cx),
        Op::Cast => elementwise::cast(cx),
        Op::Bitcast => elementwise::bitcast(cx),
        Op::InlineAsm { asm: _, constraints: _, pack, pure: _ } => elementwise::inline_asm(cx, *pack),
        Op::Hint { divisible, contiguous, at_least } => elementwise::hint(cx, *divisible, *contiguous, *at_least),

        Op::ProgramId { axis } | Op::NumPrograms { axis } => shape::program(cx, *axis),
        Op::CtaRank { ctas } => {
            barriers::ctas(cx, Some(*ctas))?;
            cx.result_is(0, &Type::scalar(crate::ir::DType::I32))
        }
        Op::Constant { value } => shape::constant(cx, *value),
        Op::Arange { start, end } => shape::arange(cx, *start, *end),
        Op::Splat => shape::splat(cx),
        Op::ExpandDims { axis } => shape::expand_dims(cx, *axis),
        Op::Broadcast => shape::broadcast(cx),
        Op::Trans { perm } => shape::trans(cx, perm),
        Op::Reshape => shape::reshape(cx),
        Op::Join => shape::join(cx),
        Op::Gather { axis } => shape::gather(cx, *axis),
        Op::Split => shape::split(cx),

        Op::MakeView { order } => memory::make_view(cx, order),
        Op::Advance => memory::advance(cx),
        Op::LoadView { boundary, padding, eviction: _ } => memory::load_view(cx, boundary, *padding),
        Op::StoreView { boundary, .. } => memory::store_view(cx, boundary),
        Op::PrefetchView { boundary } => memory::prefetch_view(cx, boundary),
        Op::TmaStore { boundary, op } => memory::tma_store(cx, boundary, *op),
        Op::AtomicView { op, boundary } => memory::atomic_view(cx, *op, boundary),
        Op::PtrAdd => memory::ptr_add(cx),
        Op::Load { eviction: _ } => memory::load(cx),
        Op::Store { eviction: _ } => memory::store(cx),
        Op::AtomicRmw { op, .. } => memory::atomic_rmw(cx, *op),
        Op::AtomicCas { .. } => memory::atomic_cas(cx),
        Op::SemaphoreWait => memory::semaphore_wait(cx),

        Op::Dot { precision: _, max_imprecise } => dot_and_reduce::dot(cx, *max_imprecise),
        Op::Reduce { axis } => dot_and_reduce::reduce(cx, *axis),
        Op::Scan { axis, reverse: _ } => dot_and_reduce::scan(cx, *axis),

        Op::For { num_stages, unroll, warp_specialize: _, overlap: _, split: _, replicas } => {
            control::for_loop(cx, *num_stages, *unroll, *replicas)
        }
        Op::DynamicIndex => control::dynamic_index(cx),
        Op::TakeIndex => control::take_index(cx),
        Op::TakenIndex => control::taken_index(cx),
        Op::If => control::if_else(cx),
        Op::While => control::while_loop(cx),
        // Checked with the op that owns the region.
        Op::Yield | Op::Condition | Op::Return => Ok(()),
        Op::Assume => cx.operand_is(0, "the condition", &Type::scalar(crate::ir::DType::Bool)),
        Op::DevicePrint { prefix: _ } => control::device_print(cx),
        Op::DeviceAssert { message: _ } => control::device_assert(cx),

        Op::ConvertLayout => shared::convert_layout(cx),
        Op::LocalAlloc => shared::local_alloc(cx),
        Op::LocalLoad => shared::local_load(cx),
        Op::LocalStore => shared::local_store(cx),
        Op::LocalSlot => shared::local_slot(cx),
        Op::LocalTrans { perm } => shared::local_trans(cx, perm),
        Op::AsyncCopy { boundary, padding } => shared::async_copy(cx, boundary, *padding),
        Op::AsyncLoad { vector } => shared::async_load(cx, *vector),
        Op::AsyncCommit
        | Op::AsyncWait { pending: _ }
        | Op::FenceAsyncShared
        | Op::PingpongArrive
        | Op::ClusterBarrier => Ok(()),
        Op::PingpongWait => barriers::pingpong_wait(cx),
        Op::MmaSync { precision: _, warps, k_end, n_end } => shared::mma(cx, Family::MmaSync, warps, [*k_end, *n_end]),
        Op::Wgmma { warps, k_end, n_end } => shared::mma(cx, Family::Wgmma, warps, [*k_end, *n_end]),
        Op::FmaDot => shared::fma_dot(cx),
        Op::WgmmaWait { pending: _ } => {
            same_types(Rule::ResultTypes, "the results of `wgmma_wait`", &cx.operands(), &cx.results())
        }
        Op::BlockBarrier { id, threads } => shared::block_barrier(cx, *id, *threads),
        Op::MbarrierAlloc { arrivals } => barriers::alloc(cx, *arrivals),
        Op::MbarrierFree => barriers::barrier(cx, 0),
        Op::MbarrierExpect { bytes } => barriers::expect(cx, *bytes),
        Op::MbarrierArrive { warps, lanes, ctas } => barriers::arrive_warps(cx, *warps, *lanes, *ctas),
        Op::AsyncArrive { threads } => barriers::arrive(cx, "threads", *threads),
        Op::MbarrierWait => barriers::wait(cx),
        Op::TmaLoad { boundary, ctas } => barriers::tma_load(cx, boundary, *ctas),
        Op::WarpSpecialize { warps, producers, registers, replicas } => {
            barriers::warp_specialize(cx, *warps, *producers, registers, *replicas)
        }
    }
}
