//! Two linear layers with GELU between them in one kernel, whose hidden activations stay in registers; and the same kernel
//! with the schedule of its loop written by hand.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::LaunchConfig;
use tilewright::prelude::*;

// ANCHOR: kernel
/// GELU(x) in the form with tanh: x · (1 + tanh u) / 2 = x · σ(2u) for u = √(2/π) · (x + 0.044715 x³).
#[device_fn]
fn gelu(x: Tile<f32>) -> Tile<f32> {
    x * sigmoid(x * (x * x * 0.07135481627 + 1.5957691216))
}

/// y = GELU(x · w1) · w2. A program has `rows_tile` rows of x and of y, and loops over the hidden units.
#[kernel(grid = cdiv(rows, rows_tile))]
pub fn fused_mlp<T: Float>(
    x: Tensor<T, (rows, d)>,
    w1: Tensor<T, (d, hidden)>,
    w2: Tensor<T, (hidden, d)>,
    y: TensorMut<T, (rows, d)>,
    #[constexpr] d: usize,
    #[constexpr] rows_tile: usize,
    #[constexpr] h_tile: usize,
) {
    let row = program_id(0) * rows_tile;
    let xt = load(x.block([row, 0], [rows_tile, d]), boundary_check = [0], padding = zero);
    let mut total = zeros::<f32>([rows_tile, d]);
    for unit in range(0, hidden, h_tile) {
        let to_hidden = load(w1.block([0, unit], [d, h_tile]), boundary_check = [1], padding = zero);
        let from_hidden = load(w2.block([unit, 0], [h_tile, d]), boundary_check = [0], padding = zero);
        let activation = gelu(dot(xt, to_hidden));
        total = dot(activation.to::<T>(), from_hidden, total);
    }
    store(y.block([row, 0], [rows_tile, d]), total.to::<T>(), boundary_check = [0]);
}
// ANCHOR_END: kernel

// ANCHOR: by_hand
/// The launch whose schedule docs/schedule.md explains, for d = 128: the text of `--emit schedule`, changed by hand.
pub fn by_hand(config: &LaunchConfig) -> LaunchConfig {
    LaunchConfig { loops: Some(include_str!("schedules/fused_mlp.tile").into()), ..config.clone() }
}
// ANCHOR_END: by_hand

/// The launch for which the schedule is written.
pub fn config() -> LaunchConfig {
    let mut config = LaunchConfig::default();
    (config.num_warps, config.num_stages) = (8, 4);
    config.schedule.warp_specialize = Some(true);
    config
}

fn case(device: &Device, [rows, d, hidden]: [usize; 3], bench: bool) -> Outcome<Vec<Row>> {
    let [x, w1, w2]: [Vec<bf16>; 3] =
        [(rows * d, 0.7), (d * hidden, 0.3), (hidden * d, 1.1)].map(|(len, f)| to(&wave(len, f), bf16::from_f32));
    let place = |x: &[bf16]| Buffer::from_slice(device, x);
    let (xd, w1d, w2d) = (place(&x)?, place(&w1)?, place(&w2)?);
    // The schedule by hand is for TMA, which older GPUs lack. On the CPU there is none.
    let has_tma = device.info().compute_capability.is_none_or(|version| version == (9, 0));
    let by_hand = has_tma.then(|| ("fused_mlp_by_hand", by_hand(&config())));
    let gelu = |v: f64| 0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh());
    let mut all = Vec::new();
    for (kernel, config) in [("fused_mlp", config())].into_iter().chain(by_hand) {
        let mut y = Buffer::<bf16>::poisoned(device, rows * d)?;
        let time = common::time(device, bench, || {
            FusedMlp {
                x: &xd.tensor([rows, d])?,
                w1: &w1d.tensor([d, hidden])?,
                w2: &w2d.tensor([hidden, d])?,
                y: &mut y.tensor_mut([rows, d])?,
                rows_tile: 128,
                h_tile: 64,
            }
            .launch_with(device, &config)
        })?;
        let want = |at: usize| {
            let (i, j) = (at / d, at % d);
            let sum = |u: usize| (0..d).map(|l| x[i * d + l].to_f64() * w1[l * hidden + u].to_f64()).sum::<f64>();
            (0..hidden).map(|u| bf16::from_f64(gelu(sum(u))).to_f64() * w2[u * d + j].to_f64()).sum()
        };
        // y and the activations have 8 bits.
        let error = check("y", &y.to_vec()?, if bench { 100 } else { 2000 }, 2e-2, want)?;
        let work = Work::Flop((4 * rows * d * hidden) as f64);
        all.push(Row { kernel, case: format!("{rows} × {d} × {hidden}"), work, error, time });
    }
    Ok(all)
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    case(device, if bench { [131_072, 128, 512] } else { [150, 128, 96] }, bench)
}

fn main() -> Outcome {
    common::main(cases)
}
