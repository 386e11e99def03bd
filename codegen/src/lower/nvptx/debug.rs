//! `device_print` and `device_assert`, by the driver's `vprintf` and `__assertfail`.

use super::{Lowering, Result};
use crate::ir::{DType, Elem, Op, OpId, Value};

impl Lowering<'_> {
    /// Prints one line per element, `pid (x, y, z) [coordinates] prefix: value`, by the thread that owns it.
    pub(super) fn device_print(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::DevicePrint { prefix } = &data.op else { panic!("internal compiler error: not a print") };
        let prefix = prefix.replace('%', "%%");
        let pids: Vec<String> = (0..3).map(|axis| self.program_id(axis)).collect();
        if data.operands.is_empty() {
            let first = self.leader();
            self.print_if(Some(first), &format!("pid (%d, %d, %d) {prefix}\n"), &pids, &[]);
            return Ok(());
        }
        for &v in &data.operands {
            self.print_value(v, &prefix, &pids);
        }
        Ok(())
    }

    fn print_value(&mut self, v: Value, prefix: &str, pids: &[String]) {
        let regs = self.regs(v);
        let layout = self.layout(v);
        let owner = match layout {
            Some(l) => self.threads.owner(&mut self.e, l),
            None => {
                let scalar = crate::layout::LayoutBuilder::new(&[])
                    .replicas(crate::layout::Dim::Lane, 32)
                    .replicas(crate::layout::Dim::Warp, self.options.num_warps)
                    .wrap(&[]);
                self.threads.owner(&mut self.e, &scalar)
            }
        };
        let coordinates = layout.map(|l| super::threads::coordinates(&mut self.e, &self.threads, l));
        let (spec, ty) = match self.elem(v) {
            Elem::Ptr(_) => ("%p", "i64"),
            Elem::Num(d) if d.is_float() => ("%f", "double"),
            Elem::Num(DType::U64) => ("%llu", "i64"),
            Elem::Num(_) => ("%lld", "i64"),
        };
        let free = layout.map_or(0, |l| l.free_mask(crate::layout::Dim::Register));
        for (r, reg) in regs.iter().enumerate() {
            if r as u32 & free != 0 {
                continue;
            }
            let mut args: Vec<String> = pids.to_vec();
            let mut place = String::new();
            if let Some(coordinates) = &coordinates {
                place = format!(" [{}]", vec!["%d"; coordinates.len()].join(", "));
                for c in coordinates {
                    let at = c.at(&mut self.e, c.register[r]);
                    args.push(at);
                }
            }
            let wide = self.widen(reg, self.elem(v));
            let format = format!("pid (%d, %d, %d){place} {prefix}: {spec}\n");
            self.print_if(owner.clone(), &format, &args, &[(ty, wide)]);
        }
    }

    /// Converts a number to `double` or `i64`, which `vprintf` takes.
    fn widen(&mut self, reg: &str, elem: Elem) -> String {
        match elem {
            Elem::Ptr(_) => self.e.inst(format!("ptrtoint ptr addrspace(1) {reg} to i64")),
            Elem::Num(d) => match d {
                DType::F64 | DType::I64 | DType::U64 => reg.to_string(),
                DType::F16 | DType::BF16 | DType::F32 => {
                    self.e.inst(format!("fpext {} {reg} to double", super::llvm_type(elem)))
                }
                DType::F8E4M3 | DType::F8E5M2 => {
                    let f = self.cast_element(reg, d, DType::F32);
                    self.e.inst(format!("fpext float {f} to double"))
                }
                _ => {
                    let extend = if d.is_signed_int() { "sext" } else { "zext" };
                    self.e.inst(format!("{extend} {} {reg} to i64", super::llvm_type(elem)))
                }
            },
        }
    }

    /// Calls `vprintf(format, args)` in the threads where `condition` holds. The i32 arguments come first.
    fn print_if(&mut self, condition: Option<String>, format: &str, ints: &[String], wide: &[(&str, String)]) {
        let (then, join) = (self.e.new_label("print"), self.e.new_label("printed"));
        match condition {
            Some(c) => self.e.branch_if(&c, &then, &join),
            None => self.e.branch(&then),
        }
        self.e.start_block(&then);
        let text = self.e.string(format);
        let size = ints.len() * 4 + 8 + wide.len() * 8;
        let buffer = self.e.hoist(format!("alloca [{} x i8], align 8", size.next_multiple_of(256)));
        let mut at = 0;
        let mut put = |e: &mut super::emit::Emitter, ty: &str, bytes: usize, value: &str| {
            at = usize::next_multiple_of(at, bytes);
            let p = e.inst(format!("getelementptr i8, ptr {buffer}, i32 {at}"));
            e.void(format!("store {ty} {value}, ptr {p}, align {bytes}"));
            at += bytes;
        };
        for v in ints {
            put(&mut self.e, "i32", 4, v);
        }
        for (ty, v) in wide {
            put(&mut self.e, ty, 8, v);
        }
        let text = self.e.inst(format!("addrspacecast ptr addrspace(1) {text} to ptr"));
        self.e.call("i32", "vprintf", &[("ptr", &text), ("ptr", &buffer)]);
        self.e.branch(&join);
        self.e.start_block(&join);
    }

    /// Stops the kernel where an element of the operand is false, if assertions are enabled.
    pub(super) fn device_assert(&mut self, id: OpId, message: &str) {
        let data = self.func.op(id);
        if !self.options.debug_asserts {
            return;
        }
        let regs = self.regs(data.operands[0]);
        let mut holds = regs[0].clone();
        for r in &regs[1..] {
            holds = self.e.inst(format!("and i1 {holds}, {r}"));
        }
        let (fail, go_on) = (self.e.new_label("fail"), self.e.new_label("holds"));
        self.e.branch_if(&holds, &go_on, &fail);
        self.e.start_block(&fail);
        let mut text = |s: &str| {
            let g = self.e.string(s);
            self.e.inst(format!("addrspacecast ptr addrspace(1) {g} to ptr"))
        };
        let (message, file, function) = (text(message), text(&data.loc.file), text(&self.func.name));
        let line = data.loc.line.to_string();
        let args = [("ptr", &*message), ("ptr", &*file), ("i32", &*line), ("ptr", &*function), ("i64", "1")];
        self.e.call("void", "__assertfail", &args);
        self.e.branch(&go_on);
        self.e.start_block(&go_on);
    }
}
