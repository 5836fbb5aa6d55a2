//! The admin command set.
