//! Namespace changes that are transferred to a new controller.

use crate::common;
use crate::host::{
    INACTIVE, INVALID, active, add, changed, ends, event, host, identify, pool, remove, replace,
    want_events, write_and_read,
};
use crate::late::Late;
use shadowbell_controller::{Carrier, Config, Controller, RestoreError};
use shadowbell_spec::identify::{IdentifyController, cns};
use shadowbell_state::Parcel;
use std::collections::BTreeMap;
use std::sync::mpsc::channel;

#[test]
fn a_successor_keeps_changed_namespaces() {
    let cached = Late { volatile: true, ..Late::memory(64) };
    let mut host = host(&cached);
    ends(&add(&host, Some(5), &Late::memory(9), "fifth").1).unwrap();
    ends(&add(&host, Some(3), &Late::memory(8), "third").1).unwrap();
    ends(&remove(&host, 1, &cached)).unwrap();
    ends(&remove(&host, 5, &Late::memory(1))).unwrap();
    want_events(&mut host, 500);
    let mut queue = host.create(1, 16, false);
    replace(&mut host, &BTreeMap::new());
    let identified: IdentifyController = identify(&mut host, cns::CONTROLLER, 0);
    assert_eq!(identified.nn, 5, "an NSID that was valid stays valid");
    assert!(identified.vwc.vwcp(), "the host has read this value");
    assert_eq!(active(&mut host), [3]);
    assert!(write_and_read(&mut host, &mut queue, 3, 7, 4).is_success());
    assert_eq!(write_and_read(&mut host, &mut queue, 1, 0, 4), INACTIVE);
    assert_eq!(write_and_read(&mut host, &mut queue, 5, 0, 4), INACTIVE);
    assert_eq!(write_and_read(&mut host, &mut queue, 6, 0, 4), INVALID);
    ends(&remove(&host, 3, &Late::memory(1))).unwrap();
    event(&mut host, 500);
    // The transferred state contains an unread event, an unread Changed Attached Namespace List,
    // and an empty set of namespaces.
    replace(&mut host, &BTreeMap::new());
    assert_eq!((active(&mut host), changed(&mut host)), (vec![], vec![1, 3, 5]));

    // A new controller whose namespaces differ from those of the state cannot be restored from it.
    ends(&add(&host, Some(2), &Late::memory(9), "second").1).unwrap();
    let (done, frozen) = channel();
    host.controller.freeze(move || done.send(()).unwrap());
    frozen.recv_timeout(common::LIMIT).unwrap();
    let mut parcel = Parcel::new();
    let saved = host.controller.save(parcel.descriptors()).unwrap();
    let namespaces: Vec<_> = host.controller.namespaces().into_iter().map(|(_, ns)| ns).collect();
    let config = Config { namespaces, ..host.controller.config().clone() };
    let other =
        Controller::successor(config, pool(1), Carrier::default(), &saved, parcel.descriptors());
    assert!(matches!(other.unwrap_err(), RestoreError::Shape("set of namespaces")));
}
