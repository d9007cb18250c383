#!/usr/bin/env bash
# Tests the adapters for other frameworks and the clients of the server, each in a virtual environment of its own, because
# their pins conflict; and the provider `gguf`, which would compile llama.cpp wherever the usual tests are installed.
#
#     tools/integrations/run.sh [--install] [NAME...]        # names of tests/integrations/; all of them without
#
# As many run at once as there are processors (or JOBS). Each says what it has to say when it has ended; all of them run,
# whatever fails, and then this fails. --install makes the environments and runs nothing. one.sh does it for one.
set -euo pipefail
cd "$(dirname "$0")/../.."
case ${1:-} in --install) export INSTALL_ONLY=1 && shift ;; esac
names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  for folder in tests/integrations/*/requirements.txt; do names+=("$(basename "$(dirname "$folder")")"); done
fi

source tools/environments.sh
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
printf '%s\n' "${names[@]}" | xargs -P "${JOBS:-$(nproc)}" -I NAME bash -c '
  tools/step.sh "  NAME" tools/integrations/one.sh NAME >"$0/NAME" 2>&1
  status=$?
  cat "$0/NAME"
  exit $status' "$logs"
