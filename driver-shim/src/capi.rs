//! The C interface; `include/lamina.h` states its rules.
//!
//! Every function here is a thin coat over the library: it checks pointers, turns errors into a
//! return value and the thread's last error, and lets no panic through.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void},
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    ptr,
};

use lamina_abi::Layout;

use crate::{Access, Lamina, NewTensor, OpenOptions, UpOptions, sysfs::Tree, up};

const WRITABLE: c_uint = 1;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// What `struct lamina` is on this side.
pub(crate) struct Handle {
    lamina: Lamina,
    tensors: Vec<[CString; 3]>,
    views: Vec<CString>,
}

impl Handle {
    fn new(lamina: Lamina) -> Self {
        let mut handle = Self { lamina, tensors: Vec::new(), views: Vec::new() };
        handle.name();
        handle
    }

    /// Makes the C strings of the directory.
    fn name(&mut self) {
        let directory = self.lamina.directory();
        self.tensors = directory
            .tensors
            .iter()
            .map(|tensor| [c_string(&tensor.name), c_string(&tensor.shape), c_string(&tensor.format)])
            .collect();
        self.views = directory.views.iter().map(|view| c_string(&view.spelling)).collect();
    }
}

/// `struct lamina_tensor`.
#[repr(C)]
pub(crate) struct Tensor {
    name: *const c_char,
    shape: *const c_char,
    format: *const c_char,
    dpa: u64,
    length: u64,
    elements: u64,
    layout: u32,
    kv_channels: u32,
    kv_window: u32,
}

/// `struct lamina_view`.
#[repr(C)]
pub(crate) struct View {
    spelling: *const c_char,
    tensor: u64,
    offset: u64,
    length: u64,
    elements: u64,
    bits: u32,
    scale_exp: i32,
}

/// `struct lamina_new_tensor`.
#[repr(C)]
pub(crate) struct NewTensorSpec {
    name: *const c_char,
    format: *const c_char,
    length: u64,
    kv_channels: u32,
    kv_window: u32,
    codec: *const c_char,
    lossy: *const c_char,
    base: *const c_char,
}

/// Text with a zero byte inside ends there, as C would read it.
fn c_string(text: &str) -> CString {
    CString::new(text.split('\0').next().unwrap_or_default()).unwrap_or_default()
}

fn fail(message: &str) {
    LAST_ERROR.with(|last| *last.borrow_mut() = c_string(message));
}

/// Runs `body`, keeping errors and panics on this side; none after either.
fn guard<T>(body: impl FnOnce() -> Result<T, String>) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Some(value),
        Ok(Err(message)) => {
            fail(&message);
            None
        }
        Err(_) => {
            fail("lamina-shim failed inside; this is a bug, please report it with the steps that led here");
            None
        }
    }
}

fn status(done: Option<()>) -> c_int {
    done.map_or(-1, |()| 0)
}

fn text(value: &impl ToString) -> String {
    value.to_string()
}

/// The string at `pointer`; none for a null pointer.
///
/// # Safety
/// `pointer` is null or points to a zero-terminated string that lives as long as `'a`.
unsafe fn c_str<'a>(pointer: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the caller's promise, and not null.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}

/// # Safety
/// `pointer` is null or points to a zero-terminated string that lives as long as `'a`.
unsafe fn name<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { c_str(pointer) }.ok_or_else(|| format!("{what} is NULL"))?;
    found.to_str().map_err(|_| format!("{what} is not UTF-8"))
}

/// The same, of what need not be said.
///
/// # Safety
/// As [`name`].
unsafe fn said(pointer: *const c_char, what: &str) -> Result<Option<String>, String> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { name(pointer, what) }.map(str::to_owned)).transpose()
}

/// # Safety
/// `handle` is null or came from `lamina_open` and was not closed.
unsafe fn shared<'a>(handle: *const Handle) -> Result<&'a Handle, String> {
    // SAFETY: the caller's promise; header rule: nobody has it exclusively meanwhile.
    unsafe { handle.as_ref() }.ok_or_else(|| "the lamina handle is NULL".into())
}

/// # Safety
/// `handle` is null or came from `lamina_open` and was not closed, and no other thread uses it.
unsafe fn exclusive<'a>(handle: *mut Handle) -> Result<&'a mut Handle, String> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_mut() }.ok_or_else(|| "the lamina handle is NULL".into())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn lamina_up() -> c_int {
    let body = || up(&Tree::system(), &UpOptions::default()).map(drop).map_err(|error| text(&error));
    status(guard(body))
}

