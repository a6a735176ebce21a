// The CPU wave simulator: runs a kernel's blocks with the waves, the barriers and the memory of a GPU, and ends the
// launch with an error where a GPU would hang, fault or silently go wrong.
//
// Every thread of a block is a fiber: a stack of its own on which it runs until it has to wait for others. One OS
// thread runs one block at a time, wave by wave. From top to bottom: context switches, guarded memory, the block
// with its threads (the scheduler), faults, the launch.
#include "sim_runtime.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

namespace sim {

constinit thread_local Here here = {};

namespace {

// ---- context switches ----

#if defined(__x86_64__) && !defined(SIM_UCONTEXT)

struct Context { void *stack_pointer; };

// Leaves `from`, to be continued later, and continues `to`. A call may change every register except these six, so
// they, the stack and the return address on it are all there is to keep.
extern "C" void sim_switch(Context *from, const Context *to);
asm(R"(
.text
.type sim_switch, @function
.hidden sim_switch
.globl sim_switch
sim_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov (%rsi), %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size sim_switch, .-sim_switch
)");

// A context that begins `function` on an empty stack; the function must not return.
Context begin(char *stack, size_t size, void (*function)()) {
  void **top = reinterpret_cast<void **>(stack + size);
  *--top = nullptr;                                    // keeps the stack aligned as after a call
  *--top = reinterpret_cast<void *>(function);         // sim_switch returns to it
  for (int i = 0; i < 6; ++i) *--top = nullptr;        // the six registers
  return {top};
}

#else

struct Context { ucontext_t state; };
void sim_switch(Context *from, const Context *to) { swapcontext(&from->state, &to->state); }
Context begin(char *stack, size_t size, void (*function)()) {
  Context context;
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = size;
  context.state.uc_link = nullptr;
  makecontext(&context.state, function, 0);
  return context;
}

#endif

// ---- guarded memory ----

const size_t page = sysconf(_SC_PAGESIZE);
size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// `size` bytes that end, but for alignment to 16, at a page which cannot be touched; another one lies before.
class Guarded {
 public:
  ~Guarded() { if (mapping_) munmap(mapping_, mapped_); }

  void resize(size_t size) {
    if (mapping_ && size == size_) return;
    if (mapping_) munmap(mapping_, mapped_);
    size_ = size;
    mapped_ = round_up(size, page) + 2 * page;
    void *p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { mapping_ = nullptr; throw std::bad_alloc(); }
    mapping_ = static_cast<char *>(p);
    mprotect(mapping_, page, PROT_NONE);
    mprotect(mapping_ + mapped_ - page, page, PROT_NONE);
  }
  char *begin() const { return mapping_ + mapped_ - page - round_up(size_, 16); }
  size_t size() const { return size_; }
  bool covers(const char *p) const { return p >= mapping_ && p < mapping_ + mapped_; }

  void poison() { memset(mapping_ + page, 0xFF, mapped_ - 2 * page); }
  // Offset from begin() of a byte outside that is no longer poison, or 0.
  ptrdiff_t damage() const {
    for (const char *p = mapping_ + page; p < mapping_ + mapped_ - page; ++p) {
      if (p == begin() && size_) p += size_ - 1;
      else if (*p != char(0xFF)) return p - begin();
    }
    return 0;
  }

 private:
  char *mapping_ = nullptr;
  size_t mapped_ = 0, size_ = 0;
};

// Stacks of a block's threads, each above a guard page.
class Stacks {
 public:
  static constexpr size_t size = 64 << 10;
  ~Stacks() { if (mapping_) munmap(mapping_, count_ * slot()); }

  void reserve(size_t count) {
    if (count <= count_) return;
    if (mapping_) munmap(mapping_, count_ * slot());
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = mmap(nullptr, count * slot(), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) { mapping_ = nullptr; count_ = 0; throw std::bad_alloc(); }
    mapping_ = static_cast<char *>(p);
    count_ = count;
    for (size_t i = 0; i < count; ++i) mprotect(mapping_ + i * slot(), page, PROT_NONE);
  }
  char *operator[](size_t i) const { return mapping_ + i * slot() + page; }
  bool covers(const char *p) const { return p >= mapping_ && p < mapping_ + count_ * slot(); }

