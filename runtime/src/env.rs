//! The environment, read once.
//!
//! | variable | values | meaning |
//! |---|---|---|
//! | `TILEWRIGHT_DEVICE` | `cpu`, `cuda`, `cuda:N` | the device of [`Device::best`](crate::Device::best); default: the first GPU if a driver responds, else the CPU |
//! | `TILEWRIGHT_CACHE` | a directory, or `off` | the directory of compiled kernels; default: `tilewright` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`) |
//! | `TILEWRIGHT_CACHE_MAX_SIZE` | bytes, `500M`, `2G`, or `unlimited` | the maximum size of that directory, in bytes or in units of 1024: beyond it, the least recently used kernels are evicted; default: `1G` |
//! | `TILEWRIGHT_DUMP` | `STAGE`, `STAGE:KERNEL`, comma-separated | print the IR after that stage or pass, of that kernel or of all |
//! | `TILEWRIGHT_REPRO` | a directory | write the IR before a failing pass to this directory, with the options |
//! | `TILEWRIGHT_TUNE` | seconds | tune kernels with `#[autotune]` at their first launch, for at most this time each; not on a simulated GPU, which has no times ([`autotune`](crate::autotune)) |
//! | `TILEWRIGHT_PTXAS` | a file | the `ptxas` of tests and `doctor`; default: the first on `PATH` |
//! | `NVTX_INJECTION64_PATH` | a file | the library that receives ranges; NVIDIA's tools set it for the programs that they run |
//!
//! An empty value counts as unset. An invalid value is an error that names the variable, the value and what is
//! expected. Directories and files are checked when they are used. Other variables that begin with `TILEWRIGHT_` are
//! a warning, unless another part of the project reads them ([`names`]).

pub mod names;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use tilewright_codegen::passes::current_name;
use tilewright_codegen::pipeline::PASS_NAMES;

use crate::error::{Error, Result};

/// Values of the variables in the table above.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Env {
    /// `TILEWRIGHT_DEVICE`.
    pub device: Option<DeviceChoice>,
    /// Directory of the artifact cache; `None` if it is off or no directory is known.
    pub cache_dir: Option<PathBuf>,
    /// `TILEWRIGHT_CACHE_MAX_SIZE`, in bytes; `u64::MAX` if unlimited.
    pub cache_max_bytes: Option<u64>,
    /// `TILEWRIGHT_DUMP`.
    pub dump: Vec<DumpRequest>,
    /// `TILEWRIGHT_REPRO`.
    pub repro_dir: Option<PathBuf>,
    /// `TILEWRIGHT_TUNE`.
    pub tune: Option<Duration>,
    /// `TILEWRIGHT_PTXAS`, or the first `ptxas` on `PATH`.
    pub ptxas: Option<PathBuf>,
    /// `NVTX_INJECTION64_PATH`.
    pub nvtx_injection: Option<PathBuf>,
}

/// A device named by the variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    Cpu,
    /// An NVIDIA GPU by ordinal.
    Cuda(usize),
}

/// One entry of `TILEWRIGHT_DUMP`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpRequest {
    /// Name of a stage or a pass.
    pub stage: String,
    /// Only this kernel; `None` means all.
    pub kernel: Option<String>,
}

impl DumpRequest {
    /// Whether this requests `stage` of `kernel`.
    pub fn matches(&self, stage: &str, kernel: &str) -> bool {
        self.stage == stage && self.kernel.as_deref().is_none_or(|wanted| wanted == kernel)
    }
}

impl Env {
    /// The environment of this process, read at the first call.
    ///
    /// # Errors
    /// Names the variable with an invalid value, and what it accepts.
    pub fn get() -> Result<&'static Env> {
        static ENV: OnceLock<Result<Env>> = OnceLock::new();
        let read = || {
            if let Some(warning) = names::warning(std::env::vars_os()) {
                tracing::warn!("{warning}");
            }
            Env::parse(|name| std::env::var_os(name))
        };
        ENV.get_or_init(read).as_ref().map_err(Clone::clone)
    }

    /// Whether `TILEWRIGHT_DUMP` requests `stage` of `kernel`.
    pub fn dumps(&self, stage: &str, kernel: &str) -> bool {
        self.dump.iter().any(|request| request.matches(stage, kernel))
    }

    /// Reads the variables through `lookup`.
    fn parse(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Env> {
        let path = |name: &str| lookup(name).filter(|v| !v.is_empty());
        let text = |name: &'static str, expected: &'static str| match path(name) {
            None => Ok(None),
            Some(value) => match value.into_string() {
                Ok(text) => Ok(Some(text)),
                Err(raw) => Err(Error::BadVariable { name, value: raw.to_string_lossy().into_owned(), expected }),
            },
        };
        let device = text("TILEWRIGHT_DEVICE", DEVICE_VALUES)?.map(|value| parse_device(&value)).transpose()?;
        let dump = text("TILEWRIGHT_DUMP", &DUMP_VALUES)?.map(|value| parse_dump(&value)).transpose()?;
        let tune = text("TILEWRIGHT_TUNE", TUNE_VALUES)?.map(|value| parse_tune(&value)).transpose()?;
        let cache_dir = match path("TILEWRIGHT_CACHE") {
            Some(value) if value == "off" => None,
            Some(value) => Some(PathBuf::from(value)),
            None => user_cache_dir(&path).map(|dir| dir.join("tilewright")),
        };
        let cache_max_bytes =
            text("TILEWRIGHT_CACHE_MAX_SIZE", SIZE_VALUES)?.map(|value| parse_size(&value)).transpose()?;
        let on_path = || {
            let dirs = path("PATH")?;
            std::env::split_paths(&dirs).map(|dir| dir.join("ptxas")).find(|candidate| candidate.is_file())
        };
        Ok(Env {
            device,
            cache_dir,
            cache_max_bytes,
            dump: dump.unwrap_or_default(),
            tune,
            repro_dir: path("TILEWRIGHT_REPRO").map(PathBuf::from),
            ptxas: path("TILEWRIGHT_PTXAS").map(PathBuf::from).or_else(on_path),
            nvtx_injection: path("NVTX_INJECTION64_PATH").map(PathBuf::from),
        })
    }
}

