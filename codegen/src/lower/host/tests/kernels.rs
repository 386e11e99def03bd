//! Kernels of realistic shape, built with the IR builder.

use crate::ir::*;

/// A kernel under construction: arguments first, then ops.
pub struct Kernel {
    pub func: Func,
}

impl Kernel {
    pub fn new(name: &str) -> Kernel {
        Kernel { func: Func::new(name) }
    }

    pub fn ptr(&mut self, name: &str, d: DType) -> Value {
        self.arg(name, Type::Scalar(Elem::Ptr(d)), None)
    }

    pub fn int(&mut self, name: &str) -> Value {
        self.arg(name, Type::scalar(DType::I64), None)
    }

    /// An integer argument that is specialized to 1.
    pub fn one(&mut self, name: &str) -> Value {
        self.arg(name, Type::scalar(DType::I64), Some(1))
    }

    fn arg(&mut self, name: &str, ty: Type, equal_to: Option<i64>) -> Value {
        self.func.add_arg(Arg { name: name.into(), divisible_by: 1, equal_to }, ty)
    }

    pub fn build(mut self, body: impl FnOnce(&mut Builder)) -> Func {
        let block = self.func.body;
        let mut b = Builder::new(&mut self.func, block, Loc::unknown());
        body(&mut b);
        b.ret();
        self.func
    }
}

fn load(b: &mut Builder, view: Value, boundary: &[usize]) -> Value {
    b.load_view(view, boundary, Padding::Zero, Eviction::Normal)
}

fn store(b: &mut Builder, view: Value, tile: Value, boundary: &[usize]) {
    b.store_view(view, tile, boundary, Eviction::Normal);
}

pub fn i64_of(b: &mut Builder, v: i64) -> Value {
    b.int(v, DType::I64)
}

/// program_id(axis) · tile, as i64.
pub fn tile_start(b: &mut Builder, axis: u32, tile: usize) -> Value {
    let pid = b.program_id(axis);
    let pid = b.cast(pid, DType::I64);
    let tile = i64_of(b, tile as i64);
    b.binary(BinaryOp::Mul, pid, tile)
}

/// y[r] = Σ_d x[r, d] · w[d]; arguments x w y x_stride rows d.
pub fn weighted_sum(elem: DType, rows_tile: usize, d_tile: usize) -> Func {
    let mut k = Kernel::new("weighted_sum");
    let (x, w, y) = (k.ptr("x", elem), k.ptr("w", elem), k.ptr("y", DType::F32));
    let (x_stride, rows, d) = (k.int("x_stride"), k.int("rows"), k.int("d"));
    let one = k.one("one");
    k.build(|b| {
        let start = tile_start(b, 0, rows_tile);
        let zero = i64_of(b, 0);
        let xv = b.make_view(x, &[rows, d], &[x_stride, one], &[start, zero], &[rows_tile, d_tile], &[1, 0]);
        let wv = b.make_view(w, &[d], &[one], &[zero], &[d_tile], &[0]);
        let yv = b.make_view(y, &[rows], &[one], &[start], &[rows_tile], &[0]);
        let acc = b.zero(Type::tensor(&[rows_tile], DType::F32));
        let step = i64_of(b, d_tile as i64);
        let out = b.for_loop(zero, d, step, &[acc, xv, wv], |b, _, c| {
            let xt = load(b, c[1], &[0, 1]);
            let wt = load(b, c[2], &[0]);
            let wt = b.expand_dims(wt, 0);
            let wt = b.broadcast(wt, &[rows_tile, d_tile]);
            let product = b.binary(BinaryOp::Mul, xt, wt);
            let product = b.cast(product, DType::F32);
            let sum = b.reduce_with(BinaryOp::Add, product, 1);
            let acc = b.binary(BinaryOp::Add, c[0], sum);
            let (zero, step) = (i64_of(b, 0), i64_of(b, d_tile as i64));
            let x_next = b.advance(c[1], &[zero, step]);
            let w_next = b.advance(c[2], &[step]);
            vec![acc, x_next, w_next]
        });
        store(b, yv, out[0], &[0]);
    })
}

