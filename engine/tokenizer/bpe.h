// Byte pair merging: the table of merges and the loop that applies them to one piece of text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds4 {

// What merging two neighbours gives; `rank` is the merge's place in the file, lower goes first.
struct Merge {
  uint32_t rank = UINT32_MAX;  // UINT32_MAX: the two do not merge
  int32_t id = -1;
};

// Pair of ids to Merge; open addressing, because this lookup is most of the tokeniser's time.
// Thread-safe once filled.
class MergeTable {
 public:
  MergeTable() : MergeTable(0) {}
  explicit MergeTable(size_t num_merges);

  // False when the pair is there already; requires fewer than num_merges pairs so far.
  bool Insert(int32_t left, int32_t right, Merge merge);
  Merge Find(int32_t left, int32_t right) const {
    const uint64_t key = Key(left, right);
    for (size_t slot = Hash(key) >> shift_;; slot = (slot + 1) & mask_) {
      if (slots_[slot].key == key) return slots_[slot].merge;
      if (slots_[slot].key == kEmpty) return {};
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // no pair: ids are never negative
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge;
  };
  static uint64_t Key(int32_t left, int32_t right) {
    return (uint64_t{static_cast<uint32_t>(left)} << 32) | static_cast<uint32_t>(right);
  }
  // Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): the high bits are the good
  // ones.
  static uint64_t Hash(uint64_t key) { return (key ^ (key >> 29)) * 0x9E3779B97F4A7C15u; }

  int shift_;
  size_t mask_;
  std::vector<Slot> slots_;
};

// Merges in place, lowest rank first and leftmost among equals, until no pair merges. Keeps its
// scratch memory between calls. Not thread-safe; one per caller.
class BpeMerger {
 public:
  explicit BpeMerger(const MergeTable& merges) : merges_(merges) {}
  void Apply(std::vector<int32_t>* ids);

 private:
  struct Candidate {
    uint32_t rank;
    uint32_t pos;  // of the left symbol; symbols keep their first byte's place
    int32_t left;  // ids when queued: a candidate is stale once either has changed
    int32_t right;
    int32_t merged;
  };
  void ApplyByScan(std::vector<int32_t>* ids);
  void ApplyByHeap(std::vector<int32_t>* ids);
  void Push(const std::vector<int32_t>& ids, uint32_t left_pos, uint32_t right_pos);

  const MergeTable& merges_;
  std::vector<Merge> pair_merges_;
  std::vector<Candidate> heap_;
  std::vector<uint32_t> next_;
  std::vector<uint32_t> prev_;
};

}  // namespace ds4
