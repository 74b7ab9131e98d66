// The common part of all gates: keys of calls, arguments as Python objects, running a program from Python, errors, and
// registration with the dispatcher.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/List.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// From libtorch_python; its own headers take long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
PyObject* THPGenerator_Wrap(const at::Generator& generator);

struct Peek;
// Gives access to an operator's current kernel: the dispatcher lets only this class read it.
template <>
class c10::TypedOperatorHandle<Peek> {
 public:
  static const KernelFunction& kernel(const OperatorHandle& op, DispatchKey key) {
    return op.operatorDef_->op.lookup(DispatchKeySet(key));
  }
};

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Words = c10::SmallVector<int64_t, 64>;
using Tensors = c10::SmallVector<Tensor, 4>;

// ---------------------------------------------------------------------------------------------- keys of calls

int64_t bits(double x) {
  int64_t out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

size_t hash(const Words& words) {
  uint64_t h = 0xcbf29ce484222325u;
  for (int64_t word : words) h = (h ^ uint64_t(word)) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
  return size_t(h);
}

// The dispatch keys of a backend's ordinary tensors: not sparse, quantized, conjugate, wrapped or named.
c10::DispatchKeySet usual_keys(c10::DispatchKey key) {
  auto backend = c10::toBackendComponent(key);
  return c10::DispatchKeySet(key) | c10::getAutocastRelatedKeySetFromBackend(backend) |
         c10::getAutogradRelatedKeySetFromBackend(backend) | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
}

// The value of a CPU tensor with one element.
at::Scalar value_of(const Tensor& t) {
  const void* data = t.const_data_ptr();
  switch (t.scalar_type()) {  // the dtypes of Python's numbers; `item` takes as long as the rest of a gate
    case at::kDouble: return *static_cast<const double*>(data);
    case at::kLong: return *static_cast<const int64_t*>(data);
    case at::kBool: return *static_cast<const bool*>(data);
    default: return t.item();
  }
}

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct Dropped {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Dropped>;

// Whether Python's error is not an Exception, but an interrupt or an exit, which must reach the caller.
bool ends() { return PyErr_Occurred() != nullptr && !PyErr_ExceptionMatches(PyExc_Exception); }

// Rethrows Python's error as a C++ exception that PyTorch turns back into a Python error.
[[noreturn]] void pass_on() {
  python_error error;
  error.persist();
  throw error;
}

// The settings that programs depend on, as a number: 0 for those of the environment. `settings_changed` is set once a
// block has changed any; from then on, `settings_here` is called for the number.
const int64_t* settings_changed = nullptr;
PyObject* settings_here = nullptr;

int64_t settings() {
  if (settings_changed == nullptr || *settings_changed == 0) return 0;
  Gil gil;
  Owned number(PyObject_CallNoArgs(settings_here));
  if (number == nullptr) pass_on();
  return PyLong_AsLongLong(number.get());
}

// watch(address of a word, () -> number)
PyObject* watch(PyObject*, PyObject* args) {
  unsigned long long address;
  PyObject* here;
  if (!PyArg_ParseTuple(args, "KO", &address, &here)) return nullptr;
  Py_XSETREF(settings_here, Py_NewRef(here));
  settings_changed = reinterpret_cast<const int64_t*>(address);
  Py_RETURN_NONE;
}

// A call: its tensors, and its key as words. Calls with equal keys are served by the same kernel.
struct Call {
  c10::DispatchKeySet usual;
  bool scalars;       // scalar tensors on the CPU count as numbers
  bool plain = true;  // false if only the original kernel can handle the arguments
  c10::DeviceIndex device = -1;
  Words words, values;  // values: numbers that may change from call to call
  c10::SmallVector<Tensor, 8> tensors;
  c10::SmallVector<bool, 8> written;  // for each tensor
  // For each tensor, the first one that is the same, if one of the two is written. It is part of the key, because it is
  // all that a program knows about shared memory.
  c10::SmallVector<int64_t, 8> same;
  bool shares = false;  // a written tensor is also another argument
  at::Generator generator;

  Call(c10::DispatchKeySet keys, bool by_value) : usual(keys), scalars(by_value) {
    word(int64_t(c10::typeMetaToScalarType(c10::get_default_dtype())));  // the dtype of results of integers
    word(settings());
  }

  void word(int64_t x) { words.push_back(x); }

  void look(const IValue& x, bool number, bool write) {
    if (x.isTensor()) return look(x.toTensor(), write);
    if (x.isTensorList()) return each(x.toTensorList(), [&](const Tensor& t) { look(t, write); });
    if (x.isOptionalTensorList())
      return each(x.toOptionalTensorList(), [&](const std::optional<Tensor>& t) { look(t.value_or(Tensor()), write); });
    word(x.isInt() + 2 * x.isDouble() + 3 * x.isBool() + 4 * x.isNone());  // 1 and 1.0 give different results
    if (x.isNone()) return;
    Words& place = number ? values : words;
    if (x.isInt()) return place.push_back(x.toInt());
    if (x.isDouble()) return place.push_back(bits(x.toDouble()));
    if (x.isBool()) return word(x.toBool());
    if (x.isString()) return word(int64_t(std::hash<std::string>()(x.toStringRef())));
    if (x.isIntList()) return each(x.toIntList(), [&](int64_t n) { word(n); });
    if (x.isBoolList()) return each(x.toBoolList(), [&](bool n) { word(n); });
    if (x.isDoubleList()) return each(x.toDoubleList(), [&](double n) { word(bits(n)); });
    if (x.isGenerator()) generator = x.toGenerator();
    else plain = false;  // a symbol, a complex number, a device
  }

  bool writes() const { return std::find(written.begin(), written.end(), true) != written.end(); }

  // Called after all arguments were seen. If a written tensor partly overlaps with another, the call is the original's.
  void share() {
    for (size_t i = 0; i < tensors.size(); ++i) same.push_back(int64_t(i));
    if (!writes()) return;
    c10::SmallVector<std::pair<uint64_t, uint64_t>, 8> spans;
    for (const Tensor& t : tensors) spans.push_back(span(t));
    for (size_t j = 1; j < tensors.size() && plain; ++j) {
      for (size_t i = 0; i < j && plain; ++i) {
        if (!(written[i] || written[j]) || spans[i].first >= spans[j].second || spans[j].first >= spans[i].second)
          continue;
        const Tensor &a = tensors[i], &b = tensors[j];
        plain = spans[i].first == spans[j].first && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
                a.strides() == b.strides();
        same[j] = std::min(same[j], same[i]);
        shares = true;
        word(-int64_t(j << 16 | i) - 16);
      }
    }
  }

 private:
  // Its memory, from the first byte to one past the last, as addresses, because different storages may share memory.
  static std::pair<uint64_t, uint64_t> span(const Tensor& t) {
    if (t.numel() == 0) return {0, 0};
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    uint64_t start = reinterpret_cast<uint64_t>(t.storage().data()) + uint64_t(t.storage_offset()) * t.itemsize();
    return {start, start + uint64_t(last + 1) * t.itemsize()};
  }

  template <class T, class Fn>
  void each(const c10::List<T>& items, Fn&& one) {
    word(int64_t(items.size()));
    for (size_t i = 0; i < items.size(); ++i) one(items.get(i));
  }

  void look(const Tensor& t, bool write) {
    if (!t.defined()) return word(-1);
    if (scalars && t.device().is_cpu() && t.dim() == 0 && !write) return scalar(t);
    auto* impl = t.unsafeGetTensorImpl();
    if (!usual.has_all(impl->key_set()) || impl->has_symbolic_sizes_strides() || !t.has_storage() ||
        (device != -1 && device != t.device().index())) {
      plain = false;
      return;
    }
    device = t.device().index();
    word(int64_t(t.scalar_type()) | t.dim() << 8 | int64_t(device) << 32);
    for (int64_t n : t.sizes()) word(n);
    for (int64_t n : t.strides()) word(n);
    tensors.push_back(t);
    written.push_back(write);
  }

  void scalar(const Tensor& t) {
    static const c10::DispatchKeySet keys = usual_keys(c10::DispatchKey::CPU);
    auto kind = t.scalar_type();
    if (c10::isComplexType(kind) || t._is_zerotensor() || t.is_neg() || !keys.has_all(t.key_set())) {
      plain = false;
      return;
    }
    word(1000 + int64_t(kind) * 2 + t.unsafeGetTensorImpl()->is_wrapped_number());
    at::Scalar value = value_of(t);
    values.push_back(value.isFloatingPoint() ? bits(value.toDouble()) : value.toLong());
  }
};

// -------------------------------------------------------------------------------------------------- table of calls

// Calls with the same key.
struct Kind {
  Words key;
  size_t number = 0;        // in the order of first calls
  std::atomic<int> turn{};  // which kernel serves them; 0: unknown
  PyObject* run = nullptr;  // takes a list of tensors, then numbers; returns a list of results
  uint64_t lifted = 0;      // bit mask of the numbers that are arguments of the program
  std::atomic<bool> used{true};  // since entries were last removed
  std::atomic<Kind*> next{};
};

// A hash table of entries (subclasses of Kind), with look-ups that take no lock.
template <class Entry>
class Table {
 public:
  // While a Visit exists, entries are not freed.
  class Visit {
   public:
    explicit Visit(Table& table) : table_(table) { table_.visits_.fetch_add(1); }
    Visit(const Visit&) = delete;
    ~Visit() {
      if (!table_.has_dropped_.load(std::memory_order_relaxed)) {
        table_.visits_.fetch_sub(1);
        return;
      }
      // Removed entries cannot be found any more. If there is no other visit, nobody holds one, and they are freed.
      std::vector<Entry*> dropped;
      {
        std::lock_guard<std::mutex> hold(table_.lock_);
        dropped.swap(table_.dropped_);
        table_.has_dropped_.store(false);
      }
      if (table_.visits_.fetch_sub(1) == 1) {
        Gil gil;
        for (Entry* e : dropped) Py_XDECREF(e->run), delete e;
      } else {
        std::lock_guard<std::mutex> hold(table_.lock_);
        table_.dropped_.insert(table_.dropped_.end(), dropped.begin(), dropped.end());
        table_.has_dropped_.store(true);
      }
    }

   private:
    Table& table_;
  };

  // Returns the entry of a key, a new one if there is none; null if the table has `most` entries already.
  Entry* at(const Words& key, size_t most = SIZE_MAX) {
    std::atomic<Kind*>& head = heads_[hash(key) % kHeads];
    if (Entry* e = find(head, key)) return e;
    std::lock_guard<std::mutex> hold(lock_);
    if (Entry* e = find(head, key)) return e;
    if (all_.size() >= most) return nullptr;
    auto* e = new Entry;
    e->key = key;
    e->number = all_.size();
    e->next.store(head.load(std::memory_order_relaxed), std::memory_order_relaxed);
    all_.push_back(e);
    head.store(e, std::memory_order_release);
    return e;
  }

  // The same for a visitor of the table. If there are `most` entries, those that were not used lately are removed.
  Entry* visited(const Words& key, size_t most) {
    Entry* e = at(key, most);
    if (e != nullptr) {
      if (!e->used.load(std::memory_order_relaxed)) e->used.store(true, std::memory_order_relaxed);
      return e;
    }
    drop();
    return at(key);
  }

  std::vector<Entry*> all() {
    std::lock_guard<std::mutex> hold(lock_);
    return all_;
  }

 private:
  static constexpr size_t kHeads = 128;

  static Entry* find(const std::atomic<Kind*>& head, const Words& key) {
    for (Kind* e = head.load(std::memory_order_acquire); e != nullptr; e = e->next.load(std::memory_order_acquire))
      if (e->key == key) return static_cast<Entry*>(e);
    return nullptr;
  }

  // Removes at least half of the entries: those that were not used since the last time, and then the oldest.
  void drop() {
    std::lock_guard<std::mutex> hold(lock_);
    auto kept = std::stable_partition(all_.begin(), all_.end(), [](Entry* e) { return !e->used.load(); });
    auto end = std::max(kept, all_.begin() + std::ptrdiff_t(all_.size() / 2));
    for (auto at = all_.begin(); at != end; ++at) {
      std::atomic<Kind*>* link = &heads_[hash((*at)->key) % kHeads];
      while (link->load() != *at) link = &link->load()->next;
      link->store((*at)->next.load());
      dropped_.push_back(*at);
    }
    all_.erase(all_.begin(), end);
    for (Entry* e : all_) e->used.store(false);
    has_dropped_.store(true);
  }

  std::atomic<Kind*> heads_[kHeads] = {};
  std::mutex lock_;
  std::vector<Entry*> all_, dropped_;
  std::atomic<int> visits_{};
  std::atomic<bool> has_dropped_{};
};

// ------------------------------------------------------------------------------------------------------ Python

// Hides what our Python code does with tensors from the user's tensor subclasses and modes.
struct Unseen {
  at::impl::TorchFunctionDisabledState before = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  Unseen() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~Unseen() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before); }
};

