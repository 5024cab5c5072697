//! An opened device: its directory, its memory as buffers without a copy, and its control port.

use std::{ffi::c_int, ops::ControlFlow, path::PathBuf, sync::Arc};

use lamina_abi::Layout;
use lamina_codec::{UnknownCodec, kv::KvLayout};
use lamina_device::{analyze::AnalyzeOptions, model::ModelFile};
use lamina_shim::{Access, Lamina, OpenOptions, Role, directory};
use pyo3::{
    exceptions::{PyBufferError, PyOSError, PyValueError},
    ffi,
    prelude::*,
};
use serde_json::{Value, json};

fn os(why: impl ToString) -> PyErr {
    PyOSError::new_err(why.to_string())
}

/// The mapped windows of a device.
#[pyclass(frozen, module = "lamina._lamina")]
pub(crate) struct Device {
    lamina: Arc<Lamina>,
}

#[pymethods]
impl Device {
    /// Maps both windows: those files, or what a guest finds.
    #[new]
    #[pyo3(signature = (base=None, views=None, *, writable=true))]
    fn new(py: Python<'_>, base: Option<PathBuf>, views: Option<PathBuf>, writable: bool) -> PyResult<Self> {
        let mut options = OpenOptions::from_env();
        if views.is_some() {
            (options.base, options.views) = (base, views);
        }
        options.base_access = if writable { Access::ReadWrite } else { Access::Read };
        let lamina = py.detach(|| Lamina::open(&options)).map_err(os)?;
        Ok(Self { lamina: Arc::new(lamina) })
    }

    /// Bytes of the base window.
    #[getter]
    fn base_bytes(&self) -> PyResult<u64> {
        Ok(self.lamina.window(Role::Base).map_err(os)?.bytes())
    }

    /// What the directory says, as JSON: tensors and views as the API names their fields.
    fn directory(&self, py: Python<'_>) -> PyResult<String> {
        let views = self.lamina.window(Role::Views).map_err(os)?;
        let found = py.detach(|| directory::read(views)).map_err(os)?;
        let tensors = found.tensors.iter().map(|tensor| {
            let shape =
                tensor.shape.split('x').filter_map(|size| size.parse::<u64>().ok()).collect::<Vec<_>>();
            let layout = match tensor.layout {
                Layout::Weight => json!({ "kind": "weight" }),
                Layout::Kv { channels, window, .. } => {
                    let kind = if tensor.lossy { "lossy_kv" } else { "kv" };
                    json!({ "kind": kind, "channels": channels, "window": window })
                }
            };
            json!({
                "name": tensor.name,
                "dpa": tensor.dpa,
                "length": tensor.length,
                "elements": tensor.elements,
                "shape": shape,
                "format": tensor.format,
                "layout": layout,
            })
        });
        let views = found.views.iter().filter_map(|view| {
            let tensor = found.tensors.get(usize::try_from(view.tensor).ok()?)?;
            Some(json!({
                "tensor": tensor.name,
                "view": view.spelling,
                "offset": view.offset,
                "length": view.length,
                "elements": view.elements,
                "bits": view.bits,
                "scale_exp": view.scale_exp,
            }))
        });
        let listed = json!({
            "tensors": tensors.collect::<Vec<_>>(),
            "views": views.collect::<Vec<_>>(),
            "is_incomplete": found.is_incomplete,
        });
        Ok(listed.to_string())
    }

    /// `length` bytes at `offset` of the window `base` or `views`, as a buffer.
    fn span(&self, window: &str, offset: u64, length: u64) -> PyResult<Span> {
        let role = match window {
            "base" => Role::Base,
            "views" => Role::Views,
            other => {
                return Err(PyValueError::new_err(format!(
                    "no window is called {other:?}: base and views are"
                )));
            }
        };
        self.lamina.window(role).map_err(os)?.span(offset, length).map_err(os)?;
        Ok(Span { lamina: Arc::clone(&self.lamina), role, offset, length })
    }

    /// Asks the control port something, both ways as JSON.
    fn request(&self, py: Python<'_>, request: &str) -> PyResult<String> {
        let request: Value =
            serde_json::from_str(request).map_err(|why| PyValueError::new_err(why.to_string()))?;
        let reply = py.detach(|| {
            self.lamina.ctl().map_err(|why| why.to_string())?.request(&request).map_err(|why| why.to_string())
        });
        Ok(reply.map_err(os)?.to_string())
    }
}

/// A part of a window. It lends its memory without a copy.
#[pyclass(frozen, module = "lamina._lamina")]
pub(crate) struct Span {
    lamina: Arc<Lamina>,
    role: Role,
    offset: u64,
    length: u64,
}

#[pymethods]
impl Span {
    /// The address of its first byte.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        let window = self.lamina.window(self.role).map_err(os)?;
        Ok(window.span(self.offset, self.length).map_err(os)?.as_ptr() as usize)
    }

    /// Whether it can be stored to.
    #[getter]
    fn writable(&self) -> PyResult<bool> {
        Ok(self.lamina.window(self.role).map_err(os)?.access() == Access::ReadWrite)
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.length).expect("mapped")
    }

    /// Lends the memory, for Python's buffer protocol.
    ///
    /// # Safety
    /// `view` is a buffer to fill in, as Python passes it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let window = this.lamina.window(this.role).map_err(os)?;
        let span = window.span(this.offset, this.length).map_err(os)?;
        let readonly = c_int::from(window.access() != Access::ReadWrite);
        let length =
            ffi::Py_ssize_t::try_from(span.len()).map_err(|why| PyBufferError::new_err(why.to_string()))?;
        // SAFETY: the memory is `length` bytes from that address on, and mapped while the windows
        // live, which `slf` holds and the buffer holds `slf`. It is marked read-only where stores
        // would fault.
        let done = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), span.as_ptr().cast(), length, readonly, flags)
        };
        if done == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// What the device would make of checkpoints: the report of `lamina analyze --json`.
#[pyfunction]
#[pyo3(signature = (files, codecs, kv=None))]
pub(crate) fn analyze(
    py: Python<'_>,
    files: Vec<PathBuf>,
    codecs: Vec<String>,
    kv: Option<(u32, u32)>,
) -> PyResult<String> {
    let codecs = codecs.iter().map(|codec| codec.parse()).collect::<Result<Vec<_>, UnknownCodec>>();
    let codecs = codecs.map_err(|why| PyValueError::new_err(why.to_string()))?;
    let options =
        AnalyzeOptions { codecs, kv: kv.map(|(channels, window)| KvLayout::rows(channels, window)) };
    let report = py.detach(|| {
        let models = files.iter().map(|path| ModelFile::open(path).map(ModelFile::spread));
        let models = models.collect::<Result<Vec<_>, _>>().map_err(|why| why.to_string())?;
        let report = lamina_device::analyze::analyze(&models, &options, |_| ControlFlow::Continue(()))
            .map_err(|why| why.to_string())?;
        serde_json::to_string(&report).map_err(|why| why.to_string())
    });
    report.map_err(PyValueError::new_err)
}