 private:
  static size_t slot() { return size + page; }
  char *mapping_ = nullptr;
  size_t count_ = 0;
};

// The shared object that a kernel's code lies in. Its thread-local storage holds the kernels' `__shared__` variables
// and nothing else.
class Module {
 public:
  explicit Module(const void *code) : code_(reinterpret_cast<uint64_t>(code)) {
    auto read = [](dl_phdr_info *info, size_t, void *self) { return int(static_cast<Module *>(self)->read(*info)); };
    dl_iterate_phdr(read, this);
  }
  // Offset of an instruction within the object's file, 0 where it lies in another object.
  uint64_t offset(uint64_t code) const { return code - start_ < size_ ? code - base_ : 0; }
  void poison_static_shared() const;

 private:
  bool read(const dl_phdr_info &info) {
    bool found = false;
    for (const auto *s = info.dlpi_phdr; s < info.dlpi_phdr + info.dlpi_phnum; ++s) {
      const uint64_t start = info.dlpi_addr + s->p_vaddr;
      if (s->p_type == PT_LOAD && code_ - start < s->p_memsz) start_ = start, size_ = s->p_memsz, found = true;
      if (s->p_type == PT_TLS) tls_size_ = s->p_memsz;
    }
    base_ = info.dlpi_addr;
    tls_module_ = info.dlpi_tls_modid;
    if (!found) tls_size_ = 0;
    return found;
  }
  uint64_t code_, base_ = 0, start_ = 0, size_ = 0;
  size_t tls_module_ = 0, tls_size_ = 0;
};

}  // namespace
}  // namespace sim

// The dynamic linker's own function; makes this thread's copy of a module's storage where there is none yet.
extern "C" void *__tls_get_addr(size_t module_and_offset[2]);

namespace sim {
namespace {

void Module::poison_static_shared() const {
  size_t start[2] = {tls_module_, 0};
  if (tls_size_) memset(__tls_get_addr(start), 0xFF, tls_size_);
}

// Random numbers (SplitMix64) for the order of lanes, waves and blocks.
struct Random {
  uint64_t state;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  template <class T> void shuffle(T *items, size_t count) {
    for (size_t i = count; i > 1; --i) std::swap(items[i - 1], items[(*this)() % i]);
  }
};

}  // namespace

// ---- the launch, as Python passes it and hears of it (backends/cpu.py declares the same) ----

struct Launch {
  dim3 grid, block;
  unsigned shared;
  int wave, threads;
  unsigned order;  // 0: lanes, waves and blocks in their natural order; else the seed of a random one
};

struct Fault {
  enum Kind : int { None, Message, Access } kind;
  int line;              // 0: not known
  int in_block;          // 1: `block` holds, 2: `thread` too
  uint3 block, thread;
  uint64_t address;      // Access: of the memory
  uint64_t code;         // offset in the module of the instruction that faulted; 0: not known
  char file[256], text[1024];
};

namespace {

// ---- a block and its threads ----

bool same(const Place &a, const Place &b) {  // a module is one translation unit: one copy of each file's name
  return a.line() == b.line() && a.column() == b.column() && a.file_name() == b.file_name();
}

enum class State : uint8_t { New, Ready, AtCollective, AtBarrier, Ended };

struct Thread {
  Context context;
  State state;
  int lane;
  uint3 index;
  // What it waits for, at a collective or a barrier.
  const char *name;
  Operation operation;
  void *operands;
  uint64_t mask;
  Place place;

  bool waits_with(const Thread &other) const {
    return state == State::AtCollective && operation == other.operation && mask == other.mask
        && same(place, other.place);
  }
};

class Block {
 public:
  // Stack of the OS thread's signal handler: a fiber's own may be what has run out.
  std::unique_ptr<char[]> signal_stack{new char[signal_stack_size]};
  static constexpr size_t signal_stack_size = 64 << 10;

