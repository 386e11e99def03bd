//! Launches with types that are known at run time, of kernels whose accesses the interpreter has checked.

use half::{bf16, f16};
use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, ParamKind};
use tilewright_runtime::kernel::{KernelArg, Memory, MemoryMut, launch_erased};
use tilewright_runtime::{Dtype as ElementType, F8E4M3, F8E5M2, LaunchArg};

/// An argument.
pub enum Value {
    /// Memory with these contents, and the place of the byte that the kernel's pointer has.
    Memory(Vec<u8>, usize),
    Int(i64),
    Float(f64),
}

/// The parameters that are passed at a launch.
fn params(def: &KernelDef) -> impl Iterator<Item = ParamKind> {
    def.params.iter().map(|param| param.kind).filter(|kind| !matches!(kind, ParamKind::Constexpr { .. }))
}

/// The type of a number, or of the elements of memory.
pub fn dtype(def: &KernelDef, dtypes: &[DType], arg: usize) -> DType {
    match params(def).nth(arg) {
        Some(ParamKind::In(elem) | ParamKind::Out(elem) | ParamKind::InOut(elem) | ParamKind::Scalar(elem)) => {
            elem.resolve(dtypes).expect("a type for each type parameter")
        }
        _ => panic!("{} has no argument {arg}", def.name),
    }
}

/// Launches a kernel; returns the contents of the arguments that are memory.
///
/// # Safety
/// Every access of the launch is in bounds of the memory of its argument, as where the interpreter has run the same program
/// with the same arguments; and programs of the launch do not race.
pub unsafe fn launch(
    device: &Device,
    def: &'static KernelDef,
    dtypes: &[DType],
    consts: &[(&str, ConstValue)],
    grid: [u32; 3],
    args: &[Value],
) -> Vec<Option<Vec<u8>>> {
    let dtype = |arg: usize| dtype(def, dtypes, arg);
    let upload = |(i, arg): (usize, &Value)| match arg {
        Value::Memory(bytes, first) if *first <= bytes.len() => {
            Some(Typed { buffer: upload(device, dtype(i), bytes), first: *first })
        }
        Value::Memory(_, first) => panic!("{}: argument {i} starts at byte {first}, after its end", def.name),
        Value::Int(_) | Value::Float(_) => None,
    };
    let mut memory: Vec<Option<Typed>> = args.iter().enumerate().map(upload).collect();
    let mut launch_args = Vec::new();
    for (i, ((arg, memory), kind)) in args.iter().zip(&mut memory).zip(params(def)).enumerate() {
        launch_args.push(match (arg, memory, kind) {
            (_, Some(memory), ParamKind::In(_)) => KernelArg::In(memory),
            (_, Some(memory), _) => KernelArg::Out(memory),
            (Value::Float(x), ..) if dtype(i) == DType::F64 => KernelArg::Scalar(LaunchArg::F64(*x)),
            (Value::Float(x), ..) => KernelArg::Scalar(LaunchArg::F32(*x as f32)),
            (Value::Int(n), ..) => KernelArg::Scalar(integer(dtype(i), *n)),
            (Value::Memory(..), None, _) => unreachable!("memory was uploaded"),
        });
    }
    // SAFETY: the accesses are in bounds, says the caller.
    let config = unsafe { LaunchConfig::new(grid).unchecked() };
    launch_erased(def, device, &config, dtypes, &mut launch_args, consts)
        .unwrap_or_else(|e| panic!("{} on {device}: {e}", def.name));
    drop(launch_args);
    memory.into_iter().map(|memory| Some(memory?.buffer.contents())).collect()
}

fn integer(dtype: DType, n: i64) -> LaunchArg {
    match dtype.bytes() {
        1 => LaunchArg::I8(n as i8),
        2 => LaunchArg::I16(n as i16),
        4 => LaunchArg::I32(n as i32),
        _ => LaunchArg::I64(n),
    }
}

/// A buffer of any type.
trait Contents: MemoryMut {
    fn contents(&self) -> Vec<u8>;
}

impl<T: Element> Contents for Buffer<T> {
    fn contents(&self) -> Vec<u8> {
        T::as_bytes(&self.to_vec().expect("memory that can be read")).to_vec()
    }
}

/// A buffer from byte `first` on.
struct Typed {
    buffer: Box<dyn Contents>,
    first: usize,
}

impl Memory for Typed {
    fn launch_arg(&self) -> LaunchArg {
        match self.buffer.launch_arg() {
            LaunchArg::Ptr { addr, bytes } => {
                LaunchArg::Ptr { addr: addr + self.first as u64, bytes: bytes - self.first as u64 }
            }
            number => number,
        }
    }

    fn dtype(&self) -> ElementType {
        self.buffer.dtype()
    }

    fn memory_device(&self) -> &Device {
        self.buffer.memory_device()
    }
}

impl MemoryMut for Typed {}

fn upload(device: &Device, dtype: DType, bytes: &[u8]) -> Box<dyn Contents> {
    fn typed<T: Element>(device: &Device, bytes: &[u8]) -> Box<dyn Contents> {
        let values = T::from_bytes(bytes.len() / size_of::<T>(), |memory| {
            memory.copy_from_slice(bytes);
            Ok(())
        });
        Box::new(Buffer::from_slice(device, &values.expect("elements")).expect("memory"))
    }
    let typed = match dtype {
        DType::Bool => typed::<bool>,
        DType::I8 => typed::<i8>,
        DType::I16 => typed::<i16>,
        DType::I32 => typed::<i32>,
        DType::I64 => typed::<i64>,
        DType::U8 => typed::<u8>,
        DType::U16 => typed::<u16>,
        DType::U32 => typed::<u32>,
        DType::U64 => typed::<u64>,
        DType::F8E4M3 => typed::<F8E4M3>,
        DType::F8E5M2 => typed::<F8E5M2>,
        DType::F16 => typed::<f16>,
        DType::BF16 => typed::<bf16>,
        DType::F32 => typed::<f32>,
        DType::F64 => typed::<f64>,
    };
    typed(device, bytes)
}
