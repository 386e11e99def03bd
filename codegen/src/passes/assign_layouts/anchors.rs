//! Chooses a layout for each value, without rewriting the function.
//!
//! Anchors (memory accesses and dots) fix a layout with a priority; elementwise ops, reductions and shape ops propagate
//! it. Loops iterate until no carried value changes: a layout is only replaced by one of higher priority, so the
//! iteration ends.

use super::dot::{DotPlan, plan_dot};
use crate::analysis::access_layout::{MAX_VECTOR_BYTES, default_layout, extents, memory_layout};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::padding::zero_from;
use crate::ir::{BlockId, DType, Func, Op, OpId, Precision, UnaryOp, Value};
use crate::layout::LinearLayout;
use crate::mma::DotShape;
use crate::schedule::partitions::is_requested;
use crate::target::{CompileOptions, GpuArch};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// A layout and its priority.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    pub layout: Rc<LinearLayout>,
    pub priority: Priority,
}

/// The priority of an assigned layout: where operands have different layouts, the higher priority wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// No anchor requires the layout.
    Default,
    /// The layout of a memory access.
    Memory,
    /// The accumulator of a dot, or a reduction of one.
    Dot,
}

/// The assigned layouts of one function.
pub struct Assignments<'f> {
    pub func: &'f Func,
    pub axis: AxisAnalysis,
    pub arch: GpuArch,
    pub num_warps: u32,
    /// Whether loops prefetch by TMA, as far as the options say.
    pub loads_by_tma: bool,
    pub options: &'f CompileOptions,
    /// By value number; `None` for flexible values and for values that are not tiles.
    assignments: Vec<Option<Assignment>>,
    /// Uses of each value, as (op, operand index), in text order.
    uses: Vec<Vec<(OpId, usize)>>,
    /// By value number.
    reached: Vec<Reached>,
    /// By shape of the result: the most columns of a second operand that are not known to be zero. `None` if each row of the
    /// dots shall be in one warp.
    shared_rows: Option<HashMap<Vec<usize>, usize>>,
}

