#!/usr/bin/env bash
# Makes the environment in which an engine is tested as a worker of NVIDIA Dynamo, and prints its interpreter. Safe to run
# again.
#
# It sees the packages of the engine's own environment, and has Dynamo beside them. So the other tests of the engine do not
# see Dynamo.
# usage: tools/dynamo-env.sh sglang|vllm      (in build/dynamo-ENGINE; see tools/engine-env.sh for PYTHON and exit status 3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }

engine=${1:-}
case $engine in # the releases that Dynamo asks for
    sglang) version=0.5.21 ;;
    vllm) version=0.31.0 ;;
    *) say "usage: tools/dynamo-env.sh sglang|vllm" && exit 2 ;;
esac
below=$(tools/engine-env.sh "$engine" "$version")
overlay=build/dynamo-$engine
wanted=adapters/dynamo/tests/requirements.txt

PYTHON=$below tools/make-venv.sh "$overlay"
site=$("$overlay/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stamp=$overlay/.stamp
if [ ! -e "$stamp" ] || [ -n "$(find tools/dynamo-env.sh "$wanted" -newer "$stamp")" ]; then
    # Without dependencies: Dynamo's name what is built for CUDA, and the engine's environment has what is needed here.
    if ! "$overlay/bin/python" -m pip install --no-input --disable-pip-version-check --quiet --no-deps --requirement "$wanted" >&2; then
        say "error: NVIDIA Dynamo cannot be installed into $overlay, so no worker of it can be tested."
        say "hint: pip says above which package it did not get: $(grep -v '^#' "$wanted" | tr '\n' ' ')"
        say "hint: PIP_FIND_LINKS can name a folder with their wheels."
        exit 1
    fi
    packages=$("$below" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf "import site; site.addsitedir('%s')\n" "$packages" >"$site/statelink_engine.pth"
    # Dynamo imports torchvision with either engine, and no build of it loads beside a torch for the CPU.
    ln -sf "$PWD/adapters/testing/absent_packages.py" "$site/absent_packages.py"
    echo "import absent_packages" >"$site/absent_packages.pth"
    touch "$stamp"
fi
echo "$overlay/bin/python"
