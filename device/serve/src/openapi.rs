//! The description of the API, `GET /openapi.json`, in version 3.1 of that format.
//!
//! * Written by hand, next to what is derived: counters come from [`sections`], names of formats
//!   and codecs from the codec. Tests hold it to the router: every route and method is in it, every
//!   one in it is answered, and what is answered has the form that it says.
//! * Objects of answers are closed: a field that is added has to be described. `/stats` and `/live`
//!   are open where counters are, whose completeness `docs/counters.md` holds.

use std::sync::LazyLock;

use lamina_codec::packkv::{PackTokens, RelativeScale, Repack};
use lamina_codec::{Codec, format::Format};
use lamina_device::counters::{Figure, Kind, Section, Unit};
use lamina_device::tensor::MAX_NAME_BYTES;
use serde_json::{Map, Value, json};

use super::metrics::{CONTENT_TYPE, sections};

/// The document as it is sent.
pub(super) static TEXT: LazyLock<String> = LazyLock::new(|| document().to_string());

pub(super) fn document() -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Lamina",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
            "description": "A device that is being served. It answers on a Unix socket and, with --tcp, on a loopback address, to its own user and root. Offsets are of the base window, in bytes.",
        },
        "paths": paths(),
        "components": { "schemas": schemas() },
    })
}

fn paths() -> Value {
    json!({
        "/": { "get": operation("page", "A page to look at", vec![text("200", "text/html")]) },
        "/openapi.json": { "get": operation("openapi", "This document", vec![answer("200", &json!({ "type": "object" }))]) },
        "/stats": { "get": operation("stats", "All counters", vec![answer("200", &of("Stats"))]) },
        "/metrics": { "get": operation("metrics", "All counters as OpenMetrics", vec![text("200", CONTENT_TYPE)]) },
        "/live": { "get": operation("live", "What a viewer sees, once a second: server-sent events `whole`, then `tick` with what changed, each an Update", vec![text("200", "text/event-stream")]) },
        "/events": { "get": operation("events", "The last events: levels of the store, writes that find no space", vec![answer("200", &list("Event"))]) },
        "/guests": { "get": operation("guests", "The exports, each with the socket for its guest", vec![answer("200", &list("Export"))]) },
        "/disks": { "get": operation("disks", "The disks that are served", vec![answer("200", &list("Disk"))]) },
        "/planner": { "get": operation("planner", "A page with sliders: what a server with such devices would do", vec![text("200", "text/html")]) },
        "/trace": {
            "get": changing("record", "Records what requests move, until that is stopped or the peer goes: a trace, as it comes", None, vec![text("200", "application/octet-stream")]),
            "delete": changing("stopRecording", "Ends the recording; the trace that is being sent ends with what was moved before", None, vec![done()]),
        },
        "/tensors": {
            "get": operation("tensors", "The tensors", vec![answer("200", &list("Tensor"))]),
            "post": changing("createTensors", "Makes a tensor, or all of a list of them or none",
                Some(json!({ "oneOf": [of("TensorSpec"), list("TensorSpec")] })),
                vec![answer("201", &json!({ "oneOf": [of("Tensor"), list("Tensor")] }))]),
        },
        "/tensors/{name}": {
            "parameters": [name("The tensor's name, of which / stays as it is")],
            "patch": changing("resizeTensor", "Makes a tensor longer or shorter where it is", Some(of("Length")), vec![answer("200", &of("Tensor"))]),
            "delete": changing("removeTensor", "Removes a tensor and its views; its bytes stay", None, vec![nothing()]),
        },
        "/detach": {
            "get": operation("detaching", "What is being detached, and how far that is", vec![answer("200", &list("Detaching"))]),
            "post": changing("detach", "Stores a tensor that has a base, or all of a model, by themselves: they need none then",
                Some(json!({ "oneOf": [object(&[("tensor", json!({ "type": "string" }))]), object(&[("model", json!({ "type": "string" }))])] })),
                vec![answer("200", &list("Tensor"))]),
        },
        "/packed/{window}/{name}": {
            "parameters": [
                json!({ "name": "window", "in": "path", "required": true, "description": "The number of the window", "schema": { "type": "integer", "minimum": 0 } }),
                name("The name of a lossy tensor, of which / stays as it is"),
            ],
            "get": operation("packed", "A window of a lossy tensor as it is stored, for who computes with it so; nothing if it is exact. Stores to it are flushed before",
                vec![text("200", "application/octet-stream"), nothing()]),
        },
        "/views": {
            "get": operation("views", "The views", vec![answer("200", &list("View"))]),
            "post": changing("createView", "Makes a view of a tensor", Some(of("ViewName")), vec![answer("201", &of("View"))]),
            "delete": changing("removeView", "Removes a view: what it was", Some(of("ViewName")), vec![answer("200", &of("View"))]),
        },
        "/hosts/{name}/revoke": {
            "parameters": [name("The host's name")],
            "post": changing("revokeHost", "Takes a host's access to the shared region away: its stores reach nobody, its loads are poison", None, vec![done()]),
        },
        "/hosts/{name}/admit": {
            "parameters": [name("The host's name")],
            "post": changing("admitHost", "Gives a host its access back; it begins as one that holds nothing", None, vec![done()]),
        },
        "/flush": { "post": optional(changing("flush", "Makes stores to a range of the base window visible in every view; without a body to all of it", Some(of("FlushRange")), vec![done()])) },
        "/discard": { "post": changing("discard", "Drops a range of the base window, which reads as zero then", Some(of("Range")), vec![done()]) },
        "/models": {
            "get": operation("models", "The models that are shown as files", vec![answer("200", &of("Models"))]),
            "post": changing("loadModel", "Loads a model from a path of the host, or compares it with the one of its name (`is_kept`); over the Unix socket it ends when who asks goes", Some(of("ModelRequest")), vec![answer("200", &of("Model")), answer("201", &of("Model"))]),
        },
        "/models/{name}": {
            "parameters": [name("The model's name")],
            "delete": changing("removeModel", "Removes a model and what it holds", None, vec![nothing()]),
        },
        "/poison": { "get": operation("poison", "The poisoned blocks", vec![answer("200", &list("Poisoned"))]) },
        "/poison/inject": { "post": changing("injectPoison", "Poisons the blocks of a range, as damage would", Some(of("Range")), vec![done()]) },
        "/poison/clear": { "post": changing("clearPoison", "Makes the poisoned blocks of a range zeros", Some(of("Range")), vec![done()]) },
    })
}

