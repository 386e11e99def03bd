//! A function that satisfies all rules, and functions that violate each of them.

use super::{Rule, verify};
use crate::ir::{Arg, Builder, DType, Func, Loc, Op, Stage, Type};
use crate::text::parse;

/// A kernel with arguments of several types and this body; `return` is appended unless the body has one.
fn kernel(body: &str) -> Func {
    let end = if body.contains("return") { "" } else { "return" };
    // Layouts of a shared buffer and of a tile of four elements, one that misses elements, and one of a 2 × 2 tile;
    // declared only if used.
    let layouts = if body.contains('#') {
        "#l0 = shared<offset=[[1],[2]], shape=[4]>
#l1 = linear<reg=[[1],[2]], lane=[[0],[0],[0],[0],[0]], warp=[], block=[], shape=[4]>
#l2 = linear<reg=[[1]], lane=[], warp=[], block=[], shape=[4]>
#l3 = linear<reg=[[0,1],[1,0]], lane=[[0,0],[0,0],[0,0],[0,0],[0,0]], warp=[], block=[], shape=[2,2]>
"
    } else {
        ""
    };
    let text = format!("{layouts}kernel @k(%p: ptr<f32>, %n: i32, %i: i64, %x: f32, %c: bool) {{\n{body}\n{end}\n}}");
    parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// The rules that a kernel violates.
fn violations(func: &Func, stage: Stage) -> Vec<(Rule, String)> {
    verify(func, stage).err().unwrap_or_default().into_iter().map(|e| (e.rule, e.to_string())).collect()
}

#[test]
fn a_kernel_with_every_op_family_passes() {
    let func = kernel(
        "%0 = program_id {axis = 0} : i32
        %1 = arange {start = 0, end = 32} : tensor<32xi32>
        %2 = splat %p : tensor<32xptr<f32>>
        %3 = ptr_add %2, %1 : tensor<32xptr<f32>>
        %4 = splat %n : tensor<32xi32>
        %5 = cmp_lt %1, %4 : tensor<32xbool>
        %6 = constant {value = 0.0} : tensor<32xf32>
        %7 = load %3, %5, %6 {eviction = normal} : tensor<32xf32>
        %8 = reshape %7 : tensor<4x8xf32>
        %9 = trans %8 {perm = [1, 0]} : tensor<8x4xf32>
        %10 = constant {value = 0.0} : tensor<4x4xf32>
        %11 = dot %8, %9, %10 {precision = tf32} : tensor<4x4xf32>
        %12, %13 = reduce %11, %11 {axis = 1} : tensor<4xf32>, tensor<4xf32> (%a: f32, %b: f32, %d: f32, %e: f32) {
          %f = add %a, %d : f32
          %g = max %b, %e : f32
          yield %f, %g
        }
        %14 = make_view %p, %i, %i, %i, %i, %i, %i {order = [1, 0]} : view<4x4xf32>
        %15 = constant {value = 4} : i32
        %16, %17 = for %n, %n, %15, %14, %11 {num_stages = 2} : view<4x4xf32>, tensor<4x4xf32> (%k: i32, %v: view<4x4xf32>, %acc: tensor<4x4xf32>) {
          %18 = load_view %v {boundary = [0, 1], padding = nan, eviction = normal} : tensor<4x4xf32>
          %19 = fma %18, %acc, %acc : tensor<4x4xf32>
          %20 = advance %v, %i, %i : view<4x4xf32>
          yield %20, %19
        }
        %21 = if %c : f32 () {
          yield %x
        } () {
          %22 = exp2 %x : f32
          yield %22
        }
        %23 = while %n : i32 (%m: i32) {
          condition %c, %m
        } (%m2: i32) {
          yield %m2
        }
        %24 = cast %12 : tensor<4xf16>
        %25 = join %x, %x : tensor<2xf32>
        %26, %27 = split %25 : f32, f32",
    );
    assert_eq!(violations(&func, Stage::Tile), []);
    assert_eq!(super::stage_of(&func), Stage::Tile);
}

/// Each function violates exactly this rule.
const VIOLATIONS: &[(Rule, Stage, &str)] = &[
    (Rule::Arity, Stage::Tile, "%0 = add %x : f32"),
    (Rule::Arity, Stage::Tile, "%0, %1 = neg %x : f32, f32"),
    (Rule::Regions, Stage::Tile, "%0 = neg %x : f32 () { yield }"),
    (Rule::Regions, Stage::Tile, "if %c () { yield }"),
    (Rule::Terminator, Stage::Tile, "if %c () { yield } () { }"),
    (Rule::Terminator, Stage::Tile, "if %c () { yield } () { return }"),
    (Rule::Terminator, Stage::Tile, "if %c () { yield } () { yield yield }\nreturn"),
    (Rule::Terminator, Stage::Tile, "if %c () { yield } () { condition %c }"),
    (Rule::Terminator, Stage::Tile, "return\n%0 = neg %x : f32"),
    (Rule::Dominance, Stage::Tile, "if %c () { %0 = neg %x : f32\nyield } () { yield }\n%1 = neg %0 : f32"),
    (
        Rule::Dominance,
        Stage::Tile,
        "%0 = for %n, %n, %n, %x : f32 (%k: i32, %a: f32) { yield %a }\n%1 = add %k, %n : i32",
    ),
    (Rule::StageLegal, Stage::Tile, "fence_async_shared"),
    (Rule::StageLegal, Stage::Layout, "async_commit"),
    (Rule::StageLegal, Stage::Tile, "%0 = local_alloc : shared<4xf32, #l0>"),
    (
        Rule::StageLegal,
        Stage::Layout,
        "%0 = make_view %p, %i, %i, %i {order = [0]} : view<4xf32>
         %1 = for %n, %n, %n, %0 : view<4xf32> (%k: i32, %v: view<4xf32>) { yield %v }",
    ),
    (Rule::Extents, Stage::Tile, "%0 = splat %x : tensor<63x63xf32>"),
    (Rule::Extents, Stage::Tile, "%0 = splat %x : tensor<2x3xf32>\n %1 = reshape %0 : tensor<6xf32>"),
    (Rule::Extents, Stage::Layout, "%0 = make_view %p, %i, %i, %i {order = [0]} : view<6xf32>"),
    (Rule::Extents, Stage::Async, "%0 = local_alloc : shared<3x3xf32, #l0>"),
    (Rule::Layouts, Stage::Tile, "%0 = splat %x : tensor<4xf32, #l1>"),
    // A shared layout; one of another shape; one that misses elements.
    (Rule::Layouts, Stage::Layout, "%0 = splat %x : tensor<4xf32, #l0>"),
    (Rule::Layouts, Stage::Layout, "%0 = splat %x : tensor<8xf32, #l1>"),
    (Rule::Layouts, Stage::Layout, "%0 = splat %x : tensor<4xf32, #l2>"),
    (Rule::Layouts, Stage::Layout, "%0 = local_alloc : shared<4xf32, #l1>"),
    (Rule::Layouts, Stage::Layout, "%0 = splat %x : tensor<4xf32>"),
    (Rule::Attributes, Stage::Tile, "%0 = program_id {axis = 3} : i32"),
    (Rule::Attributes, Stage::Tile, "%0 = constant {value = 256} : u8"),
    (Rule::Attributes, Stage::Tile, "%0 = constant {value = 1} : f32"),
    (Rule::Attributes, Stage::Tile, "%0 = arange {start = 4, end = 0} : tensor<4xi32>"),
    (Rule::Attributes, Stage::Tile, "%0 = make_view %p, %i, %i, %i {order = [1]} : view<4xf32>"),
    (
        Rule::Attributes,
        Stage::Tile,
        "%0 = make_view %p, %i, %i, %i {order = [0]} : view<4xf32>
         %1 = load_view %0 {boundary = [1], padding = zero, eviction = normal} : tensor<4xf32>",
    ),
    (Rule::Attributes, Stage::Tile, "%0 = splat %x : tensor<4xf32>\n%1 = trans %0 {perm = [0, 1]} : tensor<4xf32>"),
    (Rule::Attributes, Stage::Tile, "%0 = splat %x : tensor<4xf32>\n%1 = expand_dims %0 {axis = 2} : tensor<4x1xf32>"),
    (Rule::Attributes, Stage::Tile, "for %n, %n, %n {num_stages = 0} (%k: i32) { yield }"),
    (Rule::Attributes, Stage::Tile, "%0 = hint %n {divisible = 0} : i32"),
    (Rule::Attributes, Stage::Async, "block_barrier {id = 1, threads = 40}"),
    (Rule::OperandTypes, Stage::Tile, "%0 = exp %n : i32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = add %x, %n : f32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = add %c, %c : bool"),
    (Rule::OperandTypes, Stage::Tile, "%0 = and %x, %x : f32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = mulhi %x, %x : f32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = cmp_lt %p, %p : bool"),
    (Rule::OperandTypes, Stage::Tile, "%0 = fma %n, %n, %n : i32"),
    // An accumulator that only dots of f16 and of 8-bit floats have; and which multiply-adds have for none.
    (
        Rule::OperandTypes,
        Stage::Tile,
        "%0 = splat %x : tensor<2x2xf32>\n%1 = cast %0 : tensor<2x2xf16>
         %2 = dot %0, %0, %1 {precision = ieee} : tensor<2x2xf16>",
    ),
    (
        Rule::OperandTypes,
        Stage::Layout,
        "%0 = splat %x : tensor<2x2xf32, #l3>\n%1 = cast %0 : tensor<2x2xf16, #l3>
         %2 = fma_dot %1, %1, %1 : tensor<2x2xf16, #l3>",
    ),
    (Rule::OperandTypes, Stage::Tile, "%0 = select %n, %x, %x : f32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = cast %p : i64"),
    (Rule::OperandTypes, Stage::Tile, "%0 = bitcast %c : i8"),
    (Rule::OperandTypes, Stage::Tile, "%0 = hint %x {divisible = 4} : f32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = hint %p {at_least = 0} : ptr<f32>"),
    (Rule::OperandTypes, Stage::Tile, "%0 = expand_dims %x {axis = 0} : tensor<1xf32>"),
    (Rule::OperandTypes, Stage::Tile, "%0 = splat %x : tensor<4xf32>\n%1, %2 = split %0 : f32, f32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = join %x, %n : tensor<2xf32>"),
    (Rule::OperandTypes, Stage::Tile, "%0 = splat %x : tensor<4xf32>\n%1 = gather %0, %0 {axis = 0} : tensor<4xf32>"),
    (
        Rule::Attributes,
        Stage::Tile,
        "%0 = arange {start = 0, end = 4} : tensor<4xi32>\n%1 = gather %0, %0 {axis = 1} : tensor<4xi32>",
    ),
    (
        Rule::ResultTypes,
        Stage::Tile,
        "%0 = arange {start = 0, end = 4} : tensor<4xi32>\n%1 = gather %0, %0 {axis = 0} : tensor<8xi32>",
    ),
    (Rule::OperandTypes, Stage::Tile, "%0 = make_view %p, %i, %i, %n {order = [0]} : view<4xf32>"),
    (Rule::OperandTypes, Stage::Tile, "%0 = make_view %p, %i, %i, %i {order = [0, 1]} : view<4x4xf32>"),
    (Rule::OperandTypes, Stage::Tile, "%0 = ptr_add %p, %x : ptr<f32>"),
    (Rule::OperandTypes, Stage::Tile, "%0 = load %x {eviction = normal} : f32"),
    (Rule::OperandTypes, Stage::Tile, "%0 = load %p, %n {eviction = normal} : f32"),
    (Rule::OperandTypes, Stage::Tile, "store %p, %n {eviction = normal}"),
    (Rule::OperandTypes, Stage::Tile, "%0 = atomic_rmw %p, %x {op = xor} : f32"),
    (
        Rule::OperandTypes,
        Stage::Tile,
        "%0 = bitcast %p : ptr<i8>\n%1 = load %0 {eviction = normal} : i8\n%2 = atomic_cas %0, %1, %1 : i8",
    ),
    (
        Rule::OperandTypes,
        Stage::Tile,
        "%0 = splat %x : tensor<4x8xf32>\n%1 = splat %x : tensor<4x4xf32>\n%2 = dot %0, %0, %1 {precision = ieee} : tensor<4x4xf32>",
    ),
    (
        Rule::OperandTypes,
        Stage::Tile,
        "%0 = splat %n : tensor<4x4xi32>\n%1 = dot %0, %0, %0 {precision = ieee} : tensor<4x4xi32>",
    ),
    (Rule::OperandTypes, Stage::Tile, "for %n, %i, %n (%k: i32) { yield }"),
    (Rule::OperandTypes, Stage::Tile, "if %n () { yield } () { yield }"),
    (Rule::OperandTypes, Stage::Tile, "assume %n"),
    (Rule::OperandTypes, Stage::Tile, "device_assert %n {message = \"m\"}"),
    (Rule::OperandTypes, Stage::Async, "%0 = local_load %x : tensor<4xf32, #l1>"),
    (
        Rule::OperandTypes,
        Stage::Async,
        "%0 = local_alloc : shared<2x4xf32, #l0>\n%1 = local_slot %0, %i : shared<4xf32, #l0>",
    ),
    (
        Rule::OperandTypes,
        Stage::Async,
        "%0 = local_alloc : shared<4xf32, #l0>\n%1 = make_view %p, %i, %i, %i {order = [0]} : view<8xf32>
         async_copy %1, %0 {boundary = [], padding = zero}",
    ),
    (
        Rule::OperandTypes,
        Stage::Async,
        "%0 = local_alloc : shared<4xf32, #l0>\n%1 = splat %n : tensor<4xi32, #l1>
         async_load %1, %0, %c {vector = 1}",
    ),
    (
        Rule::OperandTypes,
        Stage::Async,
        "%0 = local_alloc : shared<4xf32, #l0>\n%1 = splat %p : tensor<4xptr<f32>, #l1>
         async_load %1, %0, %n {vector = 1}",
    ),
    (
        Rule::Attributes,
        Stage::Async,
        "%0 = local_alloc : shared<4xf32, #l0>\n%1 = splat %p : tensor<4xptr<f32>, #l1>
         async_load %1, %0, %c {vector = 3}",
    ),
    (Rule::ResultTypes, Stage::Tile, "%0 = program_id {axis = 0} : i64"),
    (Rule::ResultTypes, Stage::Tile, "%0 = neg %x : f64"),
    (Rule::ResultTypes, Stage::Tile, "%0 = cmp_eq %x, %x : f32"),
    (Rule::ResultTypes, Stage::Tile, "%0 = bitcast %x : i64"),
    (Rule::ResultTypes, Stage::Tile, "%0 = cast %x : tensor<2xf16>"),
    (Rule::ResultTypes, Stage::Tile, "%0 = arange {start = 0, end = 8} : tensor<4xi32>"),
    (Rule::ResultTypes, Stage::Tile, "%0 = splat %x : f32"),
    (Rule::ResultTypes, Stage::Tile, "%0 = splat %x : tensor<4xf32>\n%1 = reshape %0 : tensor<8xf32>"),
    (Rule::ResultTypes, Stage::Tile, "%0 = splat %x : tensor<2xf32>\n%1 = broadcast %0 : tensor<4xf32>"),
    (
        Rule::ResultTypes,
        Stage::Tile,
        "%0 = splat %x : tensor<2x4xf32>\n%1 = trans %0 {perm = [1, 0]} : tensor<2x4xf32>",
    ),
    (
        Rule::ResultTypes,
        Stage::Tile,
        "%0 = splat %x : tensor<2x4xf32>\n%1 = reduce %0 {axis = 0} : tensor<2xf32> (%a: f32, %b: f32) { yield %a }",
    ),
    (Rule::ResultTypes, Stage::Tile, "%0 = for %n, %n, %n, %x : i32 (%k: i32, %a: f32) { yield %a }"),
    (Rule::RegionParams, Stage::Tile, "for %n, %n, %n (%k: i64) { yield }"),
    (Rule::RegionParams, Stage::Tile, "if %c (%a: i32) { yield } () { yield }"),
    (
        Rule::RegionParams,
        Stage::Tile,
        "%0 = splat %x : tensor<4xf32>\n%1 = reduce %0 {axis = 0} : f32 (%a: f32) { yield %a }",
    ),
    (Rule::RegionParams, Stage::Tile, "while %n (%m: i64) { condition %c } () { yield %n }"),
    (Rule::RegionResults, Stage::Tile, "%0 = if %c : f32 () { yield %x } () { yield }"),
    (Rule::RegionResults, Stage::Tile, "%0 = for %n, %n, %n, %x : f32 (%k: i32, %a: f32) { yield %k }"),
    (Rule::RegionResults, Stage::Tile, "while %n (%m: i32) { condition %n } () { yield %n }"),
    (Rule::RegionResults, Stage::Tile, "while %n (%m: i32) { condition %c } () { yield }"),
    (
        Rule::CombineRegion,
        Stage::Tile,
        "%0 = splat %x : tensor<4xf32>
         %1 = reduce %0 {axis = 0} : f32 (%a: f32, %b: f32) { store %p, %a {eviction = normal}\nyield %b }",
    ),
    // A placement outside of a loop; before the stage; without that of the `yield`.
    (Rule::Schedule, Stage::Schedule, "%0 = neg %x : f32 at {stage = 0}"),
    (Rule::Schedule, Stage::Layout, "for %n, %n, %n (%k: i32) { yield at {stage = 0} }"),
    (Rule::Schedule, Stage::Schedule, "for %n, %n, %n (%k: i32) { %0 = neg %x : f32 at {stage = 0}\nyield }"),
    // Two stages behind; a ring, or TMA, for what is no load; a ring without buffers.
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) { %0 = neg %x : f32 at {stage = 2}\nyield at {stage = 0} }",
    ),
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) { %0 = neg %x : f32 at {stage = 0, depth = 2}\nyield at {stage = 1} }",
    ),
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) { %0 = load %p {eviction = normal} : f32 at {stage = 0, depth = 2, tma = true}
         yield at {stage = 1} }",
    ),
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) { %0 = load %p {eviction = normal} : f32 at {stage = 0, depth = 0}
         yield at {stage = 1} }",
    ),
    // Three slots of a buffer that warps exchange a tile through.
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) {
           %0 = splat %x : tensor<4xf32, #l1> at {stage = 0}
           %1 = local_alloc %0 : shared<4xf32, #l0> at {stage = 0, depth = 3}
           yield at {stage = 0}
         }",
    ),
    // A store behind the main stage.
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) { store %p, %x {eviction = normal} at {stage = 1}\nyield at {stage = 0} }",
    ),
    // Before what it depends on: by order, by stage, and through a carried value.
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) {
           %0 = neg %x : f32 at {stage = 0, order = 2}
           %1 = neg %0 : f32 at {stage = 0}
           yield at {stage = 0}
         }",
    ),
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) {
           %0 = neg %x : f32 at {stage = 1}
           %1 = neg %0 : f32 at {stage = 0, order = 2}
           yield at {stage = 0}
         }",
    ),
    (
        Rule::Schedule,
        Stage::Schedule,
        "%0 = for %n, %n, %n, %x : f32 (%k: i32, %a: f32) {
           %1 = neg %a : f32 at {stage = 0}
           %2 = neg %x : f32 at {stage = 1}
           yield %2 at {stage = 0}
         }",
    ),
    // An address that depends on a later load, and one that depends on memory that is written; a ring that is too short.
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) {
           %0 = load %p {eviction = normal} : f32 at {stage = 1}
           %1 = cast %0 : i32 at {stage = 1}
           %2 = ptr_add %p, %1 : ptr<f32> at {stage = 0}
           %3 = load %2 {eviction = normal} : f32 at {stage = 0, depth = 3}
           yield at {stage = 1}
         }",
    ),
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) {
           %0 = atomic_rmw %p, %x {op = add} : f32 at {stage = 1}
           %1 = cast %0 : i32 at {stage = 1}
           %2 = ptr_add %p, %1 : ptr<f32> at {stage = 0}
           %3 = load %2 {eviction = normal} : f32 at {stage = 0, depth = 3}
           yield at {stage = 1}
         }",
    ),
    (
        Rule::Schedule,
        Stage::Schedule,
        "for %n, %n, %n (%k: i32) {
           %0 = load %p {eviction = normal} : f32 at {stage = 0, depth = 2}
           %1 = neg %0 : f32 at {stage = 2}
           yield at {stage = 2}
         }",
    ),
];

