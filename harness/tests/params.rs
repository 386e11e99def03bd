//! Tests of parameters in flat tensors: views, use counts, gradients, groups, state.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use tilewright_harness::params::{ALIGNMENT, Init, ParamId, ParamSpec, Params, no_grad};

fn specs() -> Vec<ParamSpec> {
    vec![
        ParamSpec::matrix("embedding", &[5, 3], 0.5),
        ParamSpec::matrix("head", &[3, 7], 0.5),
        ParamSpec::vector("norm", 3, Init::Ones),
        ParamSpec { frozen: true, ..ParamSpec::matrix("table", &[2, 2], 1.0) },
    ]
}

fn params() -> Params {
    Params::new(specs(), &Device::Cpu, 7).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

#[test]
fn parameters_are_views_of_the_flat_tensors() {
    let params = params();
    assert_eq!((params.len(), params.numel()), (4, 15 + 21 + 3 + 4));
    assert_eq!(params.flat_len() % ALIGNMENT, 0);
    let flat = values(params.values());
    let mut covered = vec![false; flat.len()];
    for param in params.iter() {
        assert_eq!(param.range().start % ALIGNMENT, 0);
        assert_eq!(values(&param.value().unwrap()), flat[param.range()]);
        covered[param.range()].fill(true);
    }
    assert!(flat.iter().zip(&covered).all(|(x, covered)| *covered || *x == 0.0), "padding is zero");
    // A write to the flat tensor is visible in the view.
    params.values().slice_set(&Tensor::new(&[42.0_f32], &Device::Cpu).unwrap(), 0, 64).unwrap();
    assert_eq!(values(&params.get("head").unwrap().value().unwrap())[0], 42.0);
}

#[test]
fn initial_values_have_their_standard_deviation_and_seed() {
    let make = |seed| Params::new(vec![ParamSpec::matrix("w", &[200, 200], 0.02)], &Device::Cpu, seed).unwrap();
    let w = values(make(1).values());
    let mean = w.iter().sum::<f32>() / w.len() as f32;
    let std = (w.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / w.len() as f32).sqrt();
    // Truncation at three standard deviations reduces the standard deviation to 0.9866 of its value.
    assert!(mean.abs() < 5e-4 && (std / 0.02 - 0.9866).abs() < 0.02, "{mean} {std}");
    assert!(w.iter().all(|x| x.abs() <= 0.0600001));
    assert_eq!(w, values(make(1).values()));
    assert_ne!(w, values(make(2).values()));
}

#[test]
fn leaves_accumulate_gradients_and_fire_the_hook_once() {
    let params = params();
    let ready = Arc::new(Mutex::new(Vec::new()));
    let hook = params.on_grad_ready({
        let ready = ready.clone();
        move |id| {
            ready.lock().unwrap().push(id);
            Ok(())
        }
    });
    let x = Tensor::new(&[[1.0_f32, 2.0, 3.0]], &Device::Cpu).unwrap();
    let norm = params.get("norm").unwrap();
    let step = || {
        // loss = Σ x·w + Σ x²·w: the weight is used twice, once in bf16.
        let a = x.broadcast_mul(&norm.leaf(DType::F32).unwrap()).unwrap();
        let b = x.sqr().unwrap().to_dtype(DType::BF16).unwrap();
        let b = b.broadcast_mul(&norm.leaf(DType::BF16).unwrap()).unwrap().to_dtype(DType::F32).unwrap();
        (a.sum_all().unwrap() + b.sum_all().unwrap()).unwrap().backward().unwrap();
    };
    step();
    assert_eq!(values(&norm.grad().unwrap()), [2.0, 6.0, 12.0]);
    assert_eq!(*ready.lock().unwrap(), [norm.id()]);
    step();
    assert_eq!(values(&norm.grad().unwrap()), [4.0, 12.0, 24.0], "gradients accumulate until they are zeroed");
    assert_eq!(ready.lock().unwrap().len(), 2);
    params.zero_grads().unwrap();
    assert!(values(&params.grads()).iter().all(|g| *g == 0.0));

    // Lazily zeroed gradients are zero for accumulation, for reading, and after they are materialized.
    for look in [true, false] {
        params.lazy_zero_grads();
        step();
        assert_eq!(values(&norm.grad().unwrap()), [2.0, 6.0, 12.0]);
        params.lazy_zero_grads();
        if look {
            assert_eq!(values(&norm.grad().unwrap()), [0.0; 3]);
        }
        params.materialize_zero_grads().unwrap();
        assert!(values(&params.grads()).iter().all(|g| *g == 0.0));
        ready.lock().unwrap().pop();
    }

    // A forward pass without backward leaves no pending use.
    drop(norm.leaf(DType::F32).unwrap());
    step();
    assert_eq!(ready.lock().unwrap().len(), 3);
    drop(hook);
    step();
    assert_eq!(ready.lock().unwrap().len(), 3);
}

#[test]
fn errors_of_callbacks_end_the_backward_pass() {
    let params = params();
    let _hook = params.on_grad_ready(|id| Err(candle_core::Error::Msg(format!("no network for {id:?}"))));
    let loss = params.get("norm").unwrap().leaf(DType::F32).unwrap().sum_all().unwrap();
    let message = loss.backward().unwrap_err().to_string();
    assert!(message.contains("no network for ParamId(2)"), "{message}");
}

#[test]
fn frozen_parameters_and_evaluation_stay_off_the_autograd_graph() {
    let params = params();
    assert!(!params.get("table").unwrap().leaf(DType::F32).unwrap().track_op());
    let head = params.get("head").unwrap();
    assert!(!no_grad(|| head.leaf(DType::F32).unwrap()).track_op());
    assert!(head.leaf(DType::F32).unwrap().track_op());
}

#[test]
fn groups_are_slices_of_the_trained_parameters() {
    let groups = params().groups();
    // The frozen parameter after the norm belongs to no group.
    for (group, decay, ids, range) in [(&groups[0], true, vec![0, 1], 0..85), (&groups[1], false, vec![2], 128..131)] {
        assert_eq!((group.decay, group.ranges.len(), &group.ranges[0]), (decay, 1, &range));
        assert_eq!(group.ids, ids.into_iter().map(ParamId).collect::<Vec<_>>());
    }
    assert_eq!(groups.len(), 2);
}

#[test]
fn compute_weights_follow_the_master_weights() {
    let params = params();
    params.set_compute_dtype(DType::BF16).unwrap();
    let head = params.get("head").unwrap();
    let twice = (head.value().unwrap() * 2.0).unwrap();
    head.set_value(&twice).unwrap();
    assert_eq!(values(&head.compute(DType::BF16).unwrap()), values(&twice.to_dtype(DType::BF16).unwrap()));
    params.values().zero_set().unwrap();
    params.refresh_compute_weights().unwrap();
    assert!(values(&head.compute(DType::BF16).unwrap()).iter().all(|x| *x == 0.0));
    assert!(params.set_compute_dtype(DType::F64).is_err());
}

#[test]
fn states_are_loaded_whole_or_not_at_all() {
    let (a, b) = (params(), Params::new(specs(), &Device::Cpu, 8).unwrap());
    let state: HashMap<String, Tensor> = a.state().unwrap().into_iter().collect();
    b.load_state(&state).unwrap();
    assert_eq!(values(a.values()), values(b.values()));
    a.load_state(&state).unwrap();
    assert_eq!(values(a.values()), values(b.values()), "loading the own state changes nothing");

    let before = values(b.values());
    let mut broken = state.clone();
    broken.remove("norm");
    broken.insert("bias".into(), state["norm"].clone());
    let message = b.load_state(&broken).unwrap_err().to_string();
    assert!(message.contains("`norm`") && message.contains("`bias`"), "{message}");
    let mut broken = state.clone();
    broken.insert("head".into(), state["embedding"].zeros_like().unwrap());
    let message = b.load_state(&broken).unwrap_err().to_string();
    assert!(message.contains("[3, 7]") && message.contains("[5, 3]"), "{message}");
    assert_eq!(values(b.values()), before);

    let replica = a.replicate(&Device::Cpu).unwrap();
    assert_eq!(values(replica.values()), values(a.values()));
    replica.values().zero_set().unwrap();
    assert_ne!(values(replica.values()), values(a.values()));
}

#[test]
fn unknown_and_duplicate_names_are_errors() {
    let message = params().get("haed").unwrap_err().to_string();
    assert!(message.contains("`head`"), "{message}");
    let twice = vec![ParamSpec::vector("a", 2, Init::Zeros), ParamSpec::vector("a", 3, Init::Zeros)];
    assert!(Params::new(twice, &Device::Cpu, 0).unwrap_err().to_string().contains("`a`"));
}
