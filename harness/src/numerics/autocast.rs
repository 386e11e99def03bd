//! Mixed precision in the manner of PyTorch's `autocast`: parameters stay f32, and each operation selects its compute
//! dtype.

use candle_core::{DType, Device, Result, Tensor, Var};

use crate::report::{Cell, Column, Report, Table};

/// Selects the compute dtype of each operation.
///
/// Matmuls take 16-bit operands, accumulate in f32 and return a 16-bit result, as tensor cores do. Normalizations,
/// softmax and losses compute in f32 for any input. All other operations use the dtype of their operand.
#[derive(Clone, Copy, Debug)]
pub struct Autocast {
    /// Dtype of matmuls: F16 or BF16; `None` for f32 throughout.
    pub low: Option<DType>,
}

impl Autocast {
    /// `x · wᵀ` for x [rows, in] and w [out, in].
    pub fn linear(&self, x: &Tensor, w: &Tensor) -> Result<Tensor> {
        match self.low {
            None => x.matmul(&w.t()?),
            Some(low) => {
                let operand = |t: &Tensor| t.to_dtype(low)?.to_dtype(DType::F32);
                operand(x)?.matmul(&operand(w)?.t()?)?.to_dtype(low)
            }
        }
    }

    /// LayerNorm over the last dimension, in f32.
    pub fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        layer_norm(&x.to_dtype(DType::F32)?, weight, bias)
    }

    /// ReLU, in the dtype of the operand.
    pub fn relu(&self, x: &Tensor) -> Result<Tensor> {
        x.relu()
    }

    /// Mean of −log softmax(logits)[target], in f32; logits [rows, classes], targets [rows] of u32.
    pub fn cross_entropy(&self, logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = logits.to_dtype(DType::F32)?;
        let shifted = logits.broadcast_sub(&logits.max_keepdim(1)?.detach())?;
        let log_sum = shifted.exp()?.sum_keepdim(1)?.log()?;
        let chosen = shifted.gather(&targets.unsqueeze(1)?, 1)?;
        (log_sum - chosen)?.mean_all()
    }
}

/// (x − mean) / √(variance + 1e-5) · weight + bias, with every step in the dtype of x.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let last = x.rank() - 1;
    let centered = x.broadcast_sub(&x.mean_keepdim(last)?)?;
    let variance = centered.sqr()?.mean_keepdim(last)?;
    centered.broadcast_div(&(variance + 1e-5)?.sqrt()?)?.broadcast_mul(weight)?.broadcast_add(bias)
}

/// The toy model of the assignment: fc1 (in → 10, no bias), ReLU, LayerNorm, fc2 (10 → out, no bias).
pub struct ToyModel {
    parameters: Vec<(&'static str, Var)>,
}

/// A tensor of the model and its dtype.
pub struct TensorType {
    pub name: String,
    pub dtype: DType,
}

const HIDDEN: usize = 10;

impl ToyModel {
    /// Creates f32 parameters from a fixed pseudo-random sequence.
    pub fn new(inputs: usize, outputs: usize) -> Result<ToyModel> {
        let matrix = |rows: usize, columns: usize, seed: u64| {
            let scale = 1.0 / (columns as f32).sqrt();
            let values: Vec<f32> = uniform(seed).take(rows * columns).map(|v| scale * v).collect();
            Var::from_tensor(&Tensor::from_vec(values, (rows, columns), &Device::Cpu)?)
        };
        let parameters = vec![
            ("fc1.weight", matrix(HIDDEN, inputs, 1)?),
            ("ln.weight", Var::ones(HIDDEN, DType::F32, &Device::Cpu)?),
            ("ln.bias", Var::zeros(HIDDEN, DType::F32, &Device::Cpu)?),
            ("fc2.weight", matrix(outputs, HIDDEN, 2)?),
        ];
        Ok(ToyModel { parameters })
    }

