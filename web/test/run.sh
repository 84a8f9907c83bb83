#!/bin/sh
# Tests the page in headless Chromium against the example host: `web/test/run.sh [--shots FOLDER]`.
# What it needs from npm goes into target/page-test; Chromium and Node.js must be there.
set -eu

cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
modules=$target/page-test

if [ "${1:-}" = --shots ]; then
    PAGE_SHOTS=$(realpath -m "$2")
    mkdir -p "$PAGE_SHOTS"
    export PAGE_SHOTS
fi
mkdir -p "$modules"
# The copy, made last, says that all is there.
cmp -s web/test/package-lock.json "$modules/installed" || {
    cp web/test/package.json web/test/package-lock.json "$modules"
    npm ci --prefix "$modules" --no-audit --no-fund --loglevel=error >&2
    cp web/test/package-lock.json "$modules/installed"
}
# As `./dev` builds it: the Python package would change the features of its dependencies.
cargo build -q --release --workspace --exclude plimsoll-python --example board
PAGE_MODULES=$(realpath "$modules") PAGE_BOARD=$(realpath "$target/release/examples/board") node --test web/test/page.test.mjs web/test/ticks.test.mjs
