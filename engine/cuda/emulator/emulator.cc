// The scheduler of fibers, and what warp operations compute.
#include "engine/cuda/emulator/emulator.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/check.h"
#include "engine/base/strings.h"
#include "engine/cuda/emulator/fiber.h"

namespace ds4::cuda::emulator {
namespace {

constexpr unsigned kMaxBlockThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 * 1024;  // of a block, as on sm_90
// A block's dynamic shared memory begins behind what the system keeps, as on sm_90: kernels that
// align tables in it see the same addresses, modulo 64 KiB.
constexpr size_t kSharedBase = 1024;
constexpr size_t kSharedAlignment = 64 * 1024;
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 64 * 1024;
#else
constexpr size_t kStackBytes = 256 * 1024;  // frames are much larger there
#endif

const char* Name(WarpOp op) {
  switch (op) {
    case WarpOp::kNone:
      return "nothing";
    case WarpOp::kShuffle:
      return "__shfl_sync";
    case WarpOp::kShuffleXor:
      return "__shfl_xor_sync";
    case WarpOp::kShuffleDown:
      return "__shfl_down_sync";
    case WarpOp::kBallot:
      return "__ballot_sync";
    case WarpOp::kSyncWarp:
      return "__syncwarp";
    case WarpOp::kMmaS8:
      return "MmaS8";
    case WarpOp::kMmaBf16:
      return "MmaBf16";
    case WarpOp::kMmaF16:
      return "MmaF16";
    case WarpOp::kLoadMatrix:
      return "LoadMatrix4";
    case WarpOp::kLoadMatrixTrans:
      return "LoadMatrix4Trans";
  }
  return "?";
}

enum class State : uint8_t { kReady, kAtWarp, kAtBlock, kDone };

struct Copy {
  void* to;
  const void* from;
};

struct Thread {
  Context context;
  uint3 index{};
  State state = State::kDone;
  bool waited_for_dependency = false;
  const char* file = nullptr;  // where it waits
  int line = 0;
  std::vector<Copy> copies;        // not done yet
  std::vector<size_t> group_ends;  // committed groups: ends in `copies`
};

struct Warp {
  uint32_t ready = 0;  // lanes that can go on
  WarpOp op = WarpOp::kNone;
  unsigned arrived = 0;
  Lane lanes[32];
};

// A numbered barrier, while threads wait at it.
constexpr int kNumBarriers = 16;
struct Barrier {
  int threads = 0;  // that it is for
  int arrived = 0;
  uint32_t warps = 0;  // that have threads at it
};

// A copy that one thread has asked for and another may wait for.
struct BulkCopy {
  void* to;
  const void* from;
  uint32_t bytes;
  const void* barrier;
};

// Stacks for the fibers of one OS thread, each above a page that faults.
class StackPool {
 public:
  StackPool() = default;
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  ~StackPool() {
    if (memory_ != nullptr) munmap(memory_, count_ * Stride());
  }
  void Create(size_t count) {
    count_ = count;
    void* memory =
        mmap(nullptr, count * Stride(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    CHECK(memory != MAP_FAILED) << "no memory for " << count << " emulated threads' stacks";
    memory_ = static_cast<std::byte*>(memory);
    for (size_t i = 0; i < count; ++i) mprotect(memory_ + i * Stride(), Guard(), PROT_NONE);
  }
  bool empty() const { return memory_ == nullptr; }
  std::byte* Bottom(size_t i) const { return memory_ + i * Stride() + Guard(); }

 private:
  static size_t Guard() {
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return page;
  }
  static size_t Stride() { return Guard() + kStackBytes; }
  std::byte* memory_ = nullptr;
  size_t count_ = 0;
};

struct FreeAligned {
  void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(kSharedAlignment)); }
};

// What one OS thread needs to run launches: reused from launch to launch.
struct Machine {
  StackPool stacks;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned num_prepared = 0;  // threads that have a fiber
  std::unique_ptr<std::byte, FreeAligned> shared;

  const KernelCall* call = nullptr;
  Context launcher;
  unsigned num_threads = 0, num_warps = 0;
  unsigned current = 0;
  unsigned at_block = 0, done = 0;
  Barrier barriers[kNumBarriers];
  std::vector<BulkCopy> bulk_copies;  // not done yet
  const char* barrier_file = nullptr;
  int barrier_line = 0;

