//! Step control: computes on the device whether a step is applied, and by what factor the gradient is scaled.
//!
//! [`upload_step_inputs`] writes the inputs of a step (loss scale, norm limit, learning rates) to device memory, as
//! arguments of a launch. [`control_step`] reduces the gradient to its norm and writes the gradient factor (clip factor
//! and inverse loss scale) and whether the step is applied. [`AdamW::step_controlled`](super::AdamW::step_controlled)
//! reads both. All of it can be queued before the gradient is known; the host reads the outputs later.

use std::ops::Range;

use tilewright::kernels::FloatElement;
use tilewright::prelude::*;

use super::norm::{num_partials, partial_squares, write_partial_squares};

/// Layout of the inputs that [`upload_step_inputs`] writes.
pub mod step_inputs {
    /// Loss scale.
    pub const LOSS_SCALE: usize = 0;
    /// Largest norm of the gradient; infinity disables clipping.
    pub const MAX_NORM: usize = 1;
    /// 1 if a non-finite gradient also halts all later steps.
    pub const HALT_IF_NON_FINITE: usize = 2;
    /// Rates of the first group: see [`tilewright::kernels::adamw::Options::rates_at_step`].
    pub const GROUP_RATES: usize = 4;
    /// Elements per group.
    pub const RATES_PER_GROUP: usize = 4;
}

/// Layout of the outputs that [`control_step`] writes.
pub mod step_outputs {
    /// Factor on the gradient: clip factor divided by the loss scale.
    pub const GRAD_SCALE: usize = 0;
    /// 1 if the step is applied, 0 if it is skipped.
    pub const APPLIED: usize = 1;
    /// Norm of the gradient, without the loss scale.
    pub const GRAD_NORM: usize = 2;
    /// 1 after a step that halted all later ones.
    pub const HALTED: usize = 3;
    /// The losses of the step, contiguous.
    pub const LOSSES: usize = 4;
}

/// target\[i\] = nᵢ: passes scalars as kernel arguments to device memory.
#[kernel]
pub fn write_scalars(target: Out<f64>, n0: f64, n1: f64, n2: f64, n3: f64, n4: f64, n5: f64, n6: f64, n7: f64) {
    store(target, n0);
    store(target + 1, n1);
    store(target + 2, n2);
    store(target + 3, n3);
    store(target + 4, n4);
    store(target + 5, n5);
    store(target + 6, n6);
    store(target + 7, n7);
}

/// Scalars per launch of [`WRITE_SCALARS`]. The length of the target of [`upload_step_inputs`] must be a multiple.
pub const SCALARS_PER_LAUNCH: usize = 8;

