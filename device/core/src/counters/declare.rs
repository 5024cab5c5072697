//! The one place where a figure is declared: with its name in JSON and in OpenMetrics, its unit,
//! its kind, its help, and where an image keeps it.
//!
//! * [`figures!`] declares what is reported: a struct that serializes, and a list of [`Figure`]s,
//!   one for each of its fields that is a number. JSON, OpenMetrics, the tables of `lamina stats`,
//!   the page and `docs/counters.md` are made from these lists, which
//!   [sections](super::sections::Section) find in JSON.
//! * `counters!` declares the counters themselves too, and how a report is made of them.
//!
//! An image keeps counters by number. A [`Slot`] is written at each declaration and is never
//! changed: images of earlier programs are opened by it. What is added takes the next free `Later`.

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::Counter;

/// Whether a number only rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It only rises, while a device runs.
    Counter,
    /// It rises and falls.
    Gauge,
    /// It is counted by size: an object with `count`, `sum` and `buckets`.
    Histogram,
}

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Things that the name says.
    Count,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// One number over another.
    Ratio,
    /// GB/s.
    Rate,
}

/// A figure as it is declared.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Its field in JSON.
    pub name: &'static str,
    /// Its name in OpenMetrics, without `lamina_`, its section's prefix, its unit and `_total`.
    pub metric: &'static str,
    /// A label that tells it from others of that name.
    pub label: Option<(&'static str, &'static str)>,
    /// What it is. The first of those that a label tells apart says before a colon what all are.
    pub help: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its unit.
    pub unit: Unit,
}

impl Figure {
    /// Its title where it is shown with its unit.
    pub fn title(&self) -> String {
        let is_unit = |word: &&str| ["bytes", "seconds", "gbs"].contains(word);
        let words: Vec<&str> = self.name.split('_').filter(|word| !is_unit(word)).collect();
        if words.is_empty() { self.name.to_owned() } else { words.join(" ") }
    }

    /// Its name in OpenMetrics, if it is in a section with this prefix.
    pub fn metric(&self, prefix: &str) -> String {
        let unit = match self.unit {
            Unit::Count | Unit::Ratio => "",
            Unit::Bytes => "_bytes",
            Unit::Seconds => "_seconds",
            Unit::Rate => "_gigabytes_per_second",
        };
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("lamina_{prefix}{}{unit}{total}", self.metric)
    }
}

impl Serialize for Figure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut figure = serializer.serialize_struct("Figure", 4)?;
        figure.serialize_field("name", self.name)?;
        figure.serialize_field("title", &self.title())?;
        figure.serialize_field("help", self.help)?;
        figure.serialize_field("unit", &self.unit)?;
        figure.end()
    }
}

/// Whether a device measures comparisons: what other devices would have done, and models of this
/// one.
#[derive(Clone, Copy, Debug)]
pub struct Compared(pub bool);

impl Compared {
    /// `number`, if comparisons are measured.
    pub fn some(self, number: u64) -> Option<u64> {
        self.0.then_some(number)
    }

    /// What reports of a scope with nothing else to tell are made with.
    pub(crate) fn compared(self) -> Self {
        self
    }
}

/// Where an image keeps a counter, among those of its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    /// Among those that images kept first.
    First(usize),
    /// Among those that came later, which lie behind the first of all scopes.
    Later(usize),
}

/// Where the first and the later counters of a scope begin in the scope around it.
pub type At = (Slot, Slot);

impl Slot {
    /// Where this slot of a scope at `at` is in the scope around it.
    #[must_use]
    pub fn within(self, at: At) -> Self {
        let (begin, number) = match self {
            Self::First(number) => (at.0, number),
            Self::Later(number) => (at.1, number),
        };
        match begin {
            Self::First(begin) => Self::First(begin + number),
            Self::Later(begin) => Self::Later(begin + number),
        }
    }
}

