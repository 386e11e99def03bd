//! A flame graph: width is time, height is depth.

use std::collections::BTreeMap;

use super::{Profile, STEP};

/// Stacks with their own time in microseconds, as flame-graph tools read them: `forward;block;attention 123`.
pub fn folded(profile: &Profile<'_>) -> Vec<String> {
    let mut stacks: BTreeMap<String, u64> = BTreeMap::new();
    for item in &profile.items {
        let mut names: Vec<&str> = profile.trace.path(item.node).into_iter().filter(|name| *name != STEP).collect();
        if profile.on_gpu() && names.last() != Some(&item.name.as_str()) {
            names.push(&item.name);
        }
        // What the step does between its phases is no frame of its own.
        if names.is_empty() {
            continue;
        }
        let stack = names.iter().map(|name| name.replace(';', ":")).collect::<Vec<_>>().join(";");
        *stacks.entry(stack).or_default() += item.ns / 1000;
    }
    stacks.into_iter().filter(|(_, us)| *us > 0).map(|(stack, us)| format!("{stack} {us}")).collect()
}

/// The graph as SVG, which zooms where a browser shows it. None where nothing took a microsecond.
pub fn svg(profile: &Profile<'_>) -> Option<String> {
    let lines = folded(profile);
    let mut options = inferno::flamegraph::Options::default();
    options.title = if profile.on_gpu() { "Time on the GPU" } else { "Time of the host" }.to_string();
    options.count_name = "µs".to_string();
    options.deterministic = true;
    let mut svg = Vec::new();
    let drawn = inferno::flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg);
    drawn.ok().and_then(|()| String::from_utf8(svg).ok())
}
