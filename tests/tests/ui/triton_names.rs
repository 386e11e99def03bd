//! Triton's names, which have other spellings here: one message each, at the name.
use tilewright::prelude::*;

#[kernel]
fn modules(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] block: usize) {
    let pid = tl.program_id(axis=0);
    let i = tl.arange(0, block);
    let v = tl.load(x + i, mask=i < n, other=0.0);
    let z = tl.zeros((block, block), dtype=tl.float16);
    let e = tl.math.exp(v);
    let h = tl.cast(v, tl.bfloat16);
    let r = libdevice.rsqrt(v);
    let s = tl.condition(v);
    let f = tl.float32;
    for k in tl.static_range(0, 4) {}
    tl.store(out, tl.sum(v, axis=0));
}

#[kernel]
fn values(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] block: usize) {
    let i = arange(0, block);
    let v = load(x + i, i < n, None);
    let v = load(x + i, mask=None, eviction_policy="evict_last");
    let a = v.to(tl.float16);
    let b = v.to(f16);
    let c = v.to(out.dtype.element_ty);
    let d = v.to(tl.int32, bitcast=True);
    let t = v.T;
    let p = v ** 2;
    let m = float("-inf");
    let flag = True;
    pid = program_id(0);
    total += 1.0;
    atomic_add(out, 1.0, sem="relaxed");
    let h = tl.full((block,), 0.0, tl.float16);
    for k in 0..n {}
}

/// No names of Triton: the user's own names, and tuples as lists.
#[kernel]
fn own_names(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] block: usize, #[constexpr] tl: usize) {
    let b = make_block_ptr(x, shape = (n,), strides = (1,), offsets = (0,), block_shape = (block,), order = (0,));
    let v = load(b, boundary_check = (0), padding_option = zero);
    store(out + arange(0, block), v * tl.pow(2) as f32);
}

fn main() {}
