//! Training on several ranks equals training on one: the same weights, with every form of gradient communication.

use std::sync::{Arc, Mutex};

use candle_core::Device;
use tilewright_harness::dist::comm::{Communicator, Dtype};
use tilewright_harness::dist::ddp::{Ddp, DdpOptions, Exchange, GradSync};
use tilewright_harness::dist::sharded::{ShardedOptimizer, State, StepArguments};
use tilewright_harness::ops::memory;
use tilewright_harness::optim::AdamW;
use tilewright_harness::params::{Params, no_grad};

use crate::model::{self, BATCH, OPTIONS, RATE, values};
use crate::world::{KINDS, Kind, options, ranks};

const STEPS: usize = 20;
const FORMS: [GradSync; 4] = [GradSync::Naive, GradSync::Flat, GradSync::Overlap, GradSync::Bucketed];
/// Tolerance between training on one and on several ranks: the order of sums differs.
const TOLERANCE: f64 = 1e-6;

/// Buckets of about three parameters. On a GPU, matmuls use all SMs, as on one rank.
fn ddp_options(form: GradSync) -> DdpOptions {
    DdpOptions { form, bucket_bytes: Some(8000), reserve_sms: Some(0), ..DdpOptions::default() }
}

/// This rank's rows.
pub fn rows(comm: &Communicator) -> std::ops::Range<usize> {
    let each = BATCH / comm.world();
    comm.rank() * each..(comm.rank() + 1) * each
}

/// Fails unless all ranks have the same bits.
pub fn same_everywhere(params: &Params, comm: &Communicator, step: usize) {
    let own = values(params);
    let mut all = vec![0.0_f32; own.len() * comm.world()];
    all[comm.rank() * own.len()..][..own.len()].copy_from_slice(&own);
    comm.all_gather(&mut all).unwrap();
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for rank in 0..comm.world() {
        let other = &all[rank * own.len()..][..own.len()];
        assert!(bits(other) == bits(&own), "step {step}: rank {rank} has other parameters than rank {}", comm.rank());
    }
}

/// Trains one rank: its values after each step.
fn train(comm: Communicator, options: DdpOptions) -> Vec<Vec<f32>> {
    train_with(&Device::Cpu, Arc::new(comm), options)
}

fn train_with(device: &Device, comm: Arc<Communicator>, options: DdpOptions) -> Vec<Vec<f32>> {
    let params = model::params_on(device, 1 + comm.rank() as u64);
    let ddp = Ddp::new(&params, comm.clone(), options).unwrap();
    let mut adamw = model::adamw(&params);
    let step = |step| {
        params.zero_grads().unwrap();
        model::loss(&params, step, rows(&comm)).unwrap().backward().unwrap();
        let sent = ddp.finish_gradient_synchronization().unwrap();
        assert_eq!(sent.calls, ddp.buckets().len());
        model::update(&params, &mut adamw);
        same_everywhere(&params, &comm, step);
        values(&params)
    };
    (0..STEPS).map(step).collect()
}

/// Runs all forms on one rank of an existing world, then with a sharded optimizer.
pub fn check(device: &Device, comm: Communicator) {
    let expected = model::alone_on(device, STEPS);
    let comm = Arc::new(comm);
    let mut bucketed = Vec::new();
    for form in FORMS {
        bucketed = train_with(device, comm.clone(), ddp_options(form));
        let distance = model::distance(&bucketed[STEPS - 1], &expected[STEPS - 1]);
        assert!(distance <= TOLERANCE, "{form:?}: {distance:e}");
    }
    // With fewer SMs for NCCL: sums of two ranks are the same in any order.
    let limited = train_with(device, comm.clone(), DdpOptions { nccl_ctas: 4, ..ddp_options(GradSync::Bucketed) });
    let distance = model::distance(&limited[STEPS - 1], &bucketed[STEPS - 1]);
    assert!(distance <= if comm.world() == 2 { 0.0 } else { TOLERANCE }, "on 4 SMs: {distance:e}");
    // Copy engines: two ranks' gradients are reduced, or exchanged.
    for exchange in [Exchange::AllReduce, Exchange::PeerGradients] {
        let options = DdpOptions { copy_engines: true, exchange, ..ddp_options(GradSync::Bucketed) };
        let copied = train_with(device, comm.clone(), options);
        let distance = model::distance(&copied[STEPS - 1], &bucketed[STEPS - 1]);
        assert!(
            distance <= if comm.world() == 2 { 0.0 } else { TOLERANCE },
            "{exchange:?} by copy engines: {distance:e}"
        );
    }
    // Matmuls on some of a GPU's SMs instead of all: at most the order of sums differs.
    for reserve_sms in [None, Some(100), Some(100_000)] {
        let reserved = train_with(device, comm.clone(), DdpOptions { reserve_sms, ..ddp_options(GradSync::Bucketed) });
        let distance = model::distance(&reserved[STEPS - 1], &expected[STEPS - 1]);
        assert!(distance <= TOLERANCE, "{reserve_sms:?} reserved SMs: {distance:e}");
    }
    crate::update::check(device, &comm);
    // The last one of the forms was bucketed.
    let (sharded, ..) = train_sharded(device, comm.clone(), Exchange::AllReduce);
    assert!(sharded == bucketed, "sharded, broadcast");
    let (sharded, ..) = train_sharded(device, comm, Exchange::ReduceScatter);
    let distance = model::distance(&sharded[STEPS - 1], &expected[STEPS - 1]);
    assert!(distance <= TOLERANCE, "sharded, ZeRO-1: {distance:e}");
}

