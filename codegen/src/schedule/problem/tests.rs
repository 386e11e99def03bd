//! The problem of small loops, its bounds, and schedules written into them.

use super::*;
use crate::ir::{Func, Stage};
use crate::target::{CompileOptions, GpuArch};
use crate::text;
use crate::verify::verify;

/// A matmul of which the products of one iteration depend on each other, as in attention; scheduled by hand.
const CHAIN: &str = include_str!("chain.tile");

fn options() -> CompileOptions {
    CompileOptions { num_warps: 8, ..CompileOptions::default() }
}

fn chain() -> Func {
    text::parse(CHAIN).unwrap_or_else(|e| panic!("{}:{}: {}", e.line, e.column, e.message))
}

fn problem(func: &Func) -> Problem {
    Problem::of(func, loops(func)[0], GpuArch::Sm90a, &options()).unwrap_or_else(|e| panic!("{e}"))
}

/// Costs by hand: 128×128×64 multiply-adds at 2048 per cycle, half per group; 64 elements per thread of 128 threads at 16
/// exponentials per cycle; 16 KB of a tile at 5120 / 108 bytes per cycle.
#[test]
fn a_problem_is_printed_as_text() {
    let expected = "\
loop: 2 groups of 4 warps per block, 1 blocks per SM; a producer warp loads
rings: 2 of at most 6 buffers, 32768 bytes per iteration
registers per thread: 32 of 203 in every schedule
ops: pipe, cycles busy + latency
  0: copy 346 + 433: the `load_view`
  1: MMA 256 + 32: the `wgmma`, can run behind
  2: copy 346 + 433: the `load_view`
  3: MUFU 512 + 18: the `exp2`, can run behind
  4: FMA/ALU 64 + 4: the `cast`, can run behind
  5: MMA 256 + 32: the `wgmma`, can run behind
dependences: cycles, iterations
  1 after 0: 779, 0, all groups
  0 after 1: 29, 0, fills the buffer, all groups
  3 after 1: 0, 0
  5 after 2: 779, 0, all groups
  4 after 3: 466, 0
  5 after 4: 68, 0
  2 after 5: 29, 0, fills the buffer, all groups
  4 after 5: 0, 1, overwrites
  5 after 5: 256, 1, accumulates
tile of 1 for 3: 64 registers
tile of 3 for 4: 64 registers
tile of 4 for 5: 32 registers
bounds: copy 692, MMA 1024, MUFU 1024, FMA/ALU 128, dependences 356: interval at least 1024 cycles
";
    assert_eq!(problem(&chain()).to_string(), expected);
}

/// The bound of dependences is the longest cycle per iteration, here by enumeration of all simple cycles.
#[test]
fn the_bound_of_dependences_is_the_longest_cycle() {
    let problem = problem(&chain());
    let orders = problem.orders(problem.depth_limit);
    let mut longest = 0.0f64;
    let mut paths: Vec<(Vec<Event>, u32, u32)> =
        orders.iter().map(|o| (vec![o.from, o.to], o.delay, o.distance)).collect();
    while let Some((path, delay, distance)) = paths.pop() {
        let (first, last) = (path[0], path[path.len() - 1]);
        if first == last {
            longest = longest.max(f64::from(delay) / f64::from(distance));
            continue;
        }
        for next in orders.iter().filter(|o| o.from == last && (o.to == first || !path.contains(&o.to))) {
            paths.push(([&path[..], &[next.to]].concat(), delay + next.delay, distance + next.distance));
        }
    }
    assert_eq!(f64::from(problem.bounds().dependences), longest.ceil());
}

#[test]
fn a_loop_with_control_flow_is_refused_by_op() {
    let text = "kernel @k(%n: i32, %c: bool) {\n  %0 = constant {value = 0} : i32\n  %1 = constant {value = 1} : i32\n  \
                for %0, %n, %1 (%2: i32) {\n    if %c () {\n      yield\n    } () {\n      yield\n    }\n    yield\n  }\n  return\n}\n";
    let func = text::parse(text).unwrap_or_else(|e| panic!("{}: {}", e.line, e.message));
    let error = Problem::of(&func, loops(&func)[0], GpuArch::Sm90a, &options()).unwrap_err();
    assert!(error.contains("is not a single block: the `if` at"), "{error}");
}

