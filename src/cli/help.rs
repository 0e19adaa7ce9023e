//! `pointsman completions` and `pointsman man`: help for shells and for `man`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::output::print_bytes;
use super::{Cli, Failure};

/// Print completions for a shell
///
/// For example, for bash: pointsman completions bash > /etc/bash_completion.d/pointsman; for zsh, into a directory of
/// $fpath as _pointsman; for fish: pointsman completions fish > ~/.config/fish/completions/pointsman.fish.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Print the manual page, or write those of all commands
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Directory for the pages of all commands, e.g. /usr/local/share/man/man1
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Prints completions.
pub fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pointsman", &mut text);
    Ok(print_bytes(&text)?)
}

/// Prints a page, or writes all.
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
    page.render(&mut text).context("cannot make the manual page")?;
    Ok(text)
}
