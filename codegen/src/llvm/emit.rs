//! The four ways out of LLVM: PTX, a native object, native assembly, optimised IR.

use std::time::Instant;

use inkwell::targets::FileType;

use super::module::with_module;
use super::{Emitted, LlvmError, Machine, Opt, Timings};
use crate::target::{GpuArch, HostCpu};

/// PTX text of `ir_text` for `arch`.
///
/// `ptx_version` is major × 10 + minor (83 is PTX 8.3); the newest version that LLVM can write and that is not above it
/// is used. Entries are functions with calling convention `ptx_kernel`. Triple and data layout in the text are replaced.
pub fn ptx(ir_text: &str, arch: GpuArch, ptx_version: u32, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    emit_text(ir_text, Machine::Gpu { arch, ptx_version }, opt)
}

/// Native assembly of `ir_text`, for people to read.
pub fn asm(ir_text: &str, cpu: &HostCpu, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    emit_text(ir_text, Machine::Host(cpu), opt)
}

/// A relocatable, position-independent native object of `ir_text`, as [`JitModule::load`](super::JitModule::load) wants.
pub fn object(ir_text: &str, cpu: &HostCpu, opt: &Opt) -> Result<Emitted<Vec<u8>>, LlvmError> {
    emit(ir_text, Machine::Host(cpu), opt, FileType::Object)
}

/// `ir_text` after LLVM's pipeline for `machine`, as text.
pub fn optimised_ir(ir_text: &str, machine: Machine<'_>, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    let start = Instant::now();
    with_module(ir_text, machine, opt, |loaded| {
        let parse = start.elapsed();
        loaded.optimise(opt)?;
        let timings = Timings { parse, opt: start.elapsed() - parse, ..Timings::default() };
        Ok(Emitted { code: loaded.print(), timings })
    })
}

fn emit_text(ir_text: &str, machine: Machine<'_>, opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    let Emitted { code, timings } = emit(ir_text, machine, opt, FileType::Assembly)?;
    Ok(Emitted { code: String::from_utf8_lossy(&code).into_owned(), timings })
}

fn emit(ir_text: &str, machine: Machine<'_>, opt: &Opt, file_type: FileType) -> Result<Emitted<Vec<u8>>, LlvmError> {
    let start = Instant::now();
    with_module(ir_text, machine, opt, |loaded| {
        let parse = start.elapsed();
        loaded.optimise(opt)?;
        let opt_done = start.elapsed();
        let code = loaded.emit(file_type)?;
        let timings = Timings { parse, opt: opt_done - parse, codegen: start.elapsed() - opt_done };
        Ok(Emitted { code, timings })
    })
}
