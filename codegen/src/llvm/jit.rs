//! Links native objects into this process (LLVM's ORC).

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;
use std::sync::Mutex;

use inkwell::llvm_sys::core::LLVMCreateMemoryBufferWithMemoryRangeCopy;
use inkwell::llvm_sys::error::{LLVMConsumeError, LLVMDisposeErrorMessage, LLVMErrorRef, LLVMGetErrorMessage};
use inkwell::llvm_sys::orc2::lljit::{
    LLVMOrcCreateLLJIT, LLVMOrcDisposeLLJIT, LLVMOrcLLJITAddObjectFile, LLVMOrcLLJITGetExecutionSession,
    LLVMOrcLLJITGetGlobalPrefix, LLVMOrcLLJITGetMainJITDylib, LLVMOrcLLJITLookup, LLVMOrcLLJITMangleAndIntern,
    LLVMOrcOpaqueLLJIT,
};
use inkwell::llvm_sys::orc2::{
    LLVMJITEvaluatedSymbol, LLVMJITSymbolFlags, LLVMJITSymbolGenericFlags, LLVMOrcAbsoluteSymbols,
    LLVMOrcCSymbolMapPair, LLVMOrcCreateDynamicLibrarySearchGeneratorForProcess,
    LLVMOrcExecutionSessionSetErrorReporter, LLVMOrcJITDylibAddGenerator, LLVMOrcJITDylibDefine,
};

use super::module::initialize_targets;
use super::{JitError, builtins};
use crate::target::HostEntry;

/// A native object that is linked into this process. Dropping it unmaps the code.
///
/// The object may call symbols that the process exports (libm, `memcpy` and the like), and the 16-bit float conversions
/// that LLVM expects from a runtime library.
pub struct JitModule {
    jit: NonNull<LLVMOrcOpaqueLLJIT>,
    entry: HostEntry,
    /// Messages of the linker. The JIT holds a pointer to them, so they are freed after the JIT.
    _messages: Box<Messages>,
}

type Messages = Mutex<Vec<String>>;

// SAFETY: LLVM locks the JIT's state, which is only accessed on load and drop; the code is read-only.
unsafe impl Send for JitModule {}
// SAFETY: a shared reference gives access to the entry address only.
unsafe impl Sync for JitModule {}

impl JitModule {
    /// Links `object` (as compiled by [`object`](super::object) for this machine) and looks up `entry`.
    ///
    /// The caller is responsible for `object`: damaged code, or code for another CPU, links without an error and fails
    /// when it runs.
    pub fn load(object: &[u8], entry: &str) -> Result<JitModule, JitError> {
        initialize_targets();
        let messages: Box<Messages> = Box::default();
        let fail = |message: String| {
            let mut lines = std::mem::take(&mut *messages.lock().unwrap_or_else(|e| e.into_inner()));
            lines.push(message);
            lines.dedup();
            JitError::Failed { entry: entry.to_string(), message: lines.join("; ") }
        };
        let symbol = CString::new(entry).map_err(|_| fail("the entry's name contains a zero byte".to_string()))?;
        let jit = create(&messages).map_err(fail)?;
        match link(jit, object, &symbol) {
            Ok(entry) => Ok(JitModule { jit, entry, _messages: messages }),
            Err(message) => {
                dispose(jit);
                Err(fail(message))
            }
        }
    }

    /// The entry point. It must not be called after `self` is dropped.
    pub fn entry(&self) -> HostEntry {
        self.entry
    }
}

impl Drop for JitModule {
    fn drop(&mut self) {
        dispose(self.jit);
    }
}

