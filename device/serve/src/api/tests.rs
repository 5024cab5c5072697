//! The API is what [`openapi`] says: every route is in it, everything in it is answered, and what
//! is answered has its form.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::http::Method;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use lamina_device::device::{Device, DeviceConfig};
use serde_json::Value;
use tokio::runtime::Runtime;

use super::*;

#[test]
fn only_loopback_names_are_loopback() {
    for host in ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:9000", "[::1]", "[::1]:9000"] {
        assert!(is_loopback_name(host), "{host}");
    }
    for host in [
        "",
        "evil.example",
        "localhost.evil.example:80",
        "10.0.0.1",
        "[::2]:1",
        "127.0.0.1.evil.example",
        "a@b:c",
    ] {
        assert!(!is_loopback_name(host), "{host}");
    }
}

/// Whether `value` has the form that `schema` describes: what of JSON Schema the document uses.
fn check(document: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let wrong = |why: &str| Err(format!("{at}: {why}: {value} by {schema}"));
    for (keyword, wanted) in schema.as_object().expect("a schema") {
        match keyword.as_str() {
            "$ref" => {
                let pointer = wanted.as_str().unwrap().trim_start_matches('#');
                let named = document.pointer(pointer).unwrap_or_else(|| panic!("no {pointer}"));
                check(document, named, value, at)?;
            }
            "type" => {
                let kinds = wanted.as_array().cloned().unwrap_or_else(|| vec![wanted.clone()]);
                let is = |kind: &Value| match kind.as_str().unwrap() {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "number" => value.is_number(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    other => panic!("a type {other}"),
                };
                if !kinds.iter().any(is) {
                    return wrong("another type");
                }
            }
            "const" if value != wanted => return wrong("another value"),
            "enum" if !wanted.as_array().unwrap().contains(value) => return wrong("none of the values"),
            "minimum" if value.as_i64().is_some_and(|n| n < wanted.as_i64().unwrap()) => {
                return wrong("less");
            }
            "const" | "enum" | "minimum" | "maximum" | "description" | "minLength" | "maxLength"
            | "properties" => {}
            "oneOf" => {
                let all = wanted.as_array().unwrap().iter();
                if all.filter(|one| check(document, one, value, at).is_ok()).count() != 1 {
                    return wrong("not one of these");
                }
            }
            "items" => {
                for (number, item) in value.as_array().into_iter().flatten().enumerate() {
                    check(document, wanted, item, &format!("{at}/{number}"))?;
                }
            }
            "required" => {
                let lacks = |name: &&Value| value.is_object() && value.get(name.as_str().unwrap()).is_none();
                if let Some(name) = wanted.as_array().unwrap().iter().find(lacks) {
                    return wrong(&format!("without {name}"));
                }
            }
            "additionalProperties" => {
                for (name, one) in value.as_object().into_iter().flatten() {
                    match wanted {
                        Value::Bool(false) if schema["properties"].get(name).is_none() => {
                            return wrong(&format!("with {name}"));
                        }
                        Value::Object(_) => check(document, wanted, one, &format!("{at}/{name}"))?,
                        _ => {}
                    }
                }
            }
            other => panic!("a keyword {other}"),
        }
    }
    for (name, one) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        if let Some(value) = value.get(name) {
            check(document, one, value, &format!("{at}/{name}"))?;
        }
    }
    Ok(())
}

struct Asked {
    runtime: Runtime,
    router: Router,
    document: Value,
}

impl Asked {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        let router = router(Control::new(device));
        let mut asked = Self { runtime, router, document: Value::Null };
        asked.document = asked.ask("GET", "/openapi.json", "").1;
        asked
    }

    fn send(&self, method: &str, path: &str, body: &str) -> Response {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_owned()))
            .unwrap();
        let service = TowerToHyperService::new(self.router.clone());
        self.runtime.block_on(service.call(request)).unwrap()
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let answer = self.send(method, path, body);
        let status = answer.status().as_u16();
        let body = self.runtime.block_on(to_bytes(answer.into_body(), usize::MAX)).unwrap();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Asks, and checks that the document has that answer in this form.
    fn checked(&self, method: &str, path: &str, described: &str, body: &str) -> (u16, Value) {
        let (status, value) = self.ask(method, path, body);
        let operation = &self.document["paths"][described][method.to_lowercase()];
        assert!(operation.is_object(), "{method} {described} is not described");
        let responses = &operation["responses"];
        let exact = responses.get(status.to_string());
        let range = exact.or_else(|| responses.get(format!("{}XX", status / 100)));
        let answer = range.unwrap_or_else(|| panic!("{method} {path}: {status} is not described"));
        if let Some(schema) = answer["content"]["application/json"].get("schema") {
            let found = check(&self.document, schema, &value, path);
            assert!(found.is_ok(), "{method} {path}: {}", found.unwrap_err());
        }
        (status, value)
    }
}

