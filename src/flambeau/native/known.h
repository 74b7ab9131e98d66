// What the host knows of a tensor of the device: that it copied integers there, and between which two they lie.
//
// An index out of range is an error at once where the host knows it. It is a hint and no more: a write to the memory
// through another tensor is not noticed.

#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace flambeau {

struct Known final : c10::BackendMeta {
  int64_t least, most;  // both are among the values
  uint32_t version;     // of the tensor then

  Known(int64_t lo, int64_t hi, uint32_t at) : least(lo), most(hi), version(at) {}
};

}  // namespace flambeau

namespace {

void know(c10::TensorImpl& t, int64_t least, int64_t most) {
  if (t.is_inference()) return;  // nobody counts what is written to it
  t.set_backend_meta(c10::make_intrusive<flambeau::Known>(least, most, t.version_counter().current_version()));
}

const flambeau::Known* known(c10::TensorImpl& t) {
  auto* found = static_cast<const flambeau::Known*>(t.get_backend_meta());
  bool holds = found != nullptr && !t.is_inference() && found->version == t.version_counter().current_version();
  return holds ? found : nullptr;
}

}  // namespace
