//! KV layouts as they are written on a command line.

use std::str::FromStr;

use super::shape::{KvError, KvLayout, PagedRows, Preset, WINDOW};
use crate::packkv::PackKvError;

const FORM: KvError = KvError::Spelling {
    what: "a kv layout is CHANNELS[,WINDOW][,stride=STRIDE], for example 1024,128, or a paged cache's \
           PRESET:HEADS,HEAD_SIZE,BLOCK_SIZE[,WINDOW] with the preset nhd, hnd, nhd_kv or hnd_kv, for example hnd:8,128,16; \
           a lossy one ends with ,lossy=packkv[:SCALE[,REPACK[,PACK]]]",
};

impl FromStr for Preset {
    type Err = KvError;

    fn from_str(name: &str) -> Result<Self, KvError> {
        match name {
            "nhd" => Ok(Self::Nhd),
            "hnd" => Ok(Self::Hnd),
            "nhd_kv" => Ok(Self::NhdKv),
            "hnd_kv" => Ok(Self::HndKv),
            _ => Err(FORM),
        }
    }
}

impl FromStr for KvLayout {
    type Err = KvError;

    /// `CHANNELS[,WINDOW][,stride=STRIDE]` or `PRESET:HEADS,HEAD_SIZE,BLOCK_SIZE[,WINDOW]`, and
    /// behind either `,lossy=PACKING`.
    fn from_str(text: &str) -> Result<Self, KvError> {
        if let Some((layout, packing)) = text.split_once(",lossy=") {
            let packing =
                packing.parse().map_err(|why: PackKvError| KvError::Lossy { why: why.to_string() })?;
            return Ok(Self { lossy: Some(packing), ..layout.parse()? });
        }
        let number = |text: &str| text.parse::<u32>().map_err(|_| FORM);
        if let Some((preset, numbers)) = text.split_once(':') {
            let numbers = numbers.split(',').map(number).collect::<Result<Vec<_>, _>>()?;
            return match numbers[..] {
                [heads, size, block] => Self::preset(preset.parse()?, heads, size, block, WINDOW),
                [heads, size, block, window] => Self::preset(preset.parse()?, heads, size, block, window),
                _ => Err(FORM),
            };
        }
        let mut parts = text.split(',');
        let mut layout = Self::rows(number(parts.next().unwrap_or_default())?, WINDOW);
        let mut next = parts.next();
        if let Some(window) = next.filter(|part| !part.starts_with("stride=")) {
            layout.window = number(window)?;
            next = parts.next();
        }
        if let Some(stride) = next {
            layout.stride = Some(number(stride.strip_prefix("stride=").ok_or(FORM)?)?);
        }
        if parts.next().is_some() { Err(FORM) } else { Ok(layout) }
    }
}

impl std::fmt::Display for KvLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} channels, windows of {} tokens", self.channels, self.window)?;
        if let Some(stride) = self.stride {
            write!(f, ", rows {stride} elements apart")?;
        }
        if let Some(PagedRows { groups, block }) = self.paged {
            write!(f, ", {groups} parts a row in paged blocks of {block}")?;
        }
        if let Some(packing) = self.lossy {
            write!(f, ", lossy as {packing}")?;
        }
        Ok(())
    }
}
