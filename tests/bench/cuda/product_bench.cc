// Times Flash's dense decode products back to back in a graph, each launch with weights of its own
// so that nothing is in the L2 cache: microseconds and share of a bandwidth, with and without
// kernels that start while the one before ends.
//   product_bench [rows]
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/cuda/product.h"
#include "engine/cuda/workspace.h"

namespace ds4::cuda {
namespace {

constexpr double kBandwidth = 4.64e12;  // bytes/s, measured read rate of one H200
constexpr int kCopies = 12;

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}
void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

struct Case {
  const char* name;
  DType dtype;
  int64_t count, rows, cols;
  bool lanes;
};

void Run(const Case& c, int rows, Stream& stream, int num_sms) {
  PackedMatrix shape{c.dtype, c.count, c.rows, c.cols, nullptr};
  const int64_t bytes = c.count * shape.matrix_bytes();
  DeviceBuffer weights = Must(DeviceBuffer::Allocate(kCopies * bytes));
  const int64_t x_cols = c.count * PaddedCols(c.cols);
  Workspace sizes;
  sizes.TakeActivation(rows, 0, x_cols);
  DeviceBuffer x_memory = Must(DeviceBuffer::Allocate(sizes.used()));
  Workspace space(x_memory.data());
  ActivationView x = space.TakeActivation(rows, 0, x_cols);
  x.rows = rows;
  DeviceBuffer y = Must(DeviceBuffer::Allocate(rows * c.count * c.rows * 4));
  for (const bool overlap : {false, true}) {
    LaunchContext launch{&stream, num_sms, overlap};
    for (int i = 0; i < kCopies; ++i) {
      shape.data = weights.data() + i * bytes;
      LaunchFillRandom(launch, shape, i);
    }
    Must(stream.Synchronize());
    Graph graph = Must(Graph::Capture(stream, [&]() -> Status {
      for (int i = 0; i < kCopies; ++i) {
        shape.data = weights.data() + i * bytes;
        if (c.lanes) {
          LaunchLaneProduct(launch, shape, x, 0, y.as<float>());
          continue;
        }
        std::vector<ProductJob> jobs;
        for (int64_t k = 0; k < c.count; ++k) {
          ProductJob job;
          job.w = shape.At(k);
          job.x = x;
          job.x_col = k * PaddedCols(c.cols);
          job.y = y.as<float>() + k * c.rows;
          job.y_stride = c.count * c.rows;
          jobs.push_back(job);
        }
        LaunchProducts(launch, jobs);
      }
      return LaunchStatus();
    }));
    Event from = Must(Event::Create()), to = Must(Event::Create());
    Must(graph.Launch(stream));
    Must(from.Record(stream));
    constexpr int kRuns = 5;
    for (int i = 0; i < kRuns; ++i) Must(graph.Launch(stream));
    Must(to.Record(stream));
    Must(stream.Synchronize());
    const double us = Must(to.MillisecondsSince(from)) * 1000 / (kRuns * kCopies);
    std::printf("%-28s %2d rows  %-10s %7.2f us  %5.1f MB  %4.0f %%\n", c.name, rows,
                overlap ? "overlap" : "no overlap", us, bytes / 1e6,
                100 * bytes / (us * 1e-6) / kBandwidth);
  }
}

}  // namespace
}  // namespace ds4::cuda

int main(int argc, char** argv) {
  using namespace ds4::cuda;
  using ds4::DType;
  const int rows = argc > 1 ? std::atoi(argv[1]) : 1;
  const DeviceInfo device = Must(ListDevices()).front();
  Must(UseDevice(0));
  Stream stream = Must(Stream::Create());
  for (const Case& c : {Case{"q_a 1024x4096", DType::kQ8_0, 1, 1024, 4096, false},
                        Case{"q_b 32768x1024", DType::kQ8_0, 1, 32768, 1024, false},
                        Case{"o_a 8 x 1024x4096", DType::kQ8_0, 8, 1024, 4096, false},
                        Case{"o_b 8 lanes of 4096x1024", DType::kQ8_0, 8, 4096, 1024, true},
                        Case{"compressor 2048x4096", DType::kF16, 1, 2048, 4096, false},
                        Case{"router 256x4096", DType::kF16, 1, 256, 4096, false},
                        Case{"head 64640x4096", DType::kQ8_0, 1, 64640, 4096, false}}) {
    Run(c, rows, stream, device.num_sms);
  }
  return 0;
}
