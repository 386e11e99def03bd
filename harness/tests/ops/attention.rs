//! Tests of the three implementations of attention.

use candle_core::{D, DType, Device, Result, Tensor};
use tilewright_harness::ops::Rope;
use tilewright_harness::ops::attention::{
    AttentionOptions, QkvLayout, Tiling, flash_attention, flash_attention_packed, naive_attention, tiled_attention,
};

use crate::check::{TYPES, assert_close, check, random};

/// Attention by its definition, with repeated key/value heads.
fn formula(x: &[Tensor], causal: bool) -> Result<Tensor> {
    let (batch, heads, n_q, d) = x[0].dims4()?;
    let (_, heads_kv, n_k, _) = x[1].dims4()?;
    let repeat = |x: &Tensor| {
        let shape = (batch, heads_kv, heads / heads_kv, n_k, d);
        x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, heads, n_k, d))
    };
    let scores = (x[0].matmul(&repeat(&x[1])?.t()?)? * (1.0 / (d as f64).sqrt()))?;
    let sees = |at: usize| !causal || at % n_k + n_q <= at / n_k + n_k;
    let mask: Vec<f64> = (0..n_q * n_k).map(|at| if sees(at) { 1.0 } else { 0.0 }).collect();
    let weights = scores.exp()?.broadcast_mul(&Tensor::from_vec(mask, (n_q, n_k), &Device::Cpu)?)?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?.matmul(&repeat(&x[2])?)
}

fn inputs(q: [usize; 4], heads_kv: usize, n_k: usize, dtype: DType) -> [Tensor; 3] {
    let k = [q[0], heads_kv, n_k, q[3]];
    [random(&q, dtype, 1), random(&k, dtype, 2), random(&k, dtype, 3)]
}

#[test]
fn flash() {
    for dtype in TYPES {
        for (q, heads_kv, n_k, causal) in
            [([2, 4, 33, 16], 4, 33, true), ([1, 4, 20, 24], 2, 70, false), ([1, 2, 65, 32], 1, 130, true)]
        {
            check(
                &format!("flash {q:?} {dtype:?}"),
                dtype,
                &inputs(q, heads_kv, n_k, dtype),
                &[],
                |x, _| flash_attention(&x[0], &x[1], &x[2], &AttentionOptions::new(causal)),
                |x, _| formula(x, causal),
            );
        }
    }
}

#[test]
fn naive_and_tiled() {
    for dtype in TYPES {
        for (q, n_k, causal) in [([2, 3, 33, 16], 33, true), ([1, 4, 20, 24], 70, false), ([1, 2, 30, 8], 50, true)] {
            let x = inputs(q, q[1], n_k, dtype);
            let naive = |x: &[Tensor]| naive_attention(&x[0], &x[1], &x[2], causal, None);
            check(&format!("naive {q:?} {dtype:?}"), dtype, &x, &[], |x, _| naive(x), |x, _| formula(x, causal));
            for tiling in [Tiling { queries: 16, keys: 8 }, Tiling { queries: 7, keys: 100 }] {
                let tiled = |x: &[Tensor]| tiled_attention(&x[0], &x[1], &x[2], causal, None, tiling);
                check(&format!("tiled {q:?} {dtype:?}"), dtype, &x, &[], |x, _| tiled(x), |x, _| formula(x, causal));
            }
        }
    }
}

/// Rows that attend to no key give zeros and get no gradient.
#[test]
fn more_queries_than_keys() {
    let x = inputs([1, 1, 9, 8], 1, 4, DType::F32).map(|x| x.to_dtype(DType::F32).unwrap());
    let x = x.map(|x| candle_core::Var::from_tensor(&x).unwrap());
    let results = [
        flash_attention(&x[0], &x[1], &x[2], &AttentionOptions::new(true)).unwrap(),
        tiled_attention(&x[0], &x[1], &x[2], true, None, Tiling { queries: 3, keys: 2 }).unwrap(),
        naive_attention(&x[0], &x[1], &x[2], true, None).unwrap(),
    ];
    let gradients = results.each_ref().map(|o| o.sqr().unwrap().sum_all().unwrap().backward().unwrap());
    for (o, grads) in results.iter().zip(&gradients) {
        for (i, x) in x.iter().enumerate() {
            assert_close(&format!("gradient {i}"), grads.get(x).unwrap(), gradients[0].get(x).unwrap(), 1e-5);
        }
        let rows: Vec<Vec<f32>> = o.squeeze(0).unwrap().squeeze(0).unwrap().to_vec2().unwrap();
        assert!(rows[4].iter().all(|x| *x == 0.0) && rows[5].iter().any(|x| *x != 0.0), "{rows:?}");
    }
}

#[test]
fn packed() {
    let heads = QkvLayout { heads: 4, heads_kv: 2, d: 8 };
    let (batch, n) = (2, 19);
    let rope = Rope::new(heads.d, 100.0, 32, &Device::Cpu).unwrap().with_tables().unwrap();
    for dtype in TYPES {
        let qkv = random(&[batch, n, heads.columns()], dtype, 1);
        check(
            &format!("packed {dtype:?}"),
            dtype,
            &[qkv],
            &[],
            |x, _| flash_attention_packed(&x[0], heads, &rope),
            |x, _| {
                let part = |first: usize, count: usize| {
                    x[0].narrow(2, first * heads.d, count * heads.d)?.reshape((batch, n, count, heads.d))
                };
                let q = rope.apply_unfused(&part(0, heads.heads)?, 0)?.transpose(1, 2)?;
                let k = rope.apply_unfused(&part(heads.heads, heads.heads_kv)?, 0)?.transpose(1, 2)?;
                let v = part(heads.heads + heads.heads_kv, heads.heads_kv)?.transpose(1, 2)?;
                let o = formula(&[q.contiguous()?, k.contiguous()?, v.contiguous()?], true)?;
                o.transpose(1, 2)?.reshape((batch, n, heads.heads * heads.d))
            },
        );
    }
    let wrong = Tensor::zeros((1, 2, 60), DType::F32, &Device::Cpu).unwrap();
    let message = flash_attention_packed(&wrong, heads, &rope).unwrap_err().to_string();
    assert!(message.contains("64") && message.contains("60"), "{message}");
}
