#!/bin/sh
# Make .venv beside this file and install tfpar into it: `sh install.sh`, or `sh install.sh test` with what tests need.
# Nothing outside .venv is touched, except that a Debian or Ubuntu without its venv package gets it when root asks.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tfpar needs Python 3.11 or later, and $python is $("$python" --version 2>&1). Set PYTHON to a later one." >&2
    exit 1
}
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    # Debian keeps ensurepip, without which a virtual environment has no pip, in a package of its own.
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq "$package" >/dev/null
    else
        echo "Virtual environments need one more package here: run 'sudo apt-get install -y $package' first." >&2
        exit 1
    fi
fi
[ -x .venv/bin/pip ] || "$python" -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check --editable ".${1:+[$1]}"
