//! Kernel definitions for the host: parameters, and recording for given types and constants.

use super::dtype::Dtype;
use super::handle::{Data, Ptr, Scalar};
use super::operand::{Number, constant};
use super::record::{Recording, add_arg, fail, record_generic};
use crate::diag::Diagnostic;
pub use crate::ir::DType;
use crate::ir::{Arg, Elem, Func, Loc, Precision, Stage, Type};
use crate::verify::{Rule, verify};
use std::any::Any;
use std::fmt;

/// A kernel as parsed by `#[kernel]`. One static per kernel.
#[derive(Debug)]
pub struct KernelDef {
    /// The function's name.
    pub name: &'static str,
    /// Former names of the kernel, which `#[alias(…)]` gives.
    pub aliases: &'static [&'static str],
    /// Former and present names of parameters.
    pub param_aliases: &'static [(&'static str, &'static str)],
    /// The function's doc comment.
    pub doc: &'static str,
    pub file: &'static str,
    pub line: u32,
    /// Type parameters, in order.
    pub generics: &'static [GenericDef],
    /// All parameters: those in the signature, then the strides of its tensors, then the extents that are not in the
    /// signature, then for each memory that may be left out (`x: Option<…>`) the constant `x_given`.
    pub params: &'static [ParamDef],
    /// The tensors in the signature.
    pub tensors: &'static [TensorDef],
    /// The extents that the tensors give, in the order of their first use: names of scalars and constants.
    pub dims: &'static [&'static str],
    /// The grid, if the kernel gives it, from the values of parameters.
    pub grid: Option<Evaluate<[i64; 3]>>,
    /// Declares the arguments and runs the body. Called only by [`KernelDef::record`].
    #[doc(hidden)]
    pub body: fn(&Inputs<'_>),
}

/// A type parameter.
#[derive(Clone, Copy, Debug)]
pub struct GenericDef {
    pub name: &'static str,
    /// Name of its bound: `Float`, `Int`, `Num`, `Bits` or `Dtype`.
    pub bound: &'static str,
}

impl GenericDef {
    /// The element types that satisfy the bound.
    pub fn members(&self) -> &'static [DType] {
        super::dtype::class_members(self.bound).unwrap_or(&[])
    }
}

/// A parameter.
#[derive(Clone, Copy, Debug)]
pub struct ParamDef {
    pub name: &'static str,
    pub kind: ParamKind,
    /// Whether variants are compiled for the powers of two, up to 16, that divide arguments, and for integers that
    /// are 1. `#[no_specialize]` disables this.
    pub specialize: bool,
    /// For a constant that follows from others and from arguments (`#[heuristic(…)]`): its value.
    pub heuristic: Option<Evaluate<ConstValue>>,
}

/// Values of parameters by name.
pub type Lookup<'a> = dyn Fn(&'static str) -> Option<ConstValue> + 'a;

/// A function of values of parameters. If it needs one that is not known, its name is the error.
pub type Evaluate<R> = fn(&Lookup<'_>) -> Result<R, &'static str>;

/// The value of a number or constant; used by code that `#[kernel]` generates.
///
/// # Errors
/// The name, if the value is not known or has another type.
#[doc(hidden)]
pub fn lookup<T: Constexpr>(values: &Lookup<'_>, name: &'static str) -> Result<T, &'static str> {
    values(name).as_ref().and_then(T::from_const).ok_or(name)
}

/// A tensor in a kernel's signature: `x: Tensor<T, (rows, d)>`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorDef {
    /// The name of its memory parameter.
    pub name: &'static str,
    /// For each dimension: the index of its extent in [`KernelDef::dims`].
    pub dims: &'static [usize],
    /// For each dimension: the name of the parameter with its stride.
    pub strides: &'static [&'static str],
}

/// Kind of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamKind {
    /// Memory that is read.
    In(ElemDef),
    /// Memory that is written.
    Out(ElemDef),
    /// Memory that is read and written.
    InOut(ElemDef),
    /// A number passed at launch.
    Scalar(ElemDef),
    /// A compile-time constant. `ty` is its Rust type; `default` is used if the caller gives none.
    Constexpr { ty: &'static str, default: Option<ConstDefault> },
}

