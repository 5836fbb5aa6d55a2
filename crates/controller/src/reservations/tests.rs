//! Exhaustive test of the state machine, and tests of the reservation file. With three hosts and
//! two keys, every command of every host is executed in every reachable state. The results are
//! compared with an independent model over plain arrays, which follows the specification's tables.

use super::*;
use std::collections::{BTreeSet, VecDeque};

const HOSTS: usize = 3;
const KEYS: [u64; 2] = [7, 9];

fn host(index: usize) -> HostId {
    if index == 0 { HostId::Short(5) } else { HostId::Extended([index as u8; 16]) }
}

fn index(of: HostId) -> usize {
    (0..HOSTS).find(|index| host(*index) == of).unwrap()
}

/// State after a command, increment of the generation, and notifications by host.
type After = (Model, u32, BTreeSet<(usize, u8)>);

/// Reservation state of a namespace: keys by host (0 for none), reservation type (0 for none), and
/// holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Model {
    keys: [u64; HOSTS],
    kind: u8,
    holders: [bool; HOSTS],
}

/// Read and write access by reservation type, for a holder, for another registrant, and for a host
/// that is not registered. Base 2.1, "Command Behavior in the Presence of a Reservation".
const TABLE: [[(bool, bool); 3]; 7] = {
    const RW: (bool, bool) = (true, true);
    const RO: (bool, bool) = (true, false);
    const NO: (bool, bool) = (false, false);
    [
        [RW, RW, RW],
        [RW, RO, RO],
        [RW, NO, NO],
        [RW, RW, RO],
        [RW, RW, NO],
        [RW, RW, RO],
        [RW, RW, NO],
    ]
};

impl Model {
    fn of(state: &Reservations) -> Self {
        let mut model = Self { keys: [0; HOSTS], kind: 0, holders: [false; HOSTS] };
        state.registrants().for_each(|(host, key)| model.keys[index(host)] = key);
        model.kind = state.kind().map_or(0, |kind| kind as u8);
        for at in 0..HOSTS {
            model.holders[at] = state.is_holder(host(at));
        }
        model
    }

    fn after(&self, me: usize, action: Action) -> Result<After, Status> {
        let mut next = *self;
        let mut notifications = BTreeSet::new();
        let all_hold = |kind: u8| kind >= 5;
        let shared = |kind: u8| kind >= 3;
        let must = |key: u64| if self.keys[me] == key && key != 0 { Ok(()) } else { Err(CONFLICT) };
        let others = || (0..HOSTS).filter(move |at| *at != me);
        // If the last holder is removed, the reservation is released.
        let drop_host = |next: &mut Self, at: usize| {
            next.keys[at] = 0;
            next.holders[at] = false;
            if next.holders == [false; HOSTS] {
                next.kind = 0;
            }
        };
        let counts = match action {
            Action::Register { key: 0 } | Action::Replace { new: 0, .. } => return Err(INVALID),
            Action::Register { key } => {
                if self.keys[me] != 0 {
                    must(key)?;
                }
                next.keys[me] = key;
                next.holders[me] |= all_hold(self.kind);
                1
            }
            Action::Unregister { key } => {
                must(key.unwrap_or(self.keys[me]))?;
                drop_host(&mut next, me);
                if self.kind != 0 && next.kind == 0 && shared(self.kind) {
                    let left = others().filter(|at| next.keys[*at] != 0);
                    notifications.extend(left.map(|at| (at, 2)));
                }
                1
            }
            Action::Replace { key, new } => {
                if key.is_some() || self.keys[me] != 0 {
                    must(key.unwrap_or(self.keys[me]))?;
                }
                next.keys[me] = new;
                next.holders[me] |= all_hold(self.kind);
                1
            }
            Action::Acquire { key, kind } => {
                must(key)?;
                let kind = kind as u8;
                if self.kind == 0 {
                    next.kind = kind;
                    let holds = |at| at == me || all_hold(kind) && self.keys[at] != 0;
                    next.holders = std::array::from_fn(holds);
                } else if !(self.holders[me] && self.kind == kind) {
                    return Err(CONFLICT);
                }
                0
            }
            Action::Preempt { key, of, kind } => {
                must(key)?;
                let kind = kind as u8;
                let single = (1..=4).contains(&self.kind);
                let takes_over = if all_hold(self.kind) {
                    of == 0
                } else {
                    single && (0..HOSTS).any(|at| self.holders[at] && self.keys[at] == of)
                };
                if single && of == 0 {
                    return Err(INVALID);
                }
                let is_chosen = |at: usize| {
                    if takes_over {
                        at != me
                            && (of == 0 && self.keys[at] != 0 || of != 0 && self.keys[at] == of)
                    } else {
                        of != 0 && self.keys[at] == of
                    }
                };
                let chosen: Vec<_> = (0..HOSTS).filter(|at| is_chosen(*at)).collect();
                if !takes_over && chosen.is_empty() {
                    return Err(CONFLICT);
                }
                for at in chosen {
                    drop_host(&mut next, at);
                    if at != me {
                        notifications.insert((at, 1));
                    }
                }
                if takes_over {
                    next.kind = kind;
                    let holds = |at| at == me || all_hold(kind) && next.keys[at] != 0;
                    next.holders = std::array::from_fn(holds);
                    if kind != self.kind {
                        let left = others().filter(|at| next.keys[*at] != 0);
                        notifications.extend(left.map(|at| (at, 2)));
                    }
                }
                1
            }
            Action::Release { key, kind } => {
                must(key)?;
                if self.holders[me] {
                    if kind != self.kind {
                        return Err(INVALID);
                    }
                    next.kind = 0;
                    next.holders = [false; HOSTS];
                    if shared(self.kind) {
                        notifications
                            .extend(others().filter(|at| self.keys[*at] != 0).map(|at| (at, 2)));
                    }
                }
                0
            }
            Action::Clear { key } => {
                must(key)?;
                notifications.extend(others().filter(|at| self.keys[*at] != 0).map(|at| (at, 3)));
                next = Self { keys: [0; HOSTS], kind: 0, holders: [false; HOSTS] };
                1
            }
        };
        Ok((next, counts, notifications))
    }

