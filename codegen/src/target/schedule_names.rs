//! Former names of schedule options. The crate of the macros, which does not depend on this one, compiles this file too:
//! it has a symbolic link to it, which `cargo package` follows.

/// Former and present names.
pub const FORMER_NAMES: [(&str, &str); 2] = [("bulk_copies", "tma"), ("take_turns", "pingpong")];

/// The present name of an option, given a former one; other names are returned unchanged.
pub fn current_name(name: &str) -> &str {
    FORMER_NAMES.iter().find(|(former, _)| *former == name).map_or(name, |(_, present)| present)
}
