//! Global gradient norm and clip factor (gradient clipping, as `clip_grad_norm_` in PyTorch), and detection of
//! non-finite gradients.

use std::ops::Range;

use tilewright::kernels::FloatElement;
use tilewright::prelude::*;
use tilewright::{View, ViewMut};

/// Elements per tile.
const TILE: usize = 1024;

/// Tiles per program: enough programs to fill a GPU, and few partial sums.
fn tiles_per_program(n: usize) -> usize {
    if n < 1 << 26 { 16 } else { 128 }
}

/// partials\[p\] = Σᵢ xᵢ² in f32, over the `tiles` · `tile` elements of program p.
#[kernel]
pub fn sum_squares<T: Float>(
    x: In<T>,
    partials: Out<f32>,
    n: i64,
    #[constexpr] tile: usize,
    #[constexpr] tiles: usize,
) {
    let mut offsets = program_id(0).to::<i64>() * (tile * tiles) + arange(0, tile);
    let mut acc = zeros::<f32>([tile]);
    for _ in range(0, tiles) {
        let xt = load(x + offsets, mask = offsets < n, other = 0.0).to::<f32>();
        acc += xt * xt;
        offsets = offsets + tile;
    }
    store(partials + program_id(0), sum(acc, axis = 0));
}

/// Returns Σᵢ xᵢ². Waits for the device. Deterministic: the partial sums of the programs are summed in order, in f64. A
/// non-finite element makes the sum non-finite; so do finite elements above 10¹⁹, whose squares overflow f32.
///
/// # Errors
/// Those of the launch and of earlier work on the device.
pub fn sum_of_squares<T: FloatElement>(device: &Device, x: View<'_, T>) -> Result<f64> {
    total_sum_of_squares(device, &[x])
}

