//! Schedules that a person writes: the text of `--emit schedule` with other placements. Only placements and order are
//! taken from it; what else differs is an error, with the line.

use tilewright::codegen::ir::{DType, Func};
use tilewright::codegen::pipeline::{compile_gpu, scheduled};
use tilewright::codegen::target::{Code, CompileOptions, GpuArch, Schedule};
use tilewright::codegen::text;
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::prelude::*;
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::consts;
use tilewright_tests::examples::configurations;

/// The kernel of examples/22_fused_mlp.rs, and its options.
fn fused_mlp() -> (Func, CompileOptions) {
    let kernel = configurations().into_iter().find(|kernel| kernel.def.name == "fused_mlp").unwrap();
    (kernel.def.record(&kernel.dtypes, &kernel.consts, &well_aligned(kernel.def)).unwrap(), kernel.options)
}

fn ptx(func: &Func, options: &CompileOptions, loops: Option<String>) -> Result<String, String> {
    let options = CompileOptions { loops, ..options.clone() };
    match compile_gpu(func, GpuArch::Sm90a, &options, &mut ()).map_err(|error| error.to_string())?.code {
        Code::Ptx(ptx) => Ok(ptx),
        Code::Object(_) => unreachable!("a GPU has PTX"),
    }
}

#[test]
fn the_own_schedule_changes_nothing_and_another_one_does() {
    let (func, options) = fused_mlp();
    let own = ptx(&func, &options, None).unwrap();
    let text = text::print(&scheduled(&func, GpuArch::Sm90a, &options));
    assert_eq!(ptx(&func, &options, Some(text)).unwrap(), own);
    let by_hand = include_str!("../../examples/schedules/fused_mlp.tile");
    assert_ne!(ptx(&func, &options, Some(by_hand.into())).unwrap(), own);
    // Taken from the text with the order of its lines: an op that depends on nothing may come later.
    let text = text::print(&scheduled(&func, GpuArch::Sm90a, &options));
    let (first, second) = ("%11 = constant {value = 64} : i32", "%12 = constant {value = 0} : i32");
    let swapped = text.replace(first, "?").replace(second, first).replace('?', second);
    assert_ne!(swapped, text);
    ptx(&func, &options, Some(swapped)).unwrap();
}

#[test]
fn what_is_not_a_schedule_of_the_kernel_is_refused() {
    let (func, options) = fused_mlp();
    let text = text::print(&scheduled(&func, GpuArch::Sm90a, &options));
    let line = |part: &str| text.lines().find(|line| line.contains(part)).unwrap().to_string();
    let after = |part: &str| text.lines().position(|line| line.contains(part)).unwrap() + 1;
    for (change, reason) in [
        (text.replace("neg ", "abs "), format!("line {}: the kernel has no `", after("neg "))),
        (text.replace(&line("neg "), ""), "line".into()),
        (text.replace("{boundary = [0], eviction", "{boundary = [], eviction"), "the kernel has no `store_view".into()),
        (text.replace(&format!("{}\n", line("store_view ")), ""), "`store_view".into()),
        (text.replace("value = 1.0}", "value = 2.0}"), "the kernel has no `".into()),
        (text.replace("depth = 4", "depth = 40"), "bytes of shared memory".into()),
        // The ring of w2 is read one stage later than it is.
        (text.replace("depth = 4", "depth = 1"), "buffers".into()),
        (
            text.replace("#l1 = shared<offset=[[0,1],[0,2]", "#l1 = shared<offset=[[0,2],[0,1]"),
            "#l1 is another layout".into(),
        ),
        (text.replace("%rows: i32", "%lines: i32").replace("%rows ", "%lines "), "no argument `lines: i32`".into()),
        ("kernel @".into(), "line 1".into()),
    ] {
        assert_ne!(change, text, "{reason}");
        let error = ptx(&func, &options, Some(change)).expect_err(&reason);
        assert!(error.contains("the given schedule") && error.contains(&reason), "{reason}: {error}");
    }
    // `neg` one stage later than its user.
    let at = line("neg ");
    let (op, _) = at.split_once(" at {").unwrap();
    let late = text.replace(&at, &format!("{op} at {{stage = 1, order = 1}}"));
    let error = ptx(&func, &options, Some(late)).unwrap_err();
    assert!(error.contains("depends on") && error.contains("schedule:"), "{error}");
}

