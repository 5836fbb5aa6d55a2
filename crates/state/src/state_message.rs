//! State message: named sections and descriptors, and their wire format.

use crate::channel::{receive_bytes, receive_fds, send_bytes, send_fds};
use crate::descriptors::Descriptors;
use crate::error::StateError;
use crate::fields::{Pieces, read_json, read_json_in_pieces};
use crate::version::{READABLE, VERSION};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

const MAGIC: [u8; 8] = *b"SBELLST\0";
/// Maximum size of a state in bytes. A server with a thousand controllers needs much less.
const MAX_BYTES: u64 = 1 << 30;
const MAX_FDS: u64 = 1 << 20;
/// Size of the header in bytes: magic, version, number of descriptors, length.
const HEAD: usize = 24;

#[derive(Debug, Serialize, Deserialize)]
struct Section {
    name: String,
    mandatory: bool,
    body: Box<RawValue>,
}

/// State of a server: sections by name, and descriptors.
#[derive(Debug, Default)]
pub struct Parcel {
    sections: BTreeMap<String, Section>,
    descriptors: Descriptors,
}

impl Parcel {
    /// Creates an empty state.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Descriptors that the sections reference.
    pub fn descriptors(&mut self) -> &mut Descriptors {
        &mut self.descriptors
    }

    /// Adds a section. If the section is `mandatory`, a receiver that does not support it must
    /// refuse the state.
    ///
    /// # Errors
    ///
    /// If a section of this name exists, or `body` cannot be serialized.
    pub fn add(
        &mut self,
        name: &str,
        mandatory: bool,
        body: &impl Serialize,
    ) -> Result<(), StateError> {
        let body = serde_json::value::to_raw_value(body)
            .map_err(|source| StateError::Section { name: name.into(), source })?;
        self.put(Section { name: name.into(), mandatory, body })
    }

    fn put(&mut self, section: Section) -> Result<(), StateError> {
        if self.sections.contains_key(&section.name) {
            return Err(StateError::Twice(section.name));
        }
        self.sections.insert(section.name.clone(), section);
        Ok(())
    }

    /// Takes a section out, if it exists.
    ///
    /// # Errors
    /// If the section does not have the form of a `T`, or has an unknown field that must not be
    /// [skipped](crate::read_fields).
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, StateError> {
        let Some(section) = self.sections.remove(name) else { return Ok(None) };
        read_json(name, section.body.get().as_bytes()).map(Some)
    }

    /// Takes a section out as [`take`](Self::take) does, and parses it in pieces of at most 64 KiB.
    /// `pause` is called between two of them.
    ///
    /// # Errors
    /// Those of [`take`](Self::take).
    pub fn take_in_pieces<T: DeserializeOwned>(
        &mut self,
        name: &str,
        pause: &mut dyn FnMut(),
    ) -> Result<Option<T>, StateError> {
        let Some(section) = self.sections.remove(name) else { return Ok(None) };
        read_json_in_pieces(name, section.body.get().as_bytes(), pause).map(Some)
    }

    /// Checks that the sections that were not taken are optional.
    ///
    /// # Errors
    ///
    /// [`StateError::Unknown`] for a mandatory section.
    pub fn finish(self) -> Result<(), StateError> {
        match self.sections.into_values().find(|section| section.mandatory) {
            Some(section) => Err(StateError::Unknown(section.name)),
            None => Ok(()),
        }
    }

