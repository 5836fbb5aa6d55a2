//! File tree of the package, and its packing.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use shadowbell_bench::workspace::root;

use super::tools::output;
use super::{control, licences};

/// Configuration files, which dpkg does not overwrite if the administrator has changed them.
const CONFIGURATION: [(&str, &str); 2] = [
    ("shadowbell.toml", "etc/shadowbell/shadowbell.toml"),
    ("needrestart.conf", "etc/needrestart/conf.d/shadowbell.conf"),
];

/// Files of the directory `packaging` that are installed unchanged, and their destinations.
const FILES: [(&str, &str); 5] = [
    ("shadowbell.service", "usr/lib/systemd/system/shadowbell.service"),
    ("shadowbell@.service", "usr/lib/systemd/system/shadowbell@.service"),
    ("sysusers.conf", "usr/lib/sysusers.d/shadowbell.conf"),
    ("tmpfiles.conf", "usr/lib/tmpfiles.d/shadowbell.conf"),
    ("lintian-overrides", "usr/share/lintian/overrides/shadowbell"),
];

/// Shell completions, and their destinations.
const COMPLETIONS: [(&str, &str); 3] = [
    ("shadowbell.bash", "usr/share/bash-completion/completions/shadowbell"),
    ("_shadowbell", "usr/share/zsh/vendor-completions/_shadowbell"),
    ("shadowbell.fish", "usr/share/fish/vendor_completions.d/shadowbell.fish"),
];

const DOC: &str = "usr/share/doc/shadowbell";

/// Packs `program` as `version`, into a file in the directory `out`.
pub(super) fn build(program: &Path, version: &str, out: &Path) -> Result<PathBuf> {
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let staging = tempfile::tempdir_in(out)?;
    let tree = Tree { root: staging.path().join("shadowbell") };
    tree.fill(program, version)?;
    let mut command = Command::new("dpkg-deb");
    command.args(["--root-owner-group", "-Zxz", "-z3", "--build"]).arg(&tree.root).arg(out);
    let printed = output(&mut command)?;
    let name = printed.rsplit('\'').nth(1).context("dpkg-deb names no file")?;
    Ok(PathBuf::from(name))
}

struct Tree {
    root: PathBuf,
}

impl Tree {
    fn fill(&self, program: &Path, version: &str) -> Result<()> {
        let packaging = root().join("packaging");
        let serve = program.with_file_name("shadowbell-serve");
        self.copy_program(&serve, "usr/bin/shadowbell-serve")?;
        let installed = self.copy_program(program, "usr/bin/shadowbell")?;
        for (from, to) in FILES.into_iter().chain(CONFIGURATION) {
            self.copy(&packaging.join(from), to, 0o644)?;
        }
        self.manual(program)?;
        self.documents(version)?;
        let configuration: String =
            CONFIGURATION.iter().map(|(_, path)| format!("/{path}\n")).collect();
        let sums = self.sums()?;
        self.write("DEBIAN/conffiles", configuration.as_bytes(), 0o644)?;
        self.write("DEBIAN/md5sums", sums.as_bytes(), 0o644)?;
        for script in ["postinst", "prerm", "postrm"] {
            self.copy(&packaging.join(script), &format!("DEBIAN/{script}"), 0o755)?;
        }
        let size = output(Command::new("du").args(["-sk", "--apparent-size"]).arg(&self.root))?;
        let size = size.split_whitespace().next().and_then(|kib| kib.parse().ok());
        let control = control::control(&installed, version, size.context("`du` prints no size")?)?;
        self.write("DEBIAN/control", control.as_bytes(), 0o644)
    }

    /// Copies a program without its symbols.
    fn copy_program(&self, from: &Path, to: &str) -> Result<PathBuf> {
        let installed = self.copy(from, to, 0o755)?;
        output(Command::new("strip").arg("--strip-unneeded").arg(&installed))?;
        Ok(installed)
    }

