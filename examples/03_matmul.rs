//! Matrix multiplication (GEMM) on tensor cores, with a fused activation.
//!
//! Each program computes one tile of c: it loops over k and accumulates the dots of tiles of a and of b. The example
//! also shows the program order that reuses the L2 cache, and an activation that is applied before c is written.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

// ANCHOR: kernel
constexpr_enum! {
    /// The activation of each element. It is a compile-time constant: a variant contains only its own code.
    pub enum Activation { Identity, Relu, LeakyRelu }
}

/// c = activation(a·b) for row-major a [m, k], b [k, n] and c [m, n].
///
/// A grid of ⌈m/m_tile⌉ · ⌈n/n_tile⌉ programs.
#[kernel]
pub fn matmul(
    a: In<f16>,
    b: In<f16>,
    c: Out<f16>,
    m: i32,
    n: i32,
    k: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 8] group: usize,
    #[constexpr = Identity] activation: Activation,
) {
    let (i, j) = grouped_order(program_id(0), cdiv(m, m_tile), cdiv(n, n_tile), group);
    // A block pointer has the shape of the whole matrix, for boundary checks and for TMA.
    let mut a_block = make_block_ptr(
        a,
        shape = [m, k],
        strides = [k, 1],
        offsets = [i * m_tile, 0],
        block_shape = [m_tile, k_tile],
        order = [1, 0],
    );
    let mut b_block = make_block_ptr(
        b,
        shape = [k, n],
        strides = [n, 1],
        offsets = [0, j * n_tile],
        block_shape = [k_tile, n_tile],
        order = [1, 0],
    );
    // Dots of f16 accumulate in f32, as usual.
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for _ in range(0, cdiv(k, k_tile)) {
        let at = load(a_block, boundary_check = [0, 1], padding = zero);
        let bt = load(b_block, boundary_check = [0, 1], padding = zero);
        acc = dot(at, bt, acc);
        a_block = a_block.advance([0, k_tile]);
        b_block = b_block.advance([k_tile, 0]);
    }
    let c_block = make_block_ptr(
        c,
        shape = [m, n],
        strides = [n, 1],
        offsets = [i * m_tile, j * n_tile],
        block_shape = [m_tile, n_tile],
        order = [1, 0],
    );
    store(c_block, activate(acc, activation).to::<f16>(), boundary_check = [0, 1]);
}
// ANCHOR_END: kernel

// ANCHOR: order
/// The tile (row, column) of c that a program computes.
///
/// Concurrent programs should share rows of a and columns of b. In row-major order, the first 64 programs of a 64 × 64
/// grid would read one row of tiles of a and all of b; in groups of 8 rows, column by column, they read 8 rows of tiles
/// of a and 8 columns of b, which stay in the L2 cache. (The built-in `swizzle2d` is this function.)
#[device_fn]
fn grouped_order(
    program: Scalar<i32>,
    m_tiles: Scalar<i32>,
    n_tiles: Scalar<i32>,
    group: usize,
) -> (Scalar<i32>, Scalar<i32>) {
    let per_group = n_tiles * group;
    let first_row = program / per_group * group;
    // The last group may have fewer rows.
    let rows = minimum(m_tiles - first_row, group);
    let within = program % per_group;
    (first_row + within % rows, within / rows)
}
// ANCHOR_END: order

// ANCHOR: activation
/// `match` on a constexpr value: only the selected arm is compiled.
#[device_fn]
fn activate(x: Tile<f32>, activation: Activation) -> Tile<f32> {
    match activation {
        Activation::Identity => x,
        Activation::Relu => maximum(x, 0.0),
        Activation::LeakyRelu => where_(x >= 0.0, x, 0.01 * x),
    }
}
// ANCHOR_END: activation

/// Multiplies matrices whose sizes are not multiples of the tiles, with each activation.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (m, n, k) = (200, 264, 136);
    let a: Vec<f16> = (0..m * k).map(|i| f16::from_f32((i as f32 * 0.7).sin())).collect();
    let b: Vec<f16> = (0..k * n).map(|i| f16::from_f32((i as f32 * 0.3).cos())).collect();
    let mut product = vec![0.0f64; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                product[i * n + j] += a[i * k + l].to_f64() * b[l * n + j].to_f64();
            }
        }
    }
    let (a, b) = (Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &b)?);
    for activation in [Activation::Identity, Activation::Relu, Activation::LeakyRelu] {
        let mut c = Buffer::<f16>::poisoned(device, m * n)?;
        let (m_tile, n_tile, k_tile) = (64, 64, 32);
        let config = LaunchConfig::new(m.div_ceil(m_tile) * n.div_ceil(n_tile)).num_warps(4).num_stages(3);
        let (rows, cols, depth) = (m as i32, n as i32, k as i32);
        // `MatmulRequired` has the arguments without defaults; struct update syntax overrides some of the others.
        #[rustfmt::skip]
        let required = MatmulRequired { a: &a, b: &b, c: &mut c, m: rows, n: cols, k: depth, m_tile, n_tile, k_tile };
        let mut kernel = Matmul { activation, ..required.with_defaults() };
        kernel.launch_with(device, &config)?;
        let time = do_bench(device, 10.0, 50.0, || kernel.launch_with(device, &config))?;

        let want: Vec<f64> = product.iter().map(|x| reference(*x, activation)).collect();
        let error = check("c", &c.to_vec()?, &want, 2e-3)?;
        let (shape, rate) = (format!("{m} × {n} × {k} {activation:?}"), time.tflops((2 * m * n * k) as f64));
        println!(
            "matmul            {shape:<28} error {error:<7.1e} {:9.3} ms {rate:8.3} TFLOP/s  {device}",
            time.median
        );
    }
    Ok(())
}

fn reference(x: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Identity => x,
        Activation::Relu => x.max(0.0),
        Activation::LeakyRelu => x.max(0.01 * x),
    }
}

/// Fails unless all elements are within `tolerance`, relative to values above 1; returns the largest error.
fn check(what: &str, got: &[f16], want: &[f64], tolerance: f64) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got.to_f64() - want).abs() / want.abs().max(1.0);
        // Also true for NaN.
        if !(error <= tolerance) {
            return Err(format!("{what}[{i}] is {got}, expected {want} to within {tolerance}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