struct Private : Unseen {
  at::AutoDispatchBelowADInplaceOrView below;
};

PyObject* none() { return Py_NewRef(Py_None); }

PyObject* python(const Tensor& t) { return t.defined() ? THPVariable_Wrap(t) : none(); }
PyObject* python(bool x) { return PyBool_FromLong(x); }
PyObject* python(int64_t x) { return PyLong_FromLongLong(x); }
PyObject* python(double x) { return PyFloat_FromDouble(x); }
PyObject* python(const std::optional<Tensor>& t) { return t.has_value() ? python(*t) : none(); }

template <class T>
PyObject* python(const c10::List<T>& items) {
  PyObject* made = PyList_New(Py_ssize_t(items.size()));
  for (size_t i = 0; i < items.size(); ++i) PyList_SET_ITEM(made, Py_ssize_t(i), python(items.get(i)));
  return made;
}

PyObject* python(const IValue& x, bool dtype) {
  if (x.isTensor()) return python(x.toTensor());
  if (x.isInt() && dtype) return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(at::ScalarType(x.toInt()))));
  if (x.isInt()) return python(x.toInt());
  if (x.isDouble()) return python(x.toDouble());
  if (x.isBool()) return python(x.toBool());
  if (x.isString()) return PyUnicode_FromString(x.toStringRef().c_str());
  if (x.isIntList()) return python(x.toIntList());
  if (x.isDoubleList()) return python(x.toDoubleList());
  if (x.isBoolList()) return python(x.toBoolList());
  if (x.isTensorList()) return python(x.toTensorList());
  if (x.isOptionalTensorList()) return python(x.toOptionalTensorList());
  return none();
}

