//! QEMU's control socket (QEMU Machine Protocol): one JSON object per line, commands and answers
//! in turn, events in between.

use shadowbell_testing::wait::LIMIT;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// A control connection in command mode.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// Received part of an incomplete line.
    partial: Vec<u8>,
}

impl Qmp {
    /// Reads the greeting and enters command mode.
    pub fn new(stream: UnixStream) -> Result<Self> {
        // Reads have a short timeout, so that the deadline is checked often.
        stream.set_read_timeout(Some(Duration::from_millis(50)))?;
        let mut qmp = Self { stream: BufReader::new(stream), partial: Vec::new() };
        let timeout = LIMIT;
        let greeting = qmp.read(Instant::now() + timeout).context("the greeting of QMP")?;
        if greeting.get("QMP").is_none() {
            bail!("not a QMP greeting: {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}), timeout)?;
        Ok(qmp)
    }

    /// Runs a command. Returns its `return` value.
    ///
    /// # Errors
    ///
    /// QEMU's error message, or no answer in time.
    pub fn execute(&mut self, command: &str, arguments: Value, timeout: Duration) -> Result<Value> {
        let mut request = json!({ "execute": command });
        if arguments.as_object().is_some_and(|object| !object.is_empty())
            && let Some(object) = request.as_object_mut()
        {
            object.insert("arguments".into(), arguments);
        }
        let deadline = Instant::now() + timeout;
        let mut line = request.to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).with_context(|| command.to_owned())?;
        loop {
            let mut answer = self.read(deadline).with_context(|| format!("QMP {command}"))?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                bail!("QMP {command}: {}", error.get("desc").unwrap_or(error));
            }
            // Events are ignored.
        }
    }

    fn read(&mut self, deadline: Instant) -> Result<Value> {
        loop {
            match self.stream.read_until(b'\n', &mut self.partial) {
                Ok(0) => bail!("QEMU closed its control socket"),
                Ok(_) if self.partial.ends_with(b"\n") => {
                    let line = std::mem::take(&mut self.partial);
                    return serde_json::from_slice(&line).context("not JSON");
                }
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) => return Err(error).context("reading"),
            }
            if Instant::now() > deadline {
                bail!("no answer in time");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(lines: &'static [&'static str]) -> UnixStream {
        let (near, far) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut port = BufReader::new(far);
            let mut request = String::new();
            for line in lines {
                // Each line arrives in two parts, which the reader must join.
                let (a, b) = line.split_at(line.len() / 2);
                port.get_mut().write_all(a.as_bytes()).unwrap();
                // The pause is longer than the timeout of one read, so a read ends between the
                // parts.
                std::thread::sleep(Duration::from_millis(60));
                port.get_mut().write_all(format!("{b}\n").as_bytes()).unwrap();
                if !line.contains("event") {
                    port.read_line(&mut request).unwrap();
                }
            }
        });
        near
    }

    #[test]
    fn answers_are_found_among_events() {
        let stream = serve(&[
            r#"{"QMP": {}}"#,
            r#"{"return": {}}"#,
            r#"{"event": "RESET"}"#,
            r#"{"return": {"status": "running"}}"#,
            r#"{"error": {"class": "GenericError", "desc": "no such thing"}}"#,
        ]);
        let mut qmp = Qmp::new(stream).unwrap();
        let timeout = LIMIT;
        let status = qmp.execute("query-status", json!({}), timeout).unwrap();
        assert_eq!(status["status"], "running");
        let error = qmp.execute("nonsense", json!({"a": 1}), timeout).unwrap_err();
        assert!(error.to_string().contains("no such thing"));
    }

    #[test]
    fn something_else_is_not_taken_for_qemu() {
        assert!(Qmp::new(serve(&[r#"{"hello": 1}"#])).is_err());
        assert!(Qmp::new(serve(&["nonsense"])).is_err());
    }
}
