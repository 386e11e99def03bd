//! The loads of a loop that can be prefetched, and the reasons why others cannot.

use crate::analysis::access_layout::{
    async_copy_layout, async_copy_width, extents, pointer_order_and_width, view_operands,
};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::{memory_effects, tensor_map};
use crate::ir::nested::uses;
use crate::ir::{BlockId, DType, Def, Effects, Elem, Func, Loc, Op, OpId, Padding, Placement, Type, Value};
use crate::layout::LinearLayout;
use crate::schedule::stages;
use crate::target::GpuArch;
use std::collections::HashSet;

/// The minimum size of one `cp.async`, in bytes.
const MIN_COPY_BYTES: usize = 4;

/// A load to prefetch.
#[derive(Clone)]
pub struct Candidate {
    /// A `load_view`, or a `load` through a tile of pointers.
    pub load: OpId,
    /// The `local_alloc` from which dots read the tile.
    pub alloc: Option<OpId>,
    /// The tile has users in registers too.
    pub in_registers: bool,
    /// The type of one buffer of the ring.
    pub buffer: Type,
    /// The elements that one `cp.async` copies.
    pub vector: usize,
    /// The address depends on a tile that the loop loads: producers load scalars only.
    pub indirect: bool,
    /// The number of buffers of the ring; 0 until it is chosen.
    pub depth: u32,
    /// Loaded by TMA.
    pub tma: bool,
    /// Why it is not, where that was asked for.
    pub no_tma: Option<String>,
}

impl Candidate {
    /// Bytes of the tile, which a buffer has room for at least ([`Func::shared_bytes`]).
    pub fn buffer_bytes(&self) -> usize {
        match &self.buffer {
            Type::Shared { elem, .. } => self.buffer.numel() * elem.bytes(),
            _ => 0,
        }
    }
}

/// A load that is not prefetched although its loop asks for it or a dot reads it, and why.
pub struct Refusal {
    pub loc: Loc,
    pub reason: String,
}

/// The loads of a loop body, without nested blocks.
#[derive(Default)]
pub struct Candidates {
    pub found: Vec<Candidate>,
    pub refused: Vec<Refusal>,
}

/// The loads of a loop that can be prefetched. None if no dot reads any of them, unless the loop sets its own
/// `num_stages`: other loads may be used too soon after, or too rarely, to pay for the way through shared memory.
/// Without an own `num_stages`, loads through pointers are prefetched only for dots.
pub fn find_candidates(func: &mut Func, id: OpId) -> Candidates {
    let region = func.op(id).regions[0];
    let has_own_stages = matches!(func.op(id).op, Op::For { num_stages: Some(_), .. });
    let search = Search::new(func, region, true);
    let mut candidates = Candidates::default();
    for load in func.block(region).ops.clone() {
        let through_pointers = matches!(func.op(load).op, Op::Load { .. });
        if !through_pointers && !matches!(func.op(load).op, Op::LoadView { .. }) {
            continue;
        }
        let is_asked = has_own_stages || search.feeds_dot(func, load);
        if !is_asked && through_pointers {
            continue;
        }
        match search.candidate(func, load) {
            Ok(candidate) => candidates.found.push(candidate),
            Err(reason) if is_asked => {
                candidates.refused.push(Refusal { loc: func.op(load).loc.clone(), reason });
            }
            Err(_) => {}
        }
    }
    // Indices of other loads run further ahead, in registers.
    let addresses = candidates.found.iter().flat_map(|c| func.op(c.load).operands.iter().copied().take(2));
    let ahead = ahead_ops(func, region, addresses);
    candidates.found.retain(|c| !ahead.contains(&c.load));
    if !has_own_stages && candidates.found.iter().all(|c| !search.feeds_dot(func, c.load)) {
        candidates.found.clear();
    }
    candidates
}

