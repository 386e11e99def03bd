use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Tensor, Var};
use tilewright_candle::custom::{Output, custom_op};
use tilewright_candle::graph::record1;
use tilewright_candle::memory::OutputAlloc;

use crate::check::{assert_close, random};

fn vars(count: usize) -> Vec<Var> {
    let var = |i| Var::from_tensor(&random(&[3, 4], DType::F32, i as u64 + 1).to_dtype(DType::F32).unwrap()).unwrap();
    (0..count).map(var).collect()
}

fn output(x: &Tensor) -> Result<Output> {
    Output::new(OutputAlloc::<f32>::copy_of(&x.contiguous()?)?, x.shape())
}

/// Outputs yₖ = (k + 1) · Σᵢ xᵢ², for any number of inputs and outputs.
fn squares(inputs: &[&Tensor], outputs: usize, runs: &Arc<AtomicUsize>) -> Result<Vec<Tensor>> {
    let runs = runs.clone();
    custom_op(
        "squares",
        inputs,
        |inputs| {
            let mut sum = inputs[0].detach().sqr()?;
            for x in &inputs[1..] {
                sum = (sum + x.detach().sqr()?)?;
            }
            let scaled = (0..outputs).map(|k| output(&(&sum * (k + 1) as f64)?)).collect::<Result<_>>()?;
            Ok((scaled, outputs))
        },
        move |pass| {
            runs.fetch_add(1, Ordering::Relaxed);
            assert_eq!((pass.outputs.len(), *pass.saved), (pass.grads.len(), pass.grads.len()));
            let mut grad = pass.grads[0].clone();
            for (k, other) in pass.grads.iter().enumerate().skip(1) {
                grad = (grad + (other * (k + 1) as f64)?)?;
            }
            pass.inputs.iter().map(|x| Ok(Some((x * 2.0)?.mul(&grad)?))).collect()
        },
    )
}

#[test]
fn any_number_of_inputs_and_outputs() {
    for inputs in 1..=11 {
        for outputs in 1..=4 {
            let (vars, runs) = (vars(inputs), Arc::new(AtomicUsize::new(0)));
            let tensors: Vec<&Tensor> = vars.iter().map(|v| v.as_tensor()).collect();
            let found = squares(&tensors, outputs, &runs).unwrap();
            assert_eq!(found.len(), outputs);
            let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
            let mut factor = 0.0;
            for (k, y) in found.iter().enumerate() {
                // One output is not used.
                if k != 1 {
                    loss = (loss + (y.sum_all().unwrap() * (k + 3) as f64).unwrap()).unwrap();
                    factor += ((k + 3) * (k + 1)) as f64;
                }
            }
            // A second backward pass over the same graph gives the same.
            for pass in 1..=2 {
                let grads = loss.backward().unwrap();
                assert_eq!(runs.load(Ordering::Relaxed), pass, "{inputs} inputs, {outputs} outputs");
                for (i, var) in vars.iter().enumerate() {
                    let expected = (var.as_tensor() * (2.0 * factor)).unwrap();
                    let found = grads.get(var).unwrap_or_else(|| panic!("{inputs}, {outputs}: no gradient of {i}"));
                    assert_close(&format!("{inputs} inputs, {outputs} outputs: {i}"), found, &expected, 1e-6);
                }
            }
        }
    }
}

#[test]
fn shared_and_untracked_inputs() {
    let (vars, runs) = (vars(2), Arc::new(AtomicUsize::new(0)));
    let fixed = vars[1].as_detached_tensor();
    for count in [3, 6] {
        let mut inputs: Vec<&Tensor> = vec![vars[0].as_tensor(), &fixed, vars[0].as_tensor()];
        inputs.extend([&fixed, &fixed, &fixed].into_iter().take(count - 3));
        let y = squares(&inputs, 1, &runs).unwrap().remove(0);
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_close("a shared input", grads.get(&vars[0]).unwrap(), &(vars[0].as_tensor() * 4.0).unwrap(), 1e-6);
        assert!(grads.get(&fixed).is_none());
    }
    // Without a tracked input nothing is recorded.
    assert!(!squares(&[&fixed], 2, &runs).unwrap()[0].track_op());
    assert!(!tilewright_candle::no_grad(|| squares(&[vars[0].as_tensor()], 1, &runs)).unwrap()[0].track_op());
}

/// Backward passes of two threads over one graph do not mix their gradients.
#[test]
fn backward_on_many_threads() {
    let (vars, runs) = (vars(5), Arc::new(AtomicUsize::new(0)));
    let tensors: Vec<&Tensor> = vars.iter().map(|v| v.as_tensor()).collect();
    let found = squares(&tensors, 2, &runs).unwrap();
    let wrong = Mutex::new(0);
    std::thread::scope(|scope| {
        for factor in 1..=4 {
            let (found, vars, wrong) = (&found, &vars, &wrong);
            scope.spawn(move || {
                for _ in 0..50 {
                    let loss = (found[0].sum_all().unwrap() * factor as f64).unwrap();
                    let grads = loss.backward().unwrap();
                    let expected = (vars[4].as_tensor() * (2 * factor) as f64).unwrap();
                    let difference = (grads.get(&vars[4]).unwrap() - expected).unwrap().abs().unwrap();
                    if difference.max_all().unwrap().to_scalar::<f32>().unwrap() > 1e-5 {
                        *wrong.lock().unwrap() += 1;
                    }
                }
            });
        }
    });
    assert_eq!(*wrong.lock().unwrap(), 0);
}

