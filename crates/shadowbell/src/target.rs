//! TARGETs: namespaces as people write them, and the way to them.

use crate::plan::PlanError;
use crate::{banner, exit, local};
use anyhow::{Context, anyhow};
use shadowbell_backend::OpenError;
use shadowbell_driver::{
    AttachOptions, Controller, Doorbells, Namespace, PciAddress, QueueMap, Steered, Transport,
    Vfio, VfioUser, steer_interrupts,
};
use std::fmt;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// How long a server may take to let us in: it serves one client at a time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// What a TARGET is, for the help text of the verbs that take one.
pub const HELP: &str = "\
A TARGET is one of
  vfio-user:/run/vm0.sock  a controller behind a vfio-user socket, namespace 1;
                           namespace 2 is vfio-user:/run/vm0.sock/2
  local:disk.img           a controller in this process over a disk, as `serve`
                           takes them: local:mem:1GiB, local:null:1TiB
  disk.img, mem:1GiB       the same; the path of a socket is a vfio-user target
  nvme://0000:01:00.0/1    a PCI device through VFIO, namespace 1; hand the device
                           over first with `shadowbell bind 0000:01:00.0`";

/// A namespace as a person names it. See [`HELP`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Behind a vfio-user socket.
    VfioUser {
        /// The socket, or a directory with `cntrl` in it.
        socket: PathBuf,
        /// The namespace.
        nsid: u32,
    },
    /// A PCI device, through VFIO.
    Vfio {
        /// Where it is.
        address: PciAddress,
        /// The namespace.
        nsid: u32,
    },
    /// On a controller in this process, over the disk that this names (see
    /// [`medium::open`](crate::medium::open)).
    Local {
        /// The disk.
        disk: String,
    },
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("vfio-user:") {
            let (socket, nsid) = split_nsid(rest)?;
            if socket.is_empty() {
                return Err("it lacks a socket; write for example `vfio-user:/run/vm0.sock`".into());
            }
            return Ok(Self::VfioUser { socket: socket.into(), nsid });
        }
        if let Some(rest) = text.strip_prefix("nvme:") {
            let (address, nsid) = split_nsid(rest.strip_prefix("//").unwrap_or(rest))?;
            return Ok(Self::Vfio { address: address.parse()?, nsid });
        }
        let disk = text.strip_prefix("local:").unwrap_or(text);
        if disk.is_empty() {
            return Err("it is empty; write for example `vfio-user:/run/vm0.sock` or \
                        `local:mem:1GiB`"
                .into());
        }
        if disk == text
            && let Some((socket, nsid)) = socket_in(text)
        {
            return Ok(Self::VfioUser { socket: socket.into(), nsid });
        }
        Ok(Self::Local { disk: disk.to_owned() })
    }
}

/// The socket of which `text` is the path, if there is one, and the namespace that may follow it.
fn socket_in(text: &str) -> Option<(&str, u32)> {
    if is_socket(Path::new(text)) {
        return Some((text, 1));
    }
    split_nsid(text).ok().filter(|(path, _)| is_socket(Path::new(path)))
}

fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|about| about.file_type().is_socket())
}

/// What to write instead of `path`, which is to be a disk, if it leads to a socket.
pub(crate) fn not_a_disk(path: &str) -> Option<String> {
    let (socket, nsid) = socket_in(path)?;
    Some(if socket == path {
        format!("{path}: it is a socket; the controller behind it is `vfio-user:{socket}`")
    } else {
        format!(
            "{path}: {socket} is a socket; namespace {nsid} of the controller behind it is \
             `vfio-user:{socket}/{nsid}`"
        )
    })
}

/// What to say of a TARGET that is no more than a path where nothing is.
fn nothing_at(path: &str) -> String {
    let looks_like_socket =
        Path::new(path).extension().is_some_and(|end| end == "sock" || end == "socket");
    let make = if looks_like_socket {
        format!("`shadowbell serve DISK --socket {path}` makes such a socket")
    } else {
        format!("`truncate -s 10G {path}` makes an image of zeroes")
    };
    format!(
        "{path}: there is no such file; a TARGET is a disk (disk.img, /dev/sdb, mem:1GiB), \
         vfio-user:PATH for a controller behind a socket, or nvme://0000:01:00.0 for a PCI device; \
         {make}"
    )
}

/// Takes a namespace identifier off the end: `/run/vm0.sock/2`.
fn split_nsid(text: &str) -> Result<(&str, u32), String> {
    match text.rsplit_once('/') {
        Some((socket, digits))
            if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) =>
        {
            match digits.parse() {
                // FFFFFFFFh stands for all namespaces, and is none.
                Ok(nsid) if nsid != 0 && nsid != u32::MAX => Ok((socket, nsid)),
                _ => Err(format!("`{digits}` is no namespace; they count from 1")),
            }
        }
        _ => Ok((text.strip_suffix('/').unwrap_or(text), 1)),
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VfioUser { socket, nsid } => write!(f, "vfio-user:{}/{nsid}", socket.display()),
            Self::Vfio { address, nsid } => write!(f, "nvme://{address}/{nsid}"),
            Self::Local { disk } => write!(f, "local:{disk}"),
        }
    }
}

