//! Compile time of the GPU pipeline per op, for functions of growing size: half of the ops in a straight line, half in
//! a loop. Run by `cargo run -p tilewright-codegen --example compile_time`. The time per op should hardly grow.
//!
//! Debug builds verify the function after every pass, which the times include.

use std::time::{Duration, Instant};
use tilewright_codegen::ir::{
    Arg, BinaryOp, Builder, CmpOp, DType, Elem, Eviction, Func, Loc, Op, Stage, Type, UnaryOp, Value,
};
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::target::{CompileOptions, GpuArch};

/// Elements of a tile.
const TILE: usize = 256;

fn main() {
    println!("{:>6} {:>9} {:>10}  slowest passes", "ops", "ms", "us per op");
    for size in [250, 500, 1000, 2000, 4000] {
        let func = function(size);
        let ops = func.walk().len();
        let mut times = Times { last: Instant::now(), passes: Vec::new() };
        pipeline::gpu_ir(&func, GpuArch::Sm90a, &CompileOptions::default(), &mut times);
        let total: Duration = times.passes.iter().map(|(_, time)| time).sum();
        times.passes.sort_by_key(|&(_, time)| std::cmp::Reverse(time));
        let slowest: Vec<String> =
            times.passes[..5].iter().map(|(pass, time)| format!("{pass} {:.1} ms", time.as_secs_f64() * 1e3)).collect();
        let total = total.as_secs_f64();
        println!("{ops:>6} {:>9.1} {:>10.2}  {}", total * 1e3, total * 1e6 / ops as f64, slowest.join(", "));
    }
}

/// The time of each pass.
struct Times {
    last: Instant,
    passes: Vec<(&'static str, Duration)>,
}

impl Observer for Times {
    fn after(&mut self, pass: &'static str, _: Stage, _: &Func) {
        let now = Instant::now();
        self.passes.push((pass, now - self.last));
        self.last = now;
    }

    fn llvm_ir(&mut self, _: &str) {}
}

/// A function of about `size` ops.
fn function(size: usize) -> Func {
    let mut func = Func::new("compile_time");
    let arg = |name: &str, divisible_by: u64| Arg { name: name.into(), divisible_by, equal_to: None };
    let pointer = Type::scalar(Elem::Ptr(DType::F32));
    let input = func.add_arg(arg("input", 16), pointer.clone());
    let output = func.add_arg(arg("output", 16), pointer);
    let n = func.add_arg(arg("n", 1), Type::scalar(DType::I32));
    let body = func.body;
    let mut b = Builder::new(&mut func, body, Loc::unknown());
    let lanes = b.arange(0, TILE as i64);
    let n_tile = b.splat(n, &[TILE]);
    let mask = b.cmp(CmpOp::Lt, lanes, n_tile);
    let input = b.splat(input, &[TILE]);
    let input = b.ptr_add(input, lanes);
    let first = b.load(input, Some(mask), None, Eviction::Normal);
    let first = straight_line(&mut b, size / 2, input, mask, first);
    let (zero, one) = (b.int(0, DType::I32), b.int(1, DType::I32));
    let last = b.for_loop(zero, n, one, &[first], |b, index, carried| {
        let offsets = b.splat(index, &[TILE]);
        let input = b.ptr_add(input, offsets);
        vec![straight_line(b, size / 2, input, mask, carried[0])]
    });
    let output = b.splat(output, &[TILE]);
    let output = b.ptr_add(output, lanes);
    b.store(output, last[0], Some(mask), Eviction::Normal);
    b.ret();
    func
}

/// About `size` ops in which each tile depends on earlier ones, with equal, dead and constant ops among them.
fn straight_line(b: &mut Builder, size: usize, input: Value, mask: Value, first: Value) -> Value {
    let ty = b.func.ty(first).clone();
    let mut tiles = vec![first];
    for i in 0..size / 10 {
        let newest = tiles[tiles.len() - 1];
        let older = tiles[tiles.len() / 2];
        let scale = b.number((i % 7) as f64, ty.clone());
        let scaled = b.binary(BinaryOp::Mul, newest, scale);
        let again = b.binary(BinaryOp::Mul, newest, scale);
        let sum = b.binary(BinaryOp::Add, scaled, older);
        let root = b.unary(UnaryOp::Exp2, sum);
        let offset = b.constant(tilewright_codegen::ir::Literal::Int(i as i64), Type::tensor(&[TILE], DType::I32));
        let at = b.ptr_add(input, offset);
        let loaded = b.load(at, Some(mask), None, Eviction::Normal);
        let is_less = b.cmp(CmpOp::Lt, loaded, again);
        let next = b.op(Op::Select, &[is_less, root, loaded], std::slice::from_ref(&ty));
        tiles.push(b.func.result(next));
    }
    tiles[tiles.len() - 1]
}
