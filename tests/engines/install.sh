#!/bin/bash
# install.sh FOLDER RELEASE...: an environment for the engines' wheels without their dependencies'
# gigabytes, and in FOLDER/RELEASE (vllm==0.33.0) each release that can be had.
# It sees the packages of .venv (torch, numpy).
set -euo pipefail
folder=$1
shift
here=$(dirname "$0") python=$folder/bin/python
# The oldest gRPC that the plugin runs with, and protobuf 6: some engines cannot have 7.
oldest="$(sed -nE 's/^ *"grpcio>=([0-9.]+)".*/grpcio==\1/p' "$here/../../engine/pyproject.toml") protobuf~=6.33"
if [ "$(cat "$folder/oldest" 2>/dev/null)" != "$oldest" ]; then
  rm -rf "$folder"
  python3 -m venv "$folder"
  site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  "$here/../../.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])' > "$site/equipoise.pth"
  # Small, and imported by what balances. tests/engines/stubs.py stands in for the rest.
  # shellcheck disable=SC2086 # two words
  "$python" -m pip install -q --no-deps $oldest aiohappyeyeballs aiohttp aiosignal annotated-doc attrs \
    blake3 cachetools cbor2 certifi charset-normalizer cloudpickle dill einops fastapi frozenlist idna \
    jsonschema jsonschema-specifications msgspec multidict openai_harmony orjson pillow propcache \
    py-cpuinfo pybase64 pyzmq referencing regex requests rpds-py setproctitle tqdm triton==3.7.1 \
    urllib3 uvloop yarl
  echo "$oldest" > "$folder/oldest"
fi
for release in "$@"; do
  test -d "$folder/$release" && continue
  rm -rf "$folder/partial"
  if "$python" -m pip install -q --no-deps --target "$folder/partial" "$release"; then
    mv "$folder/partial" "$folder/$release"
  else
    echo "$release cannot be had: its tests are skipped"
  fi
done
