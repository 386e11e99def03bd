//! Lowers elementwise ops, casts, inline assembly and combine regions, one register at a time.

use super::emit::{USER_ASM, Val};
use super::remainder::remainder;
use super::{Lowering, Result, llvm_type};
use crate::analysis::magnitude;
use crate::ir::{BinaryOp, BlockId, CmpOp, DType, Elem, Literal, Op, OpId, UnaryOp, Value};
use crate::lower::host::math;
use crate::num;
use std::rc::Rc;

/// The literal as an LLVM constant of this type.
pub(super) fn literal(value: Literal, elem: Elem) -> Val {
    let Elem::Num(dtype) = elem else { return "null".into() };
    let float = match value {
        Literal::Bool(b) => b as u8 as f64,
        Literal::Int(i) => i as f64,
        Literal::Float(x) => x,
    };
    match dtype {
        DType::Bool => match value {
            Literal::Bool(b) => b.to_string(),
            Literal::Int(i) => (i != 0).to_string(),
            Literal::Float(x) => (x != 0.0).to_string(),
        },
        DType::F16 => format!("0xH{:04X}", half::f16::from_f64(float).to_bits()),
        DType::BF16 => format!("0xR{:04X}", half::bf16::from_f64(float).to_bits()),
        // LLVM prints a float as the double of the same value.
        DType::F32 => format!("0x{:016X}", f64::from(float as f32).to_bits()),
        DType::F64 => format!("0x{:016X}", float.to_bits()),
        DType::F8E4M3 => crate::num::encode(dtype, float).to_string(),
        DType::F8E5M2 => crate::num::encode(dtype, float).to_string(),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::U8 | DType::U16 | DType::U32 | DType::U64 => {
            match value {
                Literal::Bool(b) => (b as i64).to_string(),
                Literal::Int(i) => i.to_string(),
                Literal::Float(x) => (x as i64).to_string(),
            }
        }
    }
}

