// Kernels of the stand-in: those of the CPU, on aliases of the device's memory.
//
// A boxed fallback serves every operator that has a kernel for the CPU. What has none there, or must
// not take its way, follows it: memory, views, copies, and the names under which cuDNN is called.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <set>

#include "streams.h"

namespace at::native {
Tensor as_strided_tensorimpl(const Tensor&, IntArrayRef, IntArrayRef, std::optional<int64_t>);
Tensor view(const Tensor&, IntArrayRef);
Tensor _reshape_alias(const Tensor&, IntArrayRef, IntArrayRef);
Tensor unfold(const Tensor&, int64_t, int64_t, int64_t);
Tensor view_as_real(const Tensor&);
Tensor view_as_complex(const Tensor&);
Tensor& set_storage_cpu_(Tensor&, Storage, int64_t, IntArrayRef, IntArrayRef);
}  // namespace at::native

namespace stand_in {
using at::IntArrayRef;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using Maybe = std::optional<Tensor>;

inline bool has_memory(const Tensor& t) { return t.defined() && t.is_cuda() && t.has_storage() && t.storage().data(); }

// The same memory, as a tensor of the CPU.
inline Tensor on_host(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto& storage = t.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(same), DispatchKeySet(DispatchKey::CPU), t.dtype());
  auto impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

struct OnDevice {  // as a DeviceGuard, without a look at the registry
  int before = current_device;
  explicit OnDevice(int device) { current_device = device; }
  ~OnDevice() { current_device = before; }
};

// One kernel: its device, its launch, and the aliases of what it was given.
struct Call {
  std::string name;
  int device = -1;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // on the device, its alias
  std::vector<std::pair<const void*, bool>> used;
  std::vector<c10::Device> places;
  Launch at{};

  explicit Call(std::string kernel) : name(std::move(kernel)) {}
  Tensor in(const Tensor& t, bool writes = false) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      if (t.dim() > 0 && t.device().is_cpu()) places.push_back(t.device());
      return t;
    }
    places.push_back(t.device());
    if (device < 0) device = t.device().index();
    if (has_memory(t)) used.emplace_back(t.storage().data(), writes);
    for (auto& pair : pairs) if (pair.first.is_same(t)) return pair.second;
    pairs.emplace_back(t, on_host(t));
    return pairs.back().second;
  }
  Tensor in(const Maybe& t) { return t ? in(*t) : Tensor(); }
  std::string plain() const {  // neither namespace nor overload
    auto tail = name.substr(name.find("::") + 2);
    return tail.substr(0, tail.find('.'));
  }
  void start() {
    if (device < 0) device = current_device;
    at = launch(stream_now(device), name);
    Lock lock;
    complete(at.stream);
    for (auto& [pointer, writes] : used) touch(at, pointer, writes, name);
  }
  Tensor fresh(const Tensor& c) {  // what a kernel has made, in memory of the device
    if (!c.defined()) return c;
    OnDevice on(device);
    auto made = at::empty_strided(c.sizes(), c.strides(), c.options().device(CUDA, (c10::DeviceIndex)device).pinned_memory(false));
    if (c.numel()) on_host(made).copy_(c);
    Lock lock;
    if (c.numel()) touch(at, made.storage().data(), true, name);
    return made;
  }
  Tensor out(const Tensor& c) {
    if (!c.defined() || c.is_cuda()) return c;
    for (auto& pair : pairs) if (pair.second.is_same(c)) return pair.first;
    if (c.has_storage() && c.storage().data())
      for (auto& pair : pairs)
        if (pair.second.storage().data() == c.storage().data()) {  // a view
          auto& base = pair.first;
          auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c.dtype());
          view.unsafeGetTensorImpl()->set_storage_offset(c.storage_offset());
          view.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides());
          return view;
        }
    return fresh(c);
  }
  void resized() {  // an out= whose alias has other memory now, or another shape
    for (auto& [ours, theirs] : pairs) {
      if (theirs.sizes() == ours.sizes() && theirs.storage().data() == ours.storage().data()) continue;
      Tensor target = ours;
      if (target.sizes() != theirs.sizes()) target.resize_(theirs.sizes());
      if (target.strides() != theirs.strides() && target.numel())
        target.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides());
      if (!target.numel()) continue;
      on_host(target).copy_(theirs);
      Lock lock;
      touch(at, target.storage().data(), true, name);
    }
  }
  // CUDA takes operands of one device, and of the host what has no dimension.
  void same_device() const {
    static const std::set<std::string> HOST = {  // kernels that take lengths or indices of the host
        "index", "index_put_", "_index_put_impl_", "_ctc_loss", "_ctc_loss_backward", "_pack_padded_sequence",
        "_pad_packed_sequence", "_cudnn_rnn", "_cudnn_rnn_backward"};
    for (auto& place : places) {
      if (place.is_cpu() ? HOST.count(plain()) : place.index() == device) continue;
      if (place.is_cpu() && device < 0) continue;
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                  std::max(device, 0), " and ", place.str(), "! (when checking arguments in ", name, ")");
    }
  }
};

