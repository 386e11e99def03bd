//! Draws the token sequences of each step.

use serde::{Deserialize, Serialize};

use super::{Result, TokenSlice};

/// The whole state of a sampler: equal states draw equal sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    pub seed: u64,
    /// Number of sequences drawn so far, by all processes together.
    pub drawn: u64,
}

/// Draws sequences at uniformly random positions. The position of a sequence is a function of the seed and the number
/// of the sequence only, so a process can draw its shard without the others.
#[derive(Clone, Debug)]
pub struct Sampler {
    state: SamplerState,
}

/// The shard of one process in a batch: sequences `rank · n / world` to `(rank + 1) · n / world`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    pub rank: usize,
    pub world: usize,
}

impl Shard {
    /// A single process.
    pub const SINGLE_PROCESS: Shard = Shard { rank: 0, world: 1 };
}

/// Sequences of one step: `sequences` rows of `context` tokens, row-major, and for each token the one that follows it
/// as its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
    pub sequences: usize,
    pub context: usize,
}

impl Batch {
    fn with_capacity(sequences: usize, context: usize) -> Batch {
        // A sequence is read with the token after it.
        let capacity = sequences * context + 1;
        Batch { inputs: Vec::with_capacity(capacity), targets: Vec::with_capacity(capacity), sequences: 0, context }
    }

    fn push(&mut self, tokens: &TokenSlice<'_>, start: usize) -> Result<()> {
        let first = self.inputs.len();
        tokens.read(start..start + self.context + 1, &mut self.inputs)?;
        self.targets.extend(&self.inputs[first + 1..]);
        self.inputs.pop();
        self.sequences += 1;
        Ok(())
    }

    /// Splits into micro-batches of at most `sequences` sequences each, in order.
    pub fn micro_batches(&self, sequences: usize) -> impl Iterator<Item = Batch> {
        let tokens = sequences.max(1).saturating_mul(self.context);
        self.inputs.chunks(tokens).zip(self.targets.chunks(tokens)).map(|(inputs, targets)| Batch {
            inputs: inputs.to_vec(),
            targets: targets.to_vec(),
            sequences: inputs.len() / self.context,
            context: self.context,
        })
    }
}

impl Sampler {
    /// A sampler that has drawn nothing yet.
    pub fn new(seed: u64) -> Sampler {
        Sampler::from_state(SamplerState { seed, drawn: 0 })
    }

    /// A sampler that continues from `state`.
    pub fn from_state(state: SamplerState) -> Sampler {
        Sampler { state }
    }

    pub fn state(&self) -> SamplerState {
        self.state
    }

    /// Draws `sequences` sequences for all processes, and reads those of `shard`.
    ///
    /// # Errors
    /// As [`TokenFile::read`](super::TokenFile::read).
    ///
    /// # Panics
    /// `tokens` is too short for a sequence of this context (a [`Dataset`](super::Dataset) checks that), or `sequences`
    /// is not a multiple of the number of processes.
    pub fn draw(&mut self, tokens: &TokenSlice<'_>, sequences: usize, context: usize, shard: Shard) -> Result<Batch> {
        assert!(tokens.len() > context, "internal error: {} tokens for a context of {context}", tokens.len());
        assert_eq!(sequences % shard.world, 0, "internal error: {sequences} sequences for {} processes", shard.world);
        let num_positions = (tokens.len() - context) as u64;
        let per_rank = sequences / shard.world;
        // A checkpoint can contain any number: wrap around.
        let first = self.state.drawn.wrapping_add((shard.rank * per_rank) as u64);
        let mut batch = Batch::with_capacity(per_rank, context);
        for number in 0..per_rank as u64 {
            batch.push(tokens, random_below(num_positions, self.state.seed, first.wrapping_add(number)) as usize)?;
        }
        self.state.drawn = self.state.drawn.wrapping_add(sequences as u64);
        Ok(batch)
    }
}

/// Returns the first `sequences` non-overlapping sequences of `tokens`, for a reproducible evaluation. Returns fewer if
/// `tokens` is too short, none if it is shorter than one sequence.
///
/// # Errors
/// As [`TokenFile::read`](super::TokenFile::read).
pub fn non_overlapping_sequences(tokens: &TokenSlice<'_>, sequences: usize, context: usize) -> Result<Batch> {
    let fit = tokens.len().saturating_sub(1) / context;
    let mut batch = Batch::with_capacity(sequences.min(fit), context);
    for number in 0..sequences.min(fit) {
        batch.push(tokens, number * context)?;
    }
    Ok(batch)
}

