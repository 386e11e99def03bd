//! The interface of this module in a program without LLVM, the feature `llvm` being off: functions that compile or link
//! return [`WithoutLlvm`].

use super::{Emitted, JitError, LlvmError, LlvmVersion, Machine, Opt, WithoutLlvm};
use crate::target::{GpuArch, HostCpu, HostEntry};

/// Compiles `ir_text` to PTX text for `arch`, at most of version `ptx_version` (major × 10 + minor).
///
/// # Errors
/// Without the feature `llvm`: [`WithoutLlvm`].
pub fn ptx(_ir_text: &str, _arch: GpuArch, _ptx_version: u32, _opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    Err(WithoutLlvm.into())
}

/// Compiles `ir_text` to native assembly, for people to read.
///
/// # Errors
/// Without the feature `llvm`: [`WithoutLlvm`].
pub fn asm(_ir_text: &str, _cpu: &HostCpu, _opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    Err(WithoutLlvm.into())
}

/// Compiles `ir_text` to a relocatable, position-independent native object.
///
/// # Errors
/// Without the feature `llvm`: [`WithoutLlvm`].
pub fn object(_ir_text: &str, _cpu: &HostCpu, _opt: &Opt) -> Result<Emitted<Vec<u8>>, LlvmError> {
    Err(WithoutLlvm.into())
}

/// The text of `ir_text` after LLVM's optimization pipeline for `machine`.
///
/// # Errors
/// Without the feature `llvm`: [`WithoutLlvm`].
pub fn optimized_ir(_ir_text: &str, _machine: Machine<'_>, _opt: &Opt) -> Result<Emitted<String>, LlvmError> {
    Err(WithoutLlvm.into())
}

/// A native object that is linked into this process. Without the feature `llvm` there is none.
pub struct JitModule(std::convert::Infallible);

impl JitModule {
    /// Links `object` into this process and looks up `entry`.
    ///
    /// # Errors
    /// Without the feature `llvm`: [`JitError::Absent`].
    pub fn load(_object: &[u8], entry: &str) -> Result<JitModule, JitError> {
        Err(JitError::Absent { entry: entry.to_string(), without: WithoutLlvm })
    }

    /// The entry point. It must not be called after `self` is dropped.
    pub fn entry(&self) -> HostEntry {
        match self.0 {}
    }
}

impl HostCpu {
    /// The CPU that this process runs on: without LLVM only its architecture is known, not its model and features.
    pub fn native() -> HostCpu {
        let arch = std::env::consts::ARCH;
        HostCpu { triple: format!("{arch}-unknown-linux-gnu"), cpu: "generic".into(), features: String::new() }
    }
}

/// The version of the linked LLVM; `None` if there is none.
pub fn version() -> Option<LlvmVersion> {
    None
}
