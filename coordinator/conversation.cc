#include "coordinator/conversation.h"

namespace ds4 {

Conversation::Conversation(const Tokenizer& tokenizer, std::string system, bool think)
    : tokenizer_(&tokenizer), system_(std::move(system)), think_(think) {
  Reset();
}

void Conversation::Reset() {
  messages_.clear();
  if (system_.empty()) return;
  Message& message = messages_.emplace_back();
  message.role = Message::Role::kSystem;
  message.content = system_;
}

Result<std::vector<int32_t>> Conversation::PromptFor(const std::string& user_text) const {
  std::vector<Message> messages = messages_;
  Message& user = messages.emplace_back();
  user.role = Message::Role::kUser;
  user.content = user_text;
  RenderOptions options;
  options.thinking_mode = think_ ? ThinkingMode::kThinking : ThinkingMode::kChat;
  return RenderPromptIds(*tokenizer_, messages, options);
}

void Conversation::Add(const std::string& user_text, const std::string& answer,
                       const std::string& reasoning) {
  Message& user = messages_.emplace_back();
  user.role = Message::Role::kUser;
  user.content = user_text;
  Message& reply = messages_.emplace_back();
  reply.role = Message::Role::kAssistant;
  reply.content = answer;
  reply.reasoning = reasoning;
}

}  // namespace ds4
