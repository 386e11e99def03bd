use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use tilewright_candle as ours;
use tilewright_candle::{Epilogue, Rope};

use crate::check::{TYPES, assert_close, check, check_with, gradients, random, tolerance};

fn rms_formula(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + 1e-5)?.sqrt()?)?.broadcast_mul(w)
}

fn layer_formula(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    rms_formula(&x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?, w)?.broadcast_add(b)
}

#[test]
fn norms() {
    for dtype in TYPES {
        for shape in [&[7, 40][..], &[2, 3, 257], &[1, 1], &[2, 3, 2, 5]] {
            let d = *shape.last().unwrap();
            let weights = [random(&[d], dtype, 2), random(&[d], dtype, 3)];
            // In a row of one element, x̂ depends on ε only, and its gradient cancels.
            if d > 1 {
                let inputs = [random(shape, dtype, 1), weights[0].clone()];
                let op = |x: &[Tensor]| ours::rms_norm(&x[0], &x[1], 1e-5);
                check(&format!("rms_norm {shape:?}"), dtype, &inputs, op, |x| rms_formula(&x[0], &x[1]));
                let inputs = [random(shape, dtype, 1), weights[0].clone(), weights[1].clone()];
                let op = |x: &[Tensor]| ours::layer_norm(&x[0], &x[1], &x[2], 1e-5);
                check(&format!("layer_norm {shape:?}"), dtype, &inputs, op, |x| layer_formula(&x[0], &x[1], &x[2]));
            }
        }
    }
}

#[test]
fn linear_and_matmul() {
    for dtype in TYPES {
        for (shape, n) in [(&[5, 24][..], 33), (&[2, 7, 16], 8), (&[70, 130], 65), (&[1, 1], 1)] {
            let k = *shape.last().unwrap();
            let inputs = [random(shape, dtype, 1), random(&[n, k], dtype, 2)];
            let op = |x: &[Tensor]| ours::linear(&x[0], &x[1]);
            check(&format!("linear {shape:?}"), dtype, &inputs, op, |x| x[0].broadcast_matmul(&x[1].t()?));
            let inputs = [random(shape, dtype, 1), random(&[k, n], dtype, 2)];
            let op = |x: &[Tensor]| ours::matmul(&x[0], &x[1]);
            check(&format!("matmul {shape:?}"), dtype, &inputs, op, |x| x[0].broadcast_matmul(&x[1]));
        }
        for (shape, d) in [(&[5, 24][..], 33), (&[2, 7, 16], 8)] {
            let k = *shape.last().unwrap();
            let inputs = [random(shape, dtype, 1), random(&[2 * d, k], dtype, 2)];
            let op = |x: &[Tensor]| ours::linear_swiglu(&x[0], &x[1]);
            let formula = |x: &[Tensor]| {
                let silu = |x: &Tensor| x / (x.neg()?.exp()? + 1.0)?;
                let products = x[0].broadcast_matmul(&x[1].t()?)?;
                silu(&products.narrow(D::Minus1, 0, d)?)? * products.narrow(D::Minus1, d, d)?
            };
            check(&format!("linear_swiglu {shape:?}"), dtype, &inputs, op, formula);
        }
        // One tensor as both operands.
        let square = [random(&[6, 6], dtype, 4)];
        check("x·x", dtype, &square, |x| ours::matmul(&x[0], &x[0]), |x| x[0].matmul(&x[0]));
    }
    // A row that is repeated by a stride of zero.
    let row = Var::new(&[[1_f32, 2.0, 3.0]], &Device::Cpu).unwrap();
    let weight = random(&[2, 3], DType::F32, 1).to_dtype(DType::F32).unwrap();
    let y = ours::linear(&row.expand((4, 3)).unwrap(), &weight).unwrap();
    let expected = row.matmul(&weight.t().unwrap()).unwrap().expand((4, 2)).unwrap();
    assert_close("repeated rows", &y, &expected, 1e-6);
    let gradient = y.sum_all().unwrap().backward().unwrap().remove(&row).unwrap();
    assert_close("their gradient", &gradient, &(weight.sum_keepdim(0).unwrap() * 4.0).unwrap(), 1e-6);
}

