//! The API: JSON over HTTP, on a Unix socket and on loopback TCP.
//!
//! | request | does |
//! |---|---|
//! | `GET /` | a page to look at |
//! | `GET /openapi.json` | what can be asked, for programs |
//! | `GET /live` | what a viewer sees, once a second: server-sent events (see [`live`](super::live)) |
//! | `GET /stats`, `GET /metrics` | all counters, as JSON and as OpenMetrics |
//! | `GET /tensors`, `DELETE /tensors/{name}` | lists, removes |
//! | `POST /tensors` | makes one (a [`TensorSpec`]), or all of a list of them or none |
//! | `PATCH /tensors/{name}` `{"length"}` | makes it longer or shorter where it is |
//! | `POST /detach` `{"tensor"}` or `{"model"}` | stores what is a difference by itself, so that it needs no base |
//! | `GET /detach` | how far that is |
//! | `GET /views`, `POST /views`, `DELETE /views` `{"tensor","spelling"}` | lists, makes, removes |
//! | `GET /models` | lists the models and their files |
//! | `POST /models` `{"path","name"?,…}` | loads one; who asks by the socket and goes ends it |
//! | `DELETE /models/{name}` | removes one |
//! | `GET /disks` | lists the disks: serial numbers, sockets, partitions |
//! | `GET /guests` | lists the exports: whose, paths, bytes, and the socket for the guest |
//! | `POST /hosts/{name}/revoke` | takes a host's access away |
//! | `POST /hosts/{name}/admit` | gives it back |
//! | `POST /flush` `{"offset"?,"length"?}` | the coherence fence |
//! | `POST /discard` `{"offset","length"}` | drops base bytes |
//! | `GET /planner` | a page with sliders: what a server with such devices would do |
//! | `GET /trace` | records what requests move until `DELETE /trace`: a trace, as it comes |
//! | `DELETE /trace` | ends that |
//! | `GET /events` | the last events: the store's levels, writes that find no room |
//! | `GET /poison` | lists the poisoned blocks |
//! | `POST /poison/inject`, `POST /poison/clear` `{"offset","length"}` | poisons blocks, or makes poisoned ones zeros |
//!
//! Who may: the socket is its owner's alone. TCP is bound to loopback addresses only, where every
//! user of the host and every web page in a browser on it can send requests. A connection of
//! another user than the device's or root gets 403 to whatever it asks (see
//! [`owner`](super::owner)). Against web pages, a request over TCP must name a loopback host (a
//! page that rebound its own name to 127.0.0.1 sends its own) and not be what a browser says
//! another page asks; and one that changes something must be of type `application/json`, which a
//! page cannot send elsewhere without asking first, which is never allowed here.
//!
//! Errors are `{"error": "…"}` with a status that says whose mistake it was. Bodies have at most
//! [`MAX_BODY`] bytes and [`BODY_TIME`] to arrive.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::future::ready;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{self, FromRequest, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Extension, Json, Router};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{DeserializeOwned, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc::channel;
use tokio::task::{JoinHandle, spawn_blocking};

use lamina_device::device::DeviceError;
use lamina_device::files::{FilesError, Loading, PrecisionMap, name_of};
use lamina_device::load::LoadError;
use lamina_device::tensor::{TensorError, TensorSpec};
use lamina_store::StoreError;

use super::additions::{self, Recorder};
use super::asker::Asker;
use super::control::{Control, ControlError};
use super::live::{self, Live};
use super::owner::{may_ask, owner};
use super::socket::OwnedSocket;
use super::{ServeError, http, metrics, openapi};

/// Bytes a request's body may have.
pub const MAX_BODY: usize = 1 << 20;
/// Bytes a request for tensors may have: a list of them may be long.
pub const MAX_TENSORS_BODY: usize = 32 << 20;
/// How long a body may take to arrive.
pub const BODY_TIME: Duration = Duration::from_secs(10);

/// Pages that other sites may link to.
const PAGES: [&str; 2] = ["/", "/planner"];

