// How ranks of one group talk: the only thing that layers know of the network.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "engine/base/status.h"
#include "engine/comm/lane_tree.h"

namespace ds4 {

// Collective: every rank of the group makes the same calls in the same order with the same sizes; a
// frame that does not fit (sequence number or size) is kInternal naming both values and breaks the
// group. Calls block up to the deadline set with set_timeout (kDeadlineExceeded names the peer and
// the site). A lost peer is kUnavailable. Once broken, a communicator stays broken: every later
// call returns the first error at once. Thread: one at a time (the rank's own), but Abort may come
// from any.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const LaneLayout& lanes() const = 0;

  // out[count] = the sum of all lanes, same bits on every rank. roots: this rank's subtree roots,
  // [SubtreesOf(own lanes).size()][count]. Full exchange for small counts; reduce-scatter plus
  // all-gather for large ones with three or more ranks; the additions are the same.
  virtual Status AllReduceLanes(std::span<const float> roots, std::span<float> out) = 0;

  // all = the ranks' `mine` in rank order; every rank sends mine.size() bytes (equal on all).
  virtual Status AllGather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;

  // data of `root` to everyone.
  virtual Status Broadcast(int root, std::span<std::byte> data) = 0;

  virtual Status Barrier() = 0;

  // Where in the step we are, for error messages only: "layer 17, after attention".
  // `what` must be a literal; layer -1 means none.
  virtual void set_site(int layer, const char* what) = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;

  // Seconds spent so far inside exchanges with peers (sending, receiving, waiting). Rank thread
  // only.
  virtual double wait_seconds() const { return 0; }

  // Breaks the group from any thread: a call in flight returns `why` soon, later calls at once.
  virtual void Abort(Status why) = 0;
};

}  // namespace ds4
