//! Defective variants of the protocol. Every model in this module lacks one step of the protocol,
//! and has to fail. If a defective model passed, the other models of this directory would prove
//! nothing.

use loom::thread;
use shadowbell_doorbell::{Cell, DoorbellState, FullFence, Predicate, Sleeper, SqTail, Truth};

use crate::enabling::{Pages, Updates, configured_again, enable};
use crate::full::{Request, full};
use crate::park::{Without, parked};
use crate::relocate::relocated;
use crate::rig::{
    DoorbellCells, NoFence, Wake, Word, explore, in_use, ring, sleep_on, sleep_pair, word,
};
use crate::submit::submit;
use crate::trap::{posted, trapped};

#[test]
#[should_panic(expected = "deadlock")]
fn the_host_does_not_fence() {
    explore(None, || submit::<NoFence, FullFence, FullFence>(Predicate::Linux, 8, 0, 1));
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_controller_does_not_fence() {
    explore(None, || submit::<FullFence, NoFence, FullFence>(Predicate::Linux, 8, 0, 1));
}

/// SPDK's predicate requests more doorbell writes than that of Linux, but cannot replace the
/// controller's fence.
#[test]
#[should_panic(expected = "deadlock")]
fn the_controller_does_not_fence_against_an_inclusive_host() {
    explore(None, || submit::<FullFence, NoFence, FullFence>(Predicate::SpdkInclusive, 8, 0, 1));
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_host_does_not_fence_and_the_controller_waits_for_room() {
    explore(None, || full::<NoFence, FullFence>(Predicate::Linux, 3, 2, 1, Request::Arm));
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_trap_does_not_fence() {
    explore(None, || trapped::<FullFence, NoFence>(1));
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_sleeper_does_not_fence() {
    explore(None, || trapped::<NoFence, FullFence>(1));
}

/// One update by the host, after the controller has polled for a while. `round` is the controller's
/// sequence of steps to sleep.
fn after_polling(
    round: impl Fn(&mut SqTail<Word>, &mut Sleeper<Word>, &Wake) + Sync + Send + Copy + 'static,
) {
    explore(None, move || {
        let (cells, size) = (DoorbellCells::at(0), ring(8));
        let (mut doorbell, mut tail) = in_use::<FullFence>(&cells, size, 1);
        let (mut sleeper, wake) = sleep_pair();
        let host = {
            let (cells, wake) = (cells.clone(), wake.clone());
            thread::spawn(move || wake.update(&mut doorbell, Predicate::Linux, &cells.register, 2))
        };
        while tail.poll() == Ok(1) {
            round(&mut tail, &mut sleeper, &wake);
        }
        host.join().unwrap();
    });
}

/// Control for the models that use [`after_polling`]: it passes, because no step is left out.
#[test]
fn the_models_pass_without_a_defect() {
    after_polling(sleep_on);
}

/// Defect: the controller checks the tail before it arms EventIdx, so an update between the two is
/// lost. The types of the API prevent this order, so the model arms with the token of a second
/// sleeper.
#[test]
#[should_panic(expected = "deadlock")]
fn the_controller_checks_the_tail_before_arming() {
    after_polling(|tail, sleeper, wake| {
        let mut accomplice = Sleeper::<_, FullFence>::new(word(0));
        let mut fenced = sleeper.prepare().fence();
        tail.recheck(&mut fenced).unwrap();
        tail.arm(&mut accomplice.prepare());
        if let Some(_asleep) = fenced.try_sleep() {
            wake.event.wait();
        }
    });
}

/// Defect: the controller executes the fence and checks the tail again, but does not arm EventIdx.
#[test]
#[should_panic(expected = "deadlock")]
fn the_controller_does_not_arm() {
    after_polling(|tail, sleeper, wake| {
        let mut fenced = sleeper.prepare().fence();
        tail.recheck(&mut fenced).unwrap();
        if let Some(_asleep) = fenced.try_sleep() {
            wake.event.wait();
        }
    });
}

/// Defect: while the completion queue is full, the controller sets EventIdx to its tail. The host
/// would write the doorbell only after it has consumed all entries and one more.
#[test]
#[should_panic(expected = "deadlock")]
fn the_controller_waits_for_room_with_event_idx_at_the_tail() {
    explore(None, || full::<FullFence, FullFence>(Predicate::Linux, 4, 1, 1, Request::AtTheTail));
}

/// Defect: the trap handler copies every register value to the shadow entry. A posted write that
/// arrives late moves the tail back, and the controller never sees the entry that the host
/// submitted in the meantime.
#[test]
#[should_panic(expected = "deadlock")]
fn the_trap_writes_the_shadow_entry() {
    explore(Some(3), || {
        posted(|cells, wake, value| {
            cells.shadow.store_release(value.into());
            wake.trap(&cells.register, value);
        });
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_host_does_not_fence_for_a_parked_queue() {
    explore(Some(3), || {
        parked::<NoFence, FullFence, FullFence>(Predicate::Linux, 2, Without::Nothing);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_controller_does_not_fence_when_it_parks() {
    explore(Some(3), || {
        parked::<FullFence, NoFence, FullFence>(Predicate::Linux, 2, Without::Nothing);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_trap_does_not_say_which_queue_rang() {
    explore(Some(3), || {
        parked::<FullFence, FullFence, FullFence>(Predicate::Linux, 2, Without::Message);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_trap_sends_a_message_without_a_wakeup() {
    explore(Some(3), || {
        parked::<FullFence, FullFence, FullFence>(Predicate::Linux, 2, Without::Kick);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_trap_wakes_only_for_parked_queues() {
    explore(Some(3), || {
        parked::<FullFence, FullFence, FullFence>(Predicate::Linux, 2, Without::Thread);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_owner_of_a_doorbell_is_read_only_once() {
    explore(None, || relocated(false));
}

/// Replaces the shadow entry without a last read of the old entry.
fn enable_blindly(tail: SqTail<Word>, cells: &DoorbellCells) -> SqTail<Word> {
    let state = DoorbellState { truth: Truth::Last, snapshot: None, ..tail.state() };
    let mut tail = SqTail::resume(tail.size(), cells.register.clone(), state).unwrap();
    tail.reattach(cells.shadow.clone(), cells.event_idx.clone());
    tail
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_second_configuration_drops_the_pending_value_of_the_same_entry() {
    explore(Some(2), || {
        let host = Updates::Before(0);
        configured_again((8, Predicate::Linux), Pages::Same, host, &enable_blindly);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_second_configuration_drops_the_pending_value_of_the_old_entry() {
    explore(Some(2), || {
        let host = Updates::Before(0);
        configured_again((8, Predicate::Linux), Pages::Other, host, &enable_blindly);
    });
}

/// Defect: the controller reads the old value before it takes the snapshot. An update between the
/// two is part of the snapshot, so the entry seems unchanged and the update is lost.
#[test]
#[should_panic(expected = "deadlock")]
fn a_second_configuration_takes_the_pending_value_before_the_snapshot() {
    explore(Some(2), || {
        let host = (8, Predicate::Linux);
        configured_again(host, Pages::Same, Updates::InPlace, &|mut tail, cells| {
            tail.poll().unwrap();
            enable_blindly(tail, cells)
        });
    });
}

/// Defect: the host stores an update in the new entry first, and the controller also reads the new
/// entry first. So the controller can take a snapshot of the new entry that contains an update
/// which the old entry does not contain yet, and the update is lost.
#[test]
#[should_panic(expected = "deadlock")]
fn the_host_updates_the_new_entry_before_the_old_one() {
    explore(Some(2), || {
        configured_again((8, Predicate::Linux), Pages::Other, Updates::BothNewFirst, &enable);
    });
}
