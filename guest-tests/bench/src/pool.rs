//! The shared pool, coherent: gets, puts and lookups of one process while another is attached,
//! beside the same mapping's own loads and stores, and beside a Valkey or Redis on this machine.
//!
//! The other process stored what this one gets. Each side goes round as many bytes, more than the
//! processor's caches of one core hold, and takes turns with its peer.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use lamina_pool::mem::{CxlMem, Mapped};
use lamina_pool::{Chain, Geometry, Index, IndexServer, Key, Pool, ServedIndex, Service, local};
use lamina_run::daemon::{Daemon, Serve};

use crate::{median, rate, table};

/// The name of the other process's subcommand.
pub const PRODUCER: &str = "pool-producer";

/// Bytes that each side goes round.
const BYTES: u64 = 64 << 20;
/// Blocks of 64 KiB that caches hold.
const HOT: usize = 16;
/// Bytes of the pool.
const POOL: u64 = 512 << 20;
/// Sizes of objects.
const SIZES: [u64; 2] = [64 << 10, 2 << 20];
/// Blocks of a prefix.
const PREFIX: u32 = 512;
/// Lookups of the prefix in a round.
const LOOKUPS: u32 = 200;
/// Blocks that are stored by an index in a round.
const STORES: u32 = 64;
/// How long a server may take to begin.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What is measured.
#[derive(Clone, Debug)]
pub struct PoolBench {
    /// Rounds, of which the median counts.
    pub rounds: usize,
}

/// Keys of the blocks of a size, in their order.
fn keys(bytes: u64) -> Vec<Key> {
    let mut chain = Chain::new(&format!("bench of {bytes} bytes"));
    (0..BYTES / bytes).map(|number| chain.next(&[u32::try_from(number).unwrap_or(0)])).collect()
}

fn prefix() -> Vec<Key> {
    let mut chain = Chain::new("bench of a prefix");
    (0..PREFIX).map(|token| chain.next(&[token])).collect()
}

fn content(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from(at % 251).unwrap_or(0)).collect()
}

/// The other process: stores what is got, says so, and does a node's duty until its input ends; if
/// it `serves`, it answers for the index.
///
/// # Errors
/// When the pool refuses.
pub fn produce(path: &Path, serves: bool) -> Result<()> {
    let pool = Arc::new(Pool::open(path)?);
    for bytes in SIZES {
        let content = content(bytes);
        for key in keys(bytes) {
            ensure!(pool.store(key, &[&content])?, "a block is there already");
        }
    }
    for key in prefix() {
        pool.store(key, &[&[1; 64]])?;
    }
    let service = Service::start(Arc::clone(&pool));
    let server = serves.then(|| IndexServer::new(pool)).transpose()?;
    println!("ready");
    let end = thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    if let Some(server) = server {
        server.run(|| end.is_finished())?;
    }
    end.join().map_err(|_| anyhow::anyhow!("the reader of the input panicked"))??;
    service.stop()?;
    Ok(())
}

