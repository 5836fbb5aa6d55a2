//! Doorbell values outside of the ring, from a host that writes them at any moment.

use loom::sync::atomic::Ordering;
use loom::thread;
use shadowbell_doorbell::{FullFence, InvalidDoorbell, SqTail};

use crate::rig::{DoorbellCells, Wake, Word, explore, in_use, ring, sleep_pair, word};

/// A value outside of a ring of 8 entries.
const INVALID: u16 = 9;

/// Polls the tail, and sleeps between the polls, until an invalid value is reported. If a wakeup is
/// lost, the model ends in a deadlock.
fn look_until_invalid(
    tail: &mut SqTail<Word>,
    sleeper: &mut shadowbell_doorbell::Sleeper<Word, FullFence>,
    wake: &Wake,
) -> InvalidDoorbell {
    loop {
        if let Err(error) = tail.poll() {
            return error;
        }
        let mut arming = sleeper.prepare();
        tail.arm(&mut arming);
        let mut fenced = arming.fence();
        let outcome = tail.recheck(&mut fenced);
        let asleep = fenced.try_sleep();
        match outcome {
            Err(error) => {
                assert!(asleep.is_none(), "the thread sleeps with an error to report");
                return error;
            }
            Ok(_) if asleep.is_some() => wake.event.wait(),
            Ok(_) => {}
        }
    }
}

/// After an invalid tail, neither a valid value nor another invalid one has an effect.
fn check_stopped(tail: &mut SqTail<Word>, valid: u16) {
    let last = tail.last();
    assert!([valid, 0].contains(&last), "an invalid value moved the tail");
    assert_eq!(tail.poll(), Ok(last), "the tail moves after an invalid value");
}

#[test]
fn an_invalid_trapped_tail_is_reported_once_and_stops_the_queue() {
    explore(Some(3), || {
        let register = word(0);
        let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
        let mut tail: SqTail<Word> = SqTail::new(ring(8), register.clone());
        let vcpu = {
            let (register, wake) = (register.clone(), wake.clone());
            thread::spawn(move || [1, INVALID].map(|value| wake.trap(&register, value)))
        };
        let error = look_until_invalid(&mut tail, &mut sleeper, &wake);
        assert_eq!(error, InvalidDoorbell { value: INVALID.into() });
        vcpu.join().unwrap();
        register.store(2, Ordering::Release);
        check_stopped(&mut tail, 1);
    });
}

/// The host writes a valid value after the invalid one. If the controller does not read the invalid
/// value in time, it accepts the valid value.
#[test]
fn an_invalid_shadow_tail_stops_the_queue_unless_it_is_replaced_first() {
    explore(Some(3), || {
        let cells = DoorbellCells::at(7);
        let (_, mut tail) = in_use::<FullFence>(&cells, ring(8), 0);
        let host = {
            let cells = cells.clone();
            thread::spawn(move || {
                for value in [INVALID, 2] {
                    cells.shadow.store(value.into(), Ordering::Release);
                }
            })
        };
        let outcome = tail.poll();
        host.join().unwrap();
        match outcome {
            Ok(seen) => {
                assert!([0, 2].contains(&seen), "{seen}");
                assert_eq!(tail.poll(), Ok(2));
            }
            Err(error) => {
                assert_eq!(error, InvalidDoorbell { value: INVALID.into() });
                check_stopped(&mut tail, 0);
            }
        }
    });
}
