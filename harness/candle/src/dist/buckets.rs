//! Groups gradients into buckets that are communicated together.
//!
//! Gradients are stored in one flat tensor in registration order, and become ready in roughly the reverse order. A
//! bucket is a range of the flat tensor, so that nothing is copied. Buckets are built from the last parameter to the
//! first.

use std::ops::Range;

use super::flat::{ALIGNMENT, FlatParam, ParamId};

/// Alignment of shards in elements: 64 bytes of f32, for vector loads.
const SHARD_ALIGNMENT: usize = 16;

/// Parameters whose gradients are communicated together.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// Elements of the flat tensors, including the padding after every parameter.
    pub range: Range<usize>,
    /// Parameters in registration order.
    pub ids: Vec<ParamId>,
}

impl Bucket {
    /// Divides the bucket among `world` ranks: equal shards from the start of the range, and a remainder of fewer than
    /// 16 · `world` elements that every rank has.
    pub fn shards(&self, world: usize) -> BucketShards {
        let shard_len = self.range.len() / world / SHARD_ALIGNMENT * SHARD_ALIGNMENT;
        let sharded = self.range.start..self.range.start + shard_len * world;
        BucketShards { shard_len, remainder: sharded.end..self.range.end, sharded }
    }
}

/// A bucket divided into equal shards.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketShards {
    /// Elements of one rank's shard.
    pub shard_len: usize,
    /// All ranks' shards, contiguous, in rank order.
    pub sharded: Range<usize>,
    /// The elements after the shards, which every rank has.
    pub remainder: Range<usize>,
}

impl BucketShards {
    /// The shard of `rank`.
    pub fn range_of(&self, rank: usize) -> Range<usize> {
        let start = self.sharded.start + rank * self.shard_len;
        start..start + self.shard_len
    }
}

/// Returns buckets of at most `bytes` of f32 gradients (or of one larger parameter) in the order in which they are sent
/// in the first step: last parameters first. Frozen parameters are in no bucket.
pub fn buckets(params: &[FlatParam], bytes: usize) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    for (id, param) in params.iter().enumerate().filter(|(_, param)| param.requires_grad).rev() {
        // Padding is sent too: it is zero on every rank.
        let range = param.range.start..param.range.end.next_multiple_of(ALIGNMENT);
        let fits = |bucket: &&mut Bucket| {
            bucket.range.start == range.end && (bucket.range.end - range.start) * size_of::<f32>() <= bytes
        };
        match buckets.last_mut().filter(fits) {
            Some(bucket) => {
                bucket.range.start = range.start;
                bucket.ids.insert(0, ParamId(id));
            }
            None => buckets.push(Bucket { range, ids: vec![ParamId(id)] }),
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(sizes: &[(usize, bool)]) -> Vec<FlatParam> {
        let mut end = 0_usize;
        let param = |(i, &(len, frozen)): (usize, &(usize, bool))| {
            let range = end..end + len;
            end = range.end.next_multiple_of(ALIGNMENT);
            FlatParam { name: format!("p{i}"), shape: vec![len], range, requires_grad: !frozen }
        };
        sizes.iter().enumerate().map(param).collect()
    }

    fn ids(buckets: &[Bucket]) -> Vec<Vec<usize>> {
        buckets.iter().map(|bucket| bucket.ids.iter().map(|id| id.0).collect()).collect()
    }

    #[test]
    fn buckets_fill_from_the_last_parameter() {
        let params = params(&[(64, false), (100, false), (64, false), (1000, false), (10, false)]);
        let found = buckets(&params, 4 * 256);
        // 10 and 1000 elements exceed the limit together, and so does anything with 1000; 64 + 128 + 64 = 256 do not.
        assert_eq!(ids(&found), [vec![4], vec![3], vec![0, 1, 2]]);
        assert_eq!(found[2].range, 0..256);
        assert_eq!(ids(&buckets(&params, 0)), [[4], [3], [2], [1], [0]]);
        let one = buckets(&params, usize::MAX);
        assert_eq!((one.len(), one[0].range.clone()), (1, 0..64 + 128 + 64 + 1024 + 64));
    }

    #[test]
    fn frozen_parameters_are_in_no_bucket() {
        let params = params(&[(64, false), (64, true), (64, false), (64, false)]);
        let found = buckets(&params, usize::MAX);
        assert_eq!(ids(&found), [vec![2, 3], vec![0]]);
        assert_eq!((found[0].range.clone(), found[1].range.clone()), (128..256, 0..64));
    }

    #[test]
    fn shards_are_equal_and_cover_the_bucket() {
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