/// A child that is killed when it is no longer needed.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl PoolBench {
    /// Measures, and returns the table.
    ///
    /// # Errors
    /// When the pool, a device or a server fails.
    pub fn run(&self, doing: impl Fn(&str)) -> Result<Table> {
        let mut out = table(&["what", "pool", "peer", "ratio", "peer is"]);
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        doing("in a file of memory");
        self.measure(&folder.path().join("pool"), "memory", &mut out)?;
        doing("beside a server over a socket");
        self.beside_server(&folder.path().join("pool"), &mut out)?;
        fs::remove_file(folder.path().join("pool"))?;
        doing("asking another process for the index");
        self.by_index(&folder.path().join("pool"), &mut out)?;
        fs::remove_file(folder.path().join("pool"))?;
        doing("in the base window of a mount");
        let device = Daemon::start(&Serve {
            models: Vec::new(),
            views: vec!["full".to_owned()],
            kv: Vec::new(),
            mode: "trace".to_owned(),
            codec: "tree".to_owned(),
            capacity: Some("1GiB".to_owned()),
            read_ahead_kb: 1024,
            devices: None,
        })?;
        self.measure(&device.ready.base.path, "mount", &mut out)?;
        device.stop()?;
        Ok(out)
    }

    /// Gets, puts and lookups in one file.
    fn measure(&self, path: &Path, place: &str, out: &mut Table) -> Result<()> {
        local::create(path, &Geometry::fitting(POOL))?;
        let pool = Pool::open(path)?;
        let _producer = producer(path, &pool, false)?;
        let memory = local::memory(path)?;
        for bytes in SIZES {
            let kib = bytes >> 10;
            let keys = keys(bytes);
            let want = content(bytes);
            let mut into = vec![0; want.len()];
            let mut mapping = Around::new(&memory, bytes);
            let (get, load) = self.by_turns(
                || {
                    for key in &keys {
                        ensure!(pool.read_into(key, &mut [&mut into])?, "a block is lost");
                        // A look at the first byte would be none: the copy is not left out.
                        ensure!(into.last() == want.last(), "a block differs");
                    }
                    Ok(())
                },
                || mapping.load(&want),
            )?;
            ensure!(into == want, "a block differs");
            out.add_row(gb_per_s(&format!("{place}: get of {kib} KiB"), get, load, "the mapping's loads"));
            let names: Vec<_> = (0..BYTES / bytes).map(|number| format!("object {number}")).collect();
            let mut mapping = Around::new(&memory, bytes);
            let (put, store) = self.by_turns(
                || names.iter().try_for_each(|name| Ok(pool.put(name, &want)?)),
                || mapping.store(&want),
            )?;
            out.add_row(gb_per_s(&format!("{place}: put of {kib} KiB"), put, store, "the mapping's stores"));
            for name in &names {
                pool.delete(name)?;
            }
        }
        let keys = prefix();
        let mut seconds = Vec::new();
        for _ in 0..self.rounds {
            let began = Instant::now();
            for _ in 0..LOOKUPS {
                ensure!(pool.prefix(&keys)? == keys.len(), "a prefix is lost");
            }
            seconds.push(began.elapsed().as_secs_f64());
        }
        let many = f64::from(PREFIX * LOOKUPS) / median(seconds) / 1e6;
        out.add_row([
            format!("{place}: lookups of {PREFIX} blocks, million/s"),
            format!("{many:.1}"),
            String::new(),
            String::new(),
            String::new(),
        ]);
        pool.leave()?;
        Ok(())
    }

    /// Seconds of both, the median of rounds in which they take turns.
    fn by_turns(
        &self,
        mut one: impl FnMut() -> Result<()>,
        mut other: impl FnMut() -> Result<()>,
    ) -> Result<(f64, f64)> {
        one()?;
        other()?;
        let (mut ones, mut others) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let began = Instant::now();
            one()?;
            ones.push(began.elapsed().as_secs_f64());
            let began = Instant::now();
            other()?;
            others.push(began.elapsed().as_secs_f64());
        }
        Ok((median(ones), median(others)))
    }

    /// Gets, stores and lookups by an index that the other process serves, beside the table's.
    fn by_index(&self, path: &Path, out: &mut Table) -> Result<()> {
        local::create(path, &Geometry::fitting(POOL))?;
        let pool = Arc::new(Pool::open(path)?);
        let _producer = producer(path, &pool, true)?;
        let asked = ServedIndex::new(Arc::clone(&pool));
        let bytes = SIZES[0];
        let (own, block, many) = (prefix(), content(bytes), keys(bytes));
        let gets = f64::from(u32::try_from(many.len())?);
        let mut into = vec![0; block.len()];
        let mut chain = Chain::new("bench of the index");
        let mut times = [(); 2].map(|()| [const { Vec::new() }; 3]);
        for _ in 0..self.rounds {
            // By turns, so that what else the machine does is both ways'.
            for (index, seconds) in [&asked as &dyn Index, &*pool].into_iter().zip(&mut times) {
                let began = Instant::now();
                for key in &many {
                    ensure!(index.read_into(key, &mut [&mut into])?, "a block is lost");
                }
                seconds[0].push(began.elapsed().as_secs_f64() / gets);
                let began = Instant::now();
                for _ in 0..STORES {
                    ensure!(index.store(chain.next(&[0]), &[&block])?, "a block is there already");
                }
                seconds[1].push(began.elapsed().as_secs_f64() / f64::from(STORES));
                let began = Instant::now();
                ensure!(index.prefix(&own)? == own.len(), "a prefix is lost");
                seconds[2].push(began.elapsed().as_secs_f64());
            }
        }
        ensure!(into == block, "a block differs");
        let [asked, table] = times.map(|times| times.map(|seconds| median(seconds) * 1e6));
        let kib = bytes >> 10;
        let whats = [
            format!("get of {kib} KiB"),
            format!("store of {kib} KiB"),
            format!("lookup of {PREFIX} blocks"),
        ];
        for ((what, asked), table) in whats.into_iter().zip(asked).zip(table) {
            let what = format!("memory, by a server's index: {what}, us");
            let ratio = format!("{:.2}", table / asked);
            out.add_row([what, format!("{asked:.1}"), format!("{table:.1}"), ratio, "the table".to_owned()]);
        }
        Ok(())
    }

    /// The median get of 64 KiB, beside a server's.
    fn beside_server(&self, path: &Path, out: &mut Table) -> Result<()> {
        let bytes = SIZES[0];
        let what = format!("p50 in us of a get of {} KiB", bytes >> 10);
        let folder = tempfile::tempdir()?;
        let Some((name, _server, mut stream)) = server(folder.path())? else {
            let none = "skipped: no valkey-server or redis-server here; images/torch unpacks Debian's";
            out.add_row([what.as_str(), "", "", "", none]);
            return Ok(());
        };
        local::create(path, &Geometry::fitting(POOL))?;
        let pool = Pool::open(path)?;
        let _producer = producer(path, &pool, false)?;
        let keys = keys(bytes);
        let want = content(bytes);
        let mut into = vec![0; want.len()];
        for key in &keys {
            stream.set(&key.to_string(), &want)?;
        }
        // All that was stored, and as much of it as caches hold.
        for keys in [&keys[..], &keys[..HOT]] {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..self.rounds {
                for key in keys {
                    let began = Instant::now();
                    ensure!(pool.read_into(key, &mut [&mut into])?, "a block is lost");
                    ours.push(began.elapsed().as_secs_f64() * 1e6);
                }
                for key in keys {
                    let text = key.to_string();
                    let began = Instant::now();
                    stream.get(&text, &mut into)?;
                    theirs.push(began.elapsed().as_secs_f64() * 1e6);
                }
            }
            ensure!(into == want, "the server's block differs");
            let (ours, theirs) = (median(ours), median(theirs));
            out.add_row([
                format!("{what} of {}", keys.len()),
                format!("{ours:.1}"),
                format!("{theirs:.1}"),
                format!("{:.1}", theirs / ours),
                format!("{name} over a Unix socket"),
            ]);
        }
        pool.leave()?;
        Ok(())
    }
}

