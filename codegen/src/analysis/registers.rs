//! Register pressure and code size: estimates from Tile IR with layouts, before lowering.
//!
//! A tile occupies all its registers at points where every thread has to finish it before the next step: MMAs,
//! reductions, layout conversions, and the beginning and end of loops. Between such points, code processes tiles
//! element by element. The estimates ignore addresses, counters, masks, registers that the lowering adds, and values
//! that are cheaper to rematerialize than to keep.

use crate::ir::{BlockId, DType, Effects, Func, Op, OpId, Type, Value};
use std::collections::{HashMap, HashSet};

/// Registers of a streaming multiprocessor (SM), all of which one block can have.
pub const PER_SM: u32 = 65536;
/// Maximum number of registers that a thread can address.
pub const MAX_PER_THREAD: u32 = 255;

/// Allocation unit of registers per thread (CUDA's occupancy calculator: 256 per warp).
const ALLOCATION_UNIT: u32 = 8;

/// Registers available to each of `threads` threads of a block.
pub fn available(threads: u32) -> u32 {
    (PER_SM / threads.max(1) / ALLOCATION_UNIT * ALLOCATION_UNIT).min(MAX_PER_THREAD)
}

/// The registers per thread that live float tiles occupy at an op. Integer and pointer tiles do not count: most are
/// addresses, which are computed where they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub op: OpId,
    pub live: u32,
    /// Whether all elements of the live tiles are in registers here. Elsewhere, code processes tiles element by element
    /// and may hold fewer.
    pub is_sync_point: bool,
}

/// The live registers at each op, in the order of [`Func::walk`].
pub fn profile(func: &Func) -> Vec<Point> {
    let mut pressure = Pressure { func, weights: HashMap::new(), live: HashMap::new() };
    pressure.live_before(func.body, None, &HashSet::new());
    let point = |op: OpId| {
        let live = *pressure.live.get(&op)?;
        Some(Point { op, live, is_sync_point: is_sync_point(&func.op(op).op) })
    };
    func.walk().into_iter().filter_map(point).collect()
}

/// Maximum of the [`profile`] over all synchronization points.
pub fn max_live(func: &Func) -> u32 {
    profile(func).into_iter().filter(|point| point.is_sync_point).map(|point| point.live).max().unwrap_or(0)
}

/// Static number of FMA instructions per thread of dots that do not use tensor cores.
pub fn fma_count(func: &Func) -> u64 {
    let of = |id: OpId| {
        let data = func.op(id);
        match data.op {
            Op::FmaDot => {
                let depth = func.ty(data.operands[0]).shape().last().copied().unwrap_or(1);
                (func.layout_of(data.operands[2]).num_registers() * depth) as u64
            }
            _ => 0,
        }
    };
    func.walk().into_iter().map(of).sum()
}

/// Registers per thread that a tile occupies. Constants, masks and splats count as 0: they are rematerialized at their
/// uses.
pub fn tile_registers(func: &Func, v: Value) -> u32 {
    let Type::Tensor { .. } = func.ty(v) else { return 0 };
    let rematerialized = func.def_op(v).is_some_and(|id| {
        matches!(func.op(id).op, Op::Constant { .. } | Op::Splat | Op::Arange { .. } | Op::Cmp(_))
            && func.op(id).op.effects() == Effects::Pure
    });
    let bits = func.ty(v).elem().map_or(32, |e| e.bits());
    if rematerialized || bits < 8 { 0 } else { (func.layout_of(v).num_registers() * bits).div_ceil(32) as u32 }
}

/// Whether an op only changes the shape of its operand. Such ops are evaluated at their uses.
pub fn is_shape_op(op: &Op) -> bool {
    matches!(op, Op::Broadcast | Op::ExpandDims { .. } | Op::Reshape)
}

/// The value whose registers hold the elements of `v`.
pub fn source(func: &Func, v: Value) -> Value {
    match func.def_op(v) {
        Some(id) if is_shape_op(&func.op(id).op) => source(func, func.op(id).operands[0]),
        _ => v,
    }
}

fn is_dot(op: &Op) -> bool {
    op.is_dot() || matches!(op, Op::WgmmaWait { .. })
}

fn is_loop(op: &Op) -> bool {
    matches!(op, Op::For { .. } | Op::While)
}

/// Whether an op synchronizes threads or needs all elements of its operands: values that are live across it are held in
/// registers as a whole.
fn is_sync_point(op: &Op) -> bool {
    let memory =
        matches!(op, Op::ConvertLayout | Op::Gather { .. } | Op::LocalAlloc | Op::LocalStore | Op::BlockBarrier { .. });
    memory || matches!(op, Op::TmaStore { .. } | Op::Reduce { .. } | Op::Scan { .. }) || is_dot(op) || is_loop(op)
}

