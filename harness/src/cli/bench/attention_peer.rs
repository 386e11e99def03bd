//! Candle's attention on the CPU (matmul, softmax, matmul), which `bench attention` times for comparison.

use candle_core::{Device, Tensor};
use tilewright::Error;

use super::attention_check::Attention;
use super::data::{Number, values};
use super::record::BenchError;
use crate::cli::demo::case::relative_error;

/// Inputs of an attention problem as candle tensors.
pub struct Peer {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: f64,
    /// Additive mask: −∞ at masked keys.
    mask: Option<Tensor>,
}

impl Peer {
    /// Copies the inputs of `ours`, as f32.
    pub fn new<T: Number>(ours: &Attention<T>) -> Result<Peer, BenchError> {
        let p = &ours.problem;
        let tensor = |values: Vec<f64>, d: usize| {
            let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
            Tensor::from_vec(values, (p.batch, p.heads_q, p.n_q, d), &Device::Cpu).map_err(candle_error)
        };
        let mask_value = |at: usize| if at % p.n_k + p.n_q <= at / p.n_k + p.n_k { 0.0 } else { f32::NEG_INFINITY };
        let mask = p.causal.then(|| {
            Tensor::from_iter((0..p.n_q * p.n_k).map(mask_value), &Device::Cpu)
                .and_then(|mask| mask.reshape((p.n_q, p.n_k)))
                .map_err(candle_error)
        });
        let (q, k, v) =
            (tensor(values(&ours.q)?, p.d)?, tensor(values(&ours.k)?, p.d)?, tensor(values(&ours.v)?, p.d_v)?);
        Ok(Peer { q, k, v, scale: p.scale, mask: mask.transpose()? })
    }

    /// Computes softmax(scale · Q Kᵀ) V.
    pub fn run(&self) -> Result<Tensor, Error> {
        self.compute().map_err(|error| Error::Kernel(error.to_string()))
    }

    fn compute(&self) -> candle_core::Result<Tensor> {
        let scores = ((&self.q * self.scale)?).matmul(&self.k.t()?)?;
        let scores = match &self.mask {
            None => scores,
            Some(mask) => scores.broadcast_add(mask)?,
        };
        candle_nn::ops::softmax_last_dim(&scores)?.matmul(&self.v)
    }

    /// Returns the relative difference of candle's result from ours, which has been checked.
    pub fn difference<T: Number>(&self, ours: &Attention<T>) -> Result<f64, BenchError> {
        let found = self.run()?.flatten_all().and_then(|o| o.to_vec1::<f32>()).map_err(candle_error)?;
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        Ok(relative_error(&found, &values(&ours.o)?))
    }
}

fn candle_error(error: candle_core::Error) -> BenchError {
    BenchError::Unsupported(error.to_string())
}