  ~Machine() {
    for (unsigned i = 0; i < num_prepared; ++i) ReleaseFiber(threads[i].context);
  }
  Thread& thread() { return threads[current]; }
  Warp& warp() { return warps[current / 32]; }
  unsigned lane() const { return current % 32; }
};
// A plain pointer, because a thread_local with a constructor is looked at before every use.
thread_local constinit Machine* machine = nullptr;

Machine* MachineOfThread() {
  static thread_local Machine of_thread;
  return &of_thread;
}

std::string Where(const KernelCall& call) {
  return "kernel launched at " + std::string(call.file) + ":" + std::to_string(call.line);
}

template <typename Index>
std::string Coordinates(const Index& i) {
  return StrCat("(", i.x, ", ", i.y, ", ", i.z, ")");
}

std::string Describe(const Thread& thread, const Warp& warp) {
  std::string text = "  thread " + Coordinates(thread.index) + " ";
  switch (thread.state) {
    case State::kReady:
      return text + "runs";
    case State::kDone:
      return text + "has ended";
    case State::kAtWarp:
      text += std::string("waits in ") + Name(warp.op);
      break;
    case State::kAtBlock:
      text += "waits in __syncthreads";
      break;
  }
  return text + " at " + thread.file + ":" + std::to_string(thread.line);
}

// All threads that have not ended wait, for others that will never come.
[[noreturn]] void FailStuck() {
  Machine& m = *machine;
  std::string text = "no thread of the block can go on:";
  std::string last;
  for (unsigned i = 0; i < m.num_threads; ++i) {
    std::string line = Describe(m.threads[i], m.warps[i / 32]);
    // One line for each run of threads that do the same.
    const std::string what = line.substr(line.find(')'));
    if (what != last) text += "\n" + line;
    last = what;
  }
  Fail(text.c_str());
}

// The next thread that can run: the warp's other lanes first, round robin.
unsigned NextReady() {
  Machine& m = *machine;
  const unsigned warp = m.current / 32;
  if (uint32_t ready = m.warps[warp].ready; ready != 0) {
    const unsigned from = (m.current + 1) % 32;
    return warp * 32 + (std::countr_zero(std::rotr(ready, static_cast<int>(from))) + from) % 32;
  }
  for (unsigned i = 1; i < m.num_warps; ++i) {
    const unsigned other = (warp + i) % m.num_warps;
    if (uint32_t ready = m.warps[other].ready; ready != 0) {
      return other * 32 + static_cast<unsigned>(std::countr_zero(ready));
    }
  }
  FailStuck();
}

// The next thread that can run, in the order of all threads of the block, so that each gets its
// turn.
unsigned NextInTurn() {
  Machine& m = *machine;
  const unsigned warp = m.current / 32;
  const uint32_t later = m.warps[warp].ready & (~uint32_t{1} << m.lane());
  if (later != 0) return warp * 32 + static_cast<unsigned>(std::countr_zero(later));
  for (unsigned i = 1; i <= m.num_warps; ++i) {
    const unsigned other = (warp + i) % m.num_warps;
    if (uint32_t ready = m.warps[other].ready; ready != 0) {
      return other * 32 + static_cast<unsigned>(std::countr_zero(ready));
    }
  }
  return m.current;
}

void Resume(unsigned next) {
  Machine& m = *machine;
  if (next == m.current) return;
  Context& from = m.thread().context;
  m.current = next;
  threadIdx = m.thread().index;
  Switch(from, m.thread().context);
}

// Leaves the current thread in `state` until somebody makes it ready again.
void Block(State state, const char* file, int line) {
  Thread& thread = machine->thread();
  thread.state = state;
  thread.file = file;
  thread.line = line;
  machine->warp().ready &= ~(1u << machine->lane());
  Resume(NextReady());
}

void MakeReady(unsigned warp) {
  machine->warps[warp].ready = 0xffffffffu;
  for (unsigned i = 0; i < 32; ++i) machine->threads[warp * 32 + i].state = State::kReady;
}

void ComputeMmaS8(Warp& warp) {
  int8_t a[16][32], b[8][32];
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned g = i / 4, t = i % 4;
    const uint32_t* in = warp.lanes[i].in;
    std::memcpy(&a[g][4 * t], &in[0], 4);
    std::memcpy(&a[g + 8][4 * t], &in[1], 4);
    std::memcpy(&a[g][16 + 4 * t], &in[2], 4);
    std::memcpy(&a[g + 8][16 + 4 * t], &in[3], 4);
    std::memcpy(&b[g][4 * t], &in[4], 4);
    std::memcpy(&b[g][16 + 4 * t], &in[5], 4);
  }
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned g = i / 4, t = i % 4;
    for (unsigned j = 0; j < 4; ++j) {
      const int8_t* row = a[g + j / 2 * 8];
      const int8_t* column = b[2 * t + j % 2];
      int dot = 0;
      for (int k = 0; k < 32; ++k) dot += row[k] * column[k];
      warp.lanes[i].out[j] = warp.lanes[i].in[6 + j] + static_cast<uint32_t>(dot);  // wraps
    }
  }
}

