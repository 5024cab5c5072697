//! Makes a mixture of experts of a model that has none:
//! `mixture DENSE.safetensors OUT.safetensors`.

use std::{env, error::Error, fs};

use lamina_llama::{Experts, mixture};

/// Four experts, of which a token uses two.
const EXPERTS: Experts = Experts { count: 4, used: 2 };

fn main() -> Result<(), Box<dyn Error>> {
    let [dense, out] = &env::args().skip(1).collect::<Vec<_>>()[..] else {
        return Err("usage: mixture DENSE.safetensors OUT.safetensors".into());
    };
    fs::write(out, mixture::of_safetensors(&fs::read(dense)?, EXPERTS)?)?;
    Ok(())
}
