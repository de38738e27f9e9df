// The interactive chat: the coordinator outlives its workers, so a broken group costs one answer.
#include <signal.h>
#include <unistd.h>

#include "coordinator/conversation.h"
#include "coordinator/interrupt.h"
#include "coordinator/line_reader.h"
#include "coordinator/show_answer.h"
#include "coordinator/tasks.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

constexpr char kHelp[] =
    "/reset forgets the conversation, /exit or the end of input leaves, Ctrl-C stops an answer";

bool AskedToEnd() { return PendingSignal() != 0 && PendingSignal() != SIGINT; }

class ChatLoop {
 public:
  explicit ChatLoop(const Parts& parts)
      : parts_(parts),
        conversation_(parts.tokenizer, parts.options.system, parts.options.think),
        session_(&parts.cluster, Cluster::kSessionId, parts.cluster.context()),
        on_terminal_(isatty(STDIN_FILENO) == 1) {}

  Status Run() {
    parts_.console.Write(parts_.shard_table);
    if (on_terminal_) parts_.console.Note(kHelp);
    Status last;
    while (!AskedToEnd()) {
      if (on_terminal_) parts_.console.Write("> ");
      const std::optional<std::string> line = lines_.Next([] { return PendingSignal() != 0; });
      if (!line && PendingSignal() == SIGINT) {
        ClearInterrupt();
        parts_.console.Note(StrCat("\n", kHelp));
        continue;
      }
      if (!line && on_terminal_) parts_.console.Line("");
      if (!line || *line == "/exit") break;
      if (line->empty() || Command(*line)) continue;
      last = Answer(*line);
      if (!last.ok() && !AskedToEnd()) parts_.console.Error(last.message());
      ClearInterrupt();
    }
    if (AskedToEnd()) return CancelledError("asked to end");
    // A person has seen the errors; a script sees the exit code.
    return on_terminal_ || last.ok() ? OkStatus() : Status(last.code(), "the last answer failed");
  }

 private:
  // True when the line was a command.
  bool Command(const std::string& line) {
    if (line == "/reset") {
      conversation_.Reset();
      parts_.console.Note("the conversation is forgotten");
      return true;
    }
    if (line == "/help") {
      parts_.console.Note(kHelp);
      return true;
    }
    return false;
  }

  Status EnsureGroup() {
    if (parts_.cluster.formed()) {
      const Status alive = parts_.cluster.CheckAlive();
      if (alive.ok()) return OkStatus();
      parts_.console.Note("a worker is gone: " + alive.message());
    }
    parts_.console.Note("forming the group anew");
    session_.Reset(0);
    // Unlike a step, joining can be given up at once.
    parts_.cluster.set_stop([] { return PendingSignal() != 0; });
    const Status formed = parts_.cluster.Form();
    parts_.cluster.set_stop(AskedToEnd);
    RETURN_IF_ERROR(formed);
    session_.Reset(parts_.cluster.context());
    return OkStatus();
  }

  Status Answer(const std::string& text) {
    RETURN_IF_ERROR(EnsureGroup());
    ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, conversation_.PromptFor(text));
    ASSIGN_OR_RETURN(const ShownAnswer answer, ShowAnswer(parts_, &session_, prompt));
    conversation_.Add(text, answer.text, answer.reasoning);
    return OkStatus();
  }

  const Parts& parts_;
  Conversation conversation_;
  TextSession session_;
  LineReader lines_{STDIN_FILENO};
  bool on_terminal_;
};

}  // namespace

Status Chat(const Parts& parts) {
  // Ctrl-C ends an answer after its step; the group stays whole.
  parts.cluster.set_stop(AskedToEnd);
  return ChatLoop(parts).Run();
}

}  // namespace ds4
