//! Microscaling (MX) formats on the host, as operands of `dot_scaled`: 4-bit floats (E2M1), two of them in each byte, and
//! scales that are powers of two (E8M0), as in the "OCP Microscaling Formats (MX) Specification", version 1.0.

use crate::{Error, Result};

/// The 4-bit floats without a sign, by their code. The bit above is the sign.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The code, 0 to 15, of the 4-bit float that is nearest to `value`, ties to even. Magnitudes above 6, infinities and NaN
/// become 6, with the sign of `value`.
pub fn to_e2m1(value: f32) -> u8 {
    let (sign, magnitude) = (u8::from(value.is_sign_negative()) << 3, value.abs());
    // The number of midpoints below the magnitude; one on a midpoint goes to the even code.
    let above = |code: usize| {
        let middle = (E2M1[code] + E2M1[code + 1]) / 2.0;
        magnitude > middle || (magnitude == middle && code % 2 == 1)
    };
    let code = if value.is_nan() { 7 } else { (0..7).filter(|&code| above(code)).count() };
    sign | code as u8
}

/// The value of a 4-bit float; only the lowest four bits of the code count.
pub fn from_e2m1(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The largest power of two that is not above `value`, as an E8M0 scale: 2^(code − 127), at least 2⁻¹²⁷. NaN, infinities,
/// zero and negative numbers give 255, which is NaN.
pub fn to_e8m0(value: f32) -> u8 {
    if !value.is_finite() || value <= 0.0 {
        return 255;
    }
    // The exponent of f32 has the same bias; that of subnormal numbers is 0.
    (value.to_bits() >> 23) as u8
}

/// The value of an E8M0 scale: 2^(code − 127), or NaN for 255.
pub fn from_e8m0(code: u8) -> f32 {
    match code {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 22),
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// Number of positions before `axis`, along it, and behind it.
fn around(shape: &[usize], axis: usize, found: usize) -> Result<[usize; 3]> {
    let Some(&extent) = shape.get(axis) else { return Err(Error::NoSuchAxis { axis, rank: shape.len() }) };
    let product = |extents: &[usize]| extents.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    let (Some(before), Some(behind), Some(expected)) =
        (product(&shape[..axis]), product(&shape[axis + 1..]), product(shape))
    else {
        return Err(Error::TooLarge { shape: shape.to_vec() });
    };
    if found != expected {
        return Err(Error::Length { what: "4-bit floats", expected, found });
    }
    Ok([before, extent, behind])
}

/// Packs the codes of a row-major tensor of that shape in pairs along `axis`, the first in the low bits. An odd extent is
/// padded with a zero.
pub fn pack(codes: &[u8], shape: &[usize], axis: usize) -> Result<Vec<u8>> {
    let [before, extent, behind] = around(shape, axis, codes.len())?;
    let code = |i: usize, l: usize, j: usize| {
        if l < extent { codes[(i * extent + l) * behind + j] & 15 } else { 0 }
    };
    let mut bytes = Vec::with_capacity(codes.len().div_ceil(2));
    if codes.is_empty() {
        return Ok(bytes);
    }
    for i in 0..before {
        for l in (0..extent).step_by(2) {
            bytes.extend((0..behind).map(|j| code(i, l, j) | (code(i, l + 1, j) << 4)));
        }
    }
    Ok(bytes)
}

/// The codes of a row-major tensor of that shape, from pairs along `axis`: the inverse of [`pack`].
pub fn unpack(bytes: &[u8], shape: &[usize], axis: usize) -> Result<Vec<u8>> {
    let mut packed = shape.to_vec();
    if let Some(extent) = packed.get_mut(axis) {
        *extent = extent.div_ceil(2);
    }
    let [before, pairs, behind] = around(&packed, axis, bytes.len())?;
    let extent = shape[axis];
    let mut codes = Vec::with_capacity(2 * bytes.len());
    if bytes.is_empty() {
        return Ok(codes);
    }
    for i in 0..before {
        for l in 0..extent {
            let row = &bytes[(i * pairs + l / 2) * behind..][..behind];
            codes.extend(row.iter().map(|byte| (byte >> (4 * (l % 2))) & 15));
        }
    }
    Ok(codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest of all values by distances in f64, the even one of two.
    fn nearest(value: f32) -> f32 {
        let distance = |code: &u8| (f64::from(from_e2m1(*code)) - f64::from(value.abs())).abs();
        let best = (0..8).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))).unwrap();
        from_e2m1(best).copysign(value)
    }

    #[test]
    fn e2m1_rounds_to_nearest_and_saturates() {
        for at in -1000..=1000 {
            let value = at as f32 / 128.0;
            assert_eq!(from_e2m1(to_e2m1(value)).to_bits(), nearest(value).to_bits(), "{value}");
        }
        for (value, want) in
            [(7.0, 6.0), (f32::INFINITY, 6.0), (-1e30, -6.0), (f32::NAN, 6.0), (0.25, 0.0), (0.75, 1.0)]
        {
            assert_eq!(from_e2m1(to_e2m1(value)), want, "{value}");
        }
        assert_eq!(from_e2m1(to_e2m1(-0.0)).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn e2m1_codes_round_trip() {
        assert!((0..16).all(|code| to_e2m1(from_e2m1(code)) == code));
    }

    #[test]
    fn e8m0_is_the_power_of_two_below() {
        for code in 0..255 {
            assert_eq!(f64::from(from_e8m0(code)), f64::from(i32::from(code) - 127).exp2());
            assert_eq!(to_e8m0(from_e8m0(code)), code);
        }
        assert_eq!((to_e8m0(1.0), to_e8m0(1.99), to_e8m0(f32::MAX), to_e8m0(1e-45)), (127, 127, 254, 0));
        assert!(from_e8m0(255).is_nan());
        assert!([0.0, -1.0, f32::NAN, f32::INFINITY].into_iter().all(|value| to_e8m0(value) == 255));
    }

    #[test]
    fn pairs_are_packed_along_any_axis() {
        let shape = [2, 3, 4];
        let codes: Vec<u8> = (0..24).map(|at| (at * 5 % 16) as u8).collect();
        assert_eq!(pack(&codes, &shape, 2).unwrap()[..2], [codes[0] | (codes[1] << 4), codes[2] | (codes[3] << 4)]);
        // Of three rows, the last one is packed with zeros.
        assert_eq!(pack(&codes, &shape, 1).unwrap()[..5], {
            [0, 1, 2, 3].map(|j| codes[j] | (codes[4 + j] << 4)).into_iter().chain([codes[8]]).collect::<Vec<_>>()
        });
        for axis in 0..3 {
            assert_eq!(unpack(&pack(&codes, &shape, axis).unwrap(), &shape, axis).unwrap(), codes, "{axis}");
        }
        for shape in [[0, 4], [4, 0], [1 << 40, 0]] {
            assert!(pack(&[], &shape, 0).unwrap().is_empty() && unpack(&[], &shape, 0).unwrap().is_empty());
        }
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let message = |result: Result<Vec<u8>>| result.unwrap_err().to_string();
        assert_eq!(message(pack(&[1, 2], &[2], 1)), "there is no axis 1 in a shape of 1 dimensions");
        assert_eq!(message(unpack(&[1], &[2], 3)), "there is no axis 3 in a shape of 1 dimensions");
        assert_eq!(message(pack(&[1, 2], &[4], 0)), "4-bit floats: expected 4 elements, found 2");
        assert!(message(pack(&[1], &[usize::MAX, 2], 0)).contains("more elements than the address space"));
    }
}