#[test]
fn every_form_gives_the_weights_of_training_on_one_rank() {
    let expected = model::alone(STEPS);
    let start = values(&model::params(1));
    assert!(model::distance(&expected[STEPS - 1], &start) > 0.1, "parameters change during training");
    for kind in KINDS {
        for world in [2, 4] {
            for form in FORMS {
                let found = ranks(kind, world, options(), |comm| train(comm, ddp_options(form)));
                for (step, (found, expected)) in found[0].iter().zip(&expected).enumerate() {
                    let distance = model::distance(found, expected);
                    assert!(distance <= TOLERANCE, "{kind:?}, {world} ranks, {form:?}, step {step}: {distance:e}");
                }
            }
        }
    }
}

#[test]
fn forms_send_what_they_say() {
    let params = model::params(1);
    let calls = |form| {
        let sent = ranks(Kind::Threads, 2, options(), |comm| {
            let params = model::params(1);
            let ddp = Ddp::new(&params, Arc::new(comm), ddp_options(form)).unwrap();
            let comm = ddp.communicator().clone();
            comm.start_trace();
            model::loss(&params, 0, rows(&comm)).unwrap().backward().unwrap();
            // Collectives sent before the end of backward can be overlapped.
            let early =
                comm.start_all_gather(vec![0_u8; 2]).unwrap().wait().map(|_| comm.take_trace().len() - 1).unwrap();
            let sent = ddp.finish_gradient_synchronization().unwrap();
            (early, sent.calls, sent.bytes)
        });
        assert_eq!(sent[0], sent[1]);
        sent[0]
    };
    // All but the frozen matrix, with each parameter padded to a multiple of 64 elements.
    let bytes = 4 * (params.flat_len() - 40 * 40);
    // The frozen parameter is between the others: flat makes two calls.
    assert_eq!(calls(GradSync::Naive), (0, 5, bytes));
    assert_eq!(calls(GradSync::Flat), (0, 2, bytes));
    // `unused` is never ready, and delays all parameters after it in the common order; the output layer comes before
    // it.
    assert_eq!(calls(GradSync::Overlap), (1, 5, bytes));
    // unused and out; shared and norm; in.
    assert_eq!(calls(GradSync::Bucketed), (0, 3, bytes));
}

/// In the first step `unused` delays all others; afterwards ready gradients are sent before it.
#[test]
fn bucket_order_is_learned_in_the_first_step() {
    let expected = model::alone(3);
    for (form, early) in [(GradSync::Overlap, [1, 4, 4]), (GradSync::Bucketed, [0, 2, 2])] {
        let found = ranks(Kind::Threads, 2, options(), |comm| {
            let params = model::params(1);
            let ddp = Ddp::new(&params, Arc::new(comm), ddp_options(form)).unwrap();
            let comm = ddp.communicator().clone();
            let mut adamw = model::adamw(&params);
            let step = |step| {
                params.zero_grads().unwrap();
                comm.start_trace();
                model::loss(&params, step, rows(&comm)).unwrap().backward().unwrap();
                comm.start_all_gather(vec![0_u8; 2]).unwrap().wait().unwrap();
                let early = comm.take_trace().len() - 1;
                let sent = ddp.finish_gradient_synchronization().unwrap();
                assert_eq!(sent.calls, ddp.buckets().len());
                model::update(&params, &mut adamw);
                (early, model::distance(&values(&params), &expected[step]))
            };
            (0..3).map(step).collect::<Vec<_>>()
        });
        for found in found {
            assert_eq!(found.iter().map(|step| step.0).collect::<Vec<_>>(), early, "{form:?}");
            assert!(found.iter().all(|step| step.1 <= TOLERANCE), "{form:?}: {found:?}");
        }
    }
}

