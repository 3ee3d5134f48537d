// A simulated accelerator for PyTorch: the device "sim". docs/decisions/processes-and-devices.md says what it
// can show.
//
// Memory: one memfd mapped twice. Tensors point into a mapping without access rights, so that code which touches
// device memory from the host dies by SIGSEGV, as on a GPU; the simulator itself uses the second mapping, `SHIFT` away.
// Operators: a boxed fallback gives the CPU kernel aliases of the device memory (no copies), after the checks that a
// CUDA build makes: the same device for all tensors, CPU scalars only where a TensorIterator takes them.
// Time: every stream and the host have a vector clock. An access that nothing orders after a conflicting one is a race.
// Copies that a GPU makes later are made later: at the next operator of their stream, or when somebody waits for it.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>
#include <fcntl.h>

#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_set>

namespace py = pybind11;
using at::Tensor;
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using c10::IValue;

namespace {

constexpr int STREAMS = 32;                       // stream 0 is the default stream
constexpr int HOST = STREAMS;                     // the host's place in a clock
using Clock = std::array<uint64_t, STREAMS + 1>;
constexpr size_t ARENA = size_t(1) << 36;         // sparse: only touched pages take memory
const auto TYPE = c10::DeviceType::PrivateUse1;

std::recursive_mutex MUTEX;                       // one lock for everything: the simulator is for tests

void join(Clock& into, const Clock& from) {
  for (int i = 0; i <= STREAMS; ++i) into[i] = std::max(into[i], from[i]);
}

// ---- what Python is told -------------------------------------------------------------------------------------------

PyObject* LISTENER = nullptr;                     // (kind, operator, bytes, stream, tensor or None) -> None
bool RAISE = true;                                // races are errors; otherwise only counted
int64_t RACES = 0;
std::unordered_set<std::string> SCALARS_ALLOWED;  // operators that take 0-dim CPU tensors beside device tensors

void tell(const char* kind, const std::string& what, int64_t bytes, int stream, const Tensor& tensor = {}) {
  if (LISTENER == nullptr || Py_IsInitialized() == 0) return;
  py::gil_scoped_acquire gil;
  if (LISTENER == nullptr) return;
  py::handle listener(LISTENER);
  py::object shown = tensor.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)) : py::none();
  listener(kind, what, bytes, stream, shown);
}

// ---- memory --------------------------------------------------------------------------------------------------------

struct Block {
  char* at = nullptr;                             // in the mapping without rights
  size_t size = 0, asked = 0;
  int stream = 0;                                 // whose pool it belongs to
  int writer = -1;                                // the last access, which outlives the tensor
  uint64_t written = 0;
  Clock read{};
  uint32_t recorded = 0;                          // streams of record_stream
  Clock free_after{};
};

char *FORBIDDEN = nullptr, *OPEN = nullptr;
int MEMORY = -1;
size_t USED = 0;
int64_t ALLOCATED = 0, PEAK = 0;
std::map<std::pair<int, size_t>, std::deque<Block*>> FREE;

char* open_of(const void* p) { return p == nullptr ? nullptr : OPEN + (static_cast<const char*>(p) - FORBIDDEN); }
bool is_device(const void* p) { return p >= FORBIDDEN && p < FORBIDDEN + ARENA; }
bool is_open(const void* p) { return p >= OPEN && p < OPEN + ARENA; }

void reserve() {
  if (FORBIDDEN != nullptr) return;
  MEMORY = memfd_create("sim", MFD_CLOEXEC);
  TORCH_CHECK(MEMORY >= 0 && ftruncate(MEMORY, ARENA) == 0, "no memory for the simulated device");
  FORBIDDEN = static_cast<char*>(mmap(nullptr, ARENA, PROT_NONE, MAP_SHARED | MAP_NORESERVE, MEMORY, 0));
  OPEN = static_cast<char*>(mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, MEMORY, 0));
  TORCH_CHECK(FORBIDDEN != MAP_FAILED && OPEN != MAP_FAILED, "no address space for the simulated device");
}

