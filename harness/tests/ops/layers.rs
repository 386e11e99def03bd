//! Tests of norms, linear layers, embeddings, elementwise ops, rope and losses.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use tilewright_harness::ops::{self, Rope};
use tilewright_harness::params::no_grad;

use crate::check::{TYPES, Weights, assert_close, check, random, tolerance};

fn rms_formula(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + 1e-5)?.sqrt()?)?.broadcast_mul(w)
}

#[test]
fn rms_norm() {
    for (shape, dtype) in TYPES.iter().flat_map(|t| [([6, 40].as_slice(), *t), ([2, 3, 257].as_slice(), *t)]) {
        let d = *shape.last().unwrap();
        check(
            &format!("rms_norm {shape:?} {dtype:?}"),
            dtype,
            &[random(shape, dtype, 1)],
            &[&[d]],
            |x, w| ops::rms_norm(&x[0], &w.get("w0")?, 1e-5),
            |x, w| rms_formula(&x[0], &w[0]),
        );
    }
}

#[test]
fn layer_norm() {
    for (shape, dtype) in TYPES.iter().flat_map(|t| [([6, 40].as_slice(), *t), ([2, 3, 130].as_slice(), *t)]) {
        let d = *shape.last().unwrap();
        check(
            &format!("layer_norm {shape:?} {dtype:?}"),
            dtype,
            &[random(shape, dtype, 1)],
            &[&[d], &[d]],
            |x, w| ops::layer_norm(&x[0], &w.get("w0")?, &w.get("w1")?, 1e-5),
            |x, w| {
                let centered = x[0].broadcast_sub(&x[0].mean_keepdim(D::Minus1)?)?;
                rms_formula(&centered, &w[0])?.broadcast_add(&w[1])
            },
        );
    }
}

#[test]
fn linear() {
    for dtype in TYPES {
        for (x, n) in [(&[5, 24][..], 33), (&[2, 7, 16][..], 8), (&[70, 130][..], 65)] {
            let k = *x.last().unwrap();
            check(
                &format!("linear {x:?} -> {n} {dtype:?}"),
                dtype,
                &[random(x, dtype, 1)],
                &[&[n, k]],
                |x, w| ops::linear(&x[0], &w.get("w0")?),
                |x, w| x[0].broadcast_matmul(&w[0].t()?),
            );
        }
    }
}

/// The weight of a layer gets a gradient even if the input of the layer has none, as in the first layer of a model.
#[test]
fn weights_of_the_first_layer_get_their_gradient() {
    let weights = Weights::new(&[&[3, 4]], DType::F32);
    let x = random(&[5, 4], DType::F32, 3);
    let y = ops::linear(&x.to_dtype(DType::F32).unwrap(), &weights.params.get("w0").unwrap()).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    let expected = x.sum_keepdim(0).unwrap().broadcast_as((3, 4)).unwrap();
    assert_close("gradient", &weights.params.get("w0").unwrap().grad().unwrap(), &expected, 1e-5);
}

#[test]
fn no_grad_records_nothing() {
    let weights = Weights::new(&[&[4, 4]], DType::F32);
    let w = weights.params.get("w0").unwrap();
    let x = Var::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    assert!(ops::linear(&x, &w).unwrap().track_op());
    assert!(!no_grad(|| ops::linear(&x, &w).unwrap()).track_op());
    assert!(!no_grad(|| ops::silu(&x).unwrap()).track_op());
}

#[test]
fn embedding() {
    for dtype in TYPES {
        let ids = Tensor::new(&[[3_u32, 0, 3], [9, 1, 3]], &Device::Cpu).unwrap();
        check(
            &format!("embedding {dtype:?}"),
            dtype,
            &[],
            &[&[10, 6]],
            |_, w| ops::embedding(&ids, &w.get("w0")?, dtype),
            |_, w| w[0].index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 6)),
        );
    }
}

#[test]
fn silu_and_swiglu() {
    for dtype in TYPES {
        let x = random(&[3, 5, 66], dtype, 1);
        let silu = |x: &Tensor| x / (x.neg()?.exp()? + 1.0)?;
        check("silu", dtype, std::slice::from_ref(&x), &[], |x, _| ops::silu(&x[0]), |x, _| silu(&x[0]));
        let formula = |x: &[Tensor]| silu(&x[0].narrow(D::Minus1, 0, 33)?)? * x[0].narrow(D::Minus1, 33, 33)?;
        check("swiglu", dtype, std::slice::from_ref(&x), &[], |x, _| ops::swiglu(&x[0]), |x, _| formula(x));
        let unfused = |x: &[Tensor]| ops::swiglu_unfused(&x[0]);
        check("swiglu_unfused", dtype, std::slice::from_ref(&x), &[], |x, _| unfused(x), |x, _| formula(x));
        let both = [x.clone(), random(&[3, 5, 66], dtype, 2)];
        let of = |x: &[Tensor]| ops::swiglu_pair(&x[0], &x[1]);
        check("swiglu_pair", dtype, &both, &[], |x, _| of(x), |x, _| silu(&x[0])? * &x[1]);
    }
    let odd = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    assert!(ops::swiglu(&odd).unwrap_err().to_string().contains("[2, 3]"));
}

