//! Fuzz target for a mailbox: whatever a guest may store into it before it rings.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use lamina_abi::mailbox::{
    ANSWER_AT, ANSWER_BYTES, ANSWER_LENGTH_AT, ANSWER_NUMBER_AT, ANSWER_TOTAL_AT, REQUEST_NUMBER_AT,
};
use serde_json::Value;

use super::peers::{RUNTIME, exchange, works};
use super::small;
use crate::ivshmem::{mailbox::Mailbox, peer::perform};
use crate::{Control, guest_port};

/// Where a guest's stores go: the part before the answers' text, and a little of that.
const STORES: u64 = ANSWER_AT + 4096;

/// Stores into a mailbox: each a place (3 bytes), a length (a byte), and the bytes; one without
/// bytes rings. Each request is answered once, within the mailbox, and its text by one line of the
/// guest port.
pub fn mailbox(data: &[u8]) {
    let device = Arc::new(small());
    let control = Control::new(Arc::clone(&device));
    let mut mailbox = Mailbox::new().expect("memory for a mailbox");
    let memory = File::from(mailbox.memory().try_clone_to_owned().expect("a descriptor"));
    let field = |at| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, at).expect("inside the mailbox");
        u64::from_le_bytes(bytes)
    };
    let mut rest = data;
    while let Some((&[a, b, c, length], bytes)) = rest.split_first_chunk() {
        let (stored, after) = bytes.split_at(usize::from(length).min(bytes.len()));
        rest = after;
        if length > 0 {
            memory
                .write_all_at(stored, u64::from_le_bytes([a, b, c, 0, 0, 0, 0, 0]) % STORES)
                .expect("inside");
            continue;
        }
        let mut lines = None;
        let answered = RUNTIME.block_on(perform(&mut mailbox, async |mut text| {
            text.push(b'\n');
            let control = control.clone();
            let answer = exchange(&text, |stream| async move {
                guest_port::talk(&control, stream).await.expect("a pipe within this process");
            });
            let answer = answer.await;
            lines = Some(answer.clone());
            answer
        }));
        if !answered.expect("a mailbox keeps its length") {
            continue;
        }
        let (piece, total) = (field(ANSWER_LENGTH_AT), field(ANSWER_TOTAL_AT));
        assert!(piece <= ANSWER_BYTES && piece <= total, "a piece of {piece} bytes of {total}");
        assert_eq!(field(ANSWER_NUMBER_AT), field(REQUEST_NUMBER_AT), "the answer to another request");
        if let Some(answer) = lines {
            assert_eq!(answer.split_inclusive(|byte| *byte == b'\n').count(), 1, "one line to a line");
            let answer: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
            assert!(answer["ok"].is_boolean(), "{answer}");
        }
    }
    works(&device);
}
