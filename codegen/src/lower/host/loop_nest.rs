//! Loop nests over the elements of a tile.
//!
//! A nest iterates over an *iteration space* (usually the shape of the tile that a root computes). One dimension can be
//! the vector dimension: its loop steps by the vector width, and values that depend on it are vectors. Each instruction
//! is emitted to the section of the innermost loop that it depends on, so that values that are invariant along a row
//! are outside of the row's loop from the start. The evaluator emits only straight-line code.

use super::arena::BufferId;
use super::writer::{Section, Writer};
use crate::ir::{Elem, Value};
use std::collections::HashMap;

/// For each dimension of a tile, the dimension of the iteration space that indexes it; `None` for element 0 (dimensions
/// of extent 1, and broadcast ones).
pub type DimMap = Vec<Option<usize>>;

/// A tile in the arena, addressed by strides in elements.
#[derive(Clone, Debug)]
pub struct TileRef {
    pub buffer: BufferId,
    pub elem: Elem,
    /// The offset of the tile's first element from the start of the buffer, in elements.
    pub offset: usize,
    pub strides: Vec<usize>,
}

/// Row-major strides.
pub fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (0..shape.len().saturating_sub(1)).rev() {
        strides[d] = strides[d + 1] * shape[d + 1];
    }
    strides
}

/// The map of a tile with the shape of the iteration space.
pub fn identity(shape: &[usize]) -> DimMap {
    shape.iter().enumerate().map(|(d, &n)| (n > 1).then_some(d)).collect()
}

/// A value at the current point of a nest.
#[derive(Clone, Debug)]
pub struct Evaluated {
    pub name: String,
    /// 1 for values that are equal along the vector dimension.
    pub lanes: usize,
    /// The innermost loop that the value depends on; 0 is outside of all loops.
    pub level: usize,
}

/// The loops to emit.
#[derive(Clone, Debug)]
pub struct LoopNestSpec {
    pub shape: Vec<usize>,
    /// Dimensions from the outermost loop to the innermost.
    pub order: Vec<usize>,
    /// The step of each dimension's loop.
    pub steps: Vec<usize>,
    pub vec_dim: Option<usize>,
    pub lanes: usize,
}

impl LoopNestSpec {
    /// Loops over `shape` in row-major order, except that the vector dimension is innermost.
    pub fn new(shape: &[usize], vec_dim: Option<usize>, lanes: usize) -> LoopNestSpec {
        let mut order: Vec<usize> = (0..shape.len()).filter(|&d| Some(d) != vec_dim).collect();
        order.extend(vec_dim);
        let mut steps = vec![1; shape.len()];
        if let Some(d) = vec_dim {
            steps[d] = lanes;
        }
        LoopNestSpec { shape: shape.to_vec(), order, steps, vec_dim, lanes }
    }
}

struct Loop {
    extent: usize,
    step: usize,
    index: String,
}

/// A nest under construction.
pub struct LoopNest {
    pub shape: Vec<usize>,
    /// The index of each dimension, an i64 operand; for the vector dimension that of lane 0.
    pub index: Vec<String>,
    /// The loop that each index belongs to; 0 is outside of all loops.
    pub level: Vec<usize>,
    pub vec_dim: Option<usize>,
    pub lanes: usize,
    /// Whether all views are in bounds and contiguous along the vector dimension.
    pub in_bounds: bool,
    /// Whether to evaluate only lane 0 of the vector dimension.
    pub lane0: bool,
    loops: Vec<Loop>,
    before: Vec<Section>,
    after: Vec<Section>,
    cache: HashMap<(Value, DimMap, bool), Evaluated>,
    emitted: HashMap<(usize, String), String>,
    /// Values that get a buffer as a side effect of their evaluation here.
    pub side_buffers: HashMap<Value, TileRef>,
}