/// What the page may do: nothing from elsewhere, and its own inline script and style.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// An API that is being served. Dropping it ends it.
#[derive(Debug)]
pub struct Api {
    socket: PathBuf,
    address: Option<SocketAddr>,
    tasks: Vec<JoinHandle<Infallible>>,
}

impl Api {
    /// Serves `control` on a Unix socket at `socket` and, if given, on a loopback TCP address (port
    /// 0: any free one). Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When the socket or address is in use or cannot be made, or the address is not a loopback
    /// address.
    pub fn serve(control: Control, socket: &Path, tcp: Option<SocketAddr>) -> Result<Self, ServeError> {
        let unix = OwnedSocket::bind(socket)?;
        let tcp = match tcp {
            Some(address) => Some(claim_tcp(address)?),
            None => None,
        };
        Self::run(control, unix, socket, tcp)
    }

    /// Serves `control` on sockets that listen already, and stay when this ends. Must be called
    /// within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When a socket cannot be used.
    pub fn adopt(
        control: Control,
        listener: std::os::unix::net::UnixListener,
        socket: &Path,
        tcp: Option<std::net::TcpListener>,
    ) -> Result<Self, ServeError> {
        Self::run(control, OwnedSocket::adopt(listener, socket)?, socket, tcp)
    }

    fn run(
        control: Control,
        unix: OwnedSocket,
        socket: &Path,
        tcp: Option<std::net::TcpListener>,
    ) -> Result<Self, ServeError> {
        let mut api = Self { socket: socket.to_owned(), address: None, tasks: Vec::new() };
        let router = router(control);
        if let Some(listener) = tcp {
            let address = listener.local_addr().map_err(ServeError::Threads)?;
            let failed = |source| ServeError::Tcp { address, source };
            let listener = TcpListener::from_std(listener).map_err(failed)?;
            api.address = Some(address);
            let router = router.clone().layer(from_fn(not_foreign));
            api.tasks.push(tokio::spawn(async move {
                let accept = || async {
                    let (stream, peer) = listener.accept().await?;
                    let router = admit(router.clone(), stream.local_addr()?, peer);
                    Ok((stream, None, router))
                };
                http::serve(accept).await
            }));
        }
        api.tasks.push(tokio::spawn(async move {
            let accept = || async {
                let (stream, _) = unix.listener.accept().await?;
                let asker = Asker::of(&stream)?;
                Ok((stream, Some(asker), ready(router.clone())))
            };
            http::serve(accept).await
        }));
        Ok(api)
    }

