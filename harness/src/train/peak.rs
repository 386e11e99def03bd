//! Peak FLOP/s of a device, for model FLOP utilization (MFU).

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};

/// Peak rates of dense matmuls with f32 accumulation, in FLOP/s: the vendor's figures without sparsity. A row has a
/// substring of the GPU's name, the rate of bf16 and f16, and that of TF32.
const GPUS: [(&str, f64, f64); 8] = [
    ("B200", 2250e12, 1125e12),
    ("H200", 989e12, 495e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100", 989e12, 495e12),
    ("GH200", 989e12, 495e12),
    ("A100", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("4090", 165e12, 83e12),
];

/// Peak rate of matmuls in `dtype`, in FLOP/s: the vendor's figure for known GPUs (TF32 for f32), otherwise the
/// measured rate of a large matmul.
///
/// # Errors
/// Errors of the matmul.
pub fn peak_flops(device: &Device, gpu: Option<&str>, dtype: DType) -> Result<f64> {
    let known = gpu.and_then(|name| GPUS.iter().find(|(part, ..)| name.contains(part)));
    if let Some((_, half, tf32)) = known {
        return Ok(if dtype == DType::F32 { *tf32 } else { *half });
    }
    // The CPU computes in f32, whatever the model's dtype.
    let (n, dtype) = if device.is_cpu() { (768, DType::F32) } else { (8192, dtype) };
    let a = Tensor::ones((n, n), dtype, device)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        drop(a.matmul(&a)?);
        device.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (n as f64).powi(3) / best)
}
