#include "engine/tokenizer/json_value.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

constexpr size_t kMaxDepth = 200;  // values are written and destroyed by recursion

// repr() of a float: the shortest digits that read back, plain from 1e-4 to below 1e16.
std::string PythonFloat(double value) {
  char buffer[32];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string digits(buffer, end.ptr);
  const bool is_negative = digits.front() == '-';
  if (is_negative) digits.erase(0, 1);
  const size_t e = digits.find('e');
  int exponent = 0;
  const char* exponent_begin = digits.data() + e + (digits[e + 1] == '+' ? 2 : 1);
  std::from_chars(exponent_begin, digits.data() + digits.size(), exponent);
  digits.resize(e);
  std::erase(digits, '.');
  const int num_digits = static_cast<int>(digits.size());
  std::string text = is_negative ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    text += digits[0];
    if (num_digits > 1) text += "." + digits.substr(1);
    const std::string size = std::to_string(std::abs(exponent));
    return text + (exponent < 0 ? "e-" : "e+") + (size.size() < 2 ? "0" : "") + size;
  }
  if (exponent < 0)
    return text + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const size_t point = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= point) return text + digits + std::string(point - digits.size(), '0') + ".0";
  return text + digits.substr(0, point) + "." + digits.substr(point);
}

// Builds a JsonValue from nlohmann's events. `stack_` holds the open arrays and objects by value:
// an item is moved into its parent when it is complete.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return Add({}); }
  bool boolean(bool value) override {
    JsonValue item;
    item.kind = JsonValue::Kind::kBool;
    item.boolean = value;
    return Add(std::move(item));
  }
  bool number_integer(number_integer_t value) override { return AddNumber(std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    return AddNumber(std::to_string(value));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    // An integer beyond 64 bits arrives here; Python keeps all its digits.
    const bool is_integer = text.find_first_of(".eE") == std::string::npos;
    return AddNumber(is_integer ? text : PythonFloat(value));
  }
  bool string(string_t& value) override {
    JsonValue item;
    item.kind = JsonValue::Kind::kString;
    item.text = std::move(value);
    return Add(std::move(item));
  }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return Open(JsonValue::Kind::kObject); }
  bool start_array(std::size_t) override { return Open(JsonValue::Kind::kArray); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    stack_.back().key = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    error_ = StrCat("not valid JSON at byte ", position);
    return false;
  }

  const std::string& error() const { return error_; }
  JsonValue Take() { return std::move(root_); }

 private:
  struct Level {
    JsonValue value;
    std::string key;                                 // of the member that comes next
    std::unordered_map<std::string, size_t> places;  // key to its place among the items
  };
  bool AddNumber(std::string text) {
    JsonValue item;
    item.kind = JsonValue::Kind::kNumber;
    item.text = std::move(text);
    return Add(std::move(item));
  }
  bool Add(JsonValue item) {
    if (stack_.empty()) {
      root_ = std::move(item);
      return true;
    }
    Level& level = stack_.back();
    if (level.value.is_object()) {
      const auto [place, is_new] = level.places.emplace(level.key, level.value.items.size());
      if (!is_new) {
        level.value.items[place->second] = std::move(item);
        return true;
      }
      level.value.keys.push_back(std::move(level.key));
    }
    level.value.items.push_back(std::move(item));
    return true;
  }
  bool Open(JsonValue::Kind kind) {
    if (stack_.size() >= kMaxDepth) {
      error_ = StrCat("JSON nested deeper than ", kMaxDepth, " levels");
      return false;
    }
    stack_.emplace_back();
    stack_.back().value.kind = kind;
    return true;
  }
  bool Close() {
    JsonValue item = std::move(stack_.back().value);
    stack_.pop_back();
    return Add(std::move(item));
  }

  std::vector<Level> stack_;
  JsonValue root_;
  std::string error_;
};

void Dump(const JsonValue& value, std::string* out) {
  switch (value.kind) {
    case JsonValue::Kind::kNull:
      *out += "null";
      return;
    case JsonValue::Kind::kBool:
      *out += value.boolean ? "true" : "false";
      return;
    case JsonValue::Kind::kNumber:
      *out += value.text;
      return;
    case JsonValue::Kind::kString:
      *out += QuoteJson(value.text);
      return;
    case JsonValue::Kind::kArray:
    case JsonValue::Kind::kObject:
      break;
  }
  *out += value.is_object() ? "{" : "[";
  for (size_t i = 0; i < value.items.size(); ++i) {
    if (i > 0) *out += ", ";
    if (value.is_object()) *out += QuoteJson(value.keys[i]) + ": ";
    Dump(value.items[i], out);
  }
  *out += value.is_object() ? "}" : "]";
}

}  // namespace

const JsonValue* JsonValue::Find(std::string_view key) const {
  const auto it = std::find(keys.begin(), keys.end(), key);
  return it == keys.end() ? nullptr : &items[static_cast<size_t>(it - keys.begin())];
}

Result<JsonValue> ParseJson(std::string_view text) {
  Builder builder;
  if (!nlohmann::json::sax_parse(text, &builder)) return InvalidArgumentError(builder.error());
  return builder.Take();
}

std::string DumpJson(const JsonValue& value) {
  std::string out;
  Dump(value, &out);
  return out;
}

std::string QuoteJson(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          out += std::string("\\u00") + kHex[c >> 4] + kHex[c & 15];
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

}  // namespace ds4
