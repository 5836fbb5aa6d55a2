//! Mode and group of the controllers' sockets.

use std::io;
use std::sync::OnceLock;

/// Configured access for all controller sockets of the process.
static ACCESS: OnceLock<SocketAccess> = OnceLock::new();

/// Mode and group of sockets. `None` leaves the system's default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Group name or number.
    pub group: Option<String>,
}

/// Parses a mode in octal digits, as `chmod` does.
///
/// # Errors
/// The text is no mode.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err(format!(
            "`{text}` is no mode: it has up to four octal digits, as in 0660, and at most 0777"
        )),
    }
}

/// Returns the number of a group.
///
/// # Errors
/// /etc/group has no group of that name.
pub fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let found = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == text).then(|| fields.nth(1)?.parse().ok())?
    });
    found.ok_or_else(|| {
        format!("/etc/group has no group `{text}`; give a group of another database by its number")
    })
}

/// Sets the access of sockets that this process creates after the call.
pub fn set(access: &SocketAccess) {
    let _ = ACCESS.set(access.clone());
}

/// Configured mode, and the number of the configured group.
///
/// # Errors
/// The group does not exist.
pub fn configured() -> io::Result<(Option<u32>, Option<u32>)> {
    ACCESS.get().map_or(Ok((None, None)), SocketAccess::numbers)
}

impl SocketAccess {
    /// Mode, and the number of the group.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn numbers(&self) -> io::Result<(Option<u32>, Option<u32>)> {
        let group = self.group.as_deref().map(parse_group).transpose();
        Ok((self.mode, group.map_err(io::Error::other)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_groups_are_parsed() {
        assert_eq!((parse_mode("0660"), parse_mode("666")), (Ok(0o660), Ok(0o666)));
        for text in ["", "0888", "rw", "1777", "-1"] {
            assert!(parse_mode(text).is_err(), "{text}");
        }
        assert_eq!((parse_group("root"), parse_group("107")), (Ok(0), Ok(107)));
        assert!(parse_group("no such group").unwrap_err().contains("/etc/group"));
    }
}
