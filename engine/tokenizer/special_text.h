// The special tokens of the prompt format by their text. "｜" is U+FF5C, "▁" is U+2581. Their ids
// differ between vocabularies and are looked up by these texts.
#pragma once

#include <string_view>

namespace ds4::special_text {

inline constexpr std::string_view kBos = "<｜begin▁of▁sentence｜>";
inline constexpr std::string_view kEos = "<｜end▁of▁sentence｜>";
inline constexpr std::string_view kUser = "<｜User｜>";
inline constexpr std::string_view kAssistant = "<｜Assistant｜>";
inline constexpr std::string_view kLatestReminder = "<｜latest_reminder｜>";
inline constexpr std::string_view kThink = "<think>";
inline constexpr std::string_view kEndThink = "</think>";
inline constexpr std::string_view kDsml = "｜DSML｜";

}  // namespace ds4::special_text
