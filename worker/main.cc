// ds4-worker: one rank of the cluster. A table of contents: options, parts, serve, stop.
#include <chrono>
#include <iostream>

#include "engine/backends/backends.h"
#include "engine/base/strings.h"
#include "worker/log.h"
#include "worker/node.h"
#include "worker/options.h"
#include "worker/port_file.h"
#include "worker/stop_signal.h"
#include "worker/worker_service.h"

namespace ds4 {
namespace {

constexpr std::chrono::milliseconds kStopGrace{500};
constexpr std::chrono::milliseconds kStopLimit{1800};

// The line that launchers and people wait for.
void Announce(const WorkerOptions& options, const WorkerInfo& info, uint16_t port) {
  std::cout << "ds4-worker ready on " << options.listen.host << ":" << port << ", model "
            << info.model_path << ", " << info.num_threads << " threads, " << info.kernel_isa
            << std::endl;
}

// "device 0: ..." for each, which the coordinator counts; it is no error to have none.
void ListDevices() {
  const auto devices = CudaDevices();
  if (!devices.ok()) {
    std::cout << "no devices: " << devices.status().message() << std::endl;
    return;
  }
  for (size_t i = 0; i < devices->size(); ++i) {
    std::cout << "device " << i << ": " << (*devices)[i].text << "\n";
  }
  if (devices->empty()) std::cout << "no devices: the driver knows none\n";
  std::cout << std::flush;
}

Status Serve(const WorkerOptions& options) {
  // Signals first: from here on they end the program in order.
  RETURN_IF_ERROR(InstallStopSignals());
  ASSIGN_OR_RETURN(const std::unique_ptr<Node> node, Node::Open(options));
  ASSIGN_OR_RETURN(
      const std::unique_ptr<WorkerServer> server,
      WorkerServer::Start(options.listen.host, options.listen.port, node->parts(), node->info()));
  if (!options.port_file.empty()) {
    RETURN_IF_ERROR(WritePortFile(options.port_file, server->port(), node->info().data_port));
  }
  Announce(options, node->info(), server->port());

  const std::string reason = WaitForStop(options.exit_with_parent);
  LogInfo({}, StrCat("stopping: ", reason));
  ExitAfter(kStopLimit);
  server->Shutdown(UnavailableError(StrCat("the worker is stopping: ", reason)), kStopGrace);
  return OkStatus();
}

int Main(int argc, char** argv) {
  auto parsed = ParseWorkerOptions(argc, argv);
  if (!parsed.ok()) {
    std::cerr << "ds4-worker: " << parsed.status().message() << "\n";
    return 2;
  }
  if (const auto* print = std::get_if<PrintAndExit>(&*parsed)) {
    std::cout << print->text;
    return 0;
  }
  const WorkerOptions& options = std::get<WorkerOptions>(*parsed);
  if (options.list_devices) {
    ListDevices();
    return 0;
  }
  InitLog(options.verbose);
  const Status status = Serve(options);
  if (status.ok()) return 0;
  std::cerr << "ds4-worker: " << status.message() << "\n";
  return 1;
}

}  // namespace
}  // namespace ds4

int main(int argc, char** argv) { return ds4::Main(argc, argv); }
