#!/bin/sh
# Fails if the protos break clients of the last release or, before the first one, of the main branch.
set -eu

cd "$(dirname "$0")/.."
base=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null ||
    git rev-parse --verify --quiet origin/main ||
    git rev-parse --verify --quiet main ||
    git rev-parse --verify --quiet HEAD || true)
if [ -z "$base" ] || ! git cat-file -e "$base:protos/buf.yaml" 2>/dev/null; then
    echo "check_breaking: no earlier protos to compare with"
    exit 0
fi

earlier=$(mktemp -d)
trap 'rm -rf "$earlier"' EXIT
git archive "$base" protos | tar -x -C "$earlier"
buf breaking protos --against "$earlier/protos"
echo "check_breaking: compatible with $base"