/// SMs are reserved from the first bucket in flight to the end of backward, and no longer.
#[test]
fn matmuls_reserve_sms_while_gradients_are_sent() {
    use tilewright_harness::ops::reserved_sms;

    let reserved_in = |world, form, nccl_ctas, reserve_sms| {
        let found = ranks(Kind::Threads, world, options(), |comm| {
            let params = model::params(1);
            let comm = Arc::new(comm);
            let options = DdpOptions { nccl_ctas, reserve_sms, ..ddp_options(form) };
            let ddp = Ddp::new(&params, comm.clone(), options).unwrap();
            // This hook runs after that of `ddp`.
            let seen = Arc::new(Mutex::new(Vec::new()));
            let seen_in_hook = seen.clone();
            let _hook = params.on_grad_ready(move |_| {
                seen_in_hook.lock().unwrap().push(reserved_sms());
                Ok(())
            });
            for step in 0..2 {
                seen.lock().unwrap().clear();
                assert_eq!(reserved_sms(), 0);
                model::loss(&params, step, rows(&comm)).unwrap().backward().unwrap();
                ddp.finish_gradient_synchronization().unwrap();
                assert_eq!(reserved_sms(), 0);
            }
            // A failed step is not continued.
            model::loss(&params, 2, rows(&comm)).unwrap().backward().unwrap();
            drop(ddp);
            assert_eq!(reserved_sms(), 0);
            std::mem::take(&mut *seen.lock().unwrap())
        });
        assert!(found.iter().all(|rank| *rank == found[0]));
        found.into_iter().next().unwrap()
    };
    let reserved = |form, nccl_ctas, reserve_sms| reserved_in(2, form, nccl_ctas, reserve_sms);
    // NCCL uses no more CTAs than its default, whatever the limit.
    for (nccl_ctas, reserve_sms, expected) in
        [(8, None, 8), (0, None, 24), (1000, None, 24), (8, Some(12), 12), (8, Some(0), 0)]
    {
        assert!(
            reserved_in(1, GradSync::Overlap, nccl_ctas, reserve_sms).iter().all(|&sms| sms == 0),
            "one rank has no communication"
        );
        assert!(reserved(GradSync::Naive, nccl_ctas, reserve_sms).iter().all(|&sms| sms == 0));
        // In order of completion the output layer is first, and is sent immediately.
        assert_eq!(reserved(GradSync::Overlap, nccl_ctas, reserve_sms)[..4], [expected; 4]);
        let bucketed = reserved(GradSync::Bucketed, nccl_ctas, reserve_sms);
        assert_eq!((bucketed[0], *bucketed.last().unwrap()), (0, expected));
    }
    // Copy engines use no SMs.
    let copies = DdpOptions { copy_engines: true, ..DdpOptions::default() };
    assert_eq!(copies.reserved_sms(), 0);
    assert_eq!(DdpOptions { reserve_sms: Some(12), ..copies }.reserved_sms(), 12);
}

#[test]
fn gradients_of_micro_batches_are_sent_once() {
    let expected = &model::alone(1)[0];
    for form in FORMS {
        let found = ranks(Kind::Threads, 2, options(), |comm| {
            let comm = Arc::new(comm);
            let params = model::params(1);
            let ddp = Ddp::new(&params, comm.clone(), ddp_options(form)).unwrap();
            let mut adamw = model::adamw(&params);
            let all = rows(&comm);
            let (first, second) = (all.start..all.start + 4, all.start + 4..all.end);
            let backward = |rows: std::ops::Range<usize>| {
                let share = rows.len() as f64 / all.len() as f64;
                (model::loss(&params, 0, rows).unwrap() * share).unwrap().backward().map(|_| ()).unwrap();
            };
            comm.start_trace();
            ddp.no_sync(|| backward(first));
            assert!(comm.take_trace().is_empty());
            // An evaluation between them sends nothing either.
            no_grad(|| model::loss(&params, 0, all.clone())).unwrap();
            backward(second);
            ddp.finish_gradient_synchronization().unwrap();
            model::update(&params, &mut adamw);
            values(&params)
        });
        assert_eq!(found[0], found[1]);
        let distance = model::distance(&found[0], expected);
        assert!(distance <= TOLERANCE, "{form:?}: {distance:e}");
    }
}