/// Creates a JIT that reports errors to `messages` and resolves symbols in this process.
fn create(messages: &Messages) -> Result<NonNull<LLVMOrcOpaqueLLJIT>, String> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: a null builder asks for the defaults of this machine; `raw` is valid for the write.
    check(unsafe { LLVMOrcCreateLLJIT(&mut raw, std::ptr::null_mut()) })?;
    let jit = NonNull::new(raw).ok_or("LLVM returned no JIT")?;
    let mut generator = std::ptr::null_mut();
    // SAFETY: `jit` is live; `messages` is boxed and freed only after the JIT; the generator passes to the library.
    unsafe {
        let session = LLVMOrcLLJITGetExecutionSession(raw);
        let context = messages as *const Messages as *mut c_void;
        LLVMOrcExecutionSessionSetErrorReporter(session, collect_error, context);
        let prefix = LLVMOrcLLJITGetGlobalPrefix(raw);
        let no_filter = std::ptr::null_mut();
        let error = LLVMOrcCreateDynamicLibrarySearchGeneratorForProcess(&mut generator, prefix, None, no_filter);
        if let Err(message) = check(error) {
            dispose(jit);
            return Err(message);
        }
        LLVMOrcJITDylibAddGenerator(LLVMOrcLLJITGetMainJITDylib(raw), generator);
    }
    if let Err(message) = define_builtins(jit) {
        dispose(jit);
        return Err(message);
    }
    Ok(jit)
}

/// Defines the functions of [`builtins`] in the JIT; they take precedence over symbols of the process.
fn define_builtins(jit: NonNull<LLVMOrcOpaqueLLJIT>) -> Result<(), String> {
    let (exported, callable) = (
        LLVMJITSymbolGenericFlags::LLVMJITSymbolGenericFlagsExported as u8,
        LLVMJITSymbolGenericFlags::LLVMJITSymbolGenericFlagsCallable as u8,
    );
    // SAFETY: `jit` is live and the names are zero-terminated; ownership of the interned names, and then of the unit
    // that holds them, passes to the library; the functions live as long as the process.
    unsafe {
        let mut symbols = builtins::table().map(|(name, address)| LLVMOrcCSymbolMapPair {
            Name: LLVMOrcLLJITMangleAndIntern(jit.as_ptr(), name.as_ptr()),
            Sym: LLVMJITEvaluatedSymbol {
                Address: address as u64,
                Flags: LLVMJITSymbolFlags { GenericFlags: exported | callable, TargetFlags: 0 },
            },
        });
        let unit = LLVMOrcAbsoluteSymbols(symbols.as_mut_ptr(), symbols.len());
        check(LLVMOrcJITDylibDefine(LLVMOrcLLJITGetMainJITDylib(jit.as_ptr()), unit))
    }
}

/// Adds `object` to the JIT and resolves `symbol`.
fn link(jit: NonNull<LLVMOrcOpaqueLLJIT>, object: &[u8], symbol: &CStr) -> Result<HostEntry, String> {
    let mut address = 0;
    // SAFETY: `jit` is live; the buffer is a copy, and the JIT takes ownership of it even when it fails.
    unsafe {
        let buffer =
            LLVMCreateMemoryBufferWithMemoryRangeCopy(object.as_ptr().cast(), object.len(), c"kernel.o".as_ptr());
        let library = LLVMOrcLLJITGetMainJITDylib(jit.as_ptr());
        check(LLVMOrcLLJITAddObjectFile(jit.as_ptr(), library, buffer))?;
        check(LLVMOrcLLJITLookup(jit.as_ptr(), &mut address, symbol.as_ptr()))?;
    }
    if address == 0 {
        return Err("the entry resolved to address zero".to_string());
    }
    // SAFETY: the host lowering emits this symbol as a function with the signature of `HostEntry`.
    Ok(unsafe { std::mem::transmute::<usize, HostEntry>(address as usize) })
}

fn dispose(jit: NonNull<LLVMOrcOpaqueLLJIT>) {
    // SAFETY: called once per JIT, by `Drop` or after a failed load.
    unsafe {
        let error = LLVMOrcDisposeLLJIT(jit.as_ptr());
        if !error.is_null() {
            LLVMConsumeError(error);
        }
    }
}

/// Converts an LLVM error to its message, and consumes it.
fn check(error: LLVMErrorRef) -> Result<(), String> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null error is owned; taking its message consumes it, and the message is freed once.
    unsafe {
        let raw = LLVMGetErrorMessage(error);
        let text = CStr::from_ptr(raw).to_string_lossy().into_owned();
        LLVMDisposeErrorMessage(raw);
        Err(text)
    }
}

extern "C" fn collect_error(messages: *mut c_void, error: LLVMErrorRef) {
    if let Err(text) = check(error) {
        // SAFETY: `messages` is the box that `create` registered; it outlives the JIT.
        let messages = unsafe { &*(messages as *const Messages) };
        messages.lock().unwrap_or_else(|e| e.into_inner()).push(text);
    }
}
