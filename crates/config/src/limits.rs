//! Rate limits in disk specifications, and limit groups that several disks share.
//!
//! Groups exist once per process. A group is created by the configuration, by a management request,
//! or by the first disk specification that names it. The limits of a group can be changed while
//! disks use it.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_disk::Disk;
use shadowbell_disk_layers::{LimitedDisk, Limiter, Limits};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Option that names a group.
pub const GROUP: &str = "limit-group";

/// Limit group with its limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Name of the group.
    pub name: String,
    /// Rate limits that the disks of the group share.
    pub limits: Limits,
}

/// Rate limits and limit group of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskLimits {
    /// Rate limits of the disk itself.
    pub own: Limits,
    /// Name of the limit group.
    pub group: Option<String>,
}

static GROUPS: Mutex<BTreeMap<String, Arc<Limiter>>> = Mutex::new(BTreeMap::new());

/// Returns the group with this name. Creates it without limits if it does not exist.
pub fn group(name: &str) -> Arc<Limiter> {
    let mut groups = GROUPS.lock();
    let group = groups.entry(name.to_owned()).or_insert_with(|| Limiter::new(Limits::default()));
    Arc::clone(group)
}

/// Group with this name, if it exists.
pub fn existing(name: &str) -> Option<Arc<Limiter>> {
    GROUPS.lock().get(name).cloned()
}

/// All groups.
pub fn groups() -> Vec<Group> {
    let groups = GROUPS.lock();
    let group = |(name, limiter): (&String, &Arc<Limiter>)| Group {
        name: name.clone(),
        limits: limiter.limits(),
    };
    groups.iter().map(group).collect()
}

/// Sets the limits of these groups.
pub fn set_groups(groups: &[Group]) {
    groups.iter().for_each(|wanted| group(&wanted.name).set(wanted.limits));
}

/// Removes a group. Disks of the group keep its limits.
pub fn remove_group(name: &str) {
    GROUPS.lock().remove(name);
}

/// Validates the name of a group.
///
/// # Errors
/// A sentence about an invalid name.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_fine = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    match (1..=64).contains(&name.len()) && name.bytes().all(is_fine) {
        true => Ok(()),
        false => Err(format!("`{name}` is not a group name: use 1 to 64 letters, digits, `-_.`")),
    }
}

impl DiskLimits {
    /// Splits `spec` into the options of limits and the rest.
    ///
    /// # Errors
    /// A sentence about an invalid option.
    pub fn split(spec: &str) -> Result<(String, Self), String> {
        let Some((disk, options)) = spec.split_once('?') else {
            return Ok((spec.to_owned(), Self::default()));
        };
        let (mut limits, mut rest) = (Self::default(), Vec::new());
        for option in options.split('&') {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            if name == GROUP {
                check_name(value)?;
                limits.group = Some(value.to_owned());
            } else if !limits.own.set(name, value)? {
                rest.push(option);
            }
        }
        let is_bare = rest.is_empty() && !limits.is_none();
        let rest = if is_bare { disk.to_owned() } else { format!("{disk}?{}", rest.join("&")) };
        Ok((rest, limits))
    }

    /// Returns the disk specification `spec` with the limits in it replaced by these limits.
    #[must_use]
    pub fn joined(&self, spec: &str) -> String {
        let bare = Self::split(spec).map_or_else(|_| spec.to_owned(), |(bare, _)| bare);
        let own = self.own.texts().map(|(name, text)| format!("{name}={text}"));
        let group = self.group.iter().map(|group| format!("{GROUP}={group}"));
        let all: Vec<_> = own.chain(group).collect();
        match (all.is_empty(), bare.contains('?')) {
            (true, _) => bare,
            (false, true) => format!("{bare}&{}", all.join("&")),
            (false, false) => format!("{bare}?{}", all.join("&")),
        }
    }

    /// True if there are no limits and no group.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Wraps `disk` in these limits; returns `disk` itself if there are none.
    #[must_use]
    pub fn limit(&self, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        if self.is_none() {
            return disk;
        }
        let group = self.group.as_deref().map(group);
        Arc::new(LimitedDisk::new(disk, Limiter::new(self.own), group))
    }
}

/// Text for users: `iops=1000, as db`, where `db` is a limit group.
impl fmt::Display for DiskLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.group {
            Some(group) if self.own.is_none() => write!(f, "as {group}"),
            Some(group) => write!(f, "{}, as {group}", self.own),
            None => self.own.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_options_of_any_disk() {
        let (rest, limits) =
            DiskLimits::split("a.img?iops=100:200&direct=on&limit-group=g").unwrap();
        assert_eq!(rest, "a.img?direct=on");
        assert_eq!(
            (limits.own.to_string(), limits.group.as_deref()),
            ("iops=100:200".into(), Some("g"))
        );
        assert_eq!(limits.joined(&rest), "a.img?direct=on&iops=100:200&limit-group=g");
        assert_eq!(limits.joined("b?iops=7"), "b?iops=100:200&limit-group=g");
        assert_eq!(DiskLimits::split("a?bandwidth=1MiB").unwrap().0, "a");
        for spec in ["a.img", "a.img?direct=on", "mem:1MiB?x", "a?"] {
            let (rest, limits) = DiskLimits::split(spec).unwrap();
            assert_eq!((&rest[..], limits.is_none()), (spec, true));
            assert_eq!(limits.joined(spec), spec);
        }
        for spec in ["a?iops=fast", "a?limit-group=", "a?limit-group=x/y", "a?bandwidth=0"] {
            DiskLimits::split(spec).unwrap_err();
        }
        let none = DiskLimits::default();
        let disk = shadowbell_disk_file::open("mem:1MiB").unwrap();
        assert!(LimitedDisk::of(&*none.limit(Arc::clone(&disk))).is_none(), "it costs nothing");
        let limited = limits.limit(disk);
        let limited = LimitedDisk::of(&*limited).unwrap();
        assert_eq!(limited.limiters().len(), 2);
        set_groups(&[Group { name: "g".into(), limits: limits.own }]);
        assert_eq!(limited.limiters()[1].limits(), limits.own);
        assert!(groups().iter().any(|group| group.name == "g" && group.limits == limits.own));
    }
}
