//! Text forms, tables and logs. Tuning itself is tested in `runtime/tests/autotune.rs`, in processes with separate
//! caches.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode};

use super::config::distance;
use super::journal::{Event, Journal};
use super::store::{DeviceId, load_choices, save_choice};
use super::*;
use crate::cache::Cache;
use crate::prelude::*;

fn by_size(problem: &Problem) -> Config {
    let tile: usize = if problem.int("n") > Some(1000) { 1024 } else { 64 };
    Config::default().set("tile", tile).set("twice", false).num_warps(1)
}

#[autotune(
    configs = [
        Config(tile = 64, twice = true, num_warps = 2),
        Config(twice = false, tile = 128, num_stages = 4, max_registers = 128, warp_specialize = true, overlap = false),
    ],
    key = [n, mode],
    default = by_size,
)]
#[kernel]
#[alias(doubled_or_not, doubled = twice, len = n, kind = mode)]
fn scale<T: Float>(
    x: In<T>,
    y: Out<T>,
    n: i32,
    #[constexpr] tile: usize,
    #[constexpr] twice: bool,
    #[constexpr] mode: i32,
) {
    let i = program_id(0) * tile + arange(0, tile);
    let factor = if twice { 2.0 } else { 1.0 };
    store(y + i, (load(x + i, mask = i < n).to::<f32>() * factor).to::<T>(), mask = i < n);
}

fn problem(n: i64) -> Problem<'static> {
    let part = |name, value| KeyPart { name, value };
    let parts = vec![
        part("n", KeyValue::Size(size_bucket(n))),
        part("mode", KeyValue::Exact(tilewright_codegen::lang::kernel::ConstValue::Int(3))),
    ];
    Problem { target: Device::cpu().target(), def: Scale::<f32>::DEF, dtypes: &[DType::F32], parts }
}

use tilewright_codegen::ir::DType;

#[autotune(
    configs = [Config(tile = [64, 128], num_warps = [1, 2]), Config(tile = 256, num_warps = [4, 8])],
    key = [n],
)]
#[kernel]
fn negated(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    store(y + i, -load(x + i, mask = i < n), mask = i < n);
}

#[test]
fn config_lists_expand_to_all_combinations() {
    let made: Vec<(Option<usize>, u32)> =
        NEGATED_AUTOTUNE.configs().map(|config| (config.get("tile"), config.num_warps)).collect();
    let wanted = [(64, 1), (64, 2), (128, 1), (128, 2), (256, 4), (256, 8)].map(|(tile, warps)| (Some(tile), warps));
    assert_eq!(made, wanted);
}

#[autotune(
    configs = [Config(tile = 64..=256, num_warps = 2..=8, num_stages = 2..=4)],
    keep = |problem, config| config.get::<i64>("tile") <= problem.int("n") && config.num_stages != 3,
    key = [n],
)]
#[kernel]
fn in_a_space(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    store(y + i, load(x + i, mask = i < n), mask = i < n);
}

#[test]
fn spaces_are_pruned_by_the_user() {
    use tilewright_codegen::target::{GpuArch, Target};
    let autotune = &IN_A_SPACE_AUTOTUNE;
    let made: Vec<(Option<usize>, u32, u32)> =
        autotune.configs().map(|config| (config.get("tile"), config.num_warps, config.num_stages)).collect();
    let mut wanted = Vec::new();
    for tile in [64, 128, 256] {
        for warps in [2, 4, 8] {
            wanted.extend([2, 3, 4].map(|stages| (Some(tile), warps, stages)));
        }
    }
    assert_eq!(made, wanted);
    let parts = vec![KeyPart { name: "n", value: KeyValue::Size(128) }];
    let target = Target::Nvptx(GpuArch::Sm80);
    let problem = Problem { target, def: autotune.def, dtypes: &[], parts: parts.clone() };
    let candidates = autotune.candidates(&problem);
    assert_eq!(candidates.len(), 2 * 3 * 2);
    assert_eq!(candidates[0], autotune.default_config(&problem));
    assert!(candidates.iter().all(|config| config.num_stages != 3 && config.get("tile") < Some(256usize)));
    // On the CPU, warps and stages make no difference.
    let on_cpu = Problem { target: Device::cpu().target(), def: autotune.def, dtypes: &[], parts };
    assert_eq!(autotune.candidates(&on_cpu).len(), 2);
}

