//! Admin queue server: fetches admin commands, passes them to the control plane for execution,
//! transfers their data and posts their completions.
//!
//! An access to guest memory can block for as long as the guest likes (userfaultfd, FUSE). So it
//! must not happen under the control plane's lock. This module therefore owns the admin queue and
//! makes all accesses of the control plane to guest memory. The control plane sends
//! [`Orders`](crate::control::Orders) to this module. The module executes them before it fetches
//! the next command.

use crate::context::Context;
use crate::control::{Attach, Control, Data, Deferred, Orders, Outcome, Standing};
use crate::journal::JournalPart;
use crate::queue::admin::{AdminCompletion, AdminQueue};
use crate::saved::SavedAdminQueue;
use crate::trace::Kind;
use parking_lot::Mutex;
use shadowbell_memory::{DmaTable, Segments, View};
use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// Admin command that was fetched from the queue and not executed yet.
pub(crate) struct Fetched(Sqe);

/// Result of polling the admin queue.
pub(crate) enum Next {
    Command(Fetched),
    /// The queue changed during the poll: poll again.
    PollAgain,
    /// The queue is empty. After the host's next doorbell write, the control thread polls it again.
    Idle,
}

/// Server of a controller's admin queue. Runs in turns of the control thread.
#[derive(Default)]
pub(crate) struct AdminServer {
    attached: Option<Attach>,
    /// Shadow doorbell page and EventIdx page of Doorbell Buffer Config.
    shadow: Option<(u64, u64)>,
    /// Command that cannot start yet. Until it starts, no further command is fetched.
    waiting: Option<Sqe>,
    standing: Standing,
    journal: Option<JournalPart>,
    /// True if a loss of the host memory that holds the attached queue was reported.
    loss_reported: bool,
}

impl AdminServer {
    /// Executes the control plane's orders. Returns true if commands were completed, so that the
    /// caller has to checkpoint the state again.
    pub(crate) fn execute_orders(
        &mut self,
        control: &Mutex<Control>,
        cx: &Context,
        has_fetched: bool,
    ) -> bool {
        let (orders, standing) = control.lock().admin_orders(has_fetched);
        self.standing = standing;
        let Orders { detach, attach, table, latches, shadow, acq, completions, replies } = orders;
        if let Some(latch) = detach {
            if let Some(Attach { queue, .. }) = self.attached.take() {
                queue.retire(&cx.shared);
            }
            (self.shadow, self.waiting) = (None, None);
            drop(latch);
        }
        if let Some(attach) = attach {
            self.shadow = attach.shadow;
            self.loss_reported = false;
            // Without a journal the queue is served, but it cannot be recovered after a crash.
            self.journal = cx.shared.journal_part(0, attach.generation).unwrap_or_default();
            self.attached = Some(attach);
        }
        if let Some(Attach { queue, table: current, generation, .. }) = &mut self.attached {
            if let Some(table) = table {
                queue.remap(&table, self.shadow);
                *current = table;
            }
            if let Some(pages) = shadow {
                self.shadow = pages;
                if queue.change_shadow(current, pages).is_err() {
                    control.lock().invalid_doorbell_value();
                }
            }
            if let Some(acq) = acq {
                queue.set_cq_address(current, acq);
            }
            completions.iter().for_each(|completion| queue.complete(completion));
            for (sqe, data) in &replies {
                let status = match write(current, sqe, standing.page_size, data) {
                    Ok(()) => Status::SUCCESS,
                    Err(status) => {
                        control.lock().admin_data_failed(*generation, sqe, status);
                        status
                    }
                };
                let dw0 = data.dw0;
                let completion = AdminCompletion { cid: sqe.cid, status, dw0, placed: true };
                queue.complete(&completion);
                control.lock().admin_ended(*generation, completion);
            }
            if let Some(journal) = &self.journal {
                queue.write_down(journal);
            }
        }
        drop(latches);
        !replies.is_empty()
    }

    /// The attached queue, if the controller is ready.
    fn queue(&mut self) -> Option<&mut AdminQueue> {
        let attached = self.attached.as_mut().filter(|_| self.standing.ready)?;
        Some(&mut attached.queue)
    }

    /// True if a command cannot complete because the memory of the completion queue is not mapped.
    pub(crate) fn lacks_cq(&mut self) -> bool {
        self.queue().is_some_and(|queue| queue.lacks_cq())
    }

    /// Fetches the next command, if there is one and the completion queue has a free entry for it.
    /// Otherwise posts pending completions and enables doorbell events.
    pub(crate) fn next(&mut self, control: &Mutex<Control>, cx: &Context) -> Next {
        let waiting = self.waiting.take();
        if self.queue().is_none() {
            return Next::Idle;
        }
        if let Some(waiting) = waiting {
            return Next::Command(Fetched(waiting));
        }
        if !self.standing.accepts_commands {
            return Next::Idle;
        }
        let standing = &self.standing;
        let attached = self.attached.as_mut().filter(|_| standing.ready);
        let Some(attached) = attached else { return Next::Idle };
        match attached.queue.next() {
            Ok(Some(sqe)) => {
                cx.trace(Kind::CommandSeen, 0, sqe.cid.into(), sqe.opcode.into());
                return Next::Command(Fetched(sqe));
            }
            Ok(None) => {}
            Err(_) => control.lock().invalid_doorbell_value(),
        }
        post(attached, control, cx);
        match attached.queue.arm() {
            Ok(true) => return Next::Idle,
            Ok(false) => {}
            Err(_) => control.lock().invalid_doorbell_value(),
        }
        Next::PollAgain
    }

