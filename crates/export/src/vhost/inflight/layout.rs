//! Where things are in the memory of a queue: `QueueRegionSplit` and `DescStateSplit` of the
//! specification. Everything is a word of eight bytes that is loaded and stored at once, in this
//! machine's order of bytes.

use shadowbell_memory::SharedBytes;

/// Bytes before the first request: features (0), and the [`Header`].
const HEADER: usize = 16;
const FEATURES: usize = 0;
const STATE: usize = 8;
/// Bytes of a request: a [`Mark`], and its number.
const REQUEST: usize = 16;
const NUMBER: usize = 8;
/// Each queue begins at a multiple of this, as in other implementations.
const ALIGNMENT: usize = 64;

/// The version of all this.
pub(super) const VERSION: u16 = 1;

/// The bytes of a queue with so many entries.
pub(super) fn queue_bytes(entries: u16) -> usize {
    (HEADER + REQUEST * usize::from(entries)).next_multiple_of(ALIGNMENT)
}

/// The memory of a queue, as words.
pub(in super::super) trait Words {
    /// The word at this multiple of eight.
    fn load(&self, at: usize) -> u64;
    /// Stores it behind all that was stored before.
    fn store(&self, at: usize, word: u64);
}

impl Words for SharedBytes {
    fn load(&self, at: usize) -> u64 {
        // The window is as long as its queue.
        self.load_u64_acquire(at).unwrap_or_default()
    }

    fn store(&self, at: usize, word: u64) {
        let _ = self.store_u64_release(at, word);
    }
}

/// The second word of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Header {
    /// 0 if there is nothing yet.
    pub(super) version: u16,
    pub(super) entries: u16,
    /// The request that was answered last.
    pub(super) last: u16,
    /// The index of the used ring, when all before it had lost their marks.
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

/// The first word of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) in_flight: bool,
    /// The request that was answered before it.
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
