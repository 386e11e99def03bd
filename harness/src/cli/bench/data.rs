//! Random inputs of the benchmarks on a device, and the transfer of results to the host.

use half::{bf16, f16};
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::Float;
use tilewright::codegen::num;
use tilewright::kernels::FloatElement;
use tilewright::{Buffer, Device, Element, F8E4M3, F8E5M2, Result};

/// Element types of inputs and outputs.
pub trait Value: Element {
    /// Rounds a normal number to this type; integers get 32 times the number.
    fn from_f32(x: f32) -> Self;
    fn to_f64(self) -> f64;
}

/// Element types of the kernels that multiply and accumulate in f32.
pub trait Number: Value + FloatElement {}
impl<T: Value + FloatElement> Number for T {}

/// Element types of matmuls: those of [`Number`], and f64.
pub trait GemmElement: Value + Float {}
impl<T: Value + Float> GemmElement for T {}

macro_rules! values {
    ($($ty:ty: $from:expr, $to:expr;)*) => { $(
        impl Value for $ty {
            fn from_f32(x: f32) -> $ty {
                ($from)(x)
            }
            fn to_f64(self) -> f64 {
                ($to)(self)
            }
        }
    )* };
}

values! {
    f64: f64::from, |x| x;
    f32: |x| x, f64::from;
    f16: f16::from_f32, f64::from;
    bf16: bf16::from_f32, f64::from;
    F8E4M3: |x| F8E4M3(num::encode(DType::F8E4M3, f64::from(x)) as u8), |x: F8E4M3| num::decode(DType::F8E4M3, x.0.into());
    F8E5M2: |x| F8E5M2(num::encode(DType::F8E5M2, f64::from(x)) as u8), |x: F8E5M2| num::decode(DType::F8E5M2, x.0.into());
    i8: |x: f32| (32.0 * x).round() as i8, f64::from;
    i32: |x: f32| (32.0 * x).round() as i32, f64::from;
}

/// Period of the random numbers: a prime, so that consecutive rows, heads and tiles differ.
const PERIOD: usize = 1_000_003;

/// Allocates `len` numbers from a standard normal distribution on `device`. Constant data would distort timings: a
/// GPU's power, and with it its clock, depends on the data.
pub fn normal<T: Value>(device: &Device, len: usize, seed: u64) -> Result<Buffer<T>> {
    let mut random = SplitMix(seed);
    let block: Vec<T> = (0..len.min(PERIOD)).map(|_| T::from_f32(random.normal())).collect();
    let block = Buffer::from_slice(device, &block)?;
    if len <= PERIOD {
        return Ok(block);
    }
    let mut all = Buffer::uninit(device, len)?;
    for start in (0..len).step_by(PERIOD) {
        let count = PERIOD.min(len - start);
        all.slice_mut(start..start + count)?.copy_from(block.slice(..count)?)?;
    }
    Ok(all)
}

/// Copies a buffer to the host and converts it to f64.
pub fn values<T: Value>(buffer: &Buffer<T>) -> Result<Vec<f64>> {
    Ok(buffer.to_vec()?.into_iter().map(Value::to_f64).collect())
}

/// SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a normal number by the Box–Muller transform of two uniform numbers in (0, 1].
    fn normal(&mut self) -> f32 {
        let mut unit = || ((self.next() >> 40) + 1) as f32 / (1 << 24) as f32;
        let (a, b) = (unit(), unit());
        (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_normal_with_a_long_period() {
        let device = Device::cpu();
        let x = values(&normal::<f32>(&device, PERIOD + 1000, 1).unwrap()).unwrap();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 5e-3 && (variance - 1.0).abs() < 1e-2, "{mean} {variance}");
        assert_eq!(x[..1000], x[PERIOD..]);
        let y = values(&normal::<bf16>(&device, 1000, 2).unwrap()).unwrap();
        assert!(y.iter().zip(&x).filter(|(y, x)| (*y - *x).abs() < 1e-3).count() < 10);
    }
}