/// An element type in a signature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ElemDef {
    Fixed(DType),
    /// The type parameter of that index.
    Generic(usize),
}

impl ElemDef {
    /// The element type, given those of the type parameters.
    pub fn resolve(self, generics: &[DType]) -> Option<DType> {
        match self {
            ElemDef::Fixed(d) => Some(d),
            ElemDef::Generic(n) => generics.get(n).copied(),
        }
    }
}

/// The default of a constexpr parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ConstDefault {
    Int(i64),
    Float(f64),
    Bool(bool),
    Variant(&'static str),
}

impl From<ConstDefault> for ConstValue {
    fn from(d: ConstDefault) -> ConstValue {
        match d {
            ConstDefault::Int(n) => ConstValue::Int(n),
            ConstDefault::Float(x) => ConstValue::Float(x),
            ConstDefault::Bool(b) => ConstValue::Bool(b),
            ConstDefault::Variant(w) => ConstValue::Variant(w.to_string()),
        }
    }
}

/// Value of a constexpr parameter, without its Rust type.
#[derive(Clone, Debug, PartialEq)]
pub enum ConstValue {
    Int(i64),
    Float(f64),
    Bool(bool),
    /// A variant of an enum, by name.
    Variant(String),
    /// An item of the program, such as a struct of functions that the kernel calls while it is traced.
    Item(ConstItem),
}

/// A static item with its name, which stands for it in messages and manifests.
#[derive(Clone, Copy)]
pub struct ConstItem {
    pub name: &'static str,
    pub item: &'static (dyn Any + Send + Sync),
}

impl ConstItem {
    /// The item, if it is of type `T`.
    pub fn downcast<T: Any>(&self) -> Option<&'static T> {
        self.item.downcast_ref()
    }
}

/// The same item.
impl PartialEq for ConstItem {
    fn eq(&self, other: &ConstItem) -> bool {
        std::ptr::addr_eq(self.item, other.item)
    }
}

impl fmt::Debug for ConstItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl ConstValue {
    /// Parses `64`, `0.5`, `true` or an identifier, as given on a command line.
    pub fn from_text(text: &str) -> ConstValue {
        if let Ok(n) = text.parse() {
            ConstValue::Int(n)
        } else if let Ok(b) = text.parse() {
            ConstValue::Bool(b)
        } else if let Ok(x) = text.parse() {
            ConstValue::Float(x)
        } else {
            ConstValue::Variant(text.to_string())
        }
    }
}

impl fmt::Display for ConstValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConstValue::Int(n) => write!(f, "{n}"),
            ConstValue::Float(x) => write!(f, "{x:?}"),
            ConstValue::Bool(b) => write!(f, "{b}"),
            ConstValue::Variant(w) => f.write_str(w),
            ConstValue::Item(item) => f.write_str(item.name),
        }
    }
}

/// A type that `#[constexpr]` parameters can have.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the type of a `#[constexpr]` parameter",
    note = "use usize, i32, i64, u32, u64, bool, f32, f64, &'static str, Precision, an enum declared in `constexpr_enum! {{ … }}`, or a reference to a \
            static whose type is a `ConstexprItem`"
)]
pub trait Constexpr: Copy + 'static {
    /// The type's name in messages.
    const TYPE: &'static str;
    /// Placeholder for a value that is chosen later.
    const PLACEHOLDER: Self;
    fn to_const(self) -> ConstValue;
    /// `None` if the value has another type or is out of range.
    fn from_const(value: &ConstValue) -> Option<Self>;
    /// Distinct for distinct values: part of the specialization key.
    fn key(self) -> u64;
}

