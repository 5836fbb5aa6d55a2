//! Examples in the long help of each command, and so in its manual page.

use clap::Command;

/// Example of a command, and its effect.
type Example = (&'static str, &'static str);

/// Examples by command, without the name of the program. `export` has its own.
const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "serve",
        &[
            (
                "shadowbell serve /srv/vm0.img --socket /run/shadowbell/vm0.sock",
                "one controller; prints the options for QEMU and Cloud Hypervisor",
            ),
            ("shadowbell serve --config /etc/shadowbell/vms.toml", "the controllers of a file"),
        ],
    ),
    (
        "demo",
        &[
            ("shadowbell demo", "the effect of shadow doorbells, on this machine"),
            ("shadowbell demo --report demo.html", "the same, with charts"),
        ],
    ),
    (
        "bench",
        &[
            (
                "shadowbell bench vfio-user:/run/shadowbell/vm0.sock --rw randread --iodepth 32",
                "random reads of 4 KiB for 10 s",
            ),
            (
                "shadowbell bench null:1TiB --bs 64k --rw read --runtime 1m --json",
                "a controller in this process, with JSON output",
            ),
        ],
    ),
    (
        "verify",
        &[
            ("shadowbell verify mem:1GiB --runtime 1m", "write, read and compare for a minute"),
            (
                "shadowbell verify vfio-user:/run/shadowbell/vm0.sock --size 1GiB --numjobs 4",
                "only the first GiB, which is overwritten, by four threads",
            ),
        ],
    ),
    (
        "read",
        &[
            ("shadowbell read disk.qcow2 --length 512 --output boot.bin", "the first 512 bytes"),
            (
                "shadowbell read nbd://host/export --offset 1GiB --length 1MiB --output part.bin",
                "a part of a disk",
            ),
        ],
    ),
    (
        "write",
        &[
            ("shadowbell write disk.img --input boot.bin", "to the begin of the disk"),
            (
                "shadowbell write disk.img --offset 1GiB --input part.bin",
                "to another place of the disk",
            ),
        ],
    ),
    (
        "copy",
        &[
            ("shadowbell copy disk.qcow2 /dev/vg/vm0", "a qcow2 image to a block device"),
            (
                "shadowbell copy nvme://0000:01:00.0/1 disk.img",
                "a namespace of an SSD to a raw image",
            ),
        ],
    ),
    (
        "bind",
        &[
            ("shadowbell bind 0000:01:00.0", "take an SSD from the kernel's driver"),
            ("shadowbell bind 0000:01:00.0 0000:02:00.0", "two SSDs"),
        ],
    ),
    (
        "unbind",
        &[
            ("shadowbell unbind 0000:01:00.0", "return an SSD to the kernel's driver"),
            ("shadowbell unbind nvme://0000:01:00.0", "the same, as a TARGET"),
        ],
    ),
    (
        "ls",
        &[
            ("shadowbell ls", "all servers of this machine"),
            ("shadowbell ls vm0 --json", "one server, as JSON"),
        ],
    ),
    (
        "status",
        &[("shadowbell status", "the only server"), ("shadowbell status vm0", "the server vm0")],
    ),
    (
        "stop",
        &[
            ("shadowbell stop vm0", "refused while a guest is connected"),
            ("shadowbell stop vm0 --force", "guests lose their disks"),
        ],
    ),
    (
        "explain",
        &[
            ("shadowbell explain vm0", "what the guest of the controller vm0 waits for"),
            ("shadowbell explain vm0 --server vms --json", "the shares and figures as JSON"),
        ],
    ),
    (
        "ctl status",
        &[
            ("shadowbell ctl status", "the only server"),
            ("shadowbell ctl --server vms status --json", "the server vms, as JSON"),
        ],
    ),
    (
        "ctl controllers",
        &[
            ("shadowbell ctl controllers", "all controllers"),
            ("shadowbell ctl controllers vm0", "one controller"),
        ],
    ),
    (
        "ctl controller ls",
        &[
            ("shadowbell ctl controller ls", "clients, states and sizes"),
            ("shadowbell ctl controller ls --json", "with disks and reasons, as JSON"),
        ],
    ),
    (
        "ctl controller add",
        &[
            (
                "shadowbell ctl controller add vm1 /srv/vm1.img --socket /run/shadowbell/vm1.sock",
                "a controller with one namespace",
            ),
            (
                "shadowbell ctl controller add vm2 data --socket /run/shadowbell/vm2.sock --worker \
                 own",
                "a disk with an id, and an I/O thread of its own",
            ),
        ],
    ),
    (
        "ctl controller remove",
        &[
            ("shadowbell ctl controller remove vm1", "refused while a guest is connected"),
            ("shadowbell ctl controller remove vm1 --force", "the guest loses its disks"),
        ],
    ),
    (
        "ctl apply",
        &[
            ("shadowbell ctl apply /etc/shadowbell/vms.toml --dry-run", "only show the changes"),
            ("shadowbell ctl apply /etc/shadowbell/vms.toml", "apply them"),
        ],
    ),
    (
        "ctl save-config",
        &[
            ("shadowbell ctl save-config -", "print the current configuration"),
            ("shadowbell ctl save-config /etc/shadowbell/vms.toml", "store it"),
        ],
    ),
    (
        "ctl explain",
        &[
            ("shadowbell ctl explain vm0", "what the guest of vm0 waits for"),
            ("shadowbell ctl --server vms explain vm0 --json", "the same as JSON"),
        ],
    ),
    (
        "ctl namespaces",
        &[
            ("shadowbell ctl namespaces", "all namespaces"),
            ("shadowbell ctl --server vms namespaces --json", "as JSON"),
        ],
    ),
    (
        "ctl namespace ls",
        &[
            ("shadowbell ctl namespace ls", "all namespaces of the server"),
            ("shadowbell ctl --server vms namespace ls --json", "as JSON"),
        ],
    ),
    (
        "ctl namespace attach",
        &[
            (
                "shadowbell ctl namespace attach vm0 2 /srv/data.img",
                "an image as namespace 2 of vm0",
            ),
            ("shadowbell ctl namespace attach vm0 3 /srv/cd.iso --read-only", "without writes"),
        ],
    ),
    (
        "ctl namespace detach",
        &[
            ("shadowbell ctl namespace detach vm0 2", "refused while a guest is connected"),
            ("shadowbell ctl namespace detach vm0 2 --force", "the guest loses the disk"),
        ],
    ),
    (
        "ctl disk ls",
        &[
            ("shadowbell ctl disk ls", "disks, sizes, limits, users"),
            ("shadowbell ctl disk ls --json", "with counters, as JSON"),
        ],
    ),
    (
        "ctl disk add",
        &[
            ("shadowbell ctl disk add data /srv/data.img", "for `ctl namespace attach`"),
            (
                "shadowbell ctl disk add base nbd://host/base --read-only",
                "an NBD disk without writes",
            ),
        ],
    ),
    (
        "ctl disk remove",
        &[
            ("shadowbell ctl disk remove data", "a disk that nothing uses"),
            ("shadowbell ctl --server vms disk remove data", "of another server"),
        ],
    ),
    (
        "ctl disk resize",
        &[
            ("shadowbell ctl disk resize vm0/1 +10GiB", "grow the disk and its file"),
            ("shadowbell ctl disk resize vm0/1", "to the size that the file has now"),
        ],
    ),
    (
        "ctl disk replace",
        &[
            ("shadowbell ctl disk replace vm0/1 /srv/copy.img", "another image, without a copy"),
            (
                "shadowbell ctl disk replace vm0/1 /srv/copy.img --force",
                "although a guest is connected",
            ),
        ],
    ),
    (
        "ctl disk resume",
        &[
            ("shadowbell ctl disk resume vm0/1", "repeat the held requests"),
            ("shadowbell ctl disk resume data", "of a disk with an id"),
        ],
    ),
    (
        "ctl disk read-only",
        &[
            ("shadowbell ctl disk read-only vm0/1 on", "refuse writes"),
            ("shadowbell ctl disk read-only vm0/1 off", "permit them again"),
        ],
    ),
    (
        "ctl export ls",
        &[
            ("shadowbell ctl export ls", "all exports"),
            ("shadowbell ctl export ls --json", "as JSON"),
        ],
    ),
    (
        "ctl export add",
        &[
            (
                "shadowbell ctl export add backup vm0/1 --nbd unix:/run/shadowbell/backup.sock \
                 --read-only",
                "by NBD, for a backup",
            ),
            (
                "shadowbell ctl export add vm1 data --vhost-user-blk /run/shadowbell/vm1.sock",
                "as a virtio disk of a VM",
            ),
        ],
    ),
    (
        "ctl export remove",
        &[
            ("shadowbell ctl export remove backup", "refused while it has clients"),
            ("shadowbell ctl export remove backup --force", "disconnects them"),
        ],
    ),
    (
        "ctl limit",
        &[
            ("shadowbell ctl limit vm0/1", "show the limits"),
            (
                "shadowbell ctl limit vm0/1 --iops 5000:10000 --bandwidth 200MiB",
                "set two of them; the others stay",
            ),
        ],
    ),
    (
        "ctl limit-group ls",
        &[
            ("shadowbell ctl limit-group ls", "all groups"),
            ("shadowbell ctl limit-group ls --json", "as JSON"),
        ],
    ),
    (
        "ctl limit-group add",
        &[
            ("shadowbell ctl limit-group add db --bandwidth 500MiB", "a group; then:"),
            ("shadowbell ctl limit vm0/1 --group db", "the disk shares its limits"),
        ],
    ),
    (
        "ctl limit-group set",
        &[
            ("shadowbell ctl limit-group set db --bandwidth 1GiB", "change one limit"),
            ("shadowbell ctl limit-group set db --iops none", "remove one limit"),
        ],
    ),
    (
        "ctl ana",
        &[
            ("shadowbell ctl ana", "the states of all controllers"),
            ("shadowbell ctl ana vm0a 1 inaccessible", "take a path out of service"),
        ],
    ),
    (
        "ctl stats",
        &[
            ("shadowbell ctl stats", "the counters of all controllers"),
            ("shadowbell ctl stats --json", "all counters"),
        ],
    ),
    (
        "ctl trace on",
        &[
            ("shadowbell ctl trace on", "record with the default size"),
            ("shadowbell ctl trace on --records 1048576", "keep more records"),
        ],
    ),
    (
        "ctl trace off",
        &[
            ("shadowbell ctl trace off", "stop; the records are kept"),
            ("shadowbell ctl --server vms trace off", "of another server"),
        ],
    ),
    (
        "ctl trace save",
        &[
            ("shadowbell ctl trace save slow.trace", "write the records; then:"),
            ("shadowbell trace slow.trace --summary", "show them"),
        ],
    ),
    (
        "ctl measure",
        &[
            ("shadowbell ctl measure on", "latencies in `top` and metrics"),
            ("shadowbell ctl measure", "show if it is on"),
        ],
    ),
    (
        "ctl log-level",
        &[
            ("shadowbell ctl log-level debug", "log more"),
            ("shadowbell ctl log-level info,shadowbell_vfio_user=debug", "more of one part only"),
        ],
    ),
    (
        "ctl upgrade",
        &[
            ("shadowbell ctl upgrade", "to the program that is installed now"),
            (
                "shadowbell ctl upgrade --binary /opt/shadowbell/bin/shadowbell",
                "to another program",
            ),
        ],
    ),
    (
        "ctl shutdown",
        &[
            ("shadowbell ctl shutdown", "refused while a guest is connected"),
            ("shadowbell ctl --server vms shutdown --force", "guests lose their disks"),
        ],
    ),
    (
        "config check",
        &[
            ("shadowbell config check /etc/shadowbell/vms.toml", "each error with its line; then:"),
            ("shadowbell ctl apply /etc/shadowbell/vms.toml --dry-run", "the changes"),
        ],
    ),
    (
        "upgrade",
        &[
            ("shadowbell upgrade vms --check", "name clients that would be lost"),
            ("shadowbell upgrade vms", "replace the server process"),
        ],
    ),
    (
        "top",
        &[
            ("shadowbell top", "all servers; `q` quits"),
            (
                "shadowbell top vms --interval 1s --count 10 --json",
                "ten lines of JSON of one server",
            ),
        ],
    ),
    (
        "trace",
        &[
            ("shadowbell trace slow.trace --summary", "what happened how often"),
            ("shadowbell trace slow.trace --perfetto slow.json", "a timeline for ui.perfetto.dev"),
        ],
    ),
    (
        "attach-many",
        &[
            (
                "shadowbell attach-many /run/shadowbell/vm0.sock /run/shadowbell/vm1.sock",
                "time of attaching",
            ),
            (
                "shadowbell attach-many /run/shadowbell/vm0.sock --rate-iops 100 --ios 1000",
                "and the latency of slow reads",
            ),
        ],
    ),
    (
        "completions",
        &[
            (
                "shadowbell completions bash > /etc/bash_completion.d/shadowbell",
                "for bash, for all users",
            ),
            (
                "shadowbell completions fish > ~/.config/fish/completions/shadowbell.fish",
                "for fish, for this user",
            ),
        ],
    ),
    (
        "manual",
        &[
            ("shadowbell manual /usr/local/share/shadowbell", "pages and completions; then:"),
            ("shadowbell man .", "the same, in the working directory"),
        ],
    ),
    (
        "nvme list",
        &[
            ("shadowbell nvme list /run/shadowbell/vm0.sock", "the namespaces of a controller"),
            ("shadowbell nvme list disk.qcow2 --json", "of an image, as JSON"),
        ],
    ),
    (
        "nvme id-ctrl",
        &[
            ("shadowbell nvme id-ctrl /run/shadowbell/vm0.sock", "of a served controller"),
            ("shadowbell nvme id-ctrl nvme://0000:01:00.0 -o json", "of an SSD, as JSON"),
        ],
    ),
    (
        "nvme id-ns",
        &[
            ("shadowbell nvme id-ns vfio-user:/run/shadowbell/vm0.sock/2", "of namespace 2"),
            ("shadowbell nvme id-ns disk.img --json", "of an image, as JSON"),
        ],
    ),
    (
        "nvme smart-log",
        &[
            ("shadowbell nvme smart-log /run/shadowbell/vm0.sock", "of a served controller"),
            ("shadowbell nvme smart-log nvme://0000:01:00.0 --json", "of an SSD, as JSON"),
        ],
    ),
    (
        "nvme error-log",
        &[
            ("shadowbell nvme error-log /run/shadowbell/vm0.sock", "the last 64 errors"),
            ("shadowbell nvme error-log /run/shadowbell/vm0.sock -e 8", "the last 8"),
        ],
    ),
    (
        "nvme get-feature",
        &[
            ("shadowbell nvme get-feature /run/shadowbell/vm0.sock", "all features"),
            ("shadowbell nvme get-feature /run/shadowbell/vm0.sock -f 7", "number of queues"),
        ],
    ),
    (
        "nvme device-self-test",
        &[
            (
                "shadowbell nvme device-self-test /run/shadowbell/vm0.sock -s short --wait",
                "run a short test to its end",
            ),
            (
                "shadowbell nvme device-self-test /run/shadowbell/vm0.sock -s abort",
                "end a running test",
            ),
        ],
    ),
    (
        "nvme self-test-log",
        &[
            ("shadowbell nvme self-test-log /run/shadowbell/vm0.sock", "progress and results"),
            ("shadowbell nvme self-test-log /run/shadowbell/vm0.sock --json", "as JSON"),
        ],
    ),
    (
        "nvme telemetry-log",
        &[
            (
                "shadowbell nvme telemetry-log /run/shadowbell/vm0.sock -O host.bin",
                "capture new data",
            ),
            (
                "shadowbell nvme telemetry-log /run/shadowbell/vm0.sock -O own.bin --controller-init",
                "data that the controller has captured",
            ),
        ],
    ),
    (
        "nvme persistent-event-log",
        &[
            ("shadowbell nvme persistent-event-log /run/shadowbell/vm0.sock", "all events"),
            ("shadowbell nvme persistent-event-log nvme://0000:01:00.0 --json", "as JSON"),
        ],
    ),
    (
        "nvme create-ns",
        &[
            (
                "shadowbell nvme create-ns /run/shadowbell/vm0.sock --nsze 10GiB",
                "in the pool of the controller; then:",
            ),
            ("shadowbell nvme attach-ns /run/shadowbell/vm0.sock -n 2", "attach it"),
        ],
    ),
    (
        "nvme delete-ns",
        &[
            (
                "shadowbell nvme delete-ns /run/shadowbell/vm0.sock -n 2 --force",
                "the data is destroyed",
            ),
            ("shadowbell nvme delete-ns nvme://0000:01:00.0 -n 1 --force", "of an SSD"),
        ],
    ),
    (
        "nvme attach-ns",
        &[
            ("shadowbell nvme attach-ns /run/shadowbell/vm0.sock -n 2", "to this controller"),
            ("shadowbell nvme attach-ns /run/shadowbell/vm0.sock -n 2 -c 1,2", "to two"),
        ],
    ),
    (
        "nvme detach-ns",
        &[
            ("shadowbell nvme detach-ns /run/shadowbell/vm0.sock -n 2", "from this controller"),
            ("shadowbell nvme detach-ns /run/shadowbell/vm0.sock -n 2 -c 1,2", "from two"),
        ],
    ),
    (
        "nvme format",
        &[
            (
                "shadowbell nvme format /run/shadowbell/vm0.sock --block-size 4096 --force",
                "blocks of 4 KiB; the data is destroyed",
            ),
            (
                "shadowbell nvme format /run/shadowbell/vm0.sock -n 2 --ses 1 --force",
                "erase namespace 2",
            ),
        ],
    ),
    (
        "nvme sanitize",
        &[
            (
                "shadowbell nvme sanitize /run/shadowbell/vm0.sock -a block-erase --force",
                "erase all namespaces; then:",
            ),
            ("shadowbell nvme sanitize-log /run/shadowbell/vm0.sock", "the progress"),
        ],
    ),
    (
        "nvme sanitize-log",
        &[
            ("shadowbell nvme sanitize-log /run/shadowbell/vm0.sock", "progress or result"),
            ("shadowbell nvme sanitize-log /run/shadowbell/vm0.sock --json", "as JSON"),
        ],
    ),
    (
        "nvme ana-log",
        &[
            ("shadowbell nvme ana-log /run/shadowbell/vm0a.sock", "the states of this path"),
            ("shadowbell nvme ana-log /run/shadowbell/vm0a.sock --json", "as JSON"),
        ],
    ),
    (
        "nvme write-uncor",
        &[
            (
                "shadowbell nvme write-uncor /run/shadowbell/vm0.sock -s 2048 --force",
                "reads of block 2048 fail until it is written",
            ),
            (
                "shadowbell nvme write-uncor /run/shadowbell/vm0.sock -s 0 -c 7 --force",
                "eight blocks",
            ),
        ],
    ),
    ("list", LIST),
];

