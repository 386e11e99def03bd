//! Kernels that are compiled ahead of time: their launches are checked by the manifest.

use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, Specialization};
use tilewright_codegen::passes::assume_ranges;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Artifact, Code, CompileOptions, GpuArch, HostCpu, Target};
use tilewright_runtime::kernel::{self, KernelArg};
use tilewright_runtime::precompiled::{Document, PrecompiledKernel};
use tilewright_runtime::prelude::*;

/// y = a · x + y, for every `stride`-th element of x.
#[kernel]
fn axpy(x: In<f32>, y: InOut<f32>, a: f32, n: i32, stride: i64, #[constexpr = 64] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    let product = load(x + i.to::<i64>() * stride, mask = mask) * a;
    store(y + i, product + load(y + i, mask = mask), mask = mask);
}

fn artifact(target: &Target) -> Artifact {
    let specialization = Specialization::aligned_memory(&AXPY);
    kernel::compile(&AXPY, &[], &[("tile", ConstValue::Int(64))], &specialization, target, &CompileOptions::default())
        .unwrap()
}

/// Manifest and code.
fn written(artifact: &Artifact) -> (String, Vec<u8>) {
    let constants = [("tile", ConstValue::Int(64))];
    let files = [("obj", "axpy.o".to_string())];
    let document = Document::new(&AXPY, &[], &constants, &CompileOptions::default(), artifact, &files);
    let code = match &artifact.code {
        Code::Ptx(text) => text.clone().into_bytes(),
        Code::Object(bytes) => bytes.clone(),
    };
    (document.to_json(), code)
}

fn native() -> (String, Vec<u8>) {
    written(&artifact(&Target::Host(HostCpu::native())))
}

fn load(manifest: &str, code: &[u8]) -> Result<PrecompiledKernel> {
    // SAFETY: the tests change manifests only where that is an error, or where the launch is refused.
    unsafe { PrecompiledKernel::load(&Device::cpu(), manifest, code) }
}

fn loaded() -> PrecompiledKernel {
    let (manifest, code) = native();
    load(&manifest, &code).unwrap()
}

/// A launch of the precompiled kernel and one of the same kernel compiled for it, with buffers of `len` elements: both
/// have the same result, or are refused for the same reason.
#[test]
fn a_launch_is_checked_as_one_of_a_kernel_that_is_compiled_for_it() {
    let device = Device::cpu();
    let precompiled = loaded();
    let mut refused = 0;
    for (len, n, stride, grid) in [
        (100, 100, 1, 2),
        (100, 50, 2, 1),
        (100, 51, 2, 1),
        (100, 101, 1, 2),
        (64, 100, 1, 1),
        (64, 100, 1, 2),
        (64, 10, -1, 1),
    ] {
        let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let x = Buffer::from_slice(&device, &x).unwrap();
        let [mut first, mut second] = [0, 1].map(|_| Buffer::from_slice(&device, &vec![0.25f32; len]).unwrap());
        let expected = Axpy { x: &x, y: &mut first, a: 0.5, n, stride, tile: 64 }.launch(&device, grid);
        let mut args = [
            KernelArg::In(&x),
            KernelArg::Out(&mut second),
            KernelArg::scalar(0.5f32),
            KernelArg::scalar(n),
            KernelArg::scalar(stride),
        ];
        let found = precompiled.launch(grid, &mut args);
        let [found, expected] = [found, expected].map(|outcome| outcome.map_err(|error| error.to_string()));
        assert_eq!(found, expected, "{len} elements, n = {n}, stride = {stride}, grid = {grid}");
        assert_eq!(first.to_vec().unwrap(), second.to_vec().unwrap());
        if let Err(message) = found {
            assert!(message.contains("out of bounds: `"), "{message}");
            refused += 1;
        } else {
            assert_eq!(second.to_vec().unwrap()[9], 0.5 * (9 * stride) as f32 + 0.25);
        }
    }
    assert_eq!(refused, 4);
}