/// Row softmax; arguments x y rows columns.
pub fn softmax(rows_tile: usize, columns_tile: usize) -> Func {
    let mut k = Kernel::new("softmax");
    let (x, y) = (k.ptr("x", DType::F32), k.ptr("y", DType::F32));
    let (rows, columns) = (k.int("rows"), k.int("columns"));
    let one = k.one("one");
    k.build(|b| {
        let start = tile_start(b, 0, rows_tile);
        let zero = i64_of(b, 0);
        let shape = [rows_tile, columns_tile];
        let view =
            |b: &mut Builder, p| b.make_view(p, &[rows, columns], &[columns, one], &[start, zero], &shape, &[1, 0]);
        let (xv, yv) = (view(b, x), view(b, y));
        let xt = load(b, xv, &[0, 1]);
        let index = b.arange(0, columns_tile as i64);
        let index = b.cast(index, DType::I64);
        let limit = b.splat(columns, &[columns_tile]);
        let inside = b.cmp(CmpOp::Lt, index, limit);
        let inside = b.expand_dims(inside, 0);
        let inside = b.broadcast(inside, &shape);
        let low = b.constant(Literal::Float(f64::NEG_INFINITY), Type::tensor(&shape, DType::F32));
        let xt = b.select(inside, xt, low);
        let row = |b: &mut Builder, v| {
            let v = b.expand_dims(v, 1);
            b.broadcast(v, &shape)
        };
        let top = b.reduce_with(BinaryOp::Max, xt, 1);
        let top = row(b, top);
        let shifted = b.binary(BinaryOp::Sub, xt, top);
        let e = b.unary(UnaryOp::Exp, shifted);
        let sum = b.reduce_with(BinaryOp::Add, e, 1);
        let sum = row(b, sum);
        let out = b.binary(BinaryOp::Div, e, sum);
        store(b, yv, out, &[0, 1]);
    })
}

/// Index of each row's maximum, the first of equal ones; arguments x y rows columns.
pub fn argmax(rows_tile: usize, columns_tile: usize) -> Func {
    over_rows("argmax", DType::I32, rows_tile, columns_tile, |b, x| {
        let index = b.arange(0, columns_tile as i64);
        let index = b.expand_dims(index, 0);
        let index = b.broadcast(index, &[rows_tile, columns_tile]);
        b.reduce(&[x, index], 1, |b, l, r| {
            let greater = b.cmp(CmpOp::Gt, l[0], r[0]);
            let equal = b.cmp(CmpOp::Eq, l[0], r[0]);
            let earlier = b.cmp(CmpOp::Lt, l[1], r[1]);
            let tie = b.binary(BinaryOp::And, equal, earlier);
            let keep = b.binary(BinaryOp::Or, greater, tie);
            vec![b.select(keep, l[0], r[0]), b.select(keep, l[1], r[1])]
        })[1]
    })
}

/// Prefix sums along rows; arguments x y rows columns.
pub fn cumsum(rows_tile: usize, columns_tile: usize) -> Func {
    over_rows("cumsum", DType::F32, rows_tile, columns_tile, |b, x| {
        b.scan(&[x], 1, false, |b, l, r| vec![b.binary(BinaryOp::Add, l[0], r[0])])[0]
    })
}

