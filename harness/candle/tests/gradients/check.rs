//! Compares an op with a formula in f64.

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Result, Tensor, Var};

pub const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Tolerance of the relative error of an op in this dtype.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-5,
    }
}

/// Numbers that depend on the seed, in [−1, 1], rounded to `dtype`, in f64.
pub fn random(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values = (0..shape.iter().product::<usize>()).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    });
    let values = Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(shape).unwrap();
    values.to_dtype(dtype).unwrap().to_dtype(DType::F64).unwrap()
}

pub fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.detach().flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// ‖found − expected‖ / ‖expected‖.
#[track_caller]
pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let (found, expected) = (flat(found), flat(expected));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let distance = norm(&mut found.iter().zip(&expected).map(|(f, e)| f - e));
    let error = distance / norm(&mut expected.iter().copied()).max(1e-30);
    assert!(
        error < tolerance || distance == 0.0,
        "{what}: relative error {error:.2e}, at most {tolerance:.0e} expected"
    );
}

/// How a variable stores an input, which is a view of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stored {
    Dense,
    /// The last two dimensions are swapped in memory.
    Transposed,
    /// Rows are parts of longer rows.
    Gaps,
    /// The first and the last dimension are swapped in memory: no two dimensions collapse.
    Reversed,
}

pub const STORED: [Stored; 4] = [Stored::Dense, Stored::Transposed, Stored::Gaps, Stored::Reversed];

impl Stored {
    fn variable(self, x: &Tensor) -> Var {
        let stored = match self {
            Stored::Transposed if x.rank() >= 2 => x.transpose(D::Minus1, D::Minus2).unwrap().contiguous().unwrap(),
            Stored::Reversed if x.rank() >= 3 => x.transpose(0, D::Minus1).unwrap().contiguous().unwrap(),
            Stored::Gaps => x.pad_with_zeros(D::Minus1, 3, 2).unwrap(),
            _ => x.clone(),
        };
        Var::from_tensor(&stored).unwrap()
    }

    /// The input, or its gradient, in what is stored.
    fn view(self, stored: &Tensor) -> Tensor {
        match self {
            Stored::Transposed if stored.rank() >= 2 => stored.transpose(D::Minus1, D::Minus2).unwrap(),
            Stored::Reversed if stored.rank() >= 3 => stored.transpose(0, D::Minus1).unwrap(),
            Stored::Gaps => stored.narrow(D::Minus1, 3, stored.dim(D::Minus1).unwrap() - 5).unwrap(),
            _ => stored.clone(),
        }
    }
}

/// Σ y · r for numbers r that depend on the shape only.
fn seeded_sum(y: &Tensor) -> Tensor {
    let r = random(y.dims(), DType::BF16, 5).to_dtype(y.dtype()).unwrap();
    (y * r).unwrap().sum_all().unwrap()
}

/// Gradients of Σ y · r.
pub fn gradients(y: &Tensor) -> GradStore {
    seeded_sum(y).backward().unwrap()
}

/// Compares results and gradients of an op and a formula for inputs that are stored in every way.
pub fn check(
    what: &str,
    dtype: DType,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
    formula: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    check_stored(what, &STORED, tolerance(dtype), dtype, inputs, op, formula);
}

/// As [`check`], with a tolerance of the caller.
pub fn check_with(
    what: &str,
    tolerance: f64,
    dtype: DType,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
    formula: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    check_stored(what, &STORED, tolerance, dtype, inputs, op, formula);
}

/// As [`check_with`], for inputs that are stored in these ways: each compiles kernels of its own.
pub fn check_stored(
    what: &str,
    stored: &[Stored],
    tolerance: f64,
    dtype: DType,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
    formula: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let exact: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let tensors: Vec<Tensor> = exact.iter().map(|v| v.as_tensor().clone()).collect();
    let expected = formula(&tensors).unwrap();
    let expected_grads = gradients(&expected);
    for &stored in stored {
        let what = format!("{what} {dtype:?} {stored:?}");
        let ours: Vec<Var> = inputs.iter().map(|x| stored.variable(&x.to_dtype(dtype).unwrap())).collect();
        let views: Vec<Tensor> = ours.iter().map(|v| stored.view(v.as_tensor())).collect();
        let found = op(&views).unwrap();
        assert_close(&what, &found, &expected, tolerance);
        let grads = gradients(&found);
        for (i, (var, exact)) in ours.iter().zip(&exact).enumerate() {
            let gradient = grads.get(var).unwrap_or_else(|| panic!("{what}: no gradient of input {i}"));
            let expected = expected_grads.get(exact).unwrap();
            assert_close(&format!("{what}, gradient {i}"), &stored.view(gradient), expected, tolerance);
        }
        // Gradients of two uses add up.
        let twice = (op(&views).unwrap() + op(&views).unwrap()).unwrap();
        let grads = gradients(&twice);
        for (i, (var, exact)) in ours.iter().zip(&exact).enumerate() {
            let expected = (expected_grads.get(exact).unwrap() * 2.0).unwrap();
            let gradient = stored.view(grads.get(var).unwrap());
            assert_close(&format!("{what}, two uses, gradient {i}"), &gradient, &expected, tolerance);
        }
    }
}
