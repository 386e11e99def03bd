//! Assumes signs of dividends and divisors that a launch checks.
//!
//! `offsets % n` keeps runs of offsets contiguous only if the offsets are not negative and n is positive. A kernel
//! alone does not say so: n is an argument, and products of program ids wrap. A launch, which knows arguments and grid,
//! does.
//!
//! Does: where an access through pointers becomes wider if a dividend is not negative and a divisor positive, replaces
//! them by hints that say so. [`Footprint::violated_assumption`](crate::analysis::bounds::Footprint) checks them with
//! the numbers of a launch.
//! The result is split ([`split_tiles`]): the accesses are those of parts.
//! Requires: a verified function of stage *tile*, and that every launch of the resulting code makes this check.
//! Keeps: every computed value in launches that pass the check.
//! Does not: assume anything that does not widen an access, nor anything about values that no launch knows, such as
//! numbers from memory.

use super::split_tiles;
use crate::analysis::access_layout::{pointer_order_and_width, pointers_and_mask};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::bounds;
use crate::ir::{BinaryOp, Builder, DType, Func, Op, OpId, Value, nested};

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut split = func.clone();
    split_tiles::run(&mut split);
    let mut assumed = candidates(&split);
    if assumed.is_empty() {
        return false;
    }
    let widest = widths(&with_hints(&split, &assumed));
    if widest == widths(&split) {
        return false;
    }
    for candidate in assumed.clone() {
        let fewer: Vec<Candidate> = assumed.iter().copied().filter(|&c| c != candidate).collect();
        if widths(&with_hints(&split, &fewer)) == widest {
            assumed = fewer;
        }
    }
    *func = with_hints(&split, &assumed);
    true
}

/// An operand of a division whose range is to be limited.
#[derive(Clone, Copy, PartialEq)]
struct Candidate {
    op: OpId,
    operand: usize,
    at_least: i64,
}

/// Dividends that may be negative and divisors that may not be positive, where a launch knows their ranges.
fn candidates(func: &Func) -> Vec<Candidate> {
    let is_division = |&id: &OpId| {
        let data = func.op(id);
        matches!(data.op, Op::Binary(BinaryOp::Rem | BinaryOp::Div))
            && func.ty(data.operands[0]).dtype().is_some_and(DType::is_int)
            // The bounds analysis does not visit functions that combine elements.
            && nested::is_in_code(func, id)
    };
    let divisions: Vec<OpId> = func.walk().into_iter().filter(is_division).collect();
    // Most kernels have none, and need no analysis.
    if divisions.is_empty() {
        return Vec::new();
    }
    let axis = AxisAnalysis::new(func);
    let mut found = Vec::new();
    for id in divisions {
        let data = func.op(id);
        for (operand, at_least) in [(0, 0), (1, 1)] {
            if axis.get(func, data.operands[operand]).range.0 < at_least.into() {
                found.push(Candidate { op: id, operand, at_least });
            }
        }
    }
    let values: Vec<Value> = found.iter().map(|c| func.op(c.op).operands[c.operand]).collect();
    let known = bounds::are_known_at_launch(func, &values);
    found.into_iter().zip(known).filter_map(|(candidate, known)| known.then_some(candidate)).collect()
}

/// The function with a hint for each candidate.
fn with_hints(func: &Func, candidates: &[Candidate]) -> Func {
    let mut hinted = func.clone();
    for &Candidate { op, operand, at_least } in candidates {
        let data = func.op(op);
        let v = data.operands[operand];
        let v = Builder::before(&mut hinted, op, data.loc.clone()).at_least(v, at_least);
        hinted.set_operand(op, operand, v);
    }
    hinted
}

