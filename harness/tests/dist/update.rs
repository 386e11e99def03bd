//! Parameters updated while gradients are in flight: the same bits as after waiting for all gradients.

use std::sync::Arc;

use candle_core::{DType, Device};
use half::bf16;
use tilewright_harness::dist::comm::{Communicator, Dtype};
use tilewright_harness::dist::ddp::{DdpOptions, GradSync};
use tilewright_harness::dist::sharded::Mode;
use tilewright_harness::ops::memory;
use tilewright_harness::optim::{AdamWOptions, LrSchedule};
use tilewright_harness::params::Params;
use tilewright_harness::train::{DataParallel, DataParallelOptions, Error, Trainer, TrainerOptions};

use crate::model::{self, BATCH, values};
use crate::training::{rows, same_everywhere};
use crate::world::{KINDS, Kind, options, ranks};

const STEPS: usize = 5;
/// Tolerance of gradient norms: the order of the sum of squares differs.
const TOLERANCE: f64 = 1e-6;

fn trainer_options(clip: Option<f64>) -> TrainerOptions {
    TrainerOptions {
        adamw: AdamWOptions { eps: 1e-4, ..AdamWOptions::default() },
        schedule: LrSchedule { max_lr: 1e-2, min_lr: 1e-3, warmup_steps: 2, total_steps: 10 },
        weight_decay: 0.1,
        decay_embeddings: false,
        clip,
    }
}

/// A model with compute weights in bf16, and its trainer.
fn form(
    device: &Device,
    comm: Arc<Communicator>,
    ddp: DdpOptions,
    shard: Option<Mode>,
    clip: Option<f64>,
) -> (Params, DataParallel, Trainer) {
    let params = model::params_on(device, 1 + comm.rank() as u64);
    params.set_compute_dtype(DType::BF16).unwrap();
    let data_parallel = DataParallelOptions { comm, ddp, shard };
    let (data_parallel, trainer) = DataParallel::new(&data_parallel, &params, trainer_options(clip), BATCH, 1).unwrap();
    (params, data_parallel, trainer)
}

/// State of a rank after each step.
#[derive(Debug, PartialEq)]
struct After {
    values: Vec<f32>,
    compute_weights: Vec<bf16>,
    moments: Vec<[Vec<f32>; 2]>,
    rate: f64,
}

/// The moments that this rank stores.
fn moments(trainer: &Trainer) -> Vec<[Vec<f32>; 2]> {
    let pieces = trainer.moments().into_iter();
    pieces.map(|piece| [piece.first, piece.second].map(|moments| moments.to_vec().unwrap())).collect()
}

/// Trains one rank; also returns the gradient norm of each step.
fn train(
    device: &Device,
    comm: Arc<Communicator>,
    ddp: DdpOptions,
    shard: Option<Mode>,
    clip: Option<f64>,
    by_bucket: bool,
) -> (Vec<After>, Vec<f64>) {
    let (params, data_parallel, mut trainer) = form(device, comm, ddp, shard, clip);
    let step = |step| {
        trainer.begin();
        trainer.backward(&model::loss(&params, step, rows(data_parallel.communicator())).unwrap(), 1.0).unwrap();
        let update = match by_bucket {
            true => {
                assert_eq!(trainer.can_update_by_bucket(), clip.is_none());
                let (sent, update) = data_parallel.finish_step(&mut trainer).unwrap();
                assert!(sent.calls >= data_parallel.ddp().buckets().len());
                update
            }
            false => {
                data_parallel.ddp().finish_gradient_synchronization().unwrap();
                trainer.update().unwrap()
            }
        };
        assert!(update.applied && update.step == step as u64 + 1);
        same_everywhere(&params, data_parallel.communicator(), step);
        let compute_weights = params.compute_weights().unwrap().to_vec1().unwrap();
        (After { values: values(&params), compute_weights, moments: moments(&trainer), rate: update.rate }, update.norm)
    };
    (0..STEPS).map(step).unzip()
}

/// Both kinds of updates, on one rank of an existing world.
pub fn check(device: &Device, comm: &Arc<Communicator>) {
    for shard in [None, Some(Mode::Broadcast), Some(Mode::Zero1)] {
        for (form, bucket_bytes, comm_dtype, copies) in [
            (GradSync::Bucketed, 8000, None, false),
            (GradSync::Bucketed, 1 << 20, None, false),
            (GradSync::Overlap, 0, None, false),
            (GradSync::Bucketed, 8000, Some(Dtype::Bf16), false),
            (GradSync::Bucketed, 8000, None, true),
            (GradSync::Overlap, 0, Some(Dtype::Bf16), true),
        ] {
            let ddp = DdpOptions {
                form,
                bucket_bytes: Some(bucket_bytes),
                comm_dtype,
                copy_engines: copies,
                ..DdpOptions::default()
            };
            let run = |ddp, by_bucket| train(device, comm.clone(), ddp, shard, None, by_bucket);
            let ((found, norms), (expected, right)) = (run(ddp, true), run(ddp, false));
            let ranks = comm.world();
            assert!(found == expected, "{}, {ranks} ranks, {shard:?}, {ddp:?}", comm.backend());
            // On the host all backends reduce in the same order, and so does the average of exchanged gradients.
            if copies && device.is_cpu() {
                let plain = run(DdpOptions { copy_engines: false, ..ddp }, true).0;
                assert!(found == plain, "{}, {ranks} ranks, {shard:?}, {ddp:?}", comm.backend());
            }
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * b && *b > 0.0;
            assert!(norms.iter().zip(&right).all(near), "{norms:?} {right:?}");
        }
    }
}

