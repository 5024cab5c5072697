//! The opened device: both windows, the directory, and a span for (tensor, view).
//!
//! Where the windows are: as given; else the environment (`LAMINA_BASE`, `LAMINA_VIEWS`); else the
//! devdax devices in sysfs; else the driver's file of a virtio device; else the PCI devices with
//! shared memory. A view is named as the directory spells it; `base` names the tensor's own bytes
//! in the base window, the only ones that can be stored to. Nothing the directory says is believed
//! before it was checked against the windows.

use std::{
    env,
    path::{Path, PathBuf},
};

use lamina_abi::{DIRECTORY_BYTES, Directory};

use crate::{
    Access, Error, Span, Window, WindowError,
    attach::begins_with_directory,
    ctl::Ctl,
    dax::{self, Dax, Use},
    directory, ivshmem, shmem,
    sysfs::Tree,
    topology::{Role, dax_serial},
    window::fits,
};

/// The name under which a tensor's own bytes are asked for.
pub const BASE: &str = "base";

/// What to open, and how.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The base window; none to look for it, unless `views` is given.
    pub base: Option<PathBuf>,
    /// The views window; none to look for it.
    pub views: Option<PathBuf>,
    /// The control port; none to look for it.
    pub ctl: Option<PathBuf>,
    /// What to map the base window for.
    pub base_access: Access,
    /// What to map the views window for. The device ignores stores to it.
    pub views_access: Access,
    /// The kernel's files.
    pub tree: Tree,
}

impl OpenOptions {
    /// Paths from `LAMINA_BASE`, `LAMINA_VIEWS` and `LAMINA_CTL`, loads only.
    pub fn from_env() -> Self {
        let path = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            base: path("LAMINA_BASE"),
            views: path("LAMINA_VIEWS"),
            ctl: path("LAMINA_CTL"),
            base_access: Access::Read,
            views_access: Access::Read,
            tree: Tree::system(),
        }
    }
}

/// Where the bytes of (tensor, view) are, all of it checked.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Location {
    /// The tensor.
    pub tensor: String,
    /// The view, or `base`.
    pub view: String,
    /// The window that holds the bytes.
    pub window: Role,
    /// Offset in the window, in bytes.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// Elements.
    pub elements: u64,
}

/// An opened device.
#[derive(Debug)]
pub struct Lamina {
    base: Option<Window>,
    views: Window,
    directory: Directory,
    ctl: Option<PathBuf>,
    tree: Tree,
}

impl Lamina {
    /// Maps the windows and reads the directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Window`], [`Error::Directory`], [`Error::ShortWindow`].
    pub fn open(options: &OpenOptions) -> Result<Self, Error> {
        let tree = options.tree.clone();
        let (base, views) = match (&options.base, &options.views) {
            (base, Some(views)) => (base.clone().map(Place::File), Place::File(views.clone())),
            (Some(_), None) => {
                let why = "a base window was given, but the directory is in the views window".into();
                return Err(Error::NotFound { why });
            }
            (None, None) => discover(&tree)?,
        };
        let views = views.open(Role::Views, options.views_access, &tree)?;
        let directory = whole(&views, &tree, options.ctl.as_deref())?;
        let base = base.map(|place| place.open(Role::Base, options.base_access, &tree)).transpose()?;
        if let Some(base) = &base
            && base.bytes() < directory.base_bytes
        {
            return Err(Error::ShortWindow {
                path: base.path().into(),
                bytes: base.bytes(),
                stated: directory.base_bytes,
            });
        }
        Ok(Self { base, views, directory, ctl: options.ctl.clone(), tree })
    }

    /// The directory as it was last read, with the tensors and views that it has no room for if the
    /// control port told of them. It is incomplete only if there are such and nobody did.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Reads the directory again.
    ///
    /// # Errors
    /// [`Error::Directory`], [`Error::ShortWindow`].
    pub fn refresh(&mut self) -> Result<&Directory, Error> {
        self.directory = whole(&self.views, &self.tree, self.ctl.as_deref())?;
        Ok(&self.directory)
    }

