//! `tilewright generate`: samples text from a checkpoint.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use super::device::{self, DeviceArg};
use super::model_options::model_device;
use super::{CliError, Result, value_parsers};
use crate::data::Bpe;
use crate::escape::printable;
use crate::model::{Config, Transformer};
use crate::train::checkpoint::Checkpoint;
use crate::train::run::CHECKPOINT;
use crate::train::{self, Sampling, keep};

#[derive(Args)]
pub struct Arguments {
    /// Checkpoint file, or folder of a run
    #[arg(value_name = "RUN", default_value = "tilewright-run")]
    run: PathBuf,
    /// Beginning of the text
    #[arg(long, value_name = "TEXT", default_value = "Phileas Fogg")]
    prompt: String,
    /// Number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: usize,
    /// Sampling temperature; 0 is greedy decoding
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = value_parsers::non_negative)]
    temperature: f64,
    /// Top-k sampling: sample among the K most likely tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Top-p (nucleus) sampling: sample among the most likely tokens with this total probability
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = value_parsers::probability)]
    top_p: f64,
    /// Seed of the sampler; the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
}

/// Converts an error of a run's newest checkpoint to a command's error, with a hint at the newest older checkpoint if
/// there is one.
fn with_older(path: &Path, error: &dyn std::fmt::Display) -> CliError {
    let folder = path.parent().filter(|_| path.file_name().is_some_and(|name| name == CHECKPOINT));
    let help = folder.and_then(|folder| Some(folder.join(keep::newest_older(folder)?.0)));
    let help =
        help.map(|older| format!("\n  help: `tilewright generate {}` uses an older checkpoint", older.display()));
    CliError::Failure(format!("{error}{}", help.unwrap_or_default()))
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let Arguments { temperature, top_k, top_p, seed, .. } = *arguments;
    let failure = |error: &dyn std::fmt::Display| CliError::Failure(error.to_string());
    let device = model_device(arguments.device)?;
    let path = if arguments.run.is_dir() { arguments.run.join(CHECKPOINT) } else { arguments.run.clone() };
    let checkpoint = Checkpoint::open(&path).map_err(|error| match path.exists() {
        true => with_older(&path, &error),
        false => CliError::Failure(format!("{error}\n  help: `tilewright train --out DIR` writes a checkpoint to DIR")),
    })?;
    let unusable = |reason: &dyn std::fmt::Display| {
        with_older(&path, &CliError::file("use the checkpoint", &path, printable(&reason.to_string())))
    };
    let config: Config = serde_json::from_value(checkpoint.header.model.clone())
        .map_err(|error| unusable(&format!("its hyperparameters cannot be read: {error}")))?;
    config.check().map_err(|error| unusable(&error))?;
    let tokenizer = Bpe::from_json(checkpoint.tokenizer.clone()).map_err(|error| unusable(&error))?;
    if tokenizer.vocabulary() > config.vocabulary {
        let (found, expected) = (tokenizer.vocabulary(), config.vocabulary);
        return Err(unusable(&format!(
            "its tokenizer has {found} entries, but its model has a vocabulary of {expected}"
        )));
    }
    // Checked before memory for the model is allocated.
    if checkpoint.elements() != config.parameters() {
        let (found, expected) = (checkpoint.elements(), config.parameters());
        return Err(unusable(&format!("it has {found} parameters, but its hyperparameters need {expected}")));
    }
    let prompt = tokenizer.encode(&arguments.prompt).map_err(|error| failure(&error))?;
    if prompt.is_empty() {
        return Err(CliError::usage("--prompt is empty", "give a text of at least one word to continue"));
    }
    let model = Transformer::for_inference(&config, &device, 0).map_err(|error| failure(&error))?;
    checkpoint.load_params(model.params()).map_err(|error| with_older(&path, &error))?;

    let sampling = Sampling { temperature, top_k, top_p, seed };
    let mut tokens = prompt.clone();
    // Number of bytes already printed. A character is printed once all of its bytes are generated.
    let mut printed = 0;
    let mut print = |tokens: &[u32], all: bool| -> Result<()> {
        let text = tokenizer.decode(tokens).map_err(|error| failure(&error))?;
        let whole = if all { text.len() } else { text.trim_end_matches('\u{fffd}').len() };
        write!(out, "{}", text.get(printed..whole).unwrap_or_default())?;
        out.flush()?;
        printed = printed.max(whole);
        Ok(())
    };
    print(&tokens, false)?;
    train::generate(&model, &prompt, arguments.tokens, &sampling, |token| -> Result<(), Stop> {
        tokens.push(token);
        print(&tokens, false).map_err(Stop)
    })
    .map_err(|Stop(error)| error)?;
    print(&tokens, true)?;
    writeln!(out)?;
    Ok(())
}

/// Why generation stops early: the model failed, or the output cannot be written.
struct Stop(CliError);

impl From<train::Error> for Stop {
    fn from(error: train::Error) -> Stop {
        Stop(CliError::Failure(error.to_string()))
    }
}