#[test]
fn a_second_backward_without_no_sync_is_an_error() {
    let texts = ranks(Kind::Threads, 2, options(), |comm| {
        let params = model::params(1);
        let comm = Arc::new(comm);
        let ddp = Ddp::new(&params, comm.clone(), ddp_options(GradSync::Overlap)).unwrap();
        model::loss(&params, 0, 0..4).unwrap().backward().unwrap();
        let text = model::loss(&params, 0, 0..4).unwrap().backward().map(|_| ()).unwrap_err().to_string();
        drop(ddp);
        text
    });
    assert!(
        texts[0].contains("`out` got a second gradient in one step") && texts[0].contains("no_sync"),
        "{}",
        texts[0]
    );
}

#[test]
fn ranks_with_other_models_are_named() {
    let texts = ranks(Kind::Threads, 3, options(), |comm| {
        let spec = |name: &str| tilewright_harness::params::ParamSpec::matrix(name, &[4, 4], 0.1);
        let name = if comm.rank() == 1 { "b" } else { "a" };
        let params = Params::new(vec![spec(name)], &Device::Cpu, 0).unwrap();
        Ddp::new(&params, Arc::new(comm), DdpOptions::default()).map(|_| ()).unwrap_err().to_string()
    });
    assert!(
        texts.iter().all(|text| text.contains("rank 1: the model or the options differ from rank 0's")),
        "{texts:?}"
    );
}

/// Half-precision communication changes the result little, and equally on all ranks.
#[test]
fn gradients_can_be_sent_in_bf16() {
    let exact = model::alone(STEPS);
    for (form, kind) in [(GradSync::Bucketed, Kind::Threads), (GradSync::Flat, Kind::Tcp)] {
        let options_ = DdpOptions { comm_dtype: Some(Dtype::Bf16), ..ddp_options(form) };
        let found = ranks(kind, 3, options(), |comm| train(comm, options_));
        let distance = model::distance(&found[0][STEPS - 1], &exact[STEPS - 1]);
        assert!(distance > TOLERANCE && distance < 2e-2, "{distance:e}");
    }
}

/// Training with a sharded optimizer.
fn train_sharded(device: &Device, comm: Arc<Communicator>, exchange: Exchange) -> (Vec<Vec<f32>>, usize, Vec<f64>) {
    let params = model::params_on(device, 1 + comm.rank() as u64);
    let ddp = Ddp::new(&params, comm.clone(), DdpOptions { exchange, ..ddp_options(GradSync::Bucketed) }).unwrap();
    let mut optimizer = sharded(&params, &ddp);
    let mut norms = Vec::new();
    let step = |step| {
        params.zero_grads().unwrap();
        model::loss(&params, step, rows(&comm)).unwrap().backward().unwrap();
        ddp.finish_gradient_synchronization().unwrap();
        norms.push(update_sharded(&params, &mut optimizer));
        same_everywhere(&params, &comm, step);
        values(&params)
    };
    let values = (0..STEPS).map(step).collect();
    (values, optimizer.bytes(), norms)
}

fn sharded(params: &Params, ddp: &Ddp) -> ShardedOptimizer<AdamW> {
    let (device, comm) = (memory::kernel_device(params.device()).unwrap(), ddp.communicator().clone());
    let trained: Vec<_> = params.iter().filter(|param| param.requires_grad()).map(|param| param.range()).collect();
    match ddp.options().exchange {
        Exchange::AllReduce | Exchange::PeerGradients => {
            ShardedOptimizer::by_parameters(device, comm, &trained, params.flat_len(), OPTIONS).unwrap()
        }
        Exchange::ReduceScatter => {
            ShardedOptimizer::by_buckets(device, comm, ddp.buckets(), params.flat_len(), OPTIONS).unwrap()
        }
    }
}

/// A step; returns the gradient norm.
pub fn update_sharded(params: &Params, optimizer: &mut ShardedOptimizer<AdamW>) -> f64 {
    let gradients = params.grads();
    let gradients = memory::Read::<f32>::new(&gradients).unwrap();
    let norm = optimizer.gradient_norm(gradients.view().unwrap()).unwrap();
    memory::write::<f32, _>(params.values(), |_, values| {
        let (gradients, groups) = (gradients.view()?, &model::groups(params));
        Ok(optimizer.step(StepArguments { values, gradients, groups, rate: RATE, gradient_scale: 1.0 })?)
    })
    .unwrap();
    norm
}

