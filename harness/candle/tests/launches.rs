//! The kernels of this crate run, on the CPU too: every op launches the kernels that it names, forward and backward.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Activation, Optimizer, ParamsAdamW};
use tilewright::kernels::KERNELS;
use tilewright::trace::{Options, Recording};
use tilewright_candle::{self as ours, AttentionOptions, Epilogue, FusedAdamW, Rope};

/// Launches of each kernel while `f` runs.
fn launches(f: impl FnOnce() -> Result<()>) -> BTreeMap<String, usize> {
    let recording = Recording::start(Options { spans: true, ..Options::default() }).unwrap();
    f().unwrap();
    let trace = recording.finish().unwrap();
    let mut counts = BTreeMap::new();
    for span in &trace.spans {
        let name = &trace.nodes[span.node as usize].name;
        // Spans of ops have those of launches inside, which may have the same name. Matmuls run in the gemm crate.
        let is_parent = trace.nodes.iter().any(|node| node.parent == span.node);
        if !is_parent && name != "matmul" && KERNELS.iter().any(|def| def.name == name) {
            *counts.entry(name.clone()).or_default() += 1;
        }
    }
    counts
}

/// Launches of an op forward, and of its backward pass.
fn forward_and_backward(op: impl Fn() -> Result<Tensor>) -> String {
    let mut y = None;
    let forward = launches(|| {
        y = Some(op()?);
        Ok(())
    });
    let backward = launches(|| y.unwrap().sum_all()?.backward().map(|_| ()));
    let say = |counts: BTreeMap<String, usize>| {
        counts.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
    };
    format!("{}; {}", say(forward), say(backward))
}

#[test]
fn every_op_launches_its_kernels() {
    let cpu = &Device::Cpu;
    let var = |shape: &[usize]| Var::ones(shape, DType::F32, cpu).unwrap();
    let (x, w, b, q) = (var(&[4, 16]), var(&[16]), var(&[16]), var(&[1, 2, 8, 16]));
    let (table, ids) = (var(&[8, 16]), Tensor::zeros(4, DType::U32, cpu).unwrap());
    let (table_bias, residual) = (var(&[8]), var(&[4, 8]));
    let rope = Rope::new(16, 1e4, 8, cpu).unwrap();

    assert_eq!(forward_and_backward(|| ours::rms_norm(&x, &w, 1e-5)), "1 rms_norm_fwd; 1 column_sum, 1 rms_norm_bwd");
    let layer_norm = forward_and_backward(|| ours::layer_norm(&x, &w, &b, 1e-5));
    assert_eq!(layer_norm, "1 layer_norm_fwd; 2 column_sum, 1 layer_norm_bwd");
    // No sums for weights that are not trained.
    let (w_fixed, b_fixed) = (w.as_detached_tensor(), b.as_detached_tensor());
    let rms_norm = forward_and_backward(|| ours::rms_norm(&x, &w_fixed, 1e-5));
    assert_eq!(rms_norm, "1 rms_norm_fwd; 1 rms_norm_bwd");
    let layer_norm = forward_and_backward(|| ours::layer_norm(&x, &w, &b_fixed, 1e-5));
    assert_eq!(layer_norm, "1 layer_norm_fwd; 1 column_sum, 1 layer_norm_bwd");
    let layer_norm = forward_and_backward(|| ours::layer_norm(&x, &w_fixed, &b_fixed, 1e-5));
    assert_eq!(layer_norm, "1 layer_norm_fwd; 1 layer_norm_bwd");
    assert_eq!(forward_and_backward(|| ours::silu(&x)), "1 activation_fwd; 1 activation_bwd");
    assert_eq!(forward_and_backward(|| ours::gelu(&x)), "1 activation_fwd; 1 activation_bwd");
    assert_eq!(forward_and_backward(|| ours::gelu_erf(&x)), "1 activation_fwd; 1 activation_bwd");
    let biased = forward_and_backward(|| ours::linear_with(&x, &table, &Epilogue::default().with_bias(&table_bias)));
    assert_eq!(biased, "1 activation_fwd; 1 column_sum");
    let all = Epilogue::default().with_bias(&table_bias).with_activation(Activation::Gelu).with_residual(&residual);
    let all = forward_and_backward(|| ours::linear_with(&x, &table, &all));
    assert_eq!(all, "1 activation_fwd; 1 activation_bwd, 1 column_sum");
    assert_eq!(forward_and_backward(|| ours::swiglu(&x)), "1 swiglu_fwd; 1 swiglu_bwd");
    assert_eq!(forward_and_backward(|| ours::linear_swiglu(&x, &table)), "1 swiglu_fwd; 1 swiglu_bwd");
    assert_eq!(forward_and_backward(|| ours::swiglu_pair(&x, &x)), "1 swiglu_fwd; 1 swiglu_bwd");
    assert_eq!(forward_and_backward(|| ours::softmax(&x)), "1 softmax_rows; 1 softmax_bwd");
    assert_eq!(forward_and_backward(|| ours::cast(&x, DType::BF16)), "1 cast; 1 cast");
    assert_eq!(forward_and_backward(|| ours::rope(&q, &rope, 0)), "1 rope_from; 1 rope_from");
    assert_eq!(forward_and_backward(|| ours::cross_entropy(&x, &ids)), "1 cross_entropy_fwd; 1 cross_entropy_bwd");
    // The gradients are computed in the forward pass.
    let fused = forward_and_backward(|| ours::linear_cross_entropy(&x, &table, &ids));
    assert_eq!(fused, "1 cross_entropy_fwd_bwd; ");
    let attention = forward_and_backward(|| ours::flash_attention(&q, &q, &q, &AttentionOptions::new(true)));
    assert_eq!(
        attention,
        "1 flash_attention_fwd; 1 flash_attention_bwd_dkdv, 1 flash_attention_bwd_dq, 1 flash_attention_bwd_preprocess"
    );

    // One launch per parameter.
    let mut optimizer = FusedAdamW::new(vec![x.clone(), w.clone()], ParamsAdamW::default()).unwrap();
    let grads = ours::rms_norm(&x, &w, 1e-5).unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(launches(|| optimizer.step(&grads)), BTreeMap::from([("adamw".to_string(), 2)]));
}
