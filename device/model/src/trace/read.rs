//! Reading a trace: every field is checked before it is given on.

use std::io::{ErrorKind, Read};
use std::sync::Arc;

use super::{
    BLOCK_BYTES, Block, BlockKind, CHUNK_HEADER, HEADER, Header, MAGIC, MAX_DEVICE, MAX_PAYLOAD, MAX_PLANES,
    MAX_REQUEST, MAX_TIME_NS, MAX_VIEWS, Request, Seen, Served, VERSION, View, WordBytes, unzigzag,
};
use crate::ModelError;
use crate::text::printable;

/// What a trace holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A view, numbered from 0 on.
    View(View),
    /// How a block is stored from now on.
    Block(u64, Block),
    /// What a block takes as words from now on.
    Words(u64, WordBytes),
    /// A request.
    Request(Request),
    /// So many requests were lost here.
    Lost(u64),
}

/// A trace that is being read.
pub struct Reader<R: Read> {
    from: R,
    header: Header,
    version: u16,
    payload: Vec<u8>,
    at: usize,
    tag: u8,
    left: u32,
    chunk: u64,
    first: bool,
    time: u64,
    end: u64,
    block: u64,
    bits: Vec<u32>,
    /// Bytes of the planes of the block that is read, and of one before it.
    lengths: Vec<u16>,
    planes: Arc<[u16]>,
    requests: u64,
    blocks: u64,
    state: State,
    takes_cut: bool,
}

/// How far a trace is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Goes,
    Over,
    Cut,
}

/// Bytes that a part of a bundle may have: a block and its checks.
const MAX_STORED: u32 = 4160;

fn form(why: String) -> ModelError {
    ModelError::Form { what: "the trace".to_owned(), why }
}

