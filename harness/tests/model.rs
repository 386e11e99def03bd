//! Compares the Transformer with a reference of candle ops in f64, which candle differentiates.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{D, DType, Device, Result, Tensor, Var};
use tilewright_harness::model::{
    Attention, Config, Fusion, ModelGraphRunner, ModelSize, Norm, Precision, SIZES, Transformer,
};
use tilewright_harness::ops::attention::Tiling;
use tilewright_harness::params::no_grad;

fn small() -> Config {
    Config {
        vocabulary: 61,
        context: 24,
        d_model: 32,
        d_ff: 48,
        layers: 2,
        heads: 4,
        heads_kv: 4,
        tiling: Tiling { queries: 8, keys: 5 },
        ..Config::default()
    }
}

fn tokens(config: &Config, batch: usize, length: usize, seed: u32) -> Tensor {
    let ids = (0..(batch * length) as u32).map(|i| (i * i * 7 + i * 3 + seed) % config.vocabulary as u32);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((batch, length)).unwrap()
}

/// The reference model in f64.
struct Reference {
    config: Config,
    weights: HashMap<String, Var>,
}

impl Reference {
    /// Creates the reference of a model, with its weights in its compute dtype, widened to f64.
    fn of(model: &Transformer) -> Reference {
        let dtype = model.config().precision.dtype();
        let weights = model.params().iter().map(|param| {
            let exact = param.compute(dtype).unwrap().to_dtype(DType::F64).unwrap();
            (param.name().to_string(), Var::from_tensor(&exact).unwrap())
        });
        Reference { config: model.config().clone(), weights: weights.collect() }
    }

