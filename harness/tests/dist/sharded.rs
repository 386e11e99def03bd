//! Tests of parameters that join a sharded optimizer during training, and of its state with other world sizes.

use std::ops::Range;
use std::sync::Arc;

use tilewright_harness::dist::comm::Communicator;
use tilewright_harness::dist::ddp::{Ddp, DdpOptions, Exchange, GradSync};
use tilewright_harness::dist::sharded::{ShardedOptimizer, State};
use tilewright_harness::ops::memory;
use tilewright_harness::optim::{AdamW, ComputeWeights};
use tilewright_harness::params::Params;

use crate::model::{self, OPTIONS, RATE, values};
use crate::training::{rows, same_everywhere, update_sharded};
use crate::world::{KINDS, Kind, options, ranks};

const EXCHANGES: [Exchange; 2] = [Exchange::AllReduce, Exchange::ReduceScatter];
/// Number of steps, and the step in which the second parameter group is added.
const STEPS: usize = 6;
const LATER: usize = 2;
/// Tolerance between different world sizes, whose order of sums differs.
const TOLERANCE: f64 = 1e-6;

fn ranges(params: &Params, names: &[&str]) -> Vec<Range<usize>> {
    names.iter().map(|name| params.get(name).unwrap().range()).collect()
}

/// The first parameter group. Two parameters in the middle are added later ([`SECOND`]): in ZeRO-1 their buckets also
/// have parameters of the first group.
const FIRST: [&str; 3] = ["in", "norm", "unused"];
const SECOND: [&str; 2] = ["out", "shared"];

/// One rank with a new model. Buckets hold about three parameters.
fn begin(comm: Communicator, exchange: Exchange, seed: u64) -> (Params, Ddp) {
    let params = model::params(seed);
    let options = DdpOptions { form: GradSync::Bucketed, bucket_bytes: Some(8000), exchange, ..DdpOptions::default() };
    let ddp = Ddp::new(&params, Arc::new(comm), options).unwrap();
    (params, ddp)
}

fn optimizer(params: &Params, ddp: &Ddp, names: &[&str]) -> ShardedOptimizer<AdamW> {
    let (device, comm) = (memory::kernel_device(params.device()).unwrap(), ddp.communicator().clone());
    let (first, len) = (ranges(params, names), params.flat_len());
    match ddp.options().exchange {
        Exchange::AllReduce | Exchange::PeerGradients => {
            ShardedOptimizer::by_parameters(device, comm, &first, len, OPTIONS).unwrap()
        }
        Exchange::ReduceScatter => {
            let mut optimizer = ShardedOptimizer::with_buckets(device, comm, ddp.buckets(), len, OPTIONS);
            optimizer.add_param_group(&first).unwrap();
            optimizer
        }
    }
}

/// Averaged gradients of this rank's rows.
fn gradients(params: &Params, ddp: &Ddp, step: usize) {
    params.zero_grads().unwrap();
    model::loss(params, step, rows(ddp.communicator())).unwrap().backward().map(|_| ()).unwrap();
    ddp.finish_gradient_synchronization().unwrap();
}

/// Runs the steps from `from` to `STEPS`; adds the second group in step `LATER`.
fn go(params: &Params, ddp: &Ddp, optimizer: &mut ShardedOptimizer<AdamW>, steps: Range<usize>) -> Vec<Vec<f32>> {
    let step = |step| {
        if step == LATER {
            optimizer.add_param_group(&ranges(params, &SECOND)).unwrap();
        }
        gradients(params, ddp, step);
        update_sharded(params, optimizer);
        same_everywhere(params, ddp.communicator(), step);
        values(params)
    };
    steps.map(step).collect()
}

/// The reference: optimizers without sharding, one for each parameter, created when it is added.
fn unshared(comm: Communicator) -> Vec<Vec<f32>> {
    let (params, ddp) = begin(comm, Exchange::AllReduce, 1);
    let device = memory::kernel_device(params.device()).unwrap();
    let mut optimizers: Vec<AdamW> = Vec::new();
    let add = |optimizers: &mut Vec<AdamW>, names: &[&str]| {
        optimizers.extend(ranges(&params, names).into_iter().map(|range| AdamW::new(device, range, OPTIONS).unwrap()));
    };
    add(&mut optimizers, &FIRST);
    let step = |step| {
        if step == LATER {
            add(&mut optimizers, &SECOND);
        }
        gradients(&params, &ddp, step);
        let gradients = params.grads();
        let gradients = memory::Read::<f32>::new(&gradients).unwrap();
        memory::write::<f32, _>(params.values(), |_, mut values| {
            for optimizer in &mut optimizers {
                let (values, groups) = (values.reborrow(), model::groups(&params));
                optimizer
                    .step(values, gradients.view()?, ComputeWeights::None, &groups, RATE, 1.0)
                    .map_err(memory::kernel_error)?;
            }
            Ok(())
        })
        .unwrap();
        values(&params)
    };
    (0..STEPS).map(step).collect()
}