/// What has counters that an image keeps.
pub trait Slots {
    /// Adds each counter and its slot, if the scope begins at `at`.
    fn slots<'a>(&'a mut self, at: At, all: &mut Vec<(Slot, &'a mut Counter)>);

    /// The counters that images kept first, in the order in which they do.
    fn counters(&mut self) -> Vec<&mut Counter> {
        self.in_order(|slot| matches!(slot, Slot::First(_)))
    }

    /// Those that came later, likewise.
    fn later_counters(&mut self) -> Vec<&mut Counter> {
        self.in_order(|slot| matches!(slot, Slot::Later(_)))
    }

    /// Those whose slot is `wanted`, by slot.
    fn in_order(&mut self, wanted: fn(Slot) -> bool) -> Vec<&mut Counter> {
        let mut all = Vec::new();
        self.slots((Slot::First(0), Slot::Later(0)), &mut all);
        all.retain(|(slot, _)| wanted(*slot));
        all.sort_by_key(|(slot, _)| *slot);
        all.into_iter().map(|(_, counter)| counter).collect()
    }
}

impl Slots for Counter {
    fn slots<'a>(&'a mut self, at: At, all: &mut Vec<(Slot, &'a mut Counter)>) {
        all.push((at.0, self));
    }
}

/// Declares a report: fields that say what it is of, and figures.
#[macro_export]
macro_rules! figures {
    (
        $(#[$meta:meta])*
        pub struct $Report:ident {
            $(reported { $( $(#[$reported_meta:meta])* $reported:ident: $Reported:ty; )* })?
            figures { $(
                $(#[doc = $help:literal])+
                $name:ident: $Type:ty = $Kind:ident $metric:literal
                    $({ $label:ident = $value:literal })? $Unit:ident;
            )* }
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, ::serde::Serialize)]
        pub struct $Report {
            $($( $(#[$reported_meta])* pub $reported: $Reported, )*)?
            $( $(#[doc = $help])+ pub $name: $Type, )*
        }

        impl $Report {
            /// Its figures.
            pub const FIGURES: &'static [$crate::counters::Figure] = &[ $(
                $crate::counters::Figure {
                    name: stringify!($name),
                    metric: $metric,
                    label: $crate::label!($($label $value)?),
                    help: concat!($($help),+).trim_ascii_start(),
                    kind: $crate::counters::Kind::$Kind,
                    unit: $crate::counters::Unit::$Unit,
                }
            ),* ];
        }
    };
}

/// A figure's own label.
#[doc(hidden)]
#[macro_export]
macro_rules! label {
    () => {
        None
    };
    ($label:ident $value:literal) => {
        Some((stringify!($label), $value))
    };
}

/// Declares what counts of a scope, and its reports, each made by the method that `by` names:
///
/// * parts of the scope that are declared elsewhere, with where their slots begin,
/// * of each report: what is `told` besides; what is `counted`, each counter or gauge with the slot
///   of the former; what is `compared`, a counter that is absent unless it is measured; and what is
///   `computed` of these.
#[macro_export]
macro_rules! counters {
    (
        $(#[$live_meta:meta])*
        $vis:vis struct $Live:ident for $Given:ty {
            $( $(#[$part_meta:meta])* $part_vis:vis $part:ident: $Part:ty $(, at $first:expr, $later:expr)?; )*
        }
        $(
            $(#[$meta:meta])*
            pub struct $Report:ident by $by:ident {
                $(reported { $(
                    $(#[$reported_meta:meta])* $reported:ident: $Reported:ty = $tell:expr;
                )* })?
                $(counted { $(
                    $(#[doc = $help:literal])+
                    $live:ident: $Live_kind:ident $(at $slot:expr)? => $name:ident $metric:literal $Unit:ident;
                )* })?
                $(compared { $(
                    $(#[doc = $compared_help:literal])+
                    $compared_live:ident: Counter at $compared_slot:expr =>
                        $compared:ident $compared_metric:literal $Compared_unit:ident;
                )* })?
                $(computed { $(
                    $(#[doc = $computed_help:literal])+
                    $computed:ident: $Computed:ty = $Computed_kind:ident $computed_metric:literal
                        $({ $label:ident = $value:literal })? $Computed_unit:ident, $compute:expr;
                )* })?
            }
        )*
    ) => {
        $(#[$live_meta])*
        #[derive(Debug, Default)]
        $vis struct $Live {
            $( $(#[$part_meta])* $part_vis $part: $Part, )*
            $(
                $($( $(#[doc = $help])+ pub(crate) $live: $crate::counters::$Live_kind, )*)?
                $($( $(#[doc = $compared_help])+ pub(crate) $compared_live: $crate::counters::Counter, )*)?
            )*
        }

        impl $crate::counters::Slots for $Live {
            #[allow(unused_variables, reason = "an image need not keep any of a scope's counters")]
            fn slots<'a>(
                &'a mut self,
                at: $crate::counters::At,
                all: &mut Vec<($crate::counters::Slot, &'a mut $crate::counters::Counter)>,
            ) {
                $($( self.$part.slots(($first.within(at), $later.within(at)), all); )?)*
                $(
                    $($($( all.push(($slot.within(at), &mut self.$live)); )?)*)?
                    $($( all.push(($compared_slot.within(at), &mut self.$compared_live)); )*)?
                )*
            }
        }

        $(
            $crate::figures! {
                $(#[$meta])*
                pub struct $Report {
                    $(reported { $( $(#[$reported_meta])* $reported: $Reported; )* })?
                    figures {
                        $($( $(#[doc = $help])+ $name: u64 = $Live_kind $metric $Unit; )*)?
                        $($( $(#[doc = $compared_help])+
                            $compared: Option<u64> = Counter $compared_metric $Compared_unit; )*)?
                        $($( $(#[doc = $computed_help])+
                            $computed: $Computed = $Computed_kind $computed_metric
                                $({ $label = $value })? $Computed_unit; )*)?
                    }
                }
            }

            impl $Live {
                #[allow(unused_variables, reason = "reports of counters alone need nothing else")]
                pub(crate) fn $by(&self, given: &$Given) -> $Report {
                    $Report {
                        $($( $reported: {
                            let tell: fn(&$Live, &$Given) -> $Reported = $tell;
                            tell(self, given)
                        }, )*)?
                        $($( $name: self.$live.get(), )*)?
                        $($( $compared: given.compared().some(self.$compared_live.get()), )*)?
                        $($( $computed: {
                            let compute: fn(&$Live, &$Given) -> $Computed = $compute;
                            compute(self, given)
                        }, )*)?
                    }
                }
            }
        )*
    };
}
