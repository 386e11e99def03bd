//! The options of `--interpret`, and the results of a run.

use clap::Args;
use tilewright_codegen::interp::{self, ArgValue, BufferId, Memory, RunOptions};
use tilewright_codegen::ir::{DType, Elem, Func, Type};
use tilewright_codegen::num;

/// Number of elements printed per buffer.
const SHOWN: usize = 8;

#[derive(Args)]
pub struct InterpretArgs {
    /// Run the function in the interpreter after the passes, and check that the results are the same as before them.
    #[arg(long)]
    pub interpret: bool,

    /// An argument of the kernel: `n=20`, `x=-1.5` or `flag=true` for scalars; for pointers `x=random:1024`,
    /// `x=range:1024` (0, 1, 2, …) or `x=zeros:1024`, a buffer with this number of elements.
    #[arg(long = "arg", value_name = "NAME=VALUE", requires = "interpret")]
    args: Vec<String>,

    /// Extents of the grid, one to three.
    #[arg(long, value_delimiter = ',', default_value = "1,1,1", value_name = "X,Y,Z")]
    grid: Vec<u32>,

    /// Seed of random buffers.
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Stop after this number of ops: the interpreter runs a few million per second.
    #[arg(long, default_value_t = 1 << 28)]
    max_ops: u64,
}

/// A buffer after a run.
struct Buffer {
    name: String,
    dtype: DType,
    bytes: Vec<u8>,
}

/// Printed lines and buffers of a run.
pub struct Results {
    buffers: Vec<Buffer>,
    prints: Vec<String>,
}

impl InterpretArgs {
    pub fn run(&self, func: &Func) -> Result<Results, String> {
        let mut memory = Memory::new();
        let mut values = Vec::new();
        let mut buffers = Vec::new();
        for name in self.args.iter().filter_map(|a| a.split('=').next()) {
            if func.args.iter().all(|arg| arg.name != name) {
                return Err(format!("--arg {name}: the kernel has no argument of that name"));
            }
        }
        let names = || self.args.iter().filter_map(|a| a.split('=').next());
        if let Some(name) = names().find(|name| names().filter(|other| other == name).count() > 1) {
            return Err(format!("--arg {name} is given more than once"));
        }
        for (i, arg) in func.args.iter().enumerate() {
            let ty = func.ty(func.block(func.body).params[i]);
            let given = self.args.iter().find_map(|a| a.strip_prefix(arg.name.as_str())?.strip_prefix('='));
            let value = match (given, arg.equal_to, ty.elem()) {
                (None, Some(n), _) => ArgValue::Int(n),
                (None, None, Some(Elem::Ptr(_))) => return Err(missing(&arg.name, "random:1024")),
                (None, None, _) => return Err(missing(&arg.name, "1")),
                (Some(text), _, Some(Elem::Ptr(dtype))) => {
                    let seed = self.seed.wrapping_add(i as u64);
                    let bytes = buffer(text, dtype, seed).map_err(|e| format!("--arg {}={text}: {e}", arg.name))?;
                    let id = memory.add(bytes);
                    buffers.push((arg.name.clone(), dtype, id));
                    id.into()
                }
                (Some(text), _, _) => scalar(text, ty).map_err(|e| format!("--arg {}={text}: {e}", arg.name))?,
            };
            values.push(value);
        }
        let (x, y, z) = match self.grid[..] {
            [x] => (x, 1, 1),
            [x, y] => (x, y, 1),
            [x, y, z] => (x, y, z),
            _ => return Err(format!("--grid takes one to three numbers, found {}", self.grid.len())),
        };
        // The interpreter would take hours.
        let programs = [x, y, z].iter().try_fold(1u32, |n, &extent| n.checked_mul(extent));
        if programs == Some(0) {
            return Err(format!("--grid {x},{y},{z} has no program to run; extents begin at 1"));
        }
        if programs.is_none_or(|n| n > 1 << 24) {
            return Err(format!("--grid {x},{y},{z} has more than {} programs", 1 << 24));
        }
        let options = RunOptions { max_ops: self.max_ops, ..RunOptions::default() };
        let outcome = interp::run_traced(func, &values, [x, y, z], &mut memory, options, &mut ());
        let outcome = outcome.map_err(|e| match e.message.starts_with(interp::STOPPED) {
            true => format!("{e}\n  help: does the kernel end? --max-ops allows more"),
            false => e.to_string(),
        })?;
        let read =
            |(name, dtype, id): (String, DType, BufferId)| Buffer { name, dtype, bytes: memory.bytes(id).to_vec() };
        Ok(Results { buffers: buffers.into_iter().map(read).collect(), prints: outcome.prints })
    }
}

