//! AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019,
//! algorithm 2), for all parameters of one flat buffer, in one launch.
//!
//! In step t = 1, 2, …, with the gradient g,
//!
//! - m ← m + (1 − β₁) · (g − m) and v ← v + (1 − β₂) · (g² − v),
//! - p ← p − lr · (m̂ / (√v̂ + ε) + λ · p) with m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ).
//!
//! v is infinite from a step on in which (1 − β₂) · g² exceeds f32: later steps only decay the parameter, as in PyTorch.
//! p (the master weights), m and v are f32; g may have another type. For a model that computes in a narrower type, the
//! same launch writes `compute_weights`: p, rounded to that type.
//!
//! Step-dependent scalars are kernel arguments in [`step`] and are read from device memory in [`step_controlled`]: for
//! a step that is enqueued before its gradient is known, or replayed as a CUDA graph.

use crate::tensor::FloatElement;
use tilewright_runtime::prelude::*;

/// Updates p, m and v at `offsets` in memory and returns the new p.
///
/// `moments` are 1 − β₁ and 1 − β₂. The scalars of `rates` are `step_size` = lr / (1 − β₁ᵗ),
/// `inv_sqrt_bias_correction2` = 1 / √(1 − β₂ᵗ), ε, `decay` = lr · λ, and `grad_scale`, by which g is multiplied.
#[device_fn]
fn update_in_place<G: Float>(
    p: Ptr<f32>,
    m: Ptr<f32>,
    v: Ptr<f32>,
    g: Ptr<G>,
    (offsets, mask): (Tile<i64>, Tile<bool>),
    moments: (Scalar<f32>, Scalar<f32>),
    rates: (Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>),
) -> Tile<f32> {
    let gt = load(g + offsets, mask = mask).to::<f32>();
    let (p_after, m_after, v_after) = compute_update(p, m, v, gt, (offsets, mask), moments, rates);
    store_state((p, p_after), (m, m_after), (v, v_after), (offsets, mask));
    p_after
}

/// The new p, m and v for the gradients g, without stores.
#[device_fn]
fn compute_update(
    p: Ptr<f32>,
    m: Ptr<f32>,
    v: Ptr<f32>,
    g: Tile<f32>,
    (offsets, mask): (Tile<i64>, Tile<bool>),
    moments: (Scalar<f32>, Scalar<f32>),
    (step_size, inv_sqrt_bias_correction2, eps, decay, grad_scale): (
        Scalar<f32>,
        Scalar<f32>,
        Scalar<f32>,
        Scalar<f32>,
        Scalar<f32>,
    ),
) -> (Tile<f32>, Tile<f32>, Tile<f32>) {
    let gt = g * grad_scale;
    let (m_before, v_before) = (load(m + offsets, mask = mask), load(v + offsets, mask = mask));
    let m_after = m_before + moments.0 * (gt - m_before);
    // g² may exceed f32 where (1 − β₂) · g² does not. A v that is infinite stays so, as v · β₂ would; ∞ − ∞ is NaN.
    let v_next = v_before + ((moments.1 * gt) * gt - moments.1 * v_before);
    let v_after = where_(v_before == f32::INFINITY, v_before, v_next);
    let pt = load(p + offsets, mask = mask);
    (pt - (step_size * m_after / (sqrt(v_after) * inv_sqrt_bias_correction2 + eps) + decay * pt), m_after, v_after)
}

/// Stores the new p, m and v: each argument is a pointer and the new values.
#[device_fn]
fn store_state(
    (p, p_after): (Ptr<f32>, Tile<f32>),
    (m, m_after): (Ptr<f32>, Tile<f32>),
    (v, v_after): (Ptr<f32>, Tile<f32>),
    (offsets, mask): (Tile<i64>, Tile<bool>),
) {
    store(m + offsets, m_after, mask = mask);
    store(v + offsets, v_after, mask = mask);
    store(p + offsets, p_after, mask = mask);
}

