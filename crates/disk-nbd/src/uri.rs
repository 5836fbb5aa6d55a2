//! Specifications of NBD exports.

use crate::error::OpenError;
use percent_encoding::percent_decode_str;
use shadowbell_disk::DiskOptions;
use shadowbell_nbd::wire::{MAX_STRING, PORT};
use std::ffi::OsString;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

/// Maximum of the option `connections`.
const MAX_CONNECTIONS: usize = 16;
/// Maximum of the option `replay` in bytes.
const MAX_REPLAY: u64 = 1 << 30;

/// Maximum of the option `settle`.
const MAX_SETTLE: Duration = Duration::from_secs(3600);

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServerAddress {
    /// Host name or address, and port.
    Tcp { host: String, port: u16 },
    /// UNIX socket.
    Unix(PathBuf),
}

impl ServerAddress {
    /// Address without name resolution. `None` if the server has a host name.
    pub(crate) fn peer(&self) -> Option<Peer> {
        match self {
            Self::Tcp { host, port } => {
                let address: IpAddr = host.parse().ok()?;
                Some(Peer::Tcp(SocketAddr::new(address, *port)))
            }
            Self::Unix(path) => Some(Peer::Unix(path.clone())),
        }
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Address of a server that needs no name resolution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// TCP address.
    Tcp(SocketAddr),
    /// Path of a UNIX socket.
    Unix(PathBuf),
}

/// TLS parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Secure {
    /// Directory of the certificates.
    pub(crate) directory: PathBuf,
    /// Name that the certificate of the server must be valid for. `None` for the host of the
    /// address.
    pub(crate) hostname: Option<String>,
}

/// Specification of an NBD export.
///
/// | specification | the server |
/// |---|---|
/// | `nbd://host/export`, `nbd://host:10810/export`, `nbd://[::1]/export` | at a TCP port |
/// | `nbd+unix:///export?socket=/run/disk.sock` | at a UNIX socket |
/// | `nbds://host/export?tls-certificates=DIR`, `nbds+unix:` | with TLS |
///
/// | option | value | default |
/// |---|---|---|
/// | `read-only` | `on`, `off` | `off`; `on` for a read-only export |
/// | `block-size` | `512`, `4096` | `512`, if the server accepts requests of 512 bytes |
/// | `connections` | 1 to 16: number of connections, if the server allows several | 4 |
/// | `replay` | a size: limit of unflushed writes that are kept, to be replayed to a restarted server; or `off` | `64MiB` |
/// | `tls-certificates` | a directory with `ca-cert.pem`, and with `client-cert.pem` and `client-key.pem` if the server authenticates clients; `nbds:` needs it | |
/// | `tls-hostname` | the name that the server's certificate must be valid for | the host; `localhost` for a UNIX socket |
/// | `settle` | a time, as `5s` or `1500ms`: how long the server may still execute writes of a closed connection; a reconnection with writes in flight and the recovery after a crash wait for that time | no wait, no recovery |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdSpec {
    pub(crate) server_address: ServerAddress,
    pub(crate) export: String,
    pub(crate) read_only: bool,
    pub(crate) block_size: Option<u32>,
    pub(crate) connections: usize,
    /// Limit of unflushed writes in bytes; 0 disables the replay.
    pub(crate) replay: u64,
    /// Time after a crash during which the server may still execute writes of the dead process.
    /// `None` if it is unknown.
    pub(crate) settle: Option<Duration>,
    /// TLS parameters, if TLS is used.
    pub(crate) secure: Option<Secure>,
}

impl NbdSpec {
    /// Names of the options.
    pub const OPTIONS: [&str; 8] = [
        "socket",
        "read-only",
        "block-size",
        "connections",
        "replay",
        "settle",
        "tls-certificates",
        "tls-hostname",
    ];
    /// Schemes of the specifications.
    pub const SCHEMES: [&str; 4] = ["nbd", "nbd+unix", "nbds", "nbds+unix"];

    /// Parses a specification.
    ///
    /// # Errors
    /// [`OpenError::Spec`].
    pub fn parse(spec: &str) -> Result<Self, OpenError> {
        parse(spec).map_err(|why| OpenError::Spec { spec: spec.to_owned(), why })
    }

    /// Address of the server. `None` if it has a host name.
    #[must_use]
    pub fn peer(&self) -> Option<Peer> {
        self.server_address.peer()
    }

    /// Reason why a process that neither opens files nor resolves names cannot open the export.
    /// `None` if it can.
    #[must_use]
    pub fn sandbox_conflict(&self) -> Option<&'static str> {
        match (&self.secure, self.peer()) {
            (Some(_), _) => Some("reads certificates"),
            (None, None) => Some("resolves a host name (an IP address needs no resolution)"),
            (None, Some(_)) => None,
        }
    }
}