#[test]
fn every_route_is_described_and_everything_described_is_a_route() {
    let asked = Asked::new();
    let described = asked.document["paths"].as_object().unwrap();
    let live = Live::new(Control::new(Arc::new(Device::new(DeviceConfig::new(4 << 20, 4 << 20)).unwrap())));
    let known: BTreeSet<_> = routes(live).iter().map(|(path, _)| path.replace("{*", "{")).collect();
    assert_eq!(known, described.keys().cloned().collect());
    for (path, methods) in described {
        for method in [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            let here = methods.get(method.as_str().to_lowercase()).is_some();
            let status = asked.send(method.as_str(), &path.replace("{name}", "nobody"), "7").status();
            assert_eq!(status != StatusCode::METHOD_NOT_ALLOWED, here, "{method} {path}: {status}");
        }
    }
    let mut ids = BTreeSet::new();
    let operations = || described.values().flat_map(|methods| methods.as_object().unwrap().values());
    for operation in operations().filter(|operation| operation.get("operationId").is_some()) {
        assert!(operation["responses"]["500"].is_object(), "a device fails, too: {operation}");
    }
    for operation in operations() {
        if let Some(id) = operation.get("operationId") {
            assert!(ids.insert(id.as_str().unwrap().to_owned()), "{id} twice");
        }
    }
}

