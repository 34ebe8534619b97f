#!/usr/bin/env bash
# Runs the tests that need another library, with each library in an environment that only it uses.
#
#     bash tests/scripts/other_libraries.sh                    all: tunix, keras-hub, equinox, gemma
#     bash tests/scripts/other_libraries.sh tunix equinox      these
#     bash tests/scripts/other_libraries.sh tunix=venv/bin/python   in an environment that has it
#
# An environment takes up to 4 GB of a temporary folder, a minute with uv, and a few with pip. The
# tests then take up to five minutes a library. Exits non-zero if a test fails or is skipped.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
names=(tunix keras-hub equinox gemma)

# What to install, the module that shows that it is there, and pytest's arguments.
describe() {
  case $1 in
    tunix)
      packages=(google-tunix==0.1.7) module=tunix
      tests=(tests/nets/test_end_index.py tests/integrations/test_tunix.py
        tests/benchmarks/test_other_libraries.py -k "Tunix and not keras")
      ;;
    keras-hub)
      packages=(keras-hub==0.32.0) module=keras_hub
      tests=(tests/nets/test_keras_models.py tests/benchmarks/test_other_libraries.py
        -k "not tunix")
      ;;
    equinox)
      packages=(equinox==0.13.8) module=equinox
      tests=(tests/nets/test_equinox_modules.py)
      ;;
    gemma) # it asks for a protobuf that is older than the one newer versions of sentencepiece need
      packages=(gemma==4.0.1 "sentencepiece<0.2.2") module=gemma
      tests=(tests/nets/test_end_index.py tests/weights/test_gemma_orbax.py
        -k "(gemma and Gemma and not Tunix and not orbax) or save_params_of_gemma")
      ;;
    *)
      echo "unknown library: $1. Expected some of: ${names[*]}" >&2
      exit 2
      ;;
  esac
}

# Makes an environment in a folder, with the project and some packages.
make() {
  local folder=$1 wanted=(-e "$checkout" "${@:2}" pytest hypothesis)
  if command -v uv >/dev/null; then
    uv venv --quiet --python ">=3.12" "$folder" # gemma 4 needs it
    uv pip install --quiet --python "$folder/bin/python" "${wanted[@]}"
  else
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --no-compile "${wanted[@]}"
  fi
}

[ $# -gt 0 ] || set -- "${names[@]}"
for argument in "$@"; do
  describe "${argument%%=*}"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$checkout"
export PYTHONPATH=$checkout KERAS_BACKEND=jax
for argument in "$@"; do
  name=${argument%%=*}
  describe "$name"
  echo "=== $name"
  if [ "$argument" = "$name" ]; then
    make "$work/$name" "${packages[@]}"
    python=$work/$name/bin/python
  else
    python=${argument#*=}
  fi
  "$python" -c "import importlib, sys; importlib.import_module(sys.argv[1])" "$module"
  "$python" -m pytest -p no:cacheprovider "${tests[@]}" | tee "$work/log"
  if grep -qE '^SKIPPED' "$work/log"; then
    echo "$name: a test was skipped, though the library is there" >&2
    exit 1
  fi
  [ "$argument" != "$name" ] || rm -rf "${work:?}/$name"
done
