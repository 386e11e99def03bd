use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::path::Path;

use super::*;

/// Every kind of cell, and text that every format must escape.
fn sample() -> Table {
    let mut table = Table::new(
        "model-steps",
        "Time of a step & its memory",
        [
            Column::text("size"),
            Column::number("forward").unit("ms").decimals(2),
            Column::number("rate").unit("GB/s"),
            Column::integer("parameters"),
            Column::text("remark"),
        ],
    )
    .note("Batch 4; 100 % of the L2 cache.");
    table.push([
        Cell::from("small"),
        Cell::mean_std(12.345, 0.5),
        Cell::from(123.456),
        Cell::from(128_625_408_usize),
        Cell::from("a|b_c, \"d\" <e>"),
    ]);
    table.push([Cell::from("xl"), Cell::OutOfMemory, Cell::NotApplicable, Cell::from(1_998_235_200_u64), Cell::Empty]);
    table.push([Cell::from("2.7B"), Cell::from(1.0 / 3.0), Cell::from(4.2e-7), Cell::Empty, Cell::from("64×128")]);
    table
}

fn machine() -> Machine {
    Machine {
        cpu: "Example CPU".to_string(),
        threads: 8,
        memory_bytes: 16 << 30,
        gpus: vec![Gpu {
            name: "Example GPU".to_string(),
            memory_bytes: 80 << 30,
            compute_capability: "9.0".to_string(),
        }],
        driver: Some("580.159".to_string()),
        cuda: Some("13.0".to_string()),
        os: "Linux".to_string(),
        version: "0.1.0".to_string(),
        commit: Some("0123456789ab".to_string()),
        date: "2026-01-31T12:34:56Z".to_string(),
    }
}

use super::machine::{Gpu, date};

fn report() -> Report {
    let mut second = Table::new("second", "Another table", [Column::text("k"), Column::number("v")]);
    second.push([Cell::from("a"), Cell::from(2.0)]);
    let plot = Plot::bars(
        "bars",
        "Bars",
        Axis::linear("ms"),
        vec![Bar { name: "a".to_string(), group: String::new(), value: 1.5, error: None }],
    );
    let mut report = Report::new("model-steps", "Steps of a model")
        .text("What this shows.")
        .table(sample())
        .plot(plot)
        .table(second);
    report.machine = Some(machine());
    report
}

#[test]
fn text() {
    insta::assert_snapshot!(report().to_text());
}

#[test]
fn markdown() {
    insta::assert_snapshot!(report().to_markdown());
}

#[test]
fn latex() {
    insta::assert_snapshot!(report().to_latex());
}

#[test]
fn json() {
    insta::assert_snapshot!(format!("{:#}", report().to_json()));
}

#[test]
fn json_is_read_back() {
    let report = report();
    let read = Report::from_json(&report.to_json()).unwrap();
    assert_eq!((&read.name, &read.title, &read.machine), (&report.name, &report.title, &report.machine));
    let cells = |report: &Report| report.tables().map(|t| t.rows.clone()).collect::<Vec<_>>();
    assert_eq!(cells(&read), cells(&report));
    assert_eq!(read.images(), report.images());
    assert!(matches!(&read.parts[0], Part::Text(text) if text == "What this shows."));
    assert!(Report::from_json(&serde_json::json!({ "title": "x" })).unwrap_err().contains("tables"));
}

#[test]
fn csv_round_trips() {
    let text = format::data::csv(&sample());
    insta::assert_snapshot!(text);
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    assert_eq!(records.len(), 3);
    assert_eq!(&records[0][5], "a|b_c, \"d\" <e>");
    assert_eq!(records[2][1].parse::<f64>().unwrap(), 1.0 / 3.0);
}

#[test]
fn html_is_complete_and_escapes_text() {
    let page = report().to_html();
    for expected in
        ["Example GPU", "<caption>Time of a step &amp; its memory", "12.35 ± 0.50", "OOM", "<svg", "&lt;e&gt;"]
    {
        assert!(page.contains(expected), "{expected}");
    }
    assert!(!page.contains("<e>") && !page.contains("http://") | page.contains("http://www.w3.org/2000/svg"));
    let both = to_html_page("Two", &[report(), report()]);
    assert_eq!(both.matches("<svg").count(), 2);
    assert_eq!(both.matches("Example CPU").count(), 1);
}

