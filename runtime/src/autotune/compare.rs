//! Compares the outputs of two runs of a kernel.

use std::ops::Range;

use rayon::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::num;

/// Elements per chunk: errors are computed for each chunk separately. A wrong row of a large output changes the overall
/// error by little, the error of its chunk by much.
const CHUNK_ELEMENTS: usize = 256;

/// Maximum number of bytes compared per output: downloading and comparing more would take longer than the runs to be
/// timed.
const MAX_COMPARED_BYTES: usize = 64 << 20;

/// Bytes of a compared window: several rows or tiles of most outputs.
const WINDOW_BYTES: usize = 64 << 10;

/// The byte ranges of an output of `len` bytes that are compared: all of it, or, if that exceeds the limit, windows at
/// equal distances, including the first and the last bytes. A candidate that computes some tiles wrong usually does so
/// all over an output.
pub(super) fn compared_windows(len: usize) -> Vec<Range<usize>> {
    if len <= MAX_COMPARED_BYTES {
        return std::iter::once(0..len).collect();
    }
    let count = MAX_COMPARED_BYTES / WINDOW_BYTES;
    // A multiple of the bytes of a chunk, for every element type.
    let aligned = |start: usize| start / (8 * CHUNK_ELEMENTS) * (8 * CHUNK_ELEMENTS);
    let start =
        |i: usize| if i + 1 == count { len - WINDOW_BYTES } else { aligned((len - WINDOW_BYTES) / (count - 1) * i) };
    (0..count).map(|i| start(i)..start(i) + WINDOW_BYTES).collect()
}

/// Maximum relative error between outputs that differ only in the order of summation. `types` are the element types of
/// all memory arguments: an intermediate result that is rounded to a narrow type affects outputs of wider types, too.
pub(super) fn tolerance(types: impl Iterator<Item = DType>) -> f64 {
    let of = |dtype: DType| match dtype {
        DType::F8E4M3 | DType::F8E5M2 => 0.2,
        // Attention over thousands of keys averages values that cancel: its probabilities, rounded to bf16 for tiles of
        // another size, change its results by up to 2.5e-2. One wrong element of a chunk is an error of 6e-2.
        DType::F16 | DType::BF16 => 5e-2,
        // f32 dots may use tf32.
        DType::F32 => 5e-3,
        DType::F64 => 1e-6,
        _ => 0.0,
    };
    types.map(of).fold(0.0, f64::max)
}