/// Writes `numbers` to `target` in stream order, without waiting for the device, and fills up the last launch with
/// zeros.
///
/// # Errors
/// A target that is shorter than `numbers`, rounded up to a multiple of [`SCALARS_PER_LAUNCH`]; those of the launches.
pub fn upload_step_inputs(device: &Device, mut target: ViewMut<'_, f64>, numbers: &[f64]) -> Result<()> {
    for (i, part) in numbers.chunks(SCALARS_PER_LAUNCH).enumerate() {
        let n = |j: usize| part.get(j).copied().unwrap_or(0.0);
        let mut target = target.reborrow().slice(i * SCALARS_PER_LAUNCH..(i + 1) * SCALARS_PER_LAUNCH)?;
        WriteScalars {
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

/// Computes the elements of [`step_outputs`] from the partial sums of squares of a gradient and from the losses.
///
/// Grid: one program.
#[kernel]
pub fn step_control(
    partials: In<f32>,
    losses: In<f32>,
    step_inputs: In<f64>,
    step_outputs: InOut<f64>,
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
    let (loss_scale, max_norm, halt_if_non_finite) = (load(step_inputs), load(step_inputs + 1), load(step_inputs + 2));
    let norm = sqrt(sum(total)) / loss_scale;
    let which = arange(0, losses_tile);
    let loss = load(losses + which, mask = which < count, other = 0.0).to::<f64>();
    // NaN fails this comparison too.
    let finite = all(abs(loss) < f64::INFINITY) && (norm < f64::INFINITY);
    let halted_before = load(step_outputs + 3);
    let halted = if finite { halted_before } else { maximum(halted_before, halt_if_non_finite) };
    let (one, none) = (scalar::<f64>(1.0), scalar::<f64>(0.0));
    let clipped = if norm > max_norm { max_norm / (norm + 1e-6) } else { one };
    let applied = if finite && (halted_before == 0.0) { one } else { none };
    store(step_outputs, clipped / loss_scale);
    store(step_outputs + 1, applied);
    store(step_outputs + 2, norm);
    store(step_outputs + 3, halted);
    store(step_outputs + (which + 4), loss, mask = which < count);
}

/// Tile and warps of [`STEP_CONTROL`], for short and for long lists of partial sums: it is one program.
const SMALL: (usize, u32) = (1024, 4);
const LARGE: (usize, u32) = (8192, 32);

/// Largest number of losses of a step: one per micro-batch.
pub const MAX_LOSSES: usize = 4096;

/// Decides from the whole gradient and the losses whether a step is applied: reads the elements of [`step_inputs`],
/// writes those of [`step_outputs`].
///
/// Deterministic: the same gradient gives the same bits. Clips as [`clip_factor`](super::clip_factor) does.
///
/// # Errors
/// More than [`MAX_LOSSES`] losses, `step_outputs` that are too short for the losses, and those of the launches.
pub fn control_step<G: FloatElement>(
    device: &Device,
    gradients: View<'_, G>,
    losses: View<'_, f32>,
    step_inputs: View<'_, f64>,
    step_outputs: ViewMut<'_, f64>,
) -> Result<()> {
    let partials = partial_squares(device, &[gradients])?;
    control_step_from_partials(device, partials.view(), losses, step_inputs, step_outputs)
}

/// Returns the norm of a gradient with the bits that [`control_step`] computes, for a host that decides what other
/// ranks decide on the device. Waits for the device.
///
/// # Errors
/// Out of memory, and those of the launches.
pub fn grad_norm<G: FloatElement>(device: &Device, gradients: View<'_, G>) -> Result<f64> {
    let mut numbers = [0.0; step_inputs::GROUP_RATES];
    (numbers[step_inputs::LOSS_SCALE], numbers[step_inputs::MAX_NORM]) = (1.0, f64::INFINITY);
    let step_inputs = Buffer::from_slice(device, &numbers)?;
    let partials = partial_squares(device, &[gradients])?;
    let mut step_outputs = Buffer::zeros(device, step_outputs::LOSSES + 1)?;
    control_step_from_partials(
        device,
        partials.view(),
        partials.slice(0..0)?,
        step_inputs.view(),
        step_outputs.view_mut(),
    )?;
    Ok(step_outputs.to_vec()?[step_outputs::GRAD_NORM])
}

/// [`control_step`] from partial sums of squares.
fn control_step_from_partials(
    device: &Device,
    partials: View<'_, f32>,
    losses: View<'_, f32>,
    step_inputs: View<'_, f64>,
    mut step_outputs: ViewMut<'_, f64>,
) -> Result<()> {
    if losses.len() > MAX_LOSSES || step_outputs.len() < step_outputs::LOSSES + losses.len() {
        return Err(Error::Argument {
            kernel: "step_control".into(),
            name: "losses",
            expected: format!("at most {}", MAX_LOSSES.min(step_outputs.len().saturating_sub(step_outputs::LOSSES))),
            found: losses.len().to_string(),
        });
    }
    let (tile, num_warps) = if partials.len() > 1 << 16 { LARGE } else { SMALL };
    StepControl {
        partials: &partials,
        losses: &losses,
        step_inputs: &step_inputs,
        step_outputs: &mut step_outputs,
        programs: partials.len() as i64,
        count: losses.len() as i32,
        tile,
        losses_tile: losses.len().next_power_of_two().max(16),
    }
    .launch_with(device, &LaunchConfig::new(1).num_warps(num_warps))
}

/// Step control for a gradient that arrives in buckets: checks each bucket by itself, so that its parameters can be
/// updated before the next bucket arrives, then the whole gradient.
///
/// The update of a non-finite bucket is skipped, and with [`step_inputs::HALT_IF_NON_FINITE`] that of all later
/// buckets; updates of earlier buckets stay. After [`BucketedStepControl::with_partials`] the update kernel does its
/// own check.
pub struct BucketedStepControl {
    partials: Buffer<f32>,
    used_partials: usize,
    /// Outputs for the last bucket, as [`step_outputs`] lists them.
    step_outputs: Buffer<f64>,
}

impl BucketedStepControl {
    /// Creates the control of a gradient in buckets of these lengths, in elements.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(device: &Device, lengths: impl IntoIterator<Item = usize>) -> Result<BucketedStepControl> {
        BucketedStepControl::allocate(device, lengths.into_iter().map(num_partials).sum())
    }

    /// Creates the control for an update kernel that skips non-finite tiles and writes `count` sums of squares itself:
    /// nothing is decided before [`BucketedStepControl::finish`], and until then the outputs say that the step is
    /// applied.
    ///
    /// # Errors
    /// Out of memory, and those of the launch.
    pub fn with_partials(device: &Device, count: usize, step_inputs: View<'_, f64>) -> Result<BucketedStepControl> {
        let mut step_control = BucketedStepControl::allocate(device, count)?;
        let nothing = step_control.partials.slice(0..0)?;
        control_step_from_partials(device, nothing, nothing, step_inputs, step_control.step_outputs.view_mut())?;
        Ok(step_control)
    }

    fn allocate(device: &Device, count: usize) -> Result<BucketedStepControl> {
        let partials = Buffer::uninit(device, count)?;
        Ok(BucketedStepControl {
            partials,
            used_partials: 0,
            step_outputs: Buffer::zeros(device, step_outputs::LOSSES + 1)?,
        })
    }

    /// Checks the next bucket, and returns its [`step_outputs`] elements for
    /// [`AdamW::step_controlled`](super::AdamW::step_controlled). [`step_inputs::MAX_NORM`] must be infinite: a limit
    /// would clip each bucket by its own norm.
    ///
    /// # Errors
    /// More elements than the lengths in [`BucketedStepControl::new`] sum to, and those of the launches.
    pub fn check_bucket<G: FloatElement>(
        &mut self,
        gradients: View<'_, G>,
        step_inputs: View<'_, f64>,
    ) -> Result<View<'_, f64>> {
        let device = self.partials.device().clone();
        let parts = self.reserve(num_partials(gradients.len()));
        write_partial_squares(&device, gradients, self.partials.slice_mut(parts.clone())?)?;
        let partials = self.partials.slice(parts)?;
        control_step_from_partials(
            &device,
            partials,
            partials.slice(0..0)?,
            step_inputs,
            self.step_outputs.view_mut(),
        )?;
        Ok(self.step_outputs.view())
    }

    /// Returns the outputs of [`BucketedStepControl::with_partials`], and a view for the next `count` sums of squares.
    ///
    /// # Errors
    /// More sums than the `count` of [`BucketedStepControl::with_partials`].
    pub fn next_partials(&mut self, count: usize) -> Result<(View<'_, f64>, ViewMut<'_, f32>)> {
        let parts = self.reserve(count);
        Ok((self.step_outputs.view(), self.partials.slice_mut(parts)?))
    }

    /// Reserves the indices of the next `count` sums.
    fn reserve(&mut self, count: usize) -> Range<usize> {
        let start = self.used_partials;
        self.used_partials += count;
        start..self.used_partials
    }

    /// Decides the whole gradient, as [`control_step`] does.
    ///
    /// # Errors
    /// As [`control_step`].
    pub fn finish(
        &self,
        losses: View<'_, f32>,
        step_inputs: View<'_, f64>,
        step_outputs: ViewMut<'_, f64>,
    ) -> Result<()> {
        control_step_from_partials(
            self.partials.device(),
            self.partials.slice(0..self.used_partials)?,
            losses,
            step_inputs,
            step_outputs,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::clip_factor;

    fn run_step_control(gradients: &[f32], losses: &[f32], numbers: [f64; 3], halted: f64) -> Vec<f64> {
        let device = Device::cpu();
        let mut step_inputs = Buffer::<f64>::poisoned(&device, SCALARS_PER_LAUNCH).unwrap();
        upload_step_inputs(&device, step_inputs.view_mut(), &[numbers[0], numbers[1], numbers[2], 0.0]).unwrap();
        let mut step_outputs = Buffer::<f64>::zeros(&device, step_outputs::LOSSES + losses.len()).unwrap();
        step_outputs
            .copy_from_slice(&[&[0.0, 0.0, 0.0, halted], vec![f64::NAN; losses.len()].as_slice()].concat())
            .unwrap();
        let (gradients, losses) =
            (Buffer::from_slice(&device, gradients).unwrap(), Buffer::from_slice(&device, losses).unwrap());
        control_step(&device, gradients.view(), losses.view(), step_inputs.view(), step_outputs.view_mut()).unwrap();
        step_outputs.to_vec().unwrap()
    }

    #[test]
    fn step_inputs_are_written_in_order() {
        let device = Device::cpu();
        let mut target = Buffer::<f64>::poisoned(&device, 16).unwrap();
        let numbers: Vec<f64> = (0..11).map(|i| f64::from(i) / 3.0).collect();
        upload_step_inputs(&device, target.view_mut(), &numbers).unwrap();
        assert_eq!(target.to_vec().unwrap()[..11], numbers);
        assert!(target.to_vec().unwrap()[11..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn gradients_are_clipped_and_unscaled() {
        for n in [1, 1000, 40_000] {
            let gradients: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
            let norm = gradients.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            for (loss_scale, max_norm) in [(1.0, f64::INFINITY), (1.0, 0.01), (1024.0, 1e-4), (1024.0, 1e9)] {
                let step_outputs = run_step_control(&gradients, &[3.5, -1.0], [loss_scale, max_norm, 1.0], 0.0);
                let expected = norm / loss_scale;
                assert!(
                    (step_outputs[step_outputs::GRAD_NORM] - expected).abs() <= 1e-6 * expected,
                    "{n}: {step_outputs:?} for {expected}"
                );
                let scale = clip_factor(step_outputs[step_outputs::GRAD_NORM], Some(max_norm)) / loss_scale;
                assert_eq!(
                    (
                        step_outputs[step_outputs::GRAD_SCALE],
                        step_outputs[step_outputs::APPLIED],
                        step_outputs[step_outputs::HALTED]
                    ),
                    (scale, 1.0, 0.0)
                );
                assert_eq!(step_outputs[step_outputs::LOSSES..], [3.5, -1.0]);
            }
        }
    }

    #[test]
    fn non_finite_steps_are_skipped_and_may_halt_later_ones() {
        let good = vec![0.5_f32; 20_000];
        let with = |i: usize, x: f32| {
            let mut gradients = good.clone();
            gradients[i] = x;
            gradients
        };
        let outcome = |gradients: &[f32], losses: &[f32], halt_if_non_finite: f64, halted: f64| {
            let step_outputs = run_step_control(gradients, losses, [1.0, 1.0, halt_if_non_finite], halted);
            (step_outputs[step_outputs::APPLIED], step_outputs[step_outputs::HALTED])
        };
        assert_eq!(outcome(&good, &[1.0], 1.0, 0.0), (1.0, 0.0));
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for i in [0, 19_999] {
                assert_eq!(outcome(&with(i, x), &[1.0], 1.0, 0.0), (0.0, 1.0));
                assert_eq!(outcome(&with(i, x), &[1.0], 0.0, 0.0), (0.0, 0.0));
            }
            assert_eq!(outcome(&good, &[1.0, x], 1.0, 0.0), (0.0, 1.0));
        }
        assert_eq!(outcome(&good, &[1.0], 1.0, 1.0), (0.0, 1.0));
    }

    /// Interprets the IR after the GPU passes, and compiles it to PTX.
    #[test]
    fn gpu_ir_of_step_control_matches_and_compiles() {
        use tilewright::codegen::interp::{self, ArgValue, Memory};
        use tilewright::codegen::lang::kernel::{ConstValue, Specialization};
        use tilewright::codegen::pipeline;
        use tilewright::codegen::target::{CompileOptions, GpuArch};

        let partials: Vec<f32> = (0..2500).map(|i| (i % 7) as f32).collect();
        let norm = partials.iter().map(|&x| f64::from(x)).sum::<f64>().sqrt() / 2.0;
        let write = WRITE_SCALARS.record(&[], &[], &Specialization::default()).unwrap();
        // For a short and a long list of partial sums.
        for (arch, (tile, num_warps)) in [GpuArch::Sm80, GpuArch::Sm90a].into_iter().zip([SMALL, LARGE]) {
            let consts = [("tile", ConstValue::Int(tile as i64)), ("losses_tile", ConstValue::Int(16))];
            let func = STEP_CONTROL.record(&[], &consts, &Specialization::default()).unwrap();
            let options = CompileOptions { num_warps, ..CompileOptions::default() };
            let gpu_func = pipeline::gpu_ir(&func, arch, &options, &mut ());
            let mut memory = Memory::new();
            let partials = memory.add(bytemuck::cast_slice(&partials).to_vec());
            let losses = memory.add(bytemuck::cast_slice(&[1.25_f32, 2.5, 4.0]).to_vec());
            let step_inputs = memory.add(bytemuck::cast_slice(&[2.0_f64, 3.0, 1.0]).to_vec());
            let step_outputs = memory.add(bytemuck::cast_slice(&[0.0_f64; 7]).to_vec());
            let arguments = [
                partials.into(),
                losses.into(),
                step_inputs.into(),
                step_outputs.into(),
                ArgValue::Int(2500),
                ArgValue::Int(3),
            ];
            interp::run(&gpu_func, &arguments, [1, 1, 1], &mut memory).unwrap();
            let step_outputs: Vec<f64> =
                memory.bytes(step_outputs).as_chunks::<8>().0.iter().map(|&bytes| f64::from_le_bytes(bytes)).collect();
            assert!((step_outputs[2] - norm).abs() <= 1e-12 * norm, "{arch:?}: {step_outputs:?} for {norm}");
            assert!(
                (step_outputs[0] - clip_factor(norm, Some(3.0)) / 2.0).abs() <= 1e-12,
                "{arch:?}: {step_outputs:?}"
            );
            assert_eq!(step_outputs[1..2], [1.0]);
            assert_eq!(step_outputs[3..], [0.0, 1.25, 2.5, 4.0]);
            assert!(pipeline::compile_gpu(&func, arch, &options, &mut ()).is_ok(), "{arch:?}");
            assert!(pipeline::compile_gpu(&write, arch, &options, &mut ()).is_ok(), "{arch:?}");
        }
    }
}
