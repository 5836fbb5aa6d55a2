//! Specification of a pool: `DIR?capacity=1TiB`.

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
        let capacity = options.strip_prefix("capacity=").ok_or_else(no_capacity)?;
        let capacity = parse_size(capacity)?;
        if directory.is_empty() || capacity == 0 {
            return Err(no_capacity());
        }
        if directory.contains('%') {
            return Err("the name of a pool's directory must not contain `%`".to_owned());
        }
        Ok(Self { directory: process_env::absolute(Path::new(directory)), capacity })
    }
}

impl std::fmt::Display for PoolSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}?capacity={}", self.directory.display(), self.capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_a_directory_and_a_capacity() {
        let pool: PoolSpec = "/srv/pool?capacity=1GiB".parse().unwrap();
        assert_eq!((&pool.directory, pool.capacity), (&PathBuf::from("/srv/pool"), 1 << 30));
        assert_eq!(pool.to_string().parse(), Ok(pool));
        let wrong = [
            "/srv/pool",
            "?capacity=1GiB",
            "/a?capacity=0",
            "/a?capacity=x",
            "/a?size=1",
            "/%?capacity=1",
        ];
        for text in wrong {
            assert!(text.parse::<PoolSpec>().is_err(), "{text}");
        }
    }
}
