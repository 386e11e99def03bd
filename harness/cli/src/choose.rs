//! Resolves names on the command line to a kernel, its element types and its constants.

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, ParamKind};
use tilewright_codegen::target::Target;
use tilewright_runtime::autotune::{self, Autotune, Config, Source};
use tilewright_runtime::{Error, terminal};

use crate::{CliError, Result};

/// The name of the argument or constant with the number of programs of a persistent kernel.
pub const PROGRAMS: &str = "programs";

/// Returns `introduction` and all names, after `did you mean …` if one of the names is similar to `wrong`.
pub fn suggest(wrong: &str, names: &[&str], introduction: &str) -> String {
    let score = |name: &str| {
        // Every name contains an empty one.
        let contained = !wrong.is_empty() && (name.contains(wrong) || wrong.contains(name));
        let contained = if contained { 0.8 } else { 0.0 };
        strsim::jaro_winkler(wrong, name).max(contained)
    };
    let best = names.iter().max_by(|a, b| score(a).total_cmp(&score(b)));
    let all = if names.is_empty() { "none".to_string() } else { names.join(", ") };
    match best {
        Some(best) if score(best) > 0.75 => format!("did you mean `{best}`? {introduction} {all}"),
        Some(_) | None => format!("{introduction} {all}"),
    }
}

/// Parses `name=value` items, separated by commas, as of `--set`. `option` names the option in errors.
///
/// # Errors
/// An item of another form, or a name that is given twice.
pub fn assignments<'a>(words: &'a [String], option: &str) -> Result<Vec<(&'a str, &'a str)>> {
    let mut assignments: Vec<(&str, &str)> = Vec::new();
    for (name, value) in comma_separated(words).map(|part| assignment(part, option)).collect::<Result<Vec<_>>>()? {
        if assignments.iter().any(|(other, _)| *other == name) {
            return Err(named_twice(option, name));
        }
        assignments.push((name, value));
    }
    Ok(assignments)
}

/// Splits arguments at commas.
pub fn comma_separated(words: &[String]) -> impl Iterator<Item = &str> {
    words.iter().flat_map(|word| word.split(',')).map(str::trim)
}

/// Returns the error for an option that has the same name twice.
pub fn named_twice(option: &str, name: &str) -> CliError {
    CliError::usage(format!("{option} names `{name}` twice"), "give each name once")
}

/// Parses one `name=value`. `option` names the option in errors.
///
/// # Errors
/// Text of another form.
pub fn assignment<'a>(text: &'a str, option: &str) -> Result<(&'a str, &'a str)> {
    match text.split_once('=') {
        Some((name, value)) if !name.trim().is_empty() && !value.trim().is_empty() => Ok((name.trim(), value.trim())),
        Some(_) | None => Err(CliError::usage(format!("{option} got `{text}`"), format!("write {option} name=value"))),
    }
}

/// Parses the constants that `--set` gives, and checks their values against the types of the parameters.
///
/// # Errors
/// A name that is not a constexpr parameter of the kernel, a name that is given twice, or a value outside of its type.
pub fn constants(def: &'static KernelDef, words: &[String]) -> Result<Vec<(&'static str, ConstValue)>> {
    let known: Vec<(&'static str, &'static str)> = def
        .params
        .iter()
        .filter_map(|p| match p.kind {
            ParamKind::Constexpr { ty, .. } => Some((p.name, ty)),
            ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) | ParamKind::Scalar(_) => None,
        })
        .collect();
    let mut constants: Vec<(&'static str, ConstValue)> = Vec::new();
    for (name, value) in assignments(words, "--set")? {
        let name = def.param_name(name);
        let Some(&(name, ty)) = known.iter().find(|(n, _)| *n == name) else {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let help = match def.params.iter().any(|p| p.name == name) {
                true => format!("`{name}` is passed at each launch; the constants are {}", names.join(", ")),
                false => suggest(name, &names, "the constants are"),
            };
            let message = format!("--set {name} is unused: kernel `{}` has no constant `{name}`", def.name);
            return Err(CliError::usage(message, help));
        };
        let parsed = ConstValue::from_text(value);
        let wrong = match fits(&parsed, ty) {
            false => Some(format!("its type is {}", ty.trim_end())),
            true => not_finite(value, &parsed, ty),
        };
        if let Some(help) = wrong {
            let message = format!("kernel `{}`: the constant `{name}` cannot be {value}", def.name);
            return Err(CliError::usage(message, help));
        }
        if constants.iter().any(|(other, _)| *other == name) {
            return Err(named_twice("--set", name));
        }
        constants.push((name, parsed));
    }
    Ok(constants)
}

