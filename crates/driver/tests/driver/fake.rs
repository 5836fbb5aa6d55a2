//! Fake controller whose behaviour the test configures. By default it behaves correctly.
//!
//! The code of the fake controller runs on the thread that rings a doorbell, so its behaviour does
//! not depend on time.

use parking_lot::{Mutex, MutexGuard};
use shadowbell_driver::{Transport, TransportError};
use shadowbell_memory::{DmaSpace, EventFd, Mapping, Ring, Segments, SharedBytes, View};
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq, GetLogPage, Identify};
use shadowbell_spec::identify::{
    IdentifyController, IdentifyNamespace, NamespaceId, NamespaceIds, cns,
};
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::{AdminOpcode, NvmOpcode};
use shadowbell_spec::regs::{self, Aqa, Cap, Cc, Csts};
use shadowbell_spec::{Cqe, Sqe, Status, dbbuf};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

pub(crate) const BLOCKS: u64 = 2048;

/// A submission queue with its completion queue.
struct Queue {
    sq: Ring<64>,
    head: u32,
    tail: u32,
    cq: Ring<16>,
    cq_tail: u32,
    phase: bool,
    vector: Option<u32>,
}

pub(crate) struct State {
    // Properties of the controller.
    pub(crate) cap: Cap,
    pub(crate) identity: IdentifyController,
    pub(crate) namespaces: BTreeMap<u32, IdentifyNamespace>,
    pub(crate) granted: u16,
    pub(crate) vectors: u32,
    pub(crate) doorbell_page: Option<SharedBytes>,

    // Injected faults.
    /// If true, CSTS.RDY never changes.
    pub(crate) stuck: bool,
    /// If true, CSTS.CFS is set when the controller is enabled.
    pub(crate) fatal: bool,
    /// Number of enables that fail: the controller's first memory access uses a stale translation,
    /// so CSTS.CFS is set.
    pub(crate) stale: usize,
    /// If true, CSTS.NSSRO cannot be cleared.
    pub(crate) keeps_nssro: bool,
    /// If true, CSTS.SHST never indicates a complete shutdown.
    pub(crate) endless_shutdown: bool,
    /// If true, the function cannot be reset.
    pub(crate) no_reset: bool,
    /// If true, registers read as all ones.
    pub(crate) removed: bool,
    /// If true, doorbell writes fail.
    pub(crate) broken_doorbells: bool,
    /// Opcodes of admin commands that are never completed.
    pub(crate) ignored: BTreeSet<u8>,
    /// Opcodes of admin commands that fail, with their status.
    pub(crate) refused: BTreeMap<u8, Status>,
    /// If true, I/O commands wait for [`Fake::complete`].
    pub(crate) hold: bool,
    /// Status of I/O commands.
    pub(crate) io_status: Status,
    /// Wrong Identify data, by CNS.
    pub(crate) wrong_identify: BTreeMap<u8, Vec<u8>>,
    /// If true, the controller polls the shadow doorbells, and sets EventIdx so that the host need
    /// not write doorbell registers.
    pub(crate) polling: bool,
    /// Constant value of EventIdx while `polling` is true. `None` if EventIdx follows the doorbell.
    pub(crate) event_idx: Option<u32>,
    /// If true, the controller reads the admin queue's registers even with shadow doorbells.
    pub(crate) admin_by_register: bool,

    // Current state, and recorded history.
    pub(crate) cc: Cc,
    pub(crate) csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
    pub(crate) dma: DmaSpace,
    queues: BTreeMap<u16, Queue>,
    pending_cqs: BTreeMap<u16, (Ring<16>, Option<u32>)>,
    shadow: Option<(SharedBytes, SharedBytes)>,
    pub(crate) irqs: BTreeMap<u32, EventFd>,
    pub(crate) held: VecDeque<(u16, Sqe)>,
    pub(crate) event_requests: VecDeque<u16>,
    pub(crate) admin_log: Vec<u8>,
    pub(crate) doorbell_writes: Vec<(u64, u32)>,
    pub(crate) blocks: Vec<u8>,
    pub(crate) ignored_cids: Vec<u16>,
    pub(crate) deleted: Vec<u16>,
    pub(crate) unmaps: usize,
    pub(crate) resets: usize,
}

