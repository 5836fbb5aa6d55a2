//! The arguments that make a VMM use what is served.

use super::ServerPlan;
use super::options::Served;
use crate::logging;
use crate::plan::Doorbells;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The name of the socket in a directory, as SPDK has it.
const IN_DIRECTORY: &str = "cntrl";

/// Where a controller is, and who can use it there.
struct Place {
    socket: PathBuf,
    /// The directory that SPDK is told, and whether the doorbells are as its client wants them.
    spdk: Option<(PathBuf, bool)>,
}

impl Place {
    fn new(served: &Served) -> Self {
        let place = served.place();
        if !place.is_dir() {
            return Self { socket: place, spdk: None };
        }
        let mapped = served.controller.doorbells == Doorbells::Mapped;
        Self { socket: place.join(IN_DIRECTORY), spdk: Some((place, mapped)) }
    }
}

/// Prints, on standard output, what to paste. Says nothing if the person wants to hear nothing.
pub(super) fn show(plan: &ServerPlan) {
    if !logging::is_talkative() {
        return;
    }
    let places: Vec<Place> = plan.controllers.iter().map(Place::new).collect();
    // Whoever closed our output does not want it, which is no reason not to serve.
    let _ = std::io::stdout().lock().write_all(text(&places).as_bytes());
}

fn text(places: &[Place]) -> String {
    let mut text = String::from("For QEMU (10.1 or later), with the guest's memory as SIZE:\n\n");
    text.push_str(
        "  -m SIZE -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
         memory-backend=mem \\\n",
    );
    let devices: Vec<_> = places.iter().map(|place| format!("  {}", qemu(&place.socket))).collect();
    text.push_str(&devices.join(" \\\n"));
    text.push_str("\n\nFor Cloud Hypervisor:\n\n  --memory size=SIZE,shared=on \\\n");
    let devices: Vec<_> =
        places.iter().map(|place| format!("  {}", cloud_hypervisor(&place.socket))).collect();
    text.push_str(&devices.join(" \\\n"));
    text.push_str("\n\n");
    let spdk: Vec<_> = places.iter().filter_map(|place| place.spdk.as_ref()).collect();
    if !spdk.is_empty() {
        text.push_str("For SPDK, whose memory must be one file (-g in most of its programs):\n\n");
        for (directory, mapped) in spdk {
            let id = format!("trtype:VFIOUSER traddr:{}", directory.display());
            // It does without shadow doorbells here, and gives up where it can not map the others.
            let lacks = if *mapped { "" } else { "    # needs `--doorbells mapped` here" };
            text.push_str(&format!("  -r {}{lacks}\n", quoted(&id)));
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
    format!("-device {}", quoted(&device.to_string()))
}

fn cloud_hypervisor(socket: &Path) -> String {
    let argument = format!("socket={}", socket.display());
    let plain = |c: char| c.is_ascii_alphanumeric() || "=/._-+:@".contains(c);
    let argument = if argument.chars().all(plain) { argument } else { quoted(&argument) };
    format!("--user-device {argument}")
}

/// As one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_can_be_pasted() {
        let place = |path: &str| Place { socket: path.into(), spdk: None };
        let text = text(&[place("/run/vm0.sock"), place("/run/it's \"1\".sock")]);
        let expected = "For QEMU (10.1 or later), with the guest's memory as SIZE:\n\n  \
            -m SIZE -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem \\\n  \
            -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"path\":\"/run/vm0.sock\",\"type\":\"unix\"}}' \\\n  \
            -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"path\":\"/run/it'\\''s \\\"1\\\".sock\",\"type\":\"unix\"}}'\n\n\
            For Cloud Hypervisor:\n\n  --memory size=SIZE,shared=on \\\n  \
            --user-device socket=/run/vm0.sock \\\n  \
            --user-device 'socket=/run/it'\\''s \"1\".sock'\n\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_directory_is_for_spdk_and_the_socket_in_it_for_all_others() {
        let place = |name: &str, mapped| Place {
            socket: Path::new(name).join("cntrl"),
            spdk: Some((name.into(), mapped)),
        };
        let text = text(&[place("/run/a", true), place("/run/b", false)]);
        assert!(text.contains(r#""path":"/run/a/cntrl""#), "{text}");
        assert!(text.contains("--user-device socket=/run/b/cntrl"), "{text}");
        assert!(text.contains("  -r 'trtype:VFIOUSER traddr:/run/a'\n"), "{text}");
        let lacks = "  -r 'trtype:VFIOUSER traddr:/run/b'    # needs `--doorbells mapped` here\n";
        assert!(text.contains(lacks), "{text}");
    }
}
