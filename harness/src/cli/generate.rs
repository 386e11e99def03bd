//! `tilewright generate`: text from a checkpoint.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use super::model_options::model_device;
use super::run::{Choice, device};
use super::{CliError, Result, numbers};
use crate::data::Bpe;
use crate::escape::printable;
use crate::model::{Config, Transformer};
use crate::train::checkpoint::Checkpoint;
use crate::train::run::CHECKPOINT;
use crate::train::{self, Sampling, keep};

#[derive(Args)]
pub struct Arguments {
    /// A checkpoint, or the folder of a run
    #[arg(value_name = "RUN", default_value = "tilewright-run")]
    run: PathBuf,
    /// What the text begins with
    #[arg(long, value_name = "TEXT", default_value = "Phileas Fogg")]
    prompt: String,
    /// How many tokens to add
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: usize,
    /// Below 1, likely words become likelier; 0 takes the likeliest each time
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = numbers::not_negative)]
    temperature: f64,
    /// Draw from this many of the likeliest tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Draw from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = numbers::probability)]
    top_p: f64,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where to run: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    device: Option<Choice>,
}

/// An error of a run's newest checkpoint, with an older one that may be used in its place.
fn with_older(path: &Path, error: &dyn std::fmt::Display) -> CliError {
    let folder = path.parent().filter(|_| path.file_name().is_some_and(|name| name == CHECKPOINT));
    let help = folder.and_then(|folder| Some(folder.join(keep::second(folder)?.0)));
    let help = help.map(|older| format!("\n  help: `tilewright generate {}` uses an older one", older.display()));
    CliError::Failure(format!("{error}{}", help.unwrap_or_default()))
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let Arguments { temperature, top_k, top_p, seed, .. } = *arguments;
    let failure = |error: &dyn std::fmt::Display| CliError::Failure(error.to_string());
    let device = model_device(arguments.device)?;
    let path = if arguments.run.is_dir() { arguments.run.join(CHECKPOINT) } else { arguments.run.clone() };
    let checkpoint = Checkpoint::open(&path).map_err(|error| match path.exists() {
        true => with_older(&path, &error),
        false => CliError::Failure(format!("{error}\n  help: `tilewright train --out DIR` makes a checkpoint in DIR")),
    })?;
    let unusable = |reason: &dyn std::fmt::Display| {
        with_older(&path, &CliError::file("use the checkpoint", &path, printable(&reason.to_string())))
    };
    let config: Config = serde_json::from_value(checkpoint.header.model.clone())
        .map_err(|error| unusable(&format!("its hyperparameters are unknown: {error}")))?;
    config.check().map_err(|error| unusable(&error))?;
    let tokenizer = Bpe::from_json(checkpoint.tokenizer.clone()).map_err(|error| unusable(&error))?;
    if tokenizer.vocabulary() > config.vocabulary {
        let (found, expected) = (tokenizer.vocabulary(), config.vocabulary);
        return Err(unusable(&format!("its tokenizer has {found} entries, its model {expected}")));
    }
    // Before memory for a model is taken that the file does not have.
    if checkpoint.elements() != config.parameters() {
        let (found, expected) = (checkpoint.elements(), config.parameters());
        return Err(unusable(&format!("it has {found} parameters, and its hyperparameters mean {expected}")));
    }
    let prompt = tokenizer.encode(&arguments.prompt).map_err(|error| failure(&error))?;
    if prompt.is_empty() {
        return Err(CliError::usage("--prompt is empty", "a text to go on from, if only one word"));
    }
    let model = Transformer::for_inference(&config, &device, 0).map_err(|error| failure(&error))?;
    checkpoint.load_params(model.params()).map_err(|error| with_older(&path, &error))?;

    let sampling = Sampling { temperature, top_k, top_p, seed };
    let mut tokens = prompt.clone();
    // What was printed already: characters come when all of their bytes are there.
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

/// Either the model failed, or nobody reads.
struct Stop(CliError);

impl From<train::Error> for Stop {
    fn from(error: train::Error) -> Stop {
        Stop(CliError::Failure(error.to_string()))
    }
}
