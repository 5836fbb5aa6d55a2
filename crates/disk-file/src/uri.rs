//! Disk specifications: `disk.img`, `mem:1GiB`, `null:1TiB?block-size=4096`.

use crate::file::{Aio, Direct, FileDisk, FileOptions, Format};
use crate::mem::MemDisk;
use crate::null::NullDisk;
use shadowbell_disk::{Disk, DiskOptions, OpenError, Wait, parse_size};
use shadowbell_state::Descriptors;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Opens the disk that `spec` names.
///
/// | `spec` | the disk |
/// |---|---|
/// | `disk.img`, `./disk.img`, `/dev/sdb`, `file:disk.img`, `file:///srv/disk.img` | a raw image or a block device |
/// | `/dev/ng0n1` | an NVMe namespace by its generic character device |
/// | `mem:1GiB` | memory of this process, initially zero, freed with the process |
/// | `null:1TiB` | stores nothing, completes immediately |
///
/// Options follow a `?`, joined by `&`: `disk.img?block-size=4096&read-only=on`.
///
/// | option | of | value | default |
/// |---|---|---|---|
/// | `block-size` | all | `512` or `4096` | `512`; a block device's own |
/// | `read-only` | all | `on`, `off` | `off`; `on` for a file without write permission |
/// | `direct` | file | `on`: bypass the page cache or fail; `off`: use it; `auto`: bypass it if the file system and the block size allow | `auto` |
/// | `format` | file | `raw`: the bytes of the file are the disk; `qcow2`: as `shadowbell-disk-qcow2` opens it | by its first bytes |
/// | `allow-backing` | qcow2 | `on`: the image may have backing files and a data file; `off` | `off` |
/// | `aio` | file | `io_uring`: use it or fail; `threads`; `auto`: threads if the system refuses io_uring | `auto` |
/// | `read-zeroes` | null | `on`: reads return zeroes; `off`: reads leave the buffer unchanged | `off` |
///
/// Sizes take a unit: `512MiB`, `1.5TiB`, `1G` (binary, as in other disk tools), `1GB` (decimal),
/// or none for bytes.
///
/// A bare path is taken literally up to the first `?`. A path that contains a `?` is written with
/// `file:` and percent-encoding: `file:what%3F.img`, `file:100%25.img`. A path that starts like a
/// scheme is written with `file:` too (`file:word:disk.img`).
///
/// # Errors
/// [`OpenError`], with a message for the author of the specification.
pub fn open(spec: &str) -> Result<Arc<dyn Disk>, OpenError> {
    open_parsed(spec, MemDisk::new)
}

/// Opens a disk like [`open`], so that another process can [`recover`] it. A memory disk then uses
/// a memfd.
///
/// # Errors
/// Like [`open`].
pub fn open_recoverable(spec: &str) -> Result<Arc<dyn Disk>, OpenError> {
    open_parsed(spec, MemDisk::recoverable)
}

fn open_parsed(
    spec: &str,
    memory: fn(u64, u32) -> Result<MemDisk, OpenError>,
) -> Result<Arc<dyn Disk>, OpenError> {
    Ok(match parsed(spec)? {
        Parsed::File(file) => Arc::new(FileDisk::open(&file.path, &file.options)?),
        Parsed::Mem { size, block_size, read_only } => {
            let disk = memory(size / u64::from(block_size), block_size)?;
            Arc::new(disk.with_read_only(read_only))
        }
        Parsed::Null { size, block_size, read_only, read_zeroes } => {
            let disk = NullDisk::new(size / u64::from(block_size), block_size);
            Arc::new(disk.with_read_only(read_only).with_read_zeroes(read_zeroes))
        }
    })
}

/// Parsed specification of a file, for callers that open the file in another way than [`open`], for
/// example as qcow2.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSpec {
    /// Path of the file.
    pub path: PathBuf,
    /// Options for opening the file.
    pub options: FileOptions,
}

impl FileSpec {
    /// Parses `spec`, which has the syntax of [`open`]. Returns `None` if the disk is not a file.
    ///
    /// # Errors
    /// [`OpenError::Spec`].
    pub fn parse(spec: &str) -> Result<Option<Self>, OpenError> {
        match parsed(spec)? {
            Parsed::File(file) => Ok(Some(file)),
            _ => Ok(None),
        }
    }
}

