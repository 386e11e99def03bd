//! Plans of TMA copies: which blocks of memory TMA can fetch, and how.
//!
//! TMA takes a *tensor map*, which the host encodes before the launch, and coordinates. So everything in a view but its
//! offsets has to follow from the kernel's arguments. The base may be `argument + Σ scalar · stride`, with i32 scalars
//! that the kernel computes (e.g. the head of a batch) and strides that are arguments. Each such term becomes an
//! additional dimension of the map, of maximum extent, in which a box has extent 1.
//!
//! Coordinates are i32, the offsets of a view i64. Extents are therefore at most 2^31 - 1: an offset outside i32 lies
//! outside the tensor, and so does the nearest i32, on the same side ([`TmaPlan::checked`] marks the dimensions where
//! offsets may lie outside).
//!
//! Limits (CUDA Driver API, `cuTensorMapEncodeTiled`): at most five dimensions; the innermost is contiguous; base and
//! other strides are multiples of 16 bytes; a box has at most 256 elements per dimension, its rows are multiples of 16
//! bytes and, with a swizzle, no wider than its span. A wider tile takes several copies. Rows of a box start at multiples
//! of 16 bytes: the manuals do not say so, an H200 does (Triton's descriptors too).

use super::access_layout::{extents, view_operands};
use super::axis::AxisAnalysis;
use crate::ir::{BinaryOp, DType, Def, Func, Op, Type, Value};
use crate::layout::{LinearLayout, Swizzle};
use crate::num::int_range;
use crate::target::HostExpr;

const NO_VIEW: &str = "it has no block";
const NO_BASE: &str = "its base is not an argument plus products of indices and strides, which are arguments or constants and multiples of \
                       16 bytes";

pub const MAX_RANK: usize = 5;
pub const MAX_BOX: u32 = 256;
/// Required alignment of strides and addresses in bytes.
pub const ALIGN: u64 = 16;
/// Maximum extent: coordinates are i32.
const MAX_EXTENT: i64 = i32::MAX as i64;

/// TMA copies that fetch a view's block to a shared buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct TmaPlan {
    /// Index of the kernel's pointer argument.
    pub base: usize,
    pub elem: DType,
    /// Extents in elements, innermost dimension first.
    pub shape: Vec<HostExpr>,
    /// Strides in elements of all dimensions but the innermost, whose stride is 1.
    pub strides: Vec<HostExpr>,
    /// Extents of a box in elements.
    pub block: Vec<u32>,
    /// Swizzle span: 0 (none), 32, 64 or 128.
    pub swizzle_bytes: u32,
    /// Coordinates of the block, by dimension of the map: values of type i64 or i32.
    pub coordinates: Vec<Value>,
    /// The indices in the base, before casts, which become the last coordinates.
    indices: Vec<Value>,
    /// By dimension of the map: whether the block may lie outside the tensor, where it reads padding. In other
    /// dimensions, coordinates are below the extent.
    pub checked: Vec<bool>,
    pub copies: Vec<BoxCopy>,
}

/// One copy of a box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoxCopy {
    /// Bytes from the start of the buffer.
    pub offset: u32,
    /// Elements from the block's start, by dimension of the map.
    pub start: Vec<u32>,
}

impl TmaPlan {
    /// Checks that the indices in the base are coordinates: TMA takes a negative one for a place outside of the tensor, and casts to
    /// fewer bits change them. Passes ask this before they choose TMA; later ones rewrite divisions, and the ranges of the
    /// results are no longer known.
    ///
    /// # Errors
    /// What an index may be.
    pub fn check_indices(&self, func: &Func, axis: &AxisAnalysis) -> Result<(), String> {
        self.indices.iter().try_for_each(|&index| {
            let loc = func.def_op(index).map(|id| format!(" at {}", func.op(id).loc)).unwrap_or_default();
            if axis.get(func, index).range.0 < 0 {
                return Err(format!(
                    "an index in the base{loc} may be negative as far as is known: write `maximum(index, 0)` where it cannot be"
                ));
            }
            match casts_keep(func, axis, index) {
                true => Ok(()),
                false => Err(format!("a cast of an index in the base{loc} may change its value")),
            }
        })
    }
}

