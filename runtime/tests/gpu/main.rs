//! The runtime on a real GPU: buffers, launches, tensor maps, events, failures. Without a GPU each test says that it was
//! skipped.

mod failures;
mod launches;
mod memory;
mod tensor_maps;
mod timing;

use tilewright_codegen::target::{ArgDesc, ArgType, Artifact, Code, Manifest};
use tilewright_runtime::Device;

/// GPU 0, or a word on why the test is skipped.
fn gpu() -> Option<Device> {
    match Device::cuda(0) {
        Ok(device) => Some(device),
        Err(error) => {
            println!("skipped: no CUDA device ({})", error.to_string().lines().next().unwrap_or_default());
            None
        }
    }
}

/// GPU 0 if it has TMA.
fn hopper() -> Option<Device> {
    let device = gpu()?;
    if device.info().compute_capability == Some((9, 0)) {
        return Some(device);
    }
    println!("skipped: {device} is no Hopper GPU");
    None
}

fn arg(name: &str, ty: ArgType) -> ArgDesc {
    ArgDesc { name: name.to_string(), ty, divisible_by: 1, equal_to: None }
}

/// An artifact of hand-written PTX with one entry, `entry`.
fn artifact(ptx: &str, target: &str, threads: u32, args: Vec<ArgDesc>) -> Artifact {
    let manifest = Manifest {
        kernel: "probe".to_string(),
        entry: "entry".to_string(),
        target: target.to_string(),
        args,
        threads,
        shared_bytes: 0,
        arena_bytes: 0,
        tensor_maps: vec![],
        source: "probe.rs:7".to_string(),
    };
    let header = format!(".version 8.0\n.target {target}\n.address_size 64\n");
    Artifact { manifest, code: Code::Ptx(header + ptx) }
}
