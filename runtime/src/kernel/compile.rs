//! Turns a kernel's definition into an artifact: recording, the cache on disk, the compiler, and error messages with
//! the source line.

use std::path::{Path, PathBuf};

use tilewright_codegen::analysis::bounds::{self, Footprint};
use tilewright_codegen::diag::Diagnostic;
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, Specialization};
use tilewright_codegen::passes::assume_ranges;
use tilewright_codegen::pipeline::{self, CompileError};
use tilewright_codegen::target::{Artifact, CompileOptions, Target};

use crate::cache::{Cache, Key};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::{dump, terminal};

/// Records a kernel and compiles it, or loads the artifact from the cache on disk. Its manifest has the footprint that
/// launches are checked with. Lines of `static_print` go to standard error.
///
/// # Errors
/// Mistakes in the kernel, with the source line if its file can be read; features that the target lacks.
pub fn compile(
    def: &KernelDef,
    dtypes: &[DType],
    consts: &[(&str, ConstValue)],
    specialization: &Specialization,
    target: &Target,
    options: &CompileOptions,
) -> Result<Artifact> {
    let func = record(def, dtypes, consts, specialization)?;
    let mut artifact = compile_func(&func, target, options)?;
    artifact.manifest.footprint = Some(pipeline::footprint(&func));
    Ok(artifact)
}

/// Records a kernel, and discards assumptions that no launch checks. Lines of `static_print` go to standard error.
///
/// # Errors
/// Mistakes in the kernel, with the source line if its file can be read.
pub fn record(
    def: &KernelDef,
    dtypes: &[DType],
    consts: &[(&str, ConstValue)],
    specialization: &Specialization,
) -> Result<Func> {
    let recording =
        def.record_full(dtypes, consts, specialization).map_err(|d| Error::Kernel(render_with_source(&d)))?;
    for line in &recording.prints {
        terminal::print_stderr(format_args!("{}: {line}", def.name));
    }
    let mut func = recording.func;
    bounds::drop_unchecked_assumptions(&mut func);
    Ok(func)
}

/// The function that is compiled for launches on `target`, and its footprint. Launches on GPUs check the assumptions
/// that `assume_ranges` makes.
pub(crate) fn for_launches(mut func: Func, target: &Target, assume: bool) -> (Func, Footprint) {
    if assume && matches!(target, Target::Nvptx(_)) {
        assume_ranges::run(&mut func);
    }
    let footprint = pipeline::footprint(&func);
    (func, footprint)
}

/// Like [`compile`](fn@compile), for a function that is already recorded.
///
/// # Errors
/// Features that the target lacks, LLVM IR that LLVM rejects, and an environment variable with an invalid value.
pub fn compile_func(func: &Func, target: &Target, options: &CompileOptions) -> Result<Artifact> {
    let cache = Cache::from_env()?;
    let env = Env::get()?;
    let key = Key::new(func, target, options);
    // A function with requested dumps must be compiled.
    if !env.wants_dump_of(&func.name)
        && let Some(mut artifact) = cache.get(&key)
    {
        // The line of the kernel may differ from the one when the artifact was cached.
        artifact.manifest.source = func.loc.to_string();
        return Ok(artifact);
    }
    let artifact = dump::compile(func, target, options, env, &mut ()).map_err(|error| compile_error(func, error))?;
    cache.put(&key, &artifact);
    Ok(artifact)
}

/// Formats a compile error, with the source line if it has one.
pub fn compile_error(func: &Func, error: CompileError) -> Error {
    Error::Kernel(match error {
        CompileError::Unsupported(u) => {
            let mut diagnostic = Diagnostic::new(u.message, u.loc);
            diagnostic.help = u.help;
            render_with_source(&diagnostic)
        }
        CompileError::Llvm(error) => format!("kernel `{}`: {error}", func.name),
    })
}

/// The message with the source line, if the source file exists.
pub fn render_with_source(diagnostic: &Diagnostic) -> String {
    let source = source_file(&diagnostic.loc.file).and_then(|path| std::fs::read_to_string(path).ok());
    diagnostic.render(source.as_deref())
}

/// The file that a location names, if it exists. rustc names files relative to its working directory, which is this
/// directory or an ancestor for a program under development.
pub fn source_file(file: &str) -> Option<PathBuf> {
    let named = Path::new(file);
    if named.is_file() {
        return Some(named.to_path_buf());
    }
    let here = std::env::current_dir().ok()?;
    here.ancestors().skip(1).take(4).map(|dir| dir.join(named)).find(|path| path.is_file())
}