/// Recovers the disk `spec` of a dead process. That process opened it by the same specification,
/// and stored `state` as its [checkpoint](Disk::checkpoint). Returns only when no request of the
/// dead process can reach the disk any more. Until then, calls `wait` repeatedly.
///
/// # Errors
/// [`OpenError`] if the disk has been replaced; [`OpenError::Busy`] if `wait` ends the waiting.
pub fn recover(
    spec: &str,
    state: &serde_json::Value,
    fds: &mut Descriptors,
    wait: Wait<'_>,
) -> Result<Arc<dyn Disk>, OpenError> {
    Ok(match parsed(spec)? {
        Parsed::File(FileSpec { path, options }) => {
            Arc::new(FileDisk::recover(&path, &options, state, fds, wait)?)
        }
        // No fence is needed: the process itself executed the requests to these disks, so they
        // ended with it.
        Parsed::Mem { size, block_size, read_only } => {
            let form = (size / u64::from(block_size), block_size, read_only);
            let refused = |why| OpenError::NotThatDisk { disk: spec.to_owned(), why };
            Arc::new(MemDisk::recover(state, fds, form).map_err(refused)?)
        }
        Parsed::Null { .. } => return open(spec),
    })
}

fn parsed(spec: &str) -> Result<Parsed, OpenError> {
    parse(spec).map_err(|why| OpenError::Spec { spec: spec.to_owned(), why })
}

/// Options of a file.
pub const FILE_OPTIONS: [&str; 6] =
    ["block-size", "read-only", "direct", "aio", "format", "allow-backing"];
/// Options of a memory disk.
pub const MEMORY_OPTIONS: [&str; 2] = ["block-size", "read-only"];
/// Options of a null disk.
pub const NULL_OPTIONS: [&str; 3] = ["block-size", "read-only", "read-zeroes"];

/// A parsed specification.
#[derive(Debug, PartialEq, Eq)]
enum Parsed {
    File(FileSpec),
    Mem { size: u64, block_size: u32, read_only: bool },
    Null { size: u64, block_size: u32, read_only: bool, read_zeroes: bool },
}

fn parse(spec: &str) -> Result<Parsed, String> {
    let (name, mut options) = DiskOptions::split(spec)?;
    let (scheme, rest) = scheme(name)?;
    let known: &[&str] = match scheme {
        "null" => &NULL_OPTIONS,
        "mem" => &MEMORY_OPTIONS,
        _ => &FILE_OPTIONS,
    };
    options.check(scheme, known)?;
    let block_size = options.take_block_size()?;
    let read_only = options.take_switch("read-only")?;
    let parsed = match scheme {
        "mem" | "null" => {
            let block_size = block_size.unwrap_or(512);
            let size = disk_size(scheme, rest, block_size)?;
            let read_only = read_only.unwrap_or(false);
            if scheme == "mem" {
                Parsed::Mem { size, block_size, read_only }
            } else {
                let read_zeroes = options.take_switch("read-zeroes")?.unwrap_or(false);
                Parsed::Null { size, block_size, read_only, read_zeroes }
            }
        }
        _ => {
            let path = if name.len() == rest.len() { rest.into() } else { decode(rest)? };
            let read_only = read_only.unwrap_or(false);
            let direct = match options.take("direct") {
                None | Some("auto") => Direct::Auto,
                Some("on" | "true" | "yes") => Direct::On,
                Some("off" | "false" | "no") => Direct::Off,
                Some(other) => {
                    return Err(format!(
                        "the option `direct` is `on`, `off` or `auto`, not `{other}`"
                    ));
                }
            };
            let aio = match options.take("aio") {
                None | Some("auto") => Aio::Auto,
                Some("io_uring") => Aio::IoUring,
                Some("threads") => Aio::Threads,
                Some(other) => {
                    return Err(format!(
                        "the option `aio` is `io_uring`, `threads` or `auto`, not `{other}`"
                    ));
                }
            };
            let format = match options.take("format") {
                None => None,
                Some("raw") => Some(Format::Raw),
                Some("qcow2") => Some(Format::Qcow2),
                Some(other) => {
                    return Err(format!("the option `format` is `raw` or `qcow2`, not `{other}`"));
                }
            };
            let allow_backing = options.take_switch("allow-backing")?.unwrap_or(false);
            if allow_backing && format == Some(Format::Raw) {
                return Err("a raw image names no other file; leave out `allow-backing`".to_owned());
            }
            let options = FileOptions { block_size, read_only, direct, aio, format, allow_backing };
            Parsed::File(FileSpec { path, options })
        }
    };
    Ok(parsed)
}