#[derive(Clone)]
pub(crate) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(crate) fn new() -> Self {
        let mut identity = IdentifyController::new_zeroed();
        identity.mdts = 5; // 128 KiB
        identity.nn = 1;
        identity.aerl = 3;
        identity.elpe = 15;
        identity.oacs = identity.oacs.with_doorbell_buffer_config(true);
        let mut namespace = IdentifyNamespace::new_zeroed();
        namespace.nsze = BLOCKS;
        namespace.ncap = BLOCKS;
        namespace.lbaf[0].lbads = 9;
        namespace.nguid = [7; 16];
        let cap = Cap::new().with_mqes(1023).with_cqr(true).with_to(2).with_css(1).with_mpsmax(4);
        Self(Arc::new(Mutex::new(State {
            cap,
            identity,
            namespaces: BTreeMap::from([(1, namespace)]),
            granted: 8,
            vectors: 16,
            doorbell_page: None,
            stuck: false,
            fatal: false,
            stale: 0,
            keeps_nssro: false,
            endless_shutdown: false,
            no_reset: false,
            removed: false,
            broken_doorbells: false,
            ignored: BTreeSet::new(),
            refused: BTreeMap::new(),
            hold: false,
            io_status: Status::SUCCESS,
            wrong_identify: BTreeMap::new(),
            polling: false,
            event_idx: None,
            admin_by_register: false,
            cc: Cc::new(),
            csts: Csts::new(),
            aqa: Aqa::new(),
            asq: 0,
            acq: 0,
            dma: DmaSpace::default(),
            queues: BTreeMap::new(),
            pending_cqs: BTreeMap::new(),
            shadow: None,
            irqs: BTreeMap::new(),
            held: VecDeque::new(),
            event_requests: VecDeque::new(),
            admin_log: Vec::new(),
            doorbell_writes: Vec::new(),
            blocks: vec![0; BLOCKS as usize * 512],
            ignored_cids: Vec::new(),
            deleted: Vec::new(),
            unmaps: 0,
            resets: 0,
        })))
    }

    pub(crate) fn transport(&self) -> Arc<dyn Transport> {
        Arc::new(self.clone())
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state())
    }

    /// Checks every doorbell, as a controller that polls does.
    pub(crate) fn poll(&self) {
        self.state().run();
    }

    /// Executes the `n`th held command, and completes it.
    pub(crate) fn complete(&self, n: usize) {
        let mut state = self.state();
        let (qid, sqe) = state.held.remove(n).expect("a command that is held");
        let status = state.io(&sqe);
        state.post(qid, Cqe::new(sqe.cid, qid, 0, status, 0), None);
    }

    /// Posts the completion `cqe`. It need not belong to a command. With `None` as `phase`, it gets
    /// the correct phase tag.
    pub(crate) fn post(&self, qid: u16, cqe: Cqe, sq_head: u16, phase: Option<bool>) {
        let mut state = self.state();
        let cqe = Cqe { sq_head, ..cqe };
        state.post_raw(qid, cqe, phase);
    }

    /// Posts an asynchronous event.
    pub(crate) fn event(&self, dw0: u32) {
        let mut state = self.state();
        let cid = state.event_requests.pop_front().expect("an Asynchronous Event Request");
        state.post(0, Cqe::new(cid, 0, 0, Status::SUCCESS, dw0), None);
    }
}

impl State {
    fn view(&self) -> View {
        View::new(Arc::clone(self.dma.table()))
    }

    fn enable(&mut self) {
        let sq_entries = u32::from(self.aqa.asqs()) + 1;
        let cq_entries = u32::from(self.aqa.acqs()) + 1;
        let sq = Ring::resolve(self.dma.table(), self.asq, sq_entries, false).unwrap();
        let cq = Ring::resolve(self.dma.table(), self.acq, cq_entries, true).unwrap();
        self.queues.insert(0, Queue::new(sq, cq, Some(0)));
        self.csts = self.csts.with_rdy(true);
    }

    pub(crate) fn reset(&mut self) {
        self.queues.clear();
        self.pending_cqs.clear();
        self.held.clear();
        self.event_requests.clear();
        self.shadow = None;
        self.csts = Csts::new();
        self.cc = Cc::new();
    }

