// A JSON value as prompts need it: keys keep their order, numbers keep their digits, and the text
// that comes out is what Python's json.dumps(ensure_ascii=False) writes, because that is what the
// models were trained on.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/base/status.h"

namespace ds4 {

struct JsonValue {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  std::string text;               // the string, or the number as Python writes it
  std::vector<std::string> keys;  // of an object; unique, in file order
  std::vector<JsonValue> items;   // of an array, or the object's values, [keys.size()]

  bool is_null() const { return kind == Kind::kNull; }
  bool is_string() const { return kind == Kind::kString; }
  bool is_array() const { return kind == Kind::kArray; }
  bool is_object() const { return kind == Kind::kObject; }
  // The member, or nullptr when this is no object or has no such key.
  const JsonValue* Find(std::string_view key) const;
};

// Errors: kInvalidArgument for anything but one JSON value in UTF-8, and for more than 200 levels.
// A key that comes twice keeps its first place and its last value, as in Python.
Result<JsonValue> ParseJson(std::string_view text);

// {"a": 1, "b": [1.5, "x"]}
std::string DumpJson(const JsonValue& value);

// `text` in quotes; only what JSON must escape is escaped.
std::string QuoteJson(std::string_view text);

}  // namespace ds4
