//! AdamW with the fused kernel: one launch per parameter group.

use std::ops::Range;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use tilewright::kernels::FloatElement;
use tilewright::kernels::adamw::{self, AdamState, Options};
use tilewright::prelude::*;
use tilewright::{View, ViewMut};

use super::step_control::BucketedStepControl;
use super::step_control::step_inputs::{GROUP_RATES, RATES_PER_GROUP};

/// Options that hold for all parameters and steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWOptions {
    #[serde(with = "crate::train::exact")]
    pub beta1: f64,
    #[serde(with = "crate::train::exact")]
    pub beta2: f64,
    #[serde(with = "crate::train::exact")]
    pub eps: f64,
}

impl Default for AdamWOptions {
    /// The usual values for language models (Brown et al., "Language models are few-shot learners", 2020, appendix B).
    fn default() -> AdamWOptions {
        AdamWOptions { beta1: 0.9, beta2: 0.95, eps: 1e-8 }
    }
}

/// A parameter group: consecutive elements of the flat slice with the same options.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup {
    pub range: Range<usize>,
    /// λ: each step subtracts learning rate · λ · p from every parameter p.
    pub weight_decay: f64,
    /// Factor on the learning rate.
    pub lr_scale: f64,
}

/// Merges adjacent groups with the same options, which saves launches.
pub fn merge_groups(groups: impl IntoIterator<Item = ParamGroup>) -> Vec<ParamGroup> {
    let mut merged: Vec<ParamGroup> = Vec::new();
    for group in groups {
        match merged.last_mut() {
            Some(last)
                if last.range.end == group.range.start
                    && last.weight_decay == group.weight_decay
                    && last.lr_scale == group.lr_scale =>
            {
                last.range.end = group.range.end;
            }
            _ => merged.push(group),
        }
    }
    merged
}

/// Compute weights that a step writes: the new parameters, rounded.
pub enum ComputeWeights<'a> {
    None,
    Bf16(ViewMut<'a, bf16>),
    F16(ViewMut<'a, f16>),
}

/// Inputs and outputs of [`step_control`](super::step_control) in device memory.
#[derive(Clone, Copy)]
pub struct StepControlViews<'a> {
    pub inputs: View<'a, f64>,
    pub outputs: View<'a, f64>,
}

/// Optimizer state for the parameters of one range of the flat slice: all of them, or the shard of one process.
pub struct AdamW {
    options: AdamWOptions,
    range: Range<usize>,
    step: u64,
    /// First moments.
    exp_avg: Buffer<f32>,
    /// Second moments.
    exp_avg_sq: Buffer<f32>,
}

/// Evaluates `$step` with a range of a [`ComputeWeights`], for each of its dtypes.
macro_rules! with_part {
    ($weights:ident, $range:expr, |$part:ident| $step:expr) => {
        match &mut $weights {
            ComputeWeights::None => {
                let $part = None::<ViewMut<'_, bf16>>;
                $step
            }
            ComputeWeights::Bf16(weights) => {
                let $part = Some(weights.reborrow().slice($range)?);
                $step
            }
            ComputeWeights::F16(weights) => {
                let $part = Some(weights.reborrow().slice($range)?);
                $step
            }
        }
    };
}

impl AdamW {
    /// Creates the state for the parameters in `range`, before the first step.
    ///
    /// # Errors
    /// The device is out of memory: the state takes 8 bytes per parameter.
    pub fn new(device: &Device, range: Range<usize>, options: AdamWOptions) -> Result<AdamW> {
        let (exp_avg, exp_avg_sq) = (Buffer::zeros(device, range.len())?, Buffer::zeros(device, range.len())?);
        Ok(AdamW { options, range, step: 0, exp_avg, exp_avg_sq })
    }

    pub fn options(&self) -> &AdamWOptions {
        &self.options
    }

    /// The range of parameters that this optimizer updates.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Number of applied steps.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// First and second moments: one element per parameter of the range.
    pub fn moments(&self) -> (View<'_, f32>, View<'_, f32>) {
        (self.exp_avg.view(), self.exp_avg_sq.view())
    }

