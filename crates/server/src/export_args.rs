//! Command line of `export`, the short form of a server with one disk and its exports.

use super::args::{Args, DISK, Exported, ServiceArgs};
use anyhow::anyhow;
use clap::ArgGroup;
use shadowbell_config::disk_spec::with_option;
use shadowbell_config::export_config::{ExportConfig, Mounted, UblkConfig};
use shadowbell_config::parse;
use shadowbell_config::target::{self, Target};
use shadowbell_export::nbd;
use shadowbell_process::exit;
use shadowbell_supervisor::permissions::Permissions;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Number of I/O queue pairs that an NBD export requests at least from a remote controller. Each
/// NBD client needs its own queue pair.
const NBD_QUEUE_PAIRS: u16 = 16;

/// Export a disk as a block device (ublk), a file (FUSE), by NBD, or to a VM (vhost-user-blk)
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP, after_long_help = LONG_HELP.as_str())]
#[command(group = ArgGroup::new("way").required(true).multiple(true))]
pub struct ExportArgs {
    /// Namespace or disk to export
    #[arg(value_name = "TARGET")]
    target: Target,
    /// Export by NBD: unix:/run/shadowbell/disk.sock, tcp:127.0.0.1:10809; can be given several
    /// times
    #[arg(long, value_name = "unix:PATH|tcp:ADDRESS", group = "way")]
    nbd: Vec<nbd::Address>,
    /// With --nbd: accept only clients with TLS, with the certificates in DIR
    ///
    /// DIR holds ca-cert.pem, server-cert.pem and server-key.pem, as for nbdkit and QEMU. Clients
    /// must have a certificate that this CA has signed.
    #[arg(long, value_name = "DIR", requires = "nbd")]
    tls_certificates: Option<PathBuf>,
    /// With --tls-certificates: also accept clients without a certificate
    #[arg(long, requires = "tls_certificates")]
    tls_any_client: bool,
    /// Export as a file by FUSE, mounted over FILE (created if missing), for a loop device
    #[arg(long, value_name = "FILE", group = "way")]
    fuse: Option<PathBuf>,
    /// Export to a VM as a virtio disk (vhost-user-blk), with this socket
    ///
    /// The guest's memory must be shared, in a memfd or a file of tmpfs, hugetlbfs or a local disk;
    /// other VMMs are refused. One VMM can be connected at a time. A VMM that reconnects continues
    /// its requests, even if this command was killed meanwhile.
    #[arg(long, value_name = "PATH", group = "way")]
    vhost_user_blk: Option<PathBuf>,
    /// Export as a block device of this machine, /dev/ublkbN
    ///
    /// Requires root and the kernel module: `modprobe ublk_drv` (Linux 6.4 or later). At its end,
    /// this program waits until the device is neither mounted nor open, and removes it.
    #[arg(long, group = "way")]
    ublk: bool,
    /// Number N of /dev/ublkbN [default: the first free one]
    #[arg(long, value_name = "N", requires = "ublk",
        value_parser = clap::value_parser!(u32).range(0..1 << 20))]
    ublk_id: Option<u32>,
    /// Recover /dev/ublkbN if a killed server left it behind
    ///
    /// Users of the device wait meanwhile, and unanswered requests are repeated. A missing device
    /// is created, so the same command line works for every start.
    #[arg(long, requires = "ublk_id")]
    recover: bool,
    /// Copy the data of requests to this program, even if zero-copy is possible
    ///
    /// Zero-copy applies to a raw image or a block device that this program opens itself, with the
    /// page cache bypassed, without rate limits, on Linux 6.17 or later. An older release of this
    /// program can take over only devices that were created with this option.
    #[arg(long, requires = "ublk")]
    ublk_copy: bool,
    /// Refuse requests that change the disk
    #[arg(long)]
    read_only: bool,
    /// Name of the NBD export, and serial number of the disk in a VM
    #[arg(long, default_value = "", value_name = "NAME", hide_default_value = true)]
    name: String,
    /// Number of queues of the device for --ublk and --vhost-user-blk, and of a remote controller's
    /// queue pairs [default: one per processor, up to 4]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Option<u16>,
    /// Longest time in microseconds for which a thread polls before it sleeps [default: 50]
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    poll_max: Option<u32>,
    /// Time after which a request is cancelled
    #[arg(long, default_value_t = 30, value_name = "TIME", value_parser = timeout)]
    timeout: u16,

    #[command(flatten)]
    service: ServiceArgs,
}

