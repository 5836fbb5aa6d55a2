//! Parameters in the path and the query of a request.

use shadowbell_control_api::api::{Code, Problem};
use std::str::FromStr;

#[derive(Debug)]
pub(super) struct Parameters {
    pub(super) path: String,
    /// Parameters of the path, by name.
    pub(super) values: Vec<(&'static str, String)>,
    pub(super) query: Option<String>,
}

impl Parameters {
    /// Returns a parameter of the path.
    pub(super) fn text(&self, name: &str) -> &str {
        let found = self.values.iter().find(|(known, _)| *known == name);
        found.map_or("", |(_, value)| value)
    }

    /// Returns a numeric parameter of the path.
    pub(super) fn number<T: FromStr>(&self, name: &str) -> Result<T, Problem> {
        self.text(name).parse().map_err(|_| missing(&self.path))
    }

    pub(super) fn has_query(&self, query: &str) -> bool {
        self.query.as_deref() == Some(query)
    }
}

/// Problem for a path that does not exist.
pub(super) fn missing(path: &str) -> Problem {
    Problem::new(Code::NotFound, format!("there is no path {path}"))
}
