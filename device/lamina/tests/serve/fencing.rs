//! Hosts whose access to the region they share is taken away: what they store reaches nobody, and a
//! pool goes on without them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lamina_pool::{Chain, Geometry, Pool, PoolError, Reserved, Service, hosts};
use serde_json::{Value, json};

use crate::common::{Place, expected, noise, within};
use crate::deaths::kill_worker;
use crate::hosts::{Host, Rig, SHARED};

const POISON: u8 = 0xff;

fn revoke(by: &mut Host, host: &str) -> Value {
    by.ctl.ask(&json!({ "op": "revoke", "host": host }))
}

fn admit(rig: &Rig, host: &str) {
    let (status, answer) = rig.place.try_ask("POST", &format!("/hosts/{host}/admit"), &Value::Null);
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_revoked_hosts_stores_reach_nobody_and_its_loads_are_poison_until_it_is_admitted() {
    within(60, || {
        let bytes = noise(1, 40_000);
        let place = Place::new();
        let model = place.checkpoint("t", &bytes);
        let rig = Rig::new(2, &["--model", &model]);
        let (mut one, mut other) = (rig.host(0), rig.host(1));
        let view = one.ctl.ask(&json!({ "op": "view", "tensor": "t", "spelling": "e8m3" }));
        let view = view["view"]["offset"].as_u64().unwrap();
        assert!(one.views.load(view, bytes.len()) == expected("e8m3", &bytes));
        let flushed = noise(2, 4096);
        one.store(1 << 20, &flushed);
        one.flush(1 << 20, 4096);
        one.store(1 << 20, &noise(3, 64));

        assert_eq!(revoke(&mut other, "h0"), json!({ "ok": true }));
        assert_eq!(one.load(1 << 20, 4096), [POISON; 4096]);
        assert_eq!(one.views.load(view, 4096), [POISON; 4096]);
        one.store(1 << 20, &noise(4, 4096));
        one.base.sync();
        let refused = one.ctl.ask(&json!({ "op": "flush" }));
        assert_eq!((&refused["ok"], &refused["revoked"]), (&json!(false), &json!(true)), "{refused}");
        assert!(refused["error"].as_str().unwrap().contains("lamina pool fence --undo h0"), "{refused}");
        assert_eq!(revoke(&mut one, "h1")["revoked"], true, "it has no say about others");
        other.invalidate(0, SHARED);
        assert!(other.load(1 << 20, 4096) == flushed);
        let reported = rig.reported(&mut one);
        assert_eq!((&reported["revoked"], &reported["held_bytes"]), (&json!(true), &json!(0)), "{reported}");
        assert_eq!(rig.reported(&mut other)["revoked"], false);

        admit(&rig, "h0");
        assert!(one.load(1 << 20, 4096) == flushed);
        assert!(one.views.load(view, bytes.len()) == expected("e8m3", &bytes));
        one.store(1 << 20, b"again");
        one.flush(1 << 20, 5);
        other.invalidate(1 << 20, 5);
        assert!(other.load(1 << 20, 4096) == [b"again", &flushed[5..]].concat());
    });
}

#[test]
fn only_hosts_that_are_there_can_be_revoked() {
    within(60, || {
        let rig = Rig::new(2, &[]);
        let mut one = rig.host(0);
        let refused = revoke(&mut one, "h7");
        assert!(refused["error"].as_str().unwrap().contains("there are: h0, h1"), "{refused}");
        let (status, answer) = rig.place.try_ask("POST", "/hosts/h7/revoke", &Value::Null);
        assert_eq!(status, 404, "{answer}");
    });
}

#[test]
fn access_stays_revoked_when_the_worker_dies() {
    within(60, || {
        let rig = Rig::new(2, &[]);
        let (mut one, mut other) = (rig.host(0), rig.host(1));
        one.store(0, b"flushed");
        one.flush(0, 7);
        one.store(0, b"dirty!!");
        assert_eq!(revoke(&mut other, "h0")["ok"], true);
        kill_worker(&rig.run);
        (one.ctl, other.ctl) = (rig.host(0).ctl, rig.host(1).ctl);
        one.store(0, b"later!!");
        one.base.sync();
        assert_eq!(one.ctl.ask(&json!({ "op": "flush" }))["revoked"], true);
        other.invalidate(0, 4096);
        assert_eq!(other.load(0, 7), b"flushed");
        assert_eq!(one.load(8192, 64), [POISON; 64]);
        admit(&rig, "h0");
        kill_worker(&rig.run);
        assert_eq!(rig.host(0).load(0, 7), b"flushed");
    });
}

#[test]
fn nothing_follows_a_revocation_whatever_was_under_way() {
    within(120, || {
        let rig = Rig::new(2, &[]);
        let mut other = rig.host(1);
        for round in 0..10_u64 {
            let (stop, flushed) = (AtomicBool::new(false), Mutex::new(None));
            thread::scope(|scope| {
                let (rig, stop, flushed) = (&rig, &stop, &flushed);
                scope.spawn(move || {
                    let mut one = rig.host(0);
                    for step in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let (at, bytes) = (step % 64 * 4096, noise(round << 32 | step as u64, 4096));
                        one.store(at, &bytes);
                        if one.ctl.ask(&json!({ "op": "flush" }))["ok"] == true {
                            *flushed.lock().unwrap() = Some((at, bytes));
                        }
                    }
                });
                thread::sleep(Duration::from_millis(3 * round));
                assert_eq!(revoke(&mut other, "h0")["ok"], true);
                other.invalidate(0, SHARED);
                let then = other.load(0, 64 * 4096);
                thread::sleep(Duration::from_millis(20));
                other.invalidate(0, SHARED);
                assert!(other.load(0, 64 * 4096) == then, "round {round}");
                stop.store(true, Ordering::Relaxed);
            });
            // What was said to be flushed is there.
            if let Some((at, bytes)) = flushed.into_inner().unwrap() {
                assert!(other.load(at, 4096) == bytes, "round {round}: at {at}");
            }
            admit(&rig, "h0");
        }
    });
}

