//! Detects the CPU of this process, in LLVM's terms.

use inkwell::targets::TargetMachine;

use super::module::initialize_targets;
use crate::target::HostCpu;

impl HostCpu {
    /// The CPU that this process runs on, with every feature that it and its operating system support.
    pub fn native() -> HostCpu {
        initialize_targets();
        HostCpu {
            triple: TargetMachine::get_default_triple().as_str().to_string_lossy().into_owned(),
            cpu: TargetMachine::get_host_cpu_name().to_string(),
            features: TargetMachine::get_host_cpu_features().to_string(),
        }
    }
}
