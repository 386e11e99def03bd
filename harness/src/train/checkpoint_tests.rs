//! Checkpoints of a model with three parameters and the loss Σ (xᵢ − i)².

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use serde_json::json;

use super::*;
use crate::optim::{AdamWOptions, LrSchedule};
use crate::params::{Init, ParamSpec};
use crate::train::TrainerOptions;

fn options() -> TrainerOptions {
    TrainerOptions {
        adamw: AdamWOptions::default(),
        schedule: LrSchedule { max_lr: 0.1, min_lr: 0.01, warmup_steps: 2, total_steps: 20 },
        weight_decay: 0.1,
        decay_embeddings: false,
        clip: Some(1.0),
    }
}

fn model(width: usize, seed: u64) -> Params {
    let specs = vec![
        ParamSpec::matrix("embedding.weight", &[7, width], 0.5),
        ParamSpec::vector("norm.weight", width, Init::Ones),
        ParamSpec::matrix("out.weight", &[5, width], 0.5),
    ];
    Params::new(specs, &Device::Cpu, seed).unwrap()
}

fn loss(params: &Params) -> Tensor {
    let mut sum = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
    for param in params.iter() {
        let goal = Tensor::arange(0.0, param.numel() as f32, &Device::Cpu).unwrap().reshape(param.shape()).unwrap();
        let off = (param.leaf(DType::F32).unwrap() - goal).unwrap().sqr().unwrap().sum_all().unwrap();
        sum = (sum + off).unwrap();
    }
    sum
}

fn go(trainer: &mut Trainer, steps: usize) -> Vec<f32> {
    let mut losses = Vec::new();
    for _ in 0..steps {
        trainer.begin();
        let loss = loss(trainer.params());
        losses.push(loss.to_scalar::<f32>().unwrap());
        trainer.backward(&loss, 1.0).unwrap();
        assert!(trainer.update().unwrap().applied);
    }
    losses
}

fn header(trainer: &Trainer) -> Header {
    let sampler = SamplerState { seed: 3, drawn: 99 };
    Header::new(json!({ "width": 6, "norm": { "kind": "rms" } }), json!({}), trainer, sampler, ("text", [9; 32]))
}

fn saved(dir: &Path) -> PathBuf {
    let mut trainer = Trainer::new(&model(6, 1), options()).unwrap();
    go(&mut trainer, 3);
    let path = dir.join("c.safetensors");
    save(&path, &header(&trainer), "{}", &trainer).unwrap();
    path
}

#[test]
fn a_resumed_run_has_the_same_losses_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = Trainer::new(&model(6, 1), options()).unwrap();
    let expected = go(&mut whole, 10);
    assert!(expected[9] < expected[0]);

    let path = saved(dir.path());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut resumed = Trainer::new(&model(6, 77), options()).unwrap();
    checkpoint.load(&mut resumed).unwrap();
    assert_eq!((resumed.step(), checkpoint.header.sampler.drawn, checkpoint.tokenizer.as_str()), (3, 99, "{}"));
    assert_eq!(checkpoint.header, header(&resumed));
    assert_eq!(go(&mut resumed, 7), expected[3..]);
    assert_eq!(resumed.params().values().to_vec1::<f32>().unwrap(), whole.params().values().to_vec1::<f32>().unwrap());
}

#[test]
fn other_programs_can_read_it() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(saved(dir.path())).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 9);
    assert_eq!(tensors.tensor("optimizer.second.out.weight").unwrap().shape(), [5, 6]);
}

#[test]
fn a_file_cut_at_any_place_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let whole = std::fs::read(&path).unwrap();
    for len in (1..whole.len()).step_by(13).chain([4, 7, 8, 9, whole.len() - 1]) {
        std::fs::write(&path, &whole[..len]).unwrap();
        let message = Checkpoint::open(&path).err().unwrap().to_string();
        assert!(message.contains("truncated") && message.contains(&format!("found {len}")), "{message}");
    }
    std::fs::write(&path, "no checkpoint at all, but long enough to have a length").unwrap();
    assert!(Checkpoint::open(&path).err().unwrap().to_string().contains("not a usable checkpoint"));
    let missing = Checkpoint::open(&dir.path().join("none")).err().unwrap().to_string();
    assert!(missing.contains("cannot read"), "{missing}");
}