impl<'f> Assignments<'f> {
    pub fn choose(func: &'f Func, arch: GpuArch, options: &'f CompileOptions) -> Assignments<'f> {
        let mut uses = vec![Vec::new(); func.num_values()];
        for id in func.walk() {
            for (i, v) in func.op(id).operands.iter().enumerate() {
                uses[v.0 as usize].push((id, i));
            }
        }
        let axis = AxisAnalysis::new(func);
        let num_warps = options.num_warps;
        let reached = Reached::of_values(func, &uses);
        let dots: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::Dot { .. })).collect();
        let shared_rows = (!uses_rows_of(func, &dots, &uses)).then(|| columns_of(func, &dots, &axis));
        let assignments = vec![None; func.num_values()];
        let tma = options.schedule.tma.unwrap_or(is_requested(func, options));
        let loads_by_tma = arch >= GpuArch::Sm90a && tma;
        let mut assignments =
            Assignments { func, axis, arch, num_warps, loads_by_tma, options, assignments, uses, reached, shared_rows };
        assignments.block(func.body);
        assignments.load_in_place();
        assignments
    }

    /// The assigned layout of a tile; `None` where the tile is flexible.
    pub fn assignment(&self, v: Value) -> Option<&Assignment> {
        self.assignments[v.0 as usize].as_ref()
    }

    /// The layout in which to compute a tile if no user requires one: its assigned layout, or the default of its shape.
    pub fn layout_or_default(&self, v: Value) -> LinearLayout {
        match self.assignment(v) {
            Some(assignment) => (*assignment.layout).clone(),
            None => default_layout(self.func.ty(v).shape(), self.num_warps),
        }
    }

    /// The coalesced layout of the tile of a memory op.
    pub fn memory_layout(&self, id: OpId) -> Option<LinearLayout> {
        let data = self.func.op(id);
        let most = match (&data.op, data.results.first()) {
            (Op::LoadView { .. } | Op::Load { .. }, Some(&loaded)) => self.max_store_vector(loaded),
            // Without vectors, lanes with consecutive elements share the sectors of an instruction.
            (Op::AtomicView { .. }, _) if self.atomic_vector(id) == 1 => 1,
            _ => u64::MAX,
        };
        memory_layout(self.func, &self.axis, data, self.num_warps, most)
    }

    /// The largest number of consecutive elements that one instruction of an `atomic_view` adds; 1 for other ops.
    pub(super) fn atomic_vector(&self, id: OpId) -> usize {
        let data = self.func.op(id);
        match (&data.op, data.operands.get(1).and_then(|&tile| self.func.ty(tile).dtype())) {
            (Op::AtomicView { op, .. }, Some(elem)) => self.arch.reduction_vector(*op, elem, self.options.ptx_version),
            _ => 1,
        }
    }

    /// The maximum number of consecutive elements per thread for a loaded tile, so that stores of elementwise results
    /// leave no gaps between threads: the width of one store of the widest stored element type. Half-written sectors
    /// cost twice, while the L1 cache absorbs the gaps of loads.
    fn max_store_vector(&self, loaded: Value) -> u64 {
        let widest = self.reached[loaded.0 as usize].widest_store;
        MAX_VECTOR_BYTES.checked_div(widest).unwrap_or(u64::MAX)
    }

    /// The shape and the implementation of a `dot`.
    pub fn dot(&self, id: OpId) -> (DotShape, DotPlan) {
        let data = self.func.op(id);
        let Op::Dot { precision, max_imprecise } = data.op else { panic!("internal compiler error: not a dot") };
        let a = self.func.ty(data.operands[0]);
        let acc = self.func.ty(data.operands[2]);
        let elem = |v| self.func.ty(v).dtype().expect("internal compiler error: a dot of pointers");
        let operands = [elem(data.operands[0]), elem(data.operands[1])];
        let shape = DotShape {
            m: acc.shape()[0],
            n: acc.shape()[1],
            k: a.shape()[1],
            operands,
            acc: acc.dtype().unwrap_or(DType::F32),
            precision,
            max_imprecise,
            shared_rows: self.shared_rows.as_ref().map(|columns| columns[acc.shape()] as u32),
        };
        let plan = plan_dot(shape, self.arch, self.options);
        (shape, plan)
    }

    /// The element types in which dots read this tile, possibly transposed, from shared memory.
    pub fn shared_operand(&self, v: Value) -> Vec<DType> {
        let mut dtypes = Vec::new();
        for &(id, index) in &self.uses[v.0 as usize] {
            match self.func.op(id).op {
                Op::Dot { .. } if index < 2 => {
                    let (shape, plan) = self.dot(id);
                    dtypes.push(plan.operands(&shape)[index]);
                }
                Op::Trans { .. } => dtypes.extend(self.shared_operand(self.func.op(id).results[0])),
                _ => {}
            }
        }
        dtypes.sort_unstable();
        dtypes.dedup();
        dtypes
    }

    /// Whether this tile, loaded outside of a loop, is the first operand of a tf32x3 `wgmma` dot inside of the loop.
    pub fn is_loop_invariant_operand(&self, v: Value) -> bool {
        let loaded = self.func.def_op(v).map(|id| self.func.parent_block(id));
        self.uses[v.0 as usize].iter().any(|&(id, index)| {
            matches!(self.func.op(id).op, Op::Dot { precision: Precision::Tf32x3, .. })
                && index == 0
                && matches!(self.dot(id), (DotShape { operands: [DType::F32, _], .. }, plan) if plan.wgmma().is_some())
                && Some(self.func.parent_block(id)) != loaded
        })
    }

    fn set(&mut self, v: Value, assignment: Option<Assignment>) {
        self.assignments[v.0 as usize] = assignment;
    }

    pub(super) fn set_layout(&mut self, v: Value, layout: LinearLayout, priority: Priority) {
        self.set(v, Some(Assignment { layout: Rc::new(layout), priority }));
    }

    fn block(&mut self, block: BlockId) {
        let func = self.func;
        for &id in &func.block(block).ops {
            self.op(id);
        }
    }

    #[expect(clippy::too_many_lines, reason = "one arm per op")]
    fn op(&mut self, id: OpId) {
        let func = self.func;
        let data = func.op(id);
        match &data.op {
            Op::For { .. } => self.for_loop(id),
            Op::While => self.while_loop(id),
            Op::If => {
                for &r in &data.regions {
                    self.block(r);
                }
                for (i, &v) in data.results.iter().enumerate() {
                    let yields: Vec<Value> =
                        data.regions.iter().filter_map(|&r| self.terminator(r).get(i).copied()).collect();
                    let assignment = self.highest_priority(&yields).or_else(|| self.fallback(v));
                    self.set(v, assignment);
                }
            }
            Op::LoadView { .. } | Op::Load { .. } | Op::AtomicRmw { .. } | Op::AtomicCas { .. } => {
                if let Some(layout) = self.memory_layout(id) {
                    self.set_layout(data.results[0], layout, Priority::Memory);
                }
            }
            Op::Dot { .. } => {
                let (shape, plan) = self.dot(id);
                self.set_layout(data.results[0], plan.acc_layout(shape.m, shape.n), Priority::Dot);
            }
            Op::Reduce { axis } => {
                let assignment = self.highest_priority(&data.operands);
                let priority = assignment.as_ref().map_or(Priority::Default, |h| h.priority);
                let layout =
                    assignment.map_or_else(|| self.layout_or_default(data.operands[0]), |h| (*h.layout).clone());
                let sliced = layout.slice(*axis).layout;
                for &v in &data.results {
                    if func.ty(v).is_tensor() {
                        self.set_layout(v, sliced.clone(), priority);
                    }
                }
            }
            Op::Scan { axis, .. } => {
                let layout = scan_layout(func.ty(data.operands[0]).shape(), *axis, self.num_warps);
                for &v in &data.results {
                    self.set_layout(v, layout.clone(), Priority::Default);
                }
            }
            Op::ExpandDims { axis } => self.derive(id, |l| l.expand_dims(*axis).layout),
            Op::Trans { perm } => self.derive(id, |l| l.transpose(perm).layout),
            Op::Reshape => {
                let shape = extents(func.ty(data.results[0]).shape());
                self.derive(id, |l| l.reshape(&shape).layout);
            }
            // The result has the layout of the indices. Flexible ones take that of the operand, so that elements stay
            // within their warps.
            Op::Gather { axis } => {
                let extent = func.ty(data.results[0]).shape()[*axis] as u32;
                let within_warps = self.assignment(data.operands[0]).and_then(|source| {
                    let layout = source.layout.gathered(*axis, extent)?;
                    Some(Assignment { layout: Rc::new(layout), priority: source.priority })
                });
                let assignment = self.assignment(data.operands[1]).cloned().or(within_warps);
                let assignment = assignment.or_else(|| self.fallback(data.results[0]));
                self.set(data.results[0], assignment);
            }
            Op::Join => self.derive(id, |l| l.join().layout),
            Op::Split => {
                if let Some(assignment) = self.assignment(data.operands[0]).cloned() {
                    let splittable = assignment.layout.splittable();
                    if let Some(half) = splittable.split() {
                        for &v in &data.results {
                            self.set_layout(v, half.layout.clone(), assignment.priority);
                        }
                    }
                }
                for &v in &data.results {
                    if self.assignment(v).is_none() {
                        let fallback = self.fallback(v);
                        self.set(v, fallback);
                    }
                }
            }
            // A costly op gets an assigned layout: recomputing it for every user is slow, above all inside a loop.
            Op::Unary(op) if is_costly(*op) => {
                let assignment = self.highest_priority(&data.operands).or_else(|| self.fallback(data.results[0]));
                self.set(data.results[0], assignment);
            }
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Cmp(_)
            | Op::Fma
            | Op::Select
            | Op::Cast
            | Op::Bitcast
            | Op::PtrAdd
            | Op::Hint { .. } => {
                let assignment = self.highest_priority(&data.operands);
                self.set(data.results[0], assignment);
            }
            Op::InlineAsm { .. } => {
                // Must not be duplicated, so the result always has an assigned layout.
                for &v in &data.results {
                    let assignment = self.highest_priority(&data.operands).or_else(|| self.fallback(v));
                    self.set(v, assignment);
                }
            }
            // Flexible, scalar, or without results.
            Op::Constant { .. }
            | Op::Arange { .. }
            | Op::Splat
            | Op::Broadcast
            | Op::ProgramId { .. }
            | Op::CtaRank { .. }
            | Op::DynamicIndex
            | Op::NumPrograms { .. }
            | Op::MakeView { .. }
            | Op::Advance
            | Op::StoreView { .. }
            | Op::AtomicView { .. }
            | Op::Store { .. }
            | Op::SemaphoreWait
            | Op::Yield
            | Op::Condition
            | Op::Return
            | Op::Assume
            | Op::DevicePrint { .. }
            | Op::DeviceAssert { .. } => {}
            Op::ConvertLayout
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
            | Op::TakeIndex
            | Op::TakenIndex
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
            | Op::PingpongArrive
            | Op::WarpSpecialize { .. } => {
                panic!("internal compiler error: `{}` before layout assignment", data.op.mnemonic())
            }
        }
    }

    /// Assigns the result of an op with one tile operand the layout that the operand's layout determines.
    fn derive(&mut self, id: OpId, f: impl FnOnce(&LinearLayout) -> LinearLayout) {
        let data = self.func.op(id);
        let assignment = data.operands.iter().find_map(|&v| self.assignment(v).cloned());
        if let Some(assignment) = assignment {
            let layout = f(&assignment.layout);
            self.set_layout(data.results[0], layout, assignment.priority);
        }
    }

    fn highest_priority(&self, values: &[Value]) -> Option<Assignment> {
        // The first value of the highest priority: `max_by_key` would return the last.
        let mut best: Option<&Assignment> = None;
        for assignment in values.iter().filter_map(|&v| self.assignment(v)) {
            if best.is_none_or(|b| assignment.priority > b.priority) {
                best = Some(assignment);
            }
        }
        best.cloned()
    }

    fn terminator(&self, block: BlockId) -> &'f [Value] {
        match self.func.block(block).ops.last() {
            Some(&id) => &self.func.op(id).operands,
            None => &[],
        }
    }

    fn for_loop(&mut self, id: OpId) {
        let data = self.func.op(id);
        let region = data.regions[0];
        let params = &self.func.block(region).params[1..];
        let inits = &data.operands[3..];
        self.carried(inits, params, region);
        for (&result, &param) in data.results.iter().zip(params) {
            let assignment = self.assignment(param).cloned();
            self.set(result, assignment);
        }
    }

    fn while_loop(&mut self, id: OpId) {
        let data = self.func.op(id);
        let (before, after) = (data.regions[0], data.regions[1]);
        let params = &self.func.block(before).params;
        for (&param, &init) in params.iter().zip(&data.operands) {
            let assignment = self.assignment(init).cloned().or_else(|| self.fallback(param));
            self.set(param, assignment);
        }
        self.block(before);
        // `condition` forwards its operands to *after* and to the results.
        let forwarded = &self.terminator(before)[1..];
        let after_params = &self.func.block(after).params;
        for (i, &v) in forwarded.iter().enumerate() {
            let assignment = self.assignment(v).cloned().or_else(|| self.fallback(v));
            self.set(after_params[i], assignment.clone());
            self.set(data.results[i], assignment);
        }
        self.block(after);
    }

    /// Assigns layouts to loop-carried values: those of the initial values, until the body yields one of higher
    /// priority.
    fn carried(&mut self, inits: &[Value], params: &[Value], region: BlockId) {
        for (&param, &init) in params.iter().zip(inits) {
            let assignment = self.assignment(init).cloned();
            self.set(param, assignment);
        }
        // Terminates: the priority of a value only rises, at most once per level.
        loop {
            self.block(region);
            let yields = self.terminator(region);
            let mut changed = false;
            for (&param, &next) in params.iter().zip(yields) {
                let next = self.assignment(next).cloned();
                let has_higher_priority = match (self.assignment(param), &next) {
                    (None, Some(_)) => true,
                    (Some(old), Some(new)) => new.priority > old.priority,
                    (_, None) => false,
                };
                if has_higher_priority {
                    self.set(param, next);
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        let flexible: Vec<Value> =
            params.iter().copied().filter(|&p| self.func.ty(p).is_tensor() && self.assignment(p).is_none()).collect();
        if !flexible.is_empty() {
            for p in flexible {
                let assignment = self.fallback(p);
                self.set(p, assignment);
            }
            self.block(region);
        }
    }

    /// The layout of the first memory access that the value reaches through elementwise ops, else the default layout;
    /// `None` for scalars.
    fn fallback(&self, v: Value) -> Option<Assignment> {
        let ty = self.func.ty(v);
        if !ty.is_tensor() {
            return None;
        }
        let access = self.reached[v.0 as usize].access;
        let (layout, priority) = match access.and_then(|id| self.memory_layout(id)) {
            Some(layout) => (layout, Priority::Memory),
            None => (default_layout(ty.shape(), self.num_warps), Priority::Default),
        };
        Some(Assignment { layout: Rc::new(layout), priority })
    }
}

/// What a value reaches through elementwise ops on tiles of its shape.
#[derive(Clone, Copy, Default)]
struct Reached {
    /// The first memory access.
    access: Option<OpId>,
    /// The widest element that is stored, in bytes; 0 if none is.
    widest_store: u64,
}

impl Reached {
    /// What each value reaches, by value number. `uses` lists the uses of each value in text order.
    fn of_values(func: &Func, uses: &[Vec<(OpId, usize)>]) -> Vec<Reached> {
        let mut reached = vec![Reached::default(); func.num_values()];
        let params = func.block(func.body).params.iter();
        let defined = func.walk().into_iter().flat_map(|id| {
            let data = func.op(id);
            let params = data.regions.iter().flat_map(|&region| &func.block(region).params);
            params.chain(&data.results).copied().collect::<Vec<_>>()
        });
        // Results of elementwise ops are defined after their operands.
        let values: Vec<Value> = params.copied().chain(defined).collect();
        for &v in values.iter().rev() {
            reached[v.0 as usize] = Reached::of(func, v, &uses[v.0 as usize], &reached);
        }
        reached
    }

    fn of(func: &Func, v: Value, uses: &[(OpId, usize)], reached: &[Reached]) -> Reached {
        let mut found = Reached::default();
        for &(id, index) in uses {
            let data = func.op(id);
            match data.op {
                Op::Store { .. } | Op::StoreView { .. } if index == 1 => {
                    let bytes = func.ty(v).elem().map_or(0, |elem| (elem.bits() / 8) as u64);
                    found.widest_store = found.widest_store.max(bytes);
                    found.access = found.access.or(Some(id));
                }
                Op::AtomicView { .. } if index == 1 => found.access = found.access.or(Some(id)),
                Op::Load { .. } | Op::Store { .. } | Op::AtomicRmw { .. } | Op::AtomicCas { .. } => {
                    found.access = found.access.or(Some(id));
                }
                _ if is_elementwise(&data.op) && func.ty(data.results[0]).shape() == func.ty(v).shape() => {
                    let next = reached[data.results[0].0 as usize];
                    found.widest_store = found.widest_store.max(next.widest_store);
                    found.access = found.access.or(next.access);
                }
                _ => {}
            }
        }
        found
    }
}

/// By shape of the result, the most columns of the second operands of dots that are not known to be zero: dots of one
/// shape, whose results may be added, are distributed alike.
fn columns_of(func: &Func, dots: &[OpId], axis: &AxisAnalysis) -> HashMap<Vec<usize>, usize> {
    let mut columns = HashMap::new();
    for &id in dots {
        let (b, shape) = (func.op(id).operands[1], func.ty(func.result(id)).shape());
        let used = zero_from(func, axis, b, 1).unwrap_or(shape[1]);
        columns.entry(shape.to_vec()).and_modify(|most: &mut usize| *most = used.max(*most)).or_insert(used);
    }
    columns
}

/// Whether the result of one of the dots, or what is computed from its elements, is used in another way than element by element,
/// such as by a reduction or as the operand of another dot, or is an operand of a `while` loop, which is not followed.
/// `uses` lists the uses of each value.
fn uses_rows_of(func: &Func, dots: &[OpId], uses: &[Vec<(OpId, usize)>]) -> bool {
    let mut values: Vec<Value> = dots.iter().map(|&id| func.result(id)).collect();
    let mut seen = HashSet::new();
    while let Some(v) = values.pop() {
        if !seen.insert(v) {
            continue;
        }
        for &(id, index) in &uses[v.0 as usize] {
            let data = func.op(id);
            match &data.op {
                Op::Dot { .. } if index == 2 => {}
                op if is_elementwise(op) => values.extend(&data.results),
                Op::Hint { .. } | Op::InlineAsm { .. } => values.extend(&data.results),
                Op::For { .. } if index >= 3 => {
                    values.push(data.results[index - 3]);
                    values.push(func.block(data.regions[0]).params[index - 2]);
                }
                Op::Yield => {
                    let Some(parent) = func.parent_op(id).map(|id| func.op(id)) else { return true };
                    match parent.op {
                        Op::For { .. } => values.push(func.block(parent.regions[0]).params[index + 1]),
                        Op::If => {}
                        _ => return true,
                    }
                    values.push(parent.results[index]);
                }
                Op::Store { .. } | Op::StoreView { .. } | Op::AtomicView { .. } | Op::AtomicRmw { .. } => {}
                Op::DevicePrint { .. } | Op::DeviceAssert { .. } => {}
                _ => return true,
            }
        }
    }
    false
}

/// Whether each element of the result depends only on the same element of the operands.
pub(super) fn is_elementwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) | Op::Fma | Op::Select | Op::Cast | Op::Bitcast | Op::PtrAdd)
}

