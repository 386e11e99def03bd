//! Global memory: views and pointers.

use super::emit::Val;
use super::threads::{Coordinate, coordinates};
use super::{Lowering, Result, llvm_type};
use crate::analysis::access_layout::{ViewOperands, pointer_order_and_width, view_operands, view_vector_width};
use crate::analysis::bounds::argument;
use crate::analysis::memory_effects;
use crate::ir::{DType, Elem, Eviction, Op, OpId, Padding, Value};
use crate::layout::{Dim, LinearLayout};
use std::collections::HashMap;

/// The addresses of the elements of a view's block: the values that all its accesses share.
pub(super) struct BlockAddress<'f> {
    pub(super) parts: ViewOperands<'f>,
    coordinates: Vec<Coordinate>,
    pub(super) elem: DType,
    pub(super) boundary: Vec<usize>,
    /// Byte address of the element at the thread's coordinates, without the register parts.
    base: Val,
    /// Bounds checks that were emitted, by dimension and register part of the coordinate.
    bounds_checks: HashMap<(usize, u32), Val>,
    strides: Vec<Val>,
}

/// The LLVM type of an element in memory: a bool is a byte.
pub(super) fn memory_type(d: DType) -> &'static str {
    if d == DType::Bool { "i8" } else { llvm_type(Elem::Num(d)) }
}

/// How a load reads its memory.
#[derive(Clone, Copy)]
struct LoadKind {
    eviction: Eviction,
    /// Whether the kernel writes the memory too.
    changes: bool,
}

