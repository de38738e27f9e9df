#include "engine/tools/gguf_check.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"
#include "engine/gguf/fingerprint.h"
#include "engine/model/model_config.h"
#include "engine/model/tensor_names.h"
#include "engine/tensor/finite.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

constexpr int64_t kMaxPrinted = 20;

class Checker {
 public:
  Checker(const GgufFile& file, std::ostream& out, std::ostream& progress)
      : file_(file), out_(out), progress_(progress) {}

  Status Run() {
    CheckModel();
    CheckData();
    const auto digest = ModelDigest(file_);
    if (!digest.ok()) return digest.status();
    out_ << file_.tensors().size() << " tensors, " << HumanBytes(file_.file_bytes()) << ", digest "
         << *digest << "\n";
    if (num_problems_ == 0) {
      out_ << "ok\n";
      return OkStatus();
    }
    if (num_problems_ > kMaxPrinted) {
      out_ << "... and " << num_problems_ - kMaxPrinted << " problems more\n";
    }
    return DataLossError(
        StrCat(file_.path(), ": ", num_problems_, num_problems_ == 1 ? " problem" : " problems"));
  }

 private:
  void Problem(const std::string& text) {
    if (++num_problems_ <= kMaxPrinted) out_ << "problem: " << text << "\n";
  }

  void CheckModel() {
    const auto architecture = file_.GetString("general.architecture");
    if (architecture.ok() && *architecture != "deepseek4") {
      out_ << "architecture \"" << *architecture
           << "\": tensors are read, names and shapes are not checked (only deepseek4's are "
              "known)\n";
      return;
    }
    const auto config = ReadModelConfig(file_);
    if (!config.ok()) return Problem(config.status().message());
    num_experts_ = config->num_experts;
    std::set<std::string_view> needed;
    for (const TensorSpec& spec : ModelTensors(*config)) {
      const auto tensor = BindTensor(file_, spec);
      if (tensor.ok()) {
        needed.insert((*tensor)->name);
      } else {
        Problem(tensor.status().message());
      }
    }
    for (const TensorInfo& tensor : file_.tensors()) {
      if (!needed.contains(tensor.name)) out_ << "note: tensor " << tensor.name << " is not used\n";
    }
  }

  void CheckData() {
    int64_t done = 0;
    int64_t shown = 0;
    for (const TensorInfo& tensor : file_.tensors()) {
      const Status status = CheckFinite(tensor.dtype, file_.data(tensor));
      if (!status.ok()) Problem(StrCat("tensor ", tensor.name, ": ", status.message()));
      if (tensor.name.find("tid2eid") != std::string::npos) CheckExpertIds(tensor);
      done += tensor.size_bytes;
      if (done - shown < (int64_t{1} << 30)) continue;
      progress_ << "read " << HumanBytes(done) << " of " << HumanBytes(file_.file_bytes()) << "\n";
      shown = done;
    }
  }

  void CheckExpertIds(const TensorInfo& tensor) {
    if (tensor.dtype != DType::kI32) {
      return Problem(StrCat("tensor ", tensor.name, " has type ", Info(tensor.dtype).name,
                            ", expert ids are I32"));
    }
    const auto bytes = file_.data(tensor);
    for (size_t i = 0; i < bytes.size() / 4; ++i) {
      const auto id = LoadLittleEndian<int32_t>(bytes.data() + 4 * i);
      if (id >= 0 && (num_experts_ == 0 || id < num_experts_)) continue;
      return Problem(StrCat("tensor ", tensor.name, " holds expert ", id, " at index ", i,
                            ", there are ", num_experts_));
    }
  }

  const GgufFile& file_;
  std::ostream& out_;
  std::ostream& progress_;
  int64_t num_problems_ = 0;
  int64_t num_experts_ = 0;  // 0: not known
};

}  // namespace

Status CheckModelFile(const GgufFile& file, std::ostream& out, std::ostream& progress) {
  return Checker(file, out, progress).Run();
}

}  // namespace ds4