#[test]
fn schedules_without_violations_pass() {
    let func = kernel(
        "%0 = for %n, %n, %n, %x : f32 (%k: i32, %a: f32) {
           %1 = ptr_add %p, %k : ptr<f32> at {stage = 0}
           %2 = load %1 {eviction = normal} : f32 at {stage = 0}
           %3 = cast %2 : i32 at {stage = 1}
           %4 = ptr_add %p, %3 : ptr<f32> at {stage = 1}
           %5 = load %4 {eviction = normal} : f32 at {stage = 1, depth = 3}
           %6 = neg %5 : f32 at {stage = 3, order = 2}
           %7 = add %6, %a : f32 at {stage = 4, order = 1}
           store %p, %6 {eviction = normal} at {stage = 3, order = 2}
           yield %7 at {stage = 3, order = 3}
         }",
    );
    assert_eq!(violations(&func, Stage::Schedule), []);
    assert_eq!(super::stage_of(&func), Stage::Schedule);
}

#[test]
fn errors_of_schedules_name_both_ops() {
    let mut func = kernel(
        "for %n, %n, %n (%k: i32) {
           %0 = neg %x : f32 at {stage = 1, order = 1}
           %1 = abs %0 : f32 at {stage = 0}
           yield at {stage = 0}
         }",
    );
    for (line, id) in (7..).zip(func.walk().into_iter().skip(1).take(2)) {
        func.set_loc(id, Loc { file: "kernel.rs".into(), line, column: 3 });
    }
    assert_eq!(
        violations(&func, Stage::Schedule)[0].1,
        "kernel.rs:8:3: `%2 = abs %1 : f32 at {stage = 0}`: it runs in stage 0, order 0, and depends on `%1 = neg %x : f32 \
         at {stage = 1, order = 1}` at kernel.rs:7:3, which runs in stage 1, order 1 (rule: schedule)"
    );
}

