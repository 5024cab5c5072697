//! Client commands: one request to the API's socket, printed for a person or as JSON.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, header};
use hyper_util::rt::TokioIo;
use indicatif::{BinaryBytes, HumanCount};
use lamina_serve::peer;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::args::{Client, Discard, Flush, Poison, Snapshot, Upgrade, View};
use crate::holder;
use crate::out::print_line;

/// How often, and after what time, a question is asked again whose answer broke off because the device's worker was replaced.
const AGAIN: (u32, Duration) = (20, Duration::from_millis(50));

/// Bytes an answer may have.
const MAX_ANSWER: usize = 256 << 20;

/// Sends one request and returns the answer, or the API's error. What only asks is asked again if the answer breaks off.
async fn ask(api: &Path, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
    let mut left = if method == Method::GET { AGAIN.0 } else { 0 };
    loop {
        match ask_once(api, method.clone(), path, body.clone()).await {
            Err(why) if left > 0 && why.downcast_ref::<hyper::Error>().is_some() => left -= 1,
            answer => return answer,
        }
        tokio::time::sleep(AGAIN.1).await;
    }
}

async fn ask_once(api: &Path, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
    let stream = UnixStream::connect(api).await.with_context(|| {
        format!("no device answers at {}: is `lamina serve` running, with this --run-dir?", api.display())
    })?;
    peer::check(&stream, api)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.map(|body| body.to_string()).unwrap_or_default())))?;
    let answer = sender.send_request(request).await.context("the device closed the connection")?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
    let broke_off = |why: Box<dyn std::error::Error + Send + Sync>| match why.downcast::<hyper::Error>() {
        Ok(why) => anyhow::Error::from(*why),
        Err(why) => anyhow!(why),
    };
    let body = body.map_err(broke_off).context("the device's answer broke off")?.to_bytes();
    connection.abort();
    let body: Value = serde_json::from_slice(&body).with_context(|| {
        format!("the device's answer ({status}) is no JSON; is {} Lamina's?", api.display())
    })?;
    if !status.is_success() {
        bail!("the device refuses: {}", body["error"].as_str().unwrap_or(status.as_str()));
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
        Snapshot::Save { file, run_dir } => {
            let made = std::fs::File::create_new(&file)
                .with_context(|| format!("cannot make {}", file.display()))?;
            let saved = holder::save(&run_dir, &made);
            let bytes = saved.inspect_err(|_| drop(std::fs::remove_file(&file)))?;
            // The device has brought what is in it to the disk.
            lamina_store::snapshot::sync_folder(&file)
                .with_context(|| format!("cannot bring {} to the disk", file.display()))?;
            print_line!("{}: {} of data", file.display(), BinaryBytes(bytes))?;
        }
        Snapshot::Restore { file, image } => {
            lamina_store::snapshot::restore(&file, &image)?;
            print_line!("{}: serve it with `lamina serve --image`", image.display())?;
        }
    }
    Ok(())
}

/// Has a device go on with another program.
pub(crate) fn upgrade(args: &Upgrade) -> Result<()> {
    let ready = holder::upgrade(&args.run_dir, args.program.as_deref())?;
    print_line!(
        "process {} does the work now, {} tensors and {} views are there",
        ready.worker,
        ready.tensors,
        ready.view_count
    )?;
    Ok(())
}