// cuBLAS has a handle for each thread that multiplies, and a workspace for each handle and stream.
inline int64_t workspace_bytes = 0;
inline std::vector<int> idle_handles;
inline int handles = 0;
inline std::map<std::pair<int, int>, c10::DataPtr> workspaces;
struct Handle {
  int id = -1;
  ~Handle() {
    Lock lock;
    if (id >= 0) idle_handles.push_back(id);
  }
  int get() {
    if (id >= 0) return id;
    Lock lock;
    if (idle_handles.empty()) return id = handles++;
    id = idle_handles.back();
    idle_handles.pop_back();
    return id;
  }
};
inline thread_local Handle handle;
inline void need_workspace(const Call& call) {
  static const std::set<std::string> MULTIPLY = {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addmv", "addmv_", "mv", "dot", "addmm_", "baddbmm_", "addbmm"};
  if (!workspace_bytes) return;
  if (!MULTIPLY.count(call.plain())) return;
  OnDevice on(call.device < 0 ? current_device : call.device);
  std::pair<int, int> key{handle.get(), stream_now(current_device)};
  Lock lock;
  if (!workspaces.count(key)) workspaces.emplace(key, device_memory.allocate(workspace_bytes));
}

inline std::mutex drawing;  // the CPU's own generator is lent
inline bool takes_generator(const c10::Argument& argument) { return argument.type()->str().find("Generator") != std::string::npos; }

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}
inline void run_drawing(const c10::OperatorHandle& op, torch::jit::Stack* stack, Generator* given, const Call& call, int64_t numbers) {
  auto& arguments = op.schema().arguments();
  size_t first = stack->size() - arguments.size();
  std::lock_guard<std::mutex> guard(drawing);
  if (!given) given = generators()[call.device].get<Generator>();
  uint64_t seed = given->draw(numbers);
  bool takes = false;
  for (size_t i = 0; i < arguments.size(); i++)
    if (takes_generator(arguments[i])) {
      (*stack)[first + i] = at::detail::createCPUGenerator(seed);
      takes = true;
    }
  if (takes) return run_on_host(op, stack);
  auto own = at::detail::getDefaultCPUGenerator();
  auto before = own.get_state();
  own.set_current_seed(seed);
  try {
    run_on_host(op, stack);
  } catch (...) {
    own.set_state(before);
    throw;
  }
  own.set_state(before);
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto& arguments = schema.arguments();
  size_t n = arguments.size(), first = stack->size() - n;
  Call call(schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name()));
  Generator* generator = nullptr;
  int64_t numbers = 0;
  auto in = [&](const Tensor& t, bool writes) {
    if (t.defined()) numbers = std::max(numbers, t.numel());
    return call.in(t, writes);
  };
  for (size_t i = 0; i < n; i++) {
    auto& value = (*stack)[first + i];
    bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (value.isGenerator()) {
      auto given = value.toGenerator();
      if (given.device().is_cuda()) generator = given.get<Generator>();
    } else if (value.isTensor()) {
      value = in(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(in(t, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<Maybe> list;
      for (Maybe t : value.toOptionalTensorList()) list.push_back(t && t->defined() ? Maybe(in(*t, writes)) : t);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (call.device < 0 && value.toDevice().has_index()) call.device = value.toDevice().index();
      value = c10::Device(c10::kCPU);
    }
  }
  call.same_device();
  need_workspace(call);
  call.start();
  bool random = false;
  for (auto tag : op.getTags()) random |= tag == at::Tag::nondeterministic_seeded;
  if (random) run_drawing(op, stack, generator, call, numbers);
  else run_on_host(op, stack);
  size_t results = schema.returns().size();
  for (size_t i = 0; i < results; i++) {
    auto& value = (*stack)[stack->size() - results + i];
    if (value.isTensor()) {
      value = call.out(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(call.out(t));
      value = list;
    }
  }
  call.resized();
}

// ---- memory, views and copies
inline int device_of(std::optional<c10::Device> given) { return given && given->has_index() ? given->index() : current_device; }
inline auto type_of(std::optional<at::ScalarType> given) { return given.value_or(at::typeMetaToScalarType(at::get_default_dtype())); }
inline Tensor empty(IntArrayRef size, std::optional<at::ScalarType> type, std::optional<c10::Layout>, std::optional<c10::Device> device,
                    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device_of(device));
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::CUDA), type_of(type), format);
}
inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<c10::Layout>,
                            std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device_of(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA), type_of(type));
}
inline void resize_storage(c10::StorageImpl* storage, int64_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  OnDevice on(storage->device().index());
  auto fresh = device_memory.allocate(bytes);
  if (bytes && storage->data()) {
    auto at = launch(stream_now(current_device), "resize_");
    Lock lock;
    complete(at.stream);
    std::memcpy(fresh.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
    touch(at, storage->data(), false, "resize_");
    touch(at, fresh.get(), true, "resize_");
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}
inline const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t need = impl->numel() ? at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->dtype().itemsize(), impl->storage_offset()) : 0;
  if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}
