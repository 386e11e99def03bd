//! FlashAttention-2 on GPU 0.

use super::gpu;
use tilewright::codegen::ir::DType;
use tilewright::codegen::target::Schedule;
use tilewright::kernels::attention::reference::Modifiers;
use tilewright::kernels::attention::{Options, Tiles};
use tilewright::prelude::Precision;
use tilewright_tests::attention::{Case, Layout, RELATIVE, SINKS, check};
use tilewright_tests::attention_8_bit::{Scales, check_8_bit};
use tilewright_tests::attention_cache::{CacheCase, check_cache};
use tilewright_tests::numerics::TF32_TOLERANCE;

const DTYPES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// Checks a case with and without the causal mask, in every type.
fn check_all(device: &tilewright::Device, case: Case) {
    for dtype in DTYPES {
        check(device, case.dtype(dtype), &Options::default());
        check(device, case.dtype(dtype).causal(), &Options::default());
    }
}

#[test]
fn attention_of_any_length() {
    let Some(gpu) = gpu() else { return };
    for n in [1, 17, 127, 1000] {
        check_all(&gpu, Case::new(n, n, 64));
    }
    for (n_q, n_k) in [(1, 1000), (1000, 1), (127, 300), (300, 127), (256, 512), (512, 256), (65, 64), (64, 65)] {
        check_all(&gpu, Case::new(n_q, n_k, 64));
    }
    check(&gpu, Case::new(4097, 4097, 64).causal(), &Options::default());
    check(&gpu, Case::new(4097, 1000, 64), &Options::default());
}

fn check_head_dimensions(dims: &[usize]) {
    let Some(gpu) = gpu() else { return };
    for &d in dims {
        check_all(&gpu, Case::new(192, 192, d));
        check_all(&gpu, Case::new(150, 333, d));
    }
}

// Head dimensions are split among several tests, each with its own result.

#[test]
fn attention_of_small_head_dimensions() {
    check_head_dimensions(&[1, 16, 32, 64]);
}

#[test]
fn attention_of_head_dimensions_that_are_padded() {
    check_head_dimensions(&[24, 80]);
}

#[test]
fn attention_of_head_dimensions_up_to_128() {
    check_head_dimensions(&[96, 128]);
}

#[test]
fn attention_of_head_dimension_200() {
    check_head_dimensions(&[200]);
}

#[test]
fn attention_of_head_dimension_256() {
    check_head_dimensions(&[256]);
}

#[test]
fn attention_with_other_head_dimensions_of_values_and_sinks() {
    let Some(gpu) = gpu() else { return };
    for (d, d_v) in [(192, 128), (64, 128), (128, 64)] {
        check_all(&gpu, Case::new(300, 400, d).values(d_v));
        check_all(&gpu, Case::new(1500, 1300, d).values(d_v).heads(1, 4, 2).modifiers(SINKS));
    }
    check_all(&gpu, Case::new(300, 400, 64).heads(2, 16, 16).modifiers(SINKS));
    for (n_q, group) in [(1, 4), (1, 5), (6, 3), (16, 8)] {
        let case = Case::new(n_q, 3000, 128).heads(3, 2 * group, 2);
        check_all(&gpu, case.modifiers(SINKS));
        check_all(&gpu, case.values(40).layout(Layout::RowsFirst));
    }
}

/// Caches with pages and without, for one query and for several.
#[test]
fn attention_of_a_cache() {
    let Some(gpu) = gpu() else { return };
    for dtype in DTYPES {
        for n_q in [1, 4, 100] {
            let case = CacheCase { dtype, ..CacheCase::new([12, 4], n_q, [128, 64], &[0, 1, 100, 777, 3000], 3000) };
            for case in [case, case.pages_of(16), case.pages_of(50), CacheCase { missing: true, ..case.pages_of(64) }] {
                check_cache(&gpu, case, &Options::default());
                check_cache(&gpu, CacheCase { causal: false, modifiers: SINKS, ..case }, &Options::default());
            }
        }
    }
}

