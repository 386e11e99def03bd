//! The kernels of training steps on a device, against their f64 references: a continuation of [`crate::on_device`].

use crate::numerics::{HostTensor, Random, tolerance};
use crate::on_device::{ACTIVATIONS, DeviceTensor, F32, Spacing, activated, ok};
use tilewright::codegen::ir::DType;
use tilewright::kernels::activation::Activation;
use tilewright::kernels::rope::{Direction, Pairs, Rotation};
use tilewright::kernels::{
    FloatElement, IndexElement, Tensor, TensorMut, activation, adamw, cast, cross_entropy, embedding, layer_norm,
    rank_sum, rope, swiglu,
};
use tilewright::prelude::*;

/// A vector of integers at a stride of `stride` elements.
pub fn indices(dtype: DType, stride: usize, values: &[i64]) -> HostTensor {
    let mut tensor = HostTensor::poisoned(dtype, &[values.len()], &[stride]);
    let size = dtype.bytes();
    for (i, value) in values.iter().enumerate() {
        tensor.bytes[i * stride * size..][..size].copy_from_slice(&value.to_le_bytes()[..size]);
    }
    tensor
}

/// A vector of integers on the device.
struct Indices<I: Element> {
    buffer: Buffer<I>,
    len: usize,
    stride: usize,
}

impl<I: IndexElement> Indices<I> {
    fn new(device: &Device, stride: usize, values: &[i64]) -> Indices<I> {
        Indices { buffer: indices(I::dtype(), stride, values).upload(device), len: values.len(), stride }
    }

    fn input(&self) -> Tensor<'_, I, 1> {
        Tensor::strided(self.buffer.view(), [self.len], [self.stride as i64]).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// A random index in 0..n.
fn index(random: &mut Random, n: usize) -> i64 {
    ((random.number() + 1.0) / 2.0 * n as f64) as i64
}

pub fn check_layer_norm<T: FloatElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let what = format!("layer_norm {} [{rows}, {d}] {spacing:?}", T::dtype());
    let eps = 1e-5;
    let mut random = Random::new(11);
    // A mean far from zero, so that E[x²] − μ² would cancel.
    let values: Vec<f64> = (0..rows * d).map(|_| 8.0 + random.number()).collect();
    let shape = [rows, d];
    let x = DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &shape, &spacing.strides(&shape), &values));
    let w = DeviceTensor::<T>::random(device, &[d], spacing, &mut random);
    let b = DeviceTensor::<T>::random(device, &[d], spacing, &mut random);
    let mut y = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    let mut mean = DeviceTensor::<f32>::poisoned(device, &[rows], spacing);
    let mut rstd = DeviceTensor::<f32>::poisoned(device, &[rows], spacing);
    let (mean_out, rstd_out) = (mean.output(), rstd.output());
    ok(layer_norm::forward(device, x.input(), w.input(), b.input(), y.output(), mean_out, rstd_out, eps as f32));
    let (xs, ws) = (x.values(), w.values());
    let want = layer_norm::reference::forward(&xs, &ws, &b.values(), eps);
    y.check(&what, &want.y, tolerance(T::dtype()));
    mean.check(&format!("{what}, mean"), &want.mean, F32);
    rstd.check(&format!("{what}, rstd"), &want.rstd, F32);

    let grad_y = DeviceTensor::<T>::random(device, &shape, spacing, &mut random);
    let mut grad_x = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    let mut grad_w = DeviceTensor::<f32>::poisoned(device, &[d], spacing);
    let mut grad_b = DeviceTensor::<f32>::poisoned(device, &[d], spacing);
    ok(layer_norm::backward(
        device,
        x.input(),
        w.input(),
        mean.input(),
        rstd.input(),
        grad_y.input(),
        grad_x.output(),
        grad_w.output(),
        grad_b.output(),
    ));
    let want = layer_norm::reference::backward(&xs, &ws, &grad_y.values(), eps);
    // With one element per row the gradients are differences of equal numbers.
    if d > 1 {
        grad_x.check(&format!("{what}, grad_x"), &want.x, tolerance(T::dtype()));
        grad_w.check(&format!("{what}, grad_w"), &want.w, 2.0 * F32);
    }
    grad_b.check(&format!("{what}, grad_b"), &want.b, F32);
}

