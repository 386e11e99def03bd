//! Transfer functions of the axis analysis.

use super::{Axis, AxisInfo, MAX_DIVISOR, divisor, full_range, zip};
use crate::analysis::dataflow::Facts;
use crate::analysis::lattice::Lattice;
use crate::interp::{arith, literal_bits};
use crate::ir::{BinaryOp, CmpOp, DType, Elem, Op, OpId, Type, Value};
use crate::num;

impl Axis<'_> {
    /// Facts about the result of an op without regions; `None` if nothing is known.
    pub(super) fn result(&self, facts: &Facts<AxisInfo>, id: OpId) -> Option<AxisInfo> {
        let func = self.func;
        let data = func.op(id);
        let ty = func.ty(data.results[0]);
        let operand = |i: usize| self.get(facts, data.operands[i]);
        match &data.op {
            Op::Constant { value } => {
                let dtype = ty.dtype().filter(|d| !d.is_float())?;
                Some(AxisInfo::number(ty, num::decode_int(dtype, literal_bits(*value, dtype))))
            }
            // A grid has at most 2^31 − 1 programs along an axis.
            Op::ProgramId { .. } => Some(AxisInfo::uniform(ty, 1, (0, i32::MAX as i128 - 1))),
            Op::CtaRank { ctas } => Some(AxisInfo::uniform(ty, 1, (0, i128::from(*ctas) - 1))),
            // At most `end`, of a loop that runs.
            Op::TakenIndex => Some(AxisInfo::uniform(ty, 1, (0, i32::MAX.into()))),
            // The index of any iteration.
            Op::DynamicIndex => Some(AxisInfo::uniform(ty, 1, operand(1).range)),
            Op::NumPrograms { .. } => Some(AxisInfo::uniform(ty, 1, (1, i32::MAX as i128))),
            Op::Arange { start, end } => Some(AxisInfo {
                contiguity: vec![(end - start) as u64],
                divisibility: vec![divisor(*start as i128)],
                range: (*start as i128, *end as i128 - 1),
                ..AxisInfo::unknown(ty)
            }),
            Op::Splat => {
                let s = operand(0);
                Some(AxisInfo::uniform(ty, s.divisibility[0], s.range))
            }
            Op::ExpandDims { axis } => {
                let mut info = operand(0);
                let all = info.divisor_of_all();
                info.contiguity.insert(*axis, 1);
                info.constancy.insert(*axis, 1);
                info.divisibility.insert(*axis, all);
                Some(info)
            }
            Op::Broadcast => {
                let mut info = operand(0);
                for (axis, (&from, &to)) in func.ty(data.operands[0]).shape().iter().zip(ty.shape()).enumerate() {
                    if from != to {
                        // The only element of the dimension begins its run, so its divisor is that of all elements.
                        info.constancy[axis] = to as u64;
                        info.contiguity[axis] = 1;
                    }
                }
                Some(info)
            }
            Op::Trans { perm } => {
                let info = operand(0);
                let permute = |list: &[u64]| perm.iter().map(|&p| list[p]).collect();
                Some(AxisInfo {
                    contiguity: permute(&info.contiguity),
                    divisibility: permute(&info.divisibility),
                    constancy: permute(&info.constancy),
                    ..info
                })
            }
            Op::Reshape => Some(reshape(&operand(0), func.ty(data.operands[0]), ty)),
            Op::Hint { .. } => Some(self.hints(facts, id)),
            Op::ConvertLayout => Some(operand(0)),
            Op::Cast => Some(cast(&operand(0), func.ty(data.operands[0]).elem()?, ty)),
            Op::PtrAdd => {
                let from = func.ty(data.operands[1]);
                let mut offset = cast(&operand(1), from.elem()?, &from.with_elem(DType::I64));
                let pointers = operand(0);
                offset.divisibility.iter_mut().for_each(|d| *d = (*d * pointers.unit).min(MAX_DIVISOR));
                offset.unit = pointers.unit;
                Some(add(&pointers, &offset, pointers.range))
            }
            Op::Binary(op) => match ty.dtype() {
                Some(d) if !d.is_float() => Some(binary(*op, d, &operand(0), &operand(1), ty)),
                _ => Some(equal_where_all_are(&[operand(0), operand(1)], ty)),
            },
            Op::Unary(_) | Op::Bitcast | Op::Fma => {
                let operands: Vec<AxisInfo> = (0..data.operands.len()).map(operand).collect();
                Some(equal_where_all_are(&operands, ty))
            }
            Op::Cmp(op) => Some(compare(*op, &operand(0), &operand(1), ty)),
            Op::Select => {
                let met = operand(1).meet(&operand(2));
                let condition = operand(0).constancy;
                let contiguity = zip(&met.contiguity, &condition, u64::min);
                let constancy = zip(&met.constancy, &condition, u64::min);
                Some(AxisInfo { constancy, ..met.shortened(contiguity) })
            }
            _ => None,
        }
    }

    /// Facts about the last of a chain of hints. The length of runs has to be known before the divisor of their first
    /// elements.
    fn hints(&self, facts: &Facts<AxisInfo>, last: OpId) -> AxisInfo {
        let func = self.func;
        let mut chain = vec![last];
        let base = loop {
            let v: Value = func.op(chain[chain.len() - 1]).operands[0];
            match func.def_op(v).filter(|&id| matches!(func.op(id).op, Op::Hint { .. })) {
                Some(id) => chain.push(id),
                None => break v,
            }
        };
        let mut info = self.get(facts, base);
        let inner = info.rank() - 1;
        let promised = |id: &OpId| match func.op(*id).op {
            Op::Hint { divisible, contiguous, .. } => (divisible.unwrap_or(1), contiguous),
            _ => (1, None),
        };
        let shape = func.ty(base).shape();
        let extent = shape.last().map_or(1, |&n| n as u64);
        // Each element is a separate run.
        let single = extent == 1;
        let runs = |contiguous: Option<i64>| contiguous.map_or(1, |n| divisor(n as i128).min(extent));
        let longest = chain.iter().map(|id| runs(promised(id).1)).max().unwrap_or(1);
        // A run that becomes longer starts where one of the shorter runs did.
        info.contiguity[inner] = info.contiguity[inner].max(longest);
        for id in &chain {
            if let Op::Hint { at_least: Some(least), .. } = func.op(*id).op {
                info.range.0 = info.range.0.max(least.into()).min(info.range.1);
            }
            let (divisible, contiguous) = promised(id);
            let d = divisor(divisible as i128);
            // The hint states the divisor of the first element of its runs. Without a length, these are the longest
            // runs of the actual values, and runs of the length known here may start anywhere inside them.
            let stated = single || contiguous.is_some_and(|n| n.count_ones() == 1);
            let first = if stated { d } else { d.min(info.contiguity[inner] * info.unit) };
            info.divisibility[inner] = info.divisibility[inner].max(first);
            let all = if single { d } else { d.min(info.unit) };
            info.divisibility.iter_mut().for_each(|x| *x = (*x).max(all));
        }
        info
    }
}

