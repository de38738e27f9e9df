// What programs need of the GPU engine; the only header of it that they include.
#pragma once

#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/cuda/runtime.h"

namespace ds4::cuda {

// Makes Engine::Load take Backend::kCuda.
void RegisterCudaBackend();

}  // namespace ds4::cuda
