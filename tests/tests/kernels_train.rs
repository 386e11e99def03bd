//! The kernels of training steps on the CPU, through their host functions, against their f64 references.

use tilewright::kernels::rope::Direction;
use tilewright::kernels::{Tensor, TensorMut, activation, adamw, cross_entropy, rope};
use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_tests::for_types;
use tilewright_tests::numerics::{HostTensor, Random, relative_error, tolerance};
use tilewright_tests::on_device::{ACTIVATIONS, DENSE, GAPS, OFFSET, STEPS, Spacing, check_unusual_cross_entropy};

/// Rows and columns: each shape is compiled for every type.
const SHAPES: [[usize; 2]; 4] = [[1, 1], [17, 1], [127, 19], [16, 64]];

fn each_shape(mut check: impl FnMut([usize; 2], Spacing)) {
    for shape in SHAPES {
        for spacing in [DENSE, STEPS] {
            check(shape, spacing);
        }
    }
}

#[test]
fn layer_norm_and_its_gradients() {
    let cpu = Device::cpu();
    each_shape(|shape, spacing| for_types!(check_layer_norm(&cpu, shape, spacing)));
    // Wider than a tile.
    for_types!(check_layer_norm(&cpu, [3, 9001], GAPS));
}

#[test]
fn swiglu_and_its_gradients() {
    let cpu = Device::cpu();
    each_shape(|shape, spacing| for_types!(check_swiglu(&cpu, shape, spacing)));
    for_types!(check_swiglu(&cpu, [3, 5001], GAPS));
}

#[test]
fn activations_and_their_gradients() {
    let cpu = Device::cpu();
    each_shape(|shape, spacing| for_types!(check_activation(&cpu, shape, spacing)));
    for_types!(check_activation(&cpu, [3, 5001], GAPS));
}

/// f(x) and f′(x) in f32 for large |x|, infinities and NaN: no overflow in between gives NaN.
#[test]
fn activations_of_extreme_numbers() {
    let cpu = Device::cpu();
    let xs = [-1e38, -1e20, -100.0, -19.0, 0.0, 19.0, 100.0, 1e20, 1e38, f32::NAN];
    let x = Buffer::from_slice(&cpu, &xs).unwrap();
    let ones = Buffer::from_slice(&cpu, &[1.0f32; 10]).unwrap();
    let matrix = |x: &Buffer<f32>| x.to_vec().unwrap();
    for activation in ACTIVATIONS {
        let [mut y, mut grad] = [(); 2].map(|()| Buffer::<f32>::uninit(&cpu, 10).unwrap());
        let input = |x| Tensor::dense(x, [1, 10]).unwrap();
        let output = |x| TensorMut::dense(x, [1, 10]).unwrap();
        activation::forward(&cpu, input(x.view()), None, activation, None, output(y.view_mut())).unwrap();
        activation::backward(&cpu, input(x.view()), None, activation, input(ones.view()), output(grad.view_mut()))
            .unwrap();
        for (i, (y, grad)) in matrix(&y).into_iter().zip(matrix(&grad)).enumerate() {
            let x = f64::from(xs[i]);
            if x.is_nan() {
                assert!(y.is_nan(), "{activation:?}");
                continue;
            }
            let (want, want_grad) = (
                activation::reference::forward(x, activation),
                if x.abs() > 18.0 {
                    f64::from(u8::from(x > 0.0))
                } else {
                    activation::reference::derivative(x, activation)
                },
            );
            assert!((f64::from(y) - want).abs() <= 1e-5 * want.abs().max(1e-2), "{activation:?} of {x}: {y}, {want}");
            assert!((f64::from(grad) - want_grad).abs() <= 1e-6, "{activation:?}′ of {x}: {grad}, {want_grad}");
        }
    }
}

