//! Macros for the structures of this crate: all-zero defaults, and byte-exact layout tests.

/// Implements `Default` as all zeroes, for structures whose arrays are too long for the derive.
macro_rules! zero_default {
    ($($type:ty),* $(,)?) => {$(
        impl Default for $type {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    )*};
}
pub(crate) use zero_default;

/// Asserts the size of a structure and the offset of each field.
///
/// The pattern names all fields and has no `..`, so it does not compile if a field is missing.
#[cfg(test)]
macro_rules! assert_layout {
    ($type:ident, $size:literal, { $($field:ident: $offset:literal),* $(,)? }) => {
        assert_eq!(core::mem::size_of::<$type>(), $size, "size of {}", stringify!($type));
        let $type { $($field: _),* } = <$type as zerocopy::FromZeros>::new_zeroed();
        $(assert_eq!(
            core::mem::offset_of!($type, $field),
            $offset,
            "offset of {}::{}",
            stringify!($type),
            stringify!($field)
        );)*
    };
}
#[cfg(test)]
pub(crate) use assert_layout;

/// Bits `high:low` of a dword.
pub(crate) const fn bits(dword: u32, high: u32, low: u32) -> u32 {
    dword >> low & (u32::MAX >> (31 - (high - low)))
}
