//! Step control: computes on the device whether a step is applied, and by what factor the gradient is scaled.
//!
//! [`tell`] writes the inputs of a step (loss scale, norm limit, learning rates) to device memory, as arguments of a
//! launch. [`judge`] reduces the gradient to its norm and writes the gradient factor (clip factor and inverse loss
//! scale) and whether the step is applied. [`AdamW::step_by`](super::AdamW::step_by) reads both. All of it can be
//! queued before the gradient is known; the host reads the outputs later.

use std::ops::Range;

use tilewright::kernels::FloatElement;
use tilewright::prelude::*;

use super::norm::{partial_squares, parts_of, squares_of};

/// Layout of the inputs that [`tell`] writes.
pub mod told {
    /// Loss scale.
    pub const FACTOR: usize = 0;
    /// Largest norm of the gradient; infinity disables clipping.
    pub const LIMIT: usize = 1;
    /// 1 if a non-finite gradient also halts all later steps.
    pub const STRICT: usize = 2;
    /// Rates of the first group: see [`tilewright::kernels::adamw::Options::rates_of`].
    pub const RATES: usize = 4;
    /// Elements per group.
    pub const PER_GROUP: usize = 4;
}

/// Layout of the outputs that [`judge`] writes.
pub mod found {
    /// Factor on the gradient: clip factor divided by the loss scale.
    pub const SCALE: usize = 0;
    /// 1 if the step is applied, 0 if it is skipped.
    pub const MADE: usize = 1;
    /// Norm of the gradient, without the loss scale.
    pub const NORM: usize = 2;
    /// 1 after a step that halted all later ones.
    pub const HALTED: usize = 3;
    /// The losses of the step, contiguous.
    pub const LOSSES: usize = 4;
}

/// target\[i\] = nᵢ: passes scalars as kernel arguments to device memory.
#[kernel]
pub fn put_numbers(target: Out<f64>, n0: f64, n1: f64, n2: f64, n3: f64, n4: f64, n5: f64, n6: f64, n7: f64) {
    store(target, n0);
    store(target + 1, n1);
    store(target + 2, n2);
    store(target + 3, n3);
    store(target + 4, n4);
    store(target + 5, n5);
    store(target + 6, n6);
    store(target + 7, n7);
}

/// Scalars per launch of [`PUT_NUMBERS`]: the target of [`tell`] is a multiple of it long.
pub const AT_ONCE: usize = 8;

/// Writes `numbers` to `target` in stream order, without waiting for the device.
///
/// # Errors
/// Those of the launches.
pub fn tell(device: &Device, mut target: ViewMut<'_, f64>, numbers: &[f64]) -> Result<()> {
    for (i, part) in numbers.chunks(AT_ONCE).enumerate() {
        let n = |j: usize| part.get(j).copied().unwrap_or(0.0);
        let mut target = target.reborrow().slice(i * AT_ONCE..(i + 1) * AT_ONCE)?;
        PutNumbers {
            target: &mut target,
            n0: n(0),
            n1: n(1),
            n2: n(2),
            n3: n(3),
            n4: n(4),
            n5: n(5),
            n6: n(6),
            n7: n(7),
        }
        .launch(device, 1)?;
    }
    Ok(())
}

/// Computes the elements of [`found`] from the partial sums of squares of a gradient and from the losses.
///
/// Grid: one program.
#[kernel]
pub fn judge_step(
    partials: In<f32>,
    losses: In<f32>,
    told: In<f64>,
    found: InOut<f64>,
    programs: i64,
    count: i32,
    #[constexpr] tile: usize,
    #[constexpr] losses_tile: usize,
) {
    let mut offsets = arange(0, tile).to::<i64>();
    let mut total = zeros::<f64>([tile]);
    for _ in range(0, programs, tile) {
        total += load(partials + offsets, mask = offsets < programs, other = 0.0).to::<f64>();
        offsets = offsets + tile;
    }
    let (factor, limit, strict) = (load(told), load(told + 1), load(told + 2));
    let norm = sqrt(sum(total)) / factor;
    let which = arange(0, losses_tile);
    let loss = load(losses + which, mask = which < count, other = 0.0).to::<f64>();
    // NaN fails this comparison too.
    let finite = all(abs(loss) < f64::INFINITY) && (norm < f64::INFINITY);
    let halted_before = load(found + 3);
    let halted = if finite { halted_before } else { maximum(halted_before, strict) };
    let (one, none) = (scalar::<f64>(1.0), scalar::<f64>(0.0));
    let clipped = if norm > limit { limit / (norm + 1e-6) } else { one };
    let made = if finite && (halted_before == 0.0) { one } else { none };
    store(found, clipped / factor);
    store(found + 1, made);
    store(found + 2, norm);
    store(found + 3, halted);
    store(found + (which + 4), loss, mask = which < count);
}

