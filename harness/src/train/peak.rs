//! Peak FLOP/s of a device, for model FLOP utilization (MFU).

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};

/// Peak rates of a GPU in dense matmuls with f32 accumulation, in FLOP/s: the vendor's figures without sparsity.
struct PeakRate {
    /// Substring of the GPU's name.
    name: &'static str,
    /// Rate of bf16 and f16.
    half: f64,
    tf32: f64,
}

const GPUS: [PeakRate; 8] = [
    PeakRate { name: "B200", half: 2250e12, tf32: 1125e12 },
    PeakRate { name: "H200", half: 989e12, tf32: 495e12 },
    PeakRate { name: "H100 PCIe", half: 756e12, tf32: 378e12 },
    PeakRate { name: "H100", half: 989e12, tf32: 495e12 },
    PeakRate { name: "GH200", half: 989e12, tf32: 495e12 },
    PeakRate { name: "A100", half: 312e12, tf32: 156e12 },
    PeakRate { name: "L40S", half: 362e12, tf32: 183e12 },
    PeakRate { name: "4090", half: 165e12, tf32: 83e12 },
];

/// Peak rate of matmuls in `dtype`, in FLOP/s: the vendor's figure for known GPUs (TF32 for f32), otherwise the
/// measured rate of a large matmul.
///
/// # Errors
/// Errors of the matmul.
pub fn peak_flops(device: &Device, gpu: Option<&str>, dtype: DType) -> Result<f64> {
    let known = gpu.and_then(|name| GPUS.iter().find(|gpu| name.contains(gpu.name)));
    if let Some(PeakRate { half, tf32, .. }) = known {
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