/// Checks SwiGLU and its gradients.
pub fn check_swiglu<T: FloatElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let what = format!("swiglu {} [{rows}, {d}] {spacing:?}", T::dtype());
    let mut random = Random::new(12);
    // Large enough that the logistic function saturates at 0 and 1.
    let values: Vec<f64> = (0..rows * d).map(|_| 20.0 * random.number().powi(3)).collect();
    let shape = [rows, d];
    let a = DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &shape, &spacing.strides(&shape), &values));
    let b = DeviceTensor::<T>::random(device, &shape, spacing, &mut random);
    let g = DeviceTensor::<T>::random(device, &shape, spacing, &mut random);
    let (a_values, g_values) = (a.values(), g.values());
    let allowed = tolerance(T::dtype());

    let mut y = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    ok(swiglu::forward(device, a.input(), b.input(), y.output()));
    y.check(&what, &swiglu::reference::forward(&a_values, &b.values()), allowed);
    let mut grad_a = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    let mut grad_b = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    ok(swiglu::backward(device, a.input(), b.input(), g.input(), grad_a.output(), grad_b.output()));
    let (want_a, want_b) = swiglu::reference::backward(&a_values, &b.values(), &g_values);
    grad_a.check(&format!("{what}, grad_a"), &want_a, allowed);
    grad_b.check(&format!("{what}, grad_b"), &want_b, allowed);
}

/// Checks every activation and its gradient, alone and with bias and residual.
pub fn check_activation<T: FloatElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let mut random = Random::new(15);
    let values: Vec<f64> = (0..rows * d).map(|_| 20.0 * random.number().powi(3)).collect();
    let shape = [rows, d];
    let x = DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &shape, &spacing.strides(&shape), &values));
    let bias = DeviceTensor::<T>::random(device, &[d], spacing, &mut random);
    let [residual, g] = [(); 2].map(|()| DeviceTensor::<T>::random(device, &shape, spacing, &mut random));
    let (xs, biases, residuals, gs) = (x.values(), bias.values(), residual.values(), g.values());
    let allowed = tolerance(T::dtype());
    // Each activation alone, and the combinations with bias and residual.
    let alone = ACTIVATIONS.map(|activation| (activation, false, false));
    let combined =
        [(true, false), (false, true), (true, true)].map(|(bias, residual)| (Activation::None, bias, residual));
    for (activation, has_bias, has_residual) in
        alone.into_iter().chain(combined).chain([(Activation::Gelu, true, true)])
    {
        let what = format!(
            "{activation:?} {} [{rows}, {d}] {spacing:?}, bias {has_bias}, residual {has_residual}",
            T::dtype()
        );
        let bias = || has_bias.then(|| bias.input());
        let shifted = |i: usize| if has_bias { xs[i] + biases[i % d] } else { xs[i] };
        let residual = has_residual.then(|| residual.input());
        let mut y = DeviceTensor::<T>::poisoned(device, &shape, spacing);
        ok(activation::forward(device, x.input(), bias(), activation, residual, y.output()));
        let added = |i: usize| if has_residual { residuals[i] } else { 0.0 };
        let want = (0..rows * d).map(|i| activated(shifted(i), activation) + added(i));
        y.check(&what, &want.collect::<Vec<_>>(), allowed);
        let mut grad_x = DeviceTensor::<T>::poisoned(device, &shape, spacing);
        ok(activation::backward(device, x.input(), bias(), activation, g.input(), grad_x.output()));
        let want = (0..rows * d).map(|i| gs[i] * activation::reference::derivative(shifted(i), activation));
        grad_x.check(&format!("{what}, grad"), &want.collect::<Vec<_>>(), allowed);
    }
}

/// Checks cross-entropy and its gradient, with i32 and i64 targets.
pub fn check_cross_entropy<T: FloatElement>(device: &Device, shape: [usize; 2], spacing: Spacing) {
    cross_entropy_with::<T, i32>(device, shape, spacing);
    cross_entropy_with::<T, i64>(device, shape, spacing);
}