/// Tile and warps of [`JUDGE_STEP`], for short and for long lists of partial sums: it is one program.
const FEW: (usize, u32) = (1024, 4);
const MANY: (usize, u32) = (8192, 32);

/// Largest number of losses of a step: one per micro-batch.
pub const MAX_LOSSES: usize = 4096;

/// Decides a step from its whole gradient and its losses: reads the elements of [`told`], writes those of [`found`].
///
/// Deterministic: the same gradient gives the same bits. Clips as [`clip`](super::clip) does.
///
/// # Errors
/// More than 4096 losses, memory that is too short, and those of the launches.
pub fn judge<G: FloatElement>(
    device: &Device,
    gradients: View<'_, G>,
    losses: View<'_, f32>,
    told: View<'_, f64>,
    found: ViewMut<'_, f64>,
) -> Result<()> {
    let partials = partial_squares(device, &[gradients])?;
    judge_partials(device, partials.view(), losses, told, found)
}

/// Returns the norm of a gradient with the bits that [`judge`] computes, for a host that decides what other ranks
/// decide on the device. Waits for the device.
///
/// # Errors
/// Out of memory, and those of the launches.
pub fn norm_of<G: FloatElement>(device: &Device, gradients: View<'_, G>) -> Result<f64> {
    let mut numbers = [0.0; told::RATES];
    (numbers[told::FACTOR], numbers[told::LIMIT]) = (1.0, f64::INFINITY);
    let told = Buffer::from_slice(device, &numbers)?;
    let partials = partial_squares(device, &[gradients])?;
    let mut found = Buffer::zeros(device, found::LOSSES + 1)?;
    judge_partials(device, partials.view(), partials.slice(0..0)?, told.view(), found.view_mut())?;
    Ok(found.to_vec()?[found::NORM])
}

/// [`judge`] from partial sums of squares.
fn judge_partials(
    device: &Device,
    partials: View<'_, f32>,
    losses: View<'_, f32>,
    told: View<'_, f64>,
    mut found: ViewMut<'_, f64>,
) -> Result<()> {
    if losses.len() > MAX_LOSSES || found.len() < found::LOSSES + losses.len() {
        return Err(Error::Argument {
            kernel: "judge_step".into(),
            name: "losses",
            expected: format!("at most {}", MAX_LOSSES.min(found.len().saturating_sub(found::LOSSES))),
            found: losses.len().to_string(),
        });
    }
    let (tile, num_warps) = if partials.len() > 1 << 16 { MANY } else { FEW };
    JudgeStep {
        partials: &partials,
        losses: &losses,
        told: &told,
        found: &mut found,
        programs: partials.len() as i64,
        count: losses.len() as i32,
        tile,
        losses_tile: losses.len().next_power_of_two().max(16),
    }
    .launch_with(device, &LaunchConfig::new(1).num_warps(num_warps))
}

/// Step control for a gradient that arrives in pieces (buckets): decides each piece by itself, so that its parameters
/// can be updated before the next piece arrives, then the whole gradient.
///
/// A non-finite piece is skipped, and so are all later ones, as with [`told::STRICT`]; updates of earlier pieces stay.
/// (With [`Pieces::with_sums`] the caller decides that.)
pub struct Pieces {
    partials: Buffer<f32>,
    judged: usize,
    /// Outputs for the last piece, as [`found`] lists them.
    found: Buffer<f64>,
}

