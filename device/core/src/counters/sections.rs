//! Where figures lie in what `/stats` answers.

use serde::Serialize;
use serde_json::Value;

use super::Figure;

/// What figures are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The whole device.
    Device,
    /// The base window, or the views window.
    Window,
    /// A view.
    View,
    /// A tensor.
    Tensor,
    /// A partition.
    Partition,
    /// One of the devices that a region is interleaved over.
    Member,
    /// A design that is modelled.
    Design,
    /// A host that shares the device without coherence.
    Host,
    /// A plane of a format.
    Plane,
}

/// Figures that lie together in JSON.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Section {
    /// Its title in tables.
    pub title: &'static str,
    /// What they are of.
    #[serde(skip)]
    pub scope: Scope,
    /// Where they are.
    pub places: &'static [Place],
    /// Labels that tell the objects of a list apart, each with the object's field.
    pub labels: &'static [(&'static str, &'static str)],
    /// What their names in OpenMetrics begin with, after `lamina_`.
    #[serde(skip)]
    pub prefix: &'static str,
    /// What is added to their help.
    #[serde(skip)]
    pub of: &'static str,
    /// The figures.
    pub figures: &'static [Figure],
}

/// One object with figures, or one in each object of a list.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Place {
    /// The list's JSON pointer, if there is one.
    pub list: Option<&'static str>,
    /// The JSON pointer of the object with the figures, in the list's object.
    pub each: &'static str,
    /// A label that tells this place from the section's others.
    pub label: Option<(&'static str, &'static str)>,
}

impl Place {
    /// The object at `pointer`.
    pub const fn at(pointer: &'static str) -> Self {
        Self { list: None, each: pointer, label: None }
    }

    /// Every object of the list at `pointer`.
    pub const fn list(pointer: &'static str) -> Self {
        Self { list: Some(pointer), each: "", label: None }
    }

    /// What is at `each` in every object.
    #[must_use]
    pub const fn each(self, each: &'static str) -> Self {
        Self { each, ..self }
    }

    /// The same with a label.
    #[must_use]
    pub const fn label(self, label: &'static str, value: &'static str) -> Self {
        Self { label: Some((label, value)), ..self }
    }
}

/// An object with figures.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// Its labels.
    pub labels: Vec<(&'static str, String)>,
    /// The object.
    pub object: &'a Value,
}

impl Section {
    /// Its objects in `stats`: none where the device has nothing of the kind.
    pub fn rows<'a>(&self, stats: &'a Value) -> Vec<Row<'a>> {
        let mut rows = Vec::new();
        for place in self.places {
            let objects = match place.list {
                None => std::slice::from_ref(stats),
                Some(list) => stats.pointer(list).and_then(Value::as_array).map_or(&[][..], Vec::as_slice),
            };
            for object in objects {
                let own = place.label.map(|(label, value)| (label, value.to_owned()));
                let labels = self.labels.iter().map(|(label, field)| (*label, text(&object[*field])));
                let labels = own.into_iter().chain(labels).collect();
                let found = object.pointer(place.each).filter(|found| found.is_object());
                rows.extend(found.map(|object| Row { labels, object }));
            }
        }
        rows
    }
}

/// A label's value: no bound where the field is null.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "+Inf".to_owned(),
        Value::String(text) => text.clone(),
        number => number.to_string(),
    }
}