/// What is asked without a body.
fn operation(id: &str, summary: &str, answers: Vec<(&str, Value)>) -> Value {
    let mut responses: Map<_, _> =
        answers.into_iter().map(|(status, answer)| (status.to_owned(), answer)).collect();
    for (status, means) in [
        ("4XX", "It is refused, and why"),
        ("500", "The device failed, and how"),
        ("503", "The device is ending"),
        ("507", "There is no space for it"),
    ] {
        responses.insert(status.to_owned(), answer_of(means, &of("Error")));
    }
    json!({ "operationId": id, "summary": summary, "responses": responses })
}

/// What changes or records something: its body, if it has one, is JSON.
fn changing(id: &str, summary: &str, body: Option<Value>, answers: Vec<(&str, Value)>) -> Value {
    let mut operation = operation(id, summary, answers);
    match body {
        Some(schema) => {
            operation["requestBody"] =
                json!({ "required": true, "content": { "application/json": { "schema": schema } } });
        }
        // No page of a browser can send this elsewhere without asking first.
        None => {
            operation["parameters"] = json!([{
                "name": "Content-Type", "in": "header", "required": true, "schema": { "const": "application/json" },
            }]);
        }
    }
    operation
}

/// The same of what may come without its body.
fn optional(mut operation: Value) -> Value {
    operation["requestBody"]["required"] = json!(false);
    operation
}