/// An op without a placement runs in the main stage, in the order of the op of that stage before it.
#[test]
fn ops_without_a_placement_keep_dependences() {
    let func = kernel(
        "for %n, %n, %n (%k: i32) {
           %0 = neg %x : f32 at {stage = 1, order = 1}
           %1 = abs %0 : f32
           yield at {stage = 0}
         }",
    );
    let found = violations(&func, Stage::Schedule);
    assert!(found.len() == 1 && found[0].1.contains("depends on `%1 = neg %x"), "{found:?}");
}

/// A view of shared memory is copied to other stages; in its own it comes before its users.
#[test]
fn views_come_before_their_users_in_their_stage() {
    let with_orders = |view: u32, user: u32| {
        let func = crate::text::parse(&format!(
            "#l0 = shared<offset=[[0,1],[0,2],[1,0],[2,0]], shape=[4,4]>
             #l1 = shared<offset=[[1,0],[2,0],[0,1],[0,2]], shape=[4,4]>
             kernel @views(%n: i32) {{
               %0 = local_alloc : shared<4x4xbf16, #l0>
               for %n, %n, %n (%k: i32) {{
                 %1 = local_trans %0 {{perm = [1, 0]}} : shared<4x4xbf16, #l1> at {{stage = 0, order = {view}}}
                 %2 = local_trans %1 {{perm = [1, 0]}} : shared<4x4xbf16, #l0> at {{stage = 0, order = {user}}}
                 yield at {{stage = 0, order = 3}}
               }}
               return
             }}"
        ));
        violations(&func.expect("a kernel"), Stage::Schedule).len()
    };
    assert_eq!((with_orders(0, 2), with_orders(2, 2), with_orders(2, 0)), (0, 0, 1));
}

