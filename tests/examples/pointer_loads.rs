//! On one GPU, interleaved in five rounds, on the same matrices: the matmul of Triton's tutorial, through tiles of pointers,
//! beside the block-pointer matmul that ships; and with `indirect`, a block-pointer matmul that reads the rows of b through a
//! page table, and one that reads the bounds of its loop from memory, beside itself without. Prints one JSON row per round
//! and configuration.
//!
//! `pointer_loads [SIZE [indirect]]`

use tilewright::bench::do_bench;
use tilewright::kernels::matmul::{self, Options};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::{Buffer, Device, LaunchConfig};
use tilewright_tests::pointer_loads::{IndirectMatmul, PointerMatmul};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> Outcome {
    let device = Device::best()?;
    let size: usize = std::env::args().nth(1).map_or(Ok(4096), |n| n.parse())?;
    if std::env::args().nth(2).as_deref() == Some("indirect") {
        return indirect(&device, size);
    }
    let number = |i: usize| half::f16::from_f32(((i * 7919 % 1009) as f32 - 504.0) / 504.0);
    let matrix: Vec<half::f16> = (0..size * size).map(number).collect();
    let (a, b) = (Buffer::from_slice(&device, &matrix)?, Buffer::from_slice(&device, &matrix)?);
    let (mut c, mut expected) = (Buffer::poisoned(&device, size * size)?, Buffer::poisoned(&device, size * size)?);
    let n = size as i32;
    let configs: Vec<[usize; 5]> = [[128, 128, 64], [128, 256, 64], [256, 128, 64], [64, 128, 64], [128, 128, 32]]
        .into_iter()
        .flat_map(|[m, n, k]| [(4, 3), (8, 3), (8, 4)].map(|(warps, stages)| [m, n, k, warps, stages]))
        .collect();
    for round in 0..5 {
        let time = do_bench(&device, 20.0, 60.0, || {
            let options = Options::default();
            let (a, b) = (Tensor::dense(a.view(), [size, size])?, Tensor::dense(b.view(), [size, size])?);
            let c = TensorMut::dense(expected.view_mut(), [size, size])?;
            matmul::multiply(&device, a, b, c, options)
        })?;
        print(round, "block pointers, as shipped", time.median, size);
        for [m_tile, n_tile, k_tile, num_warps, num_stages] in configs.iter().copied() {
            for wrap in [false, true] {
                let grid = size.div_ceil(m_tile) * size.div_ceil(n_tile);
                let config = LaunchConfig::new(grid).num_warps(num_warps as u32).num_stages(num_stages as u32);
                let mut kernel = PointerMatmul {
                    a: &a,
                    b: &b,
                    c: &mut c,
                    m: n,
                    n,
                    k: n,
                    stride_am: n,
                    stride_ak: 1,
                    stride_bk: n,
                    stride_bn: 1,
                    stride_cm: n,
                    stride_cn: 1,
                    m_tile,
                    n_tile,
                    k_tile,
                    wrap,
                    group: 8,
                };
                let name = format!(
                    "pointers, wrap = {wrap}, {m_tile} x {n_tile} x {k_tile}, {num_warps} warps, {num_stages} stages"
                );
                match do_bench(&device, 20.0, 60.0, || kernel.launch_with(&device, &config)) {
                    Ok(time) => print(round, &name, time.median, size),
                    Err(error) => {
                        println!("{{\"round\": {round}, \"name\": \"{name}\", \"error\": {:?}}}", error.to_string())
                    }
                }
                if round == 0 {
                    let (got, want): (Vec<half::f16>, Vec<half::f16>) = (c.to_vec()?, expected.to_vec()?);
                    let wrong = got
                        .iter()
                        .zip(&want)
                        .filter(|(g, w)| !((g.to_f32() - w.to_f32()).abs() <= 0.01 * w.to_f32().abs().max(8.0)));
                    let wrong = wrong.count();
                    if wrong > 0 {
                        println!("{{\"name\": \"{name}\", \"wrong elements\": {wrong}}}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// The pages of b are in reverse order.
fn indirect(device: &Device, size: usize) -> Outcome {
    const PAGE: usize = 64;
    let number = |i: usize| half::f16::from_f32(((i * 7919 % 1009) as f32 - 504.0) / 504.0);
    let matrix: Vec<half::f16> = (0..size * size).map(number).collect();
    let pages: Vec<half::f16> = matrix.chunks(PAGE * size).rev().flatten().copied().collect();
    let table: Vec<i32> = (0..(size / PAGE) as i32).rev().collect();
    let (a, b) = (Buffer::from_slice(device, &matrix)?, Buffer::from_slice(device, &matrix)?);
    let (pages, table) = (Buffer::from_slice(device, &pages)?, Buffer::from_slice(device, &table)?);
    let ends = Buffer::from_slice(device, &vec![(size / PAGE) as i32; size])?;
    let mut expected: Option<Vec<half::f16>> = None;
    for round in 0..5 {
        for [m_tile, n_tile, num_warps, num_stages] in [[128, 256, 8, 4], [128, 128, 8, 5]] {
            for (paged, bounds) in [(false, false), (true, false), (false, true), (true, true)] {
                let mut c = Buffer::poisoned(device, size * size)?;
                let grid = size.div_ceil(m_tile) * size.div_ceil(n_tile);
                let config = LaunchConfig::new(grid).num_warps(num_warps as u32).num_stages(num_stages as u32);
                // SAFETY: entries of the table are below the number of pages, and the ends are that number.
                let config = unsafe { config.warp_specialize(true).unchecked() };
                let mut kernel = IndirectMatmul {
                    a: &a.tensor([size, size])?,
                    b: &if paged { &pages } else { &b }.tensor([size, size])?,
                    table: &table,
                    ends: &ends,
                    c: &mut c.tensor_mut([size, size])?,
                    m_tile,
                    n_tile,
                    page: PAGE,
                    paged,
                    bounds,
                    group: 8,
                };
                let time = do_bench(device, 20.0, 60.0, || kernel.launch_with(device, &config))?;
                let name = format!("{m_tile} x {n_tile}, page table: {paged}, bounds from memory: {bounds}");
                print(round, &name, time.median, size);
                let found = c.to_vec()?;
                match &expected {
                    Some(expected) if *expected != found => println!("{{\"name\": \"{name}\", \"wrong\": true}}"),
                    _ => expected = Some(found),
                }
            }
        }
    }
    Ok(())
}

fn print(round: usize, name: &str, median_ms: f64, size: usize) {
    let tflops = 2.0 * (size as f64).powi(3) / median_ms / 1e9;
    println!(
        "{{\"round\": {round}, \"name\": \"{name}\", \"size\": {size}, \"median_ms\": {median_ms:.4}, \"tflops\": {tflops:.1}}}"
    );
}