/// [`sum_of_squares`] of several slices together, with one wait for the device.
///
/// # Errors
/// As [`sum_of_squares`].
pub fn total_sum_of_squares<T: FloatElement>(device: &Device, slices: &[View<'_, T>]) -> Result<f64> {
    Ok(partial_squares(device, slices)?.to_vec()?.into_iter().map(f64::from).sum())
}

/// Partial sums of squares of the slices, in order.
pub(super) fn partial_squares<T: FloatElement>(device: &Device, slices: &[View<'_, T>]) -> Result<Buffer<f32>> {
    let mut partials = Buffer::<f32>::uninit(device, slices.iter().map(|x| num_partials(x.len())).sum())?;
    let mut at = 0;
    for x in slices {
        let end = at + num_partials(x.len());
        write_partial_squares(device, *x, partials.slice_mut(at..end)?)?;
        at = end;
    }
    Ok(partials)
}

/// Number of partial sums that [`write_partial_squares`] writes for `n` elements.
pub(super) fn num_partials(n: usize) -> usize {
    n.div_ceil(TILE * tiles_per_program(n))
}

/// Writes the [`num_partials`] partial sums of squares of x.
pub(super) fn write_partial_squares<T: FloatElement>(
    device: &Device,
    x: View<'_, T>,
    mut partials: ViewMut<'_, f32>,
) -> Result<()> {
    if x.is_empty() {
        return Ok(());
    }
    SumSquares { x: &x, partials: &mut partials, n: x.len() as i64, tile: TILE, tiles: tiles_per_program(x.len()) }
        .launch(device, num_partials(x.len()))
}

/// The Euclidean norm of x.
///
/// # Errors
/// As [`sum_of_squares`].
pub fn norm<T: FloatElement>(device: &Device, x: View<'_, T>) -> Result<f64> {
    sum_of_squares(device, x).map(f64::sqrt)
}

/// Factor on a gradient of this norm that limits its norm to `max_norm` (Pascanu, Mikolov and Bengio, "On the
/// difficulty of training recurrent neural networks", 2013, algorithm 1). 1 without a limit.
pub fn clip_factor(norm: f64, max_norm: Option<f64>) -> f64 {
    match max_norm {
        // The divisor is slightly above the norm, so that the rounded result stays below the limit.
        Some(max_norm) if norm > max_norm => max_norm / (norm + 1e-6),
        _ => 1.0,
    }
}

/// Returns the name of the first range of x with a non-finite element.
///
/// # Errors
/// As [`sum_of_squares`]; ranges outside of x.
pub fn first_non_finite<'n, T: FloatElement + Into<f64>>(
    device: &Device,
    x: View<'_, T>,
    parts: impl IntoIterator<Item = (&'n str, Range<usize>)>,
) -> Result<Option<&'n str>> {
    for (name, range) in parts {
        let part = x.slice(range)?;
        // The sum can overflow although all elements are finite.
        if !sum_of_squares(device, part)?.is_finite() && part.to_vec()?.into_iter().any(|x| !x.into().is_finite()) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_match_f64() {
        let device = Device::cpu();
        for n in [0, 1, 5, 1024, 16_384, 16_385, 100_003] {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
            let expected = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            let buffer = Buffer::from_slice(&device, &x).unwrap();
            let found = norm(&device, buffer.view()).unwrap();
            assert!((found - expected).abs() <= 1e-6 * expected, "{n}: {found} for {expected}");
            assert_eq!(norm(&device, buffer.view()).unwrap().to_bits(), found.to_bits());
            let (low, high) = (buffer.slice(0..n / 3).unwrap(), buffer.slice(n / 3..n).unwrap());
            let parts = total_sum_of_squares(&device, &[low, buffer.slice(0..0).unwrap(), high]).unwrap().sqrt();
            assert!((parts - expected).abs() <= 1e-6 * expected, "{n}: {parts} for {expected}");
        }
    }

    #[test]
    fn short_types_are_squared_in_f32() {
        let device = Device::cpu();
        // Squares that bf16 cannot represent, and a sum at which bf16 accumulation would stall.
        let x: Vec<half::bf16> =
            (0..40_000).map(|i| half::bf16::from_f32((i * 37 % 101) as f32 * 0.01 + 1.0)).collect();
        let expected = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let found = norm(&device, Buffer::from_slice(&device, &x).unwrap().view()).unwrap();
        assert!((found - expected).abs() <= 1e-6 * expected, "{found} for {expected}");
    }

    #[test]
    fn clip_factor_limits_the_norm() {
        assert_eq!([clip_factor(0.5, Some(1.0)), clip_factor(1.0, Some(1.0)), clip_factor(7.0, None)], [1.0; 3]);
        let scale = clip_factor(8.0, Some(2.0));
        assert!(8.0 * scale <= 2.0 && 8.0 * scale > 1.999);
    }

    #[test]
    fn first_non_finite_names_the_range() {
        let device = Device::cpu();
        let mut x = vec![1.0_f32; 40_000];
        let parts = [("a", 0..10_000), ("b", 10_000..10_001), ("c", 10_001..40_000)];
        let first = |x: &[f32]| {
            let buffer = Buffer::from_slice(&device, x).unwrap();
            first_non_finite(&device, buffer.view(), parts.clone()).unwrap()
        };
        assert_eq!(first(&x), None);
        // Its square overflows; the element is finite.
        x[3] = 1e30;
        assert_eq!(first(&x), None);
        x[39_999] = f32::NEG_INFINITY;
        assert_eq!(first(&x), Some("c"));
        x[10_000] = f32::NAN;
        assert_eq!(first(&x), Some("b"));
    }

    /// Interprets the IR after the GPU passes, and compiles it to PTX.
    #[test]
    fn gpu_ir_of_sum_squares_matches_and_compiles() {
        use tilewright::codegen::interp::{self, ArgValue, Memory};
        use tilewright::codegen::ir::DType;
        use tilewright::codegen::lang::kernel::{ConstValue, Specialization};
        use tilewright::codegen::pipeline;
        use tilewright::codegen::target::{CompileOptions, GpuArch};

        let n = 5000_usize;
        let x: Vec<f32> = (0..n).map(|i| ((i * 7 % 13) as f32 - 6.0) * 0.5).collect();
        let expected: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let consts = [("tile", ConstValue::Int(1024)), ("tiles", ConstValue::Int(2))];
        let func = SUM_SQUARES.record(&[DType::F32], &consts, &Specialization::default()).unwrap();
        let short = SUM_SQUARES.record(&[DType::BF16], &consts, &Specialization::default()).unwrap();
        for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
            let options = CompileOptions::default();
            let gpu_func = pipeline::gpu_ir(&func, arch, &options, &mut ());
            let programs = n.div_ceil(2048);
            let mut memory = Memory::new();
            let input = memory.add(bytemuck::cast_slice(&x).to_vec());
            let output = memory.add(vec![0xff; 4 * programs]);
            let arguments = [input.into(), output.into(), ArgValue::Int(n as i64)];
            interp::run(&gpu_func, &arguments, [programs as u32, 1, 1], &mut memory).unwrap();
            let partials = memory.bytes(output).as_chunks::<4>().0;
            let found: f64 = partials.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).sum();
            assert!((found - expected).abs() <= 1e-6 * expected, "{arch:?}: {found} for {expected}");
            for func in [&func, &short] {
                assert!(pipeline::compile_gpu(func, arch, &options, &mut ()).is_ok(), "{arch:?}");
            }
        }
    }
}
