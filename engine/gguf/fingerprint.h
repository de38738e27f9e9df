// A short text that tells model files apart: ranks compare it before they join a group.
#pragma once

#include <string>

#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"

namespace ds4 {

// XXH3-128 in hex over the header bytes (magic to the end of the tensor directory) and the tensors
// in directory order.
//   "full-..."     files up to 1 GiB: every byte of every tensor
//   "sampled-..."  larger files, which take too long to read at start: of each tensor the first and
//   last
//                  64 KiB, and 64 KiB every 16 MiB in between. It tells models, versions and
//                  quantisations apart and finds a cut or re-ordered file; it can miss a damaged
//                  byte, which `ds4-gguf check` and the digest of a transferred shard are there
//                  for.
// Not a signature: it does not withstand someone who forges files on purpose.
// kDataLoss: the file was opened as a directory and lacks a tensor's data.
Result<std::string> ModelDigest(const GgufFile& file);

}  // namespace ds4
