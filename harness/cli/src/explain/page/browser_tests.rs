//! The page in a real browser: Chromium, narrow and wide, light and dark. Skipped without one, unless
//! `TILEWRIGHT_REQUIRE_BROWSER` is set; `TILEWRIGHT_BROWSER` names another program.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::tests::{elements, explained};

/// Chromium, as distributions call it.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn browser() -> Option<String> {
    let runs = |name: &String| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    if let Ok(named) = std::env::var("TILEWRIGHT_BROWSER") {
        assert!(runs(&named), "TILEWRIGHT_BROWSER={named} does not run");
        return Some(named);
    }
    let found = NAMES.map(String::from).into_iter().find(runs);
    let is_required = std::env::var("TILEWRIGHT_REQUIRE_BROWSER").is_ok_and(|value| value == "1");
    assert!(found.is_some() || !is_required, "no Chromium: `make browser` installs it, or set TILEWRIGHT_BROWSER");
    if found.is_none() {
        println!("skipped: no Chromium (`make browser` installs it)");
    }
    found
}

/// The output of a command, which must end within two minutes.
fn output_of(command: &mut Command, folder: &Path) -> String {
    let path = folder.join("output");
    let file = std::fs::File::create(&path).unwrap();
    let mut child = command.stdout(file).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if started.elapsed() > Duration::from_secs(120) => {
                child.kill().unwrap();
                panic!("the browser does not end");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{status}");
    std::fs::read_to_string(path).unwrap()
}

/// What the script of these tests found on a page in a window of this width.
fn use_page(browser: &str, folder: &Path, page: &str, width: u32, dark: bool) -> Value {
    let errors =
        "<script>window.pageErrors = []; addEventListener('error', (e) => window.pageErrors.push(e.message));</script>";
    let (head, rest) = page.split_once("<head>").expect("a head");
    let (rest, end) = rest.rsplit_once("</body>").expect("an end of the body");
    let script = include_str!("browser_tests.js");
    let path = folder.join("used.html");
    std::fs::write(&path, format!("{head}<head>{errors}{rest}<script>{script}</script></body>{end}")).unwrap();
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .arg(format!("--window-size={width},900"))
        // 0 is dark, 1 is light (blink's `PreferredColorScheme`).
        .arg(format!("--blink-settings=preferredColorScheme={}", u32::from(!dark)))
        .arg(format!("file://{}", path.display()));
    let shown = elements(&output_of(&mut command, folder));
    let results = shown.iter().find(|element| element.get("id") == Some("results")).expect("the results of the script");
    serde_json::from_str(&results.text).unwrap()
}

#[test]
fn the_page_works_in_a_browser() {
    let Some(browser) = browser() else { return };
    let dir = crate::files::temporary_folder().unwrap();
    let page = explained(&["flash_attention_fwd", "--set", "d=64,causal=true"]);
    let mut backgrounds = Vec::new();
    for (width, dark) in [(1400, false), (1400, true), (420, false), (420, true)] {
        let found = use_page(&browser, dir.path(), &page, width, dark);
        let number = |name: &str| found[name].as_u64().unwrap_or_else(|| panic!("{name}: {found:#}"));
        let at = format!("{width} pixels, dark: {dark}: {found:#}");
        assert_eq!(found["errors"], serde_json::json!([]), "{at}");
        assert!(number("width") <= number("viewport"), "the page scrolls sideways: {at}");
        let last = number("passes") - 1;
        assert!(last > 20 && number("last") == last && number("backToLast") == last, "{at}");
        assert!(found["lines"].as_array().unwrap().iter().all(|lines| lines.as_u64() > Some(100)), "{at}");
        assert_eq!(number("hidden"), 0, "{at}");
        assert_eq!(found["afterPrevious"], serde_json::json!([last - 2, last - 1]), "{at}");
        assert_eq!(found["nextIsDisabled"], true, "{at}");
        assert_eq!(found["samePass"], "No op differs", "{at}");
        assert!(found["onlyChanges"].as_str().unwrap().starts_with("Ops: "), "{at}");
        assert!(found["pointed"].as_array().unwrap().iter().all(|lines| lines.as_u64() > Some(0)), "{at}");
        assert!(number("pinned") > 0 && found["isVisible"] == true && number("unpinned") == 0, "{at}");
        assert_eq!(number("current"), 1, "{at}");
        for (text, contrast) in found["contrast"].as_object().unwrap() {
            assert!(contrast.as_f64().is_some_and(|ratio| ratio >= 4.5), "{text}: {at}");
        }
        let pictures = found["pictures"].as_array().unwrap();
        assert!(
            pictures.len() == 2 && pictures[0].as_str().unwrap().ends_with("cycles each, for 4 groups of warps"),
            "{at}"
        );
        backgrounds.push(found["background"].clone());
    }
    assert!(backgrounds[0] == backgrounds[2] && backgrounds[1] == backgrounds[3] && backgrounds[0] != backgrounds[1]);
}
