#!/usr/bin/env bash
# Runs one step of the checks: says it, runs it, and adds its seconds and its status to the file $STEPS, if that is set.
#
#     tools/step.sh NAME COMMAND [ARGUMENT...]
set -uo pipefail
name=$1
shift
echo "+ $*"
begin=$SECONDS
"$@"
status=$?
if [ -n "${STEPS:-}" ]; then printf '%s\t%s\t%s\n' "$((SECONDS - begin))" "$status" "$name" >>"$STEPS"; fi
exit "$status"
