//! The command line of `export`.

use clap::ArgGroup;
use shadowbell_config::target::{self, Target};
use shadowbell_export::nbd;
use std::path::PathBuf;
use std::sync::LazyLock;

/// Export a disk as a block device (ublk), a file (FUSE), by NBD, or to a VM (vhost-user-blk)
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP, after_long_help = LONG_HELP.as_str())]
#[command(group = ArgGroup::new("way").required(true).multiple(true))]
pub(crate) struct Args {
    /// Namespace or disk to export
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Export by NBD: unix:/run/shadowbell/disk.sock, tcp:127.0.0.1:10809; can be given several
    /// times
    #[arg(long, value_name = "unix:PATH|tcp:ADDRESS", group = "way")]
    pub nbd: Vec<nbd::Address>,
    /// With --nbd: accept only clients with TLS, with the certificates in DIR
    ///
    /// DIR holds ca-cert.pem, server-cert.pem and server-key.pem, as for nbdkit and QEMU. Clients
    /// must have a certificate that this CA has signed.
    #[arg(long, value_name = "DIR", requires = "nbd")]
    pub tls_certificates: Option<PathBuf>,
    /// With --tls-certificates: also accept clients without a certificate
    #[arg(long, requires = "tls_certificates")]
    pub tls_any_client: bool,
    /// Export as a file by FUSE, mounted over FILE (created if missing), for a loop device
    #[arg(long, value_name = "FILE", group = "way")]
    pub fuse: Option<PathBuf>,
    /// Export to a VM as a virtio disk (vhost-user-blk), with this socket
    ///
    /// The guest's memory must be shared, in a memfd or a file of tmpfs, hugetlbfs or a local disk;
    /// other VMMs are refused. One VMM can be connected at a time. A VMM that reconnects continues
    /// its requests, even if this command was killed meanwhile.
    #[arg(long, value_name = "PATH", group = "way")]
    pub vhost_user_blk: Option<PathBuf>,
    /// Export as a block device of this machine, /dev/ublkbN
    ///
    /// Requires root and the kernel module: `modprobe ublk_drv` (Linux 6.4 or later). At its end,
    /// this program waits until the device is neither mounted nor open, and removes it.
    #[arg(long, group = "way")]
    pub ublk: bool,
    /// Number N of /dev/ublkbN [default: the first free one]
    #[arg(long, value_name = "N", requires = "ublk",
        value_parser = clap::value_parser!(u32).range(0..1 << 20))]
    pub ublk_id: Option<u32>,
    /// Recover /dev/ublkbN if a killed server left it behind
    ///
    /// Users of the device wait meanwhile, and unanswered requests are repeated. A missing device
    /// is created, so the same command line works for every start.
    #[arg(long, requires = "ublk_id")]
    pub recover: bool,
    /// Copy the data of requests to this program, even if zero-copy is possible
    ///
    /// Zero-copy applies to a raw image or a block device that this program opens itself, with the
    /// page cache bypassed, without rate limits, on Linux 6.17 or later. An older release of this
    /// program can take over only devices that were created with this option.
    #[arg(long, requires = "ublk")]
    pub ublk_copy: bool,
    /// Refuse requests that change the disk
    #[arg(long)]
    pub read_only: bool,
    /// Name of the NBD export, and serial number of the disk in a VM
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

/// End of the long help: target syntax and examples.
static LONG_HELP: LazyLock<String> = LazyLock::new(|| {
    format!(
        "{}

Examples:
  shadowbell export nvme://0000:01:00.0 --ublk
      block device on top of the user-space driver: mkfs, mount, fio
  shadowbell export disk.img --ublk --ublk-id 7 --recover
      /dev/ublkb7; if this command is killed, running it again recovers the device
  shadowbell export vfio-user:/run/shadowbell/vm0.sock --fuse /run/disk
      block device without ublk: `losetup --find --show /run/disk`
  shadowbell export nvme://0000:01:00.0 --nbd unix:/run/shadowbell/disk.sock --read-only
      for qemu-img, nbdcopy, fio; several exports of one disk can be combined
  shadowbell export disk.img --nbd tcp:0.0.0.0:10809 --tls-certificates /etc/pki/shadowbell
      over a network, for clients with a certificate",
        target::HELP
    )
});
