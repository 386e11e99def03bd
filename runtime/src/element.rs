//! Element types of buffers, and the two 8-bit floats that Rust lacks.

use half::{bf16, f16};
use std::fmt;

use crate::error::{Error, Result};

/// Type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F8E4M3,
    F8E5M2,
    F16,
    Bf16,
    F32,
    F64,
}

impl Dtype {
    /// Size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Dtype::Bool | Dtype::I8 | Dtype::U8 | Dtype::F8E4M3 | Dtype::F8E5M2 => 1,
            Dtype::I16 | Dtype::U16 | Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::I32 | Dtype::U32 | Dtype::F32 => 4,
            Dtype::I64 | Dtype::U64 | Dtype::F64 => 8,
        }
    }

    /// Whether this is a float of 8 bits.
    pub fn is_f8(self) -> bool {
        matches!(self, Dtype::F8E4M3 | Dtype::F8E5M2)
    }

    /// Its name in kernels.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bool => "bool",
            Dtype::I8 => "i8",
            Dtype::I16 => "i16",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
            Dtype::U16 => "u16",
            Dtype::U32 => "u32",
            Dtype::U64 => "u64",
            Dtype::F8E4M3 => "f8e4m3",
            Dtype::F8E5M2 => "f8e5m2",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `len` zeros.
fn zeroed<T: bytemuck::Zeroable>(len: usize) -> Result<Vec<T>> {
    let requested = || (len as u64).saturating_mul(size_of::<T>() as u64);
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| Error::HostMemory { requested: requested() })
}

mod sealed {
    pub trait Sealed {}
}

/// A type of buffer elements. Device memory may contain any bytes, so reading uses [`Element::from_bytes`].
pub trait Element: sealed::Sealed + Copy + Send + Sync + fmt::Debug + PartialEq + 'static {
    /// The run-time value for this type.
    const DTYPE: Dtype;

    /// The bytes of `values`.
    fn as_bytes(values: &[Self]) -> &[u8];

    /// `len` values, whose memory `fill` writes.
    ///
    /// # Errors
    /// Those of `fill`, or not enough memory for the values.
    fn from_bytes(len: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Vec<Self>>;
}

/// Element types for which every bit pattern is a value.
macro_rules! plain_elements {
    ($($ty:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const DTYPE: Dtype = Dtype::$dtype;

            fn as_bytes(values: &[Self]) -> &[u8] {
                bytemuck::cast_slice(values)
            }

            fn from_bytes(len: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Vec<Self>> {
                let mut values: Vec<Self> = zeroed(len)?;
                fill(bytemuck::cast_slice_mut(&mut values))?;
                Ok(values)
            }
        }
    )*};
}

plain_elements! {
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
    F8E4M3 => F8E4M3, F8E5M2 => F8E5M2, f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64,
}

impl sealed::Sealed for bool {}
impl Element for bool {
    const DTYPE: Dtype = Dtype::Bool;

    fn as_bytes(values: &[Self]) -> &[u8] {
        bytemuck::cast_slice(values)
    }

    /// Every byte except zero is true.
    fn from_bytes(len: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Vec<Self>> {
        let mut bytes: Vec<u8> = zeroed(len)?;
        fill(&mut bytes)?;
        // Same size and alignment: collected in place.
        Ok(bytes.into_iter().map(|byte| byte != 0).collect())
    }
}

/// 8-bit float with 4 exponent and 3 mantissa bits, no infinities, one NaN (OCP 8-bit floating point, E4M3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// 8-bit float with 5 exponent and 2 mantissa bits, IEEE-like infinities and NaNs (OCP 8-bit floating point, E5M2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

impl F8E4M3 {
    /// Largest finite value.
    pub const MAX: f32 = 448.0;

    /// The exact value.
    pub fn to_f32(self) -> f32 {
        if self.0 & 0x7f == 0x7f { f32::NAN } else { decode(self.0, 3, 7) }
    }

    /// Rounds to the nearest value, ties to even; magnitudes that are too large, including infinities, become
    /// ±[`F8E4M3::MAX`], as with `cvt.rn.satfinite`.
    pub fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            return F8E4M3(0x7f);
        }
        F8E4M3(encode(value, 0x7e, |byte| F8E4M3(byte).to_f32()))
    }
}

impl F8E5M2 {
    /// Largest finite value.
    pub const MAX: f32 = 57344.0;

    /// The exact value.
    pub fn to_f32(self) -> f32 {
        match self.0 & 0x7f {
            0x7c => f32::INFINITY.copysign(if self.0 & 0x80 == 0 { 1.0 } else { -1.0 }),
            0x7d.. => f32::NAN,
            _ => decode(self.0, 2, 15),
        }
    }

