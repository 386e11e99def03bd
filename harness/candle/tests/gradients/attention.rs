use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::{VarBuilder, VarMap};
use tilewright_candle::nn::{AttentionConfig, RotaryEmbedding, attention};
use tilewright_candle::{self as ours, AttentionOptions, KeyCache, PackedSequences, Rope};

use crate::check::{STORED, TYPES, assert_close, check, check_stored, flat, random, tolerance};

/// softmax(scale · Q Kᵀ) V by its definition, for keys and values of fewer heads.
fn formula(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool, scale: f64) -> Result<Tensor> {
    let sink = Tensor::full(f64::NEG_INFINITY, q.dim(1)?, q.device())?;
    formula_with_sinks(q, k, v, &sink, causal, scale)
}

/// [`formula`], where each row of a head has the score of its sink, with a value of 0.
fn formula_with_sinks(q: &Tensor, k: &Tensor, v: &Tensor, sinks: &Tensor, causal: bool, scale: f64) -> Result<Tensor> {
    let (batch, heads, n_q, _) = q.dims4()?;
    let n_k = k.dim(2)?;
    let scores = (q.contiguous()?.matmul(&repeat_heads(k, heads)?.t()?)? * scale)?;
    let scores = match causal {
        false => scores,
        true => {
            let mask: Vec<f64> =
                (0..n_q * n_k).map(|at| if at % n_k + n_q <= at / n_k + n_k { 0.0 } else { -1e9 }).collect();
            scores.broadcast_add(&Tensor::from_vec(mask, (n_q, n_k), &Device::Cpu)?)?
        }
    };
    let sinks = sinks.reshape((1, heads, 1, 1))?.expand((batch, heads, n_q, 1))?;
    let weights = candle_nn::ops::softmax(&Tensor::cat(&[&scores, &sinks], 3)?, D::Minus1)?;
    weights.narrow(3, 0, n_k)?.contiguous()?.matmul(&repeat_heads(v, heads)?)
}

/// Keys or values of all query heads.
fn repeat_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, heads_kv, n_k, d) = x.dims4()?;
    let x = x.unsqueeze(2)?.expand((batch, heads_kv, heads / heads_kv, n_k, d))?;
    x.contiguous()?.reshape((batch, heads, n_k, d))
}

/// (batch, heads, heads_kv, n_q, n_k, d)
type Shape = (usize, usize, usize, usize, usize, usize);

fn check_attention(dtype: DType, shape: Shape, causal: bool, scale: Option<f64>) {
    let (batch, heads, heads_kv, n_q, n_k, d) = shape;
    let inputs = [
        random(&[batch, heads, n_q, d], dtype, 1),
        random(&[batch, heads_kv, n_k, d], dtype, 2),
        random(&[batch, heads_kv, n_k, d], dtype, 3),
    ];
    let factor = scale.unwrap_or(1.0 / (d as f64).sqrt());
    let options = scale.into_iter().fold(AttentionOptions::new(causal), AttentionOptions::with_scale);
    check(
        &format!("attention {shape:?} causal {causal} scale {scale:?}"),
        dtype,
        &inputs,
        |x| ours::flash_attention(&x[0], &x[1], &x[2], &options),
        |x| formula(&x[0], &x[1], &x[2], causal, factor),
    );
}

/// Grouped queries, odd lengths, more keys than queries, one query, head dimensions of no power of two.
#[test]
fn attention_of_any_shape() {
    for shape in
        [(2, 4, 4, 17, 17, 16), (1, 6, 2, 9, 33, 8), (1, 2, 1, 1, 40, 32), (1, 1, 1, 65, 70, 20), (2, 3, 3, 5, 5, 1)]
    {
        check_attention(DType::F32, shape, false, None);
        check_attention(DType::F32, shape, true, Some(0.3));
    }
}

