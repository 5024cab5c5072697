//! Of fp4 the sixteen values of all codes are made for each block, or known of each scale, and
//! looked up. An fp8 has its fields moved to bf16's places, or with VBMI is looked up, and has them
//! moved to binary32's where results may be subnormal or too large.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _CMP_UNORD_Q, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128,
    _mm256_loadu_si256, _mm256_set1_epi16, _mm256_storeu_si256, _mm512_add_epi8, _mm512_add_epi16,
    _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi256_si512, _mm512_castsi512_ps,
    _mm512_castsi512_si256, _mm512_cmp_ps_mask, _mm512_cmpeq_epi16_mask, _mm512_cmpge_epi16_mask,
    _mm512_cmpge_epi32_mask, _mm512_cmplt_epi16_mask, _mm512_cmplt_epu8_mask, _mm512_cvtepi32_epi16,
    _mm512_cvtepi32_ps, _mm512_cvtepu8_epi16, _mm512_cvtepu8_epi32, _mm512_inserti64x4, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_mask_add_epi16, _mm512_mask_add_epi32, _mm512_mask_mov_epi16,
    _mm512_mask_mov_epi32, _mm512_mask_or_epi32, _mm512_maskz_mov_epi8, _mm512_mul_ps, _mm512_or_si512,
    _mm512_permutex2var_epi8, _mm512_permutexvar_epi16, _mm512_permutexvar_epi64, _mm512_set1_epi8,
    _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi64, _mm512_setzero_si512,
    _mm512_sll_epi16, _mm512_sll_epi32, _mm512_slli_epi16, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_si512, _mm512_sub_epi8, _mm512_test_epi16_mask, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
};
use std::ops::RangeInclusive;

use super::{MX_BLOCK, NAN, NV_BLOCK, PLAIN_SCALES, Rows, widened_fp4};
use crate::format::Format;

/// Whether the processor has what the functions here need.
pub(super) fn is_available() -> bool {
    cfg!(not(feature = "portable"))
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
}

/// Whether it has what [`fp8_to_bf16_in_pairs`] needs, too.
pub(super) fn has_bytes_looked_up() -> bool {
    is_available() && std::arch::is_x86_feature_detected!("avx512vbmi")
}

/// The binary32 of every code.
const VALUES: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        values[code as usize] = widened_fp4(code);
        code += 1;
    }
    values
};

/// The bf16 of every code times `scale`, in the lower half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn values(scale: f32) -> __m512i {
    // SAFETY: there are 16 values, and the load needs no alignment.
    let values = unsafe { _mm512_loadu_ps(VALUES.as_ptr()) };
    _mm512_castsi256_si512(rounded(_mm512_mul_ps(values, _mm512_set1_ps(scale))))
}

/// The bf16 of 16 binary32, nearest even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rounded(values: __m512) -> __m256i {
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    let nan = _mm512_set1_epi32(i32::from(NAN));
    _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(up), is_nan, nan))
}

/// The codes of 16 bytes, each in 16 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn codes(bytes: __m128i) -> __m512i {
    let bytes = _mm512_cvtepu8_epi32(bytes);
    let low = _mm512_and_si512(bytes, _mm512_set1_epi32(0x0f));
    let high = _mm512_and_si512(_mm512_slli_epi32::<12>(bytes), _mm512_set1_epi32(0x000f_0000));
    _mm512_or_si512(low, high)
}

/// As the portable `powers_to_bf16`.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn powers_to_bf16(table: &[f32; 256], scales: &[u8], elements: &[u8], out: &mut [u8]) {
    const BYTES: usize = MX_BLOCK / 2;
    // Those of the scale 1; zeros of both signs stay what they are.
    let (plain, some) = (values(1.0), 0xfefe);
    let blocks = elements.as_chunks::<BYTES>().0.iter();
    for ((block, scale), out) in blocks.zip(scales).zip(out.as_chunks_mut::<{ 2 * MX_BLOCK }>().0) {
        let values = if PLAIN_SCALES.contains(scale) {
            let exponent = (i16::from(*scale) - 127) << 7;
            _mm512_mask_add_epi16(plain, some, plain, _mm512_set1_epi16(exponent))
        } else {
            values(table[usize::from(*scale)])
        };
        // SAFETY: the block has 16 bytes and `out` 64; neither needs an alignment.
        unsafe {
            let codes = codes(_mm_loadu_si128(block.as_ptr().cast()));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_permutexvar_epi16(codes, values));
        }
    }
}