macro_rules! int_constexpr {
    ($($ty:ty),*) => { $(
        impl Constexpr for $ty {
            const TYPE: &'static str = stringify!($ty);
            const PLACEHOLDER: $ty = 0;
            fn to_const(self) -> ConstValue {
                ConstValue::Int(self as i64)
            }
            fn from_const(value: &ConstValue) -> Option<Self> {
                match value {
                    ConstValue::Int(n) => <$ty>::try_from(*n).ok(),
                    _ => None,
                }
            }
            fn key(self) -> u64 {
                self as u64
            }
        }
    )* };
}
int_constexpr!(usize, i32, i64, u32, u64);

macro_rules! float_constexpr {
    ($($ty:ty),*) => { $(
        impl Constexpr for $ty {
            const TYPE: &'static str = stringify!($ty);
            const PLACEHOLDER: $ty = 0.0;
            fn to_const(self) -> ConstValue {
                ConstValue::Float(self as f64)
            }
            fn from_const(value: &ConstValue) -> Option<Self> {
                match value {
                    ConstValue::Float(x) => Some(*x as $ty),
                    ConstValue::Int(n) => Some(*n as $ty),
                    _ => None,
                }
            }
            fn key(self) -> u64 {
                self.to_bits() as u64
            }
        }
    )* };
}
float_constexpr!(f32, f64);

impl Constexpr for bool {
    const TYPE: &'static str = "bool";
    const PLACEHOLDER: bool = false;
    fn to_const(self) -> ConstValue {
        ConstValue::Bool(self)
    }
    fn from_const(value: &ConstValue) -> Option<Self> {
        match value {
            ConstValue::Bool(b) => Some(*b),
            ConstValue::Int(n @ (0 | 1)) => Some(*n == 1),
            _ => None,
        }
    }
    fn key(self) -> u64 {
        self as u64
    }
}

/// A text, such as the name of a mode. The value that a recording reads from a constant stays allocated.
impl Constexpr for &'static str {
    const TYPE: &'static str = "text";
    const PLACEHOLDER: &'static str = "";
    fn to_const(self) -> ConstValue {
        ConstValue::Variant(self.to_string())
    }
    fn from_const(value: &ConstValue) -> Option<Self> {
        match value {
            ConstValue::Variant(text) => Some(text.clone().leak()),
            // A command line gives no types.
            ConstValue::Int(_) | ConstValue::Float(_) | ConstValue::Bool(_) => Some(value.to_string().leak()),
            ConstValue::Item(_) => None,
        }
    }
    fn key(self) -> u64 {
        // FNV-1a.
        self.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }
}

/// A struct whose statics are values of `#[constexpr]` parameters of type `&'static Self`, such as one of functions that a kernel
/// calls while it is traced. Two statics are different values, whatever they hold.
pub trait ConstexprItem: Any + Send + Sync {
    /// The values in messages.
    const TYPE: &'static str;
    /// The values that the command line accepts by name, and the default of a parameter has; at least one.
    const KNOWN: &'static [&'static Self];
    /// The name in messages and manifests. That of a default is the static's in lower case.
    fn name(&self) -> &'static str;
}

impl<T: ConstexprItem> Constexpr for &'static T {
    const TYPE: &'static str = T::TYPE;
    const PLACEHOLDER: &'static T = T::KNOWN[0];
    fn to_const(self) -> ConstValue {
        ConstValue::Item(ConstItem { name: self.name(), item: self })
    }
    fn from_const(value: &ConstValue) -> Option<Self> {
        match value {
            ConstValue::Item(item) => item.downcast(),
            ConstValue::Variant(name) => T::KNOWN.iter().copied().find(|known| known.name() == name),
            _ => None,
        }
    }
    fn key(self) -> u64 {
        std::ptr::from_ref(self).addr() as u64
    }
}

impl Constexpr for Precision {
    const TYPE: &'static str = "ieee | tf32 | tf32x3";
    const PLACEHOLDER: Precision = Precision::Ieee;
    fn to_const(self) -> ConstValue {
        ConstValue::Variant(self.name().to_string())
    }
    fn from_const(value: &ConstValue) -> Option<Self> {
        match value {
            ConstValue::Variant(w) => Precision::from_name(w),
            _ => None,
        }
    }
    fn key(self) -> u64 {
        self as u64
    }
}

