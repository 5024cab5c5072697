//! Discards between the requests of a kernel that is played here, one after the other.

use super::*;
use lamina_codec::kv::KvLayout;
use lamina_device::device::{Device, DeviceConfig};
use lamina_device::layout::Layout;
use lamina_device::tensor::TensorSpec;

const PAGE: usize = 4096;

struct Kernel {
    device: Arc<Device>,
    coherence: Coherence,
}

impl Kernel {
    fn new(set: Option<&str>) -> Self {
        let interleaving = set.map(|set| lamina_device::stats::Interleaving {
            interleave: set.parse().unwrap(),
            bandwidth: 1.0,
        });
        let config = DeviceConfig { interleaving, ..DeviceConfig::new(16 << 20, 8 << 20) };
        let device = Arc::new(Device::new(config).unwrap());
        let partition = Partition::first(Arc::clone(&device));
        Self { device, coherence: Coherence::new(partition, None, Duration::ZERO) }
    }

    /// Writes a page back.
    fn writes_back(&self, which: ExportFile, page: u64, byte: u8) {
        let asker = Asker { channel: 0, unique: 0 };
        let mut bytes = vec![byte; PAGE];
        let answer = self.coherence.write_back(which, asker, page * PAGE as u64, &mut bytes);
        assert_eq!(answer, Some(Ok(4096)));
    }

    /// Reads a page.
    fn reads(&self, which: ExportFile, page: u64) {
        drop(self.coherence.reading(which, page * PAGE as u64, PAGE as u64));
    }

    /// The bytes of a page of the base window, which are all the same.
    fn holds(&self, page: u64) -> u8 {
        let mut bytes = vec![0; PAGE];
        self.device.read_base(page * PAGE as u64, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page}");
        bytes[0]
    }

    fn drops(&self, pages: Range<u64>, let_go: LetGo) {
        let range = pages.start * PAGE as u64..pages.end * PAGE as u64;
        let (gone, dropped) = self.coherence.drop_step(&range, let_go);
        dropped.unwrap();
        assert_eq!(gone, range);
    }
}

#[test]
fn what_the_kernel_had_of_a_page_is_dropped_and_what_it_has_read_since_is_stored() {
    for let_go in [LetGo::Requested, LetGo::ByItself] {
        let kernel = Kernel::new(None);
        for page in 0..4 {
            kernel.writes_back(ExportFile::Base, page, 1);
        }
        kernel.drops(0..3, let_go);
        for page in 0..4 {
            kernel.writes_back(ExportFile::Base, page, 2);
        }
        assert_eq!([0, 1, 2, 3].map(|page| kernel.holds(page)), [0, 0, 0, 2]);
        kernel.reads(ExportFile::Base, 1);
        drop(kernel.coherence.writing(ExportFile::Base, 2 * PAGE as u64, PAGE as u64));
        for page in 0..3 {
            kernel.writes_back(ExportFile::Base, page, 3);
        }
        assert_eq!([0, 1, 2].map(|page| kernel.holds(page)), [0, 3, 3]);
        // A page that was read before it is dropped is the one that the kernel lets go of.
        kernel.reads(ExportFile::Base, 1);
        kernel.drops(1..2, let_go);
        kernel.writes_back(ExportFile::Base, 1, 4);
        assert_eq!(kernel.holds(1), 0);
    }
}

#[test]
fn a_discard_that_is_over_holds_nothing_back() {
    let kernel = Kernel::new(None);
    kernel.coherence.discard(100, 3 * PAGE as u64).unwrap();
    for page in 0..4 {
        kernel.writes_back(ExportFile::Base, page, 1);
    }
    assert_eq!([0, 1, 2, 3].map(|page| kernel.holds(page)), [1; 4]);
}

#[test]
fn a_discard_that_fails_says_how_far_it_came_and_marks_no_more() {
    let kernel = Kernel::new(None);
    for page in 0..8 {
        kernel.writes_back(ExportFile::Base, page, 1);
    }
    kernel.device.inject_poison(4 * PAGE as u64, 1).unwrap();
    let range = 0..4 * PAGE as u64 + 100;
    let why = kernel.coherence.discard(0, range.end).unwrap_err();
    assert!(matches!(why, ServeError::Discard { offset: 0, done: 16384, .. }), "{why}");
    // Nor does a hole.
    kernel.coherence.punch(range).unwrap_err();
    for page in 3..8 {
        kernel.writes_back(ExportFile::Base, page, 2);
    }
    assert_eq!([3, 4, 5].map(|page| kernel.holds(page)), [0, 2, 2]);
}

#[test]
fn targets_bring_nothing_back_either() {
    for set in ["2x256", "4x4K"] {
        let kernel = Kernel::new(Some(set));
        let pages = 16;
        for page in 0..pages {
            kernel.writes_back(ExportFile::Base, page, 1);
        }
        kernel.drops(0..pages, LetGo::Requested);
        let targets = set.parse::<lamina_abi::Interleave>().unwrap().ways();
        let each = pages / u64::from(targets);
        for target in 0..targets {
            (0..each).for_each(|page| kernel.writes_back(ExportFile::Target(target), page, 2));
        }
        assert!((0..pages).all(|page| kernel.holds(page) == 0), "{set}");
        // One that is read again is another, in its target.
        for target in 0..targets {
            kernel.reads(ExportFile::Target(target), 0);
            kernel.writes_back(ExportFile::Target(target), 0, 3);
            kernel.writes_back(ExportFile::Target(target), 1, 3);
        }
        let held: Vec<_> = (0..pages).map(|page| kernel.holds(page)).collect();
        let first = usize::try_from(targets).unwrap();
        assert!(
            held[..first] == vec![3; first] && held[first..].iter().all(|byte| *byte == 0),
            "{set}: {held:?}"
        );
    }
}

#[test]
fn a_step_does_not_end_inside_of_a_window() {
    let kernel = Kernel::new(None);
    let layout = KvLayout::rows(64, 128);
    let window = 64 * 128 * 2;
    let spec = TensorSpec {
        name: "k".into(),
        dpa: Some(PAGE as u64),
        length: 256 * window,
        elements: None,
        shape: Vec::new(),
        format: lamina_codec::format::Format::Bf16,
        layout: Layout::Kv(layout),
        codec: None,
        base: None,
    };
    kernel.device.create_tensor(spec).unwrap();
    kernel.device.write_base(PAGE as u64, &vec![7; 256 * usize::try_from(window).unwrap()]).unwrap();
    kernel.device.flush(0, 16 << 20).unwrap();
    let (gone, dropped) = kernel.coherence.drop_step(&(0..16 << 20), LetGo::Requested);
    dropped.unwrap();
    assert!(gone.end >= DISCARD_STEP && (gone.end - PAGE as u64).is_multiple_of(window), "{gone:?}");
    kernel.coherence.discard(0, 16 << 20).unwrap();
    assert!((0..4096).all(|page| kernel.holds(page) == 0));
}