/// Facts about any elementwise result: elements are equal where those of all operands are.
fn equal_where_all_are(operands: &[AxisInfo], ty: &Type) -> AxisInfo {
    let constancy = operands.iter().map(|o| o.constancy.clone()).reduce(|a, b| zip(&a, &b, u64::min));
    let unknown = AxisInfo::unknown(ty);
    AxisInfo { constancy: constancy.unwrap_or_else(|| unknown.constancy.clone()), ..unknown }
}

/// Facts about a reshape in row-major order: runs along the last dimension remain, up to the length of the new rows.
pub(super) fn reshape(info: &AxisInfo, from: &Type, to: &Type) -> AxisInfo {
    let whole = from.shape().iter().zip(&info.constancy).all(|(&n, &c)| c >= n as u64);
    if whole {
        return AxisInfo::uniform(to, info.divisor_of_all(), info.range);
    }
    let mut result = AxisInfo { range: info.range, ..AxisInfo::unknown(to) };
    result.divisibility.fill(info.divisor_of_all());
    let (old, new, extent) = (info.rank() - 1, result.rank() - 1, to.shape().last().map_or(1, |&n| n as u64));
    result.constancy[new] = info.constancy[old].min(extent);
    let run = info.contiguity[old].min(extent);
    if run > 1 {
        result.contiguity[new] = run;
        result.divisibility[new] = info.divisor_at(old, run);
    }
    result
}

