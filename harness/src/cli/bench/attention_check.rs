//! Device buffers of an attention problem, and checks of its outputs against f64 references.

use tilewright::kernels::attention::reference::{self, Gradients, ModifierTensors, Modifiers, Problem};
use tilewright::kernels::attention::{self, Backward, Options, Saved, Tensor, TensorMut};
use tilewright::{Buffer, Device, elements};

use super::data::{Number, Value, normal, values};
use super::record::{BenchError, accept};
use super::tiles::MAX_TILE;
use crate::cli::demo::case::{relative_error, relative_to, tolerance};

/// All buffers of the forward and the backward pass, allocated once.
pub struct Attention<T: Number> {
    device: Device,
    pub(super) problem: Problem,
    /// Tolerance on the relative error.
    limit: f64,
    pub(super) q: Buffer<T>,
    pub(super) k: Buffer<T>,
    pub(super) v: Buffer<T>,
    d_o: Buffer<T>,
    pub(super) o: Buffer<T>,
    lse: Buffer<f32>,
    dq: Buffer<T>,
    dk: Buffer<T>,
    dv: Buffer<T>,
    d_relative: Buffer<f32>,
    bias_workspace: Buffer<f32>,
    d_sinks: Buffer<f32>,
    workspace: Buffer<f32>,
    modifiers: ModifierTensors,
    /// Maximum number of splits of the forward and of the backward pass, where the options do not set it.
    splits: [Option<usize>; 2],
}

/// The inputs and results of a [`small`] problem in f64.
pub struct Expected {
    o: Vec<f64>,
    lse: Vec<f64>,
    gradients: Gradients,
    /// Bounds on the norms of the errors of dQ and dK that come from rounded scores.
    errors: [f64; 2],
}

/// Returns a smaller problem, with sequences of at most 2 · [`MAX_TILE`] rows, for which a launch with the same tiles
/// compiles the same variant: its lengths have the same remainders modulo every tile size. This holds at least for head
/// dimensions that are multiples of 16.
pub fn small(p: &Problem) -> Problem {
    let length = |n: usize| if n <= 2 * MAX_TILE { n } else { MAX_TILE + n % MAX_TILE };
    let heads = p.heads_q.min(2);
    let modifiers =
        Modifiers { documents: p.modifiers.documents.map(|starts| small_documents(starts, p.n_q)), ..p.modifiers };
    let (n_q, n_k) = (length(p.n_q), length(p.n_k));
    Problem { batch: p.batch.min(2), heads_q: heads, heads_kv: heads, n_q, n_k, modifiers, ..*p }
}

/// Packed sequences whose lengths are those of a problem of `n` rows, shortened to a third of [`MAX_TILE`] rows in all.
fn small_documents(starts: &[[usize; 2]], n: usize) -> &'static [[usize; 2]] {
    let shorter = starts.iter().map(|start| start.map(|at| if n <= 2 * MAX_TILE { at } else { at * MAX_TILE / 3 / n }));
    // A few numbers, for the life of the program: problems are plain values.
    Vec::leak(shorter.collect())
}

/// Allocates a workspace that is large enough for the forward pass and both kinds of backward pass.
fn workspace<T: Number>(device: &Device, problem: &Problem, splits: Option<usize>) -> tilewright::Result<Buffer<f32>> {
    let (shape, v_shape) = (shape(problem), v_shape(problem));
    let options = |backward| Options { backward, num_splits: splits, ..Options::new(problem.causal) };
    let two_pass = options(Backward::TwoPass);
    let backward = [&two_pass, &options(Backward::OnePass)]
        .map(|options| attention::backward_workspace::<T>(device, shape, shape, v_shape, options));
    let most = backward
        .into_iter()
        .fold(attention::forward_workspace::<T>(device, shape, shape, v_shape, &two_pass), usize::max);
    Buffer::poisoned(device, most)
}

