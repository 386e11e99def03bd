//! The kernels that commands are about.

use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_runtime::autotune::Autotune;

use crate::bind::Extents;
use crate::choose::suggest;
use crate::{CliError, Result};

/// A kernel of a command line: its definition, or its configurations.
pub trait Kernel: Sync {
    fn def(&'static self) -> &'static KernelDef;
    /// The configurations that `#[autotune]` lists.
    fn autotune(&'static self) -> Option<&'static Autotune>;
}

impl Kernel for KernelDef {
    fn def(&'static self) -> &'static KernelDef {
        self
    }

    fn autotune(&'static self) -> Option<&'static Autotune> {
        None
    }
}

impl Kernel for Autotune {
    fn def(&'static self) -> &'static KernelDef {
        self.def
    }

    fn autotune(&'static self) -> Option<&'static Autotune> {
        Some(self)
    }
}

/// What commands cannot find out about kernels by themselves. By default there is nothing.
pub trait Hints: Sync {
    /// A common value of a constant that neither the command line nor a shape or configuration determines, after
    /// `constants` are known.
    fn constant(&self, _name: &str, _constants: &[(&'static str, ConstValue)]) -> Option<ConstValue> {
        None
    }

    /// Adds the shapes of tensors that follow from the known ones.
    fn complete_shapes(
        &self,
        _def: &'static KernelDef,
        _extents: &mut Extents,
        _constants: &[(&'static str, ConstValue)],
    ) {
    }

    /// Floating-point operations of the matmuls in a launch; `None` if there are none, or if they are not known.
    fn flop(&self, _def: &KernelDef, _extents: &Extents, _constants: &[(&str, ConstValue)]) -> Option<f64> {
        None
    }

    /// The name of a kernel in records of benchmarks.
    fn record_name<'n>(&self, kernel: &'n str) -> &'n str {
        kernel
    }

    /// The tensors that have the `shape` of a record row, with their shapes; empty if it is the first tensor's.
    fn record_shapes(&self, _def: &KernelDef, _shape: &[usize]) -> Vec<(&'static str, Vec<usize>)> {
        Vec::new()
    }

    /// The constants that the `case` of a record row names; `None` if it names something else, too.
    fn record_constants(&self, _case: &str) -> Option<Vec<(&'static str, ConstValue)>> {
        Some(Vec::new())
    }
}

/// No hints.
impl Hints for () {}

/// The kernels of a program's commands.
pub struct Kernels {
    defs: Vec<&'static KernelDef>,
    autotuned: Vec<&'static Autotune>,
    hints: &'static dyn Hints,
}

impl Kernels {
    /// These kernels. If one is given twice, as its definition and as its configurations, it is listed once.
    pub fn of(kernels: &[&'static dyn Kernel]) -> Kernels {
        let mut defs: Vec<&'static KernelDef> = Vec::new();
        for def in kernels.iter().map(|kernel| kernel.def()) {
            if !defs.iter().any(|known| std::ptr::eq(*known, def)) {
                defs.push(def);
            }
        }
        let autotuned = kernels.iter().filter_map(|kernel| kernel.autotune()).collect();
        Kernels { defs, autotuned, hints: &() }
    }

    /// The same kernels, with hints about them.
    pub fn with_hints(self, hints: &'static dyn Hints) -> Kernels {
        Kernels { hints, ..self }
    }

    /// All kernels, in order.
    pub fn defs(&self) -> &[&'static KernelDef] {
        &self.defs
    }

    pub fn hints(&self) -> &'static dyn Hints {
        self.hints
    }

    /// The configurations of a kernel; `None` without `#[autotune]`.
    pub fn autotune(&self, def: &KernelDef) -> Option<&'static Autotune> {
        self.autotuned.iter().copied().find(|autotune| std::ptr::eq(autotune.def, def))
    }

    /// The kernel with this name or former name.
    ///
    /// # Errors
    /// No kernel has this name. The message suggests the most similar name and lists all kernels.
    pub fn find(&self, name: &str) -> Result<&'static KernelDef> {
        self.defs.iter().copied().find(|def| def.has_name(name)).ok_or_else(|| {
            let names: Vec<&str> = self.defs.iter().map(|def| def.name).collect();
            CliError::usage(format!("there is no kernel `{name}`"), suggest(name, &names, "the kernels are"))
        })
    }
}

/// The kernels that ship, with tiles for tests.
#[cfg(test)]
pub fn shipped() -> Kernels {
    use tilewright_kernels::{AUTOTUNED, KERNELS};
    struct Tiles;
    impl Hints for Tiles {
        fn constant(&self, name: &str, constants: &[(&'static str, ConstValue)]) -> Option<ConstValue> {
            let d = constants.iter().find(|(known, _)| *known == "d").map(|(_, value)| value.clone());
            match name {
                "d" | "q_tile" => Some(ConstValue::Int(64)),
                "d_tile" => Some(d.unwrap_or(ConstValue::Int(1024))),
                "rows_tile" | "heads_tile" => Some(ConstValue::Int(8)),
                "ids_tile" => Some(ConstValue::Int(512)),
                "tokens_tile" => Some(ConstValue::Int(32)),
                "tile" => Some(ConstValue::Int(1024)),
                _ => None,
            }
        }
    }
    Kernels { defs: KERNELS.to_vec(), autotuned: AUTOTUNED.to_vec(), hints: &Tiles }
}
