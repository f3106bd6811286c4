#!/usr/bin/env bash
# Makes the environment in which the real MoRI moves bytes without AMD's hardware, and prints its interpreter. Safe to run
# again.
#
# MoRI's wheels are for CPython 3.10. The shared libraries that they miss have a stand-in, plugins/mori/standin, which is
# built here: a network card that moves host memory between the processes of one machine, a rocm-smi that counts one GPU,
# and functions that do nothing. Root on Debian: installs what the build needs.
# usage: tools/mori-env.sh [VERSION]      (in build/mori, or build/mori-VERSION for another release than the newest)
# PYTHON3_10 names the interpreter, if it is neither on PATH nor among pyenv's.
# Exit status 3: the environment cannot be made on this machine; the reason is printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }
fits() { "$1" -c 'import sys; sys.exit(sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 10))' 2>/dev/null; }

wanted=plugins/mori/tests/requirements.txt
newest=$(sed -n 's/^amd-mori==//p' "$wanted")
version=${1:-$newest}
folder=build/mori
if [ "$version" != "$newest" ]; then folder=build/mori-$version; fi

python=
for candidate in "${PYTHON3_10:-python3.10}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.10.*/bin/python3.10; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then python=$candidate && break; fi
done
if [ -z "$python" ]; then
    say "The real MoRI needs CPython 3.10, for which alone it has wheels, and none was found on PATH or among pyenv's."
    say "hint: pyenv install 3.10, or name one: make conform-mori PYTHON3_10=/path/to/python3.10"
    exit 3
fi

packages=(gcc libc6-dev libibverbs-dev libnuma1 libdrm2 libdrm-amdgpu1)
signs=(/usr/bin/gcc /usr/include/stdio.h /usr/include/infiniband/verbs.h libnuma.so.1 libdrm.so.2 libdrm_amdgpu.so.1)
missing() { # the packages whose file, or whose shared library, is not here
    local i
    for i in "${!packages[@]}"; do
        if [ -e "${signs[i]}" ] || "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${signs[i]}" 2>/dev/null; then continue; fi
        printf '%s ' "${packages[i]}"
    done
}
read -r -a absent <<<"$(missing)" || true
if [ "${#absent[@]}" != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Installing ${absent[*]} (for MoRI) …"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${absent[@]}"; } >/dev/null </dev/null || true
    read -r -a absent <<<"$(missing)" || true
fi
if [ "${#absent[@]}" != 0 ]; then
    say "The real MoRI cannot be run here: these Debian packages are missing: ${absent[*]}"
    say "hint: sudo apt-get update && sudo apt-get install -y ${absent[*]}"
    exit 3
fi

PYTHON=$python tools/make-venv.sh "$folder"
install() { "$folder/bin/python" -m pip install --no-input --disable-pip-version-check --quiet --constraint constraints.txt "$@" >&2; }
stamp=$folder/.stamp
if [ ! -e "$stamp" ] || [ -n "$(find tools/mori-env.sh "$wanted" plugins/mori/standin plugins/mori/pyproject.toml plugins/conformance/pyproject.toml core/pyproject.toml constraints.txt -newer "$stamp")" ]; then
    install hatchling editables
    install --no-build-isolation -e core -e plugins/conformance -e plugins/mori pytest-timeout pytest-xdist
    install --no-deps "amd-mori==$version"
    plugins/mori/standin/build.sh "$folder/bin/python"
    # MoRI imports torch for an annotation. The real one takes gigabytes.
    ln -sf "$PWD/plugins/mori/standin/torch.py" "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.py"
    touch "$stamp"
fi
echo "$folder/bin/python"
