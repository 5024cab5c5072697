//! Guests whose base window is an interleave set of CXL memory devices, which their own kernel's
//! decoders put together.
//!
//! QEMU hands each load and store of such a region on by itself, so little is read.

use std::path::Path;
use std::process::Command;

use lamina_run::{judge::Judge, programs};

use super::script::{
    BEGIN, ROTATION, VIEWS, WRITTEN, all_right, finish, model, new, reported, right, sum_all, sums, write,
};

/// How the set is asked for.
enum By {
    Options,
    File,
}

impl By {
    /// The options for a boot of `script.sh` in `folder`, with the file `new` beside it, which
    /// `put` puts into the guest.
    fn options(&self, set: &str, folder: &Path, put: &str) -> Vec<String> {
        let text = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let (model, views) = (model(), VIEWS.join(","));
        let model = model.to_str().unwrap();
        match self {
            Self::Options => {
                let (run, script) = (text("run"), text("script.sh"));
                let words = ["--interleave", set, "--views", &views, "--put", put, "--run-dir", &run];
                let model = ["--script", &script, "--observe", "--model", model];
                words.iter().chain(&model).map(|word| (*word).to_owned()).collect()
            }
            Self::File => {
                let file = format!(
                    "[device]\nobserve = true\nmodel = [{model:?}]\nviews = {VIEWS:?}\ninterleave = \"{set}\"\nrun-dir = \"run\"\n\
                     [[guest]]\nscript = \"script.sh\"\nput = {{ \"/new\" = \"new\" }}\n"
                );
                std::fs::write(folder.join("topology.toml"), file).unwrap();
                vec!["--topology".to_owned(), text("topology.toml")]
            }
        }
    }
}

/// Boots a guest on the set: it loads every tensor through the region and in every view, writes one
/// by stores, and loads that again in every view.
fn a_guest_puts_the_set_together(by: &By, set: &str, ways: usize, granularity: u32) {
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge::new(&[model()]).unwrap();
    let put = new(folder.path(), &judge, WRITTEN);

    let mut script = format!(
        "{BEGIN}lamina-shim up || fail up\n\
         region=$(grep -lx {ways} /sys/bus/cxl/devices/region*/interleave_ways) || fail 'no set'\n\
         [ \"$(cat $(dirname $region)/interleave_granularity)\" = {granularity} ] || fail granularity\n"
    );
    sum_all(&mut script);
    write(&mut script, WRITTEN);
    sums(&mut script, "after", WRITTEN);
    // All of the devices have moved something, and are modelled.
    script.push_str(
        "lamina-shim stats >/stats && grep -q '\"by\": \"hardware\"' /stats || fail stats\n\
         echo \"devices $(grep -c '\"modelled_gbs\": [0-9]' /stats)\"\nexit 7\n",
    );
    let path = folder.path().join("script.sh");
    std::fs::write(&path, script).unwrap();

    let mut command = Command::new(programs::lamina().unwrap());
    command.arg("boot").args(by.options(set, folder.path(), &put));
    let said = finish(command);
    all_right(&said, &judge);
    right(&said, &judge, "after", WRITTEN, ROTATION);
    assert_eq!(reported(&said, "devices"), ways.to_string());
}

#[test]
fn two_devices_by_lines_of_256_bytes_are_one_window() {
    a_guest_puts_the_set_together(&By::File, "2x256", 2, 256);
}

#[test]
fn two_devices_by_the_largest_granules_are_one_window() {
    a_guest_puts_the_set_together(&By::Options, "2x16K", 2, 16384);
}

#[test]
fn four_devices_by_the_largest_stripes_are_one_window() {
    a_guest_puts_the_set_together(&By::Options, "4x8K", 4, 8192);
}