impl ExportArgs {
    /// Returns the equivalent command line of `serve`, for the disk and its exports.
    ///
    /// # Errors
    /// `--recover` is given for a memory disk, whose content was lost with the dead process.
    pub(super) fn serve(self) -> anyhow::Result<Args> {
        let disk = self.disk();
        if self.recover && disk.starts_with("mem:") {
            return Err(exit::bad_input(anyhow!(
                "{}: the content was lost with the process to recover from",
                self.target
            )));
        }
        let exports = self.exports();
        let sockets = exports.iter().filter_map(ExportConfig::path);
        let named = sockets.map(Path::to_owned).next().unwrap_or_else(|| DISK.into());
        let target = self.target.to_string();
        Ok(Args::of_exports(self.service, Exported { named, disk, target, exports }))
    }

    /// Permissions of the server process.
    ///
    /// # Errors
    /// As for [`Args::config`].
    pub fn permissions(self) -> anyhow::Result<Permissions> {
        self.serve()?.permissions(None)
    }

    /// Returns the specification of the disk. With `--read-only`, none of the disk's files is
    /// opened for writing.
    fn disk(&self) -> String {
        let Self { target, queues, timeout, .. } = self;
        let disk = if let Target::Local { disk } = target {
            disk.clone()
        } else {
            let queues = queues.unwrap_or_else(ExportConfig::default_queues);
            let pairs = if self.nbd.is_empty() { queues } else { queues.max(NBD_QUEUE_PAIRS) };
            format!("{target}?queue-pairs={pairs}&timeout={timeout}")
        };
        if self.read_only { with_option(&disk, "read-only", "on") } else { disk }
    }

    fn exports(&self) -> Vec<ExportConfig> {
        let export = |id: &str| ExportConfig {
            id: id.to_owned(),
            disk: DISK.to_owned(),
            name: self.name.clone(),
            read_only: self.read_only,
            share: true,
            poll_max_us: self.poll_max,
            timeout: Some(self.timeout),
            ..ExportConfig::default()
        };
        let nbd = self.nbd.iter().enumerate().map(|(nth, address)| ExportConfig {
            nbd: Some(address.to_string()),
            tls_certificates: self.tls_certificates.clone(),
            tls_any_client: self.tls_any_client,
            ..export(&if nth == 0 { "nbd".to_owned() } else { format!("nbd{nth}") })
        });
        let vhost = self.vhost_user_blk.iter().map(|path| ExportConfig {
            vhost_user_blk: Some(path.clone()),
            queues: self.queues,
            ..export("vhost-user-blk")
        });
        let fuse = self.fuse.iter().map(|path| ExportConfig {
            fuse: Some(path.clone()),
            mounted: Mounted::ByServer { created: false },
            ..export("fuse")
        });
        let ublk = self.ublk.then(|| ExportConfig {
            ublk: Some(UblkConfig {
                id: self.ublk_id,
                recover: self.recover,
                copy: self.ublk_copy,
            }),
            queues: self.queues,
            ..export("ublk")
        });
        nbd.chain(vhost).chain(ublk).chain(fuse).collect()
    }
}

fn timeout(text: &str) -> Result<u16, String> {
    parse::seconds(1..=3600)(text).map(|seconds| u16::try_from(seconds).unwrap_or(u16::MAX))
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
