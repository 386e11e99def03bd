//! The machine code (SASS) of the attention kernels on Hopper: asynchronous MMAs must overlap the arithmetic of the
//! softmax.
//!
//! It does not suffice to check the PTX, in which MMAs start early and waits come late: ptxas moves waits, and
//! serializes MMAs if it cannot prove that their registers are not in use.

use std::path::PathBuf;
use tempfile::TempDir;
use tilewright::kernels::attention::backward::{FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ};
use tilewright::kernels::attention::config::{Keys, decoding_tiles};
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Code, CompileOptions, GpuArch, Schedule, Target};
use tilewright_tests::configurations::{Configuration, PTX_VERSION, configurations, well_aligned};
use tilewright_tests::{consts, ptxas, sass};

/// A kernel, and the overlap that it must have.
struct Case {
    def: &'static KernelDef,
    d: usize,
    tiles: [usize; 2],
    causal: bool,
    /// Warp specialization: producer warps load.
    warp_specialize: bool,
    /// Least number of arithmetic instructions of a thread that each iteration executes while an MMA is in flight.
    overlapped: usize,
}

fn case(def: &'static KernelDef, d: usize, tiles: [usize; 2], overlapped: usize) -> Case {
    Case { def, d, tiles, causal: false, warp_specialize: false, overlapped }
}

fn cases() -> Vec<Case> {
    // The maxima of the 64 scores of a thread, of which ptxas moves a few below the wait.
    let forward = |d| case(&FLASH_ATTENTION_FWD, d, [128, 128], 24);
    vec![
        forward(64),
        forward(128),
        Case { causal: true, warp_specialize: true, ..forward(64) },
        Case { causal: true, warp_specialize: true, ..forward(128) },
        Case { warp_specialize: true, ..case(&FLASH_ATTENTION_BWD_DQ, 64, [128, 64], 32) },
        Case { warp_specialize: true, ..case(&FLASH_ATTENTION_BWD_DQ, 128, [128, 64], 32) },
        // Of the 32 arguments of exponentials, ptxas moves 8 above the wait.
        Case { warp_specialize: true, ..case(&FLASH_ATTENTION_BWD_DKDV, 64, [64, 128], 24) },
    ]
}

impl Case {
    fn name(&self) -> String {
        let [q_tile, k_tile] = self.tiles;
        let (causal, warp_specialize) = (self.causal, self.warp_specialize);
        format!(
            "{} d {} tiles {q_tile} x {k_tile}, causal: {causal}, warp_specialize: {warp_specialize}",
            self.def.name, self.d
        )
    }

    fn ptx(&self, clocks: Option<u32>) -> String {
        let [q_tile, k_tile] = self.tiles;
        let all: Vec<(&'static str, ConstValue)> = consts! {
            d = self.d, d_tile = self.d, d_v = self.d, d_v_tile = self.d, q_tile = q_tile, k_tile = k_tile, causal = self.causal,
            even_keys = true, even_queries = true,
        }
        .to_vec();
        let consts = all.into_iter().filter(|(name, _)| self.def.params.iter().any(|p| p.name == *name)).collect();
        let options = CompileOptions {
            num_warps: 8,
            num_stages: 2,
            ptx_version: PTX_VERSION,
            debug_asserts: false,
            clocks,
            schedule: Schedule {
                warp_specialize: Some(self.warp_specialize),
                overlap: Some(true),
                ..Schedule::default()
            },
            ..CompileOptions::default()
        };
        ptx(&Configuration { def: self.def, dtypes: vec![DType::BF16; self.def.generics.len()], consts, options })
    }
}

fn ptx(configuration: &Configuration) -> String {
    ptx_of(&configuration.record(&well_aligned(configuration.def)), &configuration.options)
}

fn ptx_of(func: &Func, options: &CompileOptions) -> String {
    let target = Target::Nvptx(GpuArch::Sm90a);
    match pipeline::compile(func, &target, options, &mut ()).unwrap_or_else(|e| panic!("{e}")).code {
        Code::Ptx(ptx) => ptx,
        Code::Object(_) => panic!("an object file instead of PTX"),
    }
}

/// The assembler, with the disassembler beside it.
struct Tools {
    ptxas: PathBuf,
    folder: TempDir,
}

impl Tools {
    fn find() -> Option<Tools> {
        Some(Tools { ptxas: ptxas::find()?, folder: tempfile::tempdir().unwrap() })
    }

