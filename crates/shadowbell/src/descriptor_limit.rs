//! How many files this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::debug;

/// Raises the limit of open files as far as the system allows. A guest with many queues has a
/// descriptor for each interrupt, and there may be many guests. Nothing here uses `select`, which
/// is what the low limit is for.
pub(crate) fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(errno) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        debug!("the limit of open files stays at {current:?}: {errno}");
    }
}
