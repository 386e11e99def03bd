#!/usr/bin/env bash
# Builds the book into build/book: build/book/index.html. Uses mdbook from PATH, else installs it into build/mdbook.
set -euo pipefail
cd "$(dirname "$0")/.."

MDBOOK_VERSION=0.5.4
# What pages of the book link to, besides docs/ and examples/.
FILES="README.md ARCHITECTURE.md SECURITY.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE harness/records/README.md harness/candle/README.md harness/cli/README.md"

mdbook=$(command -v mdbook || true)
if [ -z "$mdbook" ]; then
    mdbook=$PWD/build/mdbook/bin/mdbook
    if [ ! -x "$mdbook" ]; then
        cargo install mdbook --version "$MDBOOK_VERSION" --locked --root build/mdbook
    fi
fi

# Pages keep their paths, so that links between them, and to files, work in the book as they do in the repository.
source=build/book-source
rm -rf "$source" build/book
mkdir -p "$source"
cp -R --parents docs examples $FILES "$source"
mv "$source/docs/book.toml" "$source/docs/book.css" "$source"
# The summary is at the root: its links begin there.
sed -e 's#](#](docs/#' -e 's#](docs/\.\./#](#' "$source/docs/SUMMARY.md" > "$source/SUMMARY.md"
rm "$source/docs/SUMMARY.md"

"$mdbook" build "$source" --dest-dir "$PWD/build/book"
# mdBook names the page of a README.md index.html, and does not change links to it.
find build/book -name index.html -exec sh -c 'cp "$1" "$(dirname "$1")/README.html"' sh {} \;
echo "wrote build/book/index.html"
