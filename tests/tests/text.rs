//! Robustness of the text form: no input panics, and what parses prints as itself.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use tilewright_codegen::interp::{self, ArgValue, Memory, RunOptions};
use tilewright_codegen::ir::{Elem, Func, Stage};
use tilewright_codegen::testgen::{Options, Rng, program};
use tilewright_codegen::{passes, text, verify};

/// Random tokens of the grammar.
fn tokens() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "kernel",
        "@f",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        ",",
        ":",
        "=",
        "%0",
        "%1",
        "%x",
        "#l0",
        "-",
        "1",
        "0.5",
        "-inf",
        "nan",
        "1e400",
        "99999999999999999999",
        "\"s\"",
        "\"",
        "\\",
        "tensor",
        "view",
        "shared",
        "ptr",
        "f32",
        "tensor<8xf32>",
        "i32",
        "x",
        "add",
        "for",
        "if",
        "yield",
        "return",
        "constant",
        "{value = 1}",
        "//",
        "\n",
        "…",
        "#l0 = linear<reg=[[1]], lane=[], warp=[], block=[], shape=[2]>",
    ]);
    prop::collection::vec(word, 0..40).prop_map(|words| words.join(" "))
}

/// The text of a random program with a few lines and characters mutated.
fn mutated() -> impl Strategy<Value = String> {
    (any::<u64>(), any::<u64>(), 1..4usize).prop_map(|(seed, mutation, count)| {
        let small = Options { size: 10, ..Options::default() };
        let mut lines: Vec<String> = text::print(&program(seed, &small).func).lines().map(String::from).collect();
        let mut rng = Rng::new(mutation);
        for _ in 0..count {
            mutate(&mut lines, &mut rng);
        }
        lines.join("\n")
    })
}

fn mutate(lines: &mut Vec<String>, rng: &mut Rng) {
    let at = rng.below(lines.len());
    let other = lines[rng.below(lines.len())].clone();
    match rng.below(7) {
        0 if lines.len() > 1 => {
            lines.remove(at);
        }
        1 => lines.insert(at, other),
        2 => lines[at] = other,
        // Replaces a word by one of another line.
        3 => {
            let mut words: Vec<&str> = lines[at].split(' ').collect();
            let from: Vec<&str> = other.split(' ').collect();
            let place = rng.below(words.len());
            words[place] = from[rng.below(from.len())];
            lines[at] = words.join(" ");
        }
        // Replaces an op by one of the same kind, which is often valid.
        4 => {
            let families = [
                &["add", "sub", "mul", "div", "rem", "min", "max"][..],
                &["and", "or", "xor", "shl", "shr"],
                &["neg", "abs", "floor", "ceil", "exp", "erf"],
                &["cmp_eq", "cmp_ne", "cmp_lt", "cmp_ge"],
                &["zero", "nan"],
                &["true", "false"],
            ];
            let mut swap = |word: &str| {
                let family = families.iter().find(|family| family.contains(&word))?;
                Some(rng.pick(family).to_string())
            };
            let words: Vec<String> =
                lines[at].split(' ').map(|word| swap(word).unwrap_or_else(|| word.to_string())).collect();
            lines[at] = words.join(" ");
        }
        5 => {
            let digit = rng.below(10).to_string();
            let digits: Vec<usize> =
                lines[at].char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(i, _)| i).collect();
            if !digits.is_empty() {
                let place = rng.pick(&digits);
                lines[at].replace_range(place..place + 1, &digit);
            }
        }
        _ => {
            let chars: Vec<char> = "%{}()<>:,=x-.e\"#@0/ ".chars().collect();
            let places: Vec<usize> = lines[at].char_indices().map(|(i, _)| i).collect();
            if !places.is_empty() {
                lines[at].insert(rng.pick(&places), rng.pick(&chars));
            }
        }
    }
}

/// Checks that what parses prints as itself; returns the function, or `None` if the input does not parse.
fn round_trip(input: &str) -> Result<Option<Func>, TestCaseError> {
    let Ok(func) = text::parse(input) else { return Ok(None) };
    let printed = text::print(&func);
    let again = text::parse(&printed).map_err(|e| TestCaseError::fail(format!("{e}\n{printed}")))?;
    prop_assert_eq!(text::print(&again), printed);
    Ok(Some(func))
}

