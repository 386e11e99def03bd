//! Contiguity, divisibility and constancy of integer and pointer values.
//!
//! This is what vector width and coalescing are decided from: a run of `contiguity` neighbours whose first address is a
//! multiple of 16 bytes can be one 128-bit access, provided the mask is `constant` over the run.

use crate::ir::{BinaryOp, BlockId, CmpOp, Func, Literal, Op, OpId, Value};

/// Largest divisor that is worth knowing; also that of zero.
const MAX_DIVISOR: u64 = 1 << 32;

/// What is known of one value, per dimension of its tile (one entry for scalars).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AxisInfo {
    /// Elements come in aligned runs of this length in which each is one more than the one before (for pointers: one
    /// element further).
    pub contiguity: Vec<u64>,
    /// The first element of each contiguous run is a multiple of this power of two (for pointers: of this many bytes).
    pub divisibility: Vec<u64>,
    /// Elements come in aligned runs of this length that are all equal.
    pub constancy: Vec<u64>,
    /// The value, where it is one known integer.
    pub constant: Option<i64>,
}

impl AxisInfo {
    /// Nothing is known about a value of this rank.
    pub fn unknown(rank: usize) -> AxisInfo {
        let n = rank.max(1);
        AxisInfo { contiguity: vec![1; n], divisibility: vec![1; n], constancy: vec![1; n], constant: None }
    }

    fn uniform(shape: &[usize], divisor: u64, constant: Option<i64>) -> AxisInfo {
        let mut info = AxisInfo::unknown(shape.len());
        info.divisibility.fill(divisor);
        info.constancy = if shape.is_empty() { vec![1] } else { shape.iter().map(|&n| n as u64).collect() };
        info.constant = constant;
        info
    }

    /// Divisor of every element, whatever its place in a run.
    pub fn divisor_of_all(&self) -> u64 {
        if self.contiguity.iter().any(|&c| c > 1) { 1 } else { *self.divisibility.iter().min().unwrap_or(&1) }
    }

    fn meet(&self, other: &AxisInfo) -> AxisInfo {
        let each = |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(&a, &b)| a.min(b)).collect();
        AxisInfo {
            contiguity: each(&self.contiguity, &other.contiguity),
            divisibility: each(&self.divisibility, &other.divisibility),
            constancy: each(&self.constancy, &other.constancy),
            constant: if self.constant == other.constant { self.constant } else { None },
        }
    }
}

/// Largest power of two that divides `n`, capped; zero is divisible by everything.
pub fn divisor(n: i64) -> u64 {
    if n == 0 { MAX_DIVISOR } else { (1u64 << n.trailing_zeros().min(32)).min(MAX_DIVISOR) }
}

/// Facts about every value of a function.
pub struct AxisAnalysis {
    infos: Vec<Option<AxisInfo>>,
}

impl AxisAnalysis {
    /// Walks the function; loop-carried values are iterated to a fixed point from optimistic starts.
    pub fn new(func: &Func) -> AxisAnalysis {
        let mut a = AxisAnalysis { infos: vec![None; func.num_values()] };
        for (arg, &v) in func.args.iter().zip(&func.block(func.body).params) {
            let constant = arg.equal_to;
            let d = constant.map_or(arg.divisible_by, divisor);
            // Only powers of two matter for alignment.
            let d = 1u64 << d.trailing_zeros().min(32);
            a.infos[v.0 as usize] = Some(AxisInfo::uniform(&[], d, constant));
        }
        a.block(func, func.body);
        a
    }

    /// What is known of a value.
    pub fn get(&self, func: &Func, v: Value) -> AxisInfo {
        match self.infos.get(v.0 as usize) {
            Some(Some(info)) => info.clone(),
            _ => AxisInfo::unknown(func.ty(v).shape().len()),
        }
    }

    /// Largest known power of two that divides a scalar (bytes for pointers).
    pub fn scalar_divisor(&self, func: &Func, v: Value) -> u64 {
        self.get(func, v).divisibility[0]
    }

    /// The constant that a scalar is known to be.
    pub fn scalar_constant(&self, func: &Func, v: Value) -> Option<i64> {
        self.get(func, v).constant
    }

    fn set(&mut self, v: Value, info: AxisInfo) {
        self.infos[v.0 as usize] = Some(info);
    }

