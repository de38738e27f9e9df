// Stands in for nccl_group.cc in builds without NCCL's header, and on the emulator.
#include "engine/cuda/group_kinds.h"

namespace ds4::cuda {

Result<std::unique_ptr<TransportGroup>> CreateNcclGroup(Communicator* comm, Stream&,
                                                        const DeviceGroup::Options&) {
  RETURN_IF_ERROR(AgreeOnStatus(
      comm, UnimplementedError("this build has no NCCL: nccl.h was not found when it was made")));
  return InternalError("ranks agree although one has no NCCL");
}

}  // namespace ds4::cuda
