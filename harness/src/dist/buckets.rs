//! Which gradients travel together.
//!
//! Gradients lie in one flat tensor in the order of registration, and become ready in about the reverse order. A bucket is
//! a range of the flat tensor, so that nothing is copied; buckets are made from the last parameter to the first, and sent in
//! that order on every rank, whatever order the gradients of a rank become ready in.

use std::ops::Range;

use crate::params::{ALIGNMENT, Param, ParamId, Params};

/// Chunks of a bucket start at multiples of this many elements: 64 bytes, which vector loads want.
const SHARD_ALIGNMENT: usize = 16;

/// Parameters whose gradients travel together.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// Elements of the flat tensors, with the gaps behind parameters.
    pub range: Range<usize>,
    /// The parameters, in order of registration.
    pub ids: Vec<ParamId>,
}

impl Bucket {
    /// How it is shared among `world` ranks: so many elements shard_len from the start of the range, and a remainder of fewer than
    /// 16 · `world` elements that belongs to all.
    pub fn shards(&self, world: usize) -> BucketShards {
        let shard_len = self.range.len() / world / SHARD_ALIGNMENT * SHARD_ALIGNMENT;
        let sharded = self.range.start..self.range.start + shard_len * world;
        BucketShards { shard_len, remainder: sharded.end..self.range.end, sharded }
    }
}

/// A bucket in equal parts.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketShards {
    /// Elements of shard_len rank.
    pub shard_len: usize,
    /// All ranks' parts, one behind the other.
    pub sharded: Range<usize>,
    /// What is left over: every rank has it.
    pub remainder: Range<usize>,
}

impl BucketShards {
    /// The part of `rank`.
    pub fn range_of(&self, rank: usize) -> Range<usize> {
        let start = self.sharded.start + rank * self.shard_len;
        start..start + self.shard_len
    }
}

/// Buckets of at most `bytes` of f32 gradients shard_len, or of one parameter where that is more, in the order in which they are sent: last
/// parameters first. Frozen parameters are in no bucket.
pub fn buckets(params: &Params, bytes: usize) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    let trained: Vec<Param> = params.iter().filter(Param::requires_grad).collect();
    for param in trained.iter().rev() {
        let range = param.range();
        // Gaps travel too: they are zeros everywhere.
        let range = range.start..range.end.next_multiple_of(ALIGNMENT).min(params.flat_len());
        let fits = |bucket: &&mut Bucket| {
            bucket.range.start == range.end && (bucket.range.end - range.start) * size_of::<f32>() <= bytes
        };
        match buckets.last_mut().filter(fits) {
            Some(bucket) => {
                bucket.range.start = range.start;
                bucket.ids.insert(0, param.id());
            }
            None => buckets.push(Bucket { range, ids: vec![param.id()] }),
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::params::{Init, ParamSpec};

    fn params(sizes: &[(usize, bool)]) -> Params {
        let spec = |(i, &(len, frozen)): (usize, &(usize, bool))| ParamSpec {
            frozen,
            ..ParamSpec::vector(format!("p{i}"), len, Init::Zeros)
        };
        Params::new(sizes.iter().enumerate().map(spec).collect(), &Device::Cpu, 0).unwrap()
    }

    fn ids(buckets: &[Bucket]) -> Vec<Vec<usize>> {
        buckets.iter().map(|bucket| bucket.ids.iter().map(|id| id.0).collect()).collect()
    }

    #[test]
    fn buckets_fill_from_the_last_parameter() {
        let params = params(&[(64, false), (100, false), (64, false), (1000, false), (10, false)]);
        let found = buckets(&params, 4 * 256);
        // 10 and 1000 elements do not fit together, nor does anything with 1000; 64 + 128 + 64 = 256 do.
        assert_eq!(ids(&found), [vec![4], vec![3], vec![0, 1, 2]]);
        assert_eq!(found[2].range, 0..256);
        assert_eq!(ids(&buckets(&params, 0)), [[4], [3], [2], [1], [0]]);
        let one = buckets(&params, usize::MAX);
        assert_eq!((one.len(), one[0].range.clone()), (1, 0..params.flat_len()));
    }

    #[test]
    fn frozen_parameters_are_in_no_bucket() {
        let params = params(&[(64, false), (64, true), (64, false), (64, false)]);
        let found = buckets(&params, usize::MAX);
        assert_eq!(ids(&found), [vec![2, 3], vec![0]]);
        assert_eq!((found[0].range.clone(), found[1].range.clone()), (128..256, 0..64));
    }

    #[test]
    fn shares_are_equal_and_cover_the_bucket() {
        let bucket = Bucket { range: 64..64 + 320, ids: Vec::new() };
        for world in 1..=7 {
            let shards = bucket.shards(world);
            assert_eq!((shards.sharded.start, shards.remainder.end), (64, 384));
            assert_eq!((shards.range_of(0).start, shards.range_of(world - 1).end), (64, shards.remainder.start));
            assert!(
                shards.remainder.len() < SHARD_ALIGNMENT * world && shards.shard_len.is_multiple_of(SHARD_ALIGNMENT),
                "{shards:?}"
            );
        }
    }
}