    /// The Unix socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The TCP address, with the port that was chosen.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

/// Listens on a loopback address, without blocking; port 0 takes any free one.
///
/// # Errors
///
/// When the address is in use, or not a loopback address.
pub fn claim_tcp(address: SocketAddr) -> Result<std::net::TcpListener, ServeError> {
    if !address.ip().is_loopback() {
        return Err(ServeError::NotLoopback { address });
    }
    let failed = |source| ServeError::Tcp { address, source };
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

impl Drop for Api {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Everything that can be asked.
pub(crate) fn router(control: Control) -> Router {
    let live = Live::new(control.clone());
    let routes = routes(live).into_iter();
    routes
        .fold(Router::new(), |router, (path, methods)| router.route(path, methods))
        .fallback(|| async { Refusal::new(StatusCode::NOT_FOUND, "there is nothing here; see GET /") })
        .method_not_allowed_fallback(|| async {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this can be asked for, but not by this method")
        })
        .with_state(control)
}

/// Each path, and what can be asked there; [`openapi`] describes them.
fn routes(live: Live) -> Vec<(&'static str, MethodRouter<Control>)> {
    vec![
        ("/", get(page)),
        ("/openapi.json", get(description)),
        ("/stats", get(stats)),
        ("/metrics", get(open_metrics)),
        ("/live", get(move || watch(live.clone()))),
        ("/tensors", get(tensors).post(create_tensors)),
        ("/tensors/{*name}", delete(remove_tensor).patch(resize_tensor)),
        ("/detach", get(detaching).post(detach)),
        ("/packed/{window}/{*name}", get(packed)),
        ("/views", get(views).post(create_view).delete(remove_view)),
        ("/disks", get(disks)),
        ("/guests", get(guests)),
        ("/hosts/{name}/revoke", post(revoke_host)),
        ("/hosts/{name}/admit", post(admit_host)),
        ("/flush", post(flush)),
        ("/discard", post(discard)),
        ("/models", get(models).post(load_model)),
        ("/models/{*name}", delete(remove_model)),
        ("/planner", get(planner)),
        ("/trace", get(record).delete(stop_recording)),
        ("/events", get(events)),
        ("/poison", get(poison)),
        ("/poison/inject", post(inject_poison)),
        ("/poison/clear", post(clear_poison)),
    ]
}

/// What a connection over TCP may ask: everything if it is of the device's user or root, else
/// nothing.
async fn admit(router: Router, ours: SocketAddr, theirs: SocketAddr) -> Router {
    let found = spawn_blocking(move || owner(ours, theirs)).await.ok().flatten();
    if may_ask(found) {
        return router;
    }
    let whose = found.map_or_else(|| "an unknown user's".to_owned(), |user| format!("user {user}'s"));
    tracing::debug!(peer = %theirs, "a connection is {whose}, and refused");
    let error = format!(
        "this connection is {whose}; the API answers to the user who runs the device and to root only"
    );
    Router::new().fallback(|| async { Refusal::new(StatusCode::FORBIDDEN, error) })
}

/// An error as it is sent.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    error: String,
}

impl Refusal {
    fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self { status, error: error.into() }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "error": self.error }))).into_response()
    }
}

impl From<ControlError> for Refusal {
    fn from(why: ControlError) -> Self {
        let status = match &why {
            ControlError::Device(why)
            | ControlError::Serve(ServeError::Device(why) | ServeError::Discard { source: why, .. }) => {
                status_of(why)
            }
            ControlError::Serve(ServeError::PastEnd { .. }) => StatusCode::UNPROCESSABLE_ENTITY,
            ControlError::Serve(ServeError::Closing) => StatusCode::SERVICE_UNAVAILABLE,
            ControlError::Serve(_) | ControlError::Log(_) | ControlError::FilesUnsettled(_) => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            ControlError::Files(why) => status_of_files(why),
            ControlError::NoHost { .. } | ControlError::ViewGone { .. } => StatusCode::NOT_FOUND,
            ControlError::Revoked { .. } => StatusCode::FORBIDDEN,
            ControlError::NoModels | ControlError::LogOfFiles { .. } | ControlError::OfFiles { .. } => {
                StatusCode::CONFLICT
            }
        };
        Self::new(status, why.to_string())
    }
}