/// x·1, whose backward fails while `failing` is set.
fn fallible(x: &Tensor, failing: &Arc<AtomicBool>) -> Tensor {
    let failing = failing.clone();
    let backward = move |[_]: [&Tensor; 1], _: &Tensor, grad: &Tensor| match failing.load(Ordering::Relaxed) {
        true => candle_core::bail!("this pass fails"),
        false => Ok([Some(grad.clone())]),
    };
    record1("fallible", x, OutputAlloc::<f32>::copy_of(x).unwrap(), x.shape(), backward).unwrap()
}

/// A backward pass that fails after a part of a chain ran leaves nothing to the next one.
#[test]
fn passes_after_one_that_failed() {
    let failing = Arc::new(AtomicBool::new(false));
    // Between the outputs and the op: one of the orders visits output 1 before the failure.
    for order in [[0, 1], [1, 0]] {
        let (vars, runs) = (vars(4), Arc::new(AtomicUsize::new(0)));
        let found = squares(&vars.iter().map(|v| v.as_tensor()).collect::<Vec<_>>(), 2, &runs).unwrap();
        let summands = [fallible(&found[0], &failing), found[1].clone()];
        let both = (&summands[order[0]] + &summands[order[1]]).unwrap().sum_all().unwrap();
        failing.store(true, Ordering::Relaxed);
        assert!(both.backward().unwrap_err().to_string().contains("this pass fails"));
        assert_eq!(runs.load(Ordering::Relaxed), 0);
        failing.store(false, Ordering::Relaxed);
        for (loss, factor) in [(found[0].sum_all().unwrap(), 2.0), (both, 6.0)] {
            let grads = loss.backward().unwrap();
            for var in &vars {
                let expected = (var.as_tensor() * factor).unwrap();
                assert_close("after a failure", grads.get(var).unwrap(), &expected, 1e-6);
            }
        }
    }
    // Between the op and its inputs, of which the second pass needs fewer gradients.
    let vars = vars(5);
    let first = fallible(&vars[0], &failing);
    let inputs: Vec<&Tensor> = std::iter::once(&first).chain(vars[1..].iter().map(|v| v.as_tensor())).collect();
    let passes = AtomicUsize::new(0);
    let y = custom_op(
        "fewer",
        &inputs,
        |x| Ok((vec![output(x[0])?], ())),
        move |pass| {
            let needed = if passes.fetch_add(1, Ordering::Relaxed) == 0 { 5 } else { 1 };
            Ok((0..5).map(|i| (i < needed).then(|| pass.grads[0].clone())).collect())
        },
    )
    .unwrap();
    let loss = y[0].sum_all().unwrap();
    failing.store(true, Ordering::Relaxed);
    loss.backward().unwrap_err();
    failing.store(false, Ordering::Relaxed);
    let grads = loss.backward().unwrap();
    assert_close("fewer", grads.get(&vars[0]).unwrap(), &vars[0].ones_like().unwrap(), 1e-6);
    assert!(vars[1..].iter().all(|var| grads.get(var).is_none()));
}

#[test]
fn closures_know_which_gradients_are_needed() {
    let vars = vars(2);
    let fixed = vars[1].as_detached_tensor();
    for count in [2, 7] {
        let inputs: Vec<&Tensor> = (0..count).map(|i| if i == 0 { vars[0].as_tensor() } else { &fixed }).collect();
        let forward = |x: &[&Tensor]| Ok((vec![output(x[0])?], ()));
        let y = custom_op("first", &inputs, forward, |pass| {
            Ok(pass.needs_grad.iter().map(|needed| needed.then(|| pass.grads[0].clone())).collect())
        });
        let grads = y.unwrap()[0].sum_all().unwrap().backward().unwrap();
        assert_close("first", grads.get(&vars[0]).unwrap(), &fixed.ones_like().unwrap(), 1e-6);
    }
}

#[test]
fn mistakes_in_custom_ops() {
    let vars = vars(2);
    let one = |x: &[&Tensor]| Ok((vec![output(x[0])?], ()));
    let message = |y: Result<Vec<Tensor>>| y.unwrap()[0].sum_all().unwrap().backward().unwrap_err().to_string();
    let inputs = [vars[0].as_tensor(), vars[1].as_tensor()];
    let found = message(custom_op("mine", &inputs, one, |_| Ok(vec![None])));
    assert!(found.contains("mine") && found.contains("2 gradients") && found.contains("found 1"), "{found}");
    let found = message(custom_op("mine", &inputs, one, |pass| Ok(vec![Some(pass.grads[0].t()?), None])));
    assert!(found.contains("gradient of input 0") && found.contains("[3, 4]") && found.contains("[4, 3]"), "{found}");
    let half =
        |pass: tilewright_candle::custom::Backward<'_, ()>| Ok(vec![None, Some(pass.grads[0].to_dtype(DType::BF16)?)]);
    let found = message(custom_op("mine", &inputs, one, half));
    assert!(found.contains("gradient of input 1") && found.contains("bf16"), "{found}");
    let found = message(custom_op("mine", &inputs, one, |_| candle_core::bail!("mine has no gradient")));
    assert!(found.contains("mine has no gradient"), "{found}");
    let found = custom_op("mine", &[], one, |_| Ok(vec![])).err().unwrap().to_string();
    assert!(found.contains("at least one tensor"), "{found}");
    let nothing = |_: &[&Tensor]| Ok((vec![], ()));
    let found = custom_op("mine", &inputs, nothing, |_| Ok(vec![])).err().unwrap().to_string();
    assert!(found.contains("outputs"), "{found}");
    let wrong = Output::new(OutputAlloc::<f32>::new(&Device::Cpu, 5).unwrap(), (2, 3)).err().unwrap().to_string();
    assert!(wrong.contains("[2, 3]") && wrong.contains("5 elements"), "{wrong}");
}
