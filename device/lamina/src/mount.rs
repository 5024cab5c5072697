//! `lamina mount` and what goes with it: devices in the background whose models are files.
//!
//! Each has a directory of its own for its sockets and its log, named after where it is mounted, so
//! that all that has to be said later is that.

mod find;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use hyper::Method;
use indicatif::BinaryBytes;
use lamina_device::files::{ModelPlan, PrecisionMap, name_of};
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use self::find::Found;
use crate::args::{ApiAt, LoadModel, Ls, Mount, Rm, Shown, Umount, socket_in};
use crate::client::{ask, escaped, rows, watched};
use crate::holder;
use crate::meter::Meter;
use crate::mounted::{self, Claim};
use crate::out::{self, print_json, print_line};
use crate::signals::Ending;
use crate::status::{NotStarted, Refused};
use crate::table::new_table;

/// Bytes that files may take, unless a capacity is given. They are addresses: what is not written
/// takes nothing.
const FILES: u64 = 16 << 30;
/// Windows are multiples of this, as CXL's are.
const MULTIPLE: u64 = 256 << 20;
/// KiB read ahead: the most that the kernel gives to those who are not root.
const READ_AHEAD: u32 = 128;
/// The same where more may be asked for.
const READ_AHEAD_OF_ROOT: u32 = 1024;
/// Lines of the log that are shown when a device does not start.
const SHOWN_LINES: usize = 5;

/// Mounts a device with some models.
pub(crate) async fn mount(args: Mount) -> Result<()> {
    let Mount { mut words, bases, shown, image, capacity, files, write_cache, foreground, json } = args;
    let dir = words.pop().context("say where to mount")?;
    let says_device = image.is_some() || capacity.is_some() || files.is_some();
    // A model where DIR was forgotten. What is mounted already is not asked: it may be dead.
    if words.is_empty()
        && !says_device
        && !mounted::is_mounted(&dir)?
        && (dir.is_file() || ModelPlan::open(&dir, &name_of(&dir)).is_ok())
    {
        bail!("say where to mount {0}: `lamina mount {0} DIR`", dir.display());
    }
    let wish = files.is_none();
    let files = files.unwrap_or(if capacity.is_none() { FILES } else { 0 });
    if words.is_empty() && image.is_none() && capacity.is_none() && files == 0 {
        bail!(
            "say which models to mount, and where: `lamina mount MODEL… DIR`; without any, and without --files, \
             say the device's --capacity"
        );
    }
    if let Some(model) = words.iter().find(|model| dir.starts_with(model) || **model == dir) {
        bail!("{} is a model and cannot be mounted on", model.display());
    }
    let maps = read_maps(&shown)?;
    // What cannot be loaded is refused before anything is started.
    let mut needed = 0_u64;
    let mut names = BTreeMap::new();
    for model in &words {
        let name = name_of(model);
        if let Some(other) = names.insert(name.clone(), model) {
            bail!(
                "{} and {} are both called {name}: mount one of them, and `lamina load` the other with --as",
                other.display(),
                model.display()
            );
        }
        needed = needed.saturating_add(ModelPlan::open(model, &name)?.base_needed()?);
    }
    if let Some((model, _)) = bases.iter().find(|(model, _)| !names.contains_key(model)) {
        bail!("--base {model}=…: no model to mount is called {model}");
    }
    let new = image.as_ref().is_none_or(|image| !image.exists());
    let fitting = needed.saturating_mul(2).saturating_add(1 << 30).saturating_add(files);
    let fitting = fitting.checked_next_multiple_of(MULTIPLE);
    let capacity = capacity.or(fitting.filter(|_| new));
    // The device has a process group of its own: from here on this one ends it when it is to end.
    let mut signals = Ending::watch()?;
    let claim = Claim::new(&dir)?;
    let run_dir = &claim.run_dir().to_owned();
    let log = run_dir.join("log");
    if !foreground {
        new_log(&log).with_context(|| wrong_log(&log))?;
    }
    let start = async |files, signals: &mut Ending| {
        let rooms = Rooms { capacity, files, write_cache };
        start(&dir, run_dir, &log, image.as_deref(), &rooms, foreground, signals).await
    };
    let started = match start(files, &mut signals).await {
        // An image from before has what it has. That it has no files/ is said, and no error.
        Err(why) if wish && files > 0 && !new && !why.is::<Interrupted>() => {
            match start(0, &mut signals).await {
                Err(also) if !also.is::<Interrupted>() => Err(why),
                started => started.inspect(|_| {
                    tracing::warn!("{} has no files/: {}", dir.display(), out::reason(&why));
                }),
            }
        }
        started => started,
    };
    // From here on the device itself holds off others.
    drop(claim);
    let mut device = started.inspect_err(|why| {
        // Nobody was told that it is there.
        if let Some(image) = image.as_deref().filter(|_| new && why.is::<Interrupted>()) {
            let _ = fs::remove_file(image);
        }
        // Unless its log says more than was shown.
        if why.downcast_ref::<NotStarted>().is_none_or(|ended| ended.log.is_none()) {
            forget(run_dir);
        }
    })?;
    let loaded = tokio::select! {
        loaded = load_all(run_dir, &words, &bases, &shown.views, &maps) => loaded,
        _ = signals.next() => Err(Interrupted.into()),
    };
    if let Err(why) = loaded {
        // Nothing half done is left behind. A new image stays if others have something in it.
        let made = image.as_deref().filter(|_| new);
        let unwanted = if has_others(run_dir, &words).await { None } else { made };
        let is_over = end(&mut device).await;
        if let Some(Err(also)) = unwanted.filter(|_| is_over).map(fs::remove_file) {
            tracing::warn!("not everything of the device is gone: {also}");
        }
        // Of what else went wrong the log may say more.
        if why.is::<Interrupted>() || why.is::<Refused>() {
            forget(run_dir);
        }
        return Err(why);
    }
    let api = ApiAt::in_dir(run_dir);
    let models = ask(&api, Method::GET, "/models", None).await?;
    if json {
        let pid = device.id();
        print_json(
            &json!({ "mounted": dir, "pid": pid, "api": api.to_string(), "models": models["models"] }),
        )?;
    } else {
        say_mounted(&dir, &models)?;
    }
    if foreground {
        return wait(&mut device, &mut signals).await;
    }
    Ok(())
}