struct Failure {
  std::string text;
  bool index = false, memory = false;

  [[noreturn]] void raise() const {
    TORCH_CHECK_INDEX(!index, text);
    TORCH_CHECK(false, text);
  }
};

// Converts what Python returned: a list of tensors, or null with an error.
bool answer(PyObject* returned, Tensors& out, Failure& failure) {
  Owned made(returned);
  if (made != nullptr) {
    out.reserve(size_t(PyList_GET_SIZE(made.get())));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(made.get()); ++i) {
      PyObject* item = PyList_GET_ITEM(made.get(), i);
      if (item == Py_None) {
        out.emplace_back();
        continue;
      }
      Owned address(PyObject_GetAttrString(item, "_cdata"));
      auto* impl = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get()));
      out.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
    }
    return true;
  }
  if (ends()) pass_on();
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Owned held_type(type), held(value), held_trace(trace);
  Owned text(PyObject_Str(value));
  const char* said = text == nullptr ? nullptr : PyUnicode_AsUTF8(text.get());
  failure.text = said == nullptr ? "a kernel failed" : said;
  failure.index = PyErr_GivenExceptionMatches(type, PyExc_IndexError);
  failure.memory = std::strstr(reinterpret_cast<PyTypeObject*>(type)->tp_name, "OutOfMemoryError") != nullptr;
  PyErr_Clear();
  return false;
}

