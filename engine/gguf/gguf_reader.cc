// Parsing; what reads values out of the parsed file is in gguf_metadata.cc.
#include "engine/gguf/gguf_reader.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"
#include "engine/gguf/gguf_format.h"

namespace ds4 {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// a * b, or false when it does not fit. Both at least 0.
bool MultiplyFits(int64_t a, int64_t b, int64_t* product) {
  if (a != 0 && b > kMaxInt64 / a) return false;
  *product = a * b;
  return true;
}

// The next multiple of `step`, a power of two.
int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) & ~(step - 1); }

std::string DimsText(const std::vector<int64_t>& dims) {
  std::vector<std::string> parts;
  for (int64_t dim : dims) parts.push_back(StrCat(dim));
  return "[" + StrJoin(parts, ",") + "]";
}

}  // namespace

std::string_view GgufTypeName(GgufType type) {
  static constexpr std::string_view kNames[] = {"u8",  "i8",  "u16",  "i16",    "u32",
                                                "i32", "f32", "bool", "string", "array",
                                                "u64", "i64", "f64"};
  static_assert(std::size(kNames) == static_cast<size_t>(GgufType::kCount));
  return type < GgufType::kCount ? kNames[static_cast<size_t>(type)] : "unknown";
}

int64_t GgufItemBytes(GgufType type) {
  switch (type) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    default:
      return 0;
  }
}

int64_t TensorInfo::num_elems() const {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
}

// Walks the bytes once, front to back. Every Take checks against what is left in the file.
class GgufParser {
 public:
  GgufParser(GgufFile* file, GgufContent content)
      : file_(*file), bytes_(file->bytes_), content_(content) {}

  Status Run() {
    RETURN_IF_ERROR(ParseHeader());
    RETURN_IF_ERROR(ParseKeys());
    RETURN_IF_ERROR(ReadAlignment());
    RETURN_IF_ERROR(ParseTensors());
    file_.header_bytes_ = pos_;
    return PlaceTensors();
  }

 private:
  int64_t Left() const { return static_cast<int64_t>(bytes_.size()) - pos_; }

  Status Error(const std::string& what) const {
    return InvalidArgumentError(StrCat(file_.path_, ": ", what));
  }

  Status Skip(int64_t count, std::string_view what) {
    if (count > Left()) {
      return Error(StrCat(what, " at offset ", pos_, " needs ", count, " bytes, the file has ",
                          Left(), " left; it is cut short or damaged"));
    }
    pos_ += count;
    return OkStatus();
  }

  template <typename T>
  Status Take(std::string_view what, T* value) {
    const int64_t from = pos_;
    RETURN_IF_ERROR(Skip(sizeof(T), what));
    *value = LoadLittleEndian<T>(bytes_.data() + from);
    return OkStatus();
  }

  // A u64 that says how many things of at least `min_bytes` each follow.
  Status TakeCount(std::string_view what, int64_t min_bytes, int64_t* count) {
    const int64_t from = pos_;
    uint64_t raw = 0;
    RETURN_IF_ERROR(Take(what, &raw));
    if (raw > static_cast<uint64_t>(Left() / min_bytes)) {
      return Error(StrCat(what, " at offset ", from, " is ", raw, ", the ", Left(),
                          " bytes that follow hold at most ", Left() / min_bytes));
    }
    *count = static_cast<int64_t>(raw);
    return OkStatus();
  }

  Status TakeString(std::string_view what, std::string_view* text) {
    int64_t length = 0;
    RETURN_IF_ERROR(TakeCount(StrCat(what, " length"), 1, &length));
    *text = {reinterpret_cast<const char*>(bytes_.data()) + pos_, static_cast<size_t>(length)};
    pos_ += length;
    return OkStatus();
  }

  Status ParseHeader() {
    uint32_t magic = 0;
    RETURN_IF_ERROR(Take("magic", &magic));
    if (magic != kGgufMagic) return Error("not a GGUF file (it does not start with \"GGUF\")");
    RETURN_IF_ERROR(Take("version", &file_.version_));
    if (file_.version_ != 2 && file_.version_ != 3) {
      const bool swapped = (file_.version_ & 0xffff) == 0 && file_.version_ != 0;
      return Error(StrCat("GGUF version ", file_.version_, ", this program reads 2 and 3",
                          swapped ? " (a big-endian file?)" : ""));
    }
    RETURN_IF_ERROR(TakeCount("number of tensors", kMinTensorBytes, &num_tensors_));
    return TakeCount("number of metadata keys", kMinKeyBytes, &num_keys_);
  }

  Status ParseKeys() {
    for (int64_t i = 0; i < num_keys_; ++i) RETURN_IF_ERROR(ParseKey(i));
    // The index holds views into keys_, which must not grow from here on.
    for (size_t i = 0; i < file_.keys_.size(); ++i) {
      if (!file_.key_index_.emplace(file_.keys_[i].name, i).second) {
        return Error(StrCat("metadata key ", file_.keys_[i].name, " appears twice (number ",
                            file_.key_index_[file_.keys_[i].name], " and ", i, ")"));
      }
    }
    return OkStatus();
  }