// ---- streams -------------------------------------------------------------------------------------------------------

struct Pending {                                  // a copy that the device makes later
  uint64_t time;
  std::function<void()> run;
};

Clock HOST_CLOCK{};
std::array<Clock, STREAMS> CLOCKS{};
std::array<std::deque<Pending>, STREAMS> QUEUES;
int NEXT_STREAM = 1;
thread_local int CURRENT = 0;

uint64_t begin(int stream) {                      // an operator is launched: it follows what the host has seen
  join(CLOCKS[stream], HOST_CLOCK);
  return ++CLOCKS[stream][stream];
}

void drain(int stream, uint64_t until = UINT64_MAX) {
  auto& queue = QUEUES[stream];
  while (!queue.empty() && queue.front().time <= until) {
    auto next = std::move(queue.front());
    queue.pop_front();
    next.run();
  }
}

void wait_for(int stream) {                       // the host waits for a stream
  std::lock_guard<std::recursive_mutex> lock(MUTEX);
  drain(stream);
  join(HOST_CLOCK, CLOCKS[stream]);
}

void synchronised(const char* kind, const std::string& what, int64_t bytes = 0, const Tensor& t = {}) {
  wait_for(CURRENT);
  tell(kind, what, bytes, CURRENT, t);
}

Block* block_of(const Tensor& t) {
  return static_cast<Block*>(t.storage().data_ptr().get_context());
}

void race(const std::string& what, const std::string& how) {
  ++RACES;                                        // told to nobody: that needs Python's lock, whose holder may want ours
  TORCH_CHECK(!RAISE, "race on the simulated device: ", what, " on stream ", CURRENT, ": ", how);
}

void access(const Tensor& t, int stream, uint64_t now, bool writes, const std::string& what) {
  Block* b = t.defined() && t.numel() != 0 && t.has_storage() ? block_of(t) : nullptr;
  if (b == nullptr) return;
  const auto& clock = CLOCKS[stream];
  if (b->writer >= 0 && b->writer != stream && clock[b->writer] < b->written) {
    int other = b->writer;
    b->writer = -1;
    race(what, "nothing waits for the write on stream " + std::to_string(other));
  }
  if (writes) {
    for (int i = 0; i < STREAMS; ++i) {
      if (i != stream && clock[i] < b->read[i]) {
        b->read[i] = 0;
        race(what, "nothing waits for the read on stream " + std::to_string(i) + " (a missing wait or record_stream)");
      }
    }
    b->writer = stream;
    b->written = now;
    b->read.fill(0);
  } else {
    b->read[stream] = now;
  }
}

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t asked) override {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    reserve();
    const c10::Device device(TYPE, 0);
    if (asked == 0) return {nullptr, nullptr, &release, device};
    size_t size = 512;
    while (size < asked) size *= 2;
    if (size > 4096 && size - size / 4 >= asked) size -= size / 4;
    auto& free = FREE[{CURRENT, size}];
    Block* b = nullptr;
    for (auto it = free.begin(); it != free.end() && b == nullptr; ++it) {
      bool ready = true;
      for (int i = 0; i < STREAMS; ++i) ready = ready && HOST_CLOCK[i] >= (*it)->free_after[i];
      if (ready) {
        b = *it;
        free.erase(it);
      }
    }
    if (b == nullptr) {
      TORCH_CHECK(USED + size <= ARENA, "the simulated device is out of memory");
      b = new Block();
      b->at = FORBIDDEN + USED;
      b->size = size;
      b->stream = CURRENT;
      USED += size;
    }
    b->recorded = 0;
    b->asked = asked;
    ALLOCATED += static_cast<int64_t>(asked);
    PEAK = std::max(PEAK, ALLOCATED);
    memset(open_of(b->at), 0xFF, asked);          // not a number, -1: what was never written is seen
    return {b->at, b, &release, device};
  }
  static void release(void* context) {
    auto* b = static_cast<Block*>(context);
    if (b == nullptr) return;
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    ALLOCATED -= static_cast<int64_t>(b->asked);
    b->free_after.fill(0);
    for (int i = 0; i < STREAMS; ++i) {
      if ((b->recorded >> i) & 1) b->free_after[i] = CLOCKS[i][i];
    }
    if (b->size >= (1 << 25)) {
      fallocate(MEMORY, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, b->at - FORBIDDEN, static_cast<off_t>(b->size));
    }
    FREE[{b->stream, b->size}].push_front(b);     // the last is used again first, which finds the most races
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(open_of(to), open_of(from), count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    auto* b = static_cast<Block*>(p.get_context());
    if (b != nullptr && s.id() != b->stream) b->recorded |= uint32_t(1) << s.id();
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = ALLOCATED;
    stats.allocated_bytes[0].peak = PEAK;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { PEAK = ALLOCATED; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {ARENA - USED, ARENA}; }
};
SimAllocator ALLOCATOR;
REGISTER_ALLOCATOR(TYPE, &ALLOCATOR);

std::map<const char*, size_t> PINNED;

bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> lock(MUTEX);
  auto it = PINNED.upper_bound(static_cast<const char*>(p));
  return it != PINNED.begin() && static_cast<const char*>(p) < (--it)->first + it->second;
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, std::max<size_t>(size, 64)) == 0, "no pinned memory");
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    PINNED[static_cast<char*>(p)] = std::max<size_t>(size, 1);
    return {p, p, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* p) {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    PINNED.erase(static_cast<char*>(p));
    free(p);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator PINNED_ALLOCATOR;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &PINNED_ALLOCATOR);