    /// What the code takes, and the loops of the machine code, if there is a disassembler.
    fn assemble(&self, ptx: &str) -> (ptxas::Resources, Option<Vec<Vec<sass::Instruction>>>) {
        let (nvdisasm, cubin) = (self.ptxas.with_file_name("nvdisasm"), self.folder.path().join("kernel.cubin"));
        let resources = ptxas::assemble_to(&self.ptxas, ptx, "sm_90a", &cubin).unwrap_or_else(|e| panic!("{e}"));
        if !nvdisasm.is_file() {
            println!("skipped: no nvdisasm in the folder of {}", self.ptxas.display());
            return (resources, None);
        }
        (resources, Some(sass::loops(&nvdisasm, &cubin).unwrap_or_else(|e| panic!("{e}"))))
    }
}

/// The largest number of arithmetic instructions between a wait that leaves MMAs in flight and a wait for all.
fn overlapped_arithmetic(body: &[sass::Instruction]) -> usize {
    let (mut most, mut count, mut in_flight) = (0, 0, false);
    for instruction in body {
        if instruction.starts_with("WARPGROUP.DEPBAR") {
            in_flight = !instruction.ends_with("gsb0, 0x0");
            count = 0;
        } else if in_flight && ["MUFU", "FMNMX", "FFMA", "FMUL", "FADD"].iter().any(|op| instruction.starts_with(op)) {
            count += 1;
            most = most.max(count);
        }
    }
    most
}

/// Records of clocks store between asynchronous MMAs, and take a register.
#[test]
fn records_of_clocks_leave_wgmma_asynchronous() {
    let Some(tools) = Tools::find() else { return };
    for case in cases() {
        let ptx = case.ptx(Some(0));
        assert!(ptx.contains("%clock"), "{}", case.name());
        let (resources, _) = tools.assemble(&ptx);
        println!("{}: {} registers, {} bytes of spills", case.name(), resources.registers, resources.spills);
        assert_eq!(resources.warnings, Vec::<String>::new(), "{}", case.name());
        assert_eq!(resources.spills, 0, "{}", case.name());
    }
}