#[test]
fn cross_entropy_and_its_gradients() {
    let cpu = Device::cpu();
    each_shape(|shape, spacing| for_types!(check_cross_entropy(&cpu, shape, spacing)));
    // Vocabularies wider than a tile.
    for_types!(check_cross_entropy(&cpu, [5, 9001], GAPS));
    for_types!(check_cross_entropy(&cpu, [3, 37], OFFSET));
    check_unusual_cross_entropy(&cpu);
}

/// Unaligned logits, which the kernels of [`cross_entropy`] read in aligned vectors on GPUs. Memory around the rows is
/// NaN.
struct UnalignedLogits<'a> {
    logits: View<'a, bf16>,
    targets: &'a Buffer<i64>,
    d: usize,
    stride: usize,
}

/// Launches the kernels directly; the number of rows is the number of targets.
impl UnalignedLogits<'_> {
    const VECTOR: usize = 8;

    fn misalignment(&self) -> i32 {
        (self.logits.address() % 16 / 2) as i32
    }

    fn shape_and_strides(&self) -> ([usize; 2], [i64; 2]) {
        ([self.targets.len(), self.d], [self.stride as i64, 1])
    }

    fn forward(&self, device: &Device, loss: &mut Buffer<f32>, lse: &mut Buffer<f32>) -> Result<()> {
        let (shape, strides) = self.shape_and_strides();
        let mut kernel = cross_entropy::CrossEntropyFwd {
            logits: &Tensor::strided(self.logits, shape, strides)?,
            targets: self.targets,
            loss,
            lse,
            ignore_index: -100,
            misalignment: self.misalignment(),
            rows_tile: 2,
            d_tile: 1024,
            slots: 4,
            size_per_thread: Self::VECTOR,
            vector: Self::VECTOR,
        };
        kernel.launch(device)
    }

    fn backward(
        &self,
        device: &Device,
        lse: &Buffer<f32>,
        grad_loss: &Buffer<f32>,
        grad: ViewMut<'_, bf16>,
    ) -> Result<()> {
        let (shape, strides) = self.shape_and_strides();
        let mut kernel = cross_entropy::CrossEntropyBwd {
            logits: &Tensor::strided(self.logits, shape, strides)?,
            targets: self.targets,
            lse,
            grad_loss,
            grad_logits: &mut TensorMut::strided(grad, shape, strides)?,
            ignore_index: -100,
            misalignment: self.misalignment(),
            scale: 0.5,
            rows_tile: 2,
            d_tile: 1024,
            vector: Self::VECTOR,
        };
        kernel.launch(device)
    }
}

