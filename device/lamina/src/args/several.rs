//! Several devices: what the base window is interleaved over, as the command line says it.

use clap::Args;
use lamina_abi::Interleave;
use lamina_device::stats::{Interleaving, USUAL_BANDWIDTH};

/// The devices that the base window is interleaved over.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Several devices")]
pub(crate) struct SeveralArgs {
    /// Count the base window as N devices, 2 to 8, over which software interleaves it in chunks of
    /// 2 MiB: what each of them moves, and modelled bandwidths. The guest sees one.
    #[arg(long, value_parser = chunks, value_name = "N", conflicts_with = "interleave", group = "more_than_one")]
    devices: Option<Interleave>,
    /// Show the base window as a CXL interleave set of 2 or 4 memory devices, a file for each
    /// beside `base`: 2 ways by granules of 256 to 16K, 4 ways by 256 to 8K. QEMU hands each of the
    /// guest's loads and stores of it on by itself, which is slow.
    #[arg(long, value_name = "WAYSxGRANULE", group = "more_than_one")]
    pub(crate) interleave: Option<Interleave>,
    /// GB/s that each of several devices is taken to move, for the modelled bandwidths; the default
    /// is what Beluga (SIGMOD 2026) measures of a CXL device in its pool.
    #[arg(long, value_parser = bandwidth, default_value_t = USUAL_BANDWIDTH, requires = "more_than_one", value_name = "GB/S")]
    device_bandwidth: f64,
}

impl SeveralArgs {
    /// The devices, if they are more than one.
    pub(crate) fn interleaving(&self) -> Option<Interleaving> {
        let interleave = self.interleave.or(self.devices)?;
        Some(Interleaving { interleave, bandwidth: self.device_bandwidth })
    }
}

fn chunks(text: &str) -> Result<Interleave, String> {
    let devices = text.parse().map_err(|_| format!("{text:?} is no number of devices"))?;
    Interleave::chunks(devices).map_err(|why| why.to_string())
}

fn bandwidth(text: &str) -> Result<f64, String> {
    let given = text.parse().ok().filter(|gbs: &f64| gbs.is_finite() && *gbs > 0.0);
    given.ok_or_else(|| format!("{text:?} is no bandwidth: give GB/s, a number above 0"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn several_devices_are_asked_for_as_documented() {
        let serve = |words: &[&str]| {
            let all = ["lamina", "serve", "--mount", "m"].iter().chain(words);
            let cli = Cli::try_parse_from(all).map_err(|why| why.to_string())?;
            let Command::Serve(serve) = cli.command else { panic!("no serve") };
            Ok::<_, String>(serve.device.several.interleaving())
        };
        assert_eq!(serve(&[]), Ok(None));
        let chunks = serve(&["--devices", "3"]).unwrap().unwrap();
        assert_eq!((chunks.interleave, chunks.bandwidth), (Interleave::chunks(3).unwrap(), 22.5));
        let set = serve(&["--interleave", "2x4K", "--device-bandwidth", "64"]).unwrap().unwrap();
        assert_eq!((set.interleave.to_string().as_str(), set.bandwidth), ("2x4K", 64.0));
        for words in [
            &["--devices", "1"][..],
            &["--devices", "9"],
            &["--devices", "x"],
            &["--interleave", "4x16K"],
            &["--interleave", "2x256", "--devices", "2"],
            &["--device-bandwidth", "5"],
            &["--devices", "2", "--device-bandwidth", "0"],
            &["--devices", "2", "--device-bandwidth", "inf"],
            &["--devices", "2", "--device-bandwidth=-1"],
        ] {
            assert!(serve(words).is_err(), "{words:?}");
        }
        assert!(serve(&["--interleave", "4x16K"]).unwrap_err().contains("4 ways to 8K"));
    }
}
