//! Client commands: one request to the API's socket, printed for a person or as JSON.

mod stats;

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use indicatif::BinaryBytes;
use lamina_codec::kv::{KvLayout, Shape};
use lamina_device::{layout::Layout, tensor::TensorSpec};
use lamina_serve::peer;
use rustix::io::Errno;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

use crate::args::{ApiAt, Client, Discard, Flush, Poison, Snapshot, Tensor, TensorAdd, Upgrade, View};
use crate::holder;
use crate::made_file::Part;
use crate::meter::Meter;
use crate::mounted;
use crate::out::{print_json, print_line};
use crate::status::{NoDevice, Refused};
use crate::table::{address, new_table, size, text};

pub(crate) use self::stats::stats;

/// How often, and after what time, a question is asked again whose answer broke off because the
/// device's worker was replaced.
const AGAIN: (u32, Duration) = (20, Duration::from_millis(50));

/// How often a device is asked how far something is.
const PACE: Duration = Duration::from_millis(200);

/// Bytes an answer may have.
const MAX_ANSWER: usize = 256 << 20;

/// Sends one request and returns the answer, or the API's error. What only asks is asked again if
/// the answer breaks off.
pub(crate) async fn ask(api: &ApiAt, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
    let mut left = if method == Method::GET { AGAIN.0 } else { 0 };
    loop {
        match ask_once(api, method.clone(), path, body.clone()).await {
            Err(why) if left > 0 && why.downcast_ref::<hyper::Error>().is_some() => left -= 1,
            answer => return answer,
        }
        tokio::time::sleep(AGAIN.1).await;
    }
}

/// What a request can be sent over.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Connects to the device whose socket this is, if who answers there is to be trusted.
async fn connect_to(socket: &Path) -> Result<Box<dyn Stream>> {
    let stream = UnixStream::connect(socket).await.with_context(|| {
        NoDevice(format!(
            "no device answers at {}: is `lamina serve` running, with this --run-dir? `lamina ls` shows what is mounted",
            socket.display()
        ))
    })?;
    peer::check(&stream, socket)?;
    Ok(Box::new(stream))
}

/// Connects to the device at `api`, if who answers there is to be trusted.
async fn connect(api: &ApiAt) -> Result<Box<dyn Stream>> {
    match api {
        ApiAt::Usual(found) => {
            if let Some(socket) = found.get() {
                return connect_to(socket).await;
            }
            let socket = mounted::usual_socket()?;
            let stream = connect_to(&socket).await?;
            // What a command asks next is of the same device, whatever is mounted meanwhile.
            found.get_or_init(|| socket);
            Ok(stream)
        }
        ApiAt::Socket(socket) => connect_to(socket).await,
        ApiAt::Address(address) => {
            ensure!(
                address.ip().is_loopback(),
                "{address} is not on this host: devices answer on loopback only"
            );
            let stream = TcpStream::connect(address).await.with_context(|| {
                NoDevice(format!("no device answers at {api}: is `lamina serve --tcp {api}` running?"))
            })?;
            peer::check_address(*address)?;
            Ok(Box::new(stream))
        }
    }
}

/// Sends a request: the answer's status and body, and the connection, which ends when it is
/// dropped.
async fn send(
    api: &ApiAt,
    method: Method,
    path: &str,
    body: Option<Value>,
) -> Result<(StatusCode, Incoming, Connection)> {
    let stream = connect(api).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.map(|body| body.to_string()).unwrap_or_default())))?;
    let closed =
        || NoDevice("the device closed the connection: it ended, or had no place for one more".to_owned());
    let answer = sender.send_request(request).await.with_context(closed)?;
    Ok((answer.status(), answer.into_body(), connection))
}

/// A connection that is served until it is dropped.
#[derive(Debug)]
pub(crate) struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn ask_once(api: &ApiAt, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
    let (status, body, _connection) = send(api, method, path, body).await?;
    understood(api, status, body).await
}

