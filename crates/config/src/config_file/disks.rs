//! `[[disk]]` tables of the configuration file: named disks.

use crate::limits::GROUP;
use crate::server_config::NamedDisk;
use serde::{Deserialize, Serialize};
use shadowbell_disk::{MetadataFormat, ZoneFormat};
use shadowbell_disk_layers::{ErrorPolicy, Limits};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Table `[[disk]]`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NamedDiskTable {
    /// Id of the disk, for controllers, exports and `shadowbell ctl`.
    pub(super) id: String,
    /// File, device or URI, with or without options, as in shadowbell-disks(7).
    pub(super) source: String,
    /// Options of the disk's kind by name: `{ direct = true }`. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    options: BTreeMap<String, OptionValue>,
    /// Options of metadata or zones by name: `{ metadata = 8, pi = 1 }`. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    layers: BTreeMap<String, OptionValue>,
    /// Policy for requests that fail because the storage is full or fails: `"report"`, `"stop"` or
    /// `"stop-on-full"`. Default: `"report"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    on_error: Option<ErrorPolicy>,
    /// Rate limits by name, and the limit group: `{ iops = 5000, group = "db" }`. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    limits: BTreeMap<String, OptionValue>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "an option is a string, a number, or `true` or `false`")]
enum OptionValue {
    Switch(bool),
    Number(u64),
    Text(String),
}

impl OptionValue {
    fn text(&self) -> String {
        match self {
            Self::Switch(true) => "on".to_owned(),
            Self::Switch(false) => "off".to_owned(),
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text.clone(),
        }
    }
}

impl NamedDiskTable {
    /// Table of a disk; its `source` contains all options.
    pub(super) fn of(disk: &NamedDisk) -> Self {
        let source = crate::disk_spec::with_absolute_paths(&disk.spec);
        let (options, layers, on_error, limits) = Default::default();
        Self { id: disk.id.clone(), source, options, layers, on_error, limits }
    }

    /// Specification of the disk: source, options, layers, error policy and limits.
    ///
    /// # Errors
    /// Key of the table, and a sentence about an unknown limit or layer, or an option with `&`.
    pub(super) fn spec(&self) -> Result<String, (&'static str, String)> {
        let mut options = Vec::new();
        for (name, value) in &self.options {
            options.push(format!("{name}={}", value.text()));
        }
        let of_layers = [&MetadataFormat::OPTIONS[..], &ZoneFormat::OPTIONS[..]].concat();
        for (name, value) in &self.layers {
            if !of_layers.contains(&&name[..]) {
                let all = of_layers.join(", ");
                let why = format!(
                    "no layer of a disk has the option `{name}`; the options of `layers` are {all}"
                );
                return Err(("layers", why));
            }
            options.push(format!("{name}={}", value.text()));
        }
        let on_error = self.on_error.iter();
        options.extend(on_error.map(|policy| format!("{}={policy}", ErrorPolicy::OPTION)));
        for (name, value) in &self.limits {
            let name = match &name[..] {
                "group" => GROUP,
                name if Limits::NAMES.contains(&name) => name,
                name => {
                    let all = Limits::NAMES.join(", ");
                    let why = format!("a disk has no limit `{name}`; its limits are {all}, group");
                    return Err(("limits", why));
                }
            };
            options.push(format!("{name}={}", value.text()));
        }
        if let Some(option) = options.iter().find(|option| option.contains(['&', '?'])) {
            let why = format!("the option `{option}` has a `&` or `?`, which separates options");
            return Err(("options", why));
        }
        Ok(match (options.is_empty(), self.source.contains('?')) {
            (true, _) => self.source.clone(),
            (false, true) => format!("{}&{}", self.source, options.join("&")),
            (false, false) => format!("{}?{}", self.source, options.join("&")),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::config_file::parse;

    #[test]
    fn controllers_refer_to_named_disks() {
        let config = parse(
            "[[limit-group]]\nname = \"db\"\niops = 700\n[[disk]]\nid = \"data\"\nsource = \"/d.img\"\n\
             options = { direct = true }\nlayers = { metadata = 8, pi = 1 }\nlimits = { iops = 500, group = \"db\" }\n\
             [[disk]]\nid = \"spare\"\nsource = \"mem:1MiB?block-size=4096\"\non-error = \"stop-on-full\"\n\
             [[controller]]\nsocket = \"/vm0.sock\"\n\
             disks = [\"/a.img\", { disk = \"data\", nsid = 5, share = true }]\n",
            "vms.toml",
        );
        let config = config.unwrap();
        let disks = &config.controllers[0].controller.disks;
        assert_eq!((&disks[0].id, &disks[0].disk[..]), (&None, "/a.img"));
        assert_eq!((disks[1].id.as_deref(), disks[1].share), (Some("data"), true));
        assert_eq!(disks[1].disk, "/d.img?direct=on&metadata=8&pi=1&limit-group=db&iops=500");
        let unattached: Vec<_> =
            config.unattached().map(|disk| (&disk.id[..], &disk.spec[..])).collect();
        let spec = "mem:1MiB?block-size=4096&on-error=stop-on-full";
        assert_eq!(unattached, [("spare", spec)]);
    }

    #[test]
    fn wrong_disks_are_refused_with_their_line() {
        let refused = |text: &str| parse(text, "f").unwrap_err();
        let head = "[[disk]]\nid = \"d\"\nsource = \"/d\"\n";
        let tail = "[[controller]]\nsocket = \"/s\"\ndisks = [\"d\"]\n";
        for (more, line, words) in [
            ("limits = { speed = 1 }\n", 4, "no limit `speed`; its limits are iops"),
            ("layers = { direct = true }\n", 4, "are metadata, "),
            ("options = { x = \"a&b\" }\n", 4, "has a `&`"),
            ("limits = { group = \"no\" }\n", 4, "no `[[limit-group]]` `no`"),
            ("on-error = \"halt\"\n", 4, "unknown variant `halt`"),
            ("[[disk]]\nid = \"d\"\nsource = \"/e\"\n", 5, "the id `d` is that of another disk"),
            ("[[disk]]\nid = \"a/b\"\nsource = \"/e\"\n", 5, "`a/b` is no id"),
            (
                "[[controller]]\nsocket = \"/t\"\ndisks = [\"d\"]\n",
                8,
                "the disk `d` is that of another controller too",
            ),
        ] {
            let why = refused(&format!("{head}{more}{tail}"));
            assert!(why.starts_with(&format!("f:{line}:")) && why.contains(words), "{more}: {why}");
        }
    }
}