fn cross_entropy_with<T: FloatElement, I: IndexElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let what = format!("cross_entropy {} {} [{rows}, {d}] {spacing:?}", T::dtype(), I::dtype());
    let ignore = -100;
    let mut random = Random::new(13);
    let values: Vec<f64> = (0..rows * d).map(|_| 10.0 * random.number()).collect();
    let target = |r: usize, random: &mut Random| if r % 5 == 3 { ignore } else { index(random, d) };
    let targets: Vec<i64> = (0..rows).map(|r| target(r, &mut random)).collect();
    let shape = [rows, d];
    let x = HostTensor::of(T::dtype(), &shape, &spacing.strides(&shape), &values).with_offset(spacing.first);
    let x = DeviceTensor::<T>::new(device, x);
    let on_device = Indices::<I>::new(device, spacing.step, &targets);
    let mut loss = DeviceTensor::<f32>::poisoned(device, &[rows], spacing);
    let mut lse = DeviceTensor::<f32>::poisoned(device, &[rows], spacing);
    ok(cross_entropy::forward(device, x.input(), on_device.input(), ignore, loss.output(), lse.output()));
    let first_values = x.values();
    let (want_loss, want_lse) = cross_entropy::reference::forward(&first_values, &targets, d, ignore);
    loss.check(&what, &want_loss, F32);
    lse.check(&format!("{what}, lse"), &want_lse, F32);

    let g = DeviceTensor::<f32>::random(device, &[rows], spacing, &mut random);
    let mut grad = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    ok(cross_entropy::backward(
        device,
        x.input(),
        on_device.input(),
        ignore,
        lse.input(),
        g.input(),
        0.25,
        grad.output(),
    ));
    let want = cross_entropy::reference::backward(&x.values(), &targets, d, ignore, &g.values(), 0.25);
    grad.check(&format!("{what}, grad"), &want, tolerance(T::dtype()));

    // One gradient for all rows.
    let one = Buffer::from_slice(device, &[2.0f32]).expect("a buffer");
    let all = Tensor::strided(one.view(), [rows], [0]).expect("a tensor of repeated elements");
    let mut grad = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    ok(cross_entropy::backward(device, x.input(), on_device.input(), ignore, lse.input(), all, 1.0, grad.output()));
    let want = cross_entropy::reference::backward(&x.values(), &targets, d, ignore, &vec![2.0; rows], 1.0);
    grad.check(&format!("{what}, grad of the sum"), &want, tolerance(T::dtype()));

    // In place, of rows with more columns, which are no classes: one, and up to aligned rows.
    for columns in [d + 1, (d + 1).next_multiple_of(16)] {
        let padded = [rows, columns];
        let number = |i: usize| if i % columns >= d { f64::NAN } else { values[i / columns * d + i % columns] };
        let numbers: Vec<f64> = (0..rows * columns).map(number).collect();
        let x = HostTensor::of(T::dtype(), &padded, &spacing.strides(&padded), &numbers).with_offset(spacing.first);
        let mut x = DeviceTensor::<T>::new(device, x);
        let mut loss = DeviceTensor::<f32>::poisoned(device, &[rows], spacing);
        let target = on_device.input();
        ok(cross_entropy::forward_backward(device, x.output(), d, target, ignore, g.input(), 0.25, loss.output()));
        loss.check(&format!("{what}, in place of {columns} columns"), &want_loss, F32);
        let of_classes = cross_entropy::reference::backward(&first_values, &targets, d, ignore, &g.values(), 0.25);
        let want: Vec<f64> = (0..rows * columns)
            .map(|i| if i % columns >= d { 0.0 } else { of_classes[i / columns * d + i % columns] })
            .collect();
        x.check(&format!("{what}, grad in place of {columns} columns"), &want, tolerance(T::dtype()));
    }
}

