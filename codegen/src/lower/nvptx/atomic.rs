//! Atomic operations on global memory.

use super::emit::Val;
use super::memory::BlockAddress;
use super::{Lowering, Result, llvm_type};
use crate::analysis::access_layout::view_vector_width;
use crate::ir::{AtomicOp, BinaryOp, DType, Elem, Op, OpId, Value};
use crate::layout::{Dim, LinearLayout};
use crate::target::GpuArch;

impl Lowering<'_> {
    pub(super) fn atomic_view(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::AtomicView { op, boundary } = &data.op else { panic!("internal compiler error: not an atomic") };
        if let Some(bulk_reduction) = self.plan.bulk_reduction(id) {
            self.emit_bulk_reduce(id, bulk_reduction);
            return Ok(());
        }
        let layout = self.tile_layout(data.operands[1]);
        let values = self.regs(data.operands[1]);
        let mut block = self.block_address(data.operands[0], layout, boundary);
        let (owner, free) = self.owner_of(data.operands[1]);
        let vector = self.reduction_vector(data.operands[0], *op, &block, layout);
        for r in (0..layout.num_registers()).step_by(vector) {
            if r & free != 0 {
                continue;
            }
            let address = self.address(&block, r);
            let inside = self.inside(&mut block, r);
            let predicate = self.and_predicates(owner.clone(), inside);
            if vector > 1 {
                self.reduce_vector(&address, &values[r..r + vector], predicate);
            } else {
                self.atomic(*op, block.elem, &address, &values[r], predicate)?;
            }
        }
        Ok(())
    }

    /// The number of consecutive elements that one instruction adds to memory: Hopper has vector reductions (`red.v2`,
    /// `red.v4`) of f32, without a result.
    fn reduction_vector(&self, view: Value, op: AtomicOp, block: &BlockAddress, layout: &LinearLayout) -> usize {
        if self.arch != GpuArch::Sm90a || op != AtomicOp::Add || block.elem != DType::F32 {
            return 1;
        }
        let vector = view_vector_width(self.func, &self.axis, view, &block.boundary) as usize;
        vector.min(layout.contiguous_run(block.parts.order[0])).min(4)
    }

    /// Adds consecutive f32 to memory.
    fn reduce_vector(&mut self, address: &str, values: &[Val], predicate: Option<Val>) {
        let n = values.len();
        let registers: Vec<String> = (1..=n).map(|i| format!("${i}")).collect();
        let list: Vec<String> = values.iter().map(|v| format!("float {v}")).collect();
        let (guard, more, arg) = match &predicate {
            Some(p) => (format!("@${} ", n + 1), ",b", format!(", i1 {p}")),
            None => (String::new(), "", String::new()),
        };
        self.e.void(format!(
            "call void asm sideeffect \"{guard}red.global.gpu.relaxed.add.v{n}.f32 [$0], {{{}}};\", \"l{}{more},~{{memory}}\"(ptr addrspace(1) {address}, {}{arg})",
            registers.join(", "),
            ",f".repeat(n),
            list.join(", ")
        ));
    }

    pub(super) fn atomic_rmw(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::AtomicRmw { op } = data.op else { panic!("internal compiler error: not an atomic") };
        let elem = self.dtype(data.operands[1]);
        let pointers = self.regs(data.operands[0]);
        let values = self.regs(data.operands[1]);
        let mask = data.operands.get(2).map(|&v| self.regs(v));
        let (owner, free) = self.owner_of(data.operands[0]);
        let mut olds: Vec<Val> = Vec::new();
        for r in 0..pointers.len() {
            if r & free != 0 {
                olds.push(olds[r & !free].clone());
                continue;
            }
            let predicate = self.and_predicates(owner.clone(), mask.as_ref().map(|m| m[r].clone()));
            olds.push(self.atomic(op, elem, &pointers[r], &values[r], predicate)?);
        }
        self.broadcast_old_values(data.results[0], olds)
    }

    pub(super) fn atomic_cas(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let elem = self.dtype(data.results[0]);
        if elem.bits() < 32 {
            return self.unsupported(
                format!("atomic_cas on {elem} is not supported on the GPU"),
                Some("use a 32-bit or 64-bit type"),
            );
        }
        let operands: Vec<_> = data.operands.iter().map(|&v| self.regs(v)).collect();
        let (owner, free) = self.owner_of(data.operands[0]);
        let ty = llvm_type(Elem::Num(elem));
        let int = format!("i{}", elem.bits());
        let mut olds: Vec<Val> = Vec::new();
        for r in 0..operands[0].len() {
            if r & free != 0 {
                olds.push(olds[r & !free].clone());
                continue;
            }
            let bits = [1, 2].map(|i| self.pack_elements(&[operands[i][r].clone()], ty, &int));
            let p = &operands[0][r];
            let old = self.guarded(owner.clone(), &int, |this| {
                let pair = this.e.inst(format!(
                    "cmpxchg ptr addrspace(1) {p}, {int} {}, {int} {} syncscope(\"device\") acq_rel acquire",
                    bits[0], bits[1]
                ));
                this.e.inst(format!("extractvalue {{ {int}, i1 }} {pair}, 0"))
            });
            olds.extend(self.unpack_elements(&old, &int, ty, 1));
        }
        self.broadcast_old_values(data.results[0], olds)
    }

    /// Runs `f` where the predicate holds; the result is zero elsewhere.
    fn guarded(&mut self, predicate: Option<Val>, ty: &str, f: impl FnOnce(&mut Self) -> Val) -> Val {
        let Some(p) = predicate else { return f(self) };
        let (then, join) = (self.e.new_label("act"), self.e.new_label("acted"));
        let from = self.e.label();
        self.e.branch_if(&p, &then, &join);
        self.e.start_block(&then);
        let v = f(self);
        let end = self.e.label();
        self.e.branch(&join);
        self.e.start_block(&join);
        self.e.inst(format!("phi {ty} [ {v}, %{end} ], [ zeroinitializer, %{from} ]"))
    }

    /// Emits `old = *p; *p = op(old, value)` for one element where the predicate holds. Returns `old`.
    fn atomic(&mut self, op: AtomicOp, elem: DType, p: &str, value: &str, predicate: Option<Val>) -> Result<Val> {
        let ty = llvm_type(Elem::Num(elem));
        if elem == DType::Bool || matches!(elem, DType::F8E4M3 | DType::F8E5M2) {
            return self
                .unsupported(format!("atomics on {elem} are not supported on the GPU"), Some("use a wider type"));
        }
        let float = elem.is_float();
        let signed = elem.is_signed_int();
        let native = match (op, float) {
            (AtomicOp::Add, true) => Some("fadd"),
            (AtomicOp::Add, false) => Some("add"),
            (AtomicOp::Min, false) => Some(if signed { "min" } else { "umin" }),
            (AtomicOp::Max, false) => Some(if signed { "max" } else { "umax" }),
            (AtomicOp::Min | AtomicOp::Max, true) => None,
            (AtomicOp::And, false) => Some("and"),
            (AtomicOp::Or, false) => Some("or"),
            (AtomicOp::Xor, false) => Some("xor"),
            (AtomicOp::Xchg, _) => Some("xchg"),
            (AtomicOp::And | AtomicOp::Or | AtomicOp::Xor, true) => {
                return self.unsupported(
                    format!("atomic {} on {elem} is not supported", op.name()),
                    Some("use an integer type"),
                );
            }
        };
        if let (AtomicOp::Add, DType::F32 | DType::F64 | DType::F16) = (op, elem) {
            // Emits the instruction directly: LLVM would emit a compare-and-swap loop because of denormals.
            return Ok(self.atomic_add_asm(elem, p, value, predicate));
        }
        Ok(self.guarded(predicate, ty, |this| match native {
            Some(name) => this
                .e
                .inst(format!("atomicrmw {name} ptr addrspace(1) {p}, {ty} {value} syncscope(\"device\") monotonic")),
            None => this.atomic_loop(op, elem, p, value),
        }))
    }

    fn atomic_add_asm(&mut self, elem: DType, p: &str, value: &str, predicate: Option<Val>) -> Val {
        let (suffix, constraint, ty, zero) = match elem {
            DType::F64 => ("f64", "d", "double", "mov.f64 $0, 0d0000000000000000;"),
            DType::F16 => ("noftz.f16", "h", "i16", "mov.b16 $0, 0;"),
            _ => ("f32", "f", "float", "mov.f32 $0, 0f00000000;"),
        };
        let value = if elem == DType::F16 { self.e.inst(format!("bitcast half {value} to i16")) } else { value.into() };
        // Where the predicate is false, the old value is zero, written before the operands are read.
        let (before, output, more, arg) = match &predicate {
            Some(p) => (format!("{zero} @$3 "), "=&", ",b", format!(", i1 {p}")),
            None => (String::new(), "=", "", String::new()),
        };
        let old = self.e.inst(format!(
            "call {ty} asm sideeffect \"{before}atom.global.gpu.relaxed.add.{suffix} $0, [$1], $2;\", \"{output}{constraint},l,{constraint}{more},~{{memory}}\"(ptr addrspace(1) {p}, {ty} {value}{arg})"
        ));
        if elem == DType::F16 { self.e.inst(format!("bitcast i16 {old} to half")) } else { old }
    }

    /// Repeats compare-and-swap until it succeeds.
    fn atomic_loop(&mut self, op: AtomicOp, elem: DType, p: &str, value: &str) -> Val {
        let ty = llvm_type(Elem::Num(elem));
        let int = format!("i{}", elem.bits());
        // Atomic, because other programs may access the same element.
        let first = self.e.inst(format!(
            "load atomic {ty}, ptr addrspace(1) {p} syncscope(\"device\") monotonic, align {}",
            elem.bytes()
        ));
        let from = self.e.label();
        let (head, done) = (self.e.new_label("cas"), self.e.new_label("swapped"));
        self.e.branch(&head);
        self.e.start_block(&head);
        let (old, phi) = self.e.open_phi(ty, &first, &from);
        let binary = if op == AtomicOp::Min { BinaryOp::Min } else { BinaryOp::Max };
        let new = self.binary(binary, elem, &old, value);
        let old_bits = self.e.inst(format!("bitcast {ty} {old} to {int}"));
        let new_bits = self.e.inst(format!("bitcast {ty} {new} to {int}"));
        let pair = self.e.inst(format!(
            "cmpxchg ptr addrspace(1) {p}, {int} {old_bits}, {int} {new_bits} syncscope(\"device\") monotonic monotonic"
        ));
        let seen = self.e.inst(format!("extractvalue {{ {int}, i1 }} {pair}, 0"));
        let swapped = self.e.inst(format!("extractvalue {{ {int}, i1 }} {pair}, 1"));
        let seen = self.e.inst(format!("bitcast {int} {seen} to {ty}"));
        let end = self.e.label();
        self.e.close_phi(phi, &seen, &end);
        self.e.branch_if(&swapped, &done, &head);
        self.e.start_block(&done);
        old
    }

    /// Sets the results of an atomic. Only the thread that performed it has them; the others get them through shared
    /// memory.
    fn broadcast_old_values(&mut self, result: Value, olds: Vec<Val>) -> Result<()> {
        let values = match self.layout(result) {
            Some(layout) => {
                let copies = layout.free_mask(Dim::Lane) != 0 || layout.free_mask(Dim::Warp) != 0;
                if copies && !self.func.uses(result).is_empty() {
                    self.broadcast_from_owners(result, layout, olds)
                } else {
                    olds
                }
            }
            None if !self.func.uses(result).is_empty() => self.broadcast_scalar(result, olds),
            None => olds,
        };
        self.set(result, values);
        Ok(())
    }
}
