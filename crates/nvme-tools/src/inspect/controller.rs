//! `id-ctrl`: prints the Identify Controller data structure.

use super::fields::{Args, Fields, kelvins, show};
use super::subject::Subject;
use serde_json::{Value, json};
use shadowbell_config::uuid_text::uuid_text;
use shadowbell_spec::identify::{IdentifyController, PowerState};
use std::process::ExitCode;

/// Runs the verb.
///
/// # Errors
/// Errors of the driver.
pub fn id_ctrl(args: &Args) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.target)?;
    let fields = fields(&subject.identify_controller()?, subject.mpsmin());
    subject.finish()?;
    show("NVMe Identify Controller:", &fields, args.output.is_json())?;
    Ok(ExitCode::SUCCESS)
}

fn fields(id: &IdentifyController, mpsmin: u8) -> Fields {
    let mut f = Fields::default();
    let [low, middle, high] = id.ieee;
    f.bits("vid", id.vid).bits("ssvid", id.ssvid);
    f.text("sn", id.serial()).text("mn", id.model()).text("fr", id.firmware());
    f.number("rab", id.rab);
    f.bits("ieee", u32::from_le_bytes([low, middle, high, 0]));
    f.bits("cmic", id.cmic.into_bits());
    f.number("mdts", id.mdts);
    match id.max_transfer(mpsmin) {
        Some(bytes) => f.meaning(format!("{} KiB", bytes >> 10)),
        None => f.meaning("no limit"),
    };
    f.bits("cntlid", id.cntlid);
    f.bits("ver", id.ver);
    f.meaning(format!("{}.{}.{}", id.ver >> 16, id.ver >> 8 & 0xff, id.ver & 0xff));
    f.number("rtd3r", id.rtd3r).number("rtd3e", id.rtd3e);
    f.bits("oaes", id.oaes.into_bits()).bits("ctratt", id.ctratt.into_bits());
    f.bits("rrls", id.rrls).number("cntrltype", id.cntrltype);
    f.meaning(match id.cntrltype {
        1 => "I/O controller",
        2 => "discovery controller",
        3 => "administrative controller",
        _ => "not reported",
    });
    f.text("fguid", uuid_text(&id.fguid));
    f.number("crdt1", id.crdt1).number("crdt2", id.crdt2).number("crdt3", id.crdt3);
    f.bits("nvmsr", id.nvmsr).bits("vwci", id.vwci).bits("mec", id.mec);
    f.bits("oacs", id.oacs.into_bits());
    f.meaning(if id.oacs.doorbell_buffer_config() {
        "shadow doorbells"
    } else {
        "no shadow doorbells"
    });
    f.number("acl", id.acl).number("aerl", id.aerl);
    f.bits("frmw", id.frmw.into_bits()).bits("lpa", id.lpa.into_bits());
    f.number("elpe", id.elpe).number("npss", id.npss);
    f.bits("avscc", id.avscc).bits("apsta", id.apsta);
    f.number("wctemp", id.wctemp).meaning(kelvins(id.wctemp));
    f.number("cctemp", id.cctemp).meaning(kelvins(id.cctemp));
    f.number("mtfa", id.mtfa).number("hmpre", id.hmpre).number("hmmin", id.hmmin);
    f.number("tnvmcap", id.tnvmcap.get()).number("unvmcap", id.unvmcap.get());
    f.bits("rpmbs", id.rpmbs).number("edstt", id.edstt).number("dsto", id.dsto);
    f.number("fwug", id.fwug).number("kas", id.kas).bits("hctma", id.hctma);
    f.number("mntmt", id.mntmt).number("mxtmt", id.mxtmt).bits("sanicap", id.sanicap.into_bits());
    f.number("hmminds", id.hmminds).number("hmmaxd", id.hmmaxd);
    f.number("nsetidmax", id.nsetidmax).number("endgidmax", id.endgidmax);
    f.number("anatt", id.anatt).bits("anacap", id.anacap);
    f.number("anagrpmax", id.anagrpmax).number("nanagrpid", id.nanagrpid);
    f.number("pels", id.pels).number("domainid", id.domainid);
    f.number("megcap", id.megcap.get()).bits("tmpthha", id.tmpthha);
    f.bits("sqes", id.sqes.into_bits()).bits("cqes", id.cqes.into_bits());
    f.number("maxcmd", id.maxcmd).number("nn", id.nn);
    f.bits("oncs", id.oncs.into_bits()).bits("fuses", id.fuses);
    f.bits("fna", id.fna.into_bits()).bits("vwc", id.vwc.into_bits());
    f.meaning(if id.vwc.vwcp() { "a volatile write cache" } else { "no volatile write cache" });
    f.number("awun", id.awun).number("awupf", id.awupf);
    f.bits("icsvscc", id.icsvscc).bits("nwpc", id.nwpc);
    f.number("acwu", id.acwu).bits("ocfs", id.ocfs).bits("sgls", id.sgls.into_bits());
    f.number("mnan", id.mnan);
    f.number("maxdna", id.maxdna.get()).number("maxcna", id.maxcna).number("oaqd", id.oaqd);
    f.text("subnqn", id.qualified_name());
    f.number("ioccsz", id.ioccsz).number("iorcsz", id.iorcsz).number("icdoff", id.icdoff);
    f.bits("fcatt", id.fcatt).number("msdbd", id.msdbd).bits("ofcs", id.ofcs);
    let states = usize::from(id.npss) + 1;
    f.list("psds", id.psd.iter().take(states).map(power_state).collect());
    for (n, state) in id.psd.iter().take(states).enumerate() {
        let unit = if state.flags.mxps() { 0.0001 } else { 0.01 };
        let kind = if state.flags.nops() { "non-operational" } else { "operational" };
        f.line(
            format!("ps{n}"),
            format!(
                "{:.2} W, {kind}, enlat {} us, exlat {} us, rrt {} rrl {} rwt {} rwl {}",
                f64::from(state.mp) * unit,
                state.enlat,
                state.exlat,
                state.rrt,
                state.rrl,
                state.rwt,
                state.rwl
            ),
        );
    }
    f
}

