#include "coordinator/form_progress.h"

#include <algorithm>

#include "engine/base/strings.h"

namespace ds4 {

void FormProgress::OnWaiting(const std::string& for_whom) {
  console_->Note("waiting for " + for_whom);
}

void FormProgress::OnJoined(const std::vector<Member>& members) {
  members_ = members;
  num_ready_ = 0;
  weight_bytes_ = 0;
  load_seconds_ = 0.0;
  if (verbose_) {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      const v1::HelloReply& hello = members[rank].hello;
      console_->Note(StrCat(RankName(static_cast<int>(rank), members[rank].address), ": ",
                            hello.host(), ", ", hello.backend(), " ", hello.kernel_isa(), ", ",
                            hello.num_threads(), " threads, build ", hello.build()));
    }
  }
  if (const std::string notes = MemberNotes(members); !notes.empty()) console_->Note(notes);
  std::vector<std::string> labels;
  for (size_t rank = 0; rank < members.size(); ++rank) labels.push_back(StrCat("rank ", rank));
  bars_ = std::make_unique<ProgressBars>(console_, labels, "bytes");
}

void FormProgress::OnLoading(int rank, int64_t done_bytes, int64_t total_bytes) {
  bars_->Update(rank, done_bytes, total_bytes);
}

void FormProgress::OnReady(int rank, const v1::GroupReady& ready) {
  bars_->Update(rank, ready.weight_bytes(), ready.weight_bytes());
  weight_bytes_ += ready.weight_bytes();
  load_seconds_ = std::max(load_seconds_, ready.load_seconds());
  if (verbose_ && ready.device_bytes() > 0) {
    console_->Note(StrCat("rank ", rank, ": ", ready.backend(), ", ",
                          HumanBytes(ready.device_bytes()), " of device memory taken"));
  }
  if (++num_ready_ < static_cast<int>(members_.size())) return;
  bars_.reset();
  console_->Note(StrCat(num_ready_, num_ready_ == 1 ? " rank" : " ranks",
                        " ready: ", HumanBytes(weight_bytes_), " of weights loaded in ",
                        Fixed(load_seconds_, 2), " s"));
}

}  // namespace ds4