    fn norm(&self, x: &Tensor, prefix: &str) -> Result<Tensor> {
        let x = match self.config.norm {
            Norm::Rms => x.clone(),
            Norm::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
        };
        let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + self.config.eps)?.sqrt()?;
        let y = x.broadcast_div(&rms)?.broadcast_mul(&self.weights[&format!("{prefix}.weight")])?;
        match self.config.norm {
            Norm::Rms => Ok(y),
            Norm::Layer => y.broadcast_add(&self.weights[&format!("{prefix}.bias")]),
        }
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.broadcast_matmul(&self.weights[&format!("{name}.weight")].t()?)
    }

    /// Rotary embedding: multiplies x [batch, n, heads, d], as complex numbers, by their rotations.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, n, heads, d) = x.dims4()?;
        let angle =
            |at: usize| (at / (d / 2)) as f64 * self.config.rope_base.powf(-2.0 * (at % (d / 2)) as f64 / d as f64);
        let angles = Tensor::from_iter((0..n * d / 2).map(angle), &Device::Cpu)?.reshape((1, n, 1, d / 2, 1))?;
        let pairs = x.reshape((batch, n, heads, d / 2, 2))?;
        let (re, im) = (pairs.narrow(4, 0, 1)?, pairs.narrow(4, 1, 1)?);
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let rotated_re = (re.broadcast_mul(&cos)? - im.broadcast_mul(&sin)?)?;
        let rotated_im = (re.broadcast_mul(&sin)? + im.broadcast_mul(&cos)?)?;
        Tensor::cat(&[rotated_re, rotated_im], 4)?.reshape((batch, n, heads, d))
    }

    fn attention(&self, qkv: &Tensor) -> Result<Tensor> {
        let (batch, n, _) = qkv.dims3()?;
        let (heads, heads_kv) = (self.config.heads, self.config.heads_kv);
        let d = self.config.d_model / heads;
        let part = |first: usize, count: usize| qkv.narrow(2, first * d, count * d)?.reshape((batch, n, count, d));
        let repeat = |x: Tensor| {
            let shape = (batch, n, heads_kv, heads / heads_kv, d);
            x.unsqueeze(3)?.broadcast_as(shape)?.reshape((batch, n, heads, d))
        };
        let q = self.rotate(&part(0, heads)?)?.transpose(1, 2)?.contiguous()?;
        let k = repeat(self.rotate(&part(heads, heads_kv)?)?)?.transpose(1, 2)?.contiguous()?;
        let v = repeat(part(heads + heads_kv, heads_kv)?)?.transpose(1, 2)?.contiguous()?;
        let mask = (0..n * n).map(|at| if at % n <= at / n { 1.0_f64 } else { 0.0 });
        let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((n, n))?;
        let weights = (q.matmul(&k.t()?)? / (d as f64).sqrt())?.exp()?.broadcast_mul(&mask)?;
        let o = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?.matmul(&v)?;
        o.transpose(1, 2)?.reshape((batch, n, heads * d))
    }

    fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, n) = tokens.dims2()?;
        let rows = self.weights["embedding.weight"].index_select(&tokens.flatten_all()?, 0)?;
        let mut x = rows.reshape((batch, n, self.config.d_model))?;
        for i in 0..self.config.layers {
            let normed = self.norm(&x, &format!("blocks.{i}.attention.norm"))?;
            let o = self.attention(&self.linear(&normed, &format!("blocks.{i}.attention.qkv"))?)?;
            x = (x + self.linear(&o, &format!("blocks.{i}.attention.out"))?)?;
            let normed = self.norm(&x, &format!("blocks.{i}.mlp.norm"))?;
            let gate_up = self.linear(&normed, &format!("blocks.{i}.mlp.gate_up"))?;
            let gate = gate_up.narrow(2, 0, self.config.d_ff)?;
            let gate = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
            let inner = (gate * gate_up.narrow(2, self.config.d_ff, self.config.d_ff)?)?;
            x = (x + self.linear(&inner, &format!("blocks.{i}.mlp.down"))?)?;
        }
        self.linear(&self.norm(&x, "norm")?, if self.config.tied { "embedding" } else { "head" })
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = self.logits(tokens)?.flatten_to(1)?;
        let log_sums = logits.exp()?.sum_keepdim(1)?.log()?;
        (log_sums - logits.gather(&targets.flatten_all()?.unsqueeze(1)?, 1)?)?.mean_all()
    }
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.detach().flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
    let (found, expected) = (flat(found), flat(expected));
    let distance: f64 = found.iter().zip(&expected).map(|(f, e)| (f - e).powi(2)).sum();
    (distance / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

/// Runs forward and backward, and compares the loss, the logits and the gradient of every parameter.
fn check(config: Config, tolerance: f64) {
    check_with_gradients_in(DType::F32, config, tolerance);
}

/// As [`check`], with gradients of this dtype.
fn check_with_gradients_in(dtype: DType, config: Config, tolerance: f64) {
    let what = format!("{config:?} with gradients in {dtype:?}");
    let model = Transformer::new(&config, &Device::Cpu, 3).unwrap_or_else(|e| panic!("{what}: {e}"));
    model.params().set_grad_dtype(dtype).unwrap();
    let reference = Reference::of(&model);
    let (x, y) = (tokens(&config, 2, 17, 1), tokens(&config, 2, 17, 5));

    let logits = no_grad(|| model.logits(&x)).unwrap();
    let error = relative_error(&logits, &reference.logits(&x).unwrap());
    assert!(error < tolerance, "logits: {error:.1e} in {what}");

    let expected = reference.loss(&x, &y).unwrap();
    let grads = expected.backward().unwrap();
    let loss = model.loss(&x, &y).unwrap();
    let error = relative_error(&loss, &expected);
    assert!(error < tolerance, "loss: {error:.1e} in {what}");
    model.params().zero_grads().unwrap();
    loss.backward().unwrap();
    for param in model.params().iter() {
        let found = param.grad().unwrap();
        assert_eq!(found.dtype(), dtype);
        let expected = grads.get(&reference.weights[param.name()]).unwrap();
        let error = relative_error(&found, expected);
        assert!(flat(&found).iter().any(|g| *g != 0.0), "{}: no gradient in {what}", param.name());
        assert!(error < tolerance, "{}: {error:.1e} in {what}", param.name());
    }
}

#[test]
fn gradients_match_the_reference_in_every_configuration() {
    for (attention, fusion) in [
        (Attention::Naive, Fusion::None),
        (Attention::Naive, Fusion::Ops),
        (Attention::Tiled, Fusion::None),
        (Attention::Tiled, Fusion::Ops),
        (Attention::Flash, Fusion::None),
        (Attention::Flash, Fusion::Ops),
        (Attention::Flash, Fusion::Blocks),
    ] {
        for checkpoint in [false, true] {
            check(Config { attention, fusion, checkpoint, ..small() }, 2e-5);
        }
    }
}

#[test]
fn layer_norm_grouped_query_attention_and_tied_embeddings() {
    for fusion in Fusion::ALL.iter().copied() {
        check(Config { fusion, norm: Norm::Layer, ..small() }, 2e-5);
        check(Config { fusion, heads_kv: 2, checkpoint: true, ..small() }, 2e-5);
        check(Config { fusion, tied: true, norm: Norm::Layer, ..small() }, 2e-5);
    }
    check(Config { attention: Attention::Naive, fusion: Fusion::None, heads_kv: 1, ..small() }, 2e-5);
    check(Config { attention: Attention::Tiled, fusion: Fusion::Ops, heads_kv: 2, ..small() }, 2e-5);
}

#[test]
fn half_precisions() {
    for (precision, tolerance) in [(Precision::Bf16, 4e-2), (Precision::F16, 6e-3)] {
        for (attention, fusion) in [
            (Attention::Naive, Fusion::None),
            (Attention::Tiled, Fusion::Ops),
            (Attention::Flash, Fusion::Ops),
            (Attention::Flash, Fusion::Blocks),
        ] {
            check(Config { attention, fusion, precision, ..small() }, tolerance);
        }
    }
    check(Config { precision: Precision::Tf32, ..small() }, 2e-5);
}

/// A gradient that is rounded once, when it is complete, is as accurate as its inputs.
#[test]
fn gradients_in_bf16() {
    let bf16 = |config: Config| check_with_gradients_in(DType::BF16, config, 4e-2);
    for fusion in Fusion::ALL.iter().copied() {
        let config = Config { fusion, precision: Precision::Bf16, ..small() };
        bf16(config.clone());
        bf16(Config { checkpoint: true, ..config.clone() });
        bf16(Config { tied: true, norm: Norm::Layer, ..config });
    }
}

#[test]
fn gradient_dtype_is_fixed_once_a_hook_is_registered() {
    let config = Config { precision: Precision::Bf16, ..small() };
    let params = Transformer::new(&config, &Device::Cpu, 3).unwrap().params().clone();
    assert_eq!(params.grads().dtype(), DType::F32);
    let before = params.storage_version();
    params.set_grad_dtype(DType::F32).unwrap();
    assert_eq!(params.storage_version(), before, "captured graphs stay valid if no storage moves");
    params.set_grad_dtype(DType::BF16).unwrap();
    assert_ne!(params.storage_version(), before);
    assert!(flat(&params.grads()).iter().all(|g| *g == 0.0) && params.grads().dims() == [params.flat_len()]);
    let message = params.set_grad_dtype(DType::F16).unwrap_err().to_string();
    assert!(message.contains("f32 or bf16"), "{message}");
    let _hook = params.on_grad_ready(|_| Ok(()));
    let message = params.set_grad_dtype(DType::F32).unwrap_err().to_string();
    assert!(message.contains("ranks"), "{message}");
    assert_eq!(params.grads().dtype(), DType::BF16);
}

/// A tied head uses the embedding twice, and a checkpointed block runs forward twice: each parameter is reported once.
#[test]
fn gradients_are_ready_once_in_backward_order() {
    for (fusion, checkpoint) in
        [(Fusion::Blocks, false), (Fusion::Blocks, true), (Fusion::Ops, true), (Fusion::None, false)]
    {
        let config = Config { fusion, checkpoint, tied: true, ..small() };
        let model = Transformer::new(&config, &Device::Cpu, 3).unwrap();
        let ready = Arc::new(Mutex::new(Vec::new()));
        let params = model.params().clone();
        let _hook = model.params().on_grad_ready({
            let (ready, params) = (ready.clone(), params.clone());
            move |id| {
                ready.lock().unwrap().push(params.param(id).name().to_string());
                Ok(())
            }
        });
        let (x, y) = (tokens(&config, 2, 9, 1), tokens(&config, 2, 9, 5));
        // An evaluation before the step leaves no pending uses, inside and outside of no_grad.
        drop(model.loss(&x, &y).unwrap());
        no_grad(|| model.loss(&x, &y)).unwrap();
        assert!(ready.lock().unwrap().is_empty());
        model.loss(&x, &y).unwrap().backward().unwrap();
        let order = std::mem::take(&mut *ready.lock().unwrap());
        assert_eq!(order.len(), params.len(), "{order:?}");
        let place = |name: &str| order.iter().position(|n| n == name).unwrap_or_else(|| panic!("{name}: {order:?}"));
        assert_eq!(place("embedding.weight"), order.len() - 1);
        // The fused model sums the gradients of all norms at the end.
        let norms_last = fusion == Fusion::Blocks;
        assert_eq!(place("norm.weight") > place("blocks.0.attention.qkv.weight"), norms_last, "{order:?}");
        assert!(place("blocks.1.attention.qkv.weight") < place("blocks.0.mlp.down.weight"), "{order:?}");
    }
}

#[test]
fn gradients_accumulate_over_passes() {
    let config = small();
    let model = Transformer::new(&config, &Device::Cpu, 3).unwrap();
    let (x, y) = (tokens(&config, 2, 9, 1), tokens(&config, 2, 9, 5));
    let loss = model.loss(&x, &y).unwrap();
    loss.backward().unwrap();
    let once = flat(&model.params().grads());
    model.params().zero_grads().unwrap();
    let mut passes = ModelGraphRunner::new(&model);
    assert!(passes.fallback_reason().is_some_and(|why| why.contains("CPU")));
    for _ in 0..4 {
        let found = passes.forward_backward(&x, &y, 0.5).unwrap();
        assert_eq!(found.to_scalar::<f32>().unwrap(), loss.to_scalar::<f32>().unwrap());
    }
    let sum = flat(&model.params().grads());
    assert!(sum.iter().zip(&once).all(|(sum, once)| (sum - 2.0 * once).abs() <= 1e-5 * once.abs().max(1e-3)));
}

/// The first contribution to a lazily zeroed gradient overwrites its buffer: the bits are those of adding to zeros.
#[test]
fn lazily_zeroed_gradients_match_zeroed_ones() {
    for (fusion, dtype) in Fusion::ALL.iter().flat_map(|&fusion| [(fusion, DType::F32), (fusion, DType::BF16)]) {
        for (tied, norm) in [(false, Norm::Rms), (true, Norm::Rms), (true, Norm::Layer)] {
            let precision = if dtype == DType::BF16 { Precision::Bf16 } else { Precision::F32 };
            let config = Config { fusion, tied, norm, precision, ..small() };
            let model = Transformer::new(&config, &Device::Cpu, 3).unwrap();
            model.params().set_grad_dtype(dtype).unwrap();
            let (x, y) = (tokens(&config, 2, 9, 1), tokens(&config, 2, 9, 5));
            let params = model.params();
            let passes = |count: usize| {
                (0..count).for_each(|_| drop(model.loss(&x, &y).unwrap().backward().unwrap()));
                params.materialize_zero_grads().unwrap();
                flat(&params.grads())
            };
            params.zero_grads().unwrap();
            let (once, thrice) = (passes(1), passes(2));
            for param in params.iter() {
                let garbage = Tensor::full(7.0_f32, param.numel(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                params.grads().slice_set(&garbage, 0, param.range().start).unwrap();
            }
            params.lazy_zero_grads();
            assert_eq!((passes(1), passes(2)), (once, thrice), "{fusion} {tied} {norm:?}");
        }
    }
}

/// Cases of the aliasing tests: precision, dtype of gradients, and whether activation checkpointing is on.
const ALIASING_CASES: [(Precision, DType, bool); 4] = [
    (Precision::F32, DType::F32, false),
    (Precision::F32, DType::F32, true),
    (Precision::Bf16, DType::BF16, false),
    (Precision::Bf16, DType::F32, false),
];

/// Checks, for two sequences of `length` tokens, whether activations alias the gradients of the `gate_up` weights of
/// these blocks, and that backward gives the same bits as without aliasing.
fn check_aliasing(config: &Config, dtype: DType, length: usize, aliased_blocks: &[(usize, bool)]) {
    let model = Transformer::new(config, &Device::Cpu, 3).unwrap();
    let params = model.params();
    params.set_grad_dtype(dtype).unwrap();
    let (x, y) = (tokens(config, 2, length, 1), tokens(config, 2, length, 5));
    params.zero_grads().unwrap();
    model.loss(&x, &y).unwrap().backward().unwrap();
    let expected = flat(&params.grads());

    params.lazy_zero_grads();
    let loss = model.loss(&x, &y).unwrap();
    let what =
        format!("{}, gradients in {dtype:?}, {length} tokens, checkpoint: {}", config.precision, config.checkpoint);
    for &(block, aliases) in aliased_blocks {
        let range = params.get(&format!("blocks.{block}.mlp.gate_up.weight")).unwrap().range();
        let written = flat(&params.grads())[range.clone()] != expected[range];
        assert_eq!(written, aliases, "{what}, block {block}");
    }
    loss.backward().unwrap();
    assert!(flat(&params.grads()) == expected, "{what}");
}

/// Forward saves activations in lazily zeroed gradient buffers of the same dtype if they fit: backward gives the same
/// bits as without aliasing.
#[test]
fn activations_alias_lazily_zeroed_gradients() {
    for (precision, dtype, checkpoint) in ALIASING_CASES {
        let config = Config { fusion: Fusion::Blocks, precision, checkpoint, context: 64, ..small() };
        // 18 tokens are fewer than the d_model of 32, and fit; 66 are more.
        for (length, fits) in [(9, dtype == precision.dtype()), (33, false)] {
            check_aliasing(&config, dtype, length, &[(1, fits)]);
        }
    }
}

/// An activation that does not fit into the gradient of its own weight may fit into that of the previous block, which
/// backward computes after this block.
#[test]
fn activations_alias_gradients_of_the_previous_block() {
    for (precision, dtype, checkpoint) in ALIASING_CASES {
        // 66 tokens: 6336 elements of queries, keys and values. Their weight has 3072 elements, that of the previous
        // block 12288.
        let config =
            Config { fusion: Fusion::Blocks, precision, checkpoint, context: 64, d_ff: 192, layers: 3, ..small() };
        let fits = dtype == precision.dtype();
        check_aliasing(&config, dtype, 33, &[(0, fits), (1, fits), (2, false)]);
    }
}

#[test]
fn gradient_buffers_are_aliased_once_and_released() {
    let config = Config { fusion: Fusion::Blocks, ..small() };
    let model = Transformer::new(&config, &Device::Cpu, 3).unwrap();
    let params = model.params();
    let (x, y) = (tokens(&config, 2, 9, 1), tokens(&config, 2, 9, 5));
    let backward = |loss: Tensor| drop(loss.backward().unwrap());
    params.zero_grads().unwrap();
    backward(model.loss(&x, &y).unwrap());
    let once = flat(&params.grads());

    // Reading or computing a gradient fails while its buffer holds an activation of another pass.
    params.lazy_zero_grads();
    let (first, second) = (model.loss(&x, &y).unwrap(), model.loss(&x, &y).unwrap());
    let says = |message: String| assert!(message.contains("blocks.") && message.contains("zero_grads"), "{message}");
    says(params.get("blocks.0.attention.qkv.weight").unwrap().grad().unwrap_err().to_string());
    says(params.materialize_zero_grads().unwrap_err().to_string());
    says(second.backward().err().unwrap().to_string());
    drop((first, second));

    // A pass that is dropped without backward releases the buffers. Zeroing gradients between forward and backward is
    // allowed.
    params.lazy_zero_grads();
    drop(model.loss(&x, &y).unwrap());
    let loss = model.loss(&x, &y).unwrap();
    params.zero_grads().unwrap();
    backward(loss);
    assert!(flat(&params.grads()) == once);
    // no_grad does not touch gradients.
    params.lazy_zero_grads();
    no_grad(|| model.loss(&x, &y)).unwrap();
    assert!(flat(&params.grads()) == once);
}

/// A resumed run can repeat an uninterrupted one bit for bit only if gradients are deterministic.
#[test]
fn gradients_have_the_same_bits_in_every_run() {
    for fusion in Fusion::ALL.iter().copied() {
        let config = Config { fusion, d_model: 64, d_ff: 192, ..small() };
        let model = Transformer::new(&config, &Device::Cpu, 3).unwrap();
        let (x, y) = (tokens(&config, 8, 24, 1), tokens(&config, 8, 24, 5));
        let gradients = || {
            model.params().zero_grads().unwrap();
            model.loss(&x, &y).unwrap().backward().unwrap();
            flat(&model.params().grads())
        };
        let first = gradients();
        assert!((0..4).all(|_| gradients() == first), "{fusion}");
    }
}

/// Every graph node costs a traversal, an addition to zeros and, on a GPU, launches.
#[test]
fn fused_blocks_add_no_graph_nodes() {
    let nodes = |fusion, layers| {
        let config = Config { fusion, layers, ..small() };
        let model = Transformer::new(&config, &Device::Cpu, 0).unwrap();
        model.loss(&tokens(&config, 1, 8, 1), &tokens(&config, 1, 8, 2)).unwrap().sorted_nodes().len()
    };
    let per_block = [Fusion::None, Fusion::Ops, Fusion::Blocks].map(|fusion| nodes(fusion, 3) - nodes(fusion, 2));
    assert_eq!((per_block[1], per_block[2]), (10, 0), "{per_block:?}");
    assert_eq!(nodes(Fusion::Blocks, 2), 2, "the model, and the tracked anchor of its parameters");
    assert!(per_block[0] > 40, "{per_block:?}");
}

#[test]
fn named_sizes_have_their_parameter_counts() {
    let millions = |name: &str| (Config::named(name, 128).unwrap().parameters() as f64 / 1e5).round() / 10.0;
    assert_eq!(millions("xl"), 1998.2);
    // 2·V·d + layers·(4d² + 3·d·d_ff + 2d) + d.
    for ModelSize { name, d_model, d_ff, layers, .. } in SIZES {
        let expected =
            2 * 10_000 * d_model + layers * (4 * d_model * d_model + 3 * d_model * d_ff + 2 * d_model) + d_model;
        let config = Config::named(name, 128).unwrap();
        assert_eq!(config.parameters(), expected);
        assert_eq!(config.size_name(), Some(name));
        config.check().unwrap();
    }
    let model = Transformer::new(&small(), &Device::Cpu, 0).unwrap();
    assert_eq!(model.params().numel(), small().parameters());
}

#[test]
fn initial_loss_is_that_of_uniform_predictions() {
    for tied in [false, true] {
        let config = Config { tied, ..small() };
        let model = Transformer::new(&config, &Device::Cpu, 3).unwrap();
        let loss =
            model.loss(&tokens(&config, 4, 24, 1), &tokens(&config, 4, 24, 2)).unwrap().to_scalar::<f32>().unwrap();
        let uniform = (config.vocabulary as f32).ln();
        assert!((loss - uniform).abs() < 1.0, "{loss} for {uniform}");
    }
}

#[test]
fn invalid_configs_and_inputs_are_errors() {
    let message = |config: Config| config.check().unwrap_err().to_string();
    let heads = message(Config { heads: 5, heads_kv: 5, ..small() });
    assert!(heads.contains("5 heads") && heads.contains("32") && heads.contains("4 and 8 do"), "{heads}");
    assert!(message(Config { heads_kv: 3, ..small() }).contains("3 key/value heads"));
    assert!(message(Config { heads: 32, heads_kv: 32, ..small() }).contains("even"));
    assert!(message(Config { layers: 1, vocabulary: 0, ..small() }).contains("vocabulary"));
    assert!(message(Config { attention: Attention::Naive, ..small() }).contains("`ops`"));
    let unknown = Config::named("smal", 128).unwrap_err().to_string();
    assert!(unknown.contains("did you mean `small`"), "{unknown}");
    assert!(Config::named("gigantic", 128).unwrap_err().to_string().contains("medium"));
    assert_eq!(Config::named("2.7b", 128).unwrap().d_model, 2560);
    assert!("bf17".parse::<Precision>().unwrap_err().contains("bf16"));

    let model = Transformer::new(&small(), &Device::Cpu, 0).unwrap();
    let long = model.logits(&tokens(&small(), 1, 25, 0)).unwrap_err().to_string();
    assert!(long.contains("25") && long.contains("24"), "{long}");
    let other = Config { d_model: 64, ..small() };
    assert!(Transformer::with_params(&other, model.params().clone()).is_err());
    let beyond = Tensor::new(&[[61_u32]], &Device::Cpu).unwrap();
    assert!(model.logits(&beyond).is_err());
}