fn a<'a>() -> KernelArg<'a> {
    KernelArg::scalar(1.0f32)
}

fn n<'a>() -> KernelArg<'a> {
    KernelArg::scalar(64i32)
}

fn stride<'a>() -> KernelArg<'a> {
    KernelArg::scalar(1i64)
}

#[test]
fn arguments_are_checked_by_the_manifest() {
    let (device, kernel) = (Device::cpu(), loaded());
    let x = Buffer::<f32>::zeros(&device, 64).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 64).unwrap();
    let mut halves = Buffer::<f16>::zeros(&device, 64).unwrap();
    let simulated = Device::simulated(GpuArch::Sm80);
    let elsewhere = Buffer::<f32>::zeros(&simulated, 64).unwrap();
    let refuse = |args: &mut [KernelArg], parts: &[&str]| {
        let message = kernel.launch(1, args).unwrap_err().to_string();
        for part in parts {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
    };
    refuse(&mut [KernelArg::In(&x)], &["`axpy` (", "precompiled.rs", "takes 5 arguments: found 1"]);
    let found = "`y` expects memory of f32 to write, found memory of f16 to write";
    refuse(&mut [KernelArg::In(&x), KernelArg::Out(&mut halves), a(), n(), stride()], &[found]);
    refuse(
        &mut [KernelArg::In(&x), KernelArg::Out(&mut y), n(), n(), stride()],
        &["`a`", "expected an f32, found an i32"],
    );
    refuse(&mut [KernelArg::In(&x), KernelArg::In(&x), a(), n(), stride()], &["`y` expects memory of f32 to write"]);
    let found = "`x` expects memory of f32 to read, found a number";
    refuse(&mut [n(), KernelArg::Out(&mut y), a(), n(), stride()], &[found]);
    let other = KernelArg::In(&elsewhere);
    refuse(&mut [other, KernelArg::Out(&mut y), a(), n(), stride()], &["simulated", "CPU"]);
    let mut args = [KernelArg::In(&x), KernelArg::Out(&mut y), a(), n(), stride()];
    let message = kernel.launch(-1, &mut args).unwrap_err().to_string();
    assert!(message.contains("the grid's x extent is -1"), "{message}");
}

#[test]
fn alignment_and_values_that_the_code_assumes_are_checked() {
    let device = Device::cpu();
    let mut specialization = Specialization::aligned_memory(&AXPY);
    specialization.args[4] = ArgSpec { divisible_by: 1, equal_to: Some(1) };
    let target = Target::Host(HostCpu::native());
    let options = CompileOptions::default();
    let artifact =
        kernel::compile(&AXPY, &[], &[("tile", ConstValue::Int(64))], &specialization, &target, &options).unwrap();
    let (manifest, code) = written(&artifact);
    let kernel = load(&manifest, &code).unwrap();
    let x = Buffer::<f32>::zeros(&device, 65).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 64).unwrap();
    for (first, stride, telling) in [(0, 2i64, "the value 1, found 2"), (1, 1, "addresses divisible by 16")] {
        let view = x.slice(first..).unwrap();
        let mut args = [
            KernelArg::In(&view),
            KernelArg::Out(&mut y),
            KernelArg::scalar(1.0f32),
            KernelArg::scalar(32i32),
            KernelArg::scalar(stride),
        ];
        let message = kernel.launch(1, &mut args).unwrap_err().to_string();
        assert!(message.contains(telling), "{message}");
    }
}

/// y[i] = x[128 + (first + i) % n], n ≤ 128: as Triton's tutorials index rows, but in bounds for any dividend.
#[kernel]
fn wrapped(x: In<f32>, y: Out<f32>, first: i32, n: i32) {
    let i = (first + arange(0, 64)) % n;
    store(y + arange(0, 64), load(x + 128 + i));
}