/// Schedules that hold every rule of placements: they are carried out, or refused with a reason, whatever they ask for.
#[test]
fn no_placement_breaks_the_compiler() {
    let (func, options) = fused_mlp();
    let text = text::print(&scheduled(&func, GpuArch::Sm90a, &options));
    let lines: Vec<&str> = text.lines().collect();
    let placed: Vec<usize> = (0..lines.len()).filter(|&n| lines[n].contains(" at {stage")).collect();
    let (mut taken, mut refused) = (0, 0);
    for stage in 0..3 {
        for order in [0, 1, 2, 3, 5] {
            for (start, run) in placed.iter().enumerate().flat_map(|(n, _)| [(n, 1), (n, 4)]) {
                let mut changed: Vec<String> = lines.iter().map(ToString::to_string).collect();
                for &n in placed.iter().skip(start).take(run) {
                    let (op, place) = lines[n].split_once(" at {").unwrap();
                    let rest: Vec<&str> = place
                        .trim_end_matches('}')
                        .split(", ")
                        .filter(|field| !field.starts_with("stage") && !field.starts_with("order"))
                        .collect();
                    let place = [
                        vec![format!("stage = {stage}"), format!("order = {order}")],
                        rest.iter().map(ToString::to_string).collect(),
                    ]
                    .concat();
                    changed[n] = format!("{op} at {{{}}}", place.join(", "));
                }
                match ptx(&func, &options, Some(changed.join("\n") + "\n")) {
                    Ok(_) => taken += 1,
                    Err(why) => {
                        assert!(why.contains("the given schedule"), "{why}");
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(taken > 10 && refused > 100, "{taken} {refused}");
}

#[kernel]
fn shifts(x: InOut<f32>, y: In<f32>) {
    let at = arange(0, 64);
    let (first, second) = (load(x + at), load(y + at));
    store(x + at + 64, first);
    store(x + at + 1, second);
}

/// Loads may pass each other and nothing that writes; stores pass nothing.
#[test]
fn accesses_of_memory_keep_their_order() {
    let func = SHIFTS.record(&[], &[], &well_aligned(&SHIFTS)).unwrap();
    let options = CompileOptions::default();
    let text = text::print(&scheduled(&func, GpuArch::Sm90a, &options));
    let lines: Vec<&str> = text.lines().collect();
    let accesses: Vec<usize> =
        (0..lines.len()).filter(|&n| lines[n].contains("load ") || lines[n].contains("store ")).collect();
    let [first, second, store, last] = accesses[..] else { panic!("{text}") };
    // Later than it is, behind another access.
    let behind = |from: usize, to: usize| {
        let mut lines = lines.clone();
        let line = lines.remove(from);
        lines.insert(to, line);
        ptx(&func, &options, Some(lines.join("\n") + "\n"))
    };
    for (from, to) in [(store, last), (second, store)] {
        let error = behind(from, to).unwrap_err();
        assert!(error.contains("the `store` has to stay behind `"), "{error}");
    }
    behind(first, second).unwrap();
}

/// The loop over keys of attention's forward pass with heads of 128, as its schedule is printed: without types, attributes
/// and the bodies of reductions.
fn loop_of_attention() -> String {
    let consts = consts! {
        d = 128usize, d_tile = 128usize, d_v = 128usize, d_v_tile = 128usize, q_tile = 128usize, k_tile = 128usize, group = 1usize, even_keys = true
    };
    let func = FLASH_ATTENTION_FWD
        .record(&[DType::BF16; 3], consts, &well_aligned(&FLASH_ATTENTION_FWD))
        .unwrap_or_else(|error| panic!("{error}"));
    let options = CompileOptions { num_warps: 8, num_stages: 2, ..CompileOptions::default() };
    let options = CompileOptions { schedule: Schedule { warp_specialize: Some(true), ..options.schedule }, ..options };
    let text = text::print(&scheduled(&func, GpuArch::Sm90a, &options));
    let (mut lines, mut inside) = (String::new(), false);
    for line in text.lines().filter(|line| !line.starts_with("      ")) {
        if line.starts_with("  ") && !line.starts_with("   ") {
            inside = line.contains(" = for ");
            continue;
        }
        if !inside || line.trim() == "}" {
            continue;
        }
        let (op, place) = line.trim().split_once(" at ").unwrap_or_else(|| panic!("no placement: {line}"));
        let op = op.split(" : ").next().unwrap().split(" {").next().unwrap();
        let place = &place[..place.find('}').unwrap() + 1];
        lines += &format!("{op:<44} at {place}\n");
    }
    lines
}

/// docs/schedule.md explains it. `BLESS=1` writes it into the page.
#[test]
fn the_page_shows_the_schedule_of_attention() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/schedule.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (start, end) = ("<!-- schedule of flash_attention_fwd -->\n```text\n", "```\n");
    let (head, rest) = page.split_once(start).expect("the mark of the block");
    let (found, tail) = rest.split_once(end).expect("the end of the block");
    let expected = loop_of_attention();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, format!("{head}{start}{expected}{end}{tail}")).unwrap();
    } else {
        assert_eq!(
            found, expected,
            "docs/schedule.md has another schedule: BLESS=1 updates it; review what the page says"
        );
    }
}