/// # Safety
/// `base` and `views` are null or point to zero-terminated strings.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_open(
    base: *const c_char,
    views: *const c_char,
    flags: c_uint,
) -> *mut Handle {
    let body = || {
        if flags & !WRITABLE != 0 {
            return Err(format!("flags {flags:#x}: only LAMINA_WRITABLE ({WRITABLE:#x}) is known"));
        }
        let path = |given: &CStr| PathBuf::from(OsStr::from_bytes(given.to_bytes()));
        let mut options = OpenOptions::from_env();
        // SAFETY: the caller's promise.
        let given = unsafe { (c_str(base).map(path), c_str(views).map(path)) };
        if given != (None, None) {
            (options.base, options.views) = given;
        }
        if flags & WRITABLE != 0 {
            options.base_access = Access::ReadWrite;
        }
        let lamina = Lamina::open(&options).map_err(|error| text(&error))?;
        Ok(Box::into_raw(Box::new(Handle::new(lamina))))
    };
    guard(body).unwrap_or(ptr::null_mut())
}

/// # Safety
/// `handle` is null or came from `lamina_open`, was not closed, and is not used by anybody any
/// more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_close(handle: *mut Handle) {
    if !handle.is_null() {
        // SAFETY: it came from `Box::into_raw`, and the caller gives it up.
        let handle = unsafe { Box::from_raw(handle) };
        guard(move || {
            drop(handle);
            Ok(())
        });
    }
}

/// # Safety
/// As [`exclusive`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_refresh(handle: *mut Handle) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { exclusive(handle) }?;
        handle.lamina.refresh().map_err(|error| text(&error))?;
        handle.name();
        Ok(())
    }))
}

/// # Safety
/// As [`shared`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_tensor_count(handle: *const Handle) -> usize {
    // SAFETY: the caller's promise.
    guard(|| Ok(unsafe { shared(handle) }?.tensors.len())).unwrap_or(0)
}

/// # Safety
/// As [`shared`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_view_count(handle: *const Handle) -> usize {
    // SAFETY: the caller's promise.
    guard(|| Ok(unsafe { shared(handle) }?.views.len())).unwrap_or(0)
}

/// # Safety
/// As [`shared`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_is_incomplete(handle: *const Handle) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| Ok(unsafe { shared(handle) }?.lamina.directory().is_incomplete)).map_or(-1, c_int::from)
}

/// # Safety
/// As [`shared`]; `out` is null or points to a `lamina_tensor`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_tensor_info(
    handle: *const Handle,
    index: usize,
    out: *mut Tensor,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { shared(handle) }?;
        let tensors = &handle.lamina.directory().tensors;
        let (Some(entry), Some([name, shape, format])) = (tensors.get(index), handle.tensors.get(index))
        else {
            return Err(format!("no tensor number {index}: there are {}", tensors.len()));
        };
        let (layout, kv_channels, kv_window) = match entry.layout {
            Layout::Weight => (0, 0, 0),
            Layout::Kv { channels, window, .. } => (1, channels, window),
        };
        let info = Tensor {
            name: name.as_ptr(),
            shape: shape.as_ptr(),
            format: format.as_ptr(),
            dpa: entry.dpa,
            length: entry.length,
            elements: entry.elements,
            layout,
            kv_channels,
            kv_window,
        };
        // SAFETY: the caller's promise.
        unsafe { put(out, info) }
    }))
}

/// # Safety
/// As [`shared`]; `out` is null or points to a `lamina_view`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_view_info(
    handle: *const Handle,
    index: usize,
    out: *mut View,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { shared(handle) }?;
        let views = &handle.lamina.directory().views;
        let (Some(entry), Some(spelling)) = (views.get(index), handle.views.get(index)) else {
            return Err(format!("no view number {index}: there are {}", views.len()));
        };
        let info = View {
            spelling: spelling.as_ptr(),
            tensor: entry.tensor.into(),
            offset: entry.offset,
            length: entry.length,
            elements: entry.elements,
            bits: entry.bits,
            scale_exp: entry.scale_exp,
        };
        // SAFETY: the caller's promise.
        unsafe { put(out, info) }
    }))
}

/// # Safety
/// `out` is null or valid for a write of `T`.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), String> {
    if out.is_null() {
        return Err("the place for the result is NULL".into());
    }
    // SAFETY: the caller's promise, and not null.
    unsafe { out.write(value) };
    Ok(())
}

/// # Safety
/// As [`shared`]; `tensor` and `view` are null or zero-terminated strings; `address` and `length`
/// are null or valid for a write.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_map(
    handle: *const Handle,
    tensor: *const c_char,
    view: *const c_char,
    address: *mut *mut c_void,
    length: *mut usize,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, tensor, view) =
            unsafe { (shared(handle)?, name(tensor, "the tensor's name")?, name(view, "the view's name")?) };
        let span = handle.lamina.span(tensor, view).map_err(|error| text(&error))?;
        if address.is_null() || length.is_null() {
            return Err("the place for the address or the length is NULL".into());
        }
        // SAFETY: the caller's promise, and not null.
        unsafe {
            put(address, span.as_ptr().cast())?;
            put(length, span.len())
        }
    }))
}