/// A kernel that computes `make`'s tile from a tile of whole rows of `x` and writes it to `y`: one number or one row
/// per row.
fn over_rows(
    name: &str,
    result: DType,
    rows_tile: usize,
    columns_tile: usize,
    make: impl FnOnce(&mut Builder, Value) -> Value,
) -> Func {
    let mut k = Kernel::new(name);
    let (x, y) = (k.ptr("x", DType::F32), k.ptr("y", result));
    let (rows, columns) = (k.int("rows"), k.int("columns"));
    let one = k.one("one");
    k.build(|b| {
        let start = tile_start(b, 0, rows_tile);
        let zero = i64_of(b, 0);
        let shape = [rows_tile, columns_tile];
        let view =
            |b: &mut Builder, p| b.make_view(p, &[rows, columns], &[columns, one], &[start, zero], &shape, &[1, 0]);
        let x_view = view(b, x);
        let tile = load(b, x_view, &[0, 1]);
        let out = make(b, tile);
        if b.func.ty(out).shape().len() == 2 {
            let y_view = view(b, y);
            store(b, y_view, out, &[0, 1]);
        } else {
            let y_view = b.make_view(y, &[rows], &[one], &[start], &[rows_tile], &[0]);
            store(b, y_view, out, &[0]);
        }
    })
}

/// c = a · b; arguments a b c m n k. Tiles are [bm, bk] and [bk, bn].
pub fn matmul(elem: DType, bm: usize, bn: usize, bk: usize) -> Func {
    let mut kernel = Kernel::new("matmul");
    let (a, bp, c) = (kernel.ptr("a", elem), kernel.ptr("b", elem), kernel.ptr("c", elem));
    let (m, n, k) = (kernel.int("m"), kernel.int("n"), kernel.int("k"));
    let one = kernel.one("one");
    kernel.build(|b| {
        let (rm, rn) = (tile_start(b, 0, bm), tile_start(b, 1, bn));
        let zero = i64_of(b, 0);
        let av = b.make_view(a, &[m, k], &[k, one], &[rm, zero], &[bm, bk], &[1, 0]);
        let bv = b.make_view(bp, &[k, n], &[n, one], &[zero, rn], &[bk, bn], &[1, 0]);
        let cv = b.make_view(c, &[m, n], &[n, one], &[rm, rn], &[bm, bn], &[1, 0]);
        let acc = b.zero(Type::tensor(&[bm, bn], DType::F32));
        let step = i64_of(b, bk as i64);
        let out = b.for_loop(zero, k, step, &[acc, av, bv], |b, _, c| {
            let at = load(b, c[1], &[0, 1]);
            let bt = load(b, c[2], &[0, 1]);
            let acc = b.dot(at, bt, c[0], Precision::Ieee);
            let (zero, step) = (i64_of(b, 0), i64_of(b, bk as i64));
            let (an, bn) = (b.advance(c[1], &[zero, step]), b.advance(c[2], &[step, zero]));
            vec![acc, an, bn]
        });
        let out = b.cast(out[0], elem);
        store(b, cv, out, &[0, 1]);
    })
}

