//! Whether a CUDA driver is present, and what it supports.

use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use crate::error::{CudaFailure, Error, Result};

/// Names of the driver's library, a subset of those that cudarc tries.
#[cfg(not(windows))]
const LIBRARY_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
#[cfg(windows)]
const LIBRARY_NAMES: [&str; 2] = ["cuda.dll", "nvcuda.dll"];

/// The newest driver function that this crate needs: it came with CUDA 12.0. Newer functions have a fallback.
const NEWEST_SYMBOL: &[u8] = b"cuTensorMapEncodeTiled\0";

/// Loads and initializes the driver at the first call. Returns its CUDA version as major × 1000 + minor × 10.
pub(crate) fn driver_version() -> Result<i32> {
    static VERSION: OnceLock<Result<i32>> = OnceLock::new();
    VERSION.get_or_init(initialize).clone()
}

/// Number of visible GPUs.
pub(crate) fn gpu_count() -> Result<usize> {
    driver_version()?;
    let count = result::device::get_count().map_err(|error| Error::cuda("counting GPUs", error))?;
    Ok(count.max(0) as usize)
}

fn initialize() -> Result<i32> {
    check_library()?;
    let no_driver = |error| {
        let failure = CudaFailure::from(error);
        Error::NoDriver { reason: format!("the driver does not initialize: {failure}") }
    };
    result::init().map_err(no_driver)?;
    let mut version = 0;
    // SAFETY: the library is present (checked above) and `version` is valid for the write.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(no_driver)?;
    Ok(version)
}

/// cudarc panics if the library or one of its functions is missing, so this checks first.
fn check_library() -> Result<()> {
    // SAFETY: loading the driver's library runs its initializers, as any use of CUDA does.
    let library = LIBRARY_NAMES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
    let Some(library) = library else {
        return Err(Error::NoDriver {
            reason: format!("no NVIDIA driver is installed ({} is missing)", LIBRARY_NAMES[1]),
        });
    };
    // SAFETY: the symbol is only looked up, never called through this type.
    let found = unsafe { library.get::<*const ()>(NEWEST_SYMBOL) }.is_ok();
    // The library stays loaded: cudarc opens it again and gets the same one.
    std::mem::forget(library);
    if found {
        return Ok(());
    }
    Err(Error::NoDriver { reason: "the NVIDIA driver is older than CUDA 12.0: update it".to_string() })
}

/// The newest PTX version that a driver of this CUDA version accepts (PTX ISA, "Release Notes").
pub(super) fn ptx_version_of_driver(cuda: i32) -> u32 {
    const TABLE: [(i32, u32); 15] = [
        (13030, 93),
        (13020, 92),
        (13010, 91),
        (13000, 90),
        (12090, 88),
        (12080, 87),
        (12070, 86),
        (12060, 85),
        (12050, 85),
        (12040, 84),
        (12030, 83),
        (12020, 82),
        (12010, 81),
        (12000, 80),
        (11080, 78),
    ];
    TABLE.iter().find(|(version, _)| *version <= cuda).map_or(77, |(_, ptx)| *ptx)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_follows_the_driver() {
        assert_eq!(ptx_version_of_driver(12000), 80);
        assert_eq!(ptx_version_of_driver(12060), 85);
        assert_eq!(ptx_version_of_driver(12080), 87);
        assert_eq!(ptx_version_of_driver(13000), 90);
        assert_eq!(ptx_version_of_driver(14000), 93);
    }

    #[test]
    fn a_missing_driver_is_an_error_and_no_panic() {
        match driver_version() {
            Ok(version) => assert!(version >= 12000, "{version}"),
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains("`Device::cpu()`") && message.contains("`Device::best()`"), "{message}");
            }
        }
    }
}