/// Code that assumes that a dividend is not negative is not run where it may be negative.
#[test]
fn range_assumptions_are_checked() {
    let device = Device::cpu();
    let specialization = Specialization { args: vec![ArgSpec { divisible_by: 16, equal_to: None }; 4] };
    let mut func = kernel::record(&WRAPPED, &[], &[], &specialization).unwrap();
    assert!(assume_ranges::run(&mut func), "an access becomes wider");
    let target = Target::Host(HostCpu::native());
    let mut artifact = pipeline::compile(&func, &target, &CompileOptions::default(), &mut ()).unwrap();
    artifact.manifest.footprint = Some(pipeline::footprint(&func));
    let document = Document::new(&WRAPPED, &[], &[], &CompileOptions::default(), &artifact, &[]);
    let Code::Object(code) = &artifact.code else { panic!("an object") };
    let kernel = load(&document.to_json(), code).unwrap();
    let x: Vec<f32> = (0..256).map(|i| i as f32).collect();
    let x = Buffer::from_slice(&device, &x).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 64).unwrap();
    let mut launch = |first: i32| {
        kernel.launch(
            1,
            &mut [KernelArg::In(&x), KernelArg::Out(&mut y), KernelArg::scalar(first), KernelArg::scalar(128)],
        )
    };
    let message = launch(-16).unwrap_err().to_string();
    assert!(message.contains("at least 0; with these arguments and this grid it may be -16"), "{message}");
    launch(112).unwrap();
    let values = y.to_vec().unwrap();
    assert_eq!((values[0], values[15], values[16]), (240.0, 255.0, 128.0));
}

#[test]
fn a_manifest_and_code_of_different_compilations_are_refused() {
    let (manifest, code) = native();
    let mut other = code.clone();
    other.push(0);
    let message = load(&manifest, &other).unwrap_err().to_string();
    assert!(message.contains("the code of `axpy` has BLAKE3 hash") && message.contains("compile"), "{message}");
    let (ptx_manifest, ptx) = written(&artifact(&Target::Nvptx(GpuArch::Sm80)));
    let message = load(&ptx_manifest, &ptx).unwrap_err().to_string();
    assert!(message.contains("is compiled for sm_80, but"), "{message}");
    assert!(load(&ptx_manifest, &code).is_err());
}

/// A simulated GPU of the same architecture is no GPU: the message says so, in place of naming that architecture twice.
#[test]
fn a_simulated_gpu_refuses_compiled_code() {
    let device = Device::simulated(GpuArch::Sm90a);
    for (manifest, code, target) in [Target::Nvptx(GpuArch::Sm90a), Target::Host(HostCpu::native())].map(|target| {
        let (manifest, code) = written(&artifact(&target));
        (manifest, code, target)
    }) {
        // SAFETY: the code is not executed.
        let message = unsafe { PrecompiledKernel::load(&device, &manifest, &code) }.unwrap_err().to_string();
        let words =
            ["`axpy` (", &format!("code for {target}"), "a simulated sm_90a GPU cannot run", "from their source"];
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
}

#[test]
fn damaged_manifests_are_refused() {
    let (manifest, code) = native();
    let replaced = |from: &str, to: &str| {
        assert!(manifest.contains(from), "{manifest}");
        load(&manifest.replacen(from, to, 1), &code).map(drop).unwrap_err().to_string()
    };
    for (from, to, telling) in [
        ("\"format\": 1", "\"format\": 4", "its format is 4: this version reads formats 1 to 3"),
        ("\"format\": 1,", "", "format"),
        ("\"f32\"", "\"f31\"", "f31"),
        ("\"memory\": {", "\"memory\": {}, \"forgotten\": {", "disagree on whether `x` is memory"),
        ("\"elem_bytes\":[4,4,null,null,null]", "\"elem_bytes\":[4,4,null,null]", "refers to argument 4"),
        (
            "\"elem_bytes\":[4,4,null,null,null]",
            "\"elem_bytes\":[4,4,null,null,null,4]",
            "a kernel with 6 arguments: it lists 5",
        ),
    ] {
        let message = replaced(from, to);
        assert!(message.contains("manifest") && message.contains(telling), "{message}");
    }
    for length in (0..manifest.trim_end().len()).step_by(97) {
        assert!(load(&manifest[..length], &code).is_err(), "{length} bytes");
    }
}

/// A manifest without a footprint, as earlier versions wrote it, allows unchecked launches only.
#[test]
fn without_a_footprint_a_launch_is_unchecked_or_refused() {
    let device = Device::cpu();
    let (manifest, code) = native();
    let mut document = Document::from_json(&manifest).unwrap();
    assert_eq!(document.to_json(), manifest);
    document.manifest.footprint = None;
    let kernel = load(&document.to_json(), &code).unwrap();
    let x = Buffer::from_slice(&device, &[2.0f32; 64]).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 64).unwrap();
    let mut args = [
        KernelArg::In(&x),
        KernelArg::Out(&mut y),
        KernelArg::scalar(1.5f32),
        KernelArg::scalar(64i32),
        KernelArg::scalar(1i64),
    ];
    let message = kernel.launch(1, &mut args).unwrap_err().to_string();
    assert!(message.contains("no access footprint") && message.contains("launch_unchecked"), "{message}");
    // SAFETY: the buffers have 64 elements.
    unsafe { kernel.launch_unchecked(None, 1, &mut args) }.unwrap();
    assert_eq!(y.to_vec().unwrap(), [3.0; 64]);
}

