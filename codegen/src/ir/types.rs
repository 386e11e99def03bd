//! Element types, and the types of Tile IR values.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of tiles, scalars and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    /// OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinities.
    F8E4M3,
    /// OCP 8-bit float, 5 exponent and 2 mantissa bits.
    F8E5M2,
    F16,
    BF16,
    F32,
    F64,
}

impl DType {
    /// All element types, in declaration order.
    pub const ALL: [DType; 15] = [
        DType::Bool,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];

    /// Rust's spelling of the type (`f8e4m3` and `f8e5m2` for the 8-bit floats).
    pub fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }

    /// The type with this name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Width in memory, in bits; a `bool` takes a byte.
    pub fn bits(self) -> usize {
        match self {
            DType::Bool | DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => 8,
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => 16,
            DType::I32 | DType::U32 | DType::F32 => 32,
            DType::I64 | DType::U64 | DType::F64 => 64,
        }
    }

    /// Width in memory, in bytes.
    pub fn bytes(self) -> usize {
        self.bits() / 8
    }

    /// Whether this is a float of 8 bits.
    pub fn is_f8(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }

    pub fn is_float(self) -> bool {
        match self {
            DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 | DType::F32 | DType::F64 => true,
            DType::Bool
            | DType::I8
            | DType::I16
            | DType::I32
            | DType::I64
            | DType::U8
            | DType::U16
            | DType::U32
            | DType::U64 => false,
        }
    }

    /// Whether this is a signed or unsigned integer type; `bool` is not one.
    pub fn is_int(self) -> bool {
        !self.is_float() && self != DType::Bool
    }

    /// Whether this is a signed integer type.
    pub fn is_signed_int(self) -> bool {
        matches!(self, DType::I8 | DType::I16 | DType::I32 | DType::I64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Type of one element of a tile, or of a scalar: a number, or an address in global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    Num(DType),
    /// A pointer to elements of this type in global memory.
    Ptr(DType),
}

impl Elem {
    /// The number type; `None` for pointers.
    pub fn num(self) -> Option<DType> {
        match self {
            Elem::Num(d) => Some(d),
            Elem::Ptr(_) => None,
        }
    }

    /// The type pointed to; `None` for numbers.
    pub fn pointee(self) -> Option<DType> {
        match self {
            Elem::Ptr(d) => Some(d),
            Elem::Num(_) => None,
        }
    }

    /// Width of one element in bits; pointers have 64.
    pub fn bits(self) -> usize {
        match self {
            Elem::Num(d) => d.bits(),
            Elem::Ptr(_) => 64,
        }
    }
}

impl From<DType> for Elem {
    fn from(d: DType) -> Elem {
        Elem::Num(d)
    }
}

impl fmt::Display for Elem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Elem::Num(d) => write!(f, "{d}"),
            Elem::Ptr(d) => write!(f, "ptr<{d}>"),
        }
    }
}

/// Index of a layout in the layout table of its function; printed as `#l0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayoutId(pub u32);

/// Type of a Tile IR value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// A number or pointer that is the same for the whole program.
    Scalar(Elem),
    /// A tile. `layout` maps threads to elements; present from stage *layout* on.
    Tensor { shape: Vec<usize>, elem: Elem, layout: Option<LayoutId> },
    /// A block pointer or tensor descriptor: base, shape, strides, offsets, and the shape of the block it selects.
    View { block: Vec<usize>, elem: DType },
    /// A tile in shared memory (from stage *layout* on); an additional leading extent counts the buffers of a ring.
    Shared { shape: Vec<usize>, elem: DType, layout: LayoutId },
    /// `count` mbarriers in shared memory (at stage *async*).
    Barrier { count: usize },
}

impl Type {
    pub fn scalar(elem: impl Into<Elem>) -> Type {
        Type::Scalar(elem.into())
    }

    /// A tensor without a layout. An empty shape gives the scalar type.
    pub fn tensor(shape: &[usize], elem: impl Into<Elem>) -> Type {
        if shape.is_empty() {
            Type::Scalar(elem.into())
        } else {
            Type::Tensor { shape: shape.to_vec(), elem: elem.into(), layout: None }
        }
    }

    /// Shape of a tile or shared buffer, block shape of a view; `[]` for scalars and barriers.
    pub fn shape(&self) -> &[usize] {
        match self {
            Type::Scalar(_) | Type::Barrier { .. } => &[],
            Type::Tensor { shape, .. } | Type::Shared { shape, .. } => shape,
            Type::View { block, .. } => block,
        }
    }

    /// Number of elements (1 for a scalar).
    pub fn numel(&self) -> usize {
        self.shape().iter().product()
    }

    /// Element type of a scalar or tile; `None` otherwise.
    pub fn elem(&self) -> Option<Elem> {
        match self {
            Type::Scalar(e) | Type::Tensor { elem: e, .. } => Some(*e),
            Type::View { .. } | Type::Shared { .. } | Type::Barrier { .. } => None,
        }
    }

    /// Number type of a scalar or tile of numbers; `None` otherwise.
    pub fn dtype(&self) -> Option<DType> {
        self.elem().and_then(Elem::num)
    }

    pub fn layout(&self) -> Option<LayoutId> {
        match self {
            Type::Tensor { layout, .. } => *layout,
            Type::Shared { layout, .. } => Some(*layout),
            Type::Scalar(_) | Type::View { .. } | Type::Barrier { .. } => None,
        }
    }

    pub fn is_scalar(&self) -> bool {
        matches!(self, Type::Scalar(_))
    }

    pub fn is_tensor(&self) -> bool {
        matches!(self, Type::Tensor { .. })
    }

    /// This scalar or tile type with another element type (same shape and layout); other types are returned unchanged.
    pub fn with_elem(&self, elem: impl Into<Elem>) -> Type {
        match self {
            Type::Scalar(_) => Type::Scalar(elem.into()),
            Type::Tensor { shape, layout, .. } => {
                Type::Tensor { shape: shape.clone(), elem: elem.into(), layout: *layout }
            }
            other => other.clone(),
        }
    }

    /// This tile type with another layout; other types are returned unchanged.
    pub fn with_layout(&self, layout: Option<LayoutId>) -> Type {
        match self {
            Type::Tensor { shape, elem, .. } => Type::Tensor { shape: shape.clone(), elem: *elem, layout },
            other => other.clone(),
        }
    }
}

fn write_shape(f: &mut fmt::Formatter<'_>, shape: &[usize]) -> fmt::Result {
    for n in shape {
        write!(f, "{n}x")?;
    }
    Ok(())
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Scalar(e) => write!(f, "{e}"),
            Type::Tensor { shape, elem, layout } => {
                f.write_str("tensor<")?;
                write_shape(f, shape)?;
                write!(f, "{elem}")?;
                if let Some(LayoutId(n)) = layout {
                    write!(f, ", #l{n}")?;
                }
                f.write_str(">")
            }
            Type::View { block, elem } => {
                f.write_str("view<")?;
                write_shape(f, block)?;
                write!(f, "{elem}>")
            }
            Type::Shared { shape, elem, layout } => {
                f.write_str("shared<")?;
                write_shape(f, shape)?;
                write!(f, "{elem}, #l{}>", layout.0)
            }
            Type::Barrier { count } => write!(f, "barrier<{count}>"),
        }
    }
}
