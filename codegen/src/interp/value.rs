//! Values of the interpreter.

use crate::ir::{DType, Elem};
use crate::num;
use std::rc::Rc;

/// A tile or, with an empty shape, a scalar: the bits of its elements in row-major order, as [`crate::num`] stores
/// them. The bits of a pointer are its address.
#[derive(Clone, Debug, PartialEq)]
pub struct Tile {
    pub shape: Vec<usize>,
    pub elem: Elem,
    pub bits: Vec<u64>,
}

impl Tile {
    pub fn scalar(elem: impl Into<Elem>, bits: u64) -> Tile {
        Tile { shape: Vec::new(), elem: elem.into(), bits: vec![bits] }
    }

    /// Number type. Panics for pointers, on which the verifier rejects arithmetic.
    pub fn dtype(&self) -> DType {
        self.elem
            .num()
            .expect("internal compiler error: arithmetic on pointers passed the verifier; please report this")
    }

    /// The elements as integers (bool as 0 and 1, pointers as addresses); `None` for floats.
    pub fn ints(&self) -> Option<Vec<i128>> {
        match self.elem {
            Elem::Ptr(_) => Some(self.bits.iter().map(|&b| b as i128).collect()),
            Elem::Num(d) if d.is_float() => None,
            Elem::Num(d) => Some(self.bits.iter().map(|&b| num::decode_int(d, b)).collect()),
        }
    }

    /// Applies a function to the bits of each element; the result has the element type `elem`.
    pub(super) fn map(&self, elem: impl Into<Elem>, f: impl Fn(u64) -> u64) -> Tile {
        Tile { shape: self.shape.clone(), elem: elem.into(), bits: self.bits.iter().map(|&b| f(b)).collect() }
    }

    /// Applies a function to the bits of the elements of two tiles of one shape.
    pub(super) fn zip(&self, other: &Tile, elem: impl Into<Elem>, f: impl Fn(u64, u64) -> u64) -> Tile {
        let bits = self.bits.iter().zip(&other.bits).map(|(&a, &b)| f(a, b)).collect();
        Tile { shape: self.shape.clone(), elem: elem.into(), bits }
    }
}

/// A view: the location of its block in memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View {
    pub base: u64,
    pub elem: DType,
    pub block: Vec<usize>,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    pub offsets: Vec<i64>,
}

/// A shared buffer, or a part of one: elements `start + Σ index·stride` of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shared {
    pub allocation: usize,
    pub start: usize,
    pub elem: DType,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

/// A range of the program's mbarriers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Barriers {
    pub first: usize,
    pub count: usize,
}

/// Any value.
#[derive(Clone, Debug)]
pub(super) enum Val {
    Tile(Rc<Tile>),
    View(Rc<View>),
    Shared(Rc<Shared>),
    Barriers(Rc<Barriers>),
}

impl From<Tile> for Val {
    fn from(tile: Tile) -> Val {
        Val::Tile(Rc::new(tile))
    }
}

impl From<View> for Val {
    fn from(view: View) -> Val {
        Val::View(Rc::new(view))
    }
}

impl From<Shared> for Val {
    fn from(shared: Shared) -> Val {
        Val::Shared(Rc::new(shared))
    }
}

impl From<Barriers> for Val {
    fn from(barriers: Barriers) -> Val {
        Val::Barriers(Rc::new(barriers))
    }
}

fn wrong_kind(expected: &str) -> ! {
    panic!("internal compiler error: expected a {expected} after verification; please report this")
}

impl Val {
    pub fn tile(&self) -> &Tile {
        match self {
            Val::Tile(tile) => tile,
            Val::View(_) | Val::Shared(_) | Val::Barriers(_) => wrong_kind("tile"),
        }
    }

    pub fn view(&self) -> &View {
        match self {
            Val::View(view) => view,
            Val::Tile(_) | Val::Shared(_) | Val::Barriers(_) => wrong_kind("view"),
        }
    }

    pub fn shared(&self) -> &Shared {
        match self {
            Val::Shared(shared) => shared,
            Val::Tile(_) | Val::View(_) | Val::Barriers(_) => wrong_kind("shared buffer"),
        }
    }

    pub fn barriers(&self) -> &Barriers {
        match self {
            Val::Barriers(barriers) => barriers,
            Val::Tile(_) | Val::View(_) | Val::Shared(_) => wrong_kind("group of barriers"),
        }
    }

    /// Bits of a scalar.
    pub fn bits(&self) -> u64 {
        self.tile().bits[0]
    }

    /// Value of an integer or bool scalar.
    pub fn int(&self) -> i128 {
        num::decode_int(self.tile().dtype(), self.bits())
    }
}

/// All indices of a shape, in row-major order.
pub(super) fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    let shape = shape.to_vec();
    let total: usize = shape.iter().product();
    (0..total).map(move |linear| index_of(linear, &shape))
}

/// Index of the element at a row-major position.
fn index_of(mut linear: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        index[d] = linear % shape[d];
        linear /= shape[d];
    }
    index
}

/// Row-major position of an index.
pub(super) fn position(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |p, (&i, &n)| p * n + i)
}
