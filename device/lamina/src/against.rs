//! Which checkpoints of `--model` are stored as differences to which: `--model-base MODEL=BASE`.

use anyhow::{Context, Result, ensure};
use lamina_device::files::name_of;

use crate::partition_table::Load;

/// The number of the checkpoint that each of `loads` is stored against: of the one of that name
/// that is before it, in the same partition.
///
/// # Errors
///
/// When a name is none of theirs, or is said twice.
pub(crate) fn bases_of(loads: &[Load], bases: &[(String, String)]) -> Result<Vec<Option<usize>>> {
    let mut found = vec![None; loads.len()];
    for (model, base) in bases {
        let mut is_known = false;
        for (number, load) in loads.iter().enumerate() {
            if name_of(&load.path) != *model {
                continue;
            }
            is_known = true;
            ensure!(found[number].is_none(), "--model-base {model}={base}: {model} has a base already");
            let is_base = |other: &Load| other.partition == load.partition && name_of(&other.path) == *base;
            let at = loads[..number].iter().position(is_base);
            let at = at.with_context(|| {
                format!(
                    "--model-base {model}={base}: no --model before {} is called {base}",
                    load.path.display()
                )
            })?;
            found[number] = Some(at);
        }
        ensure!(is_known, "--model-base {model}={base}: no --model is called {model}");
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(path: &str, partition: Option<&str>) -> Load {
        Load { path: path.into(), partition: partition.map(str::to_owned) }
    }

    #[test]
    fn a_base_is_before_what_is_stored_against_it_and_in_its_partition() {
        let pair = |model: &str, base: &str| (model.to_owned(), base.to_owned());
        let loads = ["x/base.safetensors", "tuned.safetensors", "again.gguf"].map(|path| load(path, None));
        let chain = [pair("tuned", "base"), pair("again", "tuned")];
        assert_eq!(bases_of(&loads, &chain).unwrap(), [None, Some(0), Some(1)]);
        assert_eq!(bases_of(&loads, &[]).unwrap(), [None; 3]);
        let refused =
            |bases: &[(String, String)], loads: &[Load]| bases_of(loads, bases).unwrap_err().to_string();
        for (bases, part) in [
            (&[pair("tuned", "again")][..], "no --model before tuned.safetensors is called again"),
            (&[pair("other", "base")], "no --model is called other"),
            (&[pair("tuned", "base"), pair("tuned", "x")], "has a base already"),
        ] {
            let why = refused(bases, &loads);
            assert!(why.contains(part), "{why}");
        }
        // Each guest has its own.
        let of = |guest| ["base.safetensors", "tuned.safetensors"].map(|path| load(path, Some(guest)));
        let both = [of("a"), of("b")].concat();
        assert_eq!(bases_of(&both, &chain[..1]).unwrap(), [None, Some(0), None, Some(2)]);
        let apart = [load("base.safetensors", Some("a")), load("tuned.safetensors", Some("b"))];
        assert!(refused(&chain[..1], &apart).contains("no --model before"));
    }
}
