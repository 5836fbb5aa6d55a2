//! Serves an admin queue: fetches commands, gets them executed, gives the host its data, and posts
//! completions.
//!
//! All that touches the guest's memory for the control plane is in here, and none of it happens
//! under the control plane's lock: a guest can take its time to provide that memory. So the queue
//! belongs to the server. What the control plane has decided about it comes as
//! [`Orders`](crate::control::Orders), which are read before a command is executed.

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

/// A command that was fetched.
pub(crate) struct Fetched(Sqe);

/// What a look at the queue finds.
pub(crate) enum Next {
    Command(Fetched),
    /// Something has changed just now: look again.
    Look,
    /// Nothing, and the host rings when there is.
    Idle,
}

/// Serves the admin queue of a controller, one turn at a time.
#[derive(Default)]
pub(crate) struct AdminServer {
    attached: Option<Attach>,
    /// The buffers of Doorbell Buffer Config.
    shadow: Option<(u64, u64)>,
    /// A command that can not be begun yet. No other is fetched until then.
    held: Option<Sqe>,
    standing: Standing,
    journal: Option<JournalPart>,
}

impl AdminServer {
    /// Does what the control plane has decided. Whether something came of that which it has to
    /// write down.
    pub(crate) fn follow_orders(
        &mut self,
        control: &Mutex<Control>,
        cx: &Context,
        has_fetched: bool,
    ) -> bool {
        let (orders, standing) = control.lock().admin_orders(has_fetched);
        self.standing = standing;
        let Orders { detach, attach, table, latches, shadow, acq, completions, answers } = orders;
        if let Some(latch) = detach {
            if let Some(Attach { queue, .. }) = self.attached.take() {
                queue.retire(&cx.shared);
            }
            (self.shadow, self.held) = (None, None);
            drop(latch);
        }
        if let Some(attach) = attach {
            self.shadow = attach.shadow;
            // Without its positions a queue is not recovered, but served.
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
                queue.change_shadow(current, pages);
            }
            if let Some(acq) = acq {
                queue.place_cq(current, acq);
            }
            completions.iter().for_each(|completion| queue.complete(completion));
            for (sqe, data) in &answers {
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
        !answers.is_empty()
    }

    /// The queue, while it is to be served.
    fn queue(&mut self) -> Option<&mut AdminQueue> {
        let attached = self.attached.as_mut().filter(|_| self.standing.ready)?;
        Some(&mut attached.queue)
    }

    /// Whether there is a command, and no completion queue yet.
    pub(crate) fn lacks_cq(&mut self) -> bool {
        self.queue().is_some_and(AdminQueue::lacks_cq)
    }

    /// The next command, if there is one and it can be completed. Posts what is complete before it
    /// says that there is none, and has the host ring for the next.
    pub(crate) fn next(&mut self, control: &Mutex<Control>, cx: &Context) -> Next {
        let held = self.held.take();
        if self.queue().is_none() {
            return Next::Idle;
        }
        if let Some(held) = held {
            return Next::Command(Fetched(held));
        }
        if !self.standing.begins {
            return Next::Idle;
        }
        let Some(queue) = self.queue() else { return Next::Idle };
        match queue.next() {
            Ok(Some(sqe)) => {
                cx.trace(Kind::CommandSeen, 0, sqe.cid.into(), sqe.opcode.into());
                return Next::Command(Fetched(sqe));
            }
            Ok(None) => {}
            Err(_) => control.lock().bad_admin_doorbell(),
        }
        post(queue, control, cx);
        match queue.arm() {
            Ok(true) => return Next::Idle,
            Ok(false) => {}
            Err(_) => control.lock().bad_admin_doorbell(),
        }
        Next::Look
    }

    /// Executes a command. Whether the next one can be fetched.
    pub(crate) fn serve(
        &mut self,
        control: &Mutex<Control>,
        cx: &Context,
        Fetched(sqe): Fetched,
        deferred: &mut Deferred,
    ) -> bool {
        let page_size = self.standing.page_size;
        // A reset is none of the queue's business any more: nor are its commands.
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
            Ok(Outcome::Later) => return true,
            Ok(Outcome::Unplaced) => {
                queue.give_up_place();
                return true;
            }
            Ok(Outcome::NotYet) => {
                self.held = Some(sqe);
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

    /// Whether no command is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.held.is_none() && self.attached.as_ref().is_none_or(|a| a.queue.is_quiet())
    }

    /// What has to be kept of the queue while no command is under way. `used`: one was, since the
    /// controller was enabled.
    pub(crate) fn save(&self, used: bool) -> Option<SavedAdminQueue> {
        self.attached.as_ref().map(|attached| attached.queue.save(used))
    }

    /// Posts what is complete.
    pub(crate) fn post(&mut self, control: &Mutex<Control>, cx: &Context) {
        let attached = self.attached.as_mut().filter(|_| !self.standing.rests);
        if let Some(Attach { queue, .. }) = attached {
            post(queue, control, cx);
        }
    }
}

/// Posts what is complete of the queue, and says so.
fn post(queue: &mut AdminQueue, control: &Mutex<Control>, cx: &Context) {
    queue.post(&cx.shared, |at, commands| {
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

/// Gives the host its data, which may be fewer than the command is about. Whether PRP2 is a page or
/// a list of pages depends on that (Base 2.1, 4.3.1): a short answer must not end up in the list.
fn write(table: &Arc<DmaTable>, sqe: &Sqe, page: usize, data: &Data) -> Result<(), Status> {
    let segments = resolve(table, sqe, page, data.len, true)?;
    segments.write_from(0, &data.bytes).ok_or(Status::INTERNAL)
}

/// Takes `len` bytes from the host.
fn read(table: &Arc<DmaTable>, sqe: &Sqe, page: usize, len: usize) -> Result<Vec<u8>, Status> {
    let segments = resolve(table, sqe, page, len, false)?;
    let mut bytes = vec![0; len];
    segments.read_into(0, &mut bytes).ok_or(Status::INTERNAL)?;
    Ok(bytes)
}
