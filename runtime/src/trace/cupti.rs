//! Records GPU activity with CUPTI: kernels, copies, fills and allocations, each with the span that requested it.
//!
//! NVIDIA's `libcupti` is loaded when a recording needs it. A span pushes its node as an *external correlation id*;
//! CUPTI then reports for each driver call which node was on top, and for each kernel which call started it. New
//! versions append fields to the records; the first fields of each, which are all that this module reads, have not
//! changed since CUDA 12.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use libloading::Library;

use super::{MemoryEvent, NodeId, ROOT};
use crate::device::Device;
use crate::error::{Error, Result};

/// A GPU activity. Times are in nanoseconds since the recording started, on the host's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    pub kind: ActivityKind,
    /// The span in which the host requested it.
    pub node: NodeId,
    pub start_ns: u64,
    pub end_ns: u64,
    /// CUPTI's number of the stream.
    pub stream: u32,
}

/// The kind of an [`Activity`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActivityKind {
    /// Name in the driver (C++ names mangled), blocks, threads per block, registers per thread, bytes of shared memory
    /// per block.
    Kernel {
        name: String,
        grid: [u32; 3],
        block: [u32; 3],
        registers: u16,
        shared_bytes: u32,
    },
    Copy {
        direction: &'static str,
        bytes: u64,
    },
    Fill {
        bytes: u64,
    },
}

impl ActivityKind {
    /// The kernel's name, or a description such as `copy to the GPU`.
    pub fn name(&self) -> String {
        match self {
            ActivityKind::Kernel { name, .. } => name.clone(),
            ActivityKind::Copy { direction, .. } => format!("copy {direction}"),
            ActivityKind::Fill { .. } => "fill".to_string(),
        }
    }
}

/// The records of CUPTI.
#[derive(Default)]
pub(super) struct GpuTrace {
    pub activities: Vec<Activity>,
    pub memory: Vec<MemoryEvent>,
    pub dropped: u64,
    /// Peak number of bytes of the device's pool in use, beyond those in use at the start: counted by the driver.
    pub peak_bytes: u64,
}

// Numbers of `CUpti_ActivityKind` (cupti_activity.h).
const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const DRIVER: u32 = 4;
const RUNTIME: u32 = 5;
const CONCURRENT_KERNEL: u32 = 10;
/// A copy between two GPUs.
const MEMCPY2: u32 = 22;
const EXTERNAL_CORRELATION: u32 = 39;
const MEMORY2: u32 = 49;
/// `CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0`.
const CORRELATION_CUSTOM0: u32 = 3;
/// `CUPTI_ACTIVITY_MEMORY_KIND_DEVICE`.
const DEVICE_MEMORY: u32 = 3;
/// `CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_ALLOCATION` and `_RELEASE`.
const ALLOCATION: u32 = 1;
const RELEASE: u32 = 2;
/// `CUPTI_ERROR_MAX_LIMIT_REACHED`: a buffer has no further record.
const NO_MORE: u32 = 12;
/// `CUPTI_ACTIVITY_FLAG_FLUSH_FORCED`.
const FORCED: u32 = 1;

/// The start of `CUpti_ActivityKernel9` and its successors.
#[repr(C)]
struct Kernel {
    kind: u32,
    cache: u8,
    shared: u8,
    registers: u16,
    partitioned: [u32; 2],
    start: u64,
    end: u64,
    completed: u64,
    device: u32,
    context: u32,
    stream: u32,
    grid: [i32; 3],
    block: [i32; 3],
    static_shared: i32,
    dynamic_shared: i32,
    local_per_thread: u32,
    local_total: u32,
    correlation: u32,
    grid_id: i64,
    name: *const c_char,
}

/// The start of `CUpti_ActivityMemcpy5` and its successors.
#[repr(C)]
struct Memcpy {
    kind: u32,
    copy: u8,
    ends: [u8; 2],
    flags: u8,
    bytes: u64,
    start: u64,
    end: u64,
    device: u32,
    context: u32,
    stream: u32,
    correlation: u32,
}

/// The start of `CUpti_ActivityMemcpyPtoP` and its successors.
#[repr(C)]
struct PeerCopy {
    kind: u32,
    copy: u8,
    ends: [u8; 2],
    flags: u8,
    bytes: u64,
    start: u64,
    end: u64,
    device: u32,
    context: u32,
    stream: u32,
    /// Device and context of the source, then of the destination.
    places: [u32; 4],
    correlation: u32,
}

/// The start of `CUpti_ActivityMemset4` and its successors.
#[repr(C)]
struct Memset {
    kind: u32,
    value: u32,
    bytes: u64,
    start: u64,
    end: u64,
    device: u32,
    context: u32,
    stream: u32,
    correlation: u32,
}

