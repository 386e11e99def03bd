//! The shipped tuning tables: their configurations parse, pass the estimate of resources, and neither spill nor
//! serialize wgmma in `ptxas`.

use rayon::prelude::*;
use std::collections::HashSet;
use tilewright::autotune::{Autotune, Config, KeyPart, KeyValue, Problem};
use tilewright::kernels::AUTOTUNED;
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::kernels::attention::{self, Tiles};
use tilewright::prelude::*;
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::{ConstValue, Constexpr, KernelDef};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Code, CompileOptions, GpuArch, Target};
use tilewright_tests::configurations::{compile_options, configurations, well_aligned};
use tilewright_tests::ptxas;

/// A variant of an attention kernel.
struct Variant {
    autotune: &'static Autotune,
    dtype: DType,
    d: i64,
    causal: bool,
    precision: Precision,
    /// Whether the loop is split (split-KV).
    split: bool,
    config: Config,
}

impl Variant {
    fn what(&self) -> String {
        let Variant { autotune, dtype, d, causal, split, config, .. } = self;
        format!("{} {dtype} d={d} causal={causal} split={split}: {config}", autotune.def.name)
    }

    /// Records the kernel as for a launch on dense tensors of large, even lengths.
    fn record(&self) -> Result<(Func, CompileOptions), String> {
        let def = self.autotune.def;
        let even = def
            .params
            .iter()
            .map(|p| p.name)
            .find(|name| name.starts_with("even_"))
            .expect("a promise of even lengths");
        let mut constants = self.config.constants.clone();
        constants.push(("d", ConstValue::Int(self.d)));
        constants.push(("d_v", ConstValue::Int(self.d)));
        let d_tile = ConstValue::Int(attention::config::d_tile(self.d as usize) as i64);
        constants.extend([("d_tile", d_tile.clone()), ("d_v_tile", d_tile)]);
        constants.push(("causal", ConstValue::Bool(self.causal)));
        constants.push(("precision", self.precision.to_const()));
        constants.push((even, ConstValue::Bool(true)));
        constants.push(("split_rows", ConstValue::Int(if self.split { 256 } else { 0 })));
        // Split results are f32.
        let mut dtypes = vec![self.dtype; def.generics.len()];
        dtypes[1] = if self.split { DType::F32 } else { self.dtype };
        let func = def.record(&dtypes, &constants, &well_aligned(def)).map_err(|d| d.to_string())?;
        Ok((func, compile_options(&self.config)))
    }

    fn ptx(&self) -> Result<String, String> {
        let (func, options) = self.record()?;
        let artifact =
            pipeline::compile(&func, &Target::Nvptx(GpuArch::Sm90a), &options, &mut ()).map_err(|e| e.to_string())?;
        match artifact.code {
            Code::Ptx(ptx) => Ok(ptx),
            Code::Object(_) => Err("an object file instead of PTX".into()),
        }
    }
}

fn attention_kernels() -> impl Iterator<Item = &'static Autotune> {
    AUTOTUNED.iter().copied().filter(|autotune| autotune.def.name.starts_with("flash_attention"))
}

/// What the key of an attention kernel says about its variants.
struct AttentionKey {
    dtype: DType,
    d: i64,
    causal: bool,
    precision: Precision,
    /// The values of [`Variant::split`] that occur with the key. The loop is split if results are f32 and operands are
    /// not. If both are f32 and the grid is sub-wave, both values occur, even if the key has too many rows for splits,
    /// since a problem with fewer rows may use this entry as the nearest.
    splits: &'static [bool],
}

fn read_key(key: &str) -> AttentionKey {
    let value = |name: &str| {
        let word = key.split(',').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        word.unwrap_or_else(|| panic!("`{key}` has no {name}"))
    };
    let precision = Precision::from_name(value("precision")).unwrap();
    let [dtype, result] = ["T", "R"].map(|name| DType::from_name(value(name)).unwrap());
    let splits: &[bool] = match (dtype == result, dtype == DType::F32 && value("sub_wave") == "true") {
        (false, _) => &[true],
        (true, false) => &[false],
        (true, true) => &[false, true],
    };
    let (d, causal) = (value("d").parse().unwrap(), value("causal").parse().unwrap());
    AttentionKey { dtype, d, causal, precision, splits }
}

