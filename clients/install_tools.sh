#!/bin/sh
# Makes sure that a language's tools are there:  clients/install_tools.sh typescript|go
#
# As root on Debian and its kin it installs what is missing; elsewhere it says what to install.
set -eu

language=$1
case $language in
typescript) packages="nodejs npm" ;;
go) packages="golang-go protoc-gen-go-1-5 golang-github-golang-protobuf-1-5-dev protoc-gen-go-grpc golang-google-grpc-dev" ;;
*)
    echo "install_tools: no language $language; there are typescript and go" >&2
    exit 2
    ;;
esac

# What is still missing, for people; empty when all is there.
missing() {
    case $language in
    typescript)
        command -v npm >/dev/null || { echo "npm"; return; }
        node -e 'process.exit(process.versions.node.split(".")[0] >= 20 ? 0 : 1)' ||
            echo "Node.js 20 or newer (here is $(node --version))"
        ;;
    go)
        for tool in go protoc-gen-go protoc-gen-go-grpc; do
            command -v $tool >/dev/null || { echo "$tool"; return; }
        done
        [ -d /usr/share/gocode/src/google.golang.org/grpc ] || echo "Debian's golang-google-grpc-dev"
        ;;
    esac
}

if [ -n "$(missing)" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "install_tools: installing $packages"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
fi
if [ -n "$(missing)" ]; then
    echo "install_tools: $language needs $(missing). Install it (Debian: apt-get install $packages)," >&2
    echo "install_tools: or leave the language out with SKIP_LANGUAGES=$language" >&2
    exit 1
fi