/// One AdamW step for n parameters.
///
/// One program per `tile` parameters. `one_minus_beta1` and `one_minus_beta2` are 1 − β₁ and 1 − β₂, `step_size` is
/// lr / (1 − β₁ᵗ), `inv_sqrt_bias_correction2` is 1 / √(1 − β₂ᵗ), and `decay` is lr · λ. g is multiplied by
/// `grad_scale` first.
#[kernel]
#[alias(rest1 = one_minus_beta1, rest2 = one_minus_beta2, rate = step_size, spread = inv_sqrt_bias_correction2)]
pub fn adamw<G: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    n: i64,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    step_size: f32,
    inv_sqrt_bias_correction2: f32,
    eps: f32,
    decay: f32,
    grad_scale: f32,
    #[constexpr] tile: usize,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let rates = (step_size, inv_sqrt_bias_correction2, eps, decay, grad_scale);
    update_in_place(p, m, v, g, (offsets, offsets < n), (one_minus_beta1, one_minus_beta2), rates);
}

/// As [`ADAMW`]; also writes `compute_weights` = p, rounded to its type.
#[kernel]
#[alias(
    adamw_with_copy,
    copy = compute_weights,
    rest1 = one_minus_beta1,
    rest2 = one_minus_beta2,
    rate = step_size,
    spread = inv_sqrt_bias_correction2
)]
pub fn adamw_with_compute_weights<G: Float, C: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    compute_weights: Out<C>,
    n: i64,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    step_size: f32,
    inv_sqrt_bias_correction2: f32,
    eps: f32,
    decay: f32,
    grad_scale: f32,
    #[constexpr] tile: usize,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let rates = (step_size, inv_sqrt_bias_correction2, eps, decay, grad_scale);
    let after = update_in_place(p, m, v, g, (offsets, offsets < n), (one_minus_beta1, one_minus_beta2), rates);
    store(compute_weights + offsets, after.to::<C>(), mask = offsets < n);
}

/// Loads the scalars of [`compute_update`], and whether the step is applied, from the memory that [`ADAMW_CONTROLLED`]
/// describes.
#[device_fn]
fn load_rates(
    rates: Ptr<f64>,
    step_control: Ptr<f64>,
    eps: Scalar<f32>,
) -> ((Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>, Scalar<f32>), Scalar<f64>) {
    let (step_size, inv_sqrt_bias_correction2, decay) = (load(rates), load(rates + 1), load(rates + 2));
    let (grad_scale, apply) = (load(step_control), load(step_control + 1));
    (
        (step_size.to::<f32>(), inv_sqrt_bias_correction2.to::<f32>(), eps, decay.to::<f32>(), grad_scale.to::<f32>()),
        apply,
    )
}

/// As [`ADAMW_WITH_COMPUTE_WEIGHTS`], with scalars from device memory: `rates` holds `step_size`,
/// `inv_sqrt_bias_correction2` and `decay`; `step_control` holds `grad_scale`, and 1 if the step is applied or 0 if it
/// is skipped, which leaves all outputs unchanged. Without `write_compute_weights`, `compute_weights` is not written.
///
/// One program per `tile` parameters.
#[kernel]
#[alias(
    adamw_by,
    copy = compute_weights,
    verdict = step_control,
    rest1 = one_minus_beta1,
    rest2 = one_minus_beta2,
    copies = write_compute_weights
)]
pub fn adamw_controlled<G: Float, C: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    compute_weights: Out<C>,
    rates: In<f64>,
    step_control: In<f64>,
    n: i64,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    eps: f32,
    #[constexpr] tile: usize,
    #[constexpr = true] write_compute_weights: bool,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let (rates, apply) = load_rates(rates, step_control, eps);
    let mask = (offsets < n) && (apply != 0.0);
    let after = update_in_place(p, m, v, g, (offsets, mask), (one_minus_beta1, one_minus_beta2), rates);
    if write_compute_weights {
        store(compute_weights + offsets, after.to::<C>(), mask = mask);
    }
}

