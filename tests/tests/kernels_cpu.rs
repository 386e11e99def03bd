//! Every kernel on the CPU, through its host function, against its f64 reference.

use tilewright::Device;
use tilewright::kernels::matmul::Options;
use tilewright::kernels::scaled_matmul::{self, Scales};
use tilewright::kernels::{Tensor, TensorMut, matmul, softmax, weighted_sum};
use tilewright::prelude::{Buffer, F8E4M3, F8E5M2, Precision, bf16};
use tilewright_tests::for_types;
use tilewright_tests::on_device::{
    ACTIVATIONS, ALIGNED_GAPS, ColumnMajor, DENSE, GAPS, STEPS, check_matmul, check_scaled_matmul,
};

const SHAPES: [[usize; 2]; 7] = [[1, 1], [17, 1], [1, 17], [127, 17], [16, 64], [33, 1000], [700, 20]];

#[test]
fn column_sum() {
    for shape in SHAPES {
        for spacing in [DENSE, GAPS, STEPS] {
            for_types!(check_column_sum(&Device::cpu(), shape, spacing));
        }
    }
}

#[test]
fn weighted_sum_and_its_gradients() {
    for shape in SHAPES {
        for spacing in [DENSE, GAPS, STEPS] {
            for_types!(check_weighted_sum(&Device::cpu(), shape, spacing));
        }
    }
}

#[test]
fn softmax_of_rows() {
    for shape in SHAPES {
        for spacing in [DENSE, GAPS, STEPS] {
            for_types!(check_softmax(&Device::cpu(), shape, spacing));
        }
    }
    // Wider than a tile.
    for_types!(check_softmax(&Device::cpu(), [2, 20_001], GAPS));
}

#[test]
fn rms_norm_and_its_gradients() {
    for shape in SHAPES {
        for spacing in [DENSE, GAPS, STEPS] {
            for_types!(check_rms_norm(&Device::cpu(), shape, spacing));
        }
    }
    // Wider than a tile.
    for_types!(check_rms_norm(&Device::cpu(), [3, 9001], GAPS));
}

#[test]
fn matmul_of_any_strides() {
    let cpu = Device::cpu();
    for shape in [[1, 1, 1], [17, 5, 127], [64, 64, 64], [130, 70, 33]] {
        for_types!(check_matmul(&cpu, shape, DENSE, ColumnMajor::default(), Options::default()));
        for_types!(check_matmul(&cpu, shape, STEPS, ColumnMajor::default(), Options::default()));
    }
}

#[test]
fn matmul_of_any_order_of_strides() {
    let cpu = Device::cpu();
    for bits in 1..8 {
        let columns = ColumnMajor { a: bits & 1 != 0, b: bits & 2 != 0, c: bits & 4 != 0 };
        for_types!(check_matmul(&cpu, [40, 33, 65], ALIGNED_GAPS, columns, Options::default()));
        check_matmul::<f64>(&cpu, [40, 33, 65], GAPS, columns, Options::default());
    }
}

#[test]
fn matmul_of_every_activation_and_precision() {
    let cpu = Device::cpu();
    for activation in ACTIVATIONS {
        let options = Options { activation, ..Options::default() };
        for_types!(check_matmul(&cpu, [20, 30, 10], GAPS, ColumnMajor::default(), options));
    }
    for precision in [Precision::Tf32, Precision::Tf32x3] {
        let options = Options { precision, ..Options::default() };
        check_matmul::<f32>(&cpu, [50, 60, 70], DENSE, ColumnMajor::default(), options);
    }
}

/// A matrix in f64 to which products of f32 are added keeps its precision.
#[test]
fn matmul_accumulates_in_the_wider_type() {
    let cpu = Device::cpu();
    let a = Buffer::from_slice(&cpu, &[1.0f32]).unwrap();
    let b = Buffer::from_slice(&cpu, &[0.5f32]).unwrap();
    for before in [1.0 + 1e-12, 1e300] {
        let mut c = Buffer::from_slice(&cpu, &[before]).unwrap();
        let of = |x| Tensor::dense(x, [1, 1]).unwrap();
        let sum = TensorMut::dense(c.view_mut(), [1, 1]).unwrap();
        matmul::accumulate(&cpu, of(a.view()), of(b.view()), sum, Options::default()).unwrap();
        assert_eq!(c.to_vec().unwrap(), [before + 0.5]);
    }
}

