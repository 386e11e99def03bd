//! What kernels call: LLVM intrinsics, and functions of their module. Names are read once, when a module is parsed.

use super::error::UnsupportedKind;
use super::parse::Ty;
use super::value::{self, Value, mask};
use crate::ir::DType;
use crate::num;

/// A function that a call names.
#[derive(Clone, Debug)]
pub enum Callee {
    /// Of the module, by its name.
    Function(String),
    /// An intrinsic that computes from its arguments alone.
    Pure(Intrinsic),
    /// `shfl.sync` from the lane of a number, of which the segment mask replaces bits by those of the own one, or
    /// (`butterfly`) from the lane of that number's exclusive or with the own one.
    Shuffle {
        butterfly: bool,
    },
    /// `vote.sync.any`: whether the argument of a thread of the warp is true.
    Any,
    WarpBarrier,
    /// `fence.proxy.async` of shared memory.
    ProxyFence,
    /// `tid.x`.
    ThreadId,
    /// `ctaid` on an axis.
    ProgramId(usize),
    /// `nctaid` on an axis.
    NumPrograms(usize),
    /// An assumption, or output.
    Nothing,
    Trap,
    AssertFailed,
}

impl Callee {
    /// The callee of this name: a function of the module, unless it is known.
    pub fn of(name: &str) -> Callee {
        let axis = |prefix: &str| super::asm::axis_of(name, prefix);
        match name {
            "llvm.nvvm.shfl.sync.bfly.i32" => Callee::Shuffle { butterfly: true },
            "llvm.nvvm.shfl.sync.idx.i32" => Callee::Shuffle { butterfly: false },
            "llvm.nvvm.vote.any.sync" => Callee::Any,
            "llvm.nvvm.bar.warp.sync" => Callee::WarpBarrier,
            "llvm.nvvm.fence.proxy.async.shared_cta" => Callee::ProxyFence,
            "llvm.nvvm.read.ptx.sreg.tid.x" => Callee::ThreadId,
            "llvm.assume" | "vprintf" => Callee::Nothing,
            "llvm.trap" => Callee::Trap,
            "__assertfail" => Callee::AssertFailed,
            _ => match (axis("llvm.nvvm.read.ptx.sreg.ctaid."), axis("llvm.nvvm.read.ptx.sreg.nctaid.")) {
                (Some(axis), _) => Callee::ProgramId(axis),
                (_, Some(axis)) => Callee::NumPrograms(axis),
                _ => Intrinsic::parse(name).map_or_else(|| Callee::Function(name.into()), Callee::Pure),
            },
        }
    }
}

/// An LLVM intrinsic that computes from its arguments alone.
#[derive(Clone, Debug)]
pub struct Intrinsic {
    name: String,
    op: IntrinsicOp,
}

#[derive(Clone, Copy, Debug)]
enum IntrinsicOp {
    /// Two f32 as a pair of 16-bit floats.
    Pack(DType),
    /// A float as an integer, saturating.
    ToInt {
        signed: bool,
    },
    Fma,
    MinNum,
    MaxNum,
    FAbs,
    Floor,
    Ceil,
    Trunc,
    Rint,
    Sqrt,
    CopySign,
    Abs,
    SMin,
    SMax,
    UMin,
    UMax,
    MulHi {
        signed: bool,
    },
}

impl Intrinsic {
    /// The intrinsic of this name, with the suffixes of its types; `None` if it is not supported.
    pub fn parse(name: &str) -> Option<Intrinsic> {
        let parts: Vec<&str> = name.split('.').collect();
        let op = match parts[..] {
            ["llvm", "nvvm", "ff2bf16x2", "rn"] => IntrinsicOp::Pack(DType::BF16),
            ["llvm", "nvvm", "ff2f16x2", "rn"] => IntrinsicOp::Pack(DType::F16),
            ["llvm", "nvvm", "mulhi", "i" | "ll"] => IntrinsicOp::MulHi { signed: true },
            ["llvm", "nvvm", "mulhi", "ui" | "ull"] => IntrinsicOp::MulHi { signed: false },
            ["llvm", "fptosi", "sat", ..] => IntrinsicOp::ToInt { signed: true },
            ["llvm", "fptoui", "sat", ..] => IntrinsicOp::ToInt { signed: false },
            ["llvm", function, ..] => match function {
                "fma" => IntrinsicOp::Fma,
                "minnum" => IntrinsicOp::MinNum,
                "maxnum" => IntrinsicOp::MaxNum,
                "fabs" => IntrinsicOp::FAbs,
                "floor" => IntrinsicOp::Floor,
                "ceil" => IntrinsicOp::Ceil,
                "trunc" => IntrinsicOp::Trunc,
                "rint" => IntrinsicOp::Rint,
                "sqrt" => IntrinsicOp::Sqrt,
                "copysign" => IntrinsicOp::CopySign,
                "abs" => IntrinsicOp::Abs,
                "smin" => IntrinsicOp::SMin,
                "smax" => IntrinsicOp::SMax,
                "umin" => IntrinsicOp::UMin,
                "umax" => IntrinsicOp::UMax,
                _ => return None,
            },
            _ => return None,
        };
        Some(Intrinsic { name: name.into(), op })
    }