/// The same gradients, so the same bits; each rank stores its shard of the state.
#[test]
fn the_sharded_optimizer_is_the_unsharded_one_bit_for_bit() {
    for kind in KINDS {
        for world in [1, 2, 3, 4] {
            let unsharded = ranks(kind, world, options(), |comm| train(comm, ddp_options(GradSync::Bucketed)));
            let sharded =
                ranks(kind, world, options(), |comm| train_sharded(&Device::Cpu, Arc::new(comm), Exchange::AllReduce));
            for (rank, (found, bytes, _)) in sharded.iter().enumerate() {
                assert!(*found == unsharded[rank], "{kind:?}, rank {rank} of {world}");
                // The largest parameter is `shared`, with 40 · 40 elements.
                let ideal = 8 * (40 * 24 + 40 * 40 + 40 + 35 + 400) / world;
                assert!(bytes.abs_diff(ideal) <= 8 * 40 * 40, "rank {rank} of {world}: {bytes} for {ideal}");
            }
        }
    }
}

#[test]
fn zero_1_gives_the_weights_of_training_on_one_rank() {
    let expected = model::alone(STEPS);
    for kind in KINDS {
        for world in [1, 2, 3, 4] {
            let found = ranks(kind, world, options(), |comm| {
                train_sharded(&Device::Cpu, Arc::new(comm), Exchange::ReduceScatter)
            });
            for (values, bytes, norms) in &found {
                let distance = model::distance(&values[STEPS - 1], &expected[STEPS - 1]);
                assert!(distance <= TOLERANCE, "{kind:?}, {world} ranks: {distance:e}");
                assert!(*norms == found[0].2 && norms.iter().all(|norm| *norm > 0.0), "{norms:?}");
                // 1/world of the trained elements, and less than 16 · world elements of each of three buckets.
                let ideal = 8 * (model::params(1).flat_len() - 40 * 40) / world;
                assert!(bytes.abs_diff(ideal) <= 3 * 8 * 16 * world, "{bytes} for {ideal}");
            }
            let broadcast =
                ranks(kind, world, options(), |comm| train_sharded(&Device::Cpu, Arc::new(comm), Exchange::AllReduce));
            let (one, other) = (&found[0].2, &broadcast[0].2);
            assert!(one.iter().zip(other).all(|(a, b)| (a - b).abs() <= 1e-5 * b), "{one:?} {other:?}");
        }
    }
}

/// State saved by 3 ranks resumes with 1, 2 and 4.
#[test]
fn state_resumes_in_a_world_of_another_size() {
    let grads = |params: &Params, step: usize| {
        params.zero_grads().unwrap();
        model::loss(params, step, 0..BATCH).unwrap().backward().map(|_| ()).unwrap();
    };
    let whole = model::alone(4);
    for exchange in [Exchange::AllReduce, Exchange::ReduceScatter] {
        let begin = |comm: Communicator, seed| {
            let params = model::params(seed);
            let ddp =
                Ddp::new(&params, Arc::new(comm), DdpOptions { exchange, ..ddp_options(GradSync::Bucketed) }).unwrap();
            let optimizer = sharded(&params, &ddp);
            (params, ddp, optimizer)
        };
        let saved = ranks(Kind::Threads, 3, options(), |comm| {
            let (params, ddp, mut optimizer) = begin(comm, 1);
            for step in 0..2 {
                grads(&params, step);
                ddp.finish_gradient_synchronization().unwrap();
                update_sharded(&params, &mut optimizer);
            }
            (values(&params), optimizer.gather_state().unwrap())
        });
        assert!(saved.iter().all(|state| *state == saved[0]), "all ranks have the whole state");
        let (start, state) = &saved[0];
        for world in [1, 2, 4] {
            let found = ranks(Kind::Threads, world, options(), |comm| {
                let (params, ddp, mut optimizer) = begin(comm, 9);
                let flat = candle_core::Tensor::from_slice(start, start.len(), params.device()).unwrap();
                params.values().slice_set(&flat, 0, 0).unwrap();
                optimizer.load_state(state).unwrap();
                for step in 2..4 {
                    grads(&params, step);
                    ddp.finish_gradient_synchronization().unwrap();
                    update_sharded(&params, &mut optimizer);
                }
                let other = State { flats: state.flats[..1].to_vec(), ..state.clone() };
                assert!(optimizer.load_state(&other).is_err(), "state of another optimizer");
                values(&params)
            });
            // Every rank has the whole batch here, so that sums over ranks are exact except for rounding of averages of
            // 3.
            let distance = model::distance(&found[0], &whole[3]);
            assert!(distance <= TOLERANCE, "{exchange:?}, {world} ranks: {distance:e}");
        }
    }
}

