//! A module inside of LLVM: parsed, verified, optimized. Contains the unsafe calls of LLVM's C interface for modules.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Once};
use std::thread;

use inkwell::OptimizationLevel;
use inkwell::context::Context;
use inkwell::llvm_sys::LLVMDiagnosticSeverity;
use inkwell::llvm_sys::core::{
    LLVMContextSetDiagnosticHandler, LLVMCreateMemoryBufferWithMemoryRangeCopy, LLVMDisposeMemoryBuffer,
    LLVMDisposeMessage, LLVMGetDiagInfoDescription, LLVMGetDiagInfoSeverity, LLVMGetVersion,
};
use inkwell::llvm_sys::error_handling::LLVMInstallFatalErrorHandler;
use inkwell::llvm_sys::ir_reader::LLVMParseIRInContext2;
use inkwell::llvm_sys::prelude::LLVMDiagnosticInfoRef;
#[cfg(target_arch = "x86_64")]
use inkwell::llvm_sys::support::LLVMParseCommandLineOptions;
use inkwell::module::Module;
use inkwell::passes::PassBuilderOptions;
use inkwell::targets::{
    CodeModel, FileType, InitializationConfig, RelocMode, Target, TargetMachine, TargetMachineOptions, TargetTriple,
};

use super::{LlvmError, LlvmVersion, Machine, Opt, Phase, Rejection};

/// PTX versions that LLVM 22 has a feature for (`NVPTX.td`).
pub(super) const PTX_VERSIONS: [u32; 19] = [70, 71, 72, 73, 74, 75, 76, 77, 78, 80, 81, 82, 83, 84, 85, 86, 87, 88, 90];

/// The newest PTX version that LLVM supports and that is not above `wanted`; the oldest if all are above.
pub(super) fn supported_ptx_version(wanted: u32) -> u32 {
    PTX_VERSIONS.iter().rev().copied().find(|&v| v <= wanted).unwrap_or(PTX_VERSIONS[0])
}

/// Initializes the NVPTX and native targets of LLVM, once per process.
pub(super) fn initialize_targets() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let config = InitializationConfig::default();
        Target::initialize_nvptx(&config);
        // Not `initialize_native`: it calls C code of llvm-sys that the manifest turns off.
        #[cfg(target_arch = "x86_64")]
        Target::initialize_x86(&config);
        // SAFETY: the handler is a plain function that lives for the whole process.
        unsafe { LLVMInstallFatalErrorHandler(Some(report_fatal_error)) };
        #[cfg(target_arch = "x86_64")]
        disable_store_forwarding_pass();
    });
}

/// Disables LLVM's pass "X86 Avoid Store Forwarding Blocks". In LLVM 22 it treats masked vector loads, whose size in
/// memory is unknown, as accesses of a known size: it then aborts ("cannot implicitly convert a scalable size") or
/// splits copies incorrectly.
#[cfg(target_arch = "x86_64")]
fn disable_store_forwarding_pass() {
    let args = [c"tilewright".as_ptr(), c"-x86-disable-avoid-SFB".as_ptr()];
    // SAFETY: both arrays hold zero-terminated strings that live for the whole process; the option exists since the x86
    // target was initialized.
    unsafe { LLVMParseCommandLineOptions(args.len() as i32, args.as_ptr(), std::ptr::null()) };
}

/// Stack size of a thread that runs LLVM, in bytes. LLVM recurses over long dependence chains, and the calling thread
/// may have little stack left; only touched pages cost memory.
const LLVM_STACK_BYTES: usize = 64 << 20;

thread_local! {
    /// Sends the message of a fatal LLVM error of this thread.
    static FATAL: RefCell<Option<Sender<String>>> = const { RefCell::new(None) };
}

/// Runs `f` on a new thread, which ends on a fatal LLVM error (for example an instruction that it cannot select).
///
/// LLVM requires that its fatal-error handler does not return. Unwinding would skip the destructors of LLVM's frames,
/// so the handler sends the message and parks the thread forever: its stack and its LLVM context leak, and the rest of
/// the process continues.
pub(super) fn on_llvm_thread<R: Send + 'static>(
    f: impl FnOnce() -> Result<R, LlvmError> + Send + 'static,
) -> Result<R, LlvmError> {
    let (fatal, message) = channel();
    let (done, result) = channel();
    let task = Arc::new(Mutex::new(Some(f)));
    let take = |task: &Mutex<Option<_>>| task.lock().unwrap_or_else(|e| e.into_inner()).take();
    let of_thread = task.clone();
    let run = move || {
        let Some(f) = take(&of_thread) else { return };
        FATAL.set(Some(fatal));
        // A panic here drops both senders.
        let _ = done.send(f());
        FATAL.set(None);
    };
    let thread = match thread::Builder::new().name("llvm".into()).stack_size(LLVM_STACK_BYTES).spawn(run) {
        Ok(thread) => thread,
        // If no thread can be started, runs on the calling thread.
        Err(_) => match take(&task) {
            Some(f) => return f(),
            None => panic!("internal compiler error: a thread that was not started has run"),
        },
    };
    // Returns when a message arrives, or when `f` is done and the sender is dropped.
    if let Ok(message) = message.recv() {
        return Err(plain_error(Phase::Codegen, message));
    }
    match (thread.join(), result.try_recv()) {
        (Ok(()), Ok(result)) => result,
        (Err(panic), _) => std::panic::resume_unwind(panic),
        (Ok(()), Err(_)) => panic!("internal compiler error: the thread of LLVM ended without a result"),
    }
}