/// Declares an enum without fields that can be the type of `#[constexpr]` parameters. The command line accepts its
/// variants by name.
///
/// ```
/// tilewright_codegen::constexpr_enum! {
///     /// Activation function of the epilogue.
///     pub enum Activation { None, Relu, Gelu }
/// }
/// ```
#[macro_export]
macro_rules! constexpr_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$vmeta:meta])* $variant:ident),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        $vis enum $name { $($(#[$vmeta])* $variant),+ }

        impl $crate::lang::kernel::Constexpr for $name {
            const TYPE: &'static str = concat!("" $(, stringify!($variant), " ")+);
            const PLACEHOLDER: Self = {
                const VARIANTS: &[$name] = &[$($name::$variant),+];
                VARIANTS[0]
            };
            fn to_const(self) -> $crate::lang::kernel::ConstValue {
                let name = match self { $($name::$variant => stringify!($variant)),+ };
                $crate::lang::kernel::ConstValue::Variant(name.to_string())
            }
            fn from_const(value: &$crate::lang::kernel::ConstValue) -> Option<Self> {
                match value {
                    $($crate::lang::kernel::ConstValue::Variant(w) if w == stringify!($variant) => Some($name::$variant),)+
                    _ => None,
                }
            }
            fn key(self) -> u64 {
                self as u64
            }
        }

        $crate::compare_host!(eq: $name);
        $crate::rust_numbers!($name);
    };
}

/// What the compiler may assume about one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct ArgSpec {
    /// The value (for pointers: the byte address) is a multiple of this; 1 if unknown.
    pub divisible_by: u64,
    /// The value, if known.
    pub equal_to: Option<i64>,
}

impl Default for ArgSpec {
    fn default() -> Self {
        ArgSpec { divisible_by: 1, equal_to: None }
    }
}

/// What the compiler may assume about the arguments: one entry per parameter that is not constexpr, in order. Nothing
/// is assumed of arguments without an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Specialization {
    pub args: Vec<ArgSpec>,
}

impl Specialization {
    /// Assumes that pointers are aligned to 16 bytes, as allocators guarantee, and nothing about scalars. The default
    /// of ahead-of-time compilation, where no launch checks the assumptions.
    pub fn aligned_memory(def: &KernelDef) -> Specialization {
        let args = def.params.iter().filter_map(|p| match p.kind {
            ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) if p.specialize => {
                Some(ArgSpec { divisible_by: 16, equal_to: None })
            }
            ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) | ParamKind::Scalar(_) => {
                Some(ArgSpec::default())
            }
            ParamKind::Constexpr { .. } => None,
        });
        Specialization { args: args.collect() }
    }
}

/// The constants and argument facts for which a kernel is recorded; read by code that `#[kernel]` generates.
#[doc(hidden)]
#[derive(Debug)]
pub struct Inputs<'a> {
    /// One per constexpr parameter, in order.
    consts: &'a [ConstValue],
    args: &'a [ArgSpec],
}

impl Inputs<'_> {
    /// Declares a pointer parameter.
    pub fn pointer<T: Dtype>(&self, name: &str, index: usize, writable: bool) -> Ptr<T> {
        let spec = self.args.get(index).copied().unwrap_or_default();
        let arg = Arg { name: name.to_string(), divisible_by: spec.divisible_by, equal_to: None };
        Ptr::new(add_arg(arg, Type::Scalar(Elem::Ptr(T::dtype()))), writable)
    }

    /// Declares a scalar parameter. If its value is known, it is a constant in the body.
    #[track_caller]
    pub fn scalar<T: Dtype>(&self, name: &str, index: usize) -> Scalar<T> {
        // Launches pass a bool as a byte, and know the facts of integers about it.
        let spec = self.args.get(index).filter(|_| T::dtype() != DType::Bool).copied().unwrap_or_default();
        let arg = Arg { name: name.to_string(), divisible_by: spec.divisible_by, equal_to: spec.equal_to };
        let v = add_arg(arg, Type::scalar(T::dtype()));
        match spec.equal_to {
            Some(n) => Scalar::from_value(constant(Number::Int(n as i128), T::dtype(), &[])),
            None => Scalar::from_value(v),
        }
    }

    /// Value of a constexpr parameter.
    pub fn constant<T: Constexpr>(&self, name: &str, index: usize) -> T {
        let value = &self.consts[index];
        match T::from_const(value) {
            Some(x) => x,
            None => fail(Diagnostic::new(
                format!("the parameter `{name}` cannot be {value}: expected {}", T::TYPE.trim_end()),
                Loc::unknown(),
            )),
        }
    }
}

