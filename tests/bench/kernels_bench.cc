// How fast the kernels are: decode (one row, weights from memory) in bytes read per second, prefill
// in operations per second, and the small ops of a decode step in time. Never passes or fails on
// time.
//   kernels_bench --benchmark_filter=MatMul
//   DS4_ISA=avx2 kernels_bench ...
#include <benchmark/benchmark.h>

#include <memory>
#include <random>
#include <vector>

#include "engine/kernels/attention.h"
#include "engine/kernels/hyper_connection.h"
#include "engine/kernels/indexer.h"
#include "engine/kernels/matmul.h"
#include "engine/kernels/norm.h"
#include "engine/kernels/quantize.h"
#include "engine/kernels/swiglu.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

std::vector<float> Floats(int64_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = static_cast<float>(engine() % 2000) / 1000.0f - 1.0f;
  return values;
}

// One row of random values, stored in every row: what they are makes no difference to the speed.
Matrix FilledMatrix(DType dtype, int64_t rows, int64_t cols) {
  Matrix matrix = std::move(Matrix::Create(dtype, rows, cols)).value();
  const std::vector<float> values = Floats(cols, 1);
  std::vector<std::byte> row(static_cast<size_t>(BytesFor(dtype, cols)));
  CHECK(Quantize(dtype, values, row).ok());
  for (int64_t r = 0; r < rows; ++r) CHECK(matrix.SetRow(r, dtype, row.data()).ok());
  return matrix;
}

struct Inputs {
  Inputs(int64_t num_rows, int64_t cols)
      : f32(Floats(num_rows * cols, 2)),
        q_memory(static_cast<size_t>(num_rows * cols + 64)),
        scale(static_cast<size_t>(num_rows * cols / 32)) {
    int8_t* q = q_memory.data() + 64 - reinterpret_cast<uintptr_t>(q_memory.data()) % 64;
    ThreadPool pool(1);
    QuantizeRows(f32.data(), num_rows, cols, cols, q, scale.data(), pool);
    view = {num_rows, cols, f32.data(), cols, q, scale.data()};
  }
  std::vector<float> f32;
  std::vector<int8_t> q_memory;  // used from a 64-byte boundary on
  std::vector<float> scale;
  ActivationView view;
};

// range: type, weight rows, columns, input rows, threads.
void BM_MatMul(benchmark::State& state) {
  const auto dtype = static_cast<DType>(state.range(0));
  const int64_t rows = state.range(1), cols = state.range(2), num_x = state.range(3);
  const Matrix w = FilledMatrix(dtype, rows, cols);
  const Inputs x(num_x, cols);
  std::vector<float> y(static_cast<size_t>(num_x * rows));
  ThreadPool pool(static_cast<int>(state.range(4)));
  for (auto _ : state) {
    MatMul({.w = w.view(), .x = x.view, .y = y.data(), .y_stride = rows}, pool);
    benchmark::ClobberMemory();
  }
  const auto rate = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["weight_bytes"] = benchmark::Counter(static_cast<double>(w.size_bytes()), rate);
  state.counters["flops"] =
      benchmark::Counter(2.0 * static_cast<double>(rows * cols * num_x), rate);
  state.SetLabel(std::string(Info(dtype).name) + " " + std::string(KernelIsa()));
}

void MatMulArgs(benchmark::internal::Benchmark* b) {
  const int64_t q8 = static_cast<int64_t>(DType::kQ8_0), f16 = static_cast<int64_t>(DType::kF16);
  const int64_t bf16 = static_cast<int64_t>(DType::kBF16), f32 = static_cast<int64_t>(DType::kF32);
  for (const int64_t threads : {1, 2}) {
    b->Args({q8, 65536, 4096, 1, threads});   // 285 MB: from memory
    b->Args({f16, 32768, 4096, 1, threads});  // 268 MB
    b->Args({q8, 4096, 4096, 1, threads});    // 18 MB: from the L3 cache
    b->Args({q8, 512, 512, 1, threads});      // a small model's matrix
    for (const int64_t num_x : {2, 4, 5, 8, 16}) {
      b->Args({q8, 16384, 4096, num_x, threads});
      b->Args({f16, 16384, 4096, num_x, threads});
    }
    b->Args({q8, 4096, 4096, 512, threads});
    b->Args({q8, 1024, 512, 512, threads});
    b->Args({f16, 4096, 4096, 512, threads});
    b->Args({bf16, 2048, 4096, 512, threads});
    b->Args({f32, 2048, 4096, 512, threads});
    b->Args({f32, 24, 16384, 1, threads});  // one site of hyper-connections
    b->Args({f32, 24, 16384, 512, threads});
  }
}
BENCHMARK(BM_MatMul)->Apply(MatMulArgs)->UseRealTime()->Unit(benchmark::kMicrosecond);

