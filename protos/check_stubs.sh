#!/bin/sh
# Fails unless the committed stubs of the named languages are what protos/generate.sh writes now.
set -eu

cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

# The version of the Go plugin that wrote the stubs below a folder; Debian's cannot be pinned, so it may differ.
go_plugin() {
    sed -n 's/^.*protoc-gen-go \(v.*\)$/\1/p' "$1/deltaplane/v1/generation.pb.go"
}

for language in "$@"; do
    committed=clients/$language
    protos/generate.sh "$fresh" "$language"
    if [ "$language" = go ] && [ "$(go_plugin "$fresh/go")" != "$(go_plugin "$committed")" ]; then
        echo "check_stubs: protoc-gen-go $(go_plugin "$committed") wrote the committed stubs, here is" \
            "$(go_plugin "$fresh/go"); install the former, or leave Go out with SKIP_LANGUAGES=go" >&2
        exit 1
    fi
    if ! diff -r --exclude=__init__.py --exclude=__pycache__ "$fresh/$language/deltaplane/v1" "$committed/deltaplane/v1"; then
        echo "check_stubs: $committed is not what the protos say; run 'make stubs' and commit what it writes" >&2
        exit 1
    fi
    echo "check_stubs: $committed is fresh"
done
