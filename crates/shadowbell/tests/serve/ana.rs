//! ANA states of two controllers that share a disk. A state that the control socket or a
//! configuration file has set survives crashes and upgrades.

use crate::harness::{Server, finish, image, program, until};
use crate::recover::{assert_no_loss, kill};
use crate::shared::{CONFIG, serve_config, start};
use crate::supervisor::children;
use crate::upgrade::{Client, socket, upgrade};
use rustix::process::Signal;
use shadowbell_spec::Status;
use shadowbell_spec::log::{AnaLog, AnaState};

fn ctl(server: &Server, words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = program();
    command.current_dir(server.directory());
    command.args(["ctl", "-s", "./ctl.sock"]).args(words);
    finish(command)
}

/// Sets the ANA state of a group for controller `n`.
#[track_caller]
fn set(server: &Server, n: usize, group: &str, state: &str) {
    let socket = format!("vm{n}.sock");
    let (status, printed, errors) = ctl(server, &["ana", &socket, group, state]);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(printed, format!("group {group} is {state}\n"));
}

fn log(client: &mut Client) -> AnaLog {
    client.parts().1.admin().ana_log().unwrap().unwrap()
}

fn clients(server: &Server) -> [Client; 2] {
    [0, 1].map(|n| Client::attach(&socket(server, n)))
}

#[test]
fn an_inaccessible_ana_state_survives_crashes_and_upgrades() {
    let mut server = start();
    let [mut one, mut other] = clients(&server);
    one.write(1, 0, 1);
    set(&server, 0, "1", "inaccessible");
    for round in 0..4_u8 {
        assert_eq!(one.try_write(1, 0, 99), Status::ANA_INACCESSIBLE);
        assert_eq!(one.try_write(2, 0, 99), Status::ANA_INACCESSIBLE);
        other.write(1, 0, 10 + round);
        let known = log(&mut one);
        assert_eq!((known.changes, known.groups.len()), (1, 1), "once, round {round}");
        assert_eq!(known.groups[0].state, Some(AnaState::Inaccessible));
        assert_eq!(known.groups[0].nsids, [1, 2]);
        assert_eq!(log(&mut other).changes, 0);
        if round % 2 == 0 {
            kill(&server, Signal::KILL);
        } else {
            let (status, _, errors) = upgrade(&server.pid().to_string(), None);
            assert_eq!(status, Some(0), "{errors}");
            until("the old one's end", || children(server.pid()).len() == 1);
        }
    }
    let (_, printed, _) = ctl(&server, &["ana"]);
    let line = |n: usize, state| {
        let socket = socket(&server, n).canonicalize().unwrap().display().to_string();
        printed.lines().any(|line| {
            line.starts_with(&socket) && line.contains(state) && line.trim_end().ends_with("1, 2")
        })
    };
    assert!(line(0, " inaccessible ") && line(1, " optimized "), "{printed}");
    // The saved configuration contains the ANA state. Applying an edited configuration changes the
    // state while a guest is attached.
    let (status, saved, _) = ctl(&server, &["save-config", "-"]);
    assert!(status == Some(0) && saved.contains("ana = [\"inaccessible\"]"), "{saved}");
    let wanted = saved.replace("[\"inaccessible\"]", "\"non-optimized\"");
    std::fs::write(server.directory().join("wanted.toml"), wanted).unwrap();
    let (status, printed, errors) = ctl(&server, &["apply", "wanted.toml"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(printed.contains("ana: inaccessible -> non-optimized"), "{printed}");
    assert!(printed.contains("1 changed, 1 unchanged"), "{printed}");
    one.write(1, 0, 50);
    assert_eq!(other.read(1, 0), 50);
    assert_eq!(log(&mut one).changes, 2);
    drop(one);
    let mut command = program();
    command.arg("ana-log").arg(socket(&server, 0));
    let (status, printed, errors) = finish(command);
    assert_eq!(status, Some(0), "{errors}");
    assert!(
        printed.contains("(non-optimized)") && printed.contains("(namespaces 1, 2)"),
        "{printed}"
    );
    assert_no_loss(&server);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn ana_groups_and_initial_states_come_from_the_file() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 16 << 20);
    let config = CONFIG
        .replacen("state = \"state\"", "state = \"state\"\nana-groups = [[1], [2]]", 1)
        .replacen("subsystem = \"pair\"", "subsystem = \"pair\"\nana = \"non-optimized\"", 1);
    let at = config.rfind("subsystem = \"pair\"").unwrap();
    let (before, after) = config.split_at(at);
    let config = format!("{before}ana = [\"optimized\", \"persistent-loss\"]\n{after}");
    let config =
        format!("{config}\n[[controller]]\nsocket = \"vm2.sock\"\ndisks = [\"mem:1MiB\"]\n");
    let mut server = serve_config(directory, &config);
    let [mut one, mut other] = clients(&server);
    let states = |client: &mut Client| {
        let groups = log(client).groups.into_iter();
        groups.map(|group| (group.state.unwrap(), group.nsids)).collect::<Vec<_>>()
    };
    let fair = AnaState::NonOptimized;
    assert_eq!(states(&mut one), [(fair, vec![1]), (fair, vec![2])]);
    let lost = AnaState::PersistentLoss;
    assert_eq!(states(&mut other), [(AnaState::Optimized, vec![1]), (lost, vec![2])]);
    other.write(1, 0, 3);
    assert_eq!(other.try_write(2, 0, 3), Status::ANA_PERSISTENT_LOSS);
    assert_eq!(one.read(1, 0), 3);
    set(&server, 1, "2", "optimized");
    set(&server, 1, "2", "optimized");
    assert_eq!(log(&mut other).changes, 1, "setting the same state is no change");
    other.write(2, 0, 4);
    for (words, status, why) in [
        (["ana", "vm0.sock", "3", "change"], 3, "ANA groups 1 to 2"),
        (["ana", "vm9.sock", "1", "change"], 3, "no controller"),
        (["ana", "vm2.sock", "1", "change"], 4, "belongs to no subsystem"),
        (["ana", "vm0.sock", "1", "best"], 2, "non-optimized"),
    ] {
        let (ended, _, errors) = ctl(&server, &words);
        assert!(ended == Some(status) && errors.contains(why), "{ended:?} {errors}");
    }
    assert!(server.stop().success(), "{}", server.stderr());
}
