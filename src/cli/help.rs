//! `pointsman completions` and `pointsman man`: shell completions and manual pages.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::output::print_bytes;
use super::{Cli, Failure, settings};

/// Print shell completions
#[derive(Debug, clap::Args)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
pub struct CompletionsArgs {
    /// Shell to complete for
    shell: Shell,
}

const COMPLETIONS_EXAMPLES: &str = "Examples:
  pointsman completions bash > /etc/bash_completion.d/pointsman
  pointsman completions zsh > \"${fpath[1]}/_pointsman\"
  pointsman completions fish > ~/.config/fish/completions/pointsman.fish";

/// Print the manual page, or write the pages of all commands
#[derive(Debug, clap::Args)]
#[command(after_help = MAN_EXAMPLES)]
pub struct ManArgs {
    /// Write the pages of all commands to this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

const MAN_EXAMPLES: &str = "Examples:
  pointsman man | man -l -
  pointsman man --out /usr/local/share/man/man1";

/// Prints completions.
pub fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut text = Vec::new();
    let mut command = Cli::command().mut_arg("set", |arg| arg.value_parser([KEYS]));
    clap_complete::generate(args.shell, &mut command, "pointsman", &mut text);
    let text = String::from_utf8(text).context("the completions are not valid UTF-8")?;
    Ok(print_bytes(with_keys(args.shell, &text).as_bytes())?)
}

/// Stands for the keys of --set in generated completions.
const KEYS: &str = "POINTSMAN_KEYS";

/// Completions that call a function for the keys of --set. clap_complete would repeat the list for every command, and end
/// each key with a space.
fn with_keys(shell: Shell, text: &str) -> String {
    let keys: Vec<String> = settings::known_keys().iter().map(|key| format!("{key}=")).collect();
    let keys = keys.join(" ");
    match shell {
        Shell::Bash => {
            let function = format!(
                "_pointsman_keys() {{
    COMPREPLY=($(compgen -W \"{keys}\" -- \"${{cur}}\"))
    if [[ \"${{BASH_VERSINFO[0]}}\" -ge 4 ]]; then
        compopt -o nospace 2>/dev/null
    fi
}}

"
            );
            function
                + &text.replace(&format!("COMPREPLY=($(compgen -W \"{KEYS}\" -- \"${{cur}}\"))"), "_pointsman_keys")
        }
        Shell::Zsh => {
            let function = format!("_pointsman_keys() {{\n    compadd -S '' -- {keys}\n}}\n\n_pointsman() {{");
            text.replace(&format!("({KEYS})"), "_pointsman_keys").replacen("_pointsman() {", &function, 1)
        }
        Shell::Fish => {
            let function = format!("function __pointsman_keys\n    string split ' ' '{keys}'\nend\n\n");
            function + &text.replace(&format!("\"{KEYS}\\t''\""), "\"(__pointsman_keys)\"")
        }
        _ => text.to_owned(),
    }
}

/// Prints the main page, or writes all pages.
pub fn man(args: &ManArgs) -> Result<(), Failure> {
    let mut command = Cli::command();
    command.build();
    let Some(dir) = &args.out else { return Ok(print_bytes(&page(command, "pointsman")?)?) };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(write_pages(dir, &command, "pointsman")?)
}

fn write_pages(dir: &Path, command: &Command, name: &str) -> anyhow::Result<()> {
    let path = dir.join(format!("{name}.1"));
    std::fs::write(&path, page(command.clone(), name)?).with_context(|| format!("cannot write {}", path.display()))?;
    let own = command.get_subcommands().filter(|inner| inner.get_name() != "help");
    own.into_iter().try_for_each(|inner| write_pages(dir, inner, &format!("{name}-{}", inner.get_name())))
}

fn page(command: Command, name: &str) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let source = concat!("pointsman ", env!("CARGO_PKG_VERSION"));
    let page = Man::new(command).title(name.to_uppercase()).source(source);
    page.render(&mut text).context("cannot render the manual page")?;
    Ok(text)
}