/// Opens an answer that goes on, or the API's error.
pub(crate) async fn open(api: &ApiAt, path: &str) -> Result<(Incoming, Connection)> {
    let (status, body, connection) = send(api, Method::GET, path, None).await?;
    if status.is_success() {
        return Ok((body, connection));
    }
    understood(api, status, body).await?;
    bail!("the device answers {status}")
}

/// An answer's JSON, or the error that it is.
async fn understood(api: &ApiAt, status: StatusCode, body: Incoming) -> Result<Value> {
    let body = Limited::new(body, MAX_ANSWER).collect().await;
    let broke_off = |why: Box<dyn std::error::Error + Send + Sync>| match why.downcast::<hyper::Error>() {
        Ok(why) => anyhow::Error::from(*why),
        Err(why) => anyhow!(why),
    };
    let broken = || NoDevice("the device's answer broke off".to_owned());
    let body = body.map_err(broke_off).with_context(broken)?.to_bytes();
    if body.is_empty() && status.is_success() {
        return Ok(json!({}));
    }
    let body: Value = serde_json::from_slice(&body)
        .with_context(|| NoDevice(format!("the answer ({status}) is no JSON; is {api} Lamina's?")))?;
    if !status.is_success() {
        bail!(Refused(body["error"].as_str().unwrap_or(status.as_str()).to_owned()));
    }
    Ok(body)
}

pub(crate) async fn poison(command: Poison) -> Result<()> {
    let (path, range) = match command {
        Poison::Inject(range) => ("/poison/inject", range),
        Poison::Clear(range) => ("/poison/clear", range),
        Poison::List(client) => {
            let poison = ask(&client.api, Method::GET, "/poison", None).await?;
            if client.json {
                return print_json(&poison);
            }
            let mut table = new_table(&["DPA", "bytes", "tensor", "cause", "found"], 2);
            for block in rows(&poison)? {
                let dpa = block["dpa"].as_u64().map_or_else(String::new, |dpa| format!("{dpa:#x}"));
                let tensor = block["tensor"].as_str().unwrap_or_default().to_owned();
                table.add_row([
                    dpa,
                    text(&block["length"]),
                    tensor,
                    text(&block["cause"]),
                    text(&block["why"]),
                ]);
            }
            print_line!("{table}")?;
            return Ok(());
        }
    };
    let body = json!({ "offset": range.offset, "length": range.length });
    let done = ask(&range.client.api, Method::POST, path, Some(body)).await?;
    if range.client.json { print_json(&done) } else { Ok(()) }
}

/// Saves or restores a device.
pub(crate) fn snapshot(command: Snapshot) -> Result<()> {
    match command {
        Snapshot::Save { file, run_dir, json } => {
            let failed = || format!("cannot make {}", file.display());
            if file.symlink_metadata().is_ok() {
                return Err(io::Error::from(Errno::EXIST)).with_context(failed);
            }
            // Who ends this command, or copies what is there, has no part of a snapshot.
            let part = Part::beside(&file).with_context(failed)?;
            let bytes = holder::save(&run_dir, part.file())?;
            part.name(&file).with_context(failed)?;
            // The device has brought what is in it to the disk.
            lamina_store::snapshot::sync_folder(&file)
                .with_context(|| format!("cannot bring {} to the disk", file.display()))?;
            if json {
                return print_json(&json!({ "snapshot": file, "bytes": bytes }));
            }
            print_line!("{}: {} of data", file.display(), BinaryBytes(bytes))?;
        }
        Snapshot::Restore { file, image, json } => {
            lamina_store::snapshot::restore(&file, &image)?;
            if json {
                return print_json(&json!({ "snapshot": file, "image": image }));
            }
            print_line!("{}: serve it with `lamina serve --image`", image.display())?;
        }
    }
    Ok(())
}

/// Has a device go on with another program.
pub(crate) fn upgrade(args: &Upgrade) -> Result<()> {
    let ready = holder::upgrade(&args.run_dir, args.program.as_deref())?;
    if args.json {
        return print_json(&serde_json::to_value(&ready)?);
    }
    print_line!(
        "process {} does the work now, {} tensors and {} views are there",
        ready.worker,
        ready.tensors,
        ready.view_count
    )?;
    Ok(())
}

