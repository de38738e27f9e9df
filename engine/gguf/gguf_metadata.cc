// Metadata values out of a parsed file. Offsets and counts were checked when it was parsed.
#include <cmath>
#include <limits>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"
#include "engine/gguf/gguf_format.h"
#include "engine/gguf/gguf_reader.h"

namespace ds4 {
namespace {

constexpr int64_t kMaxShownItems = 8;
constexpr size_t kMaxShownBytes = 60;

bool IsInteger(GgufType type) {
  return GgufItemBytes(type) > 0 && type != GgufType::kBool && type != GgufType::kF32 &&
         type != GgufType::kF64;
}

// Text in quotes, control bytes made visible, long ones cut.
std::string Quoted(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  size_t shown = std::min(text.size(), kMaxShownBytes);
  // Not in the middle of a UTF-8 sequence.
  while (shown < text.size() && shown > 0 && (text[shown] & 0xc0) == 0x80) --shown;
  std::string out = "\"";
  for (const char c : text.substr(0, shown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (byte < 0x20 || byte == 0x7f) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
  }
  out += '"';
  if (shown < text.size()) out += StrCat("... (", text.size(), " bytes)");
  return out;
}

}  // namespace

Result<const GgufFile::Value*> GgufFile::Find(std::string_view key, bool want_array,
                                              std::string_view wanted) const {
  const auto it = key_index_.find(key);
  if (it == key_index_.end()) {
    return NotFoundError(StrCat(path_, ": metadata key ", key, " is missing"));
  }
  const Value& value = keys_[it->second].value;
  if (value.is_array != want_array) {
    return InvalidArgumentError(StrCat(path_, ": metadata key ", key, " is ",
                                       value.is_array ? "an array of " : "one ",
                                       GgufTypeName(value.type), ", needed is ", wanted));
  }
  return &value;
}

std::string_view GgufFile::StringAt(int64_t offset) const {
  const std::byte* at = bytes_.data() + offset;
  const auto length = static_cast<size_t>(LoadLittleEndian<uint64_t>(at));
  return {reinterpret_cast<const char*>(at) + 8, length};
}

Result<int64_t> GgufFile::ReadInt(std::string_view key, const Value& value, int64_t index) const {
  if (!IsInteger(value.type)) {
    return InvalidArgumentError(StrCat(path_, ": metadata key ", key, " has type ",
                                       GgufTypeName(value.type), ", needed is an integer"));
  }
  const std::byte* at = bytes_.data() + value.offset + index * GgufItemBytes(value.type);
  switch (value.type) {
    case GgufType::kU8:
      return int64_t{LoadLittleEndian<uint8_t>(at)};
    case GgufType::kI8:
      return int64_t{LoadLittleEndian<int8_t>(at)};
    case GgufType::kU16:
      return int64_t{LoadLittleEndian<uint16_t>(at)};
    case GgufType::kI16:
      return int64_t{LoadLittleEndian<int16_t>(at)};
    case GgufType::kU32:
      return int64_t{LoadLittleEndian<uint32_t>(at)};
    case GgufType::kI32:
      return int64_t{LoadLittleEndian<int32_t>(at)};
    case GgufType::kI64:
      return LoadLittleEndian<int64_t>(at);
    default:
      break;
  }
  const auto wide = LoadLittleEndian<uint64_t>(at);
  if (wide > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return InvalidArgumentError(
        StrCat(path_, ": metadata key ", key, " is ", wide, ", which does not fit in 63 bits"));
  }
  return static_cast<int64_t>(wide);
}

Result<double> GgufFile::ReadFloat(std::string_view key, const Value& value, int64_t index) const {
  const std::byte* at = bytes_.data() + value.offset + index * GgufItemBytes(value.type);
  if (value.type == GgufType::kF32) return double{LoadLittleEndian<float>(at)};
  if (value.type == GgufType::kF64) return LoadLittleEndian<double>(at);
  return InvalidArgumentError(StrCat(path_, ": metadata key ", key, " has type ",
                                     GgufTypeName(value.type), ", needed is f32 or f64"));
}

Result<int64_t> GgufFile::GetInt(std::string_view key) const {
  ASSIGN_OR_RETURN(const Value* value, Find(key, false, "one integer"));
  return ReadInt(key, *value, 0);
}

Result<double> GgufFile::GetFloat(std::string_view key) const {
  ASSIGN_OR_RETURN(const Value* value, Find(key, false, "one f32 or f64"));
  return ReadFloat(key, *value, 0);
}

Result<bool> GgufFile::GetBool(std::string_view key) const {
  ASSIGN_OR_RETURN(const Value* value, Find(key, false, "one bool"));
  if (value->type != GgufType::kBool) {
    return InvalidArgumentError(StrCat(path_, ": metadata key ", key, " has type ",
                                       GgufTypeName(value->type), ", needed is bool"));
  }
  return bytes_[static_cast<size_t>(value->offset)] != std::byte{0};
}

Result<std::string> GgufFile::GetString(std::string_view key) const {
  ASSIGN_OR_RETURN(const Value* value, Find(key, false, "one string"));
  if (value->type != GgufType::kString) {
    return InvalidArgumentError(StrCat(path_, ": metadata key ", key, " has type ",
                                       GgufTypeName(value->type), ", needed is string"));
  }
  return std::string(StringAt(value->offset));
}

Result<std::vector<int64_t>> GgufFile::GetIntArray(std::string_view key) const {
  ASSIGN_OR_RETURN(const Value* value, Find(key, true, "an array of integers"));
  std::vector<int64_t> items;
  for (int64_t i = 0; i < value->count; ++i) {
    ASSIGN_OR_RETURN(items.emplace_back(), ReadInt(key, *value, i));
  }
  return items;
}

Result<std::vector<double>> GgufFile::GetFloatArray(std::string_view key) const {
  ASSIGN_OR_RETURN(const Value* value, Find(key, true, "an array of f32 or f64"));
  std::vector<double> items;
  for (int64_t i = 0; i < value->count; ++i) {
    ASSIGN_OR_RETURN(items.emplace_back(), ReadFloat(key, *value, i));
  }
  return items;
}

Result<std::vector<std::string>> GgufFile::GetStringArray(std::string_view key) const {
  ASSIGN_OR_RETURN(const Value* value, Find(key, true, "an array of strings"));
  if (value->type != GgufType::kString) {
    return InvalidArgumentError(StrCat(path_, ": metadata key ", key, " is an array of ",
                                       GgufTypeName(value->type), ", needed are strings"));
  }
  std::vector<std::string> items;
  items.reserve(static_cast<size_t>(value->count));
  int64_t offset = value->offset;
  for (int64_t i = 0; i < value->count; ++i) {
    items.emplace_back(StringAt(offset));
    offset += 8 + static_cast<int64_t>(items.back().size());
  }
  return items;
}

bool GgufFile::IsArray(std::string_view key) const {
  const auto it = key_index_.find(key);
  return it != key_index_.end() && keys_[it->second].value.is_array;
}

std::string GgufFile::ItemText(GgufType type, int64_t offset) const {
  const std::byte* at = bytes_.data() + offset;
  switch (type) {
    case GgufType::kString:
      return Quoted(StringAt(offset));
    case GgufType::kBool:
      return *at != std::byte{0} ? "true" : "false";
    case GgufType::kF32:
      return StrCat(LoadLittleEndian<float>(at));
    case GgufType::kF64:
      return StrCat(LoadLittleEndian<double>(at));
    case GgufType::kU64:
      return StrCat(LoadLittleEndian<uint64_t>(at));
    default: {
      const auto number = ReadInt("", Value{type, false, 1, offset}, 0);
      return number.ok() ? StrCat(*number) : number.status().ToString();
    }
  }
}

std::string GgufFile::ValueText(const Value& value) const {
  if (!value.is_array) return ItemText(value.type, value.offset);
  std::vector<std::string> parts;
  int64_t offset = value.offset;
  for (int64_t i = 0; i < std::min(value.count, kMaxShownItems); ++i) {
    parts.push_back(ItemText(value.type, offset));
    const bool string = value.type == GgufType::kString;
    offset +=
        string ? 8 + static_cast<int64_t>(StringAt(offset).size()) : GgufItemBytes(value.type);
  }
  if (value.count > kMaxShownItems) parts.push_back(StrCat("... (", value.count, " items)"));
  return "[" + StrJoin(parts, ", ") + "]";
}

std::vector<GgufKeyText> GgufFile::KeyTexts() const {
  std::vector<GgufKeyText> texts;
  for (const Key& key : keys_) {
    const std::string_view type = GgufTypeName(key.value.type);
    texts.push_back(
        {key.name, StrCat(key.value.is_array ? "array of " : "", type), ValueText(key.value)});
  }
  return texts;
}

}  // namespace ds4