/// The value of a constant among those that are given.
pub fn given(constants: &[(&str, ConstValue)], name: &str) -> Option<ConstValue> {
    constants.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
}

/// Whether a value can have this type. Names of enum variants are checked by the kernel, which defines its enums.
fn fits(value: &ConstValue, ty: &str) -> bool {
    match (ty, value) {
        ("usize" | "u64", ConstValue::Int(n)) => *n >= 0,
        ("u32", ConstValue::Int(n)) => u32::try_from(*n).is_ok(),
        ("i32", ConstValue::Int(n)) => i32::try_from(*n).is_ok(),
        ("i64", ConstValue::Int(_)) => true,
        ("f32" | "f64", ConstValue::Float(_) | ConstValue::Int(_)) => true,
        ("bool", ConstValue::Bool(_) | ConstValue::Int(0 | 1)) => true,
        ("usize" | "u32" | "u64" | "i32" | "i64" | "f32" | "f64" | "bool", _) => false,
        (_, value) => matches!(value, ConstValue::Variant(_)),
    }
}

/// Why a constant of type f32 or f64 is not a finite number, if it is not.
fn not_finite(text: &str, value: &ConstValue, ty: &str) -> Option<String> {
    match (ty, value) {
        ("f32" | "f64", ConstValue::Float(x)) if names_no_number(text) => {
            Some(format!("a constant of type {ty} is a finite number: a manifest cannot hold {x}"))
        }
        ("f32", ConstValue::Float(x)) if !(*x as f32).is_finite() => Some(beyond_largest(text, ty)),
        ("f64", ConstValue::Float(x)) if !x.is_finite() => Some(beyond_largest(text, ty)),
        _ => None,
    }
}

/// Whether the text of a float is that of infinity or NaN.
pub fn names_no_number(text: &str) -> bool {
    !text.contains(|c: char| c.is_ascii_digit())
}

/// That a finite number is infinite in type `ty`, for messages.
pub fn beyond_largest(text: &str, ty: impl std::fmt::Display) -> String {
    match text.strip_prefix('-') {
        Some(_) => format!("{text} is less than the least finite {ty}"),
        None => format!("{text} is larger than the largest {ty}"),
    }
}

/// Returns the constants that have neither a default nor a given value.
pub fn missing_constants(def: &KernelDef, given: &[(&str, ConstValue)]) -> Vec<&'static str> {
    let is_missing = |p: &&tilewright_codegen::lang::kernel::ParamDef| {
        matches!(p.kind, ParamKind::Constexpr { default: None, .. }) && !given.iter().any(|(name, _)| *name == p.name)
    };
    def.params.iter().filter(is_missing).map(|p| p.name).collect()
}

/// Whether a configuration gives a constant that has no value.
pub fn needs_configuration(autotune: &Autotune, given: &[(&str, ConstValue)]) -> bool {
    missing_constants(autotune.def, given).iter().any(|name| autotune.tuned.contains(name))
}

/// A configuration without the constants that are given.
pub fn without(config: &Config, given: &[(&str, ConstValue)]) -> Config {
    let mut config = config.clone();
    config.constants.retain(|(name, _)| !given.iter().any(|(known, _)| known == name));
    config
}

/// As [`Autotune::configuration_for`], with errors that say what to write on the command line.
///
/// # Errors
/// As [`Autotune::configuration_for`].
pub fn configuration_for(
    autotune: &Autotune,
    target: &Target,
    dtypes: &[DType],
    constant: &dyn Fn(&str) -> Option<ConstValue>,
    size: &dyn Fn(&str) -> Option<i64>,
) -> Result<(Config, Source)> {
    let found = autotune.configuration_for(target, dtypes, constant, size).map_err(|error| match error {
        Error::NoConstant { kernel, name } => CliError::usage(
            format!("kernel `{kernel}` needs a value for {name}, on which its configurations depend"),
            format!("--set {name}=…"),
        ),
        error => error.into(),
    })?;
    expect_table(Some(found.1))?;
    Ok(found)
}