/// As the portable `nibbles_to_bf16`: of each scale the row has the values of all codes.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn nibbles_to_bf16(rows: &Rows, scales: &[u8], elements: &[u8], out: &mut [u8]) {
    const BYTES: usize = NV_BLOCK / 2;
    // SAFETY: a row has 32 bytes, and the load needs no alignment.
    let row = |scale: u8| unsafe { _mm256_loadu_si256(rows[usize::from(scale)].as_ptr().cast()) };
    let (pairs, last) = scales.as_chunks::<2>();
    // The codes of the second block are looked up in the upper half.
    let second = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(16));
    let (blocks, rest) = elements.as_chunks::<{ 2 * BYTES }>();
    let (outs, end) = out.as_chunks_mut::<{ 4 * NV_BLOCK }>();
    for ((block, [one, other]), out) in blocks.iter().zip(pairs).zip(outs) {
        let values = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(row(*one)), row(*other));
        // SAFETY: two blocks have 16 bytes and `out` 64; neither needs an alignment.
        unsafe {
            let codes = _mm512_or_si512(codes(_mm_loadu_si128(block.as_ptr().cast())), second);
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_permutexvar_epi16(codes, values));
        }
    }
    if let [scale] = last
        && let (Ok(rest), Ok(end)) =
            (<&[u8; BYTES]>::try_from(rest), <&mut [u8; 2 * NV_BLOCK]>::try_from(end))
    {
        let values = _mm512_castsi256_si512(row(*scale));
        // SAFETY: the block has 8 bytes and `end` 32; neither needs an alignment.
        unsafe {
            let codes = codes(_mm_loadl_epi64(rest.as_ptr().cast()));
            let shown = _mm512_castsi512_si256(_mm512_permutexvar_epi16(codes, values));
            _mm256_storeu_si256(end.as_mut_ptr().cast(), shown);
        }
    }
}

/// The bf16 of an fp8's subnormals times 2^−`down`, by their codes.
#[expect(clippy::cast_possible_truncation, reason = "fields of 16 bits")]
const fn subnormals(codes: usize, down: u32) -> [u16; 32] {
    let mut values = [0; 32];
    let mut code = 1;
    while code < codes {
        let upper = code.ilog2();
        let mantissa = (code - (1 << upper)) << (7 - upper);
        values[code] = ((127 - down + upper) << 7) as u16 | mantissa as u16;
        code += 1;
    }
    values
}

/// As the portable `bytes_to_bf16` of an fp8.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn fp8_to_bf16(
    format: Format,
    table: &[f32; 256],
    scales: &[u8],
    elements: &[u8],
    out: &mut [u8],
) {
    let e5m2 = format == Format::Fp8E5m2;
    // How far the fields move, and what the biases differ by. Subnormals are numbers of the
    // smallest: as binary32's subnormals they would take a hundred cycles each.
    let (moved, bias, smallest) = if e5m2 { (21, 15, 127 - 16) } else { (20, 7, 127 - 9) };
    let shift = _mm_cvtsi32_si128(moved);
    let rebias = _mm512_set1_epi32((127 - bias) << 23);
    let normal = _mm512_set1_epi32(if e5m2 { 4 } else { 8 });
    let smallest = _mm512_set1_ps(f32::from_bits(smallest << 23));
    // The first code that is no number: of e4m3 there is one, of e5m2 infinity and what is above.
    let first = _mm512_set1_epi32(if e5m2 { 0x7c } else { 0x7f });
    let special = _mm512_set1_epi32(0x7f80_0000 | i32::from(!e5m2));
    let narrow = Narrow::new(e5m2);
    let blocks = elements.as_chunks::<MX_BLOCK>().0.iter();
    for ((block, scale), out) in blocks.zip(scales).zip(out.as_chunks_mut::<{ 2 * MX_BLOCK }>().0) {
        if narrow.scales.contains(scale) {
            narrow.block(block, *scale, out);
            continue;
        }
        let scale = _mm512_set1_ps(table[usize::from(*scale)]);
        for (half, out) in block.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<32>().0) {
            // SAFETY: half a block has 16 bytes, and the load needs no alignment.
            let codes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(half.as_ptr().cast()) });
            let magnitudes = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f));
            let fields = _mm512_sll_epi32(magnitudes, shift);
            let subnormals = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(magnitudes), smallest));
            let is_normal = _mm512_cmpge_epi32_mask(magnitudes, normal);
            let numbers = _mm512_mask_add_epi32(subnormals, is_normal, fields, rebias);
            let is_special = _mm512_cmpge_epi32_mask(magnitudes, first);
            let numbers = _mm512_mask_or_epi32(numbers, is_special, fields, special);
            let signs = _mm512_slli_epi32::<24>(_mm512_and_si512(codes, _mm512_set1_epi32(0x80)));
            let values = _mm512_castsi512_ps(_mm512_or_si512(numbers, signs));
            // SAFETY: `out` has 32 bytes, and the store needs no alignment.
            unsafe {
                _mm256_storeu_si256(out.as_mut_ptr().cast(), rounded(_mm512_mul_ps(values, scale)));
            }
        }
    }
}

