// Which instructions of x86-64 have a processor forget where pages are.

/// Whether a processor that runs this may have another mapping behind it. Prefixes do not matter.
pub(crate) fn changes_mappings(code: &[u8]) -> bool {
    let is_prefix =
        |byte: u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3);
    let mut code = code.iter().copied().skip_while(|byte| is_prefix(*byte));
    match (code.next(), code.next(), code.next()) {
        // mov to a control register, rsm, invpcid.
        (Some(0x0f), Some(0x22 | 0xaa), _) | (Some(0x0f), Some(0x38), Some(0x82)) => true,
        // lmsw and invlpg of memory, and the instructions of nested guests.
        (Some(0x0f), Some(0x01), Some(form)) => {
            (form >> 3 & 7 >= 6 && form < 0xc0) || matches!(form, 0xc1..=0xc4 | 0xd8..=0xdf)
        }
        _ => false,
    }
}