    fn set_cc(&mut self, cc: Cc) {
        let was = std::mem::replace(&mut self.cc, cc);
        if self.stuck {
            return;
        }
        if !was.en() && cc.en() {
            if self.fatal {
                self.csts = self.csts.with_cfs(true);
            } else {
                self.enable();
            }
        } else if was.en() && !cc.en() {
            self.reset();
            self.cc = cc;
        }
        if cc.shn() != 0 && !self.endless_shutdown {
            self.csts = self.csts.with_shst(regs::SHST_COMPLETE);
        }
    }

    fn run(&mut self) {
        let qids: Vec<_> = self.queues.keys().copied().collect();
        for qid in qids {
            self.run_queue(qid);
        }
    }

    fn run_queue(&mut self, qid: u16) {
        if self.stale > 0 && qid == 0 && !self.csts.cfs() {
            self.stale -= 1;
            self.csts = self.csts.with_cfs(true);
        }
        if self.csts.cfs() {
            return;
        }
        loop {
            let dstrd = self.cap.dstrd();
            let entry = usize::try_from(dbbuf::sq_entry_offset(qid, dstrd)).unwrap();
            let shadowed = self.shadow.as_ref().filter(|_| qid != 0 || !self.admin_by_register);
            let shadow = shadowed.and_then(|(values, event_idxs)| {
                Some((values.cell(entry)?, event_idxs.cell(entry)?))
            });
            let Some(queue) = self.queues.get_mut(&qid) else { return };
            if let Some((value, event_idx)) = shadow {
                use shadowbell_doorbell::Cell;
                queue.tail = value.load_acquire();
                let behind = |at: u32| self.event_idx.unwrap_or(at.wrapping_sub(1) & 0xffff);
                let idx = if self.polling { behind(queue.tail) } else { queue.tail };
                event_idx.store_release(idx);
                // The controller does not wait for free completion queue entries. So it needs no
                // notification of head updates, and EventIdx of the head follows the head as well.
                if self.polling
                    && let Some((values, event_idxs)) = &self.shadow
                {
                    let entry = usize::try_from(dbbuf::cq_entry_offset(qid, dstrd)).unwrap();
                    let head = values.read::<u32>(entry).unwrap();
                    event_idxs.write(entry, &behind(head)).unwrap();
                }
            }
            if let Some(page) = &self.doorbell_page
                && qid != 0
            {
                queue.tail = page.read::<u32>(entry).unwrap();
            }
            assert!(queue.tail < queue.sq.entries(), "a tail outside of the queue");
            if queue.head == queue.tail {
                return;
            }
            let sqe: Sqe = queue.sq.read(queue.head);
            queue.head = (queue.head + 1) % queue.sq.entries();
            if qid == 0 {
                self.admin(&sqe);
            } else if self.hold {
                self.held.push_back((qid, sqe));
            } else {
                let status = self.io(&sqe);
                self.post(qid, Cqe::new(sqe.cid, qid, 0, status, 0), None);
            }
        }
    }

    fn post(&mut self, qid: u16, cqe: Cqe, phase: Option<bool>) {
        let head = self.queues.get(&qid).map_or(0, |queue| queue.head as u16);
        self.post_raw(qid, Cqe { sq_head: head, ..cqe }, phase);
    }

    fn post_raw(&mut self, qid: u16, cqe: Cqe, phase: Option<bool>) {
        let Some(queue) = self.queues.get_mut(&qid) else { return };
        let cqe = cqe.with_phase(phase.unwrap_or(queue.phase));
        let bytes: [u8; 16] = cqe.as_bytes().try_into().unwrap();
        let word = |at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        queue.cq.publish(queue.cq_tail, [word(0), word(8)]);
        if phase.is_none() || phase == Some(queue.phase) {
            queue.cq_tail = (queue.cq_tail + 1) % queue.cq.entries();
            queue.phase ^= queue.cq_tail == 0;
        }
        if let Some(event) = queue.vector.and_then(|vector| self.irqs.get(&vector)) {
            event.signal();
        }
    }

    fn segments(&self, sqe: &Sqe, len: usize, write: bool) -> Result<Segments, Status> {
        let mut segments = Segments::new();
        let page = 1 << (12 + u32::from(self.cc.mps()));
        self.view()
            .resolve_prps(sqe.prp1(), sqe.prp2(), len, page, write, &mut segments)
            .map_err(|error| error.status())?;
        Ok(segments)
    }

