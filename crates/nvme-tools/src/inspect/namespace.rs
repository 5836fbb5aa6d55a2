//! `id-ns`: prints the Identify Namespace data structure.

use super::fields::{Args, Fields, show};
use super::subject::Subject;
use anyhow::anyhow;
use serde_json::json;
use shadowbell_process::exit;
use shadowbell_spec::identify::IdentifyNamespace;
use std::process::ExitCode;

/// Runs the verb.
///
/// # Errors
/// Errors of the driver, or the namespace is not active.
pub fn id_ns(args: &Args) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.target)?;
    let nsid = args.target.nsid();
    let missing = |what| exit::bad_input(anyhow!("{}: namespace {nsid} {what}", args.target));
    let identity = match subject.identify_namespace(nsid)? {
        Some(identity) if identity.nsze == 0 => return Err(missing("is not active")),
        Some(identity) => identity,
        None => return Err(missing("does not exist")),
    };
    let mut fields = fields(&identity);
    if let Some(uuid) = subject.uuid(nsid) {
        fields.bytes("uuid", &uuid);
    }
    subject.finish()?;
    show(&format!("NVMe Identify Namespace {nsid}:"), &fields, args.output.is_json())?;
    Ok(ExitCode::SUCCESS)
}

fn fields(ns: &IdentifyNamespace) -> Fields {
    let mut f = Fields::default();
    f.bits("nsze", ns.nsze);
    if let Some(size) = ns.format().and_then(|format| format.block_size()) {
        f.meaning(format!("{} bytes", u128::from(ns.nsze) * u128::from(size)));
    }
    f.bits("ncap", ns.ncap).bits("nuse", ns.nuse).bits("nsfeat", ns.nsfeat.into_bits());
    f.number("nlbaf", ns.nlbaf).bits("flbas", ns.flbas.into_bits());
    f.bits("mc", ns.mc.into_bits()).bits("dpc", ns.dpc.into_bits()).bits("dps", ns.dps.into_bits());
    f.bits("nmic", ns.nmic.into_bits()).bits("rescap", ns.rescap).bits("fpi", ns.fpi);
    f.bits("dlfeat", ns.dlfeat.into_bits());
    f.meaning(match ns.dlfeat.drb() {
        1 => "deallocated blocks read as zeroes",
        2 => "deallocated blocks read as bytes of FFh",
        _ => "content of deallocated blocks not reported",
    });
    f.number("nawun", ns.nawun).number("nawupf", ns.nawupf).number("nacwu", ns.nacwu);
    f.number("nabsn", ns.nabsn).number("nabo", ns.nabo).number("nabspf", ns.nabspf);
    f.number("noiob", ns.noiob).number("nvmcap", ns.nvmcap.get());
    f.number("npwg", ns.npwg).number("npwa", ns.npwa).number("npdg", ns.npdg);
    f.number("npda", ns.npda).number("nows", ns.nows);
    f.number("mssrl", ns.mssrl).number("mcl", ns.mcl).number("msrc", ns.msrc);
    f.number("nulbaf", ns.nulbaf).number("anagrpid", ns.anagrpid);
    f.bits("nsattr", ns.nsattr);
    f.meaning(if ns.nsattr & 1 != 0 { "write protected" } else { "not write protected" });
    f.number("nvmsetid", ns.nvmsetid).number("endgid", ns.endgid);
    f.bytes("nguid", &ns.nguid).bytes("eui64", &ns.eui64);
    let in_use = usize::from(ns.flbas.index());
    let count = usize::from(ns.nlbaf) + usize::from(ns.nulbaf) + 1;
    let formats = ns.lbaf.iter().take(count);
    let for_machines =
        formats.map(|lbaf| json!({ "ms": lbaf.ms, "ds": lbaf.lbads, "rp": lbaf.rp }));
    f.list("lbafs", for_machines.collect());
    for (n, format) in ns.lbaf.iter().take(count).enumerate() {
        let text = match format.block_size() {
            Some(size) => format!(
                "ms:{} lbads:{} rp:{}{} - {size} byte blocks",
                format.ms,
                format.lbads,
                format.rp & 3,
                if n == in_use { " (in use)" } else { "" }
            ),
            None => "not available".to_owned(),
        };
        f.line(format!("lbaf{n}"), text);
    }
    f
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::identify::LbaFormat;

    #[test]
    fn identify_namespace_is_printed_by_field() {
        let mut ns = IdentifyNamespace { nsze: 0x1000, nsattr: 1, ..Default::default() };
        ns.lbaf[0] = LbaFormat { lbads: 12, ..Default::default() };
        let fields = fields(&ns);
        let text = fields.to_string();
        assert!(text.contains(": 0x1000 (16777216 bytes)\n"), "{text}");
        assert!(text.contains("ms:0 lbads:12 rp:0 (in use) - 4096 byte blocks"), "{text}");
        assert!(text.contains("(write protected)"), "{text}");
        let json = fields.to_json();
        assert_eq!((&json["nsze"], &json["lbafs"][0]["ds"]), (&0x1000.into(), &12.into()));
        // Invalid values of a controller are displayed, not rejected.
        ns.lbaf[0].lbads = 99;
        (ns.nlbaf, ns.nulbaf) = (255, 255);
        assert!(super::fields(&ns).to_string().contains("not available"));
    }
}