/// The start of `CUpti_ActivityMemory3` and its successors.
#[repr(C)]
struct MemoryRecord {
    kind: u32,
    operation: u32,
    memory: u32,
    correlation: u32,
    address: u64,
    bytes: u64,
    timestamp: u64,
}

/// `CUpti_ActivityExternalCorrelation`.
#[repr(C)]
struct External {
    kind: u32,
    external_kind: u32,
    id: u64,
    correlation: u32,
    reserved: u32,
}

type Status = u32;
type Request = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Complete = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// The functions that this module uses; the library stays loaded.
struct Api {
    register: unsafe extern "C" fn(Request, Complete) -> Status,
    enable: unsafe extern "C" fn(u32) -> Status,
    disable: unsafe extern "C" fn(u32) -> Status,
    flush: unsafe extern "C" fn(u32) -> Status,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> Status,
    dropped: unsafe extern "C" fn(*mut c_void, u32, *mut usize) -> Status,
    push: unsafe extern "C" fn(u32, u64) -> Status,
    pop: unsafe extern "C" fn(u32, *mut u64) -> Status,
    timestamp: unsafe extern "C" fn(*mut u64) -> Status,
    text: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
}

/// Names of the library, newest first.
pub(crate) const FILES: [&str; 3] = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];

fn unavailable(reason: String) -> Error {
    let help = "the directory of libcupti.so must be in LD_LIBRARY_PATH; it is part of the CUDA toolkit \
                (extras/CUPTI/lib64) and of the PyPI package nvidia-cuda-cupti";
    Error::Profiler { tool: "CUPTI", reason, help }
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    API.get_or_init(load).as_ref().map_err(|reason| unavailable(reason.clone()))
}

fn load() -> Result<Api, String> {
    let mut reasons = Vec::new();
    // SAFETY: this is NVIDIA's library by name, whose initializers any program may run.
    let library = FILES.iter().find_map(|file| match unsafe { Library::new(*file) } {
        Ok(library) => Some(library),
        Err(error) => {
            reasons.push(error.to_string());
            None
        }
    });
    let library: &'static Library = Box::leak(Box::new(library.ok_or_else(|| reasons.join("; "))?));
    macro_rules! symbol {
        ($name:literal) => {
            // SAFETY: the types are those of the functions of these names in cupti_activity.h, cupti_callbacks.h and
            // cupti_result.h, unchanged since CUDA 11.
            *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|error| error.to_string())?
        };
    }
    Ok(Api {
        register: symbol!("cuptiActivityRegisterCallbacks"),
        enable: symbol!("cuptiActivityEnable"),
        disable: symbol!("cuptiActivityDisable"),
        flush: symbol!("cuptiActivityFlushAll"),
        next: symbol!("cuptiActivityGetNextRecord"),
        dropped: symbol!("cuptiActivityGetNumDroppedRecords"),
        push: symbol!("cuptiActivityPushExternalCorrelationId"),
        pop: symbol!("cuptiActivityPopExternalCorrelationId"),
        timestamp: symbol!("cuptiGetTimestamp"),
        text: symbol!("cuptiGetResultString"),
    })
}

