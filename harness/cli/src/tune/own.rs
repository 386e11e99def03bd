//! `tune` for kernels of a user's own: the problem is a launch at given shapes.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use tilewright_runtime::{Device, Error};

use super::{Problem, Settings};
use crate::bench::Inputs;
use crate::choose;
use crate::run::Launch;
use crate::tuned::TunedLaunch;
use crate::{CliError, Kernels, Result};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    launch: Launch,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    settings: Settings,
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let Arguments { launch, inputs, settings } = arguments;
    let def = kernels.find(&launch.kernel)?;
    let autotune = kernels.autotune(def).ok_or_else(|| {
        CliError::usage(
            format!("kernel `{}` has no configurations", def.name),
            "list them with #[autotune(configs = [Config(…), …], key = […])] above #[kernel], and pass its static \
             (NAME_AUTOTUNE) to the command line",
        )
    })?;
    let given = choose::constants(def, &launch.set)?;
    if let Some((name, _)) = given.iter().find(|(name, _)| autotune.tuned.contains(name)) {
        let message = format!("--set {name} is unused: the configurations set it");
        return Err(CliError::usage(message, "omit it; `bench` times given constants"));
    }
    let tensors = || inputs.tensors(def, &launch.dtype);
    // Mistakes on the command line are found before a worker starts.
    let tuned = TunedLaunch::new(autotune, launch, &launch.set, &tensors)?;
    super::tune(&[KernelProblem { tuned, inputs }], settings, kernels, out)
}

struct KernelProblem<'a> {
    tuned: TunedLaunch<'a>,
    inputs: &'a Inputs,
}

impl Problem for KernelProblem<'_> {
    fn title(&self) -> String {
        self.arguments().join(" ")
    }

    fn kernel(&self) -> &'static str {
        self.tuned.autotune.def.name
    }

    fn arguments(&self) -> Vec<String> {
        let Launch { kernel: _, grid, set, arg, dtype } = self.tuned.launch;
        let Inputs { shape, input } = self.inputs;
        let mut words = vec![self.kernel().to_string()];
        words.extend(grid.iter().flat_map(|grid| ["--grid".to_string(), grid.clone()]));
        for (name, values) in [("--set", set), ("--arg", arg), ("--dtype", dtype), ("--shape", shape)] {
            words.extend(values.iter().flat_map(|value| [name.to_string(), value.clone()]));
        }
        let input: Option<&PathBuf> = input.as_ref();
        words.extend(input.iter().flat_map(|path| ["--input".to_string(), path.display().to_string()]));
        words
    }

    fn launch(&self, device: &Device) -> tilewright_runtime::Result<()> {
        self.tuned.choose(device).map(drop).map_err(|error| Error::Kernel(error.to_string()))
    }
}