/// Values of other head dimensions, and sinks, which get a gradient too.
#[test]
fn attention_with_sinks() {
    for (d, d_v) in [(16, 16), (24, 8), (8, 40)] {
        let inputs = [
            random(&[2, 4, 17, d], DType::F32, 1),
            random(&[2, 2, 33, d], DType::F32, 2),
            random(&[2, 2, 33, d_v], DType::F32, 3),
            random(&[4], DType::F32, 4),
        ];
        for causal in [false, true] {
            check_stored(
                &format!("attention with sinks, d {d} and {d_v}, causal {causal}"),
                if causal { &STORED[..] } else { &STORED[..1] },
                tolerance(DType::F32),
                DType::F32,
                &inputs,
                |x| {
                    let options = AttentionOptions::new(causal).with_scale(0.5).with_sinks(x[3].clone());
                    ours::flash_attention(&x[0], &x[1], &x[2], &options)
                },
                |x| formula_with_sinks(&x[0], &x[1], &x[2], &x[3], causal, 0.5),
            );
        }
    }
}

/// A relative bias, which gets a gradient too, alone and beside a window and sinks.
#[test]
fn attention_with_a_relative_bias() {
    let (heads, n_q, n_k) = (4, 17, 33);
    let inputs = [
        random(&[2, heads, n_q, 8], DType::F32, 1),
        random(&[2, 2, n_k, 8], DType::F32, 2),
        random(&[2, 2, n_k, 8], DType::F32, 3),
        random(&[heads, n_q + n_k - 1], DType::F32, 4),
        random(&[heads], DType::F32, 5),
    ];
    for (causal, window, with_sinks) in [(false, None, true), (true, None, false), (true, Some(9), false)] {
        let distance = |i: usize, j: usize| (i + n_k - n_q) as i64 - j as i64;
        let pairs = || (0..n_q).flat_map(|i| (0..n_k).map(move |j| (i, j)));
        let elements: Vec<u32> = pairs().map(|(i, j)| (i + n_k - 1 - j) as u32).collect();
        let elements = Tensor::new(elements, &Device::Cpu).unwrap();
        let is_hidden = |t: i64| causal && t < 0 || window.is_some_and(|w: usize| t.unsigned_abs() as usize > w);
        let hidden = pairs().map(|(i, j)| if is_hidden(distance(i, j)) { -1e9 } else { 0.0 }).collect::<Vec<f64>>();
        let hidden = Tensor::from_vec(hidden, (n_q, n_k), &Device::Cpu).unwrap();
        let formula = |x: &[Tensor]| -> Result<Tensor> {
            let (batch, [k, v]) = (2, [&x[1], &x[2]].map(|x| repeat_heads(x, heads)));
            let bias = x[3].index_select(&elements, 1)?.reshape((heads, n_q, n_k))?;
            let scores = (x[0].contiguous()?.matmul(&k?.t()?)? * 0.5)?.broadcast_add(&bias)?.broadcast_add(&hidden)?;
            // Without a sink its probability is 0.
            let none = Tensor::full(-1e9_f64, heads, &Device::Cpu)?;
            let sinks = x.get(4).unwrap_or(&none).reshape((1, heads, 1, 1))?.expand((batch, heads, n_q, 1))?;
            let weights = candle_nn::ops::softmax(&Tensor::cat(&[&scores, &sinks], 3)?, D::Minus1)?;
            weights.narrow(3, 0, n_k)?.contiguous()?.matmul(&v?)
        };
        check_stored(
            &format!("attention with a relative bias, causal {causal}, window {window:?}"),
            if window.is_none() { &STORED[2..] } else { &STORED[..1] },
            tolerance(DType::F32),
            DType::F32,
            &inputs[..if with_sinks { 5 } else { 4 }],
            |x| {
                let mut options = AttentionOptions::new(causal).with_scale(0.5).with_relative_bias(x[3].clone());
                options.window = window;
                options.sinks = x.get(4).cloned();
                ours::flash_attention(&x[0], &x[1], &x[2], &options)
            },
            formula,
        );
    }
}

