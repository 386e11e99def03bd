//! Bad input is an error that names the op, the argument, what was expected and what was found.

use candle_core::{DType, Device, IndexOp, Module, Result, Tensor, Var};
use candle_nn::{Activation, VarBuilder, VarMap};
use tilewright_candle::graph::{record1, record2, record3};
use tilewright_candle::matmul::matmul_into;
use tilewright_candle::memory::OutputAlloc;
use tilewright_candle::nn::{AttentionConfig, attention};
use tilewright_candle::{self as ours, AttentionOptions, Epilogue, KeyCache, Rope};

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

fn f32s(shape: &[usize]) -> Tensor {
    zeros(shape, DType::F32)
}

/// Checks that an op fails, with all of these words in its message.
#[track_caller]
fn fails<X>(result: Result<X>, words: &[&str]) {
    let message = match result {
        Ok(_) => panic!("expected an error with {words:?}"),
        Err(error) => error.to_string(),
    };
    let missing: Vec<_> = words.iter().filter(|word| !message.contains(**word)).collect();
    assert!(missing.is_empty(), "no {missing:?} in: {message}");
}

#[test]
fn wrong_dtypes() {
    let (x, w) = (f32s(&[2, 4]), f32s(&[4]));
    let double = zeros(&[2, 4], DType::F64);
    fails(ours::rms_norm(&double, &zeros(&[4], DType::F64), 1e-5), &["rms_norm", "f64", "to_dtype"]);
    fails(ours::rms_norm(&x, &zeros(&[4], DType::BF16), 1e-5), &["f32", "bf16", "cast"]);
    fails(ours::layer_norm(&x, &w, &zeros(&[4], DType::F16), 1e-5), &["f32", "f16"]);
    fails(ours::silu(&zeros(&[3], DType::U32)), &["silu", "u32"]);
    fails(ours::gelu(&double), &["gelu", "f64"]);
    fails(ours::gelu_erf(&double), &["gelu_erf", "f64"]);
    let with = |epilogue: Epilogue| ours::linear_with(&x, &f32s(&[3, 4]), &epilogue);
    fails(with(Epilogue::default().with_bias(&zeros(&[3], DType::BF16))), &["linear", "bias", "f32", "bf16"]);
    fails(with(Epilogue::default().with_bias(&f32s(&[4]))), &["linear", "bias", "[3]", "[4]"]);
    fails(with(Epilogue::default().with_residual(&f32s(&[3]))), &["linear", "residual", "[2, 3]", "[3]"]);
    fails(with(Epilogue::default().with_activation(Activation::Mish)), &["linear", "activation", "Mish", "Relu"]);
    fails(ours::swiglu(&double), &["swiglu", "f64"]);
    fails(ours::swiglu_pair(&x, &zeros(&[2, 4], DType::BF16)), &["swiglu", "f32", "bf16"]);
    fails(ours::softmax(&double), &["softmax", "f64"]);
    fails(ours::linear(&x, &zeros(&[3, 4], DType::BF16)), &["f32", "bf16"]);
    fails(ours::matmul(&x, &zeros(&[4, 3], DType::F16)), &["matmul", "f32", "f16"]);
    fails(ours::cast(&x, DType::U8), &["cast", "u8"]);
    fails(ours::embedding(&zeros(&[2], DType::I64), &x, DType::F32), &["embedding", "ids", "u32", "i64"]);
    fails(ours::embedding(&zeros(&[2], DType::U32), &x, DType::BF16), &["bf16", "f32"]);
    fails(ours::cross_entropy(&x, &zeros(&[2], DType::I64)), &["cross_entropy", "targets", "u32", "i64"]);
    let outside = Tensor::new(&[3_u32, 4], &Device::Cpu).unwrap();
    fails(ours::cross_entropy(&x, &outside), &["cross_entropy", "targets", "numbers below 4", "4 at 1"]);
    fails(ours::cross_entropy_rows(&x, &outside), &["cross_entropy", "4 at 1"]);
    fails(
        ours::linear_cross_entropy(&x, &x.pad_with_zeros(0, 0, 2).unwrap(), &outside),
        &["linear_cross_entropy", "4 at 1"],
    );
    let q = f32s(&[1, 2, 3, 4]);
    let slopes = |slopes: &Tensor| {
        ours::flash_attention(&q, &q, &q, &AttentionOptions::new(true).with_alibi_slopes(slopes.clone()))
    };
    let bias = |bias: Tensor| ours::flash_attention(&q, &q, &q, &AttentionOptions::new(true).with_relative_bias(bias));
    fails(bias(f32s(&[2, 3])), &["flash_attention", "relative_bias", "[2, 3]"]);
    fails(slopes(&zeros(&[2], DType::BF16)), &["flash_attention", "alibi_slopes", "f32", "bf16"]);
    fails(slopes(&f32s(&[2, 2]).i((.., 0)).unwrap()), &["flash_attention", "alibi_slopes", "contiguous"]);
    fails(slopes(&Var::ones(2, DType::F32, &Device::Cpu).unwrap()), &["alibi_slopes", "no gradient", "detach"]);
    fails(
        ours::flash_attention(&q, &zeros(&[1, 2, 3, 4], DType::BF16), &q, &AttentionOptions::new(true)),
        &["as k", "f32", "bf16"],
    );
    fails(
        ours::flash_attention(&zeros(&[1, 2, 3, 4], DType::F64), &q, &q, &AttentionOptions::new(true)),
        &["as k", "f64", "f32"],
    );
    let bytes = zeros(&[1, 2, 3, 4], DType::F8E4M3);
    fails(ours::flash_attention(&q, &bytes, &bytes, &AttentionOptions::new(true)), &["as k", "f32", "f8e4m3"]);
    let cached = |q: &Tensor, k: &Tensor, v: &Tensor, v_descale: Tensor| {
        let cache = KeyCache::new(zeros(&[1], DType::I32)).with_descale(f32s(&[1, 2, 1]), v_descale);
        ours::flash_attention(q, k, v, &AttentionOptions::new(true).with_cache(cache))
    };
    fails(cached(&bytes, &bytes, &bytes, f32s(&[2])), &["takes f32, bf16 and f16", "f8e4m3"]);
    fails(cached(&q, &bytes, &q, f32s(&[2])), &["as v", "f8e4m3", "f32"]);
    fails(cached(&q, &q, &q, f32s(&[2])), &["8-bit floats", "f32"]);
    fails(cached(&q, &bytes, &bytes, zeros(&[2], DType::BF16)), &["as v_descale", "f32", "bf16"]);
    fails(cached(&q, &bytes, &bytes, f32s(&[1, 2])), &["as v_descale", "[heads_kv]", "[1, 2]"]);
    fails(cached(&q, &bytes, &bytes, f32s(&[3])), &["v_descale", "2 heads", "1 × 3 × 1"]);
    let variable = Var::ones(2, DType::F32, &Device::Cpu).unwrap();
    fails(cached(&q, &bytes, &bytes, variable.as_tensor().clone()), &["as v_descale", "no_grad"]);
    fails(
        ours::rope(&zeros(&[1, 2, 3, 4], DType::F64), &Rope::new(4, 1e4, 8, &Device::Cpu).unwrap(), 0),
        &["rope", "f64"],
    );
}

