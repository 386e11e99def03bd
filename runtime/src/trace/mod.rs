//! Tracing: time spans, allocations, and the kernels of a GPU.
//!
//! [`span`] and [`phase`] name a section of code; both return a guard that ends the section when it is dropped. Without
//! a recording they cost one load of an atomic. [`Recording::start`] enables them, [`Recording::finish`] returns a
//! [`Trace`]:
//!
//! ```
//! use tilewright_runtime::trace::{Options, Phase, Recording, phase, span};
//!
//! let recording = Recording::start(Options { spans: true, ..Options::default() }).unwrap();
//! {
//!     let _forward = phase(Phase::Forward);
//!     let _attention = span("attention");
//! }
//! let trace = recording.finish().unwrap();
//! assert_eq!(trace.path(trace.spans[0].node), ["forward", "attention"]);
//! ```
//!
//! A span's *node* is its position in the tree of names: all spans with the same path of names share it. Allocations
//! and kernels have the node of the span that requested them. Threads without a span, for example those of a thread
//! pool, belong to the most recently opened span of any thread.
//!
//! In reading order: this file, [`memory`], [`cupti`], [`nvtx`].

pub mod cupti;
pub mod memory;
pub mod nvtx;

use std::cell::Cell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

pub use cupti::Activity;
pub use memory::{CountingAllocator, MemoryEvent};

use crate::device::Device;
use crate::error::Result;

/// The phases of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Reading a batch.
    Data,
    /// From tokens to the loss.
    Forward,
    /// From the loss to gradients.
    Backward,
    /// Clipping and the new parameters.
    Optimizer,
}

impl Phase {
    pub const ALL: [Phase; 4] = [Phase::Data, Phase::Forward, Phase::Backward, Phase::Optimizer];

    pub fn name(self) -> &'static str {
        match self {
            Phase::Data => "data",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
        }
    }
}

/// What to record.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Start and end of each span.
    pub spans: bool,
    /// Allocations of at least this number of bytes: of the CPU, if [`CountingAllocator`] is the program's allocator;
    /// of the GPU, through CUPTI, if `gpu` is set.
    pub min_allocation_bytes: Option<usize>,
    /// Kernels, copies and fills of this GPU, through CUPTI. A phase ends when the GPU has done its work.
    pub gpu: Option<Device>,
    /// Show spans in an NVIDIA tool that runs this program.
    pub nvtx: bool,
}

/// A name in the tree of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Index of the parent; the root's is its own.
    pub parent: u32,
    pub name: String,
    /// The phase of this name.
    pub phase: Option<Phase>,
}

/// Index of a [`Node`].
pub type NodeId = u32;

/// The root node, which contains all spans.
pub const ROOT: NodeId = 0;

/// One execution of a span. Times are in nanoseconds since the recording started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanEvent {
    pub node: NodeId,
    /// Threads are numbered in the order in which they first open a span.
    pub thread: u32,
    pub start_ns: u64,
    pub end_ns: u64,
}

/// The result of a recording. Times are in nanoseconds since it started.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The root first; parents before children.
    pub nodes: Vec<Node>,
    /// Sorted by end.
    pub spans: Vec<SpanEvent>,
    /// Sorted by time.
    pub memory: Vec<MemoryEvent>,
    /// Peak number of bytes in use, of blocks of all sizes allocated since the start: counted independently of the
    /// events.
    pub peak_bytes: u64,
    /// Sorted by start.
    pub activities: Vec<Activity>,
    /// Number of records that CUPTI dropped for lack of buffers.
    pub dropped: u64,
    /// Duration of the recording.
    pub end_ns: u64,
}

impl Trace {
    /// The names from the root to a node, without the root's.
    pub fn path(&self, node: NodeId) -> Vec<&str> {
        let mut names = Vec::new();
        let mut at = node;
        while at != ROOT {
            let node = &self.nodes[at as usize];
            names.push(node.name.as_str());
            at = node.parent;
        }
        names.reverse();
        names
    }

    /// The outermost phase that contains a node.
    pub fn phase(&self, node: NodeId) -> Option<Phase> {
        let (mut at, mut found) = (node, None);
        while at != ROOT {
            let here = &self.nodes[at as usize];
            found = here.phase.or(found);
            at = here.parent;
        }
        found
    }

    /// The phase that begins with a node; `None` for other names, and for a phase inside another.
    pub fn begins_phase(&self, node: NodeId) -> Option<Phase> {
        let here = &self.nodes[node as usize];
        here.phase.filter(|_| self.phase(here.parent).is_none())
    }
}

const SPANS: u8 = 1;
const MEMORY: u8 = 2;
const NVTX: u8 = 4;
const GPU: u8 = 8;
/// All of these need spans: to record them, or to attribute events to them.
const ANY: u8 = SPANS | MEMORY | NVTX | GPU;