/// Checks RoPE of x [tokens, heads, d] with both forms of positions (a table, and consecutive) in both directions.
pub fn check_rope<T: FloatElement>(device: &Device, shape: [usize; 3], spacing: Spacing) {
    let [tokens, heads, d] = shape;
    let what = format!("rope {} {shape:?} {spacing:?}", T::dtype());
    // The accuracy of an angle does not depend on the position.
    let allowed = if T::dtype() == DType::F32 { 1e-6 } else { tolerance(T::dtype()) };
    let base = 10_000.0;
    let mut random = Random::new(14);
    let x = DeviceTensor::<T>::random(device, &shape, spacing, &mut random);
    let theta = Buffer::from_slice(device, &rope::frequencies(d, base)).expect("a buffer");
    let theta = || Tensor::dense(theta.view(), [d / 2]).expect("a tensor");
    let listed: Vec<i64> = (0..tokens).map(|_| index(&mut random, 100_000)).collect();
    let length = tokens.div_ceil(2).max(1);
    let counted: Vec<i64> = (0..tokens).map(|t| (t % length + 65_500) as i64).collect();
    let rotations = [Pairs::Adjacent, Pairs::Halves]
        .into_iter()
        .flat_map(|pairs| [Direction::Forward, Direction::Backward].map(|direction| Rotation { direction, pairs }));
    for rotation in rotations {
        let want = rope::reference(&x.values(), &listed, heads, d, base, rotation);
        let mut y = DeviceTensor::<T>::poisoned(device, &shape, spacing);
        let positions = Indices::<i64>::new(device, spacing.step, &listed);
        ok(rope::rotate_at(device, x.input(), positions.input(), theta(), y.output(), rotation));
        y.check(&format!("{what}, at {rotation:?}"), &want, allowed);

        let want = rope::reference(&x.values(), &counted, heads, d, base, rotation);
        let mut y = DeviceTensor::<T>::poisoned(device, &shape, spacing);
        ok(rope::rotate_from(device, x.input(), 65_500, length, theta(), y.output(), rotation));
        y.check(&format!("{what}, from {rotation:?}"), &want, allowed);
    }
}

/// Checks three AdamW steps with gradients of type T, with and without compute weights of that type, with scalars as
/// arguments and in device memory.
pub fn check_adamw<T: FloatElement>(device: &Device, n: usize) {
    let mut random = Random::new(15);
    let initial: [Vec<f64>; 3] = {
        let p = HostTensor::random(DType::F32, &[n], &[1], &mut random).values();
        [p, vec![0.0; n], vec![0.0; n]]
    };
    let steps: Vec<DeviceTensor<T>> =
        (0..3).map(|_| DeviceTensor::random(device, &[n], crate::on_device::DENSE, &mut random)).collect();
    let options = adamw::Options { lr: 0.02, weight_decay: 0.1, grad_scale: 0.5, ..adamw::Options::default() };
    for (with_compute_weights, controlled) in [(false, false), (false, true), (true, false), (true, true)] {
        let what = format!(
            "adamw {} [{n}] compute weights: {with_compute_weights}, scalars in memory: {controlled}",
            T::dtype()
        );
        let mut want = initial.clone();
        let mut placed = initial
            .each_ref()
            .map(|values| DeviceTensor::<f32>::new(device, HostTensor::of(DType::F32, &[n], &[1], values)));
        let mut compute_weights = DeviceTensor::<T>::poisoned(device, &[n], crate::on_device::DENSE);
        for (i, g) in steps.iter().enumerate() {
            let t = i as u64 + 1;
            let [p, m, v] = placed.each_mut().map(|x| x.buffer.slice_mut(..n).expect("a slice"));
            let state = adamw::AdamState { p, m, v };
            let gradient = g.buffer.slice(..n).expect("a slice");
            ok(if controlled {
                let rates =
                    options.rates_at_step(t).and_then(|rates| Buffer::from_slice(device, &rates)).expect("rates");
                let step_control = Buffer::from_slice(device, &[options.grad_scale, 1.0]).expect("a step_control");
                let weights = with_compute_weights.then(|| compute_weights.buffer.slice_mut(..n).expect("a slice"));
                let scalars = [rates.view(), step_control.view()];
                adamw::step_controlled(device, state, gradient, weights, scalars, &options)
            } else if with_compute_weights {
                let weights = compute_weights.buffer.slice_mut(..n).expect("a slice");
                adamw::step_with_compute_weights(device, state, gradient, weights, t, &options)
            } else {
                adamw::step(device, state, gradient, t, &options)
            });
            let [p, m, v] = &mut want;
            adamw::reference(p, m, v, &g.values(), t, &options);
        }
        for ((tensor, want), name) in placed.iter_mut().zip(&want).zip(["p", "m", "v"]) {
            tensor.check(&format!("{what}, {name}"), want, F32);
        }
        if with_compute_weights {
            compute_weights.check(&format!("{what}, compute weights"), &want[0], tolerance(T::dtype()));
        }
    }
}