proptest! {
    #[test]
    fn any_string(input in any::<String>()) {
        round_trip(&input)?;
    }

    #[test]
    fn any_tokens(input in tokens()) {
        round_trip(&input)?;
        round_trip(&format!("kernel @f(%x: i32) {{ {input} }}"))?;
    }

    #[test]
    fn any_mutation(input in mutated()) {
        let Some(func) = round_trip(&input)? else { return Ok(()) };
        if verify::verify(&func, Stage::Tile).is_err() {
            return Ok(());
        }
        // A valid function must not panic in the interpreter, which may report undefined behavior, nor in any pass.
        run(&func);
        for pass in passes::PASSES {
            let mut out = func.clone();
            (pass.run)(&mut out);
            let valid = verify::verify(&out, Stage::Tile);
            prop_assert!(valid.is_ok(), "after {}: {:?}\n{}", pass.name, valid, text::print(&func));
        }
    }
}

/// Runs a function on small buffers, for a limited number of ops.
fn run(func: &Func) {
    let mut memory = Memory::new();
    let values: Vec<ArgValue> = func
        .block(func.body)
        .params
        .iter()
        .map(|&v| match func.ty(v).elem() {
            Some(Elem::Ptr(d)) => memory.add(vec![0; 512 * d.bytes()]).into(),
            Some(Elem::Num(d)) if d.is_float() => ArgValue::Float(1.0),
            Some(Elem::Num(d)) if d.is_int() => ArgValue::Int(2),
            _ => ArgValue::Bool(true),
        })
        .collect();
    let options = RunOptions { max_ops: 2_000, ..RunOptions::default() };
    let _ = interp::run_traced(func, &values, [1; 3], &mut memory, options, &mut ());
}

/// Checks that some mutations are valid: otherwise `any_mutation` would test only the parser.
#[test]
fn some_mutations_are_valid() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let valid = (0..200).filter(|_| {
        let input = mutated().new_tree(&mut runner).expect("a value").current();
        text::parse(&input).is_ok_and(|f| verify::verify(&f, Stage::Tile).is_ok())
    });
    let count = valid.count();
    assert!(count > 10, "{count} of 200");
}

#[test]
fn former_names_of_attributes_are_read() {
    let present = include_str!("../ir/delay_waits.tile").split("\n// expect:").next().unwrap();
    let former = present.replacen("{warps = [4, 1]}", "{warps = [4, 1], late = true, open = true}", 1);
    let former = former.replacen("{warps = [4, 1]}", "{warps = [4, 1], stage_one = true, defer_wait = true}", 1);
    assert!(former.contains("late = true, open = true") && former.contains("stage_one = true"), "{former}");
    assert_eq!(text::parse(&former).map(|f| text::print(&f)), text::parse(present).map(|f| text::print(&f)));
}

/// The kernels of `docs/ir.md` are valid, and the first one doubles what its page says.
#[test]
fn kernels_of_the_grammar_are_valid() {
    let page = include_str!("../../docs/ir.md");
    let kernels: Vec<&str> = page.split("```tile\n").skip(1).map(|part| part.split("```").next().unwrap()).collect();
    assert!(!kernels.is_empty());
    for kernel in &kernels {
        let func = text::parse(kernel).unwrap();
        verify::verify(&func, Stage::Tile).unwrap();
        let printed = text::print(&func);
        assert_eq!(text::print(&text::parse(&printed).unwrap()), printed);
    }
    let func = text::parse(kernels[0]).unwrap();
    let mut memory = Memory::new();
    let x: Vec<u8> = (0..100).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    let buffer = memory.add(x);
    let values = [buffer.into(), ArgValue::Int(90)];
    interp::run_traced(&func, &values, [2, 1, 1], &mut memory, RunOptions::default(), &mut ()).unwrap();
    let doubled = memory.bytes(buffer).chunks(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap()));
    let want = (0..100).map(|i| if i < 90 { 2.0 * i as f32 } else { i as f32 });
    assert!(doubled.eq(want));
}
