//! The reference against values from elsewhere, values made by hand, and plain arithmetic.

mod golden;
mod microscaling;
mod properties;
mod refusals;
mod views;
