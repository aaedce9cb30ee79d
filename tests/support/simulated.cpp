// A device on a processor, as strict as an accelerator: torch's PrivateUse1 backend, for the tests.
//
// Memory. A device's memory is one file in memory, mapped twice: at the addresses that tensors have nobody may read or
// write (a host that touches one dies), and at a fixed distance from them the device itself may. The allocator hands a
// freed block to the next tensor of its stream at once, as a caching allocator does, and overwrites it, in the stream's
// order: a block freed while another stream still reads it shows.
//
// Time. An operator is queued on the current stream of its thread and runs when somebody waits for it, or earlier, in any
// order that streams and events allow: a seed draws how late, and which stream is ahead. Copies from and to pageable
// memory wait for the stream, and are counted; so is every other wait of the host.
//
// Operators. Each one with a CPU kernel is queued with the addresses, shapes and strides of its tensors; outputs get their
// shapes on the meta device. A host tensor among them is an error, unless it is a scalar.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

extern "C" {  // of the interpreter that loads this
int PyGILState_Check();
int Py_IsInitialized();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

constexpr int kDevices = 4;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kArena = size_t(4) << 30;  // address space; pages come when they are written
constexpr size_t kBlock = 512;

std::recursive_mutex g_mutex;

// Whoever waits for the device lets go of the interpreter; whoever works on it may ask for the interpreter.
struct Lock {
  Lock() {
    if (!g_mutex.try_lock()) {
      void* held = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      g_mutex.lock();
      if (held) PyEval_RestoreThread(held);
    }
  }
  ~Lock() { g_mutex.unlock(); }
};

// ---- what is counted ------------------------------------------------------------------------------------------------

struct Counts {
  int64_t ops = 0, waits = 0, pageable = 0, pinned = 0, segments = 0;
  std::map<std::string, int64_t> waited_by;
};
Counts g_counts;

std::thread::id g_counter;  // the thread that counts; waits of others are counted apart

void waited(const std::string& why) {
  ++g_counts.waits;
  ++g_counts.waited_by[std::this_thread::get_id() == g_counter ? why : "elsewhere: " + why];
}

// ---- streams and events ---------------------------------------------------------------------------------------------

struct Event {
  int device = 0;
  int64_t issued = 0, done = 0;  // versions
  int64_t at = 0;                // tasks that the device had run by then
};
using EventPtr = std::shared_ptr<Event>;

using StreamKey = std::pair<int, int64_t>;

struct Task {
  std::function<void()> run;  // neither of the two below
  EventPtr record, wait;
  int64_t version = 0;
};

std::map<StreamKey, std::deque<Task>> g_streams;
std::mt19937_64 g_random(0);
double g_ahead = 0.5, g_early = 0.0;  // shares of the choices that no wait asks for
int64_t g_next_stream = 1, g_clock = 0;
std::exception_ptr g_error;
int g_running = 0;

thread_local int t_device = 0;
thread_local std::array<int64_t, kDevices> t_stream{};

double draw() { return std::uniform_real_distribution<double>(0, 1)(g_random); }

bool runnable(const std::deque<Task>& queue) {
  return !queue.empty() && !(queue.front().wait && queue.front().wait->done < queue.front().version);
}

void run_head(std::deque<Task>& queue) {
  Task task = std::move(queue.front());
  if (task.run) {
    ++g_running;
    try {
      task.run();
    } catch (...) {
      if (!g_error) g_error = std::current_exception();
    }
    --g_running;
    ++g_clock;
  } else if (task.record) {
    task.record->done = std::max(task.record->done, task.version);
    task.record->at = g_clock;
  }
  queue.pop_front();
}

// Any stream that may go on; the one that lags behind does so for long.
bool run_any() {
  std::vector<std::deque<Task>*> found;
  for (auto& [key, queue] : g_streams)
    if (runnable(queue)) found.push_back(&queue);
  if (found.empty()) return false;
  run_head(*found[std::uniform_int_distribution<size_t>(0, found.size() - 1)(g_random)]);
  return true;
}

// The task that a stream's first one waits for, to its beginning.
std::deque<Task>* first_needed(std::deque<Task>* queue) {
  while (!runnable(*queue)) {
    const Task& head = queue->front();
    std::deque<Task>* next = nullptr;
    for (auto& [key, other] : g_streams)
      for (auto& task : other)
        if (task.record == head.wait && task.version >= head.version) {
          next = &other;
          break;
        }
    TORCH_CHECK(next, "simulated device: a stream waits for an event that nobody records");
    queue = next;
  }
  return queue;
}

void rethrow() {
  if (g_error && !g_running) std::rethrow_exception(std::exchange(g_error, nullptr));
}

// Run until `done`, which holds once `queue` is empty or a task of it has run.
void pump(std::deque<Task>& queue, const std::function<bool()>& done) {
  TORCH_CHECK(!g_running || done(), "simulated device: an operator waits for the device that runs it");
  while (!done()) {
    if (draw() < g_ahead && run_any()) continue;
    run_head(*first_needed(&queue));
  }
  rethrow();
}

void sync_stream(StreamKey key) {
  auto& queue = g_streams[key];
  pump(queue, [&] { return queue.empty(); });
}

void push(StreamKey key, Task task) {
  g_streams[key].push_back(std::move(task));
  while (g_early > 0 && !g_running && draw() < g_early && run_any()) {
  }
}

StreamKey current(int device) { return {device, t_stream.at(device)}; }

c10::Stream as_stream(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(key.first)), key.second);
}
StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