fn missing(name: &str, example: &str) -> String {
    format!("the kernel's argument `{name}` needs a value, for example --arg {name}={example}")
}

fn scalar(text: &str, ty: &Type) -> Result<ArgValue, String> {
    let wanted = || format!("expected a value of type {ty}");
    match ty.dtype() {
        Some(DType::Bool) => text.parse().map(ArgValue::Bool).map_err(|_| wanted()),
        Some(d) if d.is_float() => text.parse().map(ArgValue::Float).map_err(|_| wanted()),
        _ => text.parse().map(ArgValue::Int).map_err(|_| wanted()),
    }
}

/// The bytes of a buffer from `kind:count`.
fn buffer(text: &str, dtype: DType, seed: u64) -> Result<Vec<u8>, String> {
    let wanted = "expected random:N, range:N or zeros:N with the number of elements N";
    let (kind, count) = text.split_once(':').ok_or(wanted)?;
    /// More take longer than anyone waits.
    const MOST: usize = 1 << 28;
    let count: usize = count.parse().map_err(|_| wanted)?;
    if count > MOST {
        return Err(format!("{count} elements: at most {MOST} are supported"));
    }
    let mut state = seed;
    let mut element = |i: usize| -> Result<u64, String> {
        let number = match kind {
            "zeros" => 0.0,
            "range" => i as f64,
            "random" => {
                // A Weyl sequence through a multiplicative hash: uniform over [-1, 1), and the same on every machine.
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                let unit = (mixed >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
                if dtype.is_float() { unit } else { (unit * 100.0).trunc() }
            }
            _ => return Err(wanted.into()),
        };
        Ok(if dtype.is_float() { num::encode(dtype, number) } else { num::encode_int(dtype, number as i128) })
    };
    let mut bytes = Vec::with_capacity(count * dtype.bytes());
    for i in 0..count {
        bytes.extend_from_slice(&element(i)?.to_le_bytes()[..dtype.bytes()]);
    }
    Ok(bytes)
}

impl Buffer {
    fn value(&self, i: usize) -> String {
        let size = self.dtype.bytes();
        let bits = self.bytes[i * size..(i + 1) * size].iter().rev().fold(0, |n, &b| n << 8 | b as u64);
        if self.dtype.is_float() {
            format!("{}", num::decode(self.dtype, bits))
        } else {
            format!("{}", num::decode_int(self.dtype, bits))
        }
    }

    /// FNV-1a hash of the bytes, for comparing two runs by eye.
    fn hash(&self) -> u64 {
        self.bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3))
    }
}

/// The lines of `device_print`, and the hash and first elements of each buffer.
impl std::fmt::Display for Results {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.prints.iter().try_for_each(|line| writeln!(f, "// print: {line}"))?;
        for buffer in &self.buffers {
            let count = buffer.bytes.len() / buffer.dtype.bytes();
            let first: Vec<String> = (0..count.min(SHOWN)).map(|i| buffer.value(i)).collect();
            let more = if count > SHOWN { ", …" } else { "" };
            let (name, dtype, hash) = (&buffer.name, buffer.dtype, buffer.hash());
            writeln!(f, "// {name}: {count} {dtype}, hash {hash:016x}, [{}{more}]", first.join(", "))?;
        }
        Ok(())
    }
}

impl Results {
    /// Compares two runs. NaNs are equal to each other.
    ///
    /// # Errors
    /// The first element that differs.
    pub fn same_as(&self, other: &Results) -> Result<(), String> {
        for (a, b) in self.buffers.iter().zip(&other.buffers) {
            for i in 0..a.bytes.len() / a.dtype.bytes() {
                let (found, expected) = (a.value(i), b.value(i));
                if found != expected {
                    return Err(format!("{}[{i}] was {expected} and is {found}", a.name));
                }
            }
        }
        Ok(())
    }
}
