#!/usr/bin/env bash
# Fetches vLLM's own tests of KV connectors, once, into the user's cache, and prints their folder. Safe to run again.
#
# The wheel of vLLM has no tests; its source distribution has.
# usage: tools/vllm-tests.sh PYTHON      (the interpreter that tools/engine-env.sh prints)
set -euo pipefail

python=$1
version=$("$python" -c 'from importlib.metadata import version; print(version("vllm").partition("+")[0])')
folder=${XDG_CACHE_HOME:-$HOME/.cache}/statelink/vllm-$version-tests
pip() { "$python" -m pip --no-input --disable-pip-version-check --quiet "$@" >&2; }

if [ ! -e "$folder/.complete" ]; then
    printf 'Fetching the tests of vLLM %s: 47 MB, once …\n' "$version" >&2
    work=$(mktemp --directory)
    trap 'rm -rf "$work"' EXIT
    # Pip asks a source distribution for its version before it keeps it. So what vLLM's setup.py imports has to be here.
    pip install --target "$work/tools" cmake jinja2 ninja packaging setuptools_rust setuptools_scm 'setuptools<81' wheel
    PYTHONPATH=$work/tools VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version \
        pip download --no-deps --no-binary vllm --no-build-isolation --dest "$work" "vllm==$version"
    mkdir -p "$folder"
    tar --extract --gzip --file "$work/vllm-$version.tar.gz" --directory "$folder" --strip-components 1 \
        "vllm-$version/tests/v1/kv_connector/unit"
    touch "$folder/.complete"
fi
echo "$folder"
