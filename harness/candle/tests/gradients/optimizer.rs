use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Init, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use tilewright_candle::FusedAdamW;

use crate::check::{assert_close, random};

fn options() -> ParamsAdamW {
    ParamsAdamW { lr: 0.05, weight_decay: 0.1, ..ParamsAdamW::default() }
}

/// ½ Σ (x − target)², summed over the variables.
fn loss(vars: &[Var]) -> Tensor {
    let parts = vars.iter().enumerate().map(|(i, var)| {
        let target = random(var.dims(), DType::BF16, i as u64 + 50).to_dtype(var.dtype()).unwrap();
        (var.as_tensor() - target).unwrap().sqr().unwrap().sum_all().unwrap().to_dtype(DType::F32).unwrap()
    });
    parts.reduce(|a, b| (a + b).unwrap()).unwrap()
}

#[test]
fn steps_match_those_of_candle() {
    let make = || -> Vec<Var> {
        let shapes = [&[5, 7][..], &[1], &[3, 2, 2], &[1025]];
        let tensors = shapes.iter().enumerate().map(|(i, shape)| random(shape, DType::F32, i as u64 + 1));
        tensors.map(|x| Var::from_tensor(&x.to_dtype(DType::F32).unwrap()).unwrap()).collect()
    };
    let (ours, theirs) = (make(), make());
    let mut fused = FusedAdamW::new(ours.clone(), options()).unwrap();
    let mut reference = AdamW::new(theirs.clone(), options()).unwrap();
    for step in 0..20 {
        fused.backward_step(&loss(&ours)).unwrap();
        reference.backward_step(&loss(&theirs)).unwrap();
        if step == 10 {
            fused.set_learning_rate(0.01);
            reference.set_learning_rate(0.01);
        }
        for (found, expected) in ours.iter().zip(&theirs) {
            assert_close(&format!("step {step}"), found, expected, 1e-5);
        }
    }
    assert_eq!(fused.learning_rate(), 0.01);
}

/// Variables in bf16 follow the f32 update although single steps round to nothing.
#[test]
fn short_types_have_master_weights() {
    for dtype in [DType::BF16, DType::F16] {
        let start = Tensor::ones(64, dtype, &Device::Cpu).unwrap();
        let (short, exact) =
            (Var::from_tensor(&start).unwrap(), Var::from_tensor(&start.to_dtype(DType::F32).unwrap()).unwrap());
        let options = ParamsAdamW { lr: 1e-5, weight_decay: 0.0, ..ParamsAdamW::default() };
        let mut optimizer = FusedAdamW::new(vec![short.clone(), exact.clone()], options).unwrap();
        for _ in 0..1000 {
            let sum = |var: &Var| var.to_dtype(DType::F32).unwrap().sum_all().unwrap();
            optimizer.backward_step(&(sum(&short) + sum(&exact)).unwrap()).unwrap();
        }
        let moved = 1.0 - exact.to_vec1::<f32>().unwrap()[0];
        assert!((moved - 0.01).abs() < 1e-4, "{moved}");
        assert_close(&format!("{dtype:?}"), &short, &exact, 4e-3);
        assert!(short.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()[0] < 0.995);
    }
}

