//! What hardware would have done, as a [watcher](crate::device::Watcher) models it.
//!
//! The device counts none of this. It says where such figures are told, so that they are declared
//! once like all others.

use crate::figures;

figures! {
    /// A design, modelled on the work that reached the device since its worker began.
    #[derive(Default, PartialEq)]
    pub struct ModelledReport {
        reported {
            /// `plain` or `trace`.
            design: &'static str;
            /// The module that is modelled, and whose currents these are.
            source: String;
            /// The link that is modelled.
            link: String;
        }
        figures {
            /// Modelled: parts of blocks that were asked for or stored.
            requests: u64 = Counter "modelled_requests" Count;
            /// Parts of blocks that came faster than the model could follow, and are in no figure
            /// of it.
            left_out: u64 = Counter "modelled_left_out" Count;
            /// Modelled: bytes read from DRAM, index entries with them.
            read_bytes: u64 = Counter "modelled_read" Bytes;
            /// Modelled: bytes written to DRAM, index entries with them.
            written_bytes: u64 = Counter "modelled_written" Bytes;
            /// Modelled: rows activated.
            activates: u64 = Counter "modelled_activates" Count;
            /// Modelled: lines that needed no activation, of all; null while there were none.
            row_hit_rate: Option<f64> = Gauge "modelled_row_hit_rate" Ratio;
            /// Modelled: picojoules of activations, reads and writes, standby left out.
            access_picojoules: u64 = Counter "modelled_access_picojoules" Count;
            /// Modelled: the time that half of the parts took in DRAM at most, from their first
            /// register to their last data, coming when they came here; null while there were none.
            p50_seconds: Option<f64> = Gauge "modelled_p50" Seconds;
            /// Modelled: the same of 99 in a hundred.
            p99_seconds: Option<f64> = Gauge "modelled_p99" Seconds;
            /// Modelled: the same, on average.
            mean_seconds: Option<f64> = Gauge "modelled_mean" Seconds;
            /// Modelled: seconds from load to use in a controller at 2 GHz, DRAM idle, on average.
            service_seconds: Option<f64> = Gauge "modelled_service" Seconds;
            /// Modelled: flits from the host to the device.
            down_flits: u64 = Counter "modelled_down_flits" Count;
            /// Modelled: flits from the device to the host.
            up_flits: u64 = Counter "modelled_up_flits" Count;
            /// Modelled: the part of the time up to the last request that the link to the device
            /// was busy; null while none passed.
            down_utilisation: Option<f64> = Gauge "modelled_down_utilisation" Ratio;
            /// Modelled: the same of the link to the host.
            up_utilisation: Option<f64> = Gauge "modelled_up_utilisation" Ratio;
        }
    }
}
