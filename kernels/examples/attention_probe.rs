//! Compiles FlashAttention-2 for a GPU and writes the inputs of a benchmark: `NAME.ptx`, and `NAME.json` with the
//! manifest, the constants and the grid.
//!
//! - `attention_probe DIR` writes every kernel at the default tiles, for head dimensions 64 and 128, causal and not.
//! - `attention_probe DIR key=value…` writes one variant: `kernel` (fwd, dkdv, dq, pre, or all), `d`, `dtype`,
//!   `causal`, `q_tile`, `k_tile`, `warps`, `stages`, `replicas`, `group`, `precision`, `even` (lengths are multiples of the
//!   tiles), `one_pass`, `mask`, `score` (names of modifiers), `ws` (warp specialization), `pingpong`, `overlap` (true or false), `tma`, `arch`.
//!
//! With `emit=layout` or `emit=async` it also writes `NAME.tile`, the Tile IR of that stage, and `NAME.ll`, the LLVM IR.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use tilewright_codegen::ir::{DType, Func, Stage};
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::passes::current_name;
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::target::{Code, CompileOptions, GpuArch, Schedule, Target};
use tilewright_codegen::text;
use tilewright_kernels::attention::backward::{FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ};
use tilewright_kernels::attention::backward_rows::FLASH_ATTENTION_BWD_PREPROCESS;
use tilewright_kernels::attention::config::{Pass, Tiles, adds_lanes_first, d_tile, default_tiles};
use tilewright_kernels::attention::forward::FLASH_ATTENTION_FWD;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A kernel with its name on the command line, and the pass whose default tiles it gets.
#[derive(Clone, Copy)]
struct Entry {
    name: &'static str,
    def: &'static KernelDef,
    pass: Pass,
}

const KERNELS: [Entry; 4] = [
    Entry { name: "fwd", def: &FLASH_ATTENTION_FWD, pass: Pass::Forward },
    Entry { name: "pre", def: &FLASH_ATTENTION_BWD_PREPROCESS, pass: Pass::Forward },
    Entry { name: "dkdv", def: &FLASH_ATTENTION_BWD_DKDV, pass: Pass::Dkdv },
    Entry { name: "dq", def: &FLASH_ATTENTION_BWD_DQ, pass: Pass::Dq },
];

/// One variant of one kernel.
struct VariantSpec {
    name: String,
    def: &'static KernelDef,
    pass: Pass,
    dtype: DType,
    arch: GpuArch,
    tiles: Tiles,
    consts: Vec<(&'static str, ConstValue)>,
    schedule: Schedule,
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("expected a directory to write to")?;
    let mut given = HashMap::new();
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or_else(|| format!("expected key=value, found `{arg}`"))?;
        let key = if key == "turns" { "pingpong" } else { key };
        given.insert(key.to_string(), value.to_string());
    }
    std::fs::create_dir_all(&dir)?;
    let mut combinations = Vec::new();
    for d in listed(&given, "d", &["64", "128"]) {
        for causal in listed(&given, "causal", &["true", "false"]) {
            combinations.push((d.clone(), causal));
        }
    }
    let wanted = given.get("kernel").cloned().unwrap_or("all".to_string());
    for (d, causal) in combinations {
        given.extend([("d".to_string(), d), ("causal".to_string(), causal)]);
        for entry in KERNELS {
            if wanted == "all" || wanted == entry.name {
                write(Path::new(&dir), &choice(entry, &given)?, given.get("emit"))?;
            }
        }
    }
    Ok(())
}

fn listed(given: &HashMap<String, String>, key: &str, all: &[&str]) -> Vec<String> {
    match given.get(key) {
        Some(list) => list.split(',').map(str::to_string).collect(),
        None => all.iter().map(|s| s.to_string()).collect(),
    }
}