EventPtr record_on(StreamKey key) {
  auto event = std::make_shared<Event>();
  event->device = key.first;
  event->issued = 1;
  push(key, {nullptr, event, nullptr, 1});
  return event;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(t_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "no simulated device ", device.index());
    if (device.index() >= 0) t_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) t_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return as_stream(current(device.index() < 0 ? t_device : device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream({device.index() < 0 ? t_device : device.index(), 0});
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock;
    return as_stream({device.index() < 0 ? t_device : device.index(), g_next_stream++});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto key = key_of(stream);
    auto before = current(key.first);
    t_stream.at(key.first) = key.second;
    return as_stream(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static EventPtr& of(void* event) { return *static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new EventPtr(std::make_shared<Event>());
    auto& found = of(*event);
    found->device = stream.device_index();
    push(key_of(stream), {nullptr, found, nullptr, ++found->issued});
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock;
    if (event && of(event)->issued) push(key_of(stream), {nullptr, nullptr, of(event), of(event)->issued});
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  bool queryEvent(void* event) const override {
    Lock lock;
    return !event || of(event)->done >= of(event)->issued;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock;
    auto found = of(event);
    auto version = found->issued;
    if (found->done >= version) return;
    waited("event");
    for (auto& [key, queue] : g_streams)
      for (auto& task : queue)
        if (task.record == found && task.version == version) {
          pump(queue, [&] { return found->done >= version; });
          return;
        }
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    Lock lock;
    return static_cast<double>(of(second)->at - of(first)->at);  // a task takes a millisecond
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    return g_streams[key_of(stream)].empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    waited("stream");
    sync_stream(key_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Lock lock;
    waited("device");
    for (auto& [key, queue] : g_streams)
      if (key.first == (device < 0 ? t_device : device)) sync_stream(key);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory ---------------------------------------------------------------------------------------------------------

struct Arena {
  char* guarded = nullptr;  // where tensors say they are
  char* open = nullptr;     // where the device finds them
  size_t used = 0;
  int64_t live = 0, peak = 0, blocks = 0;
};
std::array<Arena, kDevices> g_arenas;

struct Block {
  int device;
  StreamKey stream;
  char* address;
  size_t nbytes;
  std::set<StreamKey> readers;
};
std::map<std::pair<StreamKey, size_t>, std::vector<char*>> g_free;
std::vector<std::pair<std::vector<EventPtr>, std::unique_ptr<Block>>> g_awaited;

Arena& arena(int device) {
  auto& found = g_arenas.at(device);
  if (!found.open) {
    int file = memfd_create("simulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "simulated device: no memory file");
    void* open = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* guarded = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(open != MAP_FAILED && guarded != MAP_FAILED, "simulated device: cannot map its memory");
    close(file);
    found.open = static_cast<char*>(open);
    found.guarded = static_cast<char*>(guarded);
  }
  return found;
}

void* opened(const void* address) {
  auto* place = static_cast<const char*>(address);
  for (auto& each : g_arenas)
    if (each.open && place >= each.guarded && place < each.guarded + kArena)
      return each.open + (place - each.guarded);
  TORCH_CHECK(!address, "simulated device: ", address, " is no device memory");
  return nullptr;
}

// Memory that somebody still reads is no memory to take: it is live until its readers are done.
void reuse(Block& block) {
  auto& home = arena(block.device);
  home.live -= static_cast<int64_t>(block.nbytes);
  --home.blocks;
  void* place = opened(block.address);
  push(block.stream, {[place, nbytes = block.nbytes] { memset(place, 0xff, nbytes); }, nullptr, nullptr, 0});
  g_free[{block.stream, block.nbytes}].push_back(block.address);
}

void reclaim() {
  for (size_t i = 0; i < g_awaited.size();) {
    auto& [events, block] = g_awaited[i];
    if (std::all_of(events.begin(), events.end(), [](auto& event) { return event->done >= event->issued; })) {
      auto freed = std::move(block);
      g_awaited.erase(g_awaited.begin() + static_cast<std::ptrdiff_t>(i));
      reuse(*freed);
    } else {
      ++i;
    }
  }
}

void free_block(void* context) {
  Lock lock;
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->readers.erase(block->stream);
  if (block->readers.empty()) return reuse(*block);
  std::vector<EventPtr> events;
  for (auto& reader : block->readers) events.push_back(record_on(reader));
  g_awaited.emplace_back(std::move(events), std::move(block));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Lock lock;
    int device = t_device;
    auto stream = current(device);
    auto& home = arena(device);
    c10::Device place(kType, static_cast<c10::DeviceIndex>(device));
    if (!nbytes) return {nullptr, nullptr, &free_nothing, place};
    reclaim();
    nbytes = (nbytes + kBlock - 1) / kBlock * kBlock;
    auto& found = g_free[{stream, nbytes}];
    char* address;
    if (!found.empty()) {
      address = found.back();
      found.pop_back();
    } else {
      TORCH_CHECK(home.used + nbytes <= kArena, "simulated device: out of memory");
      address = home.guarded + home.used;
      memset(home.open + home.used, 0xff, std::min(nbytes, size_t(1) << 20));
      home.used += nbytes;
      ++g_counts.segments;
    }
    home.live += static_cast<int64_t>(nbytes);
    home.peak = std::max(home.peak, home.live);
    ++home.blocks;
    return {address, new Block{device, stream, address, nbytes, {}}, &free_block, place};
  }
  static void free_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(opened(to), opened(from), nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    if (data.get_deleter() == &free_block) static_cast<Block*>(data.get_context())->readers.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& home = arena(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = home.live;
    bytes.peak = home.peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { arena(device).peak = arena(device).live; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {kArena - static_cast<size_t>(arena(device).live), kArena};
  }
};
DeviceMemory g_memory;
REGISTER_ALLOCATOR(kType, &g_memory);

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  g_memory.recordStream(data, stream);
}

std::map<const char*, size_t> g_pinned;  // ranges that copies need not wait for

void pin(void* place, size_t nbytes) {
  Lock lock;
  g_pinned[static_cast<const char*>(place)] = nbytes;
}
void unpin(void* place) {
  Lock lock;
  g_pinned.erase(static_cast<const char*>(place));
}
bool is_pinned(const void* place) {
  Lock lock;
  auto after = g_pinned.upper_bound(static_cast<const char*>(place));
  if (after == g_pinned.begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(place) < found->first + found->second;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* place = nullptr;
    TORCH_CHECK(posix_memalign(&place, 4096, std::max<size_t>(nbytes, 1)) == 0, "out of host memory");
    pin(place, std::max<size_t>(nbytes, 1));
    {
      Lock lock;
      ++g_counts.pinned;
    }
    return {place, place, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* place) {
    unpin(place);
    free(place);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};
PinnedMemory g_pinned_memory;

at::Generator& generator(int device) {
  static std::array<at::Generator, kDevices> made = [] {
    std::array<at::Generator, kDevices> each;
    for (auto& one : each) one = at::detail::createCPUGenerator();
    return each;
  }();
  return made.at(device < 0 ? t_device : device);
}

bool g_available = false;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_available; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(t_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* place) const override { return is_pinned(place); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_memory; }
  at::Device getDeviceFromPtr(void* place) const override {
    for (int device = 0; device < kDevices; ++device) {
      auto& each = g_arenas[device];
      if (each.open && place >= each.guarded && place < each.guarded + kArena)
        return {kType, static_cast<c10::DeviceIndex>(device)};
    }
    TORCH_CHECK(false, "no memory of a simulated device");
  }
};

// ---- operators ------------------------------------------------------------------------------------------------------

struct Place {  // a tensor's place on the device, which does not keep its memory alive
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  at::Tensor tensor() const {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
  }
};

Place place_of(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "simulated device: lazily conjugated tensors are not known");
  return {opened(tensor.data_ptr()), tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet(c10::DispatchKey::Python) |
                                               c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
};

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// A stack with every tensor replaced.
c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& each : value.toTensorVector()) out.push_back(change(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& each : value.toOptionalTensorVector())
      out.push_back(each && each->defined() ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    return out;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  mapped(value, [&](const at::Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}

const std::set<std::string> kReadsValues{  // their outputs, or their shapes, depend on values
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::bincount", "aten::multinomial", "aten::_local_scalar_dense", "aten::is_set_to",
    "aten::segment_reduce"};
const std::set<std::string> kDraws{"aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::random_",
                                   "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_"};

bool indexes_by_mask(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  const auto& name = op.schema().name();
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_" &&
      name != "aten::repeat_interleave")
    return false;
  if (name == "aten::repeat_interleave") return true;
  bool found = false;
  each_tensor(stack[first + 1], [&](const at::Tensor& index) {
    found |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
  });
  return found;
}

void copy_to(const at::Tensor& from, const at::Tensor& to, bool from_pinned) {  // a host tensor that nobody else changes
  auto target = place_of(to);
  push(current(to.device().index()), {[from, target] {
         BelowEverything below;
         target.tensor().copy_(from);
       }, nullptr, nullptr, 0});
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t given = schema.arguments().size(), first = stack->size() - given;
  c10::IValue* arguments = stack->data() + first;

  int device = -1;
  for (size_t i = 0; i < given; ++i)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return;
      int its = tensor.device().index();
      TORCH_CHECK(device < 0 || device == its, "simulated device: ", schema.name(), " is given tensors on devices ", device,
                  " and ", its);
      device = its;
    });
  for (size_t i = 0; i < given; ++i)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (device < 0 || !tensor.defined() || on_device(tensor)) return;
      bool index = schema.name().rfind("aten::index", 0) == 0 || schema.name() == "aten::_index_put_impl_";
      TORCH_CHECK(tensor.dim() == 0 || (index && i == 1), "simulated device: ", schema.name(), " is given a host tensor ",
                  tensor.sizes());
      if (tensor.dim()) ++g_counts.pageable, waited(schema.name() + " (host index)");
    });
  if (device < 0) {  // a factory: made on the host, sent to the device
    for (size_t i = 0; i < given; ++i)
      if (arguments[i].isDevice() && arguments[i].toDevice().type() == kType) {
        device = arguments[i].toDevice().index() < 0 ? t_device : arguments[i].toDevice().index();
        arguments[i] = c10::Device(at::kCPU);
      }
    TORCH_CHECK(device >= 0, "simulated device: no tensor for ", schema.name());
    BelowEverything below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    auto made = stack->back().toTensor();
    auto out = at::empty_strided(made.sizes(), made.strides(), made.options().device(c10::Device(kType, device)));
    copy_to(made, out, true);
    stack->back() = out;
    return;
  }
  c10::OptionalDeviceGuard here(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  auto stream = current(device);

  // places of the tensors, as they are now
  auto replaced = std::make_shared<std::vector<std::pair<c10::IValue, std::vector<std::optional<Place>>>>>();
  auto refer = [&] {
    replaced->clear();
    for (size_t i = 0; i < given; ++i) {
      std::vector<std::optional<Place>> places;
      auto held = mapped(arguments[i], [&](const at::Tensor& tensor) {
        if (on_device(tensor)) {
          places.emplace_back(place_of(tensor));
          return at::Tensor(at::empty({0}, at::kCPU));
        }
        places.emplace_back(std::nullopt);
        return tensor.detach().clone();
      });
      replaced->emplace_back(std::move(held), std::move(places));
    }
  };
  auto host_stack = [replaced] {
    torch::jit::Stack out;
    for (auto& [held, places] : *replaced) {
      size_t next = 0;
      out.push_back(mapped(held, [&, &places = places](const at::Tensor& tensor) {
        auto& place = places[next++];
        return place ? place->tensor() : tensor;
      }));
    }
    return out;
  };

  bool writes = false, makes = false, tensors = true;
  for (auto& each : schema.returns()) {
    bool aliased = each.alias_info() && each.alias_info()->isWrite();
    writes |= aliased;
    makes |= !aliased;
    tensors &= each.type()->kind() == c10::TypeKind::TensorType || each.type()->kind() == c10::TypeKind::ListType;
  }
  std::vector<size_t> outs;  // arguments that out= variants write
  bool in_place = false;
  for (size_t i = 0; i < given; ++i) {
    const auto& argument = schema.arguments()[i];
    if (!argument.alias_info() || !argument.alias_info()->isWrite()) continue;
    if (argument.is_out()) outs.push_back(i);
    else in_place = true;
  }

  if (kDraws.count(schema.name()) && in_place) {  // the generator moves when the op is issued
    auto self = arguments[0].toTensor();
    auto drawn = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
    torch::jit::Stack host;
    for (size_t i = 0; i < given; ++i) {
      if (i == 0) host.emplace_back(drawn);
      else if (schema.arguments()[i].name() == "generator" && arguments[i].isNone()) host.emplace_back(generator(device));
      else if (arguments[i].isTensor() && on_device(arguments[i].toTensor())) {
        waited(schema.name());
        { Lock lock; sync_stream(stream); }
        host.emplace_back(place_of(arguments[i].toTensor()).tensor().clone());
      } else host.push_back(arguments[i]);
    }
    {
      BelowEverything below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
    }
    Lock lock;
    copy_to(drawn, self, true);
    torch::jit::drop(*stack, given);
    stack->emplace_back(self);
    return;
  }

  if (kReadsValues.count(schema.name()) || indexes_by_mask(op, *stack, first) || !tensors) {
    torch::jit::Stack host;
    {
      Lock lock;
      waited(schema.name());
      sync_stream(stream);
      refer();
      host = host_stack();
      BelowEverything below;
      ++g_running;
      try {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
      } catch (...) {
        --g_running;
        throw;
      }
      --g_running;
    }
    std::vector<c10::IValue> results;
    if (writes && !makes) {
      results.assign(arguments, arguments + 1);
    } else {
      for (auto& value : host)
        results.push_back(mapped(value, [&](const at::Tensor& made) {
          auto out = at::empty_strided(made.sizes(), made.strides(), made.options().device(c10::Device(kType, device)));
          Lock lock;
          copy_to(made.clone(at::MemoryFormat::Preserve), out, true);
          return out;
        }));
    }
    torch::jit::drop(*stack, given);
    for (auto& value : results) stack->push_back(value);
    return;
  }

  // shapes of what the op makes, or fills
  torch::jit::Stack meta;
  if (makes || !outs.empty()) {
    for (size_t i = 0; i < given; ++i) {
      if (arguments[i].isDevice()) meta.emplace_back(c10::Device(at::kMeta));
      else meta.push_back(mapped(arguments[i], [](const at::Tensor& tensor) { return on_device(tensor) || tensor.dim() ? on_meta(tensor) : tensor; }));
    }
    std::vector<at::Tensor> meta_outs;
    for (size_t i : outs)
      if (meta[i].isTensor()) meta_outs.push_back(meta[i].toTensor());
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&meta);
    for (size_t k = 0; k < meta_outs.size(); ++k) {
      auto out = arguments[outs[k]].toTensor();
      if (out.sizes() != meta_outs[k].sizes()) out.resize_(meta_outs[k].sizes());
    }
  }
  for (size_t i = 0; i < given; ++i)
    if (arguments[i].isDevice()) arguments[i] = c10::Device(at::kCPU);

  std::vector<c10::IValue> results;
  auto made = std::make_shared<std::vector<std::vector<Place>>>();
  size_t written = 0;
  std::vector<size_t> targets = outs;
  if (in_place)
    for (size_t i = 0; i < given; ++i) {
      const auto& argument = schema.arguments()[i];
      if (argument.alias_info() && argument.alias_info()->isWrite() && !argument.is_out()) targets.push_back(i);
    }
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    const auto& each = schema.returns()[r];
    if (each.alias_info() && each.alias_info()->isWrite()) {
      results.push_back(arguments[targets.at(written++)]);
      made->emplace_back();
      continue;
    }
    std::vector<Place> places;
    results.push_back(mapped(meta[r], [&](const at::Tensor& shape) {
      auto out = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(c10::Device(kType, device)));
      places.push_back(place_of(out));
      return out;
    }));
    made->push_back(std::move(places));
  }

  Lock lock;
  refer();
  ++g_counts.ops;
  push(stream, {[op, host_stack, made] {
         BelowEverything below;
         auto host = host_stack();
         op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
         for (size_t r = 0; r < made->size(); ++r) {
           size_t next = 0;
           if ((*made)[r].empty()) continue;
           each_tensor(host[r], [&](const at::Tensor& value) { (*made)[r][next++].tensor().copy_(value); });
         }
       }, nullptr, nullptr, 0});
  torch::jit::drop(*stack, given);
  for (auto& value : results) stack->push_back(value);
}

void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call(op, stack); }

// ---- operators that torch cannot derive ------------------------------------------------------------------------------

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard here(device);
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_generic(sizes, &g_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard here(device);
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_strided_generic(sizes, strides, &g_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           type);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t needed = static_cast<size_t>((impl->storage_offset() + impl->numel()) * static_cast<int64_t>(impl->itemsize()));
  auto& storage = impl->unsafe_storage();
  if (storage.nbytes() < needed) {
    c10::OptionalDeviceGuard here(self.device());
    auto data = g_memory.allocate(needed);
    Lock lock;
    if (storage.nbytes()) {
      push(current(self.device().index()), {[to = opened(data.get()), from = opened(storage.data()), n = storage.nbytes()] {
             memcpy(to, from, n);
           }, nullptr, nullptr, 0});
    }
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(needed);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  if (on_device(from) && on_device(to)) {
    TORCH_CHECK(from.sizes() == to.sizes(), "copy of ", from.sizes(), " to ", to.sizes());
    int home = from.device().index(), other = to.device().index();
    Lock lock;
    if (home != other) push(current(home), {nullptr, nullptr, record_on(current(other)), 1});
    push(current(home), {[source = place_of(from), target = place_of(to)] {
           BelowEverything below;
           target.tensor().copy_(source.tensor());
         }, nullptr, nullptr, 0});
    if (home != other) push(current(other), {nullptr, nullptr, record_on(current(home)), 1});
    return to;
  }
  const auto& host = on_device(from) ? to : from;
  const auto& mine = on_device(from) ? from : to;
  bool pinned = is_pinned(host.const_data_ptr());
  bool direct = host.scalar_type() == mine.scalar_type() && host.is_contiguous();  // else a pageable copy is made of it
  auto stream = current(mine.device().index());
  Lock lock;
  if (pinned && direct && non_blocking) {
    auto place = place_of(mine);
    push(stream, {[place, host, inward = !on_device(from)] {  // the host's allocator keeps pinned memory until the copy's end
           BelowEverything below;
           if (inward) place.tensor().copy_(host);
           else host.detach().copy_(place.tensor());
         }, nullptr, nullptr, 0});
    return to;
  }
  if (!pinned || !direct) ++g_counts.pageable;
  waited(pinned && direct ? "blocking copy" : on_device(from) ? "copy to pageable memory" : "copy from pageable memory");
  sync_stream(stream);
  BelowEverything below;
  if (on_device(from)) to.detach().copy_(place_of(from).tensor());
  else place_of(to).tensor().copy_(from);
  return to;
}

at::Scalar item(const at::Tensor& self) {
  Lock lock;
  waited("item");
  sync_stream(current(self.device().index()));
  BelowEverything below;
  return place_of(self).tensor().item();
}

void record_stream(at::Tensor& self, c10::Stream stream) { g_memory.recordStream(self.storage().data_ptr(), stream); }

int64_t attention_kind(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                       bool grouped) {
  auto host = [](const at::Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU))
        .set_requires_grad(tensor.requires_grad());
  };
  std::optional<at::Tensor> its = mask && mask->defined() ? std::optional<at::Tensor>(host(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(host(query), host(key), host(value), its, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_kind);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>()); }

void take_over() {  // every operator that a CPU has a kernel of, before torch composes it of others
  static std::vector<c10::RegistrationHandleRAII> handles;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CPU)) {
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto& schema = op->schema();
    bool view = schema.name() == "aten::copy_" || schema.name() == "aten::native_dropout";
    for (auto& each : schema.returns()) view |= each.alias_info() && !each.alias_info()->isWrite();
    if (!view)
      handles.push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                                c10::KernelFunction::makeFromBoxedFunction<&boxed>(), std::nullopt, nullptr,
                                                "simulated device"));
  }
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_kind)
}

