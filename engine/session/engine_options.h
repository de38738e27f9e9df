// What an engine is made with. Values only; engine.h says who makes engines.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"

namespace ds4 {

enum class Backend { kCpu, kCuda, kCount };

// "cpu", "cuda".
std::string_view BackendName(Backend backend);
// kInvalidArgument names the text and what it may be.
Result<Backend> ParseBackend(std::string_view text);

// Rows of one forward pass that keep the backend busy in prefill: cpu 512, cuda 2048.
int64_t DefaultBatchRows(Backend backend);

// Where the routed experts' weights live; everything else is always in the device's own memory.
enum class ExpertMemory {
  kDevice,
  kHost,  // pinned host memory that the device reads over its link: slower, for what does not fit
};

// How a device holds the compressors' and the indexer's F16 and BF16 projections, which every rank
// has whole. The router's and the hyper-connections' matrices always stay as the file has them.
enum class ReplicatedWeights {
  kAuto,  // kQ8_0 where the layer's other projections of the same input are Q8_0 in the file, so
          // that the input is rounded to int8 for them already; else kFile
  kFile,  // in the file's type
  kQ8_0,
};
// "auto", "file", "q8_0".
std::string_view ReplicatedWeightsName(ReplicatedWeights weights);
// kInvalidArgument names the text and what it may be.
Result<ReplicatedWeights> ParseReplicatedWeights(std::string_view text);

struct EngineOptions {
  std::string model_path;  // unused when `synthetic` is set
  int num_threads = 1;
  int64_t max_context = 4096;    // of one session
  int64_t max_batch_rows = 512;  // rows of one forward pass: the prefill chunk (same on all ranks)
  int max_sessions = 1;

  Backend backend = Backend::kCpu;
  // Random weights instead of a file: shapes of this preset, routed experts of this type
  // (engine/model/synthetic.h). Every rank makes the same ones. Empty: model_path.
  std::string synthetic;
  std::string quant = "q2";
  int64_t synthetic_layers = 0;  // 0: the preset's

  // CUDA only; the CPU engine takes the first value of each but kv_f32, which it always does, and
  // computes with the file's weights.
  int device = 0;              // index as the driver counts
  bool kv_f32 = false;         // keys and compressed rows in float32; false: bfloat16
  bool deterministic = false;  // shared sums keep their lanes in prefill too, not only in decode
  ExpertMemory expert_memory = ExpertMemory::kDevice;
  ReplicatedWeights replicated_weights = ReplicatedWeights::kAuto;  // the same on all ranks
  // How small sums go from device to device: auto (a probe at start), push (stores into the peers'
  // memory), nccl, or host (through the workers' own transport).
  std::string device_transport = "auto";
};

// The file that the options name: model_path with its data, or the directory (no data) of the
// synthetic model.
Result<std::unique_ptr<GgufFile>> OpenEngineModel(const EngineOptions& options);

}  // namespace ds4