pub(crate) async fn tensors(client: &Client) -> Result<()> {
    let tensors = ask(&client.api, Method::GET, "/tensors", None).await?;
    if client.json {
        return print_json(&tensors);
    }
    print_tensors(rows(&tensors)?)
}

fn print_tensors(tensors: &[Value]) -> Result<()> {
    let mut table = new_table(&["tensor", "format", "layout", "base", "shape", "DPA", "bytes"], 5);
    for tensor in tensors {
        let shape: Vec<_> = rows(&tensor["shape"])?.iter().map(text).collect();
        table.add_row([
            text(&tensor["name"]),
            text(&tensor["format"]),
            text(&tensor["layout"]["kind"]),
            tensor["base"].as_str().unwrap_or_default().to_owned(),
            shape.join("x"),
            address(&tensor["dpa"]),
            size(&tensor["length"]),
        ]);
    }
    print_line!("{table}")?;
    Ok(())
}

pub(crate) async fn views(client: &Client) -> Result<()> {
    let views = ask(&client.api, Method::GET, "/views", None).await?;
    if client.json {
        return print_json(&views);
    }
    print_views(rows(&views)?)
}

pub(crate) async fn disks(client: &Client) -> Result<()> {
    let disks = ask(&client.api, Method::GET, "/disks", None).await?;
    if client.json {
        return print_json(&disks);
    }
    let mut table = new_table(&["serial", "partition", "shows", "socket", "bytes"], 4);
    for disk in rows(&disks)? {
        let shows = match &disk["shows"] {
            Value::String(window) => window.clone(),
            shows => format!("{}:{}", text(&shows["view"]["tensor"]), text(&shows["view"]["view"])),
        };
        let shows = if disk["gone"] == true { format!("{shows} (gone)") } else { shows };
        table.add_row([
            text(&disk["serial"]),
            String::new(),
            shows,
            text(&disk["socket"]),
            size(&disk["bytes"]),
        ]);
        for partition in disk["partitions"].as_array().into_iter().flatten() {
            let shows = match text(&partition["tensor"]) {
                tensor if tensor.is_empty() => text(&partition["name"]),
                tensor => format!("{tensor}:{}", text(&partition["view"])),
            };
            let number = text(&partition["number"]);
            table.add_row([text(&disk["serial"]), number, shows, String::new(), size(&partition["length"])]);
        }
    }
    print_line!("{table}")?;
    Ok(())
}

/// The exports of the device that answers at `api`.
pub(crate) async fn exports(api: &ApiAt) -> Result<Vec<Value>> {
    Ok(rows(&ask(api, Method::GET, "/guests", None).await?)?.to_vec())
}

/// The disks of the device that answers at `api`.
pub(crate) async fn disk_list(api: &ApiAt) -> Result<Vec<Value>> {
    Ok(rows(&ask(api, Method::GET, "/disks", None).await?)?.to_vec())
}

pub(crate) async fn guests(client: &Client) -> Result<()> {
    let exports = exports(&client.api).await?;
    if client.json {
        return print_json(&exports.into());
    }
    let mut table = new_table(&["", "name", "base", "bytes", "views", "bytes", "control socket"], 7);
    for export in &exports {
        table.add_row([
            text(&export["kind"]),
            export["name"].as_str().unwrap_or_default().to_owned(),
            text(&export["base"]["path"]),
            size(&export["base"]["bytes"]),
            text(&export["views"]["path"]),
            size(&export["views"]["bytes"]),
            text(&export["ctl"]),
        ]);
    }
    print_line!("{table}")?;
    Ok(())
}

pub(crate) async fn view(command: View) -> Result<()> {
    match command {
        View::List(client) => views(&client).await,
        View::Add { tensor, spelling, client } => {
            let requested = json!({ "tensor": tensor, "spelling": spelling });
            let view = ask(&client.api, Method::POST, "/views", Some(requested)).await?;
            if client.json {
                return print_json(&view);
            }
            print_views(&[view])
        }
        View::Rm { tensor, spelling, client } => {
            let requested = json!({ "tensor": tensor, "spelling": spelling });
            let view = ask(&client.api, Method::DELETE, "/views", Some(requested)).await?;
            if client.json { print_json(&view) } else { Ok(()) }
        }
    }
}

