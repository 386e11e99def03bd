//! `tilewright bench launch`: times the host overhead of one kernel launch on the calling thread.

use std::io::Write;
use std::time::Instant;

use clap::Args;
use tilewright::bench::Timing;
use tilewright::kernels::rms_norm::{self, RmsNormFwd};
use tilewright::{Buffer, Device, LaunchConfig};

use super::Common;
use super::data::{normal, values};
use super::record::{Measured, Row, Work, accept};
use crate::cli::Result;
use crate::cli::demo::case::{relative_error, tolerance};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Number of rounds; each is one sample, the mean of its launches
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Launches per round; the driver's queue holds about a thousand, and a full queue blocks the thread
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    launches: u32,
}

const D: usize = 16;
const EPS: f32 = 1e-5;

/// RMSNorm of one row, launched through the struct that `#[kernel]` generates: four tensors and a float, which
/// are 13 arguments of the kernel.
struct Small {
    device: Device,
    x: Buffer<f32>,
    w: Buffer<f32>,
    y: Buffer<f32>,
    rstd: Buffer<f32>,
}

impl Small {
    fn new(device: &Device) -> tilewright::Result<Small> {
        Ok(Small {
            device: device.clone(),
            x: normal(device, D, 1)?,
            w: normal(device, D, 2)?,
            y: Buffer::poisoned(device, D)?,
            rstd: Buffer::poisoned(device, 1)?,
        })
    }

    fn launch(&mut self) -> tilewright::Result<()> {
        RmsNormFwd {
            x: &self.x.tensor([1, D])?,
            w: &self.w,
            y: &mut self.y.tensor_mut([1, D])?,
            rstd: &mut self.rstd,
            eps: EPS,
            rows_tile: 1,
            d_tile: D,
            reread: false,
        }
        .launch_with(&self.device, &LaunchConfig::new(1))
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.common.expect_no_times("--rounds and --launches")?;
    let (device, mut recorder) = arguments.common.open("launch")?;
    let row = Row::new("launch", &[1, D], "f32").measured(&measure(arguments, &device), Work::None);
    recorder.push(row.case("13 arguments"))?;
    recorder.finish(out)
}

fn measure(arguments: &Arguments, device: &Device) -> Measured {
    let mut small = Small::new(device)?;
    small.launch()?;
    let want = rms_norm::reference::forward(&values(&small.x)?, &values(&small.w)?, f64::from(EPS)).0;
    let tolerance = tolerance(tilewright::codegen::ir::DType::F32);
    let error = accept("y", relative_error(&values(&small.y)?, &want), tolerance)?;
    let mut samples = Vec::new();
    for _ in 0..arguments.rounds {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..arguments.launches {
            small.launch()?;
        }
        samples.push(start.elapsed().as_secs_f64() * 1e3 / f64::from(arguments.launches));
    }
    device.synchronize()?;
    Ok((Timing::from_samples(samples), error))
}