#[test]
fn configurations_read_as_they_are_written() {
    let autotune = &SCALE_AUTOTUNE;
    let key: Vec<&str> = autotune.key.iter().map(|key| key.name).collect();
    assert_eq!((autotune.tuned, &key[..]), (&["tile", "twice"][..], &["n", "mode"][..]));
    let texts: Vec<String> = autotune.configs().map(|config| config.to_string()).collect();
    assert_eq!(texts[0], "tile=64,twice=true,num_warps=2,num_stages=3");
    assert_eq!(
        texts[1],
        "tile=128,twice=false,num_warps=4,num_stages=4,max_registers=128,warp_specialize=true,overlap=false"
    );
    for (config, text) in autotune.configs().zip(&texts) {
        assert_eq!(autotune.parse_config(text), Ok(config));
    }
    let reordered = autotune.parse_config("num_stages=3, num_warps=2, twice=true, tile=64").unwrap();
    assert_eq!(reordered.to_string(), texts[0]);
    for (bad, reason) in [
        ("tile=64", "`twice` has no value"),
        ("tile=64,twice=true,depth=3", "no tuned constant `depth`"),
        ("tile=64,tile=64,twice=true", "twice"),
        ("tile=64,twice=true,num_warps=3", "power of two"),
        ("tile=64,twice", "not of the form name=value"),
        ("tile=banana,twice=true", "`tile` cannot be banana"),
        ("tile=64,twice=1", "`twice` cannot be 1"),
    ] {
        let message = autotune.parse_config(bad).unwrap_err();
        assert!(message.contains(reason), "{bad}: {message}");
    }
}

#[autotune(configs = [Config(take_turns = true, bulk_copies = false)])]
#[kernel]
fn former_options(x: InOut<f32>) {
    store(x, 0.0);
}

#[test]
fn former_names_are_read() {
    let options = FORMER_OPTIONS_AUTOTUNE.configs().next().unwrap().schedule;
    assert_eq!((options.pingpong, options.tma), (Some(true), Some(false)));
    #[expect(deprecated)]
    let launched = LaunchConfig::new(1).take_turns(true).bulk_copies(false);
    assert_eq!(launched.schedule, options);

    let present = SCALE_AUTOTUNE.parse_config("tile=64,twice=true,pingpong=true").unwrap();
    assert_eq!(SCALE_AUTOTUNE.parse_config("tile=64,doubled=true,take_turns=true"), Ok(present));
    assert!(SCALE_AUTOTUNE.parse_config("tile=64,doubled=true,twice=true").unwrap_err().contains("given twice"));

    let device = DeviceId { device: "A GPU".into(), compute_capability: None };
    let former = Entry { kernel: "doubled_or_not".into(), ..entry("T=f32,len<=64,kind=3", "") };
    let other = Entry { kernel: "other".into(), ..former.clone() };
    let table = Table::new(device, vec![former, other.clone()]).renamed(SCALE_AUTOTUNE.def);
    assert_eq!(table.entries, [entry("T=f32,n<=64,mode=3", ""), other]);
}

#[test]
fn constants_are_given_by_former_names() {
    use tilewright_codegen::lang::kernel::ConstValue;
    let def = SCALE_AUTOTUNE.def;
    let consts = |names: [&'static str; 3]| {
        let values = [ConstValue::Int(64), ConstValue::Bool(true), ConstValue::Int(3)];
        def.complete_consts(&names.into_iter().zip(values).collect::<Vec<_>>())
    };
    assert_eq!(consts(["tile", "doubled", "kind"]).unwrap(), consts(["tile", "twice", "mode"]).unwrap());
    assert!(consts(["tile", "len", "mode"]).is_err(), "`len` is an argument");
}

#[test]
fn wgmma_f32_is_tried_only_for_f32_on_hopper() {
    use tilewright_codegen::target::{GpuArch, Schedule, Target};
    let schedule = Schedule { wgmma_f32: Some(true), ..Schedule::default() };
    let config = Config { schedule, ..Config::default() };
    let on = |arch, dtypes: &'static [DType]| Problem { target: Target::Nvptx(arch), dtypes, ..problem(10) };
    assert!(on(GpuArch::Sm90a, &[DType::F32]).is_relevant(&config));
    assert!(
        !on(GpuArch::Sm90a, &[DType::BF16]).is_relevant(&config)
            && !on(GpuArch::Sm80, &[DType::F32]).is_relevant(&config)
    );
    assert!(!problem(10).is_relevant(&config) && problem(10).is_relevant(&Config::default()));
}