    /// Restores the state from a checkpoint: `read` writes both moments, `step` is the number of applied steps.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn restore<E: From<Error>>(
        &mut self,
        step: u64,
        read: impl FnOnce(ViewMut<'_, f32>, ViewMut<'_, f32>) -> Result<(), E>,
    ) -> Result<(), E> {
        read(self.exp_avg.view_mut(), self.exp_avg_sq.view_mut())?;
        self.step = step;
        Ok(())
    }

    /// Bytes of state on the device.
    pub fn bytes(&self) -> usize {
        2 * size_of::<f32>() * self.range.len()
    }

    /// Applies one step. `values`, `gradients` and `compute_weights` are whole flat slices, of which only the
    /// range of this optimizer is read and written. Parameters in no group of `groups` do not change. `rate` is the
    /// learning rate before the factors of the groups, `gradient_scale` the factor on the gradient from clipping,
    /// averaging and loss scaling.
    ///
    /// # Errors
    /// Slices that do not contain the range, and those of the launches. A failed step may have updated some groups.
    pub fn step(
        &mut self,
        mut values: ViewMut<'_, f32>,
        gradients: View<'_, f32>,
        mut compute_weights: ComputeWeights<'_>,
        groups: &[ParamGroup],
        rate: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        let device = self.exp_avg.device().clone();
        let step = self.step + 1;
        for group in groups {
            let range = group.range.start.max(self.range.start)..group.range.end.min(self.range.end);
            if range.is_empty() {
                continue;
            }
            let local = range.start - self.range.start..range.end - self.range.start;
            let (p, g) = (values.reborrow().slice(range.clone())?, gradients.slice(range.clone())?);
            let state =
                AdamState { p, m: self.exp_avg.slice_mut(local.clone())?, v: self.exp_avg_sq.slice_mut(local)? };
            let AdamWOptions { beta1, beta2, eps } = self.options;
            let options = Options {
                lr: rate * group.lr_scale,
                beta1,
                beta2,
                eps,
                weight_decay: group.weight_decay,
                grad_scale: gradient_scale,
            };
            match &mut compute_weights {
                ComputeWeights::None => adamw::step(&device, state, g, step, &options)?,
                ComputeWeights::Bf16(weights) => {
                    let weights = weights.reborrow().slice(range)?;
                    adamw::step_with_compute_weights(&device, state, g, weights, step, &options)?;
                }
                ComputeWeights::F16(weights) => {
                    let weights = weights.reborrow().slice(range)?;
                    adamw::step_with_compute_weights(&device, state, g, weights, step, &options)?;
                }
            }
        }
        self.step = step;
        Ok(())
    }

    /// Computes the rates of each group in step `t` (from 1) at the learning rate `rate`. The caller uploads them with
    /// [`step_control::upload_step_inputs`](super::step_control::upload_step_inputs), and [`AdamW::step_controlled`]
    /// reads them.
    ///
    /// # Errors
    /// Betas outside [0, 1).
    pub fn group_rates(&self, groups: &[ParamGroup], t: u64, rate: f64) -> Result<Vec<[f64; RATES_PER_GROUP]>> {
        let AdamWOptions { beta1, beta2, eps } = self.options;
        let rates = groups.iter().map(|group| {
            let lr = rate * group.lr_scale;
            let options = Options { lr, beta1, beta2, eps, weight_decay: group.weight_decay, grad_scale: 1.0 };
            let [step_size, inv_sqrt_bias_correction2, decay] = options.rates_at_step(t)?;
            Ok([step_size, inv_sqrt_bias_correction2, decay, 0.0])
        });
        rates.collect()
    }

    /// As [`AdamW::step`], with rates, gradient factor and the decision to apply the step read from device memory:
    /// `step_inputs` and `step_outputs` are those of [`step_control`](super::step_control). The caller counts applied
    /// steps with [`AdamW::set_steps`].
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub fn step_controlled<G: FloatElement>(
        &mut self,
        values: ViewMut<'_, f32>,
        gradients: View<'_, G>,
        compute_weights: ComputeWeights<'_>,
        groups: &[ParamGroup],
        step_inputs: View<'_, f64>,
        step_outputs: View<'_, f64>,
    ) -> Result<()> {
        let all = self.range();
        let step_control = StepControlViews { inputs: step_inputs, outputs: step_outputs };
        self.step_range_controlled(&all, values, gradients, compute_weights, groups, step_control)
    }

    /// As [`AdamW::step_controlled`], for the parameters in `part` only. The parts of the calls of a step must not
    /// overlap.
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub fn step_range_controlled<G: FloatElement>(
        &mut self,
        part: &Range<usize>,
        mut values: ViewMut<'_, f32>,
        gradients: View<'_, G>,
        mut compute_weights: ComputeWeights<'_>,
        groups: &[ParamGroup],
        step_control: StepControlViews<'_>,
    ) -> Result<()> {
        let device = self.exp_avg.device().clone();
        let AdamWOptions { beta1, beta2, eps } = self.options;
        let options = Options { beta1, beta2, eps, ..Options::default() };
        for (i, range) in self.ranges(part, groups) {
            let local = range.start - self.range.start..range.end - self.range.start;
            let (p, g) = (values.reborrow().slice(range.clone())?, gradients.slice(range.clone())?);
            let state =
                AdamState { p, m: self.exp_avg.slice_mut(local.clone())?, v: self.exp_avg_sq.slice_mut(local)? };
            let rates = [step_control.inputs.slice(GROUP_RATES + i * RATES_PER_GROUP..)?, step_control.outputs];
            with_part!(compute_weights, range, |weights| adamw::step_controlled(
                &device, state, g, weights, rates, &options
            ))?;
        }
        Ok(())
    }

    /// As [`AdamW::step_range_controlled`], with the average of the gradients of two ranks. Writes the sum of squares
    /// of each tile of the average to `step_control` ([`AdamW::num_partials_two_peers`]). A tile whose sum is not
    /// finite keeps its parameters.
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub fn step_range_two_peers<G: FloatElement>(
        &mut self,
        part: &Range<usize>,
        mut values: ViewMut<'_, f32>,
        [own, other]: [View<'_, G>; 2],
        mut compute_weights: ComputeWeights<'_>,
        groups: &[ParamGroup],
        step_inputs: View<'_, f64>,
        step_control: &mut BucketedStepControl,
    ) -> Result<()> {
        let device = self.exp_avg.device().clone();
        let AdamWOptions { beta1, beta2, eps } = self.options;
        let options = Options { beta1, beta2, eps, ..Options::default() };
        for (i, range) in self.ranges(part, groups) {
            let local = range.start - self.range.start..range.end - self.range.start;
            let p = values.reborrow().slice(range.clone())?;
            let g = [own.slice(range.clone())?, other.slice(range.clone())?];
            let state =
                AdamState { p, m: self.exp_avg.slice_mut(local.clone())?, v: self.exp_avg_sq.slice_mut(local)? };
            let (step_outputs, squares) = step_control.next_partials(adamw::squares_two_peers(range.len()))?;
            let rates = [step_inputs.slice(GROUP_RATES + i * RATES_PER_GROUP..)?, step_outputs];
            with_part!(compute_weights, range, |weights| adamw::step_two_peers(
                &device, state, g, weights, squares, rates, &options
            ))?;
        }
        Ok(())
    }

    /// Number of sums of squares that [`AdamW::step_range_two_peers`] writes for `part`.
    pub fn num_partials_two_peers(&self, part: &Range<usize>, groups: &[ParamGroup]) -> usize {
        self.ranges(part, groups).iter().map(|(_, range)| adamw::squares_two_peers(range.len())).sum()
    }

    /// Splits the intersection of `part` and the range of this optimizer into ranges of one group each, with the
    /// group's index.
    fn ranges(&self, part: &Range<usize>, groups: &[ParamGroup]) -> Vec<(usize, Range<usize>)> {
        let part = part.start.max(self.range.start)..part.end.min(self.range.end);
        let ranges = groups.iter().map(|group| group.range.start.max(part.start)..group.range.end.min(part.end));
        ranges.enumerate().filter(|(_, range)| !range.is_empty()).collect()
    }

    /// Sets the number of applied steps, after [`AdamW::step_controlled`].
    pub fn set_steps(&mut self, steps: u64) {
        self.step = steps;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            })
            .collect()
    }

    /// AdamW for one parameter in f64, after algorithm 2 of the paper (Loshchilov and Hutter, 2019).
    struct Reference {
        p: f64,
        m: f64,
        v: f64,
    }

    impl Reference {
        fn step(&mut self, g: f64, t: i32, rate: f64, decay: f64, options: &AdamWOptions) {
            self.m = options.beta1 * self.m + (1.0 - options.beta1) * g;
            self.v = options.beta2 * self.v + (1.0 - options.beta2) * g * g;
            let m_hat = self.m / (1.0 - options.beta1.powi(t));
            let v_hat = self.v / (1.0 - options.beta2.powi(t));
            self.p -= rate * m_hat / (v_hat.sqrt() + options.eps) + rate * decay * self.p;
        }
    }

    fn groups() -> Vec<ParamGroup> {
        vec![
            ParamGroup { range: 0..700, weight_decay: 0.1, lr_scale: 1.0 },
            ParamGroup { range: 700..1500, weight_decay: 0.0, lr_scale: 1.0 },
            // 1500..1600 is in no group.
            ParamGroup { range: 1600..3000, weight_decay: 0.02, lr_scale: 0.5 },
        ]
    }

    #[test]
    fn steps_match_an_f64_reference() {
        let device = Device::cpu();
        let n = 3000;
        let (options, start) = (AdamWOptions::default(), numbers(n, 1));
        let mut values = Buffer::from_slice(&device, &start).unwrap();
        let mut compute_weights = Buffer::<bf16>::poisoned(&device, n).unwrap();
        let mut expected: Vec<Reference> = start.iter().map(|&p| Reference { p: p.into(), m: 0.0, v: 0.0 }).collect();
        let mut adamw = AdamW::new(&device, 0..n, options).unwrap();
        let schedule = crate::optim::LrSchedule { max_lr: 1e-2, min_lr: 1e-3, warmup_steps: 3, total_steps: 20 };
        for t in 1..=20 {
            let g = numbers(n, 100 + t as u32);
            let gradients = Buffer::from_slice(&device, &g).unwrap();
            let rate = schedule.rate(t);
            let to = ComputeWeights::Bf16(compute_weights.view_mut());
            adamw.step(values.view_mut(), gradients.view(), to, &groups(), rate, 0.25).unwrap();
            for group in groups() {
                for i in group.range {
                    let rate = rate * group.lr_scale;
                    expected[i].step(0.25 * f64::from(g[i]), t as i32, rate, group.weight_decay, &options);
                }
            }
        }
        assert_eq!(adamw.steps(), 20);
        let (values, compute_weights) = (values.to_vec().unwrap(), compute_weights.to_vec().unwrap());
        for i in (0..1500).chain(1600..n) {
            let (actual, right) = (f64::from(values[i]), expected[i].p);
            assert!((actual - right).abs() <= 2e-6, "{i}: {actual} for {right}");
            assert_eq!(compute_weights[i], bf16::from_f32(values[i]));
        }
        assert_eq!(values[1500..1600], start[1500..1600]);
        let moved = (0..1500).map(|i| (values[i] - start[i]).abs()).fold(0.0, f32::max);
        assert!(moved > 0.01, "the test sees movement far above its tolerance: {moved}");
    }

    /// Steps controlled from device memory have the bits of host steps, and skipped steps change nothing.
    #[test]
    fn controlled_steps_match_host_steps_bit_for_bit() {
        use crate::optim::step_control::{self, step_inputs};

        let device = Device::cpu();
        let n = 3000;
        let start = numbers(n, 1);
        let [mut host, mut controlled] = [1, 2].map(|_| Buffer::from_slice(&device, &start).unwrap());
        let [mut host_weights, mut controlled_weights] = [1, 2].map(|_| Buffer::<bf16>::zeros(&device, n).unwrap());
        let [mut host_adamw, mut controlled_adamw] =
            [1, 2].map(|_| AdamW::new(&device, 0..n, AdamWOptions::default()).unwrap());
        let mut inputs_buffer = Buffer::<f64>::zeros(&device, 16).unwrap();
        for t in 1..=5 {
            let gradients = Buffer::from_slice(&device, &numbers(n, 100 + t as u32)).unwrap();
            let rate = 0.01 / t as f64;
            for applied in [0.0, 1.0] {
                let before = controlled.to_vec().unwrap();
                let mut list = vec![0.0; step_inputs::GROUP_RATES];
                list.extend(controlled_adamw.group_rates(&groups(), t, rate).unwrap().as_flattened());
                step_control::upload_step_inputs(&device, inputs_buffer.view_mut(), &list).unwrap();
                let step_outputs = Buffer::from_slice(&device, &[0.5, applied]).unwrap();
                let weights = ComputeWeights::Bf16(controlled_weights.view_mut());
                controlled_adamw
                    .step_controlled(
                        controlled.view_mut(),
                        gradients.view(),
                        weights,
                        &groups(),
                        inputs_buffer.view(),
                        step_outputs.view(),
                    )
                    .unwrap();
                assert_eq!(applied == 0.0, controlled.to_vec().unwrap() == before);
            }
            controlled_adamw.set_steps(t);
            let weights = ComputeWeights::Bf16(host_weights.view_mut());
            host_adamw.step(host.view_mut(), gradients.view(), weights, &groups(), rate, 0.5).unwrap();
        }
        assert_eq!(
            (controlled.to_vec().unwrap(), controlled_weights.to_vec().unwrap()),
            (host.to_vec().unwrap(), host_weights.to_vec().unwrap())
        );
        assert_eq!(controlled_adamw.steps(), host_adamw.steps());
        assert_eq!(controlled_adamw.moments().1.to_vec().unwrap(), host_adamw.moments().1.to_vec().unwrap());
    }

    #[test]
    fn sharded_updates_match_the_whole_bit_for_bit() {
        let device = Device::cpu();
        let n = 3000;
        let (start, g) = (numbers(n, 5), numbers(n, 6));
        let gradients = Buffer::from_slice(&device, &g).unwrap();
        let run = |cuts: &[usize]| {
            let mut values = Buffer::from_slice(&device, &start).unwrap();
            let mut parts: Vec<AdamW> = cuts
                .windows(2)
                .map(|cut| AdamW::new(&device, cut[0]..cut[1], AdamWOptions::default()).unwrap())
                .collect();
            for _ in 0..3 {
                for part in &mut parts {
                    part.step(values.view_mut(), gradients.view(), ComputeWeights::None, &groups(), 1e-2, 1.0).unwrap();
                }
            }
            values.to_vec().unwrap()
        };
        assert_eq!(run(&[0, 650, 651, 1550, 3000]), run(&[0, 3000]));
    }

    #[test]
    fn restored_state_resumes_bit_for_bit() {
        let device = Device::cpu();
        let n = 100;
        let groups = [ParamGroup { range: 0..n, weight_decay: 0.1, lr_scale: 1.0 }];
        let gradients = Buffer::from_slice(&device, &numbers(n, 3)).unwrap();
        let mut values = Buffer::from_slice(&device, &numbers(n, 2)).unwrap();
        let mut adamw = AdamW::new(&device, 0..n, AdamWOptions::default()).unwrap();
        let go = |adamw: &mut AdamW, values: &mut Buffer<f32>| {
            adamw.step(values.view_mut(), gradients.view(), ComputeWeights::None, &groups, 1e-2, 1.0).unwrap();
        };
        go(&mut adamw, &mut values);
        let (m, v) = adamw.moments();
        let (m, v) = (m.to_vec().unwrap(), v.to_vec().unwrap());
        let mut again = AdamW::new(&device, 0..n, AdamWOptions::default()).unwrap();
        again
            .restore(adamw.steps(), |mut first, mut second| -> Result<()> {
                first.copy_from_slice(&m)?;
                second.copy_from_slice(&v)
            })
            .unwrap();
        let mut other = values.try_clone().unwrap();
        go(&mut adamw, &mut values);
        go(&mut again, &mut other);
        assert_eq!(values.to_vec().unwrap(), other.to_vec().unwrap());
    }

    #[test]
    fn adjacent_groups_with_equal_options_are_merged() {
        let group = |range, weight_decay| ParamGroup { range, weight_decay, lr_scale: 1.0 };
        let list = [group(0..4, 0.1), group(4..6, 0.1), group(6..7, 0.0), group(7..9, 0.1), group(10..12, 0.1)];
        let merged = merge_groups(list);
        assert_eq!(merged, [group(0..6, 0.1), group(6..7, 0.0), group(7..9, 0.1), group(10..12, 0.1)]);
    }
}
