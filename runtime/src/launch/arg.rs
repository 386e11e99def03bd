//! Untyped arguments of a launch.

use tilewright_codegen::analysis::bounds::Launch;
use tilewright_codegen::target::ArgType;

use crate::buffer::{Buffer, View, ViewMut};
use crate::element::Element;

/// One argument of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LaunchArg {
    /// Address of device memory, and the number of bytes that the kernel may use from there.
    Ptr {
        addr: u64,
        bytes: u64,
    },
    I8(i8),
    I16(i16),
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
}

impl LaunchArg {
    /// Whether this fits a parameter of type `ty`.
    pub(super) fn is(&self, ty: ArgType) -> bool {
        match self {
            LaunchArg::Ptr { .. } => ty == ArgType::Ptr,
            LaunchArg::I8(_) => ty == ArgType::I8,
            LaunchArg::I16(_) => ty == ArgType::I16,
            LaunchArg::I32(_) => ty == ArgType::I32,
            LaunchArg::I64(_) => ty == ArgType::I64,
            LaunchArg::F32(_) => ty == ArgType::F32,
            LaunchArg::F64(_) => ty == ArgType::F64,
        }
    }

    /// The type, for messages.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            LaunchArg::Ptr { .. } => "a buffer",
            LaunchArg::I8(_) => "an i8",
            LaunchArg::I16(_) => "an i16",
            LaunchArg::I32(_) => "an i32",
            LaunchArg::I64(_) => "an i64",
            LaunchArg::F32(_) => "an f32",
            LaunchArg::F64(_) => "an f64",
        }
    }

    /// The value in the low bytes of a slot. Every supported target is little-endian.
    pub(super) fn bits(&self) -> u64 {
        match *self {
            LaunchArg::Ptr { addr, .. } => addr,
            LaunchArg::I8(v) => v as u8 as u64,
            LaunchArg::I16(v) => v as u16 as u64,
            LaunchArg::I32(v) => v as u32 as u64,
            LaunchArg::I64(v) => v as u64,
            LaunchArg::F32(v) => v.to_bits() as u64,
            LaunchArg::F64(v) => v.to_bits(),
        }
    }

    /// The value that assumptions refer to: an address or an integer; `None` for floats.
    pub(crate) fn integer(&self) -> Option<i128> {
        match *self {
            LaunchArg::Ptr { addr, .. } => Some(addr as i128),
            LaunchArg::I8(v) => Some(v as i128),
            LaunchArg::I16(v) => Some(v as i128),
            LaunchArg::I32(v) => Some(v as i128),
            LaunchArg::I64(v) => Some(v as i128),
            LaunchArg::F32(_) | LaunchArg::F64(_) => None,
        }
    }
}

/// The arguments of a launch, as the bounds analysis reads them.
pub(crate) struct Values<'a>(pub &'a [LaunchArg]);

impl Launch for Values<'_> {
    fn integer(&self, arg: usize) -> i128 {
        self.0[arg].integer().unwrap_or(0)
    }

    fn bytes(&self, arg: usize) -> u64 {
        match self.0[arg] {
            LaunchArg::Ptr { bytes, .. } => bytes,
            _ => 0,
        }
    }

    fn address(&self, arg: usize) -> u64 {
        match self.0[arg] {
            LaunchArg::Ptr { addr, .. } => addr,
            _ => 0,
        }
    }
}

/// The type that a manifest declares, for messages.
pub(super) fn declared_type_name(ty: ArgType) -> &'static str {
    match ty {
        ArgType::Ptr => "a buffer",
        ArgType::I8 => "an i8",
        ArgType::I16 => "an i16",
        ArgType::I32 => "an i32",
        ArgType::I64 => "an i64",
        ArgType::F32 => "an f32",
        ArgType::F64 => "an f64",
        ArgType::Clocks => "a record of clocks",
        ArgType::TensorMap => "a tensor map",
    }
}

macro_rules! from_scalar {
    ($($ty:ty => $variant:ident),* $(,)?) => {$(
        impl From<$ty> for LaunchArg {
            fn from(value: $ty) -> Self {
                LaunchArg::$variant(value)
            }
        }
    )*};
}

from_scalar! { i8 => I8, i16 => I16, i32 => I32, i64 => I64, f32 => F32, f64 => F64 }

/// Unsigned integers are passed as the signed integers with the same bits, bool as 0 or 1.
macro_rules! from_unsigned {
    ($($ty:ty => $variant:ident($signed:ty)),* $(,)?) => {$(
        impl From<$ty> for LaunchArg {
            fn from(value: $ty) -> Self {
                LaunchArg::$variant(value as $signed)
            }
        }
    )*};
}

from_unsigned! { bool => I8(i8), u8 => I8(i8), u16 => I16(i16), u32 => I32(i32), u64 => I64(i64) }

fn pointer<T>(addr: u64, len: usize) -> LaunchArg {
    LaunchArg::Ptr { addr, bytes: (len * size_of::<T>()) as u64 }
}

impl<T: Element> From<&Buffer<T>> for LaunchArg {
    fn from(buffer: &Buffer<T>) -> Self {
        pointer::<T>(buffer.address(), buffer.len())
    }
}

impl<T: Element> From<&mut Buffer<T>> for LaunchArg {
    fn from(buffer: &mut Buffer<T>) -> Self {
        pointer::<T>(buffer.address(), buffer.len())
    }
}

impl<T: Element> From<View<'_, T>> for LaunchArg {
    fn from(view: View<'_, T>) -> Self {
        pointer::<T>(view.address(), view.len())
    }
}

impl<T: Element> From<&mut ViewMut<'_, T>> for LaunchArg {
    fn from(view: &mut ViewMut<'_, T>) -> Self {
        pointer::<T>(view.address(), view.len())
    }
}