    /// Encodes the state. The caller transfers its `fds` descriptors separately.
    ///
    /// # Errors
    ///
    /// If a section cannot be serialized.
    pub fn encode(&self, fds: usize) -> Result<Vec<u8>, StateError> {
        let sections: Vec<_> = self.sections.values().collect();
        let mut bytes = vec![0; HEAD];
        serde_json::to_writer(&mut bytes, &sections)
            .map_err(|source| StateError::Section { name: "all".into(), source })?;
        let len = (bytes.len() - HEAD) as u64;
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(fds as u32).to_le_bytes());
        bytes[16..HEAD].copy_from_slice(&len.to_le_bytes());
        Ok(bytes)
    }

    /// Decodes a state. `fds` are the received descriptors. The list is empty if only the sections
    /// are examined.
    ///
    /// # Errors
    ///
    /// [`StateError`] if the bytes are not a state that this program supports.
    pub fn decode(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Self, StateError> {
        let (head, body) = Head::split(bytes)?;
        if !fds.is_empty() && head.fds != fds.len() as u64 {
            return Err(StateError::NotAState("a descriptor is missing"));
        }
        Self::read(body, fds)
    }

    /// Decodes a state without descriptors, in pieces of at most 64 KiB. `pause` is called between
    /// two of them.
    ///
    /// # Errors
    ///
    /// [`StateError`] if the bytes are not a state that this program supports.
    pub fn decode_in_pieces(bytes: &[u8], pause: &mut dyn FnMut()) -> Result<Self, StateError> {
        let (_, body) = Head::split(bytes)?;
        Self::of(serde_json::from_reader(Pieces::of(body, pause)), Vec::new())
    }

    fn read(body: &[u8], fds: Vec<OwnedFd>) -> Result<Self, StateError> {
        Self::of(serde_json::from_slice(body), fds)
    }

    fn of(
        sections: serde_json::Result<Vec<Section>>,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, StateError> {
        let sections =
            sections.map_err(|source| StateError::Section { name: "list".into(), source })?;
        let mut parcel = Self { sections: BTreeMap::new(), descriptors: Descriptors::from(fds) };
        for section in sections {
            parcel.put(section)?;
        }
        Ok(parcel)
    }

    /// Sends the state. Returns after the socket has accepted all of it.
    ///
    /// # Errors
    ///
    /// [`StateError`] of the socket.
    pub fn send(&self, socket: &UnixStream) -> Result<(), StateError> {
        let fds: Vec<_> = self.descriptors.iter().collect();
        if fds.len() != self.descriptors.len() {
            return Err(StateError::NotAState("a descriptor was already taken"));
        }
        let bytes = self.encode(fds.len())?;
        let (head, body) = bytes.split_at(HEAD);
        send_bytes(socket, head)?;
        send_fds(socket, &fds)?;
        send_bytes(socket, body)?;
        Ok(())
    }

    /// Receives a state.
    ///
    /// # Errors
    ///
    /// [`StateError`] of the socket, or if the bytes are not a state that this program supports.
    pub fn receive(socket: &UnixStream) -> Result<Self, StateError> {
        let mut head = [0; HEAD];
        receive_bytes(socket, &mut head)?;
        let head = Head::of(&head)?;
        let fds = receive_fds(socket, head.fds as usize)?;
        let mut body = vec![0; head.bytes as usize];
        receive_bytes(socket, &mut body)?;
        Self::read(&body, fds)
    }
}

/// Header of a state.
struct Head {
    fds: u64,
    bytes: u64,
}

impl Head {
    /// Header and body of a state.
    fn split(bytes: &[u8]) -> Result<(Self, &[u8]), StateError> {
        let (head, body) =
            bytes.split_first_chunk().ok_or(StateError::NotAState("it is too short"))?;
        let head = Self::of(head)?;
        match head.bytes == body.len() as u64 {
            true => Ok((head, body)),
            false => Err(StateError::NotAState("its length differs from its header")),
        }
    }

    fn of(head: &[u8; HEAD]) -> Result<Self, StateError> {
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if head[..8] != MAGIC {
            return Err(StateError::NotAState("its magic number is wrong"));
        }
        if !READABLE.contains(&word(8)) {
            return Err(StateError::Version(word(8)));
        }
        let (fds, bytes) = (u64::from(word(12)), u64::from(word(16)) | u64::from(word(20)) << 32);
        if let Some(too_large) = [(fds, MAX_FDS), (bytes, MAX_BYTES)]
            .into_iter()
            .find_map(|(is, most)| (is > most).then_some(is))
        {
            return Err(StateError::TooLarge(too_large));
        }
        Ok(Self { fds, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    fn send_and_receive(parcel: Parcel) -> Result<Parcel, StateError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || parcel.send(&ours));
        let received = Parcel::receive(&theirs);
        sender.join().unwrap().unwrap();
        received
    }

    #[test]
    fn sections_and_many_descriptors_are_transferred() {
        let mut parcel = Parcel::new();
        let mut refs = Vec::new();
        for n in 0..700_u32 {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&n.to_le_bytes()).unwrap();
            refs.push(parcel.descriptors().add(file.into()));
        }
        parcel.add("numbers", true, &refs).unwrap();
        parcel.add("long", false, &"x".repeat(1 << 20)).unwrap();
        let mut parcel = send_and_receive(parcel).unwrap();
        let refs: Vec<crate::descriptors::FdRef> = parcel.take("numbers").unwrap().unwrap();
        for (n, fd) in (0..700_u32).zip(&refs) {
            let mut file = File::from(parcel.descriptors().take(*fd).unwrap());
            let mut bytes = [0; 4];
            file.rewind().unwrap();
            file.read_exact(&mut bytes).unwrap();
            assert_eq!(u32::from_le_bytes(bytes), n);
        }
        assert!(matches!(parcel.descriptors().take(refs[0]), Err(StateError::NoDescriptor(0))));
        assert_eq!(parcel.take::<String>("long").unwrap().unwrap().len(), 1 << 20);
        parcel.finish().unwrap();
    }

    #[test]
    fn unknown_sections_are_ignored_or_refused() {
        let mut parcel = Parcel::new();
        parcel.add("extra", false, &1).unwrap();
        send_and_receive(parcel).unwrap().finish().unwrap();
        let mut parcel = Parcel::new();
        parcel.add("future", true, &1).unwrap();
        let error = send_and_receive(parcel).unwrap().finish().unwrap_err().to_string();
        assert!(error.contains("does not support the mandatory section future"), "{error}");
        let mut parcel = Parcel::new();
        parcel.add("number", true, &1).unwrap();
        assert!(matches!(parcel.add("number", true, &2), Err(StateError::Twice(_))));
        let error = parcel.take::<String>("number").unwrap_err().to_string();
        assert!(error.contains("section number"), "{error}");
    }

    #[test]
    fn bytes_and_descriptors_may_go_separate_ways() {
        let mut parcel = Parcel::new();
        parcel.add("numbers", true, &[crate::descriptors::FdRef::at(0)]).unwrap();
        let bytes = parcel.encode(1).unwrap();
        let fd = || std::os::fd::OwnedFd::from(tempfile::tempfile().unwrap());
        let mut parcel = Parcel::decode(&bytes, vec![fd()]).unwrap();
        let refs: Vec<crate::descriptors::FdRef> = parcel.take("numbers").unwrap().unwrap();
        parcel.descriptors().take(refs[0]).unwrap();
        // Sections can be examined without descriptors.
        Parcel::decode(&bytes, Vec::new()).unwrap();
        for wrong in [
            Parcel::decode(&bytes, vec![fd(), fd()]),
            Parcel::decode(&bytes[..bytes.len() - 1], Vec::new()),
            Parcel::decode(&bytes[..7], Vec::new()),
        ] {
            assert!(matches!(wrong, Err(StateError::NotAState(_))));
        }
    }

    /// Tests that at most 64 KiB are parsed between two calls of `pause`, and that the result is
    /// the same as without pauses.
    #[test]
    fn a_state_is_decoded_in_pieces() {
        let lists = vec![[1, 2, 3]; 100_000];
        let mut parcel = Parcel::new();
        parcel.add("lists", true, &lists).unwrap();
        let bytes = parcel.encode(0).unwrap();
        let body = bytes.len() - HEAD;
        let mut pauses = 0;
        let mut parcel = Parcel::decode_in_pieces(&bytes, &mut || pauses += 1).unwrap();
        assert_eq!(pauses, (body - 1) / (64 << 10));
        let mut pauses = 0;
        let taken = parcel.take_in_pieces("lists", &mut || pauses += 1).unwrap();
        assert_eq!(taken, Some(lists));
        assert!(pauses >= (body - 100) / (64 << 10), "{pauses}");
        assert_eq!(parcel.take_in_pieces::<u32>("lists", &mut || ()).unwrap(), None);
        // For invalid states, both ways of decoding return the same error.
        for wrong in [&bytes[..7], &bytes[..bytes.len() - 1], &[&bytes[..], b" "].concat()] {
            let error = Parcel::decode_in_pieces(wrong, &mut || ()).unwrap_err();
            assert_eq!(
                error.to_string(),
                Parcel::decode(wrong, Vec::new()).unwrap_err().to_string()
            );
        }
        let mut wrong = bytes;
        *wrong.last_mut().unwrap() = b'!';
        assert!(Parcel::decode_in_pieces(&wrong, &mut || ()).is_err());
    }

    #[test]
    fn invalid_state_messages_are_refused() {
        let refuse = |bytes: &[u8]| {
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            ours.write_all(bytes).unwrap();
            drop(ours);
            Parcel::receive(&theirs).unwrap_err().to_string()
        };
        assert!(refuse(b"").contains("could not be passed on"));
        assert!(refuse(&[7; 64]).contains("magic number is wrong"));
        let head = |version: u32, fds: u32, len: u64| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend(version.to_le_bytes());
            bytes.extend(fds.to_le_bytes());
            bytes.extend(len.to_le_bytes());
            bytes
        };
        let error = refuse(&head(VERSION + 1, 0, 2));
        assert!(error.contains(&format!("version {}", VERSION + 1)), "{error}");
        assert!(refuse(&head(VERSION, u32::MAX, 2)).contains("too large"));
        assert!(refuse(&head(VERSION, 0, u64::MAX)).contains("too large"));
        // The header announces a descriptor, but none arrives.
        let mut bytes = head(VERSION, 1, 2);
        bytes.extend(b"\0[]");
        assert!(refuse(&bytes).contains("no server state"), "{}", refuse(&bytes));
        let mut bytes = head(VERSION, 0, 3);
        bytes.extend(b"[1]");
        assert!(refuse(&bytes).contains("section list"));
    }
}