#[test]
fn cross_entropy_of_unaligned_rows() {
    let cpu = Device::cpu();
    for (d, gap, first) in [(1, 0, 3), (7, 0, 0), (8, 3, 5), (9, 0, 8), (1000, 0, 1), (4097, 7, 2), (50_257, 0, 7)] {
        let (rows, mut random) = (3, Random::new(d as u64));
        let values: Vec<f64> = (0..rows * d).map(|_| 10.0 * random.number()).collect();
        let shape = [rows, d];
        let mut x = HostTensor::of(DType::BF16, &shape, &[d + gap, 1], &values).with_offset(first);
        let listed = [d as i64 - 1, -100, 0];
        let targets = Buffer::from_slice(&cpu, &listed).unwrap();
        let grad_loss = Buffer::from_slice(&cpu, &[2.0f32, 3.0, 0.25]).unwrap();
        let mut buffer: Buffer<bf16> = x.upload(&cpu);
        let [mut loss, mut lse] = [(); 2].map(|()| Buffer::<f32>::poisoned(&cpu, rows).unwrap());
        let end = first + (rows - 1) * (d + gap) + d;
        let rows_of =
            |end| UnalignedLogits { logits: buffer.slice(first..end).unwrap(), targets: &targets, d, stride: d + gap };
        rows_of(end).forward(&cpu, &mut loss, &mut lse).unwrap_or_else(|e| panic!("d {d}: {e}"));
        let (want_loss, want_lse) = cross_entropy::reference::forward(&x.values(), &listed, d, -100);
        let wide = |buffer: &Buffer<f32>| buffer.to_vec().unwrap().into_iter().map(f64::from).collect::<Vec<_>>();
        assert!(relative_error(&wide(&loss), &want_loss) < 1e-5, "loss of {d}");
        assert!(relative_error(&wide(&lse), &want_lse) < 1e-5, "lse of {d}");

        let short = rows_of(end - 1);
        let message = short.forward(&cpu, &mut loss, &mut lse).unwrap_err().to_string();
        assert!(message.contains("outside"), "{message}");
        let mut other: Buffer<bf16> =
            HostTensor::poisoned(DType::BF16, &shape, &[d + gap, 1]).with_offset(first).upload(&cpu);
        let grad = other.slice_mut(first..end - 1).unwrap();
        let message = rows_of(end).backward(&cpu, &lse, &grad_loss, grad).unwrap_err().to_string();
        assert!(message.contains("outside"), "{message}");

        // In place: each logit is read by the program that writes its gradient, before it writes.
        let want = cross_entropy::reference::backward(&x.values(), &listed, d, -100, &[2.0, 3.0, 0.25], 0.5);
        let address = buffer.slice(first..).unwrap().address();
        // SAFETY: the elements live as long as the buffer; the kernel reads none of them after it wrote it.
        let logits = unsafe { View::from_address(&cpu, address, end - first) };
        let whole = UnalignedLogits { logits, targets: &targets, d, stride: d + gap };
        whole.backward(&cpu, &lse, &grad_loss, buffer.slice_mut(first..end).unwrap()).unwrap_or_else(|e| panic!("{e}"));
        x.download(&buffer);
        x.check(&format!("gradients of {d} logits in place"), &want, tolerance(DType::BF16));
    }
}

#[test]
fn rope_and_its_gradients() {
    let cpu = Device::cpu();
    for shape in [[17, 3, 6], [40, 12, 64]] {
        for spacing in [DENSE, STEPS] {
            for_types!(check_rope(&cpu, shape, spacing));
        }
    }
}

#[test]
fn adamw_steps() {
    let cpu = Device::cpu();
    for n in [0, 1, 17, 1000, 4097] {
        for_types!(check_adamw(&cpu, n));
        for_types!(check_adamw_two_peers(&cpu, n));
    }
}

/// From 1.8e19 on the square exceeds f32, and from 5.8e20 on also (1 − β₂) · g², where v becomes infinite: the parameter
/// only decays from then on.
#[test]
fn adamw_of_gradients_whose_squares_exceed_f32() {
    let cpu = Device::cpu();
    let options = adamw::Options { lr: 0.02, weight_decay: 0.1, ..adamw::Options::default() };
    let gradients = [3e19f32, -3e20, 1e38, -1e38, 1.0];
    let mut want = [vec![1.0; 5], vec![0.0; 5], vec![0.0; 5]];
    let mut state = [[1.0f32; 5], [0.0; 5], [0.0; 5]].map(|x| Buffer::from_slice(&cpu, &x).expect("a buffer"));
    for (t, scale) in [1.0f32, -0.5, 0.25].into_iter().enumerate() {
        let g = gradients.map(|g| g * scale);
        let buffer = Buffer::from_slice(&cpu, &g).expect("a buffer");
        let [p, m, v] = state.each_mut().map(|x| x.view_mut());
        adamw::step(&cpu, adamw::AdamState { p, m, v }, buffer.view(), t as u64 + 1, &options).expect("a step");
        let [p, m, v] = &mut want;
        adamw::reference(p, m, v, &g.map(f64::from), t as u64 + 1, &options);
    }
    let [p, _, v] = state.map(|x| x.to_vec().expect("values"));
    for i in [0, 1, 4] {
        assert!((f64::from(p[i]) - want[0][i]).abs() < 1e-6, "{} {}", p[i], want[0][i]);
        assert!((f64::from(v[i]) / want[2][i] - 1.0).abs() < 1e-5, "{} {}", v[i], want[2][i]);
    }
    for i in [2, 3] {
        let decayed = (1.0 - options.lr * options.weight_decay).powi(3);
        assert!((f64::from(p[i]) - decayed).abs() < 1e-6 && v[i] == f32::INFINITY, "{} {}", p[i], v[i]);
    }
}

