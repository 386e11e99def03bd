//! The examples that have the form `--bench` as one program, to carry to a GPU machine: `example_mains NAME [OPTION...]`.
//! `scripts/bench_examples.py` runs it beside Triton.

use tilewright_tests::examples::MAINS;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let named = arguments.first().and_then(|name| MAINS.iter().find(|(known, _)| known == name));
    let Some((_, main)) = named else {
        let names: Vec<&str> = MAINS.iter().map(|(name, _)| *name).collect();
        return Err(format!("expected one of {}, found {:?}", names.join(", "), arguments.first()).into());
    };
    main(&arguments[1..])
}
