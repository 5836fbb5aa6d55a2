//! Book of `docs/`: `mdbook build` with the configuration `book.toml`, without its server and
//! search.
#![forbid(unsafe_code)]

use mdbook_driver::MDBook;
use mdbook_driver::errors::Result;

fn main() -> Result<()> {
    let root = std::env::args_os().nth(1).unwrap_or_else(|| ".".into());
    MDBook::load(root)?.build()
}