/// Whose mistake a refusal of the device was.
fn status_of(why: &DeviceError) -> StatusCode {
    match why {
        DeviceError::Tensor(TensorError::Unknown { .. }) | DeviceError::UnknownView { .. } => {
            StatusCode::NOT_FOUND
        }
        DeviceError::Tensor(
            TensorError::Exists { .. }
            | TensorError::Overlap { .. }
            | TensorError::NotFree { .. }
            | TensorError::IsBase { .. }
            | TensorError::IsDerived { .. },
        ) => StatusCode::CONFLICT,
        DeviceError::Tensor(TensorError::NoRoom { .. })
        | DeviceError::NoRoomForView { .. }
        | DeviceError::Quota { .. }
        | DeviceError::Full
        | DeviceError::Store(
            StoreError::Full { .. }
            | StoreError::NoRoom { .. }
            | StoreError::HostMemory { .. }
            | StoreError::Tables { .. },
        ) => StatusCode::INSUFFICIENT_STORAGE,
        DeviceError::Tensor(_)
        | DeviceError::View { .. }
        | DeviceError::TooMany { .. }
        | DeviceError::PastWindow { .. }
        | DeviceError::Partitions { .. }
        | DeviceError::PartitionName { .. }
        | DeviceError::PartitionTwice { .. }
        | DeviceError::Plain
        | DeviceError::OpenWindows { .. }
        | DeviceError::Size { .. } => StatusCode::UNPROCESSABLE_ENTITY,
        DeviceError::Stopped { .. } | DeviceError::Busy { .. } => StatusCode::SERVICE_UNAVAILABLE,
        DeviceError::Store(_)
        | DeviceError::Damaged { .. }
        | DeviceError::BaseLost { .. }
        | DeviceError::Image { .. } => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Whose mistake a refusal of a model was.
fn status_of_files(why: &FilesError) -> StatusCode {
    match why {
        FilesError::Unknown { .. } => StatusCode::NOT_FOUND,
        FilesError::Exists { .. } | FilesError::Kept { .. } | FilesError::IsBase { .. } => {
            StatusCode::CONFLICT
        }
        FilesError::Device(why) => status_of(why),
        FilesError::Load(why) => match &**why {
            LoadError::Device { source, .. } => status_of(source),
            LoadError::Gone { .. } => StatusCode::CONFLICT,
            LoadError::Stopped => StatusCode::SERVICE_UNAVAILABLE,
            LoadError::Sync { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::UNPROCESSABLE_ENTITY,
        },
        FilesError::Manifest { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::UNPROCESSABLE_ENTITY,
    }
}

/// What a path has in its place for names.
struct Segment<T>(T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Segment<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        match extract::Path::from_request_parts(parts, state).await {
            Ok(extract::Path(found)) => Ok(Self(found)),
            Err(why) => Err(Refusal::new(why.status(), why.body_text())),
        }
    }
}

/// A JSON body, read within the bounds.
struct Requested<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Requested<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        is_json(request.headers())?;
        let body = read(request.into_body(), MAX_BODY).await?;
        // No body at all asks for the defaults.
        let body = if body.is_empty() { Bytes::from_static(b"{}") } else { body };
        let requested = serde_json::from_slice(&body);
        Ok(Self(requested.map_err(|why| {
            Refusal::new(StatusCode::BAD_REQUEST, format!("the body is no request: {why}"))
        })?))
    }
}

async fn read(body: Body, most: usize) -> Result<Bytes, Refusal> {
    let late = format!("the body did not arrive within {} s", BODY_TIME.as_secs());
    let read = tokio::time::timeout(BODY_TIME, to_bytes(body, most)).await;
    let read = read.map_err(|_| Refusal::new(StatusCode::REQUEST_TIMEOUT, late))?;
    read.map_err(|why| {
        let large = std::error::Error::source(&why)
            .is_some_and(<dyn std::error::Error>::is::<http_body_util::LengthLimitError>);
        if large {
            Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {most} bytes"))
        } else {
            Refusal::new(StatusCode::BAD_REQUEST, format!("the body could not be read: {why}"))
        }
    })
}

/// Refuses what is not of type `application/json`.
fn is_json(headers: &HeaderMap) -> Result<(), Refusal> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        Ok(())
    } else {
        let error =
            format!("this request needs Content-Type: application/json, not {kind:?}: no page may make it");
        Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, error))
    }
}

/// Refuses what [`is_foreign`].
async fn not_foreign(request: Request, next: Next) -> Response {
    // A link to a page that somebody follows is theirs.
    let is_page = request.method() == Method::GET && PAGES.contains(&request.uri().path());
    match is_foreign(request.headers(), is_page) {
        Some(error) => Refusal::new(StatusCode::FORBIDDEN, error).into_response(),
        None => next.run(request).await,
    }
}

