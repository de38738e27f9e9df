#include "engine/gguf/gguf_writer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/base/byte_order.h"
#include "engine/base/check.h"
#include "engine/base/strings.h"
#include "engine/gguf/gguf_format.h"

namespace ds4 {
namespace {

template <typename T>
void PutTo(std::vector<std::byte>* out, T value) {
  const size_t at = out->size();
  out->resize(at + sizeof(T));
  StoreLittleEndian(value, out->data() + at);
}

void PutStringTo(std::vector<std::byte>* out, std::string_view text) {
  PutTo(out, static_cast<uint64_t>(text.size()));
  const auto bytes = std::as_bytes(std::span(text));
  out->insert(out->end(), bytes.begin(), bytes.end());
}

int64_t Padded(int64_t bytes) {
  return (bytes + kDefaultGgufAlignment - 1) / kDefaultGgufAlignment * kDefaultGgufAlignment;
}

// The bytes of a tensor, or an error that says what is wrong with its shape.
Result<int64_t> TensorBytes(const std::string& name, DType dtype,
                            const std::vector<int64_t>& dims) {
  if (dims.empty() || dims.size() > kMaxDims) {
    return InvalidArgumentError(
        StrCat("tensor ", name, " has ", dims.size(), " dims, 1 to ", kMaxDims, " can be written"));
  }
  const DTypeInfo& info = Info(dtype);
  if (dims[0] < 1 || dims[0] % info.block_elems != 0) {
    return InvalidArgumentError(StrCat("tensor ", name, " has rows of ", dims[0], " values, type ",
                                       info.name, " needs a multiple of ", info.block_elems));
  }
  int64_t bytes = dims[0] / info.block_elems;
  if (bytes > kMaxTensorBytes / info.block_bytes) {
    return InvalidArgumentError(StrCat("tensor ", name, " is too large"));
  }
  bytes *= info.block_bytes;
  for (size_t i = 1; i < dims.size(); ++i) {
    if (dims[i] < 1 || bytes > kMaxTensorBytes / dims[i]) {
      return InvalidArgumentError(StrCat("tensor ", name, " has dim ", i, " of ", dims[i],
                                         ", with ", bytes, " bytes below it"));
    }
    bytes *= dims[i];
  }
  return bytes;
}

}  // namespace

template <typename T>
void GgufWriter::Put(T value) {
  PutTo(&key_bytes_, value);
}

void GgufWriter::PutString(std::string_view text) { PutStringTo(&key_bytes_, text); }

void GgufWriter::AddKey(std::string_view key, GgufType type) {
  CHECK(!file_ && !key.empty() && key.size() <= kMaxKeyBytes) << "key " << key;
  CHECK(std::find(keys_.begin(), keys_.end(), key) == keys_.end()) << key << " is added twice";
  keys_.emplace_back(key);
  PutString(key);
  Put(static_cast<uint32_t>(type));
}

void GgufWriter::AddU32(std::string_view key, uint32_t value) {
  AddKey(key, GgufType::kU32);
  Put(value);
}

void GgufWriter::AddF32(std::string_view key, float value) {
  AddKey(key, GgufType::kF32);
  Put(value);
}

void GgufWriter::AddBool(std::string_view key, bool value) {
  AddKey(key, GgufType::kBool);
  Put(static_cast<uint8_t>(value ? 1 : 0));
}

void GgufWriter::AddString(std::string_view key, std::string_view value) {
  AddKey(key, GgufType::kString);
  PutString(value);
}

void GgufWriter::AddI32Array(std::string_view key, std::span<const int32_t> items) {
  AddKey(key, GgufType::kArray);
  Put(static_cast<uint32_t>(GgufType::kI32));
  Put(static_cast<uint64_t>(items.size()));
  for (const int32_t item : items) Put(item);
}

void GgufWriter::AddF32Array(std::string_view key, std::span<const float> items) {
  AddKey(key, GgufType::kArray);
  Put(static_cast<uint32_t>(GgufType::kF32));
  Put(static_cast<uint64_t>(items.size()));
  for (const float item : items) Put(item);
}

void GgufWriter::AddStringArray(std::string_view key, std::span<const std::string> items) {
  AddKey(key, GgufType::kArray);
  Put(static_cast<uint32_t>(GgufType::kString));
  Put(static_cast<uint64_t>(items.size()));
  for (const std::string& item : items) PutString(item);
}

Status GgufWriter::AddTensor(const std::string& name, DType dtype, std::vector<int64_t> dims) {
  CHECK(!file_) << "tensor " << name << " added after Begin";
  if (name.empty() || name.size() > kMaxTensorNameBytes) {
    return InvalidArgumentError(StrCat("tensor name ", name, " has ", name.size(), " bytes, 1 to ",
                                       kMaxTensorNameBytes, " can be written"));
  }
  for (const TensorInfo& other : tensors_) {
    if (other.name == name) return InvalidArgumentError(StrCat("tensor ", name, " is added twice"));
  }
  TensorInfo tensor;
  ASSIGN_OR_RETURN(tensor.size_bytes, TensorBytes(name, dtype, dims));
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.dims = std::move(dims);
  if (!tensors_.empty()) {
    tensor.offset = tensors_.back().offset + Padded(tensors_.back().size_bytes);
  }
  if (tensor.offset > kMaxTensorBytes) {
    return InvalidArgumentError(StrCat("tensor ", name, " would start at ", tensor.offset));
  }
  tensors_.push_back(std::move(tensor));
  return OkStatus();
}

void GgufWriter::PutDirectory(std::vector<std::byte>* out) const {
  for (const TensorInfo& tensor : tensors_) {
    PutStringTo(out, tensor.name);
    PutTo(out, static_cast<uint32_t>(tensor.dims.size()));
    for (const int64_t dim : tensor.dims) PutTo(out, static_cast<uint64_t>(dim));
    PutTo(out, Info(tensor.dtype).ggml_id);
    PutTo(out, static_cast<uint64_t>(tensor.offset));
  }
}

std::vector<std::byte> GgufWriter::Directory() const {
  std::vector<std::byte> header;
  PutTo(&header, kGgufMagic);
  PutTo(&header, uint32_t{3});
  PutTo(&header, static_cast<uint64_t>(tensors_.size()));
  PutTo(&header, static_cast<uint64_t>(keys_.size()));
  header.insert(header.end(), key_bytes_.begin(), key_bytes_.end());
  PutDirectory(&header);
  header.resize(static_cast<size_t>(Padded(static_cast<int64_t>(header.size()))));
  return header;
}

Status GgufWriter::Begin(const std::string& path) {
  CHECK(!file_) << "Begin called twice";
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(path));
  file_.emplace(std::move(file));
  return file_->Write(Directory());
}

