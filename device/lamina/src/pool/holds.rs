//! What a pool or a part of it holds, as the device is told in whose mount it is.

use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, bail};
use clap::Args;
use hyper::Method;
use lamina_codec::format::Format;
use lamina_codec::kv::KvLayout;
use lamina_device::layout::Layout;
use lamina_device::tensor::TensorSpec;
use lamina_pool::{Class, Pool, PoolError};
use rustix::fs::{XattrFlags, setxattr};
use serde_json::Value;
use tokio::runtime::Handle;

use crate::args::kv_layout;
use crate::client::{ApiAt, ask, escaped};
use crate::mount;

/// What the names of tensors of pools in the base window begin with.
const TENSOR: &str = "pool@";

/// What the objects of a pool are, or one of them.
#[derive(Debug, Args)]
pub(crate) struct Holds {
    /// In a mount: the format of the elements, as which the device codes them [default with --kv:
    /// bf16].
    #[arg(long)]
    format: Option<Format>,
    /// In a mount: it is KV caches, written as for `lamina analyze --kv`.
    #[arg(long, value_parser = rows, value_name = "CHANNELS[,WINDOW]")]
    kv: Option<Rows>,
}

/// A layout, and how it was written.
#[derive(Clone, Debug)]
struct Rows {
    layout: KvLayout,
    text: String,
}

fn rows(text: &str) -> Result<Rows, String> {
    Ok(Rows { layout: kv_layout(text)?, text: text.to_owned() })
}

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
            return match mount::around(file) {
                Ok((api, _)) if is_base(file) => Handle::current().block_on(forget(&api)),
                _ => Ok(()),
            };
        }
        if self.kv.as_ref().is_some_and(|kv| kv.layout.lossy.is_some()) {
            bail!("a pool checks what it holds, and what is kept with loss does not check");
        }
        let format = self.format.unwrap_or(Format::Bf16);
        let (api, root) = mount::around(file)?;
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
        Handle::current().block_on(async {
            forget(&api).await?;
            ask(&api, Method::POST, "/tensors", Some(spec(&data, format, layout)?)).await
        })?;
        Ok(())
    }
}

/// The tensor of a part of the base window in which a pool's objects are.
fn spec(range: &Range<u64>, format: Format, layout: Layout) -> anyhow::Result<Value> {
    Ok(serde_json::to_value(TensorSpec {
        name: tensor(range),
        dpa: Some(range.start),
        length: range.end - range.start,
        elements: None,
        shape: Vec::new(),
        format,
        layout,
        codec: None,
        base: None,
    })?)
}

fn tensor(range: &Range<u64>) -> String {
    format!("{TENSOR}{:#x}", range.start)
}

/// The tensors of pools, and the bytes of each.
async fn tensors(api: &ApiAt) -> anyhow::Result<Vec<(String, u64)>> {
    let all = ask(api, Method::GET, "/tensors", None).await?;
    let all = all.as_array().into_iter().flatten();
    let named =
        all.filter_map(|tensor| Some((tensor["name"].as_str()?.to_owned(), tensor["length"].as_u64()?)));
    Ok(named.filter(|(name, _)| name.starts_with(TENSOR)).collect())
}

/// Removes the tensors of a pool that was there before. If one cannot go, who makes another in its
/// place says why.
async fn forget(api: &ApiAt) -> anyhow::Result<()> {
    for (name, _) in tensors(api).await? {
        let _ = ask(api, Method::DELETE, &format!("/tensors/{}", escaped(&name)), None).await;
    }
    Ok(())
}

fn is_base(file: &Path) -> bool {
    file.file_name() == Some(OsStr::new("base"))
}

/// Attaches to a pool. Of one in the base window, which has no attributes, the device is told by
/// its API what chunks are: each is a tensor then.
pub(super) fn open(file: &Path) -> Result<Pool, PoolError> {
    match mount::around(file) {
        Ok((api, _)) if is_base(file) => {
            let runtime = Handle::current();
            let tell = move |range: Range<u64>, class: Option<&Class>| {
                runtime
                    .block_on(say(&api, range, class))
                    .map_err(|why| PoolError::Declare(format!("{why:#}")))
            };
            Pool::open_telling(file, Box::new(tell))
        }
        _ => Pool::open(file),
    }
}

/// Has a chunk of the base window be a tensor of a class, or none.
async fn say(api: &ApiAt, range: Range<u64>, class: Option<&Class>) -> anyhow::Result<()> {
    let of = |class: &Class| -> anyhow::Result<(Format, Layout)> {
        let format = class.format().parse()?;
        let layout = class.kv().map_or(Ok(Layout::Weight), |kv| kv.parse().map(Layout::Kv))?;
        Ok((format, layout))
    };
    let class = class.map(of).transpose()?;
    if range.is_empty() {
        return Ok(());
    }
    let name = tensor(&range);
    let old = tensors(api).await?.into_iter().find(|(old, _)| *old == name);
    if let Some((_, length)) = old {
        if length != range.end - range.start {
            if class.is_none() {
                // It is as the pool is, of which that is the tensor.
                return Ok(());
            }
            bail!("the pool was made with a class of its own, whose tensor {name} overlaps its chunks");
        }
        ask(api, Method::DELETE, &format!("/tensors/{}", escaped(&name)), None).await?;
    }
    if let Some((format, layout)) = class {
        ask(api, Method::POST, "/tensors", Some(spec(&range, format, layout)?)).await?;
    }
    Ok(())
}
