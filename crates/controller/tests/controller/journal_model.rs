//! Exhaustive model of the journal of commands in flight. For a few commands, it covers every order
//! of the steps of a host, an I/O thread and a disk, with crashes. The test also shows that the
//! order of the steps is necessary: with another order, a command is lost, completed twice, or
//! executed again over newer data.
//!
//! The model has one queue pair, and stores the journal in the order that `journal` describes. A
//! process may die between any two stores. The disk executes its requests in any order, also those
//! of a dead process. Like Linux, the host reuses a command identifier as soon as it has seen the
//! completion. It also reuses entries of the submission queue that the controller has fetched but
//! not completed.

use std::collections::HashSet;

/// Number of entries of both queues. Two commands fill a queue.
const ENTRIES: u8 = 3;
/// Block that each command writes. The host submits a command only after the completion of the
/// previous command for the same block. So command 0 may be in flight while commands 1 to 3 use its
/// entry in the queue.
const BLOCKS: [usize; 7] = [0, 1, 1, 1, 0, 1, 0];
const MAX_CRASHES: u8 = 3;
const NONE: u8 = u8::MAX;

/// Deliberate error in the model: a step is missing, or is done in another order. The search must
/// find a violated rule for each of these errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    FreedBeforePosted,
    CqStoredBeforeFreed,
    CqStoredBeforeSq,
    RecordedLast,
    CompletionsNotCounted,
    NoFence,
    MovedRecordCountsTwice,
    SpareFreedBeforeRecorded,
    EntryReadFromTheQueue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Completion {
    /// Command identifier, which is the number of the block that the command writes.
    cid: u8,
    sq_head: u8,
    phase: bool,
}

/// Journal record of a command in flight: the place of the record, the count of the command in its
/// queue, and the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Record {
    place: u8,
    count: u8,
    command: u8,
}

/// State that survives a crash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Journal {
    records: Vec<Record>,
    sq_head: u8,
    fetched: u8,
    /// Submission queue position that was stored last, and the number of completions that had
    /// been posted by then.
    covers: (u8, u8),
    cq_tail: u8,
    cq_phase: bool,
    completions: u8,
}

/// Next step of an I/O thread.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// The thread chooses any available work.
    Choose,
    Fetch {
        left: u8,
    },
    Record {
        command: u8,
        count: u8,
        left: u8,
    },
    FreeEarly {
        of_batch: bool,
    },
    Post {
        of_batch: bool,
    },
    Free {
        of_batch: bool,
    },
    StoreCovers,
    StoreSq,
    StoreCq {
        of_batch: bool,
    },
    RecordLate,
    ReplayRecord {
        command: u8,
        count: u8,
        spare: u8,
    },
    ReplayFree {
        command: u8,
        count: u8,
        spare: u8,
    },
    /// The process has died, and the next process has not yet recovered the controller.
    Recover,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    // Host, and its shared memory.
    submitted: u8,
    sq: [u8; ENTRIES as usize],
    sq_tail: u8,
    cq: [Completion; ENTRIES as usize],
    cq_head: u8,
    host_phase: bool,
    /// Outstanding commands: for each command identifier, the command that uses it.
    outstanding: [u8; 2],
    /// For each block, the last command whose completion the host has seen.
    acknowledged: [u8; 2],
    // Disk: its contents, and its requests in flight, each with the number of the process that
    // submitted it.
    blocks: [u8; 2],
    in_progress: Vec<(u8, u8)>,
    journal: Journal,
    worker: Worker,
}

/// State of a process that a crash destroys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Worker {
    number: u8,
    step: Step,
    head: u8,
    fetched: u8,
    tail: u8,
    phase: bool,
    completions: u8,
    /// Commands that were submitted to the disk, each with the place of its record in the journal.
    pending: Vec<(u8, u8)>,
    /// Commands that the disk has completed and the I/O thread has not reaped.
    ended: Vec<u8>,
    staged: Vec<(Completion, u8)>,
    to_free: Vec<u8>,
    to_record: Vec<(u8, u8)>,
    replays: Vec<Record>,
}

