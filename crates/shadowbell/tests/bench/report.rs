//! HTML pages written by `--report`, examined in a headless browser.

use crate::harness::{line, output, stderr_of_failure};
use serde_json::Value;
use shadowbell_testing::programs::skipped;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Program names of headless browsers.
const BROWSERS: [&str; 3] = ["chromium-headless-shell", "chromium", "google-chrome"];

/// Path of a headless browser, if there is one.
fn browser() -> Option<PathBuf> {
    let found = find(&BROWSERS);
    if found.is_none() {
        skipped("no browser; Debian has one in chromium-headless-shell");
    }
    found
}

/// The first of these programs that is in `PATH`.
fn find(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let at = |name: &&str| {
        let files = std::env::split_paths(&path).map(|directory| directory.join(name));
        files.into_iter().find(|file| file.is_file())
    };
    names.iter().find_map(at)
}

/// Script that counts layout defects (text that is cut off, overlaps other text or has too
/// little contrast) and lists the diagrams of the page.
const INSPECT_SCRIPT: &str = r#"<script>
addEventListener('load', () => {
  document.querySelectorAll('details').forEach(details => { details.open = true; });
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 &&
    a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 &&
    a.top < b.bottom - 2 && b.top < a.bottom - 2;
  const figures = [...document.querySelectorAll('figure')].map(figure => {
    const svg = figure.querySelector('svg');
    const words = [...svg.querySelectorAll('text')];
    const boxes = words.map(word => word.getBoundingClientRect());
    const whole = svg.getBoundingClientRect();
    const cut = words.filter((_, n) => !inside(boxes[n], whole)).map(word => word.textContent.trim());
    const covered = [];
    boxes.forEach((a, n) => boxes.slice(n + 1).forEach((b, m) => {
      if (over(a, b)) {
        covered.push(words[n].textContent.trim() + ' / ' + words[n + 1 + m].textContent.trim());
      }
    }));
    return {
      title: figure.querySelector('figcaption b').textContent,
      texts: words.map(word => word.textContent.trim()),
      shapes: svg.querySelectorAll('polyline, polygon, rect, line').length,
      width: whole.width, height: whole.height, cut, covered,
    };
  });
  const pale = [...document.querySelectorAll('body *')].filter(element => {
    if (element.closest('svg') || !element.innerText) { return false; }
    const [r, g, b] = getComputedStyle(element).color.match(/\d+/g).map(Number);
    return r + g + b > 3 * 110;
  }).map(element => element.innerText);
  const found = {
    figures, pale, wide: document.documentElement.scrollWidth > innerWidth,
    title: document.title, cards: [...document.querySelectorAll('.card')].map(c => c.innerText),
    asked: performance.getEntriesByType('resource').map(entry => entry.name),
  };
  const out = document.createElement('pre');
  out.id = 'found';
  out.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
  document.body.append(out);
});
</script>
</body>"#;

/// Opens the page with [`INSPECT_SCRIPT`] added to it in a browser, and returns the findings.
fn inspect(page: &Path, browser: &Path) -> Value {
    let html = std::fs::read_to_string(page).unwrap();
    for word in ["src=", "href=", "url(", "@import", "<script"] {
        assert!(!html.contains(word), "the page loads something: {word}");
    }
    // The page's own policy forbids scripts, so the test removes it.
    let (policy, end) = ("<meta http-equiv=\"Content-Security-Policy\"", "'unsafe-inline'\">");
    let at = html.find(policy).unwrap();
    let after = at + html[at..].find(end).unwrap() + end.len();
    let copy = page.with_file_name("copy.html");
    let html = html[..at].to_owned() + &html[after..];
    std::fs::write(&copy, html.replace("</body>", INSPECT_SCRIPT)).unwrap();
    let picture = page.with_extension("png");
    let run = |page: &Path, what: &[&str]| {
        let mut command = Command::new(browser);
        // Chromium's sandbox does not work for root or in a container; the page is trusted.
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        command.args(["--disable-dev-shm-usage", "--window-size=1300,1500"]).args(what);
        command.arg(format!("--user-data-dir={}", page.with_file_name("profile").display()));
        let output = command.arg(format!("file://{}", page.display())).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let dom = run(&copy, &["--dump-dom"]);
    let (_, rest) = dom.split_once("<pre id=\"found\">").expect("the script did not run");
    let (text, _) = rest.split_once("</pre>").unwrap();
    run(page, &[&format!("--screenshot={}", picture.display())]);
    // A picture of a blank page is smaller than this.
    assert!(std::fs::metadata(&picture).unwrap().len() > 20_000, "an empty picture");
    serde_json::from_slice(&base64(text.trim())).unwrap()
}

/// Decodes base64.
fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{byte}"),
    };
    let digits: Vec<_> = text.bytes().filter(|byte| *byte != b'=').map(digit).collect();
    let mut bytes = Vec::new();
    for part in digits.chunks(4) {
        let word = part.iter().fold(0_u32, |word, digit| word << 6 | u32::from(*digit));
        let word = word << (6 * (4 - part.len()));
        bytes.extend_from_slice(&word.to_be_bytes()[1..part.len()]);
    }
    bytes
}