pub(crate) async fn tensor(command: Tensor) -> Result<()> {
    let (client, tensor) = match command {
        Tensor::List(client) => return tensors(&client).await,
        Tensor::Add(add) => {
            let spec = serde_json::to_value(spec(&add)?)?;
            let tensor = ask(&add.client.api, Method::POST, "/tensors", Some(spec)).await?;
            (add.client, tensor)
        }
        Tensor::Resize { name, length, client } => {
            let requested = json!({ "length": length });
            let tensor =
                ask(&client.api, Method::PATCH, &format!("/tensors/{}", escaped(&name)), Some(requested))
                    .await?;
            (client, tensor)
        }
        Tensor::Rm { name, client } => {
            let done =
                ask(&client.api, Method::DELETE, &format!("/tensors/{}", escaped(&name)), None).await?;
            return if client.json { print_json(&done) } else { Ok(()) };
        }
        Tensor::Detach { names, model, client } => return detach(&names, model.as_deref(), &client).await,
    };
    if client.json { print_json(&tensor) } else { print_tensors(&[tensor]) }
}

/// Has tensors, or those of a model, need no base any more.
async fn detach(names: &[String], model: Option<&str>, client: &Client) -> Result<()> {
    let tensors = names.iter().map(|name| (name.as_str(), json!({ "tensor": name })));
    let models = model.iter().map(|name| (*name, json!({ "model": name })));
    let mut all = Vec::new();
    for (name, requested) in tensors.chain(models) {
        let done = ask(&client.api, Method::POST, "/detach", Some(requested));
        let detached = watched(done, Meter::new("detached"), async || {
            let now = ask(&client.api, Method::GET, "/detach", None).await.ok()?;
            let is = rows(&now).ok()?.iter().find(|is| is["name"] == name)?;
            Some((name.to_owned(), is["bytes"].as_u64()?, is["total"].as_u64()?))
        });
        all.extend(rows(&detached.await?)?.iter().cloned());
    }
    if client.json { print_json(&all.into()) } else { print_tensors(&all) }
}

/// What comes of `done`. Meanwhile it is asked now and then how far that is: of what, how many
/// bytes are done, and of how many.
pub(crate) async fn watched<T>(
    done: impl Future<Output = T>,
    meter: Meter,
    how_far: impl AsyncFn() -> Option<(String, u64, u64)>,
) -> T {
    tokio::pin!(done);
    loop {
        tokio::select! {
            done = &mut done => {
                meter.finish();
                return done;
            }
            () = tokio::time::sleep(PACE) => {}
        }
        if let Some((what, bytes, total)) = how_far().await {
            meter.tell(&what, bytes, total);
        }
    }
}

/// The tensor that is asked for.
fn spec(add: &TensorAdd) -> Result<TensorSpec> {
    let shape = add.shape.as_ref().map_or_else(Vec::new, |shape| shape.0.clone());
    let length = add.length.or_else(|| add.format.bytes_for(elements_of(&shape)?));
    let length = length.with_context(|| {
        format!("{}: elements of {} do not fill whole bytes, or pass 64 bits", add.name, add.format)
    })?;
    Ok(TensorSpec {
        name: add.name.clone(),
        dpa: add.at,
        length,
        // A length may hold an element more: half a byte is a number of its own.
        elements: elements_of(&shape),
        shape,
        format: add.format,
        layout: layout(add)?,
        codec: add.codec,
        base: add.base.clone(),
    })
}

/// The elements of a shape, if one is given and 64 bits can count them.
fn elements_of(shape: &[u64]) -> Option<u64> {
    let product = shape.iter().try_fold(1_u64, |of, dimension| of.checked_mul(*dimension));
    product.filter(|_| !shape.is_empty())
}

