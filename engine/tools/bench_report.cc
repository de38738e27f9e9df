#include "engine/tools/bench_report.h"

#include <cxxabi.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <map>
#include <sstream>
#include <tuple>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

using Cells = std::vector<std::string>;

// Right-aligned columns, each as wide as its widest cell.
std::string Table(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::ostringstream out;
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      out << (i == 0 ? "" : "  ") << std::setw(static_cast<int>(widths[i])) << row[i];
    }
    out << "\n";
  }
  return std::move(out).str();
}

// Fields with commas or quotes in quotes (RFC 4180).
std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

std::string Csv(const std::vector<Cells>& rows) {
  std::string out;
  for (const Cells& row : rows) {
    std::vector<std::string> fields;
    for (const std::string& cell : row) fields.push_back(CsvField(cell));
    out += StrJoin(fields, ",") + "\n";
  }
  return out;
}

std::string Title(const BenchHeader& header) {
  std::string title = StrCat(header.model, "; ", header.backend);
  if (!header.kernels.empty()) title += " " + header.kernels;
  return StrCat(title, ", ", header.ranks, header.ranks == 1 ? " rank" : " ranks", " of ",
                header.threads, header.threads == 1 ? " thread" : " threads", "\n");
}

Cells CommonCells(const char* mode, const BenchHeader& header) {
  return {mode,           header.model,         header.backend,
          header.kernels, StrCat(header.ranks), StrCat(header.threads)};
}

constexpr const char* kCommonColumns[] = {"mode",    "model", "backend",
                                          "kernels", "ranks", "threads"};

Cells WithCommonColumns(const Cells& more) {
  Cells names(std::begin(kCommonColumns), std::end(kCommonColumns));
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

double Gbps(const DecodeRow& row) {
  return static_cast<double>(row.step_bytes) / 1e9 / row.step_seconds;
}

std::string ShareText(const BenchHeader& header, const DecodeRow& row) {
  if (header.bandwidth_gbps <= 0) return "-";
  return Fixed(100.0 * Gbps(row) / header.bandwidth_gbps, 1) + " %";
}

}  // namespace

int64_t BytesPerStep(const ModelConfig& config, const RankPlan& rank, int64_t rows) {
  const auto experts = static_cast<double>(config.num_experts);
  const double used = static_cast<double>(config.num_experts_used) / experts;
  // Exactly k / E for one row.
  const double hit = rows == 1 ? used : 1.0 - std::pow(1.0 - used, static_cast<double>(rows));
  int64_t bytes = 0;
  for (const TensorSlice& slice : rank.slices) {
    switch (slice.spec.read) {
      case ReadPattern::kAll:
        bytes += slice.held_bytes;
        break;
      case ReadPattern::kOneRow:
        bytes += std::min(slice.held_bytes, slice.read_bytes_per_token * rows);
        break;
      case ReadPattern::kExperts:
        bytes += std::llround(static_cast<double>(slice.held_bytes) * hit);
        break;
      case ReadPattern::kDraft:
        break;
    }
  }
  return bytes;
}

std::string DecodeTable(const BenchHeader& header, const std::vector<DecodeRow>& rows) {
  const std::string share =
      header.bandwidth_gbps > 0 ? StrCat("of ", Fixed(header.bandwidth_gbps, 0), " GB/s") : "share";
  std::vector<Cells> cells = {{"context", "batch", "fill t/s", "decode t/s", "t/s each", "ms/step",
                               "GB/step", "GB/s", share, "peers", "distinct"}};
  for (const DecodeRow& row : rows) {
    cells.push_back({StrCat(row.context), StrCat(row.batch), Fixed(row.fill_tps, 1),
                     Fixed(static_cast<double>(row.batch) / row.step_seconds, 1),
                     Fixed(1.0 / row.step_seconds, 1), Fixed(1e3 * row.step_seconds, 3),
                     Fixed(static_cast<double>(row.step_bytes) / 1e9, 3), Fixed(Gbps(row), 1),
                     ShareText(header, row), Fixed(100.0 * row.comm_share, 1) + " %",
                     Fixed(row.distinct, 1)});
  }
  return StrCat(Title(header), Table(cells),
                "GB/step: weights that rank 0 reads, by the plan and as it holds them. peers: time "
                "waiting for them. "
                "distinct: different tokens in a step.\n");
}