#[test]
fn wrong_shapes() {
    let x = f32s(&[2, 4]);
    fails(ours::rms_norm(&x, &f32s(&[5]), 1e-5), &["rms_norm", "as weight", "[4]", "[5]"]);
    fails(ours::rms_norm(&x, &f32s(&[1, 4]), 1e-5), &["rms_norm", "[4]", "[1, 4]"]);
    fails(ours::layer_norm(&x, &f32s(&[4]), &f32s(&[3]), 1e-5), &["layer_norm", "as bias", "[4]", "[3]"]);
    fails(ours::rms_norm(&f32s(&[]), &f32s(&[1]), 1e-5), &["rms_norm", "last dimension"]);
    fails(ours::swiglu(&f32s(&[2, 3])), &["even", "[2, 3]"]);
    fails(ours::swiglu_pair(&f32s(&[2, 6]), &f32s(&[3, 4])), &["swiglu", "[2, 6]", "[3, 4]"]);
    fails(ours::softmax(&f32s(&[])), &["softmax", "scalar"]);
    fails(ours::linear(&x, &f32s(&[3, 5])), &["linear", "rows of 5 elements", "[2, 4]"]);
    fails(ours::linear(&x, &f32s(&[4])), &["linear", "[n, k]", "[4]"]);
    fails(ours::linear_swiglu(&x, &f32s(&[3, 4])), &["linear_swiglu", "even number of rows", "[3, 4]"]);
    fails(ours::matmul(&x, &f32s(&[3, 4])), &["matmul", "[2, 4]", "[3, 4]"]);
    fails(ours::embedding(&zeros(&[2], DType::U32), &f32s(&[4]), DType::F32), &["embedding", "[vocabulary, d]", "[4]"]);
    fails(ours::cross_entropy(&f32s(&[2, 3, 4]), &zeros(&[6], DType::U32)), &["cross_entropy", "[2, 3, 4]", "flatten"]);
    fails(ours::cross_entropy(&x, &zeros(&[3], DType::U32)), &["targets", "[2]", "[3]"]);
    fails(ours::linear_cross_entropy(&x, &f32s(&[7, 5]), &zeros(&[2], DType::U32)), &["[vocabulary, 4]", "[7, 5]"]);
    fails(ours::linear_cross_entropy(&x, &f32s(&[7, 4]), &zeros(&[3], DType::U32)), &["targets", "[2]", "[3]"]);
}

