// What a guest's processors are held against: the file for lines has a part for each that its maker
// knew of.
//
// Text is put together by hand: what the core library has for it needs a runtime that panics.

/// A line that says why nothing is recorded.
pub(crate) struct Refusal {
    bytes: [u8; 160],
    length: usize,
}

impl Refusal {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    /// What finds no room is left out.
    fn text(mut self, text: &[u8]) -> Self {
        for from in text {
            if let Some(to) = self.bytes.get_mut(self.length) {
                *to = *from;
                self.length = self.length.wrapping_add(1);
            }
        }
        self
    }

    fn number(self, number: u64) -> Self {
        let this = if number < 10 { self } else { self.number(number / 10) };
        this.text(&[b'0' | (number % 10) as u8])
    }
}

/// Why a guest that may have `most` processors is not recorded in a file of so many parts: what the
/// others touch would be missing, and nobody would count it. None if there are enough.
pub(crate) fn of_processors(most: u64, parts: u64) -> Option<Refusal> {
    if most <= parts {
        return None;
    }
    let why = Refusal { bytes: [0; 160], length: 0 };
    let why = why.text(b"lamina: lines are recorded of ").number(parts);
    let why = why.text(b" processors, and the guest may have ").number(most);
    Some(why.text(b": give --cpus ").number(most).text(b"\n"))
}
