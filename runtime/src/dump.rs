//! Compilation with debug output from environment variables: `TILEWRIGHT_DUMP` prints intermediate forms,
//! `TILEWRIGHT_REPRO` saves the function on which a pass failed.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use tilewright_codegen::ir::{Func, Stage};
use tilewright_codegen::llvm::LlvmError;
use tilewright_codegen::pipeline::{self, CompileError, Observer};
use tilewright_codegen::target::{Artifact, Code, CompileOptions, Target};
use tilewright_codegen::text;

use crate::cache::owned;
use crate::env::Env;
use crate::terminal;

/// Like [`pipeline::compile`], with the dumps and the reproducer that the environment requests. Dumps go to standard
/// error.
///
/// `TILEWRIGHT_DUMP` accepts `tile` (the function as recorded), `layout` and `async` (at the end of that stage), the
/// name of any pass (after the pass), `llvm` (the input of LLVM) and `ptx`.
///
/// # Errors
/// Features that the target lacks; LLVM IR that LLVM rejects.
pub fn compile(
    func: &Func,
    target: &Target,
    options: &CompileOptions,
    env: &Env,
    observer: &mut dyn Observer,
) -> Result<Artifact, CompileError> {
    let repro = env.repro_dir.as_deref().map(|dir| Repro::new(dir, func, target, options));
    let mut watch = DumpObserver { env, kernel: func.name.clone(), last_stage: None, repro, observer };
    watch.dump("tile", || text::print(func));
    let artifact = pipeline::compile(func, target, options, &mut watch);
    watch.dump_finished_stage();
    if let Some(repro) = &mut watch.repro {
        match &artifact {
            Err(CompileError::Llvm(LlvmError::Rejected(rejection))) => repro.write(&rejection.to_string()),
            Err(CompileError::Llvm(LlvmError::Absent(_)) | CompileError::Unsupported(_)) | Ok(_) => {}
        }
        repro.finished = true;
    }
    if let Ok(Artifact { code: Code::Ptx(ptx), .. }) = &artifact {
        watch.dump("ptx", || ptx.clone());
    }
    artifact
}

impl Env {
    /// Whether `TILEWRIGHT_DUMP` requests a dump of `kernel`: then it must be compiled, not loaded from the cache.
    pub fn wants_dump_of(&self, kernel: &str) -> bool {
        self.dump.iter().any(|request| request.kernel.as_deref().is_none_or(|wanted| wanted == kernel))
    }
}

struct DumpObserver<'a> {
    env: &'a Env,
    kernel: String,
    /// The stage of the last pass, and the function after it if a dump of that stage is requested.
    last_stage: Option<(Stage, Option<String>)>,
    repro: Option<Repro<'a>>,
    observer: &'a mut dyn Observer,
}

impl DumpObserver<'_> {
    fn dump(&self, what: &str, text: impl FnOnce() -> String) {
        if self.env.dumps(what, &self.kernel) {
            terminal::print_stderr(format_args!("// {}, {what}\n{}", self.kernel, text()));
        }
    }

    /// Prints the function at the end of a stage, once the next stage starts or there is none.
    fn dump_finished_stage(&mut self) {
        if let Some((stage, Some(text))) = self.last_stage.take() {
            self.dump(stage_name(stage), || text);
        }
    }
}

fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Tile => "tile",
        Stage::Layout => "layout",
        Stage::Schedule => "schedule",
        Stage::Async => "async",
    }
}

impl Observer for DumpObserver<'_> {
    fn after(&mut self, pass: &'static str, stage: Stage, func: &Func) {
        if self.last_stage.as_ref().is_some_and(|(last_stage, _)| *last_stage != stage) {
            self.dump_finished_stage();
        }
        self.dump(pass, || text::print(func));
        // `tile` is the function as recorded, which is already printed.
        let wanted = stage != Stage::Tile && self.env.dumps(stage_name(stage), &self.kernel);
        self.last_stage = Some((stage, wanted.then(|| text::print(func))));
        if let Some(repro) = &mut self.repro {
            repro.last_pass = pass;
            repro.text = text::print(func);
        }
        self.observer.after(pass, stage, func);
    }

    fn llvm_ir(&mut self, text: &str) {
        self.dump_finished_stage();
        self.dump("llvm", || text.to_string());
        self.observer.llvm_ir(text);
    }

    fn note(&mut self, note: &str) {
        tracing::info!("{}: {note}", self.kernel);
        self.observer.note(note);
    }
}