fn gelu(x: &Tensor) -> Result<Tensor> {
    let u = ((x + (x.powf(3.0)? * 0.044715)?)? * std::f64::consts::FRAC_2_PI.sqrt())?;
    x.mul(&(u.tanh()? + 1.0)?)? * 0.5
}

fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    x.mul(&((x * std::f64::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)?)? * 0.5
}

/// Every part of an epilogue, alone and with the others, after both matmuls.
#[test]
fn epilogues() {
    use candle_nn::Activation;
    let apply = |activation, z: Tensor| match activation {
        None => Ok(z),
        Some(Activation::Relu) => z.relu(),
        Some(Activation::Gelu) => gelu_erf(&z),
        Some(Activation::NewGelu) => gelu(&z),
        Some(_) => &z / (z.neg()?.exp()? + 1.0)?,
    };
    let activations =
        [None, Some(Activation::Relu), Some(Activation::Gelu), Some(Activation::NewGelu), Some(Activation::Silu)];
    for (dtype, activation) in TYPES.into_iter().flat_map(|dtype| activations.map(|activation| (dtype, activation))) {
        let shape = [random(&[2, 5, 24], dtype, 1), random(&[33, 24], dtype, 2)];
        let (bias, residual) = (random(&[33], dtype, 3), random(&[2, 5, 33], dtype, 4));
        let parts = [vec![bias.clone()], vec![residual.clone()], vec![bias, residual], vec![]];
        for (i, parts) in parts.into_iter().enumerate() {
            let (has_bias, has_residual) = (i == 0 || i == 2, i == 1 || i == 2);
            let inputs: Vec<Tensor> = shape.iter().cloned().chain(parts).collect();
            let epilogue = |x: &[Tensor], then: &dyn Fn(&Epilogue) -> Result<Tensor>| {
                let mut epilogue = Epilogue::default();
                epilogue.activation = activation;
                epilogue.bias = has_bias.then(|| &x[2]);
                epilogue.residual = has_residual.then(|| &x[x.len() - 1]);
                then(&epilogue)
            };
            let formula = |x: &[Tensor], z: Tensor| {
                let z = if has_bias { z.broadcast_add(&x[2])? } else { z };
                let y = apply(activation, z)?;
                if has_residual { y + &x[x.len() - 1] } else { Ok(y) }
            };
            // z is rounded before the epilogue.
            let tolerance = 2.0 * tolerance(dtype);
            let what = format!("epilogue {activation:?}, bias {has_bias}, residual {has_residual}");
            let op = |x: &[Tensor]| epilogue(x, &|epilogue| ours::linear_with(&x[0], &x[1], epilogue));
            check_with(&what, tolerance, dtype, &inputs, op, |x| formula(x, x[0].broadcast_matmul(&x[1].t()?)?));
            let op = |x: &[Tensor]| epilogue(x, &|epilogue| ours::matmul_with(&x[0], &x[1].t()?, epilogue));
            check_with(&what, tolerance, dtype, &inputs, op, |x| formula(x, x[0].broadcast_matmul(&x[1].t()?)?));
        }
    }
}

#[test]
fn activations() {
    for dtype in TYPES {
        for shape in [&[3, 5, 66][..], &[1, 2], &[4, 1000], &[2, 2, 3, 8]] {
            let x = random(shape, dtype, 1);
            let silu = |x: &Tensor| x / (x.neg()?.exp()? + 1.0)?;
            let half = shape.last().unwrap() / 2;
            let what = |op: &str| format!("{op} {shape:?}");
            check(&what("silu"), dtype, std::slice::from_ref(&x), |x| ours::silu(&x[0]), |x| silu(&x[0]));
            let wide = [(&x * 4.0).unwrap()];
            check(&what("gelu"), dtype, &wide, |x| ours::gelu(&x[0]), |x| gelu(&x[0]));
            check(&what("gelu_erf"), dtype, &wide, |x| ours::gelu_erf(&x[0]), |x| gelu_erf(&x[0]));
            let formula =
                |x: &[Tensor]| silu(&x[0].narrow(D::Minus1, 0, half)?)? * x[0].narrow(D::Minus1, half, half)?;
            check(&what("swiglu"), dtype, std::slice::from_ref(&x), |x| ours::swiglu(&x[0]), formula);
            let pair = [x.clone(), random(shape, dtype, 2)];
            let op = |x: &[Tensor]| ours::swiglu_pair(&x[0], &x[1]);
            check(&what("swiglu_pair"), dtype, &pair, op, |x| silu(&x[0])? * &x[1]);
            let op = |x: &[Tensor]| ours::swiglu_pair(&x[0], &x[0]);
            check(&what("swiglu_pair of one tensor"), dtype, std::slice::from_ref(&x), op, |x| silu(&x[0])? * &x[0]);
        }
    }
}

