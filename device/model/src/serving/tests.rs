use super::*;

/// A node that computes 1000 tokens a second.
const COMPUTE: Compute = Compute { flops: 1e12, token_flop: 1e9 };

fn pool(devices: u32, interleaved: bool, background_gbs: f64) -> Memory {
    Memory::Pool {
        node_gbs: 40.0,
        devices,
        device_gbs: 20.0,
        ratio: 1.0,
        bytes: 8 << 30,
        interleaved,
        background_gbs,
    }
}

fn request(arrival: f64, node: usize, computed: u64, hits: &[(u64, u64)]) -> Request {
    Request { arrival, node, computed, hits: hits.to_vec() }
}

fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 1e-9 * wanted.max(1.0), "{found} is not {wanted}");
}

#[test]
fn a_node_does_one_request_after_another() {
    let requests = [request(0.0, 0, 1000, &[]), request(0.5, 0, 1000, &[]), request(5.0, 0, 500, &[])];
    let times = serve(1, &COMPUTE, &Memory::Local { node_gbs: 10.0 }, &requests).unwrap();
    // 1 s, then 1.5 s of which half a second is waiting, then half a second.
    near(times.ttft_mean, 1.0);
    near(times.ttft_p50, 1.0);
    near(times.ttft_p99, 1.5);
    near(times.requests_per_second, 3.0 / 5.5);
}

#[test]
fn what_is_hit_costs_its_fetch_and_no_computing() {
    let hit = [(0, 10_000_000_000)];
    let local = serve(1, &COMPUTE, &Memory::Local { node_gbs: 10.0 }, &[request(0.0, 0, 0, &hit)]).unwrap();
    near(local.ttft_mean, 1.0);
    // One device gives 20 GB/s; eight that are interleaved give what the node's path takes, 40.
    for (memory, seconds) in
        [(pool(1, true, 0.0), 0.5), (pool(8, true, 0.0), 0.25), (pool(1, false, 10.0), 1.0)]
    {
        near(serve(1, &COMPUTE, &memory, &[request(0.0, 0, 0, &hit)]).unwrap().fetch_mean, seconds);
    }
}

#[test]
fn what_is_stored_compressed_costs_devices_less_and_the_path_the_same() {
    let Memory::Pool { node_gbs, devices, device_gbs, bytes, interleaved, background_gbs, .. } =
        pool(8, true, 0.0)
    else {
        panic!("a pool")
    };
    let memory =
        Memory::Pool { ratio: 2.0, node_gbs, devices, device_gbs, bytes, interleaved, background_gbs };
    let hit = [(0, 5_000_000_000)];
    near(serve(1, &COMPUTE, &memory, &[request(0.0, 0, 0, &hit)]).unwrap().fetch_mean, 0.25);
}

#[test]
fn without_interleaving_one_device_has_what_lies_together() {
    // A gigabyte at the beginning: device 0 of 8 has all of it, and two nodes wait for it in turn.
    let hit = [(0, 1 << 30)];
    let requests = [request(0.0, 0, 0, &hit), request(0.0, 1, 0, &hit)];
    let alone = float(1 << 30) / 20e9;
    let apart = serve(2, &COMPUTE, &pool(8, false, 0.0), &requests).unwrap();
    near(apart.ttft_p50, alone);
    near(apart.ttft_p99, 2.0 * alone);
    let over_all = serve(2, &COMPUTE, &pool(8, true, 0.0), &requests).unwrap();
    assert!(over_all.ttft_p99 < alone);
    // What another takes of the first device slows down all that is interleaved over it.
    let beside = serve(2, &COMPUTE, &pool(8, true, 15.0), &requests).unwrap();
    near(beside.ttft_p99, 2.0 * float(1 << 27) / 5e9);
}

#[test]
fn every_byte_of_a_range_is_in_one_device() {
    for interleaved in [false, true] {
        let memory = pool(3, interleaved, 0.0);
        let devices = Devices::new(&memory);
        // It passes the end, and goes on at the beginning.
        let parts = devices.split(&[((8 << 30) - 5, 3 * INTERLEAVE + 7), (1, 1), (0, 0)]);
        assert_eq!(parts.iter().sum::<u64>(), 3 * INTERLEAVE + 8, "{interleaved}");
    }
    let memory = pool(2, true, 0.0);
    assert_eq!(Devices::new(&memory).split(&[(INTERLEAVE - 1, 3)]), [1, 2]);
}

#[test]
fn absurd_parameters_are_named() {
    let none: &[Request] = &[];
    let refused = |compute: Compute, memory: Memory, requests: &[Request]| {
        serve(1, &compute, &memory, requests).unwrap_err().to_string()
    };
    assert!(refused(Compute { flops: f64::NAN, ..COMPUTE }, pool(1, true, 0.0), none).contains("flops"));
    assert!(refused(COMPUTE, pool(0, true, 0.0), none).contains("devices"));
    assert!(refused(COMPUTE, pool(1, true, 20.0), none).contains("background_gbs"));
    assert!(refused(COMPUTE, Memory::Local { node_gbs: 0.0 }, none).contains("node_gbs"));
    assert!(refused(COMPUTE, pool(1, true, 0.0), &[request(0.0, 7, 0, &[])]).contains("node is 7"));
    assert_eq!(serve(1, &COMPUTE, &pool(1, true, 0.0), none).unwrap(), Times::default());
}
