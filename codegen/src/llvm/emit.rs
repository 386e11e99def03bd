//! The outputs of LLVM: PTX, a native object, native assembly, optimized IR.

use std::time::Instant;

use inkwell::targets::FileType;

use super::module::{Loaded, on_llvm_thread, with_module};
use super::{Emitted, LlvmError, Machine, Opt, Timings};
use crate::target::{GpuArch, HostCpu};

/// Compiles `ir_text` to PTX text for `arch`.
///
/// `ptx_version` is major × 10 + minor (83 is PTX 8.3); LLVM emits the newest version that it supports and that is not
/// above it. Entries are functions with the calling convention `ptx_kernel`. The triple and data layout in the text are
/// replaced.
pub fn ptx(ir_text: &str, arch: GpuArch, ptx_version: u32, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    emit_text(ir_text, Machine::Gpu { arch, ptx_version }, opt)
}

/// Compiles `ir_text` to native assembly, for people to read.
pub fn asm(ir_text: &str, cpu: &HostCpu, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    emit_text(ir_text, Machine::Host(cpu), opt)
}

/// Compiles `ir_text` to a relocatable, position-independent native object, for
/// [`JitModule::load`](super::JitModule::load).
pub fn object(ir_text: &str, cpu: &HostCpu, opt: &Opt) -> Result<Emitted<Vec<u8>>, LlvmError> {
    emit(ir_text, Machine::Host(cpu), opt, FileType::Object)
}

/// The text of `ir_text` after LLVM's optimization pipeline for `machine`.
pub fn optimized_ir(ir_text: &str, machine: Machine<'_>, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    with_loaded(ir_text, machine, opt, |loaded| Ok(loaded.print()))
}

fn emit_text(ir_text: &str, machine: Machine<'_>, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    let Emitted { code, timings } = emit(ir_text, machine, opt, FileType::Assembly)?;
    Ok(Emitted { code: String::from_utf8_lossy(&code).into_owned(), timings })
}

fn emit(ir_text: &str, machine: Machine<'_>, opt: &Opt, file_type: FileType) -> Result<Emitted<Vec<u8>>, LlvmError> {
    with_loaded(ir_text, machine, opt, move |loaded| loaded.emit(file_type))
}

/// Optimizes the module, applies `code` to it, and measures each phase.
fn with_loaded<T: Send + 'static>(
    ir_text: &str,
    machine: Machine<'_>,
    opt: &Opt,
    code: impl FnOnce(&Loaded<'_>) -> Result<T, LlvmError> + Send + 'static,
) -> Result<Emitted<T>, LlvmError> {
    let (ir_text, machine, opt) = (ir_text.to_string(), OwnedMachine::from(machine), *opt);
    on_llvm_thread(move || {
        let start = Instant::now();
        with_module(&ir_text, machine.borrow(), &opt, |loaded| {
            let parse = start.elapsed();
            loaded.optimize(&opt)?;
            let optimized = start.elapsed();
            let code = code(loaded)?;
            let timings = Timings { parse, opt: optimized - parse, codegen: start.elapsed() - optimized };
            Ok(Emitted { code, timings })
        })
    })
}

/// An owned [`Machine`], to pass to another thread.
enum OwnedMachine {
    Gpu { arch: GpuArch, ptx_version: u32 },
    Host(HostCpu),
}

impl From<Machine<'_>> for OwnedMachine {
    fn from(machine: Machine<'_>) -> OwnedMachine {
        match machine {
            Machine::Gpu { arch, ptx_version } => OwnedMachine::Gpu { arch, ptx_version },
            Machine::Host(cpu) => OwnedMachine::Host(cpu.clone()),
        }
    }
}

impl OwnedMachine {
    fn borrow(&self) -> Machine<'_> {
        match self {
            OwnedMachine::Gpu { arch, ptx_version } => Machine::Gpu { arch: *arch, ptx_version: *ptx_version },
            OwnedMachine::Host(cpu) => Machine::Host(cpu),
        }
    }
}