    fn access(&self, host: Option<usize>) -> (bool, bool) {
        let who = match host {
            Some(at) if self.holders[at] => 0,
            Some(at) if self.keys[at] != 0 => 1,
            _ => 2,
        };
        TABLE[usize::from(self.kind)][who]
    }
}

fn actions() -> Vec<Action> {
    let all = [0, KEYS[0], KEYS[1]];
    let mut actions = Vec::new();
    for key in all {
        let keys = [None, Some(key)];
        actions.push(Action::Register { key });
        actions.extend(keys.map(|key| Action::Unregister { key }));
        for new in all {
            actions.extend(keys.map(|key| Action::Replace { key, new }));
        }
        for kind in ReservationType::ALL {
            actions.push(Action::Acquire { key, kind });
            actions.extend(all.map(|of| Action::Preempt { key, of, kind }));
        }
        actions.extend((0..=7).map(|kind| Action::Release { key, kind }));
        actions.push(Action::Clear { key });
    }
    actions
}

#[test]
fn every_reservation_command_in_every_state_matches_the_model() {
    let (mut seen, mut queue) = (BTreeSet::new(), VecDeque::from([Reservations::default()]));
    let actions = actions();
    let mut tried = 0u32;
    while let Some(state) = queue.pop_front() {
        let model = Model::of(&state);
        if !seen.insert(model) {
            continue;
        }
        for who in [None, Some(0), Some(1), Some(2)] {
            let Access { read, write, .. } = state.access(who.map(host));
            assert_eq!((read, write), model.access(who), "{state:?} {who:?}");
        }
        for me in 0..HOSTS {
            for action in &actions {
                tried += 1;
                let mut next = state.clone();
                let outcome = next.act(host(me), *action);
                match (model.after(me, *action), outcome) {
                    (Err(expected), Err(status)) => {
                        assert_eq!(status, expected, "{state:?} {me} {action:?}");
                        assert_eq!(next, state);
                    }
                    (Ok((expected, counts, notifications)), Ok(then)) => {
                        let context = format!("{state:?} {me} {action:?}");
                        assert_eq!(Model::of(&next), expected, "{context}");
                        let counted = next.generation.wrapping_sub(state.generation);
                        assert_eq!(counted, counts, "{context}");
                        let got: Vec<_> = then
                            .notifications
                            .iter()
                            .map(|(to, notifications)| (index(*to), notifications.code()))
                            .collect();
                        assert_eq!(got.len(), notifications.len(), "{context}: {got:?}");
                        assert_eq!(
                            got.into_iter().collect::<BTreeSet<_>>(),
                            notifications,
                            "{context}"
                        );
                        let gone = (0..HOSTS)
                            .filter(|at| model.keys[*at] != 0)
                            .filter(|at| expected.keys[*at] == 0);
                        let mut lost: Vec<_> =
                            then.unregistered.iter().map(|host| index(*host)).collect();
                        lost.sort_unstable();
                        assert!(gone.eq(lost), "{context}");
                        queue.push_back(next);
                    }
                    (expected, got) => panic!("{state:?} {me} {action:?}: {expected:?} {got:?}"),
                }
            }
        }
    }
    // Number of states: all combinations of keys of three hosts. Without registrants, no
    // reservation can be held. Otherwise there is either no reservation, or one of four types with
    // one of the registrants as holder, or one of two types with all registrants as holders.
    let expected: usize = (0..27)
        .map(|n: usize| {
            let registered = [n % 3, n / 3 % 3, n / 9].into_iter().filter(|key| *key != 0).count();
            1 + 4 * registered + if registered == 0 { 0 } else { 2 }
        })
        .sum();
    assert_eq!(seen.len(), expected);
    assert_eq!(tried as usize, expected * HOSTS * actions.len());
}