    /// The window of `role`.
    ///
    /// # Errors
    /// [`Error::NoBase`].
    pub fn window(&self, role: Role) -> Result<&Window, Error> {
        match role {
            Role::Base => self.base.as_ref().ok_or(Error::NoBase),
            Role::Views => Ok(&self.views),
        }
    }

    /// Where (tensor, view) is.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::NoView`], [`Error::NoBase`], [`Error::Lie`].
    pub fn locate(&self, tensor: &str, view: &str) -> Result<Location, Error> {
        let directory = &self.directory;
        let entry = directory.tensor(tensor).ok_or_else(|| Error::NoTensor {
            name: tensor.into(),
            count: directory.tensors.len(),
            is_incomplete: directory.is_incomplete,
        })?;
        let lie = |field, value: u128, bound| Error::Lie {
            what: format!("view {view:?} of tensor {tensor:?}"),
            field,
            value,
            bound,
        };
        let (window, offset, bytes, elements) = if view == BASE {
            let base = self.window(Role::Base)?;
            if !fits(entry.dpa, entry.length, base.bytes()) {
                return Err(lie("its end", u128::from(entry.dpa) + u128::from(entry.length), base.bytes()));
            }
            (Role::Base, entry.dpa, entry.length, entry.elements)
        } else {
            let found = directory.view(tensor, view).ok_or_else(|| Error::NoView {
                tensor: tensor.into(),
                spelling: view.into(),
                known: self.views_of(tensor).join(", "),
            })?;
            if found.offset < DIRECTORY_BYTES {
                return Err(lie("its offset", found.offset.into(), DIRECTORY_BYTES));
            }
            if !fits(found.offset, found.length, self.views.bytes()) {
                let end = u128::from(found.offset) + u128::from(found.length);
                return Err(lie("its end", end, self.views.bytes()));
            }
            let needed = (u128::from(found.elements) * u128::from(found.bits)).div_ceil(8);
            if needed > found.length.into() {
                return Err(lie("bytes of its elements", needed, found.length));
            }
            (Role::Views, found.offset, found.length, found.elements)
        };
        Ok(Location { tensor: tensor.into(), view: view.into(), window, offset, bytes, elements })
    }

    /// The memory of (tensor, view), to load from, or, for `base`, to store to.
    ///
    /// # Errors
    /// As [`Lamina::locate`].
    pub fn span(&self, tensor: &str, view: &str) -> Result<Span<'_>, Error> {
        let location = self.locate(tensor, view)?;
        Ok(self.window(location.window)?.span(location.offset, location.bytes)?)
    }

    /// The spellings that can be asked for `tensor`: its views, and `base` where that is mapped.
    pub fn views_of(&self, tensor: &str) -> Vec<String> {
        let directory = &self.directory;
        let index = directory.tensors.iter().position(|entry| entry.name == tensor);
        let views = directory.views.iter().filter(|view| Some(view.tensor as usize) == index);
        let base = self.base.as_ref().map(|_| BASE.to_owned());
        base.into_iter().chain(views.map(|view| view.spelling.clone())).collect()
    }

    /// A control connection. The port is one program's at a time: drop it soon.
    ///
    /// # Errors
    /// [`Error::Ctl`].
    pub fn ctl(&self) -> Result<Ctl, Error> {
        open_ctl(&self.tree, self.ctl.as_deref())
    }

    /// Makes base stores of before visible to view reads after; `range` is offset and length in the
    /// base window, none for all of it.
    ///
    /// # Errors
    /// [`Error::Ctl`].
    pub fn flush(&self, range: Option<(u64, u64)>) -> Result<(), Error> {
        self.ctl()?.flush(range)?;
        Ok(())
    }

    /// Drops what this host holds of `range` (offset and length in the base window, none for all of
    /// it), where hosts share it without coherence: the next loads see what others have flushed.
    /// The memory stays mapped.
    ///
    /// # Errors
    /// [`Error::Ctl`].
    pub fn invalidate(&self, range: Option<(u64, u64)>) -> Result<(), Error> {
        self.ctl()?.invalidate(range)?;
        Ok(())
    }
}

