use clap::Parser;

use super::*;
use crate::args::GuestExport;

fn read(text: &str) -> Result<Vec<String>, String> {
    read_for(text, For::Boot { print_command: false })
}

fn read_for(text: &str, purpose: For) -> Result<Vec<String>, String> {
    let (_, words) = expand(text, Path::new("/t"), purpose)?;
    Ok(words.into_iter().map(|word| word.into_string().unwrap()).collect())
}

#[test]
fn a_file_means_what_the_same_options_mean() {
    let text = r#"
        [device]
        capacity = "512M"
        views-capacity = 1073741824
        mode = "trace"
        model = ["a.safetensors", "/m/b.safetensors"]
        views = ["full", "e8m3"]
        kv = ["*.k=64,128"]
        image = "device.image"
        replace = true
        observe = true
        sync-seconds = 5
        threads = 3
        devices = 2
        device-bandwidth = 12.5
        [[guest]]
        attach = "ivshmem"
        script = "test.sh"
        put = { "/bin/reader" = "reader" }
        extras = true
        python = true
        huge-pages = false
        memory = 1024
        qemu = ["-device", "edu"]
    "#;
    let words = [
        "boot",
        "--capacity=512M",
        "--views-capacity=1073741824",
        "--mode=trace",
        "--model=/t/a.safetensors",
        "--model=/m/b.safetensors",
        "--views=full,e8m3",
        "--kv=*.k=64,128",
        "--image=/t/device.image",
        "--replace",
        "--observe",
        "--sync-seconds=5",
        "--threads=3",
        "--devices=2",
        "--device-bandwidth=12.5",
        "--attach=ivshmem",
        "--script=/t/test.sh",
        "--put=/t/reader=/bin/reader",
        "--extras",
        "--python",
        "--memory=1024",
        "--",
        "-device",
        "edu",
    ];
    assert_eq!(read(text).unwrap(), words);
    let (cli, _) = expand(text, Path::new("/t"), For::Boot { print_command: true }).unwrap();
    let by_hand = ["lamina", "boot", "--print-command"].iter().chain(&words[1..]);
    let by_hand = Cli::try_parse_from(by_hand).unwrap();
    assert_eq!(format!("{cli:?}"), format!("{by_hand:?}"));
    let Command::Boot(boot) = cli.command else { panic!("no boot") };
    assert!(boot.print_command && boot.extras && !boot.huge_pages);
    assert_eq!(boot.device.capacity, Some(512 << 20));
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    for (text, line, what) in [
        ("[device]\nkapazitaet = 1\n[[guest]]\n", "line 2", "kapazitaet"),
        ("[device]\n\nmodel = \"a\"\n[[guest]]\n", "line 3", "sequence"),
        ("[[guest]]\ncpus = 2\nattach = \"scsi\"\n", "line 3", "scsi"),
        ("[device]\ncapacity = \"1.5G\"\n[[guest]]\n", "line 2", "1.5G"),
        ("[[guest]]\n\n[[guest]]\ncpus = 1\n", "line 3", "second guest without a `script`"),
        ("[[guest]]\ncapacity = \"2x\"\n", "line 2", "2x"),
        ("[[guest]]\nname = \"A\"\ncapacity = 1\n", "line 2", "cannot name a guest"),
        ("[[guest]]\nname = \"a\"\nscript = \"s\"\n[[guest]]\nname = \"a\"\n", "line 5", "called a"),
        ("[[guest]]\n[[guest]]\nscript = \"s\"\nctl = \"c\"\n", "line 4", "elsewhere"),
        ("[[guest]]\ncapacity = 1\n[[guest]]\nscript = \"s\"\n", "line 3", "`shared`"),
        ("[[guest]]\nhost = true\n[[guest]]\nscript = \"s\"\n", "line 3", "hosts"),
        ("[[guest]]\nhost = true\nattach = \"vhost-user\"\n", "line 1", "no disks"),
        ("[[guest]]\nhost = true\ncapacity = 1\n", "line 2", "no partition"),
        ("[[guest]]\n\nquota = 1\n", "line 3", "`capacity`"),
        ("[[guest]]\ncapacity = 1\nmodel = [\"a,b\"]\n", "line 3", "comma"),
        (
            "[[guest]]\ncapacity = 1\n[[guest]]\nscript = \"s\"\nattach = \"scsi\"\ncapacity = 2\n",
            "line 5",
            "scsi",
        ),
        (
            "[device]\nshared = 1\n[[guest]]\ncapacity = 1\n[[guest]]\nscript = \"s\"\nattach = \"vhost-user\"\n",
            "line 5",
            "disks",
        ),
        ("[[guest]]\nmemory = -1\n", "line 2", "-1"),
        ("[[guest]\n", "line 1", ""),
        ("[device]\ndevices = 9\n[[guest]]\n", "line 2", "2 to 8"),
        ("[device]\n\nivshmem = \"s\"\n[[guest]]\n", "line 3", "`lamina serve`"),
        ("[device]\nvhost-user = [\"d\"]\n[[guest]]\nhost = true\n", "line 2", "`lamina serve`"),
        ("[device]\n\ninterleave = \"4x16K\"\n[[guest]]\n", "line 3", "65536 bytes"),
    ] {
        let why = read(text).unwrap_err();
        assert!(why.contains(line) && why.contains(what), "{text}: {why}");
    }
    assert!(read("").unwrap_err().contains("guest"));
    assert!(read("guest = []").unwrap_err().contains("no [[guest]]"));
    assert!(read("[[guest]]\nbase = \"b\"\n").unwrap_err().contains("--views-file"));
}

