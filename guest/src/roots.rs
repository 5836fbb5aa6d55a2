//! Root file systems that are downloaded from Debian and stored under `target/guest/` of the
//! repository: one root with QEMU and the guest's programs, and one root for each guest kernel.
//!
//! Each root has a stamp that identifies its recipe. If the stamp is missing or different, the root
//! is built again in another directory and then replaced, so an interrupted download leaves the old
//! root unchanged. A lock file prevents two runs from building the same root.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::config::Kernel;
use crate::host;

/// Recipe of a root file system.
struct Recipe {
    name: &'static str,
    what: &'static str,
    suite: &'static str,
    /// Additional suites of the archive. Packages of the last one take precedence.
    backports: Option<&'static str>,
    /// mmdebstrap variant: `minbase` configures the packages, so that programs can run in a chroot;
    /// `extract` only unpacks them.
    variant: &'static str,
    packages: &'static [&'static str],
}

const TOOLS: Recipe = Recipe {
    name: "tools",
    what: "QEMU and the guest's programs",
    suite: "trixie",
    backports: Some("trixie-backports"),
    variant: "minbase",
    packages: &[
        // QEMU and firmware.
        "qemu-system-x86",
        "seabios",
        "ovmf",
        // Programs of the guest.
        "busybox",
        "e2fsprogs",
        "fio",
        "nvme-cli",
        "qemu-utils",
        "util-linux",
        // Programs that pack the guest's files.
        "xz-utils",
        "zstd",
        // Programs that make a boot disk.
        "binutils",
        "dosfstools",
        "fdisk",
        "mtools",
        "systemd-boot-efi",
    ],
};

fn kernel_recipe(kernel: Kernel) -> Recipe {
    let (name, what, suite, backports) = match kernel {
        Kernel::V6_1 => ("kernel-6.1", "Linux 6.1", "bookworm", None),
        Kernel::V7_2 => ("kernel-7.2", "Linux 7.2", "trixie", Some("trixie-backports")),
    };
    let packages = &["linux-image-cloud-amd64"];
    Recipe { name, what, suite, backports, variant: "extract", packages }
}

impl Recipe {
    /// Text that identifies the contents of the root. The mirror is not part of it, because all
    /// mirrors have the same packages.
    fn stamp(&self) -> String {
        format!(
            "{} {} {} {}\n",
            self.suite,
            self.backports.unwrap_or("-"),
            self.variant,
            self.packages.join(",")
        )
    }
}

/// Downloaded roots.
#[derive(Debug, Clone)]
pub struct Roots {
    directory: PathBuf,
}

impl Roots {
    /// Downloads the roots of `kernels`, unless they exist. `workspace` is the root of the
    /// repository.
    ///
    /// # Errors
    ///
    /// A prerequisite is missing (see [`host::prepare`]), or a download failed. The error then
    /// contains the end of the download's log.
    pub fn fetch(workspace: &Path, kernels: &[Kernel]) -> Result<Self> {
        let directory = workspace.join("target/guest");
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        host::prepare()?;
        let lock = File::create(directory.join("lock")).context("the lock of target/guest")?;
        lock.lock().context("the lock of target/guest")?;
        let roots = Self { directory };
        roots.fetch_one(&TOOLS)?;
        for &kernel in kernels {
            roots.fetch_one(&kernel_recipe(kernel))?;
        }
        Ok(roots)
    }

    /// Directory for the files that later runs use again.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Debian root with QEMU and the guest's programs, for chroot.
    pub fn tools(&self) -> PathBuf {
        self.directory.join(TOOLS.name)
    }

    /// Absolute path of the kernel image.
    pub fn kernel(&self, kernel: Kernel) -> Result<PathBuf> {
        let root = self.directory.join(kernel_recipe(kernel).name);
        // Newer packages of Debian have the image in the directory of the modules instead of
        // /boot.
        let boot = files_in(&root.join("boot"));
        let beside_modules = files_in(&root.join("usr/lib/modules"))
            .into_iter()
            .map(|directory| directory.join("vmlinuz"));
        boot.into_iter()
            .filter(|path| {
                path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"))
            })
            .chain(beside_modules)
            .find(|path| path.is_file())
            .with_context(|| format!("no kernel image in {}", root.display()))
    }

    /// Release of the kernel, as in `uname -r`. Debian updates its backports, so the release may be
    /// newer than the name of the [`Kernel`].
    pub fn release(&self, kernel: Kernel) -> Result<String> {
        let root = self.directory.join(kernel_recipe(kernel).name);
        ["usr/lib/modules", "lib/modules"]
            .into_iter()
            .flat_map(|directory| files_in(&root.join(directory)))
            .find(|path| path.is_dir())
            .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .with_context(|| format!("no kernel's modules in {}", root.display()))
    }

