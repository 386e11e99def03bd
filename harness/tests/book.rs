//! The book's tour: its pictures are what the compiler gives, and its commands run.

use std::path::{Path, PathBuf};
use std::process::Command;

use tilewright::codegen::lang::kernel::{ConstValue, DType, KernelDef};
use tilewright::codegen::target::{CompileOptions, GpuArch};
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::prelude::{Buffer, Device};
use tilewright_cli::explain::pictures;

#[path = "../../examples/02_fused_softmax.rs"]
#[allow(dead_code)]
mod fused_softmax;
#[path = "../../examples/03_matmul.rs"]
#[allow(dead_code)]
mod matmul;
#[path = "../../examples/01_vector_add.rs"]
#[allow(dead_code)]
mod vector_add;

fn tour() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tour")
}

/// A kernel, and the files that show it: the name of a file of the book, and how the name begins that
/// `explain --svg` gives it.
struct Shown {
    def: &'static KernelDef,
    dtypes: Vec<DType>,
    constants: Vec<(&'static str, ConstValue)>,
    options: CompileOptions,
    files: &'static [(&'static str, &'static str)],
}

fn integers(values: &[(&'static str, i64)]) -> Vec<(&'static str, ConstValue)> {
    values.iter().map(|(name, value)| (*name, ConstValue::Int(*value))).collect()
}

/// The matmul of the example with square tiles of c.
fn matmul(
    (tile, k_tile, num_warps): (i64, i64, u32),
    num_stages: u32,
    producer: bool,
    files: &'static [(&'static str, &'static str)],
) -> Shown {
    let mut options = CompileOptions { num_warps, num_stages, ..CompileOptions::default() };
    options.schedule.warp_specialize = Some(producer);
    let mut constants = integers(&[("m_tile", tile), ("n_tile", tile), ("k_tile", k_tile), ("group", 8)]);
    constants.push(("activation", ConstValue::Variant("Identity".into())));
    Shown { def: &matmul::MATMUL, dtypes: Vec::new(), constants, options, files }
}

fn shown() -> Vec<Shown> {
    let options = CompileOptions::default();
    let mut attention = CompileOptions { num_warps: 8, num_stages: 2, ..CompileOptions::default() };
    attention.schedule.warp_specialize = Some(true);
    attention.schedule.pingpong = Some(true);
    let tiles = [("d", 128), ("d_tile", 128), ("d_v", 128), ("d_v_tile", 128), ("q_tile", 128), ("k_tile", 128)];
    let mut tiles = integers(&tiles);
    tiles.extend(["causal", "even_keys"].map(|name| (name, ConstValue::Bool(true))));
    vec![
        Shown {
            def: &vector_add::VECTOR_ADD,
            dtypes: Vec::new(),
            constants: integers(&[("tile", 1024)]),
            options: options.clone(),
            files: &[("vector-add-layout", "registers-1024-")],
        },
        Shown {
            def: &fused_softmax::SOFTMAX_ROWS,
            dtypes: vec![DType::F32],
            constants: integers(&[("tile", 1024)]),
            options,
            files: &[("softmax-layout", "registers-1024-"), ("softmax-timeline", "timeline-1")],
        },
        matmul(
            (64, 32, 4),
            3,
            false,
            &[("matmul-accumulator", "registers-64x64-constant"), ("matmul-shared", "shared-64x32-f16")],
        ),
        matmul((64, 32, 4), 1, false, &[("matmul-load", "registers-64x32-")]),
        matmul((128, 64, 8), 1, false, &[("matmul-1-stage", "timeline-1")]),
        matmul((128, 64, 8), 3, false, &[("matmul-3-stages", "timeline-1"), ("matmul-shared-memory", "shared-memory")]),
        matmul((128, 64, 8), 4, true, &[("matmul-producer", "timeline-1")]),
        Shown {
            def: &FLASH_ATTENTION_FWD,
            dtypes: vec![DType::BF16; 3],
            constants: tiles,
            options: attention,
            files: &[("attention-timeline", "timeline-1"), ("attention-shared-memory", "shared-memory")],
        },
    ]
}

/// `BLESS=1`, which `make book-pictures` sets, rewrites the files.
#[test]
fn pictures_are_those_of_the_compiler() {
    let mut expected = Vec::new();
    let mut changed = Vec::new();
    for Shown { def, dtypes, constants, options, files } in shown() {
        let found = pictures(def, &dtypes, &constants, GpuArch::Sm90a, &options);
        let found = found.unwrap_or_else(|error| panic!("{}: {error}", def.name));
        for (file, name) in files {
            let names: Vec<&str> = found.iter().map(|(known, _)| known.as_str()).collect();
            let picture = found.iter().find(|(known, _)| known.starts_with(name) && !known.ends_with("-warps"));
            let (_, svg) = picture.unwrap_or_else(|| panic!("{} has no {name}: {names:?}", def.name));
            let path = tour().join(format!("pictures/{file}.svg"));
            if std::env::var_os("BLESS").is_some() {
                std::fs::write(&path, svg).unwrap();
            }
            if std::fs::read_to_string(&path).ok().as_deref() != Some(svg) {
                changed.push(*file);
            }
            expected.push(format!("{file}.svg"));
        }
    }
    assert!(changed.is_empty(), "`make book-pictures` updates the pictures {changed:?}");
    let mut committed: Vec<String> = std::fs::read_dir(tour().join("pictures"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    committed.sort();
    expected.sort();
    assert_eq!(committed, expected);
}

/// The blocks of shell of the tour's pages, by page.
fn commands() -> Vec<(PathBuf, String)> {
    let pages = std::fs::read_dir(tour()).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages
        .flat_map(|page| {
            let text = std::fs::read_to_string(&page).unwrap();
            let blocks = text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
            let lines = blocks.flat_map(|block| {
                let block = block.replace("\\\n", " ");
                block.lines().map(str::to_string).collect::<Vec<_>>()
            });
            lines.map(|line| (page.clone(), line)).collect::<Vec<_>>()
        })
        .collect()
}

/// Commands of `tilewright` run; `cargo run` names an example that exists, which other tests run.
#[test]
fn commands_of_the_tour_run() {
    let folder = tempfile::tempdir().unwrap();
    let (mut run, mut examples) = (0, 0);
    for (page, line) in commands() {
        let mut words = line.split_whitespace().skip_while(|word| word.contains('=') && !word.starts_with('-'));
        match words.next() {
            Some("tilewright") => {
                let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
                let output = command.args(words).current_dir(folder.path()).output().unwrap();
                let error = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{}: `{line}`: {error}", page.display());
                run += 1;
            }
            Some("cargo") => {
                let name = line.rsplit(' ').next().unwrap_or_default();
                let path = tour().join(format!("../../examples/{name}.rs"));
                assert!(line.contains("cargo run --example ") && path.exists(), "{}: `{line}`", page.display());
                examples += 1;
            }
            _ => panic!("{}: what is `{line}`?", page.display()),
        }
    }
    assert!(run >= 5 && examples >= 4, "{run} commands and {examples} examples");
    let schedule = std::fs::read_to_string(folder.path().join("out/matmul.schedule.tile")).unwrap();
    assert!(schedule.contains("at {stage = 0, partition = producer, depth = 4, tma = true}"), "{schedule}");
}

/// What the page about vector addition says about an `n` that is too large.
#[test]
fn a_launch_beyond_its_buffers_is_refused() {
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32; 100]).unwrap();
    let mut out = Buffer::<f32>::zeros(&device, 100).unwrap();
    let mut kernel = vector_add::VectorAdd { x: &x, y: &x, out: &mut out, n: 101, tile: 128 };
    let error = kernel.launch(&device, 1).unwrap_err().to_string();
    assert!(error.contains("01_vector_add.rs:"), "{error}");
}
