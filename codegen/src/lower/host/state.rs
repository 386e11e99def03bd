//! The state of the lowering of a kernel: the location of every value, and its number of remaining uses.

use super::access::ViewRef;
use super::arena::Arena;
use super::loop_nest::{TileRef, row_major};
use super::plan::{FusionPlan, is_fused, map_source};
use super::repr::stored_bytes;
use super::writer::Writer;
use crate::ir::{BlockId, Elem, Func, Loc, Op, OpId, Value};
use crate::lower::Unsupported;
use crate::target::{CompileOptions, HostCpu};
use std::collections::{BTreeSet, HashMap};

/// The vector units of the CPU, which determine the shape of the loops.
#[derive(Clone, Copy, Debug)]
pub struct VectorUnits {
    /// f32 lanes per vector register.
    pub lanes: usize,
    /// The number of vector registers.
    pub registers: usize,
    /// Whether the CPU has masked loads, stores and gathers of every element size (AVX-512). Otherwise masked accesses
    /// are emitted lane by lane: LLVM 22 loses part of the mask when it splits masked loads for AVX2.
    pub masks: bool,
}

impl VectorUnits {
    pub fn of(cpu: &HostCpu) -> VectorUnits {
        let has = |feature: &str| cpu.features.split(',').any(|f| f.trim() == feature);
        if has("+avx512f") && has("+avx512vl") && has("+avx512bw") {
            VectorUnits { lanes: 16, registers: 32, masks: true }
        } else if has("+avx2") {
            VectorUnits { lanes: 8, registers: 16, masks: false }
        } else if cpu.triple.starts_with("aarch64") {
            VectorUnits { lanes: 4, registers: 32, masks: false }
        } else {
            VectorUnits { lanes: 4, registers: 16, masks: false }
        }
    }
}

pub type Result<T> = std::result::Result<T, Unsupported>;

/// The lowering of one kernel.
pub struct Lowering<'f> {
    pub func: &'f Func,
    pub options: &'f CompileOptions,
    pub vectors: VectorUnits,
    pub w: Writer,
    pub plan: FusionPlan,
    pub arena: Arena,
    /// The `alloca`s of the entry block.
    pub allocas: String,
    /// The block whose ops are being lowered.
    pub block: BlockId,
    /// The source location of the op being lowered.
    pub loc: Loc,
    pub scalars: HashMap<Value, String>,
    pub views: HashMap<Value, ViewRef>,
    /// Tiles with a buffer; other tiles are evaluated by their consumers.
    pub tiles: HashMap<Value, TileRef>,
    /// The number of uses of each value that are not lowered yet.
    pub uses: Vec<u32>,
    /// Tiles loaded from memory that may not have a buffer yet, in order.
    pub pending_loads: Vec<Value>,
    /// The destination of a dot that needs no copy: the buffer of a loop-carried value.
    pub destinations: HashMap<Value, TileRef>,
}

