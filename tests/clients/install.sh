#!/bin/bash
# install.sh FOLDER CLIENT: a client and what it needs, in FOLDER/CLIENT, once. torch is that of the
# environment that runs this.
set -euo pipefail
folder=$1/$2 here=$(cd "$(dirname "$0")/../.." && pwd)
uv=$here/.venv/bin/uv
# What is not installed: torch is there, and vLLM's benchmark needs none of what its kernels need.
without=(torch)
# What is not pinned by name is as it was on this day.
day=2026-11-20
case $2 in
  guidellm) packages=(guidellm==0.8.1) ;;
  langchain) packages=(langchain==1.4.7 langchain-openai==1.7.3) ;;
  # It imports mcp for tools, and does not require it.
  litellm) packages=(litellm==1.106.2 'mcp>=2.2') ;;
  llama-index) packages=(llama-index-llms-openai-like==0.8.1) ;;
  lm-eval) packages=('lm-eval[api]==0.4.13') ;;
  openai) packages=(openai==3.54.0) ;;
  vllm)
    packages=('vllm[bench]==0.33.0')
    without+=(torchaudio torchvision torchcodec PyNvVideoCodec flashinfer-python tilelang nvidia-cudnn-frontend
      nvidia-cutlass-dsl nvtx fastsafetensors instanttensor quack-kernels tokenspeed-mla humming-kernels numba
      opencv-python-headless)
    ;;
  *) echo "no client $2" >&2; exit 2 ;;
esac
if [ "$(cat "$folder/packages" 2>/dev/null)" != "${packages[*]} $day" ]; then
  rm -rf "$folder"
  "$uv" venv -q --python "$here/.venv/bin/python" "$folder"
  site=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  "$uv" pip install -q --python "$folder/bin/python" --exclude-newer $day \
    --override <(printf "%s; python_version < '3'\n" "${without[@]}") "${packages[@]}"
  "$here/.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])' > "$site/equipoise.pth"
  echo "${packages[*]} $day" > "$folder/packages"
fi