    /// Manual pages and completions, which the program generates.
    fn manual(&self, program: &Path) -> Result<()> {
        let directory = tempfile::tempdir()?;
        output(Command::new(program).arg("manual").arg(directory.path()))?;
        for page in fs::read_dir(directory.path().join("man"))? {
            let page = page?;
            let name = page.file_name().to_string_lossy().into_owned();
            let section = name.rsplit_once('.').map_or("1", |(_, section)| section);
            let to = format!("usr/share/man/man{section}/{name}.gz");
            self.write_gz(&to, &fs::read(page.path())?)?;
        }
        let completions = directory.path().join("completions");
        for (from, to) in COMPLETIONS {
            self.copy(&completions.join(from), to, 0o644)?;
        }
        Ok(())
    }

    fn documents(&self, version: &str) -> Result<()> {
        let mit = fs::read_to_string(root().join("LICENSE-MIT"))?;
        let mut copyright = fs::read_to_string(root().join("packaging/copyright"))?;
        copyright.push_str(&paragraph(&mit)?);
        self.write(&format!("{DOC}/copyright"), copyright.as_bytes(), 0o644)?;
        let changes = root().join("CHANGELOG.md");
        self.write_gz(&format!("{DOC}/NEWS.gz"), &fs::read(&changes)?)?;
        let changed = fs::metadata(&changes)?.modified()?;
        let changed = changed.duration_since(std::time::UNIX_EPOCH)?.as_secs();
        let log = control::changelog(version, changed)?;
        self.write_gz(&format!("{DOC}/changelog.gz"), log.as_bytes())?;
        self.write_gz(&format!("{DOC}/LICENSES.txt.gz"), licences::all()?.as_bytes())?;
        for name in ["alerts.yml", "grafana.json", "openapi.json"] {
            self.write_gz(&format!("{DOC}/{name}.gz"), &fs::read(root().join("docs").join(name))?)?;
        }
        Ok(())
    }

    fn copy(&self, from: &Path, to: &str, mode: u32) -> Result<PathBuf> {
        let bytes = fs::read(from).with_context(|| from.display().to_string())?;
        self.write(to, &bytes, mode)?;
        Ok(self.root.join(to))
    }

    fn write(&self, to: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let path = self.root.join(to);
        let mut above: Vec<_> = path.ancestors().skip(1).take_while(|at| !at.is_dir()).collect();
        above.reverse();
        for directory in above {
            fs::create_dir(directory).with_context(|| directory.display().to_string())?;
            // Explicit permissions, independent of the umask.
            fs::set_permissions(directory, Permissions::from_mode(0o755))?;
        }
        fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        fs::set_permissions(&path, Permissions::from_mode(mode))?;
        Ok(())
    }

    /// Compresses as Debian's policy requires. There is no timestamp in the file, so that each
    /// build produces the same bytes.
    fn write_gz(&self, to: &str, bytes: &[u8]) -> Result<()> {
        let plain = to.strip_suffix(".gz").unwrap_or(to);
        self.write(plain, bytes, 0o644)?;
        output(Command::new("gzip").args(["-9n"]).arg(self.root.join(plain))).map(drop)
    }

    /// Checksums of all files, for `dpkg --verify`.
    fn sums(&self) -> Result<String> {
        let mut command = Command::new("sh");
        let script = "find etc usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum";
        output(command.current_dir(&self.root).args(["-c", script]))
    }
}

/// The MIT licence as a paragraph of the file `copyright`, where its name is Expat.
fn paragraph(mit: &str) -> Result<String> {
    let (_, text) =
        mit.split_once("Permission is hereby").context("LICENSE-MIT is not the MIT's")?;
    let text = format!("Permission is hereby{text}");
    let lines = text.trim_end().lines().map(|line| match line {
        "" => " .\n".to_owned(),
        line => format!(" {line}\n"),
    });
    Ok(format!("License: Expat\n{}", lines.collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_becomes_a_paragraph() {
        let mit = "MIT License\n\nCopyright\n\nPermission is hereby granted\nto all\n\nAS IS\n";
        let text = paragraph(mit).unwrap();
        assert_eq!(text, "License: Expat\n Permission is hereby granted\n to all\n .\n AS IS\n");
        paragraph("something else").unwrap_err();
        paragraph(&fs::read_to_string(root().join("LICENSE-MIT")).unwrap()).unwrap();
    }
}
