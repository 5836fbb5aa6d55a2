//! Options of a disk specification: `name=value`, after a `?`, joined by `&`.

/// Options of a disk specification that are not parsed yet.
#[derive(Clone, Debug, Default)]
pub struct DiskOptions<'a>(Vec<(&'a str, &'a str)>);

impl<'a> DiskOptions<'a> {
    /// Splits `spec` into the name of the disk and its options.
    ///
    /// # Errors
    /// A sentence about an option without a value, or one that is given twice.
    pub fn split(spec: &'a str) -> Result<(&'a str, Self), String> {
        let Some((name, text)) = spec.split_once('?') else { return Ok((spec, Self::default())) };
        let mut list: Vec<(&str, &str)> = Vec::new();
        for option in text.split('&') {
            let (name, value) = option.split_once('=').ok_or_else(|| {
                format!("`{option}` after the `?` is no option; options are written `name=value`")
            })?;
            if list.iter().any(|(other, _)| *other == name) {
                return Err(format!("the option `{name}` is given twice"));
            }
            list.push((name, value));
        }
        Ok((name, Self(list)))
    }

    /// Names of the remaining options.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.0.iter().map(|(name, _)| *name)
    }

    /// Removes an option and returns its value.
    pub fn take(&mut self, name: &str) -> Option<&'a str> {
        let index = self.0.iter().position(|(other, _)| *other == name)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Removes an option that is `on` or `off`.
    ///
    /// # Errors
    /// A sentence about another value.
    pub fn take_switch(&mut self, name: &str) -> Result<Option<bool>, String> {
        match self.take(name) {
            None => Ok(None),
            Some("on" | "true" | "yes") => Ok(Some(true)),
            Some("off" | "false" | "no") => Ok(Some(false)),
            Some(other) => Err(format!("the option `{name}` is `on` or `off`, not `{other}`")),
        }
    }

    /// Removes the option `block-size`.
    ///
    /// # Errors
    /// A sentence about a block size that disks do not have.
    pub fn take_block_size(&mut self) -> Result<Option<u32>, String> {
        match self.take("block-size") {
            None => Ok(None),
            Some("512") => Ok(Some(512)),
            Some("4096" | "4k" | "4K" | "4KiB") => Ok(Some(4096)),
            Some(other) => Err(format!("the block size is 512 or 4096, not `{other}`")),
        }
    }

    /// Refuses an option that is not one of `known`, the options of disks `scheme`.
    ///
    /// # Errors
    /// A sentence with all known options.
    pub fn check(&self, scheme: &str, known: &[&str]) -> Result<(), String> {
        match self.names().find(|name| !known.contains(name)) {
            None => Ok(()),
            Some(name) => {
                let known: Vec<_> = known.iter().map(|known| format!("`{known}`")).collect();
                Err(format!(
                    "a disk `{scheme}:` has no option `{name}`; its options are {}",
                    known.join(", ")
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_once_and_unknown_ones_are_refused() {
        let (name, mut options) = DiskOptions::split("a?x=1&on=yes&block-size=4k&y=").unwrap();
        assert_eq!((name, options.names().count()), ("a", 4));
        assert_eq!((options.take("x"), options.take("x")), (Some("1"), None));
        assert_eq!(options.take_switch("on"), Ok(Some(true)));
        assert_eq!(options.take_block_size(), Ok(Some(4096)));
        assert_eq!(options.check("k", &["y", "z"]), Ok(()));
        let refused = options.check("k", &["x", "z"]).unwrap_err();
        assert_eq!(refused, "a disk `k:` has no option `y`; its options are `x`, `z`");
        assert_eq!(DiskOptions::split("a").unwrap().1.names().count(), 0);
        for (spec, why) in [("a?", "written"), ("a?x", "written"), ("a?x=1&x=2", "twice")] {
            assert!(DiskOptions::split(spec).unwrap_err().contains(why), "{spec}");
        }
        for spec in ["a?on=1", "a?block-size=513"] {
            let (_, mut options) = DiskOptions::split(spec).unwrap();
            assert!(options.take_switch("on").is_err() || options.take_block_size().is_err());
        }
    }
}