impl<T: Number> Attention<T> {
    /// Allocates random inputs and NaN outputs. Queries and keys have the same length and number of heads.
    pub fn new(device: &Device, problem: Problem) -> tilewright::Result<Attention<T>> {
        let (shape, v_shape) = (shape(&problem), v_shape(&problem));
        let (len, v_len) = (elements(&shape)?, elements(&v_shape)?);
        let (biases, bias_workspace) = match problem.modifiers.relative {
            true => (
                problem.heads_q * attention::relative_bias_len(problem.n_q, problem.n_k),
                attention::relative_bias_workspace::<T>(device, shape, shape, v_shape),
            ),
            false => (0, 0),
        };
        device.check_memory(
            4.0 * (len as f64 + v_len as f64) * size_of::<T>() as f64 + 4.0 * (biases + bias_workspace) as f64,
        )?;
        Ok(Attention {
            device: device.clone(),
            problem,
            limit: tolerance(T::dtype()),
            q: normal(device, len, 1)?,
            k: normal(device, len, 2)?,
            v: normal(device, v_len, 3)?,
            d_o: normal(device, v_len, 4)?,
            o: Buffer::poisoned(device, v_len)?,
            lse: Buffer::poisoned(device, len / problem.d)?,
            dq: Buffer::poisoned(device, len)?,
            dk: Buffer::poisoned(device, len)?,
            dv: Buffer::poisoned(device, v_len)?,
            d_relative: Buffer::poisoned(device, biases)?,
            bias_workspace: Buffer::poisoned(device, bias_workspace)?,
            d_sinks: Buffer::poisoned(device, problem.heads_q)?,
            workspace: workspace::<T>(device, &problem, None)?,
            modifiers: ModifierTensors::new(device, &problem)?,
            splits: [None; 2],
        })
    }

    /// Splits each loop over KV blocks or query blocks into at most `splits` parts.
    pub fn with_splits(mut self, splits: usize) -> tilewright::Result<Attention<T>> {
        self.workspace = workspace::<T>(&self.device, &self.problem, Some(splits))?;
        self.splits = [Some(splits); 2];
        Ok(self)
    }

    /// Disables splits in the passes that are not split for `full`. The smaller problem would be split otherwise,
    /// because its grid has fewer programs than SMs.
    pub fn split_like(mut self, full: &Problem) -> Attention<T> {
        let (shape, v_shape, options) = (shape(full), v_shape(full), Options::new(full.causal));
        let forward = attention::forward_workspace::<T>(&self.device, shape, shape, v_shape, &options);
        let unsplit = Options { num_splits: Some(1), ..options.clone() };
        let backward =
            [&options, &unsplit].map(|o| attention::backward_workspace::<T>(&self.device, shape, shape, v_shape, o));
        self.splits = [forward == 0, backward[0] == backward[1]].map(|is_unsplit| is_unsplit.then_some(1));
        self
    }

    /// The names of the mask and of the score function.
    pub fn modifier_names(&self) -> [&'static str; 2] {
        [self.modifiers.mask().function.name, self.modifiers.score().function.name]
    }

