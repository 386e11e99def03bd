//! Arguments of kernels: buffers and views by reference, numbers by value.

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ElemDef, KernelDef, ParamKind};

use super::ir_dtype;
use crate::buffer::{Buffer, View, ViewMut};
use crate::device::Device;
use crate::element::{Dtype, Element};
use crate::error::{Error, Result};
use crate::launch::LaunchArg;

/// Memory that a kernel can read, of any element type.
pub trait Memory {
    #[doc(hidden)]
    fn launch_arg(&self) -> LaunchArg;
    /// Type of the elements.
    fn dtype(&self) -> Dtype;
    /// The device that the memory belongs to.
    fn memory_device(&self) -> &Device;
}

/// Memory that a kernel can write, of any element type.
pub trait MemoryMut: Memory {}

/// Memory that holds `T` and that a kernel can read: a [`Buffer`], a [`View`], a [`ViewMut`].
pub trait Input<T: Element>: Memory {}

/// Memory that holds `T` and that a kernel can write: a [`Buffer`], a [`ViewMut`].
pub trait Output<T: Element>: Input<T> + MemoryMut {}

macro_rules! memories {
    ($($ty:ty),*) => {$(
        impl<T: Element> Memory for $ty {
            fn launch_arg(&self) -> LaunchArg {
                LaunchArg::Ptr { addr: self.address(), bytes: (self.len() * size_of::<T>()) as u64 }
            }
            fn dtype(&self) -> Dtype {
                T::DTYPE
            }
            fn memory_device(&self) -> &Device {
                self.device()
            }
        }
        impl<T: Element> Input<T> for $ty {}
    )*};
}
memories!(Buffer<T>, View<'_, T>, ViewMut<'_, T>);

impl<T: Element> MemoryMut for Buffer<T> {}
impl<T: Element> MemoryMut for ViewMut<'_, T> {}
impl<T: Element> Output<T> for Buffer<T> {}
impl<T: Element> Output<T> for ViewMut<'_, T> {}

/// One run-time argument of a kernel.
pub enum KernelArg<'a> {
    /// Memory for an `In<…>` parameter.
    In(&'a dyn Memory),
    /// Memory for an `Out<…>` or `InOut<…>` parameter.
    Out(&'a mut dyn MemoryMut),
    /// A number. Unsigned integers and bool are passed as signed integers of the same size.
    Scalar(LaunchArg),
    /// No memory, for a parameter `Option<…>`.
    Absent,
}

impl KernelArg<'_> {
    pub(crate) fn launch_arg(&self) -> LaunchArg {
        match self {
            KernelArg::In(memory) => memory.launch_arg(),
            KernelArg::Out(memory) => memory.launch_arg(),
            KernelArg::Scalar(value) => *value,
            KernelArg::Absent => LaunchArg::Ptr { addr: 0, bytes: 0 },
        }
    }
}

impl<'a> KernelArg<'a> {
    /// Memory that the kernel reads.
    pub fn input<T: Element>(memory: &'a dyn Input<T>) -> KernelArg<'a> {
        KernelArg::In(memory)
    }

    /// Memory that the kernel writes.
    pub fn output<'b: 'a, T: Element>(memory: &'a mut (dyn Output<T> + 'b)) -> KernelArg<'a> {
        KernelArg::Out(memory)
    }

    /// A number.
    pub fn scalar(value: impl ScalarArg) -> KernelArg<'a> {
        KernelArg::Scalar(value.launch_arg())
    }
}

/// Numbers that a launch can pass.
pub trait ScalarArg {
    #[doc(hidden)]
    fn launch_arg(self) -> LaunchArg;
}

macro_rules! scalar_args {
    ($($ty:ty => $variant:ident as $as:ty),* $(,)?) => {$(
        impl ScalarArg for $ty {
            fn launch_arg(self) -> LaunchArg {
                LaunchArg::$variant(self as $as)
            }
        }
    )*};
}
scalar_args! {
    bool => I8 as i8, i8 => I8 as i8, i16 => I16 as i16, i32 => I32 as i32, i64 => I64 as i64,
    u8 => I8 as i8, u16 => I16 as i16, u32 => I32 as i32, u64 => I64 as i64, f32 => F32 as f32, f64 => F64 as f64,
}

/// Checks the arguments against the kernel's parameters, and that all memory is on the device of the launch. The types
/// of typed arguments are correct by construction; the check is for arguments of a command line, and costs nanoseconds.
pub(super) fn check(def: &KernelDef, device: &Device, dtypes: &[DType], args: &[KernelArg]) -> Result<()> {
    let mut given = args.iter();
    for param in def.params {
        let (elem, memory, writes) = match param.kind {
            ParamKind::In(elem) => (elem, true, false),
            ParamKind::Out(elem) | ParamKind::InOut(elem) => (elem, true, true),
            ParamKind::Scalar(elem) => (elem, false, false),
            ParamKind::Constexpr { .. } => continue,
        };
        let Some(arg) = given.next() else { return Err(count_error(def, args.len())) };
        let fail = |found: String| Error::Argument {
            kernel: label(def),
            name: param.name,
            expected: expected(elem, dtypes, memory, writes),
            found,
        };
        let (found, on) = match arg {
            KernelArg::In(m) if memory && !writes => (m.dtype(), m.memory_device()),
            KernelArg::Out(m) if memory && writes => (m.dtype(), m.memory_device()),
            KernelArg::Scalar(_) if !memory => continue,
            // Code that accesses it is refused: the memory has no elements.
            KernelArg::Absent if memory => continue,
            KernelArg::In(m) => return Err(fail(format!("memory of {} to read", m.dtype()))),
            KernelArg::Out(m) => return Err(fail(format!("memory of {} to write", m.dtype()))),
            KernelArg::Scalar(_) => return Err(fail("a number".into())),
            KernelArg::Absent => return Err(fail("nothing".into())),
        };
        if elem.resolve(dtypes) != Some(ir_dtype(found)) {
            return Err(fail(format!("memory of {found}")));
        }
        if on != device {
            let expected = format!("memory on {device}");
            return Err(Error::Argument {
                kernel: label(def),
                name: param.name,
                expected,
                found: format!("memory on {on}"),
            });
        }
    }
    if given.next().is_some() {
        return Err(count_error(def, args.len()));
    }
    Ok(())
}

fn expected(elem: ElemDef, dtypes: &[DType], memory: bool, writes: bool) -> String {
    let elem = elem.resolve(dtypes).map_or("its type".to_string(), |d| d.to_string());
    match (memory, writes) {
        (true, true) => format!("memory of {elem} to write"),
        (true, false) => format!("memory of {elem} to read"),
        (false, _) => format!("a number of type {elem}"),
    }
}

fn count_error(def: &KernelDef, found: usize) -> Error {
    let constexpr = def.params.iter().filter(|p| matches!(p.kind, ParamKind::Constexpr { .. })).count();
    Error::ArgCount { kernel: label(def), expected: def.params.len() - constexpr, found }
}

/// Name and location, as in "`matmul` (src/lib.rs:12)".
pub(super) fn label(def: &KernelDef) -> String {
    format!("`{}` ({}:{})", def.name, def.file, def.line)
}
