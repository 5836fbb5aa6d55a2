//! Listen address of an NBD server in text form.

use shadowbell_nbd::wire::PORT;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

/// Listen address: `unix:PATH` or `tcp:ADDRESS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// UNIX socket.
    Unix(PathBuf),
    /// TCP address of this machine.
    Tcp(SocketAddr),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err("it lacks a path; write for example `unix:/run/disk.sock`".into());
            }
            return Ok(Self::Unix(path.into()));
        }
        let Some(address) = text.strip_prefix("tcp:") else {
            return Err(format!("it is neither `unix:PATH` nor `tcp:ADDRESS`{}", hint(text)));
        };
        if address.is_empty() {
            return Ok(Self::Tcp((Ipv4Addr::LOCALHOST, PORT).into()));
        }
        if let Some(port) = address.strip_prefix(':') {
            let port = port.parse().map_err(|_| format!("`{port}` is no port"))?;
            return Ok(Self::Tcp((Ipv4Addr::UNSPECIFIED, port).into()));
        }
        // The resolver would take a number for an IPv4 address.
        if address.parse::<u32>().is_ok() {
            return Err(format!(
                "`{address}` is no address; write `tcp:127.0.0.1:{address}`, or `tcp::{address}` to \
                 listen on all addresses"
            ));
        }
        if let Ok(address) = address.parse() {
            return Ok(Self::Tcp(address));
        }
        let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let with_port = |host: &str| (host, PORT).to_socket_addrs();
        let found = match bare {
            Some(bare) => with_port(bare),
            None if address.contains(':') => address.to_socket_addrs(),
            None => with_port(address),
        };
        match found.map(|mut all| all.next()) {
            Ok(Some(address)) => Ok(Self::Tcp(address)),
            Ok(None) => Err(format!("`{address}` has no address")),
            Err(error) => Err(format!("`{address}` is no address: {error}")),
        }
    }
}

/// Suggestion for an address without a scheme: a port, `HOST:PORT` or a path.
fn hint(text: &str) -> String {
    let is_port = |text: &str| text.parse::<u16>().is_ok();
    if is_port(text) {
        format!("; for this port write `tcp:127.0.0.1:{text}`, or `tcp::{text}` for all addresses")
    } else if text.rsplit_once(':').is_some_and(|(_, port)| is_port(port)) {
        format!("; for TCP write `tcp:{text}`")
    } else if !text.is_empty() && !text.contains(':') {
        format!("; for a socket write `unix:{text}`")
    } else {
        String::new()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl Address {
    /// NBD URI of the export `name` at this address, for clients.
    #[must_use]
    pub fn uri(&self, name: &str) -> String {
        let name = escaped(name.as_bytes(), "");
        match self {
            Self::Unix(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                let path = escaped(path.as_os_str().as_encoded_bytes(), "/");
                format!("nbd+unix:///{name}?socket={path}")
            }
            Self::Tcp(address) => {
                // If the server listens on all addresses, local clients can use `localhost`.
                let host = match address {
                    SocketAddr::V4(v4) if v4.ip().is_unspecified() => "localhost".to_owned(),
                    SocketAddr::V6(v6) if v6.ip().is_unspecified() => "localhost".to_owned(),
                    SocketAddr::V4(v4) => v4.ip().to_string(),
                    SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
                };
                match address.port() {
                    PORT => format!("nbd://{host}/{name}"),
                    port => format!("nbd://{host}:{port}/{name}"),
                }
            }
        }
    }
}

/// Percent-encodes the bytes that are not allowed in a URI, except those in `also`.
fn escaped(bytes: &[u8], also: &str) -> String {
    let mut out = String::new();
    for byte in bytes {
        let plain = byte.is_ascii_alphanumeric() || b"-._~".contains(byte);
        if plain || also.as_bytes().contains(byte) {
            out.push(char::from(*byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_converted_to_uris() {
        let uri = |text: &str, name: &str| text.parse::<Address>().unwrap().uri(name);
        assert_eq!(uri("unix:/run/disk.sock", ""), "nbd+unix:///?socket=/run/disk.sock");
        assert_eq!(uri("unix:/run/a b", "x/y"), "nbd+unix:///x%2Fy?socket=/run/a%20b");
        let why = "tcp:10809".parse::<Address>().unwrap_err();
        assert!(why.contains("write `tcp:127.0.0.1:10809`"), "{why}");
        assert_eq!(uri("tcp:", "disk"), "nbd://127.0.0.1/disk");
        assert_eq!(uri("tcp:127.0.0.1", ""), "nbd://127.0.0.1/");
        assert_eq!(uri("tcp:127.0.0.1:4000", ""), "nbd://127.0.0.1:4000/");
        assert_eq!(uri("tcp::4000", ""), "nbd://localhost:4000/");
        assert_eq!(uri("tcp:[::1]:4000", ""), "nbd://[::1]:4000/");
        assert_eq!(uri("tcp:[::1]", ""), "nbd://[::1]/");
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (text, words) in [
            ("/run/disk.sock", "write `unix:/run/disk.sock`"),
            ("10809", "write `tcp:127.0.0.1:10809`, or `tcp::10809`"),
            ("127.0.0.1:10809", "write `tcp:127.0.0.1:10809`"),
            ("http://x", "neither"),
            ("unix:", "lacks a path"),
            ("tcp::http", "no port"),
            ("tcp:127.0.0.1:99999", "no address"),
            ("tcp:1.2.3.4.5.6:1", "no address"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