    fn block(&mut self, func: &Func, block: BlockId) {
        for &id in &func.block(block).ops {
            self.op(func, id);
        }
    }

    fn op(&mut self, func: &Func, id: OpId) {
        let data = func.op(id);
        match &data.op {
            Op::For { .. } => self.for_loop(func, id),
            Op::If => {
                for &r in &data.regions {
                    self.block(func, r);
                }
                for (i, &v) in data.results.iter().enumerate() {
                    let info = data
                        .regions
                        .iter()
                        .map(|&r| self.get(func, terminator_operands(func, r)[i]))
                        .reduce(|a, b| a.meet(&b));
                    self.infos[v.0 as usize] = info;
                }
            }
            Op::While | Op::Reduce { .. } | Op::Scan { .. } | Op::Roles { .. } => {
                // Carried values of a while stay unknown; combine regions hold no memory accesses.
                for &r in &data.regions {
                    self.block(func, r);
                }
            }
            _ => {
                if let (Some(info), [result]) = (self.transfer(func, id), &data.results[..]) {
                    self.set(*result, info);
                }
            }
        }
    }

    fn for_loop(&mut self, func: &Func, id: OpId) {
        let data = func.op(id);
        let region = data.regions[0];
        let params = func.block(region).params.clone();
        let (lower, step) = (self.get(func, data.operands[0]), self.get(func, data.operands[2]));
        let index = lower.divisibility[0].min(step.divisibility[0]);
        self.set(params[0], AxisInfo::uniform(&[], index, None));
        for (&param, &init) in params[1..].iter().zip(&data.operands[3..]) {
            let mut info = self.get(func, init);
            info.constant = None;
            self.set(param, info);
        }
        // Each round can only lower facts, each of which takes at most 33 values.
        loop {
            self.block(func, region);
            let mut changed = false;
            for (&param, &next) in params[1..].iter().zip(terminator_operands(func, region)) {
                let old = self.get(func, param);
                let met = old.meet(&self.get(func, next));
                changed |= met != old;
                self.set(param, met);
            }
            if !changed {
                break;
            }
        }
        for (&result, &param) in data.results.iter().zip(&params[1..]) {
            let info = self.get(func, param);
            self.set(result, info);
        }
    }

    /// Facts about the result of a straight-line op; `None` where nothing is known.
    fn transfer(&self, func: &Func, id: OpId) -> Option<AxisInfo> {
        let data = func.op(id);
        let result = *data.results.first()?;
        let shape = func.ty(result).shape();
        let operand = |i: usize| self.get(func, data.operands[i]);
        match &data.op {
            Op::Constant { value: Literal::Int(n) } => Some(AxisInfo::uniform(shape, divisor(*n), Some(*n))),
            Op::Constant { value: Literal::Bool(b) } => Some(AxisInfo::uniform(shape, 1, Some(*b as i64))),
            Op::Arange { start, end } => Some(AxisInfo {
                contiguity: vec![(end - start) as u64],
                divisibility: vec![divisor(*start)],
                constancy: vec![1],
                constant: None,
            }),
            Op::Splat => {
                let s = operand(0);
                Some(AxisInfo::uniform(shape, s.divisibility[0], s.constant))
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
                for (axis, (&from, &to)) in func.ty(data.operands[0]).shape().iter().zip(shape).enumerate() {
                    if from != to {
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
                    constant: info.constant,
                })
            }
            Op::Hint { divisible, contiguous } => {
                let mut info = operand(0);
                if let Some(d) = divisible {
                    info.divisibility.iter_mut().for_each(|x| *x = (*x).max(divisor(*d)));
                }
                if let (Some(c), Some(last)) = (contiguous, info.contiguity.last_mut()) {
                    *last = (*last).max(*c as u64);
                }
                Some(info)
            }
            Op::ConvertLayout => Some(operand(0)),
            Op::Cast => match (func.ty(data.operands[0]).dtype(), func.ty(result).dtype()) {
                (Some(from), Some(to)) if from.is_int() && to.is_int() && to.bits() >= from.bits() => Some(operand(0)),
                _ => {
                    let mut info = AxisInfo::unknown(shape.len());
                    info.constancy = operand(0).constancy;
                    Some(info)
                }
            },
            Op::PtrAdd => {
                let bytes = func.ty(result).elem()?.pointee()?.bytes() as u64;
                let mut offset = operand(1);
                offset.divisibility.iter_mut().for_each(|d| *d = (*d * bytes).min(MAX_DIVISOR));
                Some(add(&operand(0), &offset))
            }
            Op::Binary(op) => binary(*op, &operand(0), &operand(1)),
            Op::Cmp(op) => Some(compare(*op, &operand(0), &operand(1))),
            Op::Select => {
                let mut info = operand(1).meet(&operand(2));
                let condition = operand(0).constancy;
                if condition.len() == info.constancy.len() {
                    for (i, c) in condition.into_iter().enumerate() {
                        info.contiguity[i] = info.contiguity[i].min(c);
                        info.constancy[i] = info.constancy[i].min(c);
                    }
                }
                Some(info)
            }
            _ => None,
        }
    }
}

