//! Makes an image of an earlier version one of this version: `lamina image upgrade`.
//!
//! * A new file beside the image gets all that it holds, its entries coded anew. It is brought to
//!   the disk and only then takes the image's name. So whatever ends an upgrade, the name is the
//!   old image or the new one, whole. What a killed one left is overwritten by the next.
//! * That takes as much room as the image has. To change entries where they are would take less,
//!   but two versions in one index, and a crash in the middle, are more than that is worth.
//! * A device has opened the image before and left it cleanly. So no record of the journal and no
//!   staged KV window counts, and neither is copied. Nor are checkpoints: whoever opens an image
//!   on a disk makes them.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt, fchown},
    path::{Path, PathBuf},
};

use super::{
    entry::{DAMAGED, Damaged, ENTRY_BYTES, Entry, POISON, Place, Version},
    image::{Image, ImageError, Superblock, made_locked},
    snapshot::{data_in, sync_folder},
};
use crate::GRANULE_BYTES;

/// Bytes that are copied at once: whole entries.
const PIECE_BYTES: usize = 1 << 20;

/// Gives `path` an image of this version with all that `image` holds, which is open from there and
/// was left cleanly.
///
/// # Errors
/// [`ImageError`]; `image` is still there then, as it was.
pub fn upgrade(image: &Image, path: &Path) -> Result<(), ImageError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ImageError::File { path, source }
    };
    let made = unfinished(path);
    // Before it is touched: another upgrade may be at work on it.
    let file = made_locked(&made)?;
    file.set_len(0).map_err(failed(&made))?;
    let upgraded = Copying::new(image, file, &made).and_then(|copying| {
        give_away(copying.to.file(), image.file()).map_err(failed(&made))?;
        copying.copy()?;
        copying.to.file().sync_all().map_err(failed(&made))?;
        fs::rename(&made, path).map_err(failed(path))?;
        #[cfg(any(test, feature = "testing"))]
        super::failpoints::current().stored();
        sync_folder(path).map_err(failed(path))
    });
    if upgraded.is_err() {
        let _ = fs::remove_file(&made);
    }
    upgraded
}

/// Gives `made` the owner, the group and the mode of `old`, before anything is copied there.
fn give_away(made: &File, old: &File) -> io::Result<()> {
    let is = old.metadata()?;
    // Who is not root cannot give it to another owner; the group may still be theirs to give. Then
    // the mode: with the owner, bits of it go.
    if fchown(made, Some(is.uid()), Some(is.gid())).is_err() {
        let _ = fchown(made, None, Some(is.gid()));
    }
    made.set_permissions(is.permissions())
}

/// The name of an image that is being made of the one at `path`, in the same directory.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".upgrading");
    path.with_file_name(name)
}

struct Copying<'i> {
    from: &'i Image,
    to: Image,
    /// What is being made, to be told in errors.
    path: &'i Path,
    #[cfg(any(test, feature = "testing"))]
    failpoints: super::failpoints::Failpoints,
}

impl<'i> Copying<'i> {
    fn new(from: &'i Image, file: File, path: &'i Path) -> Result<Self, ImageError> {
        let old = from.superblock();
        let version = Version::default();
        // The usual store of a large device was larger than any can be now.
        let store_bytes = old.store_bytes.min(version.max_store_bytes());
        let superblock = Superblock { version, checkpoints: false, store_bytes, ..old.clone() };
        let to = Image::fill(file, path, superblock)?;
        Ok(Self {
            from,
            to,
            path,
            #[cfg(any(test, feature = "testing"))]
            failpoints: super::failpoints::current(),
        })
    }

    fn copy(&self) -> Result<(), ImageError> {
        let [_, tables, counters, _, _, gcomp, index, segments, ..] = self.from.parts();
        let [_, new_tables, new_counters, _, _, new_gcomp, new_index, new_segments, ..] = self.to.parts();
        let parts = [
            (tables, new_tables),
            (counters, new_counters),
            (gcomp, new_gcomp),
            // Before the segments: an entry that names one past the new store ends it here.
            (index, new_index.clone()),
            (segments, new_segments),
        ];
        for (from, to) in parts {
            self.copy_part(&from, &to, to == new_index)?;
        }
        Ok(())
    }