/// FlashAttention-2 forward; arguments q k v o l queries keys. One head per program on axis 1, heads are dense.
/// Loads K transposed through its view when `transposed_view`, with `trans` otherwise.
pub fn attention(elem: DType, bq: usize, bk: usize, d: usize, causal: bool, transposed_view: bool) -> Func {
    let mut kernel = Kernel::new("attention");
    let [q, k, v, o] = ["q", "k", "v", "o"].map(|n| kernel.ptr(n, elem));
    let l = kernel.ptr("l", DType::F32);
    let (queries, keys) = (kernel.int("queries"), kernel.int("keys"));
    let one = kernel.one("one");
    kernel.build(|b| {
        let head = b.program_id(1);
        let head = b.cast(head, DType::I64);
        let (zero, width) = (i64_of(b, 0), i64_of(b, d as i64));
        let base = |b: &mut Builder, p, rows| {
            let size = b.binary(BinaryOp::Mul, rows, width);
            let offset = b.binary(BinaryOp::Mul, head, size);
            b.ptr_add(p, offset)
        };
        let (qb, kb, vb, ob) = (base(b, q, queries), base(b, k, keys), base(b, v, keys), base(b, o, queries));
        let l_offset = b.binary(BinaryOp::Mul, head, queries);
        let lb = b.ptr_add(l, l_offset);
        let start = tile_start(b, 0, bq);
        let qv = b.make_view(qb, &[queries, width], &[width, one], &[start, zero], &[bq, d], &[1, 0]);
        let ov = b.make_view(ob, &[queries, width], &[width, one], &[start, zero], &[bq, d], &[1, 0]);
        let lv = b.make_view(lb, &[queries], &[one], &[start], &[bq], &[0]);
        let kv = if transposed_view {
            b.make_view(kb, &[width, keys], &[one, width], &[zero, zero], &[d, bk], &[0, 1])
        } else {
            b.make_view(kb, &[keys, width], &[width, one], &[zero, zero], &[bk, d], &[1, 0])
        };
        let vv = b.make_view(vb, &[keys, width], &[width, one], &[zero, zero], &[bk, d], &[1, 0]);
        let qt = load(b, qv, &[0]);
        let m = b.constant(Literal::Float(f64::NEG_INFINITY), Type::tensor(&[bq], DType::F32));
        let sum = b.zero(Type::tensor(&[bq], DType::F32));
        let acc = b.zero(Type::tensor(&[bq, d], DType::F32));
        let step = i64_of(b, bk as i64);
        let end = if causal {
            let end = i64_of(b, bq as i64);
            let end = b.binary(BinaryOp::Add, start, end);
            b.binary(BinaryOp::Min, end, keys)
        } else {
            keys
        };
        let out = b.for_loop(zero, end, step, &[m, sum, acc, kv, vv], |b, j, c| {
            let kt = if transposed_view {
                load(b, c[3], &[1])
            } else {
                let kt = load(b, c[3], &[0]);
                b.trans(kt, &[1, 0])
            };
            let vt = load(b, c[4], &[0]);
            let s0 = b.zero(Type::tensor(&[bq, bk], DType::F32));
            let s = b.dot(qt, kt, s0, Precision::Ieee);
            let factor = std::f64::consts::LOG2_E / (d as f64).sqrt();
            let factor = b.constant(Literal::Float(factor), Type::tensor(&[bq, bk], DType::F32));
            let s = b.binary(BinaryOp::Mul, s, factor);
            let s = mask(b, s, start, j, keys, (bq, bk), causal);
            let top = b.reduce_with(BinaryOp::Max, s, 1);
            let m_new = b.binary(BinaryOp::Max, c[0], top);
            let m_rows = b.expand_dims(m_new, 1);
            let m_rows = b.broadcast(m_rows, &[bq, bk]);
            let p = b.binary(BinaryOp::Sub, s, m_rows);
            let p = b.unary(UnaryOp::Exp2, p);
            let alpha = b.binary(BinaryOp::Sub, c[0], m_new);
            let alpha = b.unary(UnaryOp::Exp2, alpha);
            let row_sum = b.reduce_with(BinaryOp::Add, p, 1);
            let sum = b.binary(BinaryOp::Mul, c[1], alpha);
            let sum = b.binary(BinaryOp::Add, sum, row_sum);
            let alpha = b.expand_dims(alpha, 1);
            let alpha = b.broadcast(alpha, &[bq, d]);
            let acc = b.binary(BinaryOp::Mul, c[2], alpha);
            let p = b.cast(p, elem);
            let acc = b.dot(p, vt, acc, Precision::Ieee);
            let (zero, step) = (i64_of(b, 0), i64_of(b, bk as i64));
            let k_next = b.advance(c[3], &if transposed_view { [zero, step] } else { [step, zero] });
            let v_next = b.advance(c[4], &[step, zero]);
            vec![m_new, sum, acc, k_next, v_next]
        });
        let sums = b.expand_dims(out[1], 1);
        let sums = b.broadcast(sums, &[bq, d]);
        let result = b.binary(BinaryOp::Div, out[2], sums);
        let result = b.cast(result, elem);
        store(b, ov, result, &[0]);
        let log = b.unary(UnaryOp::Log2, out[1]);
        let log = b.binary(BinaryOp::Add, log, out[0]);
        store(b, lv, log, &[0]);
    })
}

