//! Output of a trace as JSON Lines.

use serde::ser::{Serialize, SerializeMap, Serializer};
use shadowbell_controller::trace::{Kind, Queue, Record};
use std::io::{self, Write};

/// Record as an object: `time_ns` and `kind` always; `worker`, `controller`, and `sq` or `cq` if
/// the record concerns one; then the fields of its kind. Later versions only add names.
struct Line<'a>(&'a Record);

impl Serialize for Line<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(record) = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("time_ns", &record.time_ns)?;
        map.serialize_entry("kind", &option_name(record.kind))?;
        if let Some(worker) = record.worker {
            map.serialize_entry("worker", &worker)?;
        }
        if record.controller != 0 {
            map.serialize_entry("controller", &record.controller)?;
        }
        match record.queue() {
            Some(Queue::Submission(qid)) => map.serialize_entry("sq", &qid)?,
            Some(Queue::Completion(qid)) => map.serialize_entry("cq", &qid)?,
            None => {}
        }
        for (name, value) in record.fields() {
            map.serialize_entry(name, &value)?;
        }
        map.end()
    }
}

/// Writes one object per line.
///
/// # Errors
/// `out` cannot be written.
pub(super) fn write(records: &[Record], out: &mut impl Write) -> io::Result<()> {
    for record in records {
        serde_json::to_writer(&mut *out, &Line(record))?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

/// Name of a kind in lower case with hyphens: `EventIdx armed` is `eventidx-armed`.
pub(super) fn option_name(kind: Kind) -> String {
    kind.name().to_lowercase().replace(' ', "-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_controller::trace::{COMPLETION_QUEUE, Kind};

    #[test]
    fn a_record_is_an_object_of_one_line() {
        let record = |kind, worker, controller, qid, value, extra| Record {
            time_ns: 1_500,
            kind,
            worker,
            controller,
            qid,
            value,
            extra,
        };
        let records = [
            record(Kind::QueueCreated, None, 1, 3 | COMPLETION_QUEUE, 64, 2),
            record(Kind::ShadowNew, Some(0), 1, 3, 18, 17),
            record(Kind::CompletionPosted, Some(0), 1, 3, 0x4_0011, 0),
            record(Kind::Wake, Some(2), 0, 0, 55, 0),
        ];
        let mut out = Vec::new();
        write(&records, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "{\"time_ns\":1500,\"kind\":\"queue-created\",\"controller\":1,\"cq\":3,\
             \"entries\":64,\"vector\":2}\n\
             {\"time_ns\":1500,\"kind\":\"shadow-doorbell-moved\",\"worker\":0,\"controller\":1,\
             \"sq\":3,\"from\":17,\"to\":18}\n\
             {\"time_ns\":1500,\"kind\":\"completion-posted\",\"worker\":0,\"controller\":1,\
             \"cq\":3,\"cid\":17,\"sqid\":4,\"status\":0}\n\
             {\"time_ns\":1500,\"kind\":\"wake\",\"worker\":2,\"slept_us\":55}\n"
        );
    }
}
