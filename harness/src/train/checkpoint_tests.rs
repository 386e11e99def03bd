//! Checkpoints of a model with three parameters and the loss Σ (xᵢ − i)².

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::optim::{AdamWOptions, Schedule};
use crate::params::{Init, ParamSpec};
use crate::train::LearnerOptions;

fn options() -> LearnerOptions {
    LearnerOptions {
        adamw: AdamWOptions::default(),
        schedule: Schedule { peak: 0.1, floor: 0.01, warmup: 2, total: 20 },
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

fn go(learner: &mut Learner, steps: usize) -> Vec<f32> {
    let mut losses = Vec::new();
    for _ in 0..steps {
        learner.begin().unwrap();
        let loss = loss(learner.params());
        losses.push(loss.to_scalar::<f32>().unwrap());
        learner.backward(&loss, 1.0).unwrap();
        assert!(learner.update().unwrap().applied);
    }
    losses
}

fn header(learner: &Learner) -> Header {
    let sampler = SamplerState { seed: 3, drawn: 99 };
    Header::new(json!({ "width": 6, "norm": { "kind": "rms" } }), json!({}), learner, sampler, ("text", [9; 32]))
}

fn saved(dir: &Path) -> PathBuf {
    let mut learner = Learner::new(&model(6, 1), options()).unwrap();
    go(&mut learner, 3);
    let path = dir.join("c.safetensors");
    save(&path, &header(&learner), "{}", &learner).unwrap();
    path
}

#[test]
fn a_resumed_run_has_the_same_losses_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = Learner::new(&model(6, 1), options()).unwrap();
    let expected = go(&mut whole, 10);
    assert!(expected[9] < expected[0]);

    let path = saved(dir.path());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut resumed = Learner::new(&model(6, 77), options()).unwrap();
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
        assert!(message.contains("cut short") && message.contains(&format!("found {len}")), "{message}");
    }
    std::fs::write(&path, "no checkpoint at all, but long enough to have a length").unwrap();
    assert!(Checkpoint::open(&path).err().unwrap().to_string().contains("no checkpoint"));
    let missing = Checkpoint::open(&dir.path().join("none")).err().unwrap().to_string();
    assert!(missing.contains("cannot read"), "{missing}");
}

#[test]
fn numbers_that_no_run_has_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = saved(dir.path());
    let whole = std::fs::read(&path).unwrap();
    let (length, rest) = whole.split_first_chunk::<8>().unwrap();
    let (header, tensors) = rest.split_at(u64::from_le_bytes(*length) as usize);
    // Opens the file with its header changed.
    let refuse = |change: &dyn Fn(&mut Value)| {
        let mut changed: Value = serde_json::from_slice(header).unwrap();
        change(&mut changed);
        let changed = serde_json::to_vec(&changed).unwrap();
        std::fs::write(&path, [&(changed.len() as u64).to_le_bytes(), changed.as_slice(), tensors].concat()).unwrap();
        Checkpoint::open(&path).err().unwrap().to_string()
    };
    let message = refuse(&|header| header["out.weight"]["data_offsets"] = json!([0, u64::MAX]));
    assert!(message.contains("cut short"), "{message}");
    let message = refuse(&|header| {
        let mut own: Value = serde_json::from_str(header["__metadata__"]["tilewright"].as_str().unwrap()).unwrap();
        own["optimizer_steps"] = json!(u64::MAX);
        header["__metadata__"]["tilewright"] = json!(own.to_string());
    });
    assert!(message.contains("18446744073709551615 of 3 steps"), "{message}");
}

#[test]
fn another_models_checkpoint_is_refused_with_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&saved(dir.path())).unwrap();
    checkpoint.check_model(&json!({ "norm": { "kind": "rms" }, "width": 6 })).unwrap();
    let other = checkpoint.check_model(&json!({ "norm": { "kind": "layer" }, "width": 8 })).err().unwrap().to_string();
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
    let mut learner = Learner::new(&model(6, 1), options()).unwrap();
    go(&mut learner, 1);
    let before = learner.params().values().to_vec1::<f32>().unwrap();
    learner.begin().unwrap();
    let name = "norm.weight";
    let infinite = (learner.params().get(name).unwrap().leaf(DType::F32).unwrap() * f64::INFINITY).unwrap();
    learner.backward(&infinite.sum_all().unwrap(), 1.0).unwrap();
    let message = learner.update().err().unwrap().to_string();
    assert!(message.contains("step 2") && message.contains("`norm.weight`"), "{message}");
    assert_eq!(learner.params().values().to_vec1::<f32>().unwrap(), before);
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let once = {
        let mut learner = Learner::new(&model(6, 1), options()).unwrap();
        go(&mut learner, 1);
        learner.params().values().to_vec1::<f32>().unwrap()
    };
    let mut learner = Learner::new(&model(6, 1), options()).unwrap();
    learner.begin().unwrap();
    for _ in 0..4 {
        let loss = loss(learner.params());
        learner.backward(&loss, 0.25).unwrap();
    }
    learner.update().unwrap();
    for (a, b) in learner.params().values().to_vec1::<f32>().unwrap().iter().zip(&once) {
        assert!((a - b).abs() <= 1e-6, "{a} {b}");
    }
}

#[test]
fn norms_and_embeddings_do_not_decay_unless_asked() {
    let decays = |decay_embeddings: bool| {
        let learner = Learner::new(&model(64, 1), LearnerOptions { decay_embeddings, ..options() }).unwrap();
        learner.groups().iter().map(|group| (group.range.clone(), group.weight_decay)).collect::<Vec<_>>()
    };
    assert_eq!(decays(false), [(0..512, 0.0), (512..832, 0.1)]);
    assert_eq!(decays(true), [(0..448, 0.1), (448..512, 0.0), (512..832, 0.1)]);
}

#[test]
fn an_f16_model_leaves_steps_out_that_overflow() {
    let params = model(6, 1);
    params.keep_copy(DType::F16).unwrap();
    let mut learner = Learner::new(&params, options()).unwrap();
    assert_eq!(learner.scale().factor(), 65_536.0);
    let before = params.values().to_vec1::<f32>().unwrap();
    learner.begin().unwrap();
    let huge = (params.get("norm.weight").unwrap().leaf(DType::F32).unwrap() * 1e38).unwrap();
    learner.backward(&huge.sum_all().unwrap(), 1.0).unwrap();
    let update = learner.update().unwrap();
    assert!(!update.applied && learner.scale().factor() == 32_768.0 && learner.optimizer_steps() == 0);
    assert_eq!(params.values().to_vec1::<f32>().unwrap(), before);
    go(&mut learner, 1);
    assert_eq!((learner.step(), learner.optimizer_steps()), (2, 1));
    let (values, copy) = (params.values().to_vec1::<f32>().unwrap(), params.copy().unwrap());
    let copy = copy.to_vec1::<half::f16>().unwrap();
    assert!(values.iter().zip(&copy).all(|(value, copy)| half::f16::from_f32(*value) == *copy));
}
