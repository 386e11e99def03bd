#!/usr/bin/env bash
# Installs Chromium, in which a test opens the page of `tilewright explain --html`. An installed one is used and left unchanged.
#
# Without it, the script says which test is skipped and exits with 0, or with 1 if TILEWRIGHT_REQUIRE_BROWSER is 1.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

for browser in ${TILEWRIGHT_BROWSER:+"$TILEWRIGHT_BROWSER"} chromium chromium-browser google-chrome; do
    ! "$browser" --version >/dev/null 2>&1 || exit 0
done
if command -v apt-get >/dev/null && can_become_root && apt_update && apt install --no-install-recommends chromium; then
    exit 0
fi
echo "browser: Chromium could not be installed: the test of explain's page in a browser is skipped; all other tests run." \
    "Install it (Debian: apt-get install chromium), or set TILEWRIGHT_BROWSER to the path of one." >&2
[ "${TILEWRIGHT_REQUIRE_BROWSER:-0}" != 1 ]