/// Few queries with masks, and 8-bit floats.
#[test]
fn attention_of_a_cache_with_masks_and_other_types() {
    let Some(gpu) = gpu() else { return };
    let window = Modifiers { window: Some(130), ..SINKS };
    for dtype in DTYPES {
        for n_q in [1, 4, 100] {
            let case = CacheCase { dtype, ..CacheCase::new([16, 2], n_q, [64, 64], &[0, 1, 100, 777, 3000], 3000) };
            check_cache(&gpu, CacheCase { modifiers: window, ..case.pages_of(64) }, &Options::default());
            check_cache(&gpu, CacheCase { modifiers: RELATIVE, ..case.pages_of(16) }, &Options::default());
            for stored in [DType::F8E4M3, DType::F8E5M2] {
                check_cache(&gpu, CacheCase { cache_dtype: Some(stored), ..case.pages_of(64) }, &Options::default());
                let wide = CacheCase { cache_dtype: Some(stored), d: [128, 200], modifiers: window, ..case };
                check_cache(&gpu, wide, &Options::default());
            }
        }
    }
}

/// Entries with different numbers of queries: few and many, with tiles of each width, and pages that are not there.
#[test]
fn attention_of_a_cache_with_rows_of_each_entry() {
    let Some(gpu) = gpu() else { return };
    let alibi = Modifiers { alibi: true, ..Modifiers::default() };
    let rows: [&[usize]; 3] = [&[1, 0, 1, 3, 1], &[1, 0, 70, 5, 1], &[300, 0, 64, 2000, 1]];
    for dtype in DTYPES {
        for rows in rows {
            let case = CacheCase::new([12, 4], 0, [128, 64], &[0, 1, 100, 2777, 3000], 3008);
            let case = CacheCase { dtype, rows: Some(rows), ..case };
            for case in [case, case.pages_of(16), CacheCase { missing: true, ..case.pages_of(64) }] {
                check_cache(&gpu, CacheCase { modifiers: SINKS, ..case }, &Options::default());
            }
            check_cache(&gpu, CacheCase { modifiers: alibi, d: [64, 64], ..case.pages_of(64) }, &Options::default());
        }
    }
}

/// A relative bias and its gradient.
#[test]
fn attention_with_a_relative_bias() {
    let Some(gpu) = gpu() else { return };
    for (n_q, n_k, d) in [(300, 400, 64), (1000, 129, 128), (70, 2000, 200), (1, 1, 16)] {
        check_all(&gpu, Case::new(n_q, n_k, d).heads(2, 4, 2).modifiers(RELATIVE));
    }
    let case = Case::new(1500, 1500, 64).heads(1, 2, 1).dtype(DType::BF16);
    check(&gpu, case.modifiers(Modifiers { window: Some(200), ..RELATIVE }), &Options::default());
    check(&gpu, case.causal().layout(Layout::Gaps).modifiers(RELATIVE), &Options::default());
}

/// Products of 8 bits, with default tiles of small and large grids, and with those that share loads.
#[test]
fn attention_of_8_bit_floats() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        for (n_q, n_k, d) in [(300, 400, 64), (1000, 129, 128), (70, 2000, 200), (1, 1, 16), (5000, 5000, 64)] {
            let case = Case::new(n_q, n_k, d).heads(1, 8, 4).dtype(dtype);
            for scales in [Scales::None, Scales::PerHead, Scales::PerBlock] {
                check_8_bit(&gpu, case, scales, &Options::default());
                check_8_bit(&gpu, case.causal().layout(Layout::Gaps), scales, &Options::default());
            }
        }
    }
    let case = Case::new(2100, 2100, 128).heads(1, 8, 4).dtype(DType::F8E4M3);
    check_8_bit(&gpu, case, Scales::PerBlock, &Options::default());
    let case = case.causal();
    for modifiers in [
        Modifiers { window: Some(300), softcap: Some(5.0), ..SINKS },
        Modifiers { documents: Some(&[[0, 0], [100, 100], [1500, 1700], [2100, 2100]]), alibi: true, ..SINKS },
        RELATIVE,
    ] {
        check_8_bit(&gpu, case.modifiers(modifiers), Scales::PerBlock, &Options::default());
    }
}

#[test]
fn attention_of_groups_of_heads() {
    let Some(gpu) = gpu() else { return };
    for (heads_q, heads_kv) in [(4, 4), (6, 2), (8, 1)] {
        for layout in [Layout::Dense, Layout::RowsFirst] {
            check_all(&gpu, Case::new(200, 200, 64).heads(2, heads_q, heads_kv).layout(layout));
        }
    }
}

#[test]
fn attention_of_any_strides() {
    let Some(gpu) = gpu() else { return };
    for layout in [Layout::RowsFirst, Layout::Gaps] {
        for d in [24, 64, 128] {
            check_all(&gpu, Case::new(130, 70, d).heads(2, 2, 1).layout(layout));
        }
    }
}

