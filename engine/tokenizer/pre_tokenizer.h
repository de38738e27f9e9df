// Cuts a text into the pieces inside which byte pairs may merge: the rules of DeepSeek V3 and V4.
// Three passes, each on the pieces that the one before left, matches and gaps alike:
//   1. \p{N}{1,3}
//   2. [U+4E00-U+9FA5 U+3040-U+309F U+30A0-U+30FF]+
//   3. the first of: ASCII punctuation + [A-Za-z]+ | [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+ |
//      " "?[\p{P}\p{S}]+[\r\n]* | \s*[\r\n]+ | \s+(?!\S) | \s+
// Written out by hand rather than through a regular expression engine: it runs in one pass with no
// backtracking, reads bytes that are not UTF-8, and needs the same Unicode tables everywhere.
#pragma once

#include <string_view>

namespace ds4 {

// Walks over one text. The pieces, joined, are the text. Thread-compatible; borrows `text`.
class PreTokenizer {
 public:
  explicit PreTokenizer(std::string_view text) : text_(text) {}

  // The next piece, never empty; an empty view at the end.
  std::string_view Next();

 private:
  size_t FindRunEnd(size_t begin) const;
  size_t MatchNumber(size_t begin) const;
  // End of the match of pass 3 that starts at `begin`, or `begin` when no alternative matches.
  size_t MatchWord(size_t begin) const;
  size_t MatchPunctuation(size_t begin) const;
  size_t MatchSpaces(size_t begin) const;
  size_t SkipLetters(size_t pos) const;

  std::string_view text_;
  size_t pos_ = 0;
  size_t run_end_ = 0;  // end of the current piece of pass 2; pass 3 never looks beyond it
};

}  // namespace ds4
