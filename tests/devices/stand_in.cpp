// A CUDA device made of host memory: real tensors on device "cuda", with a torch built without CUDA.
//
// Read world.h first (races), then memory.h, streams.h, kernels.h, cudnn.h; here is what torch calls.
#include <ATen/detail/CUDAHooksInterface.h>

#include "cudnn.h"

namespace stand_in {
// The kernel of scaled_dot_product_attention: 0 is the plain one.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const Maybe&, double, bool, std::optional<double>, bool) { return 0; }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("equal", equal);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("cudnn_convolution", cudnn_convolution);
  m.impl("cudnn_convolution_transpose", cudnn_convolution_transpose);
  m.impl("_conv_depthwise2d", depthwise);
  m.impl("conv_depthwise3d", depthwise);
  m.impl("cudnn_batch_norm", cudnn_batch_norm);
  m.impl("cudnn_batch_norm_backward", cudnn_batch_norm_backward);
  m.impl("_cudnn_rnn", cudnn_rnn);
  m.impl("_cudnn_rnn_backward", cudnn_rnn_backward);
  m.impl("_cudnn_rnn_flatten_weight", flatten_weights);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_use_miopen_ctc_loss", [](const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, int64_t) { return false; });
  m.impl("_use_miopen_ctc_loss.Tensor", [](const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; });
  m.impl("_use_cudnn_ctc_loss", [](const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, int64_t) { return false; });
  m.impl("_use_cudnn_ctc_loss.Tensor", [](const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; });
  // These have a kernel for all devices, made of other kernels; the device's is to be one launch.
  for (auto name : {"convolution_backward", "native_group_norm", "native_layer_norm", "native_group_norm_backward", "native_layer_norm_backward",
                    "native_batch_norm", "native_batch_norm_backward", "_foreach_norm.Scalar", "_amp_foreach_non_finite_check_and_unscale_",
                    "_slow_conv2d_forward", "_slow_conv2d_backward.output_mask", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY(stand_in, m) {
  m.def("resize_(Storage storage, int bytes) -> ()", [](c10::Storage storage, int64_t n) { resize_storage(storage.unsafeGetStorageImpl(), n); });
  m.def("on_host(Tensor t) -> Tensor", [](const Tensor& t) {  // its memory, as a tensor of the host; the device has finished
    if (t.is_cuda()) synchronize_device(t.device().index());
    return on_host(t);
  });
  m.def("used(Tensor t, bool writes) -> ()", [](const Tensor& t, bool writes) {  // a launch that somebody else has done
    auto by = launch(stream_now(t.device().index()), "collective");
    Lock lock;
    touch(by, t.storage().data(), writes, "collective");
  });
}
}  // namespace stand_in

namespace at {
bool hand_default = false;
struct Hooks final : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  static DeviceIndex index(DeviceIndex given) { return given < 0 ? (DeviceIndex)stand_in::current_device : given; }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex i) const override { return stand_in::generators()[index(i)]; }
  Generator getNewGenerator(DeviceIndex i) const override {
    return hand_default ? getDefaultGenerator(i) : make_generator<stand_in::Generator>(index(i));
  }
  Device getDeviceFromPtr(void* pointer) const override {
    stand_in::Lock lock;
    auto block = stand_in::block_of(pointer);
    return {stand_in::CUDA, (DeviceIndex)(block ? block->device : 0)};
  }
  bool isPinnedPtr(const void* pointer) const override { return stand_in::is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &stand_in::pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &stand_in::device_memory; }
  DeviceIndex current_device() const override { return index(-1); }
  DeviceIndex getCurrentDevice() const override { return index(-1); }
  DeviceIndex deviceCount() const override { return (DeviceIndex)stand_in::device_count; }
  int getNumGPUs() const override { return stand_in::device_count; }
  void setCurrentDevice(DeviceIndex i) const override { stand_in::current_device = i; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    auto before = index(-1);
    if (i >= 0) stand_in::current_device = i;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  void deviceSynchronize(DeviceIndex i) const override { stand_in::synchronize_device(index(i)); }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91002; }
  long versionRuntimeCuDNN() const override { return 91002; }
  long versionCUDART() const override { return 12080; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  std::string showConfig() const override { return "stand-in"; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at
namespace stand_in {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct Registered {
  Registered() { c10::SetAllocator(CUDA, &device_memory, 200); }
} registered;
}  // namespace stand_in

// What stand_in.py calls.
using namespace stand_in;
extern "C" {
void standin_statistics(int device, int64_t* out) {
  Lock lock;
  auto& d = world.devices[device];
  let_go(d);
  int64_t values[] = {d.live, d.peak, d.held, d.active_peak, d.requested, d.cap, world.pinned, world.launches, world.deferred,
                      world.forced, world.failures, world.allocations, (int64_t)workspaces.size()};
  std::memcpy(out, values, sizeof values);
}
void standin_reset_peak(int device) { device_memory.resetPeakStats((c10::DeviceIndex)device); }
void standin_set_cap(int device, int64_t bytes) { Lock lock; world.devices[device].cap = bytes; }
void standin_set_late(int on) { Lock lock; world.late = on; }
void standin_set_devices(int n) { device_count = n; }
void standin_set_workspace(int64_t bytes) { Lock lock; workspace_bytes = bytes; }
void standin_clear_workspaces() { Lock lock; workspaces.clear(); }
void standin_fail(int64_t first, int64_t count) {
  Lock lock;
  world.fail_from = first < 0 ? -1 : world.allocations + first;
  world.fail_until = first < 0 ? -1 : world.fail_from + count;
}
void standin_interrupt(int64_t after) { Lock lock; world.interrupt_at = after; }
void standin_tell(void (*note)(uint64_t), void (*tell)(const char*, uint64_t, uint64_t)) { noted = note; found = tell; pending = true; }
void standin_tell_faults() { pending = true; tell_faults(); }
int standin_stream(int device) { return current_stream[device]; }
void standin_set_stream(int device, int stream) { current_stream[device] = stream; }
int standin_device() { return current_device; }
void standin_set_device(int device) { current_device = device; }
void standin_synchronize(int device) { synchronize_device(device); }
void standin_hand_default(int on) { at::hand_default = on; }
const char* standin_kernels() {
  static std::string text;
  Lock lock;
  std::ostringstream lines;
  for (auto& [name, count] : world.kernels) lines << name << "\t" << count << "\n";
  return (text = lines.str()).c_str();
}
void standin_clear_kernels() { Lock lock; world.kernels.clear(); }
}