  void prepare(const Launch &launch, const Kernel &kernel, void *const *arguments, const Module &module) {
    kernel_ = &kernel;
    arguments_ = arguments;
    module_ = &module;
    wave_size_ = launch.wave;
    const dim3 size = launch.block;
    threads_.resize(size.x * size.y * size.z);
    for (unsigned t = 0; t < threads_.size(); ++t) {
      threads_[t].index = {t % size.x, t / size.x % size.y, t / (size.x * size.y)};
      threads_[t].lane = t % launch.wave;
    }
    stacks_.reserve(threads_.size());
    shared_.resize(launch.shared);
    here.blockDim = launch.block;
    here.gridDim = launch.grid;
    here.warpSize = launch.wave;
    here.dynamic_shared = shared_.begin();
  }

  // Runs one block from start to end; false after a fault.
  bool run(uint3 index, Random *random) {
    here.blockIdx = index;
    random_ = random;
    fault_.kind = Fault::None;
    module_->poison_static_shared();
    shared_.poison();
    for (Thread &t : threads_) t.state = State::New;

    waves_.resize((threads_.size() + wave_size_ - 1) / wave_size_);
    std::iota(waves_.begin(), waves_.end(), 0);
    for (bool more = true; more;) {
      if (random_) random_->shuffle(waves_.data(), waves_.size());
      for (int wave : waves_)
        if (!run_wave(wave)) return false;
      if (!pass_barrier(more)) return false;
    }
    if (ptrdiff_t at = shared_.damage()) {
      report("wrote outside the dynamic shared memory: byte %td of %zu", at, shared_.size());
      return false;
    }
    return true;
  }

  // Leaves the running thread, to be continued at `from`, for the next lane of its wave that can go on, or, after
  // the last of them, for the scheduler.
  void leave(Context *from) {
    if (next_ == lanes_.size()) return sim_switch(from, &scheduler_);
    Thread &t = *lanes_[next_++];
    if (t.state == State::New) t.context = begin(stacks_[&t - threads_.data()], Stacks::size, fiber);
    enter(t);
    sim_switch(from, &t.context);
  }

  // Gives up the block from within one of its threads.
  [[noreturn]] void abandon() {
    Context never;
    sim_switch(&never, &scheduler_);
    __builtin_unreachable();
  }

  bool runs_thread() const { return running_; }
  // Whether the instruction at `code` is a thread's, in the kernel itself and not in the simulator on its behalf.
  bool runs_kernel(uint64_t code) const { return running_ && module_->offset(code); }
  Thread &running() { return *running_; }
  const Stacks &stacks() const { return stacks_; }
  const Guarded &shared() const { return shared_; }
  Fault &fault() { return fault_; }

  void report(const char *format, ...) __attribute__((format(printf, 2, 3))) {
    va_list values;
    va_start(values, format);
    report(running_, nullptr, 0, format, values);
    va_end(values);
  }
  void report(const Thread *thread, const char *file, unsigned line, const char *format, va_list values) {
    fault_ = {};
    fault_.kind = Fault::Message;
    fault_.line = line;
    fault_.in_block = thread ? 2 : 1;
    fault_.block = here.blockIdx;
    if (thread) fault_.thread = thread->index;
    snprintf(fault_.file, sizeof fault_.file, "%s", file ? file : "");
    vsnprintf(fault_.text, sizeof fault_.text, format, values);
  }

 private:
  void enter(Thread &t) {
    t.state = State::Ready;
    running_ = &t;
    here.threadIdx = t.index;
    here.lane = t.lane;
  }

  // Body of every fiber. One that has ended needs its stack no more, so a lane that has yet to begin takes it over
  // at the cost of a call: kernels in which nobody waits run without a switch.
  static void fiber();

