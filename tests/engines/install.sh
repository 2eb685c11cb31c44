#!/bin/bash
# install.sh FOLDER [RELEASE ...]: an environment with the engines' wheels, without their dependencies'
# gigabytes. Prints the interpreter. It sees the packages of the environment that runs this (torch, numpy).
set -euo pipefail
folder=$1
shift
[ $# -gt 0 ] || set -- vllm==0.33.0 sglang==0.5.23
here=$(dirname "$0") python=$folder/bin/python
# The oldest gRPC that the plugin runs with, and protobuf 6: some engines cannot have 7.
oldest="$(sed -nE 's/^ *"grpcio>=([0-9.]+)".*/grpcio==\1/p' "$here/../../engine/pyproject.toml") protobuf~=6.33"
if [ "$(cat "$folder/releases" 2>/dev/null)" != "$* $oldest" ]; then
  rm -rf "$folder"
  python3 -m venv "$folder" >&2
  site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  "$here/../../.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])' > "$site/equipoise.pth"
  # shellcheck disable=SC2086 # two words
  "$python" -m pip install -q --no-deps "$@" $oldest >&2
  # Small, and imported by what balances. tests/engines/stubs.py stands in for the rest.
  "$python" -m pip install -q --no-deps aiohappyeyeballs aiohttp aiosignal annotated-doc attrs blake3 \
    cachetools cbor2 certifi charset-normalizer cloudpickle dill einops fastapi frozenlist idna \
    jsonschema jsonschema-specifications msgspec multidict openai_harmony orjson pillow propcache \
    py-cpuinfo pybase64 pyzmq referencing regex requests rpds-py setproctitle tqdm triton==3.7.1 \
    urllib3 uvloop yarl >&2
  echo "$* $oldest" > "$folder/releases"
fi
echo "$python"