#[test]
fn numbers_are_rounded_to_what_matters() {
    let show = |x: f64| Column::number("x").significant(3).format(&Cell::from(x));
    let shown = [0.0, 1.0, 9.996, 123.4, 1234.5, 1.5e8, 0.00123, 1.2345e-5, -2.5].map(show);
    assert_eq!(shown, ["0", "1.00", "10.0", "123", "1234", "1.50e8", "0.00123", "1.23e-5", "-2.50"]);
    assert_eq!(Column::number("x").format(&Cell::mean_std(12.3456, 0.2345)), "12.35 ± 0.23");
    assert_eq!(Column::number("x").format(&Cell::from(f64::NAN)), "NaN");
    assert_eq!(Cell::statistics(&[1.0, 3.0]), Cell::MeanStd(2.0, 2.0_f64.sqrt()));
    assert_eq!((Cell::statistics(&[]), Cell::statistics(&[4.0])), (Cell::Empty, Cell::Number(4.0)));
}

#[test]
fn empty_columns_are_dropped() {
    let mut table = Table::new("t", "T", [Column::text("a"), Column::text("b"), Column::number("c")]);
    table.push([Cell::from("x"), Cell::Empty, Cell::from(1.0)]);
    table.push([Cell::from("y"), Cell::Empty, Cell::Empty]);
    let table = table.without_empty_columns();
    assert_eq!(table.columns.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["a", "c"]);
    assert_eq!(table.rows[1], [Cell::from("y"), Cell::Empty]);
}

#[test]
#[should_panic(expected = "a row of 1 cells in the table `t` of 2 columns")]
fn a_row_of_another_length_panics() {
    Table::new("t", "T", [Column::text("a"), Column::text("b")]).push([Cell::Empty]);
}

#[test]
fn dates_follow_the_calendar() {
    assert_eq!(date(0), "1970-01-01T00:00:00Z");
    assert_eq!(date(951_782_399), "2000-02-28T23:59:59Z");
    assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
    assert_eq!(date(1_769_862_896), "2026-01-31T12:34:56Z");
    assert_eq!(date(4_107_542_400), "2100-03-01T00:00:00Z");
}

/// Centers of the circles of a plot, in the order of the points.
fn circles(svg: &str) -> Vec<(i32, i32)> {
    let number = |tag: &str, name: &str| -> i32 {
        let start = tag.find(&format!("{name}=\"")).unwrap() + name.len() + 2;
        tag[start..].split('"').next().unwrap().parse().unwrap()
    };
    svg.split("<circle").skip(1).map(|tag| (number(tag, "cx"), number(tag, "cy"))).collect()
}

#[test]
fn logarithmic_axes_space_factors_evenly() {
    let series = Series::new("s", [(256.0, 0.1), (1024.0, 1.0), (4096.0, 10.0), (16384.0, 0.0)].map(Point::from));
    let svg = Plot::lines("p", "P", Axis::log2("length"), Axis::log10("ms"), vec![series]).to_svg();
    let places = circles(&svg);
    // A logarithmic axis cannot show zero.
    assert_eq!(places.len(), 3, "{svg}");
    let (dx, dy) = (places[1].0 - places[0].0, places[0].1 - places[1].1);
    assert!(dx > 50 && (places[2].0 - places[1].0 - dx).abs() <= 1, "{places:?}");
    assert!(dy > 50 && (places[1].1 - places[2].1 - dy).abs() <= 1, "{places:?}");
    for mark in ["256", "512", "16384", "0.1", "10"] {
        assert!(svg.lines().any(|line| line.trim() == mark), "no mark {mark}: {svg}");
    }
}

#[test]
fn plots_show_their_names_and_survive_odd_values() {
    let series = |name: &str, y: f64| Series::new(name, [(0.0, y), (1.0, y)].map(Point::from));
    let stack = Plot::stack(
        "s",
        "Memory <now>",
        Axis::linear("s"),
        Axis::linear("MiB"),
        vec![series("lower", 1.0), series("upper", 2.0)],
    );
    let svg = stack.to_svg();
    assert!(svg.contains("lower") && svg.contains("upper") && svg.contains("Memory &lt;now&gt;"), "{svg}");
    for odd in [f64::NAN, f64::INFINITY, 0.0, -1.0, 1e300, 1e-300] {
        let bar = Bar { name: "b".to_string(), group: "g".to_string(), value: odd, error: Some(0.1) };
        let bars = Plot::bars("b", "B", Axis::linear("x"), vec![bar]);
        bars.to_svg();
        let json = Report::new("r", "R").plot(bars).to_json();
        assert!(Report::from_json(&json).is_ok(), "{json}");
        for axis in [Axis::linear("y"), Axis::log2("y"), Axis::log10("y")] {
            Plot::lines("l", "L", axis.clone(), axis, vec![series("s", odd)]).to_svg();
        }
    }
    assert!(Plot::lines("l", "L", Axis::linear("x"), Axis::linear("y"), Vec::new()).to_svg().contains("no data"));
    assert!(Plot::stack("l", "L", Axis::linear("x"), Axis::linear("y"), Vec::new()).to_svg().contains("no data"));
}

