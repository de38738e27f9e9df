// The messages of a chat and the prompt that they make in the model's chat format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

namespace ds4 {

class Conversation {
 public:
  // `tokenizer` outlives this.
  Conversation(const Tokenizer& tokenizer, std::string system, bool think);

  // The prompt that asks for the answer to `user_text` after all turns so far.
  Result<std::vector<int32_t>> PromptFor(const std::string& user_text) const;
  // The turn has happened.
  void Add(const std::string& user_text, const std::string& answer, const std::string& reasoning);
  // Forgets all turns.
  void Reset();

 private:
  const Tokenizer* tokenizer_;
  std::string system_;
  bool think_;
  std::vector<Message> messages_;
};

}  // namespace ds4
