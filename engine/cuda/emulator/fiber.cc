#include "engine/cuda/emulator/fiber.h"

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define DS4_FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DS4_FIBER_ASAN 1
#endif
#endif
#if defined(DS4_FIBER_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && !defined(_WIN32)
#define DS4_FIBER_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

namespace ds4::cuda::emulator {

#if defined(DS4_FIBER_ASSEMBLY)
#if defined(__APPLE__)
#define DS4_FIBER_SYMBOL "_ds4_emulator_switch"
#else
#define DS4_FIBER_SYMBOL "ds4_emulator_switch"
#endif
// Saves what the System V ABI says a call keeps, on the stack that is left.
asm(".text\n"
    ".globl " DS4_FIBER_SYMBOL "\n" DS4_FIBER_SYMBOL
    ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
extern "C" void ds4_emulator_switch(void** save_stack_pointer, void* stack_pointer);

namespace {
void PrepareMachine(Context& context, std::byte* bottom, size_t bytes, void (*entry)()) {
  // From the top: no caller, the address that `ret` goes to, six registers.
  auto* top = reinterpret_cast<void**>(bottom + bytes);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(entry);
  for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
  context.machine = top - 8;
}
void SwitchMachine(Context& from, Context& to) { ds4_emulator_switch(&from.machine, to.machine); }
void ReleaseMachine(Context&) {}
}  // namespace
#else
namespace {
ucontext_t* Machine(Context& context) {
  if (context.machine == nullptr) context.machine = new ucontext_t();
  return static_cast<ucontext_t*>(context.machine);
}
void PrepareMachine(Context& context, std::byte* bottom, size_t bytes, void (*entry)()) {
  ucontext_t* machine = Machine(context);
  getcontext(machine);
  machine->uc_stack.ss_sp = bottom;
  machine->uc_stack.ss_size = bytes;
  machine->uc_link = nullptr;
  makecontext(machine, entry, 0);
}
void SwitchMachine(Context& from, Context& to) { swapcontext(Machine(from), Machine(to)); }
void ReleaseMachine(Context& context) {
  delete static_cast<ucontext_t*>(context.machine);
  context.machine = nullptr;
}
}  // namespace
#endif

void PrepareFiber(Context& context, std::byte* bottom, size_t bytes, void (*entry)()) {
  context.stack_bottom = bottom;
  context.stack_bytes = bytes;
  PrepareMachine(context, bottom, bytes, entry);
}

void ReleaseFiber(Context& context) {
#if defined(DS4_FIBER_ASAN)
  // The stack's next user must not find the red zones of frames that never returned.
  __asan_unpoison_memory_region(context.stack_bottom, context.stack_bytes);
#endif
  ReleaseMachine(context);
}

void Switch(Context& from, Context& to) {
#if defined(DS4_FIBER_ASAN)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
  SwitchMachine(from, to);
#if defined(DS4_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void EnterFiber(Context& launcher) {
#if defined(DS4_FIBER_ASAN)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (launcher.stack_bottom == nullptr) {  // an OS thread's own stack: only ASan knows where it is
    launcher.stack_bottom = bottom;
    launcher.stack_bytes = bytes;
  }
#else
  (void)launcher;
#endif
}

}  // namespace ds4::cuda::emulator