impl LoopNest {
    pub fn open(w: &mut Writer, spec: &LoopNestSpec, in_bounds: bool) -> LoopNest {
        let n = spec.shape.len();
        let mut nest = LoopNest {
            shape: spec.shape.clone(),
            index: vec!["0".to_string(); n],
            level: vec![0; n],
            vec_dim: spec.vec_dim,
            lanes: spec.lanes,
            in_bounds,
            lane0: false,
            loops: Vec::new(),
            before: vec![w.open()],
            after: vec![w.open()],
            cache: HashMap::new(),
            emitted: HashMap::new(),
            side_buffers: HashMap::new(),
        };
        for &d in &spec.order {
            if spec.shape[d] > spec.steps[d] {
                let index = w.fresh("i");
                nest.index[d] = index.clone();
                nest.loops.push(Loop { extent: spec.shape[d], step: spec.steps[d], index });
                nest.level[d] = nest.loops.len();
                nest.before.push(w.open());
                nest.after.push(w.open());
            }
        }
        nest
    }

    /// The number of loops, which is the level of the innermost one.
    pub fn depth(&self) -> usize {
        self.loops.len()
    }

    /// Selects the beginning of a loop's body (0: before all loops).
    pub fn select(&self, w: &mut Writer, level: usize) {
        w.select(self.before[level]);
    }

    /// Selects the end of a loop's body, after the loops inside of it.
    pub fn select_after(&self, w: &mut Writer, level: usize) {
        w.select(self.after[level]);
    }

    /// Emits an instruction at a level, once per text.
    pub fn inst(&mut self, w: &mut Writer, level: usize, text: String) -> String {
        if let Some(name) = self.emitted.get(&(level, text.clone())) {
            return name.clone();
        }
        self.select(w, level);
        let name = w.inst(&text);
        self.emitted.insert((level, text), name.clone());
        name
    }

    /// Whether a value with this map differs along the vector dimension.
    pub fn varies(&self, map: &DimMap) -> bool {
        self.lanes > 1 && !self.lane0 && self.vec_dim.is_some() && map.contains(&self.vec_dim)
    }

    /// The innermost loop that the map depends on.
    pub fn map_level(&self, map: &DimMap) -> usize {
        map.iter().flatten().map(|&d| self.level[d]).max().unwrap_or(0)
    }

    pub fn cached(&self, v: Value, map: &DimMap) -> Option<Evaluated> {
        self.cache.get(&(v, map.clone(), self.lane0)).cloned()
    }

    pub fn cache(&mut self, v: Value, map: &DimMap, ev: &Evaluated) {
        self.cache.insert((v, map.clone(), self.lane0), ev.clone());
    }

    /// Moves to another point of the iteration space: later evaluations use these indices, all of which belong to the
    /// innermost loop.
    pub fn move_to(&mut self, index: Vec<String>) {
        let depth = self.depth();
        for (d, new) in index.into_iter().enumerate() {
            if self.index[d] != new {
                self.index[d] = new;
                self.level[d] = depth;
            }
        }
        self.cache.clear();
    }

    /// Joins the sections into text and appends it to `target`, which stays selected.
    pub fn close(self, w: &mut Writer, target: Section) {
        let mut inner = String::new();
        for level in (0..self.before.len()).rev() {
            let (before, after) = (w.take(self.before[level]), w.take(self.after[level]));
            let body = format!("{before}{inner}{after}");
            inner = if level == 0 { body } else { wrap(w, &self.loops[level - 1], &body) };
        }
        w.select(target);
        w.splice(&inner);
    }
}

/// Wraps `body` in a loop that runs at least once.
fn wrap(w: &mut Writer, l: &Loop, body: &str) -> String {
    let label = w.fresh_label("loop");
    let Loop { extent, step, index } = l;
    format!(
        "  br label %{label}.pre\n{label}.pre:\n  br label %{label}\n{label}:\n  \
         {index} = phi i64 [ 0, %{label}.pre ], [ {index}.next, %{label}.latch ]\n{body}  \
         br label %{label}.latch\n{label}.latch:\n  \
         {index}.next = add nuw nsw i64 {index}, {step}\n  \
         {index}.more = icmp ult i64 {index}.next, {extent}\n  \
         br i1 {index}.more, label %{label}, label %{label}.exit\n{label}.exit:\n"
    )
}