pub(crate) async fn stats(client: &Client) -> Result<()> {
    let stats = ask(&client.api, Method::GET, "/stats", None).await?;
    if client.json {
        return print_json(&stats);
    }
    let device = &stats["device"];
    print_line!(
        "{} ({}, compared with gcomp by {}): {} of {} written and stored as {} and {} of index, ratio {}",
        text(&device["mode"]),
        text(&device["codec"]),
        device["gcomp_codec"].as_str().unwrap_or("nothing"),
        size(&device["written_bytes"]),
        size(&device["capacity_bytes"]),
        size(&device["stored_bytes"]),
        size(&device["index_bytes"]),
        ratio(&device["ratio"]),
    )?;
    if device["host_memory_left_bytes"].is_u64() {
        let (left, reserve) = (&device["host_memory_left_bytes"], &device["memory_reserve_bytes"]);
        print_line!("left of the host's memory: {}, of which {} are kept free", size(left), size(reserve))?;
    }
    let mut table = new_table(&[&["window"], &TRAFFIC[..]].concat(), 1);
    for window in ["base", "views"] {
        table.add_row([vec![window.to_owned()], traffic(&stats["requests"][window])].concat());
    }
    table.add_row([vec!["for writes".to_owned()], traffic(&stats["reads_for_writes"])].concat());
    print_line!("{table}")?;
    print_line!(
        "one access here is a page filled (4 KiB) or the read-ahead, not a 64-byte load; fills by size:"
    )?;
    print_fills(&stats["requests"])?;
    let mut table = new_table(&[&["tensor", "view"], &TRAFFIC[..]].concat(), 2);
    for tensor in rows(&stats["tensors"])? {
        table.add_row([vec![text(&tensor["name"]), "(base)".to_owned()], traffic(&tensor["base"])].concat());
    }
    for view in rows(&stats["views"])? {
        table.add_row([vec![text(&view["tensor"]), text(&view["view"])], traffic(view)].concat());
    }
    print_line!("{table}")?;
    print_partitions(rows(&stats["partitions"])?, rows(&stats["hosts"])?)?;
    if !stats["interleave"].is_null() {
        print_interleave(&stats["interleave"])?;
    }
    let (writes, requests) = (&stats["writes"], &stats["requests"]);
    print_line!(
        "written: {} in {} requests; stores refused in views: {}; damaged reads: {}",
        size(&writes["base_written_bytes"]),
        count(&writes["base_writes"]),
        count(&requests["refused_view_stores"]),
        count(&requests["damaged_reads"]),
    )?;
    let (index, maintenance) = (&stats["index"], &stats["maintenance"]);
    print_line!(
        "stored for writes: {} and {} of index entries (gcomp {} and {}); index entries read: {} (gcomp {})",
        size(&writes["stored_bytes_written"]),
        size(&index["bytes_written"]),
        size(&writes["gcomp_bytes_written"]),
        size(&index["gcomp_bytes_written"]),
        size(&index["bytes_fetched"]),
        size(&index["gcomp_bytes_fetched"]),
    )?;
    print_line!(
        "maintenance: {} blocks coded anew ({} read, {} stored), {} moved ({})",
        count(&maintenance["recoded_blocks"]),
        size(&maintenance["stored_bytes_fetched"]),
        size(&maintenance["stored_bytes_written"]),
        count(&maintenance["moved_blocks"]),
        size(&maintenance["moved_bytes"]),
    )?;
    let write_backs = &stats["write_backs"];
    print_line!(
        "write-backs that wait for room: {} ({}); waited: {}; refused, and lost: {} ({})",
        count(&write_backs["waiting"]),
        size(&write_backs["waiting_bytes"]),
        count(&write_backs["waited"]),
        count(&write_backs["refused"]),
        size(&write_backs["refused_bytes"]),
    )?;
    Ok(())
}