pub(super) fn cast(info: &AxisInfo, from: Elem, ty: &Type) -> AxisInfo {
    let (Some(from), Some(to)) = (from.num(), ty.dtype()) else {
        return equal_where_all_are(std::slice::from_ref(info), ty);
    };
    if from.is_float() || to.is_float() || to == DType::Bool {
        return equal_where_all_are(std::slice::from_ref(info), ty);
    }
    // A run modulo fewer than 32 bits that wraps is no run in a wider type.
    let narrow = from.bits() < 32 && to.bits() > from.bits();
    let runs = (0..info.rank()).map(|i| if narrow { info.non_wrapping_run(i) } else { info.contiguity[i] }).collect();
    let mut result = info.clone().shortened(runs);
    result.bits = to.bits() as u32;
    result.range = within(info.range, to);
    result
}

/// The range if it fits the type, else the full range of the type, since arithmetic wraps.
fn within(range: (i128, i128), dtype: DType) -> (i128, i128) {
    let full = full_range(Some(dtype.into()));
    if range.0 >= full.0 && range.1 <= full.1 { range } else { full }
}

/// Facts about a sum: runs of one operand remain where the other one is constant.
fn add(a: &AxisInfo, b: &AxisInfo, range: (i128, i128)) -> AxisInfo {
    let runs = |x: &AxisInfo, y: &AxisInfo| zip(&x.contiguity, &y.constancy, u64::min);
    combined(a, b, zip(&runs(a, b), &runs(b, a), u64::max), range)
}

/// Facts about a sum or difference with runs of these lengths, in each of which one operand is contiguous and the other
/// constant.
fn combined(a: &AxisInfo, b: &AxisInfo, contiguity: Vec<u64>, range: (i128, i128)) -> AxisInfo {
    let at = |(i, &c): (usize, &u64)| a.divisor_at(i, c).min(b.divisor_at(i, c));
    AxisInfo {
        divisibility: contiguity.iter().enumerate().map(at).collect(),
        contiguity,
        constancy: zip(&a.constancy, &b.constancy, u64::min),
        range,
        ..a.clone()
    }
}

pub(super) fn binary(op: BinaryOp, dtype: DType, a: &AxisInfo, b: &AxisInfo, ty: &Type) -> AxisInfo {
    let range = range_of(op, dtype, a, b);
    let mut info = AxisInfo { range, ..equal_where_all_are(&[a.clone(), b.clone()], ty) };
    let constant = |x: &AxisInfo| (x.range.0 == x.range.1).then_some(x.range.0);
    if let (Some(x), Some(y)) = (constant(a), constant(b)) {
        let bits = arith::binary(op, dtype, num::encode_int(dtype, x), num::encode_int(dtype, y));
        return AxisInfo::number(ty, num::decode_int(dtype, bits));
    }
    match op {
        BinaryOp::Add => return add(a, b, range),
        BinaryOp::Sub => return combined(a, b, zip(&a.contiguity, &b.constancy, u64::min), range),
        BinaryOp::Mul => {
            for (x, y) in [(a, b), (b, a)] {
                if constant(y) == Some(1) {
                    return AxisInfo { constancy: info.constancy, ..x.clone() };
                }
            }
            info.divisibility.fill(a.divisor_of_all().saturating_mul(b.divisor_of_all()).min(MAX_DIVISOR));
        }
        BinaryOp::Rem => {
            // A remainder by zero is zero.
            let by_zero = b.range.0 <= 0 && b.range.1 >= 0;
            let contiguity = (0..a.rank()).map(|i| if by_zero { 1 } else { quotient_run(a, b, i) }).collect();
            // A common divisor of a and b divides a − b·q for every q.
            return combined(a, b, contiguity, range);
        }
        BinaryOp::Div => {
            info.constancy = (0..a.rank()).map(|i| info.constancy[i].max(quotient_run(a, b, i))).collect();
            info.divisibility.fill(exact_quotient(a.divisor_of_all(), constant(b)));
        }
        BinaryOp::CeilDiv => info.divisibility.fill(exact_quotient(a.divisor_of_all(), constant(b))),
        BinaryOp::Shr => {
            let shift = constant(b).filter(|s| (0..i128::from(a.bits.min(32))).contains(s));
            info.divisibility.fill(exact_quotient(a.divisor_of_all(), shift.map(|s| 1 << s)));
        }
        BinaryOp::Min | BinaryOp::Max => {
            info.divisibility.fill(a.divisor_of_all().min(b.divisor_of_all()));
        }
        BinaryOp::Shl => {
            let shift = constant(b).filter(|s| (0..i128::from(a.bits.min(32))).contains(s)).unwrap_or(0);
            info.divisibility.fill((a.divisor_of_all() << shift).min(MAX_DIVISOR));
        }
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::MulHi | BinaryOp::Rescale => {}
    }
    info
}