/// Checks that a configuration is of the table of `--table`, if that is given. Without a `source`, there is no need of a
/// configuration.
///
/// # Errors
/// The table is given in vain.
pub fn expect_table(source: Option<Source>) -> Result<()> {
    match source {
        _ if !autotune::has_table() => Ok(()),
        Some(Source::Given) => Ok(()),
        Some(_) => Err(CliError::usage(
            "--table is unused: it has no entry for these types, constants and sizes",
            "give the sizes of an entry with --size, add one with `tune --export`, or omit it",
        )),
        None => Err(CliError::usage("--table is unused: all constants are given", "omit it, or some constants")),
    }
}

/// The origin of a configuration in words.
pub fn origin(source: Source) -> &'static str {
    match source {
        Source::Given => "the table of --table",
        Source::Embedded => "the embedded code",
        Source::Measured => "the configuration that was measured here",
        Source::Shipped => "the configuration that ships",
        Source::Nearest => "the configuration for the nearest sizes",
        Source::Default => "the default configuration",
    }
}

/// Says on standard error which constants and options a configuration gives, and its origin in words.
pub fn note_configuration(origin: &str, used: &Config) {
    terminal::print_stderr(format_args!(
        "note: constants and options that are not given are those of {origin}: {used}"
    ));
}

/// Checks that every constant without a default has a value.
///
/// # Errors
/// A constant has no value; the message names those that do not follow from another one of them.
pub fn check_complete(def: &KernelDef, given: &[(&str, ConstValue)]) -> Result<()> {
    let missing = missing_constants(def, given);
    if missing.is_empty() {
        return Ok(());
    }
    let unknown = |name: &str| heuristic_needs(def, given, name);
    let asked: Vec<&str> = missing
        .iter()
        .copied()
        .filter(|name| unknown(name).is_none_or(|needed| needed == *name || !missing.contains(&needed)))
        .collect();
    let example: Vec<String> = asked.iter().map(|name| format!("{name}=…")).collect();
    let follows = asked.iter().filter_map(|name| Some(format!("; `{name}` follows from `{}`", unknown(name)?)));
    Err(CliError::usage(
        format!("kernel `{}` needs a value for {}", def.name, asked.join(", ")),
        format!("--set {}{}", example.join(","), follows.collect::<String>()),
    ))
}

/// The name of the value that the `#[heuristic(…)]` of a constant needs and that is not known; `None` without a
/// heuristic.
pub fn heuristic_needs(def: &KernelDef, given: &[(&str, ConstValue)], name: &str) -> Option<&'static str> {
    let heuristic = def.params.iter().find(|p| p.name == name)?.heuristic?;
    let known = |name: &'static str| self::given(given, name).or_else(|| def.default_of(name));
    heuristic(&known).err()
}

/// Parses the element types of the kernel's type parameters: `bf16` for all, or `T=bf16,U=f32`.
///
/// # Errors
/// An unknown element type, a type outside of the parameter's bound, or a parameter without a type.
pub fn dtypes(def: &KernelDef, words: &[String]) -> Result<Vec<DType>> {
    complete_dtypes(def, partial_dtypes(def, words)?)
}

/// Checks that `--dtype` has one type for each name, and at most one without a name.
///
/// # Errors
/// Two types of one type parameter, or two types for all parameters.
pub fn check_types(words: &[String]) -> Result<()> {
    let mut names: Vec<Option<&str>> = Vec::new();
    for word in comma_separated(words) {
        let name = word.split_once('=').map(|(name, _)| name.trim());
        match (name, names.contains(&name)) {
            (Some(name), true) => return Err(named_twice("--dtype", name)),
            (None, true) => {
                let given: Vec<&str> = comma_separated(words).filter(|word| !word.contains('=')).collect();
                return Err(CliError::usage(
                    format!("--dtype gives {} types for all type parameters: {}", given.len(), given.join(", ")),
                    "give one type for all, as in `bf16`, or one for each type parameter, as in `T=bf16,U=f32`",
                ));
            }
            (_, false) => names.push(name),
        }
    }
    Ok(())
}

