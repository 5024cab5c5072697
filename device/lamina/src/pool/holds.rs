//! What a pool or a part of it holds, as the device is told in whose mount it is.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, bail};
use hyper::Method;
use lamina_codec::format::Format;
use lamina_device::layout::Layout;
use lamina_device::tensor::TensorSpec;
use lamina_pool::Class;
use rustix::fs::{XattrFlags, setxattr};
use tokio::runtime::Handle;

use crate::args::Holds;
use crate::client::ask;
use crate::mount;

/// What the names of tensors of pools in the base window begin with. Whoever makes a pool anew has
/// the device forget them.
const TENSOR: &str = "pool@";

impl Holds {
    /// The class of what is stored; none is the pool's own.
    pub(super) fn class(&self) -> anyhow::Result<Option<Class>> {
        if self.format.is_none() && self.kv.is_none() {
            return Ok(None);
        }
        let format = self.format.unwrap_or(Format::Bf16);
        Ok(Some(Class::new(format.name(), self.kv.as_ref().map(|kv| kv.text.as_str()))?))
    }

    /// Tells the device: of a file in `files/` by its attributes, of the base window by a tensor
    /// where the objects will be.
    pub(super) fn declare(&self, file: &Path, data: Range<u64>) -> anyhow::Result<()> {
        if self.format.is_none() && self.kv.is_none() {
            return Ok(());
        }
        if self.kv.as_ref().is_some_and(|kv| kv.layout.lossy.is_some()) {
            bail!("a pool checks what it holds, and what is kept with loss does not check");
        }
        let format = self.format.unwrap_or(Format::Bf16);
        let Ok((api, root)) = mount::around(file) else {
            bail!(
                "{} is in no mount, and a device codes only what is in its own: make the pool in one, or leave \
                 --format and --kv out",
                file.display()
            );
        };
        let path = file.canonicalize()?;
        let inside = path.strip_prefix(root.canonicalize()?)?;
        if inside.starts_with("files") {
            let set = |name: &str, value: &str| {
                setxattr(&path, name, value.as_bytes(), XattrFlags::empty())
                    .with_context(|| format!("{}: {name} cannot be {value}", path.display()))
            };
            set("user.lamina.format", format.name())?;
            return self.kv.as_ref().map_or(Ok(()), |kv| set("user.lamina.kv", &kv.text));
        }
        if inside != Path::new("base") {
            bail!("{} cannot hold a pool: base can, and files in files/", inside.display());
        }
        let layout = self.kv.as_ref().map_or(Layout::Weight, |kv| Layout::Kv(kv.layout));
        let spec = serde_json::to_value(TensorSpec {
            layout,
            ..TensorSpec::new(
                format!("{TENSOR}{:#x}", data.start),
                Some(data.start),
                data.end - data.start,
                format,
            )
        })?;
        Handle::current().block_on(ask(&api, Method::POST, "/tensors", Some(spec)))?;
        Ok(())
    }
}
