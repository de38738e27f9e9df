// Goal: a pass on the device computes what the reference implementation computes, whatever the
// batch. Method: the golden model (tests/golden/README.md) in float32 with float32 keys; streams
// and logits within 1e-4, experts and compressed rows equal; then the same rows alone, in chunks
// and among other sessions, compared bit by bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/comm/exchange_communicator.h"
#include "engine/comm/local_transport.h"
#include "engine/cuda/transformer.h"
#include "engine/gguf/safetensors.h"
#include "engine/model/synthetic.h"
#include "tests/golden/golden_model.h"

namespace ds4::cuda {
namespace {

constexpr float kTolerance = 1e-4f;
constexpr int kNumCases = 4;

class Golden {
 public:
  Golden() : file_(SafetensorsFile::Open(GoldenData()).value()) {}
  template <typename T>
  std::vector<T> Get(const std::string& name) const {
    const SafetensorInfo* info = file_->Find(name);
    EXPECT_NE(info, nullptr) << name;
    if (info == nullptr) return {};
    std::vector<T> values(info->num_elems());
    std::memcpy(values.data(), file_->data(*info).data(), values.size() * sizeof(T));
    return values;
  }
  bool Has(const std::string& name) const { return file_->Find(name) != nullptr; }

 private:
  std::unique_ptr<SafetensorsFile> file_;
};

struct TestRow {
  int32_t token = 0;
  int32_t pos = 0;
  int32_t slot = 0;
};

// One rank of the golden model on the device.
class DeviceModel {
 public:
  explicit DeviceModel(int slots = 1, int64_t max_rows = 64) {
    EXPECT_TRUE(UseDevice(0).ok());
    file_ = GgufFile::Open(GoldenGguf()).value();
    config_ = ReadModelConfig(*file_).value();
    lanes_ = LaneLayout::Even(config_.num_lanes, 1);
    plan_ = MakeShardPlan(config_, *file_, lanes_).value();
    comm_ = MakeExchangeCommunicator(std::move(MakeLocalTransports(1).front()), lanes_);
    stream_ = Stream::Create().value();
    DeviceGroup::Options group;
    group.max_bytes = 1 << 20;
    group_ = DeviceGroup::Create(comm_.get(), stream_, group).value();
    weights_ = LoadDeviceWeights(config_, *file_, plan_.ranks[0], {}, stream_, nullptr).value();
    TransformerOptions options;
    options.max_rows = max_rows;
    options.max_context = 512;
    options.slots = slots;
    options.kv_type = KvType::kF32;
    transformer_ = DeviceTransformer::Create(config_, plan_.ranks[0], lanes_, weights_, options,
                                             group_.get(), &stream_, 4)
                       .value();
    rows_ = DeviceBuffer::Allocate(4 * max_rows * int64_t{sizeof(int32_t)}).value();
    max_rows_ = max_rows;
  }

  const ModelConfig& config() const { return config_; }

  // Logits of all rows, [rows, vocab].
  std::vector<float> Run(const std::vector<TestRow>& rows, DeviceTrace* trace = nullptr) {
    const auto count = static_cast<int64_t>(rows.size());
    std::vector<int32_t> host(4 * max_rows_);
    int32_t max_pos = 0;
    for (int64_t i = 0; i < count; ++i) {
      host[i] = rows[i].token;
      host[max_rows_ + i] = rows[i].pos;
      host[2 * max_rows_ + i] = rows[i].slot;
      host[3 * max_rows_ + i] = static_cast<int32_t>(i);
      max_pos = std::max(max_pos, rows[i].pos);
    }
    auto* device = rows_.as<int32_t>();
    Check(stream_.CopyToDevice(device, host.data(),
                               static_cast<int64_t>(host.size() * sizeof(int32_t))));
    const StepRows step{device, device + max_rows_, device + 2 * max_rows_};
    Check(transformer_->Forward(step, static_cast<int>(count), max_pos, false, trace));
    Check(transformer_->Logits(device + 3 * max_rows_, static_cast<int>(count),
                               static_cast<int>(count)));
    std::vector<float> logits(count * config_.vocab_size);
    Check(stream_.CopyToHost(logits.data(), transformer_->logits(),
                             static_cast<int64_t>(logits.size() * sizeof(float))));
    Check(stream_.Synchronize());
    return logits;
  }