impl Target {
    /// The namespace on its controller.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        match self {
            Self::VfioUser { nsid, .. } | Self::Vfio { nsid, .. } => *nsid,
            Self::Local { .. } => 1,
        }
    }

    /// The same controller, another namespace.
    #[must_use]
    pub fn with_nsid(&self, nsid: u32) -> Self {
        match self {
            Self::VfioUser { socket, .. } => Self::VfioUser { socket: socket.clone(), nsid },
            Self::Vfio { address, .. } => Self::Vfio { address: *address, nsid },
            Self::Local { .. } => self.clone(),
        }
    }

    /// Attaches the driver to the controller that has this namespace.
    ///
    /// # Errors
    /// With exit status [`exit::BAD_INPUT`] if nobody serves there or there is no such disk, and
    /// otherwise the driver's.
    pub fn attach(&self, options: &AttachOptions) -> anyhow::Result<Session> {
        Session::over(self.clone(), self.transport(options)?, options)
    }

    /// The way to the controller that has this namespace.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn transport(&self, options: &AttachOptions) -> anyhow::Result<Arc<dyn Transport>> {
        Ok(match self {
            Self::VfioUser { socket, .. } => {
                let transport = VfioUser::connect(socket, CONNECT_TIMEOUT).map_err(|error| {
                    let why = nobody_at(socket).unwrap_or_else(|| error.to_string());
                    let error = anyhow!("no controller behind {}: {why}", socket.display());
                    exit::bad_input(error)
                })?;
                Arc::new(transport)
            }
            Self::Vfio { address, .. } => Arc::new(Vfio::open(*address).map_err(exit::bad_input)?),
            Self::Local { disk } => {
                let disk = crate::medium::open(disk).map_err(|error| match error {
                    PlanError::Disk(OpenError::Missing { path }) => {
                        exit::bad_input(anyhow!(nothing_at(&path)))
                    }
                    error => error.into_error(),
                })?;
                let mapped = options.doorbells == Doorbells::Mapped;
                local::connect(disk, mapped)?
            }
        })
    }
}

/// Why nobody answers at a path, and what to do about it, if it is one of the plain reasons.
fn nobody_at(path: &Path) -> Option<String> {
    let path = if path.is_dir() { path.join("cntrl") } else { path.to_owned() };
    let serve = format!("`shadowbell serve DISK --socket {}`", path.display());
    match std::fs::metadata(&path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Some(format!("there is no such socket; {serve} makes one"))
        }
        Ok(file) if !file.file_type().is_socket() => Some("it is no socket".into()),
        Ok(_) => match UnixStream::connect(&path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                Some(format!("its server has ended; start it again, for example by {serve}"))
            }
            _ => None,
        },
        Err(_) => None,
    }
}

/// An attached controller, with the namespace that was asked for.
#[derive(Debug)]
pub struct Session {
    target: Target,
    /// Queue pairs that were asked for.
    asked: u16,
    /// What came of its interrupts, if they are the kernel's to send.
    steered: Option<Steered>,
    /// The controller.
    pub controller: Controller,
}

impl Session {
    /// Attaches to the controller at the other end of `transport`, which is that of `target`.
    ///
    /// # Errors
    /// The driver's.
    pub fn over(
        target: Target,
        transport: Arc<dyn Transport>,
        options: &AttachOptions,
    ) -> anyhow::Result<Self> {
        let controller =
            Controller::attach(transport, options).with_context(|| target.to_string())?;
        let steered = match &target {
            Target::Vfio { address, .. } if controller.has_interrupts() => {
                let map = QueueMap::of_this_machine(controller.queue_pairs());
                Some(steer_interrupts(*address, &map))
            }
            _ => None,
        };
        let session = Self { target, asked: options.queue_pairs, steered, controller };
        for line in session.banner() {
            tracing::debug!("{line}");
        }
        Ok(session)
    }

    /// Lines that tell a person what was attached.
    #[must_use]
    pub fn banner(&self) -> Vec<String> {
        banner::banner(&self.controller, self.asked, self.steered.as_ref())
    }

    /// What was asked for.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The namespace that was asked for.
    ///
    /// # Errors
    /// With exit status [`exit::BAD_INPUT`], if it is not there or can not be read and written.
    pub fn namespace(&self) -> anyhow::Result<&Namespace> {
        let nsid = self.target.nsid();
        let Some(namespace) = self.controller.namespace(nsid) else {
            let there: Vec<_> =
                self.controller.namespaces().iter().map(|ns| ns.nsid().to_string()).collect();
            let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
            return Err(exit::bad_input(anyhow!(
                "{}: there is no namespace {nsid}; active are: {there}",
                self.target
            )));
        };
        match namespace.unusable() {
            None => Ok(namespace),
            Some(what) => Err(exit::bad_input(anyhow!(
                "{}: the namespace {what}, which this program can not handle",
                self.target
            ))),
        }
    }

