//! Controller that is correct unless its script makes it misbehave. Its code runs on the driver's
//! thread when the driver writes a doorbell.

use ::shadowbell_driver::{Transport, TransportError};
use parking_lot::{Mutex, MutexGuard};
use shadowbell_memory::{DmaSpace, EventFd, Mapping, Segments, SharedBytes, View};
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace, cns};
use shadowbell_spec::regs::{self, Aqa, Cap, Cc, Csts};
use shadowbell_spec::{Cqe, Sqe, Status, dbbuf};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

pub(super) const BLOCKS: u64 = 1 << 16;
/// Maximum number of commands that the driver may submit in a program.
const COMMANDS: usize = 20_000;

/// Rest of the script: input bytes that determine how the controller misbehaves. After the end of
/// the script, the controller behaves correctly.
#[derive(Default)]
pub(super) struct Script(VecDeque<u8>);

impl Script {
    pub(super) fn u8(&mut self) -> u8 {
        self.0.pop_front().unwrap_or(0)
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub(super) fn u64(&mut self) -> u64 {
        (0..8).fold(0, |value, _| value << 8 | u64::from(self.u8()))
    }
}

struct Queue {
    sq: u64,
    entries: u32,
    head: u32,
    tail: u32,
    cq: u64,
    cq_entries: u32,
    cq_tail: u32,
    phase: bool,
    vector: Option<u32>,
}

pub(super) struct State {
    pub(super) script: Script,
    /// True if the controller misbehaves. Otherwise it executes all commands of the driver
    /// correctly.
    pub(super) malicious: bool,
    pub(super) cap: Cap,
    pub(super) vectors: u32,
    pub(super) page: Option<SharedBytes>,
    cc: Cc,
    pub(super) csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
    /// True if registers read as all ones, as after a removal.
    pub(super) removed: bool,
    dma: DmaSpace,
    queues: BTreeMap<u16, Queue>,
    cqs: BTreeMap<u16, (u64, u32, Option<u32>)>,
    shadow: Option<(SharedBytes, SharedBytes)>,
    irqs: BTreeMap<u32, EventFd>,
    /// Fetched commands that are not completed: the controller may still write their data.
    busy: Vec<(u16, Sqe)>,
    /// Identifiers of commands for which the controller has posted a forged completion. For these,
    /// any behaviour of the driver is correct.
    forged: BTreeSet<(u16, u16)>,
    requests: VecDeque<u16>,
    commands: usize,
}

#[derive(Clone)]
pub(super) struct Device(Arc<Mutex<State>>);

impl Device {
    pub(super) fn new(script: Vec<u8>) -> Self {
        let cap = Cap::new().with_mqes(1023).with_cqr(true).with_to(1).with_css(1).with_mpsmax(4);
        Self(Arc::new(Mutex::new(State {
            script: Script(script.into()),
            malicious: true,
            cap,
            vectors: 8,
            page: None,
            cc: Cc::new(),
            csts: Csts::new(),
            aqa: Aqa::new(),
            asq: 0,
            acq: 0,
            removed: false,
            dma: DmaSpace::default(),
            queues: BTreeMap::new(),
            cqs: BTreeMap::new(),
            shadow: None,
            irqs: BTreeMap::new(),
            busy: Vec::new(),
            forged: BTreeSet::new(),
            requests: VecDeque::new(),
            commands: 0,
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl State {
    fn bytes(&self, iova: u64, len: usize) -> Option<SharedBytes> {
        self.dma.table().bytes(iova, len as u64)
    }

    /// True if the controller may still write the data of this command.
    pub(super) fn is_busy(&self, qid: u16, cid: u16) -> bool {
        !self.forged.contains(&(qid, cid))
            && self.busy.iter().any(|(of, sqe)| (*of, sqe.cid) == (qid, cid))
    }

    fn reset(&mut self) {
        self.queues.clear();
        self.cqs.clear();
        self.busy.clear();
        self.forged.clear();
        self.requests.clear();
        self.shadow = None;
        self.csts = Csts::new();
    }

    fn set_cc(&mut self, cc: Cc) {
        let was = std::mem::replace(&mut self.cc, cc);
        let trick = if self.malicious { self.script.u8() } else { 0 };
        if !was.en() && cc.en() {
            let entries = u32::from(self.aqa.asqs()) + 1;
            let cq_entries = u32::from(self.aqa.acqs()) + 1;
            let queue = Queue::new(self.asq, entries, (self.acq, cq_entries, Some(0)));
            self.queues.insert(0, queue);
            self.csts = match trick {
                0xf0..=0xf7 => self.csts,
                0xf8.. => self.csts.with_cfs(true),
                _ => Csts::new().with_rdy(true),
            };
        } else if was.en() && !cc.en() && trick < 0xf0 {
            self.reset();
        }
        if cc.shn() != 0 && trick < 0xe0 {
            self.csts = self.csts.with_shst(regs::SHST_COMPLETE);
        }
    }

    /// Fetches and executes the commands of every queue.
    pub(super) fn run(&mut self) {
        let qids: Vec<_> = self.queues.keys().copied().collect();
        qids.into_iter().for_each(|qid| self.run_queue(qid));
    }

    fn run_queue(&mut self, qid: u16) {
        loop {
            if self.csts.cfs() && self.malicious {
                return;
            }
            self.read_tail(qid);
            let Some(queue) = self.queues.get_mut(&qid) else { return };
            assert!(queue.tail < queue.entries, "a tail of {} in {}", queue.tail, queue.entries);
            if queue.head == queue.tail {
                return;
            }
            let at = queue.sq + u64::from(queue.head) * 64;
            queue.head = (queue.head + 1) % queue.entries;
            self.commands += 1;
            assert!(self.commands < COMMANDS, "the driver never stops asking");
            let entry = self.bytes(at, 64).and_then(|bytes| bytes.read::<Sqe>(0));
            let sqe = entry.expect("a submission queue is in memory that is shared");
            self.busy.push((qid, sqe));
            self.play(qid, &sqe);
        }
    }

    /// Reads the tail of a queue, from the shadow doorbell if it is configured, and sets EventIdx.
    fn read_tail(&mut self, qid: u16) {
        let dstrd = self.cap.dstrd();
        let Some((values, event_idxs)) = &self.shadow else { return };
        let Ok(at) = usize::try_from(dbbuf::sq_entry_offset(qid, dstrd)) else { return };
        let (Some(queue), Some(value)) = (self.queues.get_mut(&qid), values.read::<u32>(at)) else {
            return;
        };
        queue.tail = value;
        let trick = if self.malicious { self.script.u8() } else { 0 };
        let event_idx = if trick < 0xf0 { value & 0xffff } else { trick.into() };
        let _ = event_idxs.write(at, &event_idx);
    }

    /// Executes a command, correctly or not as the script says.
    fn play(&mut self, qid: u16, sqe: &Sqe) {
        let trick = if self.malicious { self.script.u8() } else { 0 };
        match trick {
            // The command gets no completion here. `catch_up` may complete it later.
            0xf0..=0xf2 => {}
            0xf3..=0xf5 => {
                let status = Status::from_bits(self.script.u16());
                self.complete(qid, sqe.cid, status, 0);
            }
            0xf6..=0xf9 => {
                self.execute(qid, sqe, true);
            }
            0xfa..=0xfd => {
                let other = u16::from(self.script.u8());
                let cid = if trick & 1 == 0 { sqe.cid ^ other } else { sqe.cid };
                self.forge(qid, cid);
                if trick & 2 == 0 {
                    self.execute(qid, sqe, false);
                }
            }
            0xfe.. => {
                self.execute(qid, sqe, false);
                self.forge(qid, sqe.cid);
            }
            _ => self.execute(qid, sqe, false),
        }
    }

    /// Posts an invalid completion.
    pub(super) fn forge(&mut self, qid: u16, cid: u16) {
        self.forged.insert((qid, cid));
        let kind = self.script.u8();
        let sq_id = if kind & 1 == 0 { qid } else { self.script.u16() };
        let head = self.queues.get(&qid).map_or(0, |queue| queue.head as u16);
        let head = if kind & 2 == 0 { head } else { self.script.u16() };
        let status =
            if kind & 4 == 0 { Status::SUCCESS } else { Status::from_bits(self.script.u16()) };
        let dw0 = if kind & 8 == 0 { 0 } else { self.script.u64() as u32 };
        let wrong = kind & 0x30 == 0x30;
        self.write_cqe(qid, Cqe::new(cid, sq_id, head, status, dw0), wrong);
    }

    fn complete(&mut self, qid: u16, cid: u16, status: Status, dw0: u32) {
        self.busy.retain(|(of, sqe)| (*of, sqe.cid) != (qid, cid));
        let head = self.queues.get(&qid).map_or(0, |queue| queue.head as u16);
        self.write_cqe(qid, Cqe::new(cid, qid, head, status, dw0), false);
    }

    /// Writes an entry into a completion queue. With a wrong phase tag, the tail does not advance.
    fn write_cqe(&mut self, qid: u16, cqe: Cqe, wrong_phase: bool) {
        let Some(queue) = self.queues.get_mut(&qid) else { return };
        let cqe = cqe.with_phase(queue.phase != wrong_phase);
        let at = queue.cq + u64::from(queue.cq_tail) * 16;
        if !wrong_phase {
            queue.cq_tail = (queue.cq_tail + 1) % queue.cq_entries;
            queue.phase ^= queue.cq_tail == 0;
        }
        let vector = queue.vector;
        let bytes = self.bytes(at, 16).expect("a completion queue is in memory that is shared");
        let _ = bytes.write_from(0, &cqe.as_bytes()[..8]);
        let _ = bytes.write_from(8, &cqe.as_bytes()[8..]);
        if let Some(event) = vector.and_then(|vector| self.irqs.get(&vector)) {
            event.signal();
        }
    }

    /// Completes at most `most` of the commands that were left without a completion.
    pub(super) fn catch_up(&mut self, most: usize) {
        let left: Vec<_> = self.busy.iter().take(most).copied().collect();
        for (qid, sqe) in left {
            if !(qid == 0 && sqe.opcode == 0x0c) {
                self.execute(qid, &sqe, false);
            }
        }
    }

    /// Posts an asynchronous event, if a request for one is outstanding.
    pub(super) fn event(&mut self) {
        if let Some(cid) = self.requests.pop_front() {
            let dw0 = self.script.u64() as u32;
            self.complete(0, cid, Status::SUCCESS, dw0);
        }
    }

    /// Writes `data` to the command's buffer.
    fn write_data(&self, sqe: &Sqe, data: &[u8]) {
        let mut segments = Segments::new();
        let page = 1usize << (12 + u32::from(self.cc.mps()));
        let view = View::new(Arc::clone(self.dma.table()));
        let resolved =
            view.resolve_prps(sqe.prp1(), sqe.prp2(), data.len(), page, true, &mut segments);
        // The driver's data pointers must be valid, whatever the controller does.
        resolved.unwrap_or_else(|error| panic!("{sqe:?}: {error}"));
        segments.write_from(0, data).expect("room");
    }

    fn execute(&mut self, qid: u16, sqe: &Sqe, corrupt: bool) {
        let outcome = if qid == 0 { self.admin(sqe, corrupt) } else { self.io(sqe) };
        match outcome {
            Ok(Some(dw0)) => {
                let lie = if corrupt { self.script.u64() as u32 } else { dw0 };
                self.complete(qid, sqe.cid, Status::SUCCESS, lie);
            }
            Ok(None) => {}
            Err(status) => self.complete(qid, sqe.cid, status, 0),
        }
    }

    fn io(&mut self, sqe: &Sqe) -> Result<Option<u32>, Status> {
        if sqe.opcode == 0x02 {
            let len = ((sqe.cdw12 & 0xffff) as usize + 1) << 9;
            self.write_data(sqe, &vec![0x77; len.min(1 << 20)]);
        }
        Ok(Some(0))
    }

    fn admin(&mut self, sqe: &Sqe, corrupt: bool) -> Result<Option<u32>, Status> {
        match sqe.opcode {
            0x06 => {
                let mut data = self.identify(sqe)?;
                if corrupt {
                    for _ in 0..1 + self.script.u8() % 8 {
                        let at = usize::from(self.script.u16()) % data.len();
                        // Most damaged bytes are near the beginning, where the relevant fields are.
                        let at = if self.script.u8() & 1 == 0 { at % 600 } else { at };
                        data[at] = self.script.u8();
                    }
                }
                self.write_data(sqe, &data);
            }
            0x09 if sqe.cdw10 as u8 == 7 => return Ok(Some(0x0003_0003)),
            0x0a => return Ok(Some(0x100)),
            0x02 => {
                let dwords = (sqe.cdw10 >> 16 | sqe.cdw11 << 16) as usize + 1;
                let fill = if corrupt { self.script.u8() } else { 0 };
                self.write_data(sqe, &vec![fill; (dwords * 4).min(1 << 20)]);
            }
            0x05 => {
                let vector = (sqe.cdw11 & 2 != 0).then_some(sqe.cdw11 >> 16);
                let entries = (sqe.cdw10 >> 16) + 1;
                self.cqs.insert(sqe.cdw10 as u16, (sqe.prp1(), entries, vector));
            }
            0x01 => {
                let cq = *self.cqs.get(&((sqe.cdw11 >> 16) as u16)).ok_or(Status::CQ_INVALID)?;
                let queue = Queue::new(sqe.prp1(), (sqe.cdw10 >> 16) + 1, cq);
                self.queues.insert(sqe.cdw10 as u16, queue);
            }
            0x00 => {
                let qid = sqe.cdw10 as u16;
                if qid == 0 || self.queues.remove(&qid).is_none() {
                    return Err(Status::INVALID_QID);
                }
                self.busy.retain(|(of, _)| *of != qid);
                self.forged.retain(|(of, _)| *of != qid);
            }
            0x08 => return Ok(Some(1)),
            0x0c => {
                self.requests.push_back(sqe.cid);
                return Ok(None);
            }
            0x7c => {
                let page = 1 << (12 + u32::from(self.cc.mps()));
                let get = |iova| self.bytes(iova, page).ok_or(Status::INVALID_FIELD);
                self.shadow = Some((get(sqe.prp1())?, get(sqe.prp2())?));
            }
            _ => {}
        }
        Ok(Some(0))
    }

    fn identify(&mut self, sqe: &Sqe) -> Result<Vec<u8>, Status> {
        Ok(match sqe.cdw10 as u8 {
            cns::CONTROLLER => {
                let mut identity = IdentifyController::new_zeroed();
                (identity.mdts, identity.nn, identity.aerl, identity.elpe) = (5, 2, 3, 15);
                identity.oacs = identity.oacs.with_doorbell_buffer_config(true);
                identity.as_bytes().to_vec()
            }
            cns::NAMESPACE => {
                let mut namespace = IdentifyNamespace::new_zeroed();
                (namespace.nsze, namespace.ncap) = (BLOCKS, BLOCKS);
                namespace.lbaf[0].lbads = 9;
                namespace.as_bytes().to_vec()
            }
            cns::ACTIVE_NAMESPACES => {
                let mut list = vec![0; 4096];
                for (at, nsid) in (sqe.nsid.saturating_add(1)..=2).enumerate() {
                    list[at * 4..at * 4 + 4].copy_from_slice(&nsid.to_le_bytes());
                }
                list
            }
            cns::NAMESPACE_IDS => vec![0; 4096],
            _ => return Err(Status::INVALID_FIELD),
        })
    }
}

impl Queue {
    fn new(sq: u64, entries: u32, (cq, cq_entries, vector): (u64, u32, Option<u32>)) -> Self {
        Self { sq, entries, head: 0, tail: 0, cq, cq_entries, cq_tail: 0, phase: true, vector }
    }
}

fn disconnected(operation: &'static str) -> TransportError {
    TransportError::Disconnected { device: "script".into(), operation, source: "so it says".into() }
}

impl Transport for Device {
    fn name(&self) -> &str {
        "script"
    }

    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        let mut state = self.state();
        Ok(match offset {
            _ if state.removed => u32::MAX,
            // While the controller is disabled, CSTS is always correct: CSTS.RDY 0 tells the driver
            // that the controller has released all memory, and the driver cannot detect a false
            // value.
            regs::CSTS if !state.cc.en() && !state.csts.rdy() => {
                let csts = state.csts;
                state.reset();
                state.csts = csts;
                csts.into_bits()
            }
            regs::VS => regs::Vs::V1_4.into_bits(),
            regs::CC => state.cc.into_bits(),
            regs::CSTS => state.csts.into_bits(),
            _ => 0,
        })
    }

    fn read64(&self, offset: u64) -> Result<u64, TransportError> {
        let state = self.state();
        Ok(match offset {
            _ if state.removed => u64::MAX,
            regs::CAP => state.cap.into_bits(),
            _ => 0,
        })
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        let mut state = self.state();
        match offset {
            regs::CC => state.set_cc(Cc::from_bits(value)),
            regs::AQA => state.aqa = Aqa::from_bits(value),
            _ => {}
        }
        Ok(())
    }

    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError> {
        let mut state = self.state();
        match offset {
            regs::ASQ => state.asq = value,
            regs::ACQ => state.acq = value,
            _ => {}
        }
        Ok(())
    }

    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        let mut state = self.state();
        if state.malicious && state.script.u8() == 0xff {
            return Err(disconnected("ringing a doorbell"));
        }
        let doorbell = regs::decode_doorbell(offset, state.cap.dstrd()).expect("a doorbell");
        if doorbell.kind == regs::DoorbellKind::Sq {
            if let Some(queue) = state.queues.get_mut(&doorbell.qid) {
                queue.tail = value;
            }
            state.run_queue(doorbell.qid);
        }
        Ok(())
    }

    fn doorbell_page(&self) -> Option<SharedBytes> {
        self.state().page.clone()
    }

    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError> {
        let mut state = self.state();
        let trick = if state.malicious { state.script.u8() } else { 0 };
        if trick == 0xff {
            return Err(disconnected("sharing memory"));
        }
        let mut iova = 0x4000_0000_1000 + mapping.address() as u64;
        if trick == 0xfe {
            iova += 8;
        }
        // If the address is unaligned, the driver unmaps it immediately.
        let _ = state.dma.map(iova, mapping.len() as u64, &mapping.bytes());
        Ok(iova)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        let mut state = self.state();
        let inside = |at: u64| at >= iova && at < iova + len;
        let busy = state.busy.iter().find(|(qid, sqe)| {
            !state.forged.contains(&(*qid, sqe.cid)) && sqe.opcode == 0x02 && inside(sqe.prp1())
        });
        assert!(busy.is_none(), "memory is taken away under {busy:?}");
        let _ = state.dma.unmap(iova, len);
        Ok(())
    }

    fn irq_vectors(&self) -> u32 {
        self.state().vectors
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        let mut state = self.state();
        match event.and_then(|event| event.try_clone().ok()) {
            Some(event) => drop(state.irqs.insert(vector, event)),
            None => drop(state.irqs.remove(&vector)),
        }
        Ok(())
    }

    fn reset(&self) -> Result<(), TransportError> {
        let mut state = self.state();
        if state.malicious && state.script.u8() >= 0xe0 {
            return Err(disconnected("a reset"));
        }
        state.reset();
        state.cc = Cc::new();
        Ok(())
    }
}

/// A doorbell page.
pub(super) fn page() -> Option<SharedBytes> {
    Mapping::anonymous(4096).ok().map(|mapping| mapping.bytes())
}