impl Api {
    fn check(&self, operation: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: `text` is valid for writing a pointer to a constant string of the library.
        let known = unsafe { (self.text)(status, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: the library reports that it has set `text`.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown error".into() };
        Err(unavailable(format!("{operation}: {text} ({status})")))
    }
}

/// Records in the order of arrival, their times still CUPTI's.
#[derive(Default)]
struct Collected {
    /// Each with its correlation id; its node is not known yet.
    activities: Vec<(Activity, u32)>,
    memory: Vec<(MemoryEvent, u32)>,
    /// From correlation id to node.
    nodes: HashMap<u32, NodeId>,
    dropped: u64,
    /// CUPTI's clock when the recording started.
    epoch: u64,
    device: Option<Device>,
    baseline: u64,
}

static COLLECTED: Mutex<Option<Collected>> = Mutex::new(None);
static WITH_MEMORY: AtomicBool = AtomicBool::new(false);

fn collected() -> MutexGuard<'static, Option<Collected>> {
    COLLECTED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn kinds() -> impl Iterator<Item = u32> {
    let memory = WITH_MEMORY.load(Ordering::Relaxed).then_some(MEMORY2);
    [EXTERNAL_CORRELATION, DRIVER, RUNTIME, CONCURRENT_KERNEL, MEMCPY, MEMCPY2, MEMSET].into_iter().chain(memory)
}

/// If copies between GPUs cannot be recorded, the other kinds still are.
fn ignore_missing_peer_copies(kind: u32, outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if kind == MEMCPY2 => {
            tracing::debug!("copies between GPUs are not recorded: {error}");
            Ok(())
        }
        outcome => outcome,
    }
}

/// Starts to collect, and returns the instant on the host's clock from which times count.
pub(super) fn start(device: &Device, memory: bool) -> Result<Instant> {
    static REGISTERED: OnceLock<Status> = OnceLock::new();
    let api = api()?;
    device.synchronize()?;
    WITH_MEMORY.store(memory, Ordering::Relaxed);
    // SAFETY: the callbacks are functions of this program, with the library's types.
    let registered = *REGISTERED.get_or_init(|| unsafe { (api.register)(request, complete) });
    api.check("registering the activity callbacks", registered)?;
    let mut epoch = 0;
    // SAFETY: `epoch` is valid for writing a u64.
    api.check("reading the timestamp", unsafe { (api.timestamp)(&raw mut epoch) })?;
    let started = Instant::now();
    let baseline = device.reset_peak_memory()?.unwrap_or(0);
    *collected() = Some(Collected { epoch, device: Some(device.clone()), baseline, ..Collected::default() });
    for kind in kinds() {
        // SAFETY: a plain call.
        let enabled = api.check("enabling activities", unsafe { (api.enable)(kind) });
        ignore_missing_peer_copies(kind, enabled)?;
    }
    Ok(started)
}

fn stop() -> Result<()> {
    let api = api()?;
    for kind in kinds() {
        // SAFETY: a plain call.
        let disabled = api.check("disabling activities", unsafe { (api.disable)(kind) });
        ignore_missing_peer_copies(kind, disabled)?;
    }
    // SAFETY: a plain call; it calls `complete` for the remaining buffers.
    api.check("flushing the records", unsafe { (api.flush)(FORCED) })
}

pub(super) fn abandon() {
    let _ = stop();
    *collected() = None;
}

/// Ends the recording. `nodes` is the number of nodes; allocations of fewer than `from_bytes` bytes, or all if it is
/// `None`, are omitted.
pub(super) fn finish(nodes: usize, from_bytes: Option<usize>) -> Result<GpuTrace> {
    let device = collected().as_ref().and_then(|collected| collected.device.clone());
    let peak = match &device {
        None => 0,
        Some(device) => {
            device.synchronize()?;
            device.peak_memory()?.unwrap_or(0)
        }
    };
    stop()?;
    let Some(collected) = collected().take() else { return Ok(GpuTrace::default()) };
    let mut found = collected.into_trace(nodes, from_bytes);
    found.peak_bytes = peak.saturating_sub(found.peak_bytes);
    Ok(found)
}

impl Collected {
    /// Replaces correlation ids by nodes, and times by times since the start. `peak_bytes` are the bytes in use at the
    /// start.
    fn into_trace(self, nodes: usize, from_bytes: Option<usize>) -> GpuTrace {
        let node = |correlation: u32| self.nodes.get(&correlation).copied().filter(|&n| (n as usize) < nodes);
        let since = |time: u64| time.saturating_sub(self.epoch);
        let mut activities: Vec<Activity> = Vec::with_capacity(self.activities.len());
        for (activity, correlation) in self.activities {
            let (start_ns, end_ns) = (since(activity.start_ns), since(activity.end_ns));
            activities.push(Activity { node: node(correlation).unwrap_or(ROOT), start_ns, end_ns, ..activity });
        }
        activities.sort_by_key(|activity| activity.start_ns);
        let mut memory = Vec::with_capacity(self.memory.len());
        for (event, correlation) in self.memory {
            if from_bytes.is_some_and(|from| event.bytes >= from as u64) {
                let node = node(correlation).unwrap_or(ROOT);
                memory.push(MemoryEvent { node, time_ns: since(event.time_ns), ..event });
            }
        }
        memory.sort_by_key(|event| event.time_ns);
        GpuTrace { activities, memory, dropped: self.dropped, peak_bytes: self.baseline }
    }
}

/// Attributes the following driver calls of this thread to `node`, until [`leave`].
pub(super) fn enter(node: NodeId) {
    if let Ok(api) = api() {
        // SAFETY: a plain call. If it fails, the activity has no span.
        unsafe { (api.push)(CORRELATION_CUSTOM0, u64::from(node)) };
    }
}

pub(super) fn leave() {
    if let Ok(api) = api() {
        let mut last = 0;
        // SAFETY: `last` is valid for writing a u64.
        unsafe { (api.pop)(CORRELATION_CUSTOM0, &raw mut last) };
    }
}

const BUFFER_BYTES: usize = 8 << 20;

/// Callback: CUPTI requests a buffer for records.
unsafe extern "C" fn request(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // Records are aligned to 8 bytes.
    let records = vec![0_u64; BUFFER_BYTES / 8].into_boxed_slice();
    // SAFETY: CUPTI passes three pointers that are valid for writes.
    unsafe {
        *buffer = Box::into_raw(records).cast();
        *size = BUFFER_BYTES;
        *max_records = 0;
    }
}

/// Callback: CUPTI returns a buffer with records.
unsafe extern "C" fn complete(context: *mut c_void, stream: u32, buffer: *mut u8, _size: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    // SAFETY: every buffer comes from `request`, and is returned once.
    let records = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_BYTES / 8)) };
    let Ok(api) = api() else { return };
    let mut guard = collected();
    let Some(collected) = guard.as_mut() else { return };
    let mut record = std::ptr::null_mut();
    loop {
        // SAFETY: `valid` bytes of the buffer hold records; `record` starts as null and then is the previous record.
        let status = unsafe { (api.next)(buffer, valid, &raw mut record) };
        if status == NO_MORE || status != 0 || record.is_null() {
            break;
        }
        // SAFETY: CUPTI points to a record of the buffer, aligned to 8 bytes.
        unsafe { collected.take_record(record) };
    }
    let mut dropped = 0;
    // SAFETY: context and stream are those that CUPTI passed; `dropped` is valid for writing a size.
    if unsafe { (api.dropped)(context, stream, &raw mut dropped) } == 0 {
        collected.dropped += dropped as u64;
    }
    drop(records);
}

