//! `lamina stats`: the counters as tables.

use anyhow::Result;
use hyper::Method;
use serde_json::Value;

use super::{address, ask, count, new_table, print_json, ratio, rows, size, text};
use crate::args::Client;
use crate::out::print_line;

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