  Status ParseKey(int64_t number) {
    std::string_view name;
    RETURN_IF_ERROR(TakeString(StrCat("metadata key ", number), &name));
    if (name.empty() || name.size() > kMaxKeyBytes) {
      return Error(StrCat("metadata key ", number, " has a name of ", name.size(),
                          " bytes, it must have 1 to ", kMaxKeyBytes));
    }
    GgufFile::Key key;
    key.name = name;
    RETURN_IF_ERROR(TakeType(key.name, &key.value.type));
    if (key.value.type == GgufType::kArray) {
      key.value.is_array = true;
      RETURN_IF_ERROR(TakeType(key.name, &key.value.type));
      if (key.value.type == GgufType::kArray) {
        return Error(StrCat("metadata key ", key.name, " is an array of arrays; none is known"));
      }
      const bool strings = key.value.type == GgufType::kString;
      RETURN_IF_ERROR(TakeCount(StrCat("length of array ", key.name),
                                strings ? 8 : GgufItemBytes(key.value.type), &key.value.count));
    }
    key.value.offset = pos_;
    RETURN_IF_ERROR(SkipItems(key));
    file_.keys_.push_back(std::move(key));
    return OkStatus();
  }

  Status TakeType(const std::string& key, GgufType* type) {
    uint32_t raw = 0;
    RETURN_IF_ERROR(Take(StrCat("type of ", key), &raw));
    if (raw >= static_cast<uint32_t>(GgufType::kCount)) {
      return Error(StrCat("metadata key ", key, " has type ", raw, ", known are 0 to 12"));
    }
    *type = static_cast<GgufType>(raw);
    return OkStatus();
  }

  Status SkipItems(const GgufFile::Key& key) {
    const GgufFile::Value& value = key.value;
    if (value.type == GgufType::kString) {
      std::string_view text;
      for (int64_t i = 0; i < value.count; ++i) RETURN_IF_ERROR(TakeString(key.name, &text));
      return OkStatus();
    }
    int64_t size = 0;
    if (!MultiplyFits(value.count, GgufItemBytes(value.type), &size)) size = kMaxInt64;
    return Skip(size, StrCat("value of ", key.name));
  }

  Status ReadAlignment() {
    file_.alignment_ = kDefaultGgufAlignment;
    if (!file_.HasKey(kAlignmentKey)) return OkStatus();
    auto alignment = file_.GetInt(kAlignmentKey);
    if (!alignment.ok()) return alignment.status();
    if (*alignment < 1 || *alignment > kMaxGgufAlignment || (*alignment & (*alignment - 1)) != 0) {
      return Error(StrCat("general.alignment is ", *alignment,
                          ", it must be a power of two from 1 to ", kMaxGgufAlignment));
    }
    file_.alignment_ = *alignment;
    return OkStatus();
  }

  Status ParseTensors() {
    for (int64_t i = 0; i < num_tensors_; ++i) RETURN_IF_ERROR(ParseTensor(i));
    for (size_t i = 0; i < file_.tensors_.size(); ++i) {
      if (!file_.tensor_index_.emplace(file_.tensors_[i].name, i).second) {
        return Error(StrCat("tensor ", file_.tensors_[i].name, " appears twice (number ",
                            file_.tensor_index_[file_.tensors_[i].name], " and ", i, ")"));
      }
    }
    return OkStatus();
  }

  Status ParseTensor(int64_t number) {
    std::string_view name;
    RETURN_IF_ERROR(TakeString(StrCat("name of tensor ", number), &name));
    if (name.empty() || name.size() > kMaxTensorNameBytes) {
      return Error(StrCat("tensor ", number, " has a name of ", name.size(),
                          " bytes, it must have 1 to ", kMaxTensorNameBytes));
    }
    TensorInfo tensor;
    tensor.name = name;
    RETURN_IF_ERROR(ParseDims(&tensor));
    RETURN_IF_ERROR(ParseTensorType(&tensor));
    uint64_t offset = 0;
    RETURN_IF_ERROR(Take(StrCat("offset of ", tensor.name), &offset));
    // Relative to the data section, which is not known yet; PlaceTensors makes it absolute.
    if (offset > static_cast<uint64_t>(kMaxTensorBytes) ||
        offset % static_cast<uint64_t>(file_.alignment_) != 0) {
      return Error(StrCat("tensor ", tensor.name, " has offset ", offset,
                          ", it must be a multiple of ", file_.alignment_, " and at most ",
                          kMaxTensorBytes));
    }
    tensor.offset = static_cast<int64_t>(offset);
    file_.tensors_.push_back(std::move(tensor));
    return OkStatus();
  }

