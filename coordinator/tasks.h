// What the program does once a group stands: answer one prompt, chat, or measure perplexity.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/cluster.h"
#include "coordinator/console.h"
#include "coordinator/model.h"
#include "coordinator/options.h"

namespace ds4 {

// Everything a task works with; borrowed.
struct Parts {
  const Options& options;
  const Model& model;
  const Tokenizer& tokenizer;
  Cluster& cluster;
  Console& console;
  const std::string& shard_table;  // for people: who holds what
};

// The tokens of --prompt or --prompt-file: in the chat format, or with --raw the text after BOS.
Result<std::vector<int32_t>> PromptTokens(const Options& options, const Tokenizer& tokenizer);
// The tokens of --perplexity-file after BOS.
Result<std::vector<int32_t>> FileTokens(const Options& options, const Tokenizer& tokenizer);

// Streams the answer to `prompt` to stdout. kCancelled when a signal ended it.
Status AnswerPrompt(const Parts& parts, const std::vector<int32_t>& prompt);
// Prints mean NLL and perplexity of `tokens` to stdout.
Status MeasureFile(const Parts& parts, const std::vector<int32_t>& tokens);
// Reads messages from stdin until its end or /exit; a broken group is formed anew for the next
// message. The status of the last answer, when stdin is no terminal.
Status Chat(const Parts& parts);

}  // namespace ds4
