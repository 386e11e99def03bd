//! Attention in f64 by its definition: the reference of the kernels.

use super::documents::document_ranges;
use super::launch::relative_bias_len;
use super::modifiers::{Mask, Score};
use tilewright_runtime::prelude::*;

/// Sizes of an attention problem, and the scale of the scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    pub batch: usize,
    pub heads_q: usize,
    /// Divides `heads_q`.
    pub heads_kv: usize,
    pub n_q: usize,
    pub n_k: usize,
    /// The head dimension of q and k.
    pub d: usize,
    /// That of v and o.
    pub d_v: usize,
    /// Row i sees the keys j ≤ i + (n_k − n_q).
    pub causal: bool,
    pub scale: f64,
    pub modifiers: Modifiers,
}

/// Modifiers ([`super::modifiers`]), by their definition.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Modifiers {
    /// Rows see only keys at most this far from their diagonal.
    pub window: Option<usize>,
    /// Rows see the first keys too, in addition to those up to the diagonal: a prefix is `causal`, without a window.
    pub prefix: Option<usize>,
    /// Packed sequences: cumulative lengths of rows and of keys, beginning with 0. Rows and keys beyond them are unused.
    pub documents: Option<&'static [[usize; 2]]>,
    /// c · tanh(s / c).
    pub softcap: Option<f64>,
    /// − slope · |distance from the diagonal|, after the softcap; [`alibi_slope`] gives the slopes.
    pub alibi: bool,
    /// A number for each distance is added, without a softcap and ALiBi; [`relative_bias`] gives it.
    pub relative: bool,
    /// A score in addition to those of the keys, with a value of 0; [`sink_score`] gives it.
    pub sinks: bool,
}

/// The sink's score of a head: some are far below most scores, some far above.
pub fn sink_score(head: usize) -> f64 {
    6.0 * (head as f64 + 0.5).sin()
}

/// The relative bias of a head, for keys `t` places before the diagonal.
pub fn relative_bias(head: usize, t: i64) -> f64 {
    2.0 * (0.7 * t as f64 + head as f64).sin()
}

/// The slope of a head of `heads`: 2^(−8 (head + 1) / heads) (Press and others, 2022).
pub fn alibi_slope(head: usize, heads: usize) -> f64 {
    (-8.0 * (head + 1) as f64 / heads as f64).exp2()
}

/// The tensors of a problem's modifiers on a device.
pub struct ModifierTensors {
    modifiers: Modifiers,
    n_q: usize,
    slopes: Buffer<f32>,
    ranges: Buffer<i32>,
    sinks: Buffer<f32>,
    relative: Buffer<f32>,
}

impl ModifierTensors {
    /// Uploads slopes, sinks and biases, and computes the ranges of packed sequences, if there are any.
    ///
    /// # Errors
    /// Out of memory; launch errors.
    pub fn new(device: &Device, problem: &Problem) -> Result<ModifierTensors> {
        let Problem { heads_q, n_q, n_k, causal, modifiers, .. } = *problem;
        let slopes: Vec<f32> = (0..heads_q).map(|head| alibi_slope(head, heads_q) as f32).collect();
        let slopes = Buffer::from_slice(device, &slopes)?;
        let sinks: Vec<f32> = (0..heads_q).map(|head| sink_score(head) as f32).collect();
        let sinks = Buffer::from_slice(device, &sinks)?;
        let distances = if modifiers.relative { 1 - n_q as i64..n_k as i64 } else { 0..0 };
        let relative = |head| distances.clone().map(move |t| relative_bias(head, t) as f32);
        let relative = Buffer::from_slice(device, &(0..heads_q).flat_map(relative).collect::<Vec<f32>>())?;
        let Some(starts) = modifiers.documents else {
            let ranges = Buffer::uninit(device, 0)?;
            return Ok(ModifierTensors { modifiers, n_q, slopes, ranges, sinks, relative });
        };
        let lengths = [0, 1].map(|side| starts.iter().map(|start| start[side] as i32).collect::<Vec<i32>>());
        let (rows, keys) = (Buffer::from_slice(device, &lengths[0])?, Buffer::from_slice(device, &lengths[1])?);
        let mut ranges = Buffer::poisoned(device, 2 * (n_q + n_k))?;
        let (lengths, window) = ([rows.view(), keys.view()], modifiers.window);
        document_ranges(device, lengths, [n_q, n_k], causal, window, ranges.view_mut(), None)?;
        Ok(ModifierTensors { modifiers, n_q, slopes, ranges, sinks, relative })
    }