/// Why a request is refused that does not name this host by a loopback name, or that a browser says
/// another page had it send, but for a page that is gone to.
fn is_foreign(headers: &HeaderMap, is_page: bool) -> Option<String> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).unwrap_or_default();
    if !is_loopback_name(host) {
        return Some(format!("Host is {host:?}; this API answers to localhost, 127.0.0.1 and [::1] only"));
    }
    // Programs that are no browsers send none of this.
    let site = text(HeaderName::from_static("sec-fetch-site"));
    let is_own = site.is_none_or(|site| ["same-origin", "none"].contains(&site))
        && text(header::ORIGIN).is_none_or(|origin| origin.strip_prefix("http://") == Some(host));
    let is_followed = is_page && text(HeaderName::from_static("sec-fetch-dest")) == Some("document");
    let error = "a page of another site asks this; the API answers to its own pages only";
    (!is_own && !is_followed).then(|| error.to_owned())
}

/// Whether a Host header, with or without a port, names a loopback address.
fn is_loopback_name(host: &str) -> bool {
    let Ok(authority) = host.parse::<axum::http::uri::Authority>() else { return false };
    let name = authority.host();
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Runs something that sleeps on the mount where it may.
async fn blocking<T: Send + 'static>(
    run: impl FnOnce() -> Result<T, ControlError> + Send + 'static,
) -> Result<T, Refusal> {
    let done = spawn_blocking(run).await;
    let done = done.map_err(|why| {
        tracing::error!("a request failed: {why}");
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the device failed; its log says how")
    })?;
    Ok(done?)
}

async fn page() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, PAGE_POLICY)], Html(metrics::PAGE.as_str()))
}

async fn description() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], openapi::TEXT.as_str())
}

/// Tells a viewer what there is, until it goes.
async fn watch(live: Live) -> Result<impl IntoResponse, Refusal> {
    let runtime = tokio::runtime::Handle::current();
    let watched = blocking(move || Ok(live.watch(&runtime))).await?;
    let watched = watched.map_err(|live::TooMany| {
        let error = format!("{} look already; the next may when one of them goes", live::VIEWERS);
        Refusal::new(StatusCode::TOO_MANY_REQUESTS, error)
    })?;
    let head = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((head, Body::new(watched)))
}

async fn stats(State(control): State<Control>) -> Result<impl IntoResponse, Refusal> {
    blocking(move || Ok(Json(control.stats()))).await
}

async fn open_metrics(State(control): State<Control>) -> Result<impl IntoResponse, Refusal> {
    let text = blocking(move || Ok(metrics::text(&control.stats()))).await?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text))
}

async fn tensors(State(control): State<Control>) -> impl IntoResponse {
    Json(control.tensors())
}

async fn views(State(control): State<Control>) -> impl IntoResponse {
    Json(control.views())
}

async fn guests(State(control): State<Control>) -> impl IntoResponse {
    Json(control.served_exports())
}

async fn disks(State(control): State<Control>) -> impl IntoResponse {
    Json(control.disks())
}

/// A tensor that is asked for, or a list of them.
enum TensorsRequest {
    One(Box<TensorSpec>),
    Many(Vec<TensorSpec>),
}

impl<'de> Deserialize<'de> for TensorsRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Requested;

        impl<'de> Visitor<'de> for Requested {
            type Value = TensorsRequest;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a tensor, or a list of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<TensorsRequest, A::Error> {
                Deserialize::deserialize(MapAccessDeserializer::new(map)).map(TensorsRequest::One)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<TensorsRequest, A::Error> {
                Deserialize::deserialize(SeqAccessDeserializer::new(seq)).map(TensorsRequest::Many)
            }
        }

        deserializer.deserialize_any(Requested)
    }
}

