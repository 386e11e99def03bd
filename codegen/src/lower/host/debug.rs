//! `device_print` and `device_assert`.

use super::elementwise as ew;
use super::loop_nest::{Evaluated, LoopNestSpec, identity};
use super::repr::reg;
use super::state::{Lowering, Result};
use super::writer::{splat, vector};
use crate::ir::{DType, Elem, OpId};

impl Lowering<'_> {
    /// Passes the elements of each operand, as f64, to the print hook.
    pub fn print(&mut self, id: OpId, prefix: &str) -> Result<()> {
        let operands = self.func.op(id).operands.clone();
        let text = self.w.string(prefix);
        let hook = self.w.inst("load ptr, ptr %hooks");
        if operands.is_empty() {
            self.w.line(format!("call void {hook}(ptr {text}, ptr %arena, i64 0, ptr %pid)"));
        }
        for v in operands {
            let shape = self.shape(v).to_vec();
            let map = identity(&shape);
            let reads = [(v, map.clone())];
            self.materialize_operands(&reads, &shape)?;
            let tile = self.new_tile(&shape, Elem::Num(DType::F64));
            let elem = self.elem(v);
            let spec = LoopNestSpec::new(&shape, None, 1);
            self.loop_nest(&spec, &reads, &[], |l, nest| {
                let ev = l.eval(nest, v, &map);
                nest.select(&mut l.w, nest.depth());
                let name = match elem {
                    Elem::Num(d) => ew::cast(&mut l.w, d, DType::F64, 1, &ev.name),
                    Elem::Ptr(_) => {
                        let bits = l.w.inst(format!("ptrtoint ptr {} to i64", ev.name));
                        ew::cast(&mut l.w, DType::U64, DType::F64, 1, &bits)
                    }
                };
                let level = nest.depth();
                l.write_tile(nest, &tile, &map, &Evaluated { name, lanes: 1, level });
                Ok(())
            })?;
            let offset = self.arena.offset(tile.buffer);
            let values = self.w.inst(format!("getelementptr i8, ptr %arena, i64 {offset}"));
            let count: usize = shape.iter().product();
            self.w.line(format!("call void {hook}(ptr {text}, ptr {values}, i64 {count}, ptr %pid)"));
            self.arena.release(tile.buffer);
        }
        Ok(())
    }

    /// Calls the assertion hook and ends the program instance, unless every element of the operand is true.
    pub fn assert(&mut self, id: OpId, message: &str) -> Result<()> {
        let v = self.func.op(id).operands[0];
        let shape = self.shape(v).to_vec();
        let map = identity(&shape);
        let reads = [(v, map.clone())];
        self.materialize_operands(&reads, &shape)?;
        let (vec_dim, lanes) = self.vector_dim(&shape, &reads, &[]);
        let ty = vector("i1", lanes);
        let slot = self.alloca(&ty);
        self.w.line(format!("store {ty} {}, ptr {slot}", splat("i1", lanes, "true")));
        let spec = LoopNestSpec::new(&shape, vec_dim, lanes);
        self.loop_nest(&spec, &reads, &[], |l, nest| {
            let ev = l.eval(nest, v, &map);
            let x = l.widen(nest, &ev, reg(Elem::Num(DType::Bool)), lanes);
            nest.select(&mut l.w, nest.depth());
            let all = l.w.inst(format!("load {ty}, ptr {slot}"));
            let all = l.w.inst(format!("and {ty} {all}, {x}"));
            l.w.line(format!("store {ty} {all}, ptr {slot}"));
            Ok(())
        })?;
        let all = self.w.inst(format!("load {ty}, ptr {slot}"));
        let holds = super::reduce::combine_lanes(&mut self.w, crate::ir::BinaryOp::And, DType::Bool, lanes, &all);
        let (failed, passed) = (self.w.fresh_label("failed"), self.w.fresh_label("passed"));
        self.w.branch_if(&holds, &passed, &failed);
        self.w.label(&failed);
        let text = self.w.string(&format!("{}: assertion failed: {message}", self.loc));
        let entry = self.w.inst("getelementptr ptr, ptr %hooks, i64 1");
        let hook = self.w.inst(format!("load ptr, ptr {entry}"));
        self.w.line(format!("call void {hook}(ptr {text}, ptr %pid)"));
        self.w.line("ret i32 1");
        self.w.label(&passed);
        Ok(())
    }
}
