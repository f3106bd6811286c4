#!/usr/bin/env bash
# Makes the environment in which the adapter for an engine is tested, and prints its interpreter. Safe to run again.
#
# An engine and what it needs take almost 4 GB, so they are installed once, into the user's cache. What is developed here
# is installed, editable, into a small environment in build/, which sees the packages of the large one.
# usage: tools/engine-env.sh sglang|vllm [VERSION [FOLDER]]        (PYTHON picks the interpreter: 3.11 or newer)
# Without VERSION, the engine's newest release, in build/ENGINE; another one is in build/ENGINE-VERSION. What an older
# release needs otherwise is in the adapter's tests/releases/VERSION.txt. It has a folder of its own in the cache, before
# the large environment, so that releases take little room beside each other.
# STATELINK_SGLANG_BASE and STATELINK_VLLM_BASE name the large environment, if it is to be elsewhere or is there already.
# Exit status 3: no such interpreter is here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
install() { "$1/bin/python" -m pip install --no-input --disable-pip-version-check --quiet "${@:2}" >&2; }

engine=${1:-}
case $engine in
    sglang) given=${STATELINK_SGLANG_BASE:-} stand_in=adapters/testing/absent_packages ;;
    vllm) given=${STATELINK_VLLM_BASE:-} stand_in=adapters/vllm/tests/support/cpu_kernels ;;
    *) say "usage: tools/engine-env.sh sglang|vllm [VERSION [FOLDER]]" && exit 2 ;;
esac
wanted=adapters/$engine/tests/requirements.txt
version=${2:-} release=
if [ -n "$version" ] && ! grep -qx "$engine==$version" "$wanted"; then
    release=adapters/$engine/tests/releases/$version.txt
    if [ ! -e "$release" ]; then
        say "$engine $version is not among the releases that the adapter is tested with."
        say "hint: one of $(cd "adapters/$engine/tests/releases" && echo *.txt | sed 's/\.txt//g') $(sed -n "s/^$engine==//p" "$wanted")"
        exit 2
    fi
fi
overlay=${3:-build/$engine${release:+-$version}}

python=
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && recent "$candidate"; then python=$candidate && break; fi
done
if [ -z "$python" ]; then
    say "$engine is tested with Python 3.11 or newer, and none was found."
    say "hint: name one: make PYTHON=/path/to/python3 engine-$engine"
    exit 3
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/statelink
key() { # NAME LIST: a name for what is installed from a list, by its lines without comments
    "$python" -c 'import hashlib, sys
wanted = b"".join(line for line in open(sys.argv[2], "rb") if not line.startswith(b"#"))
print("%s-%d.%d-%s" % (sys.argv[1], *sys.version_info[:2], hashlib.sha256(wanted).hexdigest()[:12]))' "$1" "$2"
}
base=${given:-$cache/$(key "$engine" "$wanted")}

if [ ! -e "$base/.complete" ] && [ -z "$given" ]; then
    say "Installing $engine into $base: almost 4 GB, once …"
    mkdir -p "$(dirname "$base")"
    exec 9>"$base.lock"
    flock 9 # of two that start at once, one installs and the other waits
    if [ ! -e "$base/.complete" ]; then
        PYTHON=$python tools/make-venv.sh "$base"
        # What is imported is compiled then; most of it never is.
        install "$base" --no-compile "$(grep '^torch==' "$wanted")"
        install "$base" --no-compile --no-deps --requirement "$wanted"
        touch "$base/.complete"
    fi
    exec 9>&-
fi

above=
if [ -n "$release" ]; then
    above=$cache/$(key "$engine-$version" "$release")
    mkdir -p "$cache"
    exec 9>"$above.lock"
    flock 9
    if [ ! -e "$above/.complete" ]; then
        say "Installing $engine $version into $above …"
        rm -rf "$above"
        install "$base" --no-compile --no-deps --requirement "$release" --target "$above"
        touch "$above/.complete"
    fi
    exec 9>&-
fi

PYTHON=$python tools/make-venv.sh "$overlay"
site=$("$overlay/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stamp=$overlay/.stamp
if [ ! -e "$stamp" ] || [ -n "$(find tools/engine-env.sh "$wanted" $release core/pyproject.toml plugins/*/pyproject.toml adapters/*/pyproject.toml -newer "$stamp")" ]; then
    below=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for folder in $above "$below"; do printf "import site; site.addsitedir('%s')\n" "$folder"; done >"$site/statelink_base.pth"
    install "$overlay" hatchling editables
    install "$overlay" --no-deps --no-build-isolation -e core -e plugins/nixl -e plugins/mooncake -e "adapters/$engine"
    # Every process of a server has to have the stand-ins, also those that a server spawns.
    name=$(basename "$stand_in")
    ln -sf "$PWD/$stand_in.py" "$site/$name.py"
    echo "import $name" >"$site/$name.pth"
    touch "$stamp"
fi
echo "$overlay/bin/python"