/// Splits a specification into its scheme and the rest. A bare path has the scheme `file`.
fn scheme(name: &str) -> Result<(&str, &str), String> {
    if name.is_empty() {
        return Err("it is empty; write a path, `mem:1GiB` or `null:1TiB`".to_owned());
    }
    match name.split_once(':') {
        Some((kind @ ("file" | "mem" | "null"), rest)) => Ok((kind, rest)),
        // A scheme has only certain characters. After other characters, such as a slash, a colon is
        // a part of the path.
        Some((kind, _))
            if kind.starts_with(|c: char| c.is_ascii_alphabetic())
                && kind.chars().all(|c| c.is_ascii_alphanumeric() || "+-".contains(c)) =>
        {
            Err(format!(
                "there is no kind of disk called `{kind}`; there are `file:`, `mem:` and `null:` \
                 (for a file of that name write `file:{name}`)"
            ))
        }
        _ => Ok(("file", name)),
    }
}

/// Decodes the path after `file:`, which may contain percent-encoding.
fn decode(text: &str) -> Result<PathBuf, String> {
    let text = match text.strip_prefix("//") {
        None => text,
        Some(rest) => match rest.strip_prefix("localhost").unwrap_or(rest) {
            path if path.starts_with('/') => path,
            _ => {
                let host = rest.split('/').next().unwrap_or(rest);
                return Err(format!(
                    "it is on another machine, `{host}`; write `file:///path` or `file:path`"
                ));
            }
        },
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |b: &u8| (*b as char).to_digit(16);
        match tail {
            [high, low, tail @ ..] if digit(high).is_some() && digit(low).is_some() => {
                let value = digit(high).unwrap_or(0) << 4 | digit(low).unwrap_or(0);
                bytes.push(value as u8);
                rest = tail;
            }
            _ => {
                return Err(
                    "a `%` in it is not followed by two hexadecimal digits; after `file:` \
                            a percent sign is written `%25`"
                        .to_owned(),
                );
            }
        }
    }
    if bytes.is_empty() {
        return Err("it lacks a path; write for example `file:disk.img`".to_owned());
    }
    if bytes.contains(&0) {
        return Err("its path contains a zero byte, which no file's does".to_owned());
    }
    Ok(OsString::from_vec(bytes).into())
}