    fn options<'a>(modifiers: &'a ModifierTensors, options: &Options, splits: Option<usize>) -> Options<'a> {
        let Options { causal, scale, precision, forward_tiles, dkdv_tiles, dq_tiles, backward, .. } = *options;
        Options {
            causal,
            mask: modifiers.mask(),
            score: modifiers.score(),
            sinks: modifiers.sinks(),
            cache: None,
            descale: None,
            scale,
            precision,
            forward_tiles,
            dkdv_tiles,
            dq_tiles,
            backward,
            num_splits: options.num_splits.or(splits),
            stream: options.stream.clone(),
        }
    }

    /// Sets the tolerance to `limit`, for matmuls that are less accurate than the element type.
    pub fn with_tolerance(mut self, limit: f64) -> Attention<T> {
        self.limit = limit;
        self
    }

    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Returns O.
    pub fn output(&self) -> &Buffer<T> {
        &self.o
    }

    /// Returns the gradient of O, an input of the backward pass.
    pub fn gradient_mut(&mut self) -> &mut Buffer<T> {
        &mut self.d_o
    }

    /// Injects a fault: writes a wrong number into dV.
    #[cfg(test)]
    pub fn corrupt_dv(&mut self, at: usize) -> tilewright::Result<()> {
        self.dv.slice_mut(at..at + 1)?.copy_from_slice(&[T::from_f32(9.0)])
    }

    pub fn forward(&mut self, options: &Options) -> tilewright::Result<()> {
        let (shape, v_shape) = (shape(&self.problem), v_shape(&self.problem));
        let options = Self::options(&self.modifiers, options, self.splits[0]);
        attention::forward_into(
            &self.device,
            Tensor::dense(self.q.view(), shape)?,
            Tensor::dense(self.k.view(), shape)?,
            Tensor::dense(self.v.view(), v_shape)?,
            TensorMut::dense(self.o.view_mut(), v_shape)?,
            self.lse.view_mut(),
            self.workspace.view_mut(),
            &options,
        )
    }

    /// Runs the backward pass on the outputs of [`Attention::forward`]: gradients of q, k and v, and those of a relative bias and of
    /// sinks.
    pub fn backward(&mut self, options: &Options) -> tilewright::Result<()> {
        let (shape, v_shape) = (shape(&self.problem), v_shape(&self.problem));
        let options = Self::options(&self.modifiers, options, self.splits[1]);
        let saved = Saved {
            q: Tensor::dense(self.q.view(), shape)?,
            k: Tensor::dense(self.k.view(), shape)?,
            v: Tensor::dense(self.v.view(), v_shape)?,
            o: Tensor::dense(self.o.view(), v_shape)?,
            lse: self.lse.view(),
            d_o: Tensor::dense(self.d_o.view(), v_shape)?,
        };
        attention::backward_into(
            &self.device,
            saved,
            TensorMut::dense(self.dq.view_mut(), shape)?,
            TensorMut::dense(self.dk.view_mut(), shape)?,
            TensorMut::dense(self.dv.view_mut(), v_shape)?,
            self.workspace.view_mut(),
            &options,
        )?;
        if self.problem.modifiers.relative {
            let (gradient, workspace) = (self.d_relative.view_mut(), self.bias_workspace.view_mut());
            attention::relative_bias_gradient_into(&self.device, saved, gradient, workspace, &options)?;
        }
        let Some(sinks) = options.sinks else { return Ok(()) };
        let Saved { o, lse, d_o, .. } = saved;
        attention::sink_gradients_into(&self.device, sinks, o, lse, d_o, self.d_sinks.view_mut())
    }

    /// Fills the outputs of the forward pass with NaN, so that elements that a kernel does not write are found.
    pub fn poison_forward(&mut self) -> tilewright::Result<()> {
        self.o.poison()?;
        self.lse.poison()?;
        self.workspace.poison()
    }

    /// As [`Attention::poison_forward`], for the backward pass.
    pub fn poison_backward(&mut self) -> tilewright::Result<()> {
        self.dq.poison()?;
        self.dk.poison()?;
        self.dv.poison()?;
        self.d_relative.poison()?;
        self.d_sinks.poison()?;
        self.workspace.poison()
    }

    /// Computes all results in f64 on the host, which is slow for large problems.
    pub fn expected(&self) -> tilewright::Result<Expected> {
        let [q, k, v, d_o] = [values(&self.q)?, values(&self.k)?, values(&self.v)?, values(&self.d_o)?];
        let (o, lse) = reference::forward(&self.problem, &q, &k, &v);
        let errors = reference::backward_errors(&self.problem, &q, &k, &v, &d_o, self.score_error());
        Ok(Expected { o, lse, gradients: reference::backward(&self.problem, &q, &k, &v, &d_o), errors })
    }

    /// The absolute error of a score, relative to the product of scale and the norms of q and k: of sums in f32, or of
    /// products in tf32.
    fn score_error(&self) -> f64 {
        let is_tf32 = T::dtype().bytes() == 4 && self.limit > tolerance(T::dtype());
        f64::exp2(if is_tf32 { -11.0 } else { -22.0 })
    }

    /// Returns the largest error of O and the log-sum-exp.
    pub fn check_forward(&self, expected: &Expected) -> Result<f64, BenchError> {
        let (o, lse) = (values(&self.o)?, values(&self.lse)?);
        max_error(self.limit, &[("o", &o, &expected.o, 0.0), ("lse", &lse, &expected.lse, 0.0)])
    }

    /// Returns the largest error of dQ, dK and dV.
    pub fn check_backward(&self, expected: &Expected) -> Result<f64, BenchError> {
        let Gradients { dq, dk, dv, d_relative, d_sinks } = &expected.gradients;
        let [found_q, found_k, found_v] = [values(&self.dq)?, values(&self.dk)?, values(&self.dv)?];
        let (found_relative, found_sinks) = (values(&self.d_relative)?, values(&self.d_sinks)?);
        let [error_q, error_k] = expected.errors;
        let mut found =
            vec![("dq", &found_q[..], &dq[..], error_q), ("dk", &found_k, dk, error_k), ("dv", &found_v, dv, 0.0)];
        if self.problem.modifiers.relative {
            found.push(("the gradient of the relative bias", &found_relative, d_relative, 0.0));
        }
        if self.problem.modifiers.sinks && T::dtype().bytes() == 4 {
            // Its terms cancel each other, so that the rounding of O in a short type would be most of it.
            found.push(("the gradients of the sinks", &found_sinks, d_sinks, 0.0));
        }
        max_error(self.limit, &found)
    }

    /// Returns the heads and rows that are checked in a large problem: the first, the last, and some in between.
    fn samples(&self) -> (Vec<usize>, Vec<usize>) {
        let heads = self.problem.batch * self.problem.heads_q;
        let of = |n: usize, between: usize| {
            // Positions that are not all multiples of a tile size.
            let mut places: Vec<usize> = (1..=between).map(|i| (i * n * 5 / 7 + i * n / 64) % n).collect();
            places.extend([0, n - 1]);
            places.sort_unstable();
            places.dedup();
            places
        };
        (of(heads, 1), of(self.problem.n_q, 5))
    }

    /// As [`Attention::check_forward`], for a few rows of the full problem. Finds errors that occur only when the whole
    /// GPU is busy.
    pub fn spot_check_forward(&self) -> Result<f64, BenchError> {
        let (heads, rows) = self.samples();
        let (mut found, mut want) = (Vec::new(), Vec::new());
        let (mut found_lse, mut want_lse) = (Vec::new(), Vec::new());
        for &head in &heads {
            let Head { q, k, v, o, lse, .. } = self.head(head)?;
            for &row in &rows {
                let p = &self.problem;
                let (o_row, lse_row) = p.one_row(head % p.heads_q, row, row_of(&q, row, p.d), &k, &v);
                want.extend(o_row);
                want_lse.push(lse_row);
                found.extend_from_slice(row_of(&o, row, p.d_v));
                found_lse.push(lse[row]);
            }
        }
        max_error(self.limit, &[("o", &found, &want, 0.0), ("lse", &found_lse, &want_lse, 0.0)])
    }

    /// As [`Attention::check_backward`], for a few rows. Expected gradients are computed from the O, and dK and dV from the
    /// log-sum-exp L, that the forward pass wrote.
    pub fn spot_check_backward(&self) -> Result<f64, BenchError> {
        let (heads, rows) = self.samples();
        let mut found: [Vec<f64>; 3] = Default::default();
        let mut want: [Vec<f64>; 3] = Default::default();
        let (mut squares, unit) = ([0.0; 3], self.score_error());
        for &head in &heads {
            let h = self.head(head)?;
            let gradients = [self.part(&self.dq, head)?, self.part(&self.dk, head)?, self.part(&self.dv, head)?];
            for &row in &rows {
                let p = &self.problem;
                let rows = [(&h.q, p.d), (&h.o, p.d_v), (&h.d_o, p.d_v)].map(|(x, d)| row_of(x, row, d));
                let at = [head % p.heads_q, row];
                let dq = p.one_row_gradient(at, rows, [&h.k, &h.v]);
                let (dk, dv, square) = self.key_row(&h, head % p.heads_q, row);
                squares[0] += p.one_row_gradient_error(at, rows, [&h.k, &h.v], unit).powi(2);
                squares[1] += square;
                for (i, gradient) in [dq, dk, dv].into_iter().enumerate() {
                    want[i].extend(gradient);
                    found[i].extend_from_slice(row_of(&gradients[i], row, if i == 2 { p.d_v } else { p.d }));
                }
            }
        }
        let names = ["dq", "dk", "dv"];
        let outputs = [0, 1, 2].map(|i| (names[i], &found[i][..], &want[i][..], f64::sqrt(squares[i])));
        max_error(self.limit, &outputs)
    }

    /// Computes dK and dV of key `j`: with P = exp(S − L) and dP = dO Vᵀ, dV = Σ P dO and dK = scale · Σ P (dP − dO·O)
    /// Q, each term times the derivative of the modified score. Also returns the square of a bound on the norm of the error
    /// of dK.
    fn key_row(&self, h: &Head, head: usize, j: usize) -> (Vec<f64>, Vec<f64>, f64) {
        let Problem { d, d_v, n_q, scale, .. } = self.problem;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (k, v) = (row_of(&h.k, j, d), row_of(&h.v, j, d_v));
        let (mut dk, mut dv, mut squares) = (vec![0.0; d], vec![0.0; d_v], 0.0);
        for i in (0..n_q).filter(|&i| self.problem.seen(i).contains(&j)) {
            let (q, d_o) = (row_of(&h.q, i, d), row_of(&h.d_o, i, d_v));
            let (score, derivative) = self.problem.modified(scale * dot(q, k), head, i, j);
            let p = (score - h.lse[i]).exp();
            let d_modified = p * (dot(d_o, v) - dot(d_o, row_of(&h.o, i, d_v)));
            let ds = scale * d_modified * derivative;
            squares += self.problem.ds_error([q, k], d_modified, self.score_error()).powi(2) * dot(q, q);
            dk.iter_mut().zip(q).for_each(|(dk, q)| *dk += ds * q);
            dv.iter_mut().zip(d_o).for_each(|(dv, d_o)| *dv += p * d_o);
        }
        (dk, dv, squares)
    }

    /// The elements of a head.
    fn part(&self, buffer: &Buffer<T>, head: usize) -> tilewright::Result<Vec<f64>> {
        let len = buffer.len() / (self.problem.batch * self.problem.heads_q);
        Ok(buffer.slice(head * len..(head + 1) * len)?.to_vec()?.into_iter().map(Value::to_f64).collect())
    }

    fn head(&self, head: usize) -> tilewright::Result<Head> {
        let rows = self.lse.slice(head * self.problem.n_q..(head + 1) * self.problem.n_q)?.to_vec()?;
        Ok(Head {
            q: self.part(&self.q, head)?,
            k: self.part(&self.k, head)?,
            v: self.part(&self.v, head)?,
            d_o: self.part(&self.d_o, head)?,
            o: self.part(&self.o, head)?,
            lse: rows.into_iter().map(f64::from).collect(),
        })
    }
}