/// Changes the header with `change`. Returns the file with recomputed header hash, or without checksums.
fn with_header(whole: &[u8], checksums: bool, change: &dyn Fn(&mut Value)) -> Vec<u8> {
    let (length, rest) = whole.split_first_chunk::<8>().unwrap();
    let (header, tensors) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut changed: Value = serde_json::from_slice(header).unwrap();
    let metadata = changed["__metadata__"].as_object_mut().unwrap();
    match checksums {
        true => drop(metadata.insert("header_blake3".into(), json!("0".repeat(64)))),
        false => metadata.retain(|name, _| name == "tilewright" || name == "tokenizer"),
    }
    change(&mut changed);
    let header = serde_json::to_vec(&changed).unwrap();
    let mut start = [&(header.len() as u64).to_le_bytes(), header.as_slice()].concat();
    if checksums {
        let hash = tensor_file::checksum(&start);
        let key = b"\"header_blake3\":\"";
        let place = start.windows(key.len()).position(|part| part == key).unwrap() + key.len();
        start[place..place + 64].copy_from_slice(hash.as_bytes());
    }
    [&start, tensors].concat()
}

/// Changes the run's entry of the metadata.
fn own(header: &mut Value, change: impl FnOnce(&mut Value)) {
    let mut own: Value = serde_json::from_str(header["__metadata__"]["tilewright"].as_str().unwrap()).unwrap();
    change(&mut own);
    header["__metadata__"]["tilewright"] = json!(own.to_string());
}

fn as_format_1(whole: &[u8]) -> Vec<u8> {
    with_header(whole, false, &|header| own(header, |own| own["format"] = json!("tilewright checkpoint 1")))
}

/// The loaded state: all bits, header and tokenizer.
fn loaded(path: &Path) -> Result<(Vec<u32>, Header, String)> {
    let checkpoint = Checkpoint::open(path)?;
    let mut trainer = Trainer::new(&model(6, 77), options()).unwrap();
    checkpoint.load(&mut trainer)?;
    let values = trainer.params().values().to_vec1::<f32>().unwrap();
    let moments = trainer.moments().into_iter().flat_map(|m| [m.first.to_vec().unwrap(), m.second.to_vec().unwrap()]);
    let bits = values.into_iter().chain(moments.flatten()).map(f32::to_bits).collect();
    Ok((bits, checkpoint.header, checkpoint.tokenizer))
}

#[test]
fn impossible_header_values_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let whole = std::fs::read(&path).unwrap();
    // Opens the file with a changed header.
    let refuse = |change: &dyn Fn(&mut Value)| {
        let messages = [false, true].map(|checksums| {
            std::fs::write(&path, with_header(&whole, checksums, change)).unwrap();
            loaded(&path).err().unwrap().to_string()
        });
        messages.concat()
    };
    let message = refuse(&|header| header["out.weight"]["data_offsets"] = json!([0, u64::MAX]));
    assert!(message.contains("header is damaged"), "{message}");
    let message = refuse(&|header| header["out.weight"]["shape"] = json!([u64::MAX, 1_u64 << 40]));
    assert!(message.contains("header is damaged"), "{message}");
    let message = refuse(&|header| own(header, |own| own["optimizer_steps"] = json!(u64::MAX)));
    assert!(message.contains("18446744073709551615 optimizer steps, more than its 3 steps"), "{message}");
    let message = refuse(&|header| own(header, |own| own["sampler"]["drawn"] = json!(u64::MAX)));
    assert!(message.contains("more than a run can have"), "{message}");
    let message = refuse(&|header| own(header, |own| own["parts"] = json!({ "id": 1, "world": u64::MAX })));
    assert!(message.contains("18446744073709551615 ranks") || message.contains("checksums are missing"), "{message}");
}