/// What there is room for, and how files are written.
struct Rooms {
    capacity: Option<u64>,
    files: u64,
    write_cache: bool,
}

/// A signal came before the device had everything.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; nothing is mounted")]
struct Interrupted;

/// Starts a device and waits until it answers.
///
/// # Errors
/// [`Interrupted`] if a signal comes before that; nothing is left of the device then.
async fn start(
    dir: &Path,
    run_dir: &Path,
    log: &Path,
    image: Option<&Path>,
    rooms: &Rooms,
    foreground: bool,
    signals: &mut Ending,
) -> Result<Child> {
    let mut serve = Command::new("/proc/self/exe");
    serve.arg0("lamina").arg("serve").arg("--mount").arg(dir).arg("--run-dir").arg(run_dir);
    serve.args(["--json", "--views", ""]);
    let read_ahead = if nix::unistd::geteuid().is_root() { READ_AHEAD_OF_ROOT } else { READ_AHEAD };
    serve.args(["--read-ahead-kb", &read_ahead.to_string()]);
    if let Some(image) = image {
        serve.arg("--image").arg(image);
    }
    if let Some(capacity) = rooms.capacity {
        serve.args(["--capacity", &capacity.to_string()]);
    }
    serve.args(["--files", &rooms.files.to_string()]);
    if rooms.write_cache {
        serve.arg("--write-cache");
    }
    serve.stdin(Stdio::null()).stdout(Stdio::piped());
    if !foreground {
        let out = File::options().append(true).open(log).with_context(|| wrong_log(log))?;
        // What a terminal sends to the job is not for it.
        serve.stderr(out).process_group(0);
    }
    let mut device = serve.spawn().context("cannot start the device")?;
    let out = device.stdout.take().context("the device says nothing")?;
    let (mut out, mut line) = (BufReader::new(out), String::new());
    tokio::select! {
        read = out.read_line(&mut line) => read.context("the device says nothing")?,
        _ = signals.next() => {
            end(&mut device).await;
            bail!(Interrupted);
        }
    };
    let ready: Value = serde_json::from_str(&line).unwrap_or_default();
    if ready["ready"] == true {
        return Ok(device);
    }
    let status = device.wait().await?;
    let text = if foreground { String::new() } else { fs::read_to_string(log).unwrap_or_default() };
    let lines: Vec<_> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
    let log = (lines.len() > SHOWN_LINES).then(|| log.to_owned());
    bail!(NotStarted { status, last, log });
}