#[test]
fn wrong_attention_and_rope() {
    let q = f32s(&[1, 4, 3, 8]);
    let attention_of =
        |k: &[usize], v: &[usize]| ours::flash_attention(&q, &f32s(k), &f32s(v), &AttentionOptions::new(true));
    fails(
        ours::flash_attention(&f32s(&[3, 8]), &q, &q, &AttentionOptions::new(true)),
        &["flash_attention", "as q", "[3, 8]"],
    );
    fails(attention_of(&[1, 3, 3, 8], &[1, 3, 3, 8]), &["divides", "3 heads"]);
    fails(attention_of(&[2, 4, 3, 8], &[2, 4, 3, 8]), &["[1, 4, 3, 8]", "[2, 4, 3, 8]"]);
    fails(attention_of(&[1, 4, 3, 8], &[1, 4, 5, 8]), &["[1, 4, 3, 8]", "[1, 4, 5, 8]"]);
    fails(attention_of(&[1, 4, 3, 16], &[1, 4, 3, 16]), &["[1, 4, 3, 8]", "[1, 4, 3, 16]"]);
    let wide = f32s(&[1, 1, 2, 300]);
    for options in [AttentionOptions::new(false), AttentionOptions::new(true).with_window(3)] {
        fails(ours::flash_attention(&q, &q, &q, &options.with_prefix(2)), &["prefix", "without a window", "Some(2)"]);
    }
    fails(ours::flash_attention(&wide, &wide, &wide, &AttentionOptions::new(false)), &["256", "300"]);
    let q = f32s(&[1, 1, 2, 8]);
    for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
        fails(
            ours::flash_attention(&q, &q, &q, &AttentionOptions::new(false).with_scale(scale)),
            &["scale", "positive"],
        );
    }
    let rope = Rope::new(8, 1e4, 16, &Device::Cpu).unwrap();
    fails(ours::rope(&f32s(&[1, 2, 17, 8]), &rope, 0), &["0..17", "16"]);
    fails(ours::rope(&f32s(&[1, 2, 1, 8]), &rope, usize::MAX), &["16"]);
    fails(ours::rope(&f32s(&[1, 2, 4, 6]), &rope, 0), &["8 elements", "6"]);
    fails(ours::rope(&f32s(&[2, 4, 8]), &rope, 0), &["rope", "[batch, heads, length, d]", "[2, 4, 8]"]);
    fails(Rope::new(5, 1e4, 16, &Device::Cpu), &["even", "5"]);
    for base in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        fails(Rope::new(8, base, 16, &Device::Cpu), &["rope", "base", "positive", &base.to_string()]);
    }
    fails(Rope::from_frequencies(&[f64::NAN], 16, &Device::Cpu), &["frequencies", "NaN"]);
    fails(Rope::from_frequencies(&[1.0, 1e308], 16, &Device::Cpu), &["frequencies", "16"]);
    let variables = VarMap::new();
    let config =
        AttentionConfig { d_model: 8, heads: 4, heads_kv: 3, head_dim: 2, options: AttentionOptions::new(true) };
    let vb = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    fails(attention(config.clone(), None, vb()), &["heads_kv", "divides", "found 3"]);
    let module = attention(AttentionConfig { heads_kv: 2, ..config }, None, vb()).unwrap();
    fails(module.forward(&f32s(&[2, 8])), &["attention", "[batch, length, 8]", "[2, 8]"]);
    fails(module.forward(&f32s(&[1, 2, 9])), &["attention", "8 elements", "9"]);
}

