//! Reductions in host memory, always in rank order: the same bits on every rank, with every host backend and in every
//! run.

use bytemuck::Pod;
use half::{bf16, f16};

use super::call::{Dtype, Reduce};

/// Accumulation type of an element: f32 for half-precision floats, the type itself for all others.
trait Number: Pod {
    type Acc: Pod;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// Only called for floats: `Call`s are validated before.
    fn divide(a: Self::Acc, by: usize) -> Self::Acc;
}

macro_rules! floats {
    ($($type:ty, $acc:ty, $widen:expr, $narrow:expr;)*) => { $(impl Number for $type {
        type Acc = $acc;
        fn widen(self) -> $acc { $widen(self) }
        fn narrow(acc: $acc) -> $type { $narrow(acc) }
        fn add(a: $acc, b: $acc) -> $acc { a + b }
        fn max(a: $acc, b: $acc) -> $acc { if a > b || a.is_nan() { a } else { b } }
        fn divide(a: $acc, by: usize) -> $acc { a / by as $acc }
    })* };
}
floats! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    f16, f32, f16::to_f32, f16::from_f32;
}

macro_rules! integers {
    ($($type:ty),*) => { $(impl Number for $type {
        type Acc = $type;
        fn widen(self) -> $type { self }
        fn narrow(acc: $type) -> $type { acc }
        fn add(a: $type, b: $type) -> $type { a.wrapping_add(b) }
        fn max(a: $type, b: $type) -> $type { Ord::max(a, b) }
        fn divide(a: $type, by: usize) -> $type { a / by as $type }
    })* };
}
integers!(i32, i64, u8, u32, u64);

/// Scratch memory of one rank's reductions, reused by all calls.
#[derive(Default)]
pub(super) struct Accumulator {
    /// Words of 8 bytes, so that every accumulator type is aligned.
    words: Vec<u64>,
    rounded: Vec<u64>,
}

/// Elements that are reduced at a time; they fit into the L2 cache together with the inputs.
pub(super) const SEGMENT: usize = 32 * 1024;

impl Accumulator {
    /// Reduces up to [`SEGMENT`] elements. `part(rank)` returns the bytes of a rank's contribution; all have the same
    /// length. The returned slice is the result, of that length.
    ///
    /// With a communication dtype, contributions and result are rounded to that dtype, as if both had been sent in it.
    pub(super) fn reduce<'a>(
        &mut self,
        dtype: Dtype,
        reduce: Reduce,
        comm_dtype: Option<Dtype>,
        world: usize,
        part: impl Fn(usize) -> &'a [u8],
    ) -> &[u8] {
        match (dtype, comm_dtype) {
            (Dtype::F32, Some(Dtype::Bf16)) => self.run::<f32>(reduce, world, part, |x| bf16::from_f32(x).to_f32()),
            (Dtype::F32, Some(Dtype::F16)) => self.run::<f32>(reduce, world, part, |x| f16::from_f32(x).to_f32()),
            (Dtype::F32, _) => self.run::<f32>(reduce, world, part, |x| x),
            (Dtype::F64, _) => self.run::<f64>(reduce, world, part, |x| x),
            (Dtype::Bf16, _) => self.run::<bf16>(reduce, world, part, |x| x),
            (Dtype::F16, _) => self.run::<f16>(reduce, world, part, |x| x),
            (Dtype::I32, _) => self.run::<i32>(reduce, world, part, |x| x),
            (Dtype::I64, _) => self.run::<i64>(reduce, world, part, |x| x),
            (Dtype::U8, _) => self.run::<u8>(reduce, world, part, |x| x),
            (Dtype::U32, _) => self.run::<u32>(reduce, world, part, |x| x),
            (Dtype::U64, _) => self.run::<u64>(reduce, world, part, |x| x),
        }
    }

    fn run<'a, N: Number>(
        &mut self,
        reduce: Reduce,
        world: usize,
        part: impl Fn(usize) -> &'a [u8],
        round: impl Fn(N::Acc) -> N::Acc,
    ) -> &[u8] {
        let first: &[N] = bytemuck::cast_slice(part(0));
        let n = first.len();
        let words = |bytes: usize| bytes.div_ceil(8);
        self.words.resize(self.words.len().max(words(n * size_of::<N::Acc>())), 0);
        self.rounded.resize(self.rounded.len().max(words(size_of_val(first))), 0);
        let acc: &mut [N::Acc] = &mut bytemuck::cast_slice_mut(&mut self.words)[..n];
        for (acc, &x) in acc.iter_mut().zip(first) {
            *acc = round(x.widen());
        }
        for rank in 1..world {
            let values: &[N] = bytemuck::cast_slice(part(rank));
            match reduce {
                Reduce::Sum | Reduce::Avg => {
                    for (acc, &x) in acc.iter_mut().zip(values) {
                        *acc = N::add(*acc, round(x.widen()));
                    }
                }
                Reduce::Max => {
                    for (acc, &x) in acc.iter_mut().zip(values) {
                        *acc = N::max(*acc, round(x.widen()));
                    }
                }
            }
        }
        let result: &mut [N] = &mut bytemuck::cast_slice_mut(&mut self.rounded)[..n];
        for (result, &acc) in result.iter_mut().zip(&*acc) {
            let acc = if reduce == Reduce::Avg { N::divide(acc, world) } else { acc };
            *result = N::narrow(round(acc));
        }
        bytemuck::cast_slice(result)
    }
}