/// As [`ADAMW_CONTROLLED`], with the average of g and `peer_g`, the gradients of two ranks, rounded to their type:
/// replaces the all-reduce of the gradients.
///
/// squares\[i\] = Σ g² over the averages of program i, before `grad_scale`. If that sum is not finite, the program
/// leaves its parameters unchanged.
///
/// One program per `tile` parameters.
#[kernel]
#[alias(
    adamw_of_two,
    other = peer_g,
    copy = compute_weights,
    verdict = step_control,
    rest1 = one_minus_beta1,
    rest2 = one_minus_beta2,
    copies = write_compute_weights
)]
pub fn adamw_two_peers<G: Float, C: Float>(
    p: InOut<f32>,
    m: InOut<f32>,
    v: InOut<f32>,
    g: In<G>,
    peer_g: In<G>,
    compute_weights: Out<C>,
    squares: Out<f32>,
    rates: In<f64>,
    step_control: In<f64>,
    n: i64,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    eps: f32,
    #[constexpr] tile: usize,
    #[constexpr = true] write_compute_weights: bool,
) {
    let offsets = program_id(0).to::<i64>() * tile + arange(0, tile);
    let (rates, apply) = load_rates(rates, step_control, eps);
    let inside = offsets < n;
    let (own_g, peer_gt) =
        (load(g + offsets, mask = inside, other = 0.0), load(peer_g + offsets, mask = inside, other = 0.0));
    let gt = ((own_g.to::<f32>() + peer_gt.to::<f32>()) * 0.5).to::<G>().to::<f32>();
    // All loads are issued before the barrier of the reduction.
    let moments = (one_minus_beta1, one_minus_beta2);
    let (p_after, m_after, v_after) = compute_update(p, m, v, gt, (offsets, inside), moments, rates);
    let square = sum(gt * gt, axis = 0);
    store(squares + program_id(0), square);
    let mask = inside && ((apply != 0.0) && (square < f32::INFINITY));
    store_state((p, p_after), (m, m_after), (v, v_after), (offsets, mask));
    if write_compute_weights {
        store(compute_weights + offsets, p_after.to::<C>(), mask = mask);
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
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    step_size: f32,
    inv_sqrt_bias_correction2: f32,
    decay: f32,
}

impl Options {
    fn rates(&self, kernel: &str, t: u64) -> Result<Rates> {
        let invalid_argument = |name: &'static str, expected: &str, found: String| {
            Err(Error::Argument { kernel: kernel.into(), name, expected: expected.into(), found })
        };
        if t == 0 {
            return invalid_argument("t", "a step number of at least 1", "0".into());
        }
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return invalid_argument(name, "a number in [0, 1)", beta.to_string());
            }
        }
        let factors = [("lr", self.lr), ("weight_decay", self.weight_decay), ("grad_scale", self.grad_scale)];
        for (name, factor) in factors {
            if !factor.is_finite() {
                return invalid_argument(name, "a finite number", factor.to_string());
            }
        }
        if !(self.eps >= 0.0 && self.eps.is_finite()) {
            return invalid_argument("eps", "a finite number of at least 0", self.eps.to_string());
        }
        let exponent = t as f64;
        Ok(Rates {
            one_minus_beta1: (1.0 - self.beta1) as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            step_size: (self.lr / (1.0 - self.beta1.powf(exponent))) as f32,
            inv_sqrt_bias_correction2: (1.0 / (1.0 - self.beta2.powf(exponent)).sqrt()) as f32,
            decay: (self.lr * self.weight_decay) as f32,
        })
    }
}