/// # Safety
/// As [`shared`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_flush(handle: *const Handle, offset: u64, length: u64) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { shared(handle) }?;
        let range = (length > 0).then_some((offset, length));
        handle.lamina.flush(range).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_invalidate(handle: *const Handle, offset: u64, length: u64) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { shared(handle) }?;
        let range = (length > 0).then_some((offset, length));
        handle.lamina.invalidate(range).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`]; `tensor` and `format` are null or zero-terminated strings.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_tensor_add(
    handle: *const Handle,
    tensor: *const c_char,
    length: u64,
    format: *const c_char,
    kv_channels: u32,
    kv_window: u32,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, tensor, format) = unsafe {
            (shared(handle)?, name(tensor, "the tensor's name")?, name(format, "the format's name")?)
        };
        let new = NewTensor {
            name: tensor.to_owned(),
            length,
            format: format.to_owned(),
            kv: (kv_channels > 0).then_some((kv_channels, kv_window)),
            ..NewTensor::default()
        };
        let made = handle.lamina.ctl().and_then(|mut ctl| Ok(ctl.create_tensors(&[new])?));
        made.map(drop).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`]; `tensor` is null or points to a `lamina_new_tensor`, whose strings are null or
/// zero-terminated.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_tensor_make(
    handle: *const Handle,
    tensor: *const NewTensorSpec,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, spec) = unsafe { (shared(handle)?, tensor.as_ref()) };
        let spec = spec.ok_or("the new tensor is NULL")?;
        // SAFETY: the caller's promise.
        let new = unsafe {
            NewTensor {
                name: name(spec.name, "the tensor's name")?.to_owned(),
                length: spec.length,
                format: name(spec.format, "the format's name")?.to_owned(),
                kv: (spec.kv_channels > 0).then_some((spec.kv_channels, spec.kv_window)),
                lossy: said(spec.lossy, "the lossy coding")?,
                codec: said(spec.codec, "the codec's name")?,
                base: said(spec.base, "the base's name")?,
                ..NewTensor::default()
            }
        };
        let made = handle.lamina.ctl().and_then(|mut ctl| Ok(ctl.create_tensors(&[new])?));
        made.map(drop).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`]; `tensor` is null or a zero-terminated string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_tensor_detach(handle: *const Handle, tensor: *const c_char) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, tensor) = unsafe { (shared(handle)?, name(tensor, "the tensor's name")?) };
        let detached = handle.lamina.ctl().and_then(|mut ctl| Ok(ctl.detach_tensor(tensor)?));
        detached.map(drop).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`]; `tensor` is null or a zero-terminated string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_tensor_resize(
    handle: *const Handle,
    tensor: *const c_char,
    length: u64,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, tensor) = unsafe { (shared(handle)?, name(tensor, "the tensor's name")?) };
        let resized = handle.lamina.ctl().and_then(|mut ctl| Ok(ctl.resize_tensor(tensor, length)?));
        resized.map(drop).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`]; `tensor` is null or a zero-terminated string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_tensor_remove(handle: *const Handle, tensor: *const c_char) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, tensor) = unsafe { (shared(handle)?, name(tensor, "the tensor's name")?) };
        let removed = handle.lamina.ctl().and_then(|mut ctl| Ok(ctl.remove_tensor(tensor)?));
        removed.map(drop).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`]; `tensor` and `view` are null or zero-terminated strings.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_view_add(
    handle: *const Handle,
    tensor: *const c_char,
    view: *const c_char,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, tensor, view) =
            unsafe { (shared(handle)?, name(tensor, "the tensor's name")?, name(view, "the view's name")?) };
        let made = handle.lamina.ctl().and_then(|mut ctl| Ok(ctl.create_view(tensor, view)?));
        made.map(drop).map_err(|error| text(&error))
    }))
}

/// # Safety
/// As [`shared`]; `tensor` and `view` are null or zero-terminated strings.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn lamina_view_remove(
    handle: *const Handle,
    tensor: *const c_char,
    view: *const c_char,
) -> c_int {
    status(guard(|| {
        // SAFETY: the caller's promise.
        let (handle, tensor, view) =
            unsafe { (shared(handle)?, name(tensor, "the tensor's name")?, name(view, "the view's name")?) };
        let removed = handle.lamina.ctl().and_then(|mut ctl| Ok(ctl.remove_view(tensor, view)?));
        removed.map(drop).map_err(|error| text(&error))
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn lamina_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}