impl Collected {
    /// # Safety
    /// `record` is a record of CUPTI: its first field is its kind, which determines its type.
    unsafe fn take_record(&mut self, record: *const u8) {
        // SAFETY: every record starts with its kind, and all casts below are to the type of that kind.
        match unsafe { *record.cast::<u32>() } {
            CONCURRENT_KERNEL => {
                // SAFETY: as above.
                let kernel = unsafe { &*record.cast::<Kernel>() };
                let name = match kernel.name.is_null() {
                    true => "unnamed kernel".to_string(),
                    // SAFETY: CUPTI keeps kernel names until the module is unloaded.
                    false => unsafe { CStr::from_ptr(kernel.name) }.to_string_lossy().into_owned(),
                };
                let kind = ActivityKind::Kernel {
                    name,
                    grid: kernel.grid.map(|n| n.max(0) as u32),
                    block: kernel.block.map(|n| n.max(0) as u32),
                    registers: kernel.registers,
                    shared_bytes: (kernel.static_shared.max(0) + kernel.dynamic_shared.max(0)) as u32,
                };
                self.activity(kind, kernel.start, kernel.end, kernel.stream, kernel.correlation);
            }
            MEMCPY => {
                // SAFETY: as above.
                let copy = unsafe { &*record.cast::<Memcpy>() };
                // Numbers of `CUpti_ActivityMemcpyKind`.
                let direction = match copy.copy {
                    1 => "to the GPU",
                    2 => "from the GPU",
                    8 => "on the GPU",
                    10 => "between GPUs",
                    _ => "of memory",
                };
                let kind = ActivityKind::Copy { direction, bytes: copy.bytes };
                self.activity(kind, copy.start, copy.end, copy.stream, copy.correlation);
            }
            MEMCPY2 => {
                // SAFETY: as above.
                let copy = unsafe { &*record.cast::<PeerCopy>() };
                let kind = ActivityKind::Copy { direction: "between GPUs", bytes: copy.bytes };
                self.activity(kind, copy.start, copy.end, copy.stream, copy.correlation);
            }
            MEMSET => {
                // SAFETY: as above.
                let fill = unsafe { &*record.cast::<Memset>() };
                let kind = ActivityKind::Fill { bytes: fill.bytes };
                self.activity(kind, fill.start, fill.end, fill.stream, fill.correlation);
            }
            MEMORY2 => {
                // SAFETY: as above.
                let memory = unsafe { &*record.cast::<MemoryRecord>() };
                if memory.memory == DEVICE_MEMORY && [ALLOCATION, RELEASE].contains(&memory.operation) {
                    let event = MemoryEvent {
                        time_ns: memory.timestamp,
                        address: memory.address,
                        bytes: memory.bytes,
                        allocated: memory.operation == ALLOCATION,
                        node: ROOT,
                    };
                    self.memory.push((event, memory.correlation));
                }
            }
            EXTERNAL_CORRELATION => {
                // SAFETY: as above.
                let external = unsafe { &*record.cast::<External>() };
                if external.external_kind == CORRELATION_CUSTOM0
                    && let Ok(node) = NodeId::try_from(external.id)
                {
                    self.nodes.insert(external.correlation, node);
                }
            }
            // Driver calls: enabled only so that CUPTI writes correlations.
            _ => {}
        }
    }

