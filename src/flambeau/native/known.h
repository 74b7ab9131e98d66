// What the host knows about a device tensor: that it copied integers there, and their smallest and largest value.
//
// If the host knows that an index is out of range, the error is raised at once. This is only a hint: a write to the
// memory through another tensor is not noticed.

#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace flambeau {

struct Known final : c10::BackendMeta {
  int64_t least, most;  // the smallest and largest value
  uint32_t version;     // the tensor's version at that time

  Known(int64_t lo, int64_t hi, uint32_t at) : least(lo), most(hi), version(at) {}
};

}  // namespace flambeau

namespace {

void know(c10::TensorImpl& t, int64_t least, int64_t most) {
  if (t.is_inference()) return;  // inference tensors have no version counter, so writes would not be noticed
  t.set_backend_meta(c10::make_intrusive<flambeau::Known>(least, most, t.version_counter().current_version()));
}

const flambeau::Known* known(c10::TensorImpl& t) {
  auto* found = static_cast<const flambeau::Known*>(t.get_backend_meta());
  bool holds = found != nullptr && !t.is_inference() && found->version == t.version_counter().current_version();
  return holds ? found : nullptr;
}

}  // namespace