  // Runs a wave until each of its threads waits at a block barrier or has ended.
  bool run_wave(int wave) {
    Thread *first = &threads_[wave * wave_size_];
    const int size = std::min<size_t>(wave_size_, threads_.size() - wave * wave_size_);
    here.wave_mask = ~uint64_t(0) >> (64 - size);
    do {
      lanes_.clear();
      for (Thread *t = first; t < first + size; ++t)
        if (t->state == State::New || t->state == State::Ready) lanes_.push_back(t);
      if (random_) random_->shuffle(lanes_.data(), lanes_.size());
      next_ = 0;
      leave(&scheduler_);
      running_ = nullptr;
      if (fault_.kind) return false;
    } while (complete_collectives(first, size));
    return all_lanes_arrived(first, size);
  }

  // Carries out every collective whose lanes have all come; false if there was none.
  bool complete_collectives(Thread *wave, int size) {
    bool any = false;
    for (int i = 0; i < size; ++i) {
      if (wave[i].state != State::AtCollective) continue;
      void *operands[64] = {};
      uint64_t arrived = 0;
      for (int j = i; j < size; ++j)
        if (wave[j].waits_with(wave[i])) operands[j] = wave[j].operands, arrived |= uint64_t(1) << j;
      if (arrived != (wave[i].mask & here.wave_mask)) continue;
      wave[i].operation(operands);
      for (int j = i; j < size; ++j)
        if (arrived >> j & 1) wave[j].state = State::Ready;
      any = true;
    }
    return any;
  }

  // A lane that still waits at a collective waits forever. (A lane that has ended counts as missing although CUDA
  // lets it pass: reading from it is undefined, and other makers' waves know no such exception.)
  bool all_lanes_arrived(const Thread *wave, int size) {
    for (const Thread *t = wave; t < wave + size; ++t) {
      if (t->state != State::AtCollective) continue;
      for (int j = 0; j < size; ++j)
        if ((t->mask >> j & 1) && !wave[j].waits_with(*t))
          return stuck(*t, "lane %d waits at %s, but lane %d of its mask %s %s", t->lane, t->name, j,
                       hex(t->mask).c_str(), whereabouts(wave[j]).c_str());
    }
    return true;
  }

  // All waves have stopped: either every thread has ended (more = false) or all wait at one barrier.
  bool pass_barrier(bool &more) {
    const Thread *waiting = nullptr;
    for (const Thread &t : threads_)
      if (!waiting && t.state == State::AtBarrier) waiting = &t;
    more = waiting;
    if (!more) return true;

    auto together = [&](const Thread &t) { return t.state == State::AtBarrier && same(t.place, waiting->place); };
    const auto missing = std::find_if_not(threads_.begin(), threads_.end(), together);
    if (missing != threads_.end())
      return stuck(*waiting, "__syncthreads reached by %td of %zu threads: thread (%u, %u, %u) %s",
                   std::count_if(threads_.begin(), threads_.end(), together), threads_.size(), missing->index.x,
                   missing->index.y, missing->index.z, whereabouts(*missing).c_str());
    for (Thread &t : threads_) t.state = State::Ready;
    return true;
  }

  // Reports that `t` waits in vain; false, for the caller to return.
  bool stuck(const Thread &t, const char *format, ...) __attribute__((format(printf, 3, 4))) {
    va_list values;
    va_start(values, format);
    report(&t, t.place.file_name(), t.place.line(), format, values);
    va_end(values);
    return false;
  }

  static std::string whereabouts(const Thread &t) {
    if (t.state == State::Ended) return "has ended";
    const std::string line = " in line " + std::to_string(t.place.line());
    if (t.state == State::AtBarrier) return "waits at __syncthreads" + line;
    return "waits at " + std::string(t.name) + line + " with mask " + hex(t.mask);
  }

  static std::string hex(uint64_t mask) {
    char text[24];
    snprintf(text, sizeof text, "0x%" PRIx64, mask & here.wave_mask);
    return text;
  }

