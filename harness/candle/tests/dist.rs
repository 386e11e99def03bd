//! Data parallelism over a `VarMap`: ranks are threads, each with a part of the batch. The gradients and the training are
//! those of one process with the whole batch, in f64.

#![cfg(feature = "dist")]

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};
use tilewright_candle::FusedAdamW;
use tilewright_candle::dist::comm::Communicator;
use tilewright_candle::dist::comm::threads::threads;
use tilewright_candle::dist::ddp::{DdpOptions, Exchange, GradSync};
use tilewright_candle::dist::error;
use tilewright_candle::dist::{self, DistributedDataParallel};

const WORLD: usize = 3;
const LAYERS: usize = 12;
const D: usize = 5;

/// Runs `rank` on every rank.
fn on_ranks<R: Send + 'static>(rank: impl Fn(Arc<Communicator>) -> R + Send + Sync + Clone + 'static) -> Vec<R> {
    let run = |comm| {
        let rank = rank.clone();
        std::thread::spawn(move || rank(Arc::new(comm)))
    };
    let ranks: Vec<_> = threads(WORLD, Default::default()).unwrap().into_iter().map(run).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// A number from −1 to 1 for each index.
fn wave(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|i| ((i * 37 + seed * 101 + 1) as f64).sin()).collect()
}

/// Variables of `dtype`: 12 matrices of uneven sizes, one that no loss uses, and one of integers.
fn variables(seed: usize, dtype: DType) -> VarMap {
    let (map, cpu) = (VarMap::new(), Device::Cpu);
    for layer in 0..LAYERS {
        let values = wave(seed + layer, D * D);
        let init = Tensor::from_vec(values, (D, D), &cpu).unwrap().to_dtype(dtype).unwrap();
        insert(&map, &format!("layers.{layer}.weight"), init);
    }
    insert(&map, "unused", Tensor::ones(7, dtype, &cpu).unwrap());
    insert(&map, "steps", Tensor::new(&[seed as u32], &cpu).unwrap());
    map
}

fn insert(map: &VarMap, name: &str, init: Tensor) {
    map.data().lock().unwrap().insert(name.into(), candle_core::Var::from_tensor(&init).unwrap());
}

fn weight(map: &VarMap, layer: usize) -> Tensor {
    map.data().lock().unwrap()[&format!("layers.{layer}.weight")].as_tensor().clone()
}

/// The loss of rows [rows, D]: the first rank's does not use the last layer, the others' use it twice.
fn loss(map: &VarMap, rows: &Tensor, rank: usize) -> Result<Tensor> {
    let layers = if rank == 0 { LAYERS - 1 } else { LAYERS };
    let mut x = rows.to_dtype(weight(map, 0).dtype())?;
    for layer in 0..layers {
        x = (&x + x.matmul(&weight(map, layer))?.tanh()?)?;
    }
    if rank > 0 {
        x = x.matmul(&weight(map, LAYERS - 1))?;
    }
    x.to_dtype(DType::F64)?.sqr()?.mean_all()
}

fn rows(rank: usize, step: usize) -> Tensor {
    Tensor::from_vec(wave(1000 + 10 * step + rank, 4 * D), (4, D), &Device::Cpu).unwrap()
}

/// The loss of one process: the mean over the ranks' losses.
fn whole_loss(map: &VarMap, step: usize) -> Tensor {
    let losses: Vec<Tensor> = (0..WORLD).map(|rank| loss(map, &rows(rank, step), rank).unwrap()).collect();
    Tensor::stack(&losses, 0).unwrap().mean_all().unwrap()
}

fn values(map: &VarMap) -> BTreeMap<String, Vec<f64>> {
    let map = map.data().lock().unwrap();
    map.iter().map(|(name, var)| (name.clone(), flat(var))).collect()
}

fn flat(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[track_caller]
fn close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let size = expected.iter().fold(1e-3_f64, |size, x| size.max(x.abs()));
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() <= tolerance * size, "{what}: {a} instead of {b}, of {size}");
    }
}

