//! The oldest Rust that builds this: no dependency needs a newer one than `rust-version` promises. Our own code is
//! checked by clippy's `incompatible_msrv`, and by `tests/run` with that very toolchain where it is installed.

use std::process::Command;

use serde_json::Value;

#[test]
fn no_dependency_needs_a_newer_rust() {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--locked", "--offline", "--format-version", "1", "--filter-platform", &platform]);
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "{} packages", packages.len());
    let ours = version(env!("CARGO_PKG_RUST_VERSION"));
    assert_eq!(newer(packages, &ours), Vec::<String>::new());
    assert_ne!(newer(packages, &version("1.60")), Vec::<String>::new(), "the comparison can fail");
}

/// Packages that need a newer Rust than this.
fn newer(packages: &[Value], than: &[u64]) -> Vec<String> {
    let needs = |package: &Value| {
        let needed = package["rust_version"].as_str()?;
        (version(needed) > than.to_vec()).then(|| format!("{} needs {needed}", package["name"]))
    };
    packages.iter().filter_map(needs).collect()
}

/// 1.90 and 1.90.0 are the same.
fn version(text: &str) -> Vec<u64> {
    text.split('.').map(|part| part.parse().unwrap()).chain(std::iter::repeat(0)).take(3).collect()
}
