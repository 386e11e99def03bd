//! Values that loops and branches can carry.

use super::dtype::Dtype;
use super::handle::{BlockPtr, Data, Ptr, PtrTile, Scalar, Tile};
use super::operand::{FloatLiteral, IntegerLiteral, Number, constant};
pub use crate::ir::Value;

/// A value that a loop or a branch can carry. Rust numbers are converted to run-time scalars.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be carried through a loop or a run-time branch",
    label = "not a tile, scalar, pointer, number, or a tuple, array or `#[aggregate]` struct of these",
    note = "values that change inside `for`, `while` and run-time `if` become run-time values"
)]
pub trait Carried: Copy {
    /// The type inside the loop or branch.
    type Handle: Carried<Handle = Self::Handle>;

    #[doc(hidden)]
    #[track_caller]
    fn into_handle(self) -> Self::Handle;

    /// Appends the IR values that the handle consists of.
    #[doc(hidden)]
    fn values(handle: &Self::Handle, out: &mut Vec<Value>);

    /// A handle of the same structure as `like`, made of other values of the same types.
    #[doc(hidden)]
    fn rebuild(like: &Self::Handle, values: &mut dyn Iterator<Item = Value>) -> Self::Handle;

    /// Appends a name for each IR value.
    #[doc(hidden)]
    fn names(handle: &Self::Handle, name: &str, out: &mut Vec<String>) {
        let mut values = Vec::new();
        Self::values(handle, &mut values);
        out.extend(values.iter().map(|_| name.to_string()));
    }

    /// Appends a name for each IR value of a loop's state, given the names of the carried variables.
    #[doc(hidden)]
    fn member_names(handle: &Self::Handle, names: &[&str], out: &mut Vec<String>) {
        Self::names(handle, names.first().copied().unwrap_or_default(), out);
    }

    /// Appends the constants that the handle has besides its IR values: names, and keys that differ for other values.
    #[doc(hidden)]
    fn constants(_handle: &Self::Handle, _name: &str, _out: &mut Vec<(String, u64)>) {}

    /// Appends the constants of a loop's state, given the names of the carried variables.
    #[doc(hidden)]
    fn member_constants(handle: &Self::Handle, names: &[&str], out: &mut Vec<(String, u64)>) {
        Self::constants(handle, names.first().copied().unwrap_or_default(), out);
    }
}

#[track_caller]
fn next(values: &mut dyn Iterator<Item = Value>) -> Value {
    match values.next() {
        Some(v) => v,
        None => panic!("internal compiler error: a carried value is missing; please report this"),
    }
}

macro_rules! data_carried {
    ($($handle:ident),*) => { $(
        impl<T: Dtype> Carried for $handle<T> {
            type Handle = Self;
            fn into_handle(self) -> Self {
                self
            }
            fn values(handle: &Self, out: &mut Vec<Value>) {
                out.push(handle.value());
            }
            fn rebuild(_like: &Self, values: &mut dyn Iterator<Item = Value>) -> Self {
                Self::from_value(next(values))
            }
        }
    )* };
}
data_carried!(Tile, Scalar);

macro_rules! memory_carried {
    ($($handle:ident),*) => { $(
        impl<T: Dtype> Carried for $handle<T> {
            type Handle = Self;
            fn into_handle(self) -> Self {
                self
            }
            fn values(handle: &Self, out: &mut Vec<Value>) {
                out.push(handle.v);
            }
            fn rebuild(like: &Self, values: &mut dyn Iterator<Item = Value>) -> Self {
                Self::new(next(values), like.writable)
            }
        }
    )* };
}
memory_carried!(Ptr, PtrTile, BlockPtr);