/// Checks three AdamW steps with the averages of two gradients of type T. In step 2 the last element of the second
/// gradient is infinite: the parameters of its program stay unchanged.
pub fn check_adamw_two_peers<T: FloatElement>(device: &Device, n: usize) {
    let mut random = Random::new(20);
    let [p, own, other] =
        [DType::F32, T::dtype(), T::dtype()].map(|dtype| HostTensor::random(dtype, &[n], &[1], &mut random).values());
    let sums = adamw::squares_two_peers(n);
    let each = adamw::TILE_TWO_PEERS;
    let overflowing = n.saturating_sub(1)..n;
    let options = adamw::Options { lr: 0.02, weight_decay: 0.1, grad_scale: 0.5, ..adamw::Options::default() };
    let average: Vec<f64> = own.iter().zip(&other).map(|(a, b)| f64::from((*a as f32 + *b as f32) * 0.5)).collect();
    let average = HostTensor::of(T::dtype(), &[n], &[1], &average).values();
    for with_compute_weights in [false, true] {
        let what = format!("adamw_two_peers {} [{n}] compute weights: {with_compute_weights}", T::dtype());
        let mut want = [p.clone(), vec![0.0; n], vec![0.0; n]];
        let mut placed = want
            .each_ref()
            .map(|values| DeviceTensor::<f32>::new(device, HostTensor::of(DType::F32, &[n], &[1], values)));
        let mut compute_weights = DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &[n], &[1], &p));
        for t in 1..=3 {
            let mut others = other.clone();
            if t == 2 {
                others[overflowing.clone()].fill(f64::INFINITY);
            }
            let both =
                [&own, &others].map(|g| DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &[n], &[1], g)));
            let [p, m, v] = placed.each_mut().map(|x| x.buffer.slice_mut(..n).expect("a slice"));
            let state = adamw::AdamState { p, m, v };
            let gradients = both.each_ref().map(|g| g.buffer.slice(..n).expect("a slice"));
            let rates = options.rates_at_step(t).and_then(|rates| Buffer::from_slice(device, &rates)).expect("rates");
            let step_control = Buffer::from_slice(device, &[options.grad_scale, 1.0]).expect("a step_control");
            let mut squares = DeviceTensor::<f32>::poisoned(device, &[sums], crate::on_device::DENSE);
            let weights = with_compute_weights.then(|| compute_weights.buffer.slice_mut(..n).expect("a slice"));
            let into = squares.buffer.slice_mut(..sums).expect("a slice");
            ok(adamw::step_two_peers(
                device,
                state,
                gradients,
                weights,
                into,
                [rates.view(), step_control.view()],
                &options,
            ));
            let before = want.clone();
            let [p, m, v] = &mut want;
            adamw::reference(p, m, v, &average, t, &options);
            let found = squares.buffer.to_vec().expect("sums");
            for (i, found) in found[..sums].iter().enumerate() {
                let range = i * each..n.min((i + 1) * each);
                let right: f64 = average[range.clone()].iter().map(|g| g * g).sum();
                if t == 2 && i == sums - 1 {
                    assert!(!found.is_finite(), "{what}: sum of squares {i} is {found}, expected inf or NaN");
                    want.iter_mut()
                        .zip(&before)
                        .for_each(|(want, before)| want[range.clone()].copy_from_slice(&before[range.clone()]));
                } else {
                    assert!(
                        (f64::from(*found) - right).abs() <= 1e-5 * right,
                        "{what}: sum of squares {i} is {found}, expected {right}"
                    );
                }
            }
        }
        for ((tensor, want), name) in placed.iter_mut().zip(&want).zip(["p", "m", "v"]) {
            tensor.check(&format!("{what}, {name}"), want, F32);
        }
        if with_compute_weights {
            compute_weights.check(&format!("{what}, compute weights"), &want[0], tolerance(T::dtype()));
        }
    }
}