/// Whether TMA stores to no element outside of a view's tensor: it writes whole chunks of 16 bytes, so that the extent of
/// a row must be a multiple of 16 bytes, unless the block lies inside. (The manuals do not say so, an H200 does it;
/// issue 11583 of Triton.)
pub fn stores_stay_inside(func: &Func, axis: &AxisAnalysis, view: Value, boundary: &[usize]) -> bool {
    let Type::View { elem, .. } = func.ty(view) else { return false };
    let parts = view_operands(func, view);
    let inner = parts.order[0];
    !boundary.contains(&inner) || is_aligned(func, axis, parts.shape[inner], elem.bytes() as u64)
}

/// Whether a number of elements of `bytes` bytes is a multiple of 16 bytes.
fn is_aligned(func: &Func, axis: &AxisAnalysis, elements: Value, bytes: u64) -> bool {
    axis.scalar_divisor(func, elements).saturating_mul(bytes).is_multiple_of(ALIGN)
}

/// The plan for a view, with boundary checks in the dimensions of `boundary`, and a shared buffer of its block shape, by a
/// multiple of `pieces` copies.
///
/// # Errors
/// Why TMA cannot copy it.
pub fn plan(
    func: &Func,
    axis: &AxisAnalysis,
    view: Value,
    boundary: &[usize],
    buffer: &Type,
    pieces: u32,
) -> Result<TmaPlan, String> {
    let (Type::View { block, .. }, Type::Shared { layout, .. }) = (func.ty(view), buffer) else {
        return Err(NO_VIEW.into());
    };
    plan_pieces(func, axis, view, boundary, (&extents(block), func.layout(*layout)), pieces)
}

/// As [`plan`], for a row-major buffer without a swizzle.
pub fn plan_dense(func: &Func, axis: &AxisAnalysis, view: Value, boundary: &[usize]) -> Result<TmaPlan, String> {
    let Type::View { block, .. } = func.ty(view) else { return Err(NO_VIEW.into()) };
    let block = extents(block);
    let layout = LinearLayout::shared_row_major(&block, view_operands(func, view).order);
    plan_block(func, axis, view, boundary, &block, &layout)
}

/// As [`plan`], for a block of other extents, from the same start, and a buffer of that layout.
pub fn plan_block(
    func: &Func,
    axis: &AxisAnalysis,
    view: Value,
    boundary: &[usize],
    block: &[u32],
    layout: &LinearLayout,
) -> Result<TmaPlan, String> {
    plan_pieces(func, axis, view, boundary, (block, layout), 1)
}

fn plan_pieces(
    func: &Func,
    axis: &AxisAnalysis,
    view: Value,
    boundary: &[usize],
    (block, layout): (&[u32], &LinearLayout),
    pieces: u32,
) -> Result<TmaPlan, String> {
    let parts = view_operands(func, view);
    let Type::View { elem, .. } = func.ty(view) else { return Err(NO_VIEW.into()) };
    let bytes = elem.bytes() as u64;
    let inner = parts.order[0];
    if *elem == DType::Bool {
        return Err("its elements are bool".into());
    }
    if axis.scalar_constant(func, parts.strides[inner]) != Some(1) {
        return Err(format!("the stride of axis {inner} is not known to be 1"));
    }
    let aligned = |elements: Value| is_aligned(func, axis, elements, bytes);
    let mut plan = TmaPlan {
        base: 0,
        elem: *elem,
        shape: Vec::new(),
        strides: Vec::new(),
        block: Vec::new(),
        swizzle_bytes: 0,
        coordinates: Vec::new(),
        indices: Vec::new(),
        checked: Vec::new(),
        copies: Vec::new(),
    };
    for &d in parts.order {
        plan.shape.push(match host_expr(func, axis, parts.shape[d], &[DType::I32]) {
            Some(HostExpr::Const(extent)) if extent > MAX_EXTENT => {
                return Err(format!("the extent of axis {d} is {extent}, above {MAX_EXTENT}"));
            }
            Some(extent) => extent,
            // Without a boundary check, the block lies inside the extent.
            None if !boundary.contains(&d) && axis.get(func, parts.shape[d]).range.1 <= MAX_EXTENT.into() => {
                HostExpr::Const(MAX_EXTENT)
            }
            None => return Err(format!("the extent of axis {d} is neither an i32 argument nor a constant")),
        });
        // Hopper takes a copy whose rows start elsewhere for an illegal instruction.
        if d == inner {
            if !aligned(parts.offsets[d]) {
                return Err(format!("the offset along axis {d} is not known to be a multiple of {ALIGN} bytes"));
            }
        } else {
            if !aligned(parts.strides[d]) {
                return Err(format!("the stride of axis {d} is not known to be a multiple of {ALIGN} bytes"));
            }
            let stride = host_expr(func, axis, parts.strides[d], &[DType::I32, DType::I64]);
            plan.strides
                .push(stride.ok_or_else(|| format!("the stride of axis {d} is neither an argument nor a constant"))?);
        }
        plan.coordinates.push(parts.offsets[d]);
        plan.checked.push(boundary.contains(&d));
    }
    plan.base = base(func, axis, parts.base, &mut plan, &aligned)?;
    if plan.shape.len() > MAX_RANK {
        let rank = plan.shape.len();
        return Err(format!("it has {rank} axes, together with the indices in its base: a tensor map has {MAX_RANK}"));
    }
    let found = boxes(layout, block, parts.order, *elem, pieces, &mut plan);
    found.ok_or("TMA cannot write the layout of its buffer in shared memory")?;
    Ok(plan)
}