// Runs a program: returns its results, or the reason of a failure. It takes the tensors, then the numbers that are
// arguments. If the call has a generator, `generators` runs it.
bool run(const Kind& kind, const Call& call, PyObject* generators, Tensors& out, Failure& failure) {
  Gil gil;
  Private guard;
  Owned held(Py_NewRef(kind.run));  // it may be replaced while it runs
  uint64_t lifted = kind.lifted;
  Py_ssize_t at = 0;
  Owned list(PyList_New(Py_ssize_t(call.tensors.size()) + __builtin_popcountll(lifted)));
  for (const Tensor& t : call.tensors) PyList_SET_ITEM(list.get(), at++, THPVariable_Wrap(t));
  for (size_t i = 0; lifted >> i; ++i)
    if (lifted >> i & 1) PyList_SET_ITEM(list.get(), at++, python(call.values[i]));
  if (!call.generator.defined()) return answer(PyObject_CallOneArg(held.get(), list.get()), out, failure);
  Owned generator(THPGenerator_Wrap(call.generator));
  return answer(PyObject_CallFunctionObjArgs(generators, held.get(), list.get(), generator.get(), nullptr), out,
                failure);
}

// ------------------------------------------------------------------------------------------- the dispatch table

// Drops warnings: the dispatcher warns about a second kernel for a key, and a gate is one.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// A gate's position in the dispatch table, before an operator's kernel for a key.
struct Place {
  c10::OperatorHandle op;
  c10::KernelFunction original;
  std::optional<c10::RegistrationHandleRAII> registration;
  std::vector<bool> numbers, dtypes, writes;  // for each argument
  std::vector<int> returns;                   // for each result, the argument that it is, or -1
  std::vector<bool> lists;                    // for each result

