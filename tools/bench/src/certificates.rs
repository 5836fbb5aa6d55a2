//! Certificates for TLS benchmarks, made by OpenSSL's program.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Makes a certificate authority, a server certificate for `localhost` and a client certificate
/// in `directory`, with the file names that libnbd and QEMU expect.
pub(crate) fn make(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let file = |name: &str| directory.join(name);
    let ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let run = |arguments: &[&str], files: &[(&str, PathBuf)]| -> Result<()> {
        let mut command = Command::new("openssl");
        command.args(arguments);
        for (option, path) in files {
            command.arg(option).arg(path);
        }
        let output = command.output().context("openssl")?;
        if !output.status.success() {
            bail!("openssl: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    };
    let ca = [("-keyout", file("ca-key.pem")), ("-out", file("ca-cert.pem"))];
    run(&[&["req", "-x509", "-subj", "/CN=bench", "-days", "2"], &ec[..]].concat(), &ca)?;
    for (name, extension) in
        [("server", "subjectAltName=DNS:localhost"), ("client", "extendedKeyUsage=clientAuth")]
    {
        let subject = format!("/CN={name}");
        let request = [
            ("-keyout", file(&format!("{name}-key.pem"))),
            ("-out", file(&format!("{name}-cert.pem"))),
            ("-CA", file("ca-cert.pem")),
            ("-CAkey", file("ca-key.pem")),
        ];
        let head = ["req", "-x509", "-subj", &subject, "-days", "2", "-addext", extension];
        let leaf = ["-addext", "basicConstraints=critical,CA:FALSE"];
        run(&[&head[..], &leaf, &ec].concat(), &request)?;
    }
    Ok(())
}