/// Checks sums over one to four ranks, with gaps between the inputs, with and without a second output, with one program
/// per tile and with two programs: every result has the bits of a sum in rank order.
pub fn check_rank_sum<T: FloatElement>(device: &Device, n: usize) {
    let random = &mut Random::new(18);
    for (world, rank) in [(1, 0), (2, 0), (2, 1), (3, 1), (4, 3)] {
        for (average, with_copy, programs) in [(false, false, None), (true, true, None), (true, false, Some(2))] {
            let what = format!("rank_sum {} [{n}] of rank {rank} of {world}, average: {average}", T::dtype());
            let stride = n + 5;
            let parts: Vec<HostTensor> =
                (0..world).map(|_| HostTensor::random(T::dtype(), &[n], &[1], random)).collect();
            let values: Vec<Vec<f64>> = parts.iter().map(HostTensor::values).collect();
            let others = (0..world).filter(|&other| other != rank);
            let gaps = others.flat_map(|other| values[other].iter().copied().chain([f64::NAN; 5]));
            let gaps: Vec<f64> = gaps.collect();
            let x = DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &[gaps.len()], &[1], &gaps));
            let mut y = DeviceTensor::<T>::new(device, parts[rank].clone());
            let mut copy = DeviceTensor::<T>::poisoned(device, &[n], crate::on_device::DENSE);
            let ranks = rank_sum::RankReduction { rank, world, average };
            let into = with_copy.then(|| copy.buffer.slice_mut(..n).expect("a slice"));
            let x_view = x.buffer.slice(..gaps.len()).expect("a slice");
            let y_view = y.buffer.slice_mut(..n).expect("a slice");
            ok(rank_sum::reduce(device, y_view, (x_view, stride), into, ranks, programs));
            y.check(&what, &rank_sum::reference(&values, average), tolerance(T::dtype()));
            // In f32, in rank order, rounded once.
            let sum = |i: usize| values.iter().map(|part| part[i] as f32).reduce(|a, b| a + b).expect("a rank");
            let by = if average { 1.0 / world as f32 } else { 1.0 };
            let exact: Vec<f64> = (0..n).map(|i| f64::from(sum(i) * by)).collect();
            let exact = HostTensor::of(T::dtype(), &[n], &[1], &exact).values();
            y.check(&what, &exact, 0.0);
            if with_copy {
                copy.check(&format!("{what}, copy"), &exact, 0.0);
            }
        }
    }
}

/// Checks casts from T to each type: the results are exact up to one rounding.
pub fn check_cast<T: FloatElement>(device: &Device, shape: [usize; 2], spacing: Spacing) {
    cast_to::<T, f32>(device, shape, spacing);
    cast_to::<T, f16>(device, shape, spacing);
    cast_to::<T, bf16>(device, shape, spacing);
}

fn cast_to<T: FloatElement, U: FloatElement>(device: &Device, shape: [usize; 2], spacing: Spacing) {
    let what = format!("cast {} to {} {shape:?} {spacing:?}", T::dtype(), U::dtype());
    let x = DeviceTensor::<T>::random(device, &shape, spacing, &mut Random::new(16));
    let mut y = DeviceTensor::<U>::poisoned(device, &shape, spacing);
    ok(cast::forward(device, x.input(), y.output()));
    let want = HostTensor::of(U::dtype(), &shape, &spacing.strides(&shape), &x.values());
    y.check(&what, &want.values(), 0.0);
    let factor = Buffer::from_slice(device, &[-0.75f32]).expect("a buffer");
    let mut y = DeviceTensor::<U>::poisoned(device, &shape, spacing);
    let one = Tensor::dense(factor.view(), [1]).expect("a tensor");
    ok(cast::scaled(device, x.input(), one, y.output()));
    let want: Vec<f64> = x.values().iter().map(|x| -0.75 * x).collect();
    y.check(&format!("{what}, scaled"), &want, tolerance(U::dtype()));
}

/// Checks the gradient of an embedding with few rows for many tokens; some ids lie outside of the table.
pub fn check_embedding<T: FloatElement>(device: &Device, shape: [usize; 2], spacing: Spacing) {
    embedding_with::<T, i32>(device, shape, spacing);
    embedding_with::<T, i64>(device, shape, spacing);
}