fn options(form: GradSync) -> DdpOptions {
    // Several buckets, each of several parameters.
    DdpOptions { form, bucket_bytes: Some(800), ..DdpOptions::default() }
}

#[test]
fn gradients_are_the_averages_of_all_ranks() {
    let reference = variables(0, DType::F64);
    let whole = whole_loss(&reference, 0).backward().unwrap();
    for form in GradSync::ALL {
        // The results of bf16 are rounded once, the gradients that are averaged are candle's.
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, 0.5_f64.powi(8))] {
            let found = on_ranks(move |comm| {
                let rank = comm.rank();
                // Ranks begin with other values, and take those of rank 0.
                let map = variables(50 * rank, dtype);
                let ddp = DistributedDataParallel::new(&map, comm, options(form)).unwrap();
                assert!(ddp.names().is_sorted() && ddp.names().count() == LAYERS + 1);
                let loss = loss(&map, &rows(rank, 0), rank).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                assert!(gradients.get(&map.data().lock().unwrap()["unused"]).is_none());
                let own = loss.backward().unwrap();
                let of = |layer| {
                    let (var, zeros) = (weight(&map, layer), vec![0.0; D * D]);
                    let average = gradients.get(&var).unwrap();
                    assert!(average.dtype() == dtype && average.dims() == [D, D]);
                    (flat(average), own.get(&var).map_or(zeros, flat))
                };
                ((0..LAYERS).map(of).collect::<Vec<_>>(), values(&map))
            });
            for layer in 0..LAYERS {
                let what = format!("{form:?} {dtype:?} layer {layer}");
                let own = |i: usize| found.iter().map(|rank| rank.0[layer].1[i]).sum::<f64>() / WORLD as f64;
                let average: Vec<f64> = (0..D * D).map(own).collect();
                for rank in &found {
                    close(&rank.0[layer].0, &average, tolerance, &what);
                    assert_eq!(rank.0[layer].0, found[0].0[layer].0, "the ranks' bits");
                    if dtype == DType::F32 {
                        close(&rank.0[layer].0, &flat(whole.get(&weight(&reference, layer)).unwrap()), 1e-5, &what);
                    }
                }
            }
            for (rank, (_, values)) in found.iter().enumerate() {
                assert_eq!(values["layers.3.weight"], found[0].1["layers.3.weight"]);
                assert_eq!(values["steps"], [50.0 * rank as f64], "integers are left alone");
            }
        }
    }
}

/// Two micro-batches in each step, with AdamW.
#[test]
fn training_is_that_of_one_process() {
    let settings = ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() };
    let reference = variables(0, DType::F64);
    let floats = reference.all_vars().into_iter().filter(|var| var.dtype() == DType::F64).collect();
    let mut optimizer = candle_nn::AdamW::new(floats, settings.clone()).unwrap();
    for step in 0..4 {
        let both = (whole_loss(&reference, 2 * step) + whole_loss(&reference, 2 * step + 1)).unwrap();
        optimizer.step(&both.backward().unwrap()).unwrap();
    }
    let expected = values(&reference);
    let found = on_ranks(move |comm| {
        let rank = comm.rank();
        let map = variables(rank, DType::F32);
        let ddp = DistributedDataParallel::new(&map, comm, options(GradSync::Bucketed)).unwrap();
        let mut optimizer = FusedAdamW::from_var_map(&map, settings.clone()).unwrap();
        for step in 0..4 {
            ddp.backward_no_sync(&loss(&map, &rows(rank, 2 * step), rank).unwrap()).unwrap();
            let last = ddp.backward(&loss(&map, &rows(rank, 2 * step + 1), rank).unwrap()).unwrap();
            optimizer.step(&last).unwrap();
        }
        values(&map)
    });
    for rank in &found {
        for (name, values) in rank.iter().filter(|(name, _)| *name != "steps") {
            close(values, &expected[name], 1e-4, name);
            assert_eq!(values, &found[0][name], "the ranks' bits of {name}");
        }
    }
}

const RANK_OF_A_JOB: &str = "TILEWRIGHT_TEST_RANK";