    fn copy_part(&self, from: &Range<u64>, to: &Range<u64>, is_index: bool) -> Result<(), ImageError> {
        let failed = |source| ImageError::File { path: self.path.to_owned(), source };
        let mut data = vec![0; PIECE_BYTES];
        for range in
            data_in(self.from, from.start..from.end.min(from.start + (to.end - to.start))).map_err(failed)?
        {
            // What a file system says begins and ends at pages.
            for at in range.clone().step_by(PIECE_BYTES) {
                let length = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(PIECE_BYTES);
                let piece = &mut data[..length];
                self.from.file().read_exact_at(piece, at).map_err(failed)?;
                if is_index {
                    piece.as_chunks_mut().0.iter_mut().try_for_each(|entry| self.recode(entry))?;
                }
                if piece.iter().any(|byte| *byte != 0) {
                    self.write(piece, to.start + (at - from.start)).map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    fn recode(&self, entry: &mut [u8; ENTRY_BYTES]) -> Result<(), ImageError> {
        let (old, new) = (self.from.superblock(), self.to.superblock());
        *entry = match Entry::decode(old.version, entry) {
            Ok(found) => {
                let end = |place: &Place| place.segment * GRANULE_BYTES as u64 + place.stored.bytes() as u64;
                match found.place.as_ref().map_or(0, end) {
                    end if end <= new.store_bytes => found.fitting(new.version).encode(new.version),
                    end if end <= old.store_bytes => {
                        return Err(ImageError::Store { bytes: old.store_bytes, most: new.store_bytes });
                    }
                    // It names what there is not.
                    _ => DAMAGED,
                }
            }
            Err(Damaged::Poison) => POISON,
            // Its bytes might be an entry of this version.
            Err(_) => DAMAGED,
        };
        Ok(())
    }

    fn write(&self, data: &[u8], at: u64) -> io::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        let data = self.failpoints.written(data);
        self.to.file().write_all_at(data, at)?;
        #[cfg(any(test, feature = "testing"))]
        self.failpoints.fire();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::fs::PermissionsExt,
        panic::{AssertUnwindSafe, catch_unwind},
    };

    use lamina_codec::{
        BLOCK_BYTES, Codec, Decoder, Encoder, block::Bundle, block::MAX_BUNDLE, format::Format,
        plane::PlaneMask,
    };

    use super::*;
    use crate::{
        Store, StoreError,
        cause::Why,
        failpoints::{Failpoints, Killed},
        mode::Mode,
    };

    const BLOCKS: u64 = 64;

    fn superblock() -> Superblock {
        Superblock {
            base_bytes: BLOCKS * BLOCK_BYTES as u64,
            views_bytes: 4 << 20,
            store_bytes: 4 << 20,
            mode: Mode::Trace,
            codec: Codec::Tree,
            open_windows: 2,
            partitions: Vec::new(),
            checkpoints: false,
            version: Version::One,
        }
    }

    fn opened(path: &Path) -> (Image, Store) {
        let image = Image::open(path).unwrap().unwrap();
        let store = Store::open(&image, |_| false, |(): &mut (), _, _| {}).unwrap().0;
        (image, store)
    }

    /// Every block's words; none of a block that is lost.
    fn words(store: &Store) -> Vec<Option<Vec<u8>>> {
        let read = |block| {
            let (mut bundle, mut words) = ([0; MAX_BUNDLE], [0; BLOCK_BYTES]);
            match store.fetch(block, |_| PlaneMask(u32::MAX), &mut bundle) {
                Ok(fetched) => {
                    if let Some(place) = &fetched.entry.place {
                        Decoder::new()
                            .block(&place.stored, PlaneMask(u32::MAX), &bundle, &mut words)
                            .unwrap();
                    }
                    Some(words.to_vec())
                }
                Err(StoreError::Entry { .. }) => None,
                Err(other) => panic!("{other}"),
            }
        };
        (0..BLOCKS).map(read).collect()
    }

    /// An image of version 1: blocks of every format, rewritten, poisoned, damaged, and holes.
    fn old_image(path: &Path) -> Vec<Option<Vec<u8>>> {
        let image = Image::create(path, superblock()).unwrap();
        let store = Store::open(&image, |_| false, |(): &mut (), _, _| {}).unwrap().0;
        let mut bundle = Bundle::new();
        for block in 0..BLOCKS - 8 {
            let format = Format::ALL[usize::try_from(block % 8).unwrap()];
            for rewrite in 0..=block % 3 * 150 {
                let noise = lamina_codec::testing::bytes(block + rewrite, BLOCK_BYTES);
                let words: Vec<_> =
                    noise.iter().zip((1..=9).cycle()).map(|(byte, most)| byte % most).collect();
                Encoder::new().block(format, Codec::Tree, &words.try_into().unwrap(), &mut bundle);
                store.replace(block).unwrap().publish(&bundle).unwrap();
            }
        }
        store.poison(3, &Why::found(), |_| true).unwrap().unwrap();
        let [.., index, _, _, _, _, _, _] = image.parts();
        // Damaged, but with a check that matches: it must not become an entry that is none.
        let at = index.start + 5 * ENTRY_BYTES as u64;
        let mut entry = [0; ENTRY_BYTES];
        image.file().read_exact_at(&mut entry, at).unwrap();
        entry[7] |= 0x20;
        entry[10..14].fill(0);
        let check = crc32c::crc32c(&entry).to_le_bytes();
        entry[10..14].copy_from_slice(&check);
        image.file().write_all_at(&entry, at).unwrap();
        words(&store)
    }

    #[test]
    fn an_upgraded_image_holds_the_same_and_a_kill_leaves_the_old_one_or_the_new() {
        let folder = tempfile::tempdir().unwrap();
        let (kept, path) = (folder.path().join("kept"), folder.path().join("image"));
        let wanted = old_image(&kept);
        assert_eq!(wanted.iter().filter(|words| words.is_none()).count(), 2);
        let failpoints = Failpoints::none();
        failpoints.make_current();
        let (mut old, mut new) = (0, 0);
        for stores in 1.. {
            fs::copy(&kept, &path).unwrap();
            let image = Image::open(&path).unwrap().unwrap();
            failpoints.kill_after(stores);
            let upgraded = catch_unwind(AssertUnwindSafe(|| upgrade(&image, &path)));
            failpoints.kill_after(i64::MAX);
            drop(image);
            let (image, store) = opened(&path);
            let version = image.superblock().version;
            assert!(words(&store) == wanted, "a kill at store {stores} leaves other blocks of {version:?}");
            match upgraded {
                Ok(done) => {
                    done.unwrap();
                    assert!(version == Version::Two && !unfinished(&path).exists());
                    break;
                }
                Err(why) => assert!(why.is::<Killed>(), "it died of something else"),
            }
            *(if version == Version::One { &mut old } else { &mut new }) += 1;
        }
        assert!(old > 1 && new == 1, "{old} kills left the old image, {new} the new one");
        // It is written as any other.
        let (_image, store) = opened(&path);
        let mut bundle = Bundle::new();
        Encoder::new().block(Format::Fp32, Codec::Tree, &[7; BLOCK_BYTES], &mut bundle);
        for block in 0..BLOCKS {
            store.replace(block).unwrap_or_else(|_| store.replace_damaged(block)).publish(&bundle).unwrap();
        }
        assert!(words(&store).iter().all(|words| words.as_ref().unwrap() == &[7; BLOCK_BYTES]));
    }

    #[test]
    fn an_upgraded_image_has_the_owner_and_the_mode_that_it_had() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let image = Image::create(&path, superblock()).unwrap();
        if image.file().metadata().unwrap().uid() != 0 {
            return lamina_skipped::test("only root gives files to others");
        }
        fchown(image.file(), Some(1234), Some(2345)).unwrap();
        image.file().set_permissions(Permissions::from_mode(0o640)).unwrap();
        upgrade(&image, &path).unwrap();
        drop(image);
        let is = fs::metadata(&path).unwrap();
        assert_eq!((is.uid(), is.gid(), is.mode() & 0o7777), (1234, 2345, 0o640));
        assert_eq!(Image::open(&path).unwrap().unwrap().superblock().version, Version::Two);
    }

    #[test]
    fn an_image_with_more_than_entries_can_name_now_stays_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let most = Version::Two.max_store_bytes();
        let image = Image::create(&path, Superblock { store_bytes: 2 * most, ..superblock() }).unwrap();
        upgrade(&image, &path).unwrap();
        drop(image);
        assert_eq!(Image::open(&path).unwrap().unwrap().superblock().store_bytes, most);
        fs::remove_file(&path).unwrap();
        let image = Image::create(&path, Superblock { store_bytes: 2 * most, ..superblock() }).unwrap();
        let mut bundle = Bundle::new();
        let mut words = [0; BLOCK_BYTES];
        words
            .iter_mut()
            .zip(lamina_codec::testing::bytes(3, BLOCK_BYTES))
            .for_each(|(word, byte)| *word = byte);
        Encoder::new().block(Format::Bf16, Codec::Tree, &words, &mut bundle);
        let stored = bundle.stored.clone().unwrap();
        let place = Place { segment: most / 64, stored, lossy: false, difference: false };
        let entry = Entry { epoch: 1, place: Some(place) }.encode(Version::One);
        let [.., index, _, _, _, _, _, _] = image.parts();
        image.file().write_all_at(&entry, index.start).unwrap();
        let why = upgrade(&image, &path).unwrap_err();
        assert!(matches!(why, ImageError::Store { .. }), "{why}");
        assert!(!unfinished(&path).exists());
        drop(image);
        assert_eq!(Image::open(&path).unwrap().unwrap().superblock().version, Version::One);
    }
}