    /// Paths of the kernel's modules with these names. A module without a path is built into the
    /// kernel, or does not exist in its version.
    pub fn modules(&self, kernel: Kernel, names: &[&str]) -> Vec<PathBuf> {
        let root = self.directory.join(kernel_recipe(kernel).name);
        let mut directories = vec![root.join("usr/lib/modules"), root.join("lib/modules")];
        let mut found = vec![None; names.len()];
        while let Some(directory) = directories.pop() {
            for path in files_in(&directory) {
                let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let name = file.split(".ko").next().unwrap_or_default();
                if path.is_dir() && !path.is_symlink() {
                    directories.push(path);
                } else if let Some(place) = names.iter().position(|wanted| *wanted == name)
                    && file.contains(".ko")
                    && let Some(slot) = found.get_mut(place)
                {
                    *slot = Some(path);
                }
            }
        }
        found.into_iter().flatten().collect()
    }

    /// Command inside the tools root, in its own mount namespace. `binds` are pairs of a host
    /// directory and its path inside. All mounts end with the process. The process is killed when
    /// the starting thread ends.
    pub fn command(&self, binds: &[(&Path, &str)], program: &str) -> Result<Command> {
        let tools = self.tools();
        let mut script = String::from("set -e\n");
        let mut bind = |from: &Path, to: &str| -> Result<()> {
            let target = tools.join(to.trim_start_matches('/'));
            fs::create_dir_all(&target).with_context(|| target.display().to_string())?;
            script += &format!("mount --rbind {} {}\n", quote(from), quote(&target));
            Ok(())
        };
        bind(Path::new("/dev"), "/dev")?;
        bind(Path::new("/proc"), "/proc")?;
        for (from, to) in binds {
            bind(from, to)?;
        }
        script += &format!("exec chroot {} \"$@\"\n", quote(&tools));
        // setpriv, unshare, sh and chroot exec each other, so there is only one process.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]);
        command.args(["sh", "-c", &script, "sh", program]);
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null());
        Ok(command)
    }

    fn fetch_one(&self, recipe: &Recipe) -> Result<()> {
        let root = self.directory.join(recipe.name);
        let stamp = self.directory.join(format!("{}.stamp", recipe.name));
        if root.is_dir() && fs::read_to_string(&stamp).is_ok_and(|text| text == recipe.stamp()) {
            return Ok(());
        }
        eprintln!("fetching {} (once, about half a minute) ...", recipe.what);
        let began = Instant::now();
        remove(&stamp)?;
        remove(&root)?;
        let partial = self.directory.join(format!("{}.partial", recipe.name));
        remove(&partial)?;
        let log = self.directory.join(format!("{}.log", recipe.name));
        let log_file = File::create(&log).with_context(|| log.display().to_string())?;
        let mirror = host::debian_mirror()?;
        let source =
            |suite: &str| format!("deb [signed-by={}] {mirror} {suite} main", host::KEYRING);

        let mut command = Command::new("mmdebstrap");
        command.arg(format!("--variant={}", recipe.variant));
        command.args(["--aptopt=APT::Install-Recommends \"false\"", "--architectures=amd64"]);
        if let Some(backports) = recipe.backports {
            command.arg(format!("--aptopt=APT::Default-Release \"{backports}\""));
        }
        command.arg(format!("--include={}", recipe.packages.join(",")));
        command.arg(recipe.suite).arg(&partial).arg(source(recipe.suite));
        command.args(recipe.backports.map(source));
        let status = command
            .stdin(Stdio::null())
            .stdout(log_file.try_clone()?)
            .stderr(log_file)
            .status()
            .context("mmdebstrap")?;
        if !status.success() {
            let text = fs::read(&log).unwrap_or_default();
            bail!("fetching {} failed; {}:\n{}", recipe.what, log.display(), {
                host::last_lines(&text, 8)
            });
        }
        fs::rename(&partial, &root).context("putting the root in its place")?;
        fs::write(&stamp, recipe.stamp()).context("the stamp of the root")?;
        eprintln!("fetched {} in {:.0} s", recipe.what, began.elapsed().as_secs_f64());
        Ok(())
    }
}

fn remove(path: &Path) -> Result<()> {
    let gone = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match gone {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn files_in(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|e| e.path()).collect();
    files.sort();
    files
}

/// Quotes a path for a shell script.
fn quote(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_path_is_quoted_as_one_word() {
        assert_eq!(quote(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }

    #[test]
    fn the_stamp_changes_with_the_recipe() {
        let stamps = [
            TOOLS.stamp(),
            kernel_recipe(Kernel::V6_1).stamp(),
            kernel_recipe(Kernel::V7_2).stamp(),
        ];
        assert!(stamps[0] != stamps[1] && stamps[1] != stamps[2]);
    }
}