impl<'f> Lowering<'f> {
    /// Computes the addresses of a view's block in a layout.
    pub(super) fn block_address(&mut self, view: Value, layout: &LinearLayout, boundary: &[usize]) -> BlockAddress<'f> {
        let parts = view_operands(self.func, view);
        let crate::ir::Type::View { elem, .. } = self.func.ty(view) else {
            panic!("internal compiler error: not a view")
        };
        let coordinates = coordinates(&mut self.e, &self.threads, layout);
        let strides: Vec<Val> = parts
            .strides
            .iter()
            .map(|&s| match self.axis.scalar_constant(self.func, s) {
                Some(c) => c.to_string(),
                None => self.scalar(s),
            })
            .collect();
        let mut offset: Option<Val> = None;
        for (d, c) in coordinates.iter().enumerate() {
            let index = self.index(parts.offsets[d], &c.thread);
            let term = self.times(&index, &strides[d]);
            offset = Some(match offset {
                None => term,
                Some(sum) => self.e.inst(format!("add i64 {sum}, {term}")),
            });
        }
        let base = self.scalar(parts.base);
        let elem = *elem;
        let base = match offset {
            Some(o) => self.e.inst(format!("getelementptr {}, ptr addrspace(1) {base}, i64 {o}", memory_type(elem))),
            None => base,
        };
        // Drops the checks of dimensions in which the whole block is provably in bounds.
        let shape = self.func.ty(view).shape();
        let boundary = boundary
            .iter()
            .copied()
            .filter(|&d| {
                let known = |v| self.axis.scalar_constant(self.func, v);
                !matches!((known(parts.offsets[d]), known(parts.shape[d])),
                    (Some(o), Some(n)) if o >= 0 && o.checked_add(shape[d] as i64).is_some_and(|end| end <= n))
            })
            .collect();
        BlockAddress { parts, coordinates, elem, boundary, base, bounds_checks: HashMap::new(), strides }
    }

    /// `offset + coordinate` in i64.
    pub(super) fn index(&mut self, offset: Value, coordinate: &str) -> Val {
        let offset = self.scalar(offset);
        if coordinate == "0" {
            return offset;
        }
        let wide = self.e.inst(format!("zext nneg i32 {coordinate} to i64"));
        self.e.inst(format!("add i64 {offset}, {wide}"))
    }

    /// An extent, clamped to 0 if negative, because indices are compared with it as unsigned numbers. Arguments need no
    /// clamp: launches reject negative extents.
    pub(super) fn extent(&mut self, extent: Value) -> Val {
        match self.axis.scalar_constant(self.func, extent) {
            Some(n) => n.max(0).to_string(),
            None if argument(self.func, extent).is_some() => self.scalar(extent),
            None => {
                let extent = self.scalar(extent);
                self.e.call("i64", "llvm.smax.i64", &[("i64", &extent), ("i64", "0")])
            }
        }
    }

    fn times(&mut self, index: &str, stride: &str) -> Val {
        if stride == "1" { index.to_string() } else { self.e.inst(format!("mul i64 {index}, {stride}")) }
    }

    /// The address of the element in register `r`.
    pub(super) fn address(&mut self, block: &BlockAddress, r: usize) -> Val {
        let mut address = block.base.clone();
        let ty = memory_type(block.elem);
        for (d, c) in block.coordinates.iter().enumerate() {
            let constant = c.register[r];
            if constant == 0 {
                continue;
            }
            // The bits of the constant that overlap with the thread part do not simply add.
            let step = if constant & c.mask == 0 {
                constant.to_string()
            } else {
                let moved = c.at(&mut self.e, constant);
                let difference = self.e.inst(format!("sub i32 {moved}, {}", c.thread));
                self.e.inst(format!("sext i32 {difference} to i64"))
            };
            let by = self.times(&step, &block.strides[d]);
            address = self.e.inst(format!("getelementptr {ty}, ptr addrspace(1) {address}, i64 {by}"));
        }
        address
    }

    /// i1: the element in register `r` is in bounds; `None` where it always is.
    pub(super) fn inside(&mut self, block: &mut BlockAddress, r: usize) -> Option<Val> {
        let mut all: Option<Val> = None;
        for d in block.boundary.clone() {
            let constant = block.coordinates[d].register[r];
            let inside = match block.bounds_checks.get(&(d, constant)) {
                Some(v) => v.clone(),
                None => {
                    let at = block.coordinates[d].at(&mut self.e, constant);
                    let index = self.index(block.parts.offsets[d], &at);
                    let extent = self.extent(block.parts.shape[d]);
                    // Unsigned: a negative index is out of bounds too.
                    let v = self.e.inst(format!("icmp ult i64 {index}, {extent}"));
                    block.bounds_checks.insert((d, constant), v.clone());
                    v
                }
            };
            all = Some(match all {
                None => inside,
                Some(a) => self.e.inst(format!("and i1 {a}, {inside}")),
            });
        }
        all
    }

    pub(super) fn load_view(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::LoadView { boundary, .. } = &data.op else { panic!("internal compiler error: not a load of a view") };
        let layout = self.tile_layout(data.results[0]);
        let mut block = self.block_address(data.operands[0], layout, boundary);
        let registers: Vec<usize> = (0..layout.num_registers()).collect();
        let regs = self.load_registers(id, &mut block, &registers);
        self.set(data.results[0], regs);
        Ok(())
    }

    /// Loads the elements of a view's block in some registers of the layout.
    pub(super) fn load_registers(&mut self, id: OpId, block: &mut BlockAddress, registers: &[usize]) -> Vec<Val> {
        let data = self.func.op(id);
        let Op::LoadView { padding, eviction, .. } = data.op else {
            panic!("internal compiler error: not a load of a view")
        };
        let layout = self.tile_layout(data.results[0]);
        let vector = view_vector_width(self.func, &self.axis, data.operands[0], &block.boundary) as usize;
        let vector = vector.min(layout.contiguous_run(block.parts.order[0]));
        let is_run = |run: &[usize]| {
            run.len() == vector && run[0].is_multiple_of(vector) && run.windows(2).all(|w| w[1] == w[0] + 1)
        };
        let vector = if registers.chunks(vector).all(is_run) { vector } else { 1 };
        let fill = match padding {
            Padding::Zero => 0u64,
            Padding::Nan => nan_bits(block.elem),
        };
        let kind = self.load_kind(data.operands[0], eviction);
        let mut regs = Vec::new();
        for run in registers.chunks(vector) {
            let address = self.address(block, run[0]);
            let inside = self.inside(block, run[0]);
            regs.extend(self.load_vector(&address, block.elem, vector, inside, &Fill::Bits(fill), kind));
        }
        regs
    }

    pub(super) fn store_view(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::StoreView { boundary, eviction } = &data.op else {
            panic!("internal compiler error: not a store to a view")
        };
        let layout = self.tile_layout(data.operands[1]);
        let values = self.regs(data.operands[1]);
        let mut block = self.block_address(data.operands[0], layout, boundary);
        let vector = view_vector_width(self.func, &self.axis, data.operands[0], &block.boundary) as usize;
        let vector = vector.min(layout.contiguous_run(block.parts.order[0]));
        let owner = self.threads.owner(&mut self.e, layout);
        // Warps that hold only copies branch around the store. LLVM sinks values that only the store uses into the
        // branch, so these warps skip them too.
        let (branch, owner) = match layout.free_mask(Dim::Warp) {
            0 => (None, owner),
            _ => (owner, None),
        };
        let free = layout.free_mask(Dim::Register) as usize;
        self.when(branch, |this| {
            for r in (0..layout.num_registers()).step_by(vector).filter(|r| r & free == 0) {
                let address = this.address(&block, r);
                let inside = this.inside(&mut block, r);
                let predicate = this.and_predicates(owner.clone(), inside);
                this.store_vector(&address, block.elem, &values[r..r + vector], predicate, *eviction);
            }
        });
        Ok(())
    }

    pub(super) fn and_predicates(&mut self, a: Option<Val>, b: Option<Val>) -> Option<Val> {
        match (a, b) {
            (Some(a), Some(b)) => Some(self.e.inst(format!("and i1 {a}, {b}"))),
            (a, b) => a.or(b),
        }
    }

    /// Loads `n` consecutive elements into registers.
    fn load_vector(
        &mut self,
        address: &str,
        elem: DType,
        n: usize,
        predicate: Option<Val>,
        fill: &Fill,
        kind: LoadKind,
    ) -> Vec<Val> {
        let ty = memory_type(elem);
        let bytes = elem.bytes() * n;
        let loaded: Vec<Val> = match predicate {
            None if kind.eviction == Eviction::Normal => {
                if n == 1 {
                    vec![self.e.inst(format!("load {ty}, ptr addrspace(1) {address}, align {bytes}"))]
                } else {
                    let v = self.e.inst(format!("load <{n} x {ty}>, ptr addrspace(1) {address}, align {bytes}"));
                    self.e.elements(&v, ty, n)
                }
            }
            predicate => self.predicated_load(address, elem, n, predicate, fill, kind),
        };
        if elem != DType::Bool {
            return loaded;
        }
        loaded.iter().map(|v| self.e.inst(format!("icmp ne i8 {v}, 0"))).collect()
    }

    fn load_kind(&self, pointer: Value, eviction: Eviction) -> LoadKind {
        let arguments = memory_effects::underlying_arguments(self.func, pointer);
        LoadKind { eviction, changes: arguments.is_empty() || !arguments.is_disjoint(&self.written) }
    }

    /// Emits `@p ld.global`, with the destination filled beforehand.
    fn predicated_load(
        &mut self,
        address: &str,
        elem: DType,
        n: usize,
        predicate: Option<Val>,
        fill: &Fill,
        LoadKind { eviction, changes }: LoadKind,
    ) -> Vec<Val> {
        let word = Word::of(elem, n);
        let per_word = (word.bytes / elem.bytes()).max(1);
        let result = word.result_type();
        let fills: Vec<Val> = (0..word.count)
            .map(|w| match fill {
                Fill::Bits(bits) => {
                    let mut all = 0u64;
                    for i in 0..per_word {
                        all |= bits << (i * elem.bits());
                    }
                    signed_literal(all, word.bytes)
                }
                Fill::Values(values) => {
                    let group = &values[w * per_word..(w + 1) * per_word];
                    let group: Vec<Val> = group
                        .iter()
                        .map(
                            |v| if elem == DType::Bool { self.e.inst(format!("zext i1 {v} to i8")) } else { v.clone() },
                        )
                        .collect();
                    self.pack_word(&group, memory_type(elem), &word)
                }
            })
            .collect();
        let outputs: Vec<String> = (0..word.count).map(|i| format!("${i}")).collect();
        let list = if word.count == 1 { outputs[0].clone() } else { format!("{{{}}}", outputs.join(",")) };
        let at = word.count;
        let suffix = word.suffix();
        let (guard, predicate_constraint) = match predicate {
            Some(_) => (format!("@${} ", at + 1 + word.count), ",b"),
            None => (String::new(), ""),
        };
        let policy = self.cache_policy(eviction);
        let hint = PolicyText::new(eviction, at + 1 + word.count + usize::from(predicate.is_some()));
        // Inputs: the address, the fills tied to the outputs, the predicate, the policy of the L2 cache.
        let text = format!("{guard}ld.global{}.{suffix} {list}, [${at}]{};", hint.suffix, hint.operand);
        let ties: Vec<String> = (0..word.count).map(|i| i.to_string()).collect();
        let out = vec![format!("={}", word.constraint); word.count].join(",");
        let mut args = vec![format!("ptr addrspace(1) {address}")];
        args.extend(fills.iter().map(|f| format!("{} {f}", word.ty)));
        if let Some(p) = &predicate {
            args.push(format!("i1 {p}"));
        }
        args.extend(policy.map(|p| format!("i64 {p}")));
        let v = self.e.inst(format!(
            "call {result} asm \"{}\", \"{out},l,{}{predicate_constraint}{}{}\"({}) #3",
            escape_asm(&text),
            ties.join(","),
            hint.constraint,
            // Without it, LLVM takes assembly for a function of its operands, and moves and merges loads across stores.
            if changes { ",~{memory}" } else { "" },
            args.join(", ")
        ));
        let mut elements = Vec::new();
        for w in 0..word.count {
            let part = if word.count == 1 { v.clone() } else { self.e.inst(format!("extractvalue {result} {v}, {w}")) };
            let part = if word.bytes < 2 { self.e.inst(format!("trunc i16 {part} to i8")) } else { part };
            let packed = if word.bytes < 2 { "i8" } else { word.ty };
            elements.extend(self.unpack_elements(&part, packed, memory_type(elem), per_word));
        }
        elements
    }

    /// The L2 cache policy of an eviction hint other than the normal one. Data that is read once and evicted first
    /// leaves space for written data, which the next kernel reads. LLVM merges equal policies.
    fn cache_policy(&mut self, eviction: Eviction) -> Option<Val> {
        let priority = match eviction {
            Eviction::Normal
            | Eviction::Ca
            | Eviction::Cg
            | Eviction::Cs
            | Eviction::Cv
            | Eviction::Wb
            | Eviction::Wt => return None,
            Eviction::First => "evict_first",
            Eviction::Last => "evict_last",
        };
        let text = format!("createpolicy.fractional.L2::{priority}.b64 $0, 1.0;");
        Some(self.e.inst(format!("call i64 asm \"{text}\", \"=l\"() #2")))
    }

    /// Packs elements into one machine word. Inline asm has no 8-bit operands: bytes are extended to 16 bits.
    fn pack_word(&mut self, group: &[Val], ty: &str, word: &Word) -> Val {
        if word.bytes < 2 {
            let v = self.pack_elements(group, ty, "i8");
            self.e.inst(format!("zext i8 {v} to i16"))
        } else {
            self.pack_elements(group, ty, word.ty)
        }
    }

    fn store_vector(&mut self, address: &str, elem: DType, values: &[Val], predicate: Option<Val>, eviction: Eviction) {
        let ty = memory_type(elem);
        let n = values.len();
        let bytes = elem.bytes() * n;
        let values: Vec<Val> = values
            .iter()
            .map(|v| if elem == DType::Bool { self.e.inst(format!("zext i1 {v} to i8")) } else { v.clone() })
            .collect();
        if predicate.is_none() && eviction == Eviction::Normal {
            let (ty, v) = if n == 1 {
                (ty.to_string(), values[0].clone())
            } else {
                let vector = format!("<{n} x {ty}>");
                let mut v = "poison".to_string();
                for (i, x) in values.iter().enumerate() {
                    v = self.e.inst(format!("insertelement {vector} {v}, {ty} {x}, i32 {i}"));
                }
                (vector, v)
            };
            self.e.void(format!("store {ty} {v}, ptr addrspace(1) {address}, align {bytes}"));
            return;
        }
        let word = Word::of(elem, n);
        let per_word = (word.bytes / elem.bytes()).max(1);
        let words: Vec<Val> = values.chunks(per_word).map(|group| self.pack_word(group, ty, &word)).collect();
        let inputs: Vec<String> = (1..=word.count).map(|i| format!("${i}")).collect();
        let list = if word.count == 1 { inputs[0].clone() } else { format!("{{{}}}", inputs.join(",")) };
        let (guard, constraint) = match predicate {
            Some(_) => (format!("@${} ", word.count + 1), ",b"),
            None => (String::new(), ""),
        };
        let policy = self.cache_policy(eviction);
        let hint = PolicyText::new(eviction, word.count + 1 + usize::from(predicate.is_some()));
        let text = format!("{guard}st.global{}.{} [$0], {list}{};", hint.suffix, word.suffix(), hint.operand);
        let mut args = vec![format!("ptr addrspace(1) {address}")];
        args.extend(words.iter().map(|w| format!("{} {w}", word.ty)));
        if let Some(p) = &predicate {
            args.push(format!("i1 {p}"));
        }
        args.extend(policy.map(|p| format!("i64 {p}")));
        self.e.void(format!(
            "call void asm sideeffect \"{}\", \"l,{}{constraint}{},~{{memory}}\"({})",
            escape_asm(&text),
            vec![word.constraint; word.count].join(","),
            hint.constraint,
            args.join(", ")
        ));
    }

    pub(super) fn load(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::Load { eviction } = data.op else { panic!("internal compiler error: not a load") };
        let pointers = self.regs(data.operands[0]);
        let mask = data.operands.get(1).map(|&v| self.regs(v));
        let other = data.operands.get(2).map(|&v| self.regs(v));
        let elem = self.dtype(data.results[0]);
        let vector = self.pointer_access_width(data.operands[0], data.operands.get(1).copied());
        let kind = self.load_kind(data.operands[0], eviction);
        let mut regs = Vec::new();
        for r in (0..pointers.len()).step_by(vector) {
            let fill = match &other {
                Some(values) => Fill::Values(values[r..r + vector].to_vec()),
                None => Fill::Bits(0),
            };
            let predicate = mask.as_ref().map(|m| m[r].clone());
            regs.extend(self.load_vector(&pointers[r], elem, vector, predicate, &fill, kind));
        }
        self.set(data.results[0], regs);
        Ok(())
    }

    pub(super) fn store(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::Store { eviction } = data.op else { panic!("internal compiler error: not a store") };
        let pointers = self.regs(data.operands[0]);
        let values = self.regs(data.operands[1]);
        let mask = data.operands.get(2).map(|&v| self.regs(v));
        let elem = self.dtype(data.operands[1]);
        let vector = self.pointer_access_width(data.operands[0], data.operands.get(2).copied());
        let (owner, free) = self.owner_of(data.operands[0]);
        for r in (0..pointers.len()).step_by(vector) {
            if r & free == 0 {
                let predicate = self.and_predicates(owner.clone(), mask.as_ref().map(|m| m[r].clone()));
                self.store_vector(&pointers[r], elem, &values[r..r + vector], predicate, eviction);
            }
        }
        Ok(())
    }

    /// The number of registers of a pointer tile that one access covers.
    fn pointer_access_width(&self, pointers: Value, mask: Option<Value>) -> usize {
        match self.layout(pointers) {
            Some(layout) => {
                let (order, vector) = pointer_order_and_width(self.func, &self.axis, pointers, mask);
                (vector as usize).min(layout.contiguous_run(order[0]))
            }
            None => 1,
        }
    }

    /// The predicate of the thread that acts for an element, and the register bits that only repeat others. Thread 0
    /// acts for a scalar.
    pub(super) fn owner_of(&mut self, v: Value) -> (Option<Val>, usize) {
        match self.layout(v) {
            Some(l) => (self.threads.owner(&mut self.e, l), l.free_mask(Dim::Register) as usize),
            None => (Some(self.leader()), 0),
        }
    }
}

