#!/usr/bin/env bash
# Makes the virtual environment of one framework or client and runs its tests there; run.sh says the rest.
#
#     tools/integrations/one.sh NAME
#
# The environment is ${LLM_SPEC_INTEGRATIONS:-${XDG_CACHE_HOME:-~/.cache}/llm_spec/integrations}/NAME, made anew when
# tests/integrations/NAME/requirements.txt, no_deps.txt beside it or pyproject.toml changes. What this library exports is
# installed from the checkout; what no_deps.txt names, if there is one, comes last and without what it requires: a release
# whose pins cannot be met here. npm's packages (package.json) go into NAME/npm. With INSTALL_ONLY=1 nothing is run.
#
# An adapter's environment also runs the tests of what adapters share, and mypy over its module, its parts (_NAME_*.py)
# and what adapters share: mypy takes an editable install for someone else's code and tells errors of named modules alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tools/environments.sh
name=$1
venv=${LLM_SPEC_INTEGRATIONS:-${XDG_CACHE_HOME:-$HOME/.cache}/llm_spec/integrations}/$name
tests=tests/integrations/$name

install() { uv pip install --quiet --python "$venv/bin/python" "$@"; }

ensure() {
  local no_deps=() npm=() wanted
  if [ -e "$tests/no_deps.txt" ]; then no_deps=(-r "$tests/no_deps.txt"); fi
  if [ -e "$tests/package.json" ] && command -v npm >/dev/null; then npm=("$tests/package.json"); fi
  wanted=$(cat "$tests/requirements.txt" pyproject.toml "${no_deps[@]:1}" "${npm[@]}" | sha256sum)
  if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$venv"
    uv venv --quiet --seed --python "$(command -v python3)" "$venv" # with pip, which some tests call
    install -r "$tests/requirements.txt" pytest pytest-asyncio mypy
    if [ ${#no_deps[@]} -gt 0 ]; then install --no-deps "${no_deps[@]}"; fi
    if [ ${#npm[@]} -gt 0 ]; then
      mkdir "$venv/npm"
      cp "${npm[@]}" "$venv/npm/"
      npm install --prefix "$venv/npm" --no-fund --no-audit --silent
    fi
    echo "$wanted" >"$venv/.complete"
  elif [ "$(cat "$venv/.checkout" 2>/dev/null)" != "$PWD" ]; then
    install --no-deps -e . # of another checkout
  fi
  echo "$PWD" >"$venv/.checkout"
}

run() {
  local shared=() modules=() file module
  if [ -e "llm_spec/integrations/$name.py" ]; then
    shared=(tests/integrations/test_*.py)
    for file in llm_spec/integrations/*.py; do
      module=$(basename "$file" .py)
      case $module in
        "$name" | "_${name}_"*) ;;
        [!_]* | _*_*) continue ;; # another adapter, or a part of one
      esac
      modules+=(-m "llm_spec.integrations.$module")
    done
  fi
  "$venv/bin/python" -m pytest "${shared[@]}" "$tests" -p no:cacheprovider \
    ${REPORTS:+--junitxml="$REPORTS/$name.xml"}
  if [ ${#modules[@]} -gt 0 ]; then "$venv/bin/python" -m mypy --strict --cache-dir "$venv/mypy" "${modules[@]}"; fi
}

ensure
if [ -z "${INSTALL_ONLY:-}" ]; then run; fi