fn answer(status: &'static str, schema: &Value) -> (&'static str, Value) {
    (status, answer_of("It is done", schema))
}

fn answer_of(means: &str, schema: &Value) -> Value {
    json!({ "description": means, "content": { "application/json": { "schema": schema } } })
}

fn text<'s>(status: &'s str, kind: &str) -> (&'s str, Value) {
    (status, json!({ "description": "It is done", "content": { kind: { "schema": { "type": "string" } } } }))
}

fn nothing() -> (&'static str, Value) {
    ("204", json!({ "description": "It is done" }))
}

fn done() -> (&'static str, Value) {
    answer("200", &json!({ "type": "object", "additionalProperties": false }))
}

fn name(means: &str) -> Value {
    json!({ "name": "name", "in": "path", "required": true, "description": means, "schema": { "type": "string", "minLength": 1 } })
}

fn of(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{schema}") })
}

fn list(schema: &str) -> Value {
    json!({ "type": "array", "items": of(schema) })
}

/// An object with these fields; those that end with `?` may be missing. It has no others.
fn object(fields: &[(&str, Value)]) -> Value {
    let required: Vec<_> = fields.iter().map(|(name, _)| *name).filter(|name| !name.ends_with('?')).collect();
    let properties: Map<_, _> =
        fields.iter().map(|(name, schema)| (name.trim_end_matches('?').to_owned(), schema.clone())).collect();
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

fn or_null(schema: &Value) -> Value {
    json!({ "oneOf": [schema, { "type": "null" }] })
}

fn schemas() -> Value {
    let string = || json!({ "type": "string" });
    let count = || json!({ "type": "integer", "minimum": 0, "maximum": u64::MAX });
    let counts = || json!({ "type": "array", "items": count() });
    let seconds = || or_null(&json!({ "type": "number" }));
    let format = || json!({ "enum": Format::ALL.map(Format::name) });
    let codec = || json!({ "enum": Codec::ALL.map(|codec| codec.to_string()) });
    let moved = || {
        let measured = || or_null(&count());
        [
            ("reads", count()),
            ("bytes", count()),
            ("stored", count()),
            ("plain", measured()),
            ("gcomp", measured()),
        ]
    };
    let with = |fields: Vec<(&str, Value)>| object(&[fields, moved().to_vec()].concat());
    let file = object(&[("path", string()), ("bytes", count())]);
    let rules =
        object(&[("name", string()), ("rows?", string()), ("experts?", counts()), ("view", string())]);
    let range = [("offset", count()), ("length", count())];
    json!({
        "Error": object(&[("error", string())]),
        "Length": object(&[("length", count())]),
        "Detaching": object(&[("name", string()), ("bytes", count()), ("total", count())]),
        "Range": object(&range),
        "FlushRange": object(&[("offset?", count()), ("length?", or_null(&count()))]),
        "ViewName": object(&[("tensor", string()), ("spelling", string())]),
        "Layout": layout("window"),
        "LayoutSpec": layout("window?"),
        "TensorSpec": object(&[
            ("name", json!({ "type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES })),
            ("dpa?", or_null(&count())),
            ("length", count()),
            ("elements?", or_null(&count())),
            ("shape?", counts()),
            ("format", format()),
            ("layout?", of("LayoutSpec")),
            ("codec?", or_null(&codec())),
            ("base?", or_null(&string())),
        ]),
        "Tensor": object(&[
            ("name", string()),
            ("dpa", count()),
            ("length", count()),
            ("elements", count()),
            ("shape", counts()),
            ("format", format()),
            ("layout", of("Layout")),
            ("codec", codec()),
            ("base?", string()),
        ]),
        "View": object(&[
            ("tensor", string()),
            ("view", string()),
            ("offset", count()),
            ("length", count()),
            ("elements", count()),
            ("bits", count()),
            ("scale_exp", json!({ "type": "integer" })),
            ("planes", count()),
        ]),
        "Event": object(&[
            ("number", count()),
            ("seconds", json!({ "type": "number" })),
            ("kind", string()),
            ("text", string()),
        ]),
        "Poisoned": object(&[
            ("dpa", count()),
            ("length", count()),
            ("tensor", or_null(&string())),
            ("cause", json!({ "enum": ["damaged", "injected", "found"] })),
            ("why", string()),
            ("event", count()),
        ]),
        "Export": object(&[
            ("kind", json!({ "enum": ["root", "guest", "host"] })),
            ("name?", string()),
            ("base", file.clone()),
            ("views", file.clone()),
            ("targets?", json!({ "type": "array", "items": file })),
            ("ctl", string()),
        ]),
        "Disk": object(&[
            ("serial", string()),
            ("socket", string()),
            ("shows", json!({ "oneOf": [
                { "enum": ["base", "views"] },
                object(&[("view", object(&[("tensor", string()), ("view", string())]))]),
            ] })),
            ("guest?", string()),
            ("gone?", json!({ "type": "boolean" })),
            ("bytes", count()),
            ("read_only", json!({ "type": "boolean" })),
            ("connected", json!({ "type": "boolean" })),
            ("partitions?", json!({ "type": "array", "items": object(&[
                ("number", count()),
                ("name", string()),
                ("tensor", string()),
                ("view", string()),
                ("offset", count()),
                ("length", count()),
            ]) })),
        ]),
        "Models": object(&[
            ("models", list("Model")),
            ("loading", or_null(&object(&[("name", string()), ("bytes", count()), ("total", count())]))),
            ("files", or_null(&object(&[
                ("inodes", count()),
                ("taken_bytes", count()),
                ("limit_bytes", count()),
                ("read_bytes", count()),
                ("written_bytes", count()),
                ("records", count()),
            ]))),
            ("no_files", or_null(&string())),
        ]),
        "Model": object(&[
            ("name", string()),
            ("bytes", count()),
            ("stored", count()),
            ("base?", string()),
            ("apart?", json!({ "type": "array", "items": object(&[("tensor", string()), ("why", string())]) })),
            ("left_out?", json!({ "type": "array", "items": object(&[("file", string()), ("why", string())]) })),
            ("files", json!({ "type": "array", "items": object(&[
                ("path", string()),
                ("kind", string()),
                ("bytes", count()),
                ("stored", count()),
                ("views", json!({ "type": "array", "items": object(&[
                    ("view", string()),
                    ("bytes", count()),
                    ("read", count()),
                    ("fetched", count()),
                ]) })),
            ]) })),
        ]),
        "ModelRequest": object(&[
            ("path", string()),
            ("name?", or_null(&string())),
            ("views?", json!({ "type": "array", "items": string() })),
            ("base?", or_null(&string())),
            ("is_kept?", json!({ "type": "boolean" })),
            ("maps?", json!({ "type": "object", "additionalProperties":
                object(&[("tensor?", json!({ "type": "array", "items": rules }))]) })),
        ]),
        "Stats": stats(),
        "Update": object(&[
            ("seconds", seconds()),
            ("stats", of("Stats")),
            ("formats", json!({ "type": "array", "items": object(&[
                ("format", format()),
                ("bits", count()),
                ("exponent_bits", count()),
                ("mantissa_bits", count()),
                ("logical_bytes", count()),
                ("plane_bytes", count()),
                ("planes", json!({ "type": "array", "items": { "type": "object" } })),
            ]) })),
            ("precisions", json!({ "type": "array", "items": with(vec![("view", string()), ("tensors", count())]) })),
            ("layers", json!({ "type": "array", "items":
                with(vec![("layer", count()), ("length", count()), ("stored_bytes", count())]) })),
            ("guests", list("Export")),
            ("poison", list("Poisoned")),
            ("events", list("Event")),
            ("hottest", json!({ "type": "array", "items":
                object(&[("tensor", string()), ("bytes", count()), ("stored", count())]) })),
            ("latency", json!({ "type": "array", "items": object(&[
                ("window", string()),
                ("request", json!({ "enum": ["read", "write"] })),
                ("requests", count()),
                ("p50_seconds", seconds()),
                ("p99_seconds", seconds()),
                ("max_seconds", seconds()),
                ("now_requests", count()),
                ("now_p50_seconds", seconds()),
                ("now_p99_seconds", seconds()),
            ]) })),
            ("tensors", json!({ "type": "array", "items": with(vec![
                ("name", string()),
                ("format", format()),
                ("layout", json!({ "enum": ["weight", "kv", "lossy kv"] })),
                ("base", or_null(&string())),
                ("codec", codec()),
                ("dpa", count()),
                ("length", count()),
                ("stored_bytes", count()),
            ]) })),
            ("tensors_gone", json!({ "type": "array", "items": string() })),
            ("views", json!({ "type": "array", "items": with(vec![
                ("tensor", string()),
                ("view", string()),
                ("offset", count()),
                ("length", count()),
                ("bits", count()),
                ("planes", count()),
            ]) })),
            ("views_gone", json!({ "type": "array", "items": { "type": "array", "items": string() } })),
        ]),
    })
}

/// A tensor's layout. What is answered always has the tokens of a window.
fn layout(window: &str) -> Value {
    let string = || json!({ "type": "string" });
    let count = || json!({ "type": "integer", "minimum": 0, "maximum": u64::MAX });
    json!({ "oneOf": [
        object(&[("kind", json!({ "const": "weight" }))]),
        object(&[
            ("kind", json!({ "const": "kv" })),
            ("channels", count()),
            (window, count()),
            ("stride?", or_null(&count())),
            ("paged?", or_null(&object(&[("groups", count()), ("block", count())]))),
        ]),
        object(&[
            ("kind", json!({ "const": "lossy_kv" })),
            ("channels", count()),
            (window, count()),
            ("lossy", json!({ "oneOf": [string(), object(&[
                ("scale?", json!({ "type": "number", "minimum": RelativeScale::MIN, "maximum": 1 })),
                ("repack?", json!({ "enum": Repack::ALL.map(Repack::name) })),
                ("pack?", json!({ "enum": PackTokens::ALL.map(PackTokens::tokens) })),
            ])] })),
        ]),
    ] })
}

/// What `/stats` answers, by the declared figures. Objects that a device may lack are not required.
fn stats() -> Value {
    let mut stats =
        json!({ "type": "object", "properties": {}, "required": ["device", "requests", "tensors", "views"] });
    for section in sections() {
        for place in section.places {
            let object = match place.list {
                None => below(&mut stats, place.each),
                Some(list) => {
                    let items = below(&mut stats, list);
                    items["type"] = json!(["array", "null"]);
                    if items.get("items").is_none() {
                        items["items"] = json!({ "type": "object", "properties": {} });
                    }
                    below(&mut items["items"], place.each)
                }
            };
            describe(object, section);
        }
    }
    stats
}

/// The schema at a JSON pointer of what `schema` describes.
fn below<'s>(schema: &'s mut Value, pointer: &str) -> &'s mut Value {
    pointer.split('/').skip(1).fold(schema, |schema, name| {
        schema["type"] = json!(["object", "null"]);
        let properties = schema["properties"].as_object_mut().expect("made with the schema");
        properties.entry(name).or_insert_with(|| json!({ "properties": {} }))
    })
}

fn describe(object: &mut Value, section: &Section) {
    object["type"] = json!(["object", "null"]);
    for Figure { name, help, unit, kind, .. } in section.figures {
        let kind = match unit {
            _ if *kind == Kind::Histogram => "object",
            Unit::Count | Unit::Bytes => "integer",
            Unit::Seconds | Unit::Ratio | Unit::Rate => "number",
        };
        object["properties"][*name] = json!({ "type": [kind, "null"], "description": help });
    }
}
