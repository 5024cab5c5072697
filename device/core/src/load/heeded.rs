//! What of a command line changes nothing, so that it can be said.

use std::collections::BTreeSet;

use super::{LoadOptions, full_name};
use crate::device::Device;
use crate::model::{ModelFile, ModelTensor};
use lamina_codec::view::View;

/// What `requested` asks for of a checkpoint that the device holds already, and that it is not:
/// views that tensors lack, and rules by which they would be otherwise.
pub fn unheeded(device: &Device, model: &ModelFile, requested: &LoadOptions) -> BTreeSet<String> {
    let there: BTreeSet<_> = device.views().into_iter().map(|view| (view.tensor, view.view)).collect();
    let mut unheeded = BTreeSet::new();
    for tensor in model.tensors() {
        let Ok(info) = device.tensor(&full_name(&tensor.name, requested)) else { continue };
        for spelling in &requested.views {
            let view = View::parse(info.format, spelling).map(|view| view.to_string());
            if view.is_ok_and(|view| !there.contains(&(info.name.clone(), view))) {
                unheeded.insert(format!("--views {spelling}"));
            }
        }
        let kv = requested.kv.iter().find_map(|rule| Some((rule, rule.layout(tensor)?)));
        if let Some((rule, layout)) = kv
            && layout != info.layout
        {
            unheeded.insert(format!("--kv for {}", rule.pattern));
        }
        if let Some(rule) = requested.formats.iter().find(|rule| rule.pattern.matches(&tensor.name))
            && rule.format != info.format
        {
            unheeded.insert(format!("--format {}={}", rule.pattern, rule.format));
        }
    }
    unheeded
}

/// The rules of `requested` that match none of these tensors.
pub fn unmatched(requested: &LoadOptions, tensors: &[&ModelTensor]) -> Vec<String> {
    let has = |matches: &dyn Fn(&str) -> bool| tensors.iter().any(|tensor| matches(&tensor.name));
    let kv = requested.kv.iter().filter(|rule| !has(&|name| rule.pattern.matches(name)));
    let formats = requested.formats.iter().filter(|rule| !has(&|name| rule.pattern.matches(name)));
    let formats = formats.map(|rule| format!("--format {}={}", rule.pattern, rule.format));
    kv.map(|rule| format!("--kv for {}", rule.pattern)).chain(formats).collect()
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::device::DeviceConfig;
    use crate::load::load_model;
    use crate::load::tests::checkpoint;
    use lamina_codec::testing::bytes;

    #[test]
    fn what_a_held_checkpoint_is_not_and_what_matches_nothing_is_told() {
        let tensors = [("w", "BF16", &[64_u64, 32][..], bytes(1, 4096)), ("i", "U8", &[64], bytes(2, 64))];
        let (_file, model) = checkpoint(&tensors);
        let device = Device::new(DeviceConfig::new(64 << 20, 64 << 20)).unwrap();
        let asked = |views: &[&str], kv: &[&str], formats: &[&str]| LoadOptions {
            views: views.iter().map(|&view| view.to_owned()).collect(),
            kv: kv.iter().map(|rule| rule.parse().unwrap()).collect(),
            formats: formats.iter().map(|rule| rule.parse().unwrap()).collect(),
            ..LoadOptions::default()
        };
        let loaded = asked(&["full", "e8m3"], &["w=32,16"], &["i=int4"]);
        load_model(&device, &model, &loaded, |_| ControlFlow::Continue(())).unwrap();
        let told = |requested: &LoadOptions| Vec::from_iter(unheeded(&device, &model, requested));
        assert!(told(&loaded).is_empty() && told(&LoadOptions::default()).is_empty());
        // Int4 has no e8m2; that is no view of it that is missing.
        let other = asked(&["e8m3", "e8m2"], &["w=32,64"], &["i=int8", "w=fp16"]);
        assert_eq!(told(&other), ["--format i=int8", "--format w=fp16", "--kv for w", "--views e8m2"]);

        let all: Vec<_> = model.tensors().iter().collect();
        let unmatched = |requested| unmatched(&requested, &all);
        assert!(unmatched(loaded).is_empty());
        let none = asked(&["full"], &["*.k=32", "w=32"], &["x=bf16", "i=int4"]);
        assert_eq!(unmatched(none), ["--kv for *.k", "--format x=bf16"]);
    }
}