// Products are exact in float32; sums run over rising k, on top of d.
template <typename ToFloats>
void ComputeMmaFloat(Warp& warp, ToFloats to_floats) {
  float a[16][16], b[16][8], d[16][8];  // [row][k], [k][column], [row][column]
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned g = i / 4, t = i % 4;
    const uint32_t* in = warp.lanes[i].in;
    for (unsigned j = 0; j < 4; ++j) {
      const float2 both = to_floats(in[j]);
      float* at = &a[g + j % 2 * 8][2 * t + j / 2 * 8];
      at[0] = both.x;
      at[1] = both.y;
    }
    for (unsigned j = 0; j < 2; ++j) {
      const float2 both = to_floats(in[4 + j]);
      b[2 * t + 8 * j][g] = both.x;
      b[2 * t + 8 * j + 1][g] = both.y;
    }
    std::memcpy(&d[g][2 * t], &in[6], 8);
    std::memcpy(&d[g + 8][2 * t], &in[8], 8);
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned g = i / 4, t = i % 4;
    std::memcpy(&warp.lanes[i].out[0], &d[g][2 * t], 8);
    std::memcpy(&warp.lanes[i].out[2], &d[g + 8][2 * t], 8);
  }
}

void ComputeLoadMatrix(Warp& warp, bool transposed) {
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    uint16_t values[8][8];
    for (unsigned row = 0; row < 8; ++row) {
      std::memcpy(values[row], warp.lanes[8 * matrix + row].address, 16);
    }
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned major = i / 4, minor = 2 * (i % 4);
      const uint16_t lo = transposed ? values[minor][major] : values[major][minor];
      const uint16_t hi = transposed ? values[minor + 1][major] : values[major][minor + 1];
      warp.lanes[i].out[matrix] = lo | static_cast<uint32_t>(hi) << 16;
    }
  }
}

void Compute(Warp& warp) {
  switch (warp.op) {
    case WarpOp::kNone:
    case WarpOp::kSyncWarp:
      break;
    case WarpOp::kShuffle:
    case WarpOp::kShuffleXor:
    case WarpOp::kShuffleDown:
      for (Lane& lane : warp.lanes) lane.out[0] = warp.lanes[lane.in[1]].in[0];
      break;
    case WarpOp::kBallot: {
      uint32_t votes = 0;
      for (int i = 0; i < 32; ++i) votes |= warp.lanes[i].in[0] << i;
      for (Lane& lane : warp.lanes) lane.out[0] = votes;
      break;
    }
    case WarpOp::kMmaS8:
      ComputeMmaS8(warp);
      break;
    case WarpOp::kMmaBf16:
      ComputeMmaFloat(warp, [](uint32_t w) { return Bf162ToFloat2(w); });
      break;
    case WarpOp::kMmaF16:
      ComputeMmaFloat(warp, [](uint32_t w) { return Half2ToFloat2(w); });
      break;
    case WarpOp::kLoadMatrix:
      ComputeLoadMatrix(warp, false);
      break;
    case WarpOp::kLoadMatrixTrans:
      ComputeLoadMatrix(warp, true);
      break;
  }
}

// One CUDA thread, from the kernel's first statement to its last.
void RunThread() {
  Machine& m = *machine;
  m.call->invoke(m.call->arguments);
  if (!m.thread().waited_for_dependency) {
    Fail("this thread ended without GridDependencyWait()");
  }
  m.thread().state = State::kDone;
  m.warp().ready &= ~(1u << m.lane());
  ++m.done;
}

// A fiber outlives its thread: it runs the thread of the same number in the next block.
void FiberMain() {
  EnterFiber(machine->launcher);
  for (;;) {
    RunThread();
    Machine& m = *machine;
    if (m.done == m.num_threads) {
      Switch(m.thread().context, m.launcher);
    } else {
      Resume(NextReady());
    }
  }
}

void PrepareThreads() {
  Machine& m = *machine;
  if (m.stacks.empty()) {
    m.stacks.Create(kMaxBlockThreads);
    m.threads.resize(kMaxBlockThreads);
    m.warps.resize(kMaxBlockThreads / 32);
  }
  for (; m.num_prepared < m.num_threads; ++m.num_prepared) {
    PrepareFiber(m.threads[m.num_prepared].context, m.stacks.Bottom(m.num_prepared), kStackBytes,
                 FiberMain);
  }
}

