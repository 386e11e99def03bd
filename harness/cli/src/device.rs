//! The device that a command line names.

use tilewright_runtime::{Device, Error};

use crate::{CliError, Result};

/// A device that a command line names.
#[derive(Clone, Copy, Debug)]
pub enum DeviceArg {
    Cpu,
    Cuda(usize),
}

/// Parses a device: `cpu`, `cuda` or `cuda:1`.
pub fn parse(text: &str) -> Result<DeviceArg, String> {
    let ordinal = |text: &str| text.parse().map_err(|_| format!("`{text}` is not a GPU ordinal"));
    match text {
        "cpu" => Ok(DeviceArg::Cpu),
        "cuda" => Ok(DeviceArg::Cuda(0)),
        other => match other.strip_prefix("cuda:") {
            Some(number) => ordinal(number).map(DeviceArg::Cuda),
            None => Err("expected cpu, cuda or cuda:N".to_string()),
        },
    }
}

/// Opens the requested device, or the default one ([`Device::best`]).
///
/// # Errors
/// There is no such device, or `TILEWRIGHT_DEVICE` is invalid.
pub fn open(choice: Option<DeviceArg>) -> Result<Device> {
    Ok(match choice {
        Some(DeviceArg::Cpu) => Device::cpu(),
        Some(DeviceArg::Cuda(ordinal)) => Device::cuda(ordinal).map_err(|error| match error {
            Error::NoDriver { reason } => {
                CliError::Failure(format!("no CUDA device: {reason}\n  help: `--device cpu` runs on the CPU"))
            }
            other => other.into(),
        })?,
        None => Device::best()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        assert!(matches!(parse("cpu"), Ok(DeviceArg::Cpu)));
        assert!(matches!(parse("cuda:3"), Ok(DeviceArg::Cuda(3))));
        for bad in ["gpu", "cuda:", "cuda:-1", ""] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
