//! Lowers scans.
//!
//! Where the W lanes of a vector are consecutive along the scanned dimension, they are scanned in log₂ W steps (W. D.
//! Hillis and G. L. Steele, "Data parallel algorithms", 1986), then combined with the total of all preceding vectors.
//! Where the lanes are along another dimension, each is a separate scan.

use super::elementwise as ew;
use super::loop_nest::{DimMap, Evaluated, LoopNestSpec, identity};
use super::repr::reg;
use super::state::{Lowering, Result};
use super::writer::vector;
use crate::ir::{BlockId, Elem, OpId, Value};

impl Lowering<'_> {
    pub fn scan(&mut self, id: OpId, axis: usize, reverse: bool) -> Result<()> {
        let data = self.func.op(id);
        let (operands, results, region) = (data.operands.clone(), data.results.clone(), data.regions[0]);
        let shape = self.shape(operands[0]).to_vec();
        let map = identity(&shape);
        let reads: Vec<(Value, DimMap)> = operands.iter().map(|&v| (v, map.clone())).collect();
        self.materialize_operands(&reads, &shape)?;
        let mut tiles = Vec::new();
        for &r in &results {
            tiles.push(self.new_tile(self.shape(r), self.elem(r)));
        }
        let (vec_dim, lanes) = self.vector_dim(&shape, &reads, &[]);
        let along = vec_dim == Some(axis);
        let mut spec = LoopNestSpec::new(&shape, vec_dim, lanes);
        spec.order.retain(|&k| k != axis);
        spec.order.push(axis);
        let elems: Vec<Elem> = operands.iter().map(|&v| self.elem(v)).collect();
        let slots = self.slots(&elems, lanes);
        let last = shape[axis] - spec.steps[axis];
        self.loop_nest(&spec, &reads, &[], |l, nest| {
            let depth = nest.depth();
            let first = l.is_first(nest, axis);
            if reverse && nest.level[axis] > 0 {
                nest.index[axis] = l.w.inst(format!("sub i64 {last}, {}", nest.index[axis]));
            }
            let mut names = l.eval_all(nest, &reads, lanes);
            if along {
                names = l.scan_lanes(region, &elems, lanes, reverse, names)?;
            }
            let combined = l.combine_with_slots(region, &elems, &slots, lanes, &first, &names)?;
            for (k, name) in combined.into_iter().enumerate() {
                let vty = vector(reg(elems[k]), lanes);
                let end = if reverse { 0 } else { lanes - 1 };
                let carry = if along { l.repeat_lane(&vty, lanes, &name, end) } else { name.clone() };
                l.w.line(format!("store {vty} {carry}, ptr {}", slots[k]));
                l.write_tile(nest, &tiles[k], &map, &Evaluated { name, lanes, level: depth });
            }
            Ok(())
        })?;
        for (r, tile) in results.into_iter().zip(tiles) {
            self.define(r, tile);
        }
        Ok(())
    }

    /// Combines each lane with all lanes before it; with `reverse`, with all lanes after it.
    fn scan_lanes(
        &mut self,
        region: BlockId,
        elems: &[Elem],
        lanes: usize,
        reverse: bool,
        mut values: Vec<String>,
    ) -> Result<Vec<String>> {
        let mut distance = 1;
        while distance < lanes {
            let source = |lane: usize| match reverse {
                false => lane.checked_sub(distance),
                true => Some(lane + distance).filter(|&s| s < lanes),
            };
            // Lanes without a source at that distance shuffle themselves, and keep their value.
            let shuffle: Vec<String> = (0..lanes).map(|i| format!("i32 {}", source(i).unwrap_or(i))).collect();
            let has: Vec<String> = (0..lanes).map(|i| format!("i1 {}", source(i).is_some())).collect();
            let mut arguments = Vec::new();
            for (elem, x) in elems.iter().zip(&values) {
                let vty = vector(reg(*elem), lanes);
                arguments.push(
                    self.w.inst(format!(
                        "shufflevector {vty} {x}, {vty} poison, <{lanes} x i32> <{}>",
                        shuffle.join(", ")
                    )),
                );
            }
            arguments.extend(values.iter().cloned());
            let combined = self.inline_region(region, lanes, &arguments)?;
            let mask = format!("<{}>", has.join(", "));
            for ((x, new), elem) in values.iter_mut().zip(&combined).zip(elems) {
                *x = ew::select(&mut self.w, *elem, lanes, &mask, new, x);
            }
            distance *= 2;
        }
        Ok(values)
    }

    /// Broadcasts one lane to all lanes.
    fn repeat_lane(&mut self, vty: &str, lanes: usize, x: &str, lane: usize) -> String {
        let items = vec![format!("i32 {lane}"); lanes].join(", ");
        self.w.inst(format!("shufflevector {vty} {x}, {vty} poison, <{lanes} x i32> <{items}>"))
    }
}