fn disk_size(scheme: &str, size: &str, block_size: u32) -> Result<u64, String> {
    if size.is_empty() {
        return Err(format!("it lacks a size; write for example `{scheme}:1GiB`"));
    }
    let bytes = parse_size(size)?;
    if !bytes.is_multiple_of(u64::from(block_size)) {
        return Err(format!(
            "its size of {bytes} bytes is no multiple of the block size of {block_size} bytes"
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, options: FileOptions) -> Result<Parsed, String> {
        Ok(Parsed::File(FileSpec { path: path.into(), options }))
    }

    #[test]
    fn paths_are_used_literally_and_uris_are_decoded() {
        let plain = FileOptions::default();
        for (spec, path) in [
            ("disk.img", "disk.img"),
            ("./mem:1GiB", "./mem:1GiB"),
            ("/srv/a:b.img", "/srv/a:b.img"),
            ("100%.img", "100%.img"),
            ("a%3Fb", "a%3Fb"),
            ("file:disk.img", "disk.img"),
            ("file:word:disk.img", "word:disk.img"),
            ("file:/srv/disk.img", "/srv/disk.img"),
            ("file:///srv/disk.img", "/srv/disk.img"),
            ("file://localhost/srv/disk.img", "/srv/disk.img"),
            ("file:what%3F.img", "what?.img"),
            ("file:100%25.img", "100%.img"),
            ("file:%6D%C3%a9", "mé"),
            ("v1.2:disk", "v1.2:disk"),
        ] {
            assert_eq!(parse(spec), file(path, plain.clone()), "{spec}");
        }
        let not_utf8 = match parse("file:%FF").unwrap() {
            Parsed::File(file) => file.path.into_os_string().into_vec(),
            other => panic!("{other:?}"),
        };
        assert_eq!(not_utf8, [0xff]);
    }

    #[test]
    fn options_are_understood() {
        let options = FileOptions {
            block_size: Some(4096),
            read_only: true,
            direct: Direct::Off,
            aio: Aio::Threads,
            ..FileOptions::default()
        };
        let image = FileOptions {
            format: Some(Format::Qcow2),
            allow_backing: true,
            ..FileOptions::default()
        };
        assert_eq!(parse("a?format=qcow2&allow-backing=on"), file("a", image));
        let spec = "disk.img?block-size=4096&read-only=on&direct=off&aio=threads";
        assert_eq!(parse(spec), file("disk.img", options));
        let options = FileOptions { aio: Aio::IoUring, ..FileOptions::default() };
        assert_eq!(parse("disk.img?aio=io_uring"), file("disk.img", options));
        assert_eq!(parse("disk.img?aio=auto"), file("disk.img", FileOptions::default()));
        let options = FileOptions { direct: Direct::On, ..FileOptions::default() };
        assert_eq!(parse("file:a%3Fb?direct=on&read-only=off"), file("a?b", options));
        assert_eq!(
            parse("null:1T?read-zeroes=on&block-size=4k"),
            Ok(Parsed::Null {
                size: 1 << 40,
                block_size: 4096,
                read_only: false,
                read_zeroes: true
            })
        );
        assert_eq!(
            parse("mem:1.5MiB?read-only=yes"),
            Ok(Parsed::Mem { size: 3 << 19, block_size: 512, read_only: true })
        );
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (spec, words) in [
            ("", "it is empty"),
            ("?direct=on", "it is empty"),
            ("file:", "lacks a path"),
            ("file://server/disk.img", "another machine, `server`"),
            ("file:50%.img", "two hexadecimal digits"),
            ("file:a%0", "two hexadecimal digits"),
            ("file:a%+1b", "two hexadecimal digits"),
            ("file:a%00b", "zero byte"),
            ("qcow3:x.img", "no kind of disk called `qcow3`"),
            ("mem", "mem"),
            ("mem:", "lacks a size"),
            ("null:?block-size=512", "lacks a size"),
            ("mem:0", "size is zero"),
            ("mem:0GiB", "size is zero"),
            ("mem:-1GiB", "no size"),
            ("mem:lots", "no size"),
            ("mem:1..5GiB", "no size"),
            ("mem:1XiB", "no size"),
            ("mem:NaN", "no size"),
            ("mem:100", "no multiple of the block size of 512"),
            ("mem:512?block-size=4096", "no multiple of the block size of 4096"),
            ("mem:1000KB?block-size=4096", "no multiple"),
            ("null:8EiB", "exceeds the maximum"),
            ("null:99999999999EiB", "exceeds the maximum"),
            ("mem:1GiB?block-size=1024", "512 or 4096, not `1024`"),
            ("mem:1GiB?block-size=", "512 or 4096, not ``"),
            ("mem:1GiB?direct=on", "no option `direct`"),
            ("disk.img?read-zeroes=on", "no option `read-zeroes`"),
            ("disk.img?size=1", "no option `size`"),
            ("disk.img?direct=perhaps", "`on`, `off` or `auto`, not `perhaps`"),
            ("disk.img?aio=native", "`io_uring`, `threads` or `auto`, not `native`"),
            ("disk.img?read-only=1", "`on` or `off`, not `1`"),
            ("disk.img?format=vdi", "`raw` or `qcow2`, not `vdi`"),
            ("disk.img?format=raw&allow-backing=on", "names no other file"),
            ("disk.img?read-only", "no option; options are written"),
            ("disk.img?", "no option; options are written"),
            ("disk.img?direct=on&direct=off", "given twice"),
        ] {
            let error = match parse(spec) {
                Err(error) => error,
                // A bare word is a valid path. Opening it fails only because the file does not
                // exist.
                Ok(parsed) => format!("{parsed:?}"),
            };
            assert!(error.contains(words), "{spec}: {error}");
            if spec != "mem" {
                let error = open(spec).unwrap_err().to_string();
                assert!(error.contains(words), "{spec}: {error}");
            }
        }
    }

    #[test]
    fn disks_open_by_name() {
        let disk = open("mem:1MiB?block-size=4096").unwrap();
        assert_eq!((disk.info().blocks, disk.info().block_size), (256, 4096));
        assert_eq!(disk.name(), "mem:1MiB");
        let disk = open("null:1TiB?read-only=on").unwrap();
        assert_eq!((disk.info().blocks, disk.info().read_only), (1 << 31, true));
        let error = open("/nonexistent/disk.img").unwrap_err();
        assert!(matches!(error, OpenError::Missing { .. }));
    }
}