  std::vector<float> RunChunks(const std::vector<int32_t>& ids, int64_t chunk, int slot = 0) {
    std::vector<float> logits;
    for (size_t from = 0; from < ids.size(); from += chunk) {
      std::vector<TestRow> rows;
      for (size_t i = from; i < std::min<size_t>(ids.size(), from + chunk); ++i) {
        rows.push_back({ids[i], static_cast<int32_t>(i), slot});
      }
      const std::vector<float> part = Run(rows);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
  }

 private:
  static void Check(const Status& status) { EXPECT_TRUE(status.ok()) << status; }

  std::unique_ptr<GgufFile> file_;
  ModelConfig config_;
  LaneLayout lanes_;
  ShardPlan plan_;
  std::unique_ptr<Communicator> comm_;
  Stream stream_;
  std::unique_ptr<DeviceGroup> group_;
  DeviceWeights weights_;
  std::unique_ptr<DeviceTransformer> transformer_;
  DeviceBuffer rows_;
  int64_t max_rows_ = 0;
};

float LargestDifference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  if (a.size() != b.size()) return INFINITY;
  float worst = 0.0f;
  for (size_t i = 0; i < a.size(); ++i) {
    const float d = std::abs(a[i] - b[i]);
    if (!(d <= worst)) worst = d;  // a NaN counts
  }
  return worst;
}

std::vector<int32_t> Sorted(std::vector<int32_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}

TEST(CudaForwardTest, StreamsPicksAndLogitsMatchTheReference) {
  const Golden golden;
  for (int n = 0; n < kNumCases; ++n) {
    const std::string name = "case." + std::to_string(n) + ".";
    SCOPED_TRACE(name);
    DeviceModel model;
    const ModelConfig& config = model.config();
    const auto ids = golden.Get<int32_t>(name + "input_ids");
    const auto expected_logits = golden.Get<float>(name + "logits");
    const auto length = static_cast<int64_t>(ids.size());
    constexpr int64_t kChunk = 40;
    for (int64_t from = 0; from < length; from += kChunk) {
      const int64_t count = std::min(kChunk, length - from);
      std::vector<TestRow> rows;
      for (int64_t i = from; i < from + count; ++i) {
        rows.push_back({ids[i], static_cast<int32_t>(i), 0});
      }
      DeviceTrace trace;
      const std::vector<float> logits = model.Run(rows, &trace);
      const auto part = [&](const std::vector<float>& all, int64_t width) {
        return std::vector<float>(all.begin() + from * width, all.begin() + (from + count) * width);
      };
      EXPECT_LT(LargestDifference(logits, part(expected_logits, config.vocab_size)), kTolerance);
      for (int64_t layer = 0; layer < config.num_layers; ++layer) {
        SCOPED_TRACE("layer " + std::to_string(layer) + ", rows from " + std::to_string(from));
        const std::string suffix = "." + std::to_string(layer);
        EXPECT_LT(LargestDifference(trace.streams[layer],
                                    part(golden.Get<float>(name + "hidden" + suffix),
                                         config.num_streams * config.hidden_dim)),
                  kTolerance);
        const auto experts = golden.Get<int32_t>(name + "experts" + suffix);
        for (int64_t t = 0; t < count; ++t) {
          const std::vector<int32_t>& ours = trace.expert_ids[layer];
          EXPECT_EQ(Sorted({ours[2 * t], ours[2 * t + 1]}),
                    Sorted({experts[2 * (from + t)], experts[2 * (from + t) + 1]}));
        }
        if (!golden.Has(name + "index" + suffix)) continue;
        const auto index = golden.Get<int32_t>(name + "index" + suffix);
        const int64_t width = static_cast<int64_t>(index.size()) / length;
        for (int64_t t = 0; t < count; ++t) {
          std::vector<int32_t> expected;
          for (int64_t i = 0; i < width; ++i) {
            const int32_t row = index[(from + t) * width + i];
            if (row >= 0) expected.push_back(row);
          }
          const auto first = trace.index_picks[layer].begin() + t * config.index_top_k;
          EXPECT_EQ(std::vector<int32_t>(first, first + trace.index_counts[layer][t]), expected)
              << "row " << from + t;
        }
      }
    }
  }
}

// What a compressor has not pooled yet is 8 to 16 KiB a row and layer: too much for whole chunks.
TEST(CudaCacheTest, LongBatchesLengthenTheWindowRingsOnly) {
  const auto file = MakeSyntheticFile("flash", "q2", 0).value();
  const ModelConfig config = ReadModelConfig(*file).value();
  TransformerOptions options;
  options.max_rows = kMaxFewRows;
  const int64_t few = DeviceTransformer::CacheBytes(config, options);
  options.max_rows = 2048;
  const int64_t many = DeviceTransformer::CacheBytes(config, options);
  EXPECT_EQ(many - few,
            config.num_layers * (2048 - kMaxFewRows) * config.head_dim * KvBytes(options.kv_type));
}

TEST(CudaForwardTest, ChunksGiveTheSameBits) {
  const Golden golden;
  const auto ids = golden.Get<int32_t>("case.2.input_ids");
  DeviceModel model;
  const std::vector<float> expected = model.RunChunks(ids, 40);
  for (int64_t chunk : {1, 7, 17}) EXPECT_EQ(model.RunChunks(ids, chunk), expected) << chunk;
}

TEST(CudaForwardTest, SessionsInOneBatchDoNotTouchEachOther) {
  const Golden golden;
  const auto ids = golden.Get<int32_t>("case.2.input_ids");
  DeviceModel model(3);
  const std::vector<float> alone = model.RunChunks(ids, 40, 1);
  // Three sessions, one shifted text each, in steps of different sizes.
  std::vector<int32_t> other(ids.rbegin(), ids.rend());
  const int64_t vocab = model.config().vocab_size;
  std::vector<float> together;
  int32_t a = 0, b = 0, c = 0;
  while (a < 40) {
    std::vector<TestRow> rows;
    const int32_t steps = std::min<int32_t>(40 - a, 1 + a % 5);
    for (int i = 0; i < 3 && b < 40; ++i, ++b) rows.push_back({other[b], b, 0});
    const size_t first = rows.size();
    for (int i = 0; i < steps; ++i, ++a) rows.push_back({ids[a], a, 1});
    rows.push_back({7, 0, -1});  // a row that only fills up
    for (int i = 0; i < 2 && c < 40; ++i, ++c) rows.push_back({other[39 - c], c, 2});
    const std::vector<float> logits = model.Run(rows);
    together.insert(together.end(), logits.begin() + first * vocab,
                    logits.begin() + (first + steps) * vocab);
  }
  EXPECT_EQ(together, alone);
}

}  // namespace
}  // namespace ds4::cuda
