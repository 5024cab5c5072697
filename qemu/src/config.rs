//! What a boot is asked for.

use std::path::PathBuf;

use crate::accel::Accel;
use crate::initramfs::GuestFile;
use crate::topology::{Attach, Cxl, Port, Topology};

/// MiB of RAM that the extra programs take, once as an archive and once unpacked.
pub const EXTRAS_MIB: u64 = 256;
/// MiB of RAM that `images/python` takes, once as an archive and once unpacked.
pub const PYTHON_MIB: u64 = 320;
/// MiB of RAM that the programs of `images/workloads` take, once as an archive and once unpacked.
pub const WORKLOADS_MIB: u64 = 160;

/// Everything [`crate::boot`] needs to know. Start from [`BootConfig::new`] and set what differs.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own, named where it is made")]
pub struct BootConfig {
    /// How the guest sees the device.
    pub attach: Attach,
    /// The Unix socket that serves the guest's port `org.lamina.ctl`; without it the guest has no
    /// such port.
    pub ctl_socket: Option<PathBuf>,
    /// The other end of the guest's port `org.lamina.report`; without it the guest has no such
    /// port.
    pub report: Option<Port>,
    /// Where QEMU's monitor (QMP) is to listen, a Unix socket; without it there is none.
    pub qmp: Option<PathBuf>,
    /// Files put into the guest for this boot.
    pub programs: Vec<GuestFile>,
    /// The program the guest runs, an absolute path in it; the guest powers off when it ends.
    pub run: Option<String>,
    /// Its arguments, without white space.
    pub args: Vec<String>,
    /// Whether the guest has fio, stress-ng, memtester and numactl (`images/extras`), and
    /// [`EXTRAS_MIB`] more RAM for them.
    pub extras: bool,
    /// Whether the guest has Python, a compiler, a database and numactl (`images/workloads`), and
    /// [`WORKLOADS_MIB`] more RAM for them.
    pub workloads: bool,
    /// Whether the guest has Python with NumPy and safetensors, numactl and the CXL tools
    /// (`images/python`), and [`PYTHON_MIB`] more RAM for them.
    pub python: bool,
    /// The guest's RAM in MiB, without what extras, workloads and Python take.
    pub memory_mib: u64,
    /// The guest's processors.
    pub cpus: u32,
    /// How to run the guest; `None` is KVM when usable.
    pub accel: Option<Accel>,
    /// Let QEMU have huge pages for guest memory. On a FUSE mount that makes it read megabytes for
    /// a byte.
    pub huge_pages: bool,
    /// Connect the guest's console to this process's terminal. Needed when there is no program to
    /// run.
    pub interactive: bool,
    /// More words for the kernel's command line.
    pub kernel_args: Vec<String>,
    /// More options for QEMU, after all others.
    pub extra_args: Vec<String>,
    /// Where this boot's initramfs is written; a temporary folder unless named.
    pub run_folder: Option<PathBuf>,
    /// The QEMU to use, a program or the folder of a tools root; one is looked for if not given.
    pub qemu: Option<PathBuf>,
    /// Unpack a QEMU when the host has none that will do.
    pub build_tools: bool,
}

impl BootConfig {
    /// A guest with these windows as CXL memory, enough RAM for them, two processors, and nothing
    /// to run.
    pub fn new(
        base: impl Into<PathBuf>,
        base_bytes: u64,
        views: impl Into<PathBuf>,
        views_bytes: u64,
    ) -> Self {
        let (base, views) = (base.into(), views.into());
        Self::attached(Attach::Cxl(Cxl { base, base_bytes, views, views_bytes, targets: None }))
    }

    /// A guest with the device attached like this, enough RAM, two processors, and nothing to run.
    pub fn attached(attach: Attach) -> Self {
        Self {
            ctl_socket: None,
            report: None,
            qmp: None,
            programs: Vec::new(),
            extras: false,
            workloads: false,
            python: false,
            run: None,
            args: Vec::new(),
            memory_mib: Topology::memory_for(attach.mapped_bytes()),
            attach,
            cpus: 2,
            accel: None,
            huge_pages: false,
            interactive: false,
            kernel_args: Vec::new(),
            extra_args: Vec::new(),
            run_folder: None,
            qemu: None,
            build_tools: true,
        }
    }

    /// What is attached to the guest.
    pub fn topology(&self) -> Topology {
        let archives =
            [(self.extras, EXTRAS_MIB), (self.workloads, WORKLOADS_MIB), (self.python, PYTHON_MIB)];
        let taken: u64 = archives.iter().filter(|(wanted, _)| *wanted).map(|(_, mib)| mib).sum();
        Topology {
            attach: self.attach.clone(),
            memory_mib: self.memory_mib.saturating_add(taken),
            cpus: self.cpus,
            control: self.ctl_socket.clone(),
            report: self.report.clone(),
        }
    }
}
