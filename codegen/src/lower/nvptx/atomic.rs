//! Atomic operations on global memory.

use super::emit::Val;
use super::memory::BlockAddress;
use super::{Lowering, Result, llvm_type};
use crate::analysis::access_layout::view_vector_width;
use crate::ir::{AtomicOp, BinaryOp, DType, Elem, MemScope, MemSem, Op, OpId, Value};
use crate::layout::{Dim, LinearLayout};

/// Memory order and scope of an atomic.
#[derive(Clone, Copy)]
struct Order {
    sem: MemSem,
    scope: MemScope,
}

impl Order {
    /// Relaxed, device scope.
    const RELAXED: Order = Order { sem: MemSem::Relaxed, scope: MemScope::Gpu };

    fn of(sem: Option<MemSem>, default: MemSem, scope: Option<MemScope>) -> Order {
        Order { sem: sem.unwrap_or(default), scope: scope.unwrap_or(MemScope::Gpu) }
    }

    fn is_default(self) -> bool {
        (self.sem, self.scope) == (MemSem::Relaxed, MemScope::Gpu)
    }

    /// LLVM's scope and name of the order.
    fn llvm(self) -> (&'static str, &'static str) {
        let scope = match self.scope {
            MemScope::Cta => " syncscope(\"block\")",
            MemScope::Gpu => " syncscope(\"device\")",
            MemScope::Sys => "",
        };
        (scope, if self.sem == MemSem::Relaxed { "monotonic" } else { self.sem.name() })
    }

    /// The order of a compare-and-swap that fails, which writes nothing.
    fn failure(self) -> &'static str {
        if self.sem.acquires() { "acquire" } else { "monotonic" }
    }
}