pub(crate) async fn tensors(client: &Client) -> Result<()> {
    let tensors = ask(&client.api, Method::GET, "/tensors", None).await?;
    if client.json {
        return print_json(&tensors);
    }
    let mut table = new_table(&["tensor", "format", "layout", "shape", "DPA", "bytes"], 4);
    for tensor in rows(&tensors)? {
        let shape: Vec<_> = rows(&tensor["shape"])?.iter().map(text).collect();
        table.add_row([
            text(&tensor["name"]),
            text(&tensor["format"]),
            text(&tensor["layout"]["kind"]),
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

/// The pairs of files of the device that answers at `api`.
pub(crate) async fn seats(api: &Path) -> Result<Vec<Value>> {
    Ok(rows(&ask(api, Method::GET, "/guests", None).await?)?.to_vec())
}

/// The disks of the device that answers at `api`.
pub(crate) async fn disk_list(api: &Path) -> Result<Vec<Value>> {
    Ok(rows(&ask(api, Method::GET, "/disks", None).await?)?.to_vec())
}

pub(crate) async fn guests(client: &Client) -> Result<()> {
    let seats = seats(&client.api).await?;
    if client.json {
        return print_json(&seats.into());
    }
    let mut table = new_table(&["", "name", "base", "bytes", "views", "bytes", "control socket"], 7);
    for seat in &seats {
        table.add_row([
            text(&seat["kind"]),
            seat["name"].as_str().unwrap_or_default().to_owned(),
            text(&seat["base"]["path"]),
            size(&seat["base"]["bytes"]),
            text(&seat["views"]["path"]),
            size(&seat["views"]["bytes"]),
            text(&seat["ctl"]),
        ]);
    }
    print_line!("{table}")?;
    Ok(())
}

pub(crate) async fn view(command: View) -> Result<()> {
    match command {
        View::List(client) => views(&client).await,
        View::Add { tensor, spelling, client } => {
            let asked = json!({ "tensor": tensor, "spelling": spelling });
            let view = ask(&client.api, Method::POST, "/views", Some(asked)).await?;
            if client.json {
                return print_json(&view);
            }
            print_views(&[view])
        }
    }
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
            format!(
                "no tensor is called {:?}; a range is given by its DPA and its bytes, see `lamina tensors`",
                command.what
            )
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

/// What is counted of each guest and host, where there are any.
fn print_partitions(partitions: &[Value], hosts: &[Value]) -> Result<()> {
    if !partitions.is_empty() {
        let mut table = new_table(
            &["partition", "DPA", "bytes", "stored", "quota", "refused", "read", "views read", "written"],
            1,
        );
        for part in partitions {
            let requests = &part["requests"];
            table.add_row([
                text(&part["name"]),
                address(&part["dpa"]),
                size(&part["capacity_bytes"]),
                size(&part["stored_bytes"]),
                size(&part["quota_bytes"]),
                count(&part["quota_refusals"]),
                size(&requests["base"]["bytes"]),
                size(&requests["views"]["bytes"]),
                size(&part["writes"]["base_written_bytes"]),
            ]);
        }
        print_line!("{table}")?;
    }
    if !hosts.is_empty() {
        let head = ["host", "holds", "of", "given", "written", "lines merged", "invalidated", "evicted"];
        let mut table = new_table(&head, 1);
        for host in hosts {
            table.add_row([
                text(&host["name"]),
                size(&host["held_bytes"]),
                size(&host["cache_bytes"]),
                count(&host["pages_given"]),
                count(&host["pages_written"]),
                count(&host["lines_merged"]),
                count(&host["pages_invalidated"]),
                count(&host["pages_evicted"]),
            ]);
        }
        print_line!("{table}")?;
    }
    Ok(())
}

/// What is counted of each device that the region is interleaved over.
fn print_interleave(told: &Value) -> Result<()> {
    let head = [
        "device",
        "reads",
        "plain fetched",
        "stored fetched",
        "writes",
        "written",
        "stored written",
        "modelled GB/s",
    ];
    let mut table = new_table(&head, 1);
    for device in rows(&told["devices"])? {
        table.add_row([
            text(&device["device"]),
            count(&device["reads"]),
            size(&device["plain_bytes_fetched"]),
            size(&device["stored_bytes_fetched"]),
            count(&device["writes"]),
            size(&device["written_bytes"]),
            size(&device["stored_bytes_written"]),
            ratio(&device["modelled_gbs"]),
        ]);
    }
    print_line!("{table}")?;
    print_line!(
        "{} devices by {} ({}), imbalance {}; modelled at {} GB/s a device: the region gives {} GB/s of plain bytes",
        text(&told["ways"]),
        size(&told["granule_bytes"]),
        text(&told["by"]),
        ratio(&told["imbalance"]),
        text(&told["modelled_device_gbs"]),
        ratio(&told["modelled_region_gbs"]),
    )?;
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

fn print_json(value: &Value) -> Result<()> {
    print_line!("{}", serde_json::to_string_pretty(value)?)?;
    Ok(())
}

/// A table of which the first columns are text and the others numbers.
pub(crate) fn new_table(head: &[&str], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(head);
    for column in table.column_iter_mut().skip(texts) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// What [`traffic`] tells.
const TRAFFIC: [&str; 10] = [
    "reads",
    "bytes",
    "planes",
    "stored fetched",
    "gcomp",
    "plain",
    "of plain",
    "index",
    "of plain with it",
    "staged",
];

fn traffic(traffic: &Value) -> Vec<String> {
    vec![
        count(&traffic["reads"]),
        size(&traffic["bytes"]),
        count(&traffic["planes_fetched"]),
        size(&traffic["stored_bytes_fetched"]),
        size(&traffic["gcomp_bytes_fetched"]),
        size(&traffic["plain_bytes_fetched"]),
        ratio(&traffic["of_plain"]),
        size(&traffic["index_bytes_fetched"]),
        ratio(&traffic["of_plain_with_index"]),
        size(&traffic["staged_bytes"]),
    ]
}

/// Requests by size.
fn print_fills(requests: &Value) -> Result<()> {
    let sizes = rows(&requests["base_fills"])?;
    let title = |fills: &Value| match &fills["up_to_bytes"] {
        Value::Null => "more".to_owned(),
        bytes => format!("to {}", size(bytes)),
    };
    let titles: Vec<String> = sizes.iter().map(title).collect();
    let head: Vec<&str> = std::iter::once("fills").chain(titles.iter().map(String::as_str)).collect();
    let mut table = new_table(&head, 1);
    for (window, name) in [("base", "base_fills"), ("views", "view_fills")] {
        let fills = rows(&requests[name])?.iter().map(|fills| count(&fills["fills"]));
        table.add_row(std::iter::once(window.to_owned()).chain(fills).collect::<Vec<_>>());
    }
    print_line!("{table}")?;
    Ok(())
}

fn rows(value: &Value) -> Result<&[Value]> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| anyhow!("the device's answer is no list: {value}"))
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn size(value: &Value) -> String {
    value.as_u64().map_or_else(|| "–".to_owned(), |bytes| BinaryBytes(bytes).to_string())
}

fn count(value: &Value) -> String {
    value.as_u64().map_or_else(|| "–".to_owned(), |count| HumanCount(count).to_string())
}

fn address(value: &Value) -> String {
    value.as_u64().map_or_else(|| "–".to_owned(), |address| format!("{address:#x}"))
}

fn ratio(value: &Value) -> String {
    value.as_f64().map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.3}"))
}
