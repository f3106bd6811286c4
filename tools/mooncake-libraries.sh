#!/usr/bin/env bash
# Sees to the shared libraries that Mooncake's wheel expects from the system.
# Root on Debian: installs what is missing. Otherwise: prints the command, and fails.
# usage: tools/mooncake-libraries.sh PYTHON
set -euo pipefail

python=$1
packages=(libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4)
sonames=(libibverbs.so.1 librdmacm.so.1 libnuma.so.1 liburing.so.2 libcurl.so.4)

missing() {
    local i
    for i in "${!packages[@]}"; do
        "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${sonames[i]}" 2>/dev/null ||
            printf '%s ' "${packages[i]}"
    done
}

read -r -a absent <<<"$(missing)"
if [ "${#absent[@]}" = 0 ]; then exit 0; fi

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    printf 'Installing %s (for Mooncake) …\n' "${absent[*]}" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null </dev/null
    apt-get install -y -qq --no-install-recommends "${absent[@]}" >/dev/null </dev/null
    read -r -a absent <<<"$(missing)"
    if [ "${#absent[@]}" = 0 ]; then exit 0; fi
fi

{
    printf 'Mooncake cannot load here: these Debian packages are missing: %s\n' "${absent[*]}"
    printf 'hint: sudo apt-get update && sudo apt-get install -y %s\n' "${absent[*]}"
} >&2
exit 1