/// Runs in processes of the test below: connects as a launched program does, and prints the weights after a step.
#[test]
fn rank_of_a_job() {
    if std::env::var_os(RANK_OF_A_JOB).is_none() {
        return;
    }
    let comm = Arc::new(dist::connect().unwrap());
    assert_eq!((comm.world(), comm.backend()), (WORLD, "tcp"));
    let rank = comm.rank();
    let map = variables(rank, DType::F32);
    let ddp = DistributedDataParallel::new(&map, comm, options(GradSync::Bucketed)).unwrap();
    let mut optimizer = FusedAdamW::from_var_map(&map, ParamsAdamW::default()).unwrap();
    optimizer.step(&ddp.backward(&loss(&map, &rows(rank, 0), rank).unwrap()).unwrap()).unwrap();
    println!("weights: {:?}", flat(&weight(&map, LAYERS - 1)));
}

/// Ranks as processes, which find each other by the variables that launchers set.
#[test]
fn processes_have_the_same_weights() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["rank_of_a_job", "--exact", "--nocapture"]).env(RANK_OF_A_JOB, "1");
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", WORLD), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", WORLD)]
        {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..WORLD).map(start).collect();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    let weights = |output: &std::process::Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_once("weights: ").unwrap().1.lines().next().unwrap().to_string()
    };
    assert!(outputs.iter().all(|output| weights(output) == weights(&outputs[0])));
}

/// A pass that fails leaves nothing for the next step.
#[test]
fn a_failed_pass_leaves_no_gradient() {
    let found = on_ranks(|comm| {
        let rank = comm.rank();
        let map = variables(0, DType::F32);
        let ddp = DistributedDataParallel::new(&map, comm, options(GradSync::Flat)).unwrap();
        let of = |step| loss(&map, &rows(rank, step), rank).unwrap();
        let expected = ddp.backward(&of(1)).unwrap();
        ddp.backward_no_sync(&of(0)).unwrap();
        let failing = tilewright_candle::graph::record1(
            "failing",
            &of(2),
            tilewright_candle::memory::OutputAlloc::<f32>::new(&Device::Cpu, 1).unwrap(),
            (),
            |_, _, _| candle_core::bail!("on purpose"),
        );
        let failed = ddp.backward_no_sync(&failing.unwrap());
        assert!(failed.unwrap_err().to_string().contains("on purpose"));
        let found = ddp.backward(&of(1)).unwrap();
        let of_layer = |gradients: &candle_core::backprop::GradStore| flat(gradients.get(&weight(&map, 4)).unwrap());
        (of_layer(&found), of_layer(&expected))
    });
    assert!(found.iter().all(|(found, expected)| found == expected));
}

#[test]
fn mistakes_are_errors_on_all_ranks() {
    let message = |map: fn(usize) -> VarMap, options: DdpOptions| -> Vec<String> {
        on_ranks(move |comm| {
            let rank = comm.rank();
            DistributedDataParallel::new(&map(rank), comm, options).err().map(|error: error::Error| error.to_string())
        })
        .into_iter()
        .map(|message| message.expect("an error"))
        .collect()
    };
    let all_say = |messages: Vec<String>, part: &str| {
        assert!(messages.iter().all(|message| message.contains(part)), "expected `{part}` in: {messages:?}");
    };
    let default = DdpOptions::default();
    fn one_more(rank: usize) -> VarMap {
        let map = variables(0, DType::F32);
        if rank == 1 {
            VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu)
                .get_with_hints(3, "more", Default::default())
                .unwrap();
        }
        map
    }
    all_say(message(one_more, default), "rank 1: the model or the options differ from rank 0's");
    all_say(
        message(|_| variables(0, DType::F64), default),
        "expected variables of f32, bf16 or f16, found `layers.0.weight`",
    );
    all_say(message(|_| VarMap::new(), default), "expected a VarMap with variables of floats, found none");
    let shards = DdpOptions { exchange: Exchange::ReduceScatter, ..default };
    all_say(message(|_| variables(0, DType::F32), shards), "found ReduceScatter");
}
