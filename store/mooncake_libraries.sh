#!/bin/sh
# mooncake_libraries.sh DIRECTORY: libibverbs1 for Mooncake, from Debian. Root installs it; others get it laid into DIRECTORY, where
# store/mooncake_client.py looks.
set -eu
if ! command -v apt-get >/dev/null; then
    echo "Mooncake needs libibverbs.so.1 (Debian: libibverbs1, Fedora: libibverbs): install it, then run \`make mooncake\` again" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1
    exit
fi
mkdir -p "$1"
directory=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200
for package in *.deb; do dpkg -x "$package" root; done
find root -name 'lib*.so.*' -exec cp -L {} "$directory" \;