/// The value of a masked-off element of a load.
enum Fill {
    Bits(u64),
    Values(Vec<Val>),
}

/// The machine words of one vector access.
struct Word {
    bytes: usize,
    count: usize,
    ty: &'static str,
    constraint: &'static str,
}

impl Word {
    /// The words for `n` consecutive elements. An element is never split.
    fn of(elem: DType, n: usize) -> Word {
        match elem.bytes() * n {
            1 => Word { bytes: 1, count: 1, ty: "i16", constraint: "h" },
            2 => Word { bytes: 2, count: 1, ty: "i16", constraint: "h" },
            4 => Word { bytes: 4, count: 1, ty: "i32", constraint: "r" },
            8 => Word { bytes: 8, count: 1, ty: "i64", constraint: "l" },
            16 if elem.bytes() == 8 => Word { bytes: 8, count: 2, ty: "i64", constraint: "l" },
            16 => Word { bytes: 4, count: 4, ty: "i32", constraint: "r" },
            n => panic!("internal compiler error: an access of {n} bytes"),
        }
    }

    fn suffix(&self) -> String {
        let bits = self.bytes * 8;
        if self.count == 1 { format!("b{bits}") } else { format!("v{}.b{bits}", self.count) }
    }

    fn result_type(&self) -> String {
        if self.count == 1 { self.ty.into() } else { format!("{{ {} }}", vec![self.ty; self.count].join(", ")) }
    }
}