/// The maximum relative error of any chunk of an output, relative to the root mean square of the whole output if the
/// chunk's is smaller. Infinite if one value is NaN and the other is not, and if integers differ.
pub(super) fn relative_error(dtype: DType, want: &[u8], found: &[u8]) -> f64 {
    let bytes = dtype.bytes();
    let read = |memory: &[u8], i: usize| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(&memory[i * bytes..(i + 1) * bytes]);
        u64::from_le_bytes(word)
    };
    if !dtype.is_float() {
        return if want == found { 0.0 } else { f64::INFINITY };
    }
    let value = |memory: &[u8], i: usize| num::decode(dtype, read(memory, i));
    // A candidate's outputs may be gigabytes: pieces run in parallel, and their sums are added in order, so that the
    // result is deterministic.
    let squares = |memory: &[u8]| {
        let finite = (0..memory.len() / bytes).map(|i| value(memory, i)).filter(|x| x.is_finite());
        finite.fold((0.0_f64, 0_usize), |(total, count), x| (total + x * x, count + 1))
    };
    let pieces: Vec<(f64, usize)> = want.par_chunks(256 * CHUNK_ELEMENTS * bytes).map(squares).collect();
    let (total, count) = pieces.into_iter().fold((0.0, 0), |(x, n), (y, m)| (x + y, n + m));
    let mean_square = total / count.max(1) as f64;
    let error_of_chunk = |(want, found): (&[u8], &[u8])| {
        if want == found {
            return 0.0;
        }
        let (mut difference, mut size) = (0.0_f64, 0.0_f64);
        let n = want.len() / bytes;
        for i in 0..n {
            let (x, y) = (value(want, i), value(found, i));
            // Infinities, and elements that neither run wrote, have equal bits.
            if read(want, i) == read(found, i) || x.is_nan() && y.is_nan() {
                continue;
            }
            difference += (x - y) * (x - y);
            size += x * x;
        }
        if difference == 0.0 {
            return 0.0;
        }
        let floor = mean_square * n as f64;
        let relative = (difference / size.max(floor).max(f64::MIN_POSITIVE)).sqrt();
        if relative.is_nan() { f64::INFINITY } else { relative }
    };
    let chunks = want.par_chunks(CHUNK_ELEMENTS * bytes).zip(found.par_chunks(CHUNK_ELEMENTS * bytes)).with_min_len(64);
    chunks.map(error_of_chunk).reduce(|| 0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn local_error_in_a_large_output_is_detected() {
        let want: Vec<f32> = (0..100_000).map(|i| 1.0 + (i % 7) as f32).collect();
        let mut found = want.clone();
        assert_eq!(relative_error(DType::F32, &bytes(&want), &bytes(&found)), 0.0);
        found.iter_mut().for_each(|x| *x *= 1.0 + 1e-6);
        let small = relative_error(DType::F32, &bytes(&want), &bytes(&found));
        assert!(small > 1e-7 && small < 1e-5, "{small}");
        found[50_000..50_100].fill(0.0);
        assert!(relative_error(DType::F32, &bytes(&want), &bytes(&found)) > 0.3);
    }

    #[test]
    fn compared_windows_cover_large_outputs_evenly() {
        assert!(compared_windows(0).len() == 1 && compared_windows(0)[0].is_empty());
        assert_eq!(
            (compared_windows(MAX_COMPARED_BYTES).len(), compared_windows(MAX_COMPARED_BYTES)[0].clone()),
            (1, 0..MAX_COMPARED_BYTES)
        );
        // One element of f32, f64 or bf16 more than a multiple of `WINDOW_BYTES`.
        for len in [MAX_COMPARED_BYTES + 4, MAX_COMPARED_BYTES + WINDOW_BYTES + 8, 10 * MAX_COMPARED_BYTES + 2] {
            let windows = compared_windows(len);
            assert_eq!(windows.iter().map(Range::len).sum::<usize>(), MAX_COMPARED_BYTES);
            assert_eq!((windows[0].start, windows[windows.len() - 1].end), (0, len));
            let apart = len / windows.len();
            for pair in windows.windows(2) {
                assert!(
                    pair[0].start < pair[1].start && pair[1].start - pair[0].start < apart + WINDOW_BYTES,
                    "{len}: {pair:?}"
                );
            }
            assert!(windows[..windows.len() - 1].iter().all(|window| window.start.is_multiple_of(8)));
        }
    }

    #[test]
    fn nan_equals_only_nan() {
        let (nan, one) = (bytes(&[f32::NAN, 1.0]), bytes(&[2.0, 1.0]));
        assert_eq!(relative_error(DType::F32, &nan, &nan), 0.0);
        assert_eq!(relative_error(DType::F32, &one, &nan), f64::INFINITY);
        assert_eq!(relative_error(DType::F32, &nan, &one), f64::INFINITY);
        let infinite = bytes(&[f32::INFINITY, 1.0]);
        assert_eq!(relative_error(DType::F32, &infinite, &infinite), 0.0);
        assert_eq!(relative_error(DType::F32, &one, &infinite), f64::INFINITY);
        assert_eq!(relative_error(DType::I32, &one, &nan), f64::INFINITY);
    }

    #[test]
    fn rounding_errors_of_small_values_are_tolerated() {
        let mut want = vec![100.0_f32; 1024];
        want[..256].fill(1e-6);
        let mut found = want.clone();
        found[..256].fill(2e-6);
        assert!(relative_error(DType::F32, &bytes(&want), &bytes(&found)) < 1e-6);
    }

    #[test]
    fn narrowest_type_sets_the_tolerance() {
        assert_eq!(tolerance([DType::F32, DType::BF16, DType::I64].into_iter()), 5e-2);
        assert_eq!(tolerance([DType::I32].into_iter()), 0.0);
    }
}
