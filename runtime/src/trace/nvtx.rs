//! Spans for NVIDIA's tools (Nsight Systems, Nsight Compute), as NVTX ranges.
//!
//! NVTX has no library: a tool that runs a program names its own library in the variable `NVTX_INJECTION64_PATH`. The
//! program loads that file and calls its `InitializeInjectionNvtx2` with a function that returns a table of slots; the
//! tool stores its functions there (nvtxInit.h, nvtxTypes.h and nvtxInitDefs.h of NVTX 3). Without the variable no tool
//! is attached.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::env::Env;
use crate::error::{Error, Result};

// Numbers of `NvtxCallbackIdCore`: the functions of the module `core`.
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;
/// Slots of the module `core`, the first of which is unused.
const CORE_SLOTS: usize = 16;
/// `NVTX_CB_MODULE_CORE`.
const CORE: c_int = 1;
/// `NVTX_ETID_CALLBACKS` and `NVTX_ETID_VERSIONINFO`.
const CALLBACKS: u32 = 1;
const VERSION: u32 = 3;

static SLOTS: [AtomicPtr<c_void>; CORE_SLOTS] = [const { AtomicPtr::new(null_mut()) }; CORE_SLOTS];

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct CallbackTable {
    bytes: usize,
    functions: unsafe extern "C" fn(c_int, *mut *const *const AtomicPtr<c_void>, *mut u32) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionTable {
    bytes: usize,
    version: u32,
    reserved: u32,
    set_injection_version: unsafe extern "C" fn(u32),
}

/// Pointers to the slots, which are passed to a tool. A separate static, since it refers to another.
struct SlotPointers([*const AtomicPtr<c_void>; CORE_SLOTS + 1]);

// SAFETY: these are addresses of statics.
unsafe impl Sync for SlotPointers {}

/// The table ends with a null pointer.
static SLOT_POINTERS: SlotPointers = {
    let mut places: [*const AtomicPtr<c_void>; CORE_SLOTS + 1] = [null(); CORE_SLOTS + 1];
    let mut i = 1;
    while i < CORE_SLOTS {
        places[i] = &raw const SLOTS[i];
        i += 1;
    }
    SlotPointers(places)
};

static CALLBACK_TABLE: CallbackTable = CallbackTable { bytes: size_of::<CallbackTable>(), functions: module_functions };
static VERSION_TABLE: VersionTable =
    VersionTable { bytes: size_of::<VersionTable>(), version: 3, reserved: 0, set_injection_version: ignore_version };

unsafe extern "C" fn ignore_version(_version: u32) {}

/// `NvtxGetExportTableFunc_t`.
unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        VERSION => (&raw const VERSION_TABLE).cast(),
        _ => null(),
    }
}

unsafe extern "C" fn module_functions(
    module: c_int,
    table: *mut *const *const AtomicPtr<c_void>,
    slots: *mut u32,
) -> c_int {
    if module != CORE {
        return 0;
    }
    // SAFETY: the tool passes pointers valid for writes, or null for a value that it does not need.
    unsafe {
        if !slots.is_null() {
            *slots = CORE_SLOTS as u32;
        }
        if !table.is_null() {
            *table = SLOT_POINTERS.0.as_ptr();
        }
    }
    1
}

/// Attaches the tool that runs this program.
///
/// # Errors
/// No tool runs it, or the tool's library does not load.
pub(super) fn load() -> Result<()> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    let outcome = LOADED.get_or_init(|| match Env::get() {
        Ok(env) => match &env.nvtx_injection {
            Some(path) => inject(path),
            None => Err("no tool is attached: NVTX_INJECTION64_PATH is not set".to_string()),
        },
        Err(error) => Err(error.to_string()),
    });
    outcome.clone().map_err(|reason| Error::Profiler {
        tool: "NVTX",
        reason,
        help: "run the program under Nsight Systems (`nsys profile -t nvtx,cuda …`) or Nsight Compute",
    })
}

fn inject(path: &Path) -> Result<(), String> {
    type Initialize = unsafe extern "C" fn(unsafe extern "C" fn(u32) -> *const c_void) -> c_int;
    // SAFETY: the user who runs this program set the variable to this library for this purpose.
    let library = unsafe { libloading::Library::new(path) }.map_err(|error| format!("{}: {error}", path.display()))?;
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    // SAFETY: this is the type of the function of this name in NVTX 3.
    let initialize = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") };
    let initialize = initialize.map_err(|error| format!("{}: {error}", path.display()))?;
    // SAFETY: the function gets the arguments that NVTX specifies, and the tables are statics.
    match unsafe { initialize(export_table) } {
        0 => Err(format!("{}: the library of the tool failed to initialize", path.display())),
        _ => Ok(()),
    }
}

/// Begins a range on this thread.
pub(super) fn push(name: &str) {
    type Push = unsafe extern "C" fn(*const c_char) -> c_int;
    let slot = SLOTS[RANGE_PUSH_A].load(Ordering::Acquire);
    if slot.is_null() {
        return;
    }
    // A zero byte terminates the name.
    let name = CString::new(name.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the tool stores `nvtxRangePushA` in this slot.
    unsafe { std::mem::transmute::<*mut c_void, Push>(slot)(name.as_ptr()) };
}

/// Ends this thread's innermost range.
pub(super) fn pop() {
    type Pop = unsafe extern "C" fn() -> c_int;
    let slot = SLOTS[RANGE_POP].load(Ordering::Acquire);
    if !slot.is_null() {
        // SAFETY: the tool stores `nvtxRangePop` in this slot.
        unsafe { std::mem::transmute::<*mut c_void, Pop>(slot)() };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::CStr;

    use super::*;

    thread_local! {
        static RECEIVED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    unsafe extern "C" fn receive_push(name: *const c_char) -> c_int {
        // SAFETY: a name ends with a zero byte.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        RECEIVED.with_borrow_mut(|received| received.push(name));
        0
    }

    unsafe extern "C" fn receive_pop() -> c_int {
        RECEIVED.with_borrow_mut(|received| received.push("end".to_string()));
        0
    }

    /// Does the same as a tool's `InitializeInjectionNvtx2`.
    #[test]
    fn ranges_reach_the_injected_tool() {
        push("no tool is attached yet");
        pop();
        // SAFETY: the calls and casts are those of a tool.
        unsafe {
            let table = &*export_table(CALLBACKS).cast::<CallbackTable>();
            assert_eq!(table.bytes, 16);
            let (mut places, mut slots) = (null(), 0);
            assert_eq!((table.functions)(2, &raw mut places, &raw mut slots), 0);
            assert_eq!((table.functions)(CORE, &raw mut places, &raw mut slots), 1);
            assert_eq!(slots as usize, CORE_SLOTS);
            (**places.add(RANGE_PUSH_A)).store(receive_push as *mut c_void, Ordering::Release);
            (**places.add(RANGE_POP)).store(receive_pop as *mut c_void, Ordering::Release);
            assert!((*places.add(CORE_SLOTS)).is_null());
            assert_eq!((*export_table(VERSION).cast::<VersionTable>()).version, 3);
            assert!(export_table(99).is_null());
        }
        push("forward");
        push("atten\0tion");
        pop();
        pop();
        assert_eq!(RECEIVED.with_borrow(Clone::clone), ["forward", "atten tion", "end", "end"]);
    }
}
