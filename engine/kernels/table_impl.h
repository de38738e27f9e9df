// The table of one instruction set; the file that includes this has chosen namespace and vector
// type.
#pragma once

#include "engine/kernels/attention_impl.h"

namespace ds4::DS4_ISA_NAMESPACE {

inline constexpr KernelTable MakeTable(const char* name) {
  return {.name = name,
          .matmul = RunMatMulTask,
          .quantize_row = QuantizeRow,
          .exp = ExpOf<float>,
          .log = LogOf,
          .sigmoid = SigmoidOf<float>,
          .softplus = SoftplusOf,
          .exp_row = ExpRow,
          .sum_of_squares = SumOfSquares,
          .scale_row = ScaleRow,
          .swiglu_row = SwiGluRow,
          .attend = AttendHeads,
          .pool_window = PoolWindowRows,
          .indexer_scores = IndexerScoreRows,
          .collapse = Collapse,
          .expand = Expand};
}

}  // namespace ds4::DS4_ISA_NAMESPACE
