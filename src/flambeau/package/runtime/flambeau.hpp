// Packages in C++: one header over the C interface. Errors become exceptions, which do not cross that interface.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "flambeau.h"

namespace flambeau {

struct Error : std::runtime_error {
  explicit Error(const flam_error& e) : std::runtime_error(e.message), code(e.code) {}
  int code;
};

// An output, which owns its memory.
class Tensor : public flam_tensor {
 public:
  Tensor() : flam_tensor{} {}
  Tensor(Tensor&& other) noexcept : flam_tensor(other) { other.data = nullptr; }
  Tensor(const Tensor&) = delete;
  ~Tensor() { flam_free(data); }
  template <class T> T* as() const { return static_cast<T*>(data); }
};

class Module {
 public:
  explicit Module(const std::string& path, const char* target = nullptr) {
    flam_error error{};
    model_.reset(flam_load(path.c_str(), target, &error));
    if (!model_) throw Error(error);
  }

  std::vector<Tensor> execute(const std::string& method, const std::vector<flam_tensor>& inputs) const {
    const int number = flam_method(model_.get(), method.c_str());
    std::vector<flam_tensor> made(static_cast<size_t>(flam_output_count(model_.get(), number)));
    flam_error error{};
    if (flam_run(model_.get(), number, inputs.data(), int(inputs.size()), made.data(), int(made.size()), &error)) {
      throw Error(error);
    }
    std::vector<Tensor> out(made.size());
    for (size_t k = 0; k < made.size(); ++k) static_cast<flam_tensor&>(out[k]) = made[k];
    return out;
  }
  std::vector<Tensor> forward(const std::vector<flam_tensor>& inputs) const { return execute("forward", inputs); }

  void update_weights(const std::vector<const char*>& names, const std::vector<flam_tensor>& values) {
    flam_error error{};
    if (flam_update_weights(model_.get(), names.data(), values.data(), int(values.size()), &error)) throw Error(error);
  }

 private:
  struct Unload {
    void operator()(flam_model* m) const { flam_unload(m); }
  };
  std::unique_ptr<flam_model, Unload> model_;
};

}  // namespace flambeau
