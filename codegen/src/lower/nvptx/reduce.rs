//! Lowers reductions and scans: within a thread, then across lanes by shuffles, then across warps through shared
//! memory.

use super::emit::Val;
use super::{Lowering, Result};
use crate::analysis::scratch;
use crate::ir::{DType, Elem, Op, OpId, Type};
use crate::layout::{Dim, Index, LinearLayout};

/// One line of a scan: the elements along the scanned axis that the same lanes hold.
struct ScanLine {
    /// Registers of a lane, in the order of the scan.
    registers: Vec<usize>,
    /// Number of consecutive lanes that hold the line.
    lanes: u32,
    /// Whether the scan starts at the last lane.
    reverse: bool,
}

/// Results of one thread whose independent chains of operations hide the latency of each (4 cycles of an FMA on Hopper).
const INDEPENDENT: usize = 4;

impl Lowering<'_> {
    pub(super) fn reduce(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::Reduce { axis } = data.op else { panic!("internal compiler error: not a reduction") };
        let region = data.regions[0];
        let layout = self.tile_layout(data.operands[0]);
        let steps = layout.reduction(axis).expect("internal compiler error: a layout that cannot be reduced");
        let operands: Vec<_> = data.operands.iter().map(|&v| self.regs(v)).collect();
        let elems: Vec<Elem> = data.operands.iter().map(|&v| self.elem(v)).collect();
        let n = operands.len();
        // One entry per register of the result, with one value per operand.
        let mut partial: Vec<Vec<Val>> = Vec::new();
        for group in &steps.registers {
            let values = group.iter().map(|&r| (0..n).map(|i| operands[i][r].clone()).collect()).collect();
            partial.push(match steps.registers.len() >= INDEPENDENT {
                true => self.combine_in_sequence(region, values)?,
                false => self.combine_all(region, values)?,
            });
        }
        for &mask in &steps.lanes {
            for value in &mut partial {
                let other: Vec<Val> =
                    (0..n).map(|i| self.shuffle("bfly", &value[i], elems[i], &mask.to_string())).collect();
                *value = self.combine(region, value, &other)?;
            }
        }
        if !steps.warps.is_empty() {
            partial = self.reduce_warps(id, &steps.layout, &steps.warps, partial)?;
        }
        for (i, &result) in data.results.iter().enumerate() {
            let values: Vec<Val> = partial.iter().map(|v| v[i].clone()).collect();
            match self.func.ty(result) {
                Type::Scalar(_) => self.set(result, vec![values[0].clone()]),
                _ => {
                    let to = self.tile_layout(result);
                    let map = steps.layout.registers_of(to);
                    let map = map.expect("internal compiler error: a reduction's result in another layout");
                    self.set(result, map.iter().map(|&r| values[r].clone()).collect());
                }
            }
        }
        Ok(())
    }

    /// Combines the values one after the other: a sum of products then is a chain of fused multiply-adds.
    fn combine_in_sequence(&mut self, region: crate::ir::BlockId, values: Vec<Vec<Val>>) -> Result<Vec<Val>> {
        let mut values = values.into_iter();
        let first = values.next().expect("internal compiler error: a reduction of no elements");
        values.try_fold(first, |sum, value| self.combine(region, &sum, &value))
    }

    /// Combines all values in a balanced tree, which keeps the chain of dependent operations short.
    fn combine_all(&mut self, region: crate::ir::BlockId, mut values: Vec<Vec<Val>>) -> Result<Vec<Val>> {
        while values.len() > 1 {
            let mut next = Vec::new();
            for pair in values.chunks(2) {
                next.push(match pair {
                    [a, b] => self.combine(region, a, b)?,
                    rest => rest[0].clone(),
                });
            }
            values = next;
        }
        Ok(values.remove(0))
    }

    /// Applies the region to the accumulated values (in a scan: the preceding ones) and the next values.
    fn combine(&mut self, region: crate::ir::BlockId, a: &[Val], b: &[Val]) -> Result<Vec<Val>> {
        let args: Vec<Val> = a.iter().chain(b).cloned().collect();
        self.inline_region(region, &args)
    }

    /// Combines partial results across warps: each warp that contributes to a result writes its partial result to
    /// shared memory; after a barrier, every thread reads and combines all of them.
    fn reduce_warps(
        &mut self,
        id: OpId,
        layout: &LinearLayout,
        warps: &[u32],
        partial: Vec<Vec<Val>>,
    ) -> Result<Vec<Vec<Val>>> {
        let data = self.func.op(id);
        let region = data.regions[0];
        let parts = 1u32 << warps.len();
        let count = layout.num_elements() as u32;
        // The index of the warp among those that contribute to the same result.
        let mut images = vec![0; layout.bits(Dim::Warp)];
        for (i, mask) in warps.iter().enumerate() {
            assert!(mask.is_power_of_two(), "internal compiler error: warps mix the reduced axis with others");
            images[mask.trailing_zeros() as usize] = 1 << i;
        }
        let rank = self.threads.linear(&mut self.e, &[], &images);
        // One of the threads with the same partial result writes it.
        let apart: u32 = warps.iter().sum();
        let alike = [(Dim::Lane, layout.free_mask(Dim::Lane)), (Dim::Warp, layout.free_mask(Dim::Warp) & !apart)];
        let writer = self.threads.first_of(&mut self.e, alike);
        let order: Vec<usize> = (0..layout.rank()).rev().collect();
        let memory = LinearLayout::shared_row_major(layout.shape(), &order);
        let scratch = self.scratch(id);
        let mut columns: Vec<Vec<Vec<Val>>> = Vec::new();
        let elems: Vec<Elem> = data.operands.iter().map(|&v| self.elem(v)).collect();
        let dtypes: Vec<DType> = elems.iter().filter_map(|elem| elem.num()).collect();
        if dtypes.len() < elems.len() {
            let help = "reduce integer offsets instead, and add the base pointer to the result";
            return self.unsupported("reductions of pointers across warps are not supported", Some(help));
        }
        let (starts, _) = scratch::reduction_operands(parts * count, &dtypes);
        let mut reads = Vec::new();
        for (i, (&dtype, start)) in dtypes.iter().zip(starts).enumerate() {
            let (bytes, base) = (dtype.bytes() as u32, self.e.hoist(format!("add i32 {scratch}, {start}")));
            let values: Vec<Val> = partial.iter().map(|v| v[i].clone()).collect();
            let own = self.e.hoist(format!("mul i32 {rank}, {}", count * bytes));
            let own = self.e.hoist(format!("add i32 {own}, {base}"));
            let mut access = self.shared_access(layout, &memory, own, dtype);
            self.when(writer.clone(), |this| this.store_shared(&mut access, &values));
            reads.push((base, dtype, bytes));
        }
        self.barrier();
        for (base, dtype, bytes) in reads {
            let mut all = Vec::new();
            for part in 0..parts {
                let at = self.e.hoist(format!("add i32 {base}, {}", part * count * bytes));
                let mut access = self.shared_access(layout, &memory, at, dtype);
                all.push(self.load_shared(&mut access, layout.num_registers()));
            }
            columns.push(all);
        }
        let mut result = Vec::new();
        for r in 0..layout.num_registers() {
            let of_part = |part: usize| columns.iter().map(|c| c[part][r].clone()).collect();
            let values = (0..parts as usize).map(of_part).collect();
            result.push(self.combine_all(region, values)?);
        }
        Ok(result)
    }

    /// Lowers a scan. The layout (`scan_layout`) keeps each line in one warp: consecutive elements in registers, then
    /// in lanes.
    pub(super) fn scan(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::Scan { axis, reverse } = data.op else { panic!("internal compiler error: not a scan") };
        let region = data.regions[0];
        let layout = self.tile_layout(data.operands[0]);
        let operands: Vec<_> = data.operands.iter().map(|&v| self.regs(v)).collect();
        let elems: Vec<Elem> = data.operands.iter().map(|&v| self.elem(v)).collect();
        let lane_bits: Vec<usize> =
            (0..layout.bits(Dim::Lane)).filter(|&b| layout.bases(Dim::Lane)[b][axis] != 0).collect();
        let warp_bits: Vec<usize> =
            (0..layout.bits(Dim::Warp)).filter(|&b| layout.bases(Dim::Warp)[b][axis] != 0).collect();
        assert!(warp_bits.is_empty(), "internal compiler error: a scan across warps");
        let lanes = 1u32 << lane_bits.len();
        let mut values: Vec<Vec<Val>> =
            (0..layout.num_registers()).map(|r| operands.iter().map(|o| o[r].clone()).collect()).collect();
        for mut registers in lines(layout, axis) {
            if reverse {
                registers.reverse();
            }
            for pair in registers.windows(2) {
                let (left, right) = (values[pair[0]].clone(), values[pair[1]].clone());
                values[pair[1]] = self.combine(region, &left, &right)?;
            }
            if lanes > 1 {
                self.scan_lanes(region, &mut values, &ScanLine { registers, lanes, reverse }, &elems)?;
            }
        }
        for (i, &result) in data.results.iter().enumerate() {
            self.set(result, values.iter().map(|v| v[i].clone()).collect());
        }
        Ok(())
    }

    /// Combines the registers of each lane with the total of all lanes before it.
    fn scan_lanes(
        &mut self,
        region: crate::ir::BlockId,
        values: &mut [Vec<Val>],
        line: &ScanLine,
        elems: &[Elem],
    ) -> Result<()> {
        let ScanLine { ref registers, lanes, reverse } = *line;
        let last = *registers.last().expect("internal compiler error: an empty line");
        // Inclusive scan of the totals of the lanes.
        let mut total = values[last].clone();
        let lane = self.threads.lane.clone();
        let position = self.e.hoist(format!("and i32 {lane}, {}", lanes - 1));
        let mut distance = 1;
        while distance < lanes {
            let source = self.step_back(&lane, distance, reverse);
            let other = self.shuffle_from(&source, &total, elems);
            let sum = self.combine(region, &other, &total)?;
            let has = if reverse {
                self.e.hoist(format!("icmp ult i32 {position}, {}", lanes - distance))
            } else {
                self.e.hoist(format!("icmp uge i32 {position}, {distance}"))
            };
            total = self.choose(&has, &sum, &total, elems);
            distance *= 2;
        }
        values[last].clone_from(&total);
        if registers.len() == 1 {
            return Ok(());
        }
        // The total of the preceding lanes comes before the other registers of this lane.
        let source = self.step_back(&lane, 1, reverse);
        let before = self.shuffle_from(&source, &total, elems);
        let has = if reverse {
            self.e.hoist(format!("icmp ult i32 {position}, {}", lanes - 1))
        } else {
            self.e.hoist(format!("icmp uge i32 {position}, 1"))
        };
        for &r in registers.iter().filter(|r| **r != last) {
            let sum = self.combine(region, &before, &values[r].clone())?;
            values[r] = self.choose(&has, &sum, &values[r].clone(), elems);
        }
        Ok(())
    }

    /// The values of lane `source`.
    fn shuffle_from(&mut self, source: &str, values: &[Val], elems: &[Elem]) -> Vec<Val> {
        values.iter().zip(elems).map(|(v, &elem)| self.shuffle("idx", v, elem, source)).collect()
    }

    fn step_back(&mut self, lane: &str, distance: u32, reverse: bool) -> Val {
        let op = if reverse { "add" } else { "sub" };
        let at = self.e.hoist(format!("{op} i32 {lane}, {distance}"));
        self.e.hoist(format!("and i32 {at}, 31"))
    }

    fn choose(&mut self, condition: &str, a: &[Val], b: &[Val], elems: &[Elem]) -> Vec<Val> {
        (0..a.len())
            .map(|i| {
                let ty = super::llvm_type(elems[i]);
                self.e.inst(format!("select i1 {condition}, {ty} {}, {ty} {}", a[i], b[i]))
            })
            .collect()
    }
}

/// The registers on each line of a thread along the axis, in ascending order.
fn lines(layout: &LinearLayout, axis: usize) -> Vec<Vec<usize>> {
    // The other coordinates of a line, and its registers with their coordinate along the axis.
    type Line = (Vec<u32>, Vec<(u32, usize)>);
    let mut lines: Vec<Line> = Vec::new();
    for r in 0..layout.num_registers() {
        let mut key = layout.apply(Index::register(r as u32));
        let at = key.remove(axis);
        match lines.iter_mut().find(|(k, _)| *k == key) {
            Some((_, line)) => line.push((at, r)),
            None => lines.push((key, vec![(at, r)])),
        }
    }
    lines
        .into_iter()
        .map(|(_, mut line)| {
            line.sort();
            line.into_iter().map(|(_, r)| r).collect()
        })
        .collect()
}