#[test]
fn arithmetic_overlaps_wgmma() {
    let Some(tools) = Tools::find() else { return };
    let mut failures = Vec::new();
    for case in cases() {
        let name = case.name();
        let (resources, loops) = tools.assemble(&case.ptx(None));
        println!("{name}: {} registers, {} bytes of spills", resources.registers, resources.spills);
        if !resources.warnings.is_empty() || resources.spills > 0 {
            failures.push(format!("{name}: {} bytes of spills {:?}", resources.spills, resources.warnings));
        }
        let Some(loops) = loops else { continue };
        let most = loops.iter().map(|body| overlapped_arithmetic(body)).max().unwrap_or(0);
        if most < case.overlapped {
            failures.push(format!("{name}: {most} instructions overlap MMAs, expected at least {}", case.overlapped));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Programs that add to dQ in a fixed order leave that to a warp beside the producer: no consumer waits for the counter, and what
/// tells the warp what to do keeps the descriptors of the loop's `wgmma` in uniform registers.
#[test]
fn ordered_additions_have_a_warp_of_their_own() {
    let Some(tools) = Tools::find() else { return };
    for (d, q_tile, num_stages, causal) in
        [(64, 128, 2, true), (64, 128, 2, false), (128, 64, 3, true), (128, 64, 3, false)]
    {
        let consts = consts! {
            d = d, d_tile = d, d_v = d, d_v_tile = d, q_tile = q_tile, k_tile = 128usize, causal = causal, even_keys = true, even_queries = true,
            one_pass = true, ordered = true,
        };
        let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
        let options = CompileOptions {
            num_warps: 8,
            num_stages,
            ptx_version: PTX_VERSION,
            schedule,
            ..CompileOptions::default()
        };
        let def = &FLASH_ATTENTION_BWD_DKDV;
        let ptx = ptx(&Configuration {
            def,
            dtypes: vec![DType::BF16; def.generics.len()],
            consts: consts.to_vec(),
            options,
        });
        let count = |instruction: &str| ptx.matches(instruction).count();
        let found =
            ["ld.relaxed.gpu", "cp.reduce.async.bulk.global", "red.global", ".acquire.", ".release.gpu"].map(count);
        assert_eq!(found, [1, 1, 0, 0, 0], "d = {d}, causal: {causal}");
        let (resources, loops) = tools.assemble(&ptx);
        // Two addresses may be stored before the loop, and loaded after it.
        assert!(resources.warnings.is_empty() && resources.spills <= 16, "d = {d}, causal: {causal}: {resources:?}");
        let Some(loops) = loops else { continue };
        let count = |body: &[sass::Instruction], names: &[&str]| {
            body.iter().filter(|i| names.iter().any(|name| i.starts_with(name))).count()
        };
        let with_dots = loops.iter().filter(|body| count(body, &["HGMMA"]) > 0);
        let innermost = with_dots.min_by_key(|body| body.len()).expect("a loop with products");
        let found = count(innermost, &["R2UR", "LDL", "STL"]);
        assert!(found <= 2, "d = {d}, causal: {causal}: {found} moves to uniform registers and spills in the loop");
    }
}

/// In a plain matmul the next iteration issues its MMA before it waits for that of the current one.
#[test]
fn accumulation_overlaps_the_next_iteration() {
    let Some(tools) = Tools::find() else { return };
    let all = configurations(DType::BF16);
    let matmul = all.into_iter().find(|c| c.def.name == "matmul").expect("a configuration");
    for warp_specialize in [false, true] {
        let schedule = Schedule { warp_specialize: Some(warp_specialize), ..matmul.options.schedule };
        let options = CompileOptions { schedule, ..matmul.options.clone() };
        let ptx = ptx(&Configuration { options, ..matmul.clone() });
        let (resources, loops) = tools.assemble(&ptx);
        println!("matmul, warp_specialize: {warp_specialize}: {} registers", resources.registers);
        assert!(
            resources.warnings.is_empty() && resources.spills == 0,
            "warp_specialize: {warp_specialize}: {resources:?}"
        );
        if let Some(loops) = loops {
            let has_mma = |body: &&Vec<String>| body.iter().any(|i| i.starts_with("HGMMA"));
            let body = loops.iter().filter(has_mma).min_by_key(|body| body.len()).expect("a loop with MMAs");
            let waits: Vec<&String> = body.iter().filter(|i| i.starts_with("WARPGROUP.DEPBAR")).collect();
            let left = !waits.is_empty() && waits.iter().all(|i| i.ends_with("gsb0, 0x1"));
            assert!(left, "warp_specialize: {warp_specialize}: {waits:?}");
        }
    }
}

/// The default tiles of 8-bit attention: no spills, and the weights of the softmax become operands by one conversion for two of
/// them, in the lanes where they are. A permutation or a shuffle of bytes would be in every iteration.
#[test]
fn weights_of_8_bits_stay_in_their_lanes() {
    let Some(tools) = Tools::find() else { return };
    let def = &FLASH_ATTENTION_FWD;
    // V is transposed.
    let mut specialization = well_aligned(def);
    let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    for (param, arg) in passed.zip(&mut specialization.args) {
        match param.name {
            "v_stride_v_rows" => *arg = ArgSpec { divisible_by: 1, equal_to: Some(1) },
            "v_stride_d_v" => *arg = ArgSpec { divisible_by: 16, equal_to: None },
            _ => {}
        }
    }
    for (d, q_tile, replicas, num_warps, num_stages, pingpong) in
        [(64usize, 64usize, 3usize, 4, 2, true), (128, 128, 1, 8, 3, false), (128, 64, 2, 4, 3, false)]
    {
        for causal in [true, false] {
            let consts = consts! {
                d = d, d_tile = d, d_v = d, d_v_tile = d, q_tile = q_tile, k_tile = 128usize, causal = causal, even_keys = true,
                replicas = replicas, persistent = replicas > 1, q_descale_given = true, k_descale_given = true,
                v_descale_given = true, block_scales = true,
            };
            let schedule = Schedule {
                warp_specialize: Some(true),
                overlap: Some(true),
                pingpong: pingpong.then_some(true),
                ..Schedule::default()
            };
            let options = CompileOptions {
                num_warps,
                num_stages,
                ptx_version: PTX_VERSION,
                schedule,
                ..CompileOptions::default()
            };
            let dtypes = vec![DType::F8E4M3, DType::BF16, DType::F8E4M3];
            let configuration = Configuration { def, dtypes, consts: consts.to_vec(), options };
            let func = configuration.record(&specialization);
            let (resources, loops) = tools.assemble(&ptx_of(&func, &configuration.options));
            let name = format!("d {d}, {replicas} programs, causal: {causal}");
            assert_eq!((resources.spills, resources.warnings), (0, Vec::new()), "{name}");
            let Some(loops) = loops else { continue };
            let count = |body: &[sass::Instruction], name: &str| body.iter().filter(|i| i.starts_with(name)).count();
            let full = loops.iter().filter(|body| count(body, "QGMMA") > 0).min_by_key(|body| body.len());
            let full = full.unwrap_or_else(|| panic!("{name}: no loop with 8-bit products"));
            // 64 weights of a thread; the two shuffles of each of two rows are those of the maximum.
            assert_eq!((count(full, "F2FP"), count(full, "SHFL")), (32, 4), "{name}");
            assert!(count(full, "PRMT") == 0, "{name}: {} permutations of bytes", count(full, "PRMT"));
        }
    }
}

/// The tiles of prompts beside a cache: no spills, and a producer warp loads the keys that are all there by TMA, also where it finds
/// the program's sequence among others first, and a page in a table.
#[test]
fn producers_load_the_keys_of_prompts() {
    let Some(tools) = Tools::find() else { return };
    let def = &FLASH_ATTENTION_FWD;
    for (d, rows, page, row_starts) in [
        (64usize, 128, 64usize, true),
        (128, 128, 64, true),
        (128, 128, 0, false),
        (64, 20, 64, false),
        (128, 20, 128, true),
    ] {
        let tiles = decoding_tiles(rows, d, [2, 2], Keys::of(true, page), &Target::Nvptx(GpuArch::Sm90a));
        let consts = consts! {
            d = d, d_tile = d, d_v = d, d_v_tile = d, q_tile = tiles.q_tile, k_tile = tiles.k_tile, causal = true,
            lengths_given = true, table_given = page > 0, page = page, row_starts_given = row_starts, pack = 4usize,
            group = 4usize,
        };
        let options = CompileOptions {
            num_warps: tiles.num_warps,
            num_stages: tiles.num_stages,
            ptx_version: PTX_VERSION,
            schedule: tiles.schedule,
            ..CompileOptions::default()
        };
        let configuration = Configuration { def, dtypes: vec![DType::BF16; 3], consts: consts.to_vec(), options };
        let func = configuration.record(&well_aligned(def));
        let (resources, loops) = tools.assemble(&ptx_of(&func, &configuration.options));
        let name = format!("d {d}, {rows} rows, pages of {page}, row_starts: {row_starts}");
        assert_eq!((resources.spills, resources.warnings), (0, Vec::new()), "{name}");
        let Some(loops) = loops else { continue };
        let has = |body: &[sass::Instruction], what: &str| body.iter().any(|i| i.starts_with(what));
        let full = loops.iter().filter(|body| has(body, "HGMMA")).min_by_key(|body| body.len());
        let full = full.unwrap_or_else(|| panic!("{name}: no loop with products"));
        assert!(!has(full, "LDG") && !has(full, "UTMALDG"), "{name}: its consumers load keys");
        assert!(loops.iter().any(|body| has(body, "UTMALDG") && !has(body, "HGMMA")), "{name}: no producer");
    }
}

/// Programs of one consumer warpgroup are compiled for two blocks per SM, whose launch has 128 registers per thread, unless an
/// instruction needs more.
#[test]
fn two_blocks_of_one_warpgroup_share_an_sm() {
    for (d, d_v, k_tile, blocks) in
        [(32usize, 32usize, 128usize, 2), (64, 64, 128, 2), (64, 128, 64, 2), (64, 256, 64, 1)]
    {
        let consts = consts! {
            d = d, d_tile = d, d_v = d_v, d_v_tile = d_v, q_tile = 64usize, k_tile = k_tile, causal = true,
            even_keys = false,
        };
        let options = CompileOptions {
            num_warps: 4,
            num_stages: 2,
            ptx_version: PTX_VERSION,
            schedule: Schedule { warp_specialize: Some(true), ..Schedule::default() },
            ..CompileOptions::default()
        };
        let dtypes = vec![DType::BF16; 3];
        let configuration = Configuration { def: &FLASH_ATTENTION_FWD, dtypes, consts: consts.to_vec(), options };
        let ptx = ptx_of(&configuration.record(&well_aligned(configuration.def)), &configuration.options);
        assert!(ptx.contains(&format!(".minnctapersm {blocks}")), "d {d}, d_v {d_v}: not {blocks} blocks per SM");
    }
}