    /// Executes a command. Returns true if the next command can be fetched.
    pub(crate) fn serve(
        &mut self,
        control: &Mutex<Control>,
        cx: &Context,
        Fetched(sqe): Fetched,
        deferred: &mut Deferred,
    ) -> bool {
        let page_size = self.standing.page_size;
        // A reset detaches the queue and drops its commands.
        let Some(Attach { queue, table, generation, .. }) = &mut self.attached else {
            return false;
        };
        let data = match Control::data_length(&sqe) {
            0 => None,
            len => Some(read(table, &sqe, page_size, len)),
        };
        let executed = control.lock().execute(cx, *generation, &sqe, data, deferred);
        let Some(executed) = executed else { return false };
        let ended = match executed {
            Ok(Outcome::Data(data)) => match write(table, &sqe, page_size, &data) {
                Ok(()) => {
                    if let Some(log) = data.log {
                        control.lock().log_was_read(*generation, log);
                    }
                    Ok(data.dw0)
                }
                Err(status) => {
                    control.lock().admin_data_failed(*generation, &sqe, status);
                    Err(status)
                }
            },
            Ok(Outcome::Done(dw0)) => Ok(dw0),
            Ok(Outcome::Pending) => return true,
            Ok(Outcome::Unplaced) => {
                queue.release_last_permit();
                return true;
            }
            Ok(Outcome::NotYet) => {
                self.waiting = Some(sqe);
                return false;
            }
            Err(status) => Err(status),
        };
        let (status, dw0) = match ended {
            Ok(dw0) => (Status::SUCCESS, dw0),
            Err(status) => (status, 0),
        };
        let completion = AdminCompletion { cid: sqe.cid, status, dw0, placed: true };
        queue.complete(&completion);
        control.lock().admin_ended(*generation, completion);
        true
    }

    /// True if no command is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_none() && self.attached.as_ref().is_none_or(|a| a.queue.is_idle())
    }

    /// Snapshot of the queue. No command may be in flight. `used` is true if a command was executed
    /// since the controller was enabled.
    pub(crate) fn save(&self, used: bool) -> Option<SavedAdminQueue> {
        self.attached.as_ref().map(|attached| attached.queue.save(used))
    }

    /// Posts pending completions, unless the controller is quiesced.
    pub(crate) fn post(&mut self, control: &Mutex<Control>, cx: &Context) {
        let attached = self.attached.as_mut().filter(|_| !self.standing.quiesced);
        if let Some(attached) = attached {
            post(attached, control, cx);
        }
    }

    /// True on the first call after a loss of the host memory that holds the attached queue.
    pub(crate) fn take_memory_loss(&mut self) -> bool {
        let is_lost = self.attached.as_ref().is_some_and(|a| a.queue.has_lost_memory());
        is_lost && !std::mem::replace(&mut self.loss_reported, true)
    }
}

/// Posts pending completions of the queue, and reports them to the control plane.
fn post(attached: &mut Attach, control: &Mutex<Control>, cx: &Context) {
    let Attach { queue, table, .. } = attached;
    queue.post(&cx.shared, table, |at, commands| {
        for (cid, status) in &commands {
            cx.trace(Kind::CompletionPosted, 0, (*cid).into(), status.bits().into());
        }
        let cids: Vec<_> = commands.into_iter().map(|(cid, _)| cid).collect();
        control.lock().admin_posted(at, &cids);
    });
}

/// Resolves the data pointer of an admin command for `len` bytes.
fn resolve(
    table: &Arc<DmaTable>,
    sqe: &Sqe,
    page: usize,
    len: usize,
    write: bool,
) -> Result<Segments, Status> {
    let view = View::new(Arc::clone(table));
    let mut data = Segments::new();
    view.resolve_prps(sqe.prp1(), sqe.prp2(), len, page, write, &mut data)
        .map_err(|e| e.status())?;
    Ok(data)
}

/// Writes an admin command's data to host memory. The PRPs are resolved for `data.len`. This length
/// can be below the command's transfer length. The length decides whether PRP2 is a page or a PRP
/// list (Base 2.1, 4.3.1), and a wrong length would overwrite the list with data.
fn write(table: &Arc<DmaTable>, sqe: &Sqe, page: usize, data: &Data) -> Result<(), Status> {
    let segments = resolve(table, sqe, page, data.len, true)?;
    segments.write_from(0, &data.bytes).ok_or(Status::INTERNAL)
}

/// Reads `len` bytes of an admin command's data from host memory.
fn read(table: &Arc<DmaTable>, sqe: &Sqe, page: usize, len: usize) -> Result<Vec<u8>, Status> {
    let segments = resolve(table, sqe, page, len, false)?;
    let mut bytes = vec![0; len];
    segments.read_into(0, &mut bytes).ok_or(Status::INTERNAL)?;
    Ok(bytes)
}