/// As [`dtypes`], but parameters may have no type yet.
///
/// # Errors
/// An unknown element type, or a type outside of the parameter's bound.
pub fn partial_dtypes(def: &KernelDef, words: &[String]) -> Result<Vec<Option<DType>>> {
    check_types(words)?;
    let mut chosen: Vec<Option<DType>> = vec![None; def.generics.len()];
    // A type without a name is that of the parameters that are not named.
    let (named, unnamed): (Vec<&str>, Vec<&str>) = comma_separated(words).partition(|word| word.contains('='));
    for word in named.into_iter().chain(unnamed) {
        let (targets, name) = match word.split_once('=') {
            None => ((0..def.generics.len()).filter(|&n| chosen[n].is_none()).collect::<Vec<_>>(), word),
            Some((parameter, name)) => match def.generics.iter().position(|g| g.name == parameter.trim()) {
                Some(index) => (vec![index], name.trim()),
                None => {
                    let names: Vec<&str> = def.generics.iter().map(|g| g.name).collect();
                    let help = suggest(parameter, &names, "the type parameters are");
                    return Err(CliError::usage(
                        format!("kernel `{}` has no type parameter `{parameter}`", def.name),
                        help,
                    ));
                }
            },
        };
        if def.generics.is_empty() {
            return Err(CliError::usage(
                format!("--dtype {name} is unused: kernel `{}` has no type parameter", def.name),
                "omit --dtype: the kernel's signature fixes all element types",
            ));
        }
        let dtype = DType::from_name(name).ok_or_else(|| {
            // A type without a name is that of all of these parameters.
            let is_member = |dtype: &&DType| targets.iter().all(|&n| def.generics[n].members().contains(*dtype));
            let names: Vec<&str> = DType::ALL.iter().filter(is_member).map(|d| d.name()).collect();
            let message = format!("`{name}` is not an element type");
            CliError::usage(message, suggest(name, &names, &format!("the element types of `{}` are", def.name)))
        })?;
        if targets.is_empty() {
            let message = format!("--dtype {name} is unused: every type parameter of `{}` is named", def.name);
            return Err(CliError::usage(message, "omit it"));
        }
        for target in targets {
            check_member(def, target, dtype)?;
            chosen[target] = Some(dtype);
        }
    }
    Ok(chosen)
}

/// Checks that every type parameter has an element type.
///
/// # Errors
/// A parameter without a type.
pub fn complete_dtypes(def: &KernelDef, chosen: Vec<Option<DType>>) -> Result<Vec<DType>> {
    def.generics
        .iter()
        .zip(chosen)
        .map(|(generic, dtype)| {
            let members = || generic.members().iter().map(|d| d.name()).collect::<Vec<_>>().join(", ");
            // Without a name, the type would be that of the other type parameters too.
            let option = match def.generics {
                [_] => "--dtype TYPE".to_string(),
                _ => format!("--dtype {}=TYPE", generic.name),
            };
            dtype.ok_or_else(|| {
                CliError::usage(
                    format!("kernel `{}` needs an element type for `{}`", def.name, generic.name),
                    format!("{option}, one of {}", members()),
                )
            })
        })
        .collect()
}