/// A random number below `n`: the upper half of the product of n and 64 random bits (Lemire, "Fast random integer
/// generation in an interval", 2019, without the rejection step: the bias is below n / 2⁶⁴).
fn random_below(n: u64, seed: u64, number: u64) -> u64 {
    ((u128::from(random(seed, number)) * u128::from(n)) >> 64) as u64
}

/// 64 random bits per (seed, number): two rounds of the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
/// splittable pseudorandom number generators", 2014).
fn random(seed: u64, number: u64) -> u64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let step = 0x9e37_79b9_7f4a_7c15;
    mix(mix(seed.wrapping_add(step)).wrapping_add(number.wrapping_mul(step)))
}

#[cfg(test)]
mod tests {
    use super::super::{TokenFile, write_tokens};
    use super::*;

    /// A file in which token i has the value i.
    fn counting(len: usize) -> (tempfile::TempDir, TokenFile) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tokens");
        let tokens: Vec<u32> = (0..len as u32).collect();
        write_tokens(&path, &tokens, len, [0; 32], [0; 32]).unwrap();
        let file = TokenFile::open(&path).unwrap();
        (dir, file)
    }

    #[test]
    fn targets_are_the_next_tokens() {
        let (_dir, file) = counting(50);
        let batch = Sampler::new(3).draw(&TokenSlice::new(&file, 10..40), 100, 7, Shard::SINGLE_PROCESS).unwrap();
        assert_eq!((batch.sequences, batch.inputs.len()), (100, 700));
        for (row, next) in batch.inputs.chunks(7).zip(batch.targets.chunks(7)) {
            assert!(row.is_sorted_by(|a, b| a + 1 == *b) && row[0] >= 10 && next[6] < 40);
            assert!(row.iter().zip(next).all(|(a, b)| a + 1 == *b));
        }
        let starts: std::collections::BTreeSet<u32> = batch.inputs.iter().step_by(7).copied().collect();
        assert_eq!((starts.first(), starts.last()), (Some(&10), Some(&32)), "both ends are drawn");
        assert!(starts.len() >= 20, "{starts:?}");
    }

    #[test]
    fn a_resumed_sampler_draws_the_same_sequences() {
        let (_dir, file) = counting(1000);
        let part = TokenSlice::new(&file, 0..1000);
        let mut sampler = Sampler::new(7);
        sampler.draw(&part, 5, 16, Shard::SINGLE_PROCESS).unwrap();
        let state: SamplerState = serde_json::from_str(&serde_json::to_string(&sampler.state()).unwrap()).unwrap();
        assert_eq!(state, SamplerState { seed: 7, drawn: 5 });
        let next = sampler.draw(&part, 5, 16, Shard::SINGLE_PROCESS).unwrap();
        assert_eq!(Sampler::from_state(state).draw(&part, 5, 16, Shard::SINGLE_PROCESS).unwrap(), next);
        assert_ne!(
            Sampler::new(8).draw(&part, 5, 16, Shard::SINGLE_PROCESS).unwrap(),
            Sampler::new(7).draw(&part, 5, 16, Shard::SINGLE_PROCESS).unwrap()
        );
    }

    #[test]
    fn shards_concatenate_to_the_batch() {
        let (_dir, file) = counting(1000);
        let part = TokenSlice::new(&file, 0..1000);
        let whole = Sampler::new(1).draw(&part, 12, 8, Shard::SINGLE_PROCESS).unwrap();
        let shares: Vec<Batch> =
            (0..3).map(|rank| Sampler::new(1).draw(&part, 12, 8, Shard { rank, world: 3 }).unwrap()).collect();
        let joined: Vec<u32> = shares.iter().flat_map(|share| share.inputs.clone()).collect();
        assert_eq!(joined, whole.inputs);
        let split: Vec<Batch> = whole.micro_batches(5).collect();
        assert_eq!(split.iter().map(|batch| batch.sequences).collect::<Vec<_>>(), [5, 5, 2]);
        assert_eq!(split.iter().flat_map(|batch| batch.targets.clone()).collect::<Vec<_>>(), whole.targets);
    }

    #[test]
    fn evaluation_reads_sequences_in_order() {
        let (_dir, file) = counting(100);
        let part = TokenSlice::new(&file, 20..61);
        let batch = non_overlapping_sequences(&part, 100, 8).unwrap();
        assert_eq!((batch.sequences, batch.inputs[0], batch.targets[39]), (5, 20, 60));
        assert_eq!(non_overlapping_sequences(&part, 2, 8).unwrap().sequences, 2);
        assert_eq!(non_overlapping_sequences(&TokenSlice::new(&file, 0..8), 2, 8).unwrap().sequences, 0);
    }
}