/// The schedule of FlashAttention-3, with times by hand: the second product and the cast before it run one iteration later.
const OVERLAPPED: &str = "0@1100/1024x2:-.10w310.-.310.+60.+130w1090";

fn apply_word(word: &str) -> Result<Func, String> {
    let mut func = chain();
    let schedules: LoopSchedules = word.parse()?;
    schedules.apply(&mut func, GpuArch::Sm90a, &options())?;
    Ok(func)
}

#[test]
fn a_schedule_becomes_placements() {
    let func = apply_word(OVERLAPPED).unwrap_or_else(|e| panic!("{e}"));
    verify(&func, Stage::Schedule).unwrap_or_else(|e| panic!("{}", e[0]));
    let body = func.op(loops(&func)[0]).regions[0];
    let place = |mnemonic: &str| -> Vec<(u32, u32)> {
        let ops = func.block(body).ops.iter().map(|&id| func.op(id)).filter(|data| data.op.mnemonic() == mnemonic);
        ops.map(|data| data.place.map_or((9, 9), |place| (place.stage, place.order))).collect()
    };
    assert_eq!(place("exp2"), [(0, 2)]);
    assert_eq!(place("cast"), [(1, 1)]);
    assert_eq!(place("wgmma"), [(0, 0), (1, 1)]);
    assert_eq!(place("wgmma_wait"), [(0, 2), (1, 3)]);
    // The text of the result parses, and has the same problem but for what it says of the present schedule.
    let again = text::parse(&text::print(&func)).unwrap_or_else(|e| panic!("{}", e.message));
    assert_eq!(problem(&again).bounds(), problem(&chain()).bounds());
}

#[test]
fn a_word_is_printed_as_it_was_parsed() {
    for word in [OVERLAPPED, "1@7/7x3:-.-.0d;2@9/8x1:3"] {
        assert_eq!(word.parse::<LoopSchedules>().map(|s| s.to_string()), Ok(word.to_string()));
    }
}

#[test]
fn bad_schedules_name_what_is_wrong() {
    let cases = [
        ("", "is not the schedule of a loop"),
        ("0@1100:-", "expected LOOP@INTERVAL/BOUNDxDEPTH:TIMES"),
        ("0@1100/1024x99999999999:-", "expected LOOP@"),
        ("0@1100/1024x2:-.tenw5", "`tenw5` is not the time of an op"),
        ("3@1100/1024x2:-.10w310.-.310.+60.+130w1090", "there is no loop 3: the kernel has 1"),
        ("0@1100/1024x2:-.10w310", "it has times for 2 ops, and the loop has 6"),
        ("0@1100/1024x7:-.10w310.-.310.+60.+130w1090", "expected 1 to 6 buffers of 32768 bytes"),
        ("0@1100/1024x2:-.10w310.-.310.60w70.+130w1090", "only a `wgmma` has a wait"),
        ("0@1100/1024x2:-.10d.-.310.+60.+130w1090", "its wait cannot be deferred"),
        ("0@1100/1024x2:-.10w310.-.1310.+60.+130w1090", "after the end of the interval"),
        ("0@1100/1024x2:-.10w310.-.300.+60.+130w1090", "the `exp2` runs too early: it depends on the `wgmma`"),
        ("0@1100/1024x2:-.10w310.-.310.+60.+70w1090", "the `wgmma` runs too early: it depends on the `cast`"),
        (
            "0@1100/1024x2:-.10w310.-.310.+60.900w1090",
            "is in the main stage, and depends on the `cast`, which runs behind",
        ),
    ];
    for (word, expected) in cases {
        let error = apply_word(word).err().unwrap_or_else(|| panic!("{word} is accepted"));
        assert!(error.contains(expected), "{word}: {error}");
    }
}
