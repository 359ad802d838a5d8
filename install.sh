#!/bin/sh
# Make .venv next to this file and install tfpar into it: `sh install.sh`, `sh install.sh test` with what tests need,
# `sh install.sh docs` with what builds the documentation, or `sh install.sh cuda` with what NVIDIA GPUs need. Nothing
# outside .venv is changed, except that a Debian or Ubuntu without its venv package gets it when root asks.
set -eu
extra=${1:-}
case $extra in "" | docs | test | cuda | test,cuda | cuda,test) ;; *)
    echo "install.sh takes nothing, docs, test, cuda or test,cuda, received '$extra'." >&2
    exit 1
    ;;
esac
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
echo "Installing tfpar${extra:+ [$extra]}, TensorFlow and Keras into $PWD/.venv: 3 GB, one to three minutes."
[ -x .venv/bin/pip ] || "$python" -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
echo "Installed. Next, train the default run (10 seconds), or list the configurations and the flags:
  .venv/bin/python -m tfpar.train
  .venv/bin/python -m tfpar.train --help"
case $extra in *test*) echo "Run the tests: .venv/bin/python -m pytest" ;; esac
