//! Flame graphs: width is time, height is stack depth.

use std::collections::BTreeMap;

use super::{Profile, STEP};

/// Folded stacks with exclusive times in microseconds, the input format of flame-graph tools:
/// `forward;block;attention 123`.
pub fn folded(profile: &Profile<'_>) -> Vec<String> {
    let mut stacks: BTreeMap<String, u64> = BTreeMap::new();
    for item in &profile.items {
        let mut names: Vec<&str> = profile.trace.path(item.node).into_iter().filter(|name| *name != STEP).collect();
        if profile.on_gpu() && names.last() != Some(&item.name.as_str()) {
            names.push(&item.name);
        }
        // Skip the time between the phases of a step.
        if names.is_empty() {
            continue;
        }
        let stack = names.iter().map(|name| name.replace(';', ":")).collect::<Vec<_>>().join(";");
        *stacks.entry(stack).or_default() += item.ns / 1000;
    }
    stacks.into_iter().filter(|(_, us)| *us > 0).map(|(stack, us)| format!("{stack} {us}")).collect()
}

/// The flame graph as SVG, which can be zoomed in a browser. None if no stack took a microsecond.
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
