#!/usr/bin/env bash
# Tests the adapters for other frameworks, each in a virtual environment of its own, because their pins conflict.
#
#     tools/integrations/run.sh [NAME...]        # names of tests/integrations/; all of them without
#
# The environments are kept in ${LLM_SPEC_INTEGRATIONS:-${XDG_CACHE_HOME:-~/.cache}/llm_spec/integrations}/NAME and made
# anew when tests/integrations/NAME/requirements.txt, no_deps.txt beside it or pyproject.toml changes. What this library
# exports is installed from the checkout; what no_deps.txt names, if there is one, comes last and without what it
# requires: a release whose pins cannot be met here. npm's packages (package.json) go into NAME/npm.
#
# Each runs the adapter's tests, those of what adapters share, and mypy over its module, its parts (_NAME_*.py) and what
# adapters share: mypy takes an editable install for someone else's code and tells errors of named modules alone. The
# first run takes about a minute each.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=${LLM_SPEC_INTEGRATIONS:-${XDG_CACHE_HOME:-$HOME/.cache}/llm_spec/integrations}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  for folder in tests/integrations/*/requirements.txt; do names+=("$(basename "$(dirname "$folder")")"); done
fi

ensure() {
  local venv=$root/$1 tests=tests/integrations/$1 no_deps=() npm=() wanted
  if [ -e "$tests/no_deps.txt" ]; then no_deps=(-r "$tests/no_deps.txt"); fi
  if [ -e "$tests/package.json" ] && command -v npm >/dev/null; then npm=("$tests/package.json"); fi
  wanted=$(cat "$tests/requirements.txt" pyproject.toml "${no_deps[@]:1}" "${npm[@]}" | sha256sum)
  if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install -r "$tests/requirements.txt" pytest pytest-asyncio mypy
    if [ ${#no_deps[@]} -gt 0 ]; then "$venv/bin/pip" install --no-deps "${no_deps[@]}"; fi
    if [ ${#npm[@]} -gt 0 ]; then
      mkdir "$venv/npm"
      cp "${npm[@]}" "$venv/npm/"
      npm install --prefix "$venv/npm" --no-fund --no-audit --silent
    fi
    echo "$wanted" >"$venv/.complete"
  elif [ "$(cat "$venv/.checkout" 2>/dev/null)" != "$PWD" ]; then
    "$venv/bin/pip" install --no-deps -e . # of another checkout
  fi
  echo "$PWD" >"$venv/.checkout"
}

for name in "${names[@]}"; do
  ensure "$name"
  echo "+ integration $name"
  "$root/$name/bin/python" -m pytest tests/integrations/test_*.py "tests/integrations/$name" \
    ${REPORTS:+--junitxml="$REPORTS/$name.xml"}
  modules=()
  for file in llm_spec/integrations/*.py; do
    module=$(basename "$file" .py)
    case $module in
      "$name" | "_${name}_"*) ;;
      [!_]* | _*_*) continue ;; # another adapter, or a part of one
    esac
    modules+=(-m "llm_spec.integrations.$module")
  done
  "$root/$name/bin/python" -m mypy --strict "${modules[@]}"
done
