#!/bin/bash
# install.sh FOLDER: an environment with the engines' wheels, without their dependencies' gigabytes.
# Prints the interpreter. It sees the packages of the environment that runs this (torch, grpc, numpy).
set -euo pipefail
folder=$1 engines=(vllm==0.33.0 sglang==0.5.23)
python=$folder/bin/python
if ! "$python" -c 'import vllm, sglang, dill' 2>/dev/null; then
  python3 -m venv "$folder" >&2
  site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  "$(dirname "$0")/../../.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])' > "$site/equipoise.pth"
  "$python" -m pip install -q --no-deps "${engines[@]}" >&2
  # Small, and imported by what balances. tests/engines/stubs.py stands in for the rest.
  "$python" -m pip install -q --no-deps aiohappyeyeballs aiohttp aiosignal annotated-doc attrs blake3 \
    cachetools cbor2 certifi charset-normalizer cloudpickle dill einops fastapi frozenlist idna \
    jsonschema jsonschema-specifications msgspec multidict openai_harmony orjson pillow propcache \
    py-cpuinfo pybase64 pyzmq referencing regex requests rpds-py setproctitle tqdm triton==3.7.1 \
    urllib3 uvloop yarl >&2
fi
echo "$python"