#[test]
fn softmax() {
    for dtype in TYPES {
        for shape in [&[4, 37][..], &[2, 3, 1025], &[3, 1], &[2, 20_000], &[7]] {
            let x = [(random(shape, dtype, 1) * 4.0).unwrap()];
            let formula = |x: &[Tensor]| candle_nn::ops::softmax(&x[0], D::Minus1);
            // The gradient of a row of one element is zero.
            if shape != [3, 1] {
                check(&format!("softmax {shape:?}"), dtype, &x, |x| ours::softmax(&x[0]), formula);
            }
        }
    }
    let one = Var::zeros((3, 1), DType::F32, &Device::Cpu).unwrap();
    let y = ours::softmax(&one).unwrap();
    assert_eq!(y.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [1.0; 3]);
    let gradient = gradients(&y).remove(&one).unwrap();
    assert_eq!(gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0; 3]);
}

#[test]
fn casts() {
    for (from, to) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32), (DType::F16, DType::F32)] {
        // Numbers that both dtypes represent exactly, and so are their gradients.
        let x = random(&[4, 2, 7], DType::BF16, 1).to_dtype(from).unwrap().to_dtype(DType::F64).unwrap();
        check("cast", from, &[x], |x| ours::cast(&x[0], to), |x| Ok(x[0].clone()));
    }
}

