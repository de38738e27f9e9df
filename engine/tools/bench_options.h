// The command line of ds4-bench, checked once.
#pragma once

#include <string>
#include <variant>

#include "engine/base/status.h"
#include "engine/tools/bench_run.h"

namespace ds4 {

struct BenchCommand {
  BenchOptions run;
  std::string backend = "auto";  // cpu, cuda, auto; resolved by main
  double bandwidth_gbps = -1.0;  // -1: by the backend
  bool csv = false;              // to stdout, in place of the table
  std::string csv_file;          // and, or, to this file
  std::string kernels_file;      // each launch of a decode step
};

// --help: print this and end with 0.
struct BenchHelp {
  std::string text;
};

// kInvalidArgument names the option, its value and the range.
Result<std::variant<BenchCommand, BenchHelp>> ParseBenchOptions(int argc, const char* const* argv);

}  // namespace ds4
