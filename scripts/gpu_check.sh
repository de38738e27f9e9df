#!/usr/bin/env bash
# Checks the CUDA engine on a machine with an NVIDIA GPU, with binaries that were built anywhere: it
# needs only the driver (and compute-sanitizer, with --sanitizer). Prints a table of its checks, then
# of speeds when ds4-bench is there; fails when a check does.
#
#   scripts/gpu_check.sh [--bin DIR] [--quick] [--filter TESTS] [--sanitizer] [--no-bench]
#
#   --bin DIR       where cuda_gpu_test is, and what there is of ds4-bench, product_bench and
#                   device_group_bench (build/release/bin)
#   --quick         only the device helpers and the runtime: seconds
#   --filter TESTS  only these, as in --gtest_filter; for the sanitizer too
#   --sanitizer     the same tests again under compute-sanitizer: memcheck, racecheck, synccheck
#   --no-bench      no speeds; --quick and --sanitizer leave them out too
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export DS4_SOURCE_DIR=${DS4_SOURCE_DIR:-$root}  # test data, wherever the binaries were built
bin=$root/build/release/bin
basics='SimtTest.*:MmaFloatTest.*:RuntimeTest.*'
filter='*'
quick=0
sanitizer=0
bench=1
limit_s=600  # of one check

die() { printf 'error: %s\n' "$*" >&2; exit 1; }

while (( $# > 0 )); do
  case $1 in
    --bin) bin=${2:?--bin needs a folder}; shift ;;
    --filter) filter=${2:?--filter needs a pattern}; shift ;;
    --quick) quick=1 bench=0 ;;
    --sanitizer) sanitizer=1 bench=0 ;;
    --no-bench) bench=0 ;;
    *) die "unknown option $1: --bin DIR, --quick, --filter TESTS, --sanitizer, --no-bench" ;;
  esac
  shift
done
test_binary=$bin/cuda_gpu_test
[[ -x $test_binary ]] || die "no cuda_gpu_test in $bin: build it with DS4_CUDA=ON, or give --bin"

for pattern in "$basics" "$filter"; do
  [[ -n $("$test_binary" --gtest_list_tests --gtest_filter="$pattern" | grep '^ ') ]] ||
    die "cuda_gpu_test has no tests $pattern"
done

table=()
failed=0
# check NAME COMMAND...: one row of the table. Returns the command's success.
check() {
  local name=$1 start=$SECONDS status=0
  shift
  printf '\n== %s\n+ %s\n' "$name" "$*"
  timeout --kill-after=10 "$limit_s" "$@" || status=$?
  local result=passed
  case $status in
    0) ;;
    124) result="no end in $limit_s s" ;;
    127) result='not found' ;;
    *) result="failed ($status)" ;;
  esac
  if (( status != 0 )); then failed=1; fi
  table+=("$(printf '%-24s %-20s %8d' "$name" "$result" $((SECONDS - start)))")
  return "$status"
}

query=(nvidia-smi --query-gpu=index,name,driver_version,memory.total,memory.free --format=csv)
check 'GPU' "${query[@]}"
# Everything else rests on these.
if check 'helpers and runtime' "$test_binary" --gtest_brief=1 --gtest_filter="$basics"; then
  if (( ! quick )); then
    check "tests $filter" "$test_binary" --gtest_brief=1 --gtest_filter="$filter"
  fi
  if (( sanitizer )); then
    watched=$filter
    if (( quick )); then watched=$basics; fi
    for tool in memcheck racecheck synccheck; do
      options=(--tool "$tool" --error-exitcode 9 --print-limit 20)
      # Tests make calls that must fail.
      if [[ $tool == memcheck ]]; then options+=(--report-api-errors no); fi
      check "$tool" compute-sanitizer "${options[@]}" \
        "$test_binary" --gtest_brief=1 --gtest_filter="$watched"
    done
  fi
fi

# bench NAME COMMAND...: as check; only when the program is in the folder. Keeps ds4-bench's tables.
speeds=$(mktemp)
trap 'rm -f "$speeds"' EXIT
bench() {
  [[ -x $2 ]] || return 0
  if [[ $2 == */ds4-bench ]]; then
    check "$@" > >(tee -a "$speeds")
    wait $!
  else
    check "$@"
  fi
}
if (( bench && ! failed )); then
  IFS=', ' read -r free_mib num_gpus < <(nvidia-smi --query-gpu=memory.free,count --format=csv,noheader,nounits)
  model=(--synthetic tiny --quant q8)
  # Flash's 64 sessions with two-bit experts need about 95 GB.
  if (( free_mib >= 95368 )); then model=(--synthetic flash --quant q2); fi
  bench 'dense products' "$bin/product_bench"
  if (( num_gpus > 1 )); then bench 'gathers' "$bin/device_group_bench"; fi
  bench 'decode' "$bin/ds4-bench" decode --backend cuda "${model[@]}" --contexts 2048 --batches 1,16,64
  bench 'prefill' "$bin/ds4-bench" prefill --backend cuda "${model[@]}" --prompts 4096
fi

printf '\n%-24s %-20s %8s\n' check result seconds
printf '%s\n' "${table[@]}"
grep -v '^[=+]' "$speeds"
exit "$failed"