    fn io(&mut self, sqe: &Sqe) -> Status {
        if !self.io_status.is_success() {
            return self.io_status;
        }
        match NvmOpcode::try_from(sqe.opcode) {
            Ok(NvmOpcode::Flush | NvmOpcode::Verify) => return Status::SUCCESS,
            Ok(NvmOpcode::DatasetManagement) => return Status::SUCCESS,
            _ => {}
        }
        let rw = RwFields::decode(sqe);
        let (start, len) = (rw.slba as usize * 512, rw.blocks() as usize * 512);
        let Some(blocks) = self.blocks.get(start..start + len) else {
            return Status::LBA_OUT_OF_RANGE;
        };
        match NvmOpcode::try_from(sqe.opcode) {
            Ok(NvmOpcode::Read) => match self.segments(sqe, len, true) {
                Ok(segments) => {
                    segments.write_from(0, blocks).unwrap();
                    Status::SUCCESS
                }
                Err(status) => status,
            },
            Ok(opcode @ (NvmOpcode::Write | NvmOpcode::Compare)) => {
                match self.segments(sqe, len, false) {
                    Ok(segments) => {
                        let mut data = vec![0; len];
                        segments.read_into(0, &mut data).unwrap();
                        if opcode == NvmOpcode::Write {
                            self.blocks[start..start + len].copy_from_slice(&data);
                            Status::SUCCESS
                        } else if self.blocks[start..start + len] == data {
                            Status::SUCCESS
                        } else {
                            Status::COMPARE_FAILURE
                        }
                    }
                    Err(status) => status,
                }
            }
            Ok(NvmOpcode::WriteZeroes) => {
                self.blocks[start..start + len].fill(0);
                Status::SUCCESS
            }
            _ => Status::INVALID_OPCODE,
        }
    }

    fn admin(&mut self, sqe: &Sqe) {
        self.admin_log.push(sqe.opcode);
        if self.ignored.contains(&sqe.opcode) {
            self.ignored_cids.push(sqe.cid);
            return;
        }
        let outcome = match self.refused.get(&sqe.opcode) {
            Some(status) => Err(*status),
            None => self.carry_out(sqe),
        };
        match outcome {
            Ok(None) => {}
            Ok(Some(dw0)) => self.post(0, Cqe::new(sqe.cid, 0, 0, Status::SUCCESS, dw0), None),
            Err(status) => self.post(0, Cqe::new(sqe.cid, 0, 0, status, 0), None),
        }
    }

    fn carry_out(&mut self, sqe: &Sqe) -> Result<Option<u32>, Status> {
        let table = Arc::clone(self.dma.table());
        match AdminOpcode::try_from(sqe.opcode).map_err(|_| Status::INVALID_OPCODE)? {
            AdminOpcode::Identify => {
                let data = self.identify(sqe)?;
                self.segments(sqe, 4096, true)?.write_from(0, &data).unwrap();
            }
            AdminOpcode::SetFeatures if sqe.cdw10 as u8 == 7 => {
                let granted = u32::from(self.granted - 1);
                return Ok(Some(granted | granted << 16));
            }
            AdminOpcode::SetFeatures => {}
            AdminOpcode::GetFeatures => return Ok(Some(sqe.cdw11 | 0x100)),
            AdminOpcode::GetLogPage => {
                let fields = GetLogPage::decode(sqe);
                let len = fields.length() as usize;
                // Byte n of every log page is n.
                let data: Vec<u8> = (0..len).map(|i| (fields.lpo as usize + i) as u8).collect();
                self.segments(sqe, len, true)?.write_from(0, &data).unwrap();
            }
            AdminOpcode::CreateIoCq => {
                let cq = CreateIoCq::decode(sqe);
                let entries = u32::from(cq.qsize0) + 1;
                let ring = Ring::resolve(&table, sqe.prp1(), entries, true).unwrap();
                self.pending_cqs.insert(cq.qid, (ring, cq.ien.then_some(cq.iv.into())));
            }
            AdminOpcode::CreateIoSq => {
                let sq = CreateIoSq::decode(sqe);
                let entries = u32::from(sq.qsize0) + 1;
                let ring = Ring::resolve(&table, sqe.prp1(), entries, false).unwrap();
                let (cq, vector) = self.pending_cqs.remove(&sq.cqid).ok_or(Status::CQ_INVALID)?;
                self.queues.insert(sq.qid, Queue::new(ring, cq, vector));
                self.run_queue(sq.qid);
            }
            AdminOpcode::DeleteIoSq => {
                let qid = sqe.cdw10 as u16;
                self.queues.remove(&qid).ok_or(Status::INVALID_QID)?;
                self.held.retain(|(held, _)| *held != qid);
                self.deleted.push(qid);
            }
            AdminOpcode::DeleteIoCq => {}
            AdminOpcode::Abort => return Ok(Some(u32::from(sqe.cdw10 >> 16 != 0))),
            AdminOpcode::AsyncEventRequest => {
                self.event_requests.push_back(sqe.cid);
                return Ok(None);
            }
            AdminOpcode::DoorbellBufferConfig => {
                let page = 1 << (12 + u32::from(self.cc.mps()));
                let get = |iova| table.bytes(iova, page).ok_or(Status::INVALID_FIELD);
                self.shadow = Some((get(sqe.prp1())?, get(sqe.prp2())?));
            }
            _ => return Err(Status::INVALID_OPCODE),
        }
        Ok(Some(0))
    }

