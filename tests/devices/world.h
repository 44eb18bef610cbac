// State of the stand-in: blocks of memory, streams, launches, and who has waited for whom.
//
// Every launch (a kernel or a copy) takes the next number of its stream. A clock holds, for each
// stream, the last number that is known to have ended. A stream joins the clock of an event that it
// waits for, and the host joins those of a stream that it synchronises with (vector clocks: Fidge
// 1988, Mattern 1989). A launch that touches a block whose last write, or read, is not behind its
// stream's clock is a race, however quickly the real device would have been done.
#pragma once
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace stand_in {
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int DEVICES = 4, STREAMS = 32, ALL = DEVICES * STREAMS;
constexpr size_t ROUND = 512;  // bytes of the caching allocator's smallest block
constexpr uint64_t EVERYTHING = UINT64_MAX;
constexpr int POISON = 0xff;  // a NaN in every floating-point format

struct Clock {
  std::array<uint64_t, ALL> at{};
  void join(const Clock& other) {
    for (int i = 0; i < ALL; i++) at[i] = std::max(at[i], other.at[i]);
  }
  bool covers(const Clock& other) const {
    for (int i = 0; i < ALL; i++) if (other.at[i] > at[i]) return false;
    return true;
  }
};
struct Access { uint64_t epoch = 0, launch = 0; };
struct Block {
  size_t bytes = 0, rounded = 0;
  int device = 0, stream = 0;  // `stream` counts over all devices
  bool pinned = false;
  int writer = -1;
  Access write;
  std::string written_by;
  std::array<Access, ALL> reads{};
  std::array<bool, ALL> recorded{};
};
struct Copy { uint64_t epoch; char* to; char* from; size_t bytes; };  // not done yet
struct Held { int64_t bytes; Clock until; };  // freed, while a recorded stream may still use it
struct Device {
  int64_t live = 0, peak = 0, held = 0, active_peak = 0, requested = 0, cap = int64_t(8) << 30;
  int streams = 1;
  std::vector<Held> holding;
};
struct Fault { std::string text; uint64_t first, second; };  // launches of both sides

struct World {
  std::recursive_mutex mutex;
  std::array<Clock, ALL> streams;
  Clock host;
  std::array<Device, DEVICES> devices;
  int count = 1;
  std::map<char*, Block> blocks;  // by address
  std::array<std::deque<Copy>, ALL> copies;
  std::vector<Fault> faults;
  std::map<std::string, int64_t> kernels;
  int64_t pinned = 0, launches = 0, deferred = 0, forced = 0, failures = 0, allocations = 0;
  int64_t fail_from = -1, fail_until = -1;  // allocations, counted from the call that set them
  int64_t interrupt_at = -1;                // launches, likewise
  bool late = true;
};
inline World world;
inline thread_local int current_device = 0;
inline thread_local std::array<int, DEVICES> current_stream{};  // ids, by device
inline void (*noted)(uint64_t) = nullptr;  // told of each launch
inline void (*found)(const char*, uint64_t, uint64_t) = nullptr;  // told of each fault

struct Lock {
  std::lock_guard<std::recursive_mutex> guard{world.mutex};
};
inline int stream_index(int device, int id) { return device * STREAMS + id % STREAMS; }
inline int stream_now(int device) { return stream_index(device, current_stream[device]); }
inline std::string stream_name(int stream) {
  return "stream " + std::to_string(stream % STREAMS) + " of cuda:" + std::to_string(stream / STREAMS);
}

inline Block* block_of(const void* pointer) {
  auto p = (char*)pointer;
  auto it = world.blocks.upper_bound(p);
  if (it == world.blocks.begin()) return nullptr;
  --it;
  return p < it->first + std::max<size_t>(it->second.bytes, 1) ? &it->second : nullptr;
}

// Copies between pinned memory and the device happen as late as the program allows.
inline void complete(int stream, uint64_t epoch = EVERYTHING) {
  auto& queue = world.copies[stream];
  while (!queue.empty() && queue.front().epoch <= epoch) {
    auto copy = queue.front();
    queue.pop_front();
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
}
inline void complete_touching(const char* p, size_t n) {
  auto within = [&](const char* q) { return q >= p && q < p + n; };
  for (int s = 0; s < ALL; s++) {
    uint64_t last = 0;
    for (auto& copy : world.copies[s]) if (within(copy.to) || within(copy.from)) last = copy.epoch;
    if (last) { world.forced++; complete(s, last); }
  }
}

inline std::atomic<bool> pending{false};
inline void fault(const std::string& text, uint64_t first, uint64_t second) {
  if (world.faults.size() >= 200) return;
  world.faults.push_back({text, first, second});
  pending = true;
}
// Python is called without the lock: whoever waits for the lock may hold the interpreter.
inline void tell_faults() {
  if (!found || !pending.exchange(false)) return;
  std::vector<Fault> news;
  {
    Lock lock;
    news.swap(world.faults);
  }
  for (auto& one : news) found(one.text.c_str(), one.first, one.second);
}

struct Launch { int stream; uint64_t epoch, number; };
inline Launch launch(int stream, const std::string& kernel) {
  tell_faults();
  uint64_t number;
  {
    Lock lock;
    number = (uint64_t)++world.launches;
  }
  if (noted) noted(number);
  Lock lock;
  world.kernels[kernel]++;
  world.streams[stream].join(world.host);
  if (world.interrupt_at >= 0 && world.interrupt_at-- == 0) kill(getpid(), SIGINT);
  return {stream, ++world.streams[stream].at[stream], number};
}
inline void touch(const Launch& by, const void* pointer, bool writes, const std::string& kernel) {
  auto block = block_of(pointer);
  if (!block) return;
  auto& clock = world.streams[by.stream];
  std::string what = std::to_string(block->bytes) + " bytes" + (block->pinned ? " of pinned memory" : "");
  if (block->writer >= 0 && block->write.epoch > clock.at[block->writer])
    fault("race: " + kernel + " on " + stream_name(by.stream) + (writes ? " writes " : " reads ") + what +
          " that " + block->written_by + " on " + stream_name(block->writer) +
          " has written, without waiting for it", block->write.launch, by.number);
  if (!writes) { block->reads[by.stream] = {by.epoch, by.number}; return; }
  for (int s = 0; s < ALL; s++)
    if (block->reads[s].epoch > clock.at[s]) {
      fault("race: " + kernel + " on " + stream_name(by.stream) + " writes " + what + " that " +
            stream_name(s) + " may still read", block->reads[s].launch, by.number);
      break;
    }
  block->writer = by.stream;
  block->write = {by.epoch, by.number};
  block->written_by = kernel;
}
inline void synchronize_stream(int stream) {
  Lock lock;
  complete(stream);
  world.streams[stream].join(world.host);
  world.host.join(world.streams[stream]);
}
inline void synchronize_device(int device) {
  Lock lock;
  for (int s = device * STREAMS; s < (device + 1) * STREAMS; s++) synchronize_stream(s);
}
}  // namespace stand_in
