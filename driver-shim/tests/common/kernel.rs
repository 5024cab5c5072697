//! A kernel for tests: a sysfs tree of plain files, and the reactions of the CXL and dax cores to
//! writes, with their insistence on order.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use lamina_abi::Interleave;
use lamina_shim::{VIEWS_SERIAL, sysfs::Tree};
use tempfile::TempDir;

use super::{WINDOW, Windows};

const CXL: &str = "sys/bus/cxl/devices";
const DAX: &str = "sys/bus/dax";
const EINVAL: i32 = 22;
const EBUSY: i32 = 16;

/// What the fake kernel can be told to do.
pub(crate) struct Config {
    /// Serial numbers of mem0 and mem1.
    pub(crate) serials: [u64; 2],
    /// Which window is behind mem0; the other is behind mem1.
    pub(crate) mem0: &'static str,
    /// An interleave set that stands for these two: its targets, the last one first, and then the
    /// views window.
    pub(crate) set: Option<Interleave>,
    /// Bytes of the platform's CXL window.
    pub(crate) room: u64,
    /// Errno that `commit` gives.
    pub(crate) commit: Option<i32>,
    /// Whether a bound region brings a dax device.
    pub(crate) dax_cxl: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { serials: [1, 2], mem0: "base", set: None, room: 2 * WINDOW, commit: None, dax_cxl: true }
    }
}

/// The tree and the files behind its devices.
pub(crate) struct Kernel {
    pub(crate) windows: Windows,
    root: TempDir,
    config: Config,
    state: Mutex<State>,
}

struct State {
    room: u64,
    regions: u32,
    writes: usize,
}

impl Config {
    /// Serial number and bytes of each memdev.
    fn memdevs(&self) -> Vec<(u64, u64)> {
        let Some(set) = self.set else { return self.serials.map(|serial| (serial, WINDOW)).to_vec() };
        let targets =
            (0..set.ways()).rev().map(|target| (set.serial(target), WINDOW / u64::from(set.ways())));
        targets.chain([(VIEWS_SERIAL, WINDOW)]).collect()
    }
}

impl Kernel {
    pub(crate) fn new(config: Config) -> Arc<Self> {
        let kernel = Self {
            windows: Windows::new(),
            root: TempDir::new().unwrap(),
            state: Mutex::new(State { room: config.room, regions: 0, writes: 0 }),
            config,
        };
        for (number, (serial, bytes)) in kernel.config.memdevs().into_iter().enumerate() {
            let port = number + 2;
            kernel.put(&format!("{CXL}/mem{number}/serial"), &format!("{serial:#x}"));
            kernel.put(&format!("{CXL}/mem{number}/ram/size"), &format!("{bytes:#x}"));
            fs::create_dir_all(kernel.path(&format!("{CXL}/endpoint{port}"))).unwrap();
            symlink(format!("../mem{number}"), kernel.path(&format!("{CXL}/endpoint{port}/uport"))).unwrap();
            for file in ["mode", "region"] {
                kernel.put(&format!("{CXL}/decoder{port}.0/{file}"), "");
            }
            kernel.put(&format!("{CXL}/decoder{port}.0/dpa_size"), "0");
        }
        kernel.put(&format!("{CXL}/decoder0.0/create_ram_region"), "region0");
        kernel.put(&format!("{CXL}/decoder0.0/delete_region"), "");
        kernel.put(&format!("{CXL}/decoder0.0/interleave_granularity"), "256");
        kernel.put(&format!("{CXL}/decoder0.0/size"), &kernel.config.room.to_string());
        kernel.put("sys/bus/cxl/drivers/cxl_region/bind", "");
        for driver in ["device_dax", "kmem"] {
            for file in ["new_id", "remove_id", "bind", "unbind"] {
                kernel.put(&format!("{DAX}/drivers/{driver}/{file}"), "");
            }
        }
        kernel.put("sys/devices/system/memory/block_size_bytes", "400000");
        fs::create_dir_all(kernel.path("dev")).unwrap();
        fs::create_dir_all(kernel.path(&format!("{DAX}/devices"))).unwrap();
        Arc::new(kernel)
    }

    pub(crate) fn tree(self: &Arc<Self>) -> Tree {
        let kernel = Arc::clone(self);
        Tree::at(self.root.path(), Some(Arc::new(move |path, value| kernel.react(path, value))))
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    /// Makes or overwrites a file.
    pub(crate) fn put(&self, path: &str, value: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{value}\n")).unwrap();
    }

    pub(crate) fn get(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap().trim().to_owned()
    }

    /// How many attributes were written so far.
    pub(crate) fn writes(&self) -> usize {
        self.state.lock().unwrap().writes
    }

    /// Bytes left in the platform's CXL window.
    pub(crate) fn room(&self) -> u64 {
        self.state.lock().unwrap().room
    }

    fn react(&self, path: &Path, value: &str) -> io::Result<()> {
        self.state.lock().unwrap().writes += 1;
        let path = path.to_str().unwrap();
        let parts: Vec<&str> = path.split('/').collect();
        match parts[..] {
            ["bus", "cxl", "devices", "decoder0.0", "create_ram_region"] => self.create(value),
            ["bus", "cxl", "devices", "decoder0.0", "delete_region"] => self.delete(value),
            ["bus", "cxl", "devices", region, "size"] => self.size(region, value),
            ["bus", "cxl", "devices", region, target] if target.starts_with("target") => {
                self.target(region, &target["target".len()..], value)
            }
            ["bus", "cxl", "devices", region, "commit"] => self.commit(region),
            ["bus", "cxl", "drivers", "cxl_region", "bind"] => self.bind_region(value),
            ["bus", "dax", "drivers", driver, "new_id"] => self.bind_dax(driver, value),
            ["bus", "dax", "drivers", driver, "unbind"] => self.unbind_dax(driver, value),
            ["bus", "dax", "drivers", _, "bind"] => Err(errno(EBUSY)),
            _ => Ok(()),
        }
    }

    fn create(&self, region: &str) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        demand(region == format!("region{}", state.regions))?;
        state.regions += 1;
        for file in [
            "interleave_granularity",
            "interleave_ways",
            "size",
            "target0",
            "target1",
            "target2",
            "target3",
            "commit",
        ] {
            self.put(&format!("{CXL}/{region}/{file}"), "0");
        }
        self.put(&format!("{CXL}/decoder0.0/create_ram_region"), &format!("region{}", state.regions));
        Ok(())
    }