extern "C" {

void sim_start() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  take_over();
}

// A new order: everything that waits runs first.
void sim_seed(uint64_t seed) {
  Lock lock;
  for (auto& [key, queue] : g_streams) sync_stream(key);
  g_random.seed(seed);
  constexpr double ahead[] = {0.0, 0.3, 0.7, 1.0}, early[] = {0.0, 0.0, 0.5};
  g_ahead = ahead[seed % 4];
  g_early = early[seed % 3];
}

void sim_available(bool yes) { g_available = yes; }
bool sim_is_available() { return g_available; }
int sim_device() { return t_device; }
void sim_set_device(int device) { t_device = device; }
int sim_devices() { return kDevices; }
void sim_pin(void* place, size_t nbytes) { pin(place, nbytes); }
void sim_unpin(void* place) { unpin(place); }
void sim_manual_seed(uint64_t seed, int device) { generator(device).set_current_seed(seed); }

// The state of a device's generator, copied to ``bytes`` where there are any; how many bytes it has.
size_t sim_rng_state(int device, void* bytes) {
  const at::Tensor state = generator(device).get_state();
  if (bytes != nullptr) std::memcpy(bytes, state.const_data_ptr(), state.nbytes());
  return state.nbytes();
}

void sim_set_rng_state(int device, const void* bytes) {
  at::Tensor state = generator(device).get_state();
  std::memcpy(state.mutable_data_ptr(), bytes, state.nbytes());
  generator(device).set_state(state);
}
void sim_reset_counts() {
  Lock lock;
  g_counts = {};
  g_counter = std::this_thread::get_id();
}
int64_t sim_count(int which) {
  Lock lock;
  const int64_t counts[] = {g_counts.ops, g_counts.waits, g_counts.pageable, g_counts.pinned, g_counts.segments};
  return counts[which];
}
const char* sim_waits() {
  static std::string text;
  Lock lock;
  text.clear();
  for (auto& [why, times] : g_counts.waited_by) text += why + "=" + std::to_string(times) + ";";
  return text.c_str();
}
int64_t sim_waiting() {
  Lock lock;
  int64_t count = 0;
  for (auto& [key, queue] : g_streams) count += static_cast<int64_t>(queue.size());
  return count;
}
}
