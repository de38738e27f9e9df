// The unpacked vocabulary that the tests of this folder share.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "engine/tokenizer/tokenizer.h"

namespace ds4 {

inline std::string TokenizerDataPath(const std::string& name) {
  return std::string(DS4_BINARY_DIR) + "/tests/data/tokenizer/" + name;
}

// The full vocabulary of V4, 129280 tokens; loaded once a process.
inline const Tokenizer& V4Tokenizer() {
  static const auto* tokenizer = [] {
    auto loaded = Tokenizer::FromJsonFile(TokenizerDataPath("deepseek_v4.tokenizer.equiv.json"));
    return new std::unique_ptr<Tokenizer>(std::move(loaded).value());
  }();
  return **tokenizer;
}

}  // namespace ds4