#[test]
fn registrants_have_an_end() {
    let mut state = Reservations::default();
    for n in 1..=MAX_REGISTRANTS as u64 {
        state.act(HostId::Short(n), Action::Register { key: 1 }).unwrap();
    }
    let full = state.clone();
    let one_more = state.act(HostId::Short(1 << 40), Action::Register { key: 1 });
    assert_eq!((one_more, &state), (Err(Status::INTERNAL), &full));
}

#[test]
fn a_power_loss_clears_reservations_that_do_not_persist() {
    let mut state = Reservations::default();
    state.act(host(0), Action::Register { key: 1 }).unwrap();
    assert!(state.clone().after_power_loss().is_untouched());
    state.persistent = true;
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<Reservations>(&text).unwrap().after_power_loss(), state);
}

#[test]
fn host_identifiers_are_decoded_and_zero_is_none() {
    assert_eq!(HostId::from_bytes(&[0; 16]), None);
    assert_eq!(HostId::from_bytes(&[0; 8]), None);
    assert_eq!(HostId::from_bytes(&[1, 0, 0, 0, 0, 0, 0, 2]), Some(HostId::Short(2 << 56 | 1)));
    assert_eq!(HostId::from_bytes(&[3; 16]), Some(HostId::Extended([3; 16])));
    for id in [HostId::Short(77), HostId::Extended([9; 16])] {
        assert_eq!(HostId::from_bytes(&id.bytes()), Some(id));
    }
}

fn with_key(key: u64) -> AllReservations {
    let mut its = Reservations::default();
    its.act(HostId::Short(1), Action::Register { key }).unwrap();
    AllReservations::from([([3; 16], its)])
}

#[test]
fn a_torn_record_leaves_the_previous_one() {
    let file = tempfile::tempfile().unwrap();
    let kept = ReservationFile::new(file.try_clone().unwrap());
    assert_eq!(kept.read().unwrap(), AllReservations::new());
    for key in 1..=5 {
        kept.write(&with_key(key)).unwrap();
        assert_eq!(kept.read().unwrap(), with_key(key));
        if key == 1 {
            continue;
        }
        // Each byte of the newest version is corrupted in turn, as by an incomplete write.
        let Newest { place, value: text, .. } = kept.newest().unwrap();
        for byte in (0..SLOTS.head() + text.len()).map(|byte| place * SLOT_SIZE + byte as u64) {
            let mut was = [0];
            file.read_exact_at(&mut was, byte).unwrap();
            file.write_all_at(&[!was[0]], byte).unwrap();
            assert_eq!(kept.read().unwrap(), with_key(key - 1), "byte {byte}");
            file.write_all_at(&was, byte).unwrap();
        }
    }
}

#[test]
fn a_torn_first_record_counts_as_empty_and_another_file_is_refused() {
    let file = tempfile::tempfile().unwrap();
    let kept = ReservationFile::new(file.try_clone().unwrap());
    kept.write(&with_key(1)).unwrap();
    file.set_len(SLOTS.head() as u64 + 3).unwrap();
    assert_eq!(kept.read().unwrap(), AllReservations::new());
    file.write_all_at(b"no such thing", 0).unwrap();
    assert!(kept.read().is_err());
}

#[test]
fn a_file_of_an_earlier_version_is_read_and_written_as_that_would() {
    let file = tempfile::tempfile().unwrap();
    let kept = ReservationFile::new(file.try_clone().unwrap());
    kept.write(&AllReservations::new()).unwrap();
    let mut bytes = vec![0; 64];
    let len = file.read_at(&mut bytes, 0).unwrap();
    let mut as_before = b"SBRESV01\x01\0\0\0\0\0\0\0\x11\0\0\0\0\0\0\0".to_vec();
    as_before.extend_from_slice(&0x8f8654fa2ef6aa34_u64.to_le_bytes());
    as_before.extend_from_slice(b"{\"namespaces\":[]}");
    assert_eq!(bytes[..len], as_before);
    assert_eq!(kept.read().unwrap(), AllReservations::new());
}