#[test]
fn files_without_checksums_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let (bits, header, _) = loaded(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, as_format_1(&whole)).unwrap();
    let (found, old, _) = loaded(&path).unwrap();
    assert_eq!((found, old.step, old.format.as_str()), (bits, header.step, "tilewright checkpoint 1"));
    // A file of format 2 has to have checksums.
    std::fs::write(&path, with_header(&whole, false, &|_| {})).unwrap();
    let message = loaded(&path).err().unwrap().to_string();
    assert!(message.contains("checksums are missing"), "{message}");
}

#[test]
fn damaged_and_not_finite_tensors_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let whole = std::fs::read(&path).unwrap();
    let start = |whole: &[u8], name: &str| {
        let tensors = SafeTensors::deserialize(whole).unwrap();
        tensors.tensor(name).unwrap().data().as_ptr() as usize - whole.as_ptr() as usize
    };
    for name in ["norm.weight", "optimizer.second.out.weight"] {
        let mut flipped = whole.clone();
        flipped[start(&whole, name) + 5] ^= 1;
        std::fs::write(&path, flipped).unwrap();
        let message = loaded(&path).err().unwrap().to_string();
        assert!(
            message.contains(&format!("tensor `{name}` is damaged")) && message.contains("c.safetensors"),
            "{message}"
        );
        for value in [f32::NAN, f32::INFINITY] {
            let mut old = as_format_1(&whole);
            let place = start(&old, name) + 8;
            old[place..place + 4].copy_from_slice(&value.to_le_bytes());
            std::fs::write(&path, old).unwrap();
            let message = loaded(&path).err().unwrap().to_string();
            let parts = [format!("tensor `{name}` is not finite"), format!("element 2 is {value}")];
            // Loading only the parameters checks these.
            let values = Checkpoint::open(&path).unwrap().load_params(&model(6, 77));
            assert_eq!(values.is_err(), !name.starts_with("optimizer"));
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 100).unwrap();
    let mut trainer = Trainer::new(&model(6, 77), options()).unwrap();
    let message = checkpoint.load(&mut trainer).err().unwrap().to_string();
    assert!(message.contains("truncated while it was read"), "{message}");
    // Modified, with the same length.
    let checkpoint = Checkpoint::open(&saved(dir.path())).unwrap();
    let len = std::fs::metadata(&path).unwrap().len();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, [&bytes[..bytes.len() - 400], &[1; 400]].concat()).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
    let message = checkpoint.load(&mut trainer).err().unwrap().to_string();
    assert!(message.contains("damaged"), "{message}");
}

#[test]
fn duplicate_names_are_refused_and_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let whole = std::fs::read(&path).unwrap();
    // Readers differ in which of the two they use.
    for checksums in [false, true] {
        let change = |header: &mut Value| {
            let same = header["norm.weight"].clone();
            header["norm.weighT"] = same;
        };
        let mut bytes = match checksums {
            true => with_header(&whole, true, &change),
            false => with_header(&as_format_1(&whole), false, &change),
        };
        let place = bytes.windows(11).position(|part| part == b"norm.weighT").unwrap();
        bytes[place + 10] = b't';
        std::fs::write(&path, bytes).unwrap();
        let message = loaded(&path).err().unwrap().to_string();
        assert!(message.contains("a duplicate name, `norm.weight`") && message.contains("c.safetensors"), "{message}");
    }
    let escapes = with_header(&whole, true, &|header| {
        let info = header["norm.weight"].take();
        header.as_object_mut().unwrap().remove("norm.weight");
        header["odd\u{1b}[31m\nerror: all is lost"] = info;
    });
    std::fs::write(&path, escapes).unwrap();
    let mut trainer = Trainer::new(&model(6, 77), options()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let message = checkpoint.load(&mut trainer).err().unwrap().to_string();
    assert!(!message.contains(['\u{1b}', '\n']), "{message:?}");
    let params = Params::new(
        vec![ParamSpec::matrix("embedding.weight", &[7, 6], 0.5), ParamSpec::matrix("out.weight", &[5, 6], 0.5)],
        &Device::Cpu,
        0,
    )
    .unwrap();
    let message = checkpoint.load_params(&params).err().unwrap().to_string();
    assert!(message.contains("all is lost") && !message.contains(['\u{1b}', '\n']), "{message:?}");
}

