#!/bin/bash
# install.sh FOLDER RELEASE...: an environment for the engines' wheels without their dependencies'
# gigabytes; in FOLDER/RELEASE (vllm==0.33.0) each release that can be had, and in FOLDER/plugin the
# wheel of equipoise-engine. It sees the packages of .venv (torch, numpy).
set -euo pipefail
folder=$1
shift
root=$(dirname "$0")/../.. python=$folder/bin/python
# The oldest gRPC that the plugin runs with, and protobuf 6: some engines cannot have 7.
grpc=$(sed -nE 's/^ *"grpcio>=([0-9.]+)".*/grpcio==\1/p' "$root/engine/pyproject.toml")
# Small, and imported by what balances. tests/engines/stubs.py stands in for the rest.
packages="$grpc protobuf~=6.33 aiohappyeyeballs aiohttp aiosignal annotated-doc attrs blake3 cachetools cbor2
  certifi charset-normalizer cloudpickle dill einops fastapi frozenlist hatchling idna jsonschema
  jsonschema-specifications msgspec multidict openai_harmony orjson packaging pathspec pillow pluggy
  propcache py-cpuinfo pybase64 pyzmq referencing regex requests rpds-py setproctitle tqdm triton==3.7.1
  trove-classifiers urllib3 uvloop yarl"
if [ "$(cat "$folder/packages" 2>/dev/null)" != "$packages" ]; then
  rm -rf "$folder"
  python3 -m venv "$folder"
  site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  "$root/.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])' > "$site/equipoise.pth"
  # shellcheck disable=SC2086 # many words
  "$python" -m pip install -q --no-deps $packages
  echo "$packages" > "$folder/packages"
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
rm -rf "$folder/plugin"
"$python" -m pip install -q --no-deps --no-build-isolation --target "$folder/plugin" "$root/engine"
