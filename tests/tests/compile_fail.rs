//! What the macros and the types reject, and how they say so: each file in `ui/` beside the expected messages.

#[test]
fn messages() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