/// What is being recorded.
static FLAGS: AtomicU8 = AtomicU8::new(0);
/// The node of the most recently opened span that is still open, for threads without a span.
static LATEST: AtomicU32 = AtomicU32::new(ROOT);
static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Number of the recording, to detect spans that outlive theirs.
static RECORDING_ID: AtomicU32 = AtomicU32::new(0);
/// Locked during a recording: the next one waits.
static RECORDING_LOCK: Mutex<()> = Mutex::new(());

thread_local! {
    /// The node of this thread's innermost span, and the number of its recording.
    static CURRENT: Cell<(u32, NodeId)> = const { Cell::new((0, ROOT)) };
    /// This thread's number, and the number of its recording.
    static THREAD: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
}

struct State {
    recording_id: u32,
    started: Instant,
    nodes: Vec<Node>,
    children: HashMap<(NodeId, String), NodeId>,
    spans: Vec<SpanEvent>,
    threads: u32,
    gpu: Option<Device>,
}

impl State {
    fn node(&mut self, parent: NodeId, name: &str, phase: Option<Phase>) -> NodeId {
        let key = (parent, name.to_string());
        if let Some(&node) = self.children.get(&key) {
            return node;
        }
        let node = self.nodes.len() as NodeId;
        self.nodes.push(Node { parent, name: name.to_string(), phase });
        self.children.insert(key, node);
        node
    }

    /// The number of the calling thread.
    fn thread(&mut self) -> u32 {
        let (recording_id, number) = THREAD.get();
        if recording_id == self.recording_id {
            return number;
        }
        THREAD.set((self.recording_id, self.threads));
        self.threads += 1;
        self.threads - 1
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

fn state() -> MutexGuard<'static, Option<State>> {
    // A panic elsewhere leaves the state consistent: every change is one assignment or push.
    STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Guard of a span, which ends when this is dropped.
#[must_use = "a span ends when its guard is dropped: bind it to a name, as in `let _span = span(…)`"]
pub struct Span {
    open: Option<Open>,
    /// Not `Send`: a span ends on the thread on which it began.
    _thread: PhantomData<*const ()>,
}

struct Open {
    recording_id: u32,
    node: NodeId,
    outer: (u32, NodeId),
    latest: NodeId,
    start_ns: u64,
    phase: bool,
}

/// Opens a span of this name until the guard is dropped.
#[inline]
pub fn span(name: &'static str) -> Span {
    match FLAGS.load(Ordering::Relaxed) & ANY {
        0 => Span { open: None, _thread: PhantomData },
        flags => open(flags, name, None),
    }
}

/// Like [`span`], for a name that exists only at run time: a kernel's.
#[inline]
pub(crate) fn span_of(name: &str) -> Span {
    match FLAGS.load(Ordering::Relaxed) & ANY {
        0 => Span { open: None, _thread: PhantomData },
        flags => open(flags, name, None),
    }
}

/// Opens the span of a phase of a training step until the guard is dropped.
#[inline]
pub fn phase(phase: Phase) -> Span {
    match FLAGS.load(Ordering::Relaxed) & ANY {
        0 => Span { open: None, _thread: PhantomData },
        flags => open(flags, phase.name(), Some(phase)),
    }
}

/// Like [`span`], with the root as the parent, whatever other threads have open. For threads that work independently.
pub fn root_span(name: &'static str) -> Span {
    match FLAGS.load(Ordering::Relaxed) & ANY {
        0 => Span { open: None, _thread: PhantomData },
        flags => open_in(flags, name, None, Some(ROOT)),
    }
}

/// The number of this thread in the current recording; `None` without one.
pub fn thread_number() -> Option<u32> {
    state().as_mut().map(State::thread)
}

/// The names of the most recently opened span of any thread that is still open, outermost first; empty without a
/// recording. For a monitoring thread.
pub fn open_span_names() -> Vec<String> {
    let mut names = Vec::new();
    if let Some(state) = state().as_ref() {
        let mut at = LATEST.load(Ordering::Relaxed);
        while let Some(node) = state.nodes.get(at as usize).filter(|_| at != ROOT) {
            names.push(node.name.clone());
            at = node.parent;
        }
    }
    names.reverse();
    names
}

/// Whether a recording is in progress: for code that does work only for recordings.
pub fn recording() -> bool {
    FLAGS.load(Ordering::Relaxed) & ANY != 0
}

#[cold]
fn open(flags: u8, name: &str, phase: Option<Phase>) -> Span {
    open_in(flags, name, phase, None)
}

/// Opens a span inside a node; default: this thread's innermost span.
#[cold]
fn open_in(flags: u8, name: &str, phase: Option<Phase>, around: Option<NodeId>) -> Span {
    let _untracked = memory::untracked();
    let mut guard = state();
    let Some(state) = guard.as_mut() else { return Span { open: None, _thread: PhantomData } };
    let (outer, latest) = (CURRENT.get(), LATEST.load(Ordering::Relaxed));
    let node = state.node(around.unwrap_or_else(current_node), name, phase);
    let opened =
        Open { recording_id: state.recording_id, node, outer, latest, start_ns: state.now(), phase: phase.is_some() };
    drop(guard);
    CURRENT.set((opened.recording_id, node));
    LATEST.store(node, Ordering::Relaxed);
    if flags & GPU != 0 {
        cupti::enter(node);
    }
    if flags & NVTX != 0 {
        nvtx::push(name);
    }
    Span { open: Some(opened), _thread: PhantomData }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            close(&open);
        }
    }
}

