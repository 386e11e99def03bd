//! Available host memory, and the handling of allocations that exceed it.
//!
//! Linux overcommits memory, and kills a process (not always the one that allocated) when memory runs out. So large
//! allocations are compared with the available memory first: MemAvailable and free swap, the remainder of the limits of
//! the process's control groups, and the remainder of its address space limit (`ulimit -v`). If the system does not
//! report them, every allocation is accepted.

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Minimum size of allocations that are checked: for these, reading the limits takes less time than touching the
/// memory.
const CHECK_THRESHOLD: usize = 32 << 20;

/// Bytes that allocations have to leave available.
static RESERVE: AtomicUsize = AtomicUsize::new(0);

/// Makes later allocations of 32 MiB or more fail if they would leave fewer than `bytes` bytes of host memory
/// available.
pub fn reserve_host_memory(bytes: usize) {
    RESERVE.store(bytes, Ordering::Relaxed);
}

/// Checks that the system can provide `bytes` bytes of host memory now.
///
/// # Errors
/// [`Error::HostMemoryShort`], with the needed and the available bytes.
pub fn check_host_memory(bytes: f64) -> Result<()> {
    match available_bytes() {
        Some(available) if bytes > available => Err(Error::HostMemoryShort { needed: bytes, available }),
        _ => Ok(()),
    }
}

/// Whether more than `times` × `bytes` bytes of host memory are available; true if the system does not report it.
pub fn has_ample_host_memory(bytes: f64, times: f64) -> bool {
    available_bytes().is_none_or(|available| times * bytes < available)
}

pub(super) fn available_bytes() -> Option<f64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let text = read("/proc/meminfo")?;
    let free = kib_line(&text, "MemAvailable:")?.saturating_add(kib_line(&text, "SwapFree:").unwrap_or(0));
    let group = read("/proc/self/cgroup").and_then(|groups| cgroup_headroom(Path::new("/sys/fs/cgroup"), &groups));
    let left = [address_space_left(), group].into_iter().flatten().fold(free, u64::min);
    Some(left as f64)
}