fn outputs(folder: &Path) -> Outputs {
    Outputs {
        out: Some(folder.join("all")),
        csv: Some(folder.join("t.csv")),
        plot: Some(folder.join("p.svg")),
        ..Outputs::default()
    }
}

#[test]
fn every_format_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let outputs = outputs(folder.path());
    outputs.check().unwrap();
    assert!(!folder.path().join("all").exists());
    let mut printed = Vec::new();
    outputs.write(report(), &mut printed).unwrap();
    let printed = String::from_utf8(printed).unwrap();
    for file in [
        "t.csv",
        "t-second.csv",
        "p.svg",
        "all/model-steps.json",
        "all/model-steps.md",
        "all/model-steps.tex",
        "all/model-steps.html",
        "all/model-steps.csv",
        "all/second.csv",
        "all/bars.svg",
    ] {
        let path = folder.path().join(file);
        assert!(std::fs::metadata(&path).is_ok_and(|m| m.len() > 0), "{file}");
        assert!(printed.contains(&format!("wrote {}", path.display())), "{printed}");
    }
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 4, "a temporary file was left");
}

/// Nothing is written beside a device or a descriptor.
#[test]
fn streams_get_all_tables() {
    let folder = tempfile::tempdir().unwrap();
    let null = folder.path().join("null");
    std::os::unix::fs::symlink("/dev/null", &null).unwrap();
    let outputs = Outputs { csv: Some(null.clone()), plot: Some(null.clone()), ..Outputs::default() };
    outputs.check().unwrap();
    assert_eq!(outputs.write_files(&report()).unwrap(), [null.clone(), null]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    let mut file = tempfile::tempfile().unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let outputs = Outputs { csv: Some(path.into()), ..Outputs::default() };
    outputs.write_files(&report()).unwrap();
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    let tables: Vec<String> = report().tables().map(super::format::data::csv).collect();
    assert_eq!(text, tables.join("\n"));
}

#[test]
fn a_file_that_cannot_be_written_leaves_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("good.csv");
    let outputs = Outputs { json: Some("/dev/full".into()), csv: Some(csv.clone()), ..Outputs::default() };
    let error = outputs.write_files(&report()).unwrap_err().to_string();
    assert!(error.contains("cannot write /dev/full"), "{error}");
    assert!(csv.metadata().unwrap().len() > 0);
}

#[test]
fn plots_that_are_not_there_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let outputs = Outputs { plot: Some(folder.path().join("p.svg")), ..Outputs::default() };
    let refused = outputs.expect_no_plot().unwrap_err().to_string();
    assert!(refused.contains("--plot is unused"), "{refused}");
    let tables = Report::new("t", "T").table(Table::new("t", "T", [Column::text("a")]));
    outputs.write(tables, &mut Vec::new()).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn unwritable_outputs_are_found_by_check() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Outputs { json: Some(folder.path().join("no/such/x.json")), ..Outputs::default() };
    let message = missing.check().unwrap_err().to_string();
    assert!(message.starts_with("cannot write") && message.contains("no/such/x.json"), "{message}");
    let a_folder = Outputs { json: Some(folder.path().to_path_buf()), ..Outputs::default() };
    assert!(a_folder.check().unwrap_err().to_string().contains("directory"));
    let file = folder.path().join("file");
    std::fs::write(&file, b"old").unwrap();
    let under_a_file = Outputs { out: Some(file.join("x")), ..Outputs::default() };
    assert!(under_a_file.check().unwrap_err().to_string().starts_with("cannot create the folder"));
    assert_eq!(std::fs::read(&file).unwrap(), b"old");
}

#[test]
fn files_that_another_option_would_replace_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let all = folder.path().join("all");
    let outputs = Outputs { out: Some(all.clone()), ..Outputs::default() };
    let [rows, lines] = ["rows.json", "rows.jsonl"].map(|name| all.join(name));
    let message = outputs.check_with([("--record", &rows)]).unwrap_err().to_string();
    assert!(message.starts_with("--record ") && message.contains("in the folder of --out"), "{message}");
    assert!(!all.exists());
    outputs.check_with([("--record", &lines)]).unwrap();
    let same = Outputs { json: Some(rows.clone()), ..Outputs::default() };
    let message = same.check_with([("--record", &rows)]).unwrap_err().to_string();
    assert!(message.contains("--json and --record name the same file"), "{message}");
    // A link into the folder, and one in the folder.
    let link = folder.path().join("link.jsonl");
    std::os::unix::fs::symlink("all/rows.json", &link).unwrap();
    let outside = folder.path().join("outside.jsonl");
    std::fs::write(&outside, "").unwrap();
    std::os::unix::fs::symlink("../outside.jsonl", all.join("bench.json")).unwrap();
    for path in [&link, &outside] {
        let message = outputs.check_with([("--record", path)]).unwrap_err().to_string();
        assert!(message.contains("in the folder of --out"), "{message}");
    }
}