    /// The mask of the problem; its `causal` is that of the options.
    pub fn mask(&self) -> Mask<'_> {
        match self.modifiers {
            Modifiers { documents: Some(_), .. } => Mask::documents(self.ranges.view(), self.n_q),
            Modifiers { window: Some(size), .. } => Mask::window(size),
            Modifiers { prefix: Some(length), .. } => Mask::prefix(length),
            _ => Mask::default(),
        }
    }

    /// The score function of the problem.
    pub fn score(&self) -> Score<'_> {
        if self.modifiers.relative {
            assert!(self.modifiers.softcap.is_none() && !self.modifiers.alibi, "a bias is the only score function");
            return Score::relative(self.relative.view());
        }
        let softcap = self.modifiers.softcap.map(|cap| cap as f32);
        Score::new(softcap, self.modifiers.alibi.then(|| self.slopes.view()))
    }

    /// The sinks of the problem.
    pub fn sinks(&self) -> Option<View<'_, f32>> {
        self.modifiers.sinks.then(|| self.sinks.view())
    }
}

/// Gradients of the inputs of [`forward`], in their shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    /// [heads]; 0 without sinks.
    pub d_sinks: Vec<f64>,
    /// [heads, n_q + n_k − 1]: of the relative bias.
    pub d_relative: Vec<f64>,
}

/// The offsets of a row and of its head in dense tensors.
#[derive(Clone, Copy, Default)]
struct Offsets {
    /// Of the row in q.
    q: usize,
    /// Of the row in o.
    o: usize,
    /// Of the head in k.
    k: usize,
    /// Of the head in v.
    v: usize,
}

impl Problem {
    /// The keys that a row sees.
    pub fn seen(&self, row: usize) -> std::ops::Range<usize> {
        let Modifiers { window, prefix, documents, .. } = self.modifiers;
        let whole = [[0, 0], [self.n_q, self.n_k]];
        let starts = documents.unwrap_or(&whole);
        let Some(document) = starts.windows(2).find(|pair| (pair[0][0]..pair[1][0]).contains(&row)) else {
            return 0..0;
        };
        let [[_, first], [rows_end, end]] = [document[0], document[1]];
        // Key j is as far from the diagonal as j − diagonal.
        let window = window.map(|size| size.min(self.n_q + self.n_k));
        let diagonal = row as i64 + end as i64 - rows_end as i64;
        let clip = |at: i64| at.clamp(first as i64, end as i64) as usize;
        let last = match (self.causal || prefix.is_some(), window) {
            (true, _) => clip((diagonal + 1).max(prefix.unwrap_or(0).min(self.n_k) as i64)),
            (false, Some(size)) => clip(diagonal + size as i64 + 1),
            (false, None) => end,
        };
        let first = window.map_or(first, |size| clip(diagonal - size as i64));
        first..last.max(first)
    }

    /// Calls `f` for every (batch, head, row), with the index of the row among all rows, the head and the row, and offsets.
    fn for_each_row(&self, mut f: impl FnMut(usize, [usize; 2], Offsets)) {
        let group = self.heads_q / self.heads_kv.max(1);
        for batch in 0..self.batch {
            for head in 0..self.heads_q {
                let keys = (batch * self.heads_kv + head / group) * self.n_k;
                for row in 0..self.n_q {
                    let at = (batch * self.heads_q + head) * self.n_q + row;
                    let [d, d_v] = [self.d, self.d_v];
                    f(at, [head, row], Offsets { q: at * d, o: at * d_v, k: keys * d, v: keys * d_v });
                }
            }
        }
    }

    /// The scores of one query row against the keys that it sees: the key, the modified score, and its derivative with
    /// respect to the score.
    fn scores(
        &self,
        q: &[f64],
        k: &[f64],
        [head, row]: [usize; 2],
        q_at: usize,
        k_at: usize,
    ) -> Vec<(usize, f64, f64)> {
        let modified = |j: usize| {
            let score = self.scale * inner(self.d, &q[q_at..], &k[k_at + j * self.d..]);
            let (score, derivative) = self.modified(score, head, row, j);
            (j, score, derivative)
        };
        self.seen(row).map(modified).collect()
    }

