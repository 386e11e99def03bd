//! Fuzzes the parser with arbitrary text: parsing and verification do not panic, and printing a parsed function
//! round-trips.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tilewright_codegen::{text, verify};

fuzz_target!(|input: &str| {
    let Ok(func) = text::parse(input) else { return };
    let printed = text::print(&func);
    let again = text::parse(&printed).expect("printed text parses");
    assert_eq!(text::print(&again), printed);
    let _ = verify::verify(&func, verify::stage_of(&func));
});
