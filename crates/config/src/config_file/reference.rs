//! Reference of the configuration file, from the types that read it: tables, keys and their
//! comments.

use super::{
    ControllerTable, DiskTable, File, GroupTable, NamedDiskTable, PathsTable, SubsystemTable,
};
use crate::export_config::ExportConfig;
use serde_json::Value;
use shadowbell_disk_layers::Limits;
use utoipa::PartialSchema;

/// Table of a configuration file.
#[derive(Clone, Debug)]
pub struct TableReference {
    /// Heading of the table, as in a file; empty for the keys before the first table.
    pub name: &'static str,
    /// Purpose of the table.
    pub text: &'static str,
    /// Keys by name.
    pub keys: Vec<KeyReference>,
}

/// Key of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyReference {
    /// Name of the key.
    pub name: String,
    /// Type of the value: `string`, `integer`, `boolean`, `array`, `table`.
    pub form: String,
    /// True if the table must contain the key.
    pub is_required: bool,
    /// Meaning and default.
    pub text: String,
}

/// Tables of a configuration file.
#[must_use]
pub fn tables() -> Vec<TableReference> {
    let of = |name, text, keys| TableReference { name, text, keys };
    let mut group = keys::<GroupTable>();
    group.extend(Limits::NAMES.map(|name| {
        KeyReference {
            name: name.to_owned(),
            form: "string".to_owned(),
            is_required: false,
            text:
                "Rate limit `RATE` or `RATE:BURST` per second that all disks of the group share. \
               Default: none."
                    .to_owned(),
        }
    }));
    vec![
        of("", "Settings of the server, before the first table.", keys::<File>()),
        of("[paths]", "Files that management requests may open.", keys::<PathsTable>()),
        of(
            "[[controller]]",
            "Controller and its socket. `controller = []` serves none at first.",
            keys::<ControllerTable>(),
        ),
        of("disks = [{ ... }]", "Element of `disks` of a controller.", keys::<DiskTable>()),
        of(
            "[[disk]]",
            "Disk with an id, to which controllers and exports refer.",
            keys::<NamedDiskTable>(),
        ),
        of(
            "[[export]]",
            "Export of a disk, by one of `nbd` and `vhost-user-blk`.",
            keys::<ExportConfig>(),
        ),
        of("[[limit-group]]", "Rate limits that several disks share.", group),
        of(
            "[[subsystem]]",
            "NVM subsystem, whose controllers share their disks.",
            keys::<SubsystemTable>(),
        ),
    ]
}

/// Keys of a type, from its schema.
fn keys<T: PartialSchema>() -> Vec<KeyReference> {
    let schema = serde_json::to_value(T::schema()).unwrap_or_default();
    let required: Vec<_> = schema["required"].as_array().into_iter().flatten().collect();
    let properties = schema["properties"].as_object().into_iter().flatten();
    let keys = properties.map(|(name, about)| KeyReference {
        name: name.clone(),
        form: form(about),
        is_required: required.iter().any(|one| *one == name),
        text: about["description"].as_str().unwrap_or_default().replace('\n', " "),
    });
    keys.collect()
}

/// Type of a value in TOML. An optional value has a list of types, with `null`.
fn form(about: &Value) -> String {
    let all = about["type"].as_array().map(|all| all.iter().collect());
    let all: Vec<_> = all.unwrap_or_else(|| vec![&about["type"]]);
    let found = all.into_iter().filter_map(Value::as_str).find(|name| *name != "null");
    match found {
        Some("object") | None => "table".to_owned(),
        Some(name) => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file::parse;

    /// Keys that the parser accepts in a table with the heading `head`, from its error about an
    /// unknown one.
    fn accepted(head: &str) -> Vec<String> {
        let why = parse(&format!("{head}nonsense = 1\n"), "f").unwrap_err();
        let (_, list) = why.split_once("expected ").expect(&why);
        list.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect()
    }

    #[test]
    fn the_reference_has_the_keys_that_a_file_may_have() {
        // Tables, and keys of a checkpoint only or of another command.
        let others = [
            "limit-group",
            "subsystem",
            "disk",
            "controller",
            "export",
            "paths",
            "fuse",
            "ublk",
            "mounted",
            "owner",
        ];
        for table in tables() {
            let head = match table.name {
                "" => String::new(),
                // The parser has no list of the keys of these two.
                "disks = [{ ... }]" | "[[limit-group]]" => continue,
                name => format!("{name}\n"),
            };
            let mut accepted = accepted(&head);
            if head.is_empty() {
                accepted.retain(|key| !others.contains(&&key[..]));
            }
            accepted.retain(|key| table.name != "[[export]]" || !others[6..].contains(&&key[..]));
            accepted.sort();
            let mut keys: Vec<_> = table.keys.iter().map(|key| key.name.clone()).collect();
            keys.sort();
            assert_eq!(keys, accepted, "{}", table.name);
        }
    }

    #[test]
    fn each_key_has_its_type_meaning_and_default() {
        for table in tables() {
            for key in &table.keys {
                let place = format!("{} {}", table.name, key.name);
                assert!(key.text.ends_with('.') && key.text.len() > 10, "{place}: {}", key.text);
                let has_default = key.text.contains("Default: ");
                let is_of_export = table.name == "[[export]]";
                let is_disks = key.name == "disks";
                assert!(has_default != key.is_required || is_of_export || is_disks, "{place}");
            }
        }
        let all = tables();
        let find = |table: &str, name: &str| {
            let keys = all.iter().find(|one| one.name == table).map(|one| &one.keys);
            keys.unwrap().iter().find(|key| key.name == name).unwrap().clone()
        };
        assert_eq!(find("", "workers").form, "integer");
        assert_eq!(find("", "pin").form, "array");
        assert_eq!(find("[[controller]]", "read-only").form, "boolean");
        assert!(find("[[controller]]", "socket").is_required);
        assert_eq!(find("[[disk]]", "options").form, "table");
    }
}