    /// A modified score, and its derivative with respect to the score.
    pub fn modified(&self, score: f64, head: usize, row: usize, key: usize) -> (f64, f64) {
        let Modifiers { softcap, alibi, relative, .. } = self.modifiers;
        let (score, derivative) = match softcap {
            Some(cap) => (cap * (score / cap).tanh(), 1.0 - (score / cap).tanh().powi(2)),
            None => (score, 1.0),
        };
        let distance = row as i64 + self.n_k as i64 - self.n_q as i64 - key as i64;
        let alibi = if alibi { -alibi_slope(head, self.heads_q) * distance.abs() as f64 } else { 0.0 };
        let relative = if relative { relative_bias(head, distance) } else { 0.0 };
        (score + alibi + relative, derivative)
    }

    /// dQ of one row of a head, from its rows [q, O, dO] and the head's [k, v]. D is that of this O, as it may be rounded.
    pub fn one_row_gradient(&self, at: [usize; 2], [q, o, d_o]: [&[f64]; 3], [k, v]: [&[f64]; 2]) -> Vec<f64> {
        let mut dq = vec![0.0; self.d];
        let delta = Some(inner(self.d_v, o, d_o));
        self.for_each_gradient(at, [q, k, v, d_o], Offsets::default(), delta, |j, [ds, _], _| {
            dq.iter_mut().zip(&k[j * self.d..]).for_each(|(dq, k)| *dq += ds * k);
        });
        dq
    }

    /// A bound on the norm of the error of [`Problem::one_row_gradient`], as of [`backward_errors`].
    pub fn one_row_gradient_error(
        &self,
        at: [usize; 2],
        [q, o, d_o]: [&[f64]; 3],
        [k, v]: [&[f64]; 2],
        unit: f64,
    ) -> f64 {
        if self.modifiers.softcap.is_none() {
            return 0.0;
        }
        let mut squares = 0.0_f64;
        let delta = Some(inner(self.d_v, o, d_o));
        self.for_each_gradient(at, [q, k, v, d_o], Offsets::default(), delta, |j, [_, d_modified], _| {
            let k = &k[j * self.d..];
            squares += self.ds_error([q, k], d_modified, unit).powi(2) * inner(self.d, k, k);
        });
        squares.sqrt()
    }

    /// A bound on the error of scale · dS of a row of q and a key, with the gradient of the modified score, as of
    /// [`backward_errors`].
    pub fn ds_error(&self, [q, k]: [&[f64]; 2], d_modified: f64, unit: f64) -> f64 {
        let Some(cap) = self.modifiers.softcap else { return 0.0 };
        let norm = |x: &[f64]| inner(self.d, x, x).sqrt();
        let error = unit * self.scale.abs() * norm(q) * norm(k);
        let distance = (self.scale * inner(self.d, q, k)).abs();
        // The derivative is largest at a score of 0.
        let derivative = |s: f64| 1.0 - (s / cap).tanh().powi(2);
        let [least, exact, most] = [distance + error, distance, (distance - error).max(0.0)].map(derivative);
        (self.scale * d_modified).abs() * ((most - exact).max(exact - least) + 2.0 * f64::from(f32::EPSILON))
    }

    /// Calls `f` for each key that a row sees, with scale · dS and the gradient of the modified score, where dS is that of the score, and
    /// with P. `delta` is D, that of the exact O by default. Returns the gradient of the sink.
    fn for_each_gradient(
        &self,
        [head, row]: [usize; 2],
        [q, k, v, d_o]: [&[f64]; 4],
        at: Offsets,
        delta: Option<f64>,
        mut f: impl FnMut(usize, [f64; 2], f64),
    ) -> f64 {
        let scores = self.scores(q, k, [head, row], at.q, at.k);
        let lse = self.log_sum_exp(&scores, head);
        let weights: Vec<f64> = scores.iter().map(|s| (s.1 - lse).exp()).collect();
        let d_weight = |key: usize| inner(self.d_v, &d_o[at.o..], &v[at.v + key * self.d_v..]);
        let d_weights: Vec<f64> = scores.iter().map(|s| d_weight(s.0)).collect();
        let mean = delta.unwrap_or_else(|| weights.iter().zip(&d_weights).map(|(w, d)| w * d).sum());
        for ((j, _, derivative), (w, d)) in scores.into_iter().zip(weights.iter().zip(&d_weights)) {
            f(j, [self.scale * w * (d - mean) * derivative, w * (d - mean)], *w);
        }
        if self.modifiers.sinks { -(sink_score(head) - lse).exp() * mean } else { 0.0 }
    }

    /// The number of (row, key) pairs of one head that the mask leaves.
    pub fn pairs(&self) -> usize {
        (0..self.n_q).map(|row| self.seen(row).len()).sum()
    }

