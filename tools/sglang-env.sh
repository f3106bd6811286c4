#!/usr/bin/env bash
# Makes the environment in which the adapter for SGLang is tested, and prints its interpreter. Safe to run again.
#
# SGLang and what it needs take almost 4 GB, so they are installed once, into the user's cache. What is developed here
# is installed, editable, into a small environment in build/, which sees the packages of the large one.
# usage: tools/sglang-env.sh [FOLDER]      (default build/sglang; PYTHON picks the interpreter: 3.11 or newer)
# STATELINK_SGLANG_BASE names the large environment, if it is to be elsewhere or is there already.
# Exit status 3: no such interpreter is here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

overlay=${1:-build/sglang}
wanted=adapters/sglang/tests/requirements.txt

say() { printf '%s\n' "$*" >&2; }
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
install() { "$1/bin/python" -m pip install --no-input --disable-pip-version-check --quiet "${@:2}" >&2; }

python=
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && recent "$candidate"; then python=$candidate && break; fi
done
if [ -z "$python" ]; then
    say "SGLang needs Python 3.11 or newer, and none was found."
    say "hint: name one: make PYTHON=/path/to/python3 engine-sglang"
    exit 3
fi

key=$("$python" -c 'import hashlib, sys; text = open(sys.argv[1], "rb").read()
print("sglang-%d.%d-%s" % (*sys.version_info[:2], hashlib.sha256(text).hexdigest()[:12]))' "$wanted")
base=${STATELINK_SGLANG_BASE:-${XDG_CACHE_HOME:-$HOME/.cache}/statelink/$key}

if [ ! -e "$base/.complete" ] && [ -z "${STATELINK_SGLANG_BASE:-}" ]; then
    say "Installing SGLang into $base: almost 4 GB, once …"
    mkdir -p "$(dirname "$base")"
    exec 9>"$base.lock"
    flock 9 # of two that start at once, one installs and the other waits
    if [ ! -e "$base/.complete" ]; then
        PYTHON=$python tools/make-venv.sh "$base"
        install "$base" "$(grep '^torch==' "$wanted")"
        install "$base" --no-deps --requirement "$wanted"
        touch "$base/.complete"
    fi
    exec 9>&-
fi

PYTHON=$python tools/make-venv.sh "$overlay"
site=$("$overlay/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stamp=$overlay/.stamp
if [ ! -e "$stamp" ] || [ -n "$(find core/pyproject.toml plugins/*/pyproject.toml adapters/*/pyproject.toml -newer "$stamp")" ]; then
    below=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf "import site; site.addsitedir('%s')\n" "$below" >"$site/statelink_base.pth"
    install "$overlay" hatchling editables
    install "$overlay" --no-deps --no-build-isolation -e core -e plugins/nixl -e plugins/mooncake -e adapters/sglang
    # Every process of a server has to have the stand-ins, also those that a server spawns.
    ln -sf "$PWD/adapters/sglang/tests/support/absent_packages.py" "$site/absent_packages.py"
    echo 'import absent_packages' >"$site/absent_packages.pth"
    touch "$stamp"
fi
echo "$overlay/bin/python"