    /// What a report calls the device: `shadowbell`, or the model number of another's controller.
    #[must_use]
    pub fn device(&self) -> String {
        let model = self.controller.identity().model().to_string();
        if model.starts_with("Shadowbell") { "shadowbell".to_owned() } else { model }
    }

    /// Leaves the controller as a good driver does.
    ///
    /// # Errors
    /// The driver's, if the controller did not shut down in order.
    pub fn detach(self) -> anyhow::Result<()> {
        self.controller.detach().with_context(|| self.target.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vfio_user(socket: &str, nsid: u32) -> Result<Target, String> {
        Ok(Target::VfioUser { socket: socket.into(), nsid })
    }

    #[test]
    fn who_does_not_answer_is_missed_in_a_sentence() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("file"), "").unwrap();
        drop(std::os::unix::net::UnixListener::bind(path("ended")).unwrap());
        for (name, words) in [
            ("none", "there is no such socket; `shadowbell serve DISK --socket "),
            ("file/none", "there is no such socket"),
            ("", "/cntrl` makes one"),
            ("file", "it is no socket"),
            ("ended", "its server has ended; start it again"),
        ] {
            let target = Target::VfioUser { socket: path(name), nsid: 1 };
            let Err(error) = target.attach(&AttachOptions::default()) else { panic!("{name}") };
            assert_eq!(exit::status(&error), exit::BAD_INPUT);
            assert!(error.to_string().contains(words), "{name}: {error}");
        }
    }

    #[test]
    fn targets_are_what_people_write() {
        assert_eq!("vfio-user:/run/vm0.sock".parse(), vfio_user("/run/vm0.sock", 1));
        assert_eq!("vfio-user:/run/vm0.sock/".parse(), vfio_user("/run/vm0.sock", 1));
        assert_eq!("vfio-user:/run/vm0.sock/2".parse(), vfio_user("/run/vm0.sock", 2));
        assert_eq!("vfio-user:vm0.sock".parse(), vfio_user("vm0.sock", 1));
        assert_eq!("vfio-user:/run/7/1".parse(), vfio_user("/run/7", 1));
        let vfio = |address: &str, nsid| {
            Ok::<_, String>(Target::Vfio { address: address.parse().unwrap(), nsid })
        };
        assert_eq!("nvme://0000:01:00.0/1".parse(), vfio("01:00.0", 1));
        assert_eq!("nvme://01:00.0/3".parse(), vfio("0000:01:00.0", 3));
        assert_eq!("nvme://0000:01:00.0".parse(), vfio("0000:01:00.0", 1));
        let local = |disk: &str| Ok::<_, String>(Target::Local { disk: disk.into() });
        assert_eq!("local:mem:1GiB".parse(), local("mem:1GiB"));
        assert_eq!("null:1TiB".parse(), local("null:1TiB"));
        assert_eq!("local:disk.img?read-only=on".parse(), local("disk.img?read-only=on"));
        assert_eq!("disk.img".parse(), local("disk.img"));
        assert_eq!("disk/1".parse(), local("disk/1"));
    }

    #[test]
    fn a_target_reads_as_it_is_written() {
        for text in [
            "vfio-user:/run/vm0.sock/3",
            "nvme://0000:01:00.0/2",
            "local:mem:1GiB",
            "local:disk.img",
        ] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (text, words) in [
            ("", "empty"),
            ("local:", "empty"),
            ("vfio-user:", "lacks a socket"),
            ("vfio-user:/1", "lacks a socket"),
            ("vfio-user:/run/vm0.sock/0", "count from 1"),
            ("vfio-user:/run/vm0.sock/4294967295", "count from 1"),
            ("vfio-user:/run/vm0.sock/99999999999", "count from 1"),
            ("nvme://0000:01:00.0/0", "count from 1"),
            ("nvme://nvme0n1", "is no PCI address"),
            ("nvme:", "is no PCI address"),
        ] {
            let error = text.parse::<Target>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn the_path_of_a_socket_is_a_vfio_user_target() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm0.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let target: Target = path.to_str().unwrap().parse().unwrap();
        assert_eq!(target, Target::VfioUser { socket: path, nsid: 1 });
    }

    #[test]
    fn other_namespaces_are_of_the_same_controller() {
        let target: Target = "vfio-user:/run/vm0.sock".parse().unwrap();
        assert_eq!(target.with_nsid(4).to_string(), "vfio-user:/run/vm0.sock/4");
        assert_eq!(target.with_nsid(4).nsid(), 4);
    }
}
