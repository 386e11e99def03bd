//! Test tensors: random inputs, poisoned outputs, and errors against f64 references.

use tilewright::{Buffer, Device, Element};
use tilewright_codegen::ir::DType;
use tilewright_codegen::num;

/// Reproducible random numbers: SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number uniform in [−1, 1).
    pub fn number(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Integers from −4 to 4: sums of their products are exact.
pub fn integers<T: From<i8>>(n: usize, seed: u64) -> Vec<T> {
    let mut random = Random::new(seed);
    (0..n).map(|_| T::from((random.number() * 4.0).round() as i8)).collect()
}

/// A tensor in host memory: elements at strides, with poison (bytes 0xff: NaN for floats) everywhere else.
#[derive(Clone, Debug)]
pub struct HostTensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// In elements.
    pub strides: Vec<usize>,
    /// Elements of memory before the first one.
    pub first: usize,
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// A tensor of poison: an output before the launch. Poison after the last element detects writes out of bounds.
    pub fn poisoned(dtype: DType, shape: &[usize], strides: &[usize]) -> HostTensor {
        let last: usize = shape.iter().zip(strides).map(|(n, s)| n.saturating_sub(1) * s).sum();
        let len = if shape.contains(&0) { 0 } else { last + 1 };
        let bytes = vec![0xff; (len + TAIL) * dtype.bytes()];
        HostTensor { dtype, shape: shape.to_vec(), strides: strides.to_vec(), first: 0, bytes }
    }

    /// The same tensor with `n` elements of poison before its first element.
    pub fn with_offset(mut self, n: usize) -> HostTensor {
        self.bytes.splice(0..0, vec![0xff; n * self.dtype.bytes()]);
        self.first += n;
        self
    }

    /// A tensor of row-major values, rounded to the type; for integers truncated.
    pub fn of(dtype: DType, shape: &[usize], strides: &[usize], values: &[f64]) -> HostTensor {
        let mut tensor = HostTensor::poisoned(dtype, shape, strides);
        let offsets = tensor.offsets();
        assert_eq!(offsets.len(), values.len(), "values of a tensor of shape {shape:?}");
        let size = dtype.bytes();
        for (offset, value) in offsets.into_iter().zip(values) {
            let bits = match dtype.is_float() {
                true => num::encode(dtype, *value),
                false => num::encode_int(dtype, *value as i128),
            };
            let bits = bits.to_le_bytes();
            tensor.bytes[offset * size..(offset + 1) * size].copy_from_slice(&bits[..size]);
        }
        tensor
    }

    /// A contiguous tensor of i32.
    pub fn indices(values: &[usize]) -> HostTensor {
        let mut tensor = HostTensor::poisoned(DType::I32, &[values.len()], &[1]);
        for (bytes, &value) in tensor.bytes.chunks_mut(4).zip(values) {
            bytes.copy_from_slice(&(value as i32).to_le_bytes());
        }
        tensor
    }

    /// A tensor of numbers uniform in [−1, 1), rounded to the type.
    pub fn random(dtype: DType, shape: &[usize], strides: &[usize], random: &mut Random) -> HostTensor {
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| random.number()).collect();
        HostTensor::of(dtype, shape, strides, &values)
    }

    /// The offset of each element, in row-major order.
    fn offsets(&self) -> Vec<usize> {
        let mut offsets = vec![self.first];
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            offsets = offsets.iter().flat_map(|&first| (0..n).map(move |i| first + i * stride)).collect();
        }
        offsets
    }

    /// Bytes of memory before the first element.
    pub fn first_byte(&self) -> usize {
        self.first * self.dtype.bytes()
    }

    fn bits(&self, offset: usize) -> u64 {
        let size = self.dtype.bytes();
        let mut bits = [0; 8];
        bits[..size].copy_from_slice(&self.bytes[offset * size..(offset + 1) * size]);
        u64::from_le_bytes(bits)
    }

    /// The elements in row-major order.
    pub fn values(&self) -> Vec<f64> {
        let value = |bits| match self.dtype.is_float() {
            true => num::decode(self.dtype, bits),
            false => num::decode_int(self.dtype, bits) as f64,
        };
        self.offsets().into_iter().map(|offset| value(self.bits(offset))).collect()
    }

    /// Number of elements of memory, gaps and tail included.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Fails if anything was written to a gap or to the tail.
    pub fn check_gaps(&self, what: &str) {
        let mut inside = vec![false; self.len()];
        for offset in self.offsets() {
            inside[offset] = true;
        }
        let poison = u64::MAX >> (64 - self.dtype.bits());
        for (offset, inside) in inside.into_iter().enumerate() {
            assert!(
                inside || self.bits(offset) == poison,
                "{what}: element {offset}, which is in a gap, was overwritten"
            );
        }
    }

    /// Copies the memory to a device.
    pub fn upload<T: Element>(&self, device: &Device) -> Buffer<T> {
        assert_eq!(T::DTYPE.name(), self.dtype.name(), "element type of a buffer");
        let values = T::from_bytes(self.len(), |bytes| {
            bytes.copy_from_slice(&self.bytes);
            Ok(())
        });
        Buffer::from_slice(device, &values.expect("copying does not fail")).expect("a buffer")
    }

    /// Copies the content of the buffer back.
    pub fn download<T: Element>(&mut self, buffer: &Buffer<T>) {
        let values = buffer.to_vec().unwrap_or_else(|e| panic!("{e}"));
        self.bytes.copy_from_slice(T::as_bytes(&values));
    }

    /// Fails unless the relative error against `want` is at most `tolerance` and the gaps are unchanged.
    #[track_caller]
    pub fn check(&self, what: &str, want: &[f64], tolerance: f64) {
        let error = relative_error(&self.values(), want);
        assert!(error <= tolerance, "{what}: relative error {error:.3e}, at most {tolerance:.1e} is allowed");
        self.check_gaps(what);
    }
}