impl Pieces {
    /// For a gradient in pieces of these lengths.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(device: &Device, lengths: impl IntoIterator<Item = usize>) -> Result<Pieces> {
        Pieces::of(device, lengths.into_iter().map(parts_of).sum())
    }

    /// For an update kernel that skips non-finite elements and writes `count` sums of squares itself: nothing is
    /// decided before [`Pieces::end`], and until then the outputs say that steps are applied.
    ///
    /// # Errors
    /// Out of memory, and those of the launch.
    pub fn with_sums(device: &Device, count: usize, told: View<'_, f64>) -> Result<Pieces> {
        let mut pieces = Pieces::of(device, count)?;
        let nothing = pieces.partials.slice(0..0)?;
        judge_partials(device, nothing, nothing, told, pieces.found.view_mut())?;
        Ok(pieces)
    }

    fn of(device: &Device, count: usize) -> Result<Pieces> {
        let partials = Buffer::uninit(device, count)?;
        Ok(Pieces { partials, judged: 0, found: Buffer::zeros(device, found::LOSSES + 1)? })
    }

    /// Decides the next piece, and returns its [`found`] elements for [`AdamW::step_by`](super::AdamW::step_by). The
    /// norm is not limited.
    ///
    /// # Errors
    /// More pieces than announced, and those of the launches.
    pub fn judge<G: FloatElement>(&mut self, gradients: View<'_, G>, told: View<'_, f64>) -> Result<View<'_, f64>> {
        let device = self.partials.device().clone();
        let parts = self.next(parts_of(gradients.len()));
        squares_of(&device, gradients, self.partials.slice_mut(parts.clone())?)?;
        let partials = self.partials.slice(parts)?;
        judge_partials(&device, partials, partials.slice(0..0)?, told, self.found.view_mut())?;
        Ok(self.found.view())
    }

    /// Returns the outputs of [`Pieces::with_sums`], and a view for the next `count` sums of squares.
    ///
    /// # Errors
    /// More sums than announced.
    pub fn sums(&mut self, count: usize) -> Result<(View<'_, f64>, ViewMut<'_, f32>)> {
        let parts = self.next(count);
        Ok((self.found.view(), self.partials.slice_mut(parts)?))
    }

    /// Reserves the indices of the next `count` sums.
    fn next(&mut self, count: usize) -> Range<usize> {
        let start = self.judged;
        self.judged += count;
        start..self.judged
    }

    /// Decides the whole gradient, as [`judge`] does.
    ///
    /// # Errors
    /// As [`judge`].
    pub fn end(&self, losses: View<'_, f32>, told: View<'_, f64>, found: ViewMut<'_, f64>) -> Result<()> {
        judge_partials(self.partials.device(), self.partials.slice(0..self.judged)?, losses, told, found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::clip;

    fn judged(gradients: &[f32], losses: &[f32], numbers: [f64; 3], halted: f64) -> Vec<f64> {
        let device = Device::cpu();
        let mut told = Buffer::<f64>::poisoned(&device, AT_ONCE).unwrap();
        tell(&device, told.view_mut(), &[numbers[0], numbers[1], numbers[2], 0.0]).unwrap();
        let mut found = Buffer::<f64>::zeros(&device, found::LOSSES + losses.len()).unwrap();
        found.copy_from_slice(&[&[0.0, 0.0, 0.0, halted], vec![f64::NAN; losses.len()].as_slice()].concat()).unwrap();
        let (gradients, losses) =
            (Buffer::from_slice(&device, gradients).unwrap(), Buffer::from_slice(&device, losses).unwrap());
        judge(&device, gradients.view(), losses.view(), told.view(), found.view_mut()).unwrap();
        found.to_vec().unwrap()
    }

    #[test]
    fn numbers_arrive_in_their_places() {
        let device = Device::cpu();
        let mut target = Buffer::<f64>::poisoned(&device, 16).unwrap();
        let numbers: Vec<f64> = (0..11).map(|i| f64::from(i) / 3.0).collect();
        tell(&device, target.view_mut(), &numbers).unwrap();
        assert_eq!(target.to_vec().unwrap()[..11], numbers);
        assert!(target.to_vec().unwrap()[11..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn gradients_are_clipped_and_scaled_back() {
        for n in [1, 1000, 40_000] {
            let gradients: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
            let norm = gradients.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            for (factor, limit) in [(1.0, f64::INFINITY), (1.0, 0.01), (1024.0, 1e-4), (1024.0, 1e9)] {
                let found = judged(&gradients, &[3.5, -1.0], [factor, limit, 1.0], 0.0);
                let expected = norm / factor;
                assert!((found[found::NORM] - expected).abs() <= 1e-6 * expected, "{n}: {found:?} for {expected}");
                let scale = clip(found[found::NORM], Some(limit)) / factor;
                assert_eq!((found[found::SCALE], found[found::MADE], found[found::HALTED]), (scale, 1.0, 0.0));
                assert_eq!(found[found::LOSSES..], [3.5, -1.0]);
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_not_made_and_may_stop_what_follows() {
        let good = vec![0.5_f32; 20_000];
        let with = |i: usize, x: f32| {
            let mut gradients = good.clone();
            gradients[i] = x;
            gradients
        };
        let verdict = |gradients: &[f32], losses: &[f32], strict: f64, halted: f64| {
            let found = judged(gradients, losses, [1.0, 1.0, strict], halted);
            (found[found::MADE], found[found::HALTED])
        };
        assert_eq!(verdict(&good, &[1.0], 1.0, 0.0), (1.0, 0.0));
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for i in [0, 19_999] {
                assert_eq!(verdict(&with(i, x), &[1.0], 1.0, 0.0), (0.0, 1.0));
                assert_eq!(verdict(&with(i, x), &[1.0], 0.0, 0.0), (0.0, 0.0));
            }
            assert_eq!(verdict(&good, &[1.0, x], 1.0, 0.0), (0.0, 1.0));
        }
        assert_eq!(verdict(&good, &[1.0], 1.0, 1.0), (0.0, 1.0));
    }

    /// Interprets the IR after the GPU passes, and compiles it to PTX.
    #[test]
    fn gpus_judge_the_same() {
        use tilewright::codegen::interp::{self, ArgValue, Memory};
        use tilewright::codegen::lang::kernel::{ConstValue, Specialization};
        use tilewright::codegen::pipeline;
        use tilewright::codegen::target::{CompileOptions, GpuArch};

        let partials: Vec<f32> = (0..2500).map(|i| (i % 7) as f32).collect();
        let norm = partials.iter().map(|&x| f64::from(x)).sum::<f64>().sqrt() / 2.0;
        let put = PUT_NUMBERS.record(&[], &[], &Specialization::default()).unwrap();
        // For a short and a long list of partial sums.
        for (arch, (tile, num_warps)) in [GpuArch::Sm80, GpuArch::Sm90a].into_iter().zip([FEW, MANY]) {
            let consts = [("tile", ConstValue::Int(tile as i64)), ("losses_tile", ConstValue::Int(16))];
            let func = JUDGE_STEP.record(&[], &consts, &Specialization::default()).unwrap();
            let options = CompileOptions { num_warps, ..CompileOptions::default() };
            let laid = pipeline::gpu_ir(&func, arch, &options, &mut ());
            let mut memory = Memory::new();
            let partials = memory.add(bytemuck::cast_slice(&partials).to_vec());
            let losses = memory.add(bytemuck::cast_slice(&[1.25_f32, 2.5, 4.0]).to_vec());
            let told = memory.add(bytemuck::cast_slice(&[2.0_f64, 3.0, 1.0]).to_vec());
            let found = memory.add(bytemuck::cast_slice(&[0.0_f64; 7]).to_vec());
            let arguments =
                [partials.into(), losses.into(), told.into(), found.into(), ArgValue::Int(2500), ArgValue::Int(3)];
            interp::run(&laid, &arguments, [1, 1, 1], &mut memory).unwrap();
            let found: Vec<f64> =
                memory.bytes(found).as_chunks::<8>().0.iter().map(|&bytes| f64::from_le_bytes(bytes)).collect();
            assert!((found[2] - norm).abs() <= 1e-12 * norm, "{arch:?}: {found:?} for {norm}");
            assert!((found[0] - clip(norm, Some(3.0)) / 2.0).abs() <= 1e-12, "{arch:?}: {found:?}");
            assert_eq!(found[1..2], [1.0]);
            assert_eq!(found[3..], [0.0, 1.25, 2.5, 4.0]);
            assert!(pipeline::compile_gpu(&func, arch, &options, &mut ()).is_ok(), "{arch:?}");
            assert!(pipeline::compile_gpu(&put, arch, &options, &mut ()).is_ok(), "{arch:?}");
        }
    }
}
