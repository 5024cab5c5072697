//! Writing a trace.

use std::io::{self, Write};

use super::{
    Block, BlockKind, CHUNK_HEADER, HEADER, Header, MAGIC, MAX_PAYLOAD, Request, Seen, Served, VERSION, View,
    WordBytes, zigzag,
};

/// Bytes at which a chunk is written.
const CHUNK: usize = 1 << 16;

/// Chunks that are being filled, and where they go. What [`Writer::finish`] has not ended is a
/// trace that was cut short.
pub struct Writer<W: Write> {
    out: W,
    tag: u8,
    payload: Vec<u8>,
    records: u32,
    /// The time, the end of the last request and the last block, of this chunk.
    time: u64,
    end: u64,
    block: u64,
    now: u64,
    requests: u64,
    blocks: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// It cannot be written, or no reader takes its header.
    pub fn new(mut out: W, header: Header) -> io::Result<Self> {
        header.check().map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = u8::from(header.seen == Seen::Lines);
        bytes[16..24].copy_from_slice(&header.device_bytes.to_le_bytes());
        let check = crc32c::crc32c(&bytes[..24]);
        bytes[24..28].copy_from_slice(&check.to_le_bytes());
        out.write_all(&bytes)?;
        Ok(Self {
            out,
            tag: 0,
            payload: Vec::with_capacity(2 * CHUNK),
            records: 0,
            time: 0,
            end: 0,
            block: 0,
            now: 0,
            requests: 0,
            blocks: 0,
        })
    }

    /// Names a view, whose number is how many were named before.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn view(&mut self, view: &View) -> io::Result<()> {
        self.begin(b'V')?;
        self.number(view.name.len() as u64);
        self.payload.extend_from_slice(view.name.as_bytes());
        self.number(view.bits.into());
        self.number(view.link_bits.into());
        self.number(view.planes);
        self.records += 1;
        Ok(())
    }

    /// Says how a block is stored from now on.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn block(&mut self, number: u64, block: &Block) -> io::Result<()> {
        self.begin_block(b'B', number)?;
        self.number(match block.kind {
            BlockKind::Coded => 0,
            BlockKind::Zeros => 1,
            BlockKind::Bypassed => 2,
        });
        self.number(block.segment.map_or(0, |line| line.saturating_add(1)));
        self.number(block.head.into());
        self.number(block.stream.into());
        self.number(block.joint.into());
        self.number(block.planes.len() as u64);
        for plane in &*block.planes {
            self.number(u64::from(*plane));
        }
        self.end_block(block.words);
        Ok(())
    }

    /// Says what a block takes as words from now on.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn words(&mut self, number: u64, words: WordBytes) -> io::Result<()> {
        self.begin_block(b'W', number)?;
        self.end_block(words);
        Ok(())
    }

    fn begin_block(&mut self, tag: u8, number: u64) -> io::Result<()> {
        // Within a chunk blocks follow each other upwards.
        if self.tag == tag && self.records > 0 && number <= self.block {
            self.flush()?;
        }
        self.begin(tag)?;
        self.number(number - self.block);
        self.block = number;
        Ok(())
    }

    fn end_block(&mut self, words: WordBytes) {
        for bytes in [words.lz4, words.zstd] {
            self.number(bytes.map_or(0, |bytes| u64::from(bytes) + 1));
        }
        self.records += 1;
        self.blocks += 1;
    }

    /// Adds a request, which is not earlier than the one before.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn request(&mut self, request: &Request) -> io::Result<()> {
        self.begin(b'R')?;
        if self.records == 0 {
            self.time = self.now;
            self.number(self.now);
        }
        let time = request.time_ns.max(self.time);
        let served = request.served.map_or(0, |Served { asked, fetched, by_itself, reads_told }| {
            [asked, fetched, by_itself, reads_told]
                .into_iter()
                .rev()
                .fold(0, |bits, bit| (bits | u64::from(bit)) << 1)
        });
        self.number(u64::from(request.view) << 5 | served | u64::from(request.write));
        self.number(request.guest.into());
        self.number(time - self.time);
        self.number(zigzag(request.address.wrapping_sub(self.end).cast_signed()));
        self.number(request.length);
        (self.time, self.now) = (time, time);
        self.end = request.address.wrapping_add(request.length);
        self.records += 1;
        self.requests += 1;
        Ok(())
    }

    /// Says that so many requests were lost here.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn lost(&mut self, requests: u64) -> io::Result<()> {
        self.begin(b'L')?;
        self.number(requests);
        self.records += 1;
        Ok(())
    }

    /// Writes what was added so far, so that a reader who follows has it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.out.flush()
    }

    /// Writes a chunk of nothing, which readers skip: it shows whether anybody still takes the
    /// trace.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep_alive(&mut self) -> io::Result<()> {
        self.flush()?;
        self.tag = b'L';
        self.chunk()?;
        self.out.flush()
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush()?;
        self.tag = b'E';
        self.number(self.requests);
        self.number(self.blocks);
        self.chunk()?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn begin(&mut self, tag: u8) -> io::Result<()> {
        if self.tag != tag || self.payload.len() >= CHUNK {
            self.flush()?;
            self.tag = tag;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.records > 0 { self.chunk() } else { Ok(()) }
    }

    fn chunk(&mut self) -> io::Result<()> {
        debug_assert!(self.payload.len() <= MAX_PAYLOAD);
        let mut header = [0; CHUNK_HEADER];
        header[0] = self.tag;
        header[4..8].copy_from_slice(&self.records.to_le_bytes());
        let length = u32::try_from(self.payload.len()).map_err(io::Error::other)?;
        header[8..12].copy_from_slice(&length.to_le_bytes());
        let check = crc32c::crc32c_append(crc32c::crc32c(&header[..12]), &self.payload);
        header[12..16].copy_from_slice(&check.to_le_bytes());
        self.out.write_all(&header)?;
        self.out.write_all(&self.payload)?;
        self.payload.clear();
        (self.records, self.time, self.end, self.block) = (0, 0, 0, 0);
        Ok(())
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.payload.push(u8::try_from(number & 0x7f).unwrap_or(0) | 0x80);
            number >>= 7;
        }
        self.payload.push(u8::try_from(number).unwrap_or(0));
    }
}