impl Lowering<'_> {
    /// The atomics of an op, with barriers around them: a release publishes what all threads of the program have
    /// written, and all of them see what is acquired.
    fn ordered<R>(&mut self, order: Order, atomics: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        if order.sem.releases() {
            self.barrier();
        }
        let result = atomics(self)?;
        if order.sem.acquires() {
            self.barrier();
        }
        Ok(result)
    }

    /// One thread waits, the others at a barrier.
    pub(super) fn semaphore_wait(&mut self, id: OpId) {
        let [counter, value] = [0, 1].map(|i| self.scalar(self.func.op(id).operands[i]));
        let first = self.leader();
        self.when(Some(first), |this| {
            this.repeat_until(&value, |this| {
                let acquire = Order { sem: MemSem::Acquire, scope: MemScope::Gpu };
                this.atomic_asm(AtomicOp::Add, DType::I32, &counter, "0", acquire)
            });
        });
        self.barrier();
    }

    /// Reads a counter until it has a value, without an order of other accesses.
    pub(super) fn poll(&mut self, counter: &str, value: &str) {
        self.repeat_until(value, |this| {
            let of = "ptr addrspace(1)";
            this.e.inst(format!("load atomic i32, {of} {counter} syncscope(\"device\") monotonic, align 4"))
        });
    }

    /// Sets a counter, without an order of other accesses.
    pub(super) fn set_counter(&mut self, counter: &str, value: &str) {
        self.atomic_asm(AtomicOp::Xchg, DType::I32, counter, value, Order::RELAXED);
    }

    /// Repeats what gives an i32 until it is `value`.
    fn repeat_until(&mut self, value: &str, f: impl FnOnce(&mut Self) -> Val) {
        let (again, released) = (self.e.new_label("wait"), self.e.new_label("released"));
        self.e.branch(&again);
        self.e.start_block(&again);
        let found = f(self);
        let has_value = self.e.inst(format!("icmp eq i32 {found}, {value}"));
        self.e.branch_if(&has_value, &released, &again);
        self.e.start_block(&released);
    }

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
                self.atomic(*op, block.elem, &address, &values[r], predicate, Order::RELAXED)?;
            }
        }
        Ok(())
    }

    /// The number of consecutive elements that one instruction adds to memory.
    fn reduction_vector(&self, view: Value, op: AtomicOp, block: &BlockAddress, layout: &LinearLayout) -> usize {
        let most = self.arch.reduction_vector(op, block.elem, self.options.ptx_version);
        let vector = view_vector_width(self.func, &self.axis, view, &block.boundary) as usize;
        vector.min(layout.contiguous_run(block.parts.order[0])).min(most)
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
        let Op::AtomicRmw { op, sem, scope } = data.op else { panic!("internal compiler error: not an atomic") };
        let order = Order::of(sem, MemSem::Relaxed, scope);
        let elem = self.dtype(data.operands[1]);
        let pointers = self.regs(data.operands[0]);
        let values = self.regs(data.operands[1]);
        let mask = data.operands.get(2).map(|&v| self.regs(v));
        let (owner, free) = self.owner_of(data.operands[0]);
        let olds = self.ordered(order, |this| {
            let mut olds: Vec<Val> = Vec::new();
            for r in 0..pointers.len() {
                if r & free != 0 {
                    olds.push(olds[r & !free].clone());
                    continue;
                }
                let predicate = this.and_predicates(owner.clone(), mask.as_ref().map(|m| m[r].clone()));
                olds.push(this.atomic(op, elem, &pointers[r], &values[r], predicate, order)?);
            }
            Ok(olds)
        })?;
        self.broadcast_old_values(data.results[0], olds)
    }

    pub(super) fn atomic_cas(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let elem = self.dtype(data.results[0]);
        let Op::AtomicCas { sem, scope } = data.op else { panic!("internal compiler error: not an atomic") };
        let order = Order::of(sem, MemSem::AcqRel, scope);
        let operands: Vec<_> = data.operands.iter().map(|&v| self.regs(v)).collect();
        let (owner, free) = self.owner_of(data.operands[0]);
        let ty = llvm_type(Elem::Num(elem));
        let int = format!("i{}", elem.bits());
        let ((scope, success), failure) = (order.llvm(), order.failure());
        let olds = self.ordered(order, |this| {
            let mut olds: Vec<Val> = Vec::new();
            for r in 0..operands[0].len() {
                if r & free != 0 {
                    olds.push(olds[r & !free].clone());
                    continue;
                }
                let bits = [1, 2].map(|i| this.pack_elements(&[operands[i][r].clone()], ty, &int));
                let p = &operands[0][r];
                let predicate = this.and_predicates(owner.clone(), operands.get(3).map(|mask| mask[r].clone()));
                let old = this.guarded(predicate, &int, |this| {
                    let pair = this.e.inst(format!(
                        "cmpxchg ptr addrspace(1) {p}, {int} {}, {int} {}{scope} {success} {failure}",
                        bits[0], bits[1]
                    ));
                    this.e.inst(format!("extractvalue {{ {int}, i1 }} {pair}, 0"))
                });
                olds.extend(this.unpack_elements(&old, &int, ty, 1));
            }
            Ok(olds)
        })?;
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
    fn atomic(
        &mut self,
        op: AtomicOp,
        elem: DType,
        p: &str,
        value: &str,
        predicate: Option<Val>,
        order: Order,
    ) -> Result<Val> {
        let ty = llvm_type(Elem::Num(elem));
        if elem == DType::Bool || elem.is_f8() {
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
            return Ok(self.atomic_add_asm(elem, p, value, predicate, order));
        }
        if !order.is_default() {
            // LLVM ignores order and scope of a read-modify-write, but not those of a compare-and-swap.
            return Ok(match elem.bits() {
                16 => self.guarded(predicate, ty, |this| this.atomic_loop(op, elem, p, value, order)),
                _ if native.is_none() => {
                    self.guarded(predicate, ty, |this| this.atomic_loop(op, elem, p, value, order))
                }
                _ => self.guarded(predicate, ty, |this| this.atomic_asm(op, elem, p, value, order)),
            });
        }
        Ok(self.guarded(predicate, ty, |this| match native {
            Some(name) => this
                .e
                .inst(format!("atomicrmw {name} ptr addrspace(1) {p}, {ty} {value} syncscope(\"device\") monotonic")),
            None => this.atomic_loop(op, elem, p, value, order),
        }))
    }

    /// Emits `atom` with an order and a scope, for 32 and 64 bits.
    fn atomic_asm(&mut self, op: AtomicOp, elem: DType, p: &str, value: &str, order: Order) -> Val {
        let (ty, bits) = (llvm_type(Elem::Num(elem)), elem.bits());
        let int = format!("i{bits}");
        let name = if op == AtomicOp::Xchg { "exch" } else { op.name() };
        let kind = match op {
            AtomicOp::And | AtomicOp::Or | AtomicOp::Xor | AtomicOp::Xchg => "b",
            // Two's complement: the sum has no sign.
            AtomicOp::Add => "u",
            AtomicOp::Min | AtomicOp::Max => {
                if elem.is_signed_int() {
                    "s"
                } else {
                    "u"
                }
            }
        };
        let register = if bits == 64 { "l" } else { "r" };
        let value = self.pack_elements(&[value.to_string()], ty, &int);
        let (sem, scope) = (order.sem.name(), order.scope.name());
        let old = self.e.inst(format!(
            "call {int} asm sideeffect \"atom.global.{scope}.{sem}.{name}.{kind}{bits} $0, [$1], $2;\", \"={register},l,{register},~{{memory}}\"(ptr addrspace(1) {p}, {int} {value})"
        ));
        self.unpack_elements(&old, &int, ty, 1).remove(0)
    }

    fn atomic_add_asm(&mut self, elem: DType, p: &str, value: &str, predicate: Option<Val>, order: Order) -> Val {
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
        let (sem, scope) = (order.sem.name(), order.scope.name());
        let old = self.e.inst(format!(
            "call {ty} asm sideeffect \"{before}atom.global.{scope}.{sem}.add.{suffix} $0, [$1], $2;\", \"{output}{constraint},l,{constraint}{more},~{{memory}}\"(ptr addrspace(1) {p}, {ty} {value}{arg})"
        ));
        if elem == DType::F16 { self.e.inst(format!("bitcast i16 {old} to half")) } else { old }
    }

    /// Repeats compare-and-swap until it succeeds.
    fn atomic_loop(&mut self, op: AtomicOp, elem: DType, p: &str, value: &str, order: Order) -> Val {
        let ty = llvm_type(Elem::Num(elem));
        let int = format!("i{}", elem.bits());
        let ((scope, success), failure) = (order.llvm(), order.failure());
        // Atomic, because other programs may access the same element.
        let first =
            self.e.inst(format!("load atomic {ty}, ptr addrspace(1) {p}{scope} monotonic, align {}", elem.bytes()));
        let from = self.e.label();
        let (head, done) = (self.e.new_label("cas"), self.e.new_label("swapped"));
        self.e.branch(&head);
        self.e.start_block(&head);
        let (old, phi) = self.e.open_phi(ty, &first, &from);
        let binary = match op {
            AtomicOp::Add => Some(BinaryOp::Add),
            AtomicOp::Min => Some(BinaryOp::Min),
            AtomicOp::Max => Some(BinaryOp::Max),
            AtomicOp::And => Some(BinaryOp::And),
            AtomicOp::Or => Some(BinaryOp::Or),
            AtomicOp::Xor => Some(BinaryOp::Xor),
            AtomicOp::Xchg => None,
        };
        let new = binary.map_or(value.to_string(), |binary| self.binary(binary, elem, &old, value));
        let [old_bits, new_bits] = [&old, &new].map(|x| self.pack_elements(std::slice::from_ref(x), ty, &int));
        let pair = self.e.inst(format!(
            "cmpxchg ptr addrspace(1) {p}, {int} {old_bits}, {int} {new_bits}{scope} {success} {failure}"
        ));
        let seen = self.e.inst(format!("extractvalue {{ {int}, i1 }} {pair}, 0"));
        let swapped = self.e.inst(format!("extractvalue {{ {int}, i1 }} {pair}, 1"));
        let seen = self.unpack_elements(&seen, &int, ty, 1).remove(0);
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
