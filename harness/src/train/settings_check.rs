//! Checks before the first step that all ranks of a run have the same settings.
//!
//! The ranks compare the serialized form of whole settings structs, so that a new field is compared automatically.
//! [`OPTIONS`] only maps fields to command-line options. A test finds options that are neither compared nor listed in
//! [`PER_RANK_OPTIONS`].

use serde::Serialize;
use serde_json::Value;

use super::checkpoint::{Checkpoint, hex};
use super::{DataParallelOptions, Result, RunOptions};
use crate::data::Dataset;
use crate::dist::comm::{Communicator, Reduce};
use crate::dist::ddp::DdpOptions;
use crate::dist::error::Error;
use crate::dist::sharded::Mode;
use crate::escape::printable;

/// Options of `train` that may differ between ranks, or that are compared in another form: paths, output, device and
/// time limit may differ. `--data` and `--vocab-size` are compared by the resulting text and tokenizer, `--size` by the
/// resulting numbers, `--resume` by the loaded state.
#[cfg(test)]
const PER_RANK_OPTIONS: [&str; 8] = ["data", "vocab-size", "size", "out", "resume", "export", "device", "minutes"];

/// Fields of the settings, and the options that set them.
const OPTIONS: [(&str, &str); 47] = [
    ("version", "the program's version"),
    ("text", "the text's hash (--data)"),
    ("tokenizer", "the tokenizer's hash (--vocab-size)"),
    ("tokens", "the number of the text's tokens"),
    ("step", "the step to resume from (--resume)"),
    ("checkpoint", "the hash of the checkpoint (--out)"),
    ("model.vocabulary", "the vocabulary (--vocab-size)"),
    ("model.context", "--context"),
    ("model.d_model", "--d-model"),
    ("model.d_ff", "--d-ff"),
    ("model.layers", "--layers"),
    ("model.heads", "--heads"),
    ("model.heads_kv", "--heads-kv"),
    ("model.norm", "--norm"),
    ("model.attention", "--attention"),
    ("model.fusion", "--fusion"),
    ("model.tied", "--tied"),
    ("model.checkpoint", "--recompute"),
    ("model.precision", "--precision"),
    ("training.steps", "--steps"),
    ("training.batch", "--batch"),
    ("training.micro_batch", "--micro-batch"),
    ("training.context", "--context"),
    ("training.evaluate_every", "--evaluate-every"),
    ("training.evaluate_sequences", "--evaluate-sequences"),
    ("training.save_every", "--save-every"),
    ("training.keep.last", "--keep-last"),
    ("training.keep.best", "--keep-best"),
    ("training.seed", "--seed"),
    ("training.trainer.schedule.peak", "--lr"),
    ("training.trainer.schedule.floor", "--min-lr"),
    ("training.trainer.schedule.warmup", "--warmup"),
    ("training.trainer.schedule.total", "the step at which the learning-rate decay ends (--schedule)"),
    ("training.trainer.weight_decay", "--weight-decay"),
    ("training.trainer.decay_embeddings", "--decay-embeddings"),
    ("training.trainer.adamw.beta1", "--beta1"),
    ("training.trainer.adamw.beta2", "--beta2"),
    ("training.trainer.adamw.eps", "--eps"),
    ("training.trainer.clip", "--clip"),
    ("ranks.form", "--ddp"),
    ("ranks.bucket_bytes", "--bucket-mb (in bytes)"),
    ("ranks.comm_dtype", "--comm-dtype"),
    ("ranks.nccl_ctas", "--nccl-ctas"),
    ("ranks.copy_engines", "--copy-engines"),
    ("ranks.reserve_sms", "--reserve-sms"),
    ("shard", "--shard"),
    ("on_gpu", "whether it trains on a GPU (--device)"),
];

/// All settings that affect the result or the order of collectives.
#[derive(Serialize)]
struct Settings<'a> {
    version: String,
    text: String,
    tokenizer: String,
    tokens: usize,
    model: Value,
    training: &'a RunOptions,
    ranks: &'a DdpOptions,
    shard: Option<Mode>,
    on_gpu: bool,
    step: u64,
    checkpoint: Option<String>,
}

/// Maximum number of differences in an error.
const MAX_DIFFERENCES: usize = 20;
/// Upper bound of the size of serialized settings, far above the actual size.
const MAX_SETTINGS_BYTES: usize = 1 << 20;

/// Fails unless all ranks have the same settings, text, tokenizer, checkpoint and program version. Every rank calls it,
/// and every rank gets the same error.
///
/// # Errors
/// Names each rank that differs from rank 0, the option, and both values; errors of communication.
pub fn check(
    data_parallel: &DataParallelOptions,
    model: Value,
    options: &RunOptions,
    data: &Dataset,
    from: Option<&Checkpoint>,
) -> Result<()> {
    let unreadable = |error: serde_json::Error| Error::Misuse(format!("settings cannot be compared: {error}"));
    let settings = Settings {
        // Programs built from other sources may compute other results.
        version: format!("{}+{}", tilewright::codegen::VERSION, env!("TILEWRIGHT_HARNESS_HASH")),
        text: hex(&data.tokens.text_hash()),
        tokenizer: hex(&data.tokenizer.hash()),
        tokens: data.tokens.len(),
        model,
        training: options,
        ranks: &data_parallel.ddp,
        shard: data_parallel.shard,
        on_gpu: data_parallel.comm.is_on_device(),
        step: from.map_or(0, |checkpoint| checkpoint.header.step),
        checkpoint: from.map(Checkpoint::hash).transpose()?,
    };
    let own = serde_json::to_string(&settings).map_err(unreadable)?;
    let differences = compare(&gather(&data_parallel.comm, &own)?);
    if differences.is_empty() {
        return Ok(());
    }
    let more = differences.len().saturating_sub(MAX_DIFFERENCES);
    let mut text = String::from("the ranks have different settings:");
    for difference in differences.iter().take(MAX_DIFFERENCES) {
        text += &format!("\n  {difference}");
    }
    if more > 0 {
        text += &format!("\n  and {more} more differences");
    }
    text += "\n  help: start all ranks with the same options, files and program version; all have to use the same folder --out";
    Err(Error::Misuse(text).into())
}

