#!/usr/bin/env bash
# Sees to the server with which the tests of etcd run.
# Root on Debian: installs it, if it is missing. Otherwise: prints the command, and fails.
set -euo pipefail

package=etcd-server

if command -v etcd >/dev/null; then exit 0; fi

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    printf 'Installing %s (for the tests) …\n' "$package" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null </dev/null
    apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 </dev/null
    if command -v etcd >/dev/null; then exit 0; fi
fi

{
    printf 'The tests of etcd cannot run here: the Debian package %s is missing\n' "$package"
    printf 'hint: sudo apt-get update && sudo apt-get install -y %s\n' "$package"
} >&2
exit 1