async fn create_tensors(State(control): State<Control>, request: Request) -> Result<Response, Refusal> {
    is_json(request.headers())?;
    let body = read(request.into_body(), MAX_TENSORS_BODY).await?;
    let requested = serde_json::from_slice(&body)
        .map_err(|why| Refusal::new(StatusCode::BAD_REQUEST, format!("the body is no request: {why}")))?;
    Ok(match requested {
        TensorsRequest::One(spec) => {
            let tensor = blocking(move || control.create_tensor(*spec)).await?;
            (StatusCode::CREATED, Json(tensor)).into_response()
        }
        TensorsRequest::Many(specs) => {
            let tensors = blocking(move || control.create_tensors(specs)).await?;
            (StatusCode::CREATED, Json(tensors)).into_response()
        }
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResizeRequest {
    length: u64,
}

async fn resize_tensor(
    State(control): State<Control>,
    Segment(name): Segment<String>,
    Requested(requested): Requested<ResizeRequest>,
) -> Result<impl IntoResponse, Refusal> {
    let tensor = blocking(move || control.resize_tensor(&name, requested.length)).await?;
    Ok(Json(tensor))
}

async fn remove_tensor(
    State(control): State<Control>,
    Segment(name): Segment<String>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Refusal> {
    is_json(&headers)?;
    blocking(move || control.remove_tensor(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is to need no base.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum DetachRequest {
    Tensor(String),
    Model(String),
}

async fn detach(
    State(control): State<Control>,
    Requested(requested): Requested<DetachRequest>,
) -> Result<impl IntoResponse, Refusal> {
    let detached = blocking(move || match requested {
        DetachRequest::Tensor(name) => control.detach_tensor(&name).map(|tensor| vec![tensor]),
        DetachRequest::Model(name) => control.detach_model(&name),
    });
    Ok(Json(detached.await?))
}

async fn detaching(State(control): State<Control>) -> impl IntoResponse {
    Json(control.detaching())
}

/// A window of a lossy tensor as it is stored; nothing if it is exact.
async fn packed(
    State(control): State<Control>,
    Segment((window, name)): Segment<(String, String)>,
) -> Result<Response, Refusal> {
    let window: u64 = window.parse().map_err(|_| {
        Refusal::new(StatusCode::BAD_REQUEST, format!("{window:?} is no number of a window: 0, 1 and so on"))
    })?;
    let bytes = blocking(move || control.packed_window(&name, window)).await?;
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok(bytes.map_or_else(|| StatusCode::NO_CONTENT.into_response(), |bytes| (kind, bytes).into_response()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ViewRequest {
    tensor: String,
    spelling: String,
}

async fn create_view(
    State(control): State<Control>,
    Requested(view): Requested<ViewRequest>,
) -> Result<impl IntoResponse, Refusal> {
    let view = blocking(move || control.create_view(&view.tensor, &view.spelling)).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

async fn remove_view(
    State(control): State<Control>,
    Requested(view): Requested<ViewRequest>,
) -> Result<impl IntoResponse, Refusal> {
    let view = blocking(move || control.remove_view(&view.tensor, &view.spelling)).await?;
    Ok(Json(view))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FlushRequest {
    #[serde(default)]
    offset: u64,
    length: Option<u64>,
}

async fn flush(
    State(control): State<Control>,
    Requested(range): Requested<FlushRequest>,
) -> Result<impl IntoResponse, Refusal> {
    blocking(move || control.flush(range.offset, range.length)).await?;
    Ok(Json(json!({})))
}

async fn revoke_host(
    State(control): State<Control>,
    Segment(name): Segment<String>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Refusal> {
    is_json(&headers)?;
    blocking(move || control.revoke(&name)).await?;
    Ok(Json(json!({})))
}

async fn admit_host(
    State(control): State<Control>,
    Segment(name): Segment<String>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Refusal> {
    is_json(&headers)?;
    blocking(move || control.admit(&name)).await?;
    Ok(Json(json!({})))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RangeRequest {
    offset: u64,
    length: u64,
}

async fn discard(
    State(control): State<Control>,
    Requested(range): Requested<RangeRequest>,
) -> Result<impl IntoResponse, Refusal> {
    blocking(move || control.discard(range.offset, range.length)).await?;
    Ok(Json(json!({})))
}

async fn models(State(control): State<Control>) -> Result<impl IntoResponse, Refusal> {
    blocking(move || Ok(Json(control.folders()?))).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelRequest {
    path: PathBuf,
    /// The file's or the directory's, if not given.
    name: Option<String>,
    #[serde(default)]
    views: Vec<String>,
    #[serde(default)]
    maps: BTreeMap<String, PrecisionMap>,
    /// A model on the device whose tensors these are stored as differences to.
    #[serde(default)]
    base: Option<String>,
    /// Whether it is there already, and is only to be compared with that.
    #[serde(default)]
    is_kept: bool,
}

async fn load_model(
    State(control): State<Control>,
    asker: Option<Extension<Asker>>,
    Requested(model): Requested<ModelRequest>,
) -> Result<impl IntoResponse, Refusal> {
    let ModelRequest { path, name, views, maps, base, is_kept } = model;
    if path.as_os_str().is_empty() {
        let error = "the path of a model is empty: it is that of a file or a directory";
        return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error));
    }
    let name = name.unwrap_or_else(|| name_of(&path));
    let loading = Loading { views, maps, base };
    if is_kept {
        let kept = blocking(move || control.keep_model(&path, &name, &loading)).await?;
        return Ok((StatusCode::OK, Json(kept)));
    }
    let is_given_up = move || asker.as_ref().is_some_and(|Extension(asker)| asker.is_gone());
    let loaded = blocking(move || control.load_model(&path, &name, &loading, is_given_up)).await?;
    Ok((StatusCode::CREATED, Json(loaded)))
}

async fn remove_model(
    State(control): State<Control>,
    Segment(name): Segment<String>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Refusal> {
    is_json(&headers)?;
    blocking(move || control.remove_model(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn planner(State(control): State<Control>) -> Result<impl IntoResponse, Refusal> {
    let none = || Refusal::new(StatusCode::NOT_FOUND, "the program that serves this device has no planner");
    let page = control.additions.planner.ok_or_else(none)?;
    Ok(([(header::CONTENT_SECURITY_POLICY, PAGE_POLICY)], Html(page.to_string())))
}

fn recorder(control: &Control) -> Result<Arc<dyn Recorder>, Refusal> {
    let none =
        || Refusal::new(StatusCode::NOT_FOUND, "the program that serves this device records no traces");
    control.additions.recorder.clone().ok_or_else(none)
}

/// Gives a trace as it is recorded, until that is stopped or the peer goes.
///
/// A page of another site may ask for that, though not see it: it may not have all requests told.
async fn record(State(control): State<Control>, headers: HeaderMap) -> Result<impl IntoResponse, Refusal> {
    is_json(&headers)?;
    let (recorder, (to, pieces)) = (recorder(&control)?, channel(additions::WAITING));
    recorder.begin(&control.device, to).map_err(|why| Refusal::new(StatusCode::CONFLICT, why))?;
    let head = [(header::CONTENT_TYPE, "application/octet-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((head, Body::new(live::Watched(pieces))))
}

async fn stop_recording(
    State(control): State<Control>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Refusal> {
    is_json(&headers)?;
    if recorder(&control)?.stop() {
        return Ok(Json(json!({})));
    }
    Err(Refusal::new(StatusCode::NOT_FOUND, "no trace is being recorded"))
}

async fn events(State(control): State<Control>) -> impl IntoResponse {
    Json(control.events())
}

async fn poison(State(control): State<Control>) -> impl IntoResponse {
    Json(control.poison())
}

async fn inject_poison(
    State(control): State<Control>,
    Requested(range): Requested<RangeRequest>,
) -> Result<impl IntoResponse, Refusal> {
    blocking(move || control.inject_poison(range.offset, range.length)).await?;
    Ok(Json(json!({})))
}

async fn clear_poison(
    State(control): State<Control>,
    Requested(range): Requested<RangeRequest>,
) -> Result<impl IntoResponse, Refusal> {
    blocking(move || control.clear_poison(range.offset, range.length)).await?;
    Ok(Json(json!({})))
}

#[cfg(test)]
mod tests;