const LIST: &[Example] = &[
    ("shadowbell list /run/shadowbell/vm0.sock", "the namespaces of a controller"),
    ("shadowbell list nvme://0000:01:00.0 disk.qcow2 --json", "of an SSD, and an image, as JSON"),
];

/// Adds the examples to a command line of the program.
pub(crate) fn with_examples(command: Command) -> Command {
    below(command, "")
}

fn below(command: Command, path: &str) -> Command {
    let names: Vec<_> = command.get_subcommands().map(|one| one.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        let path = format!("{path} {name}").trim_start().to_owned();
        command.mut_subcommand(name, |verb| below(with_own(verb, &path), &path))
    })
}

fn with_own(command: Command, path: &str) -> Command {
    let Some((_, examples)) = EXAMPLES.iter().find(|(of, _)| *of == path) else { return command };
    let before = command.get_after_long_help().or(command.get_after_help());
    let before = before.map(|text| format!("{text}\n\n")).unwrap_or_default();
    let lines = examples.iter().map(|(line, effect)| format!("  {line}\n      {effect}"));
    let text = format!("{before}Examples:\n{}", lines.collect::<Vec<_>>().join("\n"));
    command.after_long_help(text)
}

#[cfg(test)]
mod tests {
    use crate::cli::command;
    use clap::{ArgMatches, Command};

