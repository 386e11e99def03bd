//! Launches of the shipped kernels with random arguments, negative, huge and overflowing ones among them, on the CPU.
//! Each launch that passes the bounds checks must stay inside its buffers: each buffer lies next to a guard page, and
//! launches run in a child process, whose death by a signal is a failure.
//!
//! `TILEWRIGHT_TEST_LAUNCHES=100000 cargo test -p tilewright-tests --release --test launch_random` runs more launches;
//! `TILEWRIGHT_TEST_SEED=7` selects other ones.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use tilewright::Device;
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ConstValue, ElemDef, KernelDef, ParamDef, ParamKind};
use tilewright::kernel::{KernelArg, LaunchConfig, Memory, MemoryMut, launch_erased};
use tilewright::kernels::KERNELS;
use tilewright::{Dtype, Error, LaunchArg};
use tilewright_codegen::testgen::Rng;

/// Number of launches by default.
const LAUNCHES: u64 = 2480;
/// Smallest number of launches of each variant of a kernel: compiling one takes as long as thousands of launches.
const PER_VARIANT: u64 = 80;
/// Largest number of variants.
const VARIANTS: u64 = 310;
/// Time limit of a launch: a legal one may loop for hours over rows whose stride is 0.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Largest size of each argument's memory, in bytes.
const MAX_BYTES: usize = 1 << 16;
/// The environment variable with the range of launches of the child process.
const RANGE: &str = "TILEWRIGHT_TEST_LAUNCH_RANGE";
/// The content of memory before and after an argument, and its length.
const CANARY: [u8; 256] = [0xA7; 256];

/// Memory between two guard pages.
struct Region {
    start: usize,
}

impl Region {
    fn new() -> Region {
        let page = page();
        // SAFETY: a new anonymous mapping; `edge` is its first and its last page.
        let start = unsafe {
            let all = libc::mmap(
                std::ptr::null_mut(),
                MAX_BYTES + 2 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(all, libc::MAP_FAILED, "no memory");
            for edge in [all, all.byte_add(MAX_BYTES + page)] {
                assert_eq!(libc::mprotect(edge, page, libc::PROT_NONE), 0, "pages cannot be protected");
            }
            all.expose_provenance() + page
        };
        Region { start }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is never unmapped; no kernel runs during a call, and no two borrows overlap.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.start), MAX_BYTES) }
    }
}

fn page() -> usize {
    // SAFETY: `sysconf` accesses no memory of the caller.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// An argument's memory.
struct Guarded<'d> {
    device: &'d Device,
    dtype: Dtype,
    address: usize,
    bytes: usize,
}

impl Memory for Guarded<'_> {
    fn launch_arg(&self) -> LaunchArg {
        LaunchArg::Ptr { addr: self.address as u64, bytes: self.bytes as u64 }
    }
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn memory_device(&self) -> &Device {
        self.device
    }
}
impl MemoryMut for Guarded<'_> {}

fn runtime_dtype(d: DType) -> Dtype {
    match d {
        DType::Bool => Dtype::Bool,
        DType::I8 => Dtype::I8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::F8E4M3 => Dtype::F8E4M3,
        DType::F8E5M2 => Dtype::F8E5M2,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
    }
}

/// The specialization class of an argument: all launches of a variant have arguments of its class.
#[derive(Clone, Copy, PartialEq)]
enum ArgClass {
    One,
    Multiple,
    /// Of 2 to this power, below 4, and of no higher one; not 1.
    Other(u32),
}

