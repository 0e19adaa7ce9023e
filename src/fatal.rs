//! Panics. A panic on any thread exits the process with an error that names the thread: a process that has lost a thread
//! would look alive and do half of its work. Everything acknowledged before is durable, so an abrupt exit loses nothing.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

thread_local! {
    /// Nesting depth of [`contain`] on this thread.
    static CONTAINED: Cell<u32> = const { Cell::new(0) };
}

/// Makes every panic from here on fatal, except within [`contain`].
pub fn make_panics_fatal() {
    std::panic::set_hook(Box::new(|info| {
        if CONTAINED.get() > 0 {
            tracing::debug!(problem = describe(info), "panic caught");
            return;
        }
        let current = std::thread::current();
        let thread = current.name().unwrap_or("unnamed");
        tracing::error!(thread, "thread {thread} panicked, exiting: {}", describe(info));
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            eprintln!("{backtrace}");
        }
        std::process::exit(1);
    }));
}

/// Runs a closure and returns a panic as an error, for libraries that panic on damaged files.
pub fn contain<T>(run: impl FnOnce() -> T) -> std::thread::Result<T> {
    CONTAINED.set(CONTAINED.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(run));
    CONTAINED.set(CONTAINED.get() - 1);
    result
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let message =
        payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(|m| m.as_str()));
    let message = message.unwrap_or("no message");
    info.location().map_or_else(|| message.to_owned(), |place| format!("{message} ({place})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contained_panics_are_errors() {
        assert_eq!(contain(|| 5).ok(), Some(5));
        let nested = contain(|| {
            let inner = contain(|| -> u32 { panic!("inner") });
            inner.expect("outer")
        });
        assert!(nested.is_err());
        assert_eq!(CONTAINED.get(), 0, "it counts back however the call ends");
    }
}