impl Worker {
    fn new(number: u8, step: Step) -> Self {
        Self {
            number,
            step,
            head: 0,
            fetched: 0,
            tail: 0,
            phase: true,
            completions: 0,
            pending: Vec::new(),
            ended: Vec::new(),
            staged: Vec::new(),
            to_free: Vec::new(),
            to_record: Vec::new(),
            replays: Vec::new(),
        }
    }
}

struct Model {
    mistake: Option<Mistake>,
    /// True if the disk completes commands at once, like memory.
    at_once: bool,
}

fn after(at: u8) -> u8 {
    (at + 1) % ENTRIES
}

fn distance(from: u8, to: u8) -> u8 {
    (to + ENTRIES - from) % ENTRIES
}

impl State {
    fn new() -> Self {
        let empty = Completion { cid: NONE, sq_head: 0, phase: false };
        Self {
            submitted: 0,
            sq: [NONE; ENTRIES as usize],
            sq_tail: 0,
            cq: [empty; ENTRIES as usize],
            cq_head: 0,
            host_phase: true,
            outstanding: [NONE; 2],
            acknowledged: [NONE; 2],
            blocks: [NONE; 2],
            in_progress: Vec::new(),
            journal: Journal { cq_phase: true, ..Journal::default() },
            worker: Worker::new(0, Step::Choose),
        }
    }

    fn is_over(&self) -> bool {
        usize::from(self.submitted) == BLOCKS.len() && self.outstanding == [NONE; 2]
    }

    /// Number of free entries of the completion queue that no command in flight will need.
    fn room(&self) -> u8 {
        let taken = usize::from(distance(self.cq_head, self.worker.tail));
        (usize::from(ENTRIES) - 1).saturating_sub(
            taken + self.worker.staged.len() + self.worker.pending.len() + self.worker.ended.len(),
        ) as u8
    }

    fn free_record(&self) -> u8 {
        (0..).find(|place| self.journal.records.iter().all(|it| it.place != *place)).unwrap_or(0)
    }

    fn free(&mut self, place: u8) {
        self.journal.records.retain(|record| record.place != place);
    }

    fn record(&mut self, command: u8, count: u8) {
        let place = self.free_record();
        self.journal.records.push(Record { place, count, command });
        self.journal.records.sort_unstable();
        // A command that has completed already is no longer in `pending`.
        if let Some(pending) = self.worker.pending.iter_mut().find(|pending| pending.0 == command) {
            pending.1 = place;
        }
    }
}

type Next = Vec<State>;

impl Model {
    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    /// All possible next states, or a description of a violated rule.
    fn next(&self, state: &State) -> Result<Next, String> {
        let mut next = Vec::new();
        self.host(state, &mut next)?;
        self.disk(state, &mut next)?;
        self.work(state, &mut next);
        if next.is_empty() && !state.is_over() {
            return Err("a command is never completed".into());
        }
        if state.worker.number < MAX_CRASHES
            && state.worker.step != Step::Recover
            && !state.is_over()
        {
            next.push(self.crash(state));
        }
        Ok(next)
    }

    fn host(&self, state: &State, next: &mut Next) -> Result<(), String> {
        let command = state.submitted;
        if let Some(block) = BLOCKS.get(usize::from(command))
            && state.outstanding[*block] == NONE
        {
            let mut submits = state.clone();
            submits.sq[usize::from(state.sq_tail)] = command;
            submits.sq_tail = after(state.sq_tail);
            submits.outstanding[*block] = command;
            submits.submitted += 1;
            next.push(submits);
        }
        let completion = state.cq[usize::from(state.cq_head)];
        if completion.phase == state.host_phase {
            let mut sees = state.clone();
            sees.cq_head = after(state.cq_head);
            sees.host_phase ^= sees.cq_head == 0;
            let block = usize::from(completion.cid);
            let command = std::mem::replace(&mut sees.outstanding[block], NONE);
            if command == NONE {
                return Err("a command is completed twice".into());
            }
            if state.blocks[block] != command {
                return Err(format!("command {command} is complete, and not carried out"));
            }
            sees.acknowledged[block] = command;
            next.push(sees);
        }
        Ok(())
    }

