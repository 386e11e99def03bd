//! The runtime on a real GPU: buffers, launches, tensor maps, events, failures. Without a GPU each test reports that it
//! is skipped.

mod failures;
mod launches;
mod memory;
mod tensor_maps;
mod timing;

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard};

use tilewright_codegen::target::{ArgDesc, ArgType, Artifact, Code, Manifest};
use tilewright_runtime::Device;

/// GPU 0, for one test at a time: concurrent tests would disturb its timings and use its memory.
struct Gpu {
    device: Device,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for Gpu {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

/// GPU 0; without one, prints why the test is skipped and returns `None`.
fn gpu() -> Option<Gpu> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(|failed| failed.into_inner());
    match Device::cuda(0) {
        Ok(device) => Some(Gpu { device, _alone: alone }),
        Err(error) => {
            println!("skipped: no CUDA device ({})", error.to_string().lines().next().unwrap_or_default());
            None
        }
    }
}

/// GPU 0 if it is a Hopper GPU, which has TMA.
fn hopper() -> Option<Gpu> {
    let device = gpu()?;
    if device.info().compute_capability == Some((9, 0)) {
        return Some(device);
    }
    println!("skipped: {} is not a Hopper GPU", *device);
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
        programs_per_block: 1,
        ctas_per_program: 1,
        arena_bytes: 0,
        tensor_maps: vec![],
        source: "probe.rs:7".to_string(),
        clocks_of: None,
        footprint: None,
    };
    let header = format!(".version 8.0\n.target {target}\n.address_size 64\n");
    Artifact { manifest, code: Code::Ptx(header + ptx) }
}
