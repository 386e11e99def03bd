//! AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019,
//! algorithm 2), for all parameters of one flat buffer, in one launch.
//!
//! In step t = 1, 2, …, with the gradient g,
//!
//! - m ← m + (1 − β₁) · (g − m) and v ← v + (1 − β₂) · (g² − v),
//! - p ← p − lr · (m̂ / (√v̂ + ε) + λ · p) with m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ).
//!
//! p (the master weights), m and v are f32; g may have another type. For a model that computes in a narrower type, the
//! same launch writes `copy`: p, rounded to that type.
//!
//! Step-dependent scalars are kernel arguments in [`step`] and are read from device memory in [`step_by`]: for a step
//! that is enqueued before its gradient is known, or replayed as a CUDA graph.

use crate::tensor::FloatElement;
use tilewright_runtime::prelude::*;

/// Updates p, m and v at `offsets` in memory and returns the new p.
///
/// `moments` are 1 − β₁ and 1 − β₂. The scalars of `rates` are `rate` = lr / (1 − β₁ᵗ), `spread` = 1 / √(1 − β₂ᵗ), ε,
/// `decay` = lr · λ, and `grad_scale`, by which g is multiplied.
#[device_fn]
fn update<G: Float>(
    state: (Ptr<f32>, Ptr<f32>, Ptr<f32>),
    g: Ptr<G>,
    (offsets, mask): (Tile<i64>, Tile<bool>),
    moments: (Scalar<f32>, Scalar<f32>),
    rates: (Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>),
) -> Tile<f32> {
    let after = updated(state, load(g + offsets, mask = mask).to::<f32>(), (offsets, mask), moments, rates);
    keep(state, after, (offsets, mask));
    after.0
}

/// The new p, m and v for the gradients g, without stores.
#[device_fn]
fn updated(
    (p, m, v): (Ptr<f32>, Ptr<f32>, Ptr<f32>),
    g: Tile<f32>,
    (offsets, mask): (Tile<i64>, Tile<bool>),
    moments: (Scalar<f32>, Scalar<f32>),
    (rate, spread, eps, decay, grad_scale): (Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>),
) -> (Tile<f32>, Tile<f32>, Tile<f32>) {
    let gt = g * grad_scale;
    let (m_before, v_before) = (load(m + offsets, mask = mask), load(v + offsets, mask = mask));
    let m_after = m_before + moments.0 * (gt - m_before);
    let v_after = v_before + moments.1 * (gt * gt - v_before);
    let pt = load(p + offsets, mask = mask);
    (pt - (rate * m_after / (sqrt(v_after) * spread + eps) + decay * pt), m_after, v_after)
}

#[device_fn]
fn keep(
    (p, m, v): (Ptr<f32>, Ptr<f32>, Ptr<f32>),
    after: (Tile<f32>, Tile<f32>, Tile<f32>),
    (offsets, mask): (Tile<i64>, Tile<bool>),
) {
    store(m + offsets, after.1, mask = mask);
    store(v + offsets, after.2, mask = mask);
    store(p + offsets, after.0, mask = mask);
}

/// One AdamW step for n parameters.
///
/// One program per `tile` parameters. `rest1` and `rest2` are 1 − β₁ and 1 − β₂; `rate` is lr / (1 − β₁ᵗ); `spread` is
/// 1 / √(1 − β₂ᵗ); `decay` is lr · λ; g is multiplied by `grad_scale` first.
#[kernel]
pub fn adamw<G: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    n: i64,
    rest1: f32,
    rest2: f32,
    rate: f32,
    spread: f32,
    eps: f32,
    decay: f32,
    grad_scale: f32,
    #[constexpr] tile: usize,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let rates = (rate, spread, eps, decay, grad_scale);
    update((p, m, v), g, (offsets, offsets < n), (rest1, rest2), rates);
}

/// As [`ADAMW`]; also writes `copy` = p, rounded to its type.
#[kernel]
pub fn adamw_with_copy<G: Float, C: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    copy: Out<C>,
    n: i64,
    rest1: f32,
    rest2: f32,
    rate: f32,
    spread: f32,
    eps: f32,
    decay: f32,
    grad_scale: f32,
    #[constexpr] tile: usize,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let rates = (rate, spread, eps, decay, grad_scale);
    let after = update((p, m, v), g, (offsets, offsets < n), (rest1, rest2), rates);
    store(copy + offsets, after.to::<C>(), mask = offsets < n);
}