/// The layout that is asked for. Weights are coded with loss only if that is said twice.
fn layout(add: &TensorAdd) -> Result<Layout> {
    let TensorAdd { name, kv, lossy, .. } = add;
    match (kv, lossy) {
        (Some(KvLayout { lossy: Some(_), .. }), Some(_)) => {
            bail!("{name}: its loss is said twice: leave out --lossy, or what --kv has of it")
        }
        (Some(kv), lossy) => Ok(Layout::Kv(KvLayout { lossy: lossy.or(kv.lossy), ..*kv })),
        (None, None) => Ok(Layout::Weight),
        (None, Some(_)) if !add.force_lossy => bail!(
            "{name}: what is no KV cache may hold weights, which lossy coding would change: say --kv CHANNELS[,WINDOW] if \
             it is one, or --force-lossy with its --shape to have it so all the same"
        ),
        (None, lossy) => {
            let row = add.shape.as_ref().and_then(|shape| shape.0.last()).copied().unwrap_or_default();
            let channels = u32::try_from(row).with_context(|| format!("{name}: rows of {row} elements"))?;
            let of = |window| KvLayout { lossy: *lossy, ..KvLayout::rows(channels, window) };
            let can_be = |window: &u32| Shape::new(add.format, &of(*window)).is_ok();
            // If none can be, the device says why.
            let window = [64, 128, 192, 256].into_iter().find(can_be).unwrap_or(64);
            Ok(Layout::Kv(of(window)))
        }
    }
}

/// A name as a part of a URL's path.
pub(crate) fn escaped(name: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~".contains(byte);
    let part = |byte: u8| match byte {
        byte if plain(&byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    name.bytes().map(part).collect()
}

pub(crate) async fn flush(command: &Flush) -> Result<()> {
    let mut range = json!({ "offset": command.offset });
    if let Some(length) = command.length {
        range["length"] = length.into();
    }
    let done = ask(&command.client.api, Method::POST, "/flush", Some(range)).await?;
    if command.client.json { print_json(&done) } else { Ok(()) }
}

pub(crate) async fn discard(command: &Discard) -> Result<()> {
    let api = &command.client.api;
    let (offset, length) = if let Some(length) = command.length {
        (crate::args::bytes(&command.what).map_err(|why| anyhow!(why))?, length)
    } else {
        let tensors = ask(api, Method::GET, "/tensors", None).await?;
        let found = rows(&tensors)?.iter().find(|tensor| tensor["name"] == command.what.as_str());
        let place = found.and_then(|tensor| Some((tensor["dpa"].as_u64()?, tensor["length"].as_u64()?)));
        place.with_context(|| {
            Refused(format!(
                "no tensor is called {:?}; a range is given by its DPA and its bytes, see `lamina tensors`",
                command.what
            ))
        })?
    };
    let range = json!({ "offset": offset, "length": length });
    let done = ask(api, Method::POST, "/discard", Some(range)).await?;
    if command.client.json { print_json(&done) } else { Ok(()) }
}

pub(crate) async fn events(client: &Client) -> Result<()> {
    let events = ask(&client.api, Method::GET, "/events", None).await?;
    if client.json {
        return print_json(&events);
    }
    let mut table = new_table(&["event", "what", "after s"], 2);
    for event in rows(&events)? {
        let seconds = event["seconds"].as_f64().map_or_else(String::new, |seconds| format!("{seconds:.1}"));
        table.add_row([text(&event["kind"]), text(&event["text"]), seconds]);
    }
    print_line!("{table}")?;
    Ok(())
}

fn print_views(views: &[Value]) -> Result<()> {
    let mut table = new_table(&["tensor", "view", "offset", "bytes", "bits", "planes", "scale"], 2);
    for view in views {
        table.add_row([
            text(&view["tensor"]),
            text(&view["view"]),
            address(&view["offset"]),
            size(&view["length"]),
            text(&view["bits"]),
            text(&view["planes"]),
            match view["scale_exp"].as_i64() {
                Some(0) | None => String::new(),
                Some(exponent) => format!("2^{exponent}"),
            },
        ]);
    }
    print_line!("{table}")?;
    Ok(())
}

pub(crate) fn rows(value: &Value) -> Result<&[Value]> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| anyhow!("the device's answer is no list: {value}"))
}