struct Event {
  Clock clock{};
  int stream = 0;
  uint64_t time = 0;
};

c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, 0), id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return {TYPE, 0}; }
  c10::Device getDevice() const override { return {TYPE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(CURRENT); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    const int id = NEXT_STREAM;
    NEXT_STREAM = NEXT_STREAM + 1 < STREAMS ? NEXT_STREAM + 1 : 1;
    return stream_of(id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const int before = CURRENT;
    CURRENT = static_cast<int>(s.id());
    return stream_of(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    if (*event == nullptr) *event = new Event();
    const int id = static_cast<int>(s.id());
    const uint64_t time = begin(id);
    *static_cast<Event*>(*event) = {CLOCKS[id], id, time};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    const auto* e = static_cast<Event*>(event);
    drain(e->stream, e->time);
    join(CLOCKS[s.id()], e->clock);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || HOST_CLOCK[static_cast<Event*>(event)->stream] >= static_cast<Event*>(event)->time;
  }
  bool queryStream(const c10::Stream& s) const override { return HOST_CLOCK[s.id()] >= CLOCKS[s.id()][s.id()]; }
  void synchronizeStream(const c10::Stream& s) const override {
    wait_for(static_cast<int>(s.id()));
    tell("sync", "stream.synchronize", 0, static_cast<int>(s.id()));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    {
      std::lock_guard<std::recursive_mutex> lock(MUTEX);
      const auto* e = static_cast<Event*>(event);
      drain(e->stream, e->time);
      join(HOST_CLOCK, e->clock);
    }
    tell("sync", "event.synchronize", 0, static_cast<Event*>(event)->stream);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int i = 0; i < STREAMS; ++i) wait_for(i);
    tell("sync", "device.synchronize", 0, CURRENT);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { ALLOCATOR.recordStream(p, s); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers ------------------------------------------------------------------------------------------------

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(at::Generator base = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(TYPE, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(base) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offsets"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override { return new SimGenerator(cpu.clone()); }
  static c10::DeviceType device_type() { return TYPE; }
  at::Generator cpu;
};

const at::Generator& default_generator() {
  static auto made = at::make_generator<SimGenerator>();
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PINNED_ALLOCATOR; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<SimGenerator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = ALLOCATOR.allocate(size);
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    drain(CURRENT);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept != 0) memcpy(open_of(fresh.get()), open_of(storage.data()), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
Hooks HOOKS;

// ---- operators -----------------------------------------------------------------------------------------------------

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, &ALLOCATOR, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &ALLOCATOR,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

// A CPU tensor with the same memory.
Tensor opened(const Tensor& t) {
  const auto options = t.options().device(c10::kCPU).pinned_memory(false);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(open_of(t.data_ptr()), t.sizes(), t.strides(), options);
}

Tensor to_device(const Tensor& result) {
  auto made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, {}, {});
  if (result.numel() != 0) opened(made).copy_(result);
  return made;
}

void poison(const Tensor& t) {                    // t is a CPU tensor
  if (t.is_non_overlapping_and_dense()) memset(t.data_ptr(), 0xFF, t.nbytes());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto bytes = static_cast<int64_t>(to.numel() * to.itemsize());
  if (on_device(from) && on_device(to)) {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    const int s = CURRENT;
    const auto now = begin(s);
    drain(s);
    access(from, s, now, false, "copy");
    access(to, s, now, true, "copy");
    opened(to).copy_(opened(from));
    return to;
  }
  if (on_device(to)) {                            // host to device
    const bool pinned = is_pinned(from.const_data_ptr());
    {
      std::lock_guard<std::recursive_mutex> lock(MUTEX);
      const int s = CURRENT;
      const auto now = begin(s);
      access(to, s, now, true, "copy to the device");
      if (non_blocking) {
        Tensor source = pinned ? from.detach() : from.detach().clone();  // pageable memory is staged at once
        Tensor target = to.detach();
        if (to.numel() != 0) poison(opened(target));
        QUEUES[s].push_back({now, [source, target] { opened(target).copy_(source); }});
      } else {
        drain(s);
        opened(to).copy_(from);
      }
    }
    if (non_blocking) tell(pinned ? "h2d later" : "h2d staged", "copy", bytes, CURRENT, from);
    else if (bytes != 0) synchronised("h2d", "copy", bytes, from);
    return to;
  }
  const bool later = non_blocking && is_pinned(to.const_data_ptr());
  {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    const int s = CURRENT;
    const auto now = begin(s);
    access(from, s, now, false, "copy to the host");
    if (later) {
      Tensor source = from.detach(), target = to.detach();
      poison(target);
      QUEUES[s].push_back({now, [source, target] { Tensor(target).copy_(opened(source)); }});
    } else {
      drain(s);
      Tensor(to).copy_(opened(from));
    }
  }
  if (later) tell("d2h later", "copy", bytes, CURRENT, {});
  else if (bytes != 0) synchronised("d2h", "copy", bytes, to);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& t) {
  {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    const auto now = begin(CURRENT);
    drain(CURRENT);
    access(t, CURRENT, now, false, "item");
  }
  synchronised("item", "_local_scalar_dense", static_cast<int64_t>(t.itemsize()));
  return at::_local_scalar_dense(opened(t));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {count}, {1});
}
Tensor& set_storage_at(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
void record_stream(Tensor& self, c10::Stream s) { ALLOCATOR.recordStream(self.storage().data_ptr(), s); }

// Operators after which the host knows something of the values, so that it waits for the device.
const std::unordered_set<std::string> WAITS = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::bincount", "aten::equal", "aten::_unique", "aten::is_set_to",
    "aten::nonzero_numpy", "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig", "aten::linalg_lstsq",
    "aten::multinomial"};
// CUDA kernels that `torch.use_deterministic_algorithms(True)` refuses.
const std::unordered_set<std::string> UNSTEADY = {
    "aten::adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
    "aten::avg_pool3d_backward", "aten::max_pool3d_with_indices_backward", "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d_backward", "aten::fractional_max_pool2d_backward",
    "aten::fractional_max_pool3d_backward", "aten::max_unpool2d", "aten::max_unpool3d",
    "aten::upsample_linear1d_backward", "aten::upsample_bilinear2d_backward", "aten::upsample_bicubic2d_backward",
    "aten::upsample_trilinear3d_backward", "aten::reflection_pad1d_backward", "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward", "aten::replication_pad1d_backward", "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward", "aten::nll_loss2d_forward", "aten::nll_loss2d_backward",
    "aten::_ctc_loss_backward", "aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward", "aten::histc",
    "aten::kthvalue", "aten::median.dim", "aten::_embedding_bag_per_sample_weights_backward"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  const auto full = schema.operator_name().overload_name.empty() ? name
                                                                 : name + "." + schema.operator_name().overload_name;
  const auto& parameters = schema.arguments();
  const size_t first = stack->size() - parameters.size();
  const bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
                       name == "aten::index_put" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
  std::vector<IValue> originals(stack->begin() + static_cast<long>(first), stack->end());
  std::vector<std::pair<Tensor, Tensor>> pairs;   // device tensor, its alias on the CPU
  std::vector<std::pair<Tensor, bool>> accesses;
  bool waits = WAITS.count(name) != 0;
  if (at::globalContext().deterministicAlgorithms() && UNSTEADY.count(name) != 0) {
    TORCH_CHECK(at::globalContext().deterministicAlgorithmsWarnOnly(), name,
                " does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'");
  }
  std::vector<Tensor> from_host;
  auto convert = [&](const Tensor& t, bool writes, bool is_index) -> Tensor {
    if (!t.defined()) return t;
    if (on_device(t)) {
      accesses.emplace_back(t, writes);
      if (is_index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) waits = true;
      pairs.emplace_back(t, opened(t));
      return pairs.back().second;
    }
    if (is_index) {                               // CUDA copies indices from the host, and waits
      if (t.numel() != 0) from_host.push_back(t);
      return t;
    }
    if (t.device().is_cpu()) {
      const bool scalar = t.dim() == 0 && !writes && SCALARS_ALLOWED.count(full) != 0;
      TORCH_CHECK(scalar, "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu!"
                  " (operator ", full, ", shape ", t.sizes(), ")");
    }
    return t;
  };
  const bool no_tensor_on_device = [&] {
    for (const auto& v : originals) {
      if (v.isTensor() && on_device(v.toTensor())) return false;
      if (v.isTensorList() || v.isOptionalTensorList()) return false;
    }
    return true;
  }();
  for (size_t i = 0; i < originals.size(); ++i) {
    const auto* alias = parameters[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    auto& place = (*stack)[first + i];
    const auto& v = originals[i];
    if (v.isTensor()) {
      if (!no_tensor_on_device) place = convert(v.toTensor(), writes, false);
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(convert(t, writes, false));
      place = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : v.toOptionalTensorVector()) {
        list.push_back(t.has_value() ? std::optional<Tensor>(convert(*t, writes, indexes)) : std::nullopt);
      }
      place = list;
    } else if (v.isDevice()) {
      place = c10::Device(c10::kCPU);
    } else if (v.isGenerator()) {
      auto g = v.toGenerator();
      if (g.device().type() == TYPE) place = g.get<SimGenerator>()->cpu;
      else TORCH_CHECK(false, "Expected a 'sim' device type for generator but found '", g.device().type(), "'");
    } else if (v.isNone() && parameters[i].type()->str().find("Generator") != std::string::npos) {
      place = default_generator().get<SimGenerator>()->cpu;
    } else if (v.isBool() && parameters[i].name() == "pin_memory") {
      place = false;
    }
  }
  for (const auto& t : from_host) {
    synchronised("h2d", full + " with indices on the host", static_cast<int64_t>(t.nbytes()), t);
  }
  std::unique_lock<std::recursive_mutex> lock(MUTEX);
  const int s = CURRENT;
  const auto now = begin(s);
  drain(s);
  for (const auto& [t, writes] : accesses) access(t, s, now, writes, full);
  lock.unlock();                                  // kernels of several threads may run side by side
  if (name == "aten::convolution_overrideable" || name == "aten::convolution_backward_overrideable") {
    const bool forward = name == "aten::convolution_overrideable";
    if (!forward) {                               // the general operator has one more argument, the bias's shape
      const auto weight = (*stack)[first + 2].toTensor();
      const int64_t outputs = (*stack)[first + 6].toBool() ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
      stack->insert(stack->begin() + static_cast<long>(first) + 3, IValue(c10::List<int64_t>({outputs})));
    }
    c10::Dispatcher::singleton().findSchemaOrThrow(forward ? "aten::convolution" : "aten::convolution_backward", "")
        .callBoxed(stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }

  auto back = [&](const Tensor& result) -> Tensor {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const auto& [ours, alias] : pairs) {     // an argument that is returned, or a view of one
      if (result.unsafeGetTensorImpl() == alias.unsafeGetTensorImpl()) return ours;
    }
    if (result.numel() != 0 && is_open(result.data_ptr())) {
      for (const auto& [ours, alias] : pairs) {
        const char* base = open_of(ours.storage().data());
        const char* p = static_cast<const char*>(result.data_ptr());
        if (ours.numel() != 0 && p >= base && p < base + ours.storage().nbytes()) {
          auto seen = at::detail::make_tensor<c10::TensorImpl>(  // its type may be another, as of view_as_real
              c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), result.dtype());
          seen.unsafeGetTensorImpl()->set_storage_offset((p - base) / static_cast<long>(result.itemsize()));
          seen.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
          return seen;
        }
      }
    }
    auto made = to_device(result);
    std::lock_guard<std::recursive_mutex> again(MUTEX);
    access(made, s, now, true, full);
    return made;
  };
  for (const auto& [ours, alias] : pairs) {       // an output that the kernel has given another size
    if (alias.sizes() != ours.sizes() || (alias.numel() != 0 && !is_open(alias.data_ptr()))) {
      at::native::resize_(ours, alias.sizes(), std::nullopt);
      if (alias.numel() != 0) {
        if (ours.strides() != alias.strides()) {
          ours.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
        }
        opened(ours).copy_(alias);
        std::lock_guard<std::recursive_mutex> again(MUTEX);
        access(ours, s, now, true, full);
      }
    }
  }
  const size_t returned = schema.returns().size();
  for (size_t i = stack->size() - returned; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) {
      v = back(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(back(t));
      v = list;
    }
  }
  if (waits) synchronised("wait", full);
}

// The cells of LSTM and GRU, which PyTorch has for GPUs only, by operators that autograd knows.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                             const std::optional<Tensor>& b, const std::optional<Tensor>& c) {
  auto gates = input + hidden;
  if (b.has_value() && b->defined()) gates = gates + *b;
  if (c.has_value() && c->defined()) gates = gates + *c;
  const auto parts = gates.chunk(4, 1);
  const auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates.detach()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                    const std::optional<Tensor>& b, const std::optional<Tensor>& c) {
  const auto i = (b.has_value() && b->defined() ? input + *b : input).chunk(3, 1);
  const auto h = (c.has_value() && c->defined() ? hidden + *c : hidden).chunk(3, 1);
  const auto update = (i[1] + h[1]).sigmoid();
  const auto fresh = (i[2] + (i[0] + h[0]).sigmoid() * h[2]).tanh();
  return {fresh + update * (state - fresh), input.detach()};
}
// Attention by its formula: fused kernels differ from device to device.
int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace

void bind_host_copies(py::module& m);  // host_copies.cpp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  reserve();
  bind_host_copies(m);
  at::RegisterPrivateUse1HooksInterface(&HOOKS);
  m.def("listen", [](py::object listener) {
    Py_CLEAR(LISTENER);
    if (!listener.is_none()) LISTENER = listener.release().ptr();
  });
  m.def("allow_scalars", [](const std::vector<std::string>& names) { SCALARS_ALLOWED.insert(names.begin(), names.end()); });
  m.def("raise_on_race", [](bool raises) { RAISE = raises; });
  m.def("races", [] {
    std::lock_guard<std::recursive_mutex> lock(MUTEX);
    return RACES;
  });
  m.def("default_generator", [] { return default_generator(); });
  m.def("synchronize", [] { Guard().synchronizeDevice(0); }, py::call_guard<py::gil_scoped_release>());
}