#[test]
fn attention_in_short_types() {
    for dtype in [DType::BF16, DType::F16] {
        check_attention(dtype, (2, 4, 2, 17, 33, 16), true, None);
    }
}

/// One tensor as queries, keys and values.
#[test]
fn attention_of_one_tensor() {
    for dtype in TYPES {
        let x = [random(&[1, 2, 11, 16], dtype, 1)];
        let op = |x: &[Tensor]| ours::flash_attention(&x[0], &x[0], &x[0], &AttentionOptions::new(true));
        check("attention of one tensor", dtype, &x, op, |x| formula(&x[0], &x[0], &x[0], true, 0.25));
    }
}

/// The module: against its formula, and token by token with a cache against all tokens at once.
#[test]
fn attention_module() {
    let cpu = &Device::Cpu;
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, cpu);
    let config =
        AttentionConfig { d_model: 24, heads: 4, heads_kv: 2, head_dim: 6, options: AttentionOptions::new(true) };
    let rope = Rope::new(6, 10_000.0, 32, cpu).unwrap().with_halves();
    let module = attention(config, Some(RotaryEmbedding::new(rope.clone())), vb).unwrap();
    let names = ["k_proj.weight", "o_proj.weight", "q_proj.weight", "v_proj.weight"];
    let mut found: Vec<String> = variables.data().lock().unwrap().keys().cloned().collect();
    found.sort();
    assert_eq!(found, names);

    let x = random(&[2, 7, 24], DType::F32, 1);
    let y = module.forward(&x.to_dtype(DType::F32).unwrap()).unwrap();
    let weight = |name: &str| variables.data().lock().unwrap()[name].to_dtype(DType::F64).unwrap();
    let project = |name: &str, heads: usize| {
        let y = x.broadcast_matmul(&weight(name).t().unwrap()).unwrap();
        y.reshape((2, 7, heads, 6)).unwrap().transpose(1, 2).unwrap().contiguous().unwrap()
    };
    let angles: Vec<f64> =
        (0..7 * 3).map(|at| (at / 3) as f64 * 10_000f64.powf(-2.0 * (at % 3) as f64 / 6.0)).collect();
    let angles = Tensor::from_vec(angles, (7, 3), cpu).unwrap();
    let rotate =
        |x: Tensor| candle_nn::rotary_emb::rope_slow(&x, &angles.cos().unwrap(), &angles.sin().unwrap()).unwrap();
    let (q, k, v) =
        (rotate(project("q_proj.weight", 4)), rotate(project("k_proj.weight", 2)), project("v_proj.weight", 2));
    let o = formula(&q, &k, &v, true, 6f64.powf(-0.5)).unwrap();
    let expected = o.transpose(1, 2).unwrap().reshape((2, 7, 24)).unwrap();
    let expected = expected.broadcast_matmul(&weight("o_proj.weight").t().unwrap()).unwrap();
    assert_close("attention module", &y, &expected, tolerance(DType::F32));

    let mut cache = KvCache::new(2, 32);
    let x = x.to_dtype(DType::F32).unwrap();
    let steps: Vec<Tensor> =
        (0..7).map(|at| module.forward_cached(&x.narrow(1, at, 1).unwrap(), Some(&mut cache)).unwrap()).collect();
    assert_close("with a cache", &Tensor::cat(&steps, 1).unwrap(), &y, 1e-5);
}

/// What [`modified_formula`] adds to [`formula`].
#[derive(Clone, Copy, Default)]
struct Modifiers<'a> {
    window: Option<usize>,
    prefix: Option<usize>,
    softcap: Option<f64>,
    alibi: bool,
    /// (rows, keys) of packed sequences.
    packed: Option<[&'a [usize]; 2]>,
}

