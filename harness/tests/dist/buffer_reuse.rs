//! Activations that alias gradient buffers, combined with communication during backward and updates by bucket: the same
//! bits as without aliasing.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use tilewright_harness::dist::comm::{Communicator, Dtype};
use tilewright_harness::dist::ddp::{DdpOptions, GradSync};
use tilewright_harness::dist::sharded::Mode;
use tilewright_harness::model::{Config, Fusion, Precision, Transformer};
use tilewright_harness::optim::{AdamWOptions, LrSchedule};
use tilewright_harness::train::{DataParallel, DataParallelOptions, TrainerOptions};

use crate::model::values;
use crate::world::{Kind, options, ranks};

const STEPS: usize = 3;
/// Sequences of each rank.
const SEQUENCES: usize = 2;

fn config(setup: Setup) -> Config {
    Config {
        vocabulary: 61,
        context: setup.length,
        d_model: 32,
        d_ff: setup.d_ff,
        layers: 3,
        heads: 4,
        heads_kv: 4,
        fusion: Fusion::Blocks,
        precision: setup.precision,
        checkpoint: setup.checkpoint,
        ..Config::default()
    }
}

/// Token ids [sequences, length], different on each rank and in each step.
fn tokens([sequences, length]: [usize; 2], seed: usize) -> Tensor {
    let ids = (0..sequences * length).map(|i| ((i * i * 7 + i * 3 + seed * 13) % 61) as u32);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((sequences, length)).unwrap()
}

/// How a rank trains.
#[derive(Clone, Copy, Debug)]
struct Setup {
    precision: Precision,
    checkpoint: bool,
    /// Sequence length, and d_ff of the model.
    length: usize,
    d_ff: usize,
    micro_batches: usize,
    comm_dtype: Option<Dtype>,
    shard: Option<Mode>,
    clip: Option<f64>,
}

/// The values after some steps, and whether activations aliased gradient buffers in the first pass.
fn train(comm: Communicator, setup: Setup, form: GradSync, aliases: bool) -> (Vec<f32>, bool) {
    let rank = comm.rank();
    let batch = SEQUENCES * comm.world();
    let model = Transformer::new(&config(setup), &Device::Cpu, 3).unwrap();
    let params = model.params();
    let trainer = TrainerOptions {
        adamw: AdamWOptions { eps: 1e-4, ..AdamWOptions::default() },
        schedule: LrSchedule::constant(1e-2),
        weight_decay: 0.1,
        decay_embeddings: false,
        clip: setup.clip,
    };
    // About the parameters of one block, so that some buckets span two blocks.
    let ddp = DdpOptions { form, bucket_bytes: Some(30_000), comm_dtype: setup.comm_dtype, ..DdpOptions::default() };
    let data_parallel = DataParallelOptions { comm: Arc::new(comm), ddp, shard: setup.shard };
    let (data_parallel, mut trainer) =
        DataParallel::new(&data_parallel, params, trainer, batch, setup.micro_batches).unwrap();
    let weight = params.get("blocks.1.mlp.gate_up.weight").unwrap().range();
    let mut aliased = false;
    for step in 0..STEPS {
        match aliases {
            true => trainer.begin(),
            // Buffers that are not lazily zeroed are not aliased.
            false => params.zero_grads().unwrap(),
        }
        let sequences = SEQUENCES / setup.micro_batches;
        for micro in 0..setup.micro_batches {
            let ids = |salt| tokens([sequences, setup.length], 1000 * rank + 100 * step + 10 * micro + salt);
            let gradient = || {
                let part = params.grads().narrow(0, weight.start, weight.len()).unwrap();
                part.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
            };
            let before = gradient();
            let loss = model.loss(&ids(0), &ids(5)).unwrap();
            aliased |= step + micro == 0 && gradient() != before;
            let share = 1.0 / setup.micro_batches as f64;
            match micro + 1 < setup.micro_batches {
                true => data_parallel.ddp().no_sync(|| trainer.backward(&loss, share).unwrap()),
                false => trainer.backward(&loss, share).unwrap(),
            }
        }
        data_parallel.finish_step(&mut trainer).unwrap();
    }
    (values(params), aliased)
}

#[test]
fn aliased_activations_are_not_all_reduced() {
    // Fewer tokens than d_model: the output of a matmul fits into the buffer of its weight's gradient.
    let f32 = Setup {
        precision: Precision::F32,
        checkpoint: false,
        length: 9,
        d_ff: 48,
        micro_batches: 1,
        comm_dtype: None,
        shard: None,
        clip: None,
    };
    let bf16 = Setup { precision: Precision::Bf16, comm_dtype: Some(Dtype::Bf16), ..f32 };
    // More tokens: some outputs fit into a larger gradient of the previous block.
    let (long_f32, long_bf16) = (Setup { length: 33, d_ff: 192, ..f32 }, Setup { length: 33, d_ff: 192, ..bf16 });
    for setup in [
        f32,
        Setup { checkpoint: true, ..f32 },
        Setup { micro_batches: 2, ..f32 },
        Setup { clip: Some(0.1), ..f32 },
        Setup { shard: Some(Mode::Broadcast), ..f32 },
        Setup { shard: Some(Mode::Zero1), ..f32 },
        bf16,
        Setup { checkpoint: true, clip: Some(0.1), ..bf16 },
        long_f32,
        Setup { checkpoint: true, shard: Some(Mode::Zero1), ..long_f32 },
        Setup { micro_batches: 2, ..long_f32 },
        Setup { clip: Some(0.1), ..long_bf16 },
    ] {
        let run =
            |form, aliases| ranks(Kind::Threads, 2, options(), |comm| train(comm, setup, form, aliases)).swap_remove(0);
        let (expected, aliased) = run(GradSync::Flat, false);
        assert!(!aliased && expected.iter().all(|value| value.is_finite()), "{setup:?}");
        for form in [GradSync::Flat, GradSync::Overlap, GradSync::Bucketed] {
            let (found, aliased) = run(form, true);
            assert!(aliased && found == expected, "{setup:?}, {form:?}, aliased: {aliased}");
        }
    }
}