inline bool is_bytes_alike(const Tensor& to, const Tensor& from) {
  return from.dtype() == to.dtype() && from.is_non_overlapping_and_dense() && from.strides() == to.strides() &&
         from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
}
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel() || self.is_same(source)) return self;
  Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  bool in = !source.is_cuda(), out = !self.is_cuda();
  int device = (in ? self : source).device().index(), to = out ? device : self.device().index();
  const void* host = out ? self.storage().data() : in ? from.storage().data() : nullptr;
  bool pinned = host && is_pinned(host);
  auto at = launch(stream_now(device), in ? "copy_ to the device" : out ? "copy_ to the host" : "copy_");
  bool later;
  {
    Lock lock;
    int peer = stream_now(to);
    if (to != device) {  // the real one makes both streams wait for each other
      complete(peer);
      world.streams[at.stream].join(world.streams[peer]);
    }
    later = world.late && non_blocking && pinned && is_bytes_alike(self, from);
    if (!in || pinned) touch(at, from.storage().data(), false, "copy_");
    if (!out || pinned) touch(at, self.storage().data(), true, "copy_");
    if (to != device) world.streams[peer].join(world.streams[at.stream]);
    if (later) {
      world.deferred++;
      world.copies[at.stream].push_back({at.epoch, (char*)self.data_ptr(), (char*)from.data_ptr(), size_t(self.numel() * self.element_size())});
    } else complete(at.stream);
  }
  if (later) return self;
  on_host(self).copy_(on_host(from));
  if ((in || out) && !(non_blocking && pinned)) {
    Lock lock;
    world.host.join(world.streams[at.stream]);
  }
  return self;
}
inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  copy_(target, self, non_blocking);
  return target;
}
inline void read_on_host(const Tensor& t, const char* kernel) {
  int stream = stream_now(t.device().index());
  synchronize_stream(stream);
  auto at = launch(stream, kernel);
  Lock lock;
  touch(at, t.storage().data(), false, kernel);
  world.host.join(world.streams[stream]);
}
inline at::Scalar item(const Tensor& self) {
  read_on_host(self, "item");
  return on_host(self).item();
}
inline bool equal(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Cannot compare two tensors on different devices. Got: ", a.device(), " and ", b.device());
  if (a.sizes() != b.sizes()) return false;
  if (a.numel()) { read_on_host(a, "equal"); read_on_host(b, "equal"); }
  return on_host(a).equal(on_host(b));
}
inline void record_stream(Tensor& self, c10::Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); }
inline Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}
inline Tensor& set_whole(Tensor& self, c10::Storage storage) {
  int64_t n = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {n}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& other) { return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides()); }
inline Tensor& set_nothing(Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_memory, true), 0, {0}, {});
}
}  // namespace stand_in
