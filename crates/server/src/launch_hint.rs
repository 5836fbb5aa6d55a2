//! Command-line arguments for VMMs, printed at start-up.

use shadowbell_config::controller_config::OfferedDoorbells;
use shadowbell_config::server_config::{ServerConfig, SocketConfig};
use shadowbell_process::{logging, shell_quote};
use std::path::{Path, PathBuf};

/// Socket name in a directory, as in SPDK.
const IN_DIRECTORY: &str = "cntrl";

/// Socket of a controller, with the data for SPDK's command line.
struct Endpoint {
    socket: PathBuf,
    /// Directory of the socket (SPDK addresses a controller by this directory), and true if
    /// doorbells are mapped as SPDK's client requires. `None` if the socket is not in a directory
    /// for SPDK.
    spdk: Option<(PathBuf, bool)>,
}

impl Endpoint {
    fn new(served: &SocketConfig) -> Self {
        let path = served.absolute_socket();
        if !path.is_dir() {
            return Self { socket: path, spdk: None };
        }
        let mapped = served.controller.doorbells == OfferedDoorbells::Mapped;
        Self { socket: path.join(IN_DIRECTORY), spdk: Some((path, mapped)) }
    }
}

/// Prints the arguments to standard output, except with `--quiet`.
pub(super) fn show(config: &ServerConfig) {
    if !logging::is_informational() || config.controllers.is_empty() {
        return;
    }
    let endpoints: Vec<Endpoint> = config.controllers.iter().map(Endpoint::new).collect();
    shell_quote::print_commands(text(&endpoints));
}

fn text(endpoints: &[Endpoint]) -> String {
    // Several controllers usually belong to several guests, so their lines are no single command.
    let (of_guest, joint) = match endpoints.len() {
        1 => ("", " \\\n"),
        _ => (" and the lines of its own controllers", "\n"),
    };
    let lines = |device: fn(&Path) -> String| {
        let lines = endpoints.iter().map(|endpoint| format!("  {}", device(&endpoint.socket)));
        lines.collect::<Vec<_>>().join("\n")
    };
    let mut text =
        format!("For QEMU (10.1 or later), with the guest's memory as SIZE{of_guest}:\n\n");
    text.push_str(
        "  -m SIZE -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
         memory-backend=mem",
    );
    text.push_str(&format!("{joint}{}", lines(qemu)));
    text.push_str("\n\nFor Cloud Hypervisor:\n\n  --memory size=SIZE,shared=on");
    text.push_str(&format!("{joint}{}\n\n", lines(cloud_hypervisor)));
    let spdk: Vec<_> = endpoints.iter().filter_map(|endpoint| endpoint.spdk.as_ref()).collect();
    if !spdk.is_empty() {
        text.push_str("For SPDK, whose memory must be one file (-g in most of its programs):\n\n");
        for (directory, mapped) in spdk {
            let id = format!("trtype:VFIOUSER traddr:{}", directory.display());
            // SPDK's client does not use shadow doorbells, and fails if it cannot map the
            // doorbell page.
            let lacks = if *mapped { "" } else { "    # needs `--doorbells mapped` here" };
            text.push_str(&format!("  -r {}{lacks}\n", shell_quote::quote(&id)));
        }
        text.push('\n');
    }
    text
}

fn qemu(socket: &Path) -> String {
    let device = serde_json::json!({
        "driver": "vfio-user-pci",
        "socket": { "type": "unix", "path": socket.to_string_lossy() },
    });
    format!("-device {}", shell_quote::quote(&device.to_string()))
}

fn cloud_hypervisor(socket: &Path) -> String {
    format!("--user-device {}", shell_quote::quote(&format!("socket={}", socket.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_can_be_pasted() {
        let endpoint = |path: &str| Endpoint { socket: path.into(), spdk: None };
        let one = text(&[endpoint("/run/it's \"1\".sock")]);
        let expected = "For QEMU (10.1 or later), with the guest's memory as SIZE:\n\n  \
            -m SIZE -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem \\\n  \
            -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"path\":\"/run/it'\\''s \\\"1\\\".sock\",\"type\":\"unix\"}}'\n\n\
            For Cloud Hypervisor:\n\n  --memory size=SIZE,shared=on \\\n  \
            --user-device 'socket=/run/it'\\''s \"1\".sock'\n\n";
        assert_eq!(one, expected);
    }

    /// No guest may get the disks of another one because its operator has pasted the text as it is.
    #[test]
    fn the_lines_of_several_controllers_are_not_one_command() {
        let endpoint = |path: &str| Endpoint { socket: path.into(), spdk: None };
        let text = text(&[endpoint("/run/vm0.sock"), endpoint("/run/vm1.sock")]);
        assert!(
            !text.contains('\\') && text.contains("the lines of its own controllers"),
            "{text}"
        );
        let devices = text.lines().filter(|line| line.starts_with("  -device "));
        assert_eq!(devices.count(), 2, "{text}");
    }

    #[test]
    fn spdk_gets_the_directory_and_other_clients_the_socket() {
        let endpoint = |name: &str, mapped| Endpoint {
            socket: Path::new(name).join("cntrl"),
            spdk: Some((name.into(), mapped)),
        };
        let text = text(&[endpoint("/run/a", true), endpoint("/run/b", false)]);
        assert!(text.contains(r#""path":"/run/a/cntrl""#), "{text}");
        assert!(text.contains("--user-device socket=/run/b/cntrl"), "{text}");
        assert!(text.contains("  -r 'trtype:VFIOUSER traddr:/run/a'\n"), "{text}");
        let lacks = "  -r 'trtype:VFIOUSER traddr:/run/b'    # needs `--doorbells mapped` here\n";
        assert!(text.contains(lacks), "{text}");
    }
}