impl Lowering<'_> {
    pub(super) fn elementwise(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Some(&result) = data.results.first() else { return self.inline_asm(id) };
        let count = self.layout(result).map_or(1, |l| l.num_registers());
        let operands: Vec<Rc<Vec<Val>>> = data.operands.iter().map(|&v| self.regs(v)).collect();
        let regs = match &data.op {
            Op::Constant { value } => vec![literal(*value, self.elem(result)); count],
            Op::Arange { start, .. } => {
                let layout = self.tile_layout(result);
                let c = super::threads::coordinates(&mut self.e, &self.threads, layout).remove(0);
                (0..count)
                    .map(|r| {
                        let at = c.at(&mut self.e, c.register[r]);
                        if *start == 0 { at } else { self.e.inst(format!("add i32 {at}, {start}")) }
                    })
                    .collect()
            }
            Op::InlineAsm { .. } => return self.inline_asm(id),
            Op::Binary(BinaryOp::Rescale) if self.is_skipped_by_warps(result, &operands[1]) => {
                self.rescale(&operands[0], &operands[1])
            }
            _ => self.elementwise_registers(id, &operands, self.equal_registers(result))?,
        };
        self.set(result, regs);
        Ok(())
    }

    /// Emits an elementwise op with operands for some registers of the layout, of which each `equal` in a row hold the
    /// same.
    pub(super) fn elementwise_registers(
        &mut self,
        id: OpId,
        operands: &[Rc<Vec<Val>>],
        equal: usize,
    ) -> Result<Vec<Val>> {
        let data = self.func.op(id);
        let result = data.results[0];
        Ok(match &data.op {
            Op::Cast => {
                let (from, to) = (self.dtype(data.operands[0]), self.dtype(result));
                self.cast(&operands[0], from, to)
            }
            Op::Unary(op @ (UnaryOp::Sin | UnaryOp::Cos)) if self.dtype(result) != DType::F64 => {
                let known = magnitude::upper_bound(self.func, data.operands[0]);
                self.sin_cos(
                    *op,
                    self.dtype(result),
                    &operands[0],
                    known.is_some_and(|x| x <= f64::from(math::SMALL_ARGUMENT)),
                )
            }
            Op::Binary(op) if self.is_bytewise(*op, result, operands) => self.bytewise(*op, operands),
            _ => {
                let count = operands[0].len();
                let mut regs: Vec<Val> = Vec::with_capacity(count);
                for r in 0..count {
                    if r % equal != 0 {
                        regs.push(regs[r - r % equal].clone());
                        continue;
                    }
                    let args: Vec<&str> = operands.iter().map(|o| o[r].as_str()).collect();
                    regs.push(self.element(id, &args)?);
                }
                regs
            }
        })
    }

    /// Whether the op works on four 8-bit integers in a word: bits, and shifts of unsigned ones by one constant.
    fn is_bytewise(&self, op: BinaryOp, result: Value, operands: &[Rc<Vec<Val>>]) -> bool {
        let dtype = self.dtype(result);
        let by_constant = || {
            let amount = &operands[1][0];
            amount.parse::<u32>().is_ok_and(|n| n < 8) && operands[1].iter().all(|other| other == amount)
        };
        matches!(dtype, DType::I8 | DType::U8)
            && operands[0].len().is_multiple_of(4)
            && match op {
                BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => true,
                BinaryOp::Shr => dtype == DType::U8 && by_constant(),
                BinaryOp::Shl => by_constant(),
                _ => false,
            }
    }

    fn bytewise(&mut self, op: BinaryOp, operands: &[Rc<Vec<Val>>]) -> Vec<Val> {
        let mut result = Vec::new();
        for (a, b) in operands[0].chunks(4).zip(operands[1].chunks(4)) {
            let word = self.pack_elements(a, "i8", "i32");
            let amount = b[0].parse::<u32>().unwrap_or(0);
            // Bits that would move to a neighbor are masked.
            let every = |byte: u8| i32::from_ne_bytes([byte; 4]);
            let changed = match op {
                BinaryOp::Shr => {
                    let shifted = self.e.inst(format!("lshr i32 {word}, {amount}"));
                    self.e.inst(format!("and i32 {shifted}, {}", every(u8::MAX >> amount)))
                }
                BinaryOp::Shl => {
                    let shifted = self.e.inst(format!("shl i32 {word}, {amount}"));
                    self.e.inst(format!("and i32 {shifted}, {}", every(u8::MAX << amount)))
                }
                _ => {
                    let other = self.pack_elements(b, "i8", "i32");
                    let name = match op {
                        BinaryOp::And => "and",
                        BinaryOp::Or => "or",
                        _ => "xor",
                    };
                    self.e.inst(format!("{name} i32 {word}, {other}"))
                }
            };
            result.extend(self.unpack_elements(&changed, "i32", "i8", 4));
        }
        result
    }

    /// The number of consecutive registers that hold equal elements, as far as axis analysis knows: the masks of a vector
    /// where the bound is a multiple of its width, or the pages of consecutive keys.
    fn equal_registers(&self, v: Value) -> usize {
        let Some(layout) = self.layout(v) else { return 1 };
        let constancy = &self.axis.get(self.func, v).constancy;
        let of_axis = |axis: usize| (constancy[axis] as usize).min(layout.contiguous_run(axis));
        (0..layout.rank()).map(of_axis).max().unwrap_or(1)
    }

    /// Emits one element of an elementwise op.
    fn element(&mut self, id: OpId, args: &[&str]) -> Result<Val> {
        let data = self.func.op(id);
        let result = data.results[0];
        Ok(match &data.op {
            Op::Unary(op) => self.unary(*op, self.dtype(result), args[0])?,
            Op::Binary(op @ (BinaryOp::Div | BinaryOp::Rem)) if !self.dtype(result).is_float() => {
                let ranges = [0, 1].map(|i| self.axis.get(self.func, data.operands[i]).range);
                self.integer_division(*op == BinaryOp::Rem, self.dtype(result), (args[0], args[1]), ranges)
            }
            Op::Binary(BinaryOp::CeilDiv) => {
                let ranges = [0, 1].map(|i| self.axis.get(self.func, data.operands[i]).range);
                self.ceil_div(self.dtype(result), (args[0], args[1]), ranges)
            }
            Op::Binary(op) => self.binary(*op, self.dtype(result), args[0], args[1]),
            Op::Cmp(op) => self.compare(*op, self.elem(data.operands[0]), args[0], args[1]),
            Op::Fma => {
                let d = self.dtype(result);
                self.in_f32(d, args, |this, args, ty| {
                    let suffix = if ty == "double" { "f64" } else { "f32" };
                    this.e.call(ty, &format!("llvm.fma.{suffix}"), &[(ty, &args[0]), (ty, &args[1]), (ty, &args[2])])
                })
            }
            Op::Select => {
                let ty = self.ty(result);
                self.e.inst(format!("select i1 {}, {ty} {}, {ty} {}", args[0], args[1], args[2]))
            }
            Op::Bitcast => {
                let (from, to) = (self.ty(data.operands[0]), self.ty(result));
                match (self.elem(data.operands[0]), self.elem(result)) {
                    _ if from == to => args[0].to_string(),
                    (Elem::Ptr(_), _) => self.e.inst(format!("ptrtoint {from} {} to {to}", args[0])),
                    (_, Elem::Ptr(_)) => self.e.inst(format!("inttoptr {from} {} to {to}", args[0])),
                    (Elem::Num(DType::Bool), _) => self.e.inst(format!("zext i1 {} to {to}", args[0])),
                    (_, Elem::Num(DType::Bool)) => self.e.inst(format!("trunc {from} {} to i1", args[0])),
                    _ => self.e.inst(format!("bitcast {from} {} to {to}", args[0])),
                }
            }
            Op::PtrAdd => {
                let pointee = self.elem(result).pointee().expect("internal compiler error: not a pointer");
                let offset = self.dtype(data.operands[1]);
                let bytes = if pointee == DType::Bool { "i8" } else { llvm_type(Elem::Num(pointee)) };
                let wide = self.widen_index(args[1], offset);
                self.e.inst(format!("getelementptr {bytes}, ptr addrspace(1) {}, i64 {wide}", args[0]))
            }
            other => panic!("internal compiler error: `{}` is not elementwise", other.mnemonic()),
        })
    }

    pub(super) fn widen_index(&mut self, v: &str, dtype: DType) -> Val {
        if dtype.bits() == 64 {
            return v.to_string();
        }
        // Folds constants, so that they stay constants.
        if let Ok(n) = v.parse::<i64>() {
            return n.to_string();
        }
        let extend = if dtype.is_signed_int() { "sext" } else { "zext" };
        self.e.inst(format!("{extend} {} {v} to i64", llvm_type(Elem::Num(dtype))))
    }

    /// Computes in f32 the functions that f16, bf16 and the 8-bit floats lack, and rounds the result back.
    fn in_f32(&mut self, d: DType, args: &[&str], f: impl FnOnce(&mut Self, &[Val], &'static str) -> Val) -> Val {
        match d {
            DType::F64 => f(self, &args.iter().map(|a| a.to_string()).collect::<Vec<_>>(), "double"),
            DType::F32 => f(self, &args.iter().map(|a| a.to_string()).collect::<Vec<_>>(), "float"),
            _ => {
                let wide: Vec<Val> = args.iter().map(|a| self.cast_element(a, d, DType::F32)).collect();
                let v = f(self, &wide, "float");
                self.cast_element(&v, DType::F32, d)
            }
        }
    }

    fn unary(&mut self, op: UnaryOp, d: DType, x: &str) -> Result<Val> {
        let ty = llvm_type(Elem::Num(d));
        if !d.is_float() {
            return Ok(match op {
                UnaryOp::Neg => self.e.inst(format!("sub {ty} 0, {x}")),
                UnaryOp::Not if d == DType::Bool => self.e.inst(format!("xor i1 {x}, true")),
                UnaryOp::Not => self.e.inst(format!("xor {ty} {x}, -1")),
                UnaryOp::Abs if d.is_signed_int() => {
                    self.e.call(ty, &format!("llvm.abs.{ty}"), &[(ty, x), ("i1", "false")])
                }
                UnaryOp::Abs => x.to_string(),
                other => panic!("internal compiler error: `{}` of {d}", other.name()),
            });
        }
        Ok(self.in_f32(d, &[x], |this, args, ty| super::math::unary(&mut this.e, op, ty, &args[0])))
    }

    /// Sine or cosine of all elements of a thread. One branch for the whole thread tests whether any element is too
    /// large for the fast path, so that the fast paths of the elements overlap. `all_small`: all are known to be small
    /// enough.
    fn sin_cos(&mut self, op: UnaryOp, d: DType, xs: &[Val], all_small: bool) -> Vec<Val> {
        let xs: Vec<Val> = xs.iter().map(|x| self.cast_element(x, d, DType::F32)).collect();
        self.e.shared_math(op);
        if all_small {
            let short = |x| self.e.inst(format!("call float {}(float {x})", math::small_argument_name(op)));
            let found: Vec<Val> = xs.iter().map(short).collect();
            return found.iter().map(|v| self.cast_element(v, DType::F32, d)).collect();
        }
        let mut largest = String::new();
        for x in &xs {
            let size = self.e.call("float", "llvm.fabs.f32", &[("float", x)]);
            largest = match &*largest {
                "" => size,
                other => self.e.call("float", "llvm.maxnum.f32", &[("float", other), ("float", &size)]),
            };
        }
        let is_large =
            self.e.inst(format!("fcmp ogt float {largest}, 0x{:016X}", f64::from(math::SMALL_ARGUMENT).to_bits()));
        let [large, small, join] = ["large", "small", "sin_cos"].map(|hint| self.e.new_label(hint));
        self.e.branch_if(&is_large, &large, &small);
        let by = |this: &mut Self, label: &str, function: &str| -> Vec<Val> {
            this.e.start_block(label);
            let values = xs.iter().map(|x| this.e.inst(format!("call float {function}(float {x})"))).collect();
            this.e.branch(&join);
            values
        };
        let found_large = by(self, &large, &format!("@math.{}.1", op.name()));
        let found_small = by(self, &small, &math::small_argument_name(op));
        self.e.start_block(&join);
        let found = found_large.iter().zip(&found_small);
        let found: Vec<Val> =
            found.map(|(f, n)| self.e.inst(format!("phi float [ {f}, %{large} ], [ {n}, %{small} ]"))).collect();
        found.iter().map(|v| self.cast_element(v, DType::F32, d)).collect()
    }

    pub(super) fn binary(&mut self, op: BinaryOp, d: DType, a: &str, b: &str) -> Val {
        if d.is_float() {
            // One rounding each, as in f32 and back: a sum or product of two f16 is exact to more bits in f32 than rounding
            // twice could reveal. Pairs become one instruction.
            if let (DType::F16, Some(name)) = (
                d,
                match op {
                    BinaryOp::Add => Some("fadd"),
                    BinaryOp::Sub => Some("fsub"),
                    BinaryOp::Mul | BinaryOp::Rescale => Some("fmul"),
                    _ => None,
                },
            ) {
                return self.e.inst(format!("{name} half {a}, {b}"));
            }
            let contract = if self.options.fp_fusion { "contract " } else { "" };
            return self.in_f32(d, &[a, b], |this, args, ty| {
                let (a, b) = (&args[0], &args[1]);
                let bits = if ty == "double" { 64 } else { 32 };
                match op {
                    BinaryOp::Add => this.e.inst(format!("fadd {contract}{ty} {a}, {b}")),
                    BinaryOp::Sub => this.e.inst(format!("fsub {contract}{ty} {a}, {b}")),
                    BinaryOp::Mul => this.e.inst(format!("fmul {contract}{ty} {a}, {b}")),
                    BinaryOp::Rescale => this.e.inst(format!("fmul {ty} {a}, {b}")),
                    // Two units in the last place over the whole range; `div.rn` calls a subroutine.
                    BinaryOp::Div if bits == 32 => this.e.inst(format!(
                        "call float asm \"div.full.f32 $0, $1, $2;\", \"=f,f,f\"(float {a}, float {b}) #2"
                    )),
                    BinaryOp::Div => this.e.inst(format!("fdiv {ty} {a}, {b}")),
                    BinaryOp::Rem => remainder(&mut this.e, ty, a, b),
                    BinaryOp::Min => this.e.call(ty, &format!("llvm.minnum.f{bits}"), &[(ty, a), (ty, b)]),
                    BinaryOp::Max => this.e.call(ty, &format!("llvm.maxnum.f{bits}"), &[(ty, a), (ty, b)]),
                    other => panic!("internal compiler error: `{}` of floats", other.name()),
                }
            });
        }
        let ty = llvm_type(Elem::Num(d));
        let signed = d.is_signed_int();
        if let ("i32", Some(name)) = (
            ty,
            match op {
                BinaryOp::Add => Some("add"),
                BinaryOp::Sub => Some("sub"),
                _ => None,
            },
        ) && let Some(sum) = self.e.add_offsets(name, a, b)
        {
            return sum;
        }
        let text = match op {
            BinaryOp::Add => format!("add {ty} {a}, {b}"),
            BinaryOp::Sub => format!("sub {ty} {a}, {b}"),
            BinaryOp::Mul => format!("mul {ty} {a}, {b}"),
            BinaryOp::Div | BinaryOp::Rem => {
                let any = num::int_range(d);
                return self.integer_division(op == BinaryOp::Rem, d, (a, b), [any, any]);
            }
            BinaryOp::CeilDiv => {
                let any = num::int_range(d);
                return self.ceil_div(d, (a, b), [any, any]);
            }
            BinaryOp::Rescale => panic!("internal compiler error: `rescale` of {d}; please report this"),
            BinaryOp::And => format!("and {ty} {a}, {b}"),
            BinaryOp::Or => format!("or {ty} {a}, {b}"),
            BinaryOp::Xor => format!("xor {ty} {a}, {b}"),
            BinaryOp::Shl | BinaryOp::Shr => return self.shift(op == BinaryOp::Shl, d, a, b),
            BinaryOp::Min | BinaryOp::Max => {
                let name = match (op == BinaryOp::Min, signed) {
                    (true, true) => "smin",
                    (true, false) => "umin",
                    (false, true) => "smax",
                    (false, false) => "umax",
                };
                return self.e.call(ty, &format!("llvm.{name}.{ty}"), &[(ty, a), (ty, b)]);
            }
            // LLVM finds no `mul.hi` in the wide product where it hoists one of the extensions out of a loop.
            BinaryOp::MulHi if d.bits() >= 32 => {
                let suffix = match (d.bits(), signed) {
                    (32, true) => "i",
                    (32, false) => "ui",
                    (_, true) => "ll",
                    (_, false) => "ull",
                };
                return self.e.call(ty, &format!("llvm.nvvm.mulhi.{suffix}"), &[(ty, a), (ty, b)]);
            }
            BinaryOp::MulHi => {
                let bits = d.bits();
                let wide = format!("i{}", 2 * bits);
                let extend = if signed { "sext" } else { "zext" };
                let a = self.e.inst(format!("{extend} {ty} {a} to {wide}"));
                let b = self.e.inst(format!("{extend} {ty} {b} to {wide}"));
                let product = self.e.inst(format!("mul {wide} {a}, {b}"));
                let high = self.e.inst(format!("lshr {wide} {product}, {bits}"));
                format!("trunc {wide} {high} to {ty}")
            }
        };
        self.e.inst(text)
    }

    /// Integer division: division by zero yields quotient and remainder 0, and the one quotient that overflows wraps,
    /// as on the CPU. LLVM's `sdiv` would be undefined there. `ranges` bound the operands.
    fn integer_division(
        &mut self,
        remainder: bool,
        d: DType,
        (a, b): (&str, &str),
        [dividend, divisor]: [(i128, i128); 2],
    ) -> Val {
        let ty = llvm_type(Elem::Num(d));
        // Unsigned division takes fewer instructions.
        let signed = d.is_signed_int() && (dividend.0 < 0 || divisor.0 < 0);
        let op = match (signed, remainder) {
            (true, false) => "sdiv",
            (true, true) => "srem",
            (false, false) => "udiv",
            (false, true) => "urem",
        };
        let holds = |(low, high): (i128, i128), n: i128| low <= n && n <= high;
        let mut safe = b.to_string();
        let by_zero = holds(divisor, 0).then(|| self.e.inst(format!("icmp eq {ty} {b}, 0")));
        if let Some(by_zero) = &by_zero {
            safe = self.e.inst(format!("select i1 {by_zero}, {ty} 1, {ty} {safe}"));
        }
        let overflows = signed && holds(dividend, num::int_range(d).0) && holds(divisor, -1);
        let by_minus_one = overflows.then(|| self.e.inst(format!("icmp eq {ty} {b}, -1")));
        if let Some(by_minus_one) = &by_minus_one {
            safe = self.e.inst(format!("select i1 {by_minus_one}, {ty} 1, {ty} {safe}"));
        }
        let mut result = self.e.inst(format!("{op} {ty} {a}, {safe}"));
        if let Some(by_minus_one) = by_minus_one.filter(|_| !remainder) {
            let negated = self.e.inst(format!("sub {ty} 0, {a}"));
            result = self.e.inst(format!("select i1 {by_minus_one}, {ty} {negated}, {ty} {result}"));
        }
        match by_zero {
            Some(by_zero) => self.e.inst(format!("select i1 {by_zero}, {ty} 0, {ty} {result}")),
            None => result,
        }
    }

    /// Emits the quotient rounded up, without intermediate results that wrap. The ranges bound the operands, and select
    /// one of five instruction sequences; the shortest comes first.
    fn ceil_div(&mut self, d: DType, (a, b): (&str, &str), [dividend, divisor]: [(i128, i128); 2]) -> Val {
        let ty = llvm_type(Elem::Num(d));
        let number = (divisor.0 == divisor.1).then_some(divisor.0);
        let largest_unsigned = (1i128 << d.bits()) - 1;
        if dividend.0 >= 0 && divisor.0 > 0 && dividend.1 + divisor.1 - 1 <= largest_unsigned {
            let less = match number {
                Some(n) => (n - 1).to_string(),
                None => self.e.inst(format!("add {ty} {b}, -1")),
            };
            let sum = self.e.inst(format!("add nuw {ty} {a}, {less}"));
            return self.e.inst(format!("udiv {ty} {sum}, {b}"));
        }
        let power_of_two = number.filter(|n| *n > 0 && n.count_ones() == 1);
        // In 64 bits, although that may take a register or two more here: with the 32-bit sequences, loops take more
        // registers in `ptxas` (matmul 195, not 192).
        if let Some(n) = power_of_two.filter(|_| d.bits() <= 32) {
            let extend = if d.is_signed_int() { "sext" } else { "zext" };
            let wide = self.e.inst(format!("{extend} {ty} {a} to i64"));
            let sum = self.e.inst(format!("add i64 {wide}, {}", n - 1));
            let shifted = self.e.inst(format!("ashr i64 {sum}, {}", n.trailing_zeros()));
            return self.e.inst(format!("trunc i64 {shifted} to {ty}"));
        }
        if let Some(n) = power_of_two {
            let shift = if d.is_signed_int() { "ashr" } else { "lshr" };
            let floor = self.e.inst(format!("{shift} {ty} {a}, {}", n.trailing_zeros()));
            let rest = self.e.inst(format!("and {ty} {a}, {}", n - 1));
            let rounded_down = self.e.inst(format!("icmp ne {ty} {rest}, 0"));
            let one_more = self.e.inst(format!("zext i1 {rounded_down} to {ty}"));
            return self.e.inst(format!("add {ty} {floor}, {one_more}"));
        }
        let quotient = self.integer_division(false, d, (a, b), [dividend, divisor]);
        let rest = self.integer_division(true, d, (a, b), [dividend, divisor]);
        // The quotient was rounded down where the remainder is not 0 and has the divisor's sign.
        let rounded_down = if !d.is_signed_int() || divisor.0 > 0 {
            let above = if d.is_signed_int() { "sgt" } else { "ne" };
            self.e.inst(format!("icmp {above} {ty} {rest}, 0"))
        } else {
            let signs = self.e.inst(format!("xor {ty} {rest}, {b}"));
            let same_sign = self.e.inst(format!("icmp sge {ty} {signs}, 0"));
            let some = self.e.inst(format!("icmp ne {ty} {rest}, 0"));
            self.e.inst(format!("and i1 {some}, {same_sign}"))
        };
        let one_more = self.e.inst(format!("zext i1 {rounded_down} to {ty}"));
        self.e.inst(format!("add {ty} {quotient}, {one_more}"))
    }

    /// Emits a shift. A shift by the bit width or more yields the result of shifting bit by bit, as on the CPU: 0, or
    /// the sign in every bit.
    fn shift(&mut self, left: bool, d: DType, a: &str, b: &str) -> Val {
        let (ty, most) = (llvm_type(Elem::Num(d)), d.bits() - 1);
        let op = match (left, d.is_signed_int()) {
            (true, _) => "shl",
            (false, true) => "ashr",
            (false, false) => "lshr",
        };
        if b.parse::<usize>().is_ok_and(|n| n <= most) {
            return self.e.inst(format!("{op} {ty} {a}, {b}"));
        }
        let count = self.e.call(ty, &format!("llvm.umin.{ty}"), &[(ty, b), (ty, &most.to_string())]);
        let shifted = self.e.inst(format!("{op} {ty} {a}, {count}"));
        if op == "ashr" {
            return shifted;
        }
        let in_range = self.e.inst(format!("icmp ule {ty} {b}, {most}"));
        self.e.inst(format!("select i1 {in_range}, {ty} {shifted}, {ty} 0"))
    }

    fn compare(&mut self, op: CmpOp, elem: Elem, a: &str, b: &str) -> Val {
        if let Elem::Num(d) = elem
            && d.is_float()
        {
            let predicate = match op {
                CmpOp::Eq => "oeq",
                CmpOp::Ne => "une",
                CmpOp::Lt => "olt",
                CmpOp::Le => "ole",
                CmpOp::Gt => "ogt",
                CmpOp::Ge => "oge",
            };
            let (a, b, ty) = match d {
                DType::F32 | DType::F64 => (a.to_string(), b.to_string(), llvm_type(elem)),
                _ => (self.cast_element(a, d, DType::F32), self.cast_element(b, d, DType::F32), "float"),
            };
            return self.e.inst(format!("fcmp {predicate} {ty} {a}, {b}"));
        }
        let signed = elem.num().is_some_and(DType::is_signed_int);
        let predicate = match (op, signed) {
            (CmpOp::Eq, _) => "eq",
            (CmpOp::Ne, _) => "ne",
            (CmpOp::Lt, true) => "slt",
            (CmpOp::Le, true) => "sle",
            (CmpOp::Gt, true) => "sgt",
            (CmpOp::Ge, true) => "sge",
            (CmpOp::Lt, false) => "ult",
            (CmpOp::Le, false) => "ule",
            (CmpOp::Gt, false) => "ugt",
            (CmpOp::Ge, false) => "uge",
        };
        self.e.inst(format!("icmp {predicate} {} {a}, {b}", llvm_type(elem)))
    }

    /// Inlines a combine region. Returns the values that it yields for these arguments.
    pub(super) fn inline_region(&mut self, region: BlockId, args: &[Val]) -> Result<Vec<Val>> {
        let block = self.func.block(region);
        for (&p, a) in block.params.iter().zip(args) {
            self.values[p.0 as usize] = Some(Rc::new(vec![a.clone()]));
        }
        for &id in &block.ops {
            self.op(id)?;
        }
        let results: Vec<Value> = block.ops.last().map(|&id| self.func.op(id).operands.clone()).unwrap_or_default();
        Ok(results.iter().map(|&v| self.scalar(v)).collect())
    }

    /// Emits one asm statement per `pack` elements: outputs first, then the elements of the operands.
    fn inline_asm(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::InlineAsm { asm, constraints, pack, pure } = &data.op else {
            panic!("internal compiler error: not inline asm")
        };
        let pack = (*pack).max(1);
        let anchor = data.results.iter().chain(&data.operands).copied().find(|&v| self.layout(v).is_some());
        let count = anchor.map_or(1, |v| self.tile_layout(v).num_registers());
        if count % pack != 0 {
            return self.unsupported(
                format!("inline asm packs {pack} elements, but each thread holds {count} elements of this tile"),
                Some("use a larger tile, fewer warps, or a smaller `pack`"),
            );
        }
        let packed_ty = |this: &Self, v: Value| -> String {
            let bits = this.elem(v).bits() * pack;
            if pack == 1 { this.ty(v).to_string() } else { format!("i{bits}") }
        };
        let mut results: Vec<Vec<Val>> = vec![Vec::new(); data.results.len()];
        for first in (0..count).step_by(pack) {
            let mut args = Vec::new();
            for &v in &data.operands {
                let regs = self.regs(v);
                let ty = packed_ty(self, v);
                let group: Vec<Val> = (0..pack)
                    .map(|i| if regs.len() == 1 { regs[0].clone() } else { regs[first + i].clone() })
                    .collect();
                let value = self.pack_elements(&group, self.ty(v), &ty);
                args.push(format!("{ty} {value}"));
            }
            let types: Vec<String> = data.results.iter().map(|&v| packed_ty(self, v)).collect();
            let result_ty = match &types[..] {
                [] => "void".to_string(),
                [one] => one.clone(),
                many => format!("{{ {} }}", many.join(", ")),
            };
            let effect = if *pure { "" } else { "sideeffect " };
            let text = format!(
                "call {result_ty} asm {effect}\"{}\", \"{constraints}\"({}) {USER_ASM}{}",
                asm.replace('\\', "\\5C").replace('"', "\\22").replace('\n', "\\0A"),
                args.join(", "),
                if *pure { " #2" } else { "" }
            );
            if types.is_empty() {
                self.e.void(text);
                continue;
            }
            let out = self.e.inst(text);
            for (i, &v) in data.results.iter().enumerate() {
                let part = if types.len() == 1 {
                    out.clone()
                } else {
                    self.e.inst(format!("extractvalue {result_ty} {out}, {i}"))
                };
                let elements = self.unpack_elements(&part, &types[i], self.ty(v), pack);
                results[i].extend(elements);
            }
        }
        for (&v, regs) in data.results.iter().zip(results) {
            self.set(v, regs);
        }
        Ok(())
    }

    /// Packs elements into one integer, the first in the low bits.
    pub(super) fn pack_elements(&mut self, elements: &[Val], ty: &str, packed: &str) -> Val {
        if elements.len() == 1 {
            return if ty == packed {
                elements[0].clone()
            } else if ty.starts_with("ptr") {
                self.e.inst(format!("ptrtoint {ty} {} to {packed}", elements[0]))
            } else {
                self.e.inst(format!("bitcast {ty} {} to {packed}", elements[0]))
            };
        }
        if let Some(words) = self.words_of_bytes(elements, ty) {
            return self.pack_elements(&words, "i16", packed);
        }
        let vector = format!("<{} x {ty}>", elements.len());
        let mut v = "poison".to_string();
        for (i, x) in elements.iter().enumerate() {
            v = self.e.inst(format!("insertelement {vector} {v}, {ty} {x}, i32 {i}"));
        }
        self.e.inst(format!("bitcast {vector} {v} to {packed}"))
    }

    /// The 16-bit words that pairs of these bytes have in vectors; `None` if not all pairs are words.
    fn words_of_bytes(&mut self, bytes: &[Val], ty: &str) -> Option<Vec<Val>> {
        let pairs = (ty == "i8" && bytes.len().is_multiple_of(2)).then(|| bytes.chunks(2))?;
        pairs.map(|pair| self.e.word_of([&pair[0], &pair[1]], ty)).collect()
    }

    pub(super) fn unpack_elements(&mut self, packed: &str, packed_ty: &str, ty: &str, count: usize) -> Vec<Val> {
        if count == 1 {
            return vec![if ty == packed_ty {
                packed.to_string()
            } else if ty.starts_with("ptr") {
                self.e.inst(format!("inttoptr {packed_ty} {packed} to {ty}"))
            } else {
                self.e.inst(format!("bitcast {packed_ty} {packed} to {ty}"))
            }];
        }
        let v = self.e.inst(format!("bitcast {packed_ty} {packed} to <{count} x {ty}>"));
        self.e.elements(&v, ty, count)
    }
}