/// Checks that hold for every page; returns the titles of the diagrams.
fn check(found: &Value) -> Vec<&str> {
    assert_eq!((&found["wide"], &found["asked"]), (&Value::Bool(false), &Value::Array(Vec::new())));
    assert_eq!(found["pale"], Value::Array(Vec::new()), "pale text");
    let figures = found["figures"].as_array().unwrap();
    for figure in figures {
        let none = Value::Array(Vec::new());
        assert_eq!((&figure["cut"], &figure["covered"]), (&none, &none), "{figure}");
        assert!(figure["texts"].as_array().unwrap().len() >= 6, "no labels: {figure}");
        assert!(figure["width"].as_f64().unwrap() > 400.0, "{figure}");
        assert!(figure["shapes"].as_u64().unwrap() > 5, "nothing is drawn: {figure}");
        let text = figure["texts"].to_string();
        assert!(!text.contains("NaN") && !text.contains("inf"), "{figure}");
    }
    figures.iter().map(|figure| figure["title"].as_str().unwrap()).collect()
}

#[test]
fn a_bench_report_renders_in_a_browser() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("bench.html");
    let command = format!(
        "bench null:1GiB --numjobs 3 --iodepth 4 --runtime 600ms --report {}",
        page.display()
    );
    output(&mut line(&command));
    let html = std::fs::read_to_string(&page).unwrap();
    for words in ["null:1GiB", "iodepth 4, 3 jobs", "<td>3</td>", "Doorbells saved"] {
        assert!(html.contains(words), "{words}");
    }
    let Some(browser) = browser() else { return };
    let found = inspect(&page, &browser);
    let titles = check(&found);
    assert_eq!(found["title"], "shadowbell bench: randread of 4 KiB");
    assert_eq!(
        titles,
        [
            "I/Os per second",
            "Latency",
            "Latency of all measured I/Os",
            "Latency over time: the darker, the more I/Os",
            "Doorbells",
            "I/Os per second of each queue"
        ]
    );
    let cards = found["cards"].as_array().unwrap();
    assert_eq!(cards.len(), 6);
    assert!(cards.iter().all(|card| !card.as_str().unwrap().contains('-')), "{cards:?}");
}

#[test]
fn a_report_of_a_fixed_number_of_ios_renders() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("bench.html");
    output(&mut line(&format!("bench null:1GiB --number-ios 1 --report {}", page.display())));
    assert!(std::fs::read_to_string(&page).unwrap().contains("<td>1</td>"));
    if let Some(browser) = browser() {
        assert_eq!(inspect(&page, &browser)["figures"].as_array().unwrap().len(), 5);
    }
}

#[test]
fn the_demo_report_compares_with_published_figures() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("demo.html");
    output(&mut line(&format!("demo --runtime 100ms --report {}", page.display())));
    let Some(browser) = browser() else { return };
    let found = inspect(&page, &browser);
    let titles = check(&found);
    assert_eq!(
        titles[..4],
        [
            "I/Os per second",
            "MMIO writes per I/O",
            "Median latency",
            "CPU time of the driver per I/O"
        ]
    );
    // Twelve measurements with five diagrams each; those of four jobs have one more.
    assert_eq!(titles.len(), 4 + 12 * 5 + 2);
}

#[test]
fn an_unwritable_report_path_is_refused_before_the_run() {
    for verb in ["bench null:1GiB --runtime 100", "demo --runtime 60"] {
        let said = stderr_of_failure(&mut line(&format!("{verb} --report no/such/page.html")), 2);
        assert!(said.contains("cannot write the report to no/such/page.html"), "{said}");
        let said = stderr_of_failure(&mut line(&format!("{verb} --report -")), 2);
        assert!(said.contains("standard output has the results"), "{said}");
    }
}