/// A value that the host can compute: a constant, or an integer argument, possibly widened.
fn host_expr(func: &Func, axis: &AxisAnalysis, v: Value, types: &[DType]) -> Option<HostExpr> {
    if let Some(c) = axis.scalar_constant(func, v) {
        return Some(HostExpr::Const(c));
    }
    match func.value(v).def {
        Def::Param(block, i) if block == func.body => {
            func.ty(v).dtype().filter(|d| types.contains(d)).map(|_| HostExpr::Arg(i))
        }
        Def::Param(..) => None,
        Def::Result(id, _) => match func.op(id).op {
            Op::Cast if func.ty(v).dtype() == Some(DType::I64) => host_expr(func, axis, func.op(id).operands[0], types),
            Op::Hint { .. } => host_expr(func, axis, func.op(id).operands[0], types),
            _ => None,
        },
    }
}

/// The pointer argument that an address is based on. Offsets added to it become dimensions of the plan.
///
/// # Errors
/// Why the host cannot compute it.
fn base(
    func: &Func,
    axis: &AxisAnalysis,
    v: Value,
    plan: &mut TmaPlan,
    aligned: &dyn Fn(Value) -> bool,
) -> Result<usize, String> {
    match func.value(v).def {
        Def::Param(block, i) if block == func.body => match func.args[i].divisible_by.is_multiple_of(ALIGN) {
            true => Ok(i),
            false => Err(format!("`{}` is not known to be aligned to {ALIGN} bytes", func.args[i].name)),
        },
        Def::Param(..) => Err(NO_BASE.into()),
        Def::Result(id, _) => {
            let data = func.op(id);
            match data.op {
                Op::Hint { .. } => base(func, axis, data.operands[0], plan, aligned),
                Op::PtrAdd => {
                    let found = base(func, axis, data.operands[0], plan, aligned)?;
                    terms(func, axis, data.operands[1], plan, aligned).ok_or(NO_BASE)?;
                    Ok(found)
                }
                _ => Err(NO_BASE.into()),
            }
        }
    }
}

/// Decomposes a sum of products `scalar · stride` into one dimension per term.
fn terms(
    func: &Func,
    axis: &AxisAnalysis,
    v: Value,
    plan: &mut TmaPlan,
    aligned: &dyn Fn(Value) -> bool,
) -> Option<()> {
    if axis.scalar_constant(func, v) == Some(0) {
        return Some(());
    }
    let data = func.op(func.def_op(v)?);
    match data.op {
        Op::Hint { .. } => terms(func, axis, data.operands[0], plan, aligned),
        Op::Binary(BinaryOp::Add) => {
            terms(func, axis, data.operands[0], plan, aligned)?;
            terms(func, axis, data.operands[1], plan, aligned)
        }
        Op::Binary(BinaryOp::Mul) if matches!(func.ty(v).dtype(), Some(DType::I32 | DType::I64)) => {
            let (scalar, stride) = factors(func, axis, v).find(|&(_, stride)| aligned(stride))?;
            plan.indices.push(scalar);
            plan.shape.push(HostExpr::Const(MAX_EXTENT));
            plan.checked.push(false);
            plan.strides.push(host_expr(func, axis, stride, &[DType::I32, DType::I64])?);
            plan.coordinates.push(narrow(func, axis, scalar)?);
            Some(())
        }
        _ => None,
    }
}

