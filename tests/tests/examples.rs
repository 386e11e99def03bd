//! The examples run on the CPU, those of a user's list on the simulated GPU too, and `ptxas` assembles the PTX of their
//! kernels. (The GPU tests run them on a GPU.)

use tilewright::codegen::lang::kernel::Specialization;
use tilewright::codegen::pipeline;
use tilewright::codegen::target::{Code, CompileOptions, GpuArch, Target};
use tilewright::prelude::*;
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::examples::{EXAMPLES, MAINS, Run, Variant, configurations, variants};
use tilewright_tests::ptxas::{self, Resources};

#[test]
fn every_example_is_listed() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let mut files: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".rs").map(str::to_string))
        .collect();
    files.sort();
    assert_eq!(files, EXAMPLES.map(|(name, _)| name.to_string()));
}

/// The lines between `ANCHOR: kernel` and `ANCHOR_END: kernel` that are neither blank nor comments.
fn lines(text: &str, comment: &str) -> usize {
    let (mut inside, mut count) = (false, 0);
    for line in text.lines().map(str::trim) {
        match line.strip_prefix(comment).map(str::trim) {
            Some("ANCHOR: kernel") => inside = true,
            Some("ANCHOR_END: kernel") => inside = false,
            Some(_) => {}
            None => count += usize::from(inside && !line.is_empty()),
        }
    }
    count
}

/// The examples that have a counterpart in Triton.
fn beside_triton() -> impl Iterator<Item = (&'static str, Run)> {
    EXAMPLES.into_iter().filter(|(name, _)| MAINS.iter().any(|(main, _)| name[3..] == **main))
}

/// `BLESS=1` rewrites the table.
#[test]
fn the_table_of_lines_is_current() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let read = |path: &str| std::fs::read_to_string(format!("{root}/{path}")).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut table = String::from("| example | Tilewright | Triton | ratio |\n|---|---|---|---|\n");
    for (name, _) in beside_triton() {
        let ours = lines(&read(&format!("examples/{name}.rs")), "//");
        let theirs = lines(&read(&format!("scripts/triton_examples/{}.py", &name[3..])), "#");
        assert!(ours > 0 && theirs > 0, "{name}: no lines between the anchors");
        let ratio = ours as f64 / theirs as f64;
        table += &format!("| [{name}](../examples/{name}.rs) | {ours} | {theirs} | {ratio:.2} |\n");
    }
    let page = read("docs/examples.md");
    let (head, rest) = page.split_once("<!-- lines -->\n").unwrap();
    let (found, tail) = rest.split_once("<!-- end of lines -->").unwrap();
    if std::env::var_os("BLESS").is_some() {
        let text = format!("{head}<!-- lines -->\n{table}<!-- end of lines -->{tail}");
        std::fs::write(format!("{root}/docs/examples.md"), text).unwrap();
    } else {
        assert_eq!(found, table, "docs/examples.md: write the table with BLESS=1");
    }
}

#[test]
fn every_example_runs_on_the_cpu() {
    let device = Device::cpu();
    for (name, run) in EXAMPLES {
        run(&device).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn examples_run_on_the_simulated_gpu() {
    let device = Device::simulated(GpuArch::Sm90a);
    for (name, run) in beside_triton() {
        run(&device).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn configurations_do_not_spill_on_hopper() {
    let Some(ptxas) = ptxas::find() else { return };
    let mut failures = Vec::new();
    for variant in configurations() {
        let ptx = ptx(&variant, &well_aligned(variant.def), GpuArch::Sm90a, &variant.options);
        match ptxas::assemble(&ptxas, &ptx, GpuArch::Sm90a.name()) {
            Ok(Resources { spills: 0, serialized: false, .. }) => {}
            other => failures.push(format!("{} {:?}: {other:?}", variant.def.name, variant.consts)),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn ptxas_assembles_every_example() {
    let ptxas = ptxas::find();
    let mut failures = Vec::new();
    for variant in variants() {
        for spec in [Specialization::default(), Specialization::aligned_memory(variant.def)] {
            for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
                let ptx = ptx(&variant, &spec, arch, &CompileOptions::default());
                let Some(ptxas) = &ptxas else { continue };
                match ptxas::assemble(ptxas, &ptx, arch.name()) {
                    Ok(r) => println!("{} for {}: {r:?}", variant.def.name, arch.name()),
                    Err(e) => failures.push(format!("{} for {}: {e}", variant.def.name, arch.name())),
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn ptx(variant: &Variant, spec: &Specialization, arch: GpuArch, options: &CompileOptions) -> String {
    let name = variant.def.name;
    let func = variant.def.record(&variant.dtypes, &variant.consts, spec).unwrap_or_else(|e| panic!("{name}: {e}"));
    let artifact = pipeline::compile(&func, &Target::Nvptx(arch), options, &mut ());
    match artifact.unwrap_or_else(|e| panic!("{name} for {}: {e}", arch.name())).code {
        Code::Ptx(ptx) => ptx,
        Code::Object(_) => panic!("{name}: an object file instead of PTX"),
    }
}