/// The kernel, types, constants and argument classes of one compiled variant.
struct Variant {
    def: &'static KernelDef,
    dtypes: Vec<DType>,
    constants: Vec<(&'static str, ConstValue)>,
    /// One for each passed parameter: its class, and whether its memory ends at a guard page (else it begins at one).
    classes: Vec<(ArgClass, bool)>,
}

fn random_below(rng: &mut Rng, n: u64) -> u64 {
    rng.next_u64() % n
}

fn choose<T: Clone>(rng: &mut Rng, list: &[T]) -> T {
    list[random_below(rng, list.len() as u64) as usize].clone()
}

fn constant(rng: &mut Rng, param: &ParamDef, ty: &str, default: Option<ConstValue>) -> ConstValue {
    if let Some(default) = default.filter(|_| random_below(rng, 2) == 0) {
        return default;
    }
    match (ty, param.name) {
        ("bool", _) => ConstValue::Bool(random_below(rng, 2) == 0),
        (_, "d" | "d_v") => ConstValue::Int(choose(rng, &[16, 24, 32])),
        (_, "d_tile" | "d_v_tile") => ConstValue::Int(32),
        (_, "slots" | "world") => ConstValue::Int(choose(rng, &[2, 4])),
        (_, "rank") => ConstValue::Int(random_below(rng, 2) as i64),
        (_, "stages" | "size_per_thread" | "group") => ConstValue::Int(choose(rng, &[1, 2])),
        (_, "vector" | "split_rows") => ConstValue::Int(choose(rng, &[0, 4, 16])),
        (_, name) if name.ends_with("tile") => ConstValue::Int(choose(rng, &[16, 16, 32])),
        ("f32" | "f64", _) => ConstValue::Float(0.5),
        ("usize" | "i32" | "i64" | "u32" | "u64", _) => ConstValue::Int(choose(rng, &[1, 2, 4])),
        (words, _) => {
            let words: Vec<&str> = words.split([' ', '|']).filter(|word| !word.is_empty()).collect();
            ConstValue::Variant(choose(rng, &words).to_string())
        }
    }
}

/// A parameter that takes an argument of a launch.
struct PassedParam {
    param: &'static ParamDef,
    class: ArgClass,
    /// Whether its memory ends, instead of starting, at a guard page.
    at_end: bool,
}

impl Variant {
    fn new(seed: u64, number: u64) -> Variant {
        let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9).wrapping_add(number << 20));
        let rng = &mut rng;
        let def = KERNELS[(number % KERNELS.len() as u64) as usize];
        let dtypes = def.generics.iter().map(|generic| choose(rng, generic.members())).collect();
        let mut constants = Vec::new();
        let mut classes = Vec::new();
        for param in def.params {
            match param.kind {
                ParamKind::Constexpr { ty, default } => {
                    constants.push((param.name, constant(rng, param, ty, default.map(ConstValue::from))))
                }
                _ => {
                    let inner = param.name.contains("stride") && random_below(rng, 2) == 0;
                    let power = choose(rng, &[0, 0, 1, 2, 3]);
                    let any = choose(rng, &[ArgClass::Multiple, ArgClass::Other(power), ArgClass::Other(power)]);
                    classes.push((if inner { ArgClass::One } else { any }, random_below(rng, 4) > 0));
                }
            }
        }
        Variant { def, dtypes, constants, classes }
    }

    fn passed(&self) -> impl Iterator<Item = PassedParam> {
        let passed = self.def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
        passed.zip(&self.classes).map(|(param, &(class, at_end))| PassedParam { param, class, at_end })
    }

    fn dtype(&self, elem: ElemDef) -> DType {
        elem.resolve(&self.dtypes).expect("a type for each type parameter")
    }
}

/// A random integer of a width and class; with `edge`, one near the limits of common ranges.
fn integer(rng: &mut Rng, bits: u32, class: ArgClass, edge: bool) -> i64 {
    let (low, high) = (i64::MIN >> (64 - bits), i64::MAX >> (64 - bits));
    let n = match class {
        ArgClass::One => return 1,
        ArgClass::Multiple if edge => {
            choose(rng, &[-16, -64, low, low + 16, high - 15, 1 << 30, 1 << 31, 1 << 32, 1 << 33, 1 << 62])
        }
        ArgClass::Multiple => 16 * random_below(rng, 5) as i64,
        ArgClass::Other(_) if edge => choose(
            rng,
            &[
                -1,
                -1,
                -1,
                -2,
                -33,
                low + 1,
                low + 7,
                high,
                high - 1,
                high - 40,
                (1 << 15) + 1,
                (1 << 16) - 1,
                (1 << 31) - 1,
                (1 << 31) + 1,
                (1 << 32) - 1,
                (1 << 32) + 3,
                (1 << 62) + 1,
            ],
        ),
        ArgClass::Other(_) => choose(rng, &[2, 3, 4, 5, 7, 9, 15, 17, 30, 33, 40, 65, 100]),
    };
    // Truncates to the type, and keeps the class.
    let cut = (n << (64 - bits)) >> (64 - bits);
    match class {
        ArgClass::Other(power) => match cut & -(2 << power) | 1 << power {
            1 => 3,
            n => n,
        },
        _ => cut,
    }
}

/// The size in bytes of memory of a class: `bytes`, rounded down to whole elements of `size` bytes, then up to the
/// class.
fn length(bytes: usize, size: usize, class: ArgClass) -> usize {
    let elements = bytes / size;
    let multiple = class == ArgClass::Multiple;
    let per_line = (16 / size).max(1);
    let elements = match multiple {
        true => elements.next_multiple_of(per_line),
        // An odd number of elements is not a multiple of 16 bytes.
        false => elements | 1,
    };
    elements * size
}