#[cold]
fn close(open: &Open) {
    let _untracked = memory::untracked();
    CURRENT.set(open.outer);
    if RECORDING_ID.load(Ordering::Relaxed) != open.recording_id {
        return;
    }
    let flags = FLAGS.load(Ordering::Relaxed);
    LATEST.store(open.latest, Ordering::Relaxed);
    if flags & NVTX != 0 {
        nvtx::pop();
    }
    if flags & GPU != 0 {
        cupti::leave();
        if open.phase {
            // The next call that can report a failure will report it.
            let gpu = state().as_ref().and_then(|state| state.gpu.clone());
            let _ = gpu.map(|gpu| gpu.synchronize());
        }
    }
    let mut guard = state();
    let Some(state) = guard.as_mut().filter(|state| state.recording_id == open.recording_id) else { return };
    if flags & SPANS != 0 {
        let thread = state.thread();
        let event = SpanEvent { node: open.node, thread, start_ns: open.start_ns, end_ns: state.now() };
        state.spans.push(event);
    }
}

/// The node of an allocation or launch of this thread. A pool thread works for the most recently opened span.
fn current_node() -> NodeId {
    match CURRENT.get() {
        (recording_id, node) if recording_id == RECORDING_ID.load(Ordering::Relaxed) && node != ROOT => node,
        _ => LATEST.load(Ordering::Relaxed),
    }
}

/// A recording in progress. There is at most one in a process.
pub struct Recording {
    options: Options,
    finished: bool,
    _lock: MutexGuard<'static, ()>,
}

impl Recording {
    /// Starts a recording, after the previous one has finished.
    ///
    /// # Errors
    /// CUPTI or NVTX was requested and is missing or fails.
    pub fn start(options: Options) -> Result<Recording> {
        let lock = RECORDING_LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if options.nvtx {
            nvtx::load()?;
        }
        let recording_id = RECORDING_ID.load(Ordering::Relaxed).wrapping_add(1);
        RECORDING_ID.store(recording_id, Ordering::Relaxed);
        let root = Node { parent: ROOT, name: String::new(), phase: None };
        let _untracked = memory::untracked();
        *state() = Some(State {
            recording_id,
            started: Instant::now(),
            nodes: vec![root],
            children: HashMap::new(),
            spans: Vec::new(),
            threads: 0,
            gpu: options.gpu.clone(),
        });
        LATEST.store(ROOT, Ordering::Relaxed);
        let flag = |on: bool, flag: u8| if on { flag } else { 0 };
        let mut flags = flag(options.spans, SPANS) | flag(options.nvtx, NVTX);
        if let Some(device) = &options.gpu {
            let memory = options.min_allocation_bytes.is_some();
            let started = cupti::start(device, memory).inspect_err(|_| *state() = None)?;
            // The host's and the GPU's times start at the same instant.
            if let Some(state) = state().as_mut() {
                state.started = started;
            }
            flags |= GPU;
        } else if let Some(bytes) = options.min_allocation_bytes {
            memory::start(bytes);
            flags |= MEMORY;
        }
        FLAGS.store(flags, Ordering::SeqCst);
        Ok(Recording { options, finished: false, _lock: lock })
    }

    /// The instant from which its times count.
    pub fn started(&self) -> Instant {
        state().as_ref().map_or_else(Instant::now, |state| state.started)
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// The GPU's work failed, or CUPTI cannot return its records.
    pub fn finish(mut self) -> Result<Trace> {
        self.finished = true;
        let memory = FLAGS.swap(0, Ordering::SeqCst) & MEMORY != 0;
        let mut trace = Trace::default();
        if memory {
            (trace.memory, trace.peak_bytes) = memory::finish();
        }
        let state = state().take();
        let Some(state) = state else { return Ok(trace) };
        trace.end_ns = state.now();
        if self.options.gpu.is_some() {
            let found = cupti::finish(state.nodes.len(), self.options.min_allocation_bytes)?;
            (trace.activities, trace.dropped) = (found.activities, found.dropped);
            (trace.memory, trace.peak_bytes) = (found.memory, found.peak_bytes);
        }
        (trace.nodes, trace.spans) = (state.nodes, state.spans);
        Ok(trace)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if !self.finished {
            FLAGS.store(0, Ordering::SeqCst);
            memory::finish();
            if self.options.gpu.is_some() {
                cupti::abandon();
            }
            *state() = None;
        }
    }
}