impl<'f> Lowering<'f> {
    pub fn new(func: &'f Func, cpu: &HostCpu, options: &'f CompileOptions) -> Lowering<'f> {
        let vectors = VectorUnits::of(cpu);
        let mut w = Writer::new();
        w.has_scalef = vectors.masks;
        Lowering {
            func,
            options,
            vectors,
            w,
            plan: FusionPlan::new(func),
            arena: Arena::default(),
            allocas: String::new(),
            block: func.body,
            loc: func.loc.clone(),
            scalars: HashMap::new(),
            views: HashMap::new(),
            tiles: HashMap::new(),
            uses: (0..func.num_values() as u32).map(|v| func.uses(Value(v)).len() as u32).collect(),
            pending_loads: Vec::new(),
            destinations: HashMap::new(),
        }
    }

    pub fn unsupported<T>(&self, message: impl Into<String>, help: Option<&str>) -> Result<T> {
        Err(Unsupported { loc: self.loc.clone(), message: message.into(), help: help.map(str::to_string) })
    }

    pub fn elem(&self, v: Value) -> Elem {
        self.func.ty(v).elem().unwrap_or_else(|| panic!("internal compiler error: not a number; please report this"))
    }

    pub fn shape(&self, v: Value) -> &'f [usize] {
        self.func.ty(v).shape()
    }

    /// The LLVM operand of a scalar.
    pub fn scalar(&self, v: Value) -> String {
        self.scalars
            .get(&v)
            .cloned()
            .unwrap_or_else(|| panic!("internal compiler error: scalar %{} has no operand; please report this", v.0))
    }

    pub fn view(&self, v: Value) -> ViewRef {
        self.views
            .get(&v)
            .cloned()
            .unwrap_or_else(|| panic!("internal compiler error: view %{} is not known; please report this", v.0))
    }

    /// Emits an `alloca` for a scalar or vector that changes in a loop; LLVM promotes it to a register.
    pub fn alloca(&mut self, ty: &str) -> String {
        let name = self.w.fresh("slot");
        self.allocas.push_str(&format!("  {name} = alloca {ty}\n"));
        name
    }

    /// Allocates a row-major buffer.
    pub fn new_tile(&mut self, shape: &[usize], elem: Elem) -> TileRef {
        let count: usize = shape.iter().product();
        let buffer = self.arena.allocate((count * stored_bytes(elem)) as u64);
        TileRef { buffer, elem, offset: 0, strides: row_major(shape) }
    }

    /// The fused op that computes a tile without a buffer.
    pub fn fused_op(&self, v: Value) -> Option<OpId> {
        if self.tiles.contains_key(&v) {
            return None;
        }
        self.func.def_op(v).filter(|&id| is_fused(self.func, id))
    }

    /// Assigns a buffer to a value. A fused value then no longer depends on its operands.
    pub fn set_tile(&mut self, v: Value, tile: TileRef) {
        let operands = match self.fused_op(v) {
            Some(id) => self.func.op(id).operands.clone(),
            None => Vec::new(),
        };
        let needed = self.uses[v.0 as usize] > 0;
        if !needed {
            self.arena.release(tile.buffer);
        }
        self.tiles.insert(v, tile);
        if needed {
            for operand in operands {
                self.used(operand);
            }
        }
    }

    /// Counts one use of a value as lowered. Its buffer is released after the last one.
    pub fn used(&mut self, v: Value) {
        let count = &mut self.uses[v.0 as usize];
        assert!(*count > 0, "internal compiler error: %{} is used more often than counted; please report this", v.0);
        *count -= 1;
        if *count == 0 {
            self.dead(v);
        }
    }

    /// Releases a value without remaining uses.
    pub fn dead(&mut self, v: Value) {
        if let Some(tile) = self.tiles.get(&v) {
            self.arena.release(tile.buffer);
        } else if let Some(id) = self.fused_op(v) {
            for operand in self.func.op(id).operands.clone() {
                self.used(operand);
            }
        }
    }

    /// The values from outside that the regions of an op use, in order.
    pub fn captured(&self, id: OpId) -> Vec<Value> {
        let mut inside = BTreeSet::new();
        let mut used = BTreeSet::new();
        for &region in &self.func.op(id).regions {
            inside.extend(&self.func.block(region).params);
            for op in self.func.walk_from(region) {
                let data = self.func.op(op);
                inside.extend(&data.results);
                used.extend(&data.operands);
                for &inner in &data.regions {
                    inside.extend(&self.func.block(inner).params);
                }
            }
        }
        used.difference(&inside).copied().collect()
    }

    /// Computes a fused tile that a region uses from outside into a buffer, unless it is cheap to recompute inside.
    pub fn materialize_captured(&mut self, v: Value) -> Result<()> {
        let source = map_source(self.func, v);
        if self.fused_op(source).is_none() {
            return Ok(());
        }
        if self.plan.is_cheap(self.func, source) {
            return Ok(());
        }
        self.materialize(source)
    }

    /// Materializes the pending loads from memory that an op is about to change. `writes` is the argument that the
    /// written memory belongs to (`None`: unknown), `keep` a load that the op itself may still perform.
    pub fn materialize_clobbered_loads(&mut self, writes: Option<Value>, keep: Option<Value>) -> Result<()> {
        let pending = std::mem::take(&mut self.pending_loads);
        for load in pending {
            if self.fused_op(load).is_none() || self.uses[load.0 as usize] == 0 {
                continue;
            }
            let id = self.func.def_op(load).expect("loads are ops");
            let reads = self.underlying_argument(self.func.op(id).operands[0]);
            let disjoint = matches!((reads, writes), (Some(a), Some(b)) if a != b);
            if disjoint || keep == Some(load) {
                self.pending_loads.push(load);
            } else {
                self.materialize(load)?;
            }
        }
        Ok(())
    }

    /// The pointer argument from which an address or view is derived; `None` if unknown. Different arguments are
    /// disjoint memory: the launch rejects buffers that overlap.
    pub fn underlying_argument(&self, v: Value) -> Option<Value> {
        self.trace_underlying_argument(v, &mut Vec::new())?
    }

    /// Like [`Self::underlying_argument`]; `Some(None)` is a loop-carried value that depends only on itself.
    fn trace_underlying_argument(&self, v: Value, visiting: &mut Vec<Value>) -> Option<Option<Value>> {
        if visiting.contains(&v) {
            return Some(None);
        }
        match self.func.value(v).def {
            crate::ir::Def::Param(block, _) if block == self.func.body => Some(Some(v)),
            crate::ir::Def::Param(block, index) => {
                let owner = self.func.owner(block)?;
                let data = self.func.op(owner);
                let Op::For { .. } = data.op else { return None };
                let init = *data.operands.get(index.checked_sub(1)? + 3)?;
                let last = *self.func.block(block).ops.last()?;
                let next = *self.func.op(last).operands.get(index - 1)?;
                visiting.push(v);
                let from_init = self.trace_underlying_argument(init, visiting)?;
                let from_next = self.trace_underlying_argument(next, visiting)?;
                visiting.pop();
                match (from_init, from_next) {
                    (a, None) => Some(a),
                    (a, b) if a == b => Some(a),
                    _ => None,
                }
            }
            crate::ir::Def::Result(id, _) => match self.func.op(id).op {
                Op::PtrAdd
                | Op::Splat
                | Op::Broadcast
                | Op::ExpandDims { .. }
                | Op::Trans { .. }
                | Op::Reshape
                | Op::Hint { .. }
                | Op::Advance
                | Op::MakeView { .. } => self.trace_underlying_argument(self.func.op(id).operands[0], visiting),
                _ => None,
            },
        }
    }
}
