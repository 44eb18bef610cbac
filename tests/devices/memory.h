// Memory of the stand-in: that of the host, with a cap a device, rounded up as CUDA's allocator does.
// What is new and what is freed is filled with NaN. Pools and fragments are not modelled.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>

#include "world.h"

namespace stand_in {
inline void let_go(Device& device) {  // of what recorded streams have finished with
  auto over = std::remove_if(device.holding.begin(), device.holding.end(), [&](const Held& one) {
    if (!world.host.covers(one.until)) return false;
    device.held -= one.bytes;
    return true;
  });
  device.holding.erase(over, device.holding.end());
}

inline void free_block(void* pointer) {
  if (!pointer) return;
  {
    Lock lock;
    auto it = world.blocks.find((char*)pointer);
    if (it == world.blocks.end()) return;
    auto& block = it->second;
    auto& device = world.devices[block.device];
    Held held{(int64_t)block.rounded, {}};
    for (int s = 0; s < ALL; s++) {
      if (s == block.stream) continue;
      bool wrote = block.writer == s && block.write.epoch > block.reads[s].epoch;
      auto last = wrote ? block.write : block.reads[s];
      uint64_t known = std::max(world.streams[block.stream].at[s], world.host.at[s]);
      if (block.recorded[s]) held.until.at[s] = world.streams[s].at[s];
      else if (last.epoch > known)
        fault("race: " + std::to_string(block.bytes) + " bytes of " + stream_name(block.stream) +
              (block.written_by.empty() ? "" : ", written last by " + block.written_by + " on " + stream_name(block.writer) + ",") +
              " are freed while " + stream_name(s) + " may still use them (no wait, no record_stream)",
              last.launch, (uint64_t)world.launches);
    }
    complete_touching((char*)pointer, block.bytes);
    if (!world.host.covers(held.until)) {
      device.holding.push_back(held);
      device.held += held.bytes;
    }
    device.live -= block.rounded;
    device.requested -= block.bytes;
    std::memset(pointer, POISON, block.rounded);
    world.blocks.erase(it);
  }
  std::free(pointer);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int index = current_device;
    c10::Device where(CUDA, (c10::DeviceIndex)index);
    if (!bytes) return {nullptr, nullptr, &free_block, where};
    Lock lock;
    auto& device = world.devices[index];
    int64_t rounded = (bytes + ROUND - 1) / ROUND * ROUND;
    let_go(device);
    if (device.live + device.held + rounded > device.cap) {  // the real one waits for its events
      synchronize_device(index);
      let_go(device);
    }
    int64_t number = world.allocations++;
    bool fails = number >= world.fail_from && number < world.fail_until;
    if (fails || device.live + rounded > device.cap) {
      world.failures++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes / 1048576.,
                       " MiB. GPU ", index, " has a total capacity of ", device.cap / 1048576., " MiB of which ",
                       (device.cap - device.live) / 1048576., " MiB is free. (stand-in)");
    }
    void* pointer = nullptr;
    TORCH_CHECK(!posix_memalign(&pointer, ROUND, rounded), "no memory of the host is left for the stand-in");
    std::memset(pointer, POISON, rounded);
    auto& block = world.blocks[(char*)pointer];
    block.bytes = bytes;
    block.rounded = rounded;
    block.device = index;
    block.stream = stream_now(index);
    device.live += rounded;
    device.requested += bytes;
    device.peak = std::max(device.peak, device.live);
    device.active_peak = std::max(device.active_peak, device.live + device.held);
    return {pointer, pointer, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    if (auto block = block_of(data.get())) block->recorded[stream_index(stream.device_index(), (int)stream.id())] = true;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Lock lock;
    auto& device = world.devices[index];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = device.live;
    stats.allocated_bytes[0].peak = device.peak;
    stats.active_bytes[0].current = stats.reserved_bytes[0].current = device.live + device.held;
    stats.active_bytes[0].peak = stats.reserved_bytes[0].peak = device.active_peak;
    stats.requested_bytes[0].current = device.requested;
    stats.num_ooms = world.failures;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Lock lock;
    auto& device = world.devices[index];
    let_go(device);
    device.peak = device.live;
    device.active_peak = device.live + device.held;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Lock lock;
    auto& device = world.devices[index];
    return {size_t(device.cap - device.live - device.held), size_t(device.cap)};
  }
};
inline DeviceMemory device_memory;

// The real allocator of pinned memory waits for copies that it has seen; so does this one.
inline void free_pinned(void* pointer) {
  if (!pointer) return;
  {
    Lock lock;
    auto it = world.blocks.find((char*)pointer);
    if (it == world.blocks.end()) return;
    complete_touching((char*)pointer, it->second.bytes);
    world.pinned -= it->second.bytes;
    std::memset(pointer, POISON, it->second.bytes);
    world.blocks.erase(it);
  }
  std::free(pointer);
}
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device where(c10::kCPU);
    if (!bytes) return {nullptr, nullptr, &free_pinned, where};
    Lock lock;
    void* pointer = nullptr;
    TORCH_CHECK(!posix_memalign(&pointer, ROUND, bytes), "no memory of the host is left for the stand-in");
    std::memset(pointer, POISON, bytes);
    auto& block = world.blocks[(char*)pointer];
    block.bytes = block.rounded = bytes;
    block.pinned = true;
    world.pinned += bytes;
    return {pointer, pointer, &free_pinned, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
inline PinnedMemory pinned_memory;
inline bool is_pinned(const void* pointer) {
  Lock lock;
  auto block = block_of(pointer);
  return block && block->pinned;
}
}  // namespace stand_in
