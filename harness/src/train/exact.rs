//! Serializes f64 losslessly as JSON strings: JSON readers may round the last digit of a number.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Serializes a value, for `#[serde(with = "exact")]`.
pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// Deserializes a value, for `#[serde(with = "exact")]`.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(Error::custom)
}

/// Same as [`serialize`] and [`deserialize`], for `Option<f64>`.
pub mod option {
    use super::{Deserialize, Deserializer, Error, Serializer};

    pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(Error::custom)).transpose()
    }
}
