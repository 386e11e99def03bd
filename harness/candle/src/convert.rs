//! Dtype conversion of flat slices.

use tilewright::kernels::{FloatElement, Tensor, TensorMut, cast};
use tilewright::{Device, Result, View, ViewMut};

/// Elements per launch: the kernel indexes with 32 bits.
const CHUNK: usize = 1 << 30;

/// Computes y = x, rounded to the nearest value of the dtype of y; for any length, in one pass over memory.
///
/// # Errors
/// Slices of different lengths, and those of the launches.
pub fn convert<T: FloatElement, U: FloatElement>(device: &Device, x: View<'_, T>, y: ViewMut<'_, U>) -> Result<()> {
    in_chunks(device, x, y, CHUNK)
}

fn in_chunks<T: FloatElement, U: FloatElement>(
    device: &Device,
    x: View<'_, T>,
    mut y: ViewMut<'_, U>,
    chunk: usize,
) -> Result<()> {
    let len = x.len().max(y.len());
    for start in (0..len).step_by(chunk) {
        let range = start..len.min(start + chunk);
        let shape = [1, range.len()];
        let to = TensorMut::dense(y.reborrow().slice(range.clone())?, shape)?;
        cast::forward(device, Tensor::dense(x.slice(range)?, shape)?, to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use tilewright::Buffer;

    use super::*;

    #[test]
    fn every_element_is_rounded_once() {
        let device = Device::cpu();
        for n in [0, 1, 100, 1001] {
            let values: Vec<f32> = (0..n).map(|i| (i as f32 - 300.5) * 1.001).collect();
            let x = Buffer::from_slice(&device, &values).unwrap();
            for chunk in [64, 100, 1 << 20] {
                let mut y = Buffer::<bf16>::zeros(&device, n).unwrap();
                in_chunks(&device, x.view(), y.view_mut(), chunk).unwrap();
                let expected: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                assert_eq!(y.to_vec().unwrap(), expected, "{n} in chunks of {chunk}");
                let mut back = Buffer::<f32>::zeros(&device, n).unwrap();
                in_chunks(&device, y.view(), back.view_mut(), chunk).unwrap();
                assert_eq!(back.to_vec().unwrap(), expected.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
            }
        }
        let (x, mut y) = (Buffer::<f32>::zeros(&device, 5).unwrap(), Buffer::<f32>::zeros(&device, 6).unwrap());
        assert!(convert(&device, x.view(), y.view_mut()).is_err());
    }
}
