use std::collections::BTreeSet;
use std::path::Path;

use clap::Parser;
use html5ever::tendril::TendrilSink;
use html5ever::{ParseOpts, parse_document};
use markup5ever_rcdom::{Handle, NodeData, RcDom};
use tilewright_codegen::explain::Trace;
use tilewright_codegen::ir::{Arg, Builder, DType, Func, Loc, Op, Type};
use tilewright_codegen::pipeline::gpu_ir;
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_codegen::text::parse;

use super::*;
use crate::explain;
use crate::report::Report;

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    arguments: explain::Arguments,
}

/// An element of a page, with the text directly in it and in its children.
pub(super) struct Element {
    name: String,
    attributes: Vec<(String, String)>,
    pub(super) text: String,
}

impl Element {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// The elements of a page, as a browser with JavaScript sees them; the page has no syntax error.
pub(super) fn elements(page: &str) -> Vec<Element> {
    let dom = parse_document(RcDom::default(), ParseOpts::default()).one(page);
    let errors = dom.errors.borrow();
    assert!(errors.is_empty(), "{errors:?}");
    let mut found = Vec::new();
    collect(&dom.document, &mut found);
    found
}

/// Appends the elements of a node, and returns its text.
fn collect(node: &Handle, found: &mut Vec<Element>) -> String {
    let at = match &node.data {
        NodeData::Element { name, attrs, .. } => {
            let attributes = attrs.borrow().iter().map(|a| (a.name.local.to_string(), a.value.to_string())).collect();
            found.push(Element { name: name.local.to_string(), attributes, text: String::new() });
            Some(found.len() - 1)
        }
        _ => None,
    };
    let own = match &node.data {
        NodeData::Text { contents } => contents.borrow().to_string(),
        _ => String::new(),
    };
    let text = node.children.borrow().iter().fold(own, |text, child| text + &collect(child, found));
    if let Some(at) = at {
        found[at].text.clone_from(&text);
    }
    text
}

/// The page of a kernel.
pub(super) fn explained(arguments: &[&str]) -> String {
    let dir = crate::files::temporary_folder().unwrap();
    let path = dir.path().join("page.html");
    let words = [&["explain"], arguments, &["--html", path.to_str().unwrap()]].concat();
    let CommandLine { arguments } = CommandLine::try_parse_from(words).unwrap();
    explain::run(&arguments, &crate::kernels::shipped(), &mut Vec::new()).unwrap();
    std::fs::read_to_string(path).unwrap()
}

fn data_of(elements: &[Element]) -> Value {
    let data = elements.iter().find(|element| element.get("id") == Some("data")).expect("a block of data");
    assert_eq!((&*data.name, data.get("type")), ("script", Some("application/json")));
    serde_json::from_str(&data.text).unwrap()
}

/// The text of a body, and the numbers of its ops.
fn body_of(data: &Value, pass: &Value) -> (String, Vec<u64>) {
    let (mut text, mut ops) = (String::new(), Vec::new());
    for line in data["bodies"][pass["body"].as_u64().unwrap() as usize].as_array().unwrap() {
        text += data["texts"][line[0].as_u64().unwrap() as usize].as_str().unwrap();
        text += "\n";
        ops.extend(line.get(2).map(|op| op.as_u64().unwrap()));
    }
    (text, ops)
}

/// Nothing on the page comes from elsewhere, and it has only its own two scripts.
fn check_self_contained(elements: &[Element]) {
    assert_eq!(elements.iter().filter(|element| element.name == "script").count(), 2);
    for element in elements {
        assert!(!["img", "link", "iframe", "object"].contains(&&*element.name), "{}", element.name);
        for (name, value) in &element.attributes {
            assert!(!name.starts_with("on") && name != "src" && name != "style", "{}: {name}", element.name);
            assert!(name != "href" || value.starts_with('#'), "{value}");
        }
    }
}

#[test]
fn the_page_has_every_op_of_every_pass_once() {
    for arguments in [
        &["flash_attention_fwd", "--set", "d=128,causal=true"][..],
        &["matmul", "--target", "sm_80", "--dtype", "f32"],
        &["rms_norm_fwd"],
        &["embedding_bwd"],
    ] {
        let page = explained(arguments);
        let elements = elements(&page);
        check_self_contained(&elements);
        let data = data_of(&elements);
        let passes = data["passes"].as_array().unwrap();
        assert!(passes.len() > 20 && passes[0]["name"] == "recorded", "{arguments:?}");
        let mut last = BTreeSet::new();
        for pass in passes {
            let (text, ops) = body_of(&data, pass);
            let func = parse(&text).unwrap_or_else(|error| panic!("{arguments:?}, {}: {error}", pass["name"]));
            assert_eq!(ops.len(), func.walk().len(), "{arguments:?}, {}", pass["name"]);
            last = ops.iter().copied().collect();
            assert_eq!(last.len(), ops.len(), "{arguments:?}, {}: an op twice", pass["name"]);
        }
        // Pictures and tables refer to ops of the last pass.
        let links: Vec<u64> = elements.iter().filter_map(|e| e.get("data-op")).map(|op| op.parse().unwrap()).collect();
        assert!(!links.is_empty() && links.iter().all(|op| last.contains(op)), "{arguments:?}");
        // Every place of an op has a source line.
        let lines: BTreeSet<&str> = elements.iter().filter_map(|e| e.get("data-place")).collect();
        for line in data["bodies"].as_array().unwrap().iter().flat_map(|body| body.as_array().unwrap()) {
            if let Some(number) = line.get(4) {
                let place = format!("{}:{number}", line[3]);
                assert!(lines.contains(&*place), "{arguments:?}: {place}");
            }
        }
    }
}

#[test]
fn pictures_show_the_kernel() {
    let page = explained(&["flash_attention_fwd", "--set", "d=128,causal=true"]);
    let elements = elements(&page);
    let section = |name: &str| &elements.iter().find(|element| element.get("id") == Some(name)).expect(name).text;
    // The swizzle of 128 bytes: the chunk of 16 bytes is XORed with the row.
    assert!(section("layouts").contains("element [1, 0]: byte 144 of the buffer, bank 4"));
    // The accumulator of wgmma: lanes hold pairs of neighbors, four lanes per row.
    assert!(section("layouts").contains("element [1, 3]: warp 0, lane 5, register 1"));
    // Two rings of two stages of 128 × 128 bf16, and one of Q of two programs.
    let rings = elements.iter().filter(|e| e.name == "title" && e.text.contains("ring of asynchronous copies"));
    let rings: Vec<&str> = rings.map(|e| e.text.as_str()).collect();
    let of = |bytes: &str| rings.iter().filter(|title| title.contains(bytes)).count();
    assert_eq!((rings.len(), of("65536 bytes"), of("32768 bytes")), (3, 2, 1), "{rings:?}");
    // As the manifest of the compiled kernel says.
    let table = elements.iter().find(|e| e.name == "td" && e.text.ends_with(" bytes of 232448")).unwrap();
    let bytes = table.text.split(' ').next().unwrap();
    assert!(section("shared").contains(&format!("{bytes} bytes of the 232448 that a block can have on sm_90a")));
    assert!(section("registers").contains("limit 240") && section("registers").contains("limit 24"));
    for part in ["(consumer)", "(producer)", "wgmma", "tma_load", "exp2", "MUFU"] {
        assert!(section("loops").contains(part), "{part}");
    }
    // The source beside the IR.
    assert!(section("source").contains("pub fn flash_attention_fwd"));
}

/// A bar of the first timeline, from its tooltip.
struct TimelineBar {
    op: String,
    group: String,
    pipe: String,
    iteration: String,
    begin: f64,
    end: f64,
}

impl TimelineBar {
    fn overlap(&self, other: &TimelineBar) -> f64 {
        (self.end.min(other.end) - self.begin.max(other.begin)).max(0.0)
    }
}

fn timeline_bars(page: &str) -> Vec<TimelineBar> {
    let section = page.split("<section id=\"timeline\">").nth(1).unwrap().split("</details>").next().unwrap();
    let bar = |title: &str| {
        let title = title.split("</title>").next()?;
        let (before, cycles) = title.rsplit_once(", cycles ")?;
        let (begin, end) = cycles.split_once(" to ")?;
        let (op, place) = before.split_once(": ")?;
        let words: Vec<&str> = place.split(", ").collect();
        let [group @ .., pipe, iteration] = &words[..] else { return None };
        let op = op.split(", line").next()?.rsplit(' ').next()?.to_string();
        let (group, pipe, iteration) = (group.join(", "), pipe.to_string(), iteration.to_string());
        Some(TimelineBar { op, group, pipe, iteration, begin: begin.parse().ok()?, end: end.parse().ok()? })
    };
    section.split("<title>").skip(1).map(|title| bar(title).unwrap_or_else(|| panic!("{title}"))).collect()
}

/// FlashAttention-3's schedule: while one warpgroup computes its softmax, MMAs run; the MMAs of a warpgroup are S of one
/// tile, then O of the tile before; a producer copies ahead.
#[test]
fn the_timeline_shows_ping_pong_and_overlap() {
    for (settings, groups) in [
        ("d=128,causal=true", ["consumer 0", "consumer 1"]),
        ("d=64,causal=true,q_tile=64,k_tile=128,replicas=1", ["block 0, consumer", "block 1, consumer"]),
    ] {
        let page = explained(&["flash_attention_fwd", "--set", settings, "--pingpong", "true"]);
        assert!(page.contains("Predicted, not measured"));
        // The MMA of O runs behind that of S.
        assert!(page.contains("stage 0 order 0: ") && page.contains("stage 1 order 1: "), "{settings}");
        let bars = timeline_bars(&page);
        let of = |group: &str, pipe: &str| -> Vec<&TimelineBar> {
            bars.iter().filter(|bar| bar.group == group && bar.pipe == pipe).collect()
        };
        let mmas = groups.map(|group| of(group, "MMA"));
        assert!(mmas.iter().all(|of| of.len() >= 4 && of.iter().all(|bar| bar.op == "wgmma")), "{settings}");
        // A pipe runs one op at a time; cycles are rounded.
        assert!(mmas[0].iter().all(|a| mmas[1].iter().all(|b| a.overlap(b) <= 1.0)), "{settings}");
        let softmax = of(groups[0], "MUFU");
        // Without those of a row vector, and those that the picture shows in part.
        let section = page.split("<section id=\"timeline\">").nth(1).unwrap();
        let interval = section.split(" cycles per iteration").next().and_then(|text| text.rsplit(' ').next()).unwrap();
        let length = 3.0 * interval.parse::<f64>().unwrap();
        let is_whole = |bar: &&&TimelineBar| bar.begin >= 0.0 && bar.end <= length && bar.end - bar.begin > 100.0;
        let tiles: Vec<_> = softmax.iter().filter(is_whole).collect();
        let hidden = |bar: &TimelineBar| {
            let under: f64 = mmas.iter().flatten().map(|mma| bar.overlap(mma)).sum();
            under > 0.5 * (bar.end - bar.begin)
        };
        // Copies bound the loop of d = 64: at times they are late.
        let count = tiles.iter().filter(|bar| hidden(bar)).count();
        assert!(count > 0 && 2 * count >= tiles.len(), "{settings}");
        let iterations: Vec<&str> = mmas[0].iter().map(|bar| bar.iteration.as_str()).collect();
        assert!(iterations.windows(2).any(|pair| pair == ["iteration i+1", "iteration i"]), "{iterations:?}");
        let copies: Vec<_> = bars.iter().filter(|bar| bar.pipe == "copy").collect();
        assert!(copies.len() >= 4 && copies.iter().all(|bar| bar.group.ends_with("producer") && bar.op == "tma_load"));
    }
}

#[test]
fn pictures_are_files_too() {
    let dir = crate::files::temporary_folder().unwrap();
    let folder = dir.path().join("new");
    let words = ["explain", "matmul", "--svg", folder.to_str().unwrap()];
    let CommandLine { arguments } = CommandLine::try_parse_from(words).unwrap();
    let mut out = Vec::new();
    explain::run(&arguments, &crate::kernels::shipped(), &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    for name in ["timeline-1", "shared-memory", "registers"] {
        let path = folder.join(format!("{name}.svg"));
        assert!(out.contains(&format!("wrote {}", path.display())), "{out}");
        let svg = std::fs::read_to_string(path).unwrap();
        let elements = elements(&format!("<!DOCTYPE html><title>x</title>{svg}"));
        let colors = elements.iter().any(|e| e.name == "style" && e.text.contains("prefers-color-scheme: dark"));
        assert!(colors && !svg.contains("data-op") && svg.matches("<rect").count() > 3, "{svg}");
    }
}

/// A function whose argument, text and source try to leave their places on the page. Names of kernels are words.
fn hostile(file: &Path) -> Func {
    const PREFIX: &str = "</script><img src=x onerror=alert(1)>\"'&{{data}}<!--<script>{{source}}";
    let mut func = Func::new("k");
    func.loc = Loc { file: file.to_str().unwrap().into(), line: 1, column: 1 };
    func.add_arg(Arg { name: "<b>x".into(), divisible_by: 1, equal_to: None }, Type::scalar(DType::I32));
    let (body, loc) = (func.body, Loc { line: 2, ..func.loc.clone() });
    let mut builder = Builder::new(&mut func, body, loc);
    builder.op(Op::DevicePrint { prefix: PREFIX.into() }, &[], &[]);
    builder.ret();
    func
}

#[test]
fn hostile_text_is_escaped() {
    let dir = crate::files::temporary_folder().unwrap();
    let file = dir.path().join("<i onclick=alert(2)>&amp;.rs");
    let source =
        "fn k() { /* </script><svg onload=alert(3)> {{data}} */\n    print(\"</noscript></pre><img src=y>\");\n}\n";
    std::fs::write(&file, source).unwrap();
    let func = hostile(&file);
    let mut trace = Trace::new(&func);
    gpu_ir(&func, GpuArch::Sm80, &CompileOptions::default(), &mut trace);
    let settings =
        Settings { arch: GpuArch::Sm80, threads: 128, max_registers: None, kernel_line: 1, clocks: Vec::new() };
    let (interactive, read) = sections(&trace, &settings);
    assert_eq!(read, std::slice::from_ref(&file));
    let page = Report { interactive: Some(interactive), ..Report::new("x", "<u>title") }.to_html();
    let elements = elements(&page);
    check_self_contained(&elements);
    let shown = &elements.iter().find(|element| element.get("id") == Some("source")).unwrap().text;
    assert!(source.lines().all(|line| shown.contains(line)), "{shown}");
    assert!(shown.contains("<i onclick=alert(2)>&amp;.rs"), "{shown}");
    let data = data_of(&elements);
    let texts = data["texts"].to_string();
    assert!(texts.contains("</script><img src=x onerror=alert(1)>") && texts.contains("<!--<script>"), "{texts}");
    assert!(!elements.iter().any(|element| ["b", "i", "u"].contains(&&*element.name)));
}

#[test]
fn without_the_source_file_line_numbers_are_shown() {
    let func = hostile(Path::new("/nowhere/k.rs"));
    let mut trace = Trace::new(&func);
    gpu_ir(&func, GpuArch::Sm80, &CompileOptions::default(), &mut trace);
    let settings =
        Settings { arch: GpuArch::Sm80, threads: 128, max_registers: None, kernel_line: 1, clocks: Vec::new() };
    let (interactive, read) = sections(&trace, &settings);
    assert!(read.is_empty());
    let page = Report { interactive: Some(interactive), ..Report::new("x", "title") }.to_html();
    let elements = elements(&page);
    let lines: Vec<&Element> = elements.iter().filter(|element| element.get("data-place").is_some()).collect();
    let numbers: Vec<&str> = lines.iter().map(|line| line.text.trim()).collect();
    assert_eq!(numbers, ["1", "2"]);
    assert!(page.contains("The file cannot be read here"));
}

#[test]
fn templates_are_filled_in_one_pass() {
    let value = |name: &str| match name {
        "a" => "{{b}}".to_string(),
        _ => format!("<{name}>"),
    };
    assert_eq!(filled("x{{a}}y{{b}}z{{", value), "x{{b}}y<b>z{{");
}

#[test]
fn short_names_are_results_and_mnemonics() {
    assert_eq!(short_name("%3, %4 = for %0 {num_stages = 2} : i32"), "%3 = for");
    assert_eq!(short_name("store %1, %2 {eviction = normal}"), "store");
    assert_eq!(short_name("yield"), "yield");
}
