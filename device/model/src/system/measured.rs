//! Ratios that were measured: from `lamina analyze --json`, from `/stats`, by a decode run, or
//! written down.

use serde_json::Value;

use super::{RATIOS, Ratios};
use crate::ModelError;
use crate::text::printable;

/// Bytes before and after, of weights and of KV.
#[derive(Default)]
struct Sums {
    weights: [f64; 2],
    kv: [f64; 2],
}

impl Sums {
    fn add(&mut self, tensor: &Value, before: f64, after: f64) {
        let kv = tensor.pointer("/layout/kind").and_then(Value::as_str) == Some("kv");
        let sums = if kv { &mut self.kv } else { &mut self.weights };
        sums[0] += before;
        sums[1] += after;
    }

    /// The ratios, with `otherwise` for what there was none of.
    fn ratios(&self, design: &'static str, otherwise: &Ratios, source: &str) -> Ratios {
        let mut missing = Vec::new();
        let mut ratio = |[before, after]: [f64; 2], of: f64, name| {
            if before > 0.0 && after > 0.0 {
                before / after
            } else {
                missing.push(name);
                of
            }
        };
        let kv = ratio(self.kv, otherwise.kv, "KV");
        let weights = ratio(self.weights, otherwise.weights, "weights");
        let source = if missing.is_empty() {
            source.to_owned()
        } else {
            format!("{source}; {}: {}", missing.join(" and "), otherwise.source)
        };
        Ratios { design, kv, weights, source }
    }
}

/// Ratios of all designs from a file. What it does not say is taken from `otherwise`.
///
/// # Errors
/// It is none of these forms, or a field of it is not what it should be.
pub fn from_json(name: &str, text: &str, otherwise: &[Ratios; 3]) -> Result<[Ratios; 3], ModelError> {
    read(name, text, otherwise).map_err(|why| why.within_file(name))
}

fn read(name: &str, text: &str, otherwise: &[Ratios; 3]) -> Result<[Ratios; 3], ModelError> {
    let form = |why: &str| ModelError::form(name, why);
    let json: Value = serde_json::from_str(text).map_err(|why| form(&why.to_string()))?;
    let ratios = if json.get("total").is_some() {
        analysis(name, &json, otherwise)?
    } else if json.get("decode").is_some() {
        decoded(name, &json, otherwise)?
    } else if json.get("tensors").is_some() {
        stats(name, &json, otherwise)?
    } else if json.get("trace").or(json.get("gcomp")).is_some() {
        written(name, &json, otherwise)?
    } else {
        let forms = "it is neither of `lamina analyze --json` nor of /stats nor a decode run's report, nor has it `trace` or `gcomp`, as in {\"trace\": {\"kv\": 1.5, \"weights\": 1.3}}";
        return Err(form(forms));
    };
    ratios.iter().try_for_each(Ratios::check)?;
    Ok(ratios)
}

/// Each tensor, and the pointer to it.
fn tensors(json: &Value) -> Result<impl Iterator<Item = (&Value, String)>, ModelError> {
    let tensors = json.get("tensors").and_then(Value::as_array).filter(|tensors| !tensors.is_empty());
    let tensors = tensors.ok_or_else(|| ModelError::missing("tensors"))?;
    Ok(tensors.iter().enumerate().map(|(at, tensor)| (tensor, format!("/tensors/{at}"))))
}

fn number(value: &Value, pointer: &str) -> Result<f64, ModelError> {
    let found = value.pointer(pointer).ok_or_else(|| ModelError::missing(pointer))?;
    let number = found.as_f64().filter(|number| (0.0..=1e18).contains(number));
    number.ok_or_else(|| ModelError::field(pointer, found, "a number from 0 to 1e18"))
}

/// The device's codec is the one that stores least of all tensors.
fn analysis(name: &str, json: &Value, otherwise: &[Ratios; 3]) -> Result<[Ratios; 3], ModelError> {
    let codecs = json.pointer("/total/codecs").and_then(Value::as_object);
    let codecs = codecs.ok_or_else(|| ModelError::missing("/total/codecs"))?;
    let stored = |codec: &str| number(json, &format!("/total/codecs/{codec}/stored_bytes"));
    let sizes = codecs.keys().map(|codec| Ok((codec, stored(codec)?))).collect::<Result<Vec<_>, _>>()?;
    let best = sizes.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let (codec, _) = best.ok_or_else(|| ModelError::missing("/total/codecs"))?;
    let (mut trace, mut gcomp) = (Sums::default(), Sums::default());
    for (tensor, at) in tensors(json)? {
        let before = number(json, &format!("{at}/logical_bytes"))?;
        trace.add(tensor, before, number(json, &format!("{at}/codecs/{codec}/stored_bytes"))?);
        // Null where nothing is stored.
        let word = tensor.pointer("/word_major/zstd").and_then(Value::as_f64);
        gcomp.add(tensor, before, word.filter(|ratio| *ratio > 0.0).map_or(0.0, |ratio| before / ratio));
    }
    let source = format!("measured: {name}, {}", printable(codec));
    let words = format!("measured: {name}, words by zstd");
    Ok([
        otherwise[0].clone(),
        gcomp.ratios("gcomp", &otherwise[1], &words),
        trace.ratios("trace", &otherwise[2], &source),
    ])
}