void RunBlock() {
  Machine& m = *machine;
  const dim3& block = m.call->block;
  m.bulk_copies.clear();
  for (unsigned i = 0; i < m.num_threads; ++i) {
    Thread& thread = m.threads[i];
    thread.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    thread.waited_for_dependency = false;
    thread.copies.clear();
    thread.group_ends.clear();
  }
  for (unsigned w = 0; w < m.num_warps; ++w) {
    m.warps[w].op = WarpOp::kNone;
    m.warps[w].arrived = 0;
    MakeReady(w);
  }
  m.at_block = m.done = m.current = 0;
  std::memset(DynamicShared(), 0xff, m.call->dynamic_shared_bytes);
  threadIdx = m.threads[0].index;
  Switch(m.launcher, m.threads[0].context);
}

}  // namespace

std::byte* DynamicShared() { return machine->shared.get() + kSharedBase; }
Lane& CurrentLane() { return machine->warp().lanes[machine->lane()]; }
unsigned LaneIndex() { return machine->lane(); }

void MeetWarp(WarpOp op, const char* file, int line) {
  Warp& warp = machine->warp();
  if (warp.arrived == 0) {
    warp.op = op;
  } else if (warp.op != op) {
    Fail((std::string(Name(op)) + " at " + file + ":" + std::to_string(line) +
          " meets other lanes of its warp in " + Name(warp.op))
             .c_str());
  }
  if (++warp.arrived < 32) return Block(State::kAtWarp, file, line);
  Compute(warp);
  warp.arrived = 0;
  MakeReady(machine->current / 32);
}

void MeetBlock(const char* file, int line) {
  Machine& m = *machine;
  if (m.at_block == 0) {
    m.barrier_file = file;
    m.barrier_line = line;
  } else if (m.barrier_line != line ||
             (m.barrier_file != file && std::strcmp(m.barrier_file, file) != 0)) {
    Fail((std::string("__syncthreads at ") + file + ":" + std::to_string(line) +
          " meets threads in the one at " + m.barrier_file + ":" + std::to_string(m.barrier_line))
             .c_str());
  }
  if (++m.at_block < m.num_threads) return Block(State::kAtBlock, file, line);
  m.at_block = 0;
  for (unsigned w = 0; w < m.num_warps; ++w) MakeReady(w);
}

void MeetSome(int barrier, int threads, const char* file, int line) {
  Machine& m = *machine;
  if (barrier < 1 || barrier >= kNumBarriers || threads <= 0 || threads % 32 != 0 ||
      static_cast<unsigned>(threads) > m.num_threads) {
    Fail("SyncThreads with such a number or so many threads");
  }
  Barrier& b = m.barriers[barrier];
  if (b.arrived != 0 && b.threads != threads) Fail("SyncThreads for different numbers of threads");
  b.threads = threads;
  b.warps |= 1u << (m.current / 32);
  if (++b.arrived < threads) return Block(State::kAtBlock, file, line);
  if (std::popcount(b.warps) * 32 != threads) Fail("SyncThreads without some lanes of a warp");
  for (unsigned w = 0; w < m.num_warps; ++w) {
    if ((b.warps >> w & 1) != 0) MakeReady(w);
  }
  b = {};
}

void Yield() {
  Resume(NextInTurn());
  std::this_thread::yield();
}

void CopyAsync(void* shared, const void* global) {
  CheckAligned(shared, 16, "CopyAsync16 to an address that is not 16-byte aligned");
  CheckAligned(global, 16, "CopyAsync16 from an address that is not 16-byte aligned");
  machine->thread().copies.push_back({shared, global});
}

void CopyBulk(void* shared, const void* global, uint32_t bytes, const void* barrier) {
  CheckAligned(shared, 16, "CopyBulk to an address that is not 16-byte aligned");
  CheckAligned(global, 16, "CopyBulk from an address that is not 16-byte aligned");
  if (bytes % 16 != 0) Fail("CopyBulk of a size that is no multiple of 16");
  machine->bulk_copies.push_back({shared, global, bytes, barrier});
}

uint32_t FinishBulk(const void* barrier) {
  uint32_t bytes = 0;
  std::erase_if(machine->bulk_copies, [&](const BulkCopy& copy) {
    if (copy.barrier != barrier) return false;
    std::memcpy(copy.to, copy.from, copy.bytes);
    bytes += copy.bytes;
    return true;
  });
  return bytes;
}

void CommitCopies() {
  Thread& thread = machine->thread();
  thread.group_ends.push_back(thread.copies.size());
}

