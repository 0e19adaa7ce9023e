//! `pointsman completions` and `pointsman man`: shell completions and manual pages.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::output::print_bytes;
use super::{Cli, Failure};

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
    clap_complete::generate(args.shell, &mut Cli::command(), "pointsman", &mut text);
    Ok(print_bytes(&text)?)
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
