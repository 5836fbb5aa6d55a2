//! Protocol of the guest's agent: one line in each direction for a command, on its own serial port.
//!
//! ```text
//! guest  @HELLO <boot id>                                    once a boot, when it is ready
//! host   @RUN <sequence> <command, base64>
//! guest  @END <sequence> <exit code> <bytes> <output, base64>
//! ```
//!
//! The output is standard output and standard error together. Its length is sent as well, so that
//! lost bytes are detected. Lines of any other form are noise of firmware or boot loader and are
//! ignored; a line that begins like one of the protocol and cannot be parsed is an error.

use anyhow::{Context, Result, bail};
use base64::{Engine, engine::general_purpose::STANDARD};

/// Maximum length of a command: the guest's terminal layer drops bytes beyond its buffers.
pub const MAX_COMMAND: usize = 24 * 1024;

/// A line from the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    /// The agent is ready. The kernel's random boot id identifies the boot.
    Hello {
        /// `/proc/sys/kernel/random/boot_id`.
        boot_id: String,
    },
    /// A command has ended.
    End {
        /// Sequence number of the command.
        sequence: u64,
        /// Exit code; 128 + n if signal n ended the command.
        code: i32,
        /// Standard output and standard error of the command.
        output: Vec<u8>,
    },
}

/// Line that runs `command`, with its line feed.
pub fn run(sequence: u64, command: &str) -> Result<String> {
    if command.len() > MAX_COMMAND {
        bail!("a command of {} bytes is too long for the agent ({MAX_COMMAND})", command.len());
    }
    Ok(format!("@RUN {sequence} {}\n", STANDARD.encode(command)))
}

/// Parses a line from the guest without its line feed. Returns `None` for noise of firmware or boot
/// loader.
pub fn parse(line: &str) -> Result<Option<Message>> {
    let mut words = line.trim_end_matches('\r').split(' ');
    let message = match words.next() {
        Some("@HELLO") => Message::Hello {
            boot_id: words.next().filter(|id| !id.is_empty()).context("no boot id")?.to_owned(),
        },
        Some("@END") => {
            let sequence = words.next().context("no sequence number")?.parse()?;
            let code = words.next().context("no exit code")?.parse()?;
            let length: usize = words.next().context("no length")?.parse()?;
            let output = STANDARD.decode(words.next().unwrap_or_default())?;
            if output.len() != length {
                bail!("the agent sent {} of {length} bytes of output", output.len());
            }
            Message::End { sequence, code, output }
        }
        _ => return Ok(None),
    };
    if words.next().is_some_and(|rest| !rest.is_empty()) {
        bail!("a word too many");
    }
    Ok(Some(message))
}

/// Splits a stream of bytes into lines, and keeps an incomplete line.
#[derive(Debug, Default)]
pub struct Lines {
    pending: Vec<u8>,
}

impl Lines {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Next complete line without its line feed, with invalid UTF-8 replaced.
    pub fn next_line(&mut self) -> Option<String> {
        let end = self.pending.iter().position(|&b| b == b'\n')?;
        let line: Vec<u8> = self.pending.drain(..=end).collect();
        Some(String::from_utf8_lossy(line.get(..end).unwrap_or_default()).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_command_is_encoded_in_one_line() {
        let line = run(7, "printf 'a b\\n'\nexit 3").unwrap();
        assert_eq!(line.matches('\n').count(), 1);
        let words: Vec<_> = line.trim().split(' ').collect();
        assert_eq!(words[..2], ["@RUN", "7"]);
        assert_eq!(STANDARD.decode(words[2]).unwrap(), b"printf 'a b\\n'\nexit 3");
    }

    #[test]
    fn a_command_that_is_too_long_is_refused() {
        assert!(run(0, &"x".repeat(MAX_COMMAND)).is_ok());
        assert!(run(0, &"x".repeat(MAX_COMMAND + 1)).is_err());
    }

    #[test]
    fn answers_parse() {
        let end = |s: &str| parse(s).unwrap().unwrap();
        assert_eq!(
            end("@END 4 127 5 aGVsbG8="),
            Message::End { sequence: 4, code: 127, output: b"hello".to_vec() }
        );
        assert_eq!(end("@END 4 0 0 "), Message::End { sequence: 4, code: 0, output: vec![] });
        assert_eq!(end("@END 4 0 0 \r"), Message::End { sequence: 4, code: 0, output: vec![] });
        assert_eq!(end("@HELLO 3a-b"), Message::Hello { boot_id: "3a-b".into() });
    }

    #[test]
    fn noise_is_passed_over_and_damage_is_not() {
        for noise in ["", "UEFI Interactive Shell", "[    1.0] nvme nvme0: x", " @END 1 0 0 "] {
            assert_eq!(parse(noise).unwrap(), None, "{noise:?}");
        }
        for damage in [
            "@HELLO",
            "@HELLO ",
            "@END",
            "@END x 0 0 ",
            "@END 1 0 6 aGVsbG8=",
            "@END 1 0 5 aGVsbG8",
            "@END 1 0 5 aGVsbG8= more",
        ] {
            assert!(parse(damage).is_err(), "{damage:?}");
        }
    }

    #[test]
    fn lines_come_out_whole_from_any_pieces() {
        let mut lines = Lines::default();
        let mut got = Vec::new();
        for piece in "one\ntwo\r\n\nthree".as_bytes().chunks(2) {
            lines.push(piece);
            got.extend(std::iter::from_fn(|| lines.next_line()));
        }
        assert_eq!(got, ["one", "two\r", ""]);
        lines.push(b"\xff\n");
        assert_eq!(lines.next_line().unwrap(), "three\u{fffd}");
    }
}
