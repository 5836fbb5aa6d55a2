//! The arguments that make a VMM use what is served.

use super::ServerPlan;
use crate::logging;
use std::io::Write;
use std::path::Path;

/// Prints, on standard output, what to paste. Says nothing if the person wants to hear nothing.
pub(super) fn show(plan: &ServerPlan) {
    if !logging::is_talkative() {
        return;
    }
    let sockets: Vec<_> = plan.controllers.iter().map(super::options::Served::place).collect();
    // Whoever closed our output does not want it, which is no reason not to serve.
    let _ = std::io::stdout().lock().write_all(text(&sockets).as_bytes());
}

fn text<P: AsRef<Path>>(sockets: &[P]) -> String {
    let mut text = String::from("For QEMU (10.1 or later), with the guest's memory as SIZE:\n\n");
    text.push_str(
        "  -m SIZE -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
         memory-backend=mem \\\n",
    );
    let devices: Vec<_> =
        sockets.iter().map(|socket| format!("  {}", qemu(socket.as_ref()))).collect();
    text.push_str(&devices.join(" \\\n"));
    text.push_str("\n\nFor Cloud Hypervisor:\n\n  --memory size=SIZE,shared=on \\\n");
    let devices: Vec<_> =
        sockets.iter().map(|socket| format!("  {}", cloud_hypervisor(socket.as_ref()))).collect();
    text.push_str(&devices.join(" \\\n"));
    text.push_str("\n\n");
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
        let text = text(&[Path::new("/run/vm0.sock"), Path::new("/run/it's \"1\".sock")]);
        let expected = "For QEMU (10.1 or later), with the guest's memory as SIZE:\n\n  \
            -m SIZE -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem \\\n  \
            -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"path\":\"/run/vm0.sock\",\"type\":\"unix\"}}' \\\n  \
            -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"path\":\"/run/it'\\''s \\\"1\\\".sock\",\"type\":\"unix\"}}'\n\n\
            For Cloud Hypervisor:\n\n  --memory size=SIZE,shared=on \\\n  \
            --user-device socket=/run/vm0.sock \\\n  \
            --user-device 'socket=/run/it'\\''s \"1\".sock'\n\n";
        assert_eq!(text, expected);
    }
}