  explicit Place(c10::OperatorHandle handle) : op(handle) {
    const auto& schema = op.schema();
    for (const auto& a : schema.arguments()) {
      auto type = a.real_type();
      numbers.push_back(type->kind() == c10::TypeKind::NumberType);
      dtypes.push_back(type->str().rfind("ScalarType", 0) == 0);
      writes.push_back(a.alias_info() != nullptr && a.alias_info()->isWrite());
    }
    for (const auto& r : schema.returns()) {
      int from = -1;
      for (size_t i = 0; r.alias_info() != nullptr && i < schema.arguments().size(); ++i) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info != nullptr && info->beforeSets() == r.alias_info()->beforeSets()) from = int(i);
      }
      returns.push_back(from);
      lists.push_back(r.type()->kind() == c10::TypeKind::ListType);
    }
  }

  void take(c10::DispatchKey key, c10::KernelFunction kernel) {
    original = c10::TypedOperatorHandle<Peek>::kernel(op, key);
    Silent silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    registration.emplace(c10::Dispatcher::singleton().registerImpl(op.operator_name(), key, std::move(kernel),
                                                                   std::nullopt, nullptr, "flambeau gate"));
  }

  Owned arguments(c10::ArrayRef<IValue> args, PyObject* (*shown)(const IValue&, bool)) const {
    Owned given(PyTuple_New(Py_ssize_t(args.size())));
    for (size_t i = 0; i < args.size(); ++i) PyTuple_SET_ITEM(given.get(), Py_ssize_t(i), shown(args[i], dtypes[i]));
    return given;
  }

  // Replaces the arguments on the stack by the results: new tensors, or arguments that are returned.
  void give(Stack& stack, Tensors& made) const {
    c10::SmallVector<IValue, 4> results;
    size_t next = 0;
    for (size_t i = 0; i < returns.size(); ++i) {
      TORCH_CHECK(returns[i] >= 0 || lists[i] || next < made.size(), "a kernel returned too few results");
      if (returns[i] >= 0) results.push_back(torch::jit::peek(stack, size_t(returns[i]), writes.size()));
      else if (lists[i]) results.emplace_back(c10::List<Tensor>(c10::ArrayRef<Tensor>(made).slice(next)));
      else results.emplace_back(std::move(made[next++]));
    }
    torch::jit::drop(stack, writes.size());
    for (IValue& result : results) stack.push_back(std::move(result));
  }
};

