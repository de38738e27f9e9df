// Goal: whatever bytes come in, the tokeniser gives them back, in bounded time; whatever is wrong
// with a tokeniser's file, loading says so. Method: random bytes and hand-made edge cases on the V4
// vocabulary; a toy vocabulary, right once and then broken in one place at a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "engine/tokenizer/byte_alphabet.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/unicode.h"
#include "tests/unit/tokenizer/test_data.h"
#include "tests/unit/tokenizer/toy_tokenizer.h"

namespace ds4 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Pieces(std::string_view text) {
  std::vector<std::string> pieces;
  PreTokenizer pre_tokenizer(text);
  for (auto piece = pre_tokenizer.Next(); !piece.empty(); piece = pre_tokenizer.Next()) {
    pieces.emplace_back(piece);
  }
  return pieces;
}

TEST(PreTokenizerTest, EachRule) {
  EXPECT_THAT(Pieces("a   12345"),
              ElementsAre("a", "   ", "123", "45"));  // 1; \s+ ends at the digits
  EXPECT_THAT(Pieces("x中文かなy"), ElementsAre("x", "中文かな", "y"));  // 2
  EXPECT_THAT(Pieces("ア・イ"), ElementsAre("ア", "・", "イ"));          // 3 runs inside 2's pieces
  EXPECT_THAT(Pieces("(foo_bar"), ElementsAre("(foo", "_bar"));          // a
  EXPECT_THAT(Pieces("\tword"), ElementsAre("\tword"));                  // b
  EXPECT_THAT(Pieces("a ...\n\nb"), ElementsAre("a", " ...\n\n", "b"));  // c
  EXPECT_THAT(Pieces("a \n \n  b"), ElementsAre("a", " \n \n", " ", " b"));    // d, e, b
  EXPECT_THAT(Pieces("a \x01\x02z"), ElementsAre("a", " ", "\x01", "\x02z"));  // f, gap, b
}

TEST(PreTokenizerTest, StrayBytesAreCharactersOfTheirOwn) {
  EXPECT_THAT(Pieces("\xFFword"), ElementsAre("\xFFword"));          // like any odd prefix
  EXPECT_THAT(Pieces("\xFF\xFE."), ElementsAre("\xFF\xFE", "."));    // a gap
  EXPECT_THAT(Pieces("\xE4\xBD"), ElementsAre("\xE4\xBD"));          // a character cut off
  EXPECT_THAT(Pieces("\xED\xA0\x80"), ElementsAre("\xED\xA0\x80"));  // a surrogate
}