/// One head of one batch entry.
struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
    o: Vec<f64>,
    lse: Vec<f64>,
}

/// The shape of q and k.
fn shape(p: &Problem) -> [usize; 4] {
    [p.batch, p.heads_q, p.n_q, p.d]
}

/// The shape of v and O.
fn v_shape(p: &Problem) -> [usize; 4] {
    [p.batch, p.heads_q, p.n_q, p.d_v]
}

fn row_of(x: &[f64], row: usize, d: usize) -> &[f64] {
    &x[row * d..(row + 1) * d]
}

/// Returns the largest error of `outputs`: name, found, expected, and what the norm of the error may be in addition to `limit`.
///
/// # Errors
/// A [`BenchError::WrongResult`] if an error exceeds both.
fn max_error(limit: f64, outputs: &[(&str, &[f64], &[f64], f64)]) -> Result<f64, BenchError> {
    let mut largest = 0.0_f64;
    for &(name, found, want, more) in outputs {
        let norm = relative_to(want);
        largest = largest.max(accept(name, relative_error(found, want), limit + more / norm)?);
    }
    Ok(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(n: usize, causal: bool) -> Problem {
        Problem {
            batch: 1,
            heads_q: 2,
            heads_kv: 2,
            n_q: n,
            n_k: n,
            d: 16,
            d_v: 16,
            causal,
            scale: 0.25,
            modifiers: Default::default(),
        }
    }

    fn assert_wrong(result: Result<f64, BenchError>, name: &str) {
        assert!(matches!(&result, Err(BenchError::WrongResult(why)) if why.contains(name)), "{name}: {result:?}");
    }

    #[test]
    fn checks_accept_right_and_reject_wrong_results() {
        for causal in [false, true] {
            let mut a = Attention::<f32>::new(&Device::cpu(), problem(70, causal)).unwrap();
            let expected = a.expected().unwrap();
            let options = Options::new(causal);
            assert_wrong(a.check_forward(&expected), "o");
            a.forward(&options).unwrap();
            a.backward(&options).unwrap();
            for error in [a.check_forward(&expected), a.spot_check_forward()] {
                assert!(error.unwrap() < 1e-5);
            }
            for error in [a.check_backward(&expected), a.spot_check_backward()] {
                assert!(error.unwrap() < 1e-5);
            }
            // A fault in the last row of each output.
            let last = 2 * 70 * 16 - 1;
            a.dv.slice_mut(last..).unwrap().copy_from_slice(&[9.0]).unwrap();
            assert_wrong(a.check_backward(&expected), "dv");
            assert_wrong(a.spot_check_backward(), "dv");
            a.dq.slice_mut(last..).unwrap().copy_from_slice(&[9.0]).unwrap();
            assert_wrong(a.spot_check_backward(), "dq");
            a.o.slice_mut(last..).unwrap().copy_from_slice(&[9.0]).unwrap();
            assert_wrong(a.spot_check_forward(), "o");
        }
    }

    /// The bound on errors of dQ and dK is as large as f32 requires, but finds wrong elements.
    #[test]
    fn softcaps_of_all_sizes_are_checked() {
        for softcap in [1e-6, 1e-3, 30.0] {
            let modifiers = reference::Modifiers { softcap: Some(softcap), ..Default::default() };
            let problem = Problem { modifiers, ..problem(70, true) };
            let mut a = Attention::<f32>::new(&Device::cpu(), problem).unwrap();
            let expected = a.expected().unwrap();
            let options = Options::new(true);
            a.forward(&options).unwrap();
            a.backward(&options).unwrap();
            let forward = [a.check_forward(&expected), a.spot_check_forward()];
            for error in forward.into_iter().chain([a.check_backward(&expected), a.spot_check_backward()]) {
                assert!(error.is_ok(), "{softcap}: {error:?}");
            }
            let last = 2 * 70 * 16 - 1;
            a.dq.slice_mut(last..).unwrap().copy_from_slice(&[9.0]).unwrap();
            assert_wrong(a.check_backward(&expected), "dq");
            assert_wrong(a.spot_check_backward(), "dq");
        }
    }

    /// What a launch took is found by its key, with modifiers and another head dimension of values, too.
    #[test]
    fn the_tiles_of_launches_are_found() {
        for (window, d_v) in [(None, 16), (Some(9), 24)] {
            let modifiers = reference::Modifiers { window, ..Default::default() };
            let problem = Problem { d_v, modifiers, ..problem(70, true) };
            let device = Device::cpu();
            let mut a = Attention::<f32>::new(&device, problem).unwrap();
            a.forward(&Options::new(true)).unwrap();
            a.backward(&Options { backward: Backward::TwoPass, ..Options::new(true) }).unwrap();
            let taken = super::super::tiles::taken::<f32>(&problem, a.modifier_names(), None, &device, false);
            assert!(taken.iter().all(Option::is_some), "{window:?}: {taken:?}");
        }
    }

    #[test]
    fn small_problem_keeps_the_tile_remainder() {
        for (n, smaller) in [(16384, 512), (16385, 513), (1000, 1000), (4097, 513), (1, 1)] {
            assert_eq!(small(&problem(n, true)).n_q, smaller);
        }
    }
}
