//! Attention with modifiers of one's own: the mask of a model that reads a few tokens ahead, as streaming speech
//! recognition does, and a learned bias per distance. The kernels of the library call them while they are traced,
//! forward and backward.

use tilewright::bench::do_bench;
use tilewright::kernels::attention::modifiers::{MaskArgs, MaskMod, Modified, Ranges, ScoreArgs, ScoreFn, ScoreMod};
use tilewright::kernels::attention::{self, Mask, Options, Saved, Score, Tensor};
use tilewright::prelude::*;

// ANCHOR: modifiers
/// Row i sees the keys j ≤ i + `number`, for as many keys as rows.
static LOOKAHEAD: MaskMod = MaskMod { name: "lookahead", keys: lookahead_keys, rows: lookahead_rows };

/// The range of keys that each row sees.
#[device_fn]
fn lookahead_keys(rows: Tile<i32>, args: MaskArgs) -> Ranges {
    (full_like(rows, 0), rows + (args.number + 1))
}

/// The range of rows that see each key.
#[device_fn]
fn lookahead_rows(keys: Tile<i32>, args: MaskArgs) -> Ranges {
    (keys - args.number, full_like(keys, args.site.n_q))
}

/// Adds `data[min(|i − j|, BIASES − 1)]` to the score of row i and key j.
static DISTANCE_BIAS: ScoreMod = ScoreMod { name: "distance_bias", has_derivative: false, bind: distance_bias };

const BIASES: usize = 16;

fn distance_bias(args: ScoreArgs) -> ScoreFn {
    Box::new(move |scores, rows, keys| Modified {
        scores: add_bias(scores, rows, keys, args.data),
        // The bias does not depend on the score.
        derivative: None,
    })
}

#[device_fn]
fn add_bias(scores: Tile<f32>, rows: Tile<i32>, keys: Tile<i32>, biases: Ptr<f32>) -> Tile<f32> {
    let distance = minimum((rows - keys).abs(), BIASES - 1);
    // The mask is always true; it proves that the access is in bounds.
    scores + load(biases + distance, mask = distance >= 0 && distance < BIASES, other = 0.0)
}
// ANCHOR_END: modifiers

/// O, dQ, dK and dV by their definition, for one head and dO = 1.
fn expected(q: &[f32], k: &[f32], v: &[f32], biases: &[f32], n: usize, d: usize, ahead: usize) -> [Vec<f64>; 4] {
    let row = |x: &[f32], i: usize| x[i * d..(i + 1) * d].iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let scale = (d as f64).powf(-0.5);
    let mut all: [Vec<f64>; 4] = std::array::from_fn(|_| vec![0.0; n * d]);
    for i in 0..n {
        let keys = 0..(i + 1 + ahead).min(n);
        let score = |j: usize| scale * dot(&row(q, i), &row(k, j)) + f64::from(biases[i.abs_diff(j).min(BIASES - 1)]);
        let weights: Vec<f64> = keys.clone().map(|j| score(j).exp()).collect();
        let total: f64 = weights.iter().sum();
        let d_weights: Vec<f64> = keys.clone().map(|j| row(v, j).iter().sum()).collect();
        let mean = dot(&weights, &d_weights) / total;
        for (j, weight) in keys.zip(weights) {
            let (p, q_row, k_row, v_row) = (weight / total, row(q, i), row(k, j), row(v, j));
            let ds = scale * p * (d_weights[j] - mean);
            for x in 0..d {
                all[0][i * d + x] += p * v_row[x];
                all[1][i * d + x] += ds * k_row[x];
                all[2][j * d + x] += ds * q_row[x];
                all[3][j * d + x] += p;
            }
        }
    }
    all
}

/// Runs forward and backward, and compares with the definition.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (n, d, ahead) = (200, 32, 50);
    let wave = |seed: f32| (0..n * d).map(|i| (i as f32 * seed).sin()).collect::<Vec<f32>>();
    let host = [wave(0.7), wave(0.3), wave(1.1)];
    let biases: Vec<f32> = (0..BIASES).map(|i| 1.0 - i as f32 * 0.2).collect();
    let want = expected(&host[0], &host[1], &host[2], &biases, n, d, ahead);

    let [q, k, v] = host.each_ref().map(|x| Buffer::from_slice(device, x));
    let (q, k, v, biases) = (q?, k?, v?, Buffer::from_slice(device, &biases)?);
    let shape = [1, 1, n, d];
    let tensor = |x| Tensor::dense(x, shape);
    // `causal` is what a mask makes of it (`args.site.causal`): this one does not ask.
    let options = Options {
        mask: Mask { function: &LOOKAHEAD, number: ahead as i32, data: None },
        score: Score { function: &DISTANCE_BIAS, number: 0.0, data: Some(biases.view()) },
        ..Options::default()
    };
    let (q, k, v) = (tensor(q.view())?, tensor(k.view())?, tensor(v.view())?);
    let (o, lse) = attention::forward(device, q, k, v, &options)?;
    let ones = Buffer::from_slice(device, &vec![1.0; n * d])?;
    let saved = Saved { q, k, v, o: tensor(o.view())?, lse: lse.view(), d_o: tensor(ones.view())? };
    let gradients = attention::backward(device, saved, &options)?;
    let found = [&o, &gradients.dq, &gradients.dk, &gradients.dv];
    let mut largest = 0.0_f64;
    for ((name, found), want) in ["o", "dq", "dk", "dv"].into_iter().zip(found).zip(&want) {
        let difference = found.to_vec()?.iter().zip(want).map(|(x, y)| (f64::from(*x) - y).abs()).fold(0.0, f64::max);
        let size = want.iter().fold(1e-3_f64, |size, x| size.max(x.abs()));
        if difference > 1e-4 * size {
            return Err(format!("{name} differs from its definition by {difference:.1e}, of {size:.1e}").into());
        }
        largest = largest.max(difference / size);
    }
    let time = do_bench(device, 10.0, 50.0, || attention::forward(device, q, k, v, &options).map(drop))?;
    let what = format!("{n} × {n} × {d}, {ahead} ahead");
    println!("attention with modifiers {what:<22} error {largest:<7.1e} {:9.3} ms {:17} {device}", time.median, "");
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