/// Loads the scalars of [`updated`], and whether the step is applied, from the memory that [`ADAMW_BY`] describes.
#[device_fn]
fn told(
    rates: Ptr<f64>,
    verdict: Ptr<f64>,
    eps: Scalar<f32>,
) -> ((Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>), Scalar<f64>) {
    let (rate, spread, decay) = (load(rates), load(rates + 1), load(rates + 2));
    let (grad_scale, made) = (load(verdict), load(verdict + 1));
    ((rate.to::<f32>(), spread.to::<f32>(), eps, decay.to::<f32>(), grad_scale.to::<f32>()), made)
}

/// As [`ADAMW_WITH_COPY`], with scalars from device memory: `rates` holds `rate`, `spread` and `decay`; `verdict` holds
/// `grad_scale`, and 1 if the step is applied or 0 if it is skipped, which leaves all outputs unchanged. Without
/// `copies`, `copy` is not written.
///
/// One program per `tile` parameters.
#[kernel]
pub fn adamw_by<G: Float, C: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    copy: Out<C>,
    rates: In<f64>,
    verdict: In<f64>,
    n: i64,
    rest1: f32,
    rest2: f32,
    eps: f32,
    #[constexpr] tile: usize,
    #[constexpr = true] copies: bool,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let (rates, made) = told(rates, verdict, eps);
    let mask = (offsets < n) && (made != 0.0);
    let after = update((p, m, v), g, (offsets, mask), (rest1, rest2), rates);
    if copies {
        store(copy + offsets, after.to::<C>(), mask = mask);
    }
}

/// As [`ADAMW_BY`], with the average of g and `other`, rounded to their type: the gradients of two ranks, which need no
/// all-reduce before.
///
/// squares\[i\] = Σ g² over the averages of program i. Where that sum is not finite, the program leaves its parameters
/// unchanged.
///
/// One program per `tile` parameters.
#[kernel]
pub fn adamw_of_two<G: Float, C: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    other: In<G>,
    copy: Out<C>,
    squares: Out<f32>,
    rates: In<f64>,
    verdict: In<f64>,
    n: i64,
    rest1: f32,
    rest2: f32,
    eps: f32,
    #[constexpr] tile: usize,
    #[constexpr = true] copies: bool,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let (rates, made) = told(rates, verdict, eps);
    let inside = offsets < n;
    let (own, others) =
        (load(g + offsets, mask = inside, other = 0.0), load(other + offsets, mask = inside, other = 0.0));
    let gt = ((own.to::<f32>() + others.to::<f32>()) * 0.5).to::<G>().to::<f32>();
    // All loads are issued before the barrier of the reduction.
    let after = updated((p, m, v), gt, (offsets, inside), (rest1, rest2), rates);
    let square = sum(gt * gt, axis = 0);
    store(squares + program_id(0), square);
    let made = inside && ((made != 0.0) && (square < f32::INFINITY));
    keep((p, m, v), after, (offsets, made));
    if copies {
        store(copy + offsets, after.0.to::<C>(), mask = made);
    }
}

/// Hyperparameters of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Learning rate.
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// λ: each step subtracts lr · λ times the weight.
    pub weight_decay: f64,
    /// Factor of the gradient: the product of the factors of clipping by the global norm and of averaging.
    pub grad_scale: f64,
}

impl Default for Options {
    /// The values of Kingma and Ba ("Adam", 2015), and λ = 0.01.
    fn default() -> Options {
        Options { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, grad_scale: 1.0 }
    }
}

/// The scalars of a step, rounded once from f64: 1 − 0.999 computed in f32 would have a relative error of 10⁻⁵.
struct Rates {
    rest1: f32,
    rest2: f32,
    rate: f32,
    spread: f32,
    decay: f32,
}

