//! The errors of the macros and of the types: each file in `ui/` has its expected messages next to it.

#[test]
fn messages() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
