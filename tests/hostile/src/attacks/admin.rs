//! Attacks by admin commands.

use anyhow::Result;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{
    DoorbellBufferConfig, FormatNvm, GetFeatures, GetLogPage, Identify, SetFeatures,
};

use crate::attack::{Attack, Field};
use crate::peer::guest::Guest;

const MEM: &[&str] = &["mem:16MiB"];
const BIG_MEM: &[&str] = &["mem:1GiB"];
const FILE: &[&str] = &["DIR/attacker.img=1073741824"];

pub(crate) const ATTACKS: &[Attack] = &[
    Attack::new("smart-log", "Get Log Page (SMART) without end", MEM, smart_log),
    Attack::new("doorbell-buffer", "Doorbell Buffer Config without end", MEM, doorbell_buffer)
        .short(),
    Attack::new("identify", "Identify without end", MEM, identify),
    Attack::new("features", "Get and Set Features without end", MEM, features),
    Attack::new("queue-churn", "I/O queues of 4096 entries created and deleted", MEM, queue_churn),
    Attack::new("format", "Format NVM of a memory disk without end", BIG_MEM, format),
    Attack::new("format-file", "Format NVM of a file without end", FILE, format),
    Attack::new("bad-admin", "admin commands that are refused, and events", MEM, bad_admin),
];

/// Floods the admin queue with commands that transfer data to one page.
fn flood(field: &mut Field, make: impl Fn(u64) -> Sqe) -> Result<()> {
    let mut guest = field.guest()?;
    let page = Guest::address(guest.alloc(8192)?);
    field.fill_admin(guest, |n| {
        let sqe = make(n);
        if sqe.prp1() == 0 { sqe.with_prps(page, page + 4096) } else { sqe }
    })
}

fn smart_log(field: &mut Field) -> Result<()> {
    let fields = GetLogPage { lid: 2, numd0: 127, ..GetLogPage::default() };
    flood(field, |_| Sqe::get_log_page(u32::MAX, fields, 0))
}

fn doorbell_buffer(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(64, 64)?;
    let shadow = Guest::address(guest.alloc(4096)?);
    let event_idx = Guest::address(guest.alloc(4096)?);
    let fields = DoorbellBufferConfig { shadow, event_idx };
    field.fill_admin(guest, |_| Sqe::dbbuf_config(fields, 0))
}

fn identify(field: &mut Field) -> Result<()> {
    flood(field, |n| {
        let cns = [1, 0, 2, 3][n as usize % 4];
        Sqe::identify(u32::from(cns != 1), Identify { cns, ..Identify::default() }, 0)
    })
}

fn features(field: &mut Field) -> Result<()> {
    flood(field, |n| {
        let fid = [0x07, 0x08, 0x09, 0x0b, 0x06, 0x04, 0x0e][n as usize / 2 % 7];
        if n % 2 == 0 {
            Sqe::get_features(0, GetFeatures { fid, ..GetFeatures::default() }, 0)
        } else {
            let cdw11 = if fid == 7 { 0x003f_003f } else { 1 };
            Sqe::set_features(0, SetFeatures { fid, cdw11, ..SetFeatures::default() }, 0)
        }
    })
}

fn queue_churn(field: &mut Field) -> Result<()> {
    let mut guest = field.guest()?;
    (0..16).try_for_each(|_| guest.create_queue(4096))?;
    while !field.is_over() {
        let queues = std::mem::take(&mut guest.queues);
        for queue in &queues {
            guest.admin_ok(Sqe::delete_io_sq(queue.qid, 0))?;
            guest.admin_ok(Sqe::delete_io_cq(queue.qid, 0))?;
        }
        field.done += queues.len() as u64;
        queues.into_iter().try_for_each(|queue| guest.create(queue))?;
    }
    field.guests.push(guest);
    Ok(())
}

fn format(field: &mut Field) -> Result<()> {
    flood(field, |_| Sqe::format_nvm(1, FormatNvm { ses: 1, ..FormatNvm::default() }, 0))
}

fn bad_admin(field: &mut Field) -> Result<()> {
    flood(field, |n| match n % 4 {
        0 => Sqe::new(0xc5, 0, 0),
        1 => Sqe::async_event_request(0),
        2 => Sqe::get_log_page(0, GetLogPage { lid: 0xee, ..GetLogPage::default() }, 0),
        _ => Sqe::delete_io_sq(999, 0),
    })
}