impl fmt::Display for NbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nbd = if self.secure.is_some() { "nbds" } else { "nbd" };
        match &self.server_address {
            server_address @ ServerAddress::Tcp { .. } => {
                write!(f, "{nbd}://{server_address}/{}", self.export)
            }
            server_address @ ServerAddress::Unix(_) => {
                write!(f, "{nbd}+unix:///{}?socket={server_address}", self.export)
            }
        }
    }
}

fn parse(spec: &str) -> Result<NbdSpec, String> {
    let (name, mut options) = DiskOptions::split(spec)?;
    let (scheme, rest) = name.split_once(':').unwrap_or((name, ""));
    let form = "write `nbd://HOST:PORT/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`";
    let rest = rest.strip_prefix("//").ok_or_else(|| form.to_owned())?;
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    let export = percent_decode_str(export).decode_utf8();
    let export = export.map_err(|_| "the name of its export is not UTF-8".to_owned())?.into_owned();
    if export.len() > MAX_STRING {
        return Err(format!("the name of its export has more than {MAX_STRING} bytes"));
    }
    let mut made = NbdSpec {
        server_address: ServerAddress::Unix(PathBuf::new()),
        export,
        read_only: false,
        block_size: None,
        connections: 4,
        replay: 64 << 20,
        settle: None,
        secure: None,
    };
    options.check(scheme, &NbdSpec::OPTIONS)?;
    made.read_only = options.take_switch("read-only")?.unwrap_or(false);
    made.block_size = options.take_block_size()?;
    let socket = options.take("socket");
    if let Some(value) = options.take("connections") {
        made.connections = match value.parse() {
            Ok(count) if (1..=MAX_CONNECTIONS).contains(&count) => count,
            _ => {
                return Err(format!(
                    "`connections` is a number from 1 to {MAX_CONNECTIONS}, not `{value}`"
                ));
            }
        };
    }
    if let Some(value) = options.take("replay") {
        made.replay = match value {
            "off" | "false" | "no" => 0,
            size => shadowbell_disk::parse_size(size)
                .map_err(|why| format!("the option `replay` is a size or `off`: {why}"))?,
        };
        if made.replay > MAX_REPLAY {
            return Err(format!("`replay` is at most 1GiB, not `{value}`"));
        }
    }
    made.settle = options.take("settle").map(seconds).transpose()?;
    let certificates = options.take("tls-certificates");
    let certificates = certificates.map(|value| path("tls-certificates", value)).transpose()?;
    let hostname = options.take("tls-hostname").map(str::to_owned);
    let (scheme, is_secure) = match scheme {
        "nbds" => ("nbd", true),
        "nbds+unix" => ("nbd+unix", true),
        other => (other, false),
    };
    made.secure = match (is_secure, certificates) {
        (true, Some(directory)) => Some(Secure { directory, hostname }),
        (true, None) => {
            return Err("it lacks certificates; add `?tls-certificates=DIR`".to_owned());
        }
        (false, None) if hostname.is_none() => None,
        (false, _) => return Err("TLS options need `nbds:` instead of `nbd:`".to_owned()),
    };
    made.server_address = match (scheme, socket) {
        ("nbd+unix", Some("")) => return Err("its `socket` is empty; give the path of one".into()),
        ("nbd+unix", Some(_)) if !authority.is_empty() => {
            return Err(format!("it names the host `{authority}` and a socket; {form}"));
        }
        ("nbd+unix", Some(path)) => ServerAddress::Unix(self::path("socket", path)?),
        ("nbd+unix", None) => return Err(format!("it lacks a socket; {form}")),
        ("nbd", None) => tcp(authority)?,
        ("nbd", Some(_)) => {
            return Err("write a socket as `nbd+unix:///EXPORT?socket=PATH`".to_owned());
        }
        _ => return Err(form.to_owned()),
    };
    Ok(made)
}

fn path(name: &str, value: &str) -> Result<PathBuf, String> {
    let bytes: Vec<u8> = percent_decode_str(value).collect();
    if bytes.contains(&0) {
        return Err(format!("the path of `{name}` contains a zero byte"));
    }
    if bytes.is_empty() {
        return Err(format!("its `{name}` is empty; give a path"));
    }
    Ok(OsString::from_vec(bytes).into())
}

/// Parses a time: `5s`, `1500ms`, or `5` for seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match text.strip_suffix("ms") {
        Some(digits) => (digits, 1),
        None => (text.strip_suffix('s').unwrap_or(text), 1000),
    };
    let time = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(unit));
    let time = time.map(Duration::from_millis).filter(|time| *time <= MAX_SETTLE);
    time.ok_or_else(|| {
        format!("`settle` is a time of at most an hour, as `5s` or `1500ms`, not `{text}`")
    })
}

