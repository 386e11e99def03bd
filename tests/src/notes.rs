//! What the compiler makes of a kernel for a GPU, and what it says.

use tilewright_codegen::ir::{Func, Stage};
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::target::{CompileOptions, GpuArch};

#[derive(Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn after(&mut self, _: &'static str, _: Stage, _: &Func) {}
    fn llvm_ir(&mut self, _: &str) {}
    fn note(&mut self, note: &str) {
        self.0.push(note.to_string());
    }
}

/// The last stage of a kernel's Tile IR, and the notes.
pub fn gpu_ir(func: &Func, arch: GpuArch, options: &CompileOptions) -> (Func, Vec<String>) {
    let mut notes = Notes::default();
    (pipeline::gpu_ir(func, arch, options, &mut notes), notes.0)
}