#[test]
fn updates_by_bucket_are_bit_exact() {
    for kind in KINDS {
        for world in [1, 2, 3] {
            ranks(kind, world, options(), |comm| check(&Device::Cpu, &Arc::new(comm)));
        }
    }
}

/// Gradients sent in bf16 are stored in bf16, without sharding and without accumulation.
#[test]
fn gradients_sent_in_bf16_are_stored_in_bf16() {
    let ddp = DdpOptions { bucket_bytes: Some(8000), comm_dtype: Some(Dtype::Bf16), ..DdpOptions::default() };
    let train = |shard, clip| {
        ranks(Kind::Threads, 2, options(), move |comm| {
            let comm = Arc::new(comm);
            let (params, data_parallel, _) = form(&Device::Cpu, comm.clone(), ddp, shard, clip);
            let kept = params.grads().dtype();
            let bytes = data_parallel.ddp().finish_gradient_synchronization().unwrap().bytes;
            assert_eq!(bytes, (params.flat_len() - 40 * 40) * kept.size_in_bytes());
            drop(data_parallel);
            (kept, train(&Device::Cpu, comm, ddp, shard, clip, true).0)
        })
        .swap_remove(0)
    };
    let ((kept, found), (exact, expected)) = (train(None, None), train(Some(Mode::Broadcast), None));
    assert_eq!((kept, exact), (DType::BF16, DType::F32));
    let distance = model::distance(&found[STEPS - 1].values, &expected[STEPS - 1].values);
    assert!(distance < 1e-2, "{distance:e}");
    assert_eq!(train(None, Some(1e9)).0, DType::BF16);
}

/// Clipping waits for the whole gradient.
#[test]
fn clipped_updates_wait_for_the_whole_gradient() {
    let ddp = DdpOptions { bucket_bytes: Some(8000), ..DdpOptions::default() };
    for shard in [None, Some(Mode::Zero1)] {
        let run = |clip, by_bucket| {
            ranks(Kind::Threads, 2, options(), |comm| train(&Device::Cpu, Arc::new(comm), ddp, shard, clip, by_bucket))
                .swap_remove(0)
        };
        let (clipped, plain) = (run(Some(1e-3), true), run(None, true));
        assert!(clipped.0 == run(Some(1e-3), false).0 && clipped.0 != plain.0, "{shard:?}");
        assert!(clipped.1[0] > 1e-3, "the gradient norm exceeds the limit: {:?}", clipped.1);
    }
}

/// The bucket with NaN, which is the last one, and later steps are skipped; earlier buckets are updated, equally on all
/// ranks.
#[test]
fn a_non_finite_gradient_stops_the_step_at_its_bucket() {
    stops_at_its_bucket::<f32>(false);
    stops_at_its_bucket::<f32>(true);
    stops_at_its_bucket::<bf16>(true);
}

/// With `copies` both ranks average the exchanged gradients: gradients of four bytes are sent, those of two bytes are
/// read from peer memory.
fn stops_at_its_bucket<G: memory::Elem>(copies: bool) {
    let comm_dtype = (size_of::<G>() == 2).then_some(Dtype::Bf16);
    let found = ranks(Kind::Threads, 2, options(), |comm| {
        let leads = comm.rank() == 0;
        let ddp = DdpOptions { bucket_bytes: Some(8000), copy_engines: copies, comm_dtype, ..DdpOptions::default() };
        let (params, data_parallel, mut trainer) = form(&Device::Cpu, Arc::new(comm), ddp, None, None);
        let before = values(&params);
        trainer.begin();
        let loss = model::loss(&params, 0, rows(data_parallel.communicator())).unwrap();
        // Nothing is sent, so that the gradient can be corrupted first.
        data_parallel.ddp().no_sync(|| trainer.backward(&loss, 1.0).unwrap());
        let first = params.get("in").unwrap().range();
        if leads {
            memory::write::<G, _>(&params.grads(), |_, grads| {
                let set_nan = |mut grads: tilewright::ViewMut<'_, G>| grads.copy_from_slice(&[G::from_f64(f64::NAN)]);
                grads.slice(first.start..first.start + 1).and_then(set_nan).map_err(memory::kernel_error)
            })
            .unwrap();
        }
        assert_eq!(data_parallel.ddp().has_peer_gradients(), copies);
        let error = data_parallel.finish_step(&mut trainer).map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::NotFinite { step: 1, cause, .. } if cause.contains("`in`")), "{error}");
        assert_eq!((trainer.step(), trainer.optimizer_steps()), (0, 0));
        same_everywhere(&params, data_parallel.communicator(), 1);
        let after = values(&params);
        assert_eq!(after[first.clone()], before[first]);
        let last = params.get("out").unwrap().range();
        assert_ne!(after[last.clone()], before[last]);
        after
    });
    assert!(found[0].iter().all(|value| value.is_finite()));
}