/// The keys that a table takes, as the refusal of another one lists them.
fn keys(table: &str) -> Vec<String> {
    let text = match table {
        "device" => "[device]\nno-such-key = 1\n[[guest]]\n",
        _ => "[[guest]]\nno-such-key = 1\n",
    };
    let why = read(text).unwrap_err();
    let (_, listed) = why.split_once("expected one of").unwrap();
    let key = |word: &str| word.trim().trim_matches('`').to_owned();
    listed.lines().next().unwrap().split(',').map(key).collect()
}

#[test]
fn every_option_of_a_boot_is_a_key() {
    let keys = [keys("device"), keys("guest")].concat();
    let command = Cli::command();
    let boot = command.find_subcommand("boot").unwrap();
    let shown = boot.get_arguments().filter(|option| !option.is_hide_set());
    let mut options: Vec<_> = shown.filter_map(clap::Arg::get_long).collect();
    // Nor is a recording, which is of one run.
    let elsewhere = ["topology", "print-command", "record-lines", "lines-cache", "help", "version"];
    options.retain(|option| !elsewhere.contains(option));
    assert!(options.len() > 30, "{options:?}");
    for option in options {
        assert!(keys.iter().any(|key| key == option), "--{option} is no key: {keys:?}");
    }
}

#[test]
fn a_device_that_is_served_is_a_file_too() {
    let text = r#"
        [device]
        mount = "m"
        capacity = "1G"
        image = "/i"
        views = []
        vhost-user = ["disks", "q.sock=w,e8m3"]
        ivshmem = "i.sock"
        vhost-user-shmem = "/s.sock"
        tcp = "127.0.0.1:0"
    "#;
    let words = [
        "serve",
        "--json",
        "--vhost-user=/t/disks",
        "--vhost-user=/t/q.sock=w,e8m3",
        "--ivshmem=/t/i.sock",
        "--vhost-user-shmem=/s.sock",
        "--mount=/t/m",
        "--capacity=1G",
        "--views=",
        "--image=/i",
        "--tcp=127.0.0.1:0",
    ];
    assert_eq!(read_for(text, For::Serve { json: true }).unwrap(), words);
    let by_hand = Cli::try_parse_from(["lamina"].iter().chain(&words)).unwrap();
    let (cli, _) = expand(text, Path::new("/t"), For::Serve { json: true }).unwrap();
    assert_eq!(format!("{cli:?}"), format!("{by_hand:?}"));
    // Guests have their partitions, and are not booted.
    let guests = "[device]\nmount = \"m\"\nshared = 4096\n[[guest]]\nname = \"a\"\ncapacity = \"1M\"\nquota = 5\ncpus = 3\n[[guest]]\n[[guest]]\nhost = true\n";
    let words = read_for(guests, For::Serve { json: false }).unwrap();
    assert_eq!(
        words,
        ["serve", "--shared=4096", "--mount=/t/m", "--guest=a=1048576,quota=5", "--host=guest-3"]
    );
    for (text, said) in [
        ("[device]\ncapacity = \"1G\"\n", "--mount"),
        ("", "--mount"),
        ("[device]\nmount = \"m\"\n\nvhost-user = [\"=base\"]\n", "directory"),
        ("[device]\nmount = \"m\"\n\ntcp = \"here\"\n", "line 4"),
        ("[device]\nmount = \"m\"\n[[guest]]\ncapacity = 1\n[[guest]]\nname = \"guest-1\"\n", "line 6"),
    ] {
        let Err(why) = read_for(text, For::Serve { json: false }) else { continue };
        assert!(why.contains(said), "{text}: {why}");
    }
    assert!(read_for("", For::Serve { json: false }).is_err());
}

#[test]
fn every_option_of_serve_is_a_key() {
    let keys = keys("device");
    let command = Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    let shown = serve.get_arguments().filter(|option| !option.is_hide_set());
    let mut options: Vec<_> = shown.filter_map(clap::Arg::get_long).collect();
    // Guests and hosts have tables of their own.
    let others = ["topology", "json", "guest", "host", "hosts", "help", "version"];
    options.retain(|option| !others.contains(option));
    assert!(options.len() > 25, "{options:?}");
    for option in options {
        assert!(keys.iter().any(|key| key == option), "--{option} is no key: {keys:?}");
    }
}