fn choice(entry: Entry, given: &HashMap<String, String>) -> Result<VariantSpec> {
    fn parsed<T: std::str::FromStr>(given: &HashMap<String, String>, key: &str, default: T) -> Result<T>
    where
        T::Err: std::fmt::Display,
    {
        match given.get(key) {
            Some(text) => text.parse().map_err(|e| format!("{key}={text}: {e}").into()),
            None => Ok(default),
        }
    }
    let Entry { name, def, pass } = entry;
    let d: usize = parsed(given, "d", 64)?;
    let dtype = match given.get("dtype").map_or("bf16", String::as_str) {
        "bf16" => DType::BF16,
        "f16" => DType::F16,
        "f32" => DType::F32,
        other => return Err(format!("dtype={other}: expected bf16, f16 or f32").into()),
    };
    let arch: GpuArch = parsed(given, "arch", GpuArch::Sm90a)?;
    let mut tiles = default_tiles(pass, d, dtype.bytes(), &Target::Nvptx(arch));
    tiles.q_tile = parsed(given, "q_tile", tiles.q_tile)?;
    tiles.k_tile = parsed(given, "k_tile", tiles.k_tile)?;
    tiles.num_warps = parsed(given, "warps", tiles.num_warps)?;
    tiles.num_stages = parsed(given, "stages", tiles.num_stages)?;
    let causal: bool = parsed(given, "causal", true)?;
    let even: bool = parsed(given, "even", true)?;
    let precision = given.get("precision").map_or(if dtype == DType::F32 { "tf32x3" } else { "ieee" }, String::as_str);
    let named = |key: &str, default: &'static str| given.get(key).cloned().unwrap_or(default.to_string());
    let (mask, score) = (named("mask", "dense"), named("score", "plain"));
    let one_pass: bool = parsed(given, "one_pass", false)?;
    let int = |n: usize| ConstValue::Int(n as i64);
    let all = [
        ("d", int(d)),
        ("d_tile", int(d_tile(d))),
        ("d_v", int(d)),
        ("d_v_tile", int(d_tile(d))),
        ("q_tile", int(tiles.q_tile)),
        ("k_tile", int(tiles.k_tile)),
        ("group", int(parsed(given, "group", 1)?)),
        ("replicas", int(parsed(given, "replicas", tiles.replicas)?)),
        ("causal", ConstValue::Bool(causal)),
        ("even_keys", ConstValue::Bool(even)),
        ("even_queries", ConstValue::Bool(even)),
        ("one_pass", ConstValue::Bool(one_pass)),
        ("lanes_first", ConstValue::Bool(one_pass && adds_lanes_first(&Target::Nvptx(arch)))),
        ("precision", ConstValue::Variant(precision.to_string())),
        ("mask", ConstValue::Variant(mask.to_string())),
        ("score", ConstValue::Variant(score.to_string())),
    ];
    let flag = |key: &str| -> Result<Option<bool>> {
        given.get(key).map(|text| text.parse().map_err(|e| format!("{key}: {e}").into())).transpose()
    };
    let (warp_specialize, pingpong, overlap) = (flag("ws")?, flag("pingpong")?, flag("overlap")?);
    let tma = flag("tma")?;
    let schedule = Schedule { warp_specialize, pingpong, overlap, tma, ..Schedule::default() };
    let has = |name: &str| def.params.iter().any(|p| p.name == name);
    let name = format!(
        "{name}_{dtype}_d{d}_{mask}_{score}{}{}_q{}k{}w{}s{}",
        if causal { "_causal" } else { "" },
        match (warp_specialize, pingpong) {
            (Some(true), Some(true)) => "_pingpong",
            (Some(true), _) => "_ws",
            _ if tma == Some(true) => "_tma",
            _ => "",
        },
        tiles.q_tile,
        tiles.k_tile,
        tiles.num_warps,
        tiles.num_stages
    );
    let consts = all.into_iter().filter(|(name, _)| has(name)).collect();
    Ok(VariantSpec { name, def, pass, dtype, arch, tiles, consts, schedule })
}

/// Assumes aligned memory, strides that are multiples of 16, and contiguous rows.
fn specialization(def: &KernelDef) -> Specialization {
    let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    let spec = |name: &str, kind: ParamKind| match kind {
        ParamKind::Scalar(_) if name.ends_with("_stride_d") => ArgSpec { divisible_by: 1, equal_to: Some(1) },
        ParamKind::Scalar(_) if !name.contains("_stride_") => ArgSpec::default(),
        _ => ArgSpec { divisible_by: 16, equal_to: None },
    };
    Specialization { args: passed.map(|p| spec(p.name, p.kind)).collect() }
}

/// Keeps the text of one stage, and the LLVM IR.
struct Stages<'a> {
    wanted: Option<&'a str>,
    tile: String,
    llvm: String,
}

impl Observer for Stages<'_> {
    fn after(&mut self, pass: &'static str, stage: Stage, func: &Func) {
        let stage = format!("{stage:?}").to_lowercase();
        if self.wanted == Some(stage.as_str()) {
            self.tile = format!("// after {pass}\n{}", text::print(func));
        }
    }
    fn llvm_ir(&mut self, text: &str) {
        self.llvm = text.to_string();
    }
}

fn write(dir: &Path, choice: &VariantSpec, emit: Option<&String>) -> Result<()> {
    let func =
        choice.def.record(&vec![choice.dtype; choice.def.generics.len()], &choice.consts, &specialization(choice.def));
    let func = func.map_err(|d| d.to_string())?;
    let Tiles { num_warps, num_stages, .. } = choice.tiles;
    let options = CompileOptions {
        num_warps,
        num_stages,
        debug_asserts: false,
        schedule: choice.schedule,
        ..CompileOptions::default()
    };
    let mut stages = Stages { wanted: emit.map(|stage| current_name(stage)), tile: String::new(), llvm: String::new() };
    let started = std::time::Instant::now();
    let artifact = pipeline::compile(&func, &Target::Nvptx(choice.arch), &options, &mut stages);
    let elapsed = started.elapsed();
    let file = |extension: &str| dir.join(format!("{}.{extension}", choice.name));
    // Written before errors are reported: the IR matters most when a kernel does not compile.
    if emit.is_some() {
        std::fs::write(file("tile"), &stages.tile)?;
    }
    let artifact = artifact?;
    let Code::Ptx(ptx) = &artifact.code else { return Err("expected PTX".into()) };
    std::fs::write(file("ptx"), ptx)?;
    if emit.is_some() {
        std::fs::write(file("ll"), &stages.llvm)?;
    }
    let consts: serde_json::Map<_, _> =
        choice.consts.iter().map(|(name, value)| (name.to_string(), value.to_string().into())).collect();
    let tile = if choice.pass == Pass::Dkdv { "k_tile over n_k" } else { "q_tile over n_q" };
    let record = serde_json::json!({
        "name": choice.name,
        "manifest": serde_json::to_value(&artifact.manifest)?,
        "consts": consts,
        "grid": [tile, if choice.pass == Pass::Dkdv { "kv heads" } else { "heads" }, "batch"],
    });
    std::fs::write(file("json"), serde_json::to_string_pretty(&record)?)?;
    println!(
        "{:40} {:4} threads {:7} bytes shared, {:.0} ms",
        choice.name,
        artifact.manifest.threads,
        artifact.manifest.shared_bytes,
        elapsed.as_secs_f64() * 1e3
    );
    Ok(())
}