/// y = a · x
#[autotune(configs = [Config(tile = 32, num_warps = 2), Config(tile = 64)], key = [n, negate])]
#[kernel]
fn scale<T: Float>(x: In<T>, y: Out<T>, a: f32, n: i32, #[constexpr] negate: bool, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let a = if negate { -a } else { a };
    store(y + i, (load(x + i, mask = i < n).to::<f32>() * a).to::<T>(), mask = i < n);
}

#[test]
fn a_compilation_from_rust_has_its_constants_assumptions_and_configuration() {
    let scale = || Scale::<f32>::compile_for(GpuArch::Sm80).constant("negate", true);
    let given = scale().constant("tile", 128usize).assume("n % 32, x % 4").compile().unwrap().document;
    assert_eq!((&given.constants["tile"], &given.constants["negate"]), (&128.into(), &true.into()));
    let assumed: Vec<u64> = given.manifest.args.iter().map(|arg| arg.divisible_by).collect();
    assert_eq!(assumed, [4, 16, 1, 32], "x, y, a, n");
    assert_eq!((given.manifest.kernel.as_str(), given.manifest.target.as_str()), ("scale", "sm_80"));
    assert!(given.manifest.footprint.is_some());

    // Without a table, the first configuration is the default one; a given constant has precedence.
    let tuned = scale().tuned(Scale::<f32>::AUTOTUNE).compile().unwrap().document;
    assert_eq!((&tuned.constants["tile"], tuned.options.num_warps), (&32.into(), 2));
    let both = scale().tuned(Scale::<f32>::AUTOTUNE).constant("tile", 256usize).compile().unwrap().document;
    assert_eq!((&both.constants["tile"], both.options.num_warps), (&256.into(), 2));
}