/// The variants of the tables, and the defaults of these types and head dimensions, each once: keys differ in sizes, too.
fn variants(dtypes: &[DType], dims: &[i64], arch: GpuArch) -> Vec<Variant> {
    let mut variants = Vec::new();
    for autotune in attention_kernels() {
        for (key, config) in autotune.shipped() {
            let AttentionKey { dtype, d, causal, precision, splits } = read_key(&key);
            for &split in splits {
                let config = config.clone();
                variants.push(Variant { autotune, dtype, d, causal, precision, split, config });
            }
        }
    }
    variants.extend(defaults(dtypes, dims, arch));
    let mut seen = HashSet::new();
    variants.retain(|variant| seen.insert((variant.what(), variant.precision.name())));
    variants
}

/// The defaults of these types and head dimensions.
fn defaults(dtypes: &[DType], dims: &[i64], arch: GpuArch) -> Vec<Variant> {
    let mut variants = Vec::new();
    for autotune in attention_kernels() {
        for (&dtype, &d) in dtypes.iter().flat_map(|dtype| dims.iter().map(move |d| (dtype, d))) {
            let exact = if dtype == DType::F32 { Precision::Tf32x3 } else { Precision::Ieee };
            for (causal, sub_wave) in [(false, false), (true, false), (true, true)] {
                let config = autotune.default_config(&problem(
                    autotune,
                    &vec![dtype; autotune.def.generics.len()],
                    d,
                    exact,
                    sub_wave,
                    arch,
                ));
                for split in if sub_wave { &[false, true][..] } else { &[false] } {
                    let (split, config) = (*split, config.clone());
                    variants.push(Variant { autotune, dtype, d, causal, precision: exact, split, config });
                }
            }
        }
    }
    variants
}

fn problem<'a>(
    autotune: &'static Autotune,
    dtypes: &'a [DType],
    d: i64,
    precision: Precision,
    sub_wave: bool,
    arch: GpuArch,
) -> Problem<'a> {
    let part = |name, value| KeyPart { name, value: KeyValue::Exact(value) };
    let parts = vec![
        part("d", ConstValue::Int(d)),
        part("d_v", ConstValue::Int(d)),
        part("precision", precision.to_const()),
        part("sub_wave", ConstValue::Bool(sub_wave)),
        part("n_k", ConstValue::Int(2048)),
    ];
    Problem { target: Target::Nvptx(arch), def: autotune.def, dtypes, parts }
}

/// The reason why the estimate of resources rejects a variant before compilation, if it does.
fn over_limit(variant: &Variant, arch: GpuArch) -> Option<String> {
    let (func, options) = variant.record().unwrap_or_else(|why| panic!("{}: {why}", variant.what()));
    let estimate =
        pipeline::estimate_resources(&func, arch, &options).unwrap_or_else(|e| panic!("{}: {e}", variant.what()));
    estimate.over_limit()
}

/// The spaces of attention: how many configurations they have, how many of them are kept for bf16 on Hopper, f32 on
/// Hopper, bf16 on Ampere and f32 on a CPU, and how many of the first are compiled, with d = 128.
#[test]
fn spaces_of_attention_have_few_candidates() {
    for (name, total, kept, compiled) in [
        ("flash_attention_fwd", 146, [50, 51, 30, 9], 50),
        ("flash_attention_bwd_dkdv", 117, [41, 53, 24, 9], 36),
        ("flash_attention_bwd_dq", 105, [35, 44, 19, 9], 33),
    ] {
        let autotune = attention_kernels().find(|autotune| autotune.def.name == name).unwrap();
        let candidates = |dtype, target: Target| {
            let dtypes = vec![dtype; autotune.def.generics.len()];
            let problem = problem(autotune, &dtypes, 128, Precision::Ieee, false, GpuArch::Sm90a);
            autotune.candidates(&Problem { target, ..problem })
        };
        let gpu = |dtype, arch| candidates(dtype, Target::Nvptx(arch));
        let on_hopper = gpu(DType::BF16, GpuArch::Sm90a);
        let found = [
            on_hopper.len(),
            gpu(DType::F32, GpuArch::Sm90a).len(),
            gpu(DType::BF16, GpuArch::Sm80).len(),
            candidates(DType::F32, Device::cpu().target()).len(),
        ];
        let (precision, dtype, split) = (Precision::Ieee, DType::BF16, false);
        let variants = on_hopper.into_iter().map(|config| Variant {
            autotune,
            dtype,
            d: 128,
            causal: true,
            precision,
            split,
            config,
        });
        let fit = variants.filter(|variant| over_limit(variant, GpuArch::Sm90a).is_none()).count();
        assert_eq!((autotune.configs().count(), found, fit), (total, kept, compiled), "{name}");
    }
}