fn signed_literal(bits: u64, bytes: usize) -> Val {
    match bytes {
        1 | 2 => (bits as u16 as i16).to_string(),
        4 => (bits as u32 as i32).to_string(),
        _ => (bits as i64).to_string(),
    }
}

/// The parts of an asm statement that an eviction priority or a cache operator adds; all empty for the normal one.
struct PolicyText {
    /// Suffix of `ld.global` and `st.global`.
    suffix: &'static str,
    /// Text of the last operand, which is the cache policy.
    operand: String,
    /// LLVM constraint of the cache policy.
    constraint: &'static str,
}

impl PolicyText {
    /// `index` is the operand number of the cache policy.
    fn new(eviction: Eviction, index: usize) -> PolicyText {
        let operator = |suffix| PolicyText { suffix, operand: String::new(), constraint: "" };
        let suffix = match eviction {
            Eviction::Normal => return operator(""),
            Eviction::Ca => return operator(".ca"),
            Eviction::Cg => return operator(".cg"),
            Eviction::Cs => return operator(".cs"),
            Eviction::Cv => return operator(".cv"),
            Eviction::Wb => return operator(".wb"),
            Eviction::Wt => return operator(".wt"),
            Eviction::First => ".L1::evict_first.L2::cache_hint",
            Eviction::Last => ".L1::evict_last.L2::cache_hint",
        };
        PolicyText { suffix, operand: format!(", ${index}"), constraint: ",l" }
    }
}

/// Escapes quotes for LLVM IR. `$n` and braces of PTX vectors stay as they are.
fn escape_asm(text: &str) -> String {
    text.replace('"', "\\22")
}

fn nan_bits(d: DType) -> u64 {
    match d {
        DType::F16 => 0x7E00,
        DType::BF16 => 0x7FC0,
        DType::F32 => 0x7FC0_0000,
        DType::F64 => 0x7FF8_0000_0000_0000,
        DType::F8E4M3 | DType::F8E5M2 => 0x7F,
        DType::Bool
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U8
        | DType::U16
        | DType::U32
        | DType::U64 => 0,
    }
}