macro_rules! number_carried {
    ($($ty:ty => $elem:ty, $number:ident $(. $field:tt)? as $wide:ty;)*) => { $(
        impl Carried for $ty {
            type Handle = Scalar<$elem>;
            #[track_caller]
            fn into_handle(self) -> Scalar<$elem> {
                Scalar::from_value(constant(Number::$number(self $(.$field)? as $wide), <$elem>::dtype(), &[]))
            }
            fn values(handle: &Scalar<$elem>, out: &mut Vec<Value>) {
                out.push(handle.value());
            }
            fn rebuild(_like: &Scalar<$elem>, values: &mut dyn Iterator<Item = Value>) -> Scalar<$elem> {
                Scalar::from_value(next(values))
            }
        }
    )* };
}
number_carried! {
    bool => bool, Bool as bool;
    i8 => i8, Int as i128;
    i16 => i16, Int as i128;
    i32 => i32, Int as i128;
    i64 => i64, Int as i128;
    u8 => u8, Int as i128;
    u16 => u16, Int as i128;
    u32 => u32, Int as i128;
    u64 => u64, Int as i128;
    usize => i32, Int as i128;
    f32 => f32, Float as f64;
    f64 => f64, Float as f64;
    IntegerLiteral => i32, Int.0 as i128;
    FloatLiteral => f32, Float.0 as f64;
}

impl<X: Carried, const N: usize> Carried for [X; N] {
    type Handle = [X::Handle; N];
    #[track_caller]
    fn into_handle(self) -> Self::Handle {
        let mut handles = Vec::with_capacity(N);
        for x in self {
            handles.push(x.into_handle());
        }
        array(handles)
    }
    fn values(handle: &Self::Handle, out: &mut Vec<Value>) {
        for h in handle {
            X::values(h, out);
        }
    }
    fn rebuild(like: &Self::Handle, values: &mut dyn Iterator<Item = Value>) -> Self::Handle {
        array(like.iter().map(|h| X::rebuild(h, values)).collect())
    }
    fn constants(handle: &Self::Handle, name: &str, out: &mut Vec<(String, u64)>) {
        handle.iter().for_each(|h| X::constants(h, name, out));
    }
}

fn array<X, const N: usize>(items: Vec<X>) -> [X; N] {
    match items.try_into() {
        Ok(array) => array,
        Err(_) => panic!("internal compiler error: an array changed its length; please report this"),
    }
}

macro_rules! tuple_carried {
    ([$($X:ident $i:tt)*]) => {
        impl<$($X: Carried),*> Carried for ($($X,)*) {
            type Handle = ($($X::Handle,)*);
            #[track_caller]
            #[allow(clippy::unused_unit)]
            fn into_handle(self) -> Self::Handle {
                ($(self.$i.into_handle(),)*)
            }
            #[allow(unused_variables)]
            fn values(handle: &Self::Handle, out: &mut Vec<Value>) {
                $($X::values(&handle.$i, out);)*
            }
            #[allow(unused_variables, clippy::unused_unit)]
            fn rebuild(like: &Self::Handle, values: &mut dyn Iterator<Item = Value>) -> Self::Handle {
                ($($X::rebuild(&like.$i, values),)*)
            }
            #[allow(unused_variables)]
            fn member_names(handle: &Self::Handle, names: &[&str], out: &mut Vec<String>) {
                $($X::names(&handle.$i, names.get($i).copied().unwrap_or_default(), out);)*
            }
            #[allow(unused_variables)]
            fn constants(handle: &Self::Handle, name: &str, out: &mut Vec<(String, u64)>) {
                $($X::constants(&handle.$i, name, out);)*
            }
            #[allow(unused_variables)]
            fn member_constants(handle: &Self::Handle, names: &[&str], out: &mut Vec<(String, u64)>) {
                $($X::constants(&handle.$i, names.get($i).copied().unwrap_or_default(), out);)*
            }
        }
    };
    ([$($done:tt)*] $X:ident $i:tt $($rest:tt)*) => {
        tuple_carried!([$($done)*]);
        tuple_carried!([$($done)* $X $i] $($rest)*);
    };
}
tuple_carried!([] A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7 I 8 J 9 K 10 L 11 M 12 N 13 O 14 P 15 Q 16 R 17 S 18 T 19);
