# Shared by the scripts in this folder; source it. Prints what it runs, installs what is missing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

# Cached objects of one clone serve another: paths below the root are stored relative to it.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK=content

say() { printf '\n== %s\n' "$*"; }
run() { printf '+ %s\n' "$*"; "$@"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Debian's and Ubuntu's names of what we build with. Boost has its version in the name.
packages() {
  local boost=libboost-dev
  if apt-cache show libboost1.81-dev >/dev/null 2>&1; then boost=libboost1.81-dev; fi
  echo g++ cmake ninja-build pkg-config ccache mold xz-utils git "$boost" \
    libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc \
    libspdlog-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libssl-dev zlib1g-dev \
    libgtest-dev libgmock-dev libbenchmark-dev
}

install_missing() {
  if [[ $(uname -s) == Darwin ]]; then
    command -v brew >/dev/null || die "install Homebrew first (it brings the compiler's libraries)"
    run brew install --quiet cmake ninja pkg-config ccache boost grpc protobuf spdlog cli11 \
      nlohmann-json xxhash googletest google-benchmark xz
    return
  fi
  command -v apt-get >/dev/null || die "this script installs with apt-get; on other systems install: $(packages)"
  # The list of what was installed last time makes the second start quick.
  local stamp=build/.packages-installed
  if [[ -f $stamp && $stamp -nt scripts/lib.sh ]]; then return; fi
  local sudo=()
  if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null || die "not root and no sudo: ask an administrator to install: $(packages)"
    sudo=(sudo)
  fi
  local missing=()
  for package in $(packages); do
    if ! dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed; then
      missing+=("$package")
    fi
  done
  if (( ${#missing[@]} > 0 )); then
    say "installing ${#missing[@]} packages: ${missing[*]}"
    run "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq update
    # Once more: a fresh machine has no package lists, so the name of Boost is known only now.
    missing=()
    for package in $(packages); do
      if ! dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed; then
        missing+=("$package")
      fi
    done
    run "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq \
      install -y --no-install-recommends "${missing[@]}" >/dev/null
  fi
  mkdir -p build
  touch "$stamp"
}

# build PRESET [TARGET...]: configure when needed, then build the targets (default: all).
build() {
  local preset=$1
  shift
  if [[ ! -f build/$preset/build.ninja ]]; then
    run cmake --preset "$preset" -Wno-dev >"build/configure-$preset.log" ||
      { cat "build/configure-$preset.log"; die "configuring $preset failed"; }
  fi
  if (( $# > 0 )); then
    run cmake --build "build/$preset" --target "$@"
  else
    run cmake --build "build/$preset"
  fi
}