/// Adds what a device stores of each tensor, and of how many bytes that is: of blocks that hold
/// data. What was never written would pass for compressed. Tensors that are stored with loss are
/// left out.
fn add_stored(sums: &mut Sums, json: &Value) -> Result<(), ModelError> {
    for (tensor, at) in tensors(json)? {
        let of = |name: &str| number(json, &format!("{at}/{name}"));
        let (stored, whole) = (of("stored_bytes")?, of("logical_bytes")?);
        let at_written = format!("{at}/written_bytes");
        if tensor.get("written_bytes").is_none() {
            let must = "there; programs before did not say it: take the file anew";
            return Err(ModelError::field(&at_written, "missing", must));
        }
        let written = number(json, &at_written)?;
        if tensor.pointer("/layout/kind").and_then(Value::as_str) != Some("lossy_kv") {
            // A tensor's last block may pass its end.
            sums.add(tensor, written.min(whole), stored);
        }
    }
    Ok(())
}

/// What a device stores, by its own mode. It does not say what another would store of each tensor.
fn stats(name: &str, json: &Value, otherwise: &[Ratios; 3]) -> Result<[Ratios; 3], ModelError> {
    let mode = json.pointer("/device/mode").ok_or_else(|| ModelError::missing("/device/mode"))?;
    let design = match mode.as_str() {
        Some("gcomp") => 1,
        Some("trace") => 2,
        _ => {
            let must = "trace or gcomp: no other device compresses";
            return Err(ModelError::field("/device/mode", mode, must));
        }
    };
    let mut sums = Sums::default();
    add_stored(&mut sums, json)?;
    let source = format!("measured: {name}, a device's counters");
    let mut ratios = otherwise.clone();
    ratios[design] = sums.ratios(otherwise[design].design, &otherwise[design], &source);
    Ok(ratios)
}

/// The report of `./x run --workload decode`: its tensors are weights, and what the decoder made of
/// KV is said beside them.
fn decoded(name: &str, json: &Value, otherwise: &[Ratios; 3]) -> Result<[Ratios; 3], ModelError> {
    let mut weights = Sums::default();
    add_stored(&mut weights, json)?;
    let kv = json.pointer("/decode/kv_ratio").filter(|ratio| !ratio.is_null());
    weights.kv = match kv {
        Some(_) => [number(json, "/decode/kv_ratio")?, 1.0],
        None => [0.0; 2],
    };
    let trace = weights.ratios("trace", &otherwise[2], &format!("measured: {name}, a decode run"));
    Ok([otherwise[0].clone(), otherwise[1].clone(), trace])
}

/// Ratios that somebody wrote down, of a design both or one of them.
fn written(name: &str, json: &Value, otherwise: &[Ratios; 3]) -> Result<[Ratios; 3], ModelError> {
    let unknown = |of: &Value, known: &[&str]| {
        let mut keys = of.as_object().into_iter().flat_map(|of| of.keys());
        keys.find(|key| !known.contains(&key.as_str())).cloned()
    };
    if let Some(unknown) = unknown(json, &["gcomp", "trace"]) {
        return Err(ModelError::field("a key", &unknown, "gcomp or trace"));
    }
    let one = |design: &'static str, otherwise: &Ratios| {
        let Some(given) = json.get(design) else { return Ok(otherwise.clone()) };
        if let Some(unknown) = unknown(given, &["kv", "weights", "source"]) {
            return Err(ModelError::field(&format!("a key of {design}"), &unknown, "kv, weights or source"));
        }
        let mut missing = Vec::new();
        let mut ratio = |of: &'static str, otherwise: f64| {
            let Some(found) = given.get(of).filter(|found| !found.is_null()) else {
                missing.push(of);
                return Ok(otherwise);
            };
            let must = || format!("a number from {} to {}", RATIOS.start(), RATIOS.end());
            let number = found.as_f64().filter(|number| RATIOS.contains(number));
            number.ok_or_else(|| ModelError::field(&format!("{design} {of} ratio"), found, &must()))
        };
        let (kv, weights) = (ratio("kv", otherwise.kv)?, ratio("weights", otherwise.weights)?);
        if missing.len() == 2 {
            return Err(ModelError::missing(&format!("{design}: kv or weights")));
        }
        let source = given.get("source").and_then(Value::as_str);
        let mut source = source.map_or_else(|| format!("given: {name}"), printable);
        if let [missing] = missing[..] {
            source = format!("{source}; {missing}: {}", otherwise.source);
        }
        Ok(Ratios { design, kv, weights, source })
    };
    Ok([otherwise[0].clone(), one("gcomp", &otherwise[1])?, one("trace", &otherwise[2])?])
}
