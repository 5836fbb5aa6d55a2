//! An export that is killed and restarted with the same arguments, as by a service manager.

use crate::Export;
use rustix::process::Signal;
use shadowbell_testing::programs::can_run;
use shadowbell_testing::wait;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;

/// Environment variable with the number of kills. Long runs set it.
const KILLS: &str = "SHADOWBELL_EXPORT_KILLS";

/// Number of kills with each of `disks` disks: `default`, or a part of the kills of a long run.
pub(crate) fn kills_of_each(disks: usize, default: usize) -> usize {
    let kills = std::env::var(KILLS).map(|kills| kills.parse::<usize>().unwrap());
    kills.map_or(default, |kills| kills.div_ceil(disks))
}

/// Image that is exported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Image {
    Raw,
    /// qcow2 image without data, so that writes allocate.
    Qcow2,
    /// qcow2 image on a backing file, so that writes copy.
    Overlay,
}

impl Image {
    /// All kinds that can be created here.
    pub(crate) fn all() -> &'static [Self] {
        if can_run("qemu-img") { &[Self::Raw, Self::Qcow2, Self::Overlay] } else { &[Self::Raw] }
    }

    /// Creates `disk.img` in the directory, with zeroes as its content. Returns the target of its
    /// export. `DIR` in the target stands for the directory.
    pub(crate) fn create(self, directory: &Path, bytes: u64) -> &'static str {
        let raw = if self == Self::Overlay { "base.img" } else { "disk.img" };
        if self != Self::Qcow2 {
            File::create(directory.join(raw)).unwrap().set_len(bytes).unwrap();
        }
        let size = bytes.to_string();
        match self {
            Self::Raw => {}
            Self::Qcow2 => qemu_img(directory, &["create", "-q", "-fqcow2", "disk.img", &size]),
            Self::Overlay => {
                let backing = ["-b", "base.img", "-Fraw"];
                let create = [&["create", "-q", "-fqcow2"], &backing[..], &["disk.img"]].concat();
                qemu_img(directory, &create);
            }
        }
        match self {
            Self::Overlay => "local:DIR/disk.img?allow-backing=on",
            Self::Raw | Self::Qcow2 => "local:DIR/disk.img",
        }
    }

    /// Checks that the closed image in the directory has no error, and returns its content.
    pub(crate) fn content(self, directory: &Path) -> Vec<u8> {
        if self == Self::Raw {
            return std::fs::read(directory.join("disk.img")).unwrap();
        }
        qemu_img(directory, &["check", "-q", "-fqcow2", "disk.img"]);
        qemu_img(directory, &["convert", "-fqcow2", "-Oraw", "disk.img", "content"]);
        std::fs::read(directory.join("content")).unwrap()
    }
}

/// Runs `qemu-img` in a directory. Its status 3 means that a check has found leaked clusters only.
fn qemu_img(directory: &Path, arguments: &[&str]) {
    let output = Command::new("qemu-img").args(arguments).current_dir(directory).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "qemu-img {arguments:?}: {output:?}");
}

/// Exported image. When its export process has died, the next one is started with the same
/// arguments.
pub(crate) struct Service {
    /// Running export process. `None` while no process serves.
    export: Option<Export>,
    arguments: Vec<String>,
    directory: PathBuf,
}

impl Service {
    /// Exports an image of `bytes` bytes with `arguments`.
    pub(crate) fn start(bytes: u64, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        Self::start_on(Image::Raw, bytes, arguments, variables)
    }

    /// Like `start`, with a kind of image.
    pub(crate) fn start_on(
        image: Image,
        bytes: u64,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let target = image.create(directory.path(), bytes);
        // Without this option, a supervisor would start another server process after a kill, and
        // the export would not end.
        let arguments = [target, "--no-supervisor"].into_iter().chain(arguments.iter().copied());
        let arguments = arguments.map(str::to_owned).collect();
        let path = directory.path().to_owned();
        let mut service = Self { export: None, arguments, directory: path };
        service.run(directory, variables);
        service
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(crate) fn export(&mut self) -> &mut Export {
        self.export.as_mut().unwrap()
    }

    /// Returns true if the export process has died.
    pub(crate) fn has_died(&mut self) -> bool {
        self.export().child.try_wait().unwrap().is_some()
    }

    /// Kills the export process.
    pub(crate) fn kill(&mut self) {
        self.export().signal(Signal::KILL);
        self.export().wait();
    }

    /// Starts the next export process after the death of the previous one.
    pub(crate) fn restart(&mut self, variables: &[(&str, &str)]) {
        let mut dead = self.export.take().unwrap();
        dead.wait();
        let none = tempfile::tempdir().unwrap();
        let directory = std::mem::replace(&mut dead.directory, none);
        self.run(directory, variables);
    }

    /// Starts an export process, again and again until one succeeds. It fails while the image is
    /// locked, that is, while writes of the dead process are in flight.
    fn run(&mut self, mut directory: TempDir, variables: &[(&str, &str)]) {
        let arguments: Vec<_> = self.arguments.iter().map(String::as_str).collect();
        let deadline = wait::deadline();
        loop {
            let mut export = Export::run_with(directory, &arguments, variables);
            loop {
                let said = export.stderr();
                if said.contains("exporting") {
                    self.export = Some(export);
                    return;
                }
                if export.child.try_wait().unwrap().is_some() {
                    let said = export.stderr();
                    assert!(said.contains("another program"), "{said}");
                    break;
                }
                assert!(Instant::now() < deadline, "the export does not start: {said}");
                wait::pause();
            }
            let none = tempfile::tempdir().unwrap();
            directory = std::mem::replace(&mut export.directory, none);
        }
    }

    /// Ends the export with a signal, and expects success.
    pub(crate) fn stop(mut self) -> TempDir {
        self.export.take().unwrap().end()
    }
}