fn embedding_with<T: FloatElement, I: IndexElement>(device: &Device, [tokens, d]: [usize; 2], spacing: Spacing) {
    const VOCABULARY: usize = 11;
    let what = format!("embedding {} {} [{tokens}, {d}] {spacing:?}", T::dtype(), I::dtype());
    let mut random = Random::new(17);
    let ids: Vec<i64> = (0..tokens).map(|_| index(&mut random, VOCABULARY + 2) - 1).collect();
    let g = DeviceTensor::<T>::random(device, &[tokens, d], spacing, &mut random);
    let mut grad = DeviceTensor::<f32>::random(device, &[VOCABULARY, d], spacing, &mut random);
    let mut want = grad.values();
    let on_device = Indices::<I>::new(device, spacing.step, &ids);
    ok(embedding::backward(device, on_device.input(), g.input(), grad.output()));
    embedding::reference(&ids, &g.values(), d, &mut want);
    grad.check(&what, &want, F32);
}

/// Checks cross-entropy with logits of −∞, targets outside of the columns, and NaN in an ignored row.
pub fn check_unusual_cross_entropy(device: &Device) {
    let inf = f32::NEG_INFINITY;
    let logits = [[1.0, inf, 1.0], [inf, 0.5, inf], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [f32::NAN, 0.0, inf]];
    let logits = Buffer::from_slice(device, logits.as_flattened()).expect("a buffer");
    let logits = || Tensor::dense(logits.view(), [5, 3]).expect("a tensor");
    let targets = Buffer::from_slice(device, &[0, 1, 3, -1, 7]).expect("a buffer");
    let targets = || Tensor::<i32, 1>::dense(targets.view(), [5]).expect("a tensor");
    let [mut loss, mut lse] = [(); 2].map(|()| Buffer::<f32>::poisoned(device, 5).expect("a buffer"));
    let out = TensorMut::dense(loss.view_mut(), [5]).expect("a tensor");
    let lse_out = TensorMut::dense(lse.view_mut(), [5]).expect("a tensor");
    ok(cross_entropy::forward(device, logits(), targets(), 7, out, lse_out));
    let got = loss.to_vec().expect("losses");
    assert!((got[0] - std::f32::consts::LN_2).abs() < 1e-6 && got[1].abs() < 1e-6, "{got:?}");
    assert!(got[2].is_nan() && got[3].is_nan() && got[4] == 0.0, "{got:?}");

    let ones = Buffer::from_slice(device, &[1.0f32; 5]).expect("a buffer");
    let [ones, lse] = [&ones, &lse].map(|buffer| Tensor::dense(buffer.view(), [5]).expect("a tensor"));
    let mut grad = Buffer::<f32>::poisoned(device, 15).expect("a buffer");
    let out = TensorMut::dense(grad.view_mut(), [5, 3]).expect("a tensor");
    ok(cross_entropy::backward(device, logits(), targets(), 7, lse, ones, 1.0, out));
    let got = grad.to_vec().expect("gradients");
    let check_gradients = |got: &[f32]| {
        for (i, want) in [-0.5, 0.0, 0.5, 0.0, 0.0, 0.0].into_iter().enumerate() {
            assert!((got[i] - want).abs() < 1e-6, "{got:?}");
        }
        assert!(got[6..12].iter().all(|g| g.is_nan()) && got[12..] == [0.0; 3], "{got:?}");
    };
    check_gradients(&got);

    let mut in_place = Buffer::from_slice(device, &logits().view().to_vec().expect("logits")).expect("a buffer");
    let x = TensorMut::dense(in_place.view_mut(), [5, 3]).expect("a tensor");
    let out = TensorMut::dense(loss.view_mut(), [5]).expect("a tensor");
    ok(cross_entropy::forward_backward(device, x, 3, targets(), 7, ones, 1.0, out));
    check_gradients(&in_place.to_vec().expect("gradients"));
    let got = loss.to_vec().expect("losses");
    assert!((got[0] - std::f32::consts::LN_2).abs() < 1e-6 && got[1].abs() < 1e-6, "{got:?}");
    assert!(got[2].is_nan() && got[3].is_nan() && got[4] == 0.0, "{got:?}");
}
