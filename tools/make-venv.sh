#!/usr/bin/env bash
# Makes a virtual environment with pip in it, with whatever this machine offers. Safe to run again.
# usage: tools/make-venv.sh FOLDER      (PYTHON picks the interpreter; default python3)
set -euo pipefail

venv=$1
python=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
works() { recent "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

if works; then exit 0; fi

if ! command -v "$python" >/dev/null; then
    say "error: '$python' was not found."
    say "hint: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3 …"
    exit 1
fi
if ! recent "$python"; then
    say "error: $("$python" --version 2>&1) is too old: Python 3.10 or newer is needed."
    say "hint: name another one: make PYTHON=/path/to/python3 …"
    exit 1
fi

say "Making $venv with $("$python" --version 2>&1) …"

# Debian keeps ensurepip, without which venv makes an environment that has no pip, in a package of its own.
has_ensurepip() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

if ! has_ensurepip && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Installing python3-venv …"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; } >/dev/null </dev/null || true
fi

if has_ensurepip; then
    "$python" -m venv --clear "$venv"
elif "$python" -m virtualenv --version >/dev/null 2>&1; then
    "$python" -m virtualenv --quiet --clear "$venv"
elif "$python" -m pip --version >/dev/null 2>&1; then
    # Into a folder of its own: it leaves the system's Python alone, and no permission is needed.
    bootstrap=$(mktemp -d)
    trap 'rm -rf "$bootstrap"' EXIT
    "$python" -m pip install --quiet --target "$bootstrap" virtualenv
    PYTHONPATH=$bootstrap "$python" -m virtualenv --quiet --clear "$venv"
fi

if ! works; then
    say "error: no virtual environment could be made: '$python' has neither ensurepip nor pip."
    say "hint: sudo apt-get update && sudo apt-get install -y python3-venv"
    exit 1
fi
