use super::{parse, print};
use crate::ir::*;

/// A kernel with all kinds of text: attributes, several regions, several results, literals of each kind.
fn sample() -> Func {
    let mut f = Func::new("sample");
    let x = f.add_arg(Arg { name: "x".into(), divisible_by: 16, equal_to: None }, Type::Scalar(Elem::Ptr(DType::F32)));
    let n = f.add_arg(Arg { name: "n".into(), divisible_by: 1, equal_to: Some(1) }, Type::scalar(DType::I32));
    let body = f.body;
    let mut b = Builder::new(&mut f, body, Loc::unknown());
    let r = b.arange(0, 64);
    let x = b.splat(x, &[64]);
    let p = b.ptr_add(x, r);
    let v = b.load(p, None, None, Eviction::First);
    let v2 = b.expand_dims(v, 1);
    let (lo, step) = (b.int(0, DType::I32), b.int(1, DType::I32));
    let sums = b.for_loop(lo, n, step, &[v2], |b, _, c| {
        let e = b.unary(UnaryOp::Exp2, c[0]);
        let inf = b.constant(Literal::Float(f64::NEG_INFINITY), Type::tensor(&[64, 1], DType::F32));
        vec![b.binary(BinaryOp::Max, e, inf)]
    });
    let flat = b.reduce_with(BinaryOp::Add, sums[0], 1);
    b.store(p, flat, None, Eviction::Normal);
    b.op(Op::DevicePrint { prefix: "a \"b\"\n".into() }, &[n], &[]);
    b.ret();
    f
}

#[test]
fn print_parse_print_is_the_identity() {
    let text = print(&sample());
    let again = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(print(&again), text);
    assert!(
        text.contains(
            "%7 = for %5, %n, %6, %4 : tensor<64x1xf32> (%8: i32, %9: tensor<64x1xf32>) {
"
        ),
        "{text}"
    );
}

#[test]
fn errors_name_the_place_and_what_was_expected() {
    let error = |text: &str| parse(text).unwrap_err().to_string();
    assert_eq!(error("kernel @f() {\n  %0 = neg %1 : f32\n}"), "line 2, column 12: `%1` is not defined here");
    assert_eq!(error("kernel @f() {\n  %0 = bogus : f32\n}"), "line 2, column 8: unknown op `bogus`");
    assert_eq!(
        error("kernel @f() {\n  %0 = program_id : i32\n}"),
        "line 2, column 8: `program_id` needs the attribute `axis`: an integer from 0 to 4294967295"
    );
    assert_eq!(
        error("kernel @f() {\n  %0 = program_id {axis = 0, axis = 1} : i32\n}"),
        "line 2, column 35: attribute `axis` is given twice"
    );
    assert_eq!(error("kernel @f("), "line 1, column 1: expected an argument, as `%name: type`");
}

#[test]
fn arguments_may_have_numbers_for_names() {
    let text = "kernel @f(%1: i32, %0: i32) {
  %2 = add %1, %0 : i32
  %3 = mul %2, %0 : i32
  return
}
";
    let named = text.replace("%2", "%a").replace("%3", "%b");
    assert_eq!(print(&parse(&named).unwrap_or_else(|e| panic!("{e}"))), text);
}

#[test]
fn ambiguous_words_and_line_breaks_parse() {
    // `nan` is a number in one op and a variant in the other; `%1` is a result, not an operand of the previous op.
    let text = "kernel @f(%p: ptr<f32>, %n: i64) {
  %0 = make_view %p, %n, %n, %n {order = [0]} : view<4xf32>
  async_commit
  %1 = load_view %0 {boundary = [0], padding = nan, eviction = normal} : tensor<4xf32>
  %2 = constant {value = nan} : f32
  %3 = constant {value = -inf} : f32
  return
}
";
    assert_eq!(print(&parse(text).unwrap_or_else(|e| panic!("{e}"))), text);
}

#[test]
fn former_names_of_ops_are_read() {
    let present = include_str!("../sim/programs/warp_specialized_copy.tile");
    let present = present.replacen("    yield\n", "    pingpong_wait\n    pingpong_arrive\n    yield\n", 1);
    let former = present.replace("pingpong_wait", "take_turn").replace("pingpong_arrive", "pass_turn");
    let former = former.replace("warp_specialize", "roles");
    assert!(former.contains("roles {") && former.contains("take_turn\n"), "{former}");
    assert_eq!(parse(&former).map(|f| print(&f)), parse(&present).map(|f| print(&f)));
}
