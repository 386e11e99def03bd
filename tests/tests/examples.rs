//! The examples run on the CPU, those of a user's list on the simulated GPU too, and `ptxas` assembles the PTX of their
//! kernels. (The GPU tests run them on a GPU.)

use tilewright::codegen::lang::kernel::{ConstValue, Specialization};
use tilewright::codegen::pipeline;
use tilewright::codegen::target::{Code, GpuArch, Target};
use tilewright::prelude::*;
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::examples::mixture_of_experts::Gate;
use tilewright_tests::examples::paged_decoding::CombineSplits;
use tilewright_tests::examples::{EXAMPLES, MAINS, Run, Variant, configurations, simple, variants};
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
    let products = EXAMPLES.into_iter().filter(|(name, _)| matches!(*name, "08_grouped_gemm" | "09_persistent_matmul"));
    for (name, run) in beside_triton().chain(products) {
        run(&device).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// Instead of results without some of the elements.
#[test]
fn constants_that_are_too_small_are_refused() {
    let weights = || configurations().into_iter().find(|v| v.def.name == "weight_only_matmul").unwrap();
    let with = |group: i64| {
        let Variant { def, dtypes, mut consts, .. } = weights();
        consts.iter_mut().find(|(name, _)| *name == "group").unwrap().1 = ConstValue::Int(group);
        def.record(&dtypes, &consts, &Specialization::default()).map(drop)
    };
    with(256).unwrap();
    let error = with(64).unwrap_err().to_string();
    assert!(error.contains("group is a multiple of k_tile"), "{error}");

    for device in [Device::cpu(), Device::simulated(GpuArch::Sm90a)] {
        let combine = |splits: usize| {
            let partial = Buffer::<f32>::zeros(&device, splits * 16).unwrap();
            let lse = Buffer::<f32>::zeros(&device, splits).unwrap();
            let mut o = Buffer::<f32>::poisoned(&device, 16).unwrap();
            CombineSplits {
                partial: &partial.tensor([splits, 1, 16]).unwrap(),
                lse: &lse.tensor([splits, 1]).unwrap(),
                o: &mut o.tensor_mut([1, 16]).unwrap(),
                most: 4,
            }
            .launch(&device)
        };
        combine(4).unwrap();
        let error = combine(5).unwrap_err().to_string();
        assert!(error.contains("assume"), "{error}");

        let gate = |experts: usize, top: usize| {
            let logits = Buffer::<f32>::zeros(&device, experts).unwrap();
            let mut weight = Buffer::<f32>::poisoned(&device, top).unwrap();
            let mut chosen = Buffer::<i32>::poisoned(&device, top).unwrap();
            Gate {
                logits: &logits.tensor([1, experts]).unwrap(),
                weight: &mut weight.tensor_mut([1, top]).unwrap(),
                chosen: &mut chosen.tensor_mut([1, top]).unwrap(),
                tile: 4,
            }
            .launch(&device)
        };
        gate(3, 2).unwrap();
        for (experts, top) in [(5, 2), (1, 2)] {
            let error = gate(experts, top).unwrap_err().to_string();
            assert!(error.contains("assume"), "{error}");
        }
    }
}

#[test]
fn configurations_do_not_spill_on_hopper() {
    let Some(ptxas) = ptxas::find() else { return };
    let mut failures = Vec::new();
    for variant in configurations().into_iter().chain(simple()) {
        let ptx = ptx(&variant, &well_aligned(variant.def), GpuArch::Sm90a);
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
                let ptx = ptx(&variant, &spec, arch);
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

fn ptx(variant: &Variant, spec: &Specialization, arch: GpuArch) -> String {
    let name = variant.def.name;
    let func = variant.def.record(&variant.dtypes, &variant.consts, spec).unwrap_or_else(|e| panic!("{name}: {e}"));
    let artifact = pipeline::compile(&func, &Target::Nvptx(arch), &variant.options, &mut ());
    match artifact.unwrap_or_else(|e| panic!("{name} for {}: {e}", arch.name())).code {
        Code::Ptx(ptx) => ptx,
        Code::Object(_) => panic!("{name}: an object file instead of PTX"),
    }
}