#[test]
fn each_rule_rejects_its_violations() {
    for (rule, stage, body) in VIOLATIONS {
        let func = kernel(body);
        let found = violations(&func, *stage);
        assert!(!found.is_empty(), "{rule:?} accepts:\n{body}");
        for (r, message) in &found {
            assert_eq!(r, rule, "{message}\n{body}");
        }
    }
}

#[test]
fn every_rule_has_a_violation_test() {
    // Violations that text cannot express are built by the tests below.
    let by_hand = [Rule::Placement, Rule::Arguments];
    for rule in Rule::ALL {
        assert!(by_hand.contains(rule) || VIOLATIONS.iter().any(|(r, _, _)| r == rule), "{rule:?}");
    }
}

#[test]
fn arguments_are_described_named_and_scalar() {
    let arg = |name: &str| Arg { name: name.into(), divisible_by: 1, equal_to: None };
    let check_named = |name: &str, args: Vec<(Arg, Type)>| {
        let mut f = Func::new(name);
        for (arg, ty) in args {
            f.add_arg(arg, ty);
        }
        let body = f.body;
        Builder::new(&mut f, body, Loc::unknown()).ret();
        violations(&f, Stage::Tile).into_iter().map(|(rule, _)| rule).collect::<Vec<_>>()
    };
    let check = |args| check_named("k", args);
    for name in ["", "1k", "k-1", "ké", "k.1"] {
        assert_eq!(check_named(name, vec![]), [Rule::Arguments], "{name}");
    }
    assert_eq!(check_named("_K1", vec![]), []);
    let i32 = Type::scalar(DType::I32);
    for (n, dtype, holds) in
        [(127, DType::I8, true), (128, DType::I8, false), (-1, DType::U8, false), (-1, DType::U64, true)]
    {
        let rules: &[Rule] = if holds { &[] } else { &[Rule::Arguments] };
        assert_eq!(check(vec![(Arg { equal_to: Some(n), ..arg("a") }, Type::scalar(dtype))]), rules, "{n}: {dtype}");
    }
    assert_eq!(check(vec![(arg("a"), i32.clone()), (arg("b"), i32.clone())]), []);
    assert_eq!(check(vec![(arg("a"), i32.clone()), (arg("a"), i32.clone())]), [Rule::Arguments]);
    assert_eq!(check(vec![(arg("a"), Type::tensor(&[4], DType::I32))]), [Rule::Arguments]);
    assert_eq!(check(vec![(Arg { divisible_by: 0, ..arg("a") }, i32.clone())]), [Rule::Arguments]);
    assert_eq!(check(vec![(Arg { equal_to: Some(1), ..arg("a") }, Type::scalar(DType::F32))]), [Rule::Arguments]);
}