    /// Examples in the long help of a command.
    fn examples(command: &Command) -> Vec<String> {
        let help = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
        let Some((_, examples)) = help.split_once("Examples:\n") else { return Vec::new() };
        let lines = examples.lines().filter_map(|line| line.strip_prefix("  "));
        lines.filter(|line| !line.starts_with(' ')).map(ToOwned::to_owned).collect()
    }

    /// Path of the command that was found.
    fn path(mut matches: &ArgMatches) -> String {
        let mut path = Vec::new();
        while let Some((name, below)) = matches.subcommand() {
            path.push(name);
            matches = below;
        }
        path.join(" ")
    }

    /// Checks the examples of a command and of the commands below.
    fn check(all: &Command, one: &Command, at: &str) {
        let visible = |below: &&Command| !below.is_hide_set() && below.get_name() != "help";
        let mut below = one.get_subcommands().filter(visible).peekable();
        let is_leaf = below.peek().is_none();
        for verb in below {
            check(all, verb, format!("{at} {}", verb.get_name()).trim_start());
        }
        if !is_leaf {
            return;
        }
        let examples = examples(one);
        assert!(examples.len() >= 2, "`{at}` has {} examples", examples.len());
        let mut own = 0;
        for example in examples {
            let line = example.split(" > ").next().unwrap();
            let matches = all.clone().try_get_matches_from(line.split_whitespace());
            let matches = matches.unwrap_or_else(|error| panic!("{example}: {error}"));
            own += u32::from(path(&matches) == at);
        }
        assert!(own >= 1, "`{at}` is in none of its examples");
    }

    #[test]
    fn every_command_has_two_examples_that_it_accepts() {
        let all = command();
        check(&all, &all, "");
    }

    #[test]
    fn every_example_belongs_to_a_command() {
        for (at, _) in super::EXAMPLES {
            let mut command = command();
            for name in at.split(' ') {
                let found = command.find_subcommand(name).cloned();
                command = found.unwrap_or_else(|| panic!("there is no `{at}`"));
            }
        }
    }
}