/// Makes an empty log. A device's lines go to its end, wherever that is by then: it may be cut
/// while a device writes it, as logrotate does.
fn new_log(path: &Path) -> io::Result<()> {
    File::options().create(true).append(true).open(path)?.set_len(0)
}

fn wrong_log(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// Tells a device to bring everything to its image and end, as [`holder::stop`] does, but from its
/// first moment on.
fn tell_to_end(device: &Child) {
    let pid = device.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    if let Some(Err(why)) = pid.map(|pid| kill_process(pid, rustix::process::Signal::TERM)) {
        tracing::warn!("the device cannot be told to end: {why}");
    }
}

/// Has a device end that was not mounted in the end: whether it has.
async fn end(device: &mut Child) -> bool {
    tell_to_end(device);
    let ended = device.wait().await;
    match &ended {
        // By the signal itself if it had not come to hear of it.
        Ok(status) if status.success() || status.signal().is_some() => {}
        Ok(status) => tracing::warn!("the device ended with {status}"),
        Err(why) => tracing::warn!("the device does not end: {why}"),
    }
    ended.is_ok()
}

/// Removes the directory of a device that is gone, unless others use it too, or are about to.
fn forget(run_dir: &Path) {
    if run_dir.parent().is_some_and(|parent| parent.ends_with(mounted::MOUNTS))
        && let Ok(_claim) = Claim::of(run_dir)
        && !holder::is_held(run_dir)
        && find::is_gone(&socket_in(run_dir))
        && let Err(why) = fs::remove_dir_all(run_dir)
    {
        tracing::debug!("{} stays: {why}", run_dir.display());
    }
}

/// Whether a device holds files, or models besides those `of` this command, or nobody can say.
async fn has_others(run_dir: &Path, of: &[PathBuf]) -> bool {
    let Ok(holds) = ask(&ApiAt::in_dir(run_dir), Method::GET, "/models", None).await else { return true };
    let own: Vec<_> = of.iter().map(|model| name_of(model)).collect();
    let is_own = |model: &Value| own.iter().any(|own| model["name"] == **own);
    // The folder of the files counts as one.
    holds["files"]["inodes"].as_u64().unwrap_or(0) > 1
        || !holds["models"].as_array().is_some_and(|models| models.iter().all(is_own))
}

async fn load_all(
    run_dir: &Path,
    models: &[PathBuf],
    bases: &[(String, String)],
    views: &[String],
    maps: &BTreeMap<String, PrecisionMap>,
) -> Result<()> {
    let api = ApiAt::in_dir(run_dir);
    let held = ask(&api, Method::GET, "/models", None).await?;
    let held: Vec<_> = rows(&held["models"])?.iter().filter_map(|model| model["name"].as_str()).collect();
    for model in models {
        let name = name_of(model);
        let base = bases.iter().find(|(model, _)| *model == name).map(|(_, base)| base.as_str());
        // An image keeps its models, and shows no other in their place.
        let is_kept = held.contains(&name.as_str());
        let loaded = load_one(&api, Wanted { model, name: &name, base, is_kept }, views, maps).await?;
        if is_kept {
            tracing::info!("the image holds {name} already; it is not loaded again");
        }
        for line in remarks(&loaded) {
            tracing::warn!("{line}");
        }
    }
    Ok(())
}

/// A model that a device is to load.
struct Wanted<'m> {
    model: &'m Path,
    name: &'m str,
    base: Option<&'m str>,
    /// Whether the device holds one of the name, which this is to be.
    is_kept: bool,
}

