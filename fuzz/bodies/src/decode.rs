//! Random wire structures for the decoders of the specification, and a stream in pieces for the
//! vfio-user codec.

use crate::limits::Limits;
use crate::source::Source;
use shadowbell_spec::Sqe;
use shadowbell_spec::identify::{
    ControllerList, IdentifyController, IdentifyNamespace, NamespaceId, NamespaceIds, NamespaceList,
};
use shadowbell_spec::log::{ChangedNamespaces, ErrorLogEntry, SmartHealth};
use shadowbell_vfio_user::capabilities::Capabilities;
use shadowbell_vfio_user::codec::{Decoder, MESSAGE_OVERHEAD};
use shadowbell_vfio_user::wire::{HEADER_LEN, header_flags};
use zerocopy::{FromBytes, IntoBytes};

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    while !source.is_empty() {
        match source.below(8) {
            0 => identify(&source.exactly(4096)),
            1..=4 => command(&source.exactly(Sqe::SIZE), &mut source),
            5 => {
                let _ = Capabilities::from_version_data(&source.bytes(512));
            }
            _ => stream(&mut source),
        }
        limits.step("decode");
    }
}

fn identify(page: &[u8]) {
    if let Ok(controller) = IdentifyController::read_from_bytes(page) {
        let words = [
            controller.serial().to_string(),
            controller.model().to_string(),
            controller.firmware().to_string(),
            controller.qualified_name().to_string(),
        ];
        assert!(words.iter().all(|word| word.len() <= 4096));
        for mpsmin in 0..16 {
            let _ = controller.max_transfer(mpsmin);
        }
    }
    if let Ok(namespace) = IdentifyNamespace::read_from_bytes(page) {
        let _ = namespace.format();
    }
    if let Ok(ids) = NamespaceIds::read_from_bytes(page) {
        let all: Vec<NamespaceId<'_>> = ids.iter().collect();
        assert!(all.len() <= 4096 / 5, "more than there is room for");
    }
    if let Ok(list) = NamespaceList::read_from_bytes(page) {
        assert!(list.iter().count() <= 1024);
    }
    if let Ok(list) = ControllerList::read_from_bytes(page) {
        assert!(list.iter().count() <= 2047);
    }
    if let Ok(changed) = ChangedNamespaces::read_from_bytes(page) {
        assert!(changed.iter().count() <= 1024);
    }
    let _ = SmartHealth::read_from_prefix(page).map(|(log, _)| format!("{log:?}"));
    let _ = ErrorLogEntry::read_from_prefix(page).map(|(entry, _)| format!("{entry:?}"));
}

/// Checks that the decoded fields of a command are encoded to the same bytes.
fn command(bytes: &[u8], source: &mut Source<'_>) {
    use shadowbell_spec::admin::{
        Abort, CreateIoCq, CreateIoSq, DeleteIoQueue, GetFeatures, GetLbaStatus, GetLogPage,
        SetFeatures,
    };
    let Ok(sqe) = Sqe::read_from_bytes(bytes) else { return };
    assert_eq!(sqe.as_bytes(), bytes);
    let _ = (sqe.fuse(), sqe.psdt(), sqe.sgl1(), format!("{sqe:?}"));
    macro_rules! there_and_back {
        ($($name:path),*) => {
            $({
                let fields = <$name>::decode(&sqe);
                assert_eq!(<$name>::decode(&fields.encode(Sqe::new(sqe.opcode, 0, 0))), fields);
            })*
        };
    }
    there_and_back!(
        CreateIoCq,
        CreateIoSq,
        DeleteIoQueue,
        Abort,
        GetLbaStatus,
        GetLogPage,
        GetFeatures,
        SetFeatures,
        shadowbell_spec::nvm::RwFields,
        shadowbell_spec::nvm::DatasetManagement,
        shadowbell_spec::nvm::CopyFields
    );
    let _ = shadowbell_spec::nvm::RwFields::decode(&sqe).end();
    let _ = shadowbell_spec::regs::decode_doorbell(source.u64(), source.u8() & 15);
    let _ = format!("{:?}", shadowbell_spec::event::AsyncEvent::from_dw0(source.u32()));
    let status = shadowbell_spec::Status::from_bits(source.u16());
    let _ = (status.name(), status.to_string(), status.code_type());
}

/// Checks that the decoded messages do not depend on the sizes of the pieces in which a stream
/// arrives, and that no message exceeds the negotiated size.
fn stream(source: &mut Source<'_>) {
    let most = source.of(&[0, 64, 4096]);
    let pieces = source.of(&[1usize, 7, 100, 5000]);
    let mut bytes = Vec::new();
    for _ in 0..source.below(12) {
        let payload = source.bytes(200);
        let real = (HEADER_LEN + payload.len()) as u64;
        let size = if source.rarely(6) { source.near(&[real, 16, 4096]) } else { real } as u32;
        let flags = if source.rarely(8) { source.u32() } else { u32::from(source.bool()) };
        bytes.extend([source.u16(), source.u16()].as_bytes());
        bytes.extend([size, flags, source.u32()].as_bytes());
        bytes.extend(payload);
    }
    let whole = messages(&bytes, usize::MAX, most);
    assert_eq!(
        whole,
        messages(&bytes, pieces, most),
        "the messages depend on how the bytes arrive"
    );
    for (_, payload) in &whole.0 {
        assert!(payload.len() + HEADER_LEN <= most + MESSAGE_OVERHEAD);
    }
}

type Messages = (Vec<(u16, Vec<u8>)>, bool);

/// Decodes a stream that arrives in pieces. Returns its commands and payloads, and true if it ends
/// with an error.
fn messages(mut bytes: &[u8], piece: usize, most: usize) -> Messages {
    let mut decoder = Decoder::new(most);
    let mut found = Vec::new();
    loop {
        loop {
            match decoder.decode() {
                Ok(Some(message)) => {
                    assert!(message.header.flags & header_flags::TYPE_MASK <= header_flags::REPLY);
                    found.push((message.header.command, message.payload.to_vec()));
                }
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.decode().err(), Some(error), "an error stays");
                    return (found, true);
                }
            }
        }
        if bytes.is_empty() {
            return (found, false);
        }
        let space = decoder.space();
        let len = space.len().min(piece).min(bytes.len());
        assert!(len > 0, "no room for more");
        space[..len].copy_from_slice(&bytes[..len]);
        decoder.advance(len, Vec::new());
        bytes = &bytes[len..];
    }
}