    /// The result, of type `ty`, for the bits of arguments with their types.
    ///
    /// # Errors
    /// Missing arguments, and types that are not supported.
    pub fn evaluate(&self, ty: &Ty, args: &[(&Ty, u64)]) -> Result<Value, UnsupportedKind> {
        let argument = |i: usize| args.get(i).copied().ok_or_else(|| UnsupportedKind::Function(self.name.clone()));
        let bits = |i: usize| argument(i).map(|(_, bits)| bits);
        let f = |i: usize| argument(i).and_then(|(ty, bits)| value::float(bits, ty));
        let out = |x: f64| value::float_bits(x, ty);
        let unknown = || UnsupportedKind::Function(self.name.clone());
        let width = || value::int_bits(ty).ok().filter(|&bits| bits <= 64).ok_or_else(unknown);
        let signed = |i: usize| Ok::<i64, UnsupportedKind>(value::signed(bits(i)?, width()?));
        let unsigned = |i: usize| Ok::<u64, UnsupportedKind>(bits(i)? & mask(width()?));
        let int = |x: i64| Ok::<u64, UnsupportedKind>(x as u64 & mask(width()?));
        Ok(Value::Bits(match self.op {
            IntrinsicOp::Pack(dtype) => {
                // The first operand goes to the high half.
                let halves = [f(1)?, f(0)?].map(|x| Value::Bits(num::encode(dtype, x)));
                return Ok(Value::aggregate(halves.to_vec()));
            }
            IntrinsicOp::ToInt { signed } => saturate(signed, width()?, f(0)?),
            IntrinsicOp::Fma => num::fused_multiply_add(value::dtype(ty)?, bits(0)?, bits(1)?, bits(2)?),
            IntrinsicOp::MinNum => out(num::minimum_number(f(0)?, f(1)?))?,
            IntrinsicOp::MaxNum => out(num::maximum_number(f(0)?, f(1)?))?,
            IntrinsicOp::FAbs => out(f(0)?.abs())?,
            IntrinsicOp::Floor => out(f(0)?.floor())?,
            IntrinsicOp::Ceil => out(f(0)?.ceil())?,
            IntrinsicOp::Trunc => out(f(0)?.trunc())?,
            IntrinsicOp::Rint => out(f(0)?.round_ties_even())?,
            IntrinsicOp::Sqrt => out(f(0)?.sqrt())?,
            IntrinsicOp::CopySign => out(f(0)?.copysign(f(1)?))?,
            IntrinsicOp::Abs => int(signed(0)?.wrapping_abs())?,
            IntrinsicOp::SMin => int(signed(0)?.min(signed(1)?))?,
            IntrinsicOp::SMax => int(signed(0)?.max(signed(1)?))?,
            IntrinsicOp::UMin => unsigned(0)?.min(unsigned(1)?),
            IntrinsicOp::UMax => unsigned(0)?.max(unsigned(1)?),
            IntrinsicOp::MulHi { signed: true } => {
                ((i128::from(signed(0)?) * i128::from(signed(1)?)) >> width()?) as u64 & mask(width()?)
            }
            IntrinsicOp::MulHi { signed: false } => {
                ((u128::from(unsigned(0)?) * u128::from(unsigned(1)?)) >> width()?) as u64
            }
        }))
    }
}

/// Converts a float to an integer of `bits` bits, saturating; NaN gives zero.
fn saturate(signed: bool, bits: u32, x: f64) -> u64 {
    let (low, high) =
        if signed { (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1) } else { (0, (1i128 << bits) - 1) };
    (x as i128).clamp(low, high) as u64 & mask(bits)
}