/// Has a device load a model, and shows how far that is.
async fn load_one(
    api: &ApiAt,
    wanted: Wanted<'_>,
    views: &[String],
    maps: &BTreeMap<String, PrecisionMap>,
) -> Result<Value> {
    let Wanted { model, name, base, is_kept } = wanted;
    let path = std::path::absolute(model)?;
    let mut requested = json!({ "path": path, "name": name, "views": views, "maps": maps });
    if is_kept {
        requested["is_kept"] = true.into();
    }
    if let Some(base) = base {
        requested["base"] = base.into();
    }
    let load = ask(api, Method::POST, "/models", Some(requested));
    let loaded = watched(load, Meter::new("loaded"), async || {
        let models = ask(api, Method::GET, "/models", None).await.ok()?;
        let now = &models["loading"];
        Some((name.to_owned(), now["bytes"].as_u64()?, now["total"].as_u64()?))
    });
    loaded.await.with_context(|| format!("{} is not loaded", model.display()))
}

/// Says what there is to look at.
fn say_mounted(dir: &Path, models: &Value) -> Result<()> {
    let mut example = None;
    for model in rows(&models["models"])? {
        let name = model["name"].as_str().unwrap_or_default();
        print_line!("{}/models/{name}: {}", dir.display(), sizes(model))?;
        for file in rows(&model["files"])? {
            let path = file["path"].as_str().unwrap_or_default();
            if example.is_none()
                && file["kind"] != "other"
                && let Some((stem, extension)) = path.rsplit_once('.')
            {
                example = Some(format!("{}/models/{name}/{stem}@e8m3.{extension}", dir.display()));
            }
        }
    }
    if let Some(example) = example {
        print_line!("the same at another precision: {example}")?;
    }
    print_line!("look: lamina ls {0}; end: lamina umount {0}", dir.display())?;
    Ok(())
}

/// Bytes, what is stored of them, and the ratio.
fn sizes(of: &Value) -> String {
    let (bytes, stored) = (of["bytes"].as_u64().unwrap_or(0), of["stored"].as_u64().unwrap_or(0));
    format!("{} stored in {}, ratio {}", BinaryBytes(bytes), BinaryBytes(stored), ratio(bytes, stored))
}