#[test]
fn keys_have_sizes_and_exact_words() {
    assert_eq!([-5, 0, 1, 2, 3, 1000, 1024, 1025].map(size_bucket), [0, 0, 1, 2, 4, 1024, 1024, 2048]);
    assert_eq!(size_bucket(i64::MAX), 1 << 63);
    assert_eq!(problem(1000).key(), "T=f32,n<=1024,mode=3");
    assert_eq!((problem(1000).int("n"), problem(1000).get::<i32>("mode")), (Some(1024), Some(3)));
    assert_eq!(SCALE_AUTOTUNE.default_config(&problem(2000)).get::<usize>("tile"), Some(1024));
    assert_eq!(SCALE_AUTOTUNE.default_config(&problem(20)).get::<usize>("tile"), Some(64));
    assert_eq!(distance("T=f32,n<=1024", "T=f32,n<=1024"), Some(0));
    assert_eq!(distance("T=f32,n<=1024,m<=4", "T=f32,n<=4096,m<=2"), Some(3));
    assert_eq!(distance("n<=1024,m<=1", "n<=16384,m<=16"), Some(8));
    assert_eq!((distance("n<=1024", "n<=32768"), distance("n<=1024", "n<=32")), (None, None));
    for other in ["T=bf16,n<=1024", "T=f32,m<=1024", "T=f32", "T=f32,n=1024", "T=f32,n<=1024,m<=1"] {
        assert_eq!(distance("T=f32,n<=1024", other), None, "{other}");
    }
}

fn entry(key: &str, config: &str) -> Entry {
    Entry { kernel: "scale".into(), key: key.into(), config: config.into(), ..Entry::default() }
}

#[test]
fn tables_are_read_as_they_are_written() {
    let device = DeviceId { device: "A \"GPU\"".into(), compute_capability: Some("9.0".into()) };
    let entries = vec![entry("T=f32,n<=64", "tile=64"), entry("T=f32,n<=1024", "tile=128")];
    let table = Table::new(device, entries);
    assert_eq!(Table::parse(&table.text()), Ok(table.clone()));
    assert_eq!(table.exact("scale", "T=f32,n<=64").map(|e| e.config.as_str()), Some("tile=64"));
    assert_eq!(table.exact("scale", "T=f32,n<=128"), None);
    let near = |key| table.nearest("scale", key).map(|(e, distance)| (e.config.as_str(), distance));
    assert_eq!(near("T=f32,n<=128"), Some(("tile=64", 1)));
    assert_eq!(near("T=f32,n<=4096"), Some(("tile=128", 2)));
    assert_eq!((near("T=bf16,n<=64"), table.nearest("other", "T=f32,n<=64")), (None, None));
    for (text, reason) in [
        ("", "not a tuning table"),
        ("{}", "not a tuning table"),
        (&*table.text().replace("tilewright tuning table", "other format"), "`other format`"),
        (&*table.text().replace("\"version\": 1", "\"version\": 9"), "version 9"),
        (&table.text()[..100], "not a tuning table"),
    ] {
        let message = Table::parse(text).unwrap_err();
        assert!(message.contains(reason), "{message}");
    }
}

#[test]
fn damaged_and_foreign_tables_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let id = |name: &str| DeviceId { device: name.into(), compute_capability: None };
    let cache = Cache::at(dir.path());
    save_choice(&cache, &id("here"), &entry("T=f32,n<=64", "tile=64"));
    save_choice(&cache, &id("there"), &entry("T=f32,n<=64", "tile=128"));
    save_choice(&cache, &id("here"), &entry("T=f32,n<=64", "tile=256"));
    std::fs::write(dir.path().join("tuned/scale/torn.json"), "{\"format\": \"tilewri").unwrap();
    let found = load_choices(&cache, "scale", &id("here"));
    assert_eq!(
        found.entries,
        [entry("T=f32,n<=64", "tile=256")],
        "a new choice for a problem replaces the previous one"
    );
}

#[test]
fn tables_writable_by_others_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, id) = (Cache::at(dir.path()), DeviceId { device: "here".into(), compute_capability: None });
    save_choice(&cache, &id, &entry("T=f32,n<=64", "tile=64"));
    let folder = dir.path().join("tuned/scale");
    let table = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let set_mode = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    assert_eq!((mode(&folder), mode(&table)), (0o700, 0o600));
    let count = || load_choices(&Cache::at(dir.path()), "scale", &id).entries.len();
    assert_eq!(count(), 1);
    for place in [&table, &folder, &dir.path().to_path_buf()] {
        let before = mode(place);
        set_mode(place, before | 0o002);
        assert_eq!(count(), 0, "{}", place.display());
        set_mode(place, before);
    }
    rustix::fs::mknodat(CWD, folder.join("fifo.json"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    symlink(&table, folder.join("link.json")).unwrap();
    assert_eq!(count(), 1, "a FIFO and a link");
    // A FIFO or a link in place of the table is replaced by a new table.
    std::fs::rename(folder.join("fifo.json"), &table).unwrap();
    save_choice(&cache, &id, &entry("T=f32,n<=64", "tile=64"));
    assert_eq!(count(), 1);
    assert!(cache.warnings().is_empty());
}

#[test]
fn logs_writable_by_others_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log.jsonl");
    let text = "{\"job\":\"job\"}\n{\"start\":\"a\"}\n{\"start\":\"a\"}\n";
    // The reason for dropping candidate `a`, during which the process ended twice.
    let dropped = || Journal::open(Some(&path), "job").dropped("a").is_some();
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    assert!(dropped());
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    assert!(!dropped());
    assert!(Journal::append(&path, &Event::Job("job".into())).unwrap_err().to_string().contains("by others"));
    let target = dir.path().join("elsewhere");
    std::fs::rename(&path, &target).unwrap();
    std::fs::set_permissions(&target, Permissions::from_mode(0o600)).unwrap();
    symlink(&target, &path).unwrap();
    assert!(!dropped());
    assert_eq!(std::fs::read_to_string(&target).unwrap(), text, "nothing is written through a link");
    std::fs::remove_file(&path).unwrap();
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    assert!(!dropped() && Journal::read(&path).is_empty(), "a FIFO does not block");
}