// A decode step's experts: 6 gate and up pairs, in one region. range: expert width, columns,
// threads.
void BM_ExpertJobs(benchmark::State& state) {
  const int64_t width = state.range(0), cols = state.range(1);
  std::vector<Matrix> weights;
  for (int i = 0; i < 12; ++i) weights.push_back(FilledMatrix(DType::kQ8_0, width, cols));
  const Inputs x(1, cols);
  std::vector<float> y(static_cast<size_t>(12 * width));
  std::vector<MatMulJob> jobs;
  for (int64_t i = 0; i < 12; ++i) {
    jobs.push_back({.w = weights[static_cast<size_t>(i)].view(),
                    .x = x.view,
                    .y = y.data() + i * width,
                    .y_stride = width});
  }
  ThreadPool pool(static_cast<int>(state.range(2)));
  for (auto _ : state) {
    MatMul(jobs, pool);
    benchmark::ClobberMemory();
  }
  state.counters["weight_bytes"] =
      benchmark::Counter(static_cast<double>(12 * weights[0].size_bytes()),
                         benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_ExpertJobs)
    ->ArgsProduct({{64, 256, 2048}, {256, 4096}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

// What a parallel region costs by itself: 2 threads against the caller alone.
void BM_EmptyRegion(benchmark::State& state) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  for (auto _ : state) {
    pool.ParallelFor(64, 1, [](int64_t begin, int64_t) { benchmark::DoNotOptimize(begin); });
  }
}
BENCHMARK(BM_EmptyRegion)->Arg(1)->Arg(2)->UseRealTime();

// range: rows, heads, keys, threads; head_dim 512.
void BM_Attend(benchmark::State& state) {
  const int64_t rows = state.range(0), heads = state.range(1), num_keys = state.range(2), dim = 512;
  const std::vector<float> q = Floats(rows * heads * dim, 3), memory = Floats(num_keys * dim, 4);
  const std::vector<float> sinks(static_cast<size_t>(heads));
  std::vector<KeyList> keys(static_cast<size_t>(rows));
  for (KeyList& list : keys) {
    for (int64_t j = 0; j < num_keys; ++j) list.push_back(memory.data() + j * dim);
  }
  std::vector<float> out(q.size());
  ThreadPool pool(static_cast<int>(state.range(3)));
  for (auto _ : state) {
    Attend(q.data(), sinks.data(), keys, rows, heads, dim, 0.044f, out.data(), pool);
    benchmark::ClobberMemory();
  }
  state.counters["flops"] =
      benchmark::Counter(4.0 * static_cast<double>(rows * heads * num_keys * dim),
                         benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Attend)
    ->ArgsProduct({{1, 32}, {64}, {128, 640, 4096}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

void BM_IndexerScores(benchmark::State& state) {
  const int64_t heads = 64, dim = 128, num_keys = 4096;
  const std::vector<float> q = Floats(heads * dim, 5), w = Floats(heads, 6),
                           keys = Floats(num_keys * dim, 7);
  std::vector<float> out(static_cast<size_t>(num_keys));
  for (auto _ : state) {
    IndexerScores(q.data(), w.data(), heads, dim, keys.data(), num_keys, 0.01f, out.data());
    benchmark::ClobberMemory();
  }
  state.counters["flops"] = benchmark::Counter(2.0 * static_cast<double>(heads * dim * num_keys),
                                               benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_IndexerScores)->UseRealTime()->Unit(benchmark::kMicrosecond);

void BM_TopK(benchmark::State& state) {
  const std::vector<float> scores = Floats(state.range(0), 8);
  std::vector<int32_t> out(512);
  for (auto _ : state)
    benchmark::DoNotOptimize(TopKIndices(scores.data(), state.range(0), 512, out.data()));
}
BENCHMARK(BM_TopK)->Arg(4096)->Arg(65536)->Unit(benchmark::kMicrosecond);

// The small ops of one decoded row of Flash, each alone. range: rows, threads.
void BM_RmsNorm(benchmark::State& state) {
  const std::vector<float> x = Floats(state.range(0) * 4096, 9), w = Floats(4096, 10);
  std::vector<float> y(x.size());
  ThreadPool pool(static_cast<int>(state.range(1)));
  for (auto _ : state) {
    RmsNorm(x.data(), w.data(), state.range(0), 4096, 1e-6f, y.data(), pool);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_RmsNorm)
    ->ArgsProduct({{1, 4, 8, 16, 512}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

void BM_QuantizeRows(benchmark::State& state) {
  const std::vector<float> x = Floats(state.range(0) * 4096, 11);
  std::vector<int8_t> q(x.size());
  std::vector<float> scale(x.size() / 32);
  ThreadPool pool(static_cast<int>(state.range(1)));
  for (auto _ : state) {
    QuantizeRows(x.data(), state.range(0), 4096, 4096, q.data(), scale.data(), pool);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_QuantizeRows)
    ->ArgsProduct({{1, 4, 8, 16, 512}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

void BM_SwiGlu(benchmark::State& state) {
  const std::vector<float> gate = Floats(state.range(0) * 2048, 12);
  std::vector<float> out(gate.size());
  ThreadPool pool(static_cast<int>(state.range(1)));
  for (auto _ : state) {
    SwiGlu(gate.data(), gate.data(), nullptr, state.range(0), 2048, 10.0f, out.data(), pool);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_SwiGlu)
    ->ArgsProduct({{1, 4, 8, 512}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

void BM_HyperConnection(benchmark::State& state) {
  const int64_t rows = state.range(0), dim = state.range(1);
  HyperConnectionParams params;
  params.hidden_dim = dim;
  const Matrix fn = FilledMatrix(DType::kF32, 24, 4 * dim);
  const std::vector<float> base = Floats(24, 13), scale = Floats(3, 14),
                           result = Floats(rows * dim, 15);
  std::vector<float> streams = Floats(rows * 4 * dim, 16),
                     collapsed(static_cast<size_t>(rows * dim));
  std::vector<float> post(static_cast<size_t>(rows * 4)), comb(static_cast<size_t>(rows * 16));
  ThreadPool pool(static_cast<int>(state.range(2)));
  for (auto _ : state) {
    HyperConnectionPre(streams.data(), rows, params, {fn.view(), base.data(), scale.data()},
                       collapsed.data(), post.data(), comb.data(), pool);
    HyperConnectionPost(streams.data(), result.data(), post.data(), comb.data(), rows, params,
                        pool);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_HyperConnection)
    ->ArgsProduct({{1, 256}, {256, 4096}, {1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ds4

BENCHMARK_MAIN();
