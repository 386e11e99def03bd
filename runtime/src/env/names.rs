//! Names of the project's environment variables, and the warning about others that begin like them.

use std::ffi::OsString;

/// How the names of all variables of the project begin.
const PREFIX: &str = "TILEWRIGHT_";

/// How the names continue in which tests pass values to their own child processes. These are not listed.
const TEST: &str = "TEST_";

/// Every variable that a program, a test or a script of this project reads or sets, without its prefix. Their meanings
/// are in the tables of [`super`] and of the harness's module `dist::rank`.
const NAMES: [&str; 25] = [
    // Read by the runtime.
    "CACHE",
    "CACHE_MAX_SIZE",
    "DEVICE",
    "DUMP",
    "PTXAS",
    "REPRO",
    "TUNE",
    // Read by programs of the harness.
    "COMM",
    "COMM_TIMEOUT",
    "JOB",
    "LIFELINE",
    "LOG",
    "SECRET",
    "SECRET_FILE",
    "START_TIMEOUT",
    "UNAUTHENTICATED",
    // Read by tests and scripts.
    "BROWSER",
    "KEEP_PTX",
    "MUTANTS",
    "MUTANTS_OF",
    "REQUIRE_BROWSER",
    "REQUIRE_PTXAS",
    // Read by a build script.
    "LLVM_LINK",
    // Set by build scripts; `cargo run` and `cargo test` pass them on.
    "HARNESS_HASH",
    "SOURCE_HASH",
];

/// Whether this is a variable of the project.
pub fn is_known(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return false };
    rest.starts_with(TEST) || NAMES.contains(&rest)
}

/// The names of all variables of the project, except those that begin with `TILEWRIGHT_TEST_`.
pub fn all() -> impl Iterator<Item = String> {
    NAMES.iter().map(|name| format!("{PREFIX}{name}"))
}

/// A warning that names the variables that nothing reads, if there are any, and for each the known name that is most
/// similar to it. Takes all variables of a process.
pub(super) fn warning(variables: impl Iterator<Item = (OsString, OsString)>) -> Option<String> {
    let set = variables.filter(|(_, value)| !value.is_empty()).map(|(name, _)| name.to_string_lossy().into_owned());
    let mut unknown: Vec<String> = set.filter(|name| name.starts_with(PREFIX) && !is_known(name)).collect();
    unknown.sort();
    let nearest = |name: &str| {
        let rest = name[PREFIX.len()..].to_uppercase();
        let score = |known: &&str| strsim::normalized_damerau_levenshtein(&rest, known);
        NAMES.into_iter().max_by(|a, b| score(a).total_cmp(&score(b))).unwrap_or_default()
    };
    let parts: Vec<String> = unknown
        .iter()
        .map(|name| format!("`{}` (the nearest known name is `{PREFIX}{}`)", name.escape_debug(), nearest(name)))
        .collect();
    (!parts.is_empty()).then(|| format!("nothing reads these environment variables: {}", parts.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warning(names: &[&str]) -> Option<String> {
        super::warning(names.iter().map(|name| (format!("{PREFIX}{name}").into(), "1".into())))
    }

    #[test]
    fn the_nearest_name_is_suggested() {
        for (typo, meant) in [
            ("DEVCE", "DEVICE"),
            ("DEVICES", "DEVICE"),
            ("device", "DEVICE"),
            ("CACHE_SIZE", "CACHE_MAX_SIZE"),
            ("TIMEOUT", "COMM_TIMEOUT"),
            ("UNAUTHENTICTED", "UNAUTHENTICATED"),
        ] {
            let message = warning(&[typo]);
            let expected = format!("`{PREFIX}{typo}` (the nearest known name is `{PREFIX}{meant}`)");
            assert!(message.as_ref().is_some_and(|message| message.contains(&expected)), "{typo}: {message:?}");
        }
    }

    #[test]
    fn one_warning_names_all_unknown_variables() {
        let message = warning(&["TUEN", "TUNE", "CACH\n"]).unwrap();
        assert_eq!(
            message,
            format!(
                "nothing reads these environment variables: \
                 `{PREFIX}CACH\\n` (the nearest known name is `{PREFIX}CACHE`), \
                 `{PREFIX}TUEN` (the nearest known name is `{PREFIX}TUNE`)"
            )
        );
    }

    #[test]
    fn known_empty_and_foreign_variables_are_silent() {
        assert_eq!(warning(&NAMES), None);
        assert_eq!(warning(&["TEST_ANYTHING"]), None);
        let foreign = [("MY_TILEWRIGHT_DEVICE", "1"), ("TILEWRIGHTED", "1"), ("PATH", "/bin")];
        let empty = (format!("{PREFIX}DEVCE"), String::new());
        let rest = foreign.map(|(name, value)| (name.to_string(), value.to_string())).into_iter().chain([empty]);
        assert_eq!(super::warning(rest.map(|(name, value)| (name.into(), value.into()))), None);
    }
}
