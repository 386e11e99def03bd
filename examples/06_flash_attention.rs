//! FlashAttention-2: softmax(scale · Q Kᵀ) V without a materialized score matrix.
//!
//! Two versions: a minimal forward kernel below, and the kernels of the library, which add a causal mask, grouped-query
//! attention, any strides and lengths, and the backward pass.

use tilewright::bench::do_bench;
use tilewright::kernels::Tensor;
use tilewright::kernels::attention::{self, Gradients, Options, Saved};
use tilewright::prelude::*;

// ANCHOR: kernel
/// o [heads, n_q, d] of dense q [heads, n_q, d], k and v [heads, n_k, d]. `d` is a power of two.
///
/// A program keeps one tile of queries and loops over the keys (online softmax). Maximum and sum of each row of scores
/// are kept for the keys seen so far; when the maximum grows, the sums are rescaled (Dao, "FlashAttention-2", 2023,
/// Algorithm 1).
#[kernel]
pub fn attention_fwd<T: Float>(
    q: In<T>,
    k: In<T>,
    v: In<T>,
    o: Out<T>,
    n_q: i32,
    n_k: i32,
    scale: f32,
    #[constexpr] d: usize,
    #[constexpr] q_tile: usize,
    #[constexpr] k_tile: usize,
) {
    let head = program_id(1).to::<i64>();
    let first_row = program_id(0) * q_tile;
    let q_block = make_block_ptr(
        q + head * n_q * d,
        shape = [n_q, d],
        strides = [d, 1],
        offsets = [first_row, 0],
        block_shape = [q_tile, d],
        order = [1, 0],
    );
    let keys = head * n_k * d;
    let k_tensor = make_tensor_descriptor(k + keys, shape = [n_k, d], strides = [d, 1], block_shape = [k_tile, d]);
    let v_tensor = make_tensor_descriptor(v + keys, shape = [n_k, d], strides = [d, 1], block_shape = [k_tile, d]);
    let qt = load(q_block, boundary_check = [0], padding = zero);
    // 2^(x · log₂ e) is eˣ; GPUs have an instruction for 2ˣ.
    let scale2 = scale * std::f32::consts::LOG2_E;
    let mut acc = zeros::<f32>([q_tile, d]);
    let mut highest = full([q_tile], f32::NEG_INFINITY);
    let mut total = zeros::<f32>([q_tile]);
    for first in range(0, n_k, k_tile) {
        let scores = dot(qt, k_tensor.load([first, 0]).t()) * scale2;
        let inside = first + arange(0, k_tile) < n_k;
        let scores = where_(inside.expand_dims(0), scores, f32::NEG_INFINITY);
        let higher = maximum(highest, max(scores, axis = 1));
        let p = exp2(scores - higher.expand_dims(1));
        let rescale = exp2(highest - higher);
        total = total * rescale + sum(p, axis = 1);
        acc = dot(p.to::<T>(), v_tensor.load([first, 0]), acc * rescale.expand_dims(1));
        highest = higher;
    }
    let o_block = make_block_ptr(
        o + head * n_q * d,
        shape = [n_q, d],
        strides = [d, 1],
        offsets = [first_row, 0],
        block_shape = [q_tile, d],
        order = [1, 0],
    );
    store(o_block, (acc / total.expand_dims(1)).to::<T>(), boundary_check = [0]);
}
// ANCHOR_END: kernel

/// Runs the kernel above and the library's on the same tensors.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (heads, n_q, n_k, d) = (2, 100, 150, 64);
    let scale = 1.0 / (d as f32).sqrt();
    let wave = |rows: usize, f: f32| -> Vec<f16> {
        (0..heads * rows * d).map(|i| f16::from_f32((i as f32 * f).sin())).collect()
    };
    let host = [wave(n_q, 0.7), wave(n_k, 0.3), wave(n_k, 1.1), wave(n_q, 0.9)];
    // The library's reference is the definition of attention, in f64.
    let wide = host.each_ref().map(|x| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
    #[rustfmt::skip]
    let mut problem = attention::reference::Problem {
        batch: 1, heads_q: heads, heads_kv: heads, n_q, n_k, d, d_v: d, causal: false, scale: f64::from(scale),
        modifiers: Default::default(),
    };
    let (want, _) = attention::reference::forward(&problem, &wide[0], &wide[1], &wide[2]);

    let [q, k, v, d_o] = host.map(|x| Buffer::from_slice(device, &x));
    let (q, k, v, d_o) = (q?, k?, v?, d_o?);
    let mut o = Buffer::<f16>::poisoned(device, heads * n_q * d)?;
    let (queries, keys, q_tile, k_tile) = (n_q as i32, n_k as i32, 64, 64);
    let mut kernel = AttentionFwd { q: &q, k: &k, v: &v, o: &mut o, n_q: queries, n_k: keys, scale, d, q_tile, k_tile };
    kernel.launch(device, (n_q.div_ceil(q_tile), heads))?;
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, (n_q.div_ceil(q_tile), heads)))?;
    let error = check("o", &o.to_vec()?, &want)?;
    let shape = format!("{heads} × {n_q} × {n_k} × {d}");
    println!("attention_fwd     {shape:<28} error {error:<7.1e} {:9.3} ms {:17} {device}", time.median, "");

    // Tensors are views of buffers with a shape [batch, heads, rows, d] and strides.
    problem.causal = true;
    let options = Options::new(true);
    let query = Tensor::dense(q.view(), [1, heads, n_q, d])?;
    let (key, value) = (Tensor::dense(k.view(), [1, heads, n_k, d])?, Tensor::dense(v.view(), [1, heads, n_k, d])?);
    let (o, lse) = attention::forward(device, query, key, value, &options)?;
    let time = do_bench(device, 10.0, 50.0, || attention::forward(device, query, key, value, &options).map(|_| ()))?;
    let (want, _) = attention::reference::forward(&problem, &wide[0], &wide[1], &wide[2]);
    let error = check("causal o", &o.to_vec()?, &want)?;
    println!(
        "flash_attention   {:<28} error {error:<7.1e} {:9.3} ms {:17} {device}",
        "the same, causal", time.median, ""
    );

    let (o, d_o) = (Tensor::dense(o.view(), query.shape())?, Tensor::dense(d_o.view(), query.shape())?);
    let saved = Saved { q: query, k: key, v: value, o, lse: lse.view(), d_o };
    let Gradients { dq, dk, dv } = attention::backward(device, saved, &options)?;
    let time = do_bench(device, 10.0, 50.0, || attention::backward(device, saved, &options).map(|_| ()))?;
    let want = attention::reference::backward(&problem, &wide[0], &wide[1], &wide[2], &wide[3]);
    let mut error = check("dq", &dq.to_vec()?, &want.dq)?;
    error = error.max(check("dk", &dk.to_vec()?, &want.dk)?);
    error = error.max(check("dv", &dv.to_vec()?, &want.dv)?);
    println!("  its backward    {:<28} error {error:<7.1e} {:9.3} ms {:17} {device}", "", time.median, "");
    Ok(())
}

/// Fails unless all elements are correct to 5e-3, relative to values above 1; returns the largest error.
fn check(what: &str, got: &[f16], want: &[f64]) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got.to_f64() - want).abs() / want.abs().max(1.0);
        // Also true for NaN.
        if !(error <= 5e-3) {
            return Err(format!("{what}[{i}] is {got}, expected {want}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