/// Attention with modifiers by its definition, in candle's ops.
fn modified_formula(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool, modifiers: Modifiers) -> Result<Tensor> {
    let (_, heads, n_q, d) = q.dims4()?;
    let n_k = k.dim(2)?;
    let mut scores = (q.contiguous()?.matmul(&k.t()?)? * (d as f64).powf(-0.5))?;
    if let Some(cap) = modifiers.softcap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    // The first position of each sequence, and the end of the last, for rows and keys.
    let starts = |side: usize, n: usize| {
        let lengths = modifiers.packed.map_or(vec![n], |packed| packed[side].to_vec());
        lengths.iter().fold(vec![0], |starts, length| [&starts[..], &[starts[starts.len() - 1] + length]].concat())
    };
    let (rows, keys) = (starts(0, n_q), starts(1, n_k));
    let mut bias = Vec::new();
    for head in 0..heads {
        for (i, j) in (0..n_q).flat_map(|i| (0..n_k).map(move |j| (i, j))) {
            let s = (0..rows.len() - 1).find(|&s| (rows[s]..rows[s + 1]).contains(&i)).unwrap();
            let distance = (i + keys[s + 1]) as i64 - (j + rows[s + 1]) as i64;
            let far = modifiers.window.is_some_and(|window| distance.unsigned_abs() as usize > window);
            let hidden = !(keys[s]..keys[s + 1]).contains(&j)
                || far
                || causal && distance < 0 && j >= modifiers.prefix.unwrap_or(0);
            let slope = if modifiers.alibi { 0.5_f64.powi(head as i32 + 1) } else { 0.0 };
            bias.push(if hidden { -1e9 } else { -slope * ((i + n_k) as f64 - (j + n_q) as f64).abs() });
        }
    }
    let scores = scores.broadcast_add(&Tensor::from_vec(bias, (heads, n_q, n_k), &Device::Cpu)?)?;
    candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(v)
}

/// Sliding windows, prefixes, softcap, ALiBi and packed sequences, against their definition; every row sees some key.
#[test]
fn modifiers() {
    let none = Modifiers::default();
    let lengths: &[usize] = &[5, 1, 0, 20, 7];
    let more_keys: &[usize] = &[9, 1, 3, 20, 20];
    let cases = [
        Modifiers { window: Some(6), ..none },
        Modifiers { softcap: Some(1.5), ..none },
        Modifiers { alibi: true, ..none },
        Modifiers { packed: Some([lengths; 2]), ..none },
        Modifiers { packed: Some([lengths, more_keys]), window: Some(3), ..none },
        Modifiers { window: Some(9), softcap: Some(2.0), alibi: true, ..none },
        Modifiers { prefix: Some(20), ..none },
    ];
    let (n_q, heads) = (33, 2);
    for (i, modifiers) in cases.into_iter().enumerate() {
        let n_k = modifiers.packed.map_or(n_q + 4, |packed| packed[1].iter().sum());
        // Compiling takes most of the time: not every case in every form.
        let forms = [(true, DType::F32), (false, DType::F32), (true, DType::BF16)];
        for (causal, dtype) in forms.into_iter().take(if i % 3 == 0 && modifiers.prefix.is_none() { 3 } else { 1 }) {
            let mut options = AttentionOptions::new(causal);
            (options.softcap, options.window) = (modifiers.softcap, modifiers.window);
            options.prefix = modifiers.prefix;
            if modifiers.alibi {
                options = options.with_alibi_slopes(Tensor::new(&[0.5_f32, 0.25], &Device::Cpu).unwrap());
            }
            if let Some([rows, keys]) = modifiers.packed {
                let packed = PackedSequences::with_keys(rows, keys, causal, modifiers.window, &Device::Cpu).unwrap();
                options.window = None;
                options = options.with_packed(packed);
            }
            let inputs = [(n_q, 1), (n_k, 2), (n_k, 3)].map(|(n, seed)| random(&[1, heads, n, 16], dtype, seed));
            // Tensors are stored in every way in `attention_of_any_shape`.
            check_stored(
                &format!("attention with modifiers {i}, causal {causal}"),
                &[STORED[i % STORED.len()]],
                tolerance(dtype),
                dtype,
                &inputs,
                |x| ours::flash_attention(&x[0], &x[1], &x[2], &options),
                |x| modified_formula(&x[0], &x[1], &x[2], causal, modifiers),
            );
        }
    }
}