#[test]
fn sums_over_ranks() {
    let cpu = Device::cpu();
    for n in [1, 17, 1000, 4097, 10_000] {
        for_types!(check_rank_sum(&cpu, n));
    }
}

#[test]
fn casts() {
    let cpu = Device::cpu();
    each_shape(|shape, spacing| for_types!(check_cast(&cpu, shape, spacing)));
}

#[test]
fn gradient_of_an_embedding() {
    let cpu = Device::cpu();
    each_shape(|shape, spacing| for_types!(check_embedding(&cpu, shape, spacing)));
}

#[test]
fn empty_tensors() {
    let cpu = Device::cpu();
    for_types!(check_layer_norm(&cpu, [0, 5], DENSE));
    for_types!(check_cross_entropy(&cpu, [0, 5], DENSE));
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for_types!(check_swiglu(&cpu, shape, DENSE));
        for_types!(check_activation(&cpu, shape, DENSE));
        for_types!(check_cast(&cpu, shape, DENSE));
        for_types!(check_embedding(&cpu, shape, DENSE));
    }
    for_types!(check_rope(&cpu, [0, 3, 4], DENSE));
}

#[test]
fn mistakes_say_what_was_expected() {
    let cpu = Device::cpu();
    let x = Buffer::<f32>::zeros(&cpu, 60).unwrap();
    let mut outs = [(); 4].map(|()| Buffer::<f32>::zeros(&cpu, 60).unwrap());
    let [a, b, c, d] = outs.each_mut();

    // A head dimension of 3 has no pairs.
    let source = Tensor::dense(x.view(), [5, 2, 3]).unwrap();
    let frequencies = Buffer::<f64>::zeros(&cpu, 1).unwrap();
    let theta = Tensor::dense(frequencies.view(), [1]).unwrap();
    let out = TensorMut::dense(a.view_mut(), [5, 2, 3]).unwrap();
    let message = rope::rotate_from(&cpu, source, 0, 5, theta, out, Direction::Forward).unwrap_err().to_string();
    assert!(message.contains("rope_from") && message.contains("even") && message.contains('3'), "{message}");

    let options = adamw::Options::default();
    let [p, m, v] = [b, c, d].map(|buffer| buffer.view_mut());
    let message =
        adamw::step(&cpu, adamw::AdamState { p, m, v }, x.slice(..59).unwrap(), 1, &options).unwrap_err().to_string();
    assert!(message.contains("`g`") && message.contains("60") && message.contains("59"), "{message}");
    let [p, m, v, _] = outs.each_mut().map(|buffer| buffer.view_mut());
    let message = adamw::step(&cpu, adamw::AdamState { p, m, v }, x.view(), 0, &options).unwrap_err().to_string();
    assert!(message.contains("a step number of at least 1"), "{message}");

    let targets = Buffer::<i32>::zeros(&cpu, 9).unwrap();
    let targets = Tensor::dense(targets.view(), [9]).unwrap();
    let logits = Tensor::dense(x.view(), [10, 6]).unwrap();
    let [loss, lse, ..] = outs.each_mut().map(|buffer| TensorMut::dense(buffer.view_mut(), [10]).unwrap());
    let message = cross_entropy::forward(&cpu, logits, targets, -100, loss, lse).unwrap_err().to_string();
    assert!(
        message.contains("`targets`") && message.contains("rows = 10, as in `logits`") && message.contains("[9]"),
        "{message}"
    );
}