    fn delete(&self, region: &str) -> io::Result<()> {
        self.state.lock().unwrap().room += self.number(&format!("{CXL}/{region}/size"));
        for number in 0..self.config.memdevs().len() {
            let file = format!("{CXL}/decoder{}.0/region", number + 2);
            if self.get(&file) == region {
                self.put(&file, "");
            }
        }
        fs::remove_dir_all(self.path(&format!("{CXL}/{region}")))
    }

    fn size(&self, region: &str, value: &str) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let ways = self.number(&format!("{CXL}/{region}/interleave_ways"));
        let granularity = self.number(&format!("{CXL}/{region}/interleave_granularity"));
        let is_set = |set: Interleave| (u64::from(set.ways()), set.granule()) == (ways, granularity);
        demand((ways, granularity) == (1, 256) || self.config.set.is_some_and(is_set))?;
        let bytes: u64 = value.parse().unwrap();
        if bytes > state.room {
            self.put(&format!("{CXL}/{region}/size"), "0");
            return Err(errno(34));
        }
        state.room -= bytes;
        Ok(())
    }

    fn target(&self, region: &str, position: &str, decoder: &str) -> io::Result<()> {
        demand(self.get(&format!("{CXL}/{decoder}/mode")) == "ram")?;
        let ways = self.number(&format!("{CXL}/{region}/interleave_ways"));
        let bytes = self.number(&format!("{CXL}/{decoder}/dpa_size"));
        demand(bytes * ways == self.number(&format!("{CXL}/{region}/size")))?;
        if ways > 1 {
            // The kernel takes any order, but only one gives the bytes back where they were.
            let number: usize = decoder["decoder".len()..].trim_end_matches(".0").parse().unwrap();
            let (_, target) = Interleave::of_serial(self.config.memdevs()[number - 2].0).unwrap();
            demand(position == target.to_string())?;
        }
        self.put(&format!("{CXL}/{decoder}/region"), region);
        Ok(())
    }

    fn commit(&self, region: &str) -> io::Result<()> {
        for position in 0..self.number(&format!("{CXL}/{region}/interleave_ways")) {
            demand(self.get(&format!("{CXL}/{region}/target{position}")).starts_with("decoder"))?;
        }
        match self.config.commit {
            Some(code) => {
                self.put(&format!("{CXL}/{region}/commit"), "0");
                Err(errno(code))
            }
            None => Ok(()),
        }
    }

    /// The region gets its driver, and a dax device without one.
    fn bind_region(&self, region: &str) -> io::Result<()> {
        demand(self.get(&format!("{CXL}/{region}/commit")) == "1")?;
        symlink("../../drivers/cxl_region", self.path(&format!("{CXL}/{region}/driver")))?;
        if !self.config.dax_cxl {
            return Ok(());
        }
        let dax = format!("{}.0", region.replace("region", "dax"));
        let folder = format!("{CXL}/{region}/dax_{region}/{dax}");
        self.put(&format!("{folder}/size"), &WINDOW.to_string());
        self.put(&format!("{folder}/align"), "2097152");
        self.put(&format!("{folder}/resource"), "0x1000000");
        symlink(self.path(&folder), self.path(&format!("{DAX}/devices/{dax}")))
    }

    fn bind_dax(&self, driver: &str, dax: &str) -> io::Result<()> {
        let link = self.path(&format!("{DAX}/devices/{dax}/driver"));
        if link.exists() {
            return Err(errno(EBUSY));
        }
        symlink(self.path(&format!("{DAX}/drivers/{driver}")), &link)?;
        if driver == "kmem" {
            for block in 4..8 {
                self.put(&format!("sys/devices/system/memory/memory{block}/state"), "offline");
            }
            return Ok(());
        }
        // Which window it is follows from the memdev whose decoder the region has.
        let region = dax.trim_end_matches(".0").replace("dax", "region");
        let mem0 = self.get(&format!("{CXL}/decoder2.0/region")) == region;
        let is_set = self.get(&format!("{CXL}/{region}/interleave_ways")) != "1";
        let base = if self.config.set.is_some() { is_set } else { mem0 == (self.config.mem0 == "base") };
        symlink(self.windows.path(if base { "base" } else { "views" }), self.path(&format!("dev/{dax}")))
    }

    fn unbind_dax(&self, driver: &str, dax: &str) -> io::Result<()> {
        let link = self.path(&format!("{DAX}/devices/{dax}/driver"));
        demand(fs::read_link(&link)?.ends_with(driver))?;
        fs::remove_file(link)?;
        fs::remove_file(self.path(&format!("dev/{dax}")))
    }

    fn number(&self, path: &str) -> u64 {
        self.get(path).parse().unwrap()
    }
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

fn demand(condition: bool) -> io::Result<()> {
    if condition { Ok(()) } else { Err(errno(EINVAL)) }
}