#[test]
fn interrupted_logs_are_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep/log.jsonl");
    let mut journal = Journal::open(Some(&path), "job");
    journal.add(Event::Start("a".into()));
    journal.add(Event::Agrees { config: "a".into(), error: 0.0 });
    journal.add(Event::Times { config: "a".into(), ms: vec![1.0, 2.0] });
    journal.add(Event::Start("b".into()));
    assert_eq!(Journal::running(&Journal::read(&path)), Some("b"));
    drop(journal);
    // The process was stopped within a line.
    let torn = std::fs::read_to_string(&path).unwrap() + "{\"times\":{\"config\":\"a\",\"m";
    std::fs::write(&path, torn).unwrap();

    let mut journal = Journal::open(Some(&path), "job");
    assert_eq!((journal.times("a"), journal.rounds("a")), (vec![1.0, 2.0], 1));
    assert_eq!((journal.dropped("a"), journal.dropped("b")), (None, None), "the candidate gets one more try");
    journal.add(Event::Start("b".into()));
    drop(journal);
    let journal = Journal::open(Some(&path), "job");
    assert!(journal.dropped("b").is_some_and(|why| why.contains("ended 2 times")));
    drop(journal);
    Journal::append(&path, &Event::Dropped { config: "c".into(), why: "hung".into() }).unwrap();
    let mut journal = Journal::open(Some(&path), "job");
    assert_eq!((journal.dropped("c"), journal.rounds("a")), (Some("hung"), 1));

    journal.add(Event::Chosen { config: "a".into(), median_ms: 1.5 });
    drop(journal);
    assert_eq!(Journal::open(Some(&path), "job").rounds("a"), 0, "a complete log is started over");
    Journal::open(Some(&path), "job").add(Event::Start("a".into()));
    assert_eq!(Journal::open(Some(&path), "other").dropped("a"), None);
    assert_eq!(Journal::read(&path), [Event::Job("other".into())]);
    assert_eq!(Journal::open(None, "job").rounds("a"), 0);
}

/// y = x / divisor or 2 x, with the configurations of another kernel.
#[autotune(configs = SCALE_AUTOTUNE, key = [n])]
#[kernel]
fn halve(
    x: In<f32>,
    y: Out<f32>,
    n: i32,
    #[constexpr] divisor: i32,
    #[constexpr] twice: bool,
    #[constexpr] tile: usize,
) {
    let i = program_id(0) * tile + arange(0, tile);
    let factor = if twice { 2.0 } else { 1.0 };
    store(y + i, load(x + i, mask = i < n) * factor / scalar::<i32>(divisor).to::<f32>(), mask = i < n);
}

#[test]
fn configurations_of_another_kernel() {
    assert_eq!((HALVE_AUTOTUNE.tuned, HALVE_AUTOTUNE.key[0].name), (SCALE_AUTOTUNE.tuned, "n"));
    assert_eq!(HALVE_AUTOTUNE.configs, SCALE_AUTOTUNE.configs);
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[8.0f32; 100]).unwrap();
    let mut y = Buffer::<f32>::poisoned(&device, 100).unwrap();
    let mut kernel = Halve { x: &x, y: &mut y, n: 100, divisor: 4, twice: tuned(), tile: tuned() };
    kernel.launch_tuned(&device, |args| 100usize.div_ceil(args.tile)).unwrap();
    assert_eq!((kernel.divisor, kernel.twice, kernel.tile), (4, true, 64));
    assert_eq!(y.to_vec().unwrap(), [4.0; 100]);
}