    fn identify(&self, sqe: &Sqe) -> Result<Vec<u8>, Status> {
        let fields = Identify::decode(sqe);
        if let Some(lie) = self.wrong_identify.get(&fields.cns) {
            return Ok(lie.clone());
        }
        Ok(match fields.cns {
            cns::CONTROLLER => self.identity.as_bytes().to_vec(),
            cns::NAMESPACE => {
                let namespace = self.namespaces.get(&sqe.nsid);
                namespace.ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?.as_bytes().to_vec()
            }
            cns::ACTIVE_NAMESPACES => {
                let mut list = vec![0; 4096];
                let above = self.namespaces.keys().filter(|nsid| **nsid > sqe.nsid);
                for (i, nsid) in above.take(1024).enumerate() {
                    list[i * 4..i * 4 + 4].copy_from_slice(&nsid.to_le_bytes());
                }
                list
            }
            cns::NAMESPACE_IDS => {
                NamespaceIds::new([NamespaceId::Uuid([sqe.nsid as u8; 16])]).bytes.to_vec()
            }
            _ => return Err(Status::INVALID_FIELD),
        })
    }
}

impl Queue {
    fn new(sq: Ring<64>, cq: Ring<16>, vector: Option<u32>) -> Self {
        Self { sq, head: 0, tail: 0, cq, cq_tail: 0, phase: true, vector }
    }
}

impl Transport for Fake {
    fn name(&self) -> &str {
        "fake"
    }

    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        let state = self.state();
        if state.removed {
            return Ok(u32::MAX);
        }
        Ok(match offset {
            regs::VS => regs::Vs::V1_4.into_bits(),
            regs::CC => state.cc.into_bits(),
            regs::CSTS => {
                state.csts.with_nssro(state.csts.nssro() || state.keeps_nssro).into_bits()
            }
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
            regs::CSTS if Csts::from_bits(value).nssro() => {
                state.csts = state.csts.with_nssro(false);
            }
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
        if state.broken_doorbells {
            return Err(TransportError::Disconnected {
                device: "fake".into(),
                operation: "ringing a doorbell",
                source: "it is broken".into(),
            });
        }
        state.doorbell_writes.push((offset, value));
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
        self.state().doorbell_page.clone()
    }

    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError> {
        // The IOVA differs from the address in the process, and has the minimum alignment.
        let iova = 0x4000_0000_1000 + mapping.address() as u64;
        self.state().dma.map(iova, mapping.len() as u64, &mapping.bytes()).unwrap();
        Ok(iova)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        let mut state = self.state();
        state.unmaps += 1;
        state.dma.unmap(iova, len).unwrap();
        Ok(())
    }

    fn irq_vectors(&self) -> u32 {
        self.state().vectors
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        let mut state = self.state();
        match event {
            Some(event) => drop(state.irqs.insert(vector, event.try_clone().unwrap())),
            None => drop(state.irqs.remove(&vector)),
        }
        Ok(())
    }

    fn reset(&self) -> Result<(), TransportError> {
        let mut state = self.state();
        if state.no_reset {
            return Err(TransportError::Unsupported { device: "fake".into(), what: "reset" });
        }
        state.resets += 1;
        state.reset();
        Ok(())
    }
}
