//! The codec on a file's bytes, without Python: for each line of input one round, of which the
//! seconds are printed to compress and to give a view. `bench.py` asks for rounds by turns with its
//! own.
//!
//! ```text
//! codec_seconds FILE FORMAT CODEC VIEW
//! ```

use std::{
    env,
    error::Error,
    fs,
    hint::black_box,
    io::{self, Write},
    time::Instant,
};

use lamina_codec::{
    BLOCK_BYTES, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE, Stored},
    format::Format,
    view::View,
};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [file, format, codec, view] = words.as_slice() else {
        return Err("usage: codec_seconds FILE FORMAT CODEC VIEW".into());
    };
    let (data, format, codec): (_, Format, Codec) = (fs::read(file)?, format.parse()?, codec.parse()?);
    let view = View::parse(format, view)?;
    let blocks = data.as_chunks::<BLOCK_BYTES>().0;
    for _ in io::stdin().lines() {
        let begun = Instant::now();
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        let (mut bytes, mut stored) = (Vec::<u8>::new(), Vec::<(Option<Stored>, usize)>::new());
        for block in blocks {
            encoder.block(format, codec, block, &mut bundle);
            stored.push((bundle.stored.clone(), bytes.len()));
            bytes.extend_from_slice(bundle.bytes());
        }
        let compress = begun.elapsed().as_secs_f64();

        let begun = Instant::now();
        let mut decoder = Decoder::new();
        let (mut fetched, mut block) = ([0; MAX_BUNDLE], [0; BLOCK_BYTES]);
        let step = BLOCK_BYTES * view.bits() as usize / format.bits() as usize;
        let mut out = vec![0; step * blocks.len()];
        for ((stored, start), out) in stored.iter().zip(out.chunks_exact_mut(step)) {
            block.fill(0);
            if let Some(stored) = stored {
                let bytes = &bytes[*start..];
                stored.runs(view.mask(), |run| fetched[run.clone()].copy_from_slice(&bytes[run]));
                decoder.block(stored, view.mask(), &fetched, &mut block)?;
            }
            view.render_to(&mut block, 0, out);
        }
        let read = begun.elapsed().as_secs_f64();
        black_box(&out);
        println!("{compress} {read}");
        io::stdout().flush()?;
    }
    Ok(())
}