    /// O and L of one row of a head, from its q row and the head's k and v.
    pub fn one_row(&self, head: usize, row: usize, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, f64) {
        let scores = self.scores(q, k, [head, row], 0, 0);
        let lse = self.log_sum_exp(&scores, head);
        let mut o = vec![0.0; self.d_v];
        for (j, s, _) in scores {
            let weight = (s - lse).exp();
            for x in 0..self.d_v {
                o[x] += weight * v[j * self.d_v + x];
            }
        }
        (o, lse)
    }

    /// log Σ exp of the scores of a row, and of the sink if there is one; −∞ without any.
    fn log_sum_exp(&self, scores: &[(usize, f64, f64)], head: usize) -> f64 {
        let sink = self.modifiers.sinks.then(|| sink_score(head));
        let all = || scores.iter().map(|s| s.1).chain(sink);
        let highest = all().fold(f64::NEG_INFINITY, f64::max);
        if highest == f64::NEG_INFINITY {
            return highest;
        }
        highest + all().map(|s| (s - highest).exp()).sum::<f64>().ln()
    }
}

/// The inner product of the first `d` numbers.
fn inner(d: usize, a: &[f64], b: &[f64]) -> f64 {
    a[..d].iter().zip(b).map(|(x, y)| x * y).sum()
}

/// O and L of dense inputs: O = softmax(scale · Q Kᵀ) V, with the scores modified, and L the rows' log-sum-exp. A row that
/// sees no key has O = 0 and, without a sink, L = −∞.
pub fn forward(p: &Problem, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let rows = p.batch * p.heads_q * p.n_q;
    let (mut o, mut lse) = (vec![0.0; rows * p.d_v], vec![0.0; rows]);
    p.for_each_row(|index, [head, row], at| {
        let (o_row, lse_row) = p.one_row(head, row, &q[at.q..], &k[at.k..], &v[at.v..]);
        o[at.o..at.o + p.d_v].copy_from_slice(&o_row);
        lse[index] = lse_row;
    });
    (o, lse)
}

/// Gradients for dO, by the chain rule through the softmax: with P = softmax(S) and dP = dO Vᵀ,
/// dS = P ∘ (dP − rowsum(P ∘ dP)), times the derivatives of the modified scores, dQ = scale · dS K, dK = scale · dSᵀ Q,
/// dV = Pᵀ dO.
pub fn backward(p: &Problem, q: &[f64], k: &[f64], v: &[f64], d_o: &[f64]) -> Gradients {
    let distances = relative_bias_len(p.n_q, p.n_k);
    let lens = [q.len(), k.len(), v.len(), p.heads_q, p.heads_q * distances];
    let [dq, dk, dv, d_sinks, d_relative] = lens.map(|len| vec![0.0; len]);
    let mut g = Gradients { dq, dk, dv, d_sinks, d_relative };
    p.for_each_row(|_, row, at| {
        g.d_sinks[row[0]] += p.for_each_gradient(row, [q, k, v, d_o], at, None, |j, [ds, d_modified], weight| {
            g.d_relative[row[0] * distances + row[1] + p.n_k - 1 - j] += d_modified;
            for x in 0..p.d {
                let key = at.k + j * p.d + x;
                g.dq[at.q + x] += ds * k[key];
                g.dk[key] += ds * q[at.q + x];
            }
            for x in 0..p.d_v {
                g.dv[at.v + j * p.d_v + x] += weight * d_o[at.o + x];
            }
        });
    });
    g
}

/// Bounds on the norms of the errors of dQ and dK ([`backward`]) that come from rounded scores; 0 without a softcap c. Its
/// derivative 1 − tanh²(s / c), computed in f32 from a score with an absolute error of `unit` · scale · ‖q‖ · ‖k‖, has an
/// error that grows as c becomes smaller.
pub fn backward_errors(p: &Problem, q: &[f64], k: &[f64], v: &[f64], d_o: &[f64], unit: f64) -> [f64; 2] {
    let mut squares = [0.0_f64; 2];
    if p.modifiers.softcap.is_some() {
        p.for_each_row(|_, row, at| {
            p.for_each_gradient(row, [q, k, v, d_o], at, None, |j, [_, d_modified], _| {
                let (q, k) = (&q[at.q..], &k[at.k + j * p.d..]);
                let square = p.ds_error([q, k], d_modified, unit).powi(2);
                squares[0] += square * inner(p.d, k, k);
                squares[1] += square * inner(p.d, q, q);
            });
        });
    }
    squares.map(f64::sqrt)
}
