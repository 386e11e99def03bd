//! Float conversions that LLVM calls by name where the CPU has no instruction.
//!
//! The runtime libraries of GCC and compiler-rt define these functions, but not all systems have all of them
//! (`__truncsfbf2` came with GCC 13), so native code links this crate's. Names and semantics are those of libgcc's
//! "Soft float library routines": *trunc* or *extend*, source, target, with `sf` for f32, `df` for f64, `hf` for f16,
//! `bf` for bf16.
//!
//! On x86-64 and AArch64, a 16-bit float is passed in the low bits of a floating-point register, as an f32 is. The
//! functions therefore pass it as an f32 with these low bits.

use half::{bf16, f16};

/// Names and addresses of the functions below.
pub(super) fn table() -> [(&'static std::ffi::CStr, usize); 5] {
    [
        (c"__truncsfbf2", f32_to_bf16 as *const () as usize),
        (c"__truncdfbf2", f64_to_bf16 as *const () as usize),
        (c"__truncsfhf2", f32_to_f16 as *const () as usize),
        (c"__truncdfhf2", f64_to_f16 as *const () as usize),
        (c"__extendhfsf2", f16_to_f32 as *const () as usize),
    ]
}

extern "C" fn f32_to_bf16(value: f32) -> f32 {
    f32::from_bits(bf16::from_f32(value).to_bits() as u32)
}

extern "C" fn f64_to_bf16(value: f64) -> f32 {
    f32_to_bf16(round_to_odd(value))
}

extern "C" fn f32_to_f16(value: f32) -> f32 {
    f32::from_bits(f16::from_f32(value).to_bits() as u32)
}

extern "C" fn f64_to_f16(value: f64) -> f32 {
    f32_to_f16(round_to_odd(value))
}

extern "C" fn f16_to_f32(value: f32) -> f32 {
    f16::from_bits(value.to_bits() as u16).to_f32()
}

/// Converts `value` to f32, truncated, with the last bit set if the result is inexact. Rounding the result to nearest
/// in a type at least two bits shorter then equals rounding `value` itself (Boldo and Melquiond, "When double rounding
/// is odd", 2005).
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if nearest as f64 == value || value.is_nan() {
        return nearest;
    }
    let truncated = nearest.to_bits() - u32::from((nearest as f64).abs() > value.abs());
    f32::from_bits(truncated | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn low16(value: f32) -> u16 {
        value.to_bits() as u16
    }

    /// Rounds to the nearest of all finite f16 values by exhaustive search, ties to even.
    fn nearest_f16(value: f64) -> u16 {
        let distance = |bits: u16| (f16::from_bits(bits).to_f64() - value).abs();
        (0..0x7c00).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
    }

    #[test]
    fn doubles_round_once() {
        // Just above a tie between two f16 values, by less than f32 resolves: rounding to f32 first would lose it.
        let tie = 1.0 + 2f64.powi(-11);
        for value in [tie, tie + 2f64.powi(-40), tie - 2f64.powi(-40), 0.1, 1e-7, 3e-8, 65000.0] {
            assert_eq!(low16(f64_to_f16(value)), nearest_f16(value), "{value}");
            assert_eq!(low16(f64_to_f16(-value)), nearest_f16(value) | 0x8000, "{}", -value);
        }
        let bf16_tie = 1.0 + 2f64.powi(-8);
        assert_eq!(low16(f64_to_bf16(bf16_tie)), 0x3f80);
        assert_eq!(low16(f64_to_bf16(bf16_tie + 2f64.powi(-45))), 0x3f81);
        assert_eq!(low16(f64_to_bf16(bf16_tie * 3.0 - 2f64.powi(-40))), low16(f32_to_bf16(3.01)));
    }

    #[test]
    fn extremes_stay_extreme() {
        assert_eq!(low16(f64_to_f16(1e300)), 0x7c00);
        assert_eq!(low16(f64_to_f16(f64::NEG_INFINITY)), 0xfc00);
        assert_eq!(low16(f64_to_f16(1e-300)), 0);
        assert!(f16::from_bits(low16(f64_to_f16(f64::NAN))).is_nan());
        assert!(bf16::from_bits(low16(f32_to_bf16(f32::NAN))).is_nan());
        assert_eq!(f16_to_f32(f32::from_bits(0xffff_3c00)), 1.0, "the upper bits of the register are ignored");
    }
}
