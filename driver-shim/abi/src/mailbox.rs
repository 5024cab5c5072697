//! The mailbox: how a guest without a serial port asks the device for what loads and stores cannot
//! say.
//!
//! It is the shared memory of a small ivshmem device ([`MAILBOX_BYTES`], BAR 2), a guest's own. The
//! rules:
//!
//! * Every field is a little-endian u64. The guest writes the request's, the device the answer's.
//! * A request: the guest writes its text (one JSON object, as the control port has it, without a
//!   line end) at [`REQUEST_AT`], its length, and last a number that is not the answer's; then it
//!   rings: a store of [`RING`] to the ivshmem device's doorbell register.
//! * The device writes the answer's text to [`ANSWER_AT`], the length of that, and last the
//!   request's number; then it rings the guest ([`GUEST_PEER`], vector 0). Who has no driver for
//!   interrupts looks at the number until it is its own.
//! * Of an answer with more than [`ANSWER_BYTES`] that is the first piece; the total says how long
//!   it is. A request of length 0 asks for the piece that begins at `from`.
//! * A guest makes no request before the one before it is answered, and lets one program at a time
//!   make them.
//!
//! | field | offset |
//! |---|---|
//! | magic `LAMINAMB`, version (1) | 0, 8 |
//! | request: number, length, from | 64, 72, 80 |
//! | answer: number, length of the piece, total length | 128, 136, 144 |

/// Bytes of a mailbox.
pub const MAILBOX_BYTES: u64 = 1 << 20;
/// The first eight bytes of a mailbox.
pub const MAILBOX_MAGIC: [u8; 8] = *b"LAMINAMB";
/// The version of these rules.
pub const MAILBOX_VERSION: u64 = 1;
/// Offset of the version.
pub const VERSION_AT: u64 = 8;
/// Offset of the request's number, which is never 0.
pub const REQUEST_NUMBER_AT: u64 = 64;
/// Offset of the request's length.
pub const REQUEST_LENGTH_AT: u64 = 72;
/// Offset of the place in the last answer from which a request of length 0 wants more.
pub const REQUEST_FROM_AT: u64 = 80;
/// Offset of the number of the request that was answered last; 0 before the first.
pub const ANSWER_NUMBER_AT: u64 = 128;
/// Offset of the length of the piece of the answer that lies in the mailbox.
pub const ANSWER_LENGTH_AT: u64 = 136;
/// Offset of the length of the whole answer.
pub const ANSWER_TOTAL_AT: u64 = 144;
/// Offset of the request's text.
pub const REQUEST_AT: u64 = 4096;
/// Bytes that a request's text may have.
pub const REQUEST_BYTES: u64 = 64 << 10;
/// Offset of the answer's text.
pub const ANSWER_AT: u64 = 128 << 10;
/// Bytes of an answer that lie in the mailbox at once.
pub const ANSWER_BYTES: u64 = MAILBOX_BYTES - ANSWER_AT;

/// The device, among the peers of the ivshmem device.
pub const DEVICE_PEER: u16 = 1;
/// The guest, among them.
pub const GUEST_PEER: u16 = 2;
/// Offset of the doorbell, a register of 32 bits in BAR 0 of an ivshmem device.
pub const DOORBELL_AT: u64 = 12;
/// What rings the device: its peer number above the vector 0.
pub const RING: u32 = (DEVICE_PEER as u32) << 16;

// Nothing overlaps, and a BAR is a power of two.
const _: () = assert!(REQUEST_AT + REQUEST_BYTES <= ANSWER_AT && MAILBOX_BYTES.is_power_of_two());