struct Pressure<'a> {
    func: &'a Func,
    weights: HashMap<Value, u32>,
    /// By op; at synchronization points, of the tiles that are held as a whole.
    live: HashMap<OpId, u32>,
}

impl Pressure<'_> {
    /// Values that are live before a block, from those that are live after it. `owner` is the op of the block.
    fn live_before(&mut self, block: BlockId, owner: Option<OpId>, after: &HashSet<Value>) -> HashSet<Value> {
        let mut live = after.clone();
        for &id in self.func.block(block).ops.iter().rev() {
            let data = self.func.op(id);
            if is_shape_op(&data.op) {
                self.update(id, &live);
                continue;
            }
            // The result of an MMA or loop replaces its accumulator.
            if is_dot(&data.op) || is_loop(&data.op) || !is_sync_point(&data.op) {
                self.update(id, &live);
            }
            for v in &data.results {
                live.remove(v);
            }
            if is_sync_point(&data.op) {
                self.update(id, &live);
            }
            let inside = self.live_into_regions(id, &live);
            live.extend(inside);
            live.extend(data.operands.iter().map(|&v| source(self.func, v)));
        }
        if let Some(owner) = owner
            && !self.func.block(block).params.is_empty()
        {
            // Loop-carried values are held as a whole between iterations.
            self.update(owner, &live);
        }
        for v in &self.func.block(block).params {
            live.remove(v);
        }
        live
    }

    /// Values from outside that the regions of an op need.
    fn live_into_regions(&mut self, id: OpId, after: &HashSet<Value>) -> HashSet<Value> {
        let func = self.func;
        let data = func.op(id);
        let mut through = after.clone();
        if is_loop(&data.op) {
            // The next iteration needs them again.
            through.extend(self.needed_inside(id));
        }
        data.regions.iter().flat_map(|&region| self.live_before(region, Some(id), &through)).collect()
    }

    /// Values that the regions of an op use and do not define.
    fn needed_inside(&self, id: OpId) -> HashSet<Value> {
        let func = self.func;
        let (mut used, mut defined) = (HashSet::new(), HashSet::new());
        for &region in &func.op(id).regions {
            defined.extend(func.block(region).params.iter().copied());
            for op in func.walk_from(region) {
                let data = func.op(op);
                used.extend(data.operands.iter().map(|&v| source(func, v)));
                defined.extend(data.results.iter().copied());
                defined.extend(data.regions.iter().flat_map(|&r| func.block(r).params.iter().copied()));
            }
        }
        used.difference(&defined).copied().collect()
    }

    fn update(&mut self, id: OpId, live: &HashSet<Value>) {
        let func = self.func;
        let weight = |v: &Value| {
            *self.weights.entry(*v).or_insert_with(|| {
                let is_float = func.ty(*v).elem().and_then(|e| e.num()).is_some_and(DType::is_float);
                if is_float { tile_registers(func, *v) } else { 0 }
            })
        };
        let registers = live.iter().map(weight).sum();
        let known = self.live.entry(id).or_default();
        *known = (*known).max(registers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    #[test]
    fn the_profile_counts_float_tiles_until_their_last_use() {
        let layout = |register: u32, lane: u32| {
            let lanes: Vec<String> = (0..5).map(|bit| format!("[{}]", lane << bit)).collect();
            format!("linear<reg=[[{register}]], lane=[{}], warp=[], block=[], shape=[64]>", lanes.join(","))
        };
        let text = format!(
            "#l0 = {}\n#l1 = {}\nkernel @k(%p: ptr<f32>) {{
  %0 = splat %p : tensor<64xptr<f32>, #l0>
  %1 = load %0 {{eviction = normal}} : tensor<64xf32, #l0>
  %2 = load %0 {{eviction = normal}} : tensor<64xf32, #l0>
  %3 = convert_layout %1 : tensor<64xf32, #l1>
  store %0, %2 {{eviction = normal}}
  store %0, %3 {{eviction = normal}}
  return
}}
",
            layout(1, 2),
            layout(32, 1)
        );
        let func = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let points = profile(&func);
        // Two registers per tile. A conversion needs its operand only until the result replaces it.
        assert_eq!(points.iter().map(|point| point.live).collect::<Vec<_>>(), [0, 2, 4, 2, 2, 0, 0]);
        let sync: Vec<usize> = (0..points.len()).filter(|&i| points[i].is_sync_point).collect();
        assert_eq!(sync, [3]);
        assert_eq!(max_live(&func), 2);
    }
}