    /// Runs forward and backward on synthetic data under `autocast`, and returns the dtypes of the parameters, the
    /// tensors of the forward pass and the gradients of the parameters.
    ///
    /// # Errors
    /// Errors of candle, or a parameter without a gradient.
    pub fn step(&self, autocast: Autocast) -> Result<Vec<TensorType>> {
        let [fc1, ln_weight, ln_bias, fc2] = [0, 1, 2, 3].map(|i| self.parameters[i].1.as_tensor());
        let (inputs, outputs) = (fc1.dim(1)?, fc2.dim(0)?);
        const ROWS: usize = 8;
        let x: Vec<f32> = uniform(3).take(ROWS * inputs).collect();
        let x = Tensor::from_vec(x, (ROWS, inputs), &Device::Cpu)?;
        let targets: Vec<u32> = (0..ROWS).map(|i| (i % outputs) as u32).collect();
        let targets = Tensor::from_vec(targets, ROWS, &Device::Cpu)?;

        let fc1_out = autocast.linear(&x, fc1)?;
        let relu_out = autocast.relu(&fc1_out)?;
        let ln_out = autocast.layer_norm(&relu_out, ln_weight, ln_bias)?;
        let logits = autocast.linear(&ln_out, fc2)?;
        let loss = autocast.cross_entropy(&logits, &targets)?;
        let gradients = loss.backward()?;

        let entry = |name: &str, dtype: DType| TensorType { name: name.to_string(), dtype };
        let mut all: Vec<TensorType> =
            self.parameters.iter().map(|(name, var)| entry(&format!("parameter {name}"), var.dtype())).collect();
        let outputs = [
            ("input", &x),
            ("output of fc1", &fc1_out),
            ("output of ReLU", &relu_out),
            ("output of LayerNorm", &ln_out),
            ("logits", &logits),
            ("loss", &loss),
        ];
        all.extend(outputs.map(|(name, tensor)| entry(name, tensor.dtype())));
        for (name, var) in &self.parameters {
            let gradient = gradients
                .get(var.as_tensor())
                .ok_or_else(|| candle_core::Error::Msg(format!("the parameter {name} has no gradient")))?;
            all.push(entry(&format!("gradient of {name}"), gradient.dtype()));
        }
        Ok(all)
    }
}

/// Numbers from −1 to 1, a function of the seed only (xorshift64*, S. Vigna 2014).
pub fn uniform(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        bits as f32 / (1 << 23) as f32 - 1.0
    })
}

/// Returns a table of the dtypes in f32, and under autocast to f16 and bf16.
///
/// # Errors
/// Errors of candle.
pub fn report() -> Result<Report> {
    let model = ToyModel::new(16, 5)?;
    let runs = [None, Some(DType::F16), Some(DType::BF16)]
        .into_iter()
        .map(|low| model.step(Autocast { low }))
        .collect::<Result<Vec<_>>>()?;
    let mut table = Table::new(
        "autocast",
        "Types in the toy model",
        [
            Column::text("tensor"),
            Column::text("without autocast").key("f32"),
            Column::text("autocast to f16").key("f16"),
            Column::text("autocast to bf16").key("bf16"),
        ],
    );
    for (i, first) in runs[0].iter().enumerate() {
        let dtype = |run: usize| Cell::from(runs[run][i].dtype.as_str());
        table.push([Cell::from(first.name.as_str()), dtype(0), dtype(1), dtype(2)]);
    }
    Ok(Report::new("autocast", "Types under autocast")
        .text(
            "Autocast does not change the parameters: they are f32, and each matmul casts its operands to 16 bits. Its result \
             stays in 16 bits until an operation that needs more: LayerNorm, whose mean and variance are sums, and the \
             loss, whose exponentials and logarithms span a wide range, compute in f32 and return f32. Casts are part of \
             the autograd graph, so the gradient of a cast parameter is cast back: gradients have the dtype of the \
             parameters, and the optimizer works in f32 throughout.",
        )
        .table(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(low: Option<DType>) -> Vec<(String, DType)> {
        let types = ToyModel::new(16, 5).unwrap().step(Autocast { low }).unwrap();
        types.into_iter().map(|entry| (entry.name, entry.dtype)).collect()
    }

    /// The dtypes that the documentation of PyTorch autocast states for these operations.
    #[test]
    fn matmuls_are_16_bit_and_the_rest_is_f32() {
        for low in [DType::F16, DType::BF16] {
            for (name, dtype) in types(Some(low)) {
                let narrow = ["output of fc1", "output of ReLU", "logits"].contains(&name.as_str());
                assert_eq!(dtype, if narrow { low } else { DType::F32 }, "{name}");
            }
        }
        assert!(types(None).iter().all(|(_, dtype)| *dtype == DType::F32));
        assert_eq!(types(None).len(), 14);
    }

    #[test]
    fn the_loss_in_bf16_is_near_that_in_f32() {
        let logits = Tensor::from_vec(vec![1_f32, 2.0, 3.0, 0.0, 0.0, 0.0], (2, 3), &Device::Cpu).unwrap();
        let targets = Tensor::from_vec(vec![2_u32, 0], 2, &Device::Cpu).unwrap();
        let loss = Autocast { low: None }.cross_entropy(&logits, &targets).unwrap().to_scalar::<f32>().unwrap();
        let expected = ((-2_f32).exp() + (-1_f32).exp() + 1.0).ln() / 2.0 + 3_f32.ln() / 2.0;
        assert!((loss - expected).abs() < 1e-6, "{loss} {expected}");
        let x = Tensor::from_vec(uniform(5).take(32).collect(), (2, 16), &Device::Cpu).unwrap();
        let w = Tensor::from_vec(uniform(6).take(48).collect(), (3, 16), &Device::Cpu).unwrap();
        let matmul = |low| {
            let result = Autocast { low }.linear(&x, &w).unwrap().to_dtype(DType::F32).unwrap();
            result.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let wide = matmul(None);
        for (low, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 4e-2)] {
            let narrow = matmul(Some(low));
            assert!(wide.iter().zip(&narrow).all(|(a, b)| (a - b).abs() < tolerance), "{wide:?} {narrow:?}");
            assert_ne!(wide, narrow);
        }
    }
}