  const Kernel *kernel_ = nullptr;
  const Module *module_ = nullptr;
  void *const *arguments_ = nullptr;
  int wave_size_ = 0;
  std::vector<Thread> threads_;
  Stacks stacks_;
  Guarded shared_;
  std::vector<int> waves_;       // in the order in which they run
  std::vector<Thread *> lanes_;  // of the running wave, those that can go on, in the order of this pass
  size_t next_ = 0;              // the first of them that has not had its turn
  Context scheduler_;
  Thread *running_ = nullptr;
  Random *random_ = nullptr;
  Fault fault_;
};

thread_local Block *block;  // that this OS thread runs

void Block::fiber() {
  Block &b = *block;
  for (;;) {
    b.kernel_->call(b.arguments_);
    b.running_->state = State::Ended;
    if (b.next_ < b.lanes_.size() && b.lanes_[b.next_]->state == State::New) {
      b.enter(*b.lanes_[b.next_++]);
    } else {
      Context never;
      b.leave(&never);
    }
  }
}

}  // namespace

// ---- what kernels call ----

void collective(const char *name, Operation operation, void *operands, uint64_t mask, Place place) {
  Thread &t = block->running();
  if (!(mask >> t.lane & 1))
    fault(place, "%s: lane %d is not in its own mask 0x%" PRIx64, name, t.lane, mask & here.wave_mask);
  t.state = State::AtCollective;
  t.name = name;
  t.operation = operation;
  t.operands = operands;
  t.mask = mask;
  t.place = place;
  block->leave(&t.context);
}

void barrier(Place place) {
  Thread &t = block->running();
  t.state = State::AtBarrier;
  t.place = place;
  block->leave(&t.context);
}

void fault(Place place, const char *format, ...) {
  va_list values;
  va_start(values, format);
  block->report(&block->running(), place.file_name(), place.line(), format, values);
  va_end(values);
  block->abandon();
}

// ---- faults found by the compiler's checks (-fsanitize), whose entry points these are ----

namespace {

struct Location { const char *file; unsigned line, column; };
struct Type { uint16_t kind, info; char name[1]; };
struct OverflowSite { Location at; const Type *type; };
struct ShiftSite { Location at; const Type *left, *right; };
struct BoundsSite { Location at; const Type *array, *index; };
struct AlignmentSite { Location at; const Type *type; uint8_t log_alignment, access; };

// An operand's value: its bits, sign-extended where the type is signed.
long long value(const Type *type, uintptr_t bits) {
  const int width = 1 << (type->info >> 1), unused = 64 - std::min(width, 64);
  return type->info & 1 ? int64_t(uint64_t(bits) << unused) >> unused : int64_t(uint64_t(bits) << unused >> unused);
}

[[noreturn, gnu::format(printf, 2, 3)]] void fault(const Location &at, const char *format, ...) {
  va_list values;
  va_start(values, format);
  block->report(&block->running(), at.file, at.line, format, values);
  va_end(values);
  block->abandon();
}

[[noreturn]] void overflow(const OverflowSite *site, uintptr_t left, const char *sign, uintptr_t right) {
  fault(site->at, "%lld %s %lld overflows %s", value(site->type, left), sign, value(site->type, right),
        site->type->name);
}

}  // namespace

extern "C" {
void __ubsan_handle_add_overflow_abort(const OverflowSite *s, uintptr_t a, uintptr_t b) { overflow(s, a, "+", b); }
void __ubsan_handle_sub_overflow_abort(const OverflowSite *s, uintptr_t a, uintptr_t b) { overflow(s, a, "-", b); }
void __ubsan_handle_mul_overflow_abort(const OverflowSite *s, uintptr_t a, uintptr_t b) { overflow(s, a, "*", b); }
void __ubsan_handle_negate_overflow_abort(const OverflowSite *s, uintptr_t a) {
  fault(s->at, "-(%lld) overflows %s", value(s->type, a), s->type->name);
}
void __ubsan_handle_divrem_overflow_abort(const OverflowSite *s, uintptr_t a, uintptr_t b) {
  if (value(s->type, b) == 0) fault(s->at, "%lld divided by zero", value(s->type, a));
  overflow(s, a, "/", b);
}
void __ubsan_handle_shift_out_of_bounds_abort(const ShiftSite *s, uintptr_t a, uintptr_t b) {
  fault(s->at, "%lld shifted by %lld bits, which %s does not have", value(s->left, a), value(s->right, b),
        s->left->name);
}
void __ubsan_handle_out_of_bounds_abort(const BoundsSite *s, uintptr_t index) {
  fault(s->at, "index %lld outside %s", value(s->index, index), s->array->name);
}
void __ubsan_handle_type_mismatch_v1_abort(const AlignmentSite *s, uintptr_t pointer) {
  fault(s->at, "misaligned access: %s at an address that is %zu past a multiple of %zu", s->type->name,
        size_t(pointer) % (size_t(1) << s->log_alignment), size_t(1) << s->log_alignment);
}
}  // extern "C"

// ---- faults found by the processor ----

namespace {

// Takes SIGSEGV and the like while any launch runs; whoever had them before has them again afterwards.
class Signals {
 public:
  static constexpr int interrupt = SIGURG;  // stops a thread of the kernel that would not end; ignored elsewhere