/// The range in elements of the `index`-th of `world` chunks of `count` elements, which are as even as possible.
pub(super) fn chunk(count: usize, world: usize, index: usize) -> std::ops::Range<usize> {
    let at = |index: usize| (count as u128 * index as u128 / world as u128) as usize;
    at(index)..at(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Pod>(dtype: Dtype, reduce: Reduce, comm_dtype: Option<Dtype>, parts: &[&[T]]) -> Vec<T> {
        let mut accumulator = Accumulator::default();
        let bytes =
            accumulator.reduce(dtype, reduce, comm_dtype, parts.len(), |rank| bytemuck::cast_slice(parts[rank]));
        bytemuck::pod_collect_to_vec(bytes)
    }

    #[test]
    fn half_floats_are_summed_in_f32() {
        // 257 is not representable in bf16: a sum that rounds after each step stays at 256.
        let x = |v: f32| [bf16::from_f32(v)];
        let sum = reduced(Dtype::Bf16, Reduce::Sum, None, &[&x(256.0), &x(1.0), &x(1.0)]);
        assert_eq!(sum[0].to_f32(), 258.0);
        let comm_dtype = reduced(Dtype::F32, Reduce::Sum, Some(Dtype::Bf16), &[&[256.0f32], &[1.0 + 1e-4], &[1.0]]);
        assert_eq!(comm_dtype, [258.0]);
    }

    #[test]
    fn reductions_are_in_rank_order() {
        let parts: [&[f32]; 3] = [&[1e8], &[-1e8], &[1.0]];
        assert_eq!(reduced(Dtype::F32, Reduce::Sum, None, &parts), [1.0]);
        let swapped: [&[f32]; 3] = [&[1e8], &[1.0], &[-1e8]];
        assert_eq!(reduced(Dtype::F32, Reduce::Sum, None, &swapped), [0.0]);
    }

    #[test]
    fn maximum_keeps_nan_and_average_divides() {
        let parts: [&[f32]; 3] = [&[1.0, f32::NAN, 5.0], &[7.0, 1.0, f32::NAN], &[3.0, 2.0, 1.0]];
        let max = reduced(Dtype::F32, Reduce::Max, None, &parts);
        assert!(max[0] == 7.0 && max[1].is_nan() && max[2].is_nan(), "{max:?}");
        assert_eq!(reduced::<f64>(Dtype::F64, Reduce::Avg, None, &[&[1.0], &[2.0], &[6.0]]), [3.0]);
        assert_eq!(reduced::<i32>(Dtype::I32, Reduce::Max, None, &[&[-5], &[-3]]), [-3]);
        assert_eq!(reduced::<u8>(Dtype::U8, Reduce::Sum, None, &[&[255], &[2]]), [1]);
    }

    #[test]
    fn chunks_cover_everything_once() {
        for (count, world) in [(0, 3), (2, 4), (10, 3), (4097, 4)] {
            let chunks: Vec<_> = (0..world).map(|i| chunk(count, world, i)).collect();
            assert_eq!((chunks[0].start, chunks[world - 1].end), (0, count));
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(chunks.iter().all(|c| c.len() == count / world || c.len() == count.div_ceil(world)));
        }
    }
}
