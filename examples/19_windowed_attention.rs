//! Sliding-window attention with a softcap and ALiBi, forward and backward: modifiers of the library's kernels.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::kernels::attention::{self, Gradients, Mask, Options, Saved, Score, Tensor};
use tilewright::prelude::*;

// ANCHOR: kernel
/// Causal attention to at most `window` keys before each row, of scores cap · tanh(s / cap) − slope · distance.
fn options(window: usize, cap: f32, slopes: View<'_, f32>) -> Options<'_> {
    Options { mask: Mask::window(window), score: Score::new(Some(cap), Some(slopes)), ..Options::new(true) }
}
// ANCHOR_END: kernel

type Matrix = Vec<f64>;

/// O, dQ, dK and dV of one head, by their definition.
fn expected([q, k, v, g]: [&[bf16]; 4], n: usize, d: usize, window: usize, cap: f64, slope: f64) -> [Matrix; 4] {
    let scale = (d as f64).powf(-0.5);
    let dot = |a: &[bf16], b: &[bf16]| a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>();
    let row = |i: usize| i * d..(i + 1) * d;
    let mut all: [Matrix; 4] = std::array::from_fn(|_| vec![0.0; n * d]);
    for i in 0..n {
        let keys: Vec<usize> = (i.saturating_sub(window)..=i).collect();
        let capped: Vec<f64> = keys.iter().map(|j| (scale * dot(&q[row(i)], &k[row(*j)]) / cap).tanh()).collect();
        let weight = |(j, s): (&usize, &f64)| (cap * s - slope * (i - j) as f64).exp();
        let weights: Vec<f64> = keys.iter().zip(&capped).map(weight).collect();
        let total: f64 = weights.iter().sum();
        let toward: Vec<f64> = keys.iter().map(|j| dot(&g[row(i)], &v[row(*j)])).collect();
        let mean = weights.iter().zip(&toward).map(|(w, t)| w * t).sum::<f64>() / total;
        for (at, j) in keys.iter().enumerate() {
            let p = weights[at] / total;
            let ds = p * (toward[at] - mean) * (1.0 - capped[at] * capped[at]) * scale;
            for x in 0..d {
                all[0][i * d + x] += p * v[j * d + x].to_f64();
                all[1][i * d + x] += ds * k[j * d + x].to_f64();
                all[2][j * d + x] += ds * q[i * d + x].to_f64();
                all[3][j * d + x] += p * g[i * d + x].to_f64();
            }
        }
    }
    all
}

fn case(device: &Device, [batch, heads, n, d]: [usize; 4], window: usize, bench: bool) -> Outcome<[Row; 2]> {
    let (cap, size) = (20.0, batch * heads * n * d);
    let host = [0.7, 0.3, 1.1, 0.9].map(|frequency| to(&wave(size, frequency), bf16::from_f32));
    let slopes: Vec<f32> = (0..heads).map(|h| (-8.0 * (h + 1) as f32 / heads as f32).exp2()).collect();
    let place = |x: &[bf16]| Buffer::from_slice(device, x);
    let (q, k, v, d_o) = (place(&host[0])?, place(&host[1])?, place(&host[2])?, place(&host[3])?);
    let slope_buffer = Buffer::from_slice(device, &slopes)?;
    let options = options(window, cap, slope_buffer.view());
    let shape = [batch, heads, n, d];
    let (qt, kt, vt) =
        (Tensor::dense(q.view(), shape)?, Tensor::dense(k.view(), shape)?, Tensor::dense(v.view(), shape)?);
    let (o, lse) = attention::forward(device, qt, kt, vt, &options)?;
    let (saved_o, d_o) = (Tensor::dense(o.view(), shape)?, Tensor::dense(d_o.view(), shape)?);
    let saved = || Saved { q: qt, k: kt, v: vt, o: saved_o, lse: lse.view(), d_o };
    let Gradients { dq, dk, dv } = attention::backward(device, saved(), &options)?;
    let (mut forward, mut backward) = (None, None);
    if bench {
        forward = common::time(device, bench, || attention::forward(device, qt, kt, vt, &options).map(drop))?;
        backward = common::time(device, bench, || attention::backward(device, saved(), &options).map(drop))?;
    }
    let mut errors = [0.0_f64; 4];
    // Of a large problem, the first rows of the first head, which see no others. They have no complete dK and dV.
    let rows = if bench { 512 } else { n };
    let heads_compared = if bench { 1 } else { batch * heads };
    for head in 0..heads_compared {
        let at = head * n * d..head * n * d + rows * d;
        let slope = f64::from(slopes[head % heads]);
        let inputs = host.each_ref().map(|x| &x[at.clone()]);
        let want = expected(inputs, rows, d, window, f64::from(cap), slope);
        let results = [&o, &dq, &dk, &dv];
        for (i, name) in ["o", "dq", "dk", "dv"].into_iter().enumerate().take(if bench { 2 } else { 4 }) {
            let found = results[i].to_vec()?;
            errors[i] = errors[i].max(check(name, &found[at.clone()], usize::MAX, 2e-2, |x| want[i][x])?);
        }
    }
    let pairs: usize = (0..n).map(|i| i.min(window) + 1).sum();
    let flop = (4 * batch * heads * pairs * d) as f64;
    let case = || format!("{batch} × {heads} × {n} × {d}, window {window}");
    let row = |kernel, times, error, time| Row { kernel, case: case(), work: Work::Flop(flop * times), error, time };
    let worst = errors[1..].iter().fold(0.0, |worst: f64, error| worst.max(*error));
    Ok([row("windowed_attention_fwd", 1.0, errors[0], forward), row("windowed_attention_bwd", 2.5, worst, backward)])
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let rows = match bench {
        true => case(device, [2, 16, 8192, 128], 1024, true)?,
        false => case(device, [1, 2, 90, 32], 20, false)?,
    };
    Ok(rows.into())
}

fn main() -> Outcome {
    common::main(cases)
}