/// A divisor of a / b for each multiple a of `divisor`: the division by a constant that divides it has no remainder.
fn exact_quotient(divisor: u64, by: Option<i128>) -> u64 {
    match by.and_then(|by| u64::try_from(by).ok()) {
        Some(by) if by > 0 && divisor.is_multiple_of(by) => divisor / by,
        _ => 1,
    }
}

/// Length of the aligned runs along a dimension in which a / b is constant: up to the next multiple of the divisor, and
/// for division by zero (which gives zero). Only for non-negative dividends: −4, −3, −2, −1 by 4 give −1, 0, 0, 0,
/// toward zero.
fn quotient_run(a: &AxisInfo, b: &AxisInfo, dim: usize) -> u64 {
    if a.range.0 < 0 {
        return 1;
    }
    let run = a.non_wrapping_run(dim).min(b.constancy[dim]);
    run.min(b.divisor_at(dim, run))
}

/// Smallest and largest result; the full range of the type if the result may wrap.
fn range_of(op: BinaryOp, dtype: DType, a: &AxisInfo, b: &AxisInfo) -> (i128, i128) {
    let full = full_range(Some(dtype.into()));
    let ((a0, a1), (b0, b1)) = (a.range, b.range);
    match op {
        BinaryOp::Add => within((a0 + b0, a1 + b1), dtype),
        BinaryOp::Sub => within((a0 - b1, a1 - b0), dtype),
        BinaryOp::Mul => {
            let corners = [(a0, b0), (a0, b1), (a1, b0), (a1, b1)].map(|(x, y)| x.checked_mul(y));
            match corners {
                [Some(p), Some(q), Some(r), Some(s)] => within((p.min(q).min(r).min(s), p.max(q).max(r).max(s)), dtype),
                _ => full,
            }
        }
        BinaryOp::Rem if a0 >= 0 => (0, a1.min((b0.abs().max(b1.abs()) - 1).max(0))),
        BinaryOp::Div if b0 == b1 && b0 > 0 => (a0 / b0, a1 / b0),
        BinaryOp::Div if a0 >= 0 && b0 >= 0 => (0, a1),
        BinaryOp::CeilDiv if b0 > 0 => {
            let up = |a: i128, b: i128| a.div_euclid(b) + i128::from(a % b != 0);
            // Larger divisors take quotients closer to 0.
            (up(a0, if a0 < 0 { b0 } else { b1 }), up(a1, if a1 < 0 { b1 } else { b0 }))
        }
        BinaryOp::CeilDiv if a0 >= 0 && b0 >= 0 => (0, a1),
        BinaryOp::Min => (a0.min(b0), a1.min(b1)),
        BinaryOp::Max => (a0.max(b0), a1.max(b1)),
        BinaryOp::And if a0 >= 0 && b0 >= 0 => (0, a1.min(b1)),
        BinaryOp::And if a0 >= 0 => (0, a1),
        BinaryOp::And if b0 >= 0 => (0, b1),
        BinaryOp::Shr if b0 == b1 && (0..i128::from(a.bits)).contains(&b0) => (a0 >> b0, a1 >> b0),
        BinaryOp::Shr if a0 >= 0 => (0, a1),
        _ => full,
    }
}

/// Facts about a comparison. Compared with a constant, consecutive numbers change the result only at multiples of a
/// common divisor.
pub(super) fn compare(op: CmpOp, a: &AxisInfo, b: &AxisInfo, ty: &Type) -> AxisInfo {
    let mut info = equal_where_all_are(&[a.clone(), b.clone()], ty);
    for i in 0..info.rank() {
        let step = |run: &AxisInfo, fixed: &AxisInfo| {
            let length = run.non_wrapping_run(i).min(fixed.constancy[i]);
            length.min(fixed.divisor_at(i, length) / fixed.unit).max(1)
        };
        let stepped = match op {
            // `x < n` and `x ≥ n` are constant from one multiple to the next; so are `n > x` and `n ≤ x`.
            CmpOp::Lt | CmpOp::Ge => step(a, b),
            CmpOp::Gt | CmpOp::Le => step(b, a),
            CmpOp::Eq | CmpOp::Ne => 1,
        };
        info.constancy[i] = info.constancy[i].max(stepped);
    }
    info
}