/// The loads of a block that only fill an operand of dots in shared memory, and that TMA can do.
pub fn operand_loads(func: &mut Func, block: BlockId) -> Vec<Candidate> {
    let mut found = Vec::new();
    if !func.block(block).ops.iter().any(|&id| matches!(func.op(id).op, Op::LoadView { .. })) {
        return found;
    }
    let search = Search::new(func, block, false);
    for load in func.block(block).ops.clone() {
        if matches!(func.op(load).op, Op::LoadView { .. })
            && let Ok(c) = search.candidate(func, load)
            && c.alloc.is_some()
            && !c.in_registers
            && !c.indirect
            && tma_can_load(func, &search.axis, &c, 1).is_ok()
        {
            found.push(Candidate { tma: true, ..c });
        }
    }
    found
}

/// The loads of a block that the schedule prefetches, with the rings that it gives them.
///
/// # Errors
/// The load that cannot be prefetched, and why; rings that exceed shared memory.
pub fn scheduled_loads(func: &mut Func, region: BlockId, arch: GpuArch) -> Result<Vec<Candidate>, String> {
    let mut found = Vec::new();
    if !func.block(region).ops.iter().any(|&id| func.op(id).place.is_some_and(|place| place.depth.is_some())) {
        return Ok(found);
    }
    let search = Search::new(func, region, stages::main_stage(func, region).is_some());
    for load in func.block(region).ops.clone() {
        let Some(Placement { depth: Some(depth), tma, .. }) = func.op(load).place else { continue };
        if func.op(load).op == Op::LocalAlloc {
            continue;
        }
        let loc = func.op(load).loc.clone();
        if !matches!(func.op(load).op, Op::Load { .. } | Op::LoadView { .. }) {
            return Err(format!("the `{}` at {loc} cannot have a ring: only loads can", func.op(load).op.mnemonic()));
        }
        let candidate = search
            .candidate(func, load)
            .map_err(|reason| format!("the load at {loc} cannot be prefetched: {reason}"))?;
        if tma && arch < GpuArch::Sm90a {
            return Err(format!("the load at {loc} cannot be prefetched by TMA: {} has no TMA", arch.name()));
        }
        if tma {
            tma_can_load(func, &search.axis, &candidate, 1)
                .map_err(|reason| format!("the load at {loc} cannot be prefetched by TMA: {reason}"))?;
        }
        found.push(Candidate { depth, tma, ..candidate });
    }
    let bytes = |c: &Candidate| func.shared_bytes(&c.buffer) as u64;
    let total: u64 = found.iter().map(|c| bytes(c) * u64::from(c.depth)).sum();
    if total > u64::from(arch.max_shared_bytes()) {
        let of_load = |c: &Candidate| {
            let loc = &func.op(c.load).loc;
            format!("that of the load at {loc} has {} buffers of {} bytes", c.depth, bytes(c))
        };
        return Err(format!(
            "the rings of a loop take {total} bytes of shared memory, and a block of {} has {}: {}",
            arch.name(),
            arch.max_shared_bytes(),
            found.iter().map(of_load).collect::<Vec<_>>().join(", ")
        ));
    }
    Ok(found)
}

/// Checks that TMA can perform the load, of which each of `ctas` CTAs loads a part.
///
/// # Errors
/// Why it cannot.
pub fn tma_can_load(func: &Func, axis: &AxisAnalysis, c: &Candidate, ctas: u32) -> Result<(), String> {
    let data = func.op(c.load);
    let Op::LoadView { boundary, .. } = &data.op else { return Err("it goes through pointers".into()) };
    tensor_map::plan(func, axis, data.operands[0], boundary, &c.buffer, ctas)?.check_indices(func, axis)
}

/// Chooses TMA for the loads that it can perform.
pub fn choose_tma(func: &Func, loads: &mut [Candidate]) {
    let axis = AxisAnalysis::new(func);
    for c in loads {
        c.no_tma = tma_can_load(func, &axis, c, 1).err();
        c.tma = c.no_tma.is_none();
    }
}

