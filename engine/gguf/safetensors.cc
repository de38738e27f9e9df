#include "engine/gguf/safetensors.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

// Bytes of one value, 0 for a type we do not know.
int64_t ItemBytes(std::string_view dtype) {
  static constexpr std::pair<std::string_view, int64_t> kTypes[] = {
      {"F64", 8},  {"F32", 4},     {"F16", 2},     {"BF16", 2},   {"I64", 8}, {"I32", 4},
      {"I16", 2},  {"I8", 1},      {"U64", 8},     {"U32", 4},    {"U16", 2}, {"U8", 1},
      {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
  for (const auto& [name, bytes] : kTypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

// A JSON number that is an integer of at least 0 and fits.
bool GetCount(const Json& json, int64_t* count) {
  if (!json.is_number_unsigned()) return false;
  const auto value = json.get<uint64_t>();
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
  *count = static_cast<int64_t>(value);
  return true;
}

// The header's JSON; a key that appears twice in one object is an error, since one would be lost.
Result<Json> ParseJson(std::string_view text) {
  std::vector<std::set<std::string>> seen;
  std::string twice;
  const Json::parser_callback_t watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) seen.emplace_back();
    if (event == Json::parse_event_t::object_end) seen.pop_back();
    if (event == Json::parse_event_t::key && !seen.back().insert(value.get<std::string>()).second) {
      twice = value.get<std::string>();
    }
    return true;
  };
  Json json = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    return InvalidArgumentError("the header is not a JSON object");
  }
  if (!twice.empty()) return InvalidArgumentError(StrCat("\"", twice, "\" appears twice"));
  return json;
}

// dtype, shape and offsets of one entry, which must agree.
Result<SafetensorInfo> ParseEntry(const std::string& name, const Json& entry) {
  const auto bad = [&name](const std::string& what) {
    return InvalidArgumentError(StrCat("tensor ", name, " ", what));
  };
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry["shape"].is_array() || !entry.contains("data_offsets") ||
      !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2) {
    return bad("needs dtype, shape and two data_offsets");
  }
  SafetensorInfo info;
  info.name = name;
  info.dtype = entry["dtype"].get<std::string>();
  int64_t bytes = ItemBytes(info.dtype);
  if (bytes == 0) return bad(StrCat("has the unknown dtype ", info.dtype));
  for (const Json& item : entry["shape"]) {
    int64_t dim = 0;
    if (!GetCount(item, &dim)) return bad(StrCat("has the dim ", item.dump()));
    if (dim != 0 && bytes > std::numeric_limits<int64_t>::max() / dim) return bad("is too large");
    bytes *= dim;
    info.shape.push_back(dim);
  }
  int64_t end = 0;
  if (!GetCount(entry["data_offsets"][0], &info.offset) ||
      !GetCount(entry["data_offsets"][1], &end) || end < info.offset) {
    return bad(StrCat("has the data_offsets ", entry["data_offsets"].dump()));
  }
  info.size_bytes = end - info.offset;
  if (info.size_bytes != bytes) {
    return bad(StrCat("has ", info.size_bytes, " bytes, dtype ", info.dtype, " and its shape need ",
                      bytes));
  }
  return info;
}

}  // namespace

int64_t SafetensorInfo::num_elems() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Result<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  ASSIGN_OR_RETURN(MappedFile mapping, MappedFile::Open(path));
  ASSIGN_OR_RETURN(auto file, Parse(mapping.bytes(), path));
  file->mapping_ = std::move(mapping);
  return file;
}

Result<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Parse(std::span<const std::byte> bytes,
                                                                const std::string& name) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->path_ = name;
  file->bytes_ = bytes;
  RETURN_IF_ERROR(file->ParseHeader().WithContext(name));
  RETURN_IF_ERROR(file->CheckPlaces().WithContext(name));
  return file;
}

Status SafetensorsFile::ParseHeader() {
  if (bytes_.size() < kLengthBytes) {
    return InvalidArgumentError(StrCat("not a safetensors file: it has ", bytes_.size(), " bytes"));
  }
  const auto header_bytes = LoadLittleEndian<uint64_t>(bytes_.data());
  if (header_bytes > bytes_.size() - kLengthBytes || header_bytes > kMaxHeaderBytes) {
    return InvalidArgumentError(StrCat("the header has ", header_bytes, " bytes, the file ",
                                       bytes_.size(), ", the format's limit is ", kMaxHeaderBytes));
  }
  ASSIGN_OR_RETURN(const Json header,
                   ParseJson({reinterpret_cast<const char*>(bytes_.data()) + kLengthBytes,
                              static_cast<size_t>(header_bytes)}));
  const auto data_start = static_cast<int64_t>(header_bytes) + kLengthBytes;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) return InvalidArgumentError("__metadata__ is not an object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string())
          return InvalidArgumentError(StrCat("metadata ", key, " is not text"));
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    ASSIGN_OR_RETURN(SafetensorInfo info, ParseEntry(name, entry));
    const int64_t room = static_cast<int64_t>(bytes_.size()) - data_start;
    if (info.offset > room || info.size_bytes > room - info.offset) {
      return InvalidArgumentError(StrCat("tensor ", name, " at data offset ", info.offset, " has ",
                                         info.size_bytes, " bytes, the data section has ", room,
                                         "; the file is cut short or damaged"));
    }
    info.offset += data_start;
    tensors_.push_back(std::move(info));
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const SafetensorInfo& a, const SafetensorInfo& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.size_bytes < b.size_bytes;
  });
  for (size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
  return OkStatus();
}

Status SafetensorsFile::CheckPlaces() const {
  for (size_t i = 1; i < tensors_.size(); ++i) {
    const SafetensorInfo& before = tensors_[i - 1];
    if (before.offset + before.size_bytes > tensors_[i].offset) {
      return InvalidArgumentError(StrCat("tensors ", before.name, " (offset ", before.offset, ", ",
                                         before.size_bytes, " bytes) and ", tensors_[i].name,
                                         " (offset ", tensors_[i].offset, ") overlap"));
    }
  }
  return OkStatus();
}

const SafetensorInfo* SafetensorsFile::Find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

std::span<const std::byte> SafetensorsFile::data(const SafetensorInfo& tensor) const {
  return bytes_.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.size_bytes));
}

}  // namespace ds4