#[test]
fn matmul_swiglu_of_any_strides() {
    let cpu = Device::cpu();
    for columns in [ColumnMajor::default(), ColumnMajor { b: true, ..ColumnMajor::default() }] {
        for (shape, spacing) in
            [([1, 1, 1], DENSE), ([40, 33, 65], STEPS), ([70, 130, 40], GAPS), ([3, 4, 0], DENSE), ([0, 4, 3], DENSE)]
        {
            for_types!(check_matmul_swiglu(&cpu, shape, spacing, columns));
        }
    }
}

#[test]
fn scaled_matmul_of_any_strides() {
    let cpu = Device::cpu();
    for columns in [ColumnMajor::default(), ColumnMajor { b: true, ..ColumnMajor::default() }] {
        for (shape, spacing) in [([1, 1, 1], DENSE), ([40, 33, 65], STEPS), ([70, 130, 200], GAPS)] {
            check_scaled_matmul::<F8E4M3, bf16>(&cpu, shape, spacing, columns, 0.0);
            check_scaled_matmul::<F8E5M2, f32>(&cpu, shape, spacing, columns, 0.0);
            check_scaled_matmul::<i8, i32>(&cpu, shape, spacing, columns, 0.0);
            check_scaled_matmul::<u8, f32>(&cpu, shape, spacing, columns, 0.0);
        }
    }
}

#[test]
fn sums_that_may_exceed_i32_are_refused() {
    let cpu = Device::cpu();
    let x = Buffer::<u8>::zeros(&cpu, 33_026).unwrap();
    let mut y = Buffer::<i32>::zeros(&cpu, 1).unwrap();
    let mut multiply = |k: usize| {
        let (a, b) = (Tensor::dense(x.view(), [1, k]).unwrap(), Tensor::dense(x.view(), [k, 1]).unwrap());
        scaled_matmul::multiply(&cpu, a, b, Scales::None, false, TensorMut::dense(y.view_mut(), [1, 1]).unwrap())
    };
    multiply(33_025).unwrap();
    let error = multiply(33_026).unwrap_err().to_string();
    assert!(error.contains("33025") && error.contains("33026"), "{error}");
}

#[test]
fn empty_tensors() {
    let cpu = Device::cpu();
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for_types!(check_column_sum(&cpu, shape, DENSE));
        for_types!(check_weighted_sum(&cpu, shape, DENSE));
        for_types!(check_softmax(&cpu, shape, DENSE));
    }
    for_types!(check_rms_norm(&cpu, [0, 5], DENSE));
    for shape in [[0, 5, 3], [5, 0, 3], [5, 3, 0]] {
        for_types!(check_matmul(&cpu, shape, DENSE, ColumnMajor::default(), Options::default()));
    }
}

#[test]
fn mistakes_name_the_argument_and_both_shapes() {
    let cpu = Device::cpu();
    let x = Buffer::<f32>::zeros(&cpu, 60).unwrap();
    let (mut y, mut z) = (Buffer::<f32>::zeros(&cpu, 60).unwrap(), Buffer::<f32>::zeros(&cpu, 60).unwrap());
    let of = |shape| Tensor::dense(x.view(), shape).unwrap();

    let w = Tensor::dense(x.view(), [7]).unwrap();
    let out = TensorMut::dense(y.view_mut(), [10]).unwrap();
    let message = weighted_sum::forward(&cpu, of([10, 6]), w, out).unwrap_err().to_string();
    for part in ["weighted_sum_fwd", "`w`", "d = 6, as in `x`", "d = 7", "[7]"] {
        assert!(message.contains(part), "{message}");
    }

    let out = TensorMut::dense(z.view_mut(), [6, 9]).unwrap();
    let message = softmax::forward(&cpu, of([6, 10]), out).unwrap_err().to_string();
    assert!(
        message.contains("`y`") && message.contains("d = 10, as in `x`") && message.contains("[6, 9]"),
        "{message}"
    );

    let out = TensorMut::dense(z.view_mut(), [6, 6]).unwrap();
    let message = matmul::multiply(&cpu, of([6, 10]), of([9, 6]), out, Options::default()).unwrap_err().to_string();
    assert!(
        message.contains("`b`") && message.contains("k = 10, as in `a`") && message.contains("[9, 6]"),
        "{message}"
    );
}