/// The scalar and the stride of a product, in the orders in which the host can compute the stride.
fn factors(func: &Func, axis: &AxisAnalysis, product: Value) -> impl Iterator<Item = (Value, Value)> {
    let operands = func.def_op(product).map_or(&[][..], |id| &func.op(id).operands);
    let orders = match *operands {
        [a, b] => vec![(a, b), (b, a)],
        _ => Vec::new(),
    };
    orders.into_iter().filter(|&(scalar, stride)| {
        host_expr(func, axis, stride, &[DType::I32, DType::I64]).is_some() && narrow(func, axis, scalar).is_some()
    })
}

/// The i32 behind the casts and hints of a coordinate, or a constant that fits into an i32.
fn narrow(func: &Func, axis: &AxisAnalysis, v: Value) -> Option<Value> {
    if func.ty(v).dtype() == Some(DType::I32)
        || axis.scalar_constant(func, v).is_some_and(|c| (0..MAX_EXTENT).contains(&c))
    {
        return Some(v);
    }
    let data = func.op(func.def_op(v)?);
    match data.op {
        Op::Cast | Op::Hint { .. } => narrow(func, axis, data.operands[0]),
        _ => None,
    }
}

/// Whether the casts of [`narrow`] keep the value: they are between integers, to a type that has it.
fn casts_keep(func: &Func, axis: &AxisAnalysis, v: Value) -> bool {
    let Some(data) = func.def_op(v).map(|id| func.op(id)) else { return true };
    match data.op {
        Op::Hint { .. } => casts_keep(func, axis, data.operands[0]),
        Op::Cast => {
            let from = data.operands[0];
            let is_int = |v| func.ty(v).dtype().is_some_and(|d| !d.is_float());
            let (low, high) = axis.get(func, from).range;
            let fits = |to: DType| int_range(to).0 <= low && high <= int_range(to).1;
            is_int(from) && is_int(v) && func.ty(v).dtype().is_some_and(fits) && casts_keep(func, axis, from)
        }
        _ => true,
    }
}

