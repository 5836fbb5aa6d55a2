//! Builds the book of `docs/` as `book.toml` says: `mdbook build`, without its server and its search.
#![forbid(unsafe_code)]

use mdbook_driver::MDBook;
use mdbook_driver::errors::Result;

fn main() -> Result<()> {
    let root = std::env::args_os().nth(1).unwrap_or_else(|| ".".into());
    MDBook::load(root)?.build()
}
