#!/usr/bin/env bash
# Builds everything: scripts/build.sh [release|debug|asan|tsan] [target...]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

preset=${1:-release}
shift || true
install_missing
build "$preset" "$@"