#[test]
fn what_is_answered_has_the_form_that_is_described() {
    let asked = Asked::new();
    let made = |method, path, described, body: &str, status| {
        let (got, value) = asked.checked(method, path, described, body);
        assert_eq!(got, status, "{method} {path} {body}: {value}");
        value
    };
    let kv = r#"{"name":"k.3.k","length":65536,"format":"bf16","shape":[512,64],"layout":{"kind":"kv","channels":64,"window":128}}"#;
    made("POST", "/tensors", "/tensors", r#"{"name":"a","length":8192,"format":"bf16"}"#, 201);
    made("POST", "/tensors", "/tensors", &format!("[{kv}]"), 201);
    made("POST", "/views", "/views", r#"{"tensor":"a","spelling":"e8m3"}"#, 201);
    made("POST", "/poison/inject", "/poison/inject", r#"{"offset":0,"length":4096}"#, 200);
    for path in ["/stats", "/tensors", "/views", "/guests", "/disks", "/poison", "/events", "/openapi.json"] {
        made("GET", path, path, "", 200);
    }
    made("GET", "/models", "/models", "", 409);
    made("POST", "/flush", "/flush", "{}", 200);
    made("POST", "/flush", "/flush", "", 200);
    assert_eq!(asked.document["paths"]["/flush"]["post"]["requestBody"]["required"], false);
    // What may be left out of a request is described so.
    let usual = r#"{"name":"k","length":65536,"format":"bf16","layout":{"kind":"kv","channels":64}}"#;
    let spec = asked.document["components"]["schemas"]["TensorSpec"].clone();
    assert_eq!(check(&asked.document, &spec, &serde_json::from_str(usual).unwrap(), ""), Ok(()));
    assert_eq!(made("POST", "/tensors", "/tensors", usual, 201)["layout"]["window"], 128);
    made("DELETE", "/tensors/k", "/tensors/{name}", "", 204);
    made("POST", "/flush", "/flush", r#"{"offset":0,"length":null}"#, 200);
    made("POST", "/discard", "/discard", r#"{"offset":0,"length":4096}"#, 200);
    made("POST", "/poison/clear", "/poison/clear", r#"{"offset":0,"length":4096}"#, 200);
    made("PATCH", "/tensors/k.3.k", "/tensors/{name}", r#"{"length":131072}"#, 200);
    let derived = r#"{"name":"near","length":8192,"format":"bf16","base":"a"}"#;
    made("POST", "/tensors", "/tensors", derived, 201);
    made("POST", "/detach", "/detach", r#"{"tensor":"near"}"#, 200);
    made("DELETE", "/tensors/near", "/tensors/{name}", "", 204);
    made("GET", "/detach", "/detach", "", 200);
    made("DELETE", "/views", "/views", r#"{"tensor":"a","spelling":"e8m3"}"#, 200);
    made("DELETE", "/tensors/a", "/tensors/{name}", "", 204);
    // Refusals have words.
    for (method, path, described, body, status) in [
        ("POST", "/tensors", "/tensors", "{}", 400),
        (
            "POST",
            "/tensors",
            "/tensors",
            r#"{"name":"x","length":4096,"format":"bf16","layout":{"kind":"weight","channels":2}}"#,
            400,
        ),
        ("POST", "/tensors", "/tensors", r#"{"name":"","length":1,"format":"bf16"}"#, 422),
        (
            "POST",
            "/tensors",
            "/tensors",
            r#"{"name":"x","length":18446744073709551615,"format":"int8"}"#,
            507,
        ),
        ("DELETE", "/tensors/nobody", "/tensors/{name}", "", 404),
        ("POST", "/views", "/views", r#"{"tensor":"nobody","spelling":"full"}"#, 404),
        ("POST", "/discard", "/discard", r#"{"offset":18446744073709551615,"length":1}"#, 422),
        ("POST", "/poison/inject", "/poison/inject", r#"{"offset":0,"length":-1}"#, 400),
        ("POST", "/models", "/models", r#"{"path":"/nowhere"}"#, 409),
        ("DELETE", "/models/nobody", "/models/{name}", "", 409),
    ] {
        let (got, value) = asked.checked(method, path, described, body);
        assert_eq!(got, status, "{method} {path} {body}: {value}");
        assert!(value["error"].as_str().is_some_and(|why| !why.is_empty()), "{value}");
    }
}

#[test]
fn the_forms_are_checked_for_real() {
    let asked = Asked::new();
    let schema = |name: &str| asked.document["components"]["schemas"][name].clone();
    let right = json!({ "offset": 1, "length": 2 });
    assert_eq!(check(&asked.document, &schema("Range"), &right, ""), Ok(()));
    for wrong in [
        json!({ "offset": 1 }),
        json!({ "offset": 1, "length": -2 }),
        json!([]),
        json!({ "offset": 1, "length": 2, "x": 3 }),
    ] {
        assert!(check(&asked.document, &schema("Range"), &wrong, "").is_err(), "{wrong}");
    }
    let layout = json!({ "kind": "kv", "channels": 1 });
    assert!(check(&asked.document, &schema("Layout"), &layout, "").is_err());
    let (_, mut stats) = asked.ask("GET", "/stats", "");
    stats["requests"]["base"]["reads"] = "many".into();
    assert!(check(&asked.document, &schema("Stats"), &stats, "").is_err());
}

#[test]
fn a_live_event_has_the_form_that_is_described() {
    let asked = Asked::new();
    let tensor =
        r#"{"name":"a.0.k","length":8192,"format":"bf16","layout":{"kind":"kv","channels":64,"window":16}}"#;
    assert_eq!(asked.ask("POST", "/tensors", tensor).0, 201);
    assert_eq!(asked.ask("POST", "/views", r#"{"tensor":"a.0.k","spelling":"full"}"#).0, 201);
    let answer = asked.send("GET", "/live", "");
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "text/event-stream");
    let mut body = answer.into_body();
    let frame = asked.runtime.block_on(http_body_util::BodyExt::frame(&mut body)).unwrap().unwrap();
    let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
    let data = text.strip_prefix("event: whole\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
    let update: Value = serde_json::from_str(data).unwrap();
    let form = check(&asked.document, &asked.document["components"]["schemas"]["Update"], &update, "");
    assert_eq!(form, Ok(()));
    assert_eq!(update["layers"][0]["layer"], 0);
}

#[test]
fn names_of_the_device_itself_are_refused() {
    let asked = Asked::new();
    let tensor = json!({
        "name": r#"/.lamina/files/7/{"format":"bf16"}"#,
        "dpa": 0, "length": 65536, "format": "bf16",
    });
    for body in [tensor.clone(), json!([tensor])] {
        let (status, answer) = asked.checked("POST", "/tensors", "/tensors", &body.to_string());
        assert_eq!(status, 422, "{answer}");
    }
}

#[test]
fn a_name_that_is_no_text_is_refused_as_all_else() {
    let asked = Asked::new();
    for (method, path, described) in [
        ("DELETE", "/tensors/%ff", "/tensors/{name}"),
        ("PATCH", "/tensors/%ff", "/tensors/{name}"),
        ("DELETE", "/models/%ff", "/models/{name}"),
        ("GET", "/packed/64/%ff", "/packed/{window}/{name}"),
        ("POST", "/hosts/%ff/revoke", "/hosts/{name}/revoke"),
    ] {
        let (status, answer) = asked.checked(method, path, described, r#"{"length":1}"#);
        assert_eq!((status, answer["error"].is_string()), (400, true), "{method} {path}: {answer}");
    }
}
