//! A launch on the simulated GPU.

use std::sync::Mutex;

use tilewright_codegen::ir::Func;
use tilewright_codegen::pipeline;
use tilewright_codegen::sim::{self, Global, Launch};
use tilewright_codegen::target::{ArgType, CompileOptions, Target, clocks};

use super::{CompiledKernel, Kernel, LaunchArg, Loaded, Slots, tensor_map};
use crate::device::{Device, Simulated};
use crate::dump;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::kernel::compile_error;

/// Code for the simulated GPU.
pub(super) struct Code {
    llvm_ir: String,
    /// The record of clocks of the last launch.
    clocks: Mutex<Vec<u8>>,
}

impl Code {
    pub(super) fn clocks(&self) -> Vec<u8> {
        self.clocks.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

/// The largest alignment that code may assume of an address, in bytes.
const ALIGN: u64 = 256;

impl Device {
    /// Compiles for the simulated architecture.
    pub(crate) fn simulate(
        &self,
        simulated: &Simulated,
        func: &Func,
        options: &CompileOptions,
    ) -> Result<CompiledKernel> {
        let env = Env::get()?;
        if env.wants_dump_of(&func.name) {
            // Only for the dumps: the simulated GPU does not need the PTX.
            let compiled = dump::compile(func, &Target::Nvptx(simulated.arch), options, env, &mut ());
            compiled.map_err(|error| compile_error(func, error))?;
        }
        let lowered = pipeline::lower_gpu(func, simulated.arch, options, &mut ());
        let (manifest, llvm_ir) = lowered.map_err(|error| compile_error(func, error.into()))?;
        Ok(self.loaded(manifest, Loaded::Simulated(Code { llvm_ir, clocks: Mutex::default() })))
    }
}

/// Copies the memory of the arguments, runs the grid, and copies changed bytes back.
///
/// # Safety
/// The contract of [`launch_on`](super::CompiledKernel::launch_on).
pub(super) unsafe fn run_grid(
    simulated: &Simulated,
    code: &Code,
    kernel: &Kernel,
    grid: [u32; 3],
    args: &[LaunchArg],
    slots: &Slots,
) -> Result<()> {
    let manifest = &kernel.manifest;
    tensor_map::check(manifest, slots, &kernel.label)?;
    let mut global = Global::default();
    let mut memory = Vec::new();
    let mut bits = slots.to_vec();
    for (arg, &index) in args.iter().zip(&kernel.passed) {
        let LaunchArg::Ptr { addr, bytes } = *arg else { continue };
        let pointer = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
        let old = match bytes {
            0 => Vec::new(),
            // SAFETY: by this function's contract, `pointer` is valid for `bytes` bytes, and nothing writes them now.
            _ => unsafe { std::slice::from_raw_parts(pointer, bytes as usize) }.to_vec(),
        };
        let name = format!("argument `{}`", manifest.args[index].name);
        bits[index] = global.add_named(name, old.clone(), addr % ALIGN);
        memory.push((pointer, bits[index], old));
    }
    bits.truncate(manifest.args.len() - manifest.tensor_maps.len());
    let clocks = manifest.args.iter().position(|arg| arg.ty == ArgType::Clocks);
    if let Some(index) = clocks {
        bits[index] = global.add_named("the record of clocks".into(), vec![0; clocks::BYTES], 0);
    }
    let launch = Launch {
        llvm_ir: &code.llvm_ir,
        grid,
        threads: manifest.threads,
        shared_bytes: manifest.shared_bytes,
        args: &bits,
        tensor_maps: &manifest.tensor_maps,
        seed: simulated.seed,
    };
    sim::run(&launch, &mut global)
        .map_err(|error| Error::Simulated { kernel: kernel.label.to_string(), error: error.to_string() })?;
    if let Some(index) = clocks {
        *code.clocks.lock().unwrap_or_else(|e| e.into_inner()) = global.bytes(bits[index]).to_vec();
    }
    for (pointer, address, old) in memory {
        let new = global.bytes(address);
        if new != old {
            // SAFETY: the kernel writes through this argument, so the caller borrows it exclusively; it has this number
            // of bytes.
            unsafe { pointer.copy_from_nonoverlapping(new.as_ptr(), new.len()) };
        }
    }
    Ok(())
}
