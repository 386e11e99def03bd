//! The kernels of training steps on GPU 0.

use super::{LENGTHS, each_shape, gpu};
use tilewright_tests::for_types;
use tilewright_tests::on_device::{ALIGNED_GAPS, DENSE, GAPS, OFFSET, STEPS, check_unusual_cross_entropy};

#[test]
fn layer_norm_and_its_gradients() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_layer_norm(&gpu, shape, spacing)));
    for d in [8192, 8193, 20_000] {
        for_types!(check_layer_norm(&gpu, [3, d], GAPS));
    }
}

#[test]
fn swiglu_and_its_gradients() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_swiglu(&gpu, shape, spacing)));
}

#[test]
fn cross_entropy_and_its_gradients() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_cross_entropy(&gpu, shape, spacing)));
    for d in [50_257, 128_000] {
        for_types!(check_cross_entropy(&gpu, [5, d], GAPS));
    }
    for d in [1, 7, 8, 9, 1000, 4097, 50_257] {
        for_types!(check_cross_entropy(&gpu, [6, d], DENSE));
        for_types!(check_cross_entropy(&gpu, [6, d], OFFSET));
    }
    check_unusual_cross_entropy(&gpu);
}

#[test]
fn rope_and_its_gradients() {
    let Some(gpu) = gpu() else { return };
    for shape in [[1, 1, 2], [17, 3, 6], [127, 12, 64], [1000, 4, 128], [33, 9, 80]] {
        for spacing in [DENSE, GAPS, ALIGNED_GAPS, STEPS] {
            for_types!(check_rope(&gpu, shape, spacing));
        }
    }
}

#[test]
fn adamw() {
    let Some(gpu) = gpu() else { return };
    for n in LENGTHS.into_iter().chain([0, 1 << 20]) {
        for_types!(check_adamw(&gpu, n));
        for_types!(check_adamw_two_peers(&gpu, n));
    }
}

#[test]
fn sums_over_ranks() {
    let Some(gpu) = gpu() else { return };
    for n in LENGTHS.into_iter().chain([1 << 20]) {
        for_types!(check_rank_sum(&gpu, n));
    }
}

#[test]
fn casts() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_cast(&gpu, shape, spacing)));
}

#[test]
fn gradient_of_an_embedding() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_embedding(&gpu, shape, spacing)));
}

#[test]
fn empty_tensors() {
    let Some(gpu) = gpu() else { return };
    for_types!(check_layer_norm(&gpu, [0, 5], DENSE));
    for_types!(check_cross_entropy(&gpu, [0, 5], DENSE));
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for_types!(check_swiglu(&gpu, shape, DENSE));
        for_types!(check_cast(&gpu, shape, DENSE));
        for_types!(check_embedding(&gpu, shape, DENSE));
    }
    for_types!(check_rope(&gpu, [0, 3, 4], DENSE));
}
