//! Device self-tests, telemetry and the persistent event log.

use crate::common;
use common::{Host, LIMIT, slow_host};
use shadowbell_controller::Polling;
use shadowbell_disk::DiskError;
use shadowbell_spec::admin::{DeviceSelfTest, GetLogPage, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::fid;
use shadowbell_spec::log::persistent_event::{
    PersistentEvent, PersistentEventLog, action, event_type,
};
use shadowbell_spec::log::{SelfTestLog, TelemetryHeader, lid, stc};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait::{self};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

fn self_test(stc: u8, nsid: u32) -> Sqe {
    DeviceSelfTest { stc }.encode(Sqe::new(0x14, 0, nsid))
}

/// Reads `len` bytes of the log page that `request` selects; the length in `request` is ignored.
fn page(host: &mut Host, request: GetLogPage, len: u32) -> Result<Vec<u8>, Status> {
    let fields = GetLogPage { numd0: len / 4 - 1, ..request };
    host.page(Sqe::get_log_page(0, fields, 0)).map(|page| page[..len as usize].to_vec())
}

fn self_test_log(host: &mut Host) -> SelfTestLog {
    let request = GetLogPage { lid: lid::SELF_TEST, ..GetLogPage::default() };
    SelfTestLog::read_from_bytes(&page(host, request, 564).unwrap()).unwrap()
}

fn run_until_over(host: &mut Host) -> SelfTestLog {
    let began = Instant::now();
    loop {
        let log = self_test_log(host);
        if log.operation == stc::NONE {
            return log;
        }
        assert!(began.elapsed() < LIMIT, "{} percent", log.completion);
        wait::pause();
    }
}

#[test]
fn a_self_test_covers_all_namespaces() {
    let mut host = Host::new(&["mem:1MiB", "null:16MiB"], ADAPTIVE);
    host.must(self_test(stc::SHORT, NSID_ALL));
    assert_eq!(run_until_over(&mut host).results[0].dsts, 0x10);
    host.must(self_test(stc::EXTENDED, 1));
    assert_eq!(run_until_over(&mut host).results[0].dsts, 0x20);
    host.must(self_test(stc::SHORT, 0));
    assert_eq!(
        run_until_over(&mut host).results[..3].iter().map(|r| r.dsts).collect::<Vec<_>>(),
        [0x10, 0x20, 0x10]
    );
    let none = host.admin(self_test(stc::SHORT, 3)).0;
    assert_eq!(none.code(), Status::INVALID_NAMESPACE_OR_FORMAT);
    assert_eq!(host.admin(self_test(7, 1)).0.code(), Status::INVALID_FIELD);
    // The self-test does not change the host's I/O counters.
    let stats = host.controller.stats();
    assert_eq!((stats.io.reads, stats.io.others, stats.io.bytes_read), (0, 0, 0));
}

#[test]
fn an_unreadable_piece_fails_the_self_test() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    host.must(self_test(stc::SHORT, 1));
    let busy = host.admin(self_test(stc::EXTENDED, 1)).0;
    assert_eq!(busy.code(), Status::SELF_TEST_IN_PROGRESS);
    for nth in 0..32 {
        let began = Instant::now();
        while self_test_log(&mut host).completion != (nth * 100 / 32) as u8 || gate.waiting() != 1 {
            assert!(began.elapsed() < LIMIT, "piece {nth} is not read");
        }
        gate.end(if nth == 1 { Err(DiskError::Io(5)) } else { Ok(()) });
    }
    let result = run_until_over(&mut host).results[0];
    assert_eq!((result.dsts, result.segment, result.nsid.get()), (0x17, 3, 1));
    // The self-test reads 32 pieces of 64 KiB, which are distributed over 512 MiB. The failing LBA
    // is the start of the second piece.
    assert_eq!(result.flba.get(), ((512 << 20) - (64 << 10)) / 31 / 512);
    assert_eq!((result.sct, result.sc, result.valid.into_bits()), (2, 0x81, 0xf));
}

#[test]
fn a_reset_aborts_only_a_short_self_test() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    host.must(self_test(stc::SHORT, 1));
    host.until("a piece", || gate.waiting() == 1);
    gate.heed_cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    let cc = host.read32(0x14);
    host.write32(0x14, cc & !1);
    gate.end(Ok(()));
    host.until("the reset", || !host.csts().rdy());
    host.enable();
    assert_eq!(self_test_log(&mut host).results[0].dsts, 0x12);
    host.must(self_test(stc::EXTENDED, 1));
    host.until("a piece", || gate.waiting() == 1);
    host.write32(0x14, cc & !1);
    gate.end(Ok(()));
    host.until("the reset", || !host.csts().rdy());
    host.enable();
    // After the reset, the extended self-test continues without a command.
    host.until("a piece", || gate.waiting() == 1);
    assert_eq!(self_test_log(&mut host).operation, stc::EXTENDED);
    host.must(self_test(stc::ABORT, 1));
    let log = self_test_log(&mut host);
    assert_eq!((log.operation, log.results[0].dsts), (stc::NONE, 0x21));
    gate.end(Ok(()));
    host.must(self_test(stc::ABORT, 1));
}