/// Gathers the settings of all ranks, by rank.
fn gather(comm: &Communicator, own: &str) -> Result<Vec<String>> {
    let mut longest = [own.len() as u64];
    comm.all_reduce(&mut longest, Reduce::Max).map_err(Error::from)?;
    let padded_bytes = longest[0] as usize;
    if padded_bytes > MAX_SETTINGS_BYTES {
        return Err(Error::Misuse(format!(
            "a rank's settings have {padded_bytes} bytes, expected at most {MAX_SETTINGS_BYTES}"
        ))
        .into());
    }
    let mut all = vec![0_u8; padded_bytes * comm.world()];
    all[padded_bytes * comm.rank()..][..own.len()].copy_from_slice(own.as_bytes());
    comm.all_gather(&mut all).map_err(Error::from)?;
    // JSON text contains no NUL bytes.
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string();
    Ok(all.chunks(padded_bytes.max(1)).map(text).collect())
}

/// Differences from rank 0, one line each.
fn compare(all: &[String]) -> Vec<String> {
    let fields: Vec<Vec<(String, String)>> = all.iter().map(|text| flatten_text(text)).collect();
    let Some((first, others)) = fields.split_first() else { return Vec::new() };
    let value = |of: &[(String, String)], path: &str| {
        of.iter().find(|(other, _)| other == path).map_or("not known".to_string(), |(_, value)| value.clone())
    };
    let mut lines = Vec::new();
    for (index, other) in others.iter().enumerate() {
        let unknown = other.iter().filter(|(path, _)| !first.iter().any(|(known, _)| known == path));
        for (path, _) in first.iter().chain(unknown) {
            let [here, there] = [first, other].map(|of| value(of, path));
            if here != there {
                let name = OPTIONS.iter().find(|(known, _)| known == path).map_or(path.as_str(), |(_, name)| *name);
                let line = format!("rank {}: {name} is {there}, and {here} on rank 0", index + 1);
                lines.push(printable(&line));
            }
        }
    }
    lines
}

/// Flattens serialized settings; invalid JSON becomes a single field.
fn flatten_text(text: &str) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    let value = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_string()));
    flatten(String::new(), &value, &mut fields);
    fields
}

/// Adds all leaf values of `value` with their paths.
fn flatten(path: String, value: &Value, fields: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                let below = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(below, value, fields);
            }
        }
        Value::String(word) => fields.push((path, word.clone())),
        Value::Null => fields.push((path, "off".into())),
        other => fields.push((path, other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn differences_name_rank_option_and_both_values() {
        let settings = |lr: f64, clip: Option<f64>| {
            serde_json::json!({ "training": { "trainer": { "clip": clip, "schedule": { "peak": lr } } } }).to_string()
        };
        let all = [settings(0.003, Some(1.0)), settings(0.003, Some(1.0)), settings(0.001, None)];
        let expected = ["rank 2: --clip is off, and 1.0 on rank 0", "rank 2: --lr is 0.001, and 0.003 on rank 0"];
        assert_eq!(compare(&all), expected);
        // A field that only one version has, and a field that is not in the list.
        let all = [r#"{"a":{"b":1}}"#.to_string(), r#"{"a":{"b":1},"c":"\u001b[2J"}"#.into(), "junk".into()];
        let expected = [
            "rank 1: c is \\u{1b}[2J, and not known on rank 0",
            "rank 2: a.b is not known, and 1 on rank 0",
            "rank 2:  is junk, and not known on rank 0",
        ];
        assert_eq!(compare(&all), expected);
    }

    /// A new option of `train` fails this test until it is added to [`OPTIONS`], if its field is part of the settings,
    /// or to [`PER_RANK_OPTIONS`], if ranks may differ in it.
    #[test]
    fn every_option_of_train_is_compared_or_may_differ() {
        let program = crate::cli::Arguments::command();
        let train = program.find_subcommand("train").unwrap();
        let named = |long: &str| {
            let words =
                |name: &str| name.replace(['(', ')'], " ").split(' ').any(|word| word.strip_prefix("--") == Some(long));
            OPTIONS.iter().any(|(_, name)| words(name)) || PER_RANK_OPTIONS.contains(&long)
        };
        let all: Vec<&str> = train.get_arguments().filter_map(|argument| argument.get_long()).collect();
        let forgotten: Vec<&&str> = all.iter().filter(|long| !named(long) && *long != &"help").collect();
        assert!(forgotten.is_empty() && all.len() > 30, "{forgotten:?} of {all:?}");
        assert!(PER_RANK_OPTIONS.iter().all(|own| all.contains(own)));
    }
}