// ------------------------------------------------------------------------------------------- asking for programs

enum Turn : int { kUnknown, kOriginal, kOurs, kResize };

// (gate, arguments, which of its tensors are the same, mask of the numbers that are arguments) -> a program with the
// ranges of the indices and of the numbers that it takes, the mask of its numbers, whether it is for many shapes, and
// whether it serves; or shapes to resize to; or None; or False, if a later call should ask again
PyObject* ask_python = nullptr;
PyObject* hot_python = nullptr;  // (the same, whether to wait for it) -> a program for this shape alone, or None
PyObject* with_generator = nullptr;  // (program, its list, generator) -> what the program returns

constexpr int kPatience = 2;  // so many different numbers get programs of their own; then they become arguments
constexpr size_t kEntries = 1024;  // for each gate
// The number of calls after which a program for one shape is compiled in the background, and after which it serves.
constexpr uint32_t kBegin = 64, kServe = 128;

// The allowed values of a tensor of indices.
struct Range {
  long long tensor, least, most;
};

// An interval of numbers that a program accepts: for others, eager raises errors, or was not tried.
struct Interval {
  size_t number;
  bool real;
  double least, most;  // for real numbers
  long long low, high; // for integers

  bool has(int64_t word) const {
    if (!real) return low <= word && word <= high;
    double x;
    std::memcpy(&x, &word, sizeof x);
    return least <= x && x <= most;
  }
};

struct Entry : Kind {
  std::vector<Range> ranges;
  std::vector<Interval> numbers;             // for the numbers that are arguments of the program, several for each
  uint64_t asked = 0;                        // the mask that was asked for
  bool many = false;                         // the program is for many shapes
  bool serves = false;                       // it is faster than the original
  std::atomic<uint32_t> calls{};             // while `many` is set
  std::vector<std::vector<int64_t>> shapes;  // to which written tensors are resized
  // For calls that differ only in their numbers (the key has none):
  Words first;
  uint64_t changed = 0;  // bit mask of the numbers that have changed
  int kinds = 0;
};

// A gate that asks Python for programs.
struct Asking : Place {
  using Place::Place;
  size_t number = 0;
  PyObject* capturing = nullptr;  // whether a stream is being captured, as nothing is compiled then; null: never

  Table<Entry> entries;
  std::mutex numbers_lock;
};

bool is_capturing(const Asking& s) {
  if (s.capturing == nullptr) return false;
  Owned answer(PyObject_CallNoArgs(s.capturing));
  bool yes = answer == nullptr || PyObject_IsTrue(answer.get()) != 0;
  PyErr_Clear();
  return yes;
}

// An argument as a Python object. Numbers that PyTorch wrapped in tensors become numbers again.
PyObject* shown(const IValue& x, bool dtype) {
  if (x.isTensor() && x.toTensor().defined() && x.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
    at::Scalar value = value_of(x.toTensor());
    if (value.isBoolean()) return python(value.toBool());
    return value.isFloatingPoint() ? python(value.toDouble()) : python(value.toLong());
  }
  return python(x, dtype);
}