/// What makes bf16 of fp8 in 16 bits each, where no result is subnormal or too large: a normal
/// fp8 has its fields moved and its exponent added to, a subnormal one is looked up.
struct Narrow {
    /// The scales of which that is so.
    scales: RangeInclusive<u8>,
    moved: __m128i,
    rebias: __m512i,
    subnormals: __m512i,
    /// The first codes that are normal, and that are no number.
    normal: __m512i,
    first: __m512i,
    /// What is infinity, if anything is.
    infinity: __m512i,
}

impl Narrow {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(e5m2: bool) -> Self {
        const E4M3: [u16; 32] = subnormals(8, 9);
        const E5M2: [u16; 32] = subnormals(4, 16);
        // The least number is 2^−9 and the largest has the exponent 8; of e5m2, −16 and 15.
        let (scales, moved, bias, normal, first) =
            if e5m2 { (17..=239, 5, 15, 4, 0x7c) } else { (10..=246, 4, 7, 8, 0x7f) };
        let table = if e5m2 { &E5M2 } else { &E4M3 };
        Self {
            scales,
            moved: _mm_cvtsi32_si128(moved),
            rebias: _mm512_set1_epi16((127 - bias) << 7),
            // SAFETY: the table has 64 bytes, and the load needs no alignment.
            subnormals: unsafe { _mm512_loadu_si512(table.as_ptr().cast()) },
            normal: _mm512_set1_epi16(normal),
            first: _mm512_set1_epi16(first),
            infinity: _mm512_set1_epi16(if e5m2 { first } else { -1 }),
        }
    }

    /// A block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn block(&self, block: &[u8; MX_BLOCK], scale: u8, out: &mut [u8; 2 * MX_BLOCK]) {
        // SAFETY: a block has 32 bytes, and the load needs no alignment.
        let codes = _mm512_cvtepu8_epi16(unsafe { _mm256_loadu_si256(block.as_ptr().cast()) });
        let magnitudes = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
        let fields = _mm512_add_epi16(_mm512_sll_epi16(magnitudes, self.moved), self.rebias);
        let is_small = _mm512_cmplt_epi16_mask(magnitudes, self.normal);
        let small = _mm512_permutexvar_epi16(magnitudes, self.subnormals);
        let numbers = _mm512_mask_mov_epi16(fields, is_small, small);
        let exponent = _mm512_set1_epi16((i16::from(scale) - 127) << 7);
        let some = _mm512_test_epi16_mask(magnitudes, magnitudes);
        let numbers = _mm512_mask_add_epi16(numbers, some, numbers, exponent);
        let is_infinite = _mm512_cmpeq_epi16_mask(magnitudes, self.infinity);
        let numbers = _mm512_mask_mov_epi16(numbers, is_infinite, _mm512_set1_epi16(0x7f80));
        let signs = _mm512_slli_epi16::<8>(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)));
        let is_none = _mm512_cmpge_epi16_mask(magnitudes, self.first) & !is_infinite;
        let values = _mm512_mask_mov_epi16(_mm512_or_si512(numbers, signs), is_none, _mm512_set1_epi16(NAN));
        // SAFETY: `out` has 64 bytes, and the store needs no alignment.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), values) };
    }
}

/// As [`fp8_to_bf16`], two blocks at a time where their scales allow it.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn fp8_to_bf16_in_pairs(
    format: Format,
    table: &[f32; 256],
    scales: &[u8],
    elements: &[u8],
    out: &mut [u8],
) {
    let wide = Wide::new(format == Format::Fp8E5m2);
    let (pairs, last) = scales.as_chunks::<2>();
    let (blocks, rest) = elements.as_chunks::<{ 2 * MX_BLOCK }>();
    let (outs, end) = out.as_chunks_mut::<{ 4 * MX_BLOCK }>();
    for ((block, scales), out) in blocks.iter().zip(pairs).zip(outs) {
        if scales.iter().all(|scale| wide.scales.contains(scale)) {
            wide.pair(block, *scales, out);
        } else {
            fp8_to_bf16(format, table, scales, block, out);
        }
    }
    fp8_to_bf16(format, table, last, rest, end);
}