void WaitCopies(size_t pending) {
  Thread& thread = machine->thread();
  if (thread.group_ends.size() <= pending) return;
  const size_t groups = thread.group_ends.size() - pending;
  const size_t end = thread.group_ends[groups - 1];
  for (size_t i = 0; i < end; ++i) std::memcpy(thread.copies[i].to, thread.copies[i].from, 16);
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<ptrdiff_t>(end));
  thread.group_ends.erase(thread.group_ends.begin(),
                          thread.group_ends.begin() + static_cast<ptrdiff_t>(groups));
  for (size_t& group_end : thread.group_ends) group_end -= end;
}

void MarkDependencyWait() { machine->thread().waited_for_dependency = true; }

void FenceSystem() {
#if defined(__SANITIZE_THREAD__)
  // TSan knows no fences; a read-modify-write that all threads share orders them too.
  static std::atomic<int> order{0};
  order.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

void Fail(const char* what) {
  std::string text = "emulator: " + std::string(what);
  if (machine != nullptr && machine->call != nullptr) {
    text += "\n  in the " + Where(*machine->call) + ", block " + Coordinates(blockIdx) + " of " +
            Coordinates(gridDim) + ", thread " + Coordinates(threadIdx) + " of " +
            Coordinates(blockDim);
  }
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
  std::abort();
}

std::string CheckLaunch(const KernelCall& call) {
  const auto refuse = [&](const std::string& why) { return Where(call) + ": " + why; };
  const dim3& grid = call.grid;
  const dim3& block = call.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxBlockThreads || block.z > 64) {
    return refuse("a block of " + Coordinates(block) + " threads; 1 to 1024 are possible");
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535) {
    return refuse("a grid of " + Coordinates(grid) + " blocks; (2^31 - 1, 65535, 65535) at most");
  }
  if (call.dynamic_shared_bytes > kMaxSharedBytes) {
    return refuse(std::to_string(call.dynamic_shared_bytes) + " bytes of shared memory; " +
                  std::to_string(kMaxSharedBytes) + " at most");
  }
  // Possible on a GPU, but our kernels never mean it: warp operations would lack lanes.
  CHECK(threads % 32 == 0) << Where(call) << ": a block of " << Coordinates(block)
                           << " threads is no whole number of warps";
  return "";
}

void RunGrid(const KernelCall& call) {
  if (machine == nullptr) machine = MachineOfThread();
  Machine& m = *machine;
  CHECK(m.call == nullptr) << "a launch from inside of a kernel";
  FenceSystem();  // as between two kernels of a stream
  m.call = &call;
  m.num_threads = call.block.x * call.block.y * call.block.z;
  m.num_warps = m.num_threads / 32;
  PrepareThreads();
  // Exactly as large as asked for, so that ASan sees the first byte too many.
  m.shared.reset(static_cast<std::byte*>(
      ::operator new(kSharedBase + call.dynamic_shared_bytes, std::align_val_t(kSharedAlignment))));
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(m.shared.get(), kSharedBase);
#endif
  gridDim = call.grid;
  blockDim = call.block;
  for (unsigned z = 0; z < call.grid.z; ++z) {
    for (unsigned y = 0; y < call.grid.y; ++y) {
      for (unsigned x = 0; x < call.grid.x; ++x) {
        blockIdx = {x, y, z};
        RunBlock();
      }
    }
  }
  m.shared.reset();
  m.call = nullptr;
}

}  // namespace ds4::cuda::emulator

namespace ds4::cuda {

uint32_t LoadAcquireSystem(const uint32_t* flag) {
  emulator::Yield();
  // atomic_ref of a const object comes only with C++26.
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire);
}

void StoreReleaseSystem(uint32_t* flag, uint32_t value) {
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}

WordPair LoadRelaxedSystem(const WordPair* words) {
  // Whole blocks look at words, most of which are there: the OS need not be asked each time.
  thread_local unsigned looks = 0;
  if (++looks % 32 == 0) {
    emulator::Yield();
  } else {
    emulator::Resume(emulator::NextReady());
  }
  emulator::CheckAligned(words, 16, "a load of two words that is not 16-byte aligned");
  auto& pair = *const_cast<WordPair*>(words);
  return {std::atomic_ref<uint64_t>(pair.first).load(std::memory_order_relaxed),
          std::atomic_ref<uint64_t>(pair.second).load(std::memory_order_relaxed)};
}

void StoreRelaxedSystem(WordPair* words, WordPair pair) {
  emulator::CheckAligned(words, 16, "a store of two words that is not 16-byte aligned");
  std::atomic_ref<uint64_t>(words->first).store(pair.first, std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(words->second).store(pair.second, std::memory_order_relaxed);
}

}  // namespace ds4::cuda