/// Values that are set before the first step count, as those that `DistributedDataParallel` takes from rank 0; later ones
/// do after a reload.
#[test]
fn variables_that_were_set_are_reloaded() {
    let var = Var::ones(4, DType::BF16, &Device::Cpu).unwrap();
    let mut optimizer = FusedAdamW::new(vec![var.clone()], options()).unwrap();
    for start in [3.0, 7.0] {
        var.set(&Tensor::full(start, 4, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()).unwrap();
        if start == 7.0 {
            optimizer.reload();
        }
        optimizer.backward_step(&var.sum_all().unwrap()).unwrap();
        let value = var.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()[0];
        let options = options();
        let expected = start - options.lr as f32 * (1.0 + options.weight_decay as f32 * start);
        assert!((value - expected).abs() < 0.004 * start, "{value} instead of {expected}");
    }
}

/// Tied weights have two names and one variable: one update per step. A gradient in the variable's own memory is read
/// before it is overwritten.
#[test]
fn one_variable_under_two_names() {
    let var = Var::from_tensor(&Tensor::new(&[1.0_f32, -2.0], &Device::Cpu).unwrap()).unwrap();
    let other = Var::from_tensor(&var.as_tensor().copy().unwrap()).unwrap();
    let mut ours = FusedAdamW::new(vec![var.clone(), var.clone()], options()).unwrap();
    let mut theirs = candle_nn::AdamW::new(vec![other.clone()], options()).unwrap();
    let step = |var: &Var| {
        let mut gradients = var.sum_all().unwrap().backward().unwrap();
        gradients.insert(var, var.as_tensor().clone());
        gradients
    };
    for _ in 0..3 {
        ours.step(&step(&var)).unwrap();
        theirs.step(&step(&other)).unwrap();
        assert_close("tied", &var, &other, 1e-6);
    }
    ours.set_learning_rate(f64::NAN);
    ours.step(&step(&var)).unwrap_err();
    ours.set_learning_rate(options().lr);
    ours.step(&step(&var)).unwrap();
    theirs.step(&step(&other)).unwrap();
    assert_close("after a refused step", &var, &other, 1e-6);
}

#[test]
fn a_refused_step_changes_nothing() {
    let [a, b] = [2.0_f32, 3.0].map(|x| Var::from_tensor(&Tensor::full(x, 4, &Device::Cpu).unwrap()).unwrap());
    let mut optimizer = FusedAdamW::new(vec![a.clone(), b.clone()], options()).unwrap();
    let loss = (a.sum_all().unwrap() + b.sum_all().unwrap()).unwrap();
    let mut gradients = loss.backward().unwrap();
    gradients.insert(b.as_tensor(), Tensor::ones(3, DType::F32, &Device::Cpu).unwrap());
    let error = optimizer.step(&gradients).unwrap_err().to_string();
    assert!(error.contains("gradient of `1`"), "{error}");
    assert_eq!(a.to_vec1::<f32>().unwrap(), [2.0; 4]);
}

#[test]
fn variables_of_a_map_are_sorted_by_name() {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    for name in ["c", "a.weight", "b", "a.bias"] {
        vb.get_with_hints((2, 2), name, Init::Const(1.0)).unwrap();
    }
    let optimizer = FusedAdamW::from_var_map(&variables, options()).unwrap();
    assert_eq!(optimizer.names().collect::<Vec<_>>(), ["a.bias", "a.weight", "b", "c"]);
}

/// A variable that the loss does not depend on stays as it is.
#[test]
fn variables_without_gradients() {
    let [used, unused] = [1.0_f32, 2.0].map(|x| Var::new(x, &Device::Cpu).unwrap());
    let mut optimizer = FusedAdamW::new(vec![used.clone(), unused.clone()], options()).unwrap();
    optimizer.backward_step(&used.sqr().unwrap()).unwrap();
    assert!(used.to_scalar::<f32>().unwrap() < 1.0);
    assert_eq!(unused.to_scalar::<f32>().unwrap(), 2.0);
}

#[test]
fn mistakes() {
    let var = |dtype| Var::zeros((2, 3), dtype, &Device::Cpu).unwrap();
    let message = FusedAdamW::new(vec![var(DType::F64)], options()).unwrap_err().to_string();
    assert!(message.contains("f64") && message.contains("`0`"), "{message}");
    let wrong = ParamsAdamW { beta1: 1.0, ..options() };
    let message = FusedAdamW::new(vec![var(DType::F32)], wrong).unwrap_err().to_string();
    assert!(message.contains("beta1"), "{message}");
    for wrong in [
        ParamsAdamW { lr: f64::NAN, ..options() },
        ParamsAdamW { weight_decay: f64::INFINITY, ..options() },
        ParamsAdamW { eps: -1.0, ..options() },
    ] {
        let message = FusedAdamW::new(vec![], wrong).unwrap_err().to_string();
        assert!(["lr", "weight_decay", "eps"].iter().any(|name| message.contains(name)), "{message}");
    }
    // Integers are not trained.
    assert_eq!(FusedAdamW::new(vec![var(DType::U32)], options()).unwrap().names().count(), 0);
}
