//! FlashAttention-2 against its definition: problems, inputs and expected outputs for the tests in the interpreter, on
//! the CPU and on GPUs.

use crate::numerics::{HostTensor, Random, relative_error, tolerance};
use half::{bf16, f16};
use tilewright::codegen::ir::DType;
use tilewright::kernels::FloatElement;
use tilewright::kernels::attention::reference::{self, Gradients, ModifierTensors, Modifiers, Problem};
use tilewright::kernels::attention::{self, Backward, Options, Saved, Tensor, TensorMut};
use tilewright::prelude::{Buffer, Device, Element};

/// A score that each row has beside its keys.
pub const SINKS: Modifiers = Modifiers {
    window: None,
    prefix: None,
    documents: None,
    softcap: None,
    alibi: false,
    relative: false,
    sinks: true,
};

/// A bias for each distance of a key.
pub const RELATIVE: Modifiers = Modifiers { relative: true, sinks: false, ..SINKS };

/// The memory layout of the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// [batch, heads, rows, d], dense.
    Dense,
    /// [batch, rows, heads, d], dense: the output of one projection for all heads.
    RowsFirst,
    /// Gaps between rows, heads and batches, and elements at a stride of 2.
    Gaps,
}

impl Layout {
    pub fn strides(self, [_, heads, rows, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Layout::Dense => [heads * rows * d, rows * d, d, 1],
            Layout::RowsFirst => [rows * heads * d, d, heads * d, 1],
            Layout::Gaps => {
                let row = 2 * d + 3;
                let head = rows * row + 5;
                [heads * head + 7, head, row, 2]
            }
        }
    }
}

/// A problem with the element type and the layout of its tensors.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub problem: Problem,
    pub dtype: DType,
    pub layout: Layout,
    /// Replaces the default tolerance of the type.
    pub tolerance: Option<f64>,
}

/// Inputs, rounded to the element type.
pub struct Inputs {
    pub q: HostTensor,
    pub k: HostTensor,
    pub v: HostTensor,
    pub d_o: HostTensor,
}

/// The expected outputs.
pub struct Expected {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub gradients: Gradients,
}

impl Case {
    /// One batch entry and one head, not causal, dense bf16.
    pub fn new(n_q: usize, n_k: usize, d: usize) -> Case {
        let scale = 1.0 / (d as f64).sqrt();
        let problem = Problem {
            batch: 1,
            heads_q: 1,
            heads_kv: 1,
            n_q,
            n_k,
            d,
            d_v: d,
            causal: false,
            scale,
            modifiers: Modifiers::default(),
        };
        Case { problem, dtype: DType::BF16, layout: Layout::Dense, tolerance: None }
    }

    pub fn modifiers(mut self, modifiers: Modifiers) -> Case {
        self.problem.modifiers = modifiers;
        self
    }

    pub fn causal(mut self) -> Case {
        self.problem.causal = true;
        self
    }

    pub fn dtype(mut self, dtype: DType) -> Case {
        self.dtype = dtype;
        self
    }

    pub fn layout(mut self, layout: Layout) -> Case {
        self.layout = layout;
        self
    }

    pub fn with_tolerance(mut self, tolerance: f64) -> Case {
        self.tolerance = Some(tolerance);
        self
    }

    pub fn heads(mut self, batch: usize, heads_q: usize, heads_kv: usize) -> Case {
        self.problem = Problem { batch, heads_q, heads_kv, ..self.problem };
        self
    }

    /// With values of another head dimension.
    pub fn values(mut self, d_v: usize) -> Case {
        self.problem.d_v = d_v;
        self
    }