/// Each shipped choice is the default of its problem, or among those that tuning measures.
#[test]
fn shipped_choices_are_in_the_spaces() {
    for autotune in attention_kernels() {
        for (key, config) in autotune.shipped() {
            let AttentionKey { dtype, d, precision, .. } = read_key(&key);
            let sub_wave = key.contains("sub_wave=true");
            let dtypes = vec![dtype; autotune.def.generics.len()];
            let problem = problem(autotune, &dtypes, d, precision, sub_wave, GpuArch::Sm90a);
            let wanted = config.to_string();
            let candidates: Vec<String> = autotune.candidates(&problem).iter().map(Config::to_string).collect();
            assert!(candidates.contains(&wanted), "{} {key}: {wanted} is not among {candidates:#?}", autotune.def.name);
        }
    }
}

/// The tuner's estimate of resources rejects no shipped configuration and no default.
#[test]
fn register_estimate_keeps_every_shipped_config() {
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        variants(&[DType::F32, DType::BF16], &[32, 64, 80, 128, 256], arch).par_iter().for_each(|variant| {
            assert_eq!(over_limit(variant, arch), None, "{} on {arch:?}", variant.what());
        });
        for kernel in [DType::F32, DType::BF16].into_iter().flat_map(configurations) {
            let func = kernel.record(&well_aligned(kernel.def));
            let estimate = pipeline::estimate_resources(&func, arch, &kernel.options).unwrap();
            assert_eq!(estimate.over_limit(), None, "{} on {arch:?}", kernel.def.name);
        }
    }
}

/// Configurations that the driver would compile for seconds or minutes, and that would spill, are rejected with the
/// estimated numbers.
#[test]
fn oversized_tiles_are_rejected_before_compilation() {
    let [forward, keys, queries] = ["fwd", "bwd_dkdv", "bwd_dq"].map(|name| {
        attention_kernels().find(|autotune| autotune.def.name.ends_with(name)).unwrap_or_else(|| panic!("no {name}"))
    });
    let tiles = |q: usize, k: usize, warps| Config::default().set("q_tile", q).set("k_tile", k).num_warps(warps);
    let found = |autotune, dtype, d, config| {
        let precision = Precision::Ieee;
        over_limit(&Variant { autotune, dtype, d, causal: true, precision, split: false, config }, GpuArch::Sm90a)
    };
    for (autotune, dtype, d, config) in [
        (keys, DType::F32, 128, tiles(64, 128, 4)),
        (keys, DType::F32, 256, tiles(64, 128, 4)),
        (keys, DType::BF16, 256, tiles(128, 128, 8)),
        (queries, DType::F32, 256, tiles(128, 64, 4)),
    ] {
        let why = found(autotune, dtype, d, config.clone()).unwrap_or_else(|| panic!("{config} is kept"));
        assert!(why.contains("registers per thread, and 255 are available"), "{config}: {why}");
    }
    // Enough registers, but scalar FMAs are fully unrolled.
    let why = found(forward, DType::F32, 128, tiles(128, 128, 8)).unwrap_or_default();
    assert!(why.contains("its code has 32768 unrolled multiply-adds per thread"), "{why}");
    // Tensor cores need no unrolled FMAs.
    assert_eq!(found(forward, DType::BF16, 128, tiles(128, 128, 8)), None);
    assert_eq!(found(forward, DType::F32, 128, tiles(64, 64, 4)), None);
}

