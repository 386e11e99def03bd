//! Op attributes: compile-time parameters of ops and their text form.

use super::types::DType;
use std::fmt;

/// An attribute value: what stands after `=` inside the `{…}` of an op's text.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    Int(i64),
    Float(f64),
    Str(String),
    /// A bare word: `true`, `false`, `none`, or a variant of an attribute enum.
    Ident(String),
    List(Vec<Attr>),
}

impl fmt::Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attr::Int(i) => write!(f, "{i}"),
            // `{:?}` prints the shortest text that parses back to the same number, always with a decimal point or an
            // exponent.
            Attr::Float(x) if x.is_finite() => write!(f, "{x:?}"),
            Attr::Float(x) if x.is_nan() => f.write_str("nan"),
            Attr::Float(x) if *x > 0.0 => f.write_str("inf"),
            Attr::Float(_) => f.write_str("-inf"),
            Attr::Str(s) => write!(f, "\"{}\"", s.escape_default()),
            Attr::Ident(s) => f.write_str(s),
            Attr::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    write!(f, "{item}")?;
                }
                f.write_str("]")
            }
        }
    }
}

/// A Rust type that an op attribute can have.
pub trait AttrValue: Sized {
    fn to_attr(&self) -> Attr;
    /// The Rust value, or `None` if the attribute has the wrong form.
    fn from_attr(attr: &Attr) -> Option<Self>;
    /// The expected form, for error messages.
    fn expected() -> String;
    /// Default of an attribute that the text omits; `None` makes the attribute mandatory.
    fn default_value() -> Option<Self> {
        None
    }
}

macro_rules! int_attr {
    ($($ty:ty),*) => { $(
        impl AttrValue for $ty {
            fn to_attr(&self) -> Attr {
                Attr::Int(*self as i64)
            }
            fn from_attr(attr: &Attr) -> Option<Self> {
                match attr {
                    Attr::Int(i) => <$ty>::try_from(*i).ok(),
                    _ => None,
                }
            }
            fn expected() -> String {
                format!("an integer from {} to {}", <$ty>::MIN, <$ty>::MAX)
            }
        }
    )* };
}
int_attr!(u32, usize, i32, i64);

impl AttrValue for bool {
    fn to_attr(&self) -> Attr {
        Attr::Ident(self.to_string())
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        match attr {
            Attr::Ident(s) => s.parse().ok(),
            _ => None,
        }
    }
    fn expected() -> String {
        "true or false".into()
    }
}

impl AttrValue for String {
    fn to_attr(&self) -> Attr {
        Attr::Str(self.clone())
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        match attr {
            Attr::Str(s) => Some(s.clone()),
            _ => None,
        }
    }
    fn expected() -> String {
        "a string".into()
    }
}

impl<T: AttrValue> AttrValue for Vec<T> {
    fn to_attr(&self) -> Attr {
        Attr::List(self.iter().map(T::to_attr).collect())
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        match attr {
            Attr::List(items) => items.iter().map(T::from_attr).collect(),
            _ => None,
        }
    }
    fn expected() -> String {
        format!("a list of {}", T::expected())
    }
}

impl<T: AttrValue> AttrValue for Option<T> {
    fn to_attr(&self) -> Attr {
        match self {
            Some(v) => v.to_attr(),
            None => Attr::Ident("none".into()),
        }
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        match attr {
            Attr::Ident(s) if s == "none" => Some(None),
            other => T::from_attr(other).map(Some),
        }
    }
    fn expected() -> String {
        format!("none, or {}", T::expected())
    }
    fn default_value() -> Option<Self> {
        Some(None)
    }
}

/// Payload of a `constant`. Integers keep their bits (a u64 above `i64::MAX` is negative here); floats are f64.
#[derive(Clone, Copy, Debug)]
pub enum Literal {
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl Literal {
    /// `value` as a literal of this number type.
    pub fn number(value: f64, dtype: Option<DType>) -> Literal {
        match dtype {
            Some(DType::Bool) => Literal::Bool(value != 0.0),
            Some(d) if d.is_int() => Literal::Int(value as i64),
            _ => Literal::Float(value),
        }
    }
}

/// The bits of a float, the same for all NaNs: text has only one.
fn bits(x: f64) -> u64 {
    if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() }
}

impl PartialEq for Literal {
    /// Compares floats bitwise: NaNs are equal, and 0.0 differs from -0.0.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Literal::Bool(a), Literal::Bool(b)) => a == b,
            (Literal::Int(a), Literal::Int(b)) => a == b,
            (Literal::Float(a), Literal::Float(b)) => bits(*a) == bits(*b),
            (Literal::Bool(_) | Literal::Int(_) | Literal::Float(_), _) => false,
        }
    }
}

impl Eq for Literal {}

impl std::hash::Hash for Literal {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        match self {
            Literal::Bool(b) => b.hash(state),
            Literal::Int(i) => i.hash(state),
            Literal::Float(x) => bits(*x).hash(state),
        }
    }
}

impl AttrValue for Literal {
    fn to_attr(&self) -> Attr {
        match self {
            Literal::Bool(b) => b.to_attr(),
            Literal::Int(i) => Attr::Int(*i),
            Literal::Float(x) => Attr::Float(*x),
        }
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        match attr {
            Attr::Int(i) => Some(Literal::Int(*i)),
            Attr::Float(x) => Some(Literal::Float(*x)),
            // The parser gives these as words: it cannot tell a number from an enum variant.
            Attr::Ident(s) => match s.as_str() {
                "nan" => Some(Literal::Float(f64::NAN)),
                "inf" => Some(Literal::Float(f64::INFINITY)),
                "-inf" => Some(Literal::Float(f64::NEG_INFINITY)),
                other => other.parse().ok().map(Literal::Bool),
            },
            Attr::Str(_) | Attr::List(_) => None,
        }
    }
    fn expected() -> String {
        "a number, true or false".into()
    }
}

/// Declares an enum whose variants are bare words in the text.
macro_rules! attr_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vmeta])* $variant),* }

        impl $name {
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// The variant's name in the text.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }

            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some($name::$variant),)* _ => None }
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = <String as serde::Deserialize>::deserialize(deserializer)?;
                let unknown = || serde::de::Error::unknown_variant(&name, &[$($text),*]);
                Self::from_name(&name).ok_or_else(unknown)
            }
        }

        impl $crate::ir::attr::AttrValue for $name {
            fn to_attr(&self) -> $crate::ir::attr::Attr {
                $crate::ir::attr::Attr::Ident(self.name().into())
            }
            fn from_attr(attr: &$crate::ir::attr::Attr) -> Option<Self> {
                match attr {
                    $crate::ir::attr::Attr::Ident(s) => Self::from_name(s),
                    _ => None,
                }
            }
            fn expected() -> String {
                [$($text),*].join(" | ")
            }
        }
    };
}
pub(crate) use attr_enum;
