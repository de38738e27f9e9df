// ds4-bench: decode and prefill speed of the engine on this host, without any network program.
#include <fstream>
#include <iostream>

#include "engine/backends/backends.h"
#include "engine/base/strings.h"
#include "engine/tools/bench_options.h"
#include "engine/tools/bench_report.h"
#include "engine/tools/bench_run.h"

namespace ds4 {
namespace {

constexpr double kH200Gbps = 4640.0;  // copies of large arrays, measured

void Note(const std::string& text) { std::cerr << "ds4-bench: " << text << std::endl; }

Status ChooseEngine(BenchCommand& command) {
  EngineOptions& engine = command.run.engine;
  ASSIGN_OR_RETURN(const BackendChoice choice, ChooseBackend(command.backend, engine.device));
  Note(StrCat("backend ", choice.why));
  engine.backend = choice.backend;
  if (choice.backend == Backend::kCuda) {
    ASSIGN_OR_RETURN(const std::vector<DeviceSummary> devices, CudaDevices());
    command.run.num_devices = static_cast<int>(devices.size());
  }
  if (command.run.kernels) {
    if (choice.backend != Backend::kCuda) {
      return InvalidArgumentError(
          StrCat("--kernels is for GPUs, this run is on ", choice.why, "; leave it out"));
    }
    RETURN_IF_ERROR(CheckKernelTimes().WithContext("--kernels"));
  }
  const double known = choice.backend == Backend::kCuda ? kH200Gbps : 0.0;
  command.run.bandwidth_gbps = command.bandwidth_gbps < 0 ? known : command.bandwidth_gbps;
  return OkStatus();
}

Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) return UnavailableError(StrCat("cannot write ", path));
  return OkStatus();
}

Status Run(BenchCommand command) {
  RegisterBuiltBackends();
  RETURN_IF_ERROR(ChooseEngine(command));
  ASSIGN_OR_RETURN(const BenchResults results, RunBench(command.run, Note));
  const bool decode = command.run.mode == BenchOptions::Mode::kDecode;
  const BenchHeader& header = results.header;
  const std::string csv =
      decode ? DecodeCsv(header, results.decode) : PrefillCsv(header, results.prefill);
  const std::string table =
      decode ? DecodeTable(header, results.decode) : PrefillTable(header, results.prefill);
  std::cout << (command.csv ? csv : table) << std::flush;
  if (!results.kernels.empty()) {
    std::cout << KernelTable(results.kernels) << std::flush;
    RETURN_IF_ERROR(WriteText(command.kernels_file, KernelCsv(results.kernels)));
  }
  return command.csv_file.empty() ? OkStatus() : WriteText(command.csv_file, csv);
}

int Main(int argc, char** argv) {
  auto parsed = ParseBenchOptions(argc, argv);
  if (!parsed.ok()) {
    Note(parsed.status().message());
    return 2;
  }
  if (const auto* help = std::get_if<BenchHelp>(&*parsed)) {
    std::cout << help->text;
    return 0;
  }
  const Status status = Run(std::get<BenchCommand>(*parsed));
  if (status.ok()) return 0;
  Note(status.message());
  return 1;
}

}  // namespace
}  // namespace ds4

int main(int argc, char** argv) { return ds4::Main(argc, argv); }
