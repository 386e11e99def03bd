//! Calls from Python into the runtime: without the GIL, with errors and panics as exceptions, and correct after `fork`.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use tilewright::cudarc::driver::result::ctx;
use tilewright::cudarc::driver::sys::CUcontext;
use tilewright::escape::printable;

/// A user's text in a message: escaped, and at most a few lines long.
pub fn shown(text: impl std::fmt::Display) -> String {
    let text = text.to_string();
    match text.char_indices().nth(200) {
        None => printable(&text),
        Some((end, _)) => format!("{}... ({} bytes)", printable(&text[..end]), text.len()),
    }
}

create_exception!(tilewright, Error, PyRuntimeError, "What a kernel, its arguments or the device do not allow.");
create_exception!(tilewright, InternalError, Error, "A mistake in Tilewright itself.");

/// Runs `f` without the GIL.
///
/// # Errors
/// Those of `f`, as `tilewright.Error`, and a panic, as `tilewright.InternalError`.
pub fn without_gil<R: Send>(py: Python<'_>, f: impl FnOnce() -> tilewright::Result<R> + Send) -> PyResult<R> {
    py.detach(|| guarded(f))
}

/// As [`without_gil`], for callers that do not have the GIL, or keep it.
///
/// # Errors
/// As [`without_gil`].
pub fn guarded<R: Send>(f: impl FnOnce() -> tilewright::Result<R> + Send) -> PyResult<R> {
    let _call = InProgress::begin();
    let _context = KeptContext::new();
    match catch_unwind(AssertUnwindSafe(|| on_pool(f))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Error::new_err(in_python(&error.to_string()))),
        Err(panic) => Err(internal_error(&*panic)),
    }
}

/// A message of the runtime, with what Python has in place of Rust's.
fn in_python(message: &str) -> String {
    message.replace(
        "guarantee them with `LaunchConfig::unchecked`",
        "guarantee them: compile with `tilewright.compile`, and pass `unchecked=True` to the code that it returns",
    )
}

/// Runs `f`, and returns a panic as `tilewright.InternalError`.
///
/// # Errors
/// Those of `f`, and a panic.
pub fn catching<R>(f: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| Err(internal_error(&*panic)))
}

fn internal_error(panic: &(dyn Any + Send)) -> PyErr {
    InternalError::new_err(format!("{}: please report this", panic_text(panic)))
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("internal error")
}

/// The number of calls in progress. A `fork` waits until there are none, and keeps the lock meanwhile, so that the
/// child's copies of all locks are free.
static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

thread_local! {
    /// The lock, in the thread that forks.
    static FORK: RefCell<Option<MutexGuard<'static, usize>>> = const { RefCell::new(None) };
}

/// Whether this process was forked from one that had loaded this module.
static FORKED: AtomicBool = AtomicBool::new(false);
/// The thread pool of a forked process, whose global pool has no threads.
static POOL: AtomicPtr<ThreadPool> = AtomicPtr::new(std::ptr::null_mut());

fn running() -> MutexGuard<'static, usize> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call in progress. Locks of this module are taken inside of one.
pub struct InProgress;

impl InProgress {
    pub fn begin() -> InProgress {
        *running() += 1;
        InProgress
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        *running() -= 1;
        ENDED.notify_all();
    }
}

/// Whether this process has used a GPU.
static GPU_USED: AtomicBool = AtomicBool::new(false);

static GPU_LOST: AtomicBool = AtomicBool::new(false);

/// Notes that this process uses a GPU from now on.
pub fn gpu_used() {
    GPU_USED.store(true, Ordering::Release);
}

/// Whether this process was forked from one that had used a GPU: it cannot use one itself.
pub fn is_gpu_lost() -> bool {
    GPU_LOST.load(Ordering::Acquire)
}

/// The calling thread's CUDA context, which is current again when this is dropped: it determines PyTorch's current GPU.
/// `None` in a process that has not used a GPU; a null context if the thread had none.
struct KeptContext(Option<CUcontext>);

fn current_context() -> CUcontext {
    ctx::get_current().ok().flatten().unwrap_or(std::ptr::null_mut())
}

impl KeptContext {
    fn new() -> KeptContext {
        KeptContext(GPU_USED.load(Ordering::Acquire).then(current_context))
    }
}

impl Drop for KeptContext {
    fn drop(&mut self) {
        let Some(before) = self.0 else { return };
        if current_context() != before {
            // SAFETY: the context was current on this thread when the call began, or there was none.
            let _ = unsafe { ctx::set_current(before) };
        }
    }
}

/// Whether this process was forked after the module was imported.
fn is_forked() -> bool {
    FORKED.load(Ordering::Acquire)
}

/// Runs `f`, in a forked process on a new thread pool: threads do not survive a fork.
fn on_pool<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    if !is_forked() {
        return f();
    }
    if POOL.load(Ordering::Acquire).is_null() {
        let threads = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        let Ok(pool) = ThreadPoolBuilder::new().num_threads(threads).build() else { return f() };
        let pool = Box::into_raw(Box::new(pool));
        let before = POOL.compare_exchange(std::ptr::null_mut(), pool, Ordering::AcqRel, Ordering::Acquire);
        if before.is_err() {
            // SAFETY: another thread was first; this pool was just made and is not shared.
            drop(unsafe { Box::from_raw(pool) });
        }
    }
    // SAFETY: the pointer is of a pool that is never freed.
    unsafe { &*POOL.load(Ordering::Acquire) }.install(f)
}

#[pyfunction]
fn before_fork(py: Python<'_>) {
    py.detach(|| {
        let idle = ENDED.wait_while(running(), |running| *running > 0).unwrap_or_else(PoisonError::into_inner);
        FORK.set(Some(idle));
    });
}

#[pyfunction]
fn after_fork(child: bool) {
    if child {
        POOL.store(std::ptr::null_mut(), Ordering::Release);
        FORKED.store(true, Ordering::Release);
        GPU_LOST.fetch_or(GPU_USED.swap(false, Ordering::AcqRel), Ordering::AcqRel);
    }
    drop(FORK.take());
}

/// Registers the handlers of `os.fork`.
pub fn register_fork_handlers(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let partial = py.import("functools")?.getattr("partial")?;
    let after = wrap_pyfunction!(after_fork, module)?;
    let handlers = pyo3::types::PyDict::new(py);
    handlers.set_item("before", wrap_pyfunction!(before_fork, module)?)?;
    handlers.set_item("after_in_parent", partial.call1((&after, false))?)?;
    handlers.set_item("after_in_child", partial.call1((&after, true))?)?;
    py.import("os")?.getattr("register_at_fork")?.call((), Some(&handlers))?;
    Ok(())
}