/// Sequences of different lengths in a cache, in pages and not, against attention of each one's keys.
#[test]
fn attention_with_a_cache() {
    let cpu = &Device::Cpu;
    let (lengths, page, d) = ([5_i32, 0, 12], 4, 16);
    let f32_of = |shape: &[usize], seed| random(shape, DType::F32, seed).to_dtype(DType::F32).unwrap();
    let q = f32_of(&[3, 4, 2, d], 1);
    // Sequence b has the pages b, b + 3, b + 6.
    let [k, v] = [2, 3].map(|seed| f32_of(&[9, 2, page, d], seed));
    let table = Tensor::new(&[[0_i32, 3, 6], [1, 4, 7], [2, 5, 8]], cpu).unwrap();
    let dense = |x: &Tensor| {
        let x = x.reshape((3, 3, 2, page, d)).unwrap().permute((1, 2, 0, 3, 4)).unwrap();
        x.contiguous().unwrap().reshape((3, 2, 3 * page, d)).unwrap()
    };
    let counts = Tensor::new(&lengths, cpu).unwrap();
    for causal in [false, true] {
        let options = AttentionOptions::new(causal);
        let paged = options.clone().with_cache(KeyCache::paged(counts.clone(), table.clone()));
        let paged = ours::flash_attention(&q, &k, &v, &paged).unwrap();
        let rows = options.clone().with_cache(KeyCache::new(counts.clone()));
        let rows = ours::flash_attention(&q, &dense(&k), &dense(&v), &rows).unwrap();
        for (entry, length) in lengths.into_iter().enumerate() {
            let own = |x: &Tensor| dense(x).narrow(0, entry, 1).unwrap().narrow(2, 0, length as usize).unwrap();
            let q = q.narrow(0, entry, 1).unwrap();
            let expected = ours::flash_attention(&q, &own(&k), &own(&v), &options).unwrap();
            for found in [&paged, &rows] {
                assert_close(
                    "a cache",
                    &found.narrow(0, entry, 1).unwrap(),
                    &expected.to_dtype(DType::F64).unwrap(),
                    1e-5,
                );
            }
        }
    }
    // The same queries as rows of one batch entry, and one row of no entry.
    let rows = q.transpose(0, 1).unwrap().reshape((1, 4, 6, d)).unwrap().pad_with_zeros(2, 0, 1).unwrap();
    let starts = Tensor::new(&[0_i32, 2, 4, 6], cpu).unwrap();
    let cache = KeyCache::paged(counts.clone(), table.clone());
    let options = AttentionOptions::new(true);
    let of = |q: &Tensor, cache| ours::flash_attention(q, &k, &v, &options.clone().with_cache(cache)).unwrap();
    let found = of(&rows, cache.clone().with_row_starts(starts));
    let expected =
        of(&q, cache).transpose(0, 1).unwrap().reshape((1, 4, 6, d)).unwrap().pad_with_zeros(2, 0, 1).unwrap();
    assert_close("rows of all entries", &found, &expected.to_dtype(DType::F64).unwrap(), 1e-5);
    let variable = candle_core::Var::from_tensor(&q).unwrap();
    let options = AttentionOptions::new(true).with_cache(KeyCache::new(counts.to_dtype(DType::I64).unwrap()));
    let error = |q: &Tensor, options: &AttentionOptions| {
        ours::flash_attention(q, &dense(&k), &dense(&v), options).unwrap_err().to_string()
    };
    assert!(error(&q, &options).contains("lengths"), "{}", error(&q, &options));
    let options = AttentionOptions::new(true).with_cache(KeyCache::new(counts));
    assert!(error(&variable, &options).contains("no_grad"), "{}", error(&variable, &options));
    let sinks = candle_core::Var::zeros(q.dim(1).unwrap(), DType::F32, cpu).unwrap();
    let options = options.with_sinks(sinks.as_tensor().clone());
    assert!(error(&q, &options).contains("as sinks, found a variable"), "{}", error(&q, &options));
}

