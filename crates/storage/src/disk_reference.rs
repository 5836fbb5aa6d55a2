//! Reference of disks: forms of a disk specification and options, for shadowbell-disks(7) and the
//! help of `serve`.

use crate::disk_kinds::{DiskKind, KINDS};
use shadowbell_config::disk_layers::Layers;

/// Kind of disk, for the reference.
#[derive(Clone, Debug)]
pub struct DiskReference {
    /// Short name.
    pub name: &'static str,
    /// Forms of the specification.
    pub forms: &'static [&'static str],
    /// Description in one or two sentences.
    pub text: &'static str,
    /// Options of this kind, without those that all disks have.
    pub options: Vec<OptionReference>,
}

/// Option of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReference {
    /// Name.
    pub name: &'static str,
    /// Grammar of the value.
    pub value: &'static str,
    /// Meaning and default.
    pub text: &'static str,
}

const fn option(name: &'static str, value: &'static str, text: &'static str) -> OptionReference {
    OptionReference { name, value, text }
}

/// All options, in the order of the reference.
const OPTIONS: [OptionReference; 40] = [
    option(
        "read-only",
        "on|off",
        "refuse writes; with off, fail if the storage is not writable [default: as the storage permits]",
    ),
    option(
        "block-size",
        "512|4096",
        "block size in bytes [default: 512, or that of a block device if it is 4096]",
    ),
    option("uuid", "UUID", "UUID that guests see [default: generated once, see --state-dir]"),
    option(
        "direct",
        "on|off|auto",
        "bypass the page cache [default: auto, if the file system permits it]",
    ),
    option("aio", "io_uring|threads", "I/O method [default: io_uring if available]"),
    option("format", "raw|qcow2", "image format, instead of detection by the first bytes"),
    option(
        "allow-backing",
        "on|off",
        "of a qcow2 image: permit backing files and a data file [default: off]",
    ),
    option(
        "read-zeroes",
        "on|off",
        "reads return zeroes [default: off, the buffers are not touched]",
    ),
    option("socket", "PATH", "with +unix: socket of the NBD server"),
    option("connections", "N", "number of connections, if the server permits several [default: 4]"),
    option(
        "replay",
        "SIZE|off",
        "size of unflushed writes to keep, to repeat them on a server that was restarted [default: 64MiB]",
    ),
    option(
        "settle",
        "TIME",
        "how long the server may execute writes of a closed connection; recovery waits for that",
    ),
    option(
        "tls-certificates",
        "DIR",
        "with nbds: directory with ca-cert.pem, and with client-cert.pem and client-key.pem if the server requires them",
    ),
    option(
        "tls-hostname",
        "NAME",
        "with nbds: name in the server's certificate [default: HOST, localhost]",
    ),
    option("conf", "FILE", "configuration of the cluster [default: that of Ceph]"),
    option("id", "USER", "user of the cluster [default: admin]"),
    option("namespace", "NAME", "namespace in the pool"),
    option("zero-copy", "on|off", "off: copy data through memory of this process [default: on]"),
    option("queue-pairs", "N", "number of queue pairs [default: 8]"),
    option("timeout", "SECONDS", "time limit of a command"),
    option(
        "on-error",
        "report|stop|stop-on-full",
        "requests that fail because the storage is full or fails: report the error to the guest, or hold them until `ctl disk resume` [default: report]",
    ),
    option(
        "iops",
        "N[:BURST]",
        "reads and writes per second; requests beyond a limit wait [default of each limit: none]",
    ),
    option("read-iops", "N[:BURST]", "reads per second"),
    option("write-iops", "N[:BURST]", "writes per second"),
    option("bandwidth", "SIZE[:BURST]", "bytes read and written per second"),
    option("read-bandwidth", "SIZE[:BURST]", "bytes read per second"),
    option("write-bandwidth", "SIZE[:BURST]", "bytes written per second"),
    option("limit-group", "NAME", "share the limits of this group [default: none]"),
    option("metadata", "0|8|16|64", "bytes of metadata per block [default: 0]"),
    option(
        "extended",
        "on|off",
        "metadata at the end of each block, instead of in a separate buffer [default: off]",
    ),
    option("pi", "0|1|2|3", "type of the protection information; 0 for none [default: 0]"),
    option(
        "guard",
        "16|64",
        "bits of the guard; 64 needs 16 or 64 bytes of metadata [default: 16]",
    ),
    option(
        "pi-first",
        "on|off",
        "protection information in the first bytes of the metadata [default: off]",
    ),
    option("zoned", "SIZE", "zone size, a power of two of at least 64KiB [default: no zones]"),
    option("zone-capacity", "SIZE", "writable part of a zone [default: the whole zone]"),
    option("max-open", "N", "number of open zones; 0 for no limit [default: 0]"),
    option("max-active", "N", "number of open and closed zones; 0 for no limit [default: 0]"),
    option(
        "append-limit",
        "SIZE",
        "longest Zone Append, a power of two [default: that of all transfers]",
    ),
    option(
        "zone-extension",
        "BYTES",
        "bytes that a host stores with each zone, a multiple of 64 [default: 0]",
    ),
    option("read-across", "on|off", "a read may cross into the next zone [default: off]"),
];

fn options(is_wanted: impl Fn(&str) -> bool) -> Vec<OptionReference> {
    OPTIONS.into_iter().filter(|option| is_wanted(option.name)).collect()
}

/// Kinds of disks.
#[must_use]
pub fn kinds() -> Vec<DiskReference> {
    let of = |kind: &&'static DiskKind| DiskReference {
        name: kind.name,
        forms: kind.forms,
        text: kind.text,
        options: options(|name| kind.options.contains(&name)),
    };
    KINDS.iter().map(of).collect()
}

/// Options that all disks have.
#[must_use]
pub fn common_options() -> Vec<OptionReference> {
    options(|name| Layers::options().any(|option| option == name))
}

/// All options with the names of the kinds that have them; no names for those of all disks.
#[must_use]
pub fn all_options() -> Vec<(OptionReference, Vec<&'static str>)> {
    let all = options(|_| true).into_iter().map(|option| {
        let kinds = KINDS.iter().filter(|kind| kind.options.contains(&option.name));
        let is_common = Layers::options().any(|name| name == option.name);
        let kinds = if is_common { Vec::new() } else { kinds.map(|kind| kind.name).collect() };
        (option, kinds)
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_reference_has_the_options_that_disks_accept() {
        let of_kinds = KINDS.iter().flat_map(|kind| kind.options.iter().copied());
        let accepted: BTreeSet<_> = of_kinds.chain(Layers::options()).collect();
        let listed: Vec<_> = OPTIONS.iter().map(|option| option.name).collect();
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), accepted);
        assert_eq!(listed.len(), accepted.len(), "an option is listed twice");
    }

    #[test]
    fn each_kind_has_its_forms() {
        for kind in KINDS {
            assert!(kind.text.ends_with('.') && !kind.forms.is_empty(), "{}", kind.name);
            for scheme in kind.schemes {
                let has_it = |form: &&&str| form.starts_with(&format!("{scheme}:"));
                assert!(kind.forms.iter().any(|form| has_it(&form)), "{scheme}");
            }
        }
    }
}