#[test]
fn ops_and_regions_have_one_parent() {
    // A region that contains itself must not make the verifier loop forever.
    let mut f = kernel("if %c () { yield } () { yield }");
    let branch = f.block(f.body).ops[0];
    let (body, condition) = (f.body, f.op(branch).operands[0]);
    let regions = vec![f.op(branch).regions[0], body];
    let again = f.create_op(Op::If, vec![condition], vec![], regions, Loc::unknown());
    f.move_before(again, branch);
    f.take_regions(branch);
    f.erase(branch);
    assert!(violations(&f, Stage::Tile).iter().any(|(rule, _)| *rule == Rule::Placement));
}

#[test]
fn ops_that_leave_their_block_are_erased() {
    let mut f = kernel("%0 = neg %x : f32\n%1 = add %0, %x : f32");
    let add = f.block(f.body).ops[1];
    f.detach(add);
    assert_eq!(violations(&f, Stage::Tile)[0].0, Rule::Placement);
    f.erase(add);
    assert_eq!(violations(&f, Stage::Tile), []);
}

#[test]
fn errors_name_location_op_expected_and_found() {
    let mut f = kernel("%0 = neg %x : f32\n%1 = add %0, %n : f32");
    let add = f.block(f.body).ops[1];
    assert!(matches!(f.op(add).op, Op::Binary(_)));
    f.set_loc(add, Loc { file: "kernel.rs".into(), line: 7, column: 3 });
    assert_eq!(
        violations(&f, Stage::Tile)[0].1,
        "kernel.rs:7:3: `%1 = add %0, %n : f32`: operand 1 should be f32, found i32 (rule: operand types)"
    );
}