std::string DecodeCsv(const BenchHeader& header, const std::vector<DecodeRow>& rows) {
  std::vector<Cells> cells = {
      WithCommonColumns({"context", "batch", "chunk", "fill_tps", "decode_tps", "step_ms",
                         "step_bytes", "gbps", "bandwidth_gbps", "comm_share", "distinct"})};
  for (const DecodeRow& row : rows) {
    Cells line = CommonCells("decode", header);
    const Cells more = {StrCat(row.context),
                        StrCat(row.batch),
                        StrCat(row.chunk),
                        Fixed(row.fill_tps, 2),
                        Fixed(static_cast<double>(row.batch) / row.step_seconds, 2),
                        Fixed(1e3 * row.step_seconds, 4),
                        StrCat(row.step_bytes),
                        Fixed(Gbps(row), 2),
                        Fixed(header.bandwidth_gbps, 1),
                        Fixed(row.comm_share, 4),
                        Fixed(row.distinct, 2)};
    line.insert(line.end(), more.begin(), more.end());
    cells.push_back(std::move(line));
  }
  return Csv(cells);
}

std::string PrefillTable(const BenchHeader& header, const std::vector<PrefillRow>& rows) {
  std::vector<Cells> cells = {{"prompt", "chunk", "prefill t/s", "seconds", "ms/chunk", "peers"}};
  for (const PrefillRow& row : rows) {
    const int64_t chunks = (row.prompt + row.chunk - 1) / row.chunk;
    cells.push_back({StrCat(row.prompt), StrCat(row.chunk),
                     Fixed(static_cast<double>(row.prompt) / row.seconds, 1), Fixed(row.seconds, 3),
                     Fixed(1e3 * row.seconds / static_cast<double>(chunks), 2),
                     Fixed(100.0 * row.comm_share, 1) + " %"});
  }
  return StrCat(Title(header), Table(cells));
}

std::string PrefillCsv(const BenchHeader& header, const std::vector<PrefillRow>& rows) {
  std::vector<Cells> cells = {
      WithCommonColumns({"prompt", "chunk", "prefill_tps", "seconds", "comm_share"})};
  for (const PrefillRow& row : rows) {
    Cells line = CommonCells("prefill", header);
    const Cells more = {StrCat(row.prompt), StrCat(row.chunk),
                        Fixed(static_cast<double>(row.prompt) / row.seconds, 2),
                        Fixed(row.seconds, 4), Fixed(row.comm_share, 4)};
    line.insert(line.end(), more.begin(), more.end());
    cells.push_back(std::move(line));
  }
  return Csv(cells);
}

Result<size_t> LaunchesPerStep(const std::vector<std::string>& kernels, size_t steps) {
  constexpr size_t kMostApart = 16;
  const size_t total = kernels.size() + 1;
  const size_t share = total / (steps + 1);
  for (size_t launches = share + kMostApart; launches > 0 && launches + kMostApart >= share;
       --launches) {
    if (steps * launches > total) continue;
    bool alike = (steps - 1) * launches > 1;  // else there is nothing to compare
    for (size_t i = total - steps * launches; alike && i + launches < kernels.size(); ++i) {
      alike = kernels[i] == kernels[i + launches];
    }
    if (alike) return launches;
  }
  return InternalError(StrCat(total, " launches are not ", steps, " like steps behind another"));
}

std::string KernelName(const std::string& symbol) {
  int status = 0;
  char* plain = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  std::string name = status == 0 ? plain : symbol;
  std::free(plain);
  for (const std::string_view noise :
       {"void ", "(anonymous namespace)::", "ds4::cuda::", "(ds4::DType)"}) {
    for (size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, noise.size());
  }
  return name.substr(0, name.find('('));
}

std::string KernelTable(const std::vector<KernelRow>& rows) {
  struct Sum {
    int64_t launches = 0;
    double us = 0.0;
  };
  std::map<std::pair<int64_t, int64_t>, std::map<std::string, Sum>> cases;
  for (const KernelRow& row : rows) {
    Sum& sum = cases[{row.length, row.rows}][row.kernel];
    ++sum.launches;
    sum.us += row.us;
  }
  std::vector<Cells> cells = {{"length", "rows", "launches", "us each", "us", "share", "kernel"}};
  for (const auto& [key, kernels] : cases) {
    std::vector<std::pair<std::string, Sum>> sorted(kernels.begin(), kernels.end());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& a, const auto& b) { return a.second.us > b.second.us; });
    Sum all;
    for (const auto& [name, sum] : sorted) {
      all.launches += sum.launches;
      all.us += sum.us;
    }
    sorted.emplace_back("all", all);
    for (const auto& [name, sum] : sorted) {
      cells.push_back({StrCat(key.first), StrCat(key.second), StrCat(sum.launches),
                       Fixed(sum.us / static_cast<double>(sum.launches), 2), Fixed(sum.us, 1),
                       Fixed(100.0 * sum.us / all.us, 1) + " %", name});
    }
  }
  return Table(cells);
}

std::string KernelCsv(const std::vector<KernelRow>& rows) {
  std::vector<Cells> cells = {{"length", "rows", "launch", "kernel", "us"}};
  for (const KernelRow& row : rows) {
    cells.push_back(
        {StrCat(row.length), StrCat(row.rows), StrCat(row.launch), row.kernel, Fixed(row.us, 3)});
  }
  return Csv(cells);
}

}  // namespace ds4