#[test]
fn wrong_numbers() {
    let (x, w) = (f32s(&[2, 4]), f32s(&[4]));
    for eps in [-1.0, f64::NAN] {
        fails(ours::rms_norm(&x, &w, eps), &["rms_norm", "eps"]);
        fails(ours::layer_norm(&x, &w, &w, eps), &["layer_norm", "eps"]);
    }
    let ids = Tensor::new(&[1_u32, 9], &Device::Cpu).unwrap();
    fails(ours::embedding(&ids, &x, DType::F32), &["9"]);
}

/// Empty tensors have results and gradients without elements, or a message; nothing panics.
#[test]
fn zero_sizes() {
    let empty = |shape: &[usize]| Var::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let (x, w) = (empty(&[0, 4]), empty(&[4]));
    let check = |name: &str, y: Result<Tensor>, shape: &[usize]| {
        let y = y.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(y.dims(), shape, "{name}");
        y.sum_all().unwrap().backward().unwrap_or_else(|error| panic!("{name}: {error}"));
    };
    check("rms_norm", ours::rms_norm(&x, &w, 1e-5), &[0, 4]);
    check("layer_norm", ours::layer_norm(&x, &w, &w, 1e-5), &[0, 4]);
    check("silu", ours::silu(&x), &[0, 4]);
    check("gelu", ours::gelu(&x), &[0, 4]);
    check("gelu_erf", ours::gelu_erf(&x), &[0, 4]);
    check("bias", ours::linear_with(&x, &empty(&[3, 4]), &Epilogue::default().with_bias(&empty(&[3]))), &[0, 3]);
    check("swiglu", ours::swiglu(&x), &[0, 2]);
    check("softmax", ours::softmax(&x), &[0, 4]);
    check("cast", ours::cast(&x, DType::BF16), &[0, 4]);
    check("linear", ours::linear(&x, &empty(&[3, 4])), &[0, 3]);
    check("linear_swiglu", ours::linear_swiglu(&x, &empty(&[6, 4])), &[0, 3]);
    check("linear_swiglu of no columns", ours::linear_swiglu(&f32s(&[2, 4]), &empty(&[0, 4])), &[2, 0]);
    check("matmul", ours::matmul(&x, &empty(&[4, 3])), &[0, 3]);
    check("matmul of no columns", ours::matmul(&empty(&[2, 0]), &empty(&[0, 3])), &[2, 3]);
    check("rope", ours::rope(&empty(&[1, 2, 0, 4]), &Rope::new(4, 1e4, 8, &Device::Cpu).unwrap(), 0), &[1, 2, 0, 4]);
    let q = empty(&[1, 2, 0, 8]);
    check("attention", ours::flash_attention(&q, &q, &q, &AttentionOptions::new(true)), &[1, 2, 0, 8]);
    let (q, k) = (empty(&[1, 2, 3, 8]), empty(&[1, 2, 0, 8]));
    check("attention without keys", ours::flash_attention(&q, &k, &k, &AttentionOptions::new(false)), &[1, 2, 3, 8]);
    let no_ids = zeros(&[0], DType::U32);
    check("embedding", ours::embedding(&no_ids, &empty(&[5, 4]), DType::F32), &[0, 4]);
    check("cross_entropy_rows", ours::cross_entropy_rows(&x, &no_ids), &[0]);
    fails(
        ours::linear_cross_entropy(x.as_tensor(), &empty(&[7, 4]), &no_ids),
        &["linear_cross_entropy", "at least one row"],
    );
    fails(ours::cross_entropy(&f32s(&[2, 0]), &zeros(&[2], DType::U32)), &["cross_entropy", "vocabulary"]);
    fails(ours::rms_norm(&f32s(&[2, 0]), &f32s(&[0]), 1e-5), &["rms_norm", "last dimension"]);
}

