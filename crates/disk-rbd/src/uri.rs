//! Specifications of RBD images.

use crate::error::OpenError;
use percent_encoding::percent_decode_str;
use shadowbell_disk::DiskOptions;
use std::fmt;
use std::path::PathBuf;

/// Specification of an RBD image: `rbd:pool/image`, `rbd:pool/image@snapshot`.
///
/// | option | value | default |
/// |---|---|---|
/// | `conf` | configuration file of the cluster | Ceph's: `/etc/ceph/ceph.conf` and others |
/// | `id` | the user, without `client.` | `admin` |
/// | `namespace` | the namespace in the pool | none |
/// | `read-only` | `on`, `off` | `off`; `on` for a snapshot |
/// | `block-size` | `512`, `4096` | `512` |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdSpec {
    pub(crate) pool: String,
    pub(crate) image: String,
    pub(crate) snapshot: Option<String>,
    pub(crate) conf: Option<PathBuf>,
    pub(crate) id: String,
    pub(crate) namespace: Option<String>,
    pub(crate) read_only: bool,
    pub(crate) block_size: u32,
}

impl RbdSpec {
    /// Names of the options.
    pub const OPTIONS: [&str; 5] = ["conf", "id", "namespace", "read-only", "block-size"];

    /// Parses a specification.
    ///
    /// # Errors
    /// [`OpenError::Spec`].
    pub fn parse(spec: &str) -> Result<Self, OpenError> {
        parse(spec).map_err(|why| OpenError::Spec { spec: spec.to_owned(), why })
    }
}

impl fmt::Display for RbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}/{}", self.pool, self.image)?;
        self.snapshot.iter().try_for_each(|snapshot| write!(f, "@{snapshot}"))
    }
}

fn text(what: &str, text: &str) -> Result<String, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| format!("its {what} is not UTF-8"))?.into_owned();
    if decoded.is_empty() {
        return Err(format!("its {what} is empty; write `rbd:POOL/IMAGE`"));
    }
    if decoded.contains('\0') {
        return Err(format!("its {what} contains a zero byte"));
    }
    Ok(decoded)
}

fn parse(spec: &str) -> Result<RbdSpec, String> {
    let (name, mut options) = DiskOptions::split(spec)?;
    let rest = name.strip_prefix("rbd:").unwrap_or(name);
    let (pool, image) = rest.split_once('/').ok_or("it lacks an image; write `rbd:POOL/IMAGE`")?;
    let (image, snapshot) = match image.split_once('@') {
        Some((image, snapshot)) => (image, Some(text("snapshot", snapshot)?)),
        None => (image, None),
    };
    let mut made = RbdSpec {
        pool: text("pool", pool)?,
        image: text("image", image)?,
        read_only: snapshot.is_some(),
        snapshot,
        conf: None,
        id: "admin".to_owned(),
        namespace: None,
        block_size: 512,
    };
    options.check("rbd", &RbdSpec::OPTIONS)?;
    made.conf = options
        .take("conf")
        .map(|path| text("option `conf`", path))
        .transpose()?
        .map(PathBuf::from);
    if let Some(user) = options.take("id") {
        made.id = text("option `id`", user)?;
    }
    let namespace = options.take("namespace");
    made.namespace = namespace.map(|name| text("option `namespace`", name)).transpose()?;
    match options.take_switch("read-only")? {
        Some(false) if made.snapshot.is_some() => {
            return Err("a snapshot takes no writes; leave out `read-only=off`".to_owned());
        }
        asked => made.read_only |= asked.unwrap_or(false),
    }
    made.block_size = options.take_block_size()?.unwrap_or(512);
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_understood() {
        let spec = RbdSpec::parse("rbd:p/i").unwrap();
        assert_eq!((&spec.pool[..], &spec.image[..], spec.read_only), ("p", "i", false));
        assert_eq!((&spec.id[..], spec.block_size), ("admin", 512));
        let all = "rbd:p%20q/i@s?conf=/etc/c%3Fh&id=vm&namespace=n&block-size=4096";
        let spec = RbdSpec::parse(all).unwrap();
        assert_eq!((&spec.pool[..], spec.snapshot.as_deref()), ("p q", Some("s")));
        assert_eq!(spec.conf, Some("/etc/c?h".into()));
        assert_eq!((&spec.id[..], spec.namespace.as_deref()), ("vm", Some("n")));
        assert!(spec.read_only && spec.block_size == 4096);
        assert_eq!(spec.to_string(), "rbd:p q/i@s");
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (spec, words) in [
            ("rbd:", "lacks an image"),
            ("rbd:/i", "pool is empty"),
            ("rbd:p/", "image is empty"),
            ("rbd:p/@s", "image is empty"),
            ("rbd:p/i@", "snapshot is empty"),
            ("rbd:p/%00", "zero byte"),
            ("rbd:p/%ff", "not UTF-8"),
            ("rbd:p/i@s?read-only=off", "takes no writes"),
            ("rbd:p/i?read-only=1", "`on` or `off`"),
            ("rbd:p/i?block-size=1024", "512 or 4096"),
            ("rbd:p/i?id=a&id=b", "given twice"),
            ("rbd:p/i?direct=on", "no option `direct`"),
            ("rbd:p/i?id", "no option; options"),
        ] {
            let error = RbdSpec::parse(spec).unwrap_err().to_string();
            assert!(error.contains(words), "{spec}: {error}");
        }
    }
}
