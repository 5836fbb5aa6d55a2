//! User that the server process becomes (`--user`).

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, Gid, Uid, chownat};
use rustix::process::{Resource, Rlimit, geteuid, setrlimit};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use shadowbell_config::server_config::ServerConfig;
use shadowbell_config::socket_access::{SocketAccess, parse_group};
use shadowbell_config::socket_path;
use std::fmt;
use std::os::unix::fs::DirBuilderExt;

/// A user and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    name: String,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Looks up a user name in /etc/passwd, or parses `UID:GID`.
///
/// # Errors
/// The user does not exist.
pub(crate) fn parse_user(text: &str) -> Result<User, String> {
    if let Some((uid, gid)) = text.split_once(':')
        && let (Ok(uid), Ok(gid)) = (uid.parse(), gid.parse())
    {
        return Ok(User { name: text.to_owned(), uid, gid, groups: Vec::new() });
    }
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    find(text, &read("/etc/passwd"), &read("/etc/group")).ok_or_else(|| {
        format!(
            "/etc/passwd has no user `{text}`; give a user of another database by numbers, UID:GID"
        )
    })
}

fn find(name: &str, users: &str, groups: &str) -> Option<User> {
    let (uid, gid) = users.lines().find_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        let [user, _, uid, gid, ..] = fields[..] else { return None };
        (user == name).then(|| Some((uid.parse().ok()?, gid.parse().ok()?)))?
    })?;
    let groups = groups.lines().filter_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        let [_, _, gid, members, ..] = fields[..] else { return None };
        members.split(',').any(|member| member == name).then(|| gid.parse().ok())?
    });
    Some(User { name: name.to_owned(), uid, gid, groups: groups.collect() })
}

impl User {
    /// Returns user id, group id and supplementary groups. The group of the controllers' sockets is
    /// added.
    pub(super) fn ids(&self, config: &ServerConfig) -> (u32, u32, Vec<u32>) {
        let SocketAccess { group, .. } = &config.socket_access;
        let of_sockets = group.as_deref().and_then(|group| parse_group(group).ok());
        let groups = self.groups.iter().copied().chain(of_sockets);
        (self.uid, self.gid, groups.collect())
    }
}

/// Changes the credentials of this thread, the only one of the process, to those of the user.
///
/// # Errors
/// The change is not permitted, or could be reverted.
pub(super) fn become_user(user: &User, config: &ServerConfig) -> anyhow::Result<()> {
    // The control socket's directory depends on the user, so it is determined before the change.
    let directory = socket_path::fix_directory();
    if geteuid().as_raw() == user.uid {
        return Ok(());
    }
    if !geteuid().is_root() {
        bail!("only root can become {user}: start it as that user, and leave out `--user`");
    }
    if let (None, Some(directory)) = (&config.control.path, directory) {
        let name = config.control.name.as_ref().unwrap_or(&config.default_name);
        let own = directory.join(name);
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&directory);
        // Mode 0700, as for the control socket's directory without `--user`.
        let made =
            made.and_then(|()| std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&own));
        let given = made.and_then(|()| {
            let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            Ok(chownat(CWD, &own, Some(uid), Some(gid), flags)?)
        });
        given.with_context(|| own.display().to_string())?;
    }
    // io_uring needs locked memory, which root may use without a limit, so the limit is removed for
    // the user.
    let all = Rlimit { current: None, maximum: None };
    let _ = setrlimit(Resource::Memlock, all);
    let (uid, gid, groups) = user.ids(config);
    let groups: Vec<_> = groups.into_iter().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_groups(&groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    if set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_ok() && user.uid != 0 {
        bail!("this process could become root again");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_with_their_groups() {
        let users = "root:x:0:0:root:/root:/bin/sh\nsb:x:990:991::/:/bin/false\n";
        let groups = "root:x:0:\ndisk:x:6:libvirt,sb\nkvm:x:107:sb\nsb:x:991:\n";
        let user = find("sb", users, groups).unwrap();
        assert_eq!((user.uid, user.gid, user.groups), (990, 991, vec![6, 107]));
        assert!(find("nobody else", users, groups).is_none());
        let user = parse_user("65534:65534").unwrap();
        assert_eq!((user.uid, user.gid), (65534, 65534));
        assert!(parse_user("no such user").unwrap_err().contains("/etc/passwd"));
        assert_eq!(parse_user("root").unwrap().to_string(), "root");
    }
}
