//! The selective scan of Mamba (Gu and Dao, 2023): a linear recurrence whose coefficients depend on the input.
//!
//! The recurrence is sequential, but pairs (a, x) that stand for h ↦ a·h + x combine associatively: within a tile of
//! time steps a parallel scan composes them, and a loop carries the state from tile to tile.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, wave};
use tilewright::prelude::*;

#[autotune(
    configs = [
        Config(tile = [128, 256, 512], num_warps = [4, 8]),
        Config(tile = [64, 128], num_warps = [1, 2]),
    ],
    key = [states, len],
)]
// ANCHOR: kernel
/// With Δ = softplus(delta): hₜ = exp(Δₜ·a) hₜ₋₁ + Δₜ·bₜ·uₜ and yₜ = Σₛ cₜ·hₜ + skip·uₜ, for each channel, which has
/// `states` states.
#[kernel(grid = (channels, batch))]
pub fn selective_scan(
    u: Tensor<f32, (batch, channels, len)>,
    delta: Tensor<f32, (batch, channels, len)>,
    a: Tensor<f32, (channels, states)>,
    b: Tensor<f32, (batch, states, len)>,
    c: Tensor<f32, (batch, states, len)>,
    skip: Tensor<f32, (channels,)>,
    y: TensorMut<f32, (batch, channels, len)>,
    #[constexpr] states: usize,
    #[constexpr] tile: usize,
) {
    let (channel, entry) = (program_id(0), program_id(1));
    let rate = load(a.index([channel]).block([0], [states])).expand_dims(1) * 1.4426950408889634;
    let through = load(skip.ptr() + channel);
    let last = full::<i32>([states, 1], tile - 1);
    let mut state = zeros::<f32>([states, 1]);
    for t in range(0, len, tile) {
        let ut = load(u.index([entry, channel]).block([t], [tile]), boundary_check = [0]);
        let dt = load(delta.index([entry, channel]).block([t], [tile]), boundary_check = [0]);
        let step = where_(dt > 20.0, dt, log(exp(dt) + 1.0)).expand_dims(0);
        let bt = load(b.index([entry]).block([0, t], [states, tile]), boundary_check = [1]);
        let ct = load(c.index([entry]).block([0, t], [states, tile]), boundary_check = [1]);
        let steps = (exp2(step * rate), step * ut.expand_dims(0) * bt);
        let (decay, added) = associative_scan(steps, axis = 1, |(a, x), (b, y)| (a * b, x * b + y));
        let h = added + decay * state;
        store(y.index([entry, channel]).block([t], [tile]), sum(h * ct, axis = 0) + ut * through, boundary_check = [0]);
        state = gather(h, last, axis = 1);
    }
}
// ANCHOR_END: kernel

fn case(device: &Device, [batch, channels, states, len]: [usize; 4], bench: bool) -> Outcome<Row> {
    let (u, delta) = (wave(batch * channels * len, 0.7), wave(batch * channels * len, 0.3));
    let a: Vec<f32> = (0..channels * states).map(|i| -((i % states + 1) as f32)).collect();
    let (b, c, skip) = (wave(batch * states * len, 1.1), wave(batch * states * len, 0.9), wave(channels, 0.5));
    let place = |x: &[f32]| Buffer::from_slice(device, x);
    let (ud, dd, ad, bd, cd, sd) = (place(&u)?, place(&delta)?, place(&a)?, place(&b)?, place(&c)?, place(&skip)?);
    let mut y = Buffer::<f32>::poisoned(device, batch * channels * len)?;
    let (inputs, coefficients) = ([batch, channels, len], [batch, states, len]);
    let time = common::time(device, bench, || {
        SelectiveScan {
            u: &ud.tensor(inputs)?,
            delta: &dd.tensor(inputs)?,
            a: &ad.tensor([channels, states])?,
            b: &bd.tensor(coefficients)?,
            c: &cd.tensor(coefficients)?,
            skip: &sd,
            y: &mut y.tensor_mut(inputs)?,
            tile: tuned(),
        }
        .launch_tuned(device)
    })?;
    // The whole row up to a time step, for each element that is compared.
    let want = |at: usize| {
        let (row, t) = (at / len, at % len);
        let (entry, channel) = (row / channels, row % channels);
        let mut h = vec![0.0_f64; states];
        for i in 0..=t {
            let step = f64::from(delta[row * len + i]).exp().ln_1p();
            for (s, h) in h.iter_mut().enumerate() {
                let input = f64::from(b[(entry * states + s) * len + i]) * f64::from(u[row * len + i]);
                *h = (step * f64::from(a[channel * states + s])).exp() * *h + step * input;
            }
        }
        let out = |(s, h): (usize, &f64)| h * f64::from(c[(entry * states + s) * len + t]);
        h.iter().enumerate().map(out).sum::<f64>() + f64::from(skip[channel]) * f64::from(u[at])
    };
    let error = check("y", &y.to_vec()?, 500, 2e-5, want)?;
    let moved = 4 * (3 * batch * channels * len + 2 * batch * states * len);
    let case = format!("{batch} × {channels} × {states} states, {len} steps");
    Ok(Row { kernel: "selective_scan", case, work: Work::Bytes(moved as f64), error, time })
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let shape = if bench { [8, 2048, 16, 2048] } else { [2, 3, 16, 300] };
    Ok(vec![case(device, shape, bench)?])
}

fn main() -> Outcome {
    common::main(cases)
}
