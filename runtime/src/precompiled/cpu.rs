//! Whether this CPU runs native code that was compiled for another one.

use tilewright_codegen::target::HostCpu;

/// An extension by LLVM's name, and whether this CPU has it.
#[cfg(target_arch = "x86_64")]
type Extension = (&'static str, fn() -> bool);

/// Extensions of x86-64 that code may use.
#[cfg(target_arch = "x86_64")]
const EXTENSIONS: &[Extension] = &[
    ("sse3", || is_x86_feature_detected!("sse3")),
    ("ssse3", || is_x86_feature_detected!("ssse3")),
    ("sse4.1", || is_x86_feature_detected!("sse4.1")),
    ("sse4.2", || is_x86_feature_detected!("sse4.2")),
    ("popcnt", || is_x86_feature_detected!("popcnt")),
    ("avx", || is_x86_feature_detected!("avx")),
    ("avx2", || is_x86_feature_detected!("avx2")),
    ("fma", || is_x86_feature_detected!("fma")),
    ("f16c", || is_x86_feature_detected!("f16c")),
    ("bmi", || is_x86_feature_detected!("bmi1")),
    ("bmi2", || is_x86_feature_detected!("bmi2")),
    ("lzcnt", || is_x86_feature_detected!("lzcnt")),
    ("movbe", || is_x86_feature_detected!("movbe")),
    ("adx", || is_x86_feature_detected!("adx")),
    ("aes", || is_x86_feature_detected!("aes")),
    ("pclmul", || is_x86_feature_detected!("pclmulqdq")),
    ("sha", || is_x86_feature_detected!("sha")),
    ("gfni", || is_x86_feature_detected!("gfni")),
    ("vaes", || is_x86_feature_detected!("vaes")),
    ("vpclmulqdq", || is_x86_feature_detected!("vpclmulqdq")),
    ("avxvnni", || is_x86_feature_detected!("avxvnni")),
    ("avxifma", || is_x86_feature_detected!("avxifma")),
    ("avxvnniint8", || is_x86_feature_detected!("avxvnniint8")),
    ("avxneconvert", || is_x86_feature_detected!("avxneconvert")),
    ("avx512f", || is_x86_feature_detected!("avx512f")),
    ("avx512cd", || is_x86_feature_detected!("avx512cd")),
    ("avx512dq", || is_x86_feature_detected!("avx512dq")),
    ("avx512bw", || is_x86_feature_detected!("avx512bw")),
    ("avx512vl", || is_x86_feature_detected!("avx512vl")),
    ("avx512ifma", || is_x86_feature_detected!("avx512ifma")),
    ("avx512vbmi", || is_x86_feature_detected!("avx512vbmi")),
    ("avx512vbmi2", || is_x86_feature_detected!("avx512vbmi2")),
    ("avx512vnni", || is_x86_feature_detected!("avx512vnni")),
    ("avx512bitalg", || is_x86_feature_detected!("avx512bitalg")),
    ("avx512vpopcntdq", || is_x86_feature_detected!("avx512vpopcntdq")),
    ("avx512bf16", || is_x86_feature_detected!("avx512bf16")),
    ("avx512fp16", || is_x86_feature_detected!("avx512fp16")),
];

/// The extensions of each level of x86-64.
#[cfg(target_arch = "x86_64")]
const LEVELS: &[(&str, &[&str])] = &[
    ("", &[]),
    ("generic", &[]),
    ("x86-64", &[]),
    ("x86-64-v2", &["sse3", "ssse3", "sse4.1", "sse4.2", "popcnt"]),
    ("x86-64-v3", &["avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"]),
    ("x86-64-v4", &["avx2", "fma", "f16c", "bmi2", "lzcnt", "avx512f", "avx512cd", "avx512dq", "avx512bw", "avx512vl"]),
];

/// The first extension that code for `cpu` may use and that this CPU does not have; `None` if it has all.
#[cfg(target_arch = "x86_64")]
pub(super) fn missing(cpu: &HostCpu) -> Option<String> {
    let level = LEVELS.iter().find(|(name, _)| *name == cpu.cpu).map(|(_, extensions)| *extensions);
    if !cpu.triple.starts_with("x86_64") || (level.is_none() && cpu.features.is_empty()) {
        return Some(format!("the instructions of `{} {}`", cpu.triple, cpu.cpu));
    }
    let features = cpu.features.split(',').filter_map(|feature| feature.trim().strip_prefix('+'));
    let mut needed = level.unwrap_or_default().iter().copied().chain(features);
    let has = |name: &str| EXTENSIONS.iter().find(|(known, _)| *known == name).is_none_or(|(_, has)| has());
    needed.find(|name| !has(name)).map(str::to_string)
}

/// On other architectures, code of the same architecture is taken to run.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn missing(cpu: &HostCpu) -> Option<String> {
    let here = std::env::consts::ARCH;
    (!cpu.triple.starts_with(here)).then(|| format!("the instructions of `{}`", cpu.triple))
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    fn cpu(name: &str, features: &str) -> HostCpu {
        HostCpu { triple: "x86_64-unknown-linux-gnu".into(), cpu: name.into(), features: features.into() }
    }

    #[test]
    fn this_cpu_runs_its_own_code_and_that_of_every_x86_64() {
        assert_eq!(missing(&HostCpu::native()), None);
        assert_eq!(missing(&cpu("x86-64", "")), None);
    }

    #[test]
    fn missing_instructions_are_named() {
        assert!(missing(&cpu("znver9", "")).unwrap().contains("znver9"));
        assert!(missing(&HostCpu { triple: "aarch64-unknown-linux-gnu".into(), ..cpu("generic", "") }).is_some());
        for (name, has) in EXTENSIONS {
            let expected = (!has()).then(|| name.to_string());
            assert_eq!(missing(&cpu("other", &format!("+{name}"))), expected, "{name}");
        }
    }
}