/// Ranks use the hash to detect that they resume from different files.
#[test]
fn checkpoints_of_other_weights_have_other_hashes() {
    let dir = tempfile::tempdir().unwrap();
    let hash = |name: &str, seed: u64| {
        let mut trainer = Trainer::new(&model(6, seed), options()).unwrap();
        go(&mut trainer, 2);
        let path = dir.path().join(name);
        save(&path, &header(&trainer), "{}", &trainer).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        (checkpoint.hash().unwrap(), serde_json::to_string(&checkpoint.header).unwrap())
    };
    let (one, same, other) = (hash("one", 3), hash("same", 3), hash("other", 4));
    assert_eq!(one, same);
    assert!(one.1 == other.1 && one.0 != other.0);
}

/// 200 randomly corrupted files: each is refused with the name of the file, or loads unchanged.
#[test]
fn corrupted_files_are_refused_or_harmless() {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let whole = std::fs::read(&path).unwrap();
    let expected = loaded(&path).unwrap();
    // Another run with the same shapes.
    let other = {
        let mut trainer = Trainer::new(&model(6, 5), options()).unwrap();
        go(&mut trainer, 4);
        let path = dir.path().join("other");
        save(&path, &header(&trainer), "{\"other\": 1}", &trainer).unwrap();
        std::fs::read(&path).unwrap()
    };
    let start = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (mut refused, mut random) = (0, StdRng::seed_from_u64(18));
    for case in 0..200 {
        let mut bytes = whole.clone();
        match case % 8 {
            // Bit flips: anywhere, in the header, in its length.
            0 | 1 => bytes[random.random_range(0..whole.len())] ^= 1 << random.random_range(0..8),
            2 => bytes[random.random_range(8..start)] ^= 1 << random.random_range(0..8),
            3 => bytes[random.random_range(0..8)] ^= 1 << random.random_range(0..8),
            // Truncated; extended.
            4 => bytes.truncate(random.random_range(0..whole.len())),
            5 => bytes.extend((0..random.random_range(1..100)).map(|i| i as u8)),
            // Two ranges of the tensors swapped.
            6 => {
                let len = random.random_range(4..100);
                let (a, b) =
                    (random.random_range(start..whole.len() - len), random.random_range(start..whole.len() - len));
                let (first, second) = (whole[a..a + len].to_vec(), whole[b..b + len].to_vec());
                bytes[b..b + len].copy_from_slice(&first);
                bytes[a..a + len].copy_from_slice(&second);
            }
            // The tensors, or the header, of another run.
            _ => {
                let (head, tail) = if random.random_bool(0.5) { (&whole, &other) } else { (&other, &whole) };
                let cut = |bytes: &[u8]| 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                bytes = [&head[..cut(head)], &tail[cut(tail)..]].concat();
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        match loaded(&path) {
            Ok(found) => assert!(found == expected, "case {case} loads something else"),
            Err(error) => {
                assert!(error.to_string().contains("c.safetensors"), "case {case}: {error}");
                refused += 1;
            }
        }
    }
    assert!(refused >= 195, "{refused} of 200 were refused");
}

#[test]
fn checkpoints_of_another_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&saved(dir.path())).unwrap();
    let check = |model: Value, free: &[&str]| checkpoint.check_model(&model, free);
    check(json!({ "norm": { "kind": "rms" }, "width": 6 }), &[]).unwrap();
    check(json!({ "norm": { "kind": "rms" }, "width": 6, "checkpoint": true }), &["checkpoint"]).unwrap();
    check(json!({ "norm": { "kind": "layer" }, "width": 6 }), &["width"]).unwrap_err();
    let other = check(json!({ "norm": { "kind": "layer" }, "width": 8 }), &[]).err().unwrap().to_string();
    for part in ["another model", "`norm.kind`", "\"layer\"", "found \"rms\"", "`width` is expected to be 8, found 6"] {
        assert!(other.contains(part), "`{part}` is missing in: {other}");
    }

    let wide = model(8, 1);
    let before = wide.values().to_vec1::<f32>().unwrap();
    let message = checkpoint.load_params(&wide).err().unwrap().to_string();
    assert!(
        message.contains("`embedding.weight`") && message.contains("[7, 8]") && message.contains("[7, 6]"),
        "{message}"
    );
    assert_eq!(wide.values().to_vec1::<f32>().unwrap(), before, "nothing was set");

    let named = |name: &str| {
        let specs = vec![ParamSpec::matrix("embedding.weight", &[7, 6], 0.5), ParamSpec::vector(name, 6, Init::Ones)];
        checkpoint.load_params(&Params::new(specs, &Device::Cpu, 0).unwrap()).err().unwrap().to_string()
    };
    assert!(named("bias").contains("expected a tensor `bias` [6], found none"));
    assert!(named("norm.weight").contains("`out.weight`"));
}