/// Whether the op takes many instructions, or runs on the special-function units (SFU), which have low throughput.
fn is_costly(op: UnaryOp) -> bool {
    match op {
        UnaryOp::Exp
        | UnaryOp::Exp2
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tanh
        | UnaryOp::Erf => true,
        UnaryOp::Neg
        | UnaryOp::Not
        | UnaryOp::Abs
        | UnaryOp::Floor
        | UnaryOp::Ceil
        | UnaryOp::Trunc
        | UnaryOp::Rint => false,
    }
}

/// A layout in which each warp holds whole lines along `axis`: consecutive elements in registers, then in lanes. Warps
/// are distributed over another dimension.
pub fn scan_layout(shape: &[usize], axis: usize, num_warps: u32) -> LinearLayout {
    let rank = shape.len();
    let lanes = 32.min(shape[axis]);
    let mut size = vec![1; rank];
    size[axis] = (shape[axis] / lanes) as u32;
    let mut threads = vec![1; rank];
    threads[axis] = 32;
    let mut warps = vec![1; rank];
    if let Some(other) = (0..rank).rev().find(|&d| d != axis) {
        warps[other] = num_warps;
    } else {
        warps[axis] = num_warps;
    }
    let mut order = vec![axis];
    order.extend((0..rank).rev().filter(|&d| d != axis));
    LinearLayout::blocked(&extents(shape), &size, &threads, &warps, &order)
}