bool shapes_of(PyObject* list, std::vector<std::vector<int64_t>>& out) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!PyTuple_Check(item)) return false;
    auto& shape = out.emplace_back();
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(item); ++k)
      shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(item, k)));
  }
  return !PyErr_Occurred();
}

// Parses the rows of a tuple.
template <class Row, class Parse>
bool rows_of(PyObject* tuple, std::vector<Row>& out, Parse&& parse) {
  std::vector<Row> found(size_t(PyTuple_GET_SIZE(tuple)));
  for (size_t i = 0; i < found.size(); ++i)
    if (!parse(PyTuple_GET_ITEM(tuple, Py_ssize_t(i)), found[i])) return false;
  out = std::move(found);
  return true;
}

// Parses (program, ((tensor, least, most), ...), ((number, is real, least, most), ...), lifted, for many shapes, serves).
bool program_of(PyObject* said, Entry& e) {
  PyObject *run, *ranges, *numbers;
  unsigned long long lifted;
  int many, serves;
  if (!PyArg_ParseTuple(said, "OO!O!Kpp", &run, &PyTuple_Type, &ranges, &PyTuple_Type, &numbers, &lifted, &many, &serves))
    return false;
  e.lifted = lifted;
  e.many = many;
  e.serves = serves;
  bool parsed = rows_of(ranges, e.ranges, [](PyObject* row, Range& r) {
    return PyArg_ParseTuple(row, "LLL", &r.tensor, &r.least, &r.most);
  }) && rows_of(numbers, e.numbers, [](PyObject* row, Interval& n) {
    int real;
    PyObject *least, *most;
    if (!PyArg_ParseTuple(row, "npOO", &n.number, &real, &least, &most)) return 0;
    n.real = real;
    if (real) n.least = PyFloat_AsDouble(least), n.most = PyFloat_AsDouble(most);
    else n.low = PyLong_AsLongLong(least), n.high = PyLong_AsLongLong(most);
    return int(PyErr_Occurred() == nullptr);
  });
  if (parsed) e.run = Py_NewRef(run);
  return parsed;
}

// Asks Python about a call; returns null if that failed.
Owned said_by(PyObject* function, Asking& s, const Call& call, c10::ArrayRef<IValue> args, uint64_t lift,
              PyObject* last = nullptr) {
  // Compilation must not see the caller's modes and guards, as if it ran in another thread.
  c10::impl::ForceDispatchKeyGuard keys(c10::default_included_set, c10::default_excluded_set);
  Unseen unseen;
  PyObject* (*view)(const IValue&, bool) = python;
  if (call.scalars) view = shown;
  Owned given = s.arguments(args, view);
  Owned number(PyLong_FromSize_t(s.number)), which(PyLong_FromUnsignedLongLong(lift));
  Owned same(PyTuple_New(Py_ssize_t(call.same.size())));
  for (size_t i = 0; i < call.same.size(); ++i) PyTuple_SET_ITEM(same.get(), Py_ssize_t(i), python(call.same[i]));
  Silent silent;  // warnings of trials, and of torch's shape functions, are repeated by the call itself
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  Owned said(PyObject_CallFunctionObjArgs(function, number.get(), given.get(), same.get(), which.get(), last, nullptr));
  if (said == nullptr) {
    if (ends()) pass_on();  // the next call asks again
    PyErr_WriteUnraisable(function);
  }
  return said;
}

// Asks Python how to serve calls like this one from now on.
void ask(Asking& s, Entry& e, const Call& call, c10::ArrayRef<IValue> args, uint64_t lift = 0) {
  Gil gil;
  if (is_capturing(s)) return;
  e.asked = lift;
  Owned said = said_by(ask_python, s, call, args, lift);
  if (said.get() == Py_False) return;
  Turn turn = kOriginal;
  if (said != nullptr && PyList_Check(said.get())) {
    if (e.shapes.empty() && shapes_of(said.get(), e.shapes)) turn = kResize;
    PyErr_Clear();
  } else if (said != nullptr && said.get() != Py_None) {
    // Only the first program is taken: another thread may be running it.
    if (e.run != nullptr || program_of(said.get(), e)) turn = e.serves ? kOurs : kOriginal;
    else PyErr_WriteUnraisable(ask_python);
  }
  e.turn.store(turn, std::memory_order_release);
}