/// Checks that a type parameter can be `dtype`.
///
/// # Errors
/// The type is outside of the parameter's bound.
pub fn check_member(def: &KernelDef, parameter: usize, dtype: DType) -> Result<()> {
    let generic = &def.generics[parameter];
    if generic.members().contains(&dtype) {
        return Ok(());
    }
    let members: Vec<&str> = generic.members().iter().map(|d| d.name()).collect();
    Err(CliError::usage(
        format!("kernel `{}`: `{}` cannot be {dtype}", def.name, generic.name),
        format!("expected one of {}", members.join(", ")),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_similar_names_only() {
        let names = ["softmax", "matmul", "weighted_sum_fwd"];
        assert!(suggest("softmaks", &names, "there are").contains("did you mean `softmax`?"));
        assert!(suggest("weighted_sum", &names, "there are").contains("did you mean `weighted_sum_fwd`?"));
        for unlike in ["zzz", ""] {
            assert_eq!(suggest(unlike, &names, "there are"), "there are softmax, matmul, weighted_sum_fwd");
        }
        assert_eq!(suggest("zzz", &[], "there are"), "there are none");
    }

    #[test]
    fn pairs_are_split_at_commas_and_checked() {
        let words = ["a=1,b=2".to_string(), "c=x".to_string()];
        assert_eq!(assignments(&words, "--set").unwrap(), [("a", "1"), ("b", "2"), ("c", "x")]);
        for bad in ["a", "a=", "=1"] {
            assert!(matches!(assignments(&[bad.to_string()], "--set"), Err(CliError::Usage(_))), "{bad}");
        }
    }

    #[test]
    fn each_type_parameter_has_one_type() {
        let kernels = crate::kernels::shipped();
        let types = |kernel: &str, words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            partial_dtypes(kernels.find(kernel).unwrap(), &words).map_err(|error| error.to_string())
        };
        for (words, part) in [
            (&["bf16,f32"][..], "gives 2 types for all type parameters: bf16, f32"),
            (&["bf16", "bf16"], "gives 2 types"),
            (&["T=bf16", "T=f16"], "--dtype names `T` twice"),
            (&["T=bf16,f16"], "--dtype f16 is unused: every type parameter of `softmax_rows` is named"),
        ] {
            let message = types("softmax_rows", words).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
        let expected = Ok(vec![Some(DType::F32), Some(DType::I64)]);
        assert_eq!(types("cross_entropy_fwd", &["T=f32,I=i64"]), expected);
        assert_eq!(types("cross_entropy_fwd", &["I=i64,f32"]), expected);
        assert_eq!(types("cross_entropy_fwd", &["f32", "I=i64"]), expected);
    }

    #[test]
    fn constants_are_finite() {
        let of = |text: &str, ty| not_finite(text, &ConstValue::from_text(text), ty);
        for (text, ty) in [("1.5", "f32"), ("3.4e38", "f32"), ("-1e300", "f64"), ("7", "f32"), ("16", "usize")] {
            assert_eq!(of(text, ty), None, "{text}");
        }
        assert_eq!(of("1e400", "f64").unwrap(), "1e400 is larger than the largest f64");
        assert_eq!(of("-1e50", "f32").unwrap(), "-1e50 is less than the least finite f32");
        for text in ["inf", "-inf", "NaN", "infinity"] {
            assert!(of(text, "f64").unwrap().contains("a manifest cannot hold"), "{text}");
        }
    }

    #[test]
    fn former_names_are_found() {
        let kernels = crate::kernels::shipped();
        for (former, present) in [
            ("adamw_by", "adamw_controlled"),
            ("adamw_of_two", "adamw_two_peers"),
            ("adamw_with_copy", "adamw_with_compute_weights"),
            ("flash_attention_fwd_join", "flash_attention_fwd_combine"),
        ] {
            assert_eq!(kernels.find(former).unwrap().name, present);
        }
        let def = kernels.find("flash_attention_fwd").unwrap();
        let set = |text: &str| constants(def, &[text.to_string()]);
        assert_eq!(set("part_rows=512").unwrap(), set("split_rows=512").unwrap());
        assert!(matches!(set("part_rows=512,split_rows=512"), Err(CliError::Usage(..))));
    }

    #[test]
    fn values_are_checked_against_types() {
        let value = ConstValue::from_text;
        assert!(fits(&value("64"), "usize") && !fits(&value("-1"), "usize") && !fits(&value("64"), "tf32 | ieee"));
        assert!(fits(&value("true"), "bool") && fits(&value("1"), "bool") && !fits(&value("2"), "bool"));
        assert!(fits(&value("1"), "f32") && fits(&value("0.5"), "f64") && !fits(&value("x"), "f32"));
        assert!(fits(&value("tf32"), "ieee | tf32"));
    }
}
