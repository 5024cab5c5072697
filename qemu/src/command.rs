//! The command line of QEMU, as a pure function of what is asked for.

use std::path::{Path, PathBuf};

use crate::accel::Accel;
use crate::config::BootConfig;
use crate::find::{Install, Qemu};
use crate::image::GuestImage;
use crate::topology::{Attach, escape};

/// The longest command line that the kernel takes, in bytes (x86's `COMMAND_LINE_SIZE`, less its
/// end).
const KERNEL_BYTES: usize = 2047;

/// Why there is no command line.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The guest would have nothing to do and nobody to ask.
    #[error("there is nothing for the guest to run; name a program or make it interactive")]
    Nothing,
    /// The program's path is not absolute.
    #[error("the program to run in the guest must be an absolute path in it, not {path:?}")]
    Relative {
        /// The path.
        path: String,
    },
    /// A word would be taken apart by the kernel.
    #[error(
        "{word:?} cannot be passed to the guest: words on the kernel's command line have no white space and no quotes"
    )]
    Word {
        /// The word.
        word: String,
    },
    /// Too many or too long words.
    #[error("the kernel's command line would have {bytes} bytes, more than the {KERNEL_BYTES} it takes")]
    Long {
        /// Its length.
        bytes: usize,
    },
}

/// A command that starts QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// Environment variables set for it.
    pub env: Vec<(String, String)>,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
}

impl CommandLine {
    /// The command for this boot. `initramfs` is the one assembled for it, `filter` the library to
    /// preload, if any, and `console_log` where an interactive console is recorded.
    ///
    /// # Errors
    /// When the guest's program or its arguments cannot be passed on.
    pub fn new(
        config: &BootConfig,
        qemu: &Qemu,
        accel: Accel,
        image: &GuestImage,
        initramfs: &Path,
        filter: Option<&Path>,
        console_log: &Path,
    ) -> Result<Self, CommandError> {
        let (program, mut args) = qemu.install.command(filter);
        let env = match (&qemu.install, filter) {
            (Install::Host(_), Some(filter)) => {
                vec![("LD_PRELOAD".to_owned(), filter.to_string_lossy().into_owned())]
            }
            _ => Vec::new(),
        };
        args.extend(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"].map(String::from));
        args.extend(accel.args(qemu.version));
        args.extend(config.topology().args(qemu.version));
        if let Some(monitor) = &config.qmp {
            args.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", escape(monitor))]);
        }
        // Ctrl-C belongs to the guest's shell; Ctrl-A X ends QEMU.
        let console = if config.interactive {
            args.extend(["-mon", "chardev=console"].map(String::from));
            format!("stdio,id=console,signal=off,mux=on,logfile={}", escape(console_log))
        } else {
            "stdio,id=console,signal=off".to_owned()
        };
        args.extend(["-chardev".to_owned(), console, "-serial".to_owned(), "chardev:console".to_owned()]);
        // These three are whole arguments, not option lists: a comma stands for itself.
        args.extend(["-kernel".to_owned(), image.kernel.to_string_lossy().into_owned()]);
        args.extend(["-initrd".to_owned(), initramfs.to_string_lossy().into_owned()]);
        args.extend(["-append".to_owned(), kernel_line(config, accel)?]);
        args.extend(config.extra_args.iter().cloned());
        Ok(Self { env, program, args })
    }

    /// The command as a shell takes it.
    pub fn to_shell(&self) -> String {
        let quote = |word: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
            if !word.is_empty() && word.chars().all(plain) {
                word.to_owned()
            } else {
                format!("'{}'", word.replace('\'', r"'\''"))
            }
        };
        let mut words: Vec<String> =
            self.env.iter().map(|(name, value)| format!("{name}={}", quote(value))).collect();
        words.push(quote(&self.program.to_string_lossy()));
        words.extend(self.args.iter().map(|arg| quote(arg)));
        words.join(" ")
    }
}

/// A panic ends the guest at once instead of hanging it. Nothing in it needs protection from
/// itself, nor tests of its ciphers, and those who wait for others in its boot wait less. An
/// emulated processor that gets no time on a busy host misses timer ticks, and the kernel, which
/// cannot tell that it is a guest, would take the timer for broken and panic.
const KERNEL: [&str; 8] = [
    "console=ttyS0",
    "quiet",
    "panic=-1",
    "mitigations=off",
    "no_timer_check",
    "init_on_alloc=0",
    "cryptomgr.notests",
    "rcupdate.rcu_expedited=1",
];