impl Options {
    fn rates(&self, kernel: &str, t: u64) -> Result<Rates> {
        let mistake = |name: &'static str, expected: &str, found: String| {
            Err(Error::Argument { kernel: kernel.into(), name, expected: expected.into(), found })
        };
        if t == 0 {
            return mistake("t", "the number of the step, counted from 1", "0".into());
        }
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return mistake(name, "a number in [0, 1)", beta.to_string());
            }
        }
        let exponent = t as f64;
        Ok(Rates {
            rest1: (1.0 - self.beta1) as f32,
            rest2: (1.0 - self.beta2) as f32,
            rate: (self.lr / (1.0 - self.beta1.powf(exponent))) as f32,
            spread: (1.0 / (1.0 - self.beta2.powf(exponent)).sqrt()) as f32,
            decay: (self.lr * self.weight_decay) as f32,
        })
    }
}

impl Options {
    /// The `rates` that [`step_by`] reads in step `t` (from 1).
    ///
    /// # Errors
    /// `t` = 0; betas outside of [0, 1).
    pub fn rates_of(&self, t: u64) -> Result<[f64; 3]> {
        let Rates { rate, spread, decay, .. } = self.rates("adamw_by", t)?;
        Ok([rate, spread, decay].map(f64::from))
    }
}

/// Parameters per program: 8 per thread.
const TILE: usize = 1024;

fn expect_len(kernel: &str, name: &'static str, found: usize, n: usize) -> Result<()> {
    if found == n {
        return Ok(());
    }
    Err(Error::Argument {
        kernel: kernel.into(),
        name,
        expected: format!("{n} elements, as many as `p`"),
        found: found.to_string(),
    })
}

