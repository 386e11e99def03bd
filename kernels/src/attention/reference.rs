//! Attention in f64 by its definition: the reference of the kernels.

/// Sizes of an attention problem, and the scale of the scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    pub batch: usize,
    pub heads_q: usize,
    /// Divides `heads_q`.
    pub heads_kv: usize,
    pub n_q: usize,
    pub n_k: usize,
    pub d: usize,
    /// Row i sees the keys j ≤ i + (n_k − n_q).
    pub causal: bool,
    pub scale: f64,
}

/// Gradients of the inputs of [`forward`], in their shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl Problem {
    /// The offset, in dense q or o, of the [n_q, d] matrix of a query head.
    fn query_matrix(&self, batch: usize, head: usize) -> usize {
        (batch * self.heads_q + head) * self.n_q * self.d
    }

    /// The offset, in dense k or v, of the [n_k, d] matrix that a query head reads.
    fn key_matrix(&self, batch: usize, head: usize) -> usize {
        let group = self.heads_q / self.heads_kv;
        (batch * self.heads_kv + head / group) * self.n_k * self.d
    }

    /// The number of keys that a row sees, from the first one on.
    fn seen(&self, row: usize) -> usize {
        if self.causal { (row + 1 + self.n_k).saturating_sub(self.n_q).min(self.n_k) } else { self.n_k }
    }

    /// Calls `f` for every (batch, head, row), with the index of the row among all rows, the row, the offset of its q
    /// row, and the offset of its k matrix.
    fn for_each_row(&self, mut f: impl FnMut(usize, usize, usize, usize)) {
        for batch in 0..self.batch {
            for head in 0..self.heads_q {
                for row in 0..self.n_q {
                    let at = (batch * self.heads_q + head) * self.n_q + row;
                    f(at, row, self.query_matrix(batch, head) + row * self.d, self.key_matrix(batch, head));
                }
            }
        }
    }

    /// Scores of one query row against the keys that it sees.
    fn scores(&self, q: &[f64], k: &[f64], row: usize, q_at: usize, k_at: usize) -> Vec<f64> {
        (0..self.seen(row)).map(|j| self.scale * self.inner(&q[q_at..], &k[k_at + j * self.d..])).collect()
    }

    fn inner(&self, a: &[f64], b: &[f64]) -> f64 {
        a[..self.d].iter().zip(b).map(|(x, y)| x * y).sum()
    }
}

/// log Σ exp; −∞ for an empty slice.
fn log_sum_exp(scores: &[f64]) -> f64 {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if highest == f64::NEG_INFINITY {
        return highest;
    }
    highest + scores.iter().map(|s| (s - highest).exp()).sum::<f64>().ln()
}

/// O and L of dense inputs: O = softmax(scale · Q Kᵀ) V, L the rows' log-sum-exp. A row that sees no key has O = 0 and
/// L = −∞.
pub fn forward(p: &Problem, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let rows = p.batch * p.heads_q * p.n_q;
    let (mut o, mut lse) = (vec![0.0; rows * p.d], vec![0.0; rows]);
    p.for_each_row(|at, row, q_at, k_at| {
        let scores = p.scores(q, k, row, q_at, k_at);
        lse[at] = log_sum_exp(&scores);
        for (j, s) in scores.iter().enumerate() {
            let weight = (s - lse[at]).exp();
            for x in 0..p.d {
                o[q_at + x] += weight * v[k_at + j * p.d + x];
            }
        }
    });
    (o, lse)
}

/// Gradients for dO, by the chain rule through the softmax: with P = softmax(S) and dP = dO Vᵀ,
/// dS = P ∘ (dP − rowsum(P ∘ dP)), dQ = scale · dS K, dK = scale · dSᵀ Q, dV = Pᵀ dO.
pub fn backward(p: &Problem, q: &[f64], k: &[f64], v: &[f64], d_o: &[f64]) -> Gradients {
    let mut g = Gradients { dq: vec![0.0; q.len()], dk: vec![0.0; k.len()], dv: vec![0.0; v.len()] };
    p.for_each_row(|_, row, q_at, k_at| {
        let scores = p.scores(q, k, row, q_at, k_at);
        let lse = log_sum_exp(&scores);
        let weights: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
        let d_weights: Vec<f64> = (0..scores.len()).map(|j| p.inner(&d_o[q_at..], &v[k_at + j * p.d..])).collect();
        let mean: f64 = weights.iter().zip(&d_weights).map(|(w, d)| w * d).sum();
        for (j, (w, d)) in weights.iter().zip(&d_weights).enumerate() {
            let ds = p.scale * w * (d - mean);
            for x in 0..p.d {
                let key = k_at + j * p.d + x;
                g.dq[q_at + x] += ds * k[key];
                g.dk[key] += ds * q[q_at + x];
                g.dv[key] += w * d_o[q_at + x];
            }
        }
    });
    g
}