#[test]
fn later_parameters_go_to_the_least_loaded_rank() {
    let bytes = ranks(Kind::Threads, 2, options(), |comm| {
        let params = model::params(1);
        let device = memory::kernel_device(params.device()).unwrap();
        let range = |name: &str| params.get(name).unwrap().range();
        let comm = Arc::new(comm);
        let first = [range("in"), range("shared")];
        let mut optimizer =
            ShardedOptimizer::<AdamW>::by_parameters(device, comm.clone(), &first, params.flat_len(), OPTIONS).unwrap();
        let before = optimizer.bytes();
        let grads = |step| {
            params.zero_grads().unwrap();
            model::loss(&params, step, 0..BATCH).unwrap().backward().map(|_| ()).unwrap();
        };
        grads(0);
        update_sharded(&params, &mut optimizer);
        assert_eq!(values(&params)[range("out")], values(&model::params(1))[range("out")], "out is not trained yet");
        optimizer.add_param_group(&[range("out")]).unwrap();
        let text = optimizer.add_param_group(&[range("in")]).unwrap_err().to_string();
        assert!(text.contains("already belong to this optimizer"), "{text}");
        grads(1);
        update_sharded(&params, &mut optimizer);
        assert_ne!(values(&params)[range("out")], values(&model::params(1))[range("out")]);
        same_everywhere(&params, &comm, 1);
        (before, optimizer.bytes())
    });
    assert_eq!(bytes, [(8 * 960, 8 * 1360), (8 * 1600, 8 * 1600)]);
}

/// Two ranks that are threads exchange gradients. Only one of two models gets the buffer for the peer; the next one
/// gets it when the first is dropped.
#[test]
fn two_ranks_average_peer_gradients() {
    let expected = model::alone(STEPS);
    let options =
        DdpOptions { copy_engines: true, exchange: Exchange::PeerGradients, ..ddp_options(GradSync::Overlap) };
    let found = ranks(Kind::Threads, 2, crate::world::options(), |comm| {
        let comm = Arc::new(comm);
        let params = model::params(1);
        let other = Ddp::new(&params, comm.clone(), options).unwrap();
        assert!(other.has_peer_gradients());
        let second = Ddp::new(&model::params(1), comm.clone(), options).unwrap();
        assert!(!second.has_peer_gradients(), "the peer buffer belongs to the first Ddp");
        drop((other, second));
        let whole = train_with(&Device::Cpu, comm.clone(), options);
        assert!(whole == train_with(&Device::Cpu, comm.clone(), ddp_options(GradSync::Overlap)));
        // Accumulated micro-batches are sent once.
        let ddp = Ddp::new(&params, comm.clone(), options).unwrap();
        assert!(ddp.has_peer_gradients());
        let gradients = |ddp: &Ddp| {
            params.zero_grads().unwrap();
            ddp.no_sync(|| model::loss(&params, 0, rows(&comm)).unwrap().backward().unwrap());
            model::loss(&params, 1, rows(&comm)).unwrap().backward().unwrap();
            assert_eq!(ddp.finish_gradient_synchronization().unwrap().calls, ddp.buckets().len());
            params.grads().to_vec1::<f32>().unwrap()
        };
        let both = gradients(&ddp);
        drop(ddp);
        let plain = Ddp::new(&params, comm.clone(), ddp_options(GradSync::Overlap)).unwrap();
        assert!(!plain.has_peer_gradients() && gradients(&plain) == both);
        whole
    });
    let distance = model::distance(&found[0][STEPS - 1], &expected[STEPS - 1]);
    assert!(distance <= TOLERANCE, "{distance:e}");
    // Three ranks use an all-reduce.
    ranks(Kind::Threads, 3, crate::world::options(), |comm| {
        assert!(!Ddp::new(&model::params(1), Arc::new(comm), options).unwrap().has_peer_gradients());
    });
}
