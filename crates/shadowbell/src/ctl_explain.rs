//! `shadowbell ctl explain` and `shadowbell explain`: why a guest is slow or hangs.

use crate::ctl_paths::controller_path;
use anyhow::anyhow;
use shadowbell_config::socket_path;
use shadowbell_control_api::api::Controller;
use shadowbell_control_api::client::Client;
use shadowbell_control_api::discovery;
use shadowbell_control_api::explain::Explanation;
use shadowbell_process::exit::bad_input;
use shadowbell_process::output::show;
use std::io::{self, IsTerminal};

/// Columns of the sentences on a terminal.
const WIDTH: usize = 79;

/// Server to ask about the controller `id`. If several servers run and none is named, it is the one
/// that has this controller.
///
/// # Errors
/// No server is found, or several are.
pub(crate) fn server_of(server: Option<&str>, id: Option<&str>) -> anyhow::Result<Client> {
    if let (None, Some(id), Some(directory)) = (server, id, socket_path::directory()) {
        let running = discovery::running(&directory).into_iter();
        let mut clients = running.map(|(_, socket)| Client::new(&socket));
        let has_it = |client: &Client| client.get::<Controller>(&controller_path(id)).is_ok();
        if let Some(client) = clients.find(has_it) {
            return Ok(client);
        }
    }
    discovery::server(server)
}

/// Prints the explanation of a controller; without `id`, of the only one.
///
/// # Errors
/// There is no such controller, or none was named and there are several.
pub(crate) fn explain(client: &Client, id: Option<&str>, json: bool) -> anyhow::Result<()> {
    let id = match id {
        Some(id) => id.to_owned(),
        None => only(&client.get::<Vec<Controller>>("/v1/controllers")?)?,
    };
    let explanation: Explanation = client.get(&format!("{}/explain", controller_path(&id)))?;
    let width = if io::stdout().is_terminal() { WIDTH } else { usize::MAX };
    show(&explanation, json, |out, explanation| {
        explanation.sentences.iter().try_for_each(|one| writeln!(out, "{}", wrapped(one, width)))
    })
}

fn only(all: &[Controller]) -> anyhow::Result<String> {
    let ids: Vec<_> = all.iter().map(|controller| &controller.id[..]).collect();
    match ids[..] {
        [id] => Ok(id.to_owned()),
        _ => Err(bad_input(anyhow!(
            "name one of the controllers: {}",
            if ids.is_empty() { "there is none".to_owned() } else { ids.join(", ") }
        ))),
    }
}

/// Breaks a text between words into lines of at most `width` columns.
fn wrapped(text: &str, width: usize) -> String {
    let (mut lines, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        let len = word.chars().count();
        if column != 0 && column + 1 + len > width {
            lines.push('\n');
            column = 0;
        } else if column != 0 {
            lines.push(' ');
            column += 1;
        }
        lines += word;
        column += len;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_wrapped_between_words() {
        assert_eq!(wrapped("one two three", 7), "one two\nthree");
        assert_eq!(wrapped("eleven-letters a", 7), "eleven-letters\na");
        assert_eq!(wrapped("one two three", usize::MAX), "one two three");
    }
}
