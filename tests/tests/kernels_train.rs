//! The kernels of training steps on the CPU, through their host side, against their f64 references.

use tilewright::Device;
use tilewright::kernels::rope::Direction;
use tilewright::kernels::{Tensor, TensorMut, adamw, cross_entropy, rope};
use tilewright::prelude::Buffer;
use tilewright_tests::for_types;
use tilewright_tests::on_device::{DENSE, GAPS, STEPS, Spacing, check_unusual_cross_entropy};

/// Rows and columns: each of these is compiled for every type.
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
fn cross_entropy_and_its_gradients() {
    let cpu = Device::cpu();
    each_shape(|shape, spacing| for_types!(check_cross_entropy(&cpu, shape, spacing)));
    // Vocabularies wider than a tile.
    for_types!(check_cross_entropy(&cpu, [5, 9001], GAPS));
    check_unusual_cross_entropy(&cpu);
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
fn empty_tensors_are_nothing_special() {
    let cpu = Device::cpu();
    for_types!(check_layer_norm(&cpu, [0, 5], DENSE));
    for_types!(check_cross_entropy(&cpu, [0, 5], DENSE));
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for_types!(check_swiglu(&cpu, shape, DENSE));
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

    // Heads of three have no pairs.
    let source = Tensor::dense(x.view(), [5, 2, 3]).unwrap();
    let frequencies = Buffer::<f64>::zeros(&cpu, 1).unwrap();
    let theta = Tensor::dense(frequencies.view(), [1]).unwrap();
    let out = TensorMut::dense(a.view_mut(), [5, 2, 3]).unwrap();
    let message = rope::rotate_from(&cpu, source, 0, 5, theta, out, Direction::Forward).unwrap_err().to_string();
    assert!(message.contains("rope_from") && message.contains("even") && message.contains('3'), "{message}");

    let options = adamw::Options::default();
    let [p, m, v] = [b, c, d].map(|buffer| buffer.view_mut());
    let message = adamw::step(&cpu, p, m, v, x.slice(..59).unwrap(), 1, &options).unwrap_err().to_string();
    assert!(message.contains("`g`") && message.contains("60") && message.contains("59"), "{message}");
    let [p, m, v, _] = outs.each_mut().map(|buffer| buffer.view_mut());
    let message = adamw::step(&cpu, p, m, v, x.view(), 0, &options).unwrap_err().to_string();
    assert!(message.contains("counted from 1"), "{message}");

    let targets = Buffer::<i32>::zeros(&cpu, 9).unwrap();
    let targets = Tensor::dense(targets.view(), [9]).unwrap();
    let logits = Tensor::dense(x.view(), [10, 6]).unwrap();
    let [loss, lse, ..] = outs.each_mut().map(|buffer| TensorMut::dense(buffer.view_mut(), [10]).unwrap());
    let message = cross_entropy::forward(&cpu, logits, targets, -100, loss, lse).unwrap_err().to_string();
    assert!(message.contains("`targets`") && message.contains("[10]") && message.contains("[9]"), "{message}");
}
