//! Output of a report to its file.

use super::html::escape;
use anyhow::Context;
use std::path::Path;
use std::time::SystemTime;

const STYLE: &str = include_str!("style.css");

/// Description of this machine: CPUs and kernel.
fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("processors", |(_, model)| model.trim());
    let kernel = rustix::system::uname();
    format!("{cpus} × {model}, Linux {}", kernel.release().to_string_lossy())
}

/// Writes a report to `path`. `lead` is a sentence below the title, `body` is HTML.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(path: &Path, title: &str, lead: &str, body: &str) -> anyhow::Result<()> {
    let (title, lead) = (escape(title), escape(lead));
    let (machine, when) = (escape(&machine()), httpdate::fmt_http_date(SystemTime::now()));
    let version = env!("CARGO_PKG_VERSION");
    let page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>{title}</h1>\n<p>{lead}</p>\n{body}\
         <footer>{machine} · {when} · shadowbell {version}</footer>\n</body>\n</html>\n"
    );
    let name = path.display();
    std::fs::write(path, page).with_context(|| format!("cannot write the report to {name}"))?;
    tracing::info!("report written to {name}");
    Ok(())
}

/// Checks that a report can be written, before the measurement begins.
///
/// # Errors
/// With exit status `exit::BAD_INPUT` if the file cannot be opened for writing.
pub(crate) fn check(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    if path == Path::new("-") {
        return Err(shadowbell_process::exit::bad_input(anyhow::anyhow!(
            "--report -: standard output has the results; for a file of that name, give `./-`"
        )));
    }
    // The file is not truncated: if the measurement fails, an older report is preserved.
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    let name = path.display();
    opened.map(drop).map_err(|error| {
        shadowbell_process::exit::bad_input(anyhow::anyhow!(
            "cannot write the report to {name}: {error}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_loads_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("page.html");
        write(&path, "a <title>", "lead", "<p>body</p>\n").unwrap();
        let page = std::fs::read_to_string(&path).unwrap();
        assert!(page.contains("<title>a &lt;title&gt;</title>"), "{page}");
        for word in ["src=", "href=", "url(", "@import", "<script"] {
            assert!(!page.contains(word), "{word}");
        }
        check(Some(&path)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), page, "it is still there");
        let missing = directory.path().join("no/such");
        assert!(check(Some(&missing)).is_err() && check(None).is_ok());
    }
}