#[test]
fn casts() {
    for (from, to) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32), (DType::F16, DType::F32)] {
        // Numbers that both dtypes represent exactly, and so are their gradients.
        let x = random(&[4, 7], DType::BF16, 1).to_dtype(from).unwrap().to_dtype(DType::F64).unwrap();
        check("cast", from, &[x], &[], |x, _| ops::cast(&x[0], to), |x, _| Ok(x[0].clone()));
    }
}

#[test]
fn rope() {
    const D: usize = 6;
    for (dtype, start) in TYPES.iter().flat_map(|t| [(*t, 0), (*t, 5)]) {
        let rope = Rope::new(D, 100.0, 16, &Device::Cpu).unwrap().with_tables().unwrap();
        // As products of complex numbers.
        let formula = |x: &Tensor| {
            let (_, length, _, _) = x.dims4()?;
            let angles: Vec<f64> = (0..length * D / 2)
                .map(|at| (start + at / (D / 2)) as f64 * 100f64.powf(-2.0 * (at % (D / 2)) as f64 / D as f64))
                .collect();
            let angles = Tensor::from_vec(angles, (1, length, 1, D / 2, 1), &Device::Cpu)?;
            let pairs = x.reshape((2, length, 3, D / 2, 2))?;
            let (re, im) = (pairs.narrow(4, 0, 1)?, pairs.narrow(4, 1, 1)?);
            let rotated_re = (re.broadcast_mul(&angles.cos()?)? - im.broadcast_mul(&angles.sin()?)?)?;
            let rotated_im = (re.broadcast_mul(&angles.sin()?)? + im.broadcast_mul(&angles.cos()?)?)?;
            Tensor::cat(&[rotated_re, rotated_im], 4)?.reshape((2, length, 3, D))
        };
        let x = random(&[2, 9, 3, D], dtype, 1);
        check("rope", dtype, std::slice::from_ref(&x), &[], |x, _| rope.apply(&x[0], start), |x, _| formula(&x[0]));
        let unfused = |x: &[Tensor]| rope.apply_unfused(&x[0], start);
        check("unfused rope", dtype, &[x], &[], |x, _| unfused(x), |x, _| formula(&x[0]));
    }
    let rope = Rope::new(D, 100.0, 16, &Device::Cpu).unwrap();
    let x = Tensor::zeros((1, 17, 1, D), DType::F32, &Device::Cpu).unwrap();
    let message = rope.apply(&x, 0).unwrap_err().to_string();
    assert!(message.contains("0..17") && message.contains("16"), "{message}");
    assert!(Rope::new(5, 100.0, 16, &Device::Cpu).is_err());
}

#[test]
fn cross_entropy() {
    for dtype in TYPES {
        let logits = (random(&[5, 37], dtype, 1) * 8.0).unwrap();
        let targets = Tensor::new(&[0_u32, 36, 17, 17, 3], &Device::Cpu).unwrap();
        let rows = |x: &Tensor| {
            let log_sum = x.exp()?.sum_keepdim(1)?.log()?;
            log_sum.broadcast_sub(x)?.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)
        };
        let logits = [logits];
        let (mean, each) = (
            |x: &[Tensor]| ops::cross_entropy(&x[0], &targets),
            |x: &[Tensor]| ops::cross_entropy_rows(&x[0], &targets),
        );
        let unfused = |x: &[Tensor]| ops::cross_entropy_unfused(&x[0], &targets);
        check("cross_entropy", dtype, &logits, &[], |x, _| mean(x), |x, _| rows(&x[0])?.mean_all());
        check("cross_entropy_rows", dtype, &logits, &[], |x, _| each(x), |x, _| rows(&x[0]));
        check("unfused", dtype, &logits, &[], |x, _| unfused(x), |x, _| rows(&x[0])?.mean_all());
    }
}

#[test]
fn matmuls_accumulate() {
    for dtype in TYPES {
        let (a, b) = (random(&[40, 30], dtype, 1), random(&[20, 30], dtype, 2));
        let start = random(&[40, 20], DType::F32, 3);
        let c = start.to_dtype(DType::F32).unwrap();
        let short = |x: &Tensor| x.to_dtype(dtype).unwrap();
        ops::matmul_accumulate(&c, &short(&a), &short(&b).t().unwrap()).unwrap();
        let product = a.matmul(&b.t().unwrap()).unwrap();
        assert_close("sum", &c, &(start + &product).unwrap(), 1e-5);
        let found = ops::matmul(&short(&a), &short(&b).t().unwrap()).unwrap();
        assert_close("product", &found, &product, tolerance(dtype));
    }
    let (a, b) = (random(&[2, 3], DType::F32, 1), random(&[2, 3], DType::F32, 1));
    let message = ops::matmul(&a, &b).unwrap_err().to_string();
    assert!(message.contains("[2, 3]"), "{message}");
}
