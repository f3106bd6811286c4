#!/usr/bin/env bash
# Builds the stand-in for the shared libraries that MoRI's wheel misses, and puts it under their names into the package's
# own folder, where the wheel's libraries look first.
# usage: plugins/mori/standin/build.sh PYTHON      (the interpreter of an environment in which amd-mori is installed)
set -euo pipefail

python=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
package=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("mori").submodule_search_locations[0])')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

find "$package" -maxdepth 1 -type l -delete
"$python" "$here/symbols.py" "$package" "$work"
gcc -O2 -Wall -Werror -shared -fPIC -pthread -Wl,--version-script="$work/stubs.map" -o "$package/standin" \
    "$work/stubs.c" "$here"/{faults,machine,memory,pair,verbs}.c -I"$here"
while read -r name; do ln -s standin "$package/$name"; done <"$work/names"
