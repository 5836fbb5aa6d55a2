//! NBD over TLS, with libnbd's tools, QEMU, and clients that violate the protocol.

use crate::client::Client;
use crate::nbd::Rig;
use crate::tools::{noise, run};
use shadowbell_block::BlockOptions;
use shadowbell_export::nbd::Options;
use shadowbell_export::nbd::wire::{answer, option, put_option};
use shadowbell_testing::certificates::{Authority, CertificatePurpose, CertificateSpec};
use shadowbell_testing::programs::can_run;
use shadowbell_tls::ServerTls;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

struct Certificates {
    authority: Authority,
    directory: TempDir,
}

impl Certificates {
    fn new() -> Self {
        let made = Self { authority: Authority::new(), directory: tempfile::tempdir().unwrap() };
        made.authority.write_all(made.directory.path());
        made
    }

    fn rig(&self, mebibytes: u64, any_client: bool) -> Rig {
        let mut served = Options::default();
        served.tls = Some(ServerTls::load(self.directory.path(), any_client).unwrap());
        Rig::with(mebibytes << 11, &BlockOptions::default(), &served)
    }
}

fn uri(rig: &Rig, certificates: &Path) -> String {
    format!(
        "nbds+unix:///?socket={}&tls-certificates={}",
        rig.socket().display(),
        certificates.display()
    )
}

/// Runs a tool that must fail. Returns its standard error.
fn failure(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(!output.status.success(), "{program} {arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn libnbds_tools_copy_by_tls() {
    if !can_run("nbdinfo") || !can_run("nbdcopy") {
        return;
    }
    let certificates = Certificates::new();
    let rig = certificates.rig(16, false);
    let uri = uri(&rig, certificates.directory.path());
    let about = run("nbdinfo", &[&uri]);
    for words in ["with TLS", "using structured packets", "base:allocation", "can_multi_conn: true"]
    {
        assert!(about.contains(words), "{words}: {about}");
    }
    let directory = tempfile::tempdir().unwrap();
    let (source, back) = (directory.path().join("source"), directory.path().join("back"));
    let data = noise(16 << 20);
    std::fs::write(&source, &data).unwrap();
    std::fs::write(&back, []).unwrap();
    let (source, back) = (source.to_str().unwrap(), back.to_str().unwrap());
    let many = ["--connections=4", "--requests=64", "--flush"];
    run("nbdcopy", &[&many[..], &[source, &uri]].concat());
    run("nbdcopy", &[&many[..], &[&uri, back]].concat());
    assert!(std::fs::read(back).unwrap() == data);
    rig.end();
}

/// Reads and writes by QEMU over TLS. QEMU supports TLS only over TCP or with an explicit host
/// name; over TCP it expects the name `localhost` in the certificate.
#[test]
fn qemu_reads_and_writes_by_tls() {
    if !can_run("qemu-io") {
        return;
    }
    let certificates = Certificates::new();
    let rig = certificates.rig(8, false);
    let object = format!(
        "tls-creds-x509,id=tls,endpoint=client,dir={}",
        certificates.directory.path().display()
    );
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},tls-creds=tls,tls-hostname=localhost",
        rig.socket().display()
    );
    let steps = ["-c", "write -P 7 1000 123456", "-c", "read -P 7 1000 123456", "-c", "flush"];
    let said =
        run("qemu-io", &[&["--object", &object, "--image-opts", &image], &steps[..]].concat());
    assert!(!said.contains("mismatch") && !said.contains("failed"), "{said}");
    rig.end();
}

#[test]
fn clients_without_the_right_certificate_are_sent_away() {
    if !can_run("nbdinfo") {
        return;
    }
    let certificates = Certificates::new();
    let rig = certificates.rig(8, false);
    let (ca_only, stranger) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    certificates.authority.write_ca(ca_only.path());
    certificates.authority.write_ca(stranger.path());
    Authority::new().write_certificate(
        stranger.path(),
        CertificatePurpose::Client,
        &CertificateSpec::default(),
    );
    for directory in [&ca_only, &stranger] {
        failure("nbdinfo", &[&uri(&rig, directory.path())]);
    }
    // Refused clients do not delay a valid client.
    run("nbdinfo", &["--size", &uri(&rig, certificates.directory.path())]);
    rig.end();
    let rig = certificates.rig(8, true);
    assert_eq!(run("nbdinfo", &["--size", &uri(&rig, ca_only.path())]).trim(), "8388608");
    rig.end();
}

#[test]
fn clients_without_tls_are_refused() {
    let certificates = Certificates::new();
    let rig = certificates.rig(8, false);
    let mut client = Client::greeted(&rig.socket());
    for option in [option::LIST, option::GO, option::STRUCTURED_REPLY] {
        assert_eq!(client.option(option, b"")[0].0, answer::ERR_TLS_REQD);
    }
    // The protocol has no error reply to EXPORT_NAME, so the server closes the connection.
    let mut bytes = Vec::new();
    put_option(&mut bytes, option::EXPORT_NAME, b"");
    client.socket.write_all(&bytes).unwrap();
    assert_eq!(client.socket.read(&mut [0; 100]).unwrap(), 0);
    rig.end();
}

/// Injection of plaintext: an attacker appends an option to the client's STARTTLS, before the TLS
/// handshake. The server must discard it.
#[test]
fn plaintext_before_the_tls_handshake_is_not_injected() {
    let certificates = Certificates::new();
    let rig = certificates.rig(8, true);
    let mut client = Client::greeted(&rig.socket());
    let mut bytes = Vec::new();
    put_option(&mut bytes, option::STARTTLS, b"");
    put_option(&mut bytes, option::LIST, b"");
    client.socket.write_all(&bytes).unwrap();
    let mut said = Vec::new();
    // At most the reply to STARTTLS arrives. The injected option gets no reply.
    let _ = client.socket.read_to_end(&mut said);
    assert!(said.len() <= 20, "{said:?}");
    // The client sends garbage instead of a TLS handshake.
    let mut client = Client::greeted(&rig.socket());
    assert_eq!(client.option(option::STARTTLS, b""), [(answer::ACK, vec![])]);
    client.socket.write_all(&[7; 4000]).unwrap();
    let mut said = Vec::new();
    let _ = client.socket.read_to_end(&mut said);
    assert!(said.len() < 100, "{said:?}");
    rig.end();
}
