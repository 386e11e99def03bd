//! Records kernels and runs them in the interpreter.

use tilewright::codegen::interp::{self, ArgValue, BufferId, Memory};
use tilewright::codegen::ir::{DType, Func, Stage};
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef, Specialization};
use tilewright::codegen::{text, verify};

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

/// Runs a kernel without type parameters in the interpreter.
pub fn run(def: &KernelDef, c: &Consts, args: &[Arg], grid: u32) -> Outputs {
    run_as(def, &[], c, args, grid)
}

/// Runs a kernel in the interpreter.
pub fn run_as(def: &KernelDef, dtypes: &[DType], c: &Consts, args: &[Arg], grid: u32) -> Outputs {
    let func = record(def, dtypes, c);
    let mut memory = Memory::new();
    let mut buffers = Vec::new();
    let mut values = Vec::new();
    for arg in args {
        let bytes: Option<Vec<u8>> = match arg {
            Arg::F32(x) => Some(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Arg::I32(x) => Some(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Arg::I64(x) => Some(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Arg::Bytes(x) => Some(x.to_vec()),
            Arg::OutF32(n) => Some(vec![0xff; 4 * n]),
            Arg::OutI32(n) => Some(vec![0; 4 * n]),
            Arg::OutBytes(n) => Some(vec![0; *n]),
            Arg::Int(_) | Arg::Float(_) => None,
        };
        let buffer = bytes.map(|b| memory.add(b));
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