#[test]
fn telemetry_is_captured_for_a_host_and_stays_until_the_next() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let (status, _) = host.run(&mut queue, Sqe::read(1, 1 << 40, 0, 0));
    assert_eq!(status.code(), Status::LBA_OUT_OF_RANGE);
    let read = GetLogPage { lid: lid::TELEMETRY_HOST, ..GetLogPage::default() };
    let header = |host: &mut Host, request| {
        let page = page(host, request, 512).unwrap();
        TelemetryHeader::read_from_bytes(&page).unwrap()
    };
    assert_eq!(header(&mut host, read).blocks(), 0);
    let created = header(&mut host, GetLogPage { lsp: 1, ..read });
    assert_eq!((created.host_generation, created.host_scope), (1, 1));
    assert!(created.blocks() > 1 && created.last_blocks.is_sorted_by_key(|last| last.get()));
    let first = page(&mut host, GetLogPage { lpo: 512, ..read }, 1024).unwrap();
    let text = String::from_utf8(first.clone()).unwrap();
    for line in ["shadowbell-telemetry 1\n", "\nresets 0\n", "\nrecoveries 0\n", "\nerrors 1\n"] {
        assert!(text.contains(line), "{line:?} in {text}");
    }
    assert!(text.contains("\nerror 0.80 1 LBA Out of Range\n"), "{text}");
    // Errors that occur after the capture do not change the captured telemetry data.
    host.run(&mut queue, Sqe::read(1, 1 << 40, 0, 0));
    assert_eq!(page(&mut host, GetLogPage { lpo: 512, ..read }, 1024).unwrap(), first);
    assert_eq!(header(&mut host, GetLogPage { lsp: 1, ..read }).host_generation, 2);
    assert_ne!(page(&mut host, GetLogPage { lpo: 512, ..read }, 1024).unwrap(), first);
    // A read must consist of whole blocks of 512 bytes, and must not exceed the log.
    for (lpo, len) in [(4, 512), (512, 4), (256, 512), (0, 516)] {
        let refused = page(&mut host, GetLogPage { lpo, ..read }, len).unwrap_err();
        assert_eq!(refused.code(), Status::INVALID_FIELD, "{len} at {lpo}");
    }
    let behind = GetLogPage { lpo: 512 << 10, ..read };
    assert_eq!(page(&mut host, behind, 512).unwrap_err().code(), Status::INVALID_FIELD);
    let own = GetLogPage { lid: lid::TELEMETRY_CONTROLLER, lsp: 1, ..read };
    assert_eq!(header(&mut host, own).blocks(), 0);
}

/// The controller captures telemetry on a fatal status, and sends an event to a host that has
/// enabled it.
#[test]
fn a_fatal_status_is_in_the_telemetry_after_the_reset() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    host.disable();
    // An admin queue of one entry is invalid, so enabling the controller results in Controller
    // Fatal Status.
    let aqa = host.read32(0x24);
    host.write32(0x24, 0);
    host.write32(0x14, 0x46_0001);
    assert!(host.csts().cfs());
    host.disable();
    host.write32(0x24, aqa);
    host.enable();
    let read = GetLogPage { lid: lid::TELEMETRY_CONTROLLER, rae: true, ..GetLogPage::default() };
    let header = |host: &mut Host, request| {
        let page = page(host, request, 512).unwrap();
        TelemetryHeader::read_from_bytes(&page).unwrap()
    };
    let own = header(&mut host, read);
    assert_eq!((own.controller_available, own.controller_generation), (1, 1));
    assert!(own.reason.starts_with(b"fatal: AQA asks for an admin queue of one entry\0"));
    assert!(own.blocks() >= 1);
    header(&mut host, GetLogPage { rae: false, ..read });
    assert_eq!(header(&mut host, read).controller_available, 0);
    assert_eq!(AsyncEvent::TELEMETRY_LOG_CHANGED.lid, lid::TELEMETRY_CONTROLLER);
}

#[test]
fn events_are_kept_over_resets() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let data = host.alloc(4096);
    host.poke(data, &77_000u64.to_le_bytes());
    let set = SetFeatures { fid: fid::TIMESTAMP, ..SetFeatures::default() };
    host.must(set.encode(Sqe::new(0x09, 0, 0)).with_prps(data, 0));
    host.disable();
    host.enable();
    let read = GetLogPage { lid: lid::PERSISTENT_EVENTS, ..GetLogPage::default() };
    let error = page(&mut host, read, 512).unwrap_err();
    assert_eq!(error.code(), Status::COMMAND_SEQUENCE_ERROR);
    let establish = GetLogPage { lsp: action::ESTABLISH, ..read };
    let all = page(&mut host, establish, 4096).unwrap();
    let (head, rest) = PersistentEventLog::read_from_prefix(&all).unwrap();
    let mut rest = &rest[..head.tll.get() as usize - 512];
    let mut types = Vec::new();
    while let Ok((event, data)) = PersistentEvent::read_from_prefix(rest) {
        types.push(event.event);
        rest = &data[event.el.get().into()..];
    }
    assert_eq!(types.len() as u32, head.tnev.get());
    // A SMART snapshot event may have been recorded as well.
    types.retain(|event| *event != event_type::SMART);
    let (enabled, changed) = (event_type::POWER_ON_OR_RESET, event_type::TIMESTAMP_CHANGE);
    assert_eq!(types, [enabled, changed, enabled]);
    // The log can be read in several parts, because the established context does not change.
    let piece = page(&mut host, GetLogPage { lpo: 512, ..read }, 1024).unwrap();
    assert_eq!(piece, all[512..1536]);
    assert_eq!(page(&mut host, establish, 512).unwrap_err().code(), Status::COMMAND_SEQUENCE_ERROR);
    page(&mut host, GetLogPage { lsp: action::RELEASE, ..read }, 512).unwrap();
    let error = page(&mut host, read, 512).unwrap_err();
    assert_eq!(error.code(), Status::COMMAND_SEQUENCE_ERROR);
}