fn kernel_line(config: &BootConfig, accel: Accel) -> Result<String, CommandError> {
    let mut words: Vec<String> = KERNEL.map(String::from).to_vec();
    if accel == Accel::Tcg {
        // All emulated processors have the host's clock, which none need watch by another.
        words.push("tsc=reliable".to_owned());
    }
    if matches!(config.attach, Attach::Cxl(_)) {
        // Media errors that the device reports are trace events to Linux; this puts them into the
        // kernel's log too.
        words.extend(["trace_event=cxl:cxl_general_media", "tp_printk"].map(String::from));
    }
    words.extend(config.kernel_args.iter().cloned());
    match &config.run {
        Some(path) if !path.starts_with('/') => return Err(CommandError::Relative { path: path.clone() }),
        Some(path) => words.push(format!("lamina.run={path}")),
        None if !config.interactive => return Err(CommandError::Nothing),
        None => {}
    }
    words.extend(config.args.iter().map(|arg| format!("lamina.arg={arg}")));
    let broken =
        |word: &&String| word.is_empty() || word.contains(|c: char| c.is_whitespace() || "\"'\0".contains(c));
    if let Some(word) = words.iter().find(broken) {
        return Err(CommandError::Word { word: word.clone() });
    }
    let line = words.join(" ");
    if line.len() > KERNEL_BYTES { Err(CommandError::Long { bytes: line.len() }) } else { Ok(line) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Attach, VhostUser};
    use crate::version::OLDEST;

    fn config() -> BootConfig {
        let mut config = BootConfig::new("/m/base", 256 << 20, "/m/views", 256 << 20);
        config.run = Some("/run.sh".into());
        config
    }

    fn command(config: &BootConfig, install: Install) -> Result<CommandLine, CommandError> {
        let qemu = Qemu { install, version: OLDEST };
        let image = GuestImage {
            kernel: "/i/vmlinux".into(),
            initramfs: "/i/initramfs.img".into(),
            release: "6.12".into(),
        };
        let filter = (!config.huge_pages).then_some(Path::new("/f.so"));
        CommandLine::new(
            config,
            &qemu,
            Accel::Tcg,
            &image,
            Path::new("/r/initramfs.img"),
            filter,
            Path::new("/r/console.log"),
        )
    }

    #[test]
    fn the_filter_is_preloaded_unless_huge_pages_are_wanted() {
        let host = || Install::Host("/usr/bin/qemu-system-x86_64".into());
        let line = command(&config(), host()).unwrap();
        assert_eq!(line.env, [("LD_PRELOAD".to_owned(), "/f.so".to_owned())]);
        let root = command(&config(), Install::Root("/root".into())).unwrap();
        assert!(root.env.is_empty() && root.args.windows(2).any(|pair| pair == ["--preload", "/f.so"]));
        let huge = BootConfig { huge_pages: true, ..config() };
        assert!(!command(&huge, host()).unwrap().to_shell().contains("/f.so"));
        assert!(!command(&huge, Install::Root("/root".into())).unwrap().to_shell().contains("preload"));
    }

    #[test]
    fn a_guest_that_maps_no_mount_may_have_huge_pages() {
        let disks = VhostUser { disks: vec!["/run/base.sock".into()], queues: 2 };
        let config = BootConfig { attach: Attach::VhostUser(disks), ..config() };
        assert!(!config.attach.maps_mount());
        let line = command(&config, Install::Host("qemu".into())).unwrap().to_shell();
        assert!(line.contains("memory-backend-memfd,share=on,id=ram"), "{line}");
    }

    #[test]
    fn the_program_and_its_arguments_reach_init() {
        let config = BootConfig { args: vec!["--count=3".into(), "all".into()], ..config() };
        let line = command(&config, Install::Host("qemu".into())).unwrap();
        let append = &line.args[line.args.iter().position(|arg| arg == "-append").unwrap() + 1];
        assert!(append.ends_with("lamina.run=/run.sh lamina.arg=--count=3 lamina.arg=all"), "{append}");
    }

    #[test]
    fn what_the_kernel_would_take_apart_is_refused() {
        let with = |arg: &str| {
            command(&BootConfig { args: vec![arg.into()], ..config() }, Install::Host("qemu".into()))
        };
        for arg in ["two words", "tab\t", "new\nline", "\"", "'", "nul\0"] {
            assert!(matches!(with(arg), Err(CommandError::Word { .. })), "{arg:?}");
        }
        assert!(matches!(with(&"x".repeat(2048)), Err(CommandError::Long { bytes }) if bytes > KERNEL_BYTES));
        let relative = BootConfig { run: Some("run.sh".into()), ..config() };
        assert!(matches!(
            command(&relative, Install::Host("qemu".into())),
            Err(CommandError::Relative { .. })
        ));
    }

    #[test]
    fn a_guest_without_program_needs_a_person() {
        let mut config = BootConfig { run: None, ..config() };
        assert!(matches!(command(&config, Install::Host("qemu".into())), Err(CommandError::Nothing)));
        config.interactive = true;
        let line = command(&config, Install::Host("qemu".into())).unwrap().to_shell();
        assert!(line.contains("mux=on") && line.contains("-mon chardev=console"), "{line}");
    }

    #[test]
    fn the_printed_command_can_be_pasted_into_a_shell() {
        let line = CommandLine {
            env: vec![("A".into(), "b c".into())],
            program: "/q emu".into(),
            args: vec!["it's".into(), String::new(), "-m".into(), "512M".into(), "$HOME".into()],
        };
        assert_eq!(line.to_shell(), r"A='b c' '/q emu' 'it'\''s' '' -m 512M '$HOME'");
    }

    #[test]
    fn extra_options_come_last() {
        let config = BootConfig { extra_args: vec!["-smp".into(), "1".into()], ..config() };
        assert!(
            command(&config, Install::Host("qemu".into()))
                .unwrap()
                .args
                .ends_with(&["-smp".into(), "1".into()])
        );
    }
}