#[test]
fn rope_of_both_pairings() {
    const D: usize = 6;
    let cpu = &Device::Cpu;
    for dtype in TYPES {
        for (start, halves) in [(0, false), (5, false), (0, true), (5, true)] {
            let rope = Rope::new(D, 100.0, 16, cpu).unwrap();
            let rope = if halves { rope.with_halves() } else { rope };
            // candle_nn's forms that have gradients.
            let angles: Vec<f64> = (0..9 * D / 2)
                .map(|at| (start + at / (D / 2)) as f64 * 100f64.powf(-2.0 * (at % (D / 2)) as f64 / D as f64))
                .collect();
            let angles = Tensor::from_vec(angles, (9, D / 2), cpu).unwrap();
            let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
            let formula = |x: &[Tensor]| match halves {
                true => candle_nn::rotary_emb::rope_slow(&x[0], &cos, &sin),
                false => candle_nn::rotary_emb::rope_i_slow(&x[0], &cos, &sin),
            };
            let x = [random(&[2, 3, 9, D], dtype, 1)];
            let what = format!("rope from {start}, halves {halves}");
            check(&what, dtype, &x, |x| ours::rope(&x[0], &rope, start), formula);
            let by_token = |x: &[Tensor]| rope.apply(&x[0].transpose(1, 2)?, start)?.transpose(1, 2);
            check(&format!("{what} by token"), dtype, &x, by_token, formula);
        }
    }
    // Strides of a dimension of one token say nothing.
    let rope = Rope::new(D, 100.0, 16, cpu).unwrap();
    let x = random(&[2, 3, 2, D], DType::F32, 1).to_dtype(DType::F32).unwrap();
    let (all, last) = (ours::rope(&x, &rope, 4).unwrap(), x.narrow(2, 1, 1).unwrap().force_contiguous().unwrap());
    let [all, last] = [all.narrow(2, 1, 1).unwrap(), ours::rope(&last, &rope, 5).unwrap()]
        .map(|y| y.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    assert_eq!(all, last);
    let scaled = Rope::from_frequencies(&[0.5], 4, cpu).unwrap();
    let x = Tensor::new(&[[[[1_f32, 0.0], [1.0, 0.0]]]], cpu).unwrap();
    let y = ours::rope(&x, &scaled, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let expected = [0.5_f32.cos(), 0.5_f32.sin(), 1_f32.cos(), 1_f32.sin()];
    assert!(y.iter().zip(expected).all(|(y, e)| (y - e).abs() < 1e-6), "{y:?}");
}

#[test]
fn embedding() {
    for dtype in TYPES {
        let ids = Tensor::new(&[[3_u32, 0, 3], [9, 1, 3]], &Device::Cpu).unwrap();
        for ids in [ids.clone(), ids.t().unwrap()] {
            let [a, b] = <[usize; 2]>::try_from(ids.dims()).unwrap();
            let op = |x: &[Tensor]| ours::embedding(&ids, &x[0], x[0].dtype());
            let formula = |x: &[Tensor]| x[0].index_select(&ids.flatten_all()?, 0)?.reshape((a, b, 6));
            check("embedding", dtype, &[random(&[10, 6], dtype, 1)], op, formula);
        }
    }
}

/// The modules compute what those of candle-nn do, with the same variables.
#[test]
fn modules_match_candle_nn() {
    let cpu = &Device::Cpu;
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, cpu);
    let x = Var::from_tensor(&random(&[2, 5, 12], DType::F32, 1).to_dtype(DType::F32).unwrap()).unwrap();
    let theirs = candle_nn::linear(12, 7, vb.pp("linear")).unwrap();
    let found = ours::nn::linear(12, 7, vb.pp("linear")).unwrap();
    compare("linear", &variables, &x, &found.forward(&x).unwrap(), &theirs.forward(&x).unwrap());
    let theirs = candle_nn::rms_norm(12, 1e-6, vb.pp("rms")).unwrap();
    let found = ours::nn::rms_norm(12, 1e-6, vb.pp("rms")).unwrap();
    compare("rms_norm", &variables, &x, &found.forward(&x).unwrap(), &theirs.forward_diff(&x).unwrap());
    // candle's LayerNorm has a gradient only for inputs that are not contiguous.
    let theirs = candle_nn::layer_norm(12, 1e-6, vb.pp("layer")).unwrap();
    let found = ours::nn::layer_norm(12, 1e-6, vb.pp("layer")).unwrap();
    let strided = x.transpose(0, 1).unwrap();
    compare("layer_norm", &variables, &x, &found.forward(&strided).unwrap(), &theirs.forward(&strided).unwrap());
    let ids = Tensor::new(&[[1_u32, 4], [4, 0]], cpu).unwrap();
    let theirs = candle_nn::embedding(6, 5, vb.pp("embedding")).unwrap();
    let found = ours::nn::embedding(6, 5, vb.pp("embedding")).unwrap();
    compare("embedding", &variables, &x, &found.forward(&ids).unwrap(), &theirs.forward(&ids).unwrap());
}

/// Compares results and the gradients of all variables, in f32.
fn compare(what: &str, variables: &VarMap, x: &Var, found: &Tensor, expected: &Tensor) {
    assert_close(what, found, expected, 2e-6);
    let (found, expected) = (gradients(found), gradients(expected));
    for var in variables.all_vars().iter().chain([x]) {
        match (found.get(var), expected.get(var)) {
            (None, None) => {}
            (Some(found), Some(expected)) => assert_close(&format!("{what}, a gradient"), found, expected, 5e-6),
            (found, expected) => panic!("{what}: {} and {}", found.is_some(), expected.is_some()),
        }
    }
}

/// A model that is not trained, and what runs inside `no_grad`, records nothing.
#[test]
fn recorded_only_if_needed() {
    let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    let w = Var::ones((4, 4), DType::F32, &Device::Cpu).unwrap();
    assert!(ours::linear(&x, &w).unwrap().track_op());
    assert!(!ours::linear(&x, &w.as_detached_tensor()).unwrap().track_op());
    assert!(!ours::no_grad(|| ours::linear(&x, &w).unwrap()).track_op());
    assert!(!ours::no_grad(|| ours::silu(&w).unwrap()).track_op());
}