/// The control port at `path`, else the virtio port, else the driver's file, else the mailbox.
///
/// # Errors
/// [`Error::Ctl`].
pub fn open_ctl(tree: &Tree, path: Option<&Path>) -> Result<Ctl, Error> {
    Ok(path.map_or_else(|| Ctl::find(tree), Ctl::open)?)
}

/// The directory, and what it has no room for as the control port tells.
fn whole(views: &Window, tree: &Tree, ctl: Option<&Path>) -> Result<Directory, Error> {
    let directory = checked(views)?;
    if !directory.is_incomplete {
        return Ok(directory);
    }
    let told = open_ctl(tree, ctl).and_then(|mut ctl| directory::complete(&directory, &mut ctl));
    Ok(told.unwrap_or_else(|error| {
        tracing::debug!(%error, "the directory is incomplete, and nobody tells the rest");
        directory
    }))
}

/// The directory, with the window sizes it states held against the window it came from.
fn checked(views: &Window) -> Result<Directory, Error> {
    let directory = directory::read(views)?;
    if directory.views_bytes > views.bytes() {
        return Err(Error::ShortWindow {
            path: views.path().into(),
            bytes: views.bytes(),
            stated: directory.views_bytes,
        });
    }
    Ok(directory)
}

/// Where a window is.
enum Place {
    /// A file that is nothing else.
    File(PathBuf),
    /// A driver's file, which shows both.
    Driver(PathBuf),
}

impl Place {
    fn open(&self, role: Role, access: Access, tree: &Tree) -> Result<Window, WindowError> {
        match self {
            Self::File(path) => Window::open(path, access, tree),
            Self::Driver(node) => Window::of_driver(node, role, access),
        }
    }
}

/// The base window, if it is mapped at all, and the views window, from sysfs.
fn discover(tree: &Tree) -> Result<(Option<Place>, Place), Error> {
    let all: Vec<(Dax, Option<Role>)> = dax::list(tree)
        .into_iter()
        .filter(|dax| dax.driver == Some(Use::Devdax))
        .map(|dax| {
            let role = dax_serial(tree, &dax.name).and_then(Role::of_serial);
            (dax, role)
        })
        .collect();
    let by_serial = |role| all.iter().position(|(_, found)| *found == Some(role));
    // Backwards, so that the base, usually the first, is not read for this.
    let views = by_serial(Role::Views).or_else(|| {
        (0..all.len())
            .rev()
            .find(|index| all[*index].1.is_none() && begins_with_directory(tree, &all[*index].0).is_ok())
    });
    let names = || all.iter().map(|(dax, _)| dax.name.as_str()).collect::<Vec<_>>().join(", ");
    // Without CXL memory, the windows may be shared memory.
    if views.is_none()
        && let Some(node) = shmem::node(tree)
    {
        return Ok((Some(Place::Driver(node.clone())), Place::Driver(node)));
    }
    if views.is_none()
        && let Some(bars) = ivshmem::windows(tree)?
    {
        return Ok((bars.base.map(|bar| Place::File(bar.node)), Place::File(bars.views.node)));
    }
    let views = views.ok_or_else(|| Error::NotFound {
        why: match all.len() {
            0 => "there are no devdax devices".into(),
            _ => format!("none of {} begins with a directory", names()),
        },
    })?;
    let base = by_serial(Role::Base).or_else(|| {
        let mut rest = (0..all.len()).filter(|index| *index != views && all[*index].1.is_none());
        // A third device could be anybody's: then there is no telling.
        rest.next().filter(|_| rest.next().is_none())
    });
    let file = |index: usize| Place::File(all[index].0.node.clone());
    Ok((base.map(file), file(views)))
}