  Signals() {
    std::lock_guard lock(mutex_);
    if (users_++ > 0) return;
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < count_; ++i) sigaction(numbers_[i], &action, &before_[i]);
  }
  ~Signals() {
    std::lock_guard lock(mutex_);
    if (--users_ > 0) return;
    for (int i = 0; i < count_; ++i) sigaction(numbers_[i], &before_[i], nullptr);
  }

 private:
  static void handle(int number, siginfo_t *info, void *context) {
    if (number == interrupt) {  // within the simulator's own code it has to wait until it is sent again
      if (block && block->runs_kernel(program_counter(context))) {
        block->report("stopped");
        block->abandon();
      }
      return;
    }
    if (!block || !block->runs_thread()) {  // not ours: it comes again, to the handler from before
      for (int i = 0; i < count_; ++i)
        if (numbers_[i] == number) sigaction(number, &before_[i], nullptr);
      return;
    }
    const char *address = static_cast<char *>(info->si_addr);
    const bool memory = number == SIGSEGV || number == SIGBUS;
    if (number == SIGFPE)
      block->report("integer division by zero, or of INT_MIN by -1");
    else if (!memory)
      block->report("the kernel trapped");
    else if (block->stacks().covers(address))
      block->report("stack overflow: a simulated thread has %zu KiB for its variables", Stacks::size >> 10);
    else if (block->shared().covers(address))
      block->report("access outside the dynamic shared memory: byte %td of %zu", address - here.dynamic_shared,
                    block->shared().size());
    else {
      block->report("access to memory that is not the kernel's");
      block->fault().kind = Fault::Access;
      block->fault().address = reinterpret_cast<uint64_t>(address);
    }
    block->fault().code = program_counter(context);
    block->abandon();  // never returns to the fault; SA_NODEFER has kept the signal unblocked
  }

  static uint64_t program_counter([[maybe_unused]] void *context) {
#if defined(__x86_64__)
    return static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return static_cast<ucontext_t *>(context)->uc_mcontext.pc;
#else
    return 0;
#endif
  }

  static constexpr int count_ = 6, numbers_[count_] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, interrupt};
  static inline struct sigaction before_[count_];
  static inline std::mutex mutex_;
  static inline int users_ = 0;
};

// ---- the launch ----

// Blocks with their stacks, kept from one launch to the next.
class Pool {
 public:
  std::unique_ptr<Block> take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Block>();
    auto block = std::move(free_.back());
    free_.pop_back();
    return block;
  }
  void give(std::unique_ptr<Block> block) {
    std::lock_guard lock(mutex_);
    free_.push_back(std::move(block));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
};
Pool pool;

// Numbers of the grid's blocks in the order in which they start: 0, 1, 2, ..., or, with a seed, offset + i * step
// modulo their count, which meets each of them once where step and count have no common divisor.
struct BlockOrder {
  uint64_t count, offset = 0, step = 1;
  BlockOrder(uint64_t blocks, unsigned seed) : count(blocks) {
    if (!seed) return;
    Random random{seed};
    offset = random() % count;
    do step = random() % count; while (std::gcd(step, count) != 1);
  }
  uint64_t operator[](uint64_t i) const { return uint64_t(((unsigned __int128)(i) * step + offset) % count); }
};