#[test]
fn tables_parse_and_match_their_kernels() {
    assert!(!tilewright::kernels::tuned::TABLES.is_empty());
    for autotune in AUTOTUNED {
        for text in autotune.tables {
            let table = tilewright::autotune::Table::parse(text).unwrap();
            assert_eq!(table.device.compute_capability.as_deref(), Some("9.0"));
            for entry in table.entries.iter().filter(|entry| entry.kernel == autotune.def.name) {
                autotune.parse_config(&entry.config).unwrap_or_else(|why| panic!("{}: {why}", entry.config));
            }
        }
    }
    let shipped: usize = attention_kernels().map(|autotune| autotune.shipped().len()).sum();
    assert!(shipped >= 2, "{shipped}");
}

/// Tables with the former names of constants and options give the same configurations.
#[test]
fn tables_with_former_names_hold_the_same_choices() {
    // No shipped choice has `pingpong`.
    let scheduled = "warp_specialize=true";
    let present = tilewright::kernels::tuned::TABLES[0].replace(scheduled, &format!("{scheduled},pingpong=true"));
    let mut former = present.clone();
    for (present, old) in [("x_evict_first=", "first_out="), ("pingpong=", "take_turns=")] {
        assert!(former.contains(present), "{present}");
        former = former.replace(present, old);
    }
    let [present, former] =
        [present, former].map(|text| -> &'static [&'static str] { Box::leak(Box::new([&*text.leak()])) });
    for autotune in AUTOTUNED {
        let with = |tables| Autotune { tables, ..**autotune }.shipped();
        assert_eq!(with(former), with(present), "{}", autotune.def.name);
    }
}

/// Asynchronous MMAs stay in flight, and nothing spills.
#[test]
fn shipped_attention_neither_spills_nor_serializes_wgmma() {
    let Some(ptxas) = ptxas::find() else { return };
    let mut variants = variants(&[DType::BF16, DType::F32], &[16, 32, 64, 80, 128], GpuArch::Sm90a);
    variants.extend(defaults(&[DType::BF16], &[192, 256], GpuArch::Sm90a));
    let failure =
        |variant: &Variant| match variant.ptx().and_then(|ptx| ptxas::assemble(&ptxas, &ptx, GpuArch::Sm90a.name())) {
            Err(why) => Some(format!("{}: {why}", variant.what())),
            Ok(found) if found.serialized || found.spills > 0 => Some(format!("{}: {found:?}", variant.what())),
            Ok(_) => None,
        };
    let failures: Vec<String> = variants.par_iter().filter_map(failure).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[kernel]
fn centered(x: In<f32>, y: Out<f32>, #[constexpr] tile: usize) {
    let i = arange(0, tile);
    let v = load(x + i);
    store(y + i, v - max(v));
}

#[kernel]
fn doubled(x: In<f32>, y: Out<f32>, #[constexpr] tile: usize) {
    let i = arange(0, tile);
    store(y + i, load(x + i) * 2.0);
}

#[kernel]
fn summed(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let i = arange(0, tile);
    let w = load(x + i);
    let mut total = zeros::<f32>([tile]);
    for step in range(0, n) {
        total += exp(load(x + step * tile + i) * w);
    }
    store(y + i, total);
}

/// A tile of 4096 f32 takes 128 registers per thread of one warp.
#[test]
fn register_estimate_counts_live_tiles() {
    let registers = |def: &'static KernelDef, num_warps: u32| {
        let func = def.record(&[], &[("tile", ConstValue::Int(4096))], &well_aligned(def)).unwrap();
        let options = CompileOptions { num_warps, ..CompileOptions::default() };
        let estimate = pipeline::estimate_resources(&func, GpuArch::Sm80, &options).unwrap();
        (estimate.registers, estimate.available)
    };
    // The tile is live until its maximum is known.
    assert_eq!(registers(&CENTERED, 1), (128, 255));
    assert_eq!(registers(&CENTERED, 4), (32, 255));
    assert_eq!(registers(&CENTERED, 16), (8, 128));
    // Processed element by element.
    assert_eq!(registers(&DOUBLED, 1).0, 0);
    // The accumulator, and the tile that every iteration reads.
    assert_eq!(registers(&SUMMED, 1).0, 256);
}

