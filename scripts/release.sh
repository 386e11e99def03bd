#!/usr/bin/env bash
# Prepares a release of the published crates (docs/releasing.md): checks versions and changelog, packages the crates,
# compiles each one from its package, and prints the commands that tag and upload. Uploads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

# In the order of their dependencies.
mapfile -t CRATES <scripts/published-crates.txt

die() {
    echo "release: $*" >&2
    exit 1
}

[ -z "$(git status --porcelain)" ] || die "the working tree has changes: commit them, because packages contain committed files only."

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
grep -q "^## $version\$" CHANGELOG.md || die "CHANGELOG.md has no section '## $version'."
for crate in "${CRATES[@]}"; do
    grep -q "^$crate = {.*version = \"=$version\"" Cargo.toml ||
        die "workspace.dependencies in Cargo.toml requires another version of $crate than =$version."
done

packages=("${CRATES[@]/#/--package=}")
cargo package --locked "${packages[@]}"

echo
grep -q '^repository = ' Cargo.toml || echo "release: workspace.package.repository is not set: set it before the upload (docs/releasing.md)."
echo "release: the packages of $version are in target/package. To publish them:"
echo
echo "    git tag v$version && git push origin v$version"
for crate in "${CRATES[@]}"; do
    echo "    cargo publish --locked --package $crate"
done
