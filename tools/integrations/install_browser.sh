#!/usr/bin/env bash
# Installs Debian's chromium, in which the tests of the server's page run, where that is not there and can be installed.
# Where it cannot, it is said, and is no failure: those tests skip.
set -uo pipefail
if ! command -v chromium >/dev/null; then
  (apt-get update -q && apt-get install -y -q chromium) >/dev/null 2>&1
fi
command -v chromium || echo "chromium is not there and cannot be installed: the tests of the page skip"