/// −∞ where a key is beyond the end, or after the query.
fn mask(
    b: &mut Builder,
    s: Value,
    start: Value,
    first_key: Value,
    keys: Value,
    (bq, bk): (usize, usize),
    causal: bool,
) -> Value {
    let index = |b: &mut Builder, n: usize, from: Value| {
        let i = b.arange(0, n as i64);
        let i = b.cast(i, DType::I64);
        let from = b.splat(from, &[n]);
        b.binary(BinaryOp::Add, i, from)
    };
    let column = index(b, bk, first_key);
    let column = b.expand_dims(column, 0);
    let column = b.broadcast(column, &[bq, bk]);
    let limit = b.splat(keys, &[bq, bk]);
    let mut keep = b.cmp(CmpOp::Lt, column, limit);
    if causal {
        let row = index(b, bq, start);
        let row = b.expand_dims(row, 1);
        let row = b.broadcast(row, &[bq, bk]);
        let before = b.cmp(CmpOp::Ge, row, column);
        keep = b.binary(BinaryOp::And, keep, before);
    }
    let low = b.constant(Literal::Float(f64::NEG_INFINITY), Type::tensor(&[bq, bk], DType::F32));
    b.select(keep, s, low)
}

/// c = a · b through loop-carried pointer tiles; arguments a b c m n k, all multiples of the tiles.
pub fn matmul_by_pointers(bm: usize, bn: usize, bk: usize) -> Func {
    let mut kernel = Kernel::new("matmul_by_pointers");
    let [a, bp, c] = ["a", "b", "c"].map(|n| kernel.ptr(n, DType::F32));
    let [_m, n, k] = ["m", "n", "k"].map(|n| kernel.int(n));
    kernel.build(|b| {
        let (rm, rn) = (tile_start(b, 0, bm), tile_start(b, 1, bn));
        let zero = i64_of(b, 0);
        // base + (row + i) · width + (column + j)
        let tile = |b: &mut Builder, base: Value, (row, rows): (Value, usize), (column, columns), width: Value| {
            let index = |b: &mut Builder, from: Value, n: usize| {
                let i = b.arange(0, n as i64);
                let i = b.cast(i, DType::I64);
                let from = b.splat(from, &[n]);
                b.binary(BinaryOp::Add, from, i)
            };
            let shape = [rows, columns];
            let (i, j) = (index(b, row, rows), index(b, column, columns));
            let width = b.splat(width, &[rows]);
            let i = b.binary(BinaryOp::Mul, i, width);
            let (i, j) = (b.expand_dims(i, 1), b.expand_dims(j, 0));
            let (i, j) = (b.broadcast(i, &shape), b.broadcast(j, &shape));
            let offset = b.binary(BinaryOp::Add, i, j);
            let base = b.splat(base, &shape);
            b.ptr_add(base, offset)
        };
        let ap = tile(b, a, (rm, bm), (zero, bk), k);
        let bq = tile(b, bp, (zero, bk), (rn, bn), n);
        let acc = b.zero(Type::tensor(&[bm, bn], DType::F32));
        let step = i64_of(b, bk as i64);
        let out = b.for_loop(zero, k, step, &[acc, ap, bq], |b, _, c| {
            let at = b.load(c[1], None, None, Eviction::Normal);
            let bt = b.load(c[2], None, None, Eviction::Normal);
            let acc = b.dot(at, bt, c[0], Precision::Ieee);
            let a_step = b.constant(Literal::Int(bk as i64), Type::tensor(&[bm, bk], DType::I32));
            let ap = b.ptr_add(c[1], a_step);
            let width = i64_of(b, bk as i64);
            let b_step = b.binary(BinaryOp::Mul, n, width);
            let b_step = b.splat(b_step, &[bk, bn]);
            vec![acc, ap, b.ptr_add(c[2], b_step)]
        });
        let cp = tile(b, c, (rm, bm), (rn, bn), n);
        b.store(cp, out[0], None, Eviction::Normal);
    })
}
