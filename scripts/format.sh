#!/usr/bin/env bash
# Formats all C++ files in place with clang-format: scripts/format.sh [--check]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

command -v clang-format >/dev/null || die "clang-format is missing: apt-get install clang-format"
mode=(-i)
if [[ ${1:-} == --check ]]; then mode=(--dry-run --Werror); fi
git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 clang-format "${mode[@]}"