    fn disk(&self, state: &State, next: &mut Next) -> Result<(), String> {
        for at in 0..state.in_progress.len() {
            let mut ends = state.clone();
            let (command, worker) = ends.in_progress.remove(at);
            let block = BLOCKS[usize::from(command)];
            let known = state.acknowledged[block];
            if known != NONE && known > command {
                return Err(format!("command {command} is carried out after {known}"));
            }
            ends.blocks[block] = command;
            if worker == state.worker.number && state.worker.step != Step::Recover {
                ends.worker.ended.push(command);
                ends.worker.ended.sort_unstable();
            }
            next.push(ends);
        }
        Ok(())
    }

    fn crash(&self, state: &State) -> State {
        let worker = Worker::new(state.worker.number + 1, Step::Recover);
        State { worker, ..state.clone() }
    }

    /// Submits a command to the disk.
    fn start(&self, state: &mut State, command: u8) {
        if self.at_once {
            state.blocks[BLOCKS[usize::from(command)]] = command;
            let completion = self.completion(state, command);
            state.worker.staged.push((completion, NONE));
        } else {
            state.in_progress.push((command, state.worker.number));
            state.in_progress.sort_unstable();
            state.worker.pending.push((command, NONE));
        }
    }

    fn completion(&self, state: &State, command: u8) -> Completion {
        let cid = BLOCKS[usize::from(command)] as u8;
        Completion { cid, sq_head: state.worker.head, phase: false }
    }

    fn begin_post(&self, of_batch: bool) -> Step {
        match self.is(Mistake::FreedBeforePosted) {
            true => Step::FreeEarly { of_batch },
            false => Step::Post { of_batch },
        }
    }

