//! Layout of a queue's in-flight tracking memory: `QueueRegionSplit` and `DescStateSplit` of the
//! vhost-user specification. All fields are accessed as words of eight bytes, loaded and stored
//! atomically, in native byte order.

use shadowbell_memory::SharedBytes;

/// Size in bytes of the part before the requests: the features (at offset 0), and the [`Header`].
const HEADER: usize = 16;
const FEATURES: usize = 0;
const STATE: usize = 8;
/// Size of a request's state in bytes: a [`Mark`], and the request's number.
const REQUEST: usize = 16;
const NUMBER: usize = 8;
/// Alignment in bytes of each queue's tracking memory, as in other implementations.
const ALIGNMENT: usize = 64;

/// Version of the layout.
pub(super) const VERSION: u16 = 1;

/// Size in bytes of the memory of a queue with `entries` entries.
pub(super) fn queue_bytes(entries: u16) -> usize {
    (HEADER + REQUEST * usize::from(entries)).next_multiple_of(ALIGNMENT)
}

/// Memory of a queue, accessed in words.
pub(crate) trait Words {
    /// Loads the word at offset `at`, which is a multiple of eight.
    fn load(&self, at: usize) -> u64;
    /// Stores a word. Earlier stores become visible before it.
    fn store(&self, at: usize, word: u64);
}

impl Words for SharedBytes {
    fn load(&self, at: usize) -> u64 {
        // The load cannot fail, because the memory has the length that its queue needs.
        self.load_u64_acquire(at).unwrap_or_default()
    }

    fn store(&self, at: usize, word: u64) {
        let _ = self.store_u64_release(at, word);
    }
}

/// Header of a queue. It is the second word of the queue's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Header {
    /// Version; 0 if the memory is not initialized.
    pub(super) version: u16,
    pub(super) entries: u16,
    /// Head of the request that was answered last.
    pub(super) last: u16,
    /// Index of the used ring up to which the marks of answered requests were removed.
    pub(super) used: u16,
}

impl Header {
    pub(super) fn load(words: &impl Words) -> Self {
        let [a, b, c, d, e, f, g, h] = words.load(STATE).to_ne_bytes();
        let [version, entries, last, used] =
            [[a, b], [c, d], [e, f], [g, h]].map(u16::from_ne_bytes);
        Self { version, entries, last, used }
    }

    pub(super) fn store(self, words: &impl Words) {
        let Self { version, entries, last, used } = self;
        let [[a, b], [c, d], [e, f], [g, h]] = [version, entries, last, used].map(u16::to_ne_bytes);
        words.store(STATE, u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
    }
}

/// In-flight mark of a request. It is the first word of the request's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) in_flight: bool,
    /// Head of the request that was answered directly before this request.
    pub(super) next: u16,
}

impl Mark {
    pub(super) fn load(words: &impl Words, head: u16) -> Self {
        let [in_flight, _, _, _, _, _, low, high] = words.load(request(head)).to_ne_bytes();
        Self { in_flight: in_flight == 1, next: u16::from_ne_bytes([low, high]) }
    }

    pub(super) fn store(self, words: &impl Words, head: u16) {
        let [low, high] = self.next.to_ne_bytes();
        let bytes = [self.in_flight.into(), 0, 0, 0, 0, 0, low, high];
        words.store(request(head), u64::from_ne_bytes(bytes));
    }
}

pub(super) fn features(words: &impl Words) -> u64 {
    words.load(FEATURES)
}

pub(super) fn number(words: &impl Words, head: u16) -> u64 {
    words.load(request(head) + NUMBER)
}

pub(super) fn store_number(words: &impl Words, head: u16, number: u64) {
    words.store(request(head) + NUMBER, number);
}

fn request(head: u16) -> usize {
    HEADER + REQUEST * usize::from(head)
}
