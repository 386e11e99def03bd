//! Values as bits, and arithmetic on them.

use super::error::UnsupportedKind;
use super::parse::Ty;
use crate::ir::DType;
use crate::num;
use std::rc::Rc;

/// The value of a thread's register.
#[derive(Clone, Debug, Hash)]
pub enum Value {
    Bits(u64),
    Aggregate(Rc<Vec<Value>>),
    /// An accumulator of an MMA in flight: the index of the MMA, and the bits of the result.
    Pending(u64, u64),
    Undef,
}

impl Value {
    /// The bits of a scalar; an error if the value cannot be used.
    pub fn bits(&self) -> Result<u64, String> {
        match self {
            Value::Bits(b) => Ok(*b),
            Value::Pending(..) => Err("the result of a wgmma is used before it was waited for".into()),
            Value::Undef => Err("an undefined value is used".into()),
            Value::Aggregate(_) => Err("a vector is used as a scalar".into()),
        }
    }

    pub fn aggregate(list: Vec<Value>) -> Value {
        Value::Aggregate(Rc::new(list))
    }

    pub fn element(&self, i: usize) -> Value {
        match self {
            // LLVM: poison.
            Value::Aggregate(list) => list.get(i).cloned().unwrap_or(Value::Undef),
            other => other.clone(),
        }
    }
}

pub fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

pub fn signed(x: u64, bits: u32) -> i64 {
    let shift = 64 - bits.min(64);
    ((x << shift) as i64) >> shift
}