/// Random finite f8e4m3, and the numbers that they are, in f64.
fn random_f8(shape: &[usize], seed: u64) -> [Tensor; 2] {
    let bytes = flat(&random(shape, DType::F64, seed)).into_iter().map(|x| ((x + 1.0) * 128.0) as u8);
    let bytes: Vec<u8> = bytes.map(|byte| if byte & 0x7f == 0x7f { byte ^ 1 } else { byte }).collect();
    let number = |byte: &u8| {
        let (sign, exponent) = (if *byte < 128 { 1.0 } else { -1.0 }, i32::from((byte >> 3) & 15));
        let fraction = f64::from(byte & 7) / 8.0;
        sign * if exponent == 0 { fraction / 64.0 } else { (1.0 + fraction) * 2f64.powi(exponent - 7) }
    };
    let numbers = Tensor::from_vec(bytes.iter().map(number).collect::<Vec<f64>>(), shape, &Device::Cpu);
    [Tensor::from_raw_buffer(&bytes, DType::F8E4M3, shape, &Device::Cpu).unwrap(), numbers.unwrap()]
}

/// Keys and values of 8 bits with scales, in pages and not, against the formula of the numbers that they are.
#[test]
fn attention_with_a_cache_of_8_bits() {
    let (cpu, lengths, d) = (&Device::Cpu, [5_usize, 12], 16);
    let counts = Tensor::new(&lengths.map(|n| n as i32), cpu).unwrap();
    let table = Tensor::new(&[[0_i32, 1, 2], [3, 4, 5]], cpu).unwrap();
    let [[k, k_numbers], [v, v_numbers]] = [2, 3].map(|seed| random_f8(&[2, 12, 2, d], seed));
    let k_descale = Tensor::new(&[[[0.02_f32], [0.01]], [[0.005], [0.03]]], cpu).unwrap();
    let v_descale = k_descale.affine(-3.0, 0.1).unwrap();
    for (dtype, is_paged) in [(DType::F32, false), (DType::BF16, true)] {
        // As in flash-attn, the heads of a key are side by side. The pages of an entry follow each other.
        let shape = if is_paged { (6, 4, 2, d) } else { (2, 12, 2, d) };
        let [k, v] = [&k, &v].map(|x| x.reshape(shape).unwrap().transpose(1, 2).unwrap());
        let cache =
            if is_paged { KeyCache::paged(counts.clone(), table.clone()) } else { KeyCache::new(counts.clone()) };
        // Scales of each entry, or those of the first one for all.
        let given = |x: &Tensor| if is_paged { x.clone() } else { x.get(0).unwrap().flatten_all().unwrap() };
        let cache = cache.with_descale(given(&k_descale), given(&v_descale));
        let q = random(&[2, 4, 2, d], dtype, 1);
        let options = AttentionOptions::new(true).with_cache(cache);
        let found = ours::flash_attention(&q.to_dtype(dtype).unwrap(), &k, &v, &options).unwrap();
        for (entry, length) in lengths.into_iter().enumerate() {
            let own = |x: &Tensor, entry| x.narrow(0, entry, 1).unwrap();
            let scaled = |numbers: &Tensor, scales: &Tensor| {
                let numbers = own(numbers, entry).narrow(1, 0, length).unwrap().transpose(1, 2).unwrap();
                let scales = own(scales, if is_paged { entry } else { 0 }).to_dtype(DType::F64).unwrap();
                numbers.broadcast_mul(&scales.unsqueeze(3).unwrap()).unwrap()
            };
            let (k, v) = (scaled(&k_numbers, &k_descale), scaled(&v_numbers, &v_descale));
            let expected = formula(&own(&q, entry), &k, &v, true, 0.25).unwrap();
            assert_close("a cache of 8 bits", &own(&found, entry), &expected, tolerance(dtype));
        }
    }
}
