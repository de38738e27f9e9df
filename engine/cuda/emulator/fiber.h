// A stack of its own, to which a thread of the OS can switch and back: what a CUDA thread is in the
// emulator.
#pragma once

#include <cstddef>

namespace ds4::cuda::emulator {

// Where a fiber (or the OS thread's own stack) stopped. Filled by Switch.
struct Context {
  void* machine =
      nullptr;  // stack pointer, or a ucontext_t where there is no assembly for this CPU
  // For AddressSanitizer, which wants to know of every stack.
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
};

// Prepares `context` so that the first Switch to it calls `entry`, which never returns, on the
// stack [bottom, bottom + bytes).
void PrepareFiber(Context& context, std::byte* bottom, size_t bytes, void (*entry)());
void ReleaseFiber(Context& context);
// Stops here, goes on there.
void Switch(Context& from, Context& to);
// Must be the first thing that `entry` does. `launcher`: the context of the OS thread; the first
// fiber of an OS thread must be entered from there.
void EnterFiber(Context& launcher);

}  // namespace ds4::cuda::emulator
