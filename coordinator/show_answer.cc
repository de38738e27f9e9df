#include "coordinator/show_answer.h"

#include <algorithm>

#include "coordinator/answer_printer.h"
#include "coordinator/interrupt.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

GenerateOptions MakeGenerateOptions(const Parts& parts, int64_t max_tokens) {
  GenerateOptions generate;
  generate.max_tokens = max_tokens;
  generate.sampling = parts.options.sampling;
  generate.chunk = parts.options.chunk;
  if (!parts.options.ignore_eos) generate.stop_ids = {parts.tokenizer.eos_id()};
  return generate;
}

std::string PerSecond(int64_t count, double seconds) {
  return seconds > 0 ? StrCat(Fixed(static_cast<double>(count) / seconds, 1), " tokens/s") : "";
}

}  // namespace

int64_t AnswerLimit(const Options& options, int64_t prompt_tokens, int64_t context) {
  if (options.max_tokens_given) return options.max_tokens;
  // At least one, so that a prompt that fills the context is refused with its numbers.
  return std::clamp<int64_t>(context - prompt_tokens, 1, options.max_tokens);
}

std::string StatsText(const GenerateStats& stats, int num_ranks) {
  const int64_t run = stats.prompt_tokens - stats.reused_tokens;
  std::string text = StrCat("prefill: ", run, " tokens in ", Fixed(stats.prefill_seconds, 3),
                            " s (", PerSecond(run, stats.prefill_seconds), ")");
  if (stats.reused_tokens > 0) text += StrCat(", ", stats.reused_tokens, " reused");
  if (stats.decoded_tokens > 0) {
    text +=
        StrCat("; decode: ", stats.decoded_tokens, " tokens in ", Fixed(stats.decode_seconds, 3),
               " s (", PerSecond(stats.decoded_tokens, stats.decode_seconds), ")");
  }
  const double seconds = stats.prefill_seconds + stats.decode_seconds;
  if (num_ranks > 1 && seconds > 0) {
    text += StrCat("; ", num_ranks, " ranks, rank 0 waited for peers ",
                   Fixed(100.0 * stats.comm_seconds / seconds, 0), " % of it");
  }
  return text;
}

Result<ShownAnswer> ShowAnswer(const Parts& parts, TextSession* session,
                               const std::vector<int32_t>& prompt) {
  int32_t end_think = -1;
  if (parts.options.think) end_think = parts.tokenizer.SpecialId("</think>").value_or(-1);
  AnswerPrinter printer(parts.tokenizer, &parts.console, end_think);
  ProgressBars bar(&parts.console, {"prefill"}, "tokens");
  GenerateCallbacks callbacks;
  callbacks.on_token = [&](int32_t token) {
    bar.Clear();
    printer.Push(token);
  };
  callbacks.on_prefill = [&](int64_t done, int64_t total) {
    if (done < total) bar.Update(0, done, total);
  };
  callbacks.interrupted = [&] { return PendingSignal() != 0 || !printer.ok(); };

  const int64_t max_tokens =
      AnswerLimit(parts.options, std::ssize(prompt), parts.cluster.context());
  Result<Answer> answer =
      session->Generate(prompt, MakeGenerateOptions(parts, max_tokens), callbacks);
  bar.Clear();
  if (answer.ok() || !printer.answer().empty()) printer.Finish();
  RETURN_IF_ERROR(answer.status());
  if (!printer.ok()) return UnavailableError("stdout takes no more text");
  if (parts.options.stats) {
    if (answer->reason == StopReason::kMaxTokens) {
      parts.console.Note(StrCat("stopped after ", max_tokens,
                                " tokens; --max-tokens and --ctx set "
                                "the limit"));
    }
    if (!parts.options.interactive()) parts.console.Write(parts.shard_table);
    parts.console.Note(StatsText(answer->stats, parts.options.num_ranks()));
  }
  return ShownAnswer{printer.answer(), printer.reasoning(), answer->reason};
}

}  // namespace ds4