const DEVICE_VALUES: &str = "cpu, cuda or cuda:N (N counts GPUs from 0)";
/// What `TILEWRIGHT_DUMP` can name besides passes.
const STAGES: [&str; 5] = ["tile", "layout", "async", "llvm", "ptx"];
static DUMP_VALUES: LazyLock<String> = LazyLock::new(|| {
    let (stages, passes) = (STAGES.join(", "), PASS_NAMES.join(", "));
    format!("STAGE or STAGE:KERNEL, several separated by commas; stages are {stages}, and the passes {passes}")
});

const SIZE_VALUES: &str =
    "a number of bytes above 0, such as 500M or 2G (K, M, G and T are powers of 1024), or `unlimited`";

fn parse_size(value: &str) -> Result<u64> {
    let bad =
        || Error::BadVariable { name: "TILEWRIGHT_CACHE_MAX_SIZE", value: value.to_string(), expected: SIZE_VALUES };
    let word = value.trim().to_ascii_lowercase();
    if word == "unlimited" {
        return Ok(u64::MAX);
    }
    let units = [("k", 10), ("m", 20), ("g", 30), ("t", 40)];
    let with_unit = units.iter().find_map(|&(unit, bits)| Some((word.strip_suffix(unit)?, bits)));
    let (number, bits) = with_unit.unwrap_or((&word, 0));
    let bytes = number.trim_end().parse::<u64>().ok().and_then(|number| number.checked_mul(1 << bits));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(bad)
}

const TUNE_VALUES: &str = "a number of seconds, at most 86400";