/// Counts of launches by outcome.
#[derive(Default, Debug)]
struct Tally {
    ran: u64,
    refused: u64,
    failed_to_record: u64,
}

/// The value of an integer constant.
fn integer_constant(variant: &Variant, name: &str) -> Option<i64> {
    match variant.constants.iter().find(|(other, _)| *other == name)?.1 {
        ConstValue::Int(n) => Some(n),
        _ => None,
    }
}

/// The value of a parameter that a kernel assumes, if it is such a parameter; `given` are the arguments before it. In
/// attention, a result has an entry for each batch entry and split of the loop, and `group` query heads share keys.
fn assumed(variant: &Variant, name: &str, given: &[LaunchArg]) -> Option<i32> {
    let scalars = variant.passed().filter(|passed| matches!(passed.param.kind, ParamKind::Scalar(_)));
    let names: Vec<&str> = scalars.map(|passed| passed.param.name).collect();
    let value = |name: &str| match given.get(names.iter().position(|other| *other == name)?)? {
        LaunchArg::I32(n) => Some(i64::from(*n)),
        _ => None,
    };
    let value = match name {
        "entries" => {
            let split_rows = integer_constant(variant, "split_rows")?;
            let rows = value(if variant.def.name.ends_with("dkdv") { "n_q" } else { "n_k" })?;
            let splits = if split_rows > 0 { (rows + split_rows - 1).div_euclid(split_rows) } else { 1 };
            value("batch")?.checked_mul(splits)?
        }
        "heads_kv" => value("heads")?.checked_div(integer_constant(variant, "group")?)?,
        _ => return None,
    };
    i32::try_from(value).ok()
}

/// Launches a variant with random arguments; if only a buffer is too small, retries with the size that the error
/// reports.
fn launch(variant: &Variant, device: &Device, regions: &mut [Region], rng: &mut Rng, tally: &mut Tally, name: &str) {
    let edges = random_below(rng, 2) == 0;
    let mut scalars = Vec::new();
    let mut lengths = Vec::new();
    let mut output = String::new();
    for PassedParam { param, class, .. } in variant.passed() {
        match param.kind {
            ParamKind::Scalar(elem) => {
                let edge = edges && random_below(rng, 4) == 0;
                let derived = (random_below(rng, 8) > 0).then(|| assumed(variant, param.name, &scalars)).flatten();
                let value = match variant.dtype(elem) {
                    DType::F32 => LaunchArg::F32(0.5),
                    DType::F64 => LaunchArg::F64(0.5),
                    DType::Bool => LaunchArg::I8(random_below(rng, 2) as i8),
                    DType::I8 | DType::U8 => LaunchArg::I8(integer(rng, 8, class, edge) as i8),
                    DType::I16 | DType::U16 => LaunchArg::I16(integer(rng, 16, class, edge) as i16),
                    DType::I32 | DType::U32 => {
                        let drawn = derived.unwrap_or_else(|| integer(rng, 32, class, edge) as i32);
                        // Heads come in whole groups.
                        let group =
                            integer_constant(variant, "group").filter(|_| param.name == "heads").unwrap_or(1) as i32;
                        LaunchArg::I32(drawn - drawn % group)
                    }
                    _ => LaunchArg::I64(integer(rng, 64, class, edge)),
                };
                let _ = write!(output, " {}={value:?}", param.name);
                scalars.push(value);
                lengths.push(0);
            }
            _ => {
                lengths.push(choose(rng, &[0, 4, 64, 400, 3000]));
            }
        }
    }
    let grid: [u32; 3] = std::array::from_fn(|_| choose(rng, &[1, 1, 2, 3]));
    for attempt in 0..6 {
        let memories = place(variant, device, regions, &mut lengths);
        let sizes: Vec<usize> = memories.iter().map(|memory| memory.bytes).collect();
        println!("\nlaunch {name} attempt {attempt} {}{output} grid={grid:?} bytes={sizes:?}", variant.def.name);
        let _ = std::io::stdout().flush();
        let config = LaunchConfig::new(grid);
        let outcome = start(variant, device, &config, &memories, &scalars);
        check_canaries(&memories, regions, name);
        match outcome {
            Ok(()) => return tally.ran += 1,
            Err(Error::OutOfBounds { name, farthest_element, .. }) if attempt < 5 => {
                let index = variant.passed().position(|passed| passed.param.name == name).expect("a parameter");
                let size = element_size(variant, index);
                let wanted =
                    usize::try_from(farthest_element).ok().and_then(|last| last.checked_add(1)?.checked_mul(size));
                match wanted.filter(|&bytes| bytes <= MAX_BYTES / 2) {
                    Some(bytes) => lengths[index] = bytes,
                    None => return tally.refused += 1,
                }
            }
            Err(Error::Kernel(_)) => return tally.failed_to_record += 1,
            Err(_) => return tally.refused += 1,
        }
    }
    tally.refused += 1;
}