/// The shape of a result would otherwise let candle's kernels read behind its memory.
#[test]
fn results_have_the_elements_of_their_shape() {
    let x = f32s(&[2, 3]);
    let memory = || OutputAlloc::<f32>::copy_of(&x).unwrap();
    let words = ["double", "[7]", "memory of 6 elements"];
    fails(record1("double", &x, memory(), 7, |_, _, _| Ok([None])), &words);
    fails(record2("double", [&x, &x], memory(), 7, |_, _, _| Ok([None, None])), &words);
    fails(record3("double", [&x, &x, &x], memory(), 7, |_, _, _| Ok([None, None, None])), &words);
    assert_eq!(record1("double", &x, memory(), (3, 2), |_, _, _| Ok([None])).unwrap().dims(), [3, 2]);
}

#[test]
fn gradients_of_rows_without_elements() {
    let x = Var::from_tensor(&f32s(&[2, 0])).unwrap();
    let gradients = ours::swiglu(&x).unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(gradients.get(&x).map(|g| g.dims().to_vec()), Some(vec![2, 0]));
}

/// Operands in the memory of the result of an in-place matmul are read as they were.
#[test]
fn a_matmul_into_one_of_its_operands() {
    let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let a = Tensor::arange(0_f32, 9.0, &Device::Cpu).unwrap().reshape((3, 3)).unwrap();
    let (a_before, b) = (a.copy().unwrap(), a.affine(0.5, 1.0).unwrap());
    matmul_into(&a, &a, &b, false).unwrap();
    assert_eq!(values(&a), values(&a_before.matmul(&b).unwrap()));
    let before = a.copy().unwrap();
    matmul_into(&a, &b, &a.t().unwrap(), true).unwrap();
    assert_eq!(values(&a), values(&(b.matmul(&before.t().unwrap()).unwrap() + before).unwrap()));
}

#[test]
fn huge_and_odd_arguments() {
    let cpu = &Device::Cpu;
    fails(Rope::new(usize::MAX - 1, 1e4, 8, cpu), &["rope", "d", "2048"]);
    fails(Rope::new(4, 1e4, usize::MAX, cpu).unwrap().with_tables(), &["rope", "max_length"]);
    fails(tilewright_candle::matmul::multiply(&f32s(&[1 << 40, 0]), &f32s(&[0, 1 << 40])), &["matmul", "too large"]);
    let mut memory = OutputAlloc::<f32>::new(cpu, 4).unwrap();
    assert!(memory.columns([usize::MAX, 2], [0..1, 1..2]).is_err());
    assert!(memory.columns([2, 2], [0..1, 1..usize::MAX]).is_err());
    fails(ours::rms_norm(&f32s(&[1, 2]), &f32s(&[2]), 1e-46), &["rms_norm", "eps", "positive"]);
    let ids = Tensor::new(&[0_u32, u32::MAX], cpu).unwrap();
    fails(ours::embedding(&ids, &f32s(&[2, 3]), DType::F32), &["embedding", "ids", "numbers below 2", "at 1"]);
    fails(
        ours::flash_attention(
            &f32s(&[1, 2, 3, 4]),
            &f32s(&[1, 2, 3, 4]),
            &f32s(&[1, 2, 3, 4]),
            &AttentionOptions::new(true).with_alibi_slopes(f32s(&[2, 1])),
        ),
        &["alibi_slopes", "[2]", "[2, 1]"],
    );
    let grad = f32s(&[2, 1]);
    fails(tilewright_candle::elementwise::swiglu_backward::<f32>(&f32s(&[2, 6]), &grad), &["swiglu", "gradient"]);
    let y = ours::linear(&f32s(&[2, 3, 0]), &f32s(&[4, 0])).unwrap();
    assert_eq!(y.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0; 24]);
}