/// See [`on_llvm_thread`]. A fatal error on another thread aborts the process, as LLVM would.
extern "C" fn report_fatal_error(reason: *const c_char) {
    // SAFETY: LLVM passes a zero-terminated string that lives during the call.
    let reason = unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned();
    if let Some(fatal) = FATAL.take()
        && fatal.send(reason.clone()).is_ok()
    {
        loop {
            thread::park();
        }
    }
    eprintln!("internal compiler error: fatal error in LLVM: {reason}");
    eprintln!("  this is a bug in Tilewright, not in the kernel: please report it together with the kernel's source");
    std::process::abort();
}

/// Messages that LLVM reports to a context instead of returning them. Without a handler LLVM would print them and, for
/// errors, end the process.
#[derive(Default)]
struct Diagnostics {
    errors: Mutex<Vec<String>>,
}

extern "C" fn collect_diagnostic(info: LLVMDiagnosticInfoRef, sink: *mut c_void) {
    // SAFETY: `info` is valid during the call; the description is ours to free.
    let (severity, text) = unsafe {
        let raw = LLVMGetDiagInfoDescription(info);
        let text = CStr::from_ptr(raw).to_string_lossy().into_owned();
        LLVMDisposeMessage(raw);
        (LLVMGetDiagInfoSeverity(info), text)
    };
    if severity == LLVMDiagnosticSeverity::LLVMDSError {
        // SAFETY: `sink` is the `Diagnostics` that `with_module` registered; it outlives the context.
        let sink = unsafe { &*(sink as *const Diagnostics) };
        sink.errors.lock().unwrap_or_else(|e| e.into_inner()).push(text);
    }
}

/// A parsed and verified module, with its target machine.
pub(super) struct Loaded<'ctx> {
    module: Module<'ctx>,
    machine: TargetMachine,
    ir_text: &'ctx str,
    diagnostics: &'ctx Diagnostics,
}

/// Parses and verifies `ir_text` in a new context, sets the triple and data layout of `machine`, and calls `f`.
pub(super) fn with_module<R>(
    ir_text: &str,
    machine: Machine<'_>,
    opt: &Opt,
    f: impl FnOnce(&Loaded<'_>) -> Result<R, LlvmError>,
) -> Result<R, LlvmError> {
    initialize_targets();
    let diagnostics = Diagnostics::default();
    let context = Context::create();
    // SAFETY: `diagnostics` is declared before the context, so it is dropped after it.
    unsafe {
        LLVMContextSetDiagnosticHandler(
            context.raw(),
            Some(collect_diagnostic),
            &diagnostics as *const Diagnostics as *mut c_void,
        )
    };
    let machine = target_machine(machine, opt)?;
    let module = parse(&context, ir_text)?;
    module.set_triple(&machine.get_triple());
    module.set_data_layout(&machine.get_target_data().get_data_layout());
    module.verify().map_err(|message| verifier_error(message.to_string(), ir_text))?;
    f(&Loaded { module, machine, ir_text, diagnostics: &diagnostics })
}

impl Loaded<'_> {
    /// Runs LLVM's default pipeline at `opt.level`.
    pub(super) fn optimize(&self, opt: &Opt) -> Result<(), LlvmError> {
        let options = PassBuilderOptions::create();
        options.set_loop_vectorization(opt.vectorize_loops);
        options.set_loop_interleaving(opt.vectorize_loops);
        options.set_loop_slp_vectorization(opt.vectorize_slp);
        options.set_loop_unrolling(opt.unroll_loops);
        let pipeline = format!("default<O{}>", opt.level.min(3));
        let result = self.module.run_passes(&pipeline, &self.machine, options);
        result.map_err(|message| plain_error(Phase::Optimize, message.to_string()))?;
        self.check_diagnostics(Phase::Optimize)
    }

    /// Emits assembly or an object.
    pub(super) fn emit(&self, file_type: FileType) -> Result<Vec<u8>, LlvmError> {
        let buffer = self
            .machine
            .write_to_memory_buffer(&self.module, file_type)
            .map_err(|message| plain_error(Phase::Codegen, message.to_string()))?;
        self.check_diagnostics(Phase::Codegen)?;
        Ok(buffer.as_slice().to_vec())
    }

    /// The module as text.
    pub(super) fn print(&self) -> String {
        self.module.print_to_string().to_string()
    }

    fn check_diagnostics(&self, phase: Phase) -> Result<(), LlvmError> {
        let errors = std::mem::take(&mut *self.diagnostics.errors.lock().unwrap_or_else(|e| e.into_inner()));
        if errors.is_empty() {
            return Ok(());
        }
        let message = errors.join("\n");
        let line = quoted_line(&message, self.ir_text);
        Err(error_at(phase, message, line, self.ir_text))
    }
}