// A launch under way: OS threads that each take the grid's next block until there is none or one has failed.
class Run {
 public:
  Run(const Kernel &kernel, const Launch &launch, void *const *arguments)
      : kernel_(kernel), launch_(launch), arguments_(arguments), module_(reinterpret_cast<const void *>(kernel.call)),
        count_(uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z), order_(count_, launch.order) {
    std::lock_guard lock(mutex_);  // no worker ends before all have begun
    const uint64_t wanted = std::min<uint64_t>(std::max(launch.threads, 1), count_);
    try {
      while (threads_.size() < wanted) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error &) {  // fewer threads do as well, none does not
      if (threads_.empty()) fail("the system refuses another thread");
    }
  }

  // Waits for the end, but no longer than this; true if it has come. Once a block has failed, the others stop too.
  bool wait(std::chrono::milliseconds longest) {
    std::unique_lock lock(mutex_);
    auto all_ended = [this] { return ended_ == threads_.size(); };
    if (ending_.wait_for(lock, longest, all_ended)) return true;
    if (stop_)
      for (auto &thread : threads_) pthread_kill(thread.native_handle(), Signals::interrupt);
    return false;
  }

  // Stops what still runs.
  Fault finish() {
    stop_ = true;
    while (!wait(std::chrono::milliseconds(10))) {}
    for (auto &thread : threads_) thread.join();
    fault_.code = module_.offset(fault_.code);
    return fault_;
  }

 private:
  void work() {
    std::unique_ptr<Block> mine = pool.take();
    block = mine.get();
    stack_t signal_stack = {};
    signal_stack.ss_sp = mine->signal_stack.get();
    signal_stack.ss_size = Block::signal_stack_size;
    sigaltstack(&signal_stack, nullptr);
    try {
      mine->prepare(launch_, kernel_, arguments_, module_);
      for (uint64_t i; !stop_ && (i = next_++) < count_;)
        if (!run_block(order_[i]) && !stop_.exchange(true)) fault_ = mine->fault();
    } catch (const std::bad_alloc &) {
      if (!stop_.exchange(true)) fail("no memory for a block's stacks and shared memory");
    }
    signal_stack.ss_flags = SS_DISABLE;
    sigaltstack(&signal_stack, nullptr);
    block = nullptr;
    pool.give(std::move(mine));
    std::lock_guard lock(mutex_);
    ++ended_;
    ending_.notify_all();
  }

  bool run_block(uint64_t number) {
    const dim3 grid = launch_.grid;
    const uint3 index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y),
                         unsigned(number / grid.x / grid.y)};
    Random random{launch_.order + (number << 32)};
    return block->run(index, launch_.order ? &random : nullptr);
  }

  void fail(const char *text) {
    fault_.kind = Fault::Message;
    snprintf(fault_.text, sizeof fault_.text, "%s", text);
  }

  const Kernel &kernel_;
  const Launch launch_;
  void *const *arguments_;
  const Module module_;
  const uint64_t count_;
  const BlockOrder order_;
  std::atomic<uint64_t> next_ = 0;
  std::atomic<bool> stop_ = false;
  Fault fault_ = {};
  Signals signals_;
  std::mutex mutex_;
  std::condition_variable ending_;
  size_t ended_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace

// Python starts a launch, waits for it in slices, so as to hear of Ctrl-C, and always finishes it.
extern "C" {
Run *sim_start(const Kernel *kernel, const Launch *launch, void *const *arguments) {
  return new Run(*kernel, *launch, arguments);
}
int sim_wait(Run *run, int milliseconds) { return run->wait(std::chrono::milliseconds(milliseconds)); }
void sim_finish(Run *run, Fault *fault) {
  *fault = run->finish();
  delete run;
}
}

}  // namespace sim