fn parse_tune(value: &str) -> Result<Duration> {
    let bad = || Error::BadVariable { name: "TILEWRIGHT_TUNE", value: value.to_string(), expected: TUNE_VALUES };
    let seconds = value.trim().parse::<f64>().ok().filter(|seconds| (0.0..=86400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(bad)
}

fn parse_device(value: &str) -> Result<DeviceChoice> {
    let bad = || Error::BadVariable { name: "TILEWRIGHT_DEVICE", value: value.to_string(), expected: DEVICE_VALUES };
    match value.trim().to_ascii_lowercase().as_str() {
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda(0)),
        other => {
            let ordinal = other.strip_prefix("cuda:").and_then(|n| n.parse().ok());
            ordinal.map(DeviceChoice::Cuda).ok_or_else(bad)
        }
    }
}

fn parse_dump(value: &str) -> Result<Vec<DumpRequest>> {
    let bad = || Error::BadVariable { name: "TILEWRIGHT_DUMP", value: value.to_string(), expected: &DUMP_VALUES };
    let parse_one = |entry: &str| {
        let (stage, kernel) = match entry.trim().split_once(':') {
            Some((stage, kernel)) => (stage.trim(), Some(kernel.trim())),
            None => (entry.trim(), None),
        };
        let stage = current_name(stage);
        if !STAGES.iter().chain(PASS_NAMES).any(|known| *known == stage) || kernel.is_some_and(str::is_empty) {
            return Err(bad());
        }
        Ok(DumpRequest { stage: stage.to_string(), kernel: kernel.map(str::to_string) })
    };
    value.split(',').map(parse_one).collect()
}

/// The cache directory of the XDG Base Directory Specification, which requires relative values to be ignored.
fn user_cache_dir(path: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| path(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn parse(vars: &[(&str, &str)]) -> Result<Env> {
        Env::parse(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v)))
    }

    #[test]
    fn nothing_set_means_defaults() {
        assert_eq!(parse(&[]).unwrap(), Env::default());
        assert_eq!(parse(&[("TILEWRIGHT_DEVICE", ""), ("TILEWRIGHT_DUMP", "")]).unwrap(), Env::default());
    }

    #[test]
    fn devices() {
        let device = |value| parse(&[("TILEWRIGHT_DEVICE", value)]).map(|env| env.device.unwrap());
        assert_eq!(device("cpu").unwrap(), DeviceChoice::Cpu);
        assert_eq!(device("CUDA").unwrap(), DeviceChoice::Cuda(0));
        assert_eq!(device("cuda:3").unwrap(), DeviceChoice::Cuda(3));
        for bad in ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu0"] {
            let message = device(bad).unwrap_err().to_string();
            assert!(message.contains("TILEWRIGHT_DEVICE") && message.contains(bad), "{message}");
            assert!(message.contains("cuda:N"), "{message}");
        }
    }

    #[test]
    fn cache_directories() {
        let dir = |vars: &[(&str, &str)]| parse(vars).unwrap().cache_dir;
        assert_eq!(dir(&[("TILEWRIGHT_CACHE", "/c"), ("HOME", "/h")]), Some(PathBuf::from("/c")));
        assert_eq!(dir(&[("TILEWRIGHT_CACHE", "off"), ("HOME", "/h")]), None);
        assert_eq!(dir(&[("HOME", "/h")]), Some(PathBuf::from("/h/.cache/tilewright")));
        assert_eq!(dir(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Some(PathBuf::from("/x/tilewright")));
        assert_eq!(dir(&[("HOME", "/h"), ("XDG_CACHE_HOME", "rel")]), Some(PathBuf::from("/h/.cache/tilewright")));
    }

    #[test]
    fn sizes_of_the_cache() {
        let size = |value| parse(&[("TILEWRIGHT_CACHE_MAX_SIZE", value)]).map(|env| env.cache_max_bytes);
        assert_eq!(size("").unwrap(), None);
        assert_eq!(size("1000").unwrap(), Some(1000));
        assert_eq!(size("500M").unwrap(), Some(500 << 20));
        assert_eq!(size("2 g").unwrap(), Some(2 << 30));
        assert_eq!(size("Unlimited").unwrap(), Some(u64::MAX));
        for bad in ["0", "0G", "-1", "1.5G", "G", "99999999999T", "lots", "1B"] {
            let message = size(bad).unwrap_err().to_string();
            assert!(message.contains("TILEWRIGHT_CACHE_MAX_SIZE") && message.contains("2G"), "{bad}: {message}");
        }
    }

    #[test]
    fn tuning_takes_seconds() {
        let tune = |value| parse(&[("TILEWRIGHT_TUNE", value)]).map(|env| env.tune);
        assert_eq!(tune("1.5").unwrap(), Some(Duration::from_millis(1500)));
        assert_eq!(tune("").unwrap(), None);
        for bad in ["yes", "-1", "NaN", "1e9"] {
            assert!(tune(bad).unwrap_err().to_string().contains("number of seconds"), "{bad}");
        }
    }

    #[test]
    fn dumps() {
        let env = parse(&[("TILEWRIGHT_DUMP", "ptx, layout:matmul")]).unwrap();
        assert!(env.dumps("ptx", "anything") && env.dumps("layout", "matmul"));
        assert!(!env.dumps("layout", "softmax") && !env.dumps("tile", "matmul"));
        let former = parse(&[("TILEWRIGHT_DUMP", "laid,take_turns:matmul")]).unwrap();
        assert!(former.dumps("layout", "softmax") && former.dumps("pingpong", "matmul"));
        for bad in [":k", "ptx:", "ptx,,layout", "nonsense", "ptx,lade:matmul"] {
            assert!(parse(&[("TILEWRIGHT_DUMP", bad)]).unwrap_err().to_string().contains("STAGE:KERNEL"), "{bad}");
        }
    }

    /// Every variable in the table of the module page rejects an invalid value, and names what it expects; paths are
    /// accepted as they are.
    #[test]
    fn invalid_values_are_rejected() {
        let rejected = [
            ("TILEWRIGHT_DEVICE", "gpu", "cuda:N"),
            ("TILEWRIGHT_CACHE_MAX_SIZE", "lots", "2G"),
            ("TILEWRIGHT_DUMP", "nonsense", "assign_layouts"),
            ("TILEWRIGHT_TUNE", "soon", "a number of seconds"),
        ];
        let paths = ["TILEWRIGHT_CACHE", "TILEWRIGHT_REPRO", "TILEWRIGHT_PTXAS", "NVTX_INJECTION64_PATH"];
        let rows = include_str!("env.rs").lines().filter_map(|line| line.strip_prefix("//! | `")?.split('`').next());
        let listed: Vec<&str> = rejected.iter().map(|(name, ..)| *name).chain(paths).collect();
        let missing: Vec<&str> = rows.filter(|name| !listed.contains(name)).collect();
        assert!(missing.is_empty(), "variables without a test of invalid values: {missing:?}");
        for (name, value, expected) in rejected {
            let message = parse(&[(name, value)]).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains(value) && message.contains(expected), "{message}");
            let bytes = |asked: &str| (asked == name).then(|| OsString::from_vec(vec![0xff]));
            assert!(Env::parse(bytes).unwrap_err().to_string().contains(name), "{name} that is no text");
            assert_eq!(parse(&[(name, "")]).unwrap(), Env::default());
        }
    }
}
