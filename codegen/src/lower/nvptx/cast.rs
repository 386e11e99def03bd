//! Conversions between element types.

use super::elementwise::literal;
use super::emit::Val;
use super::{Lowering, llvm_type};
use crate::ir::{DType, Elem, Literal};
use crate::target::GpuArch;

impl Lowering<'_> {
    /// Casts all registers of a tile. f32 → f16/bf16 converts two registers per instruction. bf16 → f32 of a packed
    /// pair takes one instruction per element: the halves of the word are the upper halves of the results.
    pub(super) fn cast(&mut self, regs: &[Val], from: DType, to: DType) -> Vec<Val> {
        let packed = match (from, to) {
            (DType::F32, DType::BF16) => Some(("bfloat", "llvm.nvvm.ff2bf16x2.rn")),
            (DType::F32, DType::F16) => Some(("half", "llvm.nvvm.ff2f16x2.rn")),
            _ => None,
        };
        if let (Some((ty, name)), true) = (packed, regs.len().is_multiple_of(2)) {
            let vector = format!("<2 x {ty}>");
            return regs
                .chunks(2)
                .flat_map(|pair| {
                    // The first operand becomes the high half.
                    let v = self.e.call(&vector, name, &[("float", &pair[1]), ("float", &pair[0])]);
                    [0, 1].map(|i| self.e.inst(format!("extractelement {vector} {v}, i32 {i}")))
                })
                .collect();
        }
        if (from, to) == (DType::BF16, DType::F32) && regs.len().is_multiple_of(2) {
            return regs.chunks(2).flat_map(|pair| self.widen_pair([&pair[0], &pair[1]])).collect();
        }
        if from != DType::F64 && to.is_f8() && self.converts_f8() && regs.len().is_multiple_of(2) {
            let wide = self.cast(regs, from, DType::F32);
            return wide.chunks(2).flat_map(|pair| self.narrow_pair(pair, to)).collect();
        }
        if from.is_f8() && self.converts_f8() && regs.len().is_multiple_of(2) {
            let halves: Vec<Val> = regs.chunks(2).flat_map(|pair| self.halves_of_f8(pair, from)).collect();
            return self.cast(&halves, DType::F16, to);
        }
        if let (DType::I8 | DType::U8, DType::F16, true) = (from, to, regs.len().is_multiple_of(4)) {
            return regs.chunks(4).flat_map(|bytes| self.bytes_to_halves(bytes, from == DType::I8)).collect();
        }
        regs.iter().map(|x| self.cast_element(x, from, to)).collect()
    }

    /// Converts four 8-bit integers to f16: as the last bits of the mantissa of 1024, a number is added to 1024, which is
    /// subtracted again. Conversion instructions have a quarter of the rate.
    fn bytes_to_halves(&mut self, bytes: &[Val], signed: bool) -> Vec<Val> {
        let mut word = self.pack_elements(bytes, "i8", "i32");
        if signed {
            // As unsigned numbers that are 128 larger.
            word = self.e.inst(format!("xor i32 {word}, {}", 0x8080_8080_u32 as i32));
        }
        let zero = if signed { "0xH6480" } else { "0xH6400" };
        // Of the bytes of the word (0 to 3) and of the constant (4 to 7), those of the result.
        let pairs = ["0x4140", "0x4342"].map(|bytes| {
            let asm = format!("\"prmt.b32 $0, $1, $2, {bytes};\", \"=r,r,r\"");
            self.e.inst(format!("call i32 asm {asm}(i32 {word}, i32 {}) #2", 0x6464_6464))
        });
        let sums: Vec<Val> = pairs.iter().flat_map(|pair| self.unpack_elements(pair, "i32", "half", 2)).collect();
        sums.iter().map(|sum| self.e.inst(format!("fsub half {sum}, {zero}"))).collect()
    }

    /// Converts two f32 to 8-bit floats.
    fn narrow_pair(&mut self, pair: &[Val], to: DType) -> Vec<Val> {
        // The first operand becomes the high byte.
        let asm = format!("cvt.rn.satfinite.{}x2.f32 $0, $1, $2;", &to.name()[2..]);
        let word = self.e.inst(format!("call i16 asm \"{asm}\", \"=h,f,f\"(float {}, float {}) #2", pair[1], pair[0]));
        self.unpack_elements(&word, "i16", "i8", 2)
    }

    /// Converts two 8-bit floats to f16, which has all of their values.
    fn halves_of_f8(&mut self, pair: &[Val], from: DType) -> Vec<Val> {
        let word = self.pack_elements(pair, "i8", "i16");
        let asm = format!("cvt.rn.f16x2.{}x2 $0, $1;", &from.name()[2..]);
        let halves = self.e.inst(format!("call i32 asm \"{asm}\", \"=r,h\"(i16 {word}) #2"));
        self.unpack_elements(&halves, "i32", "half", 2)
    }

    /// Whether the target has instructions that convert 8-bit floats: 8.9 from PTX 8.1 on.
    fn converts_f8(&self) -> bool {
        self.arch >= GpuArch::Sm90a || self.arch == GpuArch::Sm89 && self.options.ptx_version >= 81
    }

    /// Converts two bf16 to f32.
    fn widen_pair(&mut self, pair: [&str; 2]) -> [Val; 2] {
        match self.e.word_of(pair, "bfloat") {
            Some(word) => {
                let low = self.e.inst(format!("shl i32 {word}, 16"));
                let high = self.e.inst(format!("and i32 {word}, -65536"));
                [low, high].map(|bits| self.e.inst(format!("bitcast i32 {bits} to float")))
            }
            None => pair.map(|x| self.cast_element(x, DType::BF16, DType::F32)),
        }
    }

    /// Numeric conversion of one element, as `cast` defines it.
    pub(super) fn cast_element(&mut self, x: &str, from: DType, to: DType) -> Val {
        let (from_ty, to_ty) = (llvm_type(Elem::Num(from)), llvm_type(Elem::Num(to)));
        if from == to {
            return x.to_string();
        }
        if let Some(v) = self.cast_f8(x, from, to) {
            return v;
        }
        if to == DType::Bool {
            return if from.is_float() {
                self.e.inst(format!("fcmp une {from_ty} {x}, {}", literal(Literal::Float(0.0), Elem::Num(from))))
            } else {
                self.e.inst(format!("icmp ne {from_ty} {x}, 0"))
            };
        }
        let text = match (from.is_float(), to.is_float()) {
            (true, true) if from.bits() < to.bits() => format!("fpext {from_ty} {x} to {to_ty}"),
            (true, true) if from.bits() > to.bits() => format!("fptrunc {from_ty} {x} to {to_ty}"),
            (true, true) => {
                // f16 and bf16 convert through f32.
                let wide = self.e.inst(format!("fpext {from_ty} {x} to float"));
                format!("fptrunc float {wide} to {to_ty}")
            }
            (true, false) => {
                let sign = if to.is_signed_int() { "s" } else { "u" };
                let wide = self.cast_element(x, from, if from == DType::F64 { DType::F64 } else { DType::F32 });
                let wide_ty = if from == DType::F64 { ("f64", "double") } else { ("f32", "float") };
                let name = format!("llvm.fpto{sign}i.sat.{to_ty}.{}", wide_ty.0);
                return self.e.call(to_ty, &name, &[(wide_ty.1, &wide)]);
            }
            (false, true) => {
                let convert = if from.is_signed_int() { "sitofp" } else { "uitofp" };
                format!("{convert} {from_ty} {x} to {to_ty}")
            }
            (false, false) if from.bits() < to.bits() || from == DType::Bool => {
                let extend = if from.is_signed_int() { "sext" } else { "zext" };
                format!("{extend} {from_ty} {x} to {to_ty}")
            }
            (false, false) if from.bits() > to.bits() => format!("trunc {from_ty} {x} to {to_ty}"),
            (false, false) => return x.to_string(),
        };
        self.e.inst(text)
    }

    /// Conversions from and to the 8-bit floats: by instructions where the target has them, else by integer arithmetic.
    fn cast_f8(&mut self, x: &str, from: DType, to: DType) -> Option<Val> {
        let native = self.converts_f8();
        if from.is_f8() && native {
            let half = self.halves_of_f8(&[x.to_string(), "0".to_string()], from).swap_remove(0);
            return Some(self.cast_element(&half, DType::F16, to));
        }
        if from.is_f8() {
            self.e.f8 = true;
            let wide = self.e.inst(format!("call float @decode.{from}(i8 {x})"));
            return Some(self.cast_element(&wide, DType::F32, to));
        }
        if !to.is_f8() {
            return None;
        }
        let wide = match from {
            DType::F64 => {
                self.e.f8 = true;
                self.e.inst(format!("call float @odd(double {x})"))
            }
            _ => self.cast_element(x, from, DType::F32),
        };
        if native {
            return Some(self.narrow_pair(&[wide, "0.0".to_string()], to).swap_remove(0));
        }
        self.e.f8 = true;
        Some(self.e.inst(format!("call i8 @encode.{to}(float {wide})")))
    }
}