/// Fills `bytes`, or says that the trace was cut short and what of it is `whole`.
fn fill(
    from: &mut impl Read,
    bytes: &mut [u8],
    what: &str,
    whole: &str,
    state: &mut State,
) -> Result<(), ModelError> {
    from.read_exact(bytes).map_err(|why| match why.kind() {
        ErrorKind::UnexpectedEof => {
            *state = State::Cut;
            form(format!("it is cut short: {what} is not whole; {whole}"))
        }
        _ => form(format!("{what} cannot be read: {why}")),
    })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// It is no trace, one of another version, or damaged.
    pub fn new(mut from: R) -> Result<Self, ModelError> {
        let mut bytes = [0; HEADER];
        fill(&mut from, &mut bytes, "the header", "nothing behind it is there", &mut State::Goes)?;
        if &bytes[..8] != MAGIC {
            return Err(form("it does not begin with LAMTRACE".to_owned()));
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if !(1..=VERSION).contains(&version) {
            let why = format!("its version is {version}, and this program reads 1 to {VERSION}");
            return Err(form(why));
        }
        if crc32c::crc32c(&bytes[..24]) != u32_at(&bytes, 24) {
            return Err(form("its header is damaged: the checksum differs".to_owned()));
        }
        let seen = match bytes[10] {
            0 => Seen::Requests,
            1 => Seen::Lines,
            other => return Err(ModelError::field("what an address is", &other, "0 or 1")),
        };
        let low = u64::from(u32_at(&bytes, 16));
        let device_bytes = low | u64::from(u32_at(&bytes, 20)) << 32;
        let header = Header { seen, device_bytes };
        header.check()?;
        Ok(Self {
            from,
            header,
            version,
            payload: Vec::new(),
            at: 0,
            tag: 0,
            left: 0,
            chunk: 0,
            first: true,
            time: 0,
            end: 0,
            block: 0,
            bits: Vec::new(),
            lengths: Vec::new(),
            planes: Arc::default(),
            requests: 0,
            blocks: 0,
            state: State::Goes,
            takes_cut: false,
        })
    }

    /// Takes where the trace is cut short, if it is, for its end.
    #[must_use]
    pub fn up_to_a_cut(self) -> Self {
        Self { takes_cut: true, ..self }
    }

    /// Refuses what lies behind the end of a trace that was read to it.
    ///
    /// # Errors
    /// There are more bytes, or they cannot be read.
    pub fn check_end(&mut self) -> Result<(), ModelError> {
        match self.from.read_exact(&mut [0]) {
            Err(why) if why.kind() == ErrorKind::UnexpectedEof => Ok(()),
            Ok(()) => Err(form("it has bytes behind its end".to_owned())),
            Err(why) => Err(form(format!("what is behind its end cannot be read: {why}"))),
        }
    }

    /// Whether it ended before it was over: what was given so far is whole.
    pub fn is_cut(&self) -> bool {
        self.state == State::Cut
    }

    /// Requests and blocks that were given so far.
    pub fn given(&self) -> (u64, u64) {
        (self.requests, self.blocks)
    }

    /// Whether the next item is the first of a chunk, so that one who follows a trace may wait for
    /// it.
    pub fn is_at_chunk(&self) -> bool {
        self.left == 0
    }

    /// What the trace says of itself.
    pub fn header(&self) -> Header {
        self.header
    }

    /// The next item; none behind the last.
    ///
    /// # Errors
    /// The trace is cut short, damaged, or says what cannot be.
    pub fn next_item(&mut self) -> Result<Option<Item>, ModelError> {
        while self.left == 0 {
            if self.state == State::Over || self.is_cut() && self.takes_cut {
                return Ok(None);
            }
            self.next_chunk()?;
        }
        self.left -= 1;
        let item = match self.tag {
            b'V' => self.view()?,
            b'B' => self.read_block()?,
            b'W' => {
                let number = self.block_number()?;
                Item::Words(number, self.word_bytes()?)
            }
            b'L' => Item::Lost(self.number()?),
            _ => self.request()?,
        };
        if self.left == 0 && self.at < self.payload.len() {
            return Err(self.wrong("has bytes behind its records"));
        }
        Ok(Some(item))
    }

    fn wrong(&self, why: &str) -> ModelError {
        form(format!("chunk {} {why}", self.chunk))
    }

    fn next_chunk(&mut self) -> Result<(), ModelError> {
        let read = self.read_chunk();
        if self.is_cut() && self.takes_cut { Ok(()) } else { read }
    }

    fn read_chunk(&mut self) -> Result<(), ModelError> {
        self.chunk += 1;
        let mut header = [0; CHUNK_HEADER];
        let whole = format!("{} requests and {} blocks before it are whole", self.requests, self.blocks);
        let what = format!("chunk {} or the last one", self.chunk);
        fill(&mut self.from, &mut header, &what, &whole, &mut self.state)?;
        let (records, length) = (u32_at(&header, 4), u32_at(&header, 8));
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let tags = if self.version > 2 { "VBWRLE" } else { "VBRLE" };
        if !tags.as_bytes().contains(&header[0]) || bytes > MAX_PAYLOAD {
            return Err(self.wrong(&format!("is of kind {} with {length} bytes", header[0])));
        }
        self.payload.resize(bytes, 0);
        let what = format!("chunk {}", self.chunk);
        fill(&mut self.from, &mut self.payload, &what, &whole, &mut self.state)?;
        let check = crc32c::crc32c_append(crc32c::crc32c(&header[..12]), &self.payload);
        if check != u32_at(&header, 12) {
            return Err(self.wrong("is damaged: the checksum differs"));
        }
        (self.tag, self.left, self.at) = (header[0], records, 0);
        (self.time, self.end, self.block, self.first) = (0, 0, 0, true);
        if self.tag == b'E' {
            let (requests, blocks) = (self.number()?, self.number()?);
            if (requests, blocks) != (self.requests, self.blocks) || records > 0 {
                let counted = format!("{} and {}", self.requests, self.blocks);
                return Err(
                    self.wrong(&format!("counts {requests} requests and {blocks} blocks, not {counted}"))
                );
            }
            self.state = State::Over;
        }
        Ok(())
    }

    #[inline]
    fn number(&mut self) -> Result<u64, ModelError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let Some(byte) = self.payload.get(self.at) else {
                return Err(self.wrong("ends within a record"));
            };
            self.at += 1;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(self.wrong("has a number of more than 64 bits"))
    }

    fn within(&mut self, field: &str, most: u64) -> Result<u64, ModelError> {
        let number = self.number()?;
        if number > most {
            let field = format!("{field} in chunk {}", self.chunk);
            return Err(ModelError::field(&field, &number, &format!("at most {most}")));
        }
        Ok(number)
    }

    fn small(&mut self, field: &str, most: u32) -> Result<u32, ModelError> {
        Ok(u32::try_from(self.within(field, most.into())?).unwrap_or(most))
    }

    fn view(&mut self) -> Result<Item, ModelError> {
        let length = usize::try_from(self.within("name length", 4096)?).unwrap_or(0);
        let Some(name) = self.payload.get(self.at..self.at + length) else {
            return Err(self.wrong("ends within a view's name"));
        };
        let name = printable(&String::from_utf8_lossy(name));
        self.at += length;
        let bits = self.small("bits of a view's element", MAX_PLANES)?;
        let link_bits = self.small("link bits of a view", 64)?;
        let planes = self.number()?;
        if bits == 0 || self.bits.len() >= MAX_VIEWS || planes & !View::full(bits).planes != 0 {
            let view = format!("{bits} bits and planes {planes:#x}");
            return Err(ModelError::field(&format!("view {name:?}"), &view, "planes of its bits"));
        }
        self.bits.push(bits);
        Ok(Item::View(View { name, bits, link_bits, planes }))
    }

    /// The block that a record is of, which is counted.
    fn block_number(&mut self) -> Result<u64, ModelError> {
        let last = self.header.device_bytes / BLOCK_BYTES - 1;
        let number = self.block.saturating_add(self.number()?);
        if number > last {
            let must = format!("at most {last}, the device's last block");
            return Err(ModelError::field(&format!("block in chunk {}", self.chunk), &number, &must));
        }
        self.block = number;
        self.blocks += 1;
        Ok(number)
    }

    fn stored(&mut self, field: &str) -> Result<u16, ModelError> {
        Ok(u16::try_from(self.small(field, MAX_STORED)?).unwrap_or(0))
    }

    fn word_bytes(&mut self) -> Result<WordBytes, ModelError> {
        let by = |reader: &mut Self, field| {
            if reader.version > 2 {
                let more = reader.small(field, MAX_STORED + 1)?;
                return Ok(more.checked_sub(1).and_then(|bytes| u16::try_from(bytes).ok()));
            }
            reader.stored(field).map(|bytes| Some(bytes).filter(|bytes| *bytes > 0))
        };
        Ok(WordBytes { lz4: by(self, "bytes by lz4")?, zstd: by(self, "bytes by zstd")? })
    }

    fn read_block(&mut self) -> Result<Item, ModelError> {
        let number = self.block_number()?;
        let kind = match self.number()? {
            0 => BlockKind::Coded,
            1 => BlockKind::Zeros,
            2 => BlockKind::Bypassed,
            other => {
                return Err(ModelError::field(&format!("kind of block {number}"), &other, "0, 1 or 2"));
            }
        };
        let mut block = Block { kind, ..Block::default() };
        if self.version > 1 {
            block.segment = self.within("segment of a block", MAX_DEVICE / 64)?.checked_sub(1);
            block.head = self.stored("bytes of a head")?;
            block.stream = self.stored("bytes of a stream")?;
            block.joint = u8::try_from(self.small("planes in a stream", MAX_PLANES)?).unwrap_or(0);
        }
        let count = self.within("planes of a block", MAX_PLANES.into())?;
        self.lengths.clear();
        for _ in 0..count {
            let length = self.stored("bytes of a plane")?;
            self.lengths.push(length);
        }
        // Of blocks with a stream, most have the same planes beside it: one copy of these stays in
        // a processor's cache, where a replay looks for them at each request.
        if self.lengths != *self.planes {
            self.planes = self.lengths.as_slice().into();
        }
        block.planes = Arc::clone(&self.planes);
        block.words = self.word_bytes()?;
        if usize::from(block.joint) > block.planes.len().saturating_sub(1) {
            let must = format!("fewer than the planes, {count}");
            return Err(ModelError::field(&format!("joint planes of block {number}"), &block.joint, &must));
        }
        if block.bytes() > 2 * BLOCK_BYTES {
            return Err(ModelError::field(
                &format!("planes of block {number}"),
                "more than two blocks",
                "less",
            ));
        }
        Ok(Item::Block(number, block))
    }

    #[inline]
    fn request(&mut self) -> Result<Item, ModelError> {
        if std::mem::take(&mut self.first) {
            self.time = self.number()?;
        }
        let word = self.number()?;
        let bits = match self.version {
            1 => 1,
            2 => 4,
            _ => 5,
        };
        let view = u32::try_from(word >> bits).unwrap_or(u32::MAX);
        if view as usize >= self.bits.len() {
            let must = format!("one of the {} views named before", self.bits.len());
            let field = format!("view of request {}", self.requests);
            return Err(ModelError::field(&field, &(word >> bits), &must));
        }
        let guest = self.small("guest", u32::MAX)?;
        let passed = self.number()?;
        let time_ns = self.time.checked_add(passed).filter(|time| *time <= MAX_TIME_NS);
        let Some(time_ns) = time_ns else {
            let must = format!("at most {MAX_TIME_NS} ns since the trace began");
            return Err(ModelError::field(&format!("time of request {}", self.requests), &passed, &must));
        };
        let address = self.end.wrapping_add(unzigzag(self.number()?).cast_unsigned());
        let length = self.number()?;
        let device = self.header.device_bytes;
        if !(1..=MAX_REQUEST).contains(&length) {
            let field = format!("length of request {}", self.requests);
            return Err(ModelError::field(&field, &length, &format!("from 1 to {MAX_REQUEST}")));
        }
        if address.checked_add(length).is_none_or(|end| end > device) {
            let field = format!("address of request {}", self.requests);
            let value = format!("{address:#x} with {length} bytes");
            return Err(ModelError::field(&field, &value, &format!("within the device's {device:#x} bytes")));
        }
        (self.time, self.end) = (time_ns, address + length);
        self.requests += 1;
        let is = |bit: u32| word >> bit & 1 == 1;
        let reads_told = bits > 4 && is(4);
        let served = Served { asked: is(1), fetched: is(2), by_itself: is(3), reads_told };
        let served = Some(served).filter(|_| bits > 1 && word & 0b1110 != 0);
        Ok(Item::Request(Request { time_ns, address, length, view, guest, write: is(0), served }))
    }
}