#[test]
fn gradients_that_are_not_finite_stop_the_run_with_their_name() {
    let mut trainer = Trainer::new(&model(6, 1), options()).unwrap();
    go(&mut trainer, 1);
    let before = trainer.params().values().to_vec1::<f32>().unwrap();
    trainer.begin();
    let name = "norm.weight";
    let infinite = (trainer.params().get(name).unwrap().leaf(DType::F32).unwrap() * f64::INFINITY).unwrap();
    trainer.backward(&infinite.sum_all().unwrap(), 1.0).unwrap();
    let message = trainer.update().err().unwrap().to_string();
    assert!(message.contains("step 2") && message.contains("`norm.weight`"), "{message}");
    assert_eq!(trainer.params().values().to_vec1::<f32>().unwrap(), before);
}

#[test]
fn micro_batches_accumulate_to_the_batch() {
    let once = {
        let mut trainer = Trainer::new(&model(6, 1), options()).unwrap();
        go(&mut trainer, 1);
        trainer.params().values().to_vec1::<f32>().unwrap()
    };
    let mut trainer = Trainer::new(&model(6, 1), options()).unwrap();
    trainer.begin();
    for _ in 0..4 {
        let loss = loss(trainer.params());
        trainer.backward(&loss, 0.25).unwrap();
    }
    trainer.update().unwrap();
    for (a, b) in trainer.params().values().to_vec1::<f32>().unwrap().iter().zip(&once) {
        assert!((a - b).abs() <= 1e-6, "{a} {b}");
    }
}

#[test]
fn norms_and_embeddings_do_not_decay_unless_asked() {
    let decays = |decay_embeddings: bool| {
        let trainer = Trainer::new(&model(64, 1), TrainerOptions { decay_embeddings, ..options() }).unwrap();
        trainer.groups().iter().map(|group| (group.range.clone(), group.weight_decay)).collect::<Vec<_>>()
    };
    assert_eq!(decays(false), [(0..512, 0.0), (512..832, 0.1)]);
    assert_eq!(decays(true), [(0..448, 0.1), (448..512, 0.0), (512..832, 0.1)]);
}

#[test]
fn f16_overflow_skips_the_step() {
    let params = model(6, 1);
    params.set_compute_dtype(DType::F16).unwrap();
    let mut trainer = Trainer::new(&params, options()).unwrap();
    assert_eq!(trainer.scale().factor(), 65_536.0);
    let before = params.values().to_vec1::<f32>().unwrap();
    trainer.begin();
    let huge = (params.get("norm.weight").unwrap().leaf(DType::F32).unwrap() * 1e38).unwrap();
    trainer.backward(&huge.sum_all().unwrap(), 1.0).unwrap();
    let update = trainer.update().unwrap();
    assert!(!update.applied && trainer.scale().factor() == 32_768.0 && trainer.optimizer_steps() == 0);
    assert_eq!(params.values().to_vec1::<f32>().unwrap(), before);
    go(&mut trainer, 1);
    assert_eq!((trainer.step(), trainer.optimizer_steps()), (2, 1));
    let (values, copy) = (params.values().to_vec1::<f32>().unwrap(), params.compute_weights().unwrap());
    let copy = copy.to_vec1::<half::f16>().unwrap();
    assert!(values.iter().zip(&copy).all(|(value, copy)| half::f16::from_f32(*value) == *copy));
}