/// The line `NAME N kB` of a file of Linux's `/proc`, in bytes.
pub(super) fn kib_line(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The remainder of `RLIMIT_AS`; `None` without a limit.
fn address_space_left() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    let used = kib_line(&std::fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(limit.saturating_sub(used))
}

/// File names of one cgroup version.
struct Names {
    limit: &'static str,
    usage: &'static str,
    /// Memory that the kernel reclaims under memory pressure.
    reclaimable: &'static str,
}

const V1: Names =
    Names { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", reclaimable: "total_inactive_file " };
const V2: Names = Names { limit: "memory.max", usage: "memory.current", reclaimable: "inactive_file " };

/// The remainder of the limits of this process's control groups and their ancestors. `groups` is `/proc/self/cgroup`: a
/// line `N:controllers:path` for each hierarchy of version 1, `0::path` for version 2.
fn cgroup_headroom(root: &Path, groups: &str) -> Option<u64> {
    let lines = groups.lines().filter_map(|line| {
        let mut words = line.splitn(3, ':').skip(1);
        let (controllers, path) = (words.next()?, words.next()?);
        let (root, names) = match controllers {
            "" => (root.to_path_buf(), V2),
            list if list.split(',').any(|name| name == "memory") => (root.join("memory"), V1),
            _ => return None,
        };
        let own = Path::new(path.trim_start_matches('/'));
        // In a container the path may be the host's, which does not exist there; the root then is the container's
        // group.
        own.ancestors().filter_map(|group| group_headroom(&root.join(group), &names)).min()
    });
    lines.min()
}

fn group_headroom(folder: &Path, names: &Names) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    // `max` means no limit.
    let limit: u64 = read(names.limit)?.trim().parse().ok()?;
    let usage: u64 = read(names.usage)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let line = stat.lines().find_map(|line| line.strip_prefix(names.reclaimable));
    let reclaimable = line.and_then(|number| number.trim().parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

thread_local! {
    /// Whether the caller of the current allocation on this thread reports its failure as an error.
    static CALLER_HANDLES_FAILURE: Cell<bool> = const { Cell::new(false) };
}

/// Runs an allocation whose failure the caller reports as an error.
pub(super) fn with_handled_failure<R>(allocate: impl FnOnce() -> R) -> R {
    let before = CALLER_HANDLES_FAILURE.replace(true);
    let result = allocate();
    CALLER_HANDLES_FAILURE.set(before);
    result
}

/// Whether an allocation of `bytes` may be tried. If not, and no caller on this thread reports it as an error, the
/// process ends with exit code 1 and a message: otherwise a failed allocation aborts, and an overcommitted one gets the
/// process killed when the memory is used.
pub(crate) fn check_allocation(bytes: usize) -> bool {
    if bytes < CHECK_THRESHOLD {
        return true;
    }
    match available_bytes() {
        Some(available) if bytes.saturating_add(RESERVE.load(Ordering::Relaxed)) as f64 > available => {
            exit_out_of_memory(bytes, Some(available));
            false
        }
        _ => true,
    }
}

/// Ends the process after a failed allocation of `bytes`, unless the caller reports it as an error.
#[cold]
pub(crate) fn exit_out_of_memory(bytes: usize, available: Option<f64>) {
    if CALLER_HANDLES_FAILURE.try_with(Cell::get).unwrap_or(false) {
        return;
    }
    // Prevents recursion if formatting the message allocates.
    CALLER_HANDLES_FAILURE.set(true);
    let available = available.or_else(available_bytes).unwrap_or(0.0);
    // There may be no memory for the message: it is formatted on the stack.
    let mut text = [0_u8; 320];
    let mut rest = &mut text[..];
    let (bytes, available) = (gib(bytes as f64), gib(available));
    let words = format_args!(
        "error: out of memory on the CPU: {bytes:.3} GiB more are needed at once, {available:.3} GiB are available"
    );
    let _ = write_to(&mut rest, words);
    let _ = write_to(&mut rest, format_args!("\n  help: use smaller sizes, or fewer at a time\n"));
    let len = 320 - rest.len();
    // SAFETY: the bytes live through the call; then the process ends without allocating.
    unsafe {
        libc::write(2, text.as_ptr().cast(), len);
        libc::_exit(1);
    }
}

fn gib(bytes: f64) -> f64 {
    bytes / (1_u64 << 30) as f64
}

fn write_to(to: &mut &mut [u8], words: std::fmt::Arguments<'_>) -> std::io::Result<()> {
    std::io::Write::write_fmt(to, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_requests_report_needed_and_available() {
        check_host_memory(1e6).unwrap();
        if available_bytes().is_some() {
            let message = check_host_memory(1e18).unwrap_err().to_string();
            assert!(message.starts_with("out of memory on the CPU: about 9.3e8 GiB"), "{message}");
            assert!(check_host_memory(f64::INFINITY).is_err());
            assert!(has_ample_host_memory(1e3, 8.0) && !has_ample_host_memory(1e17, 8.0));
        }
    }

    #[test]
    fn proc_lines_are_parsed_as_bytes() {
        let text = "MemTotal:       24 kB\nMemAvailable:   3 kB\nHugePages_Total:       0\n";
        assert_eq!(
            ["MemTotal:", "MemAvailable:", "SwapFree:"].map(|name| kib_line(text, name)),
            [Some(24576), Some(3072), None]
        );
    }

    #[test]
    fn cgroup_headroom_is_that_of_the_tightest_group() {
        let root = tempfile::tempdir().unwrap();
        let group = |path: &str, files: &[(&str, &str)]| {
            let folder = root.path().join(path);
            std::fs::create_dir_all(&folder).unwrap();
            files.iter().for_each(|(name, text)| std::fs::write(folder.join(name), text).unwrap());
        };
        assert_eq!(cgroup_headroom(root.path(), "0::/a/b\n"), None);
        group(
            "a",
            &[("memory.max", "1000\n"), ("memory.current", "700\n"), ("memory.stat", "anon 9\ninactive_file 100\n")],
        );
        group("a/b", &[("memory.max", "max\n"), ("memory.current", "5\n")]);
        assert_eq!(cgroup_headroom(root.path(), "3:cpu,cpuacct:/\n0::/a/b\n"), Some(400));
        group("a/b", &[("memory.max", "90\n")]);
        assert_eq!(cgroup_headroom(root.path(), "0::/a/b\n"), Some(85));
        // Version 1, in a container that does not see its own path.
        group("memory", &[("memory.limit_in_bytes", "50\n"), ("memory.usage_in_bytes", "60\n")]);
        assert_eq!(cgroup_headroom(root.path(), "4:memory:/docker/1\n0::/\n"), Some(0));
    }
}