fn expect_lens(kernel: &str, n: usize, mut lens: impl Iterator<Item = (&'static str, usize)>) -> Result<()> {
    lens.try_for_each(|(name, found)| expect_len(kernel, name, found, n))
}

/// Checks `list`: name, found length and minimum length of each argument.
fn expect_numbers(kernel: &str, list: &[(&'static str, usize, usize)]) -> Result<()> {
    match list.iter().find(|(_, found, expected)| found < expected) {
        None => Ok(()),
        Some(&(name, found, expected)) => {
            let (expected, found) = (format!("{expected} elements"), found.to_string());
            Err(Error::Argument { kernel: kernel.into(), name, expected, found })
        }
    }
}

/// Applies step `t` (from 1) to the parameters p and their moments m and v, with gradients g, all of one length.
///
/// Parameter groups with different options are slices of the buffers, one launch each.
///
/// # Errors
/// Lengths that differ; `t` = 0; betas outside of [0, 1); tensors on another device; launch errors.
pub fn step<G: FloatElement>(
    device: &Device,
    mut p: ViewMut<'_, f32>,
    mut m: ViewMut<'_, f32>,
    mut v: ViewMut<'_, f32>,
    g: View<'_, G>,
    t: u64,
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw";
    let n = p.len();
    for (name, len) in [("m", m.len()), ("v", v.len()), ("g", g.len())] {
        expect_len(NAME, name, len, n)?;
    }
    let Rates { rest1, rest2, rate, spread, decay } = options.rates(NAME, t)?;
    Adamw {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        n: n as i64,
        rest1,
        rest2,
        rate,
        spread,
        eps: options.eps as f32,
        decay,
        grad_scale: options.grad_scale as f32,
        tile: TILE,
    }
    .launch(device, n.div_ceil(TILE))
}

/// As [`step`]; also writes `copy` = p, rounded to its type.
///
/// # Errors
/// As [`step`].
pub fn step_with_copy<G: FloatElement, C: FloatElement>(
    device: &Device,
    mut p: ViewMut<'_, f32>,
    mut m: ViewMut<'_, f32>,
    mut v: ViewMut<'_, f32>,
    g: View<'_, G>,
    mut copy: ViewMut<'_, C>,
    t: u64,
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw_with_copy";
    let n = p.len();
    for (name, len) in [("m", m.len()), ("v", v.len()), ("g", g.len()), ("copy", copy.len())] {
        expect_len(NAME, name, len, n)?;
    }
    let Rates { rest1, rest2, rate, spread, decay } = options.rates(NAME, t)?;
    AdamwWithCopy {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        copy: &mut copy,
        n: n as i64,
        rest1,
        rest2,
        rate,
        spread,
        eps: options.eps as f32,
        decay,
        grad_scale: options.grad_scale as f32,
        tile: TILE,
    }
    .launch(device, n.div_ceil(TILE))
}

/// As [`step`] or [`step_with_copy`], with scalars from device memory: `rates` as [`Options::rates_of`] gives them;
/// `verdict` is the gradient scale, and 1 if the step is applied or 0 if it is skipped. Of `options` this reads only
/// the betas and `eps`.
///
/// # Errors
/// Lengths that differ; tensors on another device; launch errors.
pub fn step_by<G: FloatElement, C: FloatElement>(
    device: &Device,
    [mut p, mut m, mut v]: [ViewMut<'_, f32>; 3],
    g: View<'_, G>,
    copy: Option<ViewMut<'_, C>>,
    [rates, verdict]: [View<'_, f64>; 2],
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw_by";
    let n = p.len();
    let copied = copy.as_ref().map(|copy| ("copy", copy.len()));
    expect_lens(NAME, n, [("m", m.len()), ("v", v.len()), ("g", g.len())].into_iter().chain(copied))?;
    expect_numbers(NAME, &[("rates", rates.len(), 3), ("verdict", verdict.len(), 2)])?;
    let Rates { rest1, rest2, .. } = options.rates(NAME, 1)?;
    let copies = copy.is_some();
    let mut none = Buffer::<C>::uninit(device, 0)?;
    let mut copy = copy.unwrap_or_else(|| none.view_mut());
    AdamwBy {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        copy: &mut copy,
        rates: &rates,
        verdict: &verdict,
        n: n as i64,
        rest1,
        rest2,
        eps: options.eps as f32,
        tile: TILE,
        copies,
    }
    .launch(device, n.div_ceil(TILE))
}

/// Parameters per program of [`step_of_two`].
pub const TILE_OF_TWO: usize = 2048;

/// The number of sums of squares that [`step_of_two`] writes for `n` parameters.
pub fn squares_of_two(n: usize) -> usize {
    n.div_ceil(TILE_OF_TWO)
}

/// As [`step_by`], with the averages of the gradients of two ranks. `squares` receives [`squares_of_two`] sums of
/// squares of the averages; where one is not finite, the parameters of its program are left unchanged.
///
/// # Errors
/// As [`step_by`].
pub fn step_of_two<G: FloatElement, C: FloatElement>(
    device: &Device,
    [mut p, mut m, mut v]: [ViewMut<'_, f32>; 3],
    [g, other]: [View<'_, G>; 2],
    copy: Option<ViewMut<'_, C>>,
    mut squares: ViewMut<'_, f32>,
    [rates, verdict]: [View<'_, f64>; 2],
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw_of_two";
    let (n, sums) = (p.len(), squares_of_two(p.len()));
    let copied = copy.as_ref().map(|copy| ("copy", copy.len()));
    let lens = [("m", m.len()), ("v", v.len()), ("g", g.len()), ("other", other.len())];
    expect_lens(NAME, n, lens.into_iter().chain(copied))?;
    expect_numbers(
        NAME,
        &[("rates", rates.len(), 3), ("verdict", verdict.len(), 2), ("squares", squares.len(), sums)],
    )?;
    let Rates { rest1, rest2, .. } = options.rates(NAME, 1)?;
    let copies = copy.is_some();
    let mut none = Buffer::<C>::uninit(device, 0)?;
    let mut copy = copy.unwrap_or_else(|| none.view_mut());
    AdamwOfTwo {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        other: &other,
        copy: &mut copy,
        squares: &mut squares,
        rates: &rates,
        verdict: &verdict,
        n: n as i64,
        rest1,
        rest2,
        eps: options.eps as f32,
        tile: TILE_OF_TWO,
        copies,
    }
    .launch_with(device, &LaunchConfig::new(sums).num_warps((TILE_OF_TWO / 256) as u32))
}

/// The reference in f64 of step `t`, as the paper writes it.
pub fn reference(p: &mut [f64], m: &mut [f64], v: &mut [f64], g: &[f64], t: u64, options: &Options) {
    let Options { lr, beta1, beta2, eps, weight_decay, grad_scale } = *options;
    for i in 0..p.len() {
        let g = g[i] * grad_scale;
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        let m_hat = m[i] / (1.0 - beta1.powi(t as i32));
        let v_hat = v[i] / (1.0 - beta2.powi(t as i32));
        p[i] -= lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * p[i]);
    }
}
