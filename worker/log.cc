#include "worker/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

std::string Line(const LogContext& who, std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) c = ' ';
  }
  if (who.rank < 0) return text;
  return StrCat("rank ", who.rank, " epoch ", who.epoch, ": ", text);
}

void Write(spdlog::level::level_enum level, const LogContext& who, const std::string& text) {
  spdlog::default_logger_raw()->log(level, spdlog::string_view_t(Line(who, text)));
}

}  // namespace

void InitLog(bool verbose) {
  // The colour sink looks for a terminal by itself (color_mode::automatic).
  auto logger = std::make_shared<spdlog::logger>(
      "ds4-worker", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %n[%P] %v");
  logger->set_level(verbose ? spdlog::level::debug : spdlog::level::info);
  logger->flush_on(spdlog::level::debug);
  spdlog::set_default_logger(std::move(logger));
}

void LogDebug(const LogContext& who, const std::string& text) {
  Write(spdlog::level::debug, who, text);
}
void LogInfo(const LogContext& who, const std::string& text) {
  Write(spdlog::level::info, who, text);
}
void LogWarning(const LogContext& who, const std::string& text) {
  Write(spdlog::level::warn, who, text);
}
void LogError(const LogContext& who, const std::string& text) {
  Write(spdlog::level::err, who, text);
}

}  // namespace ds4