    /// The shape of q and its gradient.
    pub fn query_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        [p.batch, p.heads_q, p.n_q, p.d]
    }

    /// The shape of o and its gradient.
    pub fn result_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        [p.batch, p.heads_q, p.n_q, p.d_v]
    }

    /// The shape of k and its gradient.
    pub fn key_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        [p.batch, p.heads_kv, p.n_k, p.d]
    }

    /// The shape of v and its gradient.
    pub fn value_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        [p.batch, p.heads_kv, p.n_k, p.d_v]
    }

    /// A tensor of these values, in the type and layout of the case.
    pub fn tensor(&self, shape: [usize; 4], values: &[f64]) -> HostTensor {
        HostTensor::of(self.dtype, &shape, &self.layout.strides(shape), values)
    }

    /// A poisoned output.
    pub fn poisoned(&self, shape: [usize; 4]) -> HostTensor {
        HostTensor::poisoned(self.dtype, &shape, &self.layout.strides(shape))
    }

    /// Inputs with mean 0 and variance 1.
    pub fn inputs(&self) -> Inputs {
        let mut random = Random::new(9);
        let mut tensor = |shape: [usize; 4]| {
            let values: Vec<f64> = (0..shape.iter().product()).map(|_| random.number() * 3f64.sqrt()).collect();
            self.tensor(shape, &values)
        };
        let [q, k, v, d_o] =
            [self.query_shape(), self.key_shape(), self.value_shape(), self.result_shape()].map(&mut tensor);
        Inputs { q, k, v, d_o }
    }

    pub fn expected(&self, inputs: &Inputs) -> Expected {
        let [q, k, v, d_o] = [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o].map(HostTensor::values);
        let (o, lse) = reference::forward(&self.problem, &q, &k, &v);
        let gradients = reference::backward(&self.problem, &q, &k, &v, &d_o);
        Expected { o, lse, gradients }
    }

    /// Fails unless the gradients of the sinks are those of this O, as it is rounded: −Σ exp(s − L) · (dO · O) of each head, whose
    /// terms cancel each other.
    #[track_caller]
    pub fn check_sinks(&self, found: &HostTensor, o: &HostTensor, inputs: &Inputs, expected: &Expected) {
        let p = &self.problem;
        let (o, d_o) = (o.values(), inputs.d_o.values());
        let mut want = vec![0.0; p.heads_q];
        for (row, (o, d_o)) in o.chunks(p.d_v).zip(d_o.chunks(p.d_v)).enumerate() {
            let head = row / p.n_q % p.heads_q;
            let product: f64 = o.iter().zip(d_o).map(|(o, d_o)| o * d_o).sum();
            want[head] -= (reference::sink_score(head) - expected.lse[row]).exp() * product;
        }
        self.check("d_sinks", found, &want);
        if self.dtype == DType::F32 {
            self.check("d_sinks", found, &expected.gradients.d_sinks);
        }
    }

    /// Fails unless the tensor agrees with `want` and its gaps are unchanged.
    #[track_caller]
    pub fn check(&self, what: &str, found: &HostTensor, want: &[f64]) {
        let norm: f64 = want.iter().map(|x| x * x).sum();
        let got = found.values();
        // Where the true result is zero (a row with one key has no gradient of its score), the error is relative to 1:
        // what remains is the rounding of numbers of that size.
        let zero = norm < 1e-20 * want.len() as f64;
        let (got, want): (Vec<f64>, Vec<f64>) =
            if zero { got.iter().map(|x| (1.0 + x, 1.0)).unzip() } else { (got, want.to_vec()) };
        self.check_error(what, relative_error(&got, &want), self.tolerance.unwrap_or(tolerance(self.dtype)));
        found.check_gaps(what);
    }

    /// As [`Case::check`], for the log-sum-exp L: near zero the absolute error counts.
    #[track_caller]
    pub fn check_lse(&self, found: &HostTensor, want: &[f64]) {
        let finite = |x: f64| if x == f64::NEG_INFINITY { None } else { Some(1.0 + x.abs()) };
        let (mut got, mut wanted) = (Vec::new(), Vec::new());
        for (i, (x, y)) in found.values().into_iter().zip(want).enumerate() {
            match (finite(x), finite(*y)) {
                (Some(_), Some(size)) => {
                    got.push(size + (x - y));
                    wanted.push(size);
                }
                (None, None) => {}
                _ => panic!("lse of {self:?}: row {i} has {x}, expected {y}"),
            }
        }
        self.check_error("lse", relative_error(&got, &wanted), self.tolerance.unwrap_or(1e-5));
        found.check_gaps("lse");
    }

    #[track_caller]
    fn check_error(&self, what: &str, error: f64, tolerance: f64) {
        assert!(
            error <= tolerance,
            "{what} of {self:?}: relative error {error:.3e}, at most {tolerance:.1e} is allowed"
        );
    }
}

/// A poisoned dense f32 vector.
pub fn poisoned_rows(rows: usize) -> HostTensor {
    HostTensor::poisoned(DType::F32, &[rows], &[1])
}

/// Runs forward and backward on the device, with the tiles and precision of the options, and compares with the
/// definition.
pub fn check(device: &Device, case: Case, options: &Options) {
    match case.dtype {
        DType::BF16 => check_typed::<bf16>(device, case, options),
        DType::F16 => check_typed::<f16>(device, case, options),
        DType::F32 => check_typed::<f32>(device, case, options),
        other => panic!("attention does not compute in {other}"),
    }
}

fn array(list: &[usize]) -> [usize; 4] {
    list.try_into().expect("four dimensions")
}

pub(crate) fn input<'a, T: Element>(buffer: &'a Buffer<T>, like: &HostTensor) -> Tensor<'a, T> {
    let strides = array(&like.strides).map(|s| s as i64);
    Tensor::strided(buffer.view(), array(&like.shape), strides).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn output<'a, T: FloatElement>(buffer: &'a mut Buffer<T>, like: &HostTensor) -> TensorMut<'a, T> {
    let strides = array(&like.strides).map(|s| s as i64);
    TensorMut::strided(buffer.view_mut(), array(&like.shape), strides).unwrap_or_else(|e| panic!("{e}"))
}

