use candle_core::{D, DType, Device, Result, Tensor, Var};
use tilewright_candle as ours;

use crate::check::{TYPES, assert_close, check, random};

/// −log softmax(logits)[target] per row.
fn rows(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let lse = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
    lse.broadcast_sub(logits)?.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)
}

#[test]
fn cross_entropy() {
    for dtype in TYPES {
        let targets = Tensor::new(&[0_u32, 36, 17, 17, 3], &Device::Cpu).unwrap();
        let logits = [(random(&[5, 37], dtype, 1) * 4.0).unwrap()];
        let mean = |x: &[Tensor]| ours::cross_entropy(&x[0], &targets);
        check("cross_entropy", dtype, &logits, mean, |x| rows(&x[0], &targets)?.mean_all());
        let each = |x: &[Tensor]| ours::cross_entropy_rows(&x[0], &targets);
        check("cross_entropy_rows", dtype, &logits, each, |x| rows(&x[0], &targets));
    }
    // Against candle's own, in f32.
    let logits = Var::from_tensor(&random(&[6, 50], DType::F32, 2).to_dtype(DType::F32).unwrap()).unwrap();
    let targets = Tensor::new(&[49_u32, 0, 7, 7, 8, 1], &Device::Cpu).unwrap();
    let (found, expected) =
        (ours::cross_entropy(&logits, &targets).unwrap(), candle_nn::loss::cross_entropy(&logits, &targets).unwrap());
    assert_close("candle's loss", &found, &expected, 1e-6);
    let [found, expected] = [found, expected].map(|loss| loss.backward().unwrap().remove(&logits).unwrap());
    assert_close("candle's gradient", &found, &expected, 1e-5);
}

/// Vocabularies whose rows of logits are padded, and others. (Several chunks: the test in `linear_cross_entropy.rs`.)
#[test]
fn linear_cross_entropy() {
    for dtype in TYPES {
        for (shape, vocabulary) in [(&[5, 8][..], 37), (&[2, 150, 8], 40)] {
            let outer = &shape[..shape.len() - 1];
            let count: usize = outer.iter().product();
            let targets: Vec<u32> = (0..count).map(|i| (i * 7919 % vocabulary) as u32).collect();
            let targets = Tensor::from_vec(targets, outer, &Device::Cpu).unwrap();
            let inputs = [random(shape, dtype, 1), random(&[vocabulary, 8], dtype, 2)];
            let op = |x: &[Tensor]| ours::linear_cross_entropy(&x[0], &x[1], &targets);
            let formula = |x: &[Tensor]| {
                let logits = x[0].reshape((count, 8))?.matmul(&x[1].t()?)?;
                rows(&logits, &targets.flatten_all()?)?.mean_all()
            };
            check(&format!("linear_cross_entropy {shape:?}"), dtype, &inputs, op, formula);
        }
    }
}

/// The gradient of one input is that of both, where only one is tracked.
#[test]
fn linear_cross_entropy_of_one_variable() {
    let [x, w] = [random(&[150, 8], DType::F32, 1), random(&[40, 8], DType::F32, 2)]
        .map(|x| Var::from_tensor(&x.to_dtype(DType::F32).unwrap()).unwrap());
    let (x_fixed, w_fixed) = (x.as_detached_tensor(), w.as_detached_tensor());
    let targets = Tensor::from_iter((0..150).map(|i| i * 7 % 40), &Device::Cpu).unwrap().to_dtype(DType::U32).unwrap();
    let gradients = |x: &Tensor, w: &Tensor| ours::linear_cross_entropy(x, w, &targets).unwrap().backward().unwrap();
    let both = gradients(&x, &w);
    let (of_x, of_w) = (gradients(&x, &w_fixed), gradients(&x_fixed, &w));
    assert_close("x", of_x.get(&x).unwrap(), both.get(&x).unwrap(), 1e-7);
    assert_close("w", of_w.get(&w).unwrap(), both.get(&w).unwrap(), 1e-7);
    assert!(of_x.get(&w_fixed).is_none() && of_w.get(&x_fixed).is_none());
}

/// A loss that is scaled by 2¹⁶, as loss scaling does, keeps gradients of f16 that would round to zero.
#[test]
fn gradients_of_scaled_losses() {
    let x = Var::from_tensor(&random(&[400, 8], DType::F16, 1).to_dtype(DType::F16).unwrap()).unwrap();
    let w = random(&[1000, 8], DType::F16, 2).to_dtype(DType::F16).unwrap();
    let targets = Tensor::zeros(400, DType::U32, &Device::Cpu).unwrap();
    let loss = (ours::linear_cross_entropy(&x, &w, &targets).unwrap() * 65536.0).unwrap();
    let found = loss.backward().unwrap().remove(&x).unwrap();
    let exact = Var::from_tensor(&x.to_dtype(DType::F64).unwrap()).unwrap();
    let logits = exact.matmul(&w.to_dtype(DType::F64).unwrap().t().unwrap()).unwrap();
    let loss = (rows(&logits, &targets).unwrap().mean_all().unwrap() * 65536.0).unwrap();
    assert_close("scaled", &found, &loss.backward().unwrap().remove(&exact).unwrap(), 2e-3);
}