pub fn f32_from_bits(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// The element type of a float.
pub fn dtype(ty: &Ty) -> Result<DType, UnsupportedKind> {
    match ty {
        Ty::Half => Ok(DType::F16),
        Ty::BFloat => Ok(DType::BF16),
        Ty::Float => Ok(DType::F32),
        Ty::Double => Ok(DType::F64),
        other => Err(UnsupportedKind::Type(format!("{other} as a float"))),
    }
}

/// The width of an integer type in bits.
pub fn int_bits(ty: &Ty) -> Result<u32, UnsupportedKind> {
    match ty {
        Ty::Int(bits) => Ok(*bits),
        other => Err(UnsupportedKind::Type(format!("{other} as an integer"))),
    }
}

/// The value of a float's bits.
pub fn float(bits: u64, ty: &Ty) -> Result<f64, UnsupportedKind> {
    Ok(match ty {
        Ty::Float => f64::from(f32_from_bits(bits)),
        Ty::Double => f64::from_bits(bits),
        ty => num::decode(dtype(ty)?, bits & 0xFFFF),
    })
}

/// The bits of the nearest float, rounded once.
pub fn float_bits(x: f64, ty: &Ty) -> Result<u64, UnsupportedKind> {
    Ok(match ty {
        Ty::Float => u64::from((x as f32).to_bits()),
        Ty::Double => x.to_bits(),
        ty => num::encode(dtype(ty)?, x),
    })
}

pub fn is_float(ty: &Ty) -> bool {
    matches!(ty, Ty::Half | Ty::BFloat | Ty::Float | Ty::Double)
}

pub fn binary(op: &str, ty: &Ty, a: u64, b: u64) -> Result<u64, UnsupportedKind> {
    let unknown = || UnsupportedKind::Instruction(format!("{op} {ty}"));
    if is_float(ty) {
        return Ok(match (op, ty) {
            // In the type itself: f64 arithmetic would round twice.
            ("fadd", Ty::Float) => u64::from((f32_from_bits(a) + f32_from_bits(b)).to_bits()),
            ("fsub", Ty::Float) => u64::from((f32_from_bits(a) - f32_from_bits(b)).to_bits()),
            ("fmul", Ty::Float) => u64::from((f32_from_bits(a) * f32_from_bits(b)).to_bits()),
            ("fdiv", Ty::Float) => u64::from((f32_from_bits(a) / f32_from_bits(b)).to_bits()),
            ("frem", Ty::Float) => u64::from((f32_from_bits(a) % f32_from_bits(b)).to_bits()),
            _ => {
                let (x, y) = (float(a, ty)?, float(b, ty)?);
                let r = match op {
                    "fadd" => x + y,
                    "fsub" => x - y,
                    "fmul" => x * y,
                    "fdiv" => x / y,
                    "frem" => x % y,
                    _ => return Err(unknown()),
                };
                float_bits(r, ty)?
            }
        });
    }
    let bits = int_bits(ty)?;
    let (a, b) = (a & mask(bits), b & mask(bits));
    let (sa, sb) = (signed(a, bits), signed(b, bits));
    let shift = b.min(63) as u32;
    let r = match op {
        "add" => a.wrapping_add(b),
        "sub" => a.wrapping_sub(b),
        "mul" => a.wrapping_mul(b),
        "udiv" => a.checked_div(b).unwrap_or(0),
        "urem" => a.checked_rem(b).unwrap_or(0),
        "sdiv" => sa.checked_div(sb).unwrap_or(0) as u64,
        "srem" => sa.checked_rem(sb).unwrap_or(0) as u64,
        "and" => a & b,
        "or" => a | b,
        "xor" => a ^ b,
        "shl" => {
            if b >= u64::from(bits) {
                0
            } else {
                a << shift
            }
        }
        "lshr" => {
            if b >= u64::from(bits) {
                0
            } else {
                a >> shift
            }
        }
        "ashr" => (sa >> shift.min(bits - 1)) as u64,
        _ => return Err(unknown()),
    };
    Ok(r & mask(bits))
}

/// Arithmetic on i128: only what double-width products need.
pub fn wide_binary(op: &str, a: u128, b: u128) -> Result<u128, UnsupportedKind> {
    Ok(match op {
        "mul" => a.wrapping_mul(b),
        "lshr" => u32::try_from(b).ok().and_then(|b| a.checked_shr(b)).unwrap_or(0),
        _ => return Err(UnsupportedKind::Instruction(format!("{op} i128"))),
    })
}

pub fn compare(predicate: &str, ty: &Ty, a: u64, b: u64) -> Result<bool, UnsupportedKind> {
    let (kind, predicate) = predicate.split_at(1);
    let unknown = || UnsupportedKind::Instruction(format!("{kind}cmp {predicate} {ty}"));
    if kind == "f" {
        let (x, y) = (float(a, ty)?, float(b, ty)?);
        let unordered = x.is_nan() || y.is_nan();
        return Ok(match predicate {
            "oeq" => x == y,
            "one" => !unordered && x != y,
            "olt" => x < y,
            "ole" => x <= y,
            "ogt" => x > y,
            "oge" => x >= y,
            "une" => x != y,
            "uno" => unordered,
            "ord" => !unordered,
            "ult" => unordered || x < y,
            "ugt" => unordered || x > y,
            "ueq" => unordered || x == y,
            "ule" => unordered || x <= y,
            "uge" => unordered || x >= y,
            _ => return Err(unknown()),
        });
    }
    let bits = match ty {
        Ty::Ptr(_) => 64,
        Ty::Int(bits) if *bits <= 64 => *bits,
        _ => return Err(unknown()),
    };
    let (a, b) = (a & mask(bits), b & mask(bits));
    let (sa, sb) = (signed(a, bits), signed(b, bits));
    Ok(match predicate {
        "eq" => a == b,
        "ne" => a != b,
        "slt" => sa < sb,
        "sle" => sa <= sb,
        "sgt" => sa > sb,
        "sge" => sa >= sb,
        "ult" => a < b,
        "ule" => a <= b,
        "ugt" => a > b,
        "uge" => a >= b,
        _ => return Err(unknown()),
    })
}

/// Casts a scalar of at most 64 bits; the caller handles bitcasts between vectors.
pub fn cast(op: &str, from: &Ty, x: u64, to: &Ty) -> Result<u64, UnsupportedKind> {
    let int = |t: &Ty| match t {
        Ty::Ptr(_) => Ok(64),
        t => int_bits(t),
    };
    Ok(match op {
        "zext" => x & mask(int(from)?) & mask(int(to)?),
        "sext" => signed(x, int(from)?) as u64 & mask(int(to)?),
        "trunc" => x & mask(int(to)?) & mask(int(from)?),
        "fpext" | "fptrunc" => float_bits(float(x, from)?, to)?,
        // Narrow floats would be rounded twice by way of f64.
        "sitofp" => num::convert(DType::I64, dtype(to)?, signed(x, int(from)?) as u64),
        "uitofp" => num::convert(DType::U64, dtype(to)?, x & mask(int(from)?)),
        "fptosi" => float(x, from)? as i64 as u64 & mask(int(to)?),
        "fptoui" => float(x, from)? as u64 & mask(int(to)?),
        "ptrtoint" => x & mask(int(to)?),
        "bitcast" if from.bytes() != to.bytes() => {
            return Err(UnsupportedKind::Instruction(format!("bitcast {from} to {to}")));
        }
        "inttoptr" | "bitcast" | "addrspacecast" => x,
        _ => return Err(UnsupportedKind::Instruction(format!("{op} {from} to {to}"))),
    })
}

pub fn from_bytes(ty: &Ty, bytes: &[u8]) -> Value {
    match ty {
        Ty::Vector(n, t) | Ty::Array(n, t) => {
            // Vectors of i1 would be packed; the lowering does not emit them.
            let size = bytes.len() / n;
            Value::aggregate((0..*n).map(|i| from_bytes(t, &bytes[i * size..(i + 1) * size])).collect())
        }
        _ => {
            let mut all = [0; 8];
            all[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
            Value::Bits(u64::from_le_bytes(all))
        }
    }
}

pub fn to_bytes(ty: &Ty, v: &Value) -> Result<Vec<u8>, String> {
    match ty {
        Ty::Vector(n, t) => {
            let mut bytes = Vec::new();
            for i in 0..*n {
                bytes.extend(to_bytes(t, &v.element(i))?);
            }
            Ok(bytes)
        }
        _ => Ok(v.bits()?.to_le_bytes()[..ty.bytes()].to_vec()),
    }
}

/// Like [`to_bytes`], with undefined values as zeros.
pub fn to_bytes_undef_as_zero(ty: &Ty, v: &Value) -> Result<Vec<u8>, String> {
    match (ty, v) {
        (Ty::Vector(n, t), Value::Aggregate(list)) => {
            let mut bytes = Vec::new();
            for x in list.iter().take(*n) {
                bytes.extend(to_bytes_undef_as_zero(t, x)?);
            }
            Ok(bytes)
        }
        (ty, Value::Undef) => Ok(vec![0; ty.bytes()]),
        _ => to_bytes(ty, v),
    }
}
