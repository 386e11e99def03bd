//! `tilewright bench copy`: times a device-to-device copy, the upper bound of memory-bound kernels.

use std::io::Write;

use clap::Args;
use tilewright::bench::Timing;
use tilewright::{Buffer, Device};

use super::record::{Row, Work};
use super::{Common, data};
use crate::cli::Result;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Size of the copy in MiB. Default: 4096, or 256 on the CPU
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    mib: Option<u32>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let (device, mut recorder) = arguments.common.open("copy")?;
    let len = arguments.mib.map_or(default_len(&device), |mib| mib as usize * (1 << 18));
    let timing = measure(&arguments.common, &device, len)?;
    recorder.push(Row::new("copy", &[len], "f32").timed(&timing, Work::Bytes(bytes(len), None)))?;
    recorder.finish(out)
}

/// Measures the bandwidth of a large copy in GB/s, counting bytes read and bytes written.
pub fn ceiling(common: &Common, device: &Device) -> Result<f64> {
    let len = default_len(device);
    Ok(measure(common, device, len)?.gbps(bytes(len)))
}

fn default_len(device: &Device) -> usize {
    if device.is_cuda() { 1 << 30 } else { 1 << 26 }
}

fn bytes(len: usize) -> f64 {
    2.0 * 4.0 * len as f64
}

fn measure(common: &Common, device: &Device, len: usize) -> Result<Timing> {
    let source = data::normal::<f32>(device, len, 1)?;
    let mut copy = Buffer::<f32>::poisoned(device, len)?;
    Ok(common.time(device, || copy.copy_from(source.view()))?)
}