TEST(UnicodeTest, WellFormedOnly) {
  EXPECT_EQ(DecodeUtf8("é", 0).code_point, 0xE9);
  EXPECT_EQ(DecodeUtf8("\xF4\x8F\xBF\xBF", 0).code_point, 0x10FFFF);
  for (const char* bad :
       {"\x80", "\xC1\x81", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xC3"}) {
    EXPECT_EQ(DecodeUtf8(bad, 0).code_point, -1);
    EXPECT_EQ(DecodeUtf8(bad, 0).size, 1u);
  }
  EXPECT_EQ(IncompleteUtf8Suffix("a\xE4\xBD"), 2u);
  EXPECT_EQ(IncompleteUtf8Suffix("a\xF0"), 1u);
  EXPECT_EQ(IncompleteUtf8Suffix("\xE4\xBD\xA0"), 0u);
  EXPECT_EQ(IncompleteUtf8Suffix("\xE0\x80"), 0u);  // overlong: no third byte can save it
}

TEST(TokenizerTest, RandomBytesComeBack) {
  const Tokenizer& tokenizer = V4Tokenizer();
  std::mt19937 random(1);
  for (const int max_byte : {256, 128, 64}) {
    for (int round = 0; round < 10; ++round) {
      std::string text(10'000, '\0');
      std::generate(text.begin(), text.end(),
                    [&] { return static_cast<char>(random() % max_byte); });
      ASSERT_EQ(tokenizer.Decode(tokenizer.Encode(text, false)), text);
      ASSERT_EQ(tokenizer.Decode(tokenizer.Encode(text, true)), text);
    }
  }
}

TEST(TokenizerTest, EveryTokenComesBack) {
  const Tokenizer& tokenizer = V4Tokenizer();
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string text(tokenizer.TokenBytes(id));
    const std::vector<int32_t> ids = tokenizer.Encode(text, true);
    ASSERT_EQ(tokenizer.Decode(ids), text) << id;
    if (tokenizer.IsSpecial(id)) {
      ASSERT_THAT(ids, ElementsAre(id));
    }
  }
}

// Quadratic merging would need minutes here.
TEST(TokenizerTest, LongPieceWithoutSpace) {
  const Tokenizer& tokenizer = V4Tokenizer();
  std::mt19937 random(2);
  std::string letters(1'000'000, ' ');
  std::generate(letters.begin(), letters.end(),
                [&] { return static_cast<char>('a' + random() % 26); });
  for (const std::string& text : {std::string(1'000'000, 'a'), std::string(1'000'000, ' '),
                                  std::string(1'000'000, '\xFF'), letters}) {
    EXPECT_TRUE(tokenizer.Decode(tokenizer.Encode(text, true)) == text);
  }
}

// The scan for short pieces and the heap for long ones are two ways to one answer.
TEST(TokenizerTest, HeapAndScanAgree) {
  const auto tokenizer = Tokenizer::Create(ToySpec()).value();
  std::mt19937 random(3);
  for (int round = 0; round < 1000; ++round) {
    std::string half(20 + random() % 28, ' ');
    std::generate(half.begin(), half.end(), [&] { return "abc"[random() % 3]; });
    // No merge of the toy crosses "ddd", so the halves of a long piece encode as they do alone.
    std::vector<int32_t> expected = tokenizer->Encode(half, false);
    const std::vector<int32_t> again = expected;
    expected.insert(expected.end(), 3, 'd');
    expected.insert(expected.end(), again.begin(), again.end());
    ASSERT_EQ(tokenizer->Encode(half + "ddd" + half, false), expected) << half;
  }
}

TEST(TokenizerTest, LowestRankFirstThenLeftmost) {
  const auto tokenizer = Tokenizer::Create(ToySpec()).value();
  EXPECT_THAT(tokenizer->Encode("abc", false), ElementsAre(kToyAb, 'c'));  // "a b" before "b c"
  EXPECT_THAT(tokenizer->Encode("aaa", false), ElementsAre(kToyAa, 'a'));  // leftmost
  EXPECT_THAT(tokenizer->Encode("abab", false), ElementsAre(kToyAbab));
}

TEST(TokenizerTest, SpecialTextIsPlainUnlessAsked) {
  const auto tokenizer = Tokenizer::Create(ToySpec()).value();
  EXPECT_THAT(tokenizer->Encode("a<s>b", true), ElementsAre('a', kToyBos, 'b'));
  EXPECT_THAT(tokenizer->Encode("a<s>b", false), ElementsAre('a', '<', 's', '>', 'b'));
  EXPECT_THAT(tokenizer->Encode("<s>>", true), ElementsAre(kToyLonger));  // longest wins
  EXPECT_THAT(tokenizer->Encode("<s<s>", true), ElementsAre('<', 's', kToyBos));
  EXPECT_FALSE(tokenizer->SpecialId("ab").has_value());
  EXPECT_FALSE(tokenizer->SpecialId("<s").has_value());
  EXPECT_EQ(tokenizer->TokenBytes(-1), "");
  EXPECT_EQ(tokenizer->TokenBytes(tokenizer->vocab_size()), "");
}

TEST(TokenizerTest, MalformedSpecs) {
  struct Case {
    const char* expected;
    std::function<void(TokenizerSpec*)> spoil;
  };
  const Case cases[] = {
      {"0 tokens", [](TokenizerSpec* s) { s->tokens.clear(); }},
      {"BOS id -1 is outside", [](TokenizerSpec* s) { s->bos_id = -1; }},
      {"EOS id 1000000 is outside", [](TokenizerSpec* s) { s->eos_id = 1'000'000; }},
      {"id 256 of", [](TokenizerSpec* s) { s->tokens[256].kind = TokenizerSpec::Kind::kMissing; }},
      {"is empty", [](TokenizerSpec* s) { s->tokens[257].text.clear(); }},
      {"not written in the byte alphabet", [](TokenizerSpec* s) { s->tokens[257].text = "｜"; }},
      {"no token for byte 65", [](TokenizerSpec* s) { s->tokens[65].text = "zz"; }},
      {"has ids", [](TokenizerSpec* s) { s->tokens[kToyAb].text = "aa"; }},
      {"outside the vocabulary", [](TokenizerSpec* s) { s->merges[1].second = "c"; }},
      {"outside the vocabulary", [](TokenizerSpec* s) { s->merges[1].first = "nope"; }},
      {"is there twice", [](TokenizerSpec* s) { s->merges.push_back(s->merges[0]); }},
  };
  for (const Case& test : cases) {
    TokenizerSpec spec = ToySpec();
    test.spoil(&spec);
    const auto tokenizer = Tokenizer::Create(spec);
    ASSERT_FALSE(tokenizer.ok()) << test.expected;
    EXPECT_EQ(tokenizer.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(tokenizer.status().message(), HasSubstr(test.expected));
  }
}

TEST(StreamDecoderTest, WholeCharactersOnly) {
  const auto tokenizer = Tokenizer::Create(ToySpec()).value();
  StreamDecoder decoder(*tokenizer);
  EXPECT_EQ(decoder.Push(0xE4), "");
  EXPECT_EQ(decoder.Push(0xBD), "");
  EXPECT_EQ(decoder.Push(0xA0), "你");
  EXPECT_EQ(decoder.Push(kToyBos), "<s>");
  EXPECT_EQ(decoder.Push(0xE4), "");
  EXPECT_EQ(decoder.Push('a'), "\uFFFDa");  // the character can no longer become whole
  EXPECT_EQ(decoder.Push(0xF0), "");
  EXPECT_EQ(decoder.Finish(), "\uFFFD");
  EXPECT_EQ(decoder.Finish(), "");
}

TEST(StreamDecoderTest, SameTextForAnyCut) {
  const Tokenizer& tokenizer = V4Tokenizer();
  const std::string text = "Grüße, 世界! 🦜🏽 ꧁𓙱꧂ e\u0301";
  StreamDecoder decoder(tokenizer);
  std::string streamed;
  for (const char byte : text) {
    // Byte tokens one at a time: every cut there can be.
    for (const int32_t id : tokenizer.Encode(std::string_view(&byte, 1), false)) {
      streamed += decoder.Push(id);
      EXPECT_EQ(ReplaceInvalidUtf8(streamed), streamed);
    }
  }
  EXPECT_EQ(streamed + decoder.Finish(), text);
}

}  // namespace
}  // namespace ds4