/// Elements of poison after every tensor.
const TAIL: usize = 7;

/// Relative Frobenius error ‖got − want‖ / ‖want‖; infinite where something is NaN, or differs from a zero reference.
pub fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "number of elements");
    let difference: f64 = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum();
    let norm: f64 = want.iter().map(|w| w * w).sum();
    let error = match (difference, norm) {
        (0.0, 0.0) => 0.0,
        _ => (difference / norm).sqrt(),
    };
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Largest relative error of results of this type, for inputs that were rounded to it before: half a unit in the last
/// place, plus a margin for the order of f32 sums.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        DType::BF16 => 1e-2,
        other => panic!("no tolerance for {other}"),
    }
}

/// Largest relative error of f32 dots in tf32.
pub const TF32_TOLERANCE: f64 = 2e-3;

/// Strides of a dense row-major tensor.
pub fn dense(shape: &[usize]) -> Vec<usize> {
    gapped(shape, 0, 1)
}

/// Strides of a row-major tensor with `gap` elements after each row and `step` elements from one element to the next.
pub fn gapped(shape: &[usize], gap: usize, step: usize) -> Vec<usize> {
    let mut strides = vec![step; shape.len()];
    for axis in (1..shape.len()).rev() {
        let gap = if axis + 1 == shape.len() { gap } else { 0 };
        strides[axis - 1] = strides[axis] * shape[axis].max(1) + gap;
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_nan_never_passes() {
        assert_eq!(relative_error(&[3.0, 4.5], &[3.0, 4.0]), 0.1);
        assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
        assert_eq!(relative_error(&[1e-30], &[0.0]), f64::INFINITY);
        assert_eq!(relative_error(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[f64::INFINITY], &[f64::INFINITY]), f64::INFINITY);
        assert_eq!(relative_error(&[], &[]), 0.0);
    }

    #[test]
    fn tensors_hold_their_values_between_poison() {
        let values: Vec<f64> = (0..6).map(f64::from).collect();
        let strides = gapped(&[2, 3], 5, 2);
        assert_eq!(strides, [11, 2]);
        let tensor = HostTensor::of(DType::BF16, &[2, 3], &strides, &values);
        assert_eq!(tensor.values(), values);
        tensor.check_gaps("after construction");
        assert!(HostTensor::poisoned(DType::F16, &[2], &[1]).values().iter().all(|x| x.is_nan()));
    }

    #[test]
    #[should_panic(expected = "element 1, which is in a gap, was overwritten")]
    fn writes_into_gaps_are_seen() {
        let mut tensor = HostTensor::of(DType::F32, &[2], &[3], &[1.0, 2.0]);
        tensor.bytes[4] = 0;
        tensor.check("one byte", &[1.0, 2.0], 0.0);
    }
}
