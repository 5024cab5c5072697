//! Parts of a file that are of another class than the file: chunks of a pool, each of what its
//! nodes keep in it.
//!
//! * A part's class is written nowhere but in where its bytes lie: in a slab of that class. Whoever
//!   makes a part lie nowhere, by a hole, makes it the file's own again.
//! * What is said of a part keeps its bytes. They move to another slab, in one record.
//! * A part's units are a multiple of the file's, or the file's of them: so what is cut off the
//!   file is whole units of either.
//! * A part begins with a unit of its class, whatever the offset. What is behind its last whole
//!   unit is the file's own.

use std::ops::Range;

use lamina_codec::format::Format;
use lamina_device::layout::Layout;

use super::class::Class;
use super::error::FileError;
use super::extents::{Extents, Piece, held};
use super::state::Change;
use super::{Caller, Core, Files, space};

/// The attribute that says what a part of a file is, each time it is set: `OFFSET+LENGTH`, and
/// behind it a format and perhaps a layout, or nothing for what the file is.
pub const PART: &[u8] = b"user.lamina.class";

const FORM: FileError = FileError::Invalid { what: "a part's class is OFFSET+LENGTH[ FORMAT[ KV]]" };
const UNEVEN: FileError = FileError::Invalid { what: "the part does not end with units of the file" };

/// What is said of a part: `None` is the file's own class.
fn of_text(value: &[u8]) -> Result<(Range<u64>, Option<Class>), FileError> {
    let text = std::str::from_utf8(value).map_err(|_| FORM)?;
    let (range, class) = text.split_once(' ').map_or((text, None), |(range, class)| (range, Some(class)));
    let (start, length) = range.split_once('+').ok_or(FORM)?;
    let number = |text: &str| text.parse::<u64>().map_err(|_| FORM);
    let (start, length) = (number(start)?, number(length)?);
    let end = start.checked_add(length).ok_or(FileError::TooLarge { bytes: start })?;
    Ok((start..end, class.map(Class::of_text).transpose()?))
}

/// Where a part is, and its format and layout: none if it is what the whole is.
pub type SaidOfPart = (Range<u64>, Option<(Format, Layout)>);

/// What the value of [`PART`] says.
///
/// # Errors
/// [`FileError::Invalid`], [`FileError::TooLarge`] and what formats and layouts refuse.
pub fn said_of_part(value: &[u8]) -> Result<SaidOfPart, FileError> {
    let (range, class) = of_text(value)?;
    Ok((range, class.map(|class| (class.format(), class.layout()))))
}

impl Files {
    /// Has a part of a file be of a class from now on, as the value of [`PART`] says.
    pub(crate) fn set_class(&self, caller: Caller, inode: u64, value: &[u8]) -> Result<(), FileError> {
        let (range, class) = of_text(value)?;
        let gate = self.gate(inode)?;
        let _alone = gate.write();
        let (pieces, parts) = {
            let core = self.core.lock();
            if core.is_done(caller) {
                return Ok(());
            }
            let node = core.state.file(inode)?;
            let own = node.class().without_loss()?;
            let class = class.unwrap_or(own);
            let (part, file) = (class.unit(), own.unit());
            if !part.is_multiple_of(file) && !file.is_multiple_of(part) {
                return Err(FileError::Units { part, file });
            }
            let end = node.meta.size;
            if range.end > end {
                return Err(FileError::TooLarge { bytes: range.end });
            }
            let rest = range.end - (range.end - range.start) % class.unit();
            if [range.start, rest, range.end].iter().any(|at| !at.is_multiple_of(own.unit())) {
                return Err(UNEVEN);
            }
            let pieces = node.extents.pieces(&range);
            let bytes = |places: &[Range<u64>]| places.iter().map(|at| at.end - at.start).sum::<u64>();
            if bytes(&held(&core.space.whole(&own, &pieces))) != bytes(&held(&pieces)) {
                return Err(UNEVEN);
            }
            let parts = [(range.start..rest, class), (rest..range.end, own)];
            // Holes are the file's own.
            let is_so = |(part, class): &(Range<u64>, Class)| {
                let pieces = node.extents.pieces(part);
                let is_of = |place: &Range<u64>| core.space.is_of(class, place);
                held(&pieces).iter().all(is_of) && (*class == own || pieces.iter().all(|at| at.dpa.is_some()))
            };
            if parts.iter().all(is_so) {
                return Ok(());
            }
            let wanted = parts.map(|(part, class)| {
                let all = if class == own { node.extents.pieces(&part) } else { vec![whole(part)] };
                let is_wanted = |piece: &&Piece| class != own || piece.dpa.is_some();
                let ranges = all.iter().filter(is_wanted).map(|piece| piece.at..piece.at + piece.length);
                (ranges.collect::<Vec<_>>(), class)
            });
            (pieces, wanted)
        };
        let mut changes = Vec::new();
        if pieces.iter().any(|piece| piece.dpa.is_some()) {
            changes.push(Change::Cut { inode, at: range.start, length: range.end - range.start });
        }
        let (mut taken, mut to) = (Vec::new(), Extents::default());
        let moved = self.take_parts(inode, &parts, &mut changes, &mut taken, &mut to).and_then(|()| {
            pieces.iter().try_for_each(|piece| self.copy(piece, &to))?;
            let mut core = self.core.lock();
            self.commit(&mut core, changes, caller, false)
        });
        // What was not taken up, or is not used any more.
        self.free_alone(if moved.is_ok() { held(&pieces) } else { taken });
        moved
    }