fn element_size(variant: &Variant, index: usize) -> usize {
    let PassedParam { param, .. } = variant.passed().nth(index).expect("a parameter");
    match param.kind {
        ParamKind::In(elem) | ParamKind::Out(elem) | ParamKind::InOut(elem) => variant.dtype(elem).bytes(),
        _ => 1,
    }
}

/// Lays out the memory of a launch, filled with small numbers, with canaries around each argument.
fn place<'d>(variant: &Variant, device: &'d Device, regions: &mut [Region], lengths: &mut [usize]) -> Vec<Guarded<'d>> {
    let mut memories = Vec::new();
    for (i, PassedParam { param, class, at_end }) in variant.passed().enumerate() {
        let (ParamKind::In(elem) | ParamKind::Out(elem) | ParamKind::InOut(elem)) = param.kind else { continue };
        let dtype = variant.dtype(elem);
        lengths[i] = length(lengths[i], dtype.bytes(), class);
        let region = &mut regions[memories.len()];
        // The start of a page is aligned; unaligned memory begins one element later.
        let unaligned_start = if class == ArgClass::Multiple { 0 } else { dtype.bytes() };
        let offset = if at_end { MAX_BYTES - lengths[i] } else { unaligned_start };
        let bytes = region.bytes();
        for around in canary_ranges(offset, lengths[i]) {
            bytes[around.clone()].copy_from_slice(&CANARY[..around.len()]);
        }
        for (k, byte) in bytes[offset..offset + lengths[i]].iter_mut().enumerate() {
            *byte = if k % dtype.bytes() == 0 { (k / dtype.bytes() % 7) as u8 } else { 0 };
        }
        let address = region.start + offset;
        memories.push(Guarded { device, dtype: runtime_dtype(dtype), address, bytes: lengths[i] });
    }
    memories
}

fn start(
    variant: &Variant,
    device: &Device,
    config: &LaunchConfig,
    memories: &[Guarded],
    scalars: &[LaunchArg],
) -> Result<(), Error> {
    let mut outputs: Vec<Guarded> = memories.iter().map(|m| Guarded { device: m.device, ..*m }).collect();
    let (mut scalars, mut memories) = (scalars.iter(), memories.iter().zip(&mut outputs));
    let mut args = Vec::new();
    for PassedParam { param, .. } in variant.passed() {
        args.push(match param.kind {
            ParamKind::Scalar(_) => KernelArg::Scalar(*scalars.next().expect("a number")),
            ParamKind::In(_) => KernelArg::In(memories.next().expect("memory").0),
            _ => KernelArg::Out(memories.next().expect("memory").1),
        });
    }
    launch_erased(variant.def, device, config, &variant.dtypes, &mut args, &variant.constants)
}

/// The ranges of the canaries around memory of `bytes` bytes at an offset.
fn canary_ranges(offset: usize, bytes: usize) -> [std::ops::Range<usize>; 2] {
    let end = offset + bytes;
    [offset.saturating_sub(CANARY.len())..offset, end..MAX_BYTES.min(end + CANARY.len())]
}

fn check_canaries(memories: &[Guarded], regions: &mut [Region], name: &str) {
    for (memory, region) in memories.iter().zip(regions) {
        for around in canary_ranges(memory.address - region.start, memory.bytes) {
            assert_eq!(region.bytes()[around.clone()], CANARY[..around.len()], "launch {name} wrote out of bounds");
        }
    }
}

