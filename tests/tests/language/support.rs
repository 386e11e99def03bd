//! Records kernels and runs them in the interpreter and on every device.

use tilewright::codegen::interp::{self, ArgValue, BufferId, Memory};
use tilewright::codegen::ir::{DType, Func, Stage};
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef, Specialization};
use tilewright::codegen::{num, text, verify};
use tilewright_tests::erased::{self, Value};
use tilewright_tests::on_device::devices;

pub type Consts<'a> = Vec<(&'a str, ConstValue)>;

/// Integer constants by name.
pub fn consts<'a>(list: &[(&'a str, i64)]) -> Consts<'a> {
    list.iter().map(|&(name, n)| (name, ConstValue::Int(n))).collect()
}

/// Records and verifies a kernel; its text must parse and print as itself.
pub fn record(def: &KernelDef, dtypes: &[DType], consts: &Consts) -> Func {
    let func = def.record(dtypes, consts, &Specialization::default()).unwrap_or_else(|d| panic!("{d}"));
    if let Err(errors) = verify::verify(&func, Stage::Tile) {
        panic!("{}: {}\n{}", def.name, errors[0], text::print(&func));
    }
    let printed = text::print(&func);
    let again = text::parse(&printed).unwrap_or_else(|e| panic!("{e}\n{printed}"));
    assert_eq!(text::print(&again), printed);
    func
}

pub fn text(def: &KernelDef, dtypes: &[DType], consts: &Consts) -> String {
    text::print(&record(def, dtypes, consts))
}

/// An argument of a run.
pub enum Arg<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
    I64(&'a [i64]),
    /// Elements of any type.
    Bytes(&'a [u8]),
    /// A poisoned output with this number of f32.
    OutF32(usize),
    /// A zeroed output with this number of i32.
    OutI32(usize),
    /// A zeroed output with this number of bytes.
    OutBytes(usize),
    Int(i64),
    Float(f64),
}

impl Arg<'_> {
    /// What the memory holds before a run; `None` for a number.
    fn bytes(&self) -> Option<Vec<u8>> {
        match self {
            Arg::F32(x) => Some(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Arg::I32(x) => Some(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Arg::I64(x) => Some(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Arg::Bytes(x) => Some(x.to_vec()),
            Arg::OutF32(n) => Some(vec![0xff; 4 * n]),
            Arg::OutI32(n) => Some(vec![0; 4 * n]),
            Arg::OutBytes(n) => Some(vec![0; *n]),
            Arg::Int(_) | Arg::Float(_) => None,
        }
    }
}

/// The memory after a run, by argument.
pub struct Outputs {
    memory: Memory,
    buffers: Vec<Option<BufferId>>,
}

impl Outputs {
    pub fn f32(&self, arg: usize) -> Vec<f32> {
        self.words(arg).map(f32::from_le_bytes).collect()
    }

    pub fn i32(&self, arg: usize) -> Vec<i32> {
        self.words(arg).map(i32::from_le_bytes).collect()
    }

    pub fn bytes(&self, arg: usize) -> &[u8] {
        self.memory.bytes(self.buffers[arg].expect("a buffer"))
    }

    fn words(&self, arg: usize) -> impl Iterator<Item = [u8; 4]> {
        self.bytes(arg).chunks(4).map(|c| [c[0], c[1], c[2], c[3]])
    }
}

/// Runs a kernel without type parameters in the interpreter and on every device, which must agree.
pub fn run(def: &'static KernelDef, c: &Consts, args: &[Arg], grid: u32) -> Outputs {
    run_as(def, &[], c, args, grid)
}

/// Runs a kernel in the interpreter and on every device, which must agree.
pub fn run_as(def: &'static KernelDef, dtypes: &[DType], c: &Consts, args: &[Arg], grid: u32) -> Outputs {
    run_within(0.0, def, dtypes, c, args, grid)
}

/// Runs a kernel in the interpreter and on every device; floats may differ by `error`, relative to numbers above 1.
pub fn run_within(
    error: f64,
    def: &'static KernelDef,
    dtypes: &[DType],
    c: &Consts,
    args: &[Arg],
    grid: u32,
) -> Outputs {
    let expected = interpret(def, dtypes, c, args, grid);
    let value = |arg: &Arg| match (arg, arg.bytes()) {
        (_, Some(bytes)) => Value::Memory(bytes, 0),
        (Arg::Float(x), _) => Value::Float(*x),
        (Arg::Int(n), _) => Value::Int(*n),
        _ => unreachable!("memory has bytes"),
    };
    let values: Vec<Value> = args.iter().map(value).collect();
    for device in devices() {
        // SAFETY: the interpreter has checked the accesses.
        let memory = unsafe { erased::launch(&device, def, dtypes, c, [grid, 1, 1], &values) };
        for (arg, bytes) in memory.iter().enumerate() {
            let Some(bytes) = bytes else { continue };
            let what = format!("{}: argument {arg} on {device}", def.name);
            compare(&what, bytes, expected.bytes(arg), erased::dtype(def, dtypes, arg), error);
        }
    }
    expected
}

fn interpret(def: &KernelDef, dtypes: &[DType], c: &Consts, args: &[Arg], grid: u32) -> Outputs {
    let func = record(def, dtypes, c);
    let mut memory = Memory::new();
    let mut buffers = Vec::new();
    let mut values = Vec::new();
    for arg in args {
        let buffer = arg.bytes().map(|b| memory.add(b));
        buffers.push(buffer);
        values.push(match (arg, buffer) {
            (_, Some(id)) => ArgValue::Buffer(id),
            (Arg::Int(n), _) => ArgValue::Int(*n),
            (Arg::Float(x), _) => ArgValue::Float(*x),
            _ => unreachable!(),
        });
    }
    interp::run(&func, &values, [grid, 1, 1], &mut memory).unwrap_or_else(|e| panic!("{e}\n{}", text::print(&func)));
    Outputs { memory, buffers }
}

/// Compares elements: any NaN is NaN.
fn compare(what: &str, found: &[u8], expected: &[u8], dtype: DType, error: f64) {
    let words = |bytes: &[u8]| -> Vec<u64> {
        let word = |c: &[u8]| c.iter().rev().fold(0, |word, &b| word << 8 | u64::from(b));
        bytes.chunks(dtype.bytes()).map(word).collect()
    };
    for (i, (found, expected)) in words(found).into_iter().zip(words(expected)).enumerate() {
        if found == expected {
            continue;
        }
        assert!(dtype.is_float(), "{what}, element {i}: {found:#x}, but {expected:#x} in the interpreter");
        let [found, expected] = [found, expected].map(|word| num::decode(dtype, word));
        let same = found.is_nan() && expected.is_nan()
            || expected.is_finite() && (found - expected).abs() <= error * expected.abs().max(1.0);
        assert!(same, "{what}, element {i}: {found:e}, but {expected:e} in the interpreter");
    }
}