impl Options {
    /// The `rates` that [`step_controlled`] reads in step `t` (from 1).
    ///
    /// # Errors
    /// `t` = 0; betas outside of [0, 1); a negative eps; numbers that are not finite.
    pub fn rates_at_step(&self, t: u64) -> Result<[f64; 3]> {
        let Rates { step_size, inv_sqrt_bias_correction2, decay, .. } = self.rates("adamw_controlled", t)?;
        Ok([step_size, inv_sqrt_bias_correction2, decay].map(f64::from))
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

/// The length of an argument, and its minimum.
struct MinLen {
    name: &'static str,
    found: usize,
    min: usize,
}

fn expect_min_lens(kernel: &str, lens: &[MinLen]) -> Result<()> {
    match lens.iter().find(|len| len.found < len.min) {
        None => Ok(()),
        Some(&MinLen { name, found, min }) => {
            let (expected, found) = (format!("at least {min} elements"), found.to_string());
            Err(Error::Argument { kernel: kernel.into(), name, expected, found })
        }
    }
}

/// What a step updates: parameters and their moments, all of one length.
pub struct AdamState<'a> {
    pub p: ViewMut<'a, f32>,
    pub m: ViewMut<'a, f32>,
    pub v: ViewMut<'a, f32>,
}

/// Applies step `t` (from 1) to the parameters p and their moments m and v, with as many gradients g.
///
/// Parameter groups with different options are slices of the buffers, one launch each.
///
/// # Errors
/// Lengths that differ; `t` = 0; betas outside of [0, 1); tensors on another device; launch errors.
pub fn step<G: FloatElement>(
    device: &Device,
    AdamState { mut p, mut m, mut v }: AdamState<'_>,
    g: View<'_, G>,
    t: u64,
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw";
    let n = p.len();
    for (name, len) in [("m", m.len()), ("v", v.len()), ("g", g.len())] {
        expect_len(NAME, name, len, n)?;
    }
    let Rates { one_minus_beta1, one_minus_beta2, step_size, inv_sqrt_bias_correction2, decay } =
        options.rates(NAME, t)?;
    Adamw {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        n: n as i64,
        one_minus_beta1,
        one_minus_beta2,
        step_size,
        inv_sqrt_bias_correction2,
        eps: options.eps as f32,
        decay,
        grad_scale: options.grad_scale as f32,
        tile: TILE,
    }
    .launch(device, n.div_ceil(TILE))
}

/// As [`step`]; also writes `compute_weights` = p, rounded to its type.
///
/// # Errors
/// As [`step`].
pub fn step_with_compute_weights<G: FloatElement, C: FloatElement>(
    device: &Device,
    AdamState { mut p, mut m, mut v }: AdamState<'_>,
    g: View<'_, G>,
    mut compute_weights: ViewMut<'_, C>,
    t: u64,
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw_with_compute_weights";
    let n = p.len();
    for (name, len) in [("m", m.len()), ("v", v.len()), ("g", g.len()), ("compute_weights", compute_weights.len())] {
        expect_len(NAME, name, len, n)?;
    }
    let Rates { one_minus_beta1, one_minus_beta2, step_size, inv_sqrt_bias_correction2, decay } =
        options.rates(NAME, t)?;
    AdamwWithComputeWeights {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        compute_weights: &mut compute_weights,
        n: n as i64,
        one_minus_beta1,
        one_minus_beta2,
        step_size,
        inv_sqrt_bias_correction2,
        eps: options.eps as f32,
        decay,
        grad_scale: options.grad_scale as f32,
        tile: TILE,
    }
    .launch(device, n.div_ceil(TILE))
}

/// As [`step`] or [`step_with_compute_weights`], with scalars from device memory: `rates` as [`Options::rates_at_step`]
/// gives them; `step_control` is the gradient scale, and 1 if the step is applied or 0 if it is skipped. Of `options`,
/// only the betas and `eps` are read.
///
/// # Errors
/// Lengths that differ; fewer than 3 `rates` or 2 elements of `step_control`; betas outside of [0, 1); tensors on
/// another device; launch errors.
pub fn step_controlled<G: FloatElement, C: FloatElement>(
    device: &Device,
    AdamState { mut p, mut m, mut v }: AdamState<'_>,
    g: View<'_, G>,
    compute_weights: Option<ViewMut<'_, C>>,
    [rates, step_control]: [View<'_, f64>; 2],
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw_controlled";
    let n = p.len();
    let compute_weights_len =
        compute_weights.as_ref().map(|compute_weights| ("compute_weights", compute_weights.len()));
    expect_lens(NAME, n, [("m", m.len()), ("v", v.len()), ("g", g.len())].into_iter().chain(compute_weights_len))?;
    expect_min_lens(
        NAME,
        &[
            MinLen { name: "rates", found: rates.len(), min: 3 },
            MinLen { name: "step_control", found: step_control.len(), min: 2 },
        ],
    )?;
    let Rates { one_minus_beta1, one_minus_beta2, .. } = options.rates(NAME, 1)?;
    let write_compute_weights = compute_weights.is_some();
    let mut none = Buffer::<C>::uninit(device, 0)?;
    let mut compute_weights = compute_weights.unwrap_or_else(|| none.view_mut());
    AdamwControlled {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        compute_weights: &mut compute_weights,
        rates: &rates,
        step_control: &step_control,
        n: n as i64,
        one_minus_beta1,
        one_minus_beta2,
        eps: options.eps as f32,
        tile: TILE,
        write_compute_weights,
    }
    .launch(device, n.div_ceil(TILE))
}

/// Parameters per program of [`step_two_peers`].
pub const TILE_TWO_PEERS: usize = 2048;

/// The number of sums of squares that [`step_two_peers`] writes for `n` parameters.
pub fn squares_two_peers(n: usize) -> usize {
    n.div_ceil(TILE_TWO_PEERS)
}

/// As [`step_controlled`], with the averages of the gradients of two ranks. `squares` receives [`squares_two_peers`]
/// sums of squares of the averages; where one is not finite, the parameters of its program are left unchanged.
///
/// # Errors
/// As [`step_controlled`]; also `squares` with fewer than [`squares_two_peers`] elements.
pub fn step_two_peers<G: FloatElement, C: FloatElement>(
    device: &Device,
    AdamState { mut p, mut m, mut v }: AdamState<'_>,
    [g, peer_g]: [View<'_, G>; 2],
    compute_weights: Option<ViewMut<'_, C>>,
    mut squares: ViewMut<'_, f32>,
    [rates, step_control]: [View<'_, f64>; 2],
    options: &Options,
) -> Result<()> {
    const NAME: &str = "adamw_two_peers";
    let (n, sums) = (p.len(), squares_two_peers(p.len()));
    let compute_weights_len =
        compute_weights.as_ref().map(|compute_weights| ("compute_weights", compute_weights.len()));
    let lens = [("m", m.len()), ("v", v.len()), ("g", g.len()), ("peer_g", peer_g.len())];
    expect_lens(NAME, n, lens.into_iter().chain(compute_weights_len))?;
    expect_min_lens(
        NAME,
        &[
            MinLen { name: "rates", found: rates.len(), min: 3 },
            MinLen { name: "step_control", found: step_control.len(), min: 2 },
            MinLen { name: "squares", found: squares.len(), min: sums },
        ],
    )?;
    let Rates { one_minus_beta1, one_minus_beta2, .. } = options.rates(NAME, 1)?;
    let write_compute_weights = compute_weights.is_some();
    let mut none = Buffer::<C>::uninit(device, 0)?;
    let mut compute_weights = compute_weights.unwrap_or_else(|| none.view_mut());
    AdamwTwoPeers {
        p: &mut p,
        m: &mut m,
        v: &mut v,
        g: &g,
        peer_g: &peer_g,
        compute_weights: &mut compute_weights,
        squares: &mut squares,
        rates: &rates,
        step_control: &step_control,
        n: n as i64,
        one_minus_beta1,
        one_minus_beta2,
        eps: options.eps as f32,
        tile: TILE_TWO_PEERS,
        write_compute_weights,
    }
    .launch_with(device, &LaunchConfig::new(sums).num_warps((TILE_TWO_PEERS / 256) as u32))
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