/// Runs the launches that the environment variable names, and prints each before it starts.
#[test]
fn launches_in_a_child_process() {
    let Ok(range) = std::env::var(RANGE) else { return };
    let numbers: Vec<u64> = range.split(' ').map(|n| n.parse().expect("a number")).collect();
    let [seed, each, first, last] = numbers[..] else {
        panic!("a seed, launches of a variant, the first and the last")
    };
    let device = Device::cpu();
    let mut regions: Vec<Region> = (0..24).map(|_| Region::new()).collect();
    let mut tally = Tally::default();
    let mut variant = Variant::new(seed, first / each);
    for number in first..last {
        if number % each == 0 {
            variant = Variant::new(seed, number / each);
        }
        let mut rng = Rng::new(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        launch(&variant, &device, &mut regions, &mut rng, &mut tally, &number.to_string());
        println!("\ndone {number} {} {} {}", tally.ran, tally.refused, tally.failed_to_record);
    }
}

fn number_of(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs a child process; returns its last lines, and its exit status, or `None` if it printed nothing for [`TIMEOUT`].
fn watch(range: &str, cache: &std::path::Path) -> (Vec<String>, Option<std::process::ExitStatus>) {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["launches_in_a_child_process", "--exact", "--nocapture", "--test-threads=1"])
        .env(RANGE, range)
        .env("TILEWRIGHT_CACHE", cache)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a process");
    let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let (sender, receiver) = channel();
    let reader = std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    // The last lines suffice to identify the launch.
    let mut output: Vec<String> = Vec::new();
    let status = loop {
        match receiver.recv_timeout(TIMEOUT) {
            Ok(line) if line.is_empty() => {}
            Ok(line) => {
                if output.len() == 64 {
                    output.remove(0);
                }
                output.push(line);
            }
            Err(RecvTimeoutError::Disconnected) => break Some(child.wait().expect("the end of a process")),
            Err(RecvTimeoutError::Timeout) => {
                child.kill().expect("a process to end");
                child.wait().expect("the end of a process");
                break None;
            }
        }
    };
    reader.join().expect("a reader");
    (output, status)
}

/// What became of launches.
#[derive(Default)]
struct Outcomes {
    tally: Tally,
    timed_out: Vec<String>,
    failures: Vec<String>,
}

/// Runs the launches `first..end` in child processes, one after the other: one that is stopped or dies is followed by another.
fn run(seed: u64, each: u64, first: u64, end: u64, cache: &std::path::Path) -> Outcomes {
    let mut all = Outcomes::default();
    let mut next = first;
    while next < end {
        let (output, status) = watch(&format!("{seed} {each} {next} {end}"), cache);
        let done = output.iter().rev().find_map(|line| {
            let numbers: Vec<u64> = line.strip_prefix("done ")?.split(' ').filter_map(|n| n.parse().ok()).collect();
            <[u64; 4]>::try_from(numbers).ok()
        });
        let mut after = next;
        if let Some([number, ran, refused, failed_to_record]) = done {
            after = number + 1;
            all.tally.ran += ran;
            all.tally.refused += refused;
            all.tally.failed_to_record += failed_to_record;
        }
        let last = output.iter().rev().find(|line| line.starts_with("launch ")).cloned().unwrap_or_default();
        match status {
            Some(status) if status.success() => {
                assert_eq!(after, end, "the process ended early: {output:?}");
            }
            Some(status) => all.failures.push(format!("{status} (signal {:?}): seed {seed}, {last}", status.signal())),
            None => all.timed_out.push(last),
        }
        next = if after < end { after + 1 } else { end };
    }
    all
}

#[test]
fn launches_stay_in_bounds() {
    if std::env::var(RANGE).is_ok() {
        return;
    }
    let (launches, seed) = (number_of("TILEWRIGHT_TEST_LAUNCHES", LAUNCHES), number_of("TILEWRIGHT_TEST_SEED", 1));
    let each = PER_VARIANT.max(launches / VARIANTS);
    let cache = tempfile::tempdir().expect("a folder");
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    // Whole variants, so that none is compiled twice.
    let share = launches.div_ceil(each).div_ceil(cores) * each;
    let mut all = Outcomes::default();
    std::thread::scope(|scope| {
        let shares = (0..launches).step_by(share.max(1) as usize).map(|first| {
            let (end, cache) = ((first + share).min(launches), cache.path());
            scope.spawn(move || run(seed, each, first, end, cache))
        });
        for part in shares.collect::<Vec<_>>() {
            let Outcomes { tally, timed_out, failures } = part.join().expect("the launches of a share");
            all.tally.ran += tally.ran;
            all.tally.refused += tally.refused;
            all.tally.failed_to_record += tally.failed_to_record;
            all.timed_out.extend(timed_out);
            all.failures.extend(failures);
        }
    });
    let Outcomes { tally, timed_out, failures } = all;
    println!("{launches} launches with seed {seed}: {tally:?}, {} stopped, {} failed", timed_out.len(), failures.len());
    timed_out.iter().for_each(|line| println!("stopped after {TIMEOUT:?}: {line}"));
    assert!(failures.is_empty(), "{} of {launches} launches failed\n{}", failures.len(), failures.join("\n"));
    assert!(tally.ran > launches / 10, "only {tally:?} of {launches} passed the checks");
    assert!(
        timed_out.len() as u64 <= 1 + launches / 500,
        "{} launches did not end\n{}",
        timed_out.len(),
        timed_out.join("\n")
    );
}
