//! Random valid tile programs with inputs, for tests.
//!
//! [`program`] gives the same program for the same seed and options on every machine. Programs have no undefined
//! behavior: indices stay in bounds. Each program instance writes its own elements, or uses one commutative atomic per
//! buffer, so that the order of programs does not matter.
//!
//! With [`Options::exact`], a program uses only operations that IEEE 754 or the IR defines to the last bit, in any
//! order that the IR allows: every target must give the outputs of [`Program::interpret`], as [`difference`] compares
//! them.

mod asm;
pub mod check;
mod control;
mod effects;
mod facts;
mod generate;
mod loops;
mod matrix;
mod rng;
pub mod saved;
#[cfg(test)]
mod tests;

pub use facts::check_analyses;
pub use rng::Rng;

use crate::interp::{self, ArgValue, BufferId, InterpError, Memory};
use crate::ir::{DType, Elem, Func};
use crate::num;
use crate::passes::split_ctas;
use crate::target::{CompileOptions, GpuArch};

/// What programs may contain.
#[derive(Clone, Debug)]
pub struct Options {
    /// Approximate number of ops, without constants and the ops that keep indices in bounds.
    pub size: usize,
    /// Element types to choose from.
    pub dtypes: Vec<DType>,
    /// Exclude ops whose last bits may differ: elementary functions, float sums, dots of float matrices, divisions but those
    /// of f64, fused multiply-adds of narrow floats.
    pub exact: bool,
    /// Include loops and branches.
    pub control_flow: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { size: 24, dtypes: DType::ALL.to_vec(), exact: false, control_flow: true }
    }
}

/// An argument of a generated program.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A buffer that is only read.
    Input {
        dtype: DType,
        bytes: Vec<u8>,
    },
    /// A buffer that is compared afterwards, with its initial bytes.
    Output {
        dtype: DType,
        bytes: Vec<u8>,
    },
    Int(i64),
    Float(f64),
}

/// A program with everything that a run needs. Arguments are positional.
#[derive(Clone, Debug)]
pub struct Program {
    pub func: Func,
    pub args: Vec<Argument>,
    pub grid: [u32; 3],
}

/// The program of a seed.
pub fn program(seed: u64, options: &Options) -> Program {
    generate::program(Rng::new(seed), options)
}

/// A program with compile options.
#[derive(Clone, Debug)]
pub struct Case {
    pub program: Program,
    pub options: CompileOptions,
    /// If set, GPU targets get some ops as inline assembly, chosen by this seed.
    pub assembly: Option<u64>,
}

impl Case {
    /// The program's function for GPU targets, with the assumptions of a launch.
    pub fn gpu_func(&self) -> Func {
        self.gpu_func_of(&self.program.func)
    }

    /// As [`Case::gpu_func`], for another function with the same arguments.
    pub fn gpu_func_of(&self, func: &Func) -> Func {
        let mut func = facts::as_launched(&self.program, func);
        if let Some(seed) = self.assembly {
            asm::write(&mut func, &mut Rng::new(seed));
        }
        func
    }
}

/// The case of a seed. Even seeds give programs of small tiles with all ops; odd seeds give programs with loops of dots
/// for tensor cores. All are exact ([`Options::exact`]).
pub fn case(seed: u64) -> Case {
    let mut rng = Rng::new(seed ^ 0x7469_6c65);
    let assembly = rng.one_in(8).then_some(seed);
    let mut case = if seed % 2 == 1 {
        Case { assembly, ..matrix::case(rng) }
    } else {
        let size = rng.range(4, 48) as usize;
        let options = matrix::compile_options(&mut rng);
        Case { program: program(seed, &Options { exact: true, size, ..Options::default() }), options, assembly }
    };
    // The oldest version of PTX that drivers may ask for.
    if Rng::new(seed ^ 0x0070_7478).one_in(4) {
        case.options.ptx_version = 80;
    }
    // Programs that CTAs can share.
    let ctas = Rng::new(seed ^ 0x6374_6173).pick(&[1, 2, 4]);
    if split_ctas::run(&mut case.gpu_func(), ctas).is_ok() {
        case.options.num_ctas = ctas;
    }
    case
}