fn tcp(authority: &str) -> Result<ServerAddress, String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, after) =
                rest.split_once(']').ok_or("its address begins with `[` and lacks the `]`")?;
            match after.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if after.is_empty() => (host, None),
                None => return Err(format!("`{after}` follows its address")),
            }
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() {
        return Err("it lacks a host; write for example `nbd://localhost/`".to_owned());
    }
    let port = match port {
        None => PORT,
        Some(text) => match text.parse() {
            Ok(port) if port != 0 => port,
            _ => return Err(format!("`{text}` is no port")),
        },
    };
    Ok(ServerAddress::Tcp { host: host.to_owned(), port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_understood() {
        let tcp = |host: &str, port| ServerAddress::Tcp { host: host.into(), port };
        for (spec, server_address, export) in [
            ("nbd://server/disk", tcp("server", PORT), "disk"),
            ("nbd://server", tcp("server", PORT), ""),
            ("nbd://server:99/a%20b/c", tcp("server", 99), "a b/c"),
            ("nbd://[::1]:7/x", tcp("::1", 7), "x"),
            ("nbd://[::1]", tcp("::1", PORT), ""),
            (
                "nbd+unix:///disk?socket=/run/a.sock",
                ServerAddress::Unix("/run/a.sock".into()),
                "disk",
            ),
            ("nbd+unix://?socket=a%3Fb", ServerAddress::Unix("a?b".into()), ""),
        ] {
            let parsed = NbdSpec::parse(spec).unwrap();
            assert_eq!(
                (&parsed.server_address, &parsed.export[..]),
                (&server_address, export),
                "{spec}"
            );
        }
        let parsed =
            NbdSpec::parse("nbd://s/x?read-only=on&block-size=4096&connections=2&replay=1MiB")
                .unwrap();
        assert!(parsed.read_only);
        assert_eq!(
            (parsed.block_size, parsed.connections, parsed.replay),
            (Some(4096), 2, 1 << 20)
        );
        assert_eq!(NbdSpec::parse("nbd://s/x?replay=off").unwrap().replay, 0);
        for (text, millis) in [("5", 5000), ("5s", 5000), ("1500ms", 1500), ("0", 0)] {
            let settle = NbdSpec::parse(&format!("nbd://s/x?settle={text}")).unwrap().settle;
            assert_eq!(settle, Some(Duration::from_millis(millis)));
        }
        let parsed = NbdSpec::parse("nbds://s/x?tls-certificates=/etc/pki/a%20b").unwrap();
        let secure = parsed.secure.clone().unwrap();
        assert_eq!((secure.directory, secure.hostname), ("/etc/pki/a b".into(), None));
        assert_eq!(parsed.to_string(), "nbds://s:10809/x");
        let spec = "nbds+unix:///?socket=/a&tls-certificates=c&tls-hostname=s.example";
        let parsed = NbdSpec::parse(spec).unwrap();
        assert_eq!(parsed.server_address, ServerAddress::Unix("/a".into()));
        assert_eq!(parsed.secure.unwrap().hostname.as_deref(), Some("s.example"));
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (spec, words) in [
            ("nbd:server", "write `nbd://HOST"),
            ("nbd://", "lacks a host"),
            ("nbd://:99/", "lacks a host"),
            ("nbd://a:0/", "`0` is no port"),
            ("nbd://a:b/", "`b` is no port"),
            ("nbd://[::1/", "lacks the `]`"),
            ("nbd://[::1]x/", "follows its address"),
            ("nbd://a/%ff", "not UTF-8"),
            ("nbd://a/x?socket=y", "nbd+unix"),
            ("nbd+unix:///x", "lacks a socket"),
            ("nbd+unix:///x?socket=", "is empty"),
            ("nbd+unix:///x?socket=a%00b", "zero byte"),
            ("nbd+unix://host/x?socket=y", "the host `host`"),
            ("nbd://a/?connections=0", "from 1 to 16"),
            ("nbd://a/?connections=many", "from 1 to 16"),
            ("nbd://a/?replay=2GiB", "at most 1GiB"),
            ("nbd://a/?replay=some", "is a size or `off`"),
            ("nbd://a/?block-size=1024", "512 or 4096"),
            ("nbd://a/?settle=soon", "as `5s` or `1500ms`, not `soon`"),
            ("nbd://a/?settle=2h", "not `2h`"),
            ("nbd://a/?settle=7200", "at most an hour"),
            ("nbd://a/?read-only=1", "`on` or `off`"),
            ("nbd://a/?read-only=on&read-only=on", "given twice"),
            ("nbds://a/", "lacks certificates; add `?tls-certificates=DIR`"),
            ("nbds://a/?tls-certificates=", "is empty"),
            ("nbd://a/?tls-certificates=x", "TLS options need `nbds:`"),
            ("nbd://a/?tls-hostname=x", "TLS options need `nbds:`"),
            ("nbd://a/?direct=on", "no option `direct`"),
            ("nbd://a/?x", "no option; options"),
        ] {
            let error = NbdSpec::parse(spec).unwrap_err().to_string();
            assert!(error.contains(words), "{spec}: {error}");
        }
        let long = format!("nbd://a/{}", "x".repeat(MAX_STRING + 1));
        assert!(NbdSpec::parse(&long).unwrap_err().to_string().contains("more than 4096"));
    }
}