fn check_typed<T: FloatElement>(device: &Device, case: Case, options: &Options) {
    let tensors = ModifierTensors::new(device, &case.problem).unwrap_or_else(|e| panic!("{case:?}: {e}"));
    let (mask, score, sinks) = (tensors.mask(), tensors.score(), tensors.sinks());
    let (causal, scale) = (case.problem.causal, Some(case.problem.scale as f32));
    let options = Options { causal, scale, mask, score, sinks, ..options.clone() };
    let inputs = case.inputs();
    let expected = case.expected(&inputs);
    let Inputs { q, k, v, d_o } = &inputs;
    let [q_buffer, k_buffer, v_buffer, do_buffer] = [q, k, v, d_o].map(|t| t.upload::<T>(device));
    let (q_in, k_in, v_in) = (input(&q_buffer, q), input(&k_buffer, k), input(&v_buffer, v));
    let downloaded = |mut host: HostTensor, buffer: &Buffer<T>| {
        host.download(buffer);
        host
    };

    let mut o = case.poisoned(case.result_shape());
    let mut lse = poisoned_rows(expected.lse.len());
    let (mut o_buffer, mut lse_buffer) = (o.upload::<T>(device), lse.upload::<f32>(device));
    let o_out = output(&mut o_buffer, &o);
    let (q_shape, k_shape, v_shape) = (case.query_shape(), case.key_shape(), case.value_shape());
    let workspace = attention::forward_workspace::<T>(device, q_shape, k_shape, v_shape, &options);
    let mut workspace = Buffer::<f32>::poisoned(device, workspace).unwrap_or_else(|e| panic!("{e}"));
    attention::forward_into(device, q_in, k_in, v_in, o_out, lse_buffer.view_mut(), workspace.view_mut(), &options)
        .unwrap_or_else(|e| panic!("{case:?}: {e}"));
    o = downloaded(o, &o_buffer);
    lse.download(&lse_buffer);
    case.check("o", &o, &expected.o);
    case.check_lse(&lse, &expected.lse);

    let (o_in, do_in) = (input(&o_buffer, &o), input(&do_buffer, d_o));
    let saved = Saved { q: q_in, k: k_in, v: v_in, o: o_in, lse: lse_buffer.view(), d_o: do_in };
    if let Some(sinks) = options.sinks {
        let d_sinks = attention::sink_gradients(device, sinks, o_in, lse_buffer.view(), do_in);
        let d_sinks = d_sinks.and_then(|d_sinks| d_sinks.to_vec()).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        let d_sinks: Vec<f64> = d_sinks.into_iter().map(f64::from).collect();
        let found = HostTensor::of(DType::F32, &[d_sinks.len()], &[1], &d_sinks);
        case.check_sinks(&found, &o, &inputs, &expected);
    }
    if case.problem.modifiers.relative {
        let gradient = attention::relative_bias_gradient(device, saved, &options);
        let gradient = gradient.and_then(|x| x.to_vec()).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        let gradient: Vec<f64> = gradient.into_iter().map(f64::from).collect();
        let found = HostTensor::of(DType::F32, &[gradient.len()], &[1], &gradient);
        case.check("the gradient of the relative bias", &found, &expected.gradients.d_relative);
    }
    let mut ordered: Option<HostTensor> = None;
    for backward in [Backward::TwoPass, Backward::OnePass, Backward::Ordered, Backward::Ordered] {
        let options = Options { backward, ..options.clone() };
        let [query, key, value] = [q_shape, k_shape, v_shape].map(|shape| case.poisoned(shape));
        let [mut dq, mut dk, mut dv] = [&query, &key, &value].map(|tensor| tensor.upload::<T>(device));
        let workspace = attention::backward_workspace::<T>(device, q_shape, k_shape, v_shape, &options);
        let mut workspace = Buffer::<f32>::poisoned(device, workspace).unwrap_or_else(|e| panic!("{e}"));
        let (dq_out, dk_out, dv_out) = (output(&mut dq, &query), output(&mut dk, &key), output(&mut dv, &value));
        attention::backward_into(device, saved, dq_out, dk_out, dv_out, workspace.view_mut(), &options)
            .unwrap_or_else(|e| panic!("{case:?}, {backward:?}: {e}"));
        case.check(&format!("dv of {backward:?}"), &downloaded(value, &dv), &expected.gradients.dv);
        case.check(&format!("dk of {backward:?}"), &downloaded(key, &dk), &expected.gradients.dk);
        let dq = downloaded(query, &dq);
        case.check(&format!("dq of {backward:?}"), &dq, &expected.gradients.dq);
        if let Some(first) = ordered.take() {
            assert!(first.bytes == dq.bytes, "{case:?}: dQ of two ordered runs differs");
        } else if backward == Backward::Ordered {
            ordered = Some(dq);
        }
    }
}
