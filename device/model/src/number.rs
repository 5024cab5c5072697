//! Numbers between counts and figures, and their bounds.

use std::ops::RangeInclusive;

use crate::ModelError;

/// A count as a figure.
#[expect(clippy::cast_precision_loss, reason = "exact up to 8 PiB, and a figure needs no more")]
pub fn float(count: u64) -> f64 {
    count as f64
}

/// The whole number at or above `figure`; the largest there is beyond that.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast from float saturates, and figures are not negative"
)]
pub fn ceil(figure: f64) -> u64 {
    figure.ceil() as u64
}

/// `figure` to so many places.
pub(crate) fn rounded(figure: f64, places: i32) -> f64 {
    let unit = 10_f64.powi(places);
    (figure * unit).round() / unit
}

/// A figure as it is written, with an exponent where it has many digits.
pub(crate) fn shown(figure: f64) -> String {
    let is_long = figure.is_finite() && figure != 0.0 && !(1e-6..1e18).contains(&figure.abs());
    if is_long { format!("{figure:e}") } else { figure.to_string() }
}

/// `value`, if it is within bounds.
pub(crate) fn within(field: &str, value: f64, bounds: RangeInclusive<f64>) -> Result<f64, ModelError> {
    if bounds.contains(&value) {
        return Ok(value);
    }
    Err(ModelError::field(field, &shown(value), &format!("from {} to {}", bounds.start(), bounds.end())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_shown_in_a_few_digits() {
        let all = [0.0, 1.5, -3.0, 1e-6, 1e-300, -1e300, f64::INFINITY, f64::NAN].map(shown);
        assert_eq!(all, ["0", "1.5", "-3", "0.000001", "1e-300", "-1e300", "inf", "NaN"]);
    }
}