  Status ParseDims(TensorInfo* tensor) {
    uint32_t num_dims = 0;
    RETURN_IF_ERROR(Take(StrCat("number of dims of ", tensor->name), &num_dims));
    if (num_dims < 1 || num_dims > kMaxDims) {
      return Error(StrCat("tensor ", tensor->name, " has ", num_dims, " dims, it must have 1 to ",
                          kMaxDims));
    }
    int64_t num_elems = 1;
    for (uint32_t i = 0; i < num_dims; ++i) {
      uint64_t dim = 0;
      RETURN_IF_ERROR(Take(StrCat("dim ", i, " of ", tensor->name), &dim));
      if (dim < 1 || dim > static_cast<uint64_t>(kMaxInt64)) {
        return Error(StrCat("tensor ", tensor->name, " has dim ", i, " of ", dim));
      }
      tensor->dims.push_back(static_cast<int64_t>(dim));
      if (!MultiplyFits(num_elems, tensor->dims.back(), &num_elems)) {
        return Error(StrCat("tensor ", tensor->name, " with dims ", DimsText(tensor->dims),
                            " has more values than fit in 63 bits"));
      }
    }
    return OkStatus();
  }

  Status ParseTensorType(TensorInfo* tensor) {
    uint32_t id = 0;
    RETURN_IF_ERROR(Take(StrCat("type of ", tensor->name), &id));
    const auto dtype = DTypeFromGgmlId(id);
    if (!dtype)
      return Error(StrCat("tensor ", tensor->name, " has type id ", id, ", which is unknown"));
    tensor->dtype = *dtype;
    const DTypeInfo& info = Info(*dtype);
    if (tensor->dims[0] % info.block_elems != 0) {
      return Error(StrCat("tensor ", tensor->name, " has rows of ", tensor->dims[0],
                          " values, type ", info.name, " needs a multiple of ", info.block_elems));
    }
    if (!MultiplyFits(tensor->num_elems() / info.block_elems, info.block_bytes,
                      &tensor->size_bytes)) {
      return Error(StrCat("tensor ", tensor->name, " with dims ", DimsText(tensor->dims),
                          " has more bytes than fit in 63 bits"));
    }
    return OkStatus();
  }

  // Makes offsets absolute; checks that tensors lie inside the file and apart from each other.
  Status PlaceTensors() {
    const int64_t data_start = RoundUp(pos_, file_.alignment_);
    for (TensorInfo& tensor : file_.tensors_) {
      tensor.offset += data_start;  // no overflow: both are below kMaxTensorBytes and the file size
      if (tensor.size_bytes > 2 * kMaxTensorBytes - tensor.offset) {
        return Error(StrCat("tensor ", tensor.name, " at offset ", tensor.offset, " has ",
                            tensor.size_bytes, " bytes, more than any file holds"));
      }
      const int64_t end = RoundUp(tensor.offset + tensor.size_bytes, file_.alignment_);
      if (content_ == GgufContent::kComplete && end > file_.file_bytes()) {
        return Error(StrCat("tensor ", tensor.name, " at offset ", tensor.offset, " has ",
                            tensor.size_bytes, " bytes and ends, padded, at ", end,
                            "; the file ends at ", file_.file_bytes(),
                            ": it is cut short or damaged"));
      }
    }
    return CheckApart();
  }

  Status CheckApart() const {
    std::vector<const TensorInfo*> order;
    for (const TensorInfo& tensor : file_.tensors_) order.push_back(&tensor);
    std::sort(order.begin(), order.end(),
              [](const TensorInfo* a, const TensorInfo* b) { return a->offset < b->offset; });
    for (size_t i = 1; i < order.size(); ++i) {
      const TensorInfo& before = *order[i - 1];
      if (before.offset + before.size_bytes > order[i]->offset) {
        return Error(StrCat("tensors ", before.name, " (offset ", before.offset, ", ",
                            before.size_bytes, " bytes) and ", order[i]->name, " (offset ",
                            order[i]->offset, ") overlap"));
      }
    }
    return OkStatus();
  }

  GgufFile& file_;
  std::span<const std::byte> bytes_;
  GgufContent content_;
  int64_t pos_ = 0;
  int64_t num_tensors_ = 0;
  int64_t num_keys_ = 0;
};

Result<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path, GgufContent content) {
  ASSIGN_OR_RETURN(MappedFile mapping, MappedFile::Open(path));
  ASSIGN_OR_RETURN(auto file, Parse(mapping.bytes(), path, content));
  file->mapping_ = std::move(mapping);
  return file;
}

Result<std::unique_ptr<GgufFile>> GgufFile::Parse(std::span<const std::byte> bytes,
                                                  const std::string& name, GgufContent content) {
  std::unique_ptr<GgufFile> file(new GgufFile());
  file->path_ = name;
  file->bytes_ = bytes;
  RETURN_IF_ERROR(GgufParser(file.get(), content).Run());
  return file;
}

Result<std::unique_ptr<GgufFile>> GgufFile::Adopt(std::vector<std::byte> bytes,
                                                  const std::string& name, GgufContent content) {
  ASSIGN_OR_RETURN(auto file, Parse(bytes, name, content));
  file->owned_ = std::move(bytes);  // a moved vector's bytes stay where they are
  return file;
}

const TensorInfo* GgufFile::FindTensor(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

std::span<const std::byte> GgufFile::data(const TensorInfo& tensor) const {
  if (tensor.offset + tensor.size_bytes > file_bytes()) return {};
  return bytes_.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.size_bytes));
}

}  // namespace ds4