// Counts a call of a shape that is served by a program for many shapes.
void count(Asking& s, Entry& e, const Call& call, c10::ArrayRef<IValue> args) {
  uint32_t calls = e.calls.fetch_add(1, std::memory_order_relaxed) + 1;
  if (calls != kBegin && calls != kServe) return;
  Gil gil;
  if (is_capturing(s)) return;
  Owned said = said_by(hot_python, s, call, args, e.asked, calls == kServe ? Py_True : Py_False);
  if (said == nullptr || said.get() == Py_None) return;
  Owned before(e.run);
  e.run = said.release();
  e.lifted = e.asked;
  e.turn.store(kOurs, std::memory_order_release);
}

// The bit mask of the numbers that change from call to call; 0 as long as few calls were seen.
uint64_t changing(Asking& s, Entry& alike, const Words& values) {
  if (values.size() > 64) return 0;
  std::lock_guard<std::mutex> hold(s.numbers_lock);
  if (alike.first.empty()) alike.first = values;
  for (size_t i = 0; i < values.size(); ++i) alike.changed |= uint64_t(values[i] != alike.first[i]) << i;
  return alike.kinds < kPatience ? 0 : alike.changed;
}

// Whether a program accepts these numbers.
bool takes(const Entry& e, const Words& values) {
  for (size_t i = 0; e.lifted >> i; ++i)
    if (e.lifted >> i & 1 && std::none_of(e.numbers.begin(), e.numbers.end(), [&](const Interval& n) {
          return n.number == i && n.has(values[i]);
        })) return false;
  return true;
}

// The entry of a call. Its turn stays unknown if Python has to be asked again.
Entry* decide(Asking& s, const Call& call, c10::ArrayRef<IValue> args) {
  Entry* e = s.entries.visited(call.words, kEntries);
  Entry& alike = *e;
  if (!call.values.empty()) {
    if (uint64_t lift = changing(s, alike, call.values)) {
      Words key = call.words;
      key.append({-2, int64_t(lift)});
      for (size_t i = 0; i < call.values.size(); ++i)
        if (!(lift >> i & 1)) key.push_back(call.values[i]);
      e = s.entries.visited(key, kEntries);
      if (e->turn.load(std::memory_order_acquire) == kUnknown) ask(s, *e, call, args, lift);
      if (e->turn.load(std::memory_order_acquire) == kOurs && takes(*e, call.values)) return e;
    }
    Words key = call.words;
    key.append(call.values.begin(), call.values.end());
    key.push_back(-1);
    e = s.entries.visited(key, kEntries);
  }
  if (e->turn.load(std::memory_order_acquire) != kUnknown) return e;
  ask(s, *e, call, args);
  std::lock_guard<std::mutex> hold(s.numbers_lock);
  alike.kinds += e->turn.load(std::memory_order_acquire) != kUnknown;
  return e;
}

// start(ask, hot, with_generator or None)
PyObject* start(PyObject*, PyObject* args) {
  PyObject *ask, *hot, *generator;
  if (!PyArg_ParseTuple(args, "OOO", &ask, &hot, &generator)) return nullptr;
  Py_XSETREF(ask_python, Py_NewRef(ask));
  Py_XSETREF(hot_python, Py_NewRef(hot));
  Py_XSETREF(with_generator, Py_NewRef(generator));
  Py_RETURN_NONE;
}

// Never freed: a call may be inside a gate while another thread removes it, and tensors may outlive the interpreter.
template <class State>
std::vector<std::unique_ptr<State>>& gates() {
  static auto* all = new std::vector<std::unique_ptr<State>>;
  return *all;
}

}  // namespace

#include "guarded.h"