impl Case {
    /// The case without clusters.
    #[cfg(test)]
    fn of_one_cta(mut self) -> Case {
        self.options.num_ctas = 1;
        self
    }

    /// The options for an architecture: without clusters where it has none.
    pub fn options_for(&self, arch: GpuArch) -> CompileOptions {
        let num_ctas = if arch < GpuArch::Sm90a { 1 } else { self.options.num_ctas };
        CompileOptions { num_ctas, ..self.options.clone() }
    }
}

impl Program {
    /// Runs the program's function in the interpreter; returns the outputs in the order of arguments.
    pub fn interpret(&self) -> Result<Vec<Vec<u8>>, InterpError> {
        self.interpret_as(&self.func)
    }

    /// As [`Program::interpret`], for another function with the same arguments, such as the result of a pass.
    pub fn interpret_as(&self, func: &Func) -> Result<Vec<Vec<u8>>, InterpError> {
        let mut memory = Memory::new();
        let (values, buffers) = self.arguments(&mut memory);
        interp::run(func, &values, self.grid, &mut memory)?;
        let output = |(arg, id): (&Argument, &Option<BufferId>)| match arg {
            Argument::Output { .. } => id.map(|id| memory.bytes(id).to_vec()),
            Argument::Input { .. } | Argument::Int(_) | Argument::Float(_) => None,
        };
        Ok(self.args.iter().zip(&buffers).filter_map(output).collect())
    }

    /// The arguments for the interpreter, and their buffers.
    fn arguments(&self, memory: &mut Memory) -> (Vec<ArgValue>, Vec<Option<BufferId>>) {
        let argument = |arg: &Argument| match arg {
            Argument::Input { bytes, .. } | Argument::Output { bytes, .. } => {
                let id = memory.add(bytes.clone());
                (id.into(), Some(id))
            }
            Argument::Int(i) => (ArgValue::Int(*i), None),
            Argument::Float(x) => (ArgValue::Float(*x), None),
        };
        self.args.iter().map(argument).unzip()
    }

    /// Element types of the outputs, in the order of arguments.
    pub fn output_dtypes(&self) -> Vec<DType> {
        let output = |arg: &Argument| match arg {
            Argument::Output { dtype, bytes: _ } => Some(*dtype),
            Argument::Input { .. } | Argument::Int(_) | Argument::Float(_) => None,
        };
        self.args.iter().filter_map(output).collect()
    }
}

/// Describes the first difference between two lists of outputs. NaNs are equal to each other, and so are both zeros.
pub fn difference(dtypes: &[DType], expected: &[Vec<u8>], found: &[Vec<u8>]) -> Option<String> {
    if expected.len() != found.len() {
        return Some(format!("expected {} outputs, found {}", expected.len(), found.len()));
    }
    for (k, (&dtype, (a, b))) in dtypes.iter().zip(expected.iter().zip(found)).enumerate() {
        if a.len() != b.len() {
            return Some(format!("output {k} should have {} bytes, found {}", a.len(), b.len()));
        }
        for (i, (x, y)) in a.chunks(dtype.bytes()).zip(b.chunks(dtype.bytes())).enumerate() {
            let (x, y) = (storage(x), storage(y));
            if !same(dtype, x, y) {
                let [x, y] = [x, y].map(|bits| show(dtype, bits));
                return Some(format!("output {k}, element {i} ({dtype}): expected {x}, found {y}"));
            }
        }
    }
    None
}

/// The bits of an element in the encoding of [`crate::num`].
fn storage(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | b as u64)
}

fn same(dtype: DType, x: u64, y: u64) -> bool {
    if !dtype.is_float() {
        return x == y;
    }
    let (a, b) = (num::decode(dtype, x), num::decode(dtype, y));
    a == b || (a.is_nan() && b.is_nan())
}

fn show(dtype: DType, bits: u64) -> String {
    if dtype.is_float() {
        format!("{:?} ({bits:#x})", num::decode(dtype, bits))
    } else {
        num::decode_int(dtype, bits).to_string()
    }
}

/// Element type of a scalar or tile of numbers; generated values are nothing else.
fn dtype_of(elem: Option<Elem>) -> DType {
    elem.and_then(Elem::num).expect("internal error of the generator: a pool of numbers holds something else")
}
