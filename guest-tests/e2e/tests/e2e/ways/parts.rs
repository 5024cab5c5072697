//! Guests of parts of a device that is served (`lamina boot --guest`), by ivshmem and by shmem.
//!
//! [`super::topology`] has parts by CXL and as disks.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use lamina_run::{bundled, daemon::SharedDaemon, judge::Judge};

use super::script::{ROTATION, VIEWS, boot, hidden, new, right, sums, write};
use super::{ivshmem, shmem};

/// A part, and how its guest is booted.
struct Part<'a> {
    device: &'a SharedDaemon,
    name: &'a str,
    attach: &'a str,
    prologue: String,
    judge: &'a Judge,
    /// The tensor that lies where the part begins.
    tensor: &'a str,
    /// A tensor of the other part.
    others: &'a str,
}

impl Part<'_> {
    /// Boots the guest: it reads a tensor in everything, finds nothing of the other guest, writes
    /// the tensor and reads it again.
    fn visit(&self) {
        let Self { name, attach, tensor, others, .. } = *self;
        let folder = tempfile::tempdir().unwrap();
        let mut script = format!("{}lamina-shim up || fail up\n", self.prologue);
        sums(&mut script, "before", tensor);
        for view in ["base", "full"] {
            hidden(&mut script, others, view);
        }
        write(&mut script, tensor);
        sums(&mut script, "after", tensor);
        let put = new(folder.path(), self.judge, tensor);
        let run = self.device.ready.api.parent().unwrap().to_str().unwrap();
        let options = ["--guest", name, "--attach", attach, "--cpus", "1", "--run-dir", run, "--put", &put];
        let said = boot(folder.path(), &script, &options);
        right(&said, self.judge, "before", tensor, 0);
        right(&said, self.judge, "after", tensor, ROTATION);
    }

    /// Whether the part has what its guest stored, and not what the other did.
    fn has_what_was_stored(&self) {
        let want = self.judge.full(self.tensor, ROTATION).unwrap();
        let mut found = vec![0; want.len()];
        let base = self.device.export_of(self.name).unwrap().base.path;
        File::open(base).unwrap().read_exact_at(&mut found, 0).unwrap();
        assert!(found == want, "{}", self.name);
    }
}

#[test]
fn guests_of_two_parts_read_and_write_their_own_by_ivshmem_and_by_shmem() {
    let models = bundled().expect("start the tests through ./x test");
    let guest = |name: &str, model: &Path| format!("{name}=256M,model={}", model.display());
    let (alice, bob) = (guest("alice", &models[0]), guest("bob", &models[1]));
    let options = ["--guest", &alice, "--guest", &bob, "--views", &VIEWS.join(",")];
    let device = SharedDaemon::start(&options).unwrap();
    let judges = [0, 1].map(|which| Judge::new(&models[which..=which]).unwrap());
    let [weights, cache] = [0, 1].map(|which| judges[which].names().next().unwrap());
    let part = |name, attach, prologue, judge, tensor, others| Part {
        device: &device,
        name,
        attach,
        prologue,
        judge,
        tensor,
        others,
    };
    let parts = [
        part("alice", "ivshmem", ivshmem::prologue(), &judges[0], weights, cache),
        part("bob", "shmem", shmem::prologue(), &judges[1], cache, weights),
    ];
    // At once, and at the same place of their windows.
    thread::scope(|scope| parts.iter().for_each(|part| drop(scope.spawn(|| part.visit()))));
    parts.iter().for_each(Part::has_what_was_stored);
    device.stop().unwrap();
}