/// Adds the boxes, a multiple of `pieces`, whose copies arrange the block in the buffer according to its layout. A row of the
/// buffer may have room for more elements: with a swizzle, rows of a box start at multiples of the span, whatever its width.
fn boxes(
    layout: &LinearLayout,
    extents: &[u32],
    order: &[usize],
    elem: DType,
    pieces: u32,
    plan: &mut TmaPlan,
) -> Option<()> {
    let bytes = elem.bytes() as u32;
    let (inner, rest) = (order[0], &order[1..]);
    let rows: u32 = rest.iter().map(|&d| extents[d]).product();
    let room = layout.shape();
    (rest.iter().all(|&d| room.get(d) == Some(&extents[d]))).then_some(())?;
    let swizzle = Swizzle::ALL.into_iter().find(|&s| {
        if s == Swizzle::None {
            return *layout == LinearLayout::shared_row_major(extents, order);
        }
        room[inner] * bytes >= s.bytes() && *layout == LinearLayout::shared_swizzled(room, order, bytes, s.bytes())
    })?;
    // Extent of a box along the innermost dimension, and along the next one, and elements from one row to the next.
    let width = match swizzle {
        Swizzle::None if rest.is_empty() => extents[inner].min(MAX_BOX),
        Swizzle::None => extents[inner],
        _ => extents[inner].min(swizzle.bytes() / bytes),
    };
    let pitch = if swizzle == Swizzle::None { width } else { swizzle.bytes() / bytes };
    let most = rest.first().map_or(1, |&d| extents[d].min(MAX_BOX));
    let panels = extents[inner] / width;
    let is_even = |height: &u32| {
        rest.is_empty() || (panels * (extents[rest[0]] / height)).is_multiple_of(pieces) && most.is_multiple_of(*height)
    };
    let height = std::iter::successors(Some(most), |&height| (height > 1).then_some(height / 2)).find(is_even)?;
    let too_large = width > MAX_BOX || rest.iter().skip(1).any(|&d| extents[d] > MAX_BOX);
    let split_below = rest.len() > 1 && height < extents[rest[0]];
    if too_large || split_below || !(width * bytes).is_multiple_of(ALIGN as u32) {
        return None;
    }
    let extra = plan.shape.len() - order.len();
    plan.block.push(width);
    plan.block.extend(rest.iter().enumerate().map(|(i, &d)| if i == 0 { height } else { extents[d] }));
    plan.block.extend(std::iter::repeat_n(1, extra));
    plan.swizzle_bytes = if swizzle == Swizzle::None { 0 } else { swizzle.bytes() };
    for panel in 0..panels {
        for part in 0..rest.first().map_or(1, |&d| extents[d] / height) {
            let mut start = vec![0; plan.shape.len()];
            start[0] = panel * width;
            if !rest.is_empty() {
                start[1] = part * height;
            }
            plan.copies.push(BoxCopy { offset: (panel * rows + part * height) * pitch * bytes, start });
        }
    }
    (plan.copies.len() as u32).is_multiple_of(pieces).then_some(())?;
    // The swizzle pattern is a function of address bits, so every box, and every buffer of a ring, must be aligned to
    // it.
    let size = rows * room[inner] * bytes;
    let starts = plan.copies.iter().map(|c| c.offset).chain([size]);
    starts.clone().all(|at| at.is_multiple_of(swizzle.alignment())).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    /// The plan for the view of a kernel and the buffer of its `local_alloc`.
    fn plan_of(text: &str) -> Result<TmaPlan, String> {
        let func = parse(text).unwrap_or_else(|e| panic!("{e}"));
        let axis = AxisAnalysis::new(&func);
        let ops = func.walk();
        let view = ops.iter().find(|&&id| matches!(func.op(id).op, Op::MakeView { .. })).map(|&id| func.result(id));
        let buffer = ops.iter().find(|&&id| func.op(id).op == Op::LocalAlloc).map(|&id| func.result(id));
        plan(&func, &axis, view.unwrap(), &[0], func.ty(buffer.unwrap()), 1)
    }

    const SWIZZLED: &str = "#l0 = shared<offset=[[0,1],[0,2],[0,4],[0,8],[0,16],[0,32],[1,8],[2,16],[4,32],[8,0],[16,0],[32,0],[0,64]], shape=[64,128]>";

    fn kernel(stride: &str, base: &str) -> String {
        format!(
            "{SWIZZLED}
kernel @f(%p: ptr<bf16> {{divisible_by = 16}}, %s: i64 {stride}, %t: i64 {{divisible_by = 16}}, %n: i32) {{
  %h = program_id {{axis = 1}} : i32
  %w = cast %h : i64
  %x = mul %w, %t : i64
  %o = constant {{value = 0}} : i64
  %u = constant {{value = 1}} : i64
  %d = constant {{value = 128}} : i64
  %m = cast %n : i64
  {base}
  %v = make_view %q, %m, %d, %s, %u, %o, %o {{order = [1, 0]}} : view<64x128xbf16>
  %b = local_alloc : shared<64x128xbf16, #l0>
  return
}}"
        )
    }

    #[test]
    fn pointer_offset_of_a_head_becomes_a_map_dimension() {
        let plan = plan_of(&kernel("{divisible_by = 16}", "%q = ptr_add %p, %x : ptr<bf16>")).unwrap();
        assert_eq!(plan.shape, [HostExpr::Const(128), HostExpr::Arg(3), HostExpr::Const(i64::from(i32::MAX))]);
        assert_eq!(plan.strides, [HostExpr::Arg(1), HostExpr::Arg(2)]);
        assert_eq!((plan.block, plan.swizzle_bytes), (vec![64, 64, 1], 128));
        let copies: Vec<(u32, u32)> = plan.copies.iter().map(|c| (c.offset, c.start[0])).collect();
        assert_eq!(copies, [(0, 0), (8192, 64)]);
    }

    #[test]
    fn unaligned_or_device_computed_strides_have_no_plan() {
        let straight = "%q = ptr_add %p, %o : ptr<bf16>";
        assert!(plan_of(&kernel("{divisible_by = 16}", straight)).is_ok());
        let refusal = |stride: &str, base: &str| plan_of(&kernel(stride, base)).unwrap_err();
        // Strides of four elements are eight bytes.
        assert_eq!(
            refusal("{divisible_by = 4}", straight),
            "the stride of axis 0 is not known to be a multiple of 16 bytes"
        );
        assert_eq!(refusal("{divisible_by = 16}", "%q = ptr_add %p, %w : ptr<bf16>"), NO_BASE);
    }
}