/// Without a measured configuration, caches and modifiers get the tiles that suit them: few rows small ones, and the kernel accepts
/// them all.
#[test]
fn caches_and_modifiers_have_defaults_of_their_own() {
    let def = &FLASH_ATTENTION_FWD;
    let autotune = attention_kernels().find(|autotune| autotune.def.name == def.name).unwrap();
    let tiles = |constants: &[(&'static str, ConstValue)], sizes: &[(&str, i64)]| {
        let of_size = |name: &str| sizes.iter().find(|(known, _)| *known == name).map(|(_, n)| *n);
        let heuristics = def.heuristics(&|name| {
            let constant = constants.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
            constant.or_else(|| of_size(name).map(ConstValue::Int))
        });
        let mut all = [constants, &heuristics].concat();
        let constant = |name: &str| all.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let (target, dtypes) = (Target::Nvptx(GpuArch::Sm90a), [DType::BF16; 3]);
        let (config, _) = autotune.configuration_for(&target, &dtypes, &constant, &of_size).unwrap();
        all.extend(config.constants.clone());
        def.record(&dtypes, &all, &well_aligned(def)).unwrap_or_else(|why| panic!("{sizes:?}: {config}: {why}"));
        Tiles::of(&config).unwrap()
    };
    let (yes, int) = (ConstValue::Bool(true), ConstValue::Int);
    let base = [("d", int(64)), ("d_v", int(64)), ("causal", yes.clone()), ("precision", Precision::Ieee.to_const())];
    let heads = [("heads", 32), ("heads_kv", 8), ("batch", 8), ("n_k", 16384)];
    let with = |constants: &[(&'static str, ConstValue)], sizes: &[(&'static str, i64)]| {
        tiles(&[&base[..], constants].concat(), &[&heads[..], sizes].concat())
    };
    let dense = with(&[], &[("n_q", 16384)]);
    assert!(dense.replicas > 1 && dense.persistent, "{dense:?}");
    let window = with(&[("mask", ConstValue::Variant("window".into()))], &[("n_q", 16384)]);
    assert!(window.replicas == 1 && !window.persistent, "{window:?}");
    assert_eq!(with(&[], &[("n_q", 7)]).q_tile, 16);
    let pack = ("pack", int(4));
    let cache = [("lengths_given", yes.clone()), ("table_given", yes.clone()), ("page", int(64)), pack.clone()];
    let rows = [("lengths_given", yes.clone()), ("table_given", yes.clone()), ("page", int(16)), pack];
    for (n_q, q_tile) in [(1, 16), (4, 16), (5, 64), (16, 64), (17, 128), (16384, 128)] {
        let sizes = [("n_q", n_q)];
        assert_eq!(with(&cache, &sizes).q_tile, q_tile, "{n_q} queries");
        let (blocks, by_rows) = (with(&cache, &sizes), with(&rows, &sizes));
        assert!(blocks.replicas == 1 && !blocks.persistent && by_rows.replicas == 1, "{blocks:?}, {by_rows:?}");
        assert_eq!(blocks == by_rows, n_q <= 4, "{blocks:?}, {by_rows:?}");
    }
    // 1000 sequences, most of one query.
    let packed = [&cache[..], &[("row_starts_given", yes)]].concat();
    assert_eq!(with(&packed, &[("n_q", 1500), ("num_starts", 1001)]).q_tile, 16);
    assert_eq!(with(&packed, &[("n_q", 4000), ("num_starts", 2)]).q_tile, 128);
    // Without a number of sequences, they have many queries.
    assert_eq!(with(&packed, &[]).q_tile, 128);
}
