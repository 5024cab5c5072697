//! What a directory says of a partition's tensors and views.
//!
//! It has room for a few ten thousand of them. If there are more, it says that it is incomplete:
//! tensors with views come first, then the others by DPA, and the control port tells the rest.

use std::{collections::HashMap, sync::Arc};

use lamina_abi::{
    DIRECTORY_BYTES, Directory, HEADER_BYTES, TENSOR_RECORD_BYTES, TensorEntry, VIEW_RECORD_BYTES, ViewEntry,
};

use super::{Alias, map::Map};
use crate::{partition_table::PartitionTable, tensor::Tensor};

/// The bytes of the directory of a partition.
pub(super) fn encode(
    map: &Map,
    partition: usize,
    generation: u64,
    partition_table: &PartitionTable,
) -> Vec<u8> {
    let own = &partition_table.partitions[partition];
    let tensors: Vec<_> = map.listed_in(partition, partition_table).collect();
    let aliases: Vec<_> = map.aliases_of_partition(partition, partition_table).collect();
    let Chosen { tensors: named, aliases: shown } = choose(&tensors, &aliases, partition_table);
    let mut directory = Directory {
        generation,
        base_bytes: own.base.end - own.base.start,
        views_bytes: own.views.end - own.views.start,
        is_incomplete: named.contains(&false) || shown.contains(&false),
        ..Directory::default()
    };
    let mut index = HashMap::new();
    for (tensor, _) in tensors.iter().zip(named).filter(|(_, named)| *named) {
        let number = u32::try_from(directory.tensors.len()).expect("far fewer fit a directory");
        index.insert(tensor.number, number);
        directory.tensors.push(tensor_entry(tensor, partition_table));
    }
    for (alias, _) in aliases.iter().zip(shown).filter(|(_, shown)| *shown) {
        let tensor = index[&alias.tensor.number];
        directory.views.push(view_entry(alias, tensor, own.views.start));
    }
    lamina_abi::encode(&directory).expect("no more than fits was chosen")
}

/// Which tensors and views a directory names.
struct Chosen {
    tensors: Vec<bool>,
    aliases: Vec<bool>,
}

fn choose(tensors: &[&Arc<Tensor>], aliases: &[&Arc<Alias>], partition_table: &PartitionTable) -> Chosen {
    let mut left = usize::try_from(DIRECTORY_BYTES).expect("2 MiB") - HEADER_BYTES;
    let of_tensor = |tensor: &Tensor| {
        let info = &tensor.info;
        let name = partition_table.own_name(&info.name).len();
        TENSOR_RECORD_BYTES + name + shape(tensor).len() + info.format.name().len()
    };
    let of_alias = |alias: &Alias| VIEW_RECORD_BYTES + alias.info.view.len();
    let needed = tensors.iter().map(|tensor| of_tensor(tensor)).sum::<usize>()
        + aliases.iter().map(|alias| of_alias(alias)).sum::<usize>();
    if needed <= left {
        return Chosen { tensors: vec![true; tensors.len()], aliases: vec![true; aliases.len()] };
    }
    let mut chosen = Chosen { tensors: vec![false; tensors.len()], aliases: vec![false; aliases.len()] };
    let place: HashMap<_, _> = tensors.iter().enumerate().map(|(at, tensor)| (tensor.number, at)).collect();
    for (alias, is_chosen) in aliases.iter().zip(&mut chosen.aliases) {
        // A view of a tensor that nobody is told of yet there is none.
        let Some(at) = place.get(&alias.tensor.number) else { continue };
        let tensor = if chosen.tensors[*at] { 0 } else { of_tensor(tensors[*at]) };
        if let Some(rest) = left.checked_sub(of_alias(alias) + tensor) {
            (left, *is_chosen, chosen.tensors[*at]) = (rest, true, true);
        }
    }
    for (tensor, is_chosen) in tensors.iter().zip(&mut chosen.tensors).filter(|(_, chosen)| !**chosen) {
        if let Some(rest) = left.checked_sub(of_tensor(tensor)) {
            (left, *is_chosen) = (rest, true);
        }
    }
    chosen
}

fn shape(tensor: &Tensor) -> String {
    tensor.info.shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x")
}

fn tensor_entry(tensor: &Tensor, partition_table: &PartitionTable) -> TensorEntry {
    let info = &tensor.info;
    TensorEntry {
        name: partition_table.own_name(&info.name).to_owned(),
        shape: shape(tensor),
        format: info.format.name().to_owned(),
        dpa: info.dpa - partition_table.partitions[tensor.partition].base.start,
        length: info.length,
        elements: info.elements,
        layout: info.layout.into(),
        lossy: info.layout.lossy().is_some(),
    }
}

/// The entry of `alias` of the tensor whose record is `tensor`, in the directory of the partition
/// whose views begin at `start`.
fn view_entry(alias: &Alias, tensor: u32, start: u64) -> ViewEntry {
    ViewEntry {
        tensor,
        spelling: alias.info.view.clone(),
        offset: alias.info.offset - start,
        length: alias.info.length,
        elements: alias.info.elements,
        bits: alias.info.bits,
        scale_exp: alias.info.scale_exp,
    }
}