    /// Rounds to the nearest value, ties to even; magnitudes that are too large, including infinities, become
    /// ±[`F8E5M2::MAX`], as with `cvt.rn.satfinite`.
    pub fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            return F8E5M2(0x7f);
        }
        F8E5M2(encode(value, 0x7b, |byte| F8E5M2(byte).to_f32()))
    }
}

/// Decodes a finite value from its bits: sign, exponent with `bias`, `mantissa_bits` of mantissa.
fn decode(bits: u8, mantissa_bits: u32, bias: i32) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let mantissa = (bits & ((1 << mantissa_bits) - 1)) as f32 / (1 << mantissa_bits) as f32;
    let exponent = ((bits & 0x7f) >> mantissa_bits) as i32;
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(1 - bias),
        _ => (1.0 + mantissa) * 2f32.powi(exponent - bias),
    };
    sign * magnitude
}

/// The byte whose value is nearest to `value`, ties to even. Magnitudes increase with the byte, so a bisection between
/// 0 and `max_finite` finds it.
fn encode(value: f32, max_finite: u8, to_f32: impl Fn(u8) -> f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    let (mut low, mut high) = (0, max_finite);
    if magnitude >= to_f32(high) {
        return sign | high;
    }
    // Invariant: to_f32(low) <= magnitude < to_f32(high).
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if to_f32(middle) <= magnitude { low = middle } else { high = middle }
    }
    let (below, above) = (magnitude - to_f32(low), to_f32(high) - magnitude);
    let up = above < below || (above == below && low & 1 == 1);
    sign | if up { high } else { low }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_8_bit_values() {
        assert_eq!(F8E4M3(0x7e).to_f32(), F8E4M3::MAX);
        assert_eq!(F8E4M3(0x01).to_f32(), 2f32.powi(-9));
        assert_eq!(F8E4M3(0x38).to_f32(), 1.0);
        assert_eq!(F8E5M2(0x7b).to_f32(), F8E5M2::MAX);
        assert_eq!(F8E5M2(0x01).to_f32(), 2f32.powi(-16));
        assert_eq!(F8E5M2(0xbc).to_f32(), -1.0);
        assert_eq!(F8E5M2(0xfc).to_f32(), f32::NEG_INFINITY);
        assert!(F8E4M3(0xff).to_f32().is_nan() && F8E5M2(0xff).to_f32().is_nan());
    }

    #[test]
    fn every_8_bit_value_survives_a_round_trip() {
        for byte in 0..=255 {
            let (a, b) = (F8E4M3(byte), F8E5M2(byte));
            if a.to_f32().is_finite() {
                assert_eq!(F8E4M3::from_f32(a.to_f32()), a);
            }
            if b.to_f32().is_finite() {
                assert_eq!(F8E5M2::from_f32(b.to_f32()), b);
            }
        }
    }

    /// f16 also has 5 exponent bits: E5M2 is f16 rounded to its upper byte, with integer arithmetic.
    #[test]
    fn e5m2_rounds_as_the_upper_byte_of_f16() {
        for bits in 0..0x7b80_u16 {
            let rounded = (bits + 0x7f + ((bits >> 8) & 1)) >> 8;
            assert_eq!(F8E5M2::from_f32(f16::from_bits(bits).to_f32()).0 as u16, rounded, "bits {bits:#x}");
        }
    }

    #[test]
    fn too_large_values_saturate() {
        assert_eq!(F8E4M3::from_f32(1e9).to_f32(), F8E4M3::MAX);
        assert_eq!(F8E4M3::from_f32(f32::NEG_INFINITY).to_f32(), -F8E4M3::MAX);
        assert_eq!(F8E5M2::from_f32(f32::INFINITY).to_f32(), F8E5M2::MAX);
    }

    #[test]
    fn bools_are_read_from_any_bytes() {
        let read = bool::from_bytes(3, |bytes| {
            bytes.copy_from_slice(&[0, 1, 0xff]);
            Ok(())
        });
        assert_eq!(read.unwrap(), [false, true, true]);
    }

    #[test]
    fn lack_of_memory_is_an_error_with_the_bytes() {
        let message = f64::from_bytes(1 << 57, |_| Ok(())).unwrap_err().to_string();
        assert!(message.contains("out of memory") && message.contains("1152921504606846976 bytes"), "{message}");
        assert!(bool::from_bytes(usize::MAX, |_| Ok(())).is_err() && f16::from_bytes(usize::MAX, |_| Ok(())).is_err());
    }
}
