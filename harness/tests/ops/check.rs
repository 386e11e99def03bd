//! Compares an op with its formula in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use tilewright_harness::params::{Init, ParamSpec, Params};

/// Tolerance of the relative error of an op in this dtype.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-5,
    }
}

/// Random numbers that depend on the seed, rounded to `dtype`, in f64. Normal with σ 0.5, truncated at 3σ.
pub fn random(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let spec = ParamSpec { init: Init::Normal { std: 0.5 }, ..ParamSpec::matrix("x", shape, 0.5) };
    let values = Params::new(vec![spec], &Device::Cpu, seed).unwrap().get("x").unwrap().value().unwrap();
    values.to_dtype(dtype).unwrap().to_dtype(DType::F64).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.detach().flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// ‖found − expected‖ / ‖expected‖.
pub fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.dims(), expected.dims());
    let (found, expected) = (flat(found), flat(expected));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let distance = norm(&mut found.iter().zip(&expected).map(|(f, e)| f - e));
    distance / norm(&mut expected.iter().copied()).max(1e-30)
}

#[track_caller]
pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let error = relative_error(found, expected);
    assert!(error < tolerance, "{what}: relative error {error:.2e}, at most {tolerance:.0e} expected");
}

/// Parameters for the op, and the same values in f64 for the formula.
pub struct Weights {
    pub params: Params,
    pub exact: Vec<Var>,
}

impl Weights {
    pub fn new(shapes: &[&[usize]], dtype: DType) -> Weights {
        let specs = shapes.iter().enumerate().map(|(i, shape)| ParamSpec::matrix(format!("w{i}"), shape, 0.5));
        let params = Params::new(specs.collect(), &Device::Cpu, 99).unwrap();
        let mut exact = Vec::new();
        for param in params.iter() {
            let rounded = param.value().unwrap().to_dtype(dtype).unwrap();
            param.set_value(&rounded).unwrap();
            exact.push(Var::from_tensor(&rounded.to_dtype(DType::F64).unwrap()).unwrap());
        }
        Weights { params, exact }
    }
}

/// Compares results, and the gradients of Σ result · r for a random r, of inputs and of weights.
pub fn check(
    what: &str,
    dtype: DType,
    inputs: &[Tensor],
    weights: &[&[usize]],
    op: impl Fn(&[Tensor], &Params) -> Result<Tensor>,
    formula: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>,
) {
    let tolerance = tolerance(dtype);
    let weights = Weights::new(weights, dtype);
    let ours: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap()).collect();
    let exact: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let tensors = |vars: &[Var]| vars.iter().map(|v| v.as_tensor().clone()).collect::<Vec<_>>();

    let found = op(&tensors(&ours), &weights.params).unwrap();
    let expected = formula(&tensors(&exact), &tensors(&weights.exact)).unwrap();
    assert_close(what, &found, &expected, tolerance);

    // The upstream gradient may be transposed or sliced, as in a model.
    let r = random(found.dims(), found.dtype(), 5);
    let r_ours = r.to_dtype(found.dtype()).unwrap();
    let grads = (&found * &r_ours).unwrap().sum_all().unwrap().backward().unwrap();
    let grads_exact = (&expected * &r).unwrap().sum_all().unwrap().backward().unwrap();
    for (i, (var, exact)) in ours.iter().zip(&exact).enumerate() {
        let found = grads.get(var).unwrap_or_else(|| panic!("{what}: no gradient of input {i}"));
        assert_close(&format!("{what}: gradient of input {i}"), found, grads_exact.get(exact).unwrap(), tolerance);
    }
    for (param, exact) in weights.params.iter().zip(&weights.exact) {
        let expected = grads_exact.get(exact).unwrap();
        let what = format!("{what}: gradient of {}", param.name());
        assert_close(&what, &param.grad().unwrap(), expected, tolerance);
    }
    // Gradients accumulate: a second backward pass doubles them.
    let again = op(&tensors(&ours), &weights.params).unwrap();
    (again * &r_ours).unwrap().sum_all().unwrap().backward().unwrap();
    for (param, exact) in weights.params.iter().zip(&weights.exact) {
        let twice = (grads_exact.get(exact).unwrap() * 2.0).unwrap();
        assert_close(&format!("{what}: twice {}", param.name()), &param.grad().unwrap(), &twice, tolerance);
    }
}

pub const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
