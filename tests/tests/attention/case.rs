//! An attention problem with its inputs, as every test of the kernels needs it.

use tilewright::codegen::ir::DType;
use tilewright::codegen::num;
use tilewright::kernels::attention::reference::{self, Gradients, Problem};

/// How the tensors lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// [batch, heads, rows, d], dense.
    Dense,
    /// [batch, rows, heads, d], dense: what a projection of all heads at once gives.
    RowsFirst,
    /// Rows, heads and batches with unused memory between them, and every second number of a row.
    Gaps,
}

impl Layout {
    /// Strides of a [batch, heads, rows, d] tensor, and the number of elements that its memory has.
    pub fn strides(self, [batch, heads, rows, d]: [usize; 4]) -> ([i64; 4], usize) {
        let strides = match self {
            Layout::Dense => [heads * rows * d, rows * d, d, 1],
            Layout::RowsFirst => [rows * heads * d, d, heads * d, 1],
            Layout::Gaps => {
                let row = 2 * d + 3;
                let head = rows * row + 5;
                [heads * head + 7, head, row, 2]
            }
        };
        let len = match self {
            Layout::Dense | Layout::RowsFirst => batch * heads * rows * d,
            Layout::Gaps => batch * strides[0],
        };
        (strides.map(|s| s as i64), len)
    }
}

/// A tensor [batch, heads, rows, d] in memory of its own. What the layout leaves out is poison.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub shape: [usize; 4],
    pub strides: [i64; 4],
    /// NaN where no element lies.
    pub memory: Vec<f64>,
}

impl Tensor {
    pub fn new(shape: [usize; 4], layout: Layout, dense: &[f64]) -> Tensor {
        let mut tensor = Tensor::poisoned(shape, layout);
        for (i, &x) in dense.iter().enumerate() {
            let at = tensor.place(i);
            tensor.memory[at] = x;
        }
        tensor
    }

    pub fn poisoned(shape: [usize; 4], layout: Layout) -> Tensor {
        let (strides, len) = layout.strides(shape);
        Tensor { shape, strides, memory: vec![f64::NAN; len] }
    }

    /// Where the element lies that has this number in a dense tensor.
    fn place(&self, mut i: usize) -> usize {
        let mut at = 0;
        for axis in (0..4).rev() {
            at += i % self.shape[axis] * self.strides[axis] as usize;
            i /= self.shape[axis];
        }
        at
    }

    fn places(&self) -> impl Iterator<Item = usize> {
        (0..self.shape.iter().product()).map(|i| self.place(i))
    }

    /// The elements in dense order.
    pub fn dense(&self) -> Vec<f64> {
        self.places().map(|at| self.memory[at]).collect()
    }

    /// Panics where something was written between the elements.
    pub fn check_gaps(&self, what: &str) {
        let mut gap = vec![true; self.memory.len()];
        self.places().for_each(|at| gap[at] = false);
        let touched = gap.iter().zip(&self.memory).position(|(&gap, x)| gap && !x.is_nan());
        assert_eq!(touched, None, "{what} was written beside its elements");
    }
}

/// A problem, the type of its tensors, and their layout.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub problem: Problem,
    pub dtype: DType,
    pub layout: Layout,
    /// Replaces what the dtype explains.
    pub tolerance: Option<f64>,
}

/// Inputs that the dtype represents exactly.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
}

/// What the definition gives for them.
pub struct Expected {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub gradients: Gradients,
}

impl Case {
    /// One batch entry and one head, not causal, dense bf16.
    pub fn new(n_q: usize, n_k: usize, d: usize) -> Case {
        let scale = 1.0 / (d as f64).sqrt();
        let problem = Problem { batch: 1, heads_q: 1, heads_kv: 1, n_q, n_k, d, causal: false, scale };
        Case { problem, dtype: DType::BF16, layout: Layout::Dense, tolerance: None }
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

    pub fn within(mut self, tolerance: f64) -> Case {
        self.tolerance = Some(tolerance);
        self
    }

    pub fn heads(mut self, batch: usize, heads_q: usize, heads_kv: usize) -> Case {
        self.problem = Problem { batch, heads_q, heads_kv, ..self.problem };
        self
    }

    /// Shape of q, o and their gradients.
    pub fn query_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        [p.batch, p.heads_q, p.n_q, p.d]
    }

    /// Shape of k, v and their gradients.
    pub fn key_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        [p.batch, p.heads_kv, p.n_k, p.d]
    }

    fn random(&self, shape: [usize; 4], seed: u64) -> Tensor {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678_9ABC_DEF0;
        let dense: Vec<f64> = (0..shape.iter().product())
            .map(|_| {
                // xorshift64*: the upper half of the product is even enough for test inputs.
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                let bits = state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32;
                let x = (bits as f64 / (1u64 << 31) as f64 - 1.0) * 3f64.sqrt();
                num::decode(self.dtype, num::encode(self.dtype, x))
            })
            .collect();
        Tensor::new(shape, self.layout, &dense)
    }

    /// Numbers of mean 0 and variance 1.
    pub fn inputs(&self) -> Inputs {
        Inputs {
            q: self.random(self.query_shape(), 1),
            k: self.random(self.key_shape(), 2),
            v: self.random(self.key_shape(), 3),
            d_o: self.random(self.query_shape(), 4),
        }
    }

    pub fn expected(&self, inputs: &Inputs) -> Expected {
        let [q, k, v, d_o] = [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o].map(Tensor::dense);
        let (o, lse) = reference::forward(&self.problem, &q, &k, &v);
        let gradients = reference::backward(&self.problem, &q, &k, &v, &d_o);
        Expected { o, lse, gradients }
    }

    /// Largest relative error in the Frobenius norm that rounding in the dtype explains.
    pub fn tolerance(&self) -> f64 {
        let explained = match self.dtype {
            DType::BF16 => 1e-2,
            DType::F16 => 2e-3,
            _ => 1e-5,
        };
        self.tolerance.unwrap_or(explained)
    }

    /// Panics unless the tensors agree within [`Case::tolerance`].
    pub fn compare(&self, what: &str, found: &[f64], expected: &[f64]) {
        let norm: f64 = expected.iter().map(|y| y * y).sum();
        // Where the true result is zero, rounding of numbers of size 1 is what is left.
        let len = expected.len() as f64;
        let norm = if norm < 1e-20 * len { len } else { norm };
        self.compare_to_norm(what, found, expected, norm, self.tolerance());
    }

    /// As [`Case::compare`], for the logarithms L: near zero their absolute error is what counts.
    pub fn compare_lse(&self, found: &[f64], expected: &[f64]) {
        let norm = expected.iter().filter(|y| y.is_finite()).map(|y| y * y).sum::<f64>();
        let tolerance = self.tolerance.unwrap_or(1e-5);
        self.compare_to_norm("lse", found, expected, norm.max(expected.len() as f64), tolerance);
    }

    /// NaN never agrees; infinities must be equal.
    fn compare_to_norm(&self, what: &str, found: &[f64], expected: &[f64], norm: f64, tolerance: f64) {
        assert_eq!(found.len(), expected.len(), "{what} of {self:?}");
        let mut error = 0.0;
        for (i, (x, y)) in found.iter().zip(expected).enumerate().filter(|(_, (x, y))| x != y) {
            assert!(x.is_finite() && y.is_finite(), "{what} of {self:?}: element {i} is {x}, expected {y}");
            error += (x - y) * (x - y);
        }
        let relative = if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
        assert!(relative < tolerance, "{what} of {self:?}: relative error {relative:.2e}, allowed {tolerance:.0e}");
    }
}