fn ratio(bytes: u64, of: u64) -> String {
    if of == 0 {
        return "-".to_owned();
    }
    let hundredths = u128::from(bytes) * 100 / u128::from(of);
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// Waits for the end of a device that is held in the foreground.
async fn wait(device: &mut Child, signals: &mut Ending) -> Result<()> {
    loop {
        tokio::select! {
            status = device.wait() => {
                let status = status?;
                return if status.success() { Ok(()) } else { bail!("the device ended with {status}") };
            }
            _ = signals.next() => {}
        }
        tell_to_end(device);
    }
}

/// The API of the device in whose mount a path lies, and the mount's root.
pub(crate) fn around(path: &Path) -> Result<(ApiAt, PathBuf)> {
    let found = find::mounted(path)?;
    let root = found.dir.with_context(|| format!("{} is in no mount", path.display()))?;
    Ok((found.api, root))
}

/// Takes a mount down.
pub(crate) fn umount(args: &Umount) -> Result<()> {
    // Who asks a dead one anything else may wait for ever.
    let run_dir = if let Some((run_dir, mount)) = find::dead(&args.dir)? {
        let dir = args.dir.display();
        ensure!(
            mount.take_away(),
            "nobody serves {dir} any more, and it cannot be unmounted: `umount -l {dir}` as root does it"
        );
        run_dir
    } else {
        let run_dir = find::ours(&args.dir)?;
        holder::stop(&run_dir)?;
        run_dir
    };
    forget(&run_dir);
    if args.json { print_json(&json!({ "unmounted": args.dir })) } else { Ok(()) }
}

/// Loads a model into a device that is mounted.
pub(crate) async fn load(args: LoadModel) -> Result<()> {
    let found = find::one(&args.to).await?;
    let name = args.name.unwrap_or_else(|| name_of(&args.model));
    let maps = read_maps(&args.shown)?;
    let wanted = Wanted { model: &args.model, name: &name, base: args.base.as_deref(), is_kept: false };
    let loaded = load_one(&found.api, wanted, &args.shown.views, &maps).await?;
    if args.to.json {
        return print_json(&loaded);
    }
    print_line!("{}: {}", found.folder(&name), sizes(&loaded))?;
    for line in remarks(&loaded) {
        print_line!("  {line}")?;
    }
    Ok(())
}

/// What of a model's directory was left out, and which tensors of one with a base are stored by
/// themselves.
fn remarks(model: &Value) -> Vec<String> {
    let of = |list: &str| model[list].as_array().into_iter().flatten();
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let left_out =
        of("left_out").map(|left| format!("{} is left out: {}", text(left, "file"), text(left, "why")));
    let base = model["base"].as_str().unwrap_or_default();
    let apart = of("apart").map(|tensor| {
        format!("{} is no difference to {base}'s: {}", text(tensor, "tensor"), text(tensor, "why"))
    });
    left_out.chain(apart).collect()
}

/// Removes a model.
pub(crate) async fn rm(args: Rm) -> Result<()> {
    let found = find::one(&args.to).await?;
    ask(&found.api, Method::DELETE, &format!("/models/{}", escaped(&args.name)), None).await?;
    if args.to.json { print_json(&json!({ "removed": args.name })) } else { Ok(()) }
}

/// Lists models.
pub(crate) async fn ls(args: Ls) -> Result<()> {
    let (found, is_asked) = match (args.api, &args.dir) {
        (Some(api), _) => (vec![find::at(api).await], true),
        (None, Some(dir)) => (vec![find::mounted(dir)?], true),
        (None, None) => (find::all().await, false),
    };
    let mut all = Vec::new();
    for found in found {
        match ask(&found.api, Method::GET, "/models", None).await {
            Ok(models) => all.push((found, models)),
            Err(why) if is_asked => return Err(why),
            Err(why) => tracing::warn!("{}: {}", found.api, out::reason(&why)),
        }
    }
    if args.json {
        let mounts = all.iter().map(|(Found { api, dir }, models)| {
            json!({
                "mounted": dir, "api": api.to_string(), "models": models["models"], "loading": models["loading"],
                "files": models["files"], "no_files": models["no_files"],
            })
        });
        return print_json(&mounts.collect());
    }
    let mut table = new_table(&["file", "at", "bytes", "stored", "ratio", "base", "read", "fetched"], 2);
    for (found, models) in &all {
        for model in rows(&models["models"])? {
            let name = model["name"].as_str().unwrap_or_default();
            for file in rows(&model["files"])? {
                let path = file["path"].as_str().unwrap_or_default();
                let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or(0);
                let size = |bytes| BinaryBytes(bytes).to_string();
                for view in rows(&file["views"])? {
                    let at = view["view"].as_str().unwrap_or_default();
                    let full = at == "full";
                    let (bytes, stored) = (number(view, "bytes"), number(file, "stored"));
                    table.add_row([
                        format!("{}/{path}", found.folder(name)),
                        at.to_owned(),
                        size(bytes),
                        if full { size(stored) } else { String::new() },
                        if full { ratio(bytes, stored) } else { String::new() },
                        model["base"].as_str().filter(|_| full).unwrap_or_default().to_owned(),
                        size(number(view, "read")),
                        size(number(view, "fetched")),
                    ]);
                }
            }
        }
    }
    print_line!("{table}")?;
    for (found, models) in &all {
        let number = |key: &str| models["files"][key].as_u64().unwrap_or(0);
        let files = found.files();
        if models["files"].is_object() {
            // The folder itself counts as one.
            let (taken, limit) = (BinaryBytes(number("taken_bytes")), BinaryBytes(number("limit_bytes")));
            print_line!(
                "{files}: {} files and folders, {taken} of {limit}",
                number("inodes").saturating_sub(1)
            )?;
        } else if let Some(why) = models["no_files"].as_str() {
            print_line!("{files} is not shown: {why}")?;
        }
    }
    Ok(())
}

fn read_maps(shown: &Shown) -> Result<BTreeMap<String, PrecisionMap>> {
    let read = |(name, path): &(String, PathBuf)| {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let map = text.parse().with_context(|| format!("{} is no map of precisions", path.display()))?;
        Ok((name.clone(), map))
    };
    shown.maps.iter().map(read).collect()
}
