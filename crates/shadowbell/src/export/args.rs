//! The command line of `export`.

use crate::target::{self, Target};
use clap::ArgGroup;
use shadowbell_export::nbd;
use std::path::PathBuf;
use std::sync::LazyLock;

/// Export a disk: as a block device (ublk) or a file (FUSE), to tools (NBD), to a VM
/// (vhost-user-blk)
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP, after_long_help = LONG_HELP.as_str())]
#[command(group = ArgGroup::new("way").required(true).multiple(true))]
pub(crate) struct Args {
    /// What to export
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Serve it by NBD: unix:/run/disk.sock, tcp:127.0.0.1:10809; can be given more than once
    #[arg(long, value_name = "unix:PATH|tcp:ADDRESS", group = "way")]
    pub nbd: Vec<nbd::Address>,
    /// With --nbd: take no client without TLS, with the certificates in DIR
    ///
    /// DIR holds ca-cert.pem, server-cert.pem and server-key.pem, as nbdkit and QEMU have it.
    /// Clients have to show a certificate that this CA has signed.
    #[arg(long, value_name = "DIR", requires = "nbd")]
    pub tls_certificates: Option<PathBuf>,
    /// With --tls-certificates: take clients that show no certificate, too
    #[arg(long, requires = "tls_certificates")]
    pub tls_any_client: bool,
    /// Mount it over FILE as a file, which is made for that if it is not there; for a loop device
    #[arg(long, value_name = "FILE", group = "way")]
    pub fuse: Option<PathBuf>,
    /// Offer it to a VM as a virtio disk, behind this socket
    ///
    /// The VMM's memory for the guest has to be shared, and in a memfd or a file of tmpfs,
    /// hugetlbfs or a local disk; a VMM that shares anything else is sent away. One VMM at a time. A
    /// VMM that connects again goes on where it was, also if this command was killed meanwhile.
    #[arg(long, value_name = "PATH", group = "way")]
    pub vhost_user_blk: Option<PathBuf>,
    /// Make it a block device of this machine, /dev/ublkbN
    ///
    /// Takes root, and the kernel's module: `modprobe ublk_drv` (Linux 6.4 or later). The end of
    /// this program removes the device, once nobody has it mounted or open any more.
    #[arg(long, group = "way")]
    pub ublk: bool,
    /// The N in /dev/ublkbN [default: the first that is free]
    #[arg(long, value_name = "N", requires = "ublk",
        value_parser = clap::value_parser!(u32).range(0..1 << 20))]
    pub ublk_id: Option<u32>,
    /// Take /dev/ublkbN over if a server left it behind that was killed
    ///
    /// Whoever uses the device waits meanwhile, and what was not answered is done once more. A
    /// device that is not there is made, so that one command line serves every start.
    #[arg(long, requires = "ublk_id")]
    pub recover: bool,
    /// Have the kernel copy the data of requests to this program, even if they could go straight
    ///
    /// The data of a raw image or a block device that this program opens itself go straight between
    /// the kernel's memory and the disk, where the page cache is bypassed, no limit is set, and the
    /// kernel can (Linux 6.17 or later). An older release of this program can take a device over
    /// only if it was made with this option.
    #[arg(long, requires = "ublk")]
    pub ublk_copy: bool,
    /// Refuse everything that changes the disk
    #[arg(long)]
    pub read_only: bool,
    /// The export's name, and the disk's serial number in a VM
    #[arg(long, default_value = "", value_name = "NAME", hide_default_value = true)]
    pub name: String,
    /// Number of queues of the device for --ublk and --vhost-user-blk, and of a remote controller's
    /// queue pairs [default: one per processor, up to 4]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub queues: Option<u16>,
    /// Longest time in microseconds for which a thread polls before it sleeps [default: 50]
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub poll_max: Option<u32>,
    /// Time in seconds after which a request is cancelled
    #[arg(long, default_value_t = 30, value_name = "SECONDS",
        value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub timeout: u16,
}

/// What the long help ends with.
static LONG_HELP: LazyLock<String> = LazyLock::new(|| {
    format!(
        "{}

Examples:
  shadowbell export nvme://0000:01:00.0 --ublk
      a block device on the user-space driver: mkfs, mount, fio
  shadowbell export disk.img --ublk --ublk-id 7 --recover
      /dev/ublkb7, which goes on where it was if this command is killed and run again
  shadowbell export vfio-user:/run/vm0.sock --fuse /run/disk
      the same without ublk: `losetup --find --show /run/disk`
  shadowbell export nvme://0000:01:00.0 --nbd unix:/run/disk.sock --read-only
      for qemu-img, nbdcopy, fio; several ways to one disk can be given at once
  shadowbell export disk.img --nbd tcp:0.0.0.0:10809 --tls-certificates /etc/pki/shadowbell
      by a network, to clients with a certificate",
        target::HELP
    )
});