#[test]
fn several_guests_are_a_device_that_is_served_and_a_boot_of_each() {
    let text = r#"
        [device]
        run-dir = "run"
        shared = "256M"
        model = ["all.safetensors"]
        [[guest]]
        name = "alice"
        capacity = "1G"
        quota = 4096
        model = ["a.safetensors", "/m/b.safetensors"]
        script = "a.sh"
        [[guest]]
        attach = "vhost-user"
        capacity = "256M"
        views-capacity = "512M"
        script = "b.sh"
        cpus = 1
        [[guest]]
        name = "shell"
        attach = "shmem"
    "#;
    let (cli, words) = expand(text, Path::new("/t"), For::Boot { print_command: true }).unwrap();
    let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
    assert_eq!(
        words,
        [
            "serve",
            "--mount=/t/run/mount",
            "--shared=256M",
            "--model=/t/all.safetensors",
            "--run-dir=/t/run",
            "--guest=alice=1073741824,quota=4096,model=/t/a.safetensors,model=/m/b.safetensors",
            "--guest=guest-2=268435456,views=536870912,disks=/t/run/disks-guest-2",
        ]
    );
    let Command::BootSeveral(several) = cli.command else { panic!("one guest") };
    assert!(several.print_command);
    let guests = several.members.iter();
    let guests: Vec<_> = guests
        .map(|guest| (&*guest.name, guest.export, guest.boot.attach.to_string(), guest.boot.cpus))
        .collect();
    assert_eq!(
        guests,
        [
            ("alice", GuestExport::Named, "cxl".to_owned(), 2),
            ("guest-2", GuestExport::Named, "vhost-user".to_owned(), 1),
            ("shell", GuestExport::Shared, "shmem".to_owned(), 2),
        ]
    );
    let hosts = "[device]\nrun-dir = \"/r\"\nhost-cache = \"1M\"\n[[guest]]\nhost = true\nscript = \"s\"\n[[guest]]\nhost = true\n";
    let words = read(hosts).unwrap();
    assert!(words.ends_with(&["--host=guest-1".to_owned(), "--host=guest-2".to_owned()]), "{words:?}");
    let disks = "[device]\nrun-dir = \"/r\"\n[[guest]]\nscript = \"s\"\n[[guest]]\nattach = \"vhost-user\"\n";
    assert!(read(disks).unwrap().ends_with(&["--vhost-user=/r/disks-guest-2".to_owned()]));
}

#[test]
fn one_monitor_or_several_are_told_of_poison() {
    for (said, wanted) in [("\"a\"", &["--qmp=/t/a"][..]), ("[\"a\", \"/b\"]", &["--qmp=/t/a", "--qmp=/b"])] {
        let words =
            read_for(&format!("[device]\nmount = \"/m\"\nqmp = {said}\n"), For::Serve { json: false });
        let words: Vec<_> = words.unwrap().into_iter().filter(|word| word.starts_with("--qmp")).collect();
        assert_eq!(words, wanted);
    }
    let refused = read_for("[device]\nmount = \"/m\"\nqmp = 1\n", For::Serve { json: false });
    assert!(refused.unwrap_err().contains("a path or a list of paths"));
}

#[test]
fn the_examples_can_be_booted() {
    let example = include_str!("../../../../docs/topology.toml");
    let (cli, _) = expand(example, Path::new("/t"), For::Boot { print_command: true }).unwrap();
    let Command::Boot(boot) = cli.command else { panic!("no boot") };
    assert_eq!(boot.attach.to_string(), "ivshmem");
    assert_eq!(boot.device.models, [Path::new("/t/../guest-tests/models/stories260K-bf16.safetensors")]);
    let example = include_str!("../../../../docs/guests.toml");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let (cli, _) = expand(example, &docs, For::Boot { print_command: true }).unwrap();
    let Command::BootSeveral(several) = cli.command else { panic!("one guest") };
    assert_eq!(several.members.iter().map(|guest| &*guest.name).collect::<Vec<_>>(), ["alice", "bob"]);
    // What they read is there, too.
    for guest in &several.members {
        let script = guest.boot.script.iter();
        script.for_each(|script| assert!(script.is_file(), "{}", script.display()));
    }
    let example = include_str!("../../../../docs/lamina.toml");
    let (cli, _) = expand(example, Path::new("/t"), For::Serve { json: false }).unwrap();
    let Command::Serve(serve) = cli.command else { panic!("no serve") };
    assert_eq!(serve.device.capacity, Some(4 << 30));
    // What is commented out can be written, too.
    let example = example.replace("# [[", "[[");
    let all = example.lines().map(|line| {
        let key = line
            .strip_prefix("# ")
            .filter(|line| line.split_once(" = ").is_some_and(|(key, _)| !key.contains(' ')));
        key.unwrap_or(line).to_owned() + "\n"
    });
    let all: String = all.filter(|line| !line.starts_with("capacity = \"4G\"")).collect();
    let words = read_for(&all, For::Serve { json: false }).unwrap();
    assert!(words.iter().any(|word| word.starts_with("--guest=alice=")), "{words:?}");
}
