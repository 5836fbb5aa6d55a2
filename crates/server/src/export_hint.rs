//! Example commands for clients of an export, printed after the start.

use super::running_exports::{ExportDevice, Exports, RunningExport};
use shadowbell_export::nbd::Address;
use shadowbell_process::logging;
use shadowbell_process::process_env;
use shadowbell_process::shell_quote::{self, quote as quoted};
use std::path::Path;

/// Prints the commands on standard output. Prints nothing with `--quiet`.
pub(super) fn show(exports: &Exports) {
    if logging::is_informational() && !exports.is_empty() {
        let target = exports.target.get();
        shell_quote::print_commands(exports.map(|export| hint(export, target)).concat());
    }
}

fn hint(export: &RunningExport, target: Option<&String>) -> String {
    let RunningExport { config, block, device } = export;
    match device {
        ExportDevice::Nbd(server) => {
            let text = if config.tls_certificates.is_some() { nbd_by_tls } else { nbd };
            // The path is made absolute without a system call for the working directory, which the
            // sandbox forbids.
            text(
                &match server.address() {
                    Address::Unix(path) => Address::Unix(process_env::absolute(path)),
                    tcp @ Address::Tcp(_) => tcp.clone(),
                },
                &config.name,
            )
        }
        ExportDevice::VhostUserBlk(device) => vhost((device.path(), block.queues())),
        ExportDevice::Fuse(_, path) => fuse(path),
        ExportDevice::Ublk(device) => {
            let target = target.cloned().unwrap_or_else(|| block.disk().name());
            ublk(device.path(), device.id(), &target)
        }
    }
}

fn nbd(address: &Address, name: &str) -> String {
    let uri = address.uri(name);
    let client = match address {
        Address::Unix(path) => format!("-unix {}", quoted(&path.to_string_lossy())),
        Address::Tcp(address) if address.ip().is_unspecified() => {
            format!("localhost {}", address.port())
        }
        Address::Tcp(address) => format!("{} {}", address.ip(), address.port()),
    };
    let name = if name.is_empty() { String::new() } else { format!(" -N {}", quoted(name)) };
    let uri = quoted(&uri);
    format!(
        "For QEMU, its tools, libnbd's tools, and fio:\n\n  \
         qemu-system-x86_64 ... -drive file={uri},format=raw,if=virtio\n  \
         qemu-img info {uri}\n  \
         nbdcopy {uri} disk.img\n\n\
         As a block device of this machine:\n\n  \
         nbd-client {client}{name} /dev/nbd0\n\n"
    )
}

fn nbd_by_tls(address: &Address, name: &str) -> String {
    let uri = address.uri(name).replacen("nbd", "nbds", 1);
    let separator = if uri.contains('?') { '&' } else { '?' };
    // `DIR` is a placeholder for the directory of the client's certificates.
    let uri = quoted(&format!("{uri}{separator}tls-certificates=DIR"));
    let server = match address {
        Address::Unix(path) => {
            format!("server.type=unix,server.path={},tls-hostname=localhost", path.display())
        }
        Address::Tcp(address) => {
            let is_any = address.ip().is_unspecified();
            let host = if is_any { "HOST".to_owned() } else { address.ip().to_string() };
            format!("server.type=inet,server.host={host},server.port={}", address.port())
        }
    };
    let export = if name.is_empty() { String::new() } else { format!(",export={name}") };
    let image = quoted(&format!("driver=nbd,{server}{export},tls-creds=tls"));
    format!(
        "For libnbd's tools, fio and a disk of Shadowbell, with the client's certificates in DIR:\n\n  \
         nbdcopy {uri} disk.img\n\n\
         For QEMU and its tools:\n\n  \
         qemu-img info --object tls-creds-x509,id=tls,endpoint=client,dir=DIR --image-opts {image}\n\n"
    )
}

fn vhost((path, queues): (&Path, usize)) -> String {
    let path = path.to_string_lossy();
    let chardev = quoted(&format!("socket,id=disk,path={path}"));
    let disk = quoted(&format!("vhost_user=true,socket={path},num_queues={queues}"));
    format!(
        "For QEMU, with the guest's memory as SIZE:\n\n  \
         -m SIZE -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
         memory-backend=mem \\\n  \
         -chardev {chardev} -device vhost-user-blk-pci,chardev=disk,num-queues={queues}\n\n\
         For Cloud Hypervisor:\n\n  \
         --memory size=SIZE,shared=on --disk {disk}\n\n"
    )
}

fn ublk(path: &Path, id: u32, target: &str) -> String {
    let path = path.display();
    let target = quoted(target);
    format!(
        "As a block device of this machine:\n\n  \
         {path}\n\n\
         If this program is killed, users of the device wait until it is recovered with\n\n  \
         shadowbell export {target} --ublk --ublk-id {id} --recover\n\n"
    )
}

fn fuse(path: &Path) -> String {
    let path = quoted(&path.to_string_lossy());
    format!(
        "As a block device of this machine:\n\n  \
         losetup --find --show {path}\n\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_commands_are_quoted_for_a_shell() {
        let text = nbd(&"unix:/run/disk.sock".parse().unwrap(), "");
        assert_eq!(
            text,
            "For QEMU, its tools, libnbd's tools, and fio:\n\n  \
             qemu-system-x86_64 ... -drive file='nbd+unix:///?socket=/run/disk.sock',format=raw,if=virtio\n  \
             qemu-img info 'nbd+unix:///?socket=/run/disk.sock'\n  \
             nbdcopy 'nbd+unix:///?socket=/run/disk.sock' disk.img\n\n\
             As a block device of this machine:\n\n  \
             nbd-client -unix /run/disk.sock /dev/nbd0\n\n"
        );
        let text = nbd_by_tls(&"tcp:10.0.0.1:4000".parse().unwrap(), "a");
        assert!(
            text.contains("nbdcopy 'nbds://10.0.0.1:4000/a?tls-certificates=DIR' disk"),
            "{text}"
        );
        assert!(text.contains("server.host=10.0.0.1,server.port=4000,export=a,tls-creds=tls"));
        let text = nbd_by_tls(&"unix:/run/d".parse().unwrap(), "");
        assert!(text.contains("nbds+unix:///?socket=/run/d&tls-certificates=DIR"), "{text}");
        let text = nbd(&"tcp::4000".parse().unwrap(), "a disk");
        assert!(text.contains("nbd-client localhost 4000 -N 'a disk' /dev/nbd0"), "{text}");
        assert!(text.contains("nbd://localhost:4000/a%20disk"), "{text}");
        let text = vhost((Path::new("/run/disk.sock"), 2));
        assert!(
            text.contains(
                "-chardev socket,id=disk,path=/run/disk.sock \
                 -device vhost-user-blk-pci,chardev=disk,num-queues=2\n"
            ),
            "{text}"
        );
        let text = ublk(Path::new("/dev/ublkb3"), 3, "local:my disk.img");
        assert!(text.contains("\n  /dev/ublkb3\n\n"), "{text}");
        let again = "shadowbell export 'local:my disk.img' --ublk --ublk-id 3 --recover\n";
        assert!(text.contains(again), "{text}");
        let text = fuse(Path::new("/run/disk"));
        assert!(text.ends_with("\n  losetup --find --show /run/disk\n\n"), "{text}");
    }
}