    fn work(&self, state: &State, next: &mut Next) {
        let mut then = state.clone();
        match state.worker.step.clone() {
            Step::Choose => return self.choose(state, next),
            Step::Fetch { left } => {
                let command = state.sq[usize::from(state.worker.head)];
                let count = state.worker.fetched;
                then.worker.head = after(state.worker.head);
                then.worker.fetched += 1;
                self.start(&mut then, command);
                then.worker.step = match (self.at_once, self.is(Mistake::RecordedLast)) {
                    (false, false) => Step::Record { command, count, left: left - 1 },
                    (is_at_once, _) => {
                        if !is_at_once {
                            then.worker.to_record.push((command, count));
                        }
                        self.fetch_on(left - 1)
                    }
                };
            }
            Step::Record { command, count, left } => {
                then.record(command, count);
                then.worker.step = self.fetch_on(left);
            }
            Step::FreeEarly { of_batch } => {
                let places: Vec<_> = state.worker.staged.iter().map(|staged| staged.1).collect();
                places.iter().for_each(|place| then.free(*place));
                then.worker.step = Step::Post { of_batch };
            }
            Step::Post { of_batch } if !state.worker.staged.is_empty() => {
                let (completion, place) = then.worker.staged.remove(0);
                then.cq[usize::from(state.worker.tail)] =
                    Completion { phase: state.worker.phase, ..completion };
                then.worker.tail = after(state.worker.tail);
                then.worker.phase ^= then.worker.tail == 0;
                then.worker.completions += 1;
                then.worker.to_free.push(place);
                then.worker.step = Step::Post { of_batch };
            }
            Step::Post { of_batch } => {
                then.worker.step = match self.is(Mistake::CqStoredBeforeFreed) {
                    true => Step::StoreCq { of_batch },
                    false => Step::Free { of_batch },
                };
            }
            Step::Free { of_batch } => match then.worker.to_free.pop() {
                Some(place) => then.free(place),
                None => then.worker.step = self.freed(of_batch),
            },
            Step::StoreCovers => {
                then.journal.covers = (state.worker.head, state.worker.completions);
                then.worker.step = Step::StoreSq;
            }
            Step::StoreSq => {
                (then.journal.sq_head, then.journal.fetched) =
                    (state.worker.head, state.worker.fetched);
                then.worker.step = match self.mistake {
                    Some(Mistake::CqStoredBeforeFreed | Mistake::CqStoredBeforeSq) => Step::Choose,
                    _ => Step::StoreCq { of_batch: true },
                };
            }
            Step::StoreCq { of_batch } => {
                let journal = &mut then.journal;
                (journal.cq_tail, journal.cq_phase) = (state.worker.tail, state.worker.phase);
                journal.completions = state.worker.completions;
                then.worker.step = match self.mistake {
                    Some(Mistake::CqStoredBeforeFreed) => Step::Free { of_batch },
                    Some(Mistake::CqStoredBeforeSq) if of_batch => Step::StoreCovers,
                    Some(Mistake::RecordedLast) => Step::RecordLate,
                    _ => Step::Choose,
                };
            }
            Step::RecordLate => match then.worker.to_record.pop() {
                Some((command, count)) => then.record(command, count),
                None => then.worker.step = Step::Choose,
            },
            Step::ReplayRecord { command, count, spare } => {
                then.record(command, count);
                then.worker.step = match self.is(Mistake::SpareFreedBeforeRecorded) {
                    true => Step::Choose,
                    false => Step::ReplayFree { command, count, spare },
                };
            }
            Step::ReplayFree { command, count, spare } => {
                then.free(spare);
                then.worker.step = match self.is(Mistake::SpareFreedBeforeRecorded) {
                    true => Step::ReplayRecord { command, count, spare },
                    false => Step::Choose,
                };
            }
            Step::Recover => {
                if !self.is(Mistake::NoFence) && !state.in_progress.is_empty() {
                    return;
                }
                self.recover(&mut then);
            }
        }
        next.push(then);
    }

    fn fetch_on(&self, left: u8) -> Step {
        if left == 0 { self.begin_post(true) } else { Step::Fetch { left } }
    }

    fn freed(&self, of_batch: bool) -> Step {
        match (self.mistake, of_batch) {
            (Some(Mistake::CqStoredBeforeFreed), false) => Step::Choose,
            (Some(Mistake::CqStoredBeforeSq), _) | (_, false) => Step::StoreCq { of_batch },
            _ => Step::StoreCovers,
        }
    }

    /// Adds the possible next steps of the I/O thread. It executes all replays first, and then its
    /// other work in any order.
    fn choose(&self, state: &State, next: &mut Next) {
        if !state.worker.replays.is_empty() && state.room() > 0 {
            let mut replays = state.clone();
            let Record { place: spare, count, command } = replays.worker.replays.remove(0);
            self.start(&mut replays, command);
            replays.worker.step = match self.is(Mistake::SpareFreedBeforeRecorded) {
                true => Step::ReplayFree { command, count, spare },
                false => Step::ReplayRecord { command, count, spare },
            };
            return next.push(replays);
        }
        let left = distance(state.worker.head, state.sq_tail).min(state.room());
        if left > 0 {
            let worker = Worker { step: Step::Fetch { left }, ..state.worker.clone() };
            next.push(State { worker, ..state.clone() });
        }
        if !state.worker.ended.is_empty() {
            let mut reaps = state.clone();
            for command in std::mem::take(&mut reaps.worker.ended) {
                let completion = self.completion(state, command);
                let at = reaps.worker.pending.iter().position(|pending| pending.0 == command);
                let place = at.map_or(NONE, |at| reaps.worker.pending.remove(at).1);
                reaps.worker.staged.push((completion, place));
            }
            next.push(reaps);
        }
        if !state.worker.staged.is_empty() {
            let worker = Worker { step: self.begin_post(false), ..state.worker.clone() };
            next.push(State { worker, ..state.clone() });
        }
    }