#[test]
fn attention_in_other_precisions() {
    let Some(gpu) = gpu() else { return };
    for d in [64, 128] {
        let case = Case::new(130, 200, d).causal().dtype(DType::F32);
        for precision in [Precision::Ieee, Precision::Tf32x3] {
            check(&gpu, case, &Options { precision: Some(precision), ..Options::default() });
        }
        let fast = Options { precision: Some(Precision::Tf32), ..Options::default() };
        check(&gpu, case.with_tolerance(TF32_TOLERANCE), &fast);
    }
}

/// f32 with wgmma (3xTF32), with loads by all threads and by producer warps.
#[test]
fn attention_of_f32_by_wgmma() {
    let Some(gpu) = gpu() else { return };
    for (tiles, warp_specialized, overlap) in [
        ([64, 64, 4], false, None),
        ([64, 32, 4], true, None),
        ([128, 32, 8], false, None),
        ([64, 64, 8], false, Some(false)),
    ] {
        let [q_tile, k_tile, num_warps] = tiles;
        let tiles = |q_tile, k_tile| {
            let tiles = Tiles::new(q_tile, k_tile, num_warps as u32, 2);
            let schedule = Schedule {
                wgmma_f32: Some(true),
                warp_specialize: Some(warp_specialized),
                overlap,
                ..Schedule::default()
            };
            Some(Tiles { schedule, ..tiles })
        };
        let options = Options {
            forward_tiles: tiles(q_tile, k_tile),
            dkdv_tiles: tiles(k_tile.min(32), q_tile),
            dq_tiles: tiles(q_tile, k_tile.min(32)),
            precision: Some(Precision::Tf32x3),
            ..Options::default()
        };
        for (n_q, n_k) in [(256, 256), (300, 300), (130, 700), (17, 1)] {
            let case = Case::new(n_q, n_k, 64).heads(2, 2, 1).dtype(DType::F32);
            check(&gpu, case, &options);
            check(&gpu, case.causal(), &options);
        }
    }
}

/// Split-KV: the default number of splits, and a limit of three.
#[test]
fn attention_split_kv() {
    let Some(gpu) = gpu() else { return };
    for (n_q, n_k, d) in [(1024, 1024, 64), (600, 1030, 128), (1030, 600, 80)] {
        for case in [Case::new(n_q, n_k, d), Case::new(n_q, n_k, d).causal(), Case::new(n_q, n_k, d).heads(2, 2, 1)] {
            for dtype in [DType::F32, DType::BF16] {
                let case = case.dtype(dtype);
                check(&gpu, case, &Options::default());
                check(&gpu, case, &Options { num_splits: Some(3), ..Options::default() });
            }
        }
    }
}

#[test]
fn attention_of_nothing() {
    let Some(gpu) = gpu() else { return };
    for (n_q, n_k) in [(20, 0), (0, 20), (0, 0)] {
        check_all(&gpu, Case::new(n_q, n_k, 64));
    }
}

/// TMA loads, warp specialization, ping-pong scheduling, and overlapped MMAs or none.
#[test]
fn attention_in_every_schedule() {
    let Some(gpu) = gpu() else { return };
    let plain = Tiles::new(128, 128, 8, 2);
    let open = Schedule::default();
    let with = |schedule| Tiles { schedule, ..plain };
    let warp_specialized = Schedule { warp_specialize: Some(true), ..open };
    let schedules = [
        ("no overlap", with(Schedule { overlap: Some(false), ..open })),
        ("overlap", with(Schedule { overlap: Some(true), ..open })),
        ("TMA", with(Schedule { tma: Some(true), ..open })),
        ("warp specialization", with(warp_specialized)),
        ("ping-pong", with(Schedule { pingpong: Some(true), ..warp_specialized })),
    ];
    for (name, schedule) in schedules {
        println!("{name}");
        let tiles = |q_tile, k_tile| Some(Tiles { q_tile, k_tile, ..schedule });
        let options = Options {
            forward_tiles: tiles(128, 128),
            dkdv_tiles: tiles(64, 128),
            dq_tiles: tiles(128, 64),
            ..Options::default()
        };
        for d in [64, 128] {
            // An empty tensor of keys has no tensor map.
            for (n_q, n_k) in [(512, 512), (300, 300), (130, 700), (700, 130), (17, 1), (17, 0)] {
                let case = Case::new(n_q, n_k, d).heads(2, 2, 1);
                check(&gpu, case, &options);
                check(&gpu, case.causal(), &options);
            }
        }
    }
}
