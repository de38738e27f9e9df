#include "engine/tokenizer/bpe.h"

#include <algorithm>
#include <bit>

#include "engine/base/check.h"

namespace ds4 {
namespace {

// Up to here a scan of all pairs per merge beats the heap; nearly every word is shorter.
constexpr size_t kMaxScanSize = 48;
constexpr uint32_t kNone = UINT32_MAX;

// std heap functions keep the largest first: "less" is the later candidate.
struct LaterFirst {
  template <typename T>
  bool operator()(const T& a, const T& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.pos > b.pos;
  }
};

}  // namespace

MergeTable::MergeTable(size_t num_merges) {
  const size_t num_slots = std::bit_ceil(std::max<size_t>(2, num_merges * 2));
  shift_ = 64 - std::countr_zero(num_slots);
  mask_ = num_slots - 1;
  slots_.resize(num_slots);
}

bool MergeTable::Insert(int32_t left, int32_t right, Merge merge) {
  const uint64_t key = Key(left, right);
  size_t slot = Hash(key) >> shift_;
  while (slots_[slot].key != kEmpty) {
    if (slots_[slot].key == key) return false;
    slot = (slot + 1) & mask_;
  }
  slots_[slot] = {key, merge};
  return true;
}

void BpeMerger::Apply(std::vector<int32_t>* ids) {
  CHECK(ids->size() < kNone) << "a piece of " << ids->size() << " bytes";
  if (ids->size() <= kMaxScanSize) {
    ApplyByScan(ids);
  } else {
    ApplyByHeap(ids);
  }
}

void BpeMerger::ApplyByScan(std::vector<int32_t>* ids) {
  std::vector<int32_t>& symbols = *ids;
  if (symbols.size() < 2) return;
  pair_merges_.resize(symbols.size() - 1);
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    pair_merges_[i] = merges_.Find(symbols[i], symbols[i + 1]);
  }
  while (!pair_merges_.empty()) {
    const auto best =
        std::min_element(pair_merges_.begin(), pair_merges_.end(),
                         [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
    if (best->rank == kNone) return;
    const size_t i = static_cast<size_t>(best - pair_merges_.begin());
    symbols[i] = best->id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    pair_merges_.erase(best);
    if (i > 0) pair_merges_[i - 1] = merges_.Find(symbols[i - 1], symbols[i]);
    if (i < pair_merges_.size()) pair_merges_[i] = merges_.Find(symbols[i], symbols[i + 1]);
  }
}

void BpeMerger::Push(const std::vector<int32_t>& ids, uint32_t left_pos, uint32_t right_pos) {
  const Merge merge = merges_.Find(ids[left_pos], ids[right_pos]);
  if (merge.rank == kNone) return;
  heap_.push_back({merge.rank, left_pos, ids[left_pos], ids[right_pos], merge.id});
  std::push_heap(heap_.begin(), heap_.end(), LaterFirst());
}

// A linked list of symbols and a heap of candidates: n log n for pieces without a space.
void BpeMerger::ApplyByHeap(std::vector<int32_t>* ids) {
  std::vector<int32_t>& symbols = *ids;
  const uint32_t size = static_cast<uint32_t>(symbols.size());
  next_.resize(size);
  prev_.resize(size);
  for (uint32_t i = 0; i < size; ++i) {
    next_[i] = i + 1 < size ? i + 1 : kNone;
    prev_[i] = i > 0 ? i - 1 : kNone;
  }
  heap_.clear();
  for (uint32_t i = 0; i + 1 < size; ++i) Push(symbols, i, i + 1);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), LaterFirst());
    const Candidate best = heap_.back();
    heap_.pop_back();
    const uint32_t right = next_[best.pos];
    // A symbol that was swallowed has id -1, so its old candidates never match.
    if (symbols[best.pos] != best.left || right == kNone || symbols[right] != best.right) continue;
    symbols[best.pos] = best.merged;
    symbols[right] = -1;
    next_[best.pos] = next_[right];
    if (next_[right] != kNone) {
      prev_[next_[right]] = best.pos;
      Push(symbols, best.pos, next_[right]);
    }
    if (prev_[best.pos] != kNone) Push(symbols, prev_[best.pos], best.pos);
  }
  std::erase(symbols, -1);
}

}  // namespace ds4