/// The target machine of `machine` at `opt.level`.
fn target_machine(machine: Machine<'_>, opt: &Opt) -> Result<TargetMachine, LlvmError> {
    let (triple, cpu, features) = match machine {
        Machine::Gpu { arch, ptx_version } => (
            "nvptx64-nvidia-cuda".to_string(),
            arch.name().to_string(),
            format!("+ptx{}", supported_ptx_version(ptx_version)),
        ),
        Machine::Host(host) => (host.triple.clone(), host.cpu.clone(), host.features.clone()),
    };
    let level = match opt.level {
        0 => OptimizationLevel::None,
        1 => OptimizationLevel::Less,
        2 => OptimizationLevel::Default,
        _ => OptimizationLevel::Aggressive,
    };
    let triple = TargetTriple::create(&triple);
    let target = Target::from_triple(&triple).map_err(|message| plain_error(Phase::Target, message.to_string()))?;
    let options = TargetMachineOptions::new()
        .set_cpu(&cpu)
        .set_features(&features)
        .set_level(level)
        .set_reloc_mode(RelocMode::PIC)
        .set_code_model(CodeModel::Default);
    let machine = target.create_target_machine_from_options(&triple, options);
    let machine = machine.ok_or_else(|| {
        plain_error(Phase::Target, format!("no target machine for {}, CPU {cpu}, features {features}", triple))
    })?;
    machine.set_asm_verbosity(false);
    Ok(machine)
}

/// Parses `ir_text`. Calls the C interface directly, because inkwell never frees the buffer that it parses.
fn parse<'ctx>(context: &'ctx Context, ir_text: &str) -> Result<Module<'ctx>, LlvmError> {
    let mut module = std::ptr::null_mut();
    let mut message = std::ptr::null_mut();
    // SAFETY: the buffer is a zero-terminated copy of the text, freed after the call, which does not keep it. On
    // success `module` belongs to `context` and to the returned `Module`; on failure `message` is a string for us to
    // free.
    unsafe {
        let name = c"kernel.ll";
        let buffer = LLVMCreateMemoryBufferWithMemoryRangeCopy(ir_text.as_ptr().cast(), ir_text.len(), name.as_ptr());
        let failed = LLVMParseIRInContext2(context.raw(), buffer, &mut module, &mut message) != 0;
        LLVMDisposeMemoryBuffer(buffer);
        if !failed {
            return Ok(Module::new(module));
        }
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        LLVMDisposeMessage(message);
        let line = text.strip_prefix("kernel.ll:").and_then(|rest| rest.split(':').next()?.parse().ok());
        Err(error_at(Phase::Parse, text, line, ir_text))
    }
}

fn plain_error(phase: Phase, message: String) -> LlvmError {
    LlvmError::Rejected(Rejection { phase, message, line: None, excerpt: None })
}

fn error_at(phase: Phase, message: String, line: Option<usize>, ir_text: &str) -> LlvmError {
    let excerpt = line.and_then(|l| ir_text.lines().nth(l.checked_sub(1)?)).map(str::to_string);
    LlvmError::Rejected(Rejection { phase, message, line, excerpt })
}

fn verifier_error(message: String, ir_text: &str) -> LlvmError {
    let line = quoted_line(&message, ir_text);
    error_at(Phase::Verify, message, line, ir_text)
}

/// Finds the first line of a verifier message that is also a line of the IR: the verifier reports no line numbers, but
/// quotes instructions.
fn quoted_line(message: &str, ir_text: &str) -> Option<usize> {
    let quoted = message.lines().map(str::trim).filter(|l| l.len() > 3);
    quoted.into_iter().find_map(|q| ir_text.lines().position(|l| l.trim() == q)).map(|index| index + 1)
}

/// The version of the linked LLVM; `None` if there is none.
pub fn version() -> Option<LlvmVersion> {
    let mut version = LlvmVersion::default();
    // SAFETY: the three pointers are valid for one write each.
    unsafe { LLVMGetVersion(&mut version.major, &mut version.minor, &mut version.patch) };
    Some(version)
}
