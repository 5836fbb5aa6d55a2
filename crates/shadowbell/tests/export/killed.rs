//! An export that is killed and restarted with the same arguments, as by a service manager.

use crate::Export;
use rustix::process::Signal;
use shadowbell_testing::wait;
use std::fs::File;
use std::path::PathBuf;
use std::time::Instant;
use tempfile::TempDir;

/// An image exported by one process after another.
pub(crate) struct Service {
    /// None while no process serves.
    export: Option<Export>,
    arguments: Vec<String>,
    directory: PathBuf,
}

impl Service {
    /// Exports an image of `bytes` bytes with `arguments`.
    pub(crate) fn start(bytes: u64, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        File::create(directory.path().join("disk.img")).unwrap().set_len(bytes).unwrap();
        // Without a supervisor, whose next server process would continue the export.
        let arguments = ["local:DIR/disk.img", "--no-keeper"].iter().chain(arguments);
        let arguments = arguments.map(|argument| (*argument).to_owned()).collect();
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

    /// Starts processes until one exports: the image is locked while writes of the dead process are
    /// in flight.
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
        let mut export = self.export.take().unwrap();
        export.signal(Signal::TERM);
        let status = export.wait();
        assert_eq!(status.code(), Some(0), "{}", export.stderr());
        std::mem::replace(&mut export.directory, tempfile::tempdir().unwrap())
    }
}
