#include "engine/tools/gguf_inspect.h"

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

struct Totals {
  int64_t num_tensors = 0;
  int64_t num_elems = 0;
  int64_t bytes = 0;

  void Add(const TensorInfo& tensor) {
    ++num_tensors;
    num_elems += tensor.num_elems();
    bytes += tensor.size_bytes;
  }
};

std::string DimsText(const TensorInfo& tensor) {
  std::vector<std::string> parts;
  for (const int64_t dim : tensor.dims) parts.push_back(StrCat(dim));
  return "[" + StrJoin(parts, ", ") + "]";
}

void PrintKeys(const GgufFile& file, std::ostream& out) {
  const auto keys = file.KeyTexts();
  size_t name_width = 0;
  size_t type_width = 0;
  for (const GgufKeyText& key : keys) {
    name_width = std::max(name_width, key.key.size());
    type_width = std::max(type_width, key.type.size());
  }
  out << "\nMetadata (" << keys.size() << " keys)\n" << std::left;
  for (const GgufKeyText& key : keys) {
    out << "  " << std::setw(static_cast<int>(name_width)) << key.key << "  "
        << std::setw(static_cast<int>(type_width)) << key.type << "  " << key.value << "\n";
  }
}

void PrintTensors(const GgufFile& file, std::ostream& out) {
  size_t name_width = 6;
  size_t dims_width = 4;
  for (const TensorInfo& tensor : file.tensors()) {
    name_width = std::max(name_width, tensor.name.size());
    dims_width = std::max(dims_width, DimsText(tensor).size());
  }
  out << "\nTensors (" << file.tensors().size() << "; first dim contiguous)\n";
  for (const TensorInfo& tensor : file.tensors()) {
    out << "  " << std::left << std::setw(static_cast<int>(name_width)) << tensor.name << "  "
        << std::setw(8) << Info(tensor.dtype).name << "  "
        << std::setw(static_cast<int>(dims_width)) << DimsText(tensor) << "  " << std::right
        << std::setw(12) << HumanBytes(tensor.size_bytes) << "  at " << tensor.offset << "\n";
  }
}

void PrintTotals(const GgufFile& file, std::ostream& out) {
  std::map<std::string, Totals, std::less<>> by_type;
  Totals all;
  for (const TensorInfo& tensor : file.tensors()) {
    by_type[std::string(Info(tensor.dtype).name)].Add(tensor);
    all.Add(tensor);
  }
  by_type["all"] = all;
  out << "\nTotals by type\n";
  for (const auto& [name, totals] : by_type) {
    const double bits = 8.0 * static_cast<double>(totals.bytes) /
                        static_cast<double>(std::max<int64_t>(1, totals.num_elems));
    out << "  " << std::left << std::setw(8) << name << std::right << std::setw(6)
        << totals.num_tensors << " tensors" << std::setw(16) << totals.num_elems << " values"
        << std::setw(12) << HumanBytes(totals.bytes) << "  " << Fixed(bits, 2) << " bits each\n";
  }
}

}  // namespace

void PrintFile(const GgufFile& file, std::ostream& out) {
  out << file.path() << ": GGUF version " << file.version() << ", " << HumanBytes(file.file_bytes())
      << ", alignment " << file.alignment() << "\n";
  PrintKeys(file, out);
  PrintTensors(file, out);
  PrintTotals(file, out);
}

void PrintFileJson(const GgufFile& file, std::ostream& out) {
  using Json = nlohmann::ordered_json;
  Json json;
  json["path"] = file.path();
  json["version"] = file.version();
  json["file_bytes"] = file.file_bytes();
  json["alignment"] = file.alignment();
  json["metadata"] = Json::array();
  for (const GgufKeyText& key : file.KeyTexts()) {
    json["metadata"].push_back({{"key", key.key}, {"type", key.type}, {"value", key.value}});
  }
  json["tensors"] = Json::array();
  for (const TensorInfo& tensor : file.tensors()) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"type", Info(tensor.dtype).name},
                               {"dims", tensor.dims},
                               {"offset", tensor.offset},
                               {"bytes", tensor.size_bytes}});
  }
  // Names come from the file and need not be UTF-8; bad bytes print as the replacement character.
  out << json.dump(1, ' ', false, Json::error_handler_t::replace) << "\n";
}

}  // namespace ds4
