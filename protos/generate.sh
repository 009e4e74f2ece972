#!/bin/sh
# Writes the client stubs of the named languages:  protos/generate.sh FOLDER LANGUAGE...
#
# FOLDER/python, FOLDER/typescript and FOLDER/go take one language each. One protoc writes them all, that of
# the pinned grpcio-tools, so that stubs do not depend on the machine they were made on.
set -eu

cd "$(dirname "$0")/.."
folder=$1
shift

protoc() {
    python -m grpc_tools.protoc --proto_path=protos "$@" protos/deltaplane/v1/*.proto
}

for language in "$@"; do
    out=$folder/$language
    mkdir -p "$out"
    case $language in
    python)
        protoc --python_out="$out" --grpc_python_out="$out" \
            --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out"
        ;;
    typescript)
        protoc --plugin=protoc-gen-es=clients/typescript/node_modules/.bin/protoc-gen-es \
            --es_out="$out" --es_opt=target=ts,import_extension=js
        ;;
    go)
        protoc --go_out="$out" --go_opt=paths=source_relative \
            --go-grpc_out="$out" --go-grpc_opt=paths=source_relative
        ;;
    *)
        echo "protos/generate.sh: no language $language; there are python, typescript and go" >&2
        exit 2
        ;;
    esac
done
