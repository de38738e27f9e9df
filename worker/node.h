// This machine's real side of a worker: the model file, the data plane's port, and from them the
// parts that groups are made of.
#pragma once

#include <memory>

#include "engine/base/status.h"
#include "engine/comm/tcp_transport.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/model/model_config.h"
#include "worker/options.h"
#include "worker/parts.h"

namespace ds4 {

// Outlives the server and every group made from its parts. Immutable after Open, except for the
// listener, which the rank's thread uses.
class Node {
 public:
  // Opens and checks the model, reads its digest, listens on the data port. Errors name the file or
  // the option.
  static Result<std::unique_ptr<Node>> Open(const WorkerOptions& options);

  const WorkerInfo& info() const { return info_; }
  // Functions that borrow this object.
  WorkerParts parts();

 private:
  Node() = default;
  Status ChooseEngine(const WorkerOptions& options);
  Status OpenModel(const WorkerOptions& options);
  Result<std::unique_ptr<Transport>> Connect(const GroupSpec& spec, std::stop_token stop);

  std::unique_ptr<GgufFile> file_;
  ModelConfig config_;
  EngineOptions engine_;  // but for the group's limits
  std::unique_ptr<TcpListener> listener_;
  WorkerInfo info_;
};

}  // namespace ds4