/// A node of a pool for each host, of which one stops in the middle of a store and goes on when the
/// others have done without it.
#[test]
fn a_pool_goes_on_without_a_host_that_stopped_and_refuses_it_afterwards() {
    within(240, || {
        let rig = Rig::new(3, &[]);
        let names: Vec<String> = (0..3).map(|host| format!("h{host}")).collect();
        let ctl = |host: usize| rig.run.ready["guests"][host]["ctl"].as_str().unwrap().to_owned();
        let geometry = Geometry::fitting_for(SHARED as u64, 3);
        hosts::create(&rig.path(0, "base"), ctl(0).as_ref(), &geometry).unwrap();
        let timeout = Duration::from_millis(1500);
        let attach = |host: usize| -> Pool {
            hosts::open(&rig.path(host, "base"), ctl(host).as_ref(), &names, &names[host], timeout).unwrap()
        };
        let stopped = attach(0);
        stopped.put("before", b"it stopped").unwrap();
        let key = Chain::new("a model").next(&[1, 2, 3]);
        let Ok(Reserved::Yours(mut reservation)) = stopped.reserve(key, 4096) else { panic!("not reserved") };
        reservation.append(&[1; 100]).unwrap();

        // It counts on no more. The others go on, and one of them manages.
        let others = [1, 2].map(|host| Arc::new(attach(host)));
        let services = others.each_ref().map(|pool| Service::start(Arc::clone(pool)));
        let block = noise(7, 4096);
        let stored = thread::scope(|scope| {
            let store = |pool: &Pool| {
                let mut stored = false;
                while pool.prefix(&[key]).unwrap() == 0 {
                    stored |= pool.store(key, &[&block]).unwrap();
                    thread::sleep(Duration::from_millis(1));
                }
                stored
            };
            let threads = others.each_ref().map(|pool| scope.spawn(move || store(pool)));
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(stored.iter().filter(|stored| **stored).count(), 1, "stored once");
        assert_eq!(rig.reported(&mut rig.host(0))["revoked"], true);

        // What it does now, it does to nobody.
        let appended = reservation.append(&[1; 3996]);
        let refused = appended.and_then(|()| reservation.commit()).unwrap_err();
        assert!(matches!(refused, PoolError::Revoked | PoolError::Fenced { .. }), "{refused}");
        assert!(matches!(stopped.put("later", b"x"), Err(PoolError::Revoked | PoolError::Fenced { .. })));
        for pool in &others {
            let mut read = vec![0; 4096];
            assert!(pool.read_into(&key, &mut [&mut read]).unwrap() && read == block);
            assert_eq!(pool.get("before").unwrap().unwrap(), b"it stopped");
            assert_eq!(pool.get("later").unwrap(), None);
        }
        assert!(others[0].check(false).unwrap().problems.is_empty());

        // Started anew, it is one of them again.
        drop(stopped);
        admit(&rig, "h0");
        let anew = attach(0);
        assert_eq!(anew.get("before").unwrap().unwrap(), b"it stopped");
        anew.put("after", b"it was started anew").unwrap();
        assert_eq!(others[1].get("after").unwrap().unwrap(), b"it was started anew");
        for service in services {
            service.stop().unwrap();
        }
        anew.leave().unwrap();
    });
}