    /// Recovery by the next process from the dead process's journal, as in `RecoveredJournal`. The
    /// model creates the new journal in one step, because the supervisor stores a new journal only
    /// when it is complete.
    fn recover(&self, state: &mut State) {
        let Journal { mut records, sq_head, fetched, covers, .. } = state.journal.clone();
        let (mut head, mut count) = (sq_head, fetched);
        let age = |count: u8, record: &Record| count.wrapping_sub(record.count) as i8;
        let (mut tail, mut phase) = (state.journal.cq_tail, state.journal.cq_phase);
        for nth in 1..ENTRIES {
            let completion = state.cq[usize::from(tail)];
            if completion.phase != phase {
                break;
            }
            tail = after(tail);
            phase ^= tail == 0;
            let number = state.journal.completions + nth;
            let is_covered = covers.0 == sq_head && covers.1 >= number;
            if !is_covered || self.is(Mistake::CompletionsNotCounted) {
                count = count.wrapping_add(distance(head, completion.sq_head));
                head = completion.sq_head;
            }
            let is_it = |record: &&Record| {
                BLOCKS[usize::from(record.command)] == usize::from(completion.cid)
                    && age(count, record) > 0
            };
            let oldest = records.iter().filter(is_it).max_by_key(|record| age(count, record));
            if let Some(done) = oldest.map(|record| record.count) {
                records.retain(|record| record.count != done);
            }
        }
        records.retain(|record| age(count, record) > 0);
        records.sort_by_key(|record| std::cmp::Reverse(age(count, record)));
        if !self.is(Mistake::MovedRecordCountsTwice) {
            records.dedup_by_key(|record| record.count);
        }
        for (place, record) in (100..).zip(&mut records) {
            record.place = place;
            if self.is(Mistake::EntryReadFromTheQueue) {
                record.command = state.sq[usize::from(record.count % ENTRIES)];
            }
        }
        state.journal = Journal {
            records: records.clone(),
            sq_head: head,
            fetched: count,
            covers: (head, 0),
            cq_tail: tail,
            cq_phase: phase,
            completions: 0,
        };
        (state.worker.head, state.worker.fetched, state.worker.tail, state.worker.phase) =
            (head, count, tail, phase);
        state.worker.replays = records;
        state.worker.step = Step::Choose;
    }

    /// Visits all reachable states. Returns their number.
    fn explore(&self) -> Result<usize, String> {
        let mut seen = HashSet::from([State::new()]);
        let mut open = vec![State::new()];
        while let Some(state) = open.pop() {
            for next in self.next(&state)? {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        Ok(seen.len())
    }
}

#[test]
fn the_journal_loses_and_repeats_no_command() {
    for at_once in [false, true] {
        let states = Model { mistake: None, at_once }.explore().unwrap();
        println!("{states} states");
        assert!(states > 1000);
    }
}

#[test]
fn each_mistake_of_the_journal_is_detected() {
    for (mistake, at_once) in [
        (Mistake::FreedBeforePosted, false),
        (Mistake::CqStoredBeforeFreed, false),
        (Mistake::CqStoredBeforeSq, true),
        (Mistake::RecordedLast, false),
        (Mistake::CompletionsNotCounted, false),
        (Mistake::NoFence, false),
        (Mistake::MovedRecordCountsTwice, false),
        (Mistake::SpareFreedBeforeRecorded, false),
        (Mistake::EntryReadFromTheQueue, false),
    ] {
        match (Model { mistake: Some(mistake), at_once }).explore() {
            Err(found) => println!("{mistake:?}: {found}"),
            Ok(states) => panic!("{mistake:?} does no harm in {states} states"),
        }
    }
}
