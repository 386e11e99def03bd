//! Whether two runs of a kernel wrote the same.

use tilewright_codegen::ir::DType;
use tilewright_codegen::num;

/// Elements whose error is looked at together. A wrong row of a large output changes its overall error by little, that of
/// its own part by much.
const PART: usize = 256;

/// Largest relative error between outputs that differ by the order of sums alone. `types` are those of all the kernel's
/// memory: what is rounded to a small type on the way shows in large ones too.
pub(super) fn tolerance(types: impl Iterator<Item = DType>) -> f64 {
    let of = |dtype: DType| match dtype {
        DType::F8E4M3 | DType::F8E5M2 => 0.2,
        DType::F16 | DType::BF16 => 2e-2,
        // Products may be of tf32.
        DType::F32 => 5e-3,
        DType::F64 => 1e-6,
        _ => 0.0,
    };
    types.map(of).fold(0.0, f64::max)
}

/// The largest relative error of any part of an output, against the root mean square of the whole where the part itself is
/// small. Infinite where one is NaN and the other is not, and where integers differ.
pub(super) fn error(dtype: DType, want: &[u8], found: &[u8]) -> f64 {
    let bytes = dtype.bytes();
    let read = |memory: &[u8], i: usize| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(&memory[i * bytes..(i + 1) * bytes]);
        u64::from_le_bytes(word)
    };
    if !dtype.is_float() {
        return if want == found { 0.0 } else { f64::INFINITY };
    }
    let n = want.len() / bytes;
    let value = |memory: &[u8], i: usize| num::decode(dtype, read(memory, i));
    let (mut total, mut count) = (0.0_f64, 0_usize);
    for i in 0..n {
        let x = value(want, i);
        if x.is_finite() {
            total += x * x;
            count += 1;
        }
    }
    let mean_square = total / count.max(1) as f64;
    let mut worst = 0.0_f64;
    for start in (0..n).step_by(PART) {
        let part = start..(start + PART).min(n);
        let (mut difference, mut size) = (0.0_f64, 0.0_f64);
        for i in part.clone() {
            let (x, y) = (value(want, i), value(found, i));
            // Infinities and what neither wrote are equal as bits.
            if read(want, i) == read(found, i) || x.is_nan() && y.is_nan() {
                continue;
            }
            difference += (x - y) * (x - y);
            size += x * x;
        }
        if difference > 0.0 || difference.is_nan() {
            let floor = mean_square * part.len() as f64;
            let relative = (difference / size.max(floor).max(f64::MIN_POSITIVE)).sqrt();
            worst = if relative.is_nan() { f64::INFINITY } else { worst.max(relative) };
        }
    }
    worst
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn a_wrong_part_is_seen_in_a_large_output() {
        let want: Vec<f32> = (0..100_000).map(|i| 1.0 + (i % 7) as f32).collect();
        let mut found = want.clone();
        assert_eq!(error(DType::F32, &bytes(&want), &bytes(&found)), 0.0);
        found.iter_mut().for_each(|x| *x *= 1.0 + 1e-6);
        let small = error(DType::F32, &bytes(&want), &bytes(&found));
        assert!(small > 1e-7 && small < 1e-5, "{small}");
        found[50_000..50_100].fill(0.0);
        assert!(error(DType::F32, &bytes(&want), &bytes(&found)) > 0.3);
    }

    #[test]
    fn nan_is_equal_to_itself_alone() {
        let (nan, one) = (bytes(&[f32::NAN, 1.0]), bytes(&[2.0, 1.0]));
        assert_eq!(error(DType::F32, &nan, &nan), 0.0);
        assert_eq!(error(DType::F32, &one, &nan), f64::INFINITY);
        assert_eq!(error(DType::F32, &nan, &one), f64::INFINITY);
        let infinite = bytes(&[f32::INFINITY, 1.0]);
        assert_eq!(error(DType::F32, &infinite, &infinite), 0.0);
        assert_eq!(error(DType::F32, &one, &infinite), f64::INFINITY);
        assert_eq!(error(DType::I32, &one, &nan), f64::INFINITY);
    }

    #[test]
    fn rounding_of_small_numbers_among_large_ones_is_no_mistake() {
        let mut want = vec![100.0_f32; 1024];
        want[..256].fill(1e-6);
        let mut found = want.clone();
        found[..256].fill(2e-6);
        assert!(error(DType::F32, &bytes(&want), &bytes(&found)) < 1e-6);
    }

    #[test]
    fn the_smallest_type_decides() {
        assert_eq!(tolerance([DType::F32, DType::BF16, DType::I64].into_iter()), 2e-2);
        assert_eq!(tolerance([DType::I32].into_iter()), 0.0);
    }
}