    fn take_parts(
        &self,
        inode: u64,
        parts: &[(Vec<Range<u64>>, Class)],
        changes: &mut Vec<Change>,
        taken: &mut Vec<Range<u64>>,
        to: &mut Extents,
    ) -> Result<(), FileError> {
        for (ranges, class) in parts {
            for range in ranges {
                let mut at = range.start;
                let places = self.take(&mut self.core.lock(), class, range.end - range.start)?;
                for (dpa, length) in places {
                    changes.push(Change::Map { inode, at, dpa, length });
                    to.insert(at, dpa, length);
                    taken.push(dpa..dpa + length);
                    at += length;
                }
            }
        }
        Ok(())
    }

    /// Bytes that are stored of a file, by class: of what is as each text says, which is what is
    /// said of a part; nothing said is what the file is.
    ///
    /// # Errors
    /// What the device says.
    pub fn stored_by_class(&self, inode: u64, classes: &[&str]) -> Result<Vec<u64>, FileError> {
        let gate = self.gate(inode)?;
        let _shared = gate.read();
        let places = {
            let core = self.core.lock();
            let node = core.state.file(inode)?;
            let own = node.class();
            // One that cannot be is nobody's.
            let of = |text: &&str| if text.is_empty() { Some(own) } else { Class::of_text(text).ok() };
            let known: Vec<_> = classes.iter().map(of).collect();
            let mut places = Vec::new();
            for (at, dpa, length) in node.extents.all() {
                let length = length.min(node.meta.size.saturating_sub(at));
                for (class, part) in core.space.classes_of(&(dpa..dpa + length)) {
                    let number = known.iter().position(|known| *known == Some(class));
                    let slabs = core.space.slabs_of(&part);
                    places.extend(number.into_iter().flat_map(|number| {
                        slabs.clone().into_iter().map(move |(slab, range)| (number, slab, range))
                    }));
                }
            }
            places
        };
        let mut stored = vec![0; classes.len()];
        for (number, slab, range) in places {
            stored[number] += space::stored(&self.device, &slab, range)?;
        }
        Ok(stored)
    }
}

fn whole(range: Range<u64>) -> Piece {
    Piece { at: range.start, length: range.end - range.start, dpa: None }
}

/// What unmaps a range of a file, whole units of the file's class, and the places that are free by
/// that. Of parts of other classes some may stay mapped at the range's ends.
pub(crate) fn cuts(
    core: &Core,
    inode: u64,
    range: &Range<u64>,
) -> Result<(Vec<Change>, Vec<Range<u64>>), FileError> {
    let node = core.state.file(inode)?;
    let (own, pieces) = (node.class(), node.extents.pieces(range));
    let places = held(&pieces);
    if places.iter().all(|place| core.space.is_of(&own, place)) {
        let length = range.end - range.start;
        return Ok((vec![Change::Cut { inode, at: range.start, length }], places));
    }
    let whole = core.space.whole(&own, &pieces);
    let cut = |piece: &Piece| Change::Cut { inode, at: piece.at, length: piece.length };
    Ok((whole.iter().map(cut).collect(), held(&whole)))
}