/// For each access through pointers, the number of consecutive elements that one access of a thread may cover.
fn widths(func: &Func) -> Vec<u64> {
    let axis = AxisAnalysis::new(func);
    let accesses = func.walk().into_iter().filter_map(|id| pointers_and_mask(func, func.op(id)));
    accesses.map(|(pointers, mask)| pointer_order_and_width(func, &axis, pointers, mask).1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::bounds::{Footprint, Launch};
    use crate::pipeline::footprint;
    use crate::testgen::{Argument, Program, Rng, check_analyses};
    use crate::text::{parse, print};

    struct Numbers<'a>(&'a [i64]);

    impl Launch for Numbers<'_> {
        fn integer(&self, arg: usize) -> i128 {
            self.0[arg].into()
        }
        fn bytes(&self, _: usize) -> u64 {
            0
        }
        fn address(&self, _: usize) -> u64 {
            0
        }
    }

    fn holds(footprint: &Footprint, numbers: &[i64], grid: u32) -> bool {
        footprint.violated_assumption(&Numbers(numbers), [grid, 1, 1]).is_none()
    }

    /// Loads 64 elements of `%x` at `(%e + 0 .. 64) % %n`, where `lines` computes `%e`.
    fn gather(lines: &str) -> String {
        format!(
            "kernel @f(%x: ptr<i32> {{divisible_by = 16}}, %y: ptr<i32>, %n: i32 {{divisible_by = 16}},
    %s: i32, %t: i32) {{
  %pid = program_id {{axis = 0}} : i32
  %c = constant {{value = 16}} : i32
{lines}
  %r = arange {{start = 0, end = 64}} : tensor<64xi32>
  %es = splat %e : tensor<64xi32>
  %ns = splat %n : tensor<64xi32>
  %a = add %es, %r : tensor<64xi32>
  %m = rem %a, %ns : tensor<64xi32>
  %zero = constant {{value = 0}} : tensor<64xi32>
  %end = constant {{value = 64}} : tensor<64xi32>
  %low = cmp_ge %m, %zero : tensor<64xbool>
  %high = cmp_lt %m, %end : tensor<64xbool>
  %k = and %low, %high : tensor<64xbool>
  %xs = splat %x : tensor<64xptr<i32>>
  %p = ptr_add %xs, %m : tensor<64xptr<i32>>
  %v = load %p, %k {{eviction = normal}} : tensor<64xi32>
  %ys = splat %y : tensor<64xptr<i32>>
  %sixty_four = constant {{value = 64}} : i32
  %own = mul %pid, %sixty_four : i32
  %os = splat %own : tensor<64xi32>
  %o = add %os, %r : tensor<64xi32>
  %q = ptr_add %ys, %o : tensor<64xptr<i32>>
  store %q, %v {{eviction = normal}}
  return
}}"
        )
    }

    fn assumed(lines: &str) -> Func {
        let mut func = parse(&gather(lines)).unwrap_or_else(|e| panic!("{e}"));
        assert!(run(&mut func), "nothing is assumed of\n{lines}");
        func
    }

    #[test]
    fn launches_decide_whether_assumptions_hold() {
        let code = footprint(&assumed("  %first = mul %pid, %s : i32\n  %e = mul %first, %c : i32"));
        let holds = |n: i64, s: i64, grid: u32| holds(&code, &[0, 0, n, s, 0], grid);
        assert!(holds(64, 4, 1) && holds(16, 0, 1000) && holds(16, -4, 1));
        // A divisor of 0 or less; a negative dividend.
        assert!(!holds(0, 4, 1) && !holds(-16, 4, 1) && !holds(64, -4, 2));
        // The largest dividend is 2³¹ − 1 at most: 16 · s · (grid − 1) + 63.
        assert!(holds(64, 1 << 20, 128) && !holds(64, 1 << 20, 129));
        assert!(holds(64, (1 << 27) - 4, 2) && !holds(64, (1 << 27) - 3, 2));
        // Nothing runs.
        assert!(holds(0, 4, 0));
        let violated = code.violated_assumption(&Numbers(&[0, 0, 64, -1, 0]), [3, 1, 1]).unwrap();
        assert_eq!((violated.found, violated.at_least), (-32, 0));
    }

    #[test]
    fn only_what_widens_an_access_is_assumed() {
        let hints = |func: &Func| func.walk().iter().filter(|&&id| matches!(func.op(id).op, Op::Hint { .. })).count();
        assert_eq!(hints(&assumed("  %e = mul %s, %c : i32")), 2);
        // The quotient is not used as an address.
        assert_eq!(hints(&assumed("  %e = mul %s, %c : i32\n  %quotient = div %s, %t : i32")), 2);
        // Dividends that are never negative.
        assert_eq!(hints(&assumed("  %e = constant {value = 32} : i32")), 1);
        for (lines, why) in [
            ("  %e = mul %s, %t : i32", "runs start anywhere"),
            ("  %l = load %x {eviction = normal} : i32\n  %e = mul %l, %c : i32", "no launch knows the number"),
        ] {
            let mut func = parse(&gather(lines)).unwrap();
            let before = print(&func);
            assert!(!run(&mut func) && print(&func) == before, "{why}");
        }
    }

    /// Dividends that are random expressions of arguments, program ids and loop indices. Where the check of the launch
    /// passes, the interpreter finds every hint and every fact of the analyses true, and the results are the same.
    #[test]
    fn assumptions_that_pass_the_check_hold() {
        let (mut met, mut violated, mut wrong) = (0, 0, 0);
        for seed in 0..600 {
            let mut rng = Rng::new(seed);
            let mut values: Vec<String> = ["%pid", "%s", "%t", "%n", "%c"].map(String::from).to_vec();
            let mut lines = String::new();
            for i in 0..rng.range(1, 4) {
                let op = rng.pick(&["add", "sub", "mul", "div", "rem", "min", "max", "shr", "and"]);
                let [a, b] = [(); 2].map(|()| values[rng.below(values.len())].clone());
                lines += &format!("  %w{i} = {op} {a}, {b} : i32\n");
                values.push(format!("%w{i}"));
            }
            let last = values.last().unwrap();
            lines += &format!("  %e = mul {last}, %c : i32");
            let plain = parse(&gather(&lines)).unwrap_or_else(|e| panic!("{e}"));
            let mut func = plain.clone();
            if !run(&mut func) {
                continue;
            }
            let code = footprint(&func);
            for _ in 0..4 {
                let number = |rng: &mut Rng| match rng.below(6) {
                    0 => rng.range(i32::MIN.into(), i32::MAX.into()),
                    1 => i64::from(rng.pick(&[i32::MIN, i32::MAX])),
                    _ => rng.range(-3, 40),
                };
                let n = 16 * rng.pick(&[-1, 0, 1, 1, 3, 4, 4, 1 << 26]);
                let (s, t, grid) = (number(&mut rng), number(&mut rng), rng.range(1, 4) as u32);
                let bytes = |n: i32| (0..n).flat_map(|i| (7 * i).to_le_bytes()).collect();
                let args = vec![
                    Argument::Input { dtype: DType::I32, bytes: bytes(64) },
                    Argument::Output { dtype: DType::I32, bytes: bytes(64 * grid as i32) },
                    Argument::Int(n),
                    Argument::Int(s),
                    Argument::Int(t),
                ];
                let program = Program { func: plain.clone(), args, grid: [grid, 1, 1] };
                let outcome = check_analyses(&program, &func).and_then(|()| {
                    let found = program.interpret_as(&func).map_err(|e| e.to_string())?;
                    (Ok(&found) == program.interpret().as_ref())
                        .then_some(())
                        .ok_or_else(|| "other results".to_string())
                });
                if holds(&code, &[0, 0, n, s, t], grid) {
                    met += 1;
                    outcome.unwrap_or_else(|e| panic!("seed {seed}, n {n}, s {s}, t {t}: {e}\n{}", print(&func)));
                } else {
                    violated += 1;
                    wrong += usize::from(outcome.is_err());
                }
            }
        }
        assert!(met > 100 && violated > 100 && 2 * wrong > violated, "{met} met, {violated} violated, {wrong} wrong");
    }
}