fn zip3(a: &[u64], b: &[u64], f: impl Fn(u64, u64) -> u64) -> Vec<u64> {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

fn add(a: &AxisInfo, b: &AxisInfo) -> AxisInfo {
    let runs = |x: &AxisInfo, y: &AxisInfo| zip3(&x.contiguity, &y.constancy, u64::min);
    AxisInfo {
        contiguity: zip3(&runs(a, b), &runs(b, a), u64::max),
        divisibility: zip3(&a.divisibility, &b.divisibility, u64::min),
        constancy: zip3(&a.constancy, &b.constancy, u64::min),
        constant: a.constant.zip(b.constant).and_then(|(a, b)| a.checked_add(b)),
    }
}

fn binary(op: BinaryOp, a: &AxisInfo, b: &AxisInfo) -> Option<AxisInfo> {
    let constants = a.constant.zip(b.constant);
    let constancy = zip3(&a.constancy, &b.constancy, u64::min);
    let n = constancy.len();
    let info = |contiguity: Vec<u64>, divisibility: Vec<u64>, constant: Option<i64>| {
        Some(AxisInfo { contiguity, divisibility, constancy: constancy.clone(), constant })
    };
    match op {
        BinaryOp::Add => Some(add(a, b)),
        BinaryOp::Sub => info(
            zip3(&a.contiguity, &b.constancy, u64::min),
            zip3(&a.divisibility, &b.divisibility, u64::min),
            constants.and_then(|(a, b)| a.checked_sub(b)),
        ),
        BinaryOp::Mul => {
            if b.constant == Some(1) {
                return Some(AxisInfo { constancy, ..a.clone() });
            }
            if a.constant == Some(1) {
                return Some(AxisInfo { constancy, ..b.clone() });
            }
            // Within a run of consecutive numbers only the first is known to be divisible.
            let of_all = |x: &AxisInfo| -> Vec<u64> {
                x.contiguity.iter().zip(&x.divisibility).map(|(&c, &d)| if c > 1 { 1 } else { d }).collect()
            };
            let product = zip3(&of_all(a), &of_all(b), |a, b| (a * b).min(MAX_DIVISOR));
            info(vec![1; n], product, constants.and_then(|(a, b)| a.checked_mul(b)))
        }
        BinaryOp::Rem => {
            // Consecutive numbers stay consecutive up to the next multiple of the modulus.
            let contiguity = (0..n)
                .map(|i| {
                    if b.constancy[i] >= a.contiguity[i] {
                        a.contiguity[i].min(b.divisibility[i]).min(a.divisibility[i])
                    } else {
                        1
                    }
                })
                .collect();
            info(contiguity, zip3(&a.divisibility, &b.divisibility, u64::min), None)
        }
        BinaryOp::Div => {
            // a / b is constant over the part of a run of a that does not cross a multiple of b.
            let mut result = AxisInfo::unknown(n);
            if n == a.contiguity.len() {
                result.constancy = (0..n)
                    .map(|i| {
                        let run = a.contiguity[i].min(b.divisibility[i]).min(a.divisibility[i]).min(b.constancy[i]);
                        run.max(constancy[i])
                    })
                    .collect();
            }
            result.constant = constants.and_then(|(a, b)| a.checked_div(b));
            if let Some(c) = result.constant {
                result.divisibility.fill(divisor(c));
            }
            Some(result)
        }
        BinaryOp::Min | BinaryOp::Max => info(
            vec![1; n],
            zip3(&a.divisibility, &b.divisibility, u64::min)
                .into_iter()
                .enumerate()
                .map(|(i, d)| if a.contiguity[i] > 1 || b.contiguity[i] > 1 { 1 } else { d })
                .collect(),
            None,
        ),
        BinaryOp::Shl => {
            let shifted = b.constant.filter(|s| (0..32).contains(s)).map(|s| 1u64 << s);
            let product = a
                .contiguity
                .iter()
                .zip(&a.divisibility)
                .map(|(&c, &d)| ((if c > 1 { 1 } else { d }) * shifted.unwrap_or(1)).min(MAX_DIVISOR))
                .collect();
            info(vec![1; n], product, None)
        }
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Shr | BinaryOp::MulHi => {
            info(vec![1; n], vec![1; n], None)
        }
    }
}

/// A comparison of consecutive numbers with a constant changes only at multiples of what divides both.
fn compare(op: CmpOp, a: &AxisInfo, b: &AxisInfo) -> AxisInfo {
    let n = a.contiguity.len();
    let mut info = AxisInfo::unknown(n);
    for i in 0..n {
        let equal = a.constancy[i].min(b.constancy[i]);
        let step = |run: &AxisInfo, fixed: &AxisInfo| {
            run.contiguity[i].min(run.divisibility[i]).min(fixed.divisibility[i]).min(fixed.constancy[i])
        };
        let stepped = match op {
            // `x < n` and `x ≥ n` keep their value from one multiple to the next; `n > x` and `n ≤ x` likewise.
            CmpOp::Lt | CmpOp::Ge => step(a, b),
            CmpOp::Gt | CmpOp::Le => step(b, a),
            CmpOp::Eq | CmpOp::Ne => 1,
        };
        info.constancy[i] = equal.max(stepped);
    }
    info
}

/// Operands of the op that ends a block; empty for an empty block.
fn terminator_operands(func: &Func, block: BlockId) -> &[Value] {
    match func.block(block).ops.last() {
        Some(&id) => &func.op(id).operands,
        None => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    /// Facts about the value that the op with this mnemonic defines last.
    fn facts(text: &str, mnemonic: &str) -> AxisInfo {
        let f = parse(text).unwrap();
        let a = AxisAnalysis::new(&f);
        let id = f.walk().into_iter().rfind(|&id| f.op(id).op.mnemonic() == mnemonic).unwrap();
        a.get(&f, f.result(id))
    }

    #[test]
    fn pointers_of_a_masked_vector_add() {
        let text = "kernel @f(%x: ptr<f32> {divisible_by = 16}, %n: i32 {divisible_by = 16}) {
            %p = program_id {axis = 0} : i32
            %b = constant {value = 1024} : i32
            %o = mul %p, %b : i32
            %r = arange {start = 0, end = 1024} : tensor<1024xi32>
            %s = splat %o : tensor<1024xi32>
            %i = add %s, %r : tensor<1024xi32>
            %q = splat %x : tensor<1024xptr<f32>>
            %a = ptr_add %q, %i : tensor<1024xptr<f32>>
            %m = splat %n : tensor<1024xi32>
            %k = cmp_lt %i, %m : tensor<1024xbool>
            return }";
        let p = facts(text, "ptr_add");
        assert_eq!((p.contiguity[0], p.divisibility[0]), (1024, 16));
        assert_eq!(facts(text, "cmp_lt").constancy[0], 16);
        assert_eq!(facts(&text.replace("%n: i32 {divisible_by = 16}", "%n: i32"), "cmp_lt").constancy[0], 1);
    }

    #[test]
    fn a_loop_keeps_what_every_iteration_keeps() {
        let text = |step: i64| {
            format!(
                "kernel @f(%n: i32) {{
            %z = constant {{value = 0}} : i32
            %o = constant {{value = 1}} : i32
            %s = constant {{value = {step}}} : i32
            %c = constant {{value = 64}} : i32
            %r = for %z, %n, %o, %c : i32 (%i: i32, %a: i32) {{
              %b = add %a, %s : i32
              yield %b
            }}
            return }}"
            )
        };
        assert_eq!(facts(&text(32), "for").divisibility[0], 32);
        assert_eq!(facts(&text(5), "for").divisibility[0], 1);
        assert_eq!(facts(&text(128), "for").divisibility[0], 64);
    }
}
