#!/usr/bin/env bash
# Does what a third party does who writes a backend: it makes a virtual environment, installs built packages with pip, and
# has no part of this checkout on the path. It runs the kit on the examples, and on what `new-backend` makes.
# usage: tools/third-party.sh [FOLDER]      (PYTHON picks the interpreter; the folder is made anew)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
folder=${1:-build/third-party}
unset PYTHONPATH
# The caller's choice of backends and keys must not count.
while IFS='=' read -r name _; do unset "$name"; done < <(env | grep '^STATELINK_' || true)

rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
tools/make-venv.sh "$folder/venv"
python=$folder/venv/bin/python
install=("$python" -m pip install --no-input --disable-pip-version-check --quiet --no-build-isolation)
install+=(--constraint "$root/constraints.txt")

"${install[@]}" hatchling
"${install[@]}" "$root/core" "$root/plugins/conformance"
"$folder/venv/bin/statelink" new-backend first --directory "$folder/first"
"${install[@]}" "$root/examples/backend-shm[test]" "$root/examples/backend-procmem[test]" "$folder/first[test]"

cd "$folder"
"$python" - "$root" <<'CHECK'
import json
import subprocess
import sys

import statelink
import statelink_first
import statelink_procmem
import statelink_shm

for module in (statelink, statelink_first, statelink_procmem, statelink_shm):
    assert module.__file__.startswith(sys.prefix), f"{module.__file__} is not the installed one"
listed = subprocess.run([f"{sys.prefix}/bin/statelink", "backends", "--json"], check=True, capture_output=True)
states = {row["name"]: row["state"] for row in json.loads(listed.stdout)}
assert states == dict.fromkeys(("first", "procmem", "shm", "tcp"), "ready"), states
CHECK
"$python" -m pytest -p no:cacheprovider "$root/examples/backend-shm"
"$python" -m pytest -p no:cacheprovider "$root/examples/backend-procmem"
"$python" -m pytest -p no:cacheprovider "$folder/first"