/// The function before the current pass, written to a file if that pass panics or if LLVM rejects the code.
struct Repro<'a> {
    dir: &'a Path,
    kernel: String,
    target: String,
    options: String,
    last_pass: &'static str,
    text: String,
    finished: bool,
}

impl<'a> Repro<'a> {
    fn new(dir: &'a Path, func: &Func, target: &Target, options: &CompileOptions) -> Repro<'a> {
        Repro {
            dir,
            kernel: func.name.clone(),
            target: target.to_string(),
            options: format!("{options:?}"),
            last_pass: "recording",
            text: text::print(func),
            finished: false,
        }
    }

    fn write(&self, reason: &str) {
        let path = self.path();
        let mut text = String::new();
        for line in reason.lines() {
            let _ = writeln!(text, "// {line}");
        }
        let _ = writeln!(text, "// compiler {}, target {}", tilewright_codegen::compiler_id(), self.target);
        let _ = writeln!(text, "// {}", self.options);
        let _ = writeln!(text, "// the function after: {}", self.last_pass);
        text.push_str(&self.text);
        let outcome = replace(&path, &text);
        match outcome {
            Ok(()) => terminal::print_stderr(format_args!("wrote a reproducer to {}", path.display())),
            Err(error) => {
                terminal::print_stderr(format_args!("cannot write a reproducer to {}: {error}", path.display()))
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.join(format!("{}.{}.tile", self.kernel, self.target))
    }
}

/// Writes a temporary file next to `path` and renames it to `path`: a link or FIFO of that name is replaced, not
/// written through.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    owned::check_file_size(text.len() as u64)?;
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}

impl Drop for Repro<'_> {
    fn drop(&mut self) {
        if !self.finished && std::thread::panicking() {
            self.write("the next pass panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::DumpRequest;
    use tilewright_codegen::target::GpuArch;

    fn function() -> Func {
        text::parse("kernel @nothing(%n: i32) {\n  return\n}\n").unwrap_or_else(|error| panic!("{error}"))
    }

    /// Panics after the pass of that name.
    struct PanicAfter(&'static str);
    impl Observer for PanicAfter {
        fn after(&mut self, pass: &'static str, _: Stage, _: &Func) {
            assert_ne!(pass, self.0, "injected panic");
        }
        fn llvm_ir(&mut self, _: &str) {}
    }

    #[test]
    fn a_panic_leaves_a_reproducer_that_parses() {
        let dir = tempfile::tempdir().unwrap();
        let env = Env { repro_dir: Some(dir.path().join("repro")), ..Env::default() };
        let (func, target) = (function(), Target::Nvptx(GpuArch::Sm80));
        let attempt = |observer: &mut dyn Observer| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                compile(&func, &target, &CompileOptions::default(), &env, observer).map(|_| ())
            }))
        };
        let path = dir.path().join("repro/nothing.sm_80.tile");
        attempt(&mut ()).unwrap().unwrap();
        assert!(!path.exists(), "nothing went wrong");
        attempt(&mut PanicAfter("licm")).unwrap_err();
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("num_warps: 4") && text.contains("after: licm"), "{text}");
        assert_eq!(text::print(&text::parse(&text).unwrap()), text::print(&func));
    }

    /// In a directory that other users can write, the reproducer's path may already exist.
    #[test]
    fn reproducer_replaces_links_and_fifos() {
        use rustix::fs::{CWD, FileType, Mode};
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join("nothing.sm_80.tile"), dir.path().join("precious"));
        let env = Env { repro_dir: Some(dir.path().to_path_buf()), ..Env::default() };
        let fail = || {
            let run = || {
                compile(
                    &function(),
                    &Target::Nvptx(GpuArch::Sm80),
                    &CompileOptions::default(),
                    &env,
                    &mut PanicAfter("licm"),
                )
            };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run().map(drop))).unwrap_err();
            assert!(std::fs::symlink_metadata(&path).unwrap().is_file());
            std::fs::remove_file(&path).unwrap();
        };
        std::fs::write(&target, "precious").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        fail();
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious", "written through a link");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        fail();
    }

    #[test]
    fn dump_requests_select_kernels() {
        let dump = vec![DumpRequest { stage: "ptx".into(), kernel: Some("a".into()) }];
        let env = Env { dump, ..Env::default() };
        assert!(env.wants_dump_of("a") && !env.wants_dump_of("b"));
        assert!(!Env::default().wants_dump_of("a"));
    }
}