/// Notes why TMA does not perform these loads. Loops that are copies of each other have the same loads.
pub fn note_tma<'c>(func: &Func, loads: impl IntoIterator<Item = &'c Candidate>, notes: &mut Vec<String>) {
    for (c, reason) in loads.into_iter().filter_map(|c| Some((c, c.no_tma.as_ref()?))) {
        let note = format!("TMA does not perform the load at {}: {reason}", func.op(c.load).loc);
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
}

struct Search {
    region: BlockId,
    axis: AxisAnalysis,
    /// Pointers and views that the kernel writes through.
    written: HashSet<Value>,
    /// The loads run in an iteration before that of their use.
    runs_ahead: bool,
}

impl Search {
    fn new(func: &Func, region: BlockId, runs_ahead: bool) -> Search {
        Search { region, axis: AxisAnalysis::new(func), written: memory_effects::written_pointers(func), runs_ahead }
    }

    /// The `local_alloc` in the loop body that is filled from the tile of a load.
    fn alloc_of(&self, func: &Func, load: OpId) -> Option<OpId> {
        let tile = func.result(load);
        let is_filled = |op: &OpId| func.op(*op).op == Op::LocalAlloc && func.op(*op).operands == [tile];
        func.block(self.region).ops.iter().copied().find(is_filled)
    }

    /// Whether a dot of the loop body multiplies the tile of a load, as it is or as elements of a wider type.
    fn feeds_dot(&self, func: &Func, load: OpId) -> bool {
        let mut tiles = HashSet::from([func.result(load)]);
        func.block(self.region).ops.iter().any(|&id| {
            let data = func.op(id);
            let reads = data.operands.iter().any(|operand| tiles.contains(operand));
            let bits = |v: Value| func.ty(v).elem().map_or(0, Elem::bits);
            let passes = match data.op {
                Op::Cast => bits(data.operands[0]) <= bits(data.results[0]),
                Op::ConvertLayout | Op::Trans { .. } => true,
                _ => false,
            };
            if reads && passes {
                tiles.extend(&data.results);
            }
            match data.op {
                Op::LocalAlloc => reads,
                // Not as the addend.
                Op::MmaSync { .. } | Op::Wgmma { .. } | Op::FmaDot => {
                    data.operands[..2].iter().any(|v| tiles.contains(v))
                }
                _ => false,
            }
        })
    }

    /// # Errors
    /// Why the load cannot be prefetched.
    fn candidate(&self, func: &mut Func, load: OpId) -> Result<Candidate, String> {
        let data = func.op(load).clone();
        let (tile, address) = (func.result(load), data.operands[0]);
        let Some(elem) = func.ty(tile).dtype().filter(|_| func.ty(tile).is_tensor()) else {
            return Err("it loads a scalar".into());
        };
        if elem == DType::Bool {
            return Err("`cp.async` does not copy bool".into());
        }
        self.require_zero_padding(func, load)?;
        // The operands after the address of a `load` are the mask and its padding.
        for &v in data.operands.iter().take(2).filter(|_| self.runs_ahead) {
            self.require_known_ahead(func, v)?;
        }
        if !self.written.is_disjoint(&memory_effects::underlying_pointers(func, address)) {
            return Err("the kernel writes the memory that it reads".into());
        }
        let alloc = self.alloc_of(func, load);
        let users = func.uses(tile).len() - usize::from(alloc.is_some());
        // The layout of the copies, for any number of warps, and the order of dimensions in memory.
        let (order, widest) = match &data.op {
            Op::LoadView { .. } => (view_operands(func, address).order.to_vec(), u64::MAX),
            _ => pointer_order_and_width(func, &self.axis, address, data.operands.get(1).copied()),
        };
        let buffer = match alloc {
            Some(alloc) => func.ty(func.result(alloc)).clone(),
            None => {
                let shape = func.ty(tile).shape().to_vec();
                let layout = match self.feeds_dot(func, load) {
                    // It is read in another order than it is loaded.
                    true => LinearLayout::shared_for_dots(&extents(&shape), &order, elem.bytes() as u32),
                    false => LinearLayout::shared_row_major(&extents(&shape), &order),
                };
                let layout = func.intern_layout(layout);
                Type::Shared { shape, elem, layout }
            }
        };
        let layout = buffer.layout().ok_or("its buffer has no layout")?;
        let copies = match &data.op {
            // The copied vectors do not depend on the number of warps.
            Op::LoadView { boundary, .. } => async_copy_layout(func, &self.axis, address, boundary, 1),
            _ => func.layout_of(address).clone(),
        };
        let vector = async_copy_width(&copies, order[0], func.layout(layout)).min(widest as usize);
        if vector * elem.bytes() < MIN_COPY_BYTES {
            return Err(format!(
                "accesses that are known to be contiguous and aligned have {} bytes, and `cp.async` copies at least \
                 {MIN_COPY_BYTES}",
                vector * elem.bytes()
            ));
        }
        // `cp.async` copies 4, 8 or 16 bytes.
        let vector = vector.min(16 / elem.bytes());
        let ahead = ahead_ops(func, self.region, data.operands.iter().copied().take(2));
        let loads_tile = |&id: &OpId| matches!(func.op(id).op, Op::Load { .. }) && func.ty(func.result(id)).is_tensor();
        let indirect = ahead.iter().any(loads_tile);
        let in_registers = users > 0;
        Ok(Candidate { load, alloc, in_registers, buffer, vector, indirect, depth: 0, tma: false, no_tma: None })
    }

    fn require_zero_padding(&self, func: &Func, load: OpId) -> Result<(), String> {
        let data = func.op(load);
        let is_zero = match data.op {
            Op::LoadView { padding, .. } => padding == Padding::Zero,
            _ => data.operands.get(2).is_none_or(|&other| is_zero(func, other)),
        };
        is_zero
            .then_some(())
            .ok_or_else(|| "elements that it does not read should be zero: `cp.async` writes zeros".into())
    }

    /// Requires that the value of a later iteration can be computed in this one: all ops in the loop that it depends
    /// on, also through carried values, are pure, or are loads through pointers of memory that the kernel does not
    /// write.
    fn require_known_ahead(&self, func: &Func, v: Value) -> Result<(), String> {
        for id in ahead_ops(func, self.region, [v]) {
            let data = func.op(id);
            let op = format!("the `{}` at {}", data.op.mnemonic(), data.loc);
            let is_load = matches!(data.op, Op::Load { .. });
            if is_load && !self.written.is_disjoint(&memory_effects::underlying_pointers(func, data.operands[0])) {
                return Err(format!("its address depends on {op} of memory that the kernel writes"));
            }
            if !is_load && (!data.regions.is_empty() || data.op.effects() != Effects::Pure) {
                return Err(format!("its address depends on {op}"));
            }
        }
        Ok(())
    }
}

/// The ops of a block that values depend on, in its order: in the body of a loop also through carried values.
pub fn ahead_ops(func: &Func, region: BlockId, values: impl IntoIterator<Item = Value>) -> Vec<OpId> {
    let ops = &func.block(region).ops;
    let in_loop = func.owner(region).is_some_and(|owner| matches!(func.op(owner).op, Op::For { .. }));
    let mut seen: Vec<Value> = values.into_iter().collect();
    let mut found: HashSet<OpId> = HashSet::new();
    let mut next = 0;
    while next < seen.len() {
        let v = seen[next];
        next += 1;
        let sources = match func.value(v).def {
            Def::Param(block, index) if block == region && index > 0 && in_loop => {
                let last = *ops.last().expect("internal compiler error: an empty loop; please report this");
                vec![func.op(last).operands[index - 1]]
            }
            Def::Result(id, _) if func.is_in(id, region) => {
                found.insert(id);
                uses(func, id).into_iter().collect()
            }
            Def::Param(..) | Def::Result(..) => Vec::new(),
        };
        for v in sources {
            if !seen.contains(&v) {
                seen.push(v);
            }
        }
    }
    ops.iter().copied().filter(|id| found.contains(id)).collect()
}

/// Whether a tile or scalar is a constant zero.
fn is_zero(func: &Func, v: Value) -> bool {
    match func.def_op(v).map(|id| func.op(id)) {
        Some(data) if matches!(data.op, Op::Splat | Op::Broadcast | Op::ConvertLayout) => {
            is_zero(func, data.operands[0])
        }
        Some(data) => match data.op {
            Op::Constant { value } => match value {
                crate::ir::Literal::Bool(b) => !b,
                crate::ir::Literal::Int(i) => i == 0,
                crate::ir::Literal::Float(x) => x.to_bits() == 0,
            },
            _ => false,
        },
        None => false,
    }
}
