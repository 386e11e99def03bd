//! GPU memory shared between processes of one host (CUDA IPC).

use tilewright::cudarc::driver::sys;

/// Bytes of a CUDA IPC handle.
pub(super) const HANDLE_BYTES: usize = size_of::<sys::CUipcMemHandle>();

/// The IPC handle of the allocation at `address`.
pub(super) fn handle(address: u64) -> Result<[u8; HANDLE_BYTES], String> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
    // SAFETY: `handle` receives the result.
    let got = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) }.result();
    got.map_err(|error| format!("its memory cannot be shared with other processes (cuIpcGetMemHandle): {error}"))?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Maps the memory of rank `rank`, whose handle is at the start of `payload`, and returns its address in this process.
pub(super) fn open(rank: usize, payload: &[u8]) -> Result<u64, String> {
    let bytes: [u8; HANDLE_BYTES] =
        payload.get(..HANDLE_BYTES).and_then(|bytes| bytes.try_into().ok()).ok_or("an IPC handle was truncated")?;
    let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as _) };
    let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut address = 0;
    // SAFETY: the handle is that of live memory of another process, which stays allocated until all ranks have closed
    // it; the call writes the address.
    let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }.result();
    opened.map_err(|error| {
        format!(
            "rank {rank}'s memory cannot be mapped (cuIpcOpenMemHandle): {error}; the GPUs may have no peer access, or a process may not see the other's GPU (CUDA_VISIBLE_DEVICES) or its memory (another container)"
        )
    })?;
    Ok(address)
}

/// Unmaps memory that [`open`] mapped, if it did, and sets the address to 0. The memory is no longer in use.
pub(super) fn close(address: &mut u64) {
    if *address != 0 {
        // SAFETY: mapped once, unmapped once, and not used again.
        let _ = unsafe { sys::cuIpcCloseMemHandle(std::mem::take(address)) };
    }
}

/// Whether this process's GPU reaches memory of another process by NVLink, where loads are as fast as copies. Only
/// links of this kind support atomics; two processes on one GPU count too.
pub(super) fn has_nvlink(peer_address: u64) -> bool {
    let mut peer: i32 = -1;
    let mut own: sys::CUdevice = -1;
    let mut atomics = 0;
    // SAFETY: the pointers receive results; `peer_address` is an address of this process.
    let asked = unsafe {
        let what = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        sys::cuPointerGetAttribute((&raw mut peer).cast(), what, peer_address)
            .result()
            .and_then(|()| sys::cuCtxGetDevice(&raw mut own).result())
            .and_then(|()| {
                if own == peer {
                    atomics = 1;
                    return Ok(());
                }
                let what = sys::CUdevice_P2PAttribute_enum::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
                sys::cuDeviceGetP2PAttribute(&raw mut atomics, what, own, peer).result()
            })
    };
    asked.is_ok() && atomics == 1
}
