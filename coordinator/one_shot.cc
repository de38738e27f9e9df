// The tasks that run once: one answer, one measurement.
#include "coordinator/answer_printer.h"
#include "coordinator/conversation.h"
#include "coordinator/interrupt.h"
#include "coordinator/perplexity.h"
#include "coordinator/show_answer.h"
#include "coordinator/tasks.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

std::vector<int32_t> TextAfterBos(const std::string& text, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids = {tokenizer.bos_id()};
  const std::vector<int32_t> rest = tokenizer.Encode(text, /*parse_special=*/false);
  ids.insert(ids.end(), rest.begin(), rest.end());
  return ids;
}

}  // namespace

Result<std::vector<int32_t>> PromptTokens(const Options& options, const Tokenizer& tokenizer) {
  std::string text = options.prompt;
  if (!options.prompt_file.empty()) {
    ASSIGN_OR_RETURN(text, ReadTextFile(options.prompt_file));
  }
  if (options.raw) return TextAfterBos(text, tokenizer);
  if (text.empty()) {
    return InvalidArgumentError(
        StrCat(options.prompt_file, " is empty; --raw starts from nothing"));
  }
  return Conversation(tokenizer, options.system, options.think).PromptFor(text);
}

Result<std::vector<int32_t>> FileTokens(const Options& options, const Tokenizer& tokenizer) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(options.perplexity_file));
  return TextAfterBos(text, tokenizer);
}

Status AnswerPrompt(const Parts& parts, const std::vector<int32_t>& prompt) {
  TextSession session(&parts.cluster, Cluster::kSessionId, parts.cluster.context());
  ASSIGN_OR_RETURN(const ShownAnswer answer, ShowAnswer(parts, &session, prompt));
  if (answer.reason == StopReason::kInterrupted) return CancelledError("interrupted");
  return OkStatus();
}

Status MeasureFile(const Parts& parts, const std::vector<int32_t>& tokens) {
  ProgressBars bar(&parts.console, {"perplexity"}, "tokens");
  PerplexityCallbacks callbacks;
  callbacks.on_progress = [&](int64_t done, int64_t total) { bar.Update(0, done, total); };
  callbacks.interrupted = [] { return PendingSignal() != 0; };
  ASSIGN_OR_RETURN(const PerplexityResult measured,
                   MeasurePerplexity(&parts.cluster, Cluster::kSessionId, tokens,
                                     parts.cluster.context(), parts.options.chunk, callbacks));
  bar.Clear();
  AnswerPrinter printer(parts.tokenizer, &parts.console, -1);
  printer.Print(StrCat("perplexity ", Fixed(measured.perplexity, 6), ", mean NLL ",
                       Fixed(measured.mean_nll, 9), " over ", measured.num_scored, " of ",
                       tokens.size(), " tokens in ", measured.num_windows, " windows of ",
                       parts.cluster.context(), "\n"));
  if (!printer.ok()) return UnavailableError("stdout takes no more text");
  if (parts.options.stats) {
    parts.console.Write(parts.shard_table);
    parts.console.Note(StrCat(tokens.size(), " tokens in ", Fixed(measured.seconds, 2), " s (",
                              Fixed(static_cast<double>(tokens.size()) / measured.seconds, 1),
                              " tokens/s)"));
  }
  return OkStatus();
}

}  // namespace ds4
