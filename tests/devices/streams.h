// Streams, events, the current device, and generators that count as Philox's do.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace stand_in {
inline int device_count = 1;
struct Event { int stream; uint64_t epoch; Clock clock; };
inline c10::Stream stream_of(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, (c10::DeviceIndex)device), id);
}
inline int index_of(const c10::Stream& stream) { return stream_index(stream.device_index(), (int)stream.id()); }
inline int device_or_now(c10::Device device) { return device.has_index() ? device.index() : current_device; }
inline int new_stream(int device) {  // the real pool has 32, too, and begins again
  Lock lock;
  auto& count = world.devices[device].streams;
  return 1 + (count++ - 1) % (STREAMS - 1);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device getDevice() const override { return {CUDA, (c10::DeviceIndex)current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    int index = device_or_now(device);
    return stream_of(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device_or_now(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    int index = device_or_now(device);
    return stream_of(index, new_stream(index));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = stream.device_index();
    auto before = stream_of(device, current_stream[device]);
    current_stream[device] = (int)stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return (void*)(intptr_t)stream.id(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Event();
    int index = index_of(stream);
    world.streams[index].join(world.host);
    *(Event*)*event = {index, world.streams[index].at[index], world.streams[index]};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock;
    auto one = (Event*)event;
    complete(one->stream, one->epoch);
    world.streams[index_of(stream)].join(one->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock;
    auto one = (Event*)event;
    complete(one->stream, one->epoch);
    world.host.join(one->clock);
  }
  bool queryEvent(void* event) const override {  // who asks may ask until it is so
    synchronizeEvent(event);
    return true;
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)device_count; }
  bool queryStream(const c10::Stream& stream) const override {
    synchronize_stream(index_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(index_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device < 0 ? current_device : device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { device_memory.recordStream(data, stream); }
};

// A state is a seed and an offset, 16 bytes as CUDA's. The offset grows with the numbers drawn.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static c10::DeviceType device_type() { return CUDA; }
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "RNG state must be a torch.ByteTensor of 16");
    auto words = (const uint64_t*)state.data();
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // Not at::empty: under a mode of fake tensors that has no memory.
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte, {}, {}, {}, {});
    auto words = (uint64_t*)state.data_ptr();
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t draw(int64_t numbers) {  // the seed of the next kernel
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ull ^ (offset_ + 1) * 0xD1B54A32D192ED03ull;
    offset_ += 4 * (uint64_t)std::max<int64_t>(1, (numbers + 65535) / 65536);
    return mixed;
  }
};
inline std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; i++) made.push_back(at::make_generator<Generator>((c10::DeviceIndex)i));
    return made;
  }();
  return all;
}
}  // namespace stand_in