// Zeros up to the next multiple of the alignment. The data section starts at one, so positions in
// the file and in the section agree.
Status GgufWriter::Pad() {
  static constexpr std::byte kZeros[kDefaultGgufAlignment] = {};
  const int64_t missing = Padded(file_->bytes_written()) - file_->bytes_written();
  return file_->Write(std::span(kZeros, static_cast<size_t>(missing)));
}

Status GgufWriter::Append(std::string_view name, std::span<const std::byte> bytes) {
  CHECK(file_) << "Append before Begin";
  if (current_ == tensors_.size() || tensors_[current_].name != name) {
    return InvalidArgumentError(
        StrCat("data of tensor ", name, " came when ",
               current_ == tensors_.size() ? "none" : tensors_[current_].name, " was due"));
  }
  const TensorInfo& tensor = tensors_[current_];
  const auto count = static_cast<int64_t>(bytes.size());
  if (count > tensor.size_bytes - current_bytes_) {
    return InvalidArgumentError(StrCat("tensor ", name, " got ", current_bytes_ + count,
                                       " bytes, it has room for ", tensor.size_bytes));
  }
  RETURN_IF_ERROR(file_->Write(bytes));
  current_bytes_ += count;
  if (current_bytes_ < tensor.size_bytes) return OkStatus();
  ++current_;
  current_bytes_ = 0;
  return Pad();
}

Status GgufWriter::Finish() {
  CHECK(file_) << "Finish before Begin";
  if (current_ < tensors_.size()) {
    const TensorInfo& tensor = tensors_[current_];
    return FailedPreconditionError(StrCat("tensor ", tensor.name, " got ", current_bytes_, " of ",
                                          tensor.size_bytes, " bytes"));
  }
  return file_->Commit();
}

}  // namespace ds4