    fn activity(&mut self, kind: ActivityKind, start_ns: u64, end_ns: u64, stream: u32, correlation: u32) {
        self.activities.push((Activity { kind, node: ROOT, start_ns, end_ns, stream }, correlation));
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// Offsets of the C structs in cupti_activity.h, which are packed to 8 bytes, computed by hand.
    #[test]
    fn record_layouts_match_cupti() {
        assert_eq!((offset_of!(Kernel, registers), offset_of!(Kernel, start)), (6, 16));
        assert_eq!((offset_of!(Kernel, stream), offset_of!(Kernel, grid)), (48, 52));
        assert_eq!((offset_of!(Kernel, correlation), offset_of!(Kernel, grid_id)), (92, 96));
        assert_eq!((offset_of!(Kernel, name), size_of::<Kernel>()), (104, 112));
        assert_eq!((offset_of!(Memcpy, bytes), offset_of!(Memcpy, correlation)), (8, 44));
        assert_eq!((offset_of!(PeerCopy, stream), offset_of!(PeerCopy, correlation)), (40, 60));
        assert_eq!((offset_of!(Memset, start), offset_of!(Memset, correlation)), (16, 44));
        assert_eq!((offset_of!(MemoryRecord, address), offset_of!(MemoryRecord, timestamp)), (16, 32));
        assert_eq!((offset_of!(External, id), offset_of!(External, correlation), size_of::<External>()), (8, 16, 24));
    }

    /// Records in CUPTI's format, parsed to nodes and times.
    #[test]
    fn kernels_get_the_span_that_launched_them() {
        let kernel = Kernel {
            kind: CONCURRENT_KERNEL,
            cache: 0,
            shared: 0,
            registers: 64,
            partitioned: [0; 2],
            start: 1500,
            end: 1900,
            completed: 0,
            device: 0,
            context: 1,
            stream: 7,
            grid: [4, 2, 1],
            block: [128, 1, 1],
            static_shared: 16,
            dynamic_shared: 1024,
            local_per_thread: 0,
            local_total: 0,
            correlation: 42,
            grid_id: 1,
            name: c"softmax".as_ptr(),
        };
        let external = External {
            kind: EXTERNAL_CORRELATION,
            external_kind: CORRELATION_CUSTOM0,
            id: 3,
            correlation: 42,
            reserved: 0,
        };
        let memory = |operation, timestamp| MemoryRecord {
            kind: MEMORY2,
            operation,
            memory: DEVICE_MEMORY,
            correlation: 43,
            address: 0x1000,
            bytes: 4096,
            timestamp,
        };
        let copy = PeerCopy {
            kind: MEMCPY2,
            copy: 10,
            ends: [3; 2],
            flags: 1,
            bytes: 4096,
            start: 1600,
            end: 1650,
            device: 0,
            context: 1,
            stream: 9,
            places: [0, 1, 1, 2],
            correlation: 42,
        };
        let mut collected = Collected { epoch: 1000, ..Collected::default() };
        for record in [&raw const kernel as *const u8, &raw const copy as *const u8, &raw const external as *const u8] {
            // SAFETY: these are records.
            unsafe { collected.take_record(record) };
        }
        for record in [memory(RELEASE, 1700), memory(ALLOCATION, 1600)] {
            // SAFETY: this is a record.
            unsafe { collected.take_record((&raw const record).cast()) };
        }
        let found = collected.into_trace(4, Some(4096));
        let activity = &found.activities[0];
        assert_eq!((activity.node, activity.start_ns, activity.end_ns, activity.stream), (3, 500, 900, 7));
        let ActivityKind::Kernel { name, grid, shared_bytes, .. } = &activity.kind else { panic!("{activity:?}") };
        assert_eq!((name.as_str(), *grid, *shared_bytes), ("softmax", [4, 2, 1], 1040));
        let activity = &found.activities[1];
        assert_eq!((activity.kind.name().as_str(), activity.start_ns, activity.stream), ("copy between GPUs", 600, 9));
        let events: Vec<(bool, u64, NodeId)> = found.memory.iter().map(|e| (e.allocated, e.time_ns, e.node)).collect();
        assert_eq!(events, [(true, 600, ROOT), (false, 700, ROOT)]);
    }
}
