//! Specification of a pool: `DIR?capacity=1TiB`, optionally with `&overwrite-rate=100MiB`.

use serde::{Deserialize, Serialize};
use shadowbell_disk::parse_size;
use shadowbell_process::process_env;
use std::path::{Path, PathBuf};

/// Directory and capacity of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSpec {
    /// Absolute path of the directory.
    pub directory: PathBuf,
    /// Limit for the sum of all namespace sizes, in bytes.
    pub capacity: u64,
    /// Rate of Sanitize Overwrite, in bytes per second.
    #[serde(default = "overwrite_rate")]
    pub overwrite_rate: u64,
}

/// Default rate of Sanitize Overwrite: a part of what a disk can do, so that other guests on it are
/// hardly slower.
const OVERWRITE_RATE: u64 = 100 << 20;

fn overwrite_rate() -> u64 {
    OVERWRITE_RATE
}

impl std::str::FromStr for PoolSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let no_capacity = || {
            format!(
                "`{text}` is not a pool; write its directory and capacity, as in \
                 `/srv/pool?capacity=1TiB`"
            )
        };
        let (directory, options) = text.split_once('?').ok_or_else(no_capacity)?;
        let (mut capacity, mut overwrite_rate) = (0, OVERWRITE_RATE);
        for option in options.split('&') {
            match option.split_once('=') {
                Some(("capacity", size)) => capacity = parse_size(size)?,
                Some(("overwrite-rate", size)) => overwrite_rate = parse_size(size)?,
                _ => return Err(no_capacity()),
            }
        }
        if directory.is_empty() || capacity == 0 {
            return Err(no_capacity());
        }
        if overwrite_rate == 0 {
            return Err("an `overwrite-rate` of 0 would never end an overwrite".to_owned());
        }
        if directory.contains('%') {
            return Err("the name of a pool's directory must not contain `%`".to_owned());
        }
        let directory = process_env::absolute(Path::new(directory));
        Ok(Self { directory, capacity, overwrite_rate })
    }
}

impl std::fmt::Display for PoolSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}?capacity={}", self.directory.display(), self.capacity)?;
        if self.overwrite_rate != OVERWRITE_RATE {
            write!(f, "&overwrite-rate={}", self.overwrite_rate)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_a_directory_and_a_capacity() {
        let pool: PoolSpec = "/srv/pool?capacity=1GiB".parse().unwrap();
        assert_eq!((&pool.directory, pool.capacity), (&PathBuf::from("/srv/pool"), 1 << 30));
        assert_eq!((pool.to_string().parse(), pool.overwrite_rate), (Ok(pool), OVERWRITE_RATE));
        let pool: PoolSpec = "/srv/pool?capacity=1GiB&overwrite-rate=1MiB".parse().unwrap();
        assert_eq!((pool.to_string().parse(), pool.overwrite_rate), (Ok(pool), 1 << 20));
        let wrong = [
            "/srv/pool",
            "?capacity=1GiB",
            "/a?capacity=0",
            "/a?capacity=x",
            "/a?size=1",
            "/a?overwrite-rate=1MiB",
            "/a?capacity=1GiB&overwrite-rate=0",
            "/a?capacity=1GiB&",
            "/%?capacity=1",
        ];
        for text in wrong {
            assert!(text.parse::<PoolSpec>().is_err(), "{text}");
        }
    }
}