/// Power state as JSON, under the names of nvme-cli. Versions of nvme-cli before 2.4 print `flags`
/// instead of the two fields that follow it here.
fn power_state(state: &PowerState) -> Value {
    json!({
        "max_power": state.mp,
        "flags": state.flags.into_bits(),
        "max_power_scale": u8::from(state.flags.mxps()),
        "non-operational_state": u8::from(state.flags.nops()),
        "entry_lat": state.enlat,
        "exit_lat": state.exlat,
        "read_tput": state.rrt,
        "read_lat": state.rrl,
        "write_tput": state.rwt,
        "write_lat": state.rwl,
        "idle_power": state.idlp,
        "idle_scale": state.ips >> 6,
        "active_power": state.actp,
        "active_power_work": state.apws & 7,
        "active_scale": state.apws >> 6,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identify_controller_is_printed_by_field() {
        let mut id =
            IdentifyController { vid: 0x1b36, ver: 0x2_0000, mdts: 8, ..Default::default() };
        id.sn = shadowbell_spec::identify::ascii_field("SN 1");
        let fields = fields(&id, 0);
        let text = fields.to_string();
        assert!(text.contains("vid") && text.contains(": 0x1b36\n"), "{text}");
        assert!(text.contains(": SN 1\n"), "{text}");
        assert!(text.contains(": 8 (1024 KiB)\n"), "{text}");
        assert!(text.contains(": 0x20000 (2.0.0)\n"), "{text}");
        assert_eq!(fields.to_json()["sn"], "SN 1");
        // NPSS beyond the 32 descriptors of the structure is clamped.
        id.npss = 255;
        let fields = super::fields(&id, 0);
        assert_eq!(fields.to_json()["psds"].as_array().map(Vec::len), Some(32));
        assert!(fields.to_string().contains("ps31"));
    }
}