#[test]
fn later_parameter_groups_count_their_own_steps() {
    for kind in KINDS {
        for world in [1, 2, 3, 4] {
            let expected = ranks(kind, world, options(), unshared).swap_remove(0);
            let start = values(&model::params(1));
            let out = ranges(&model::params(1), &["out"]).remove(0);
            assert_eq!(expected[LATER - 1][out.clone()], start[out.clone()]);
            assert_ne!(expected[LATER][out.clone()], start[out]);
            for exchange in EXCHANGES {
                let found = ranks(kind, world, options(), |comm| {
                    let (params, ddp) = begin(comm, exchange, 1);
                    let mut optimizer = optimizer(&params, &ddp, &FIRST);
                    go(&params, &ddp, &mut optimizer, 0..STEPS)
                });
                // Sums are in rank order on any rank: the same bits.
                assert!(found.iter().all(|found| *found == expected), "{kind:?}, {exchange:?}, {world} ranks");
            }
        }
    }
}

/// State of both groups, saved with 1 to 4 ranks in either mode, resumes with 1 to 4 ranks in the same and in the other
/// mode.
#[test]
fn their_state_resumes_in_any_world() {
    let half = LATER + 2;
    let unsharded = ranks(Kind::Threads, 1, options(), unshared).swap_remove(0);
    for (saver, exchange) in [(1, EXCHANGES[0]), (2, EXCHANGES[1]), (3, EXCHANGES[0]), (4, EXCHANGES[1])] {
        let saved = ranks(Kind::Threads, saver, options(), |comm| {
            let (params, ddp) = begin(comm, exchange, 1);
            let mut optimizer = optimizer(&params, &ddp, &FIRST);
            go(&params, &ddp, &mut optimizer, 0..half);
            (values(&params), optimizer.gather_state().unwrap())
        });
        assert!(saved.iter().all(|state| *state == saved[0]), "all ranks have the whole state");
        let (start, state) = &saved[0];
        let steps_of = |name: &str| {
            let range = ranges(&model::params(1), &[name]).remove(0);
            state.steps.iter().find(|(known, _)| known.start <= range.start && range.end <= known.end).unwrap().1
        };
        assert_eq!((steps_of("in"), steps_of("out")), (half as u64, (half - LATER) as u64));
        for exchange in EXCHANGES {
            for world in [1, 2, 3, 4] {
                let found = ranks(Kind::Threads, world, options(), |comm| goes_on(comm, exchange, start, state, half));
                for found in &found {
                    let distance = model::distance(found, &unsharded[STEPS - 1]);
                    assert!(distance <= TOLERANCE, "{saver} ranks, then {world}, {exchange:?}: {distance:e}");
                }
            }
        }
    }
}

/// An optimizer with all parameters from the start loads the state of one with two groups.
fn goes_on(comm: Communicator, exchange: Exchange, start: &[f32], state: &State, from: usize) -> Vec<f32> {
    let (params, ddp) = begin(comm, exchange, 9);
    let flat = candle_core::Tensor::from_slice(start, start.len(), params.device()).unwrap();
    params.values().slice_set(&flat, 0, 0).unwrap();
    let mut optimizer = optimizer(&params, &ddp, &[FIRST.as_slice(), &SECOND].concat());
    let before = optimizer.bytes();
    let mut reads = 0;
    let failed = optimizer.load_with(&state.steps, |_, _, _| {
        reads += 1;
        Err(tilewright::Error::HostMemory { requested: 1 })
    });
    assert!(failed.is_err() || reads == 0, "the error of the first read");
    // Nothing is lost by it: another state is loaded whole.
    optimizer.load_state(state).unwrap();
    assert_eq!(optimizer.bytes(), before, "no element has duplicate state");
    assert_eq!(optimizer.steps(), from as u64);
    go(&params, &ddp, &mut optimizer, from..STEPS).pop().unwrap()
}

#[test]
fn invalid_groups_are_errors() {
    for exchange in EXCHANGES {
        let texts = ranks(Kind::Threads, 2, options(), |comm| {
            let (params, ddp) = begin(comm, exchange, 1);
            let mut optimizer = optimizer(&params, &ddp, &FIRST);
            let before = (optimizer.bytes(), optimizer.ranges());
            let len = params.flat_len();
            let frozen = ranges(&params, &["frozen"]);
            let out = ranges(&params, &["out"]).remove(0);
            let beyond = len - 1..len + 1;
            let wrong = [ranges(&params, &["in"]), vec![beyond], vec![out.clone(), out]];
            let mut texts: Vec<String> =
                wrong.iter().map(|wrong| optimizer.add_param_group(wrong).unwrap_err().to_string()).collect();
            if exchange == Exchange::ReduceScatter {
                texts.push(optimizer.add_param_group(&frozen).unwrap_err().to_string());
            }
            assert_eq!((optimizer.bytes(), optimizer.ranges()), before, "a failed call changes nothing");
            texts
        });
        let texts = &texts[0];
        let reasons = ["already belong to this optimizer", "exceed the flat tensor of", "are given twice"];
        assert!(texts.iter().zip(reasons).all(|(text, reason)| text.contains(reason)), "{texts:?}");
        assert!(texts.get(3).is_none_or(|text| text.contains("in no bucket") && text.contains("frozen")), "{texts:?}");
    }
}