fn gb_per_s(what: &str, seconds: f64, peers: f64, peer: &str) -> [String; 5] {
    let rates = [seconds, peers].map(|seconds| format!("{:.1}", rate(BYTES, seconds)));
    let [ours, theirs] = rates;
    [format!("{what}, GB/s"), ours, theirs, format!("{:.2}", peers / seconds), peer.to_owned()]
}

/// The other process, when it has stored all. This one serves meanwhile.
fn producer(path: &Path, pool: &Pool, serves: bool) -> Result<Killed> {
    let this = std::env::current_exe()?;
    let mut command = Command::new(this);
    command.arg(PRODUCER).arg(path).args(serves.then_some("--serves"));
    let mut child = Killed(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
    let output = child.0.stdout.take().context("the producer's output")?;
    let ready = thread::spawn(move || {
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).map(|_| line)
    });
    while !ready.is_finished() {
        pool.serve()?;
        thread::sleep(Duration::from_millis(1));
    }
    let line = ready.join().map_err(|_| anyhow::anyhow!("the reader of the producer panicked"))??;
    ensure!(line == "ready\n", "the producer failed");
    Ok(child)
}

/// Loads and stores of a mapping, a piece after the other, round the end of the pool's memory.
struct Around<'m> {
    memory: &'m Mapped,
    at: u64,
    bytes: u64,
    scratch: Vec<u8>,
}

impl<'m> Around<'m> {
    fn new(memory: &'m Mapped, bytes: u64) -> Self {
        // The last chunks are nobody's: the pool takes the first that are free.
        Self { memory, at: POOL - (128 << 20), bytes, scratch: Vec::new() }
    }

    fn load(&mut self, like: &[u8]) -> Result<()> {
        self.scratch.resize(like.len(), 0);
        for step in 0..BYTES / self.bytes {
            self.memory.load(self.at + step * self.bytes, &mut self.scratch)?;
            std::hint::black_box(&self.scratch);
        }
        Ok(())
    }

    fn store(&mut self, content: &[u8]) -> Result<()> {
        for step in 0..BYTES / self.bytes {
            self.memory.store(self.at + step * self.bytes, content)?;
        }
        Ok(())
    }
}

/// A client of a server that speaks RESP.
struct Client(BufReader<UnixStream>);

impl Client {
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    fn set(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), value.len());
        self.0.get_mut().write_all(&[head.as_bytes(), value, b"\r\n"].concat())?;
        let said = self.line()?;
        ensure!(said == "+OK", "the server said {said}");
        Ok(())
    }

    fn get(&mut self, key: &str, into: &mut [u8]) -> Result<()> {
        let request = format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len());
        self.0.get_mut().write_all(request.as_bytes())?;
        let said = self.line()?;
        ensure!(said == format!("${}", into.len()), "the server said {said}");
        self.0.read_exact(into)?;
        self.0.read_exact(&mut [0; 2])?;
        Ok(())
    }
}

/// The variable that names a program of Valkey's: `./x` sets it to the one that is unpacked.
const VALKEY: &str = "LAMINA_VALKEY";

/// Starts Valkey or Redis, whichever there is.
fn server(folder: &Path) -> Result<Option<(&'static str, Killed, Client)>> {
    let socket: PathBuf = folder.join("socket");
    let unpacked = env::var_os(VALKEY).map(|program| ("valkey-server", program));
    let installed = ["valkey-server", "redis-server"].map(|name| (name, name.into()));
    for (name, program) in unpacked.into_iter().chain(installed) {
        let started = Command::new(program)
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let Ok(child) = started else { continue };
        let child = Killed(child);
        let began = Instant::now();
        loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => {
                    return Ok(Some((name, child, Client(BufReader::with_capacity(128 << 10, stream)))));
                }
                Err(why) if began.elapsed() > TIMEOUT => {
                    return Err(why).with_context(|| format!("{name} does not listen"));
                }
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }
    Ok(None)
}