/// A diagnostic for the first op whose tile is too large, or whose attribute is out of range. Language functions check
/// their own arguments; what follows from several of them, such as the shape that two tiles broadcast to, is checked
/// here on the complete function.
fn first_limit_violation(func: &Func) -> Option<Diagnostic> {
    let errors = verify(func, Stage::Tile).err()?;
    let limit = errors.into_iter().find(|error| matches!(error.rule, Rule::Extents | Rule::Attributes))?;
    let op = format!("in op `{}`", limit.op);
    Some(
        Diagnostic::new(limit.message, limit.loc)
            .label("out of range")
            .note(op)
            .help("use smaller constants for smaller tiles, or powers of two"),
    )
}

impl KernelDef {
    /// Whether `name` is the kernel's name or a former one.
    pub fn has_name(&self, name: &str) -> bool {
        self.name == name || self.aliases.contains(&name)
    }

    /// The present name of the parameter that has or had this name; names of no parameter are returned unchanged.
    pub fn param_name<'n>(&self, name: &'n str) -> &'n str {
        self.param_aliases.iter().find(|(former, _)| *former == name).map_or(name, |(_, present)| present)
    }

    /// Source location of the kernel.
    pub fn loc(&self) -> Loc {
        Loc { file: self.file.into(), line: self.line, column: 1 }
    }

    /// Records the kernel.
    ///
    /// `dtypes` has one entry per type parameter. `consts` gives constexpr parameters by name; those with a default are
    /// optional.
    ///
    /// # Errors
    /// A type outside its bound, a constant that is missing, unknown or of the wrong type, and any error in the body.
    pub fn record(
        &self,
        dtypes: &[DType],
        consts: &[(&str, ConstValue)],
        specialization: &Specialization,
    ) -> Result<Func, Diagnostic> {
        self.record_full(dtypes, consts, specialization).map(|r| r.func)
    }

    /// As [`KernelDef::record`], with the output of `static_print`.
    ///
    /// # Errors
    /// As [`KernelDef::record`].
    pub fn record_full(
        &self,
        dtypes: &[DType],
        consts: &[(&str, ConstValue)],
        specialization: &Specialization,
    ) -> Result<Recording, Diagnostic> {
        self.check_dtypes(dtypes)?;
        let consts = self.complete_consts(consts)?;
        let inputs = Inputs { consts: &consts, args: &specialization.args };
        let mut recording = record_generic(self.name, dtypes, || (self.body)(&inputs)).map_err(|mut d| {
            if d.loc.is_unknown() {
                d.message = format!("kernel `{}`: {}", self.name, d.message);
                d.loc = self.loc();
            }
            d
        })?;
        recording.func.loc = self.loc();
        match first_limit_violation(&recording.func) {
            Some(diagnostic) => Err(diagnostic),
            None => Ok(recording),
        }
    }

    fn error(&self, message: String) -> Diagnostic {
        Diagnostic::new(format!("kernel `{}`: {message}", self.name), self.loc())
    }

    fn check_dtypes(&self, dtypes: &[DType]) -> Result<(), Diagnostic> {
        if dtypes.len() != self.generics.len() {
            let names: Vec<&str> = self.generics.iter().map(|g| g.name).collect();
            return Err(self.error(format!(
                "expected {} element types ({}), found {}",
                self.generics.len(),
                names.join(", "),
                dtypes.len()
            )));
        }
        for (g, d) in self.generics.iter().zip(dtypes) {
            if !g.members().contains(d) {
                let members: Vec<&str> = g.members().iter().map(|d| d.name()).collect();
                return Err(self.error(format!("`{}` cannot be {d}: expected one of {}", g.name, members.join(", "))));
            }
        }
        Ok(())
    }

    /// The default of a constexpr parameter, if it has one.
    pub fn default_of(&self, name: &str) -> Option<ConstValue> {
        self.params.iter().find(|p| p.name == name).and_then(|p| match p.kind {
            ParamKind::Constexpr { default, .. } => default.map(ConstValue::from),
            _ => None,
        })
    }

    /// Whether constants leave a memory parameter out: `x` of `x: Option<…>` where `x_given` is false.
    pub fn is_left_out(&self, name: &str, constant: impl Fn(&str) -> Option<ConstValue>) -> bool {
        let flag = format!("{name}_given");
        let value = constant(&flag).or_else(|| self.default_of(&flag));
        matches!(value, Some(ConstValue::Bool(false) | ConstValue::Int(0)))
    }

    /// Whether only tensors that are left out have this extent, which then is 0.
    pub fn is_absent(&self, dim: &str, constant: impl Fn(&str) -> Option<ConstValue>) -> bool {
        self.all_with(dim, |tensor| self.is_left_out(tensor, &constant))
    }

    /// Whether only optional tensors, `x: Option<…>`, have this extent.
    pub fn is_of_optional(&self, dim: &str) -> bool {
        self.all_with(dim, |tensor| self.params.iter().any(|p| p.name.strip_suffix("_given") == Some(tensor)))
    }

    /// Whether `dim` is the name of an extent, and each tensor that has it is as `is` says of its name.
    fn all_with(&self, dim: &str, is: impl Fn(&str) -> bool) -> bool {
        let has = |tensor: &&TensorDef| tensor.dims.iter().any(|&at| self.dims[at] == dim);
        self.dims.contains(&dim) && self.tensors.iter().filter(has).all(|tensor| is(tensor.name))
    }

    /// The constants that `#[heuristic(…)]` gives, in order, except for those that `values` has and those that depend on values
    /// that are not known.
    pub fn heuristics(&self, values: &Lookup<'_>) -> Vec<(&'static str, ConstValue)> {
        let mut found: Vec<(&'static str, ConstValue)> = Vec::new();
        for param in self.params.iter().filter(|p| values(p.name).is_none()) {
            let known = |name: &'static str| {
                let earlier = found.iter().find(|(other, _)| *other == name).map(|(_, value)| value.clone());
                earlier.or_else(|| values(name)).or_else(|| self.default_of(name))
            };
            if let Some(Ok(value)) = param.heuristic.map(|heuristic| heuristic(&known)) {
                found.push((param.name, value));
            }
        }
        found
    }

    /// Values of all constexpr parameters, in order: the given ones, also by former names, and defaults for the others.
    ///
    /// # Errors
    /// A constant that is missing or unknown.
    pub fn complete_consts(&self, given: &[(&str, ConstValue)]) -> Result<Vec<ConstValue>, Diagnostic> {
        let constants = self.params.iter().filter(|p| matches!(p.kind, ParamKind::Constexpr { .. }));
        let names: Vec<&str> = constants.map(|p| p.name).collect();
        // First, because a misspelled name leaves another constant without a value.
        if let Some((unknown, _)) = given.iter().find(|(name, _)| !names.contains(&self.param_name(name))) {
            return Err(self.error(format!(
                "there is no constexpr parameter `{unknown}`: there are {}",
                if names.is_empty() { "none".to_string() } else { names.join(", ") }
            )));
        }
        let mut values = Vec::new();
        for p in self.params {
            let ParamKind::Constexpr { ty, default } = p.kind else { continue };
            let value = given.iter().find(|(name, _)| self.param_name(name) == p.name).map(|(_, value)| value.clone());
            match value.or(default.map(ConstValue::from)) {
                Some(value) => values.push(value),
                None => return Err(self.error(format!("the constant `{}` ({ty}) is not given", p.name))),
            }
        }
        Ok(values)
    }
}
