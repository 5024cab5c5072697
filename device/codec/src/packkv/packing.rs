//! How a KV cache is coded with loss, as somebody asks for it.

use std::{fmt, str::FromStr};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::{PackKvError, PackTokens, RelativeScale, Repack};

/// How a KV cache is coded with loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Packing {
    /// The step of a token's values, as a part of what they span.
    pub scale: RelativeScale,
    /// The order of tokens.
    pub repack: Repack,
    /// Tokens of a pack.
    pub pack: PackTokens,
}

/// A packing as its fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    #[serde(default = "usual_scale")]
    scale: RelativeScale,
    #[serde(default = "usual_repack")]
    repack: Repack,
    #[serde(default = "usual_pack")]
    pack: PackTokens,
}

/// As it is spelled, or as its fields, each of which may be left out.
impl<'de> Deserialize<'de> for Packing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Written;

        impl<'de> Visitor<'de> for Written {
            type Value = Packing;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("packkv[:SCALE[,REPACK[,PACK]]], or scale, repack and pack")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Packing, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Packing, A::Error> {
                let Fields { scale, repack, pack } = Fields::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Packing { scale, repack, pack })
            }
        }

        deserializer.deserialize_any(Written)
    }
}

/// The paper's of keys.
fn usual_scale() -> RelativeScale {
    RelativeScale::new(0.1).expect("between 0.01 and 1")
}

const fn usual_repack() -> Repack {
    Repack::Greedy
}

const fn usual_pack() -> PackTokens {
    PackTokens(8)
}

impl Default for Packing {
    fn default() -> Self {
        Self { scale: usual_scale(), repack: usual_repack(), pack: usual_pack() }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scale, repack, pack } = self;
        write!(f, "packkv:{},{},{}", scale.get(), repack.name(), pack.tokens())
    }
}

impl FromStr for Packing {
    type Err = PackKvError;

    /// `packkv[:SCALE[,REPACK[,PACK]]]`.
    fn from_str(text: &str) -> Result<Self, PackKvError> {
        let wrong = |why: String| PackKvError::Spelling { text: text.chars().take(64).collect(), why };
        let mut packing = Self::default();
        let rest = match text.strip_prefix("packkv") {
            Some("") => return Ok(packing),
            Some(rest) => rest.strip_prefix(':'),
            None => None,
        };
        let rest = rest.ok_or_else(|| wrong("packkv is the one lossy coding that is known".to_owned()))?;
        let mut parts = rest.split(',');
        let scale = parts.next().unwrap_or_default();
        let scale: f32 = scale.parse().map_err(|_| wrong(format!("{scale:?} is no number")))?;
        packing.scale = RelativeScale::new(scale).map_err(|why| wrong(why.to_string()))?;
        if let Some(name) = parts.next() {
            packing.repack = Repack::ALL
                .into_iter()
                .find(|repack| repack.name() == name)
                .ok_or_else(|| wrong(format!("{name:?} is not none, greedy or median")))?;
        }
        if let Some(tokens) = parts.next() {
            let tokens = tokens.parse().map_err(|_| wrong(format!("{tokens:?} is no number of tokens")))?;
            packing.pack = PackTokens::new(tokens).map_err(|why| wrong(why.to_string()))?;
        }
        match parts.next() {
            None => Ok(packing),
            Some(more) => Err(wrong(format!("{more:?} is one too many"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packing_is_read_as_it_is_written() {
        let read = |text: &str| text.parse::<Packing>();
        assert_eq!(read("packkv"), Ok(Packing::default()));
        assert_eq!(read("packkv:0.1").unwrap().to_string(), "packkv:0.1,greedy,8");
        for text in ["packkv:0.05,none,4", "packkv:1,median,16", "packkv:0.25,greedy,8"] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        for (text, part) in [
            ("kivi", "the one lossy coding"),
            ("packkv0.1", "the one lossy coding"),
            ("packkv:", "no number"),
            ("packkv:0", "from 0.01 to 1"),
            ("packkv:nan", "from 0.01 to 1"),
            ("packkv:0.1,random", "none, greedy or median"),
            ("packkv:0.1,none,5", "4, 8 or 16"),
            ("packkv:0.1,none,8,9", "one too many"),
        ] {
            let why = read(text).unwrap_err().to_string();
            assert!(why.contains(part) && why.contains(text), "{why}");
        }
        let json = r#"{"scale":0.1,"repack":"median","pack":16}"#;
        let packing: Packing = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&packing).unwrap(), json);
        for bad in [r#"{"scale":2}"#, r#"{"pack":3}"#, r#"{"other":1}"#, r#"{"repack":"best"}"#] {
            assert!(serde_json::from_str::<Packing>(bad).is_err(), "{bad}");
        }
    }
}