#[test]
fn what_cannot_be_compiled_is_named() {
    let scale = || Scale::<f32>::compile_for(GpuArch::Sm80).constant("tile", 64usize).constant("negate", false);
    let tuned = || Scale::<f32>::compile_for(GpuArch::Sm80).tuned(Scale::<f32>::AUTOTUNE);
    for (compilation, words) in [
        (scale().assume("m % 16"), ["no argument `m`", "x, y, a, n"]),
        (scale().assume("n"), ["`n` is not an assumption", "write `name%16`"]),
        (scale().assume("n >= 16"), ["`n >= 16` is not an assumption", "or `name=1`"]),
        (scale().assume("n == 16"), ["`n == 16` is not an assumption", "or `name=1`"]),
        (scale().assume("n % 16 = 0"), ["`n % 16 = 0` is not an assumption", "write `name%16`"]),
        (scale().assume("n % 7"), ["cannot be a multiple of 7", "help: write `name%16`"]),
        (scale().assume("n % 12"), ["cannot be a multiple of 12", "power of two"]),
        (scale().assume("n = 1, n % 16"), ["`n` has two assumptions", "once"]),
        (scale().assume("a = 1"), ["`a` is of type f32", "pointers and integers"]),
        (scale().constant("tiles", 3usize), ["no constexpr parameter `tiles`", "tile"]),
        (Scale::<f32>::compile_for(GpuArch::Sm80).constant("tille", 3usize), ["`tille`", "negate, tile"]),
        (tuned().constant("tille", 3usize), ["`tille`", "negate, tile"]),
        (Scale::<f32>::compile_for(GpuArch::Sm80), ["`negate`", "is not given"]),
        (tuned(), ["constant `negate`, which has no value", "give the constant"]),
        (tuned().size("n", 100).assume("n % 16"), ["the size n = 100 contradicts", "assumption `n % 16`"]),
        (tuned().size("a", 3), ["the size of `a` selects no configuration", "its configurations depend on n"]),
    ] {
        let message = compilation.compile().unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{words:?} in {message}");
    }
}

/// A manifest of code that was compiled by itself has the same hash as one of `compile_for`, and the CPU.
#[test]
fn manifests_have_the_hash_of_the_kernel_and_the_cpu() {
    let (native, _) = native();
    let document = Document::from_json(&native).unwrap();
    let compiled = Axpy::compile_for(HostCpu::native()).constant("tile", 64usize).compile().unwrap().document;
    assert_eq!((document.ir_hash.len(), &document.ir_hash), (64, &compiled.ir_hash));
    assert_eq!((&document.cpu, &compiled.cpu), (&Some(HostCpu::native()), &Some(HostCpu::native())));
    let other = Axpy::compile_for(GpuArch::Sm80).constant("tile", 32usize).assume("n % 16").compile().unwrap().document;
    assert!(other.ir_hash.len() == 64 && other.ir_hash != compiled.ir_hash && other.cpu.is_none());
    let level = HostCpu { cpu: "x86-64-v2".into(), features: String::new(), ..HostCpu::native() };
    let compiled = Axpy::compile_for(level.clone()).compile().unwrap().document;
    assert_eq!(compiled.cpu, Some(level));
}

#[test]
fn code_from_files_runs_as_the_struct_does() {
    let folder = tempfile::tempdir().unwrap();
    let compiled = Scale::<f32>::compile_for(HostCpu::native()).constant("tile", 64usize).constant("negate", true);
    let [code, manifest] = compiled.compile().unwrap().write(folder.path().join("new")).unwrap();
    let read = (std::fs::read_to_string(manifest).unwrap(), std::fs::read(code).unwrap());
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0]).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 3).unwrap();
    let mut args = [KernelArg::In(&x), KernelArg::Out(&mut y), KernelArg::scalar(2.0f32), KernelArg::scalar(3i32)];
    load(&read.0, &read.1).unwrap().launch(1, &mut args).unwrap();
    assert_eq!(y.to_vec().unwrap(), [-2.0, -4.0, -6.0]);
}

/// Code that may use instructions which this CPU does not have is not run.
#[test]
fn code_for_another_cpu_is_refused() {
    let compiled = Scale::<f32>::compile_for(HostCpu::native()).constant("tile", 64usize).constant("negate", true);
    let mut compiled = compiled.compile().unwrap();
    let cpu = compiled.document.cpu.as_mut().unwrap();
    (cpu.cpu, cpu.features) = ("znver9".into(), String::new());
    let message = load(&compiled.document.to_json(), compiled.bytes()).unwrap_err().to_string();
    assert!(message.contains("needs a CPU with") && message.contains("znver9"), "{message}");
}