/// Two blocks at a time, of what [`Narrow`] makes: of each code the two bytes of its bf16 are
/// looked up, and the scale is added to the exponent.
struct Wide {
    /// The scales of which no result is subnormal or too large.
    scales: RangeInclusive<u8>,
    /// The lower and the upper bytes of the bf16 of every magnitude.
    tables: [[__m512i; 2]; 2],
    /// Twice the first code that is not finite, less 2, and twice the first that is no number.
    finite: __m512i,
    none: __m512i,
}

/// The bytes of the bf16 of every magnitude of an fp8: the lower ones, and the upper ones.
#[expect(clippy::cast_possible_truncation, reason = "bytes of 16 bits")]
const fn bytes(e5m2: bool) -> [[u8; 128]; 2] {
    let (small, down, moved, bias, first) = if e5m2 { (4, 16, 5, 15, 0x7c) } else { (8, 9, 4, 7, 0x7f) };
    let subnormals = subnormals(small, down);
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let value = if code < small {
            subnormals[code]
        } else if code < first {
            ((code << moved) + ((127 - bias) << 7)) as u16
        } else if e5m2 && code == first {
            0x7f80
        } else {
            NAN.cast_unsigned()
        };
        bytes[0][code] = value as u8;
        bytes[1][code] = (value >> 8) as u8;
        code += 1;
    }
    bytes
}

impl Wide {
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn new(e5m2: bool) -> Self {
        const E4M3: [[u8; 128]; 2] = bytes(false);
        const E5M2: [[u8; 128]; 2] = bytes(true);
        let bytes = if e5m2 { &E5M2 } else { &E4M3 };
        let table = |bytes: &[u8; 128]| {
            // SAFETY: there are twice 64 bytes, and the loads need no alignment.
            unsafe {
                [_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast())]
            }
        };
        let (finite, none) = if e5m2 { (0xf8_u8, 0xfa_u8) } else { (0xfe, 0xfe) };
        Self {
            scales: Narrow::new(e5m2).scales,
            tables: [table(&bytes[0]), table(&bytes[1])],
            // Less 2, as codes are: of them zero, which no scale is added to, becomes the largest.
            finite: _mm512_set1_epi8((finite - 2).cast_signed()),
            none: _mm512_set1_epi8(none.cast_signed()),
        }
    }

    /// Two blocks, of scales that [`Narrow`] has.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn pair(&self, blocks: &[u8; 2 * MX_BLOCK], scales: [u8; 2], out: &mut [u8; 4 * MX_BLOCK]) {
        // SAFETY: two blocks have 64 bytes, and the load needs no alignment.
        let codes = unsafe { _mm512_loadu_si512(blocks.as_ptr().cast()) };
        let doubled = _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(2));
        let scaled = _mm512_cmplt_epu8_mask(doubled, self.finite);
        // Unpacking takes the lower halves of all 16 bytes, then the upper ones: a block each.
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        let codes = _mm512_permutexvar_epi64(order, codes);
        let [low, high] = self.tables.map(|[one, two]| _mm512_permutex2var_epi8(one, codes, two));
        let is_number = _mm512_cmplt_epu8_mask(_mm512_add_epi8(codes, codes), self.none);
        let signs = _mm512_maskz_mov_epi8(is_number, _mm512_and_si512(codes, _mm512_set1_epi8(-128)));
        let high = _mm512_or_si512(high, signs);
        let values = [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)];
        let masks = scaled.to_le_bytes();
        let masks = masks.as_chunks::<4>().0.iter().map(|mask| u32::from_le_bytes(*mask));
        let blocks = values.into_iter().zip(masks).zip(scales).zip(out.as_chunks_mut::<{ 2 * MX_BLOCK }>().0);
        for (((values, mask), scale), out) in blocks {
            let exponent = _mm512_set1_epi16((i16::from(scale) - 127) << 7);
            let values = _mm512_mask_add_epi16(values, mask, values, exponent);
            // SAFETY: `out` has 64 bytes, and the store needs no alignment.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), values) };
        }
    }
}
