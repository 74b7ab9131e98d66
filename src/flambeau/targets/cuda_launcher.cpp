// Starts Triton's machine code on an NVIDIA GPU from Python: `Launch` one kernel, `Plan` several in a row.
//
// The CUDA driver is loaded at run time, so that this compiles on machines without it. A launch calls Python only for
// new cases: the variant of machine code for its arguments, and the number of programs for its sizes, are remembered.

#include "launcher.h"

namespace {

// ---------------------------------------------------------------------------------------------------- driver

using Result = int;
using Handle = void*;

struct Driver {
  Result (*init)(unsigned);
  Result (*error_string)(Result, const char**);
  Result (*get_context)(Handle*);
  Result (*set_context)(Handle);
  Result (*get_device)(int*, int);
  Result (*retain_context)(Handle*, int);
  Result (*load_module)(Handle*, const void*);
  Result (*get_function)(Handle*, Handle, const char*);
  Result (*set_attribute)(Handle, int, int);
  Result (*host_alloc)(void**, size_t, unsigned);
  Result (*device_pointer)(unsigned long long*, void*, unsigned);
  Result (*memset)(unsigned long long, unsigned char, size_t, Handle);
  Result (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
                   void**);
  Result (*launch_early)(const struct Config*, Handle, void**, void**);
  Result (*describe)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*,
                     int, int, int, int);
} driver;

// CUlaunchConfig, with one attribute: programmatic stream serialization.
struct Attribute {
  int id, unused;
  int64_t value[8];
};
struct Config {
  unsigned grid[3], block[3], shared;
  Handle stream;
  const Attribute* attributes;
  unsigned count;
};
constexpr Attribute kEarly = {6, 0, {1}};

constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kUsualShared = 48 << 10;
constexpr unsigned kPortableMapped = 3;  // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP

// Python functions that this module calls.
PyObject* current_device = nullptr;  // () -> index
PyObject* current_stream = nullptr;  // (index) -> address
PyObject* workspace = nullptr;       // (index, stream, bytes) -> address
PyObject* flags = nullptr;           // (index, stream) -> address of words that are zero between launches

// Kernels report faults in host memory that the GPU can write. Each kernel that checks data has a slot there; if there
// are no more slots, kernels share the first. The slots are read before the next launch, without waiting.
constexpr size_t kPlaces = 1024;
int64_t* faults = nullptr;
unsigned long long faults_on_device = 0;
size_t places_given = 0;

bool check(Result result, const char* what) {
  if (result == 0) return true;
  const char* text = nullptr;
  if (driver.error_string != nullptr) driver.error_string(result, &text);
  PyErr_Format(PyExc_RuntimeError, "%s failed: %s (CUDA error %d)", what, text ? text : "unknown", result);
  return false;
}

bool primary_context(int device, Handle& context) {
  int handle = 0;
  return check(driver.get_device(&handle, device), "cuDeviceGet") &&
         check(driver.retain_context(&context, handle), "cuDevicePrimaryCtxRetain");
}

// torch makes the device current for its own calls; a thread that has made none has no context yet.
bool enter(int device) {
  Handle context = nullptr;
  if (!check(driver.get_context(&context), "cuCtxGetCurrent")) return false;
  if (context != nullptr) return true;
  return primary_context(device, context) && check(driver.set_context(context), "cuCtxSetCurrent");
}

PyObject* open_driver(PyObject*, PyObject* args) {
  const char* path;
  PyObject *device, *stream, *memory, *words;
  if (!PyArg_ParseTuple(args, "sOOOO", &path, &device, &stream, &memory, &words)) return nullptr;
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  const Symbol wanted[] = {
      {"cuInit", &driver.init},
      {"cuGetErrorString", &driver.error_string},
      {"cuCtxGetCurrent", &driver.get_context},
      {"cuCtxSetCurrent", &driver.set_context},
      {"cuDeviceGet", &driver.get_device},
      {"cuDevicePrimaryCtxRetain", &driver.retain_context},
      {"cuModuleLoadData", &driver.load_module},
      {"cuModuleGetFunction", &driver.get_function},
      {"cuFuncSetAttribute", &driver.set_attribute},
      {"cuMemHostAlloc", &driver.host_alloc},
      {"cuMemHostGetDevicePointer_v2", &driver.device_pointer},
      {"cuMemsetD8Async", &driver.memset},
      {"cuLaunchKernel", &driver.launch},
      {"cuLaunchKernelEx", &driver.launch_early},
      {"cuTensorMapEncodeTiled", &driver.describe},
  };
  if (!find_symbols(library, path, wanted)) return nullptr;
  Py_XSETREF(current_device, Py_NewRef(device));
  Py_XSETREF(current_stream, Py_NewRef(stream));
  Py_XSETREF(workspace, Py_NewRef(memory));
  Py_XSETREF(flags, Py_NewRef(words));
  if (faults != nullptr) Py_RETURN_NONE;
  Owned index(PyObject_CallNoArgs(current_device));
  if (!index) return nullptr;
  void* host = nullptr;
  if (!check(driver.init(0), "cuInit") || !enter(int(PyLong_AsLong(index.get()))) ||
      !check(driver.host_alloc(&host, kPlaces * sizeof(int64_t), kPortableMapped), "cuMemHostAlloc") ||
      !check(driver.device_pointer(&faults_on_device, host, 0), "cuMemHostGetDevicePointer")) {
    return nullptr;
  }
  std::memset(host, 0, kPlaces * sizeof(int64_t));
  faults = static_cast<int64_t*>(host);
  Py_RETURN_NONE;
}

// Loads machine code into the context of a device, and returns the address of its function.
PyObject* load(PyObject*, PyObject* args) {
  const char *code, *name;
  Py_ssize_t length;
  int shared, device;
  if (!PyArg_ParseTuple(args, "y#sii", &code, &length, &name, &shared, &device)) return nullptr;
  Handle module = nullptr, function = nullptr, before = nullptr, context = nullptr;
  // The thread that waits for a build may be on another device.
  if (!check(driver.get_context(&before), "cuCtxGetCurrent") || !primary_context(device, context) ||
      !check(driver.set_context(context), "cuCtxSetCurrent")) {
    return nullptr;
  }
  bool loaded = check(driver.load_module(&module, code), "cuModuleLoadData") &&
                check(driver.get_function(&function, module, name), "cuModuleGetFunction") &&
                (shared <= kUsualShared ||
                 check(driver.set_attribute(function, kMaxDynamicShared, shared), "cuFuncSetAttribute"));
  if (before != nullptr) driver.set_context(before);
  return loaded ? PyLong_FromVoidPtr(function) : nullptr;
}

// ---------------------------------------------------------------------------------------------------- Launch

constexpr size_t kRank = 5;  // the highest rank of a tensor whose tiles the copy engine moves

// The description of a tensor map by the compiler.
struct Block {
  size_t number;  // among those of the part
  int dtype, swizzle;
  std::vector<uint32_t> sides;  // innermost first
};

// The part of a tensor map's description that depends on a call's sizes.
struct Tensor {
  int64_t pointer, start;  // index of the kernel's pointer, or -1 for the workspace; offset in bytes
  size_t rank;
  uint64_t shape[kRank], steps[kRank];  // innermost first; steps in bytes, the first of which is an element
};

// A tensor map with the arguments that follow it: shape and steps, outermost first.
struct alignas(64) Map {
  char words[128];
  int32_t shape[kRank];
  int64_t steps[kRank];
};

struct Part {
  Handle function;
  unsigned threads, shared;
  size_t scratch;  // bytes for each program
  bool waits;      // the kernel itself waits for earlier ones
  std::vector<Block> blocks;
};

// Facts that machine code may rely on; see Facts in triton_compile.py.
struct Facts {
  int64_t device;
  bool aligned;
  uint64_t sizes;
  bool wide;

  bool operator==(const Facts& o) const {
    return device == o.device && aligned == o.aligned && sizes == o.sizes && wide == o.wide;
  }
};

struct Variant {
  Facts facts;
  std::vector<Part> parts;
};

struct Grid {
  unsigned x, y, z;
};

// For these sizes: the number of programs of each part, the bytes of the workspace, and whether indices need 64 bits.
struct Shape {
  std::vector<int64_t> sizes;
  std::vector<Grid> grids;
  std::vector<std::vector<Tensor>> tensors;  // for each part
  size_t work;
  bool wide;
};

struct Kernel {
  std::vector<std::unique_ptr<Variant>> variants;  // never changed
  Shapes<Shape> shapes;
  size_t place = 0;  // its slot for faults
  uint64_t words = 0;  // bit mask of the sizes that no shape depends on
  bool cleared = true;  // its workspace has to be zero at the start
  bool signals = false;  // its programs tell each other about finished work by flags
};

struct Launch {
  LaunchHead head;
  PyObject* shape;  // (*sizes) -> (workspace, wide, x, y, z of the first part, ...)
  PyObject* start;  // (device, aligned, sizes, wide): begin to compile
  PyObject* make;   // (device, aligned, sizes, wide) -> ((function, warps, shared, scratch, waits, ...), ...)
  PyObject* maps;   // None, or (*sizes) -> (tensor maps of the first part, of each pointer, start, rank, shape, ...)
  Kernel* kernel;
};

// One launch of a call: its arguments, and the facts about them.
struct Work : Given<Launch> {
  Facts facts;
  const Variant* variant = nullptr;
  std::shared_ptr<const Shape> shape;
  size_t scratch = 0;
  int64_t flags = 0;
};

Facts facts_of(const Work& work, int64_t device) {
  uint64_t bits = 0, sizes = 0;
  // The copy engine does not accept empty tensors, which may have no address.
  const bool described = work.launch->maps != Py_None;
  for (size_t i = 0; i < work.pointer_count; ++i) {
    bits |= described && work.p[i] == 0 ? 1 : static_cast<uint64_t>(work.p[i]);
  }
  for (size_t i = 0; i < work.size_count && i < 63; ++i) sizes |= uint64_t(work.n[i] % 16 == 0) << i;
  return {device, bits % 16 == 0, sizes & ~work.launch->kernel->words, work.shape->wide};
}

const Variant* known(const Kernel& kernel, const Facts& facts) {
  for (const auto& variant : kernel.variants) {
    if (variant->facts == facts) return variant.get();
  }
  return nullptr;
}

Owned ask(PyObject* function, const Facts& facts) {
  return Owned(PyObject_CallFunction(function, "LOKO", (long long)facts.device, facts.aligned ? Py_True : Py_False,
                                     (unsigned long long)facts.sizes, facts.wide ? Py_True : Py_False));
}

const Variant* made(Launch* launch, const Facts& facts) {
  Owned given = ask(launch->make, facts);
  if (!given) return nullptr;
  Owned items(PySequence_Tuple(given.get()));
  if (!items) return nullptr;
  if (const Variant* other = known(*launch->kernel, facts)) return other;  // another thread built it meanwhile
  auto variant = std::make_unique<Variant>();
  variant->facts = facts;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    Words words;
    if (!words.read(PyTuple_GET_ITEM(items.get(), i))) return nullptr;
    if (words.count < 5) {
      return PyErr_SetString(PyExc_ValueError, "a part is (function, warps, shared, scratch, waits, maps)"), nullptr;
    }
    variant->parts.push_back({reinterpret_cast<Handle>(words.data[0]), unsigned(32 * words.data[1]),
                              unsigned(words.data[2]), size_t(words.data[3]), words.data[4] != 0, {}});
    for (Py_ssize_t at = 5; at < words.count; at += 1 + words.data[at]) {
      const int64_t* block = words.data + at + 1;
      if (words.data[at] < 4 || words.data[at] > int64_t(3 + kRank) || at + words.data[at] >= words.count) {
        return PyErr_SetString(PyExc_ValueError, "a tensor map is (number, dtype, swizzle, sides)"), nullptr;
      }
      variant->parts.back().blocks.push_back({size_t(block[0]), int(block[1]), int(block[2]), {}});
      for (int64_t k = words.data[at] - 1; k >= 3; --k) {
        variant->parts.back().blocks.back().sides.push_back(uint32_t(block[k]));
      }
    }
  }
  launch->kernel->variants.push_back(std::move(variant));
  return launch->kernel->variants.back().get();
}

// The tensors of each part, for these sizes.
bool tensors(const Work& work, Shape& shape) {
  Words words;
  if (!work.launch->kernel->shapes.ask(work.launch->maps, work, words)) return false;
  Py_ssize_t at = 0;
  for (size_t part = 0; part < shape.grids.size() && at < words.count; ++part) {
    shape.tensors.emplace_back();
    for (int64_t left = words.data[at++]; left > 0; --left) {
      if (at + 3 > words.count || words.data[at + 2] < 1 || words.data[at + 2] > int64_t(kRank) ||
          at + 3 + 2 * words.data[at + 2] > words.count) {
        return PyErr_SetString(PyExc_ValueError, "a tensor is (pointer, start, rank, shape, steps)"), false;
      }
      Tensor tensor = {words.data[at], words.data[at + 1], size_t(words.data[at + 2]), {}, {}};
      for (size_t k = 0; k < tensor.rank; ++k) {
        tensor.shape[k] = uint64_t(words.data[at + 2 + tensor.rank - k]);
        tensor.steps[k] = uint64_t(words.data[at + 2 + 2 * tensor.rank - k]);
      }
      shape.tensors.back().push_back(tensor);
      at += 3 + 2 * Py_ssize_t(tensor.rank);
    }
  }
  if (shape.tensors.size() == shape.grids.size() && at == words.count) return true;
  return PyErr_SetString(PyExc_ValueError, "tensor maps are given for each part"), false;
}

std::shared_ptr<const Shape> shaped(const Work& work) {
  Kernel& kernel = *work.launch->kernel;
  if (auto known = kernel.shapes.find(work, kernel.words)) return known;
  Words words;
  if (!kernel.shapes.ask(work.launch->shape, work, words)) return nullptr;
  if (words.count < 2 || words.count % 3 != 2) {
    return PyErr_SetString(PyExc_ValueError, "a shape is (bytes, wide, x, y, z of each part)"), nullptr;
  }
  auto shape = std::make_shared<Shape>();
  shape->work = (size_t(words.data[0]) + 255) / 256 * 256;
  shape->wide = words.data[1] != 0;
  for (Py_ssize_t i = 2; i < words.count; i += 3) {
    shape->grids.push_back({unsigned(words.data[i]), unsigned(words.data[i + 1]), unsigned(words.data[i + 2])});
  }
  return work.launch->maps == Py_None || tensors(work, *shape) ? kernel.shapes.keep(work, std::move(shape)) : nullptr;
}

// Bytes that the compiler needs in addition to the workspace. The parts run one after the other, and share them.
size_t scratch_of(const Work& work) {
  size_t most = 0;
  for (size_t i = 0; i < work.shape->grids.size(); ++i) {
    const Grid& g = work.shape->grids[i];
    most = std::max(most, work.variant->parts[i].scratch * g.x * g.y * g.z);
  }
  return most;
}

// The tensor maps of a part, with pointers to them and to the arguments that follow each.
Result describe(const Work& work, size_t number, int64_t memory, std::vector<Map>& maps,
                std::vector<void*>& arguments) {
  const Part& part = work.variant->parts[number];
  maps.resize(part.blocks.size());
  for (size_t i = 0; i < part.blocks.size(); ++i) {
    const Block& block = part.blocks[i];
    const Tensor& tensor = work.shape->tensors[number][block.number];
    Map& map = maps[i];
    const uint32_t next[kRank] = {1, 1, 1, 1, 1};
    int64_t address = (tensor.pointer < 0 ? memory : work.p[tensor.pointer]) + tensor.start;
    // Not interleaved, not filled with NaN; each read loads 128 bytes into the second-level cache.
    Result result = driver.describe(map.words, block.dtype, unsigned(tensor.rank), reinterpret_cast<void*>(address),
                                    tensor.shape, tensor.steps + 1, block.sides.data(), next, 0, block.swizzle, 2, 0);
    if (result) return result;
    arguments.push_back(map.words);
    for (size_t k = 0; k < tensor.rank; ++k) {
      map.shape[k] = int32_t(tensor.shape[tensor.rank - 1 - k]);
      map.steps[k] = int64_t(tensor.steps[tensor.rank - 1 - k] / tensor.steps[0]);
    }
    for (size_t k = 0; k < tensor.rank; ++k) arguments.push_back(map.shape + k);
    for (size_t k = 0; k < tensor.rank; ++k) arguments.push_back(map.steps + k);
  }
  return 0;
}

Result start(const Work& work, Handle stream, int64_t memory, std::vector<void*>& arguments, std::vector<Map>& maps) {
  // Triton's functions take the arguments in the order of the source, then the addresses of two memory areas that the
  // compiler may need (the second is for profiling, which is off). An int32 is the first half of an int64.
  int64_t space = memory, fault = int64_t(faults_on_device + work.launch->kernel->place * sizeof(int64_t));
  int64_t scratch = work.scratch ? memory + int64_t(work.shape->work) : 0, profile = 0;
  arguments.clear();
  for (size_t i = 0; i < work.pointer_count; ++i) arguments.push_back(work.p + i);
  for (size_t i = 0; i < work.size_count; ++i) arguments.push_back(work.n + i);
  if (work.shape->work) arguments.push_back(&space);
  int64_t words = work.flags;
  if (words) arguments.push_back(&words);
  arguments.push_back(&fault);
  const size_t given = arguments.size();
  if (work.shape->work && work.launch->kernel->cleared) {
    if (Result result = driver.memset(static_cast<unsigned long long>(memory), 0, work.shape->work, stream)) return result;
  }
  for (size_t i = 0; i < work.shape->grids.size(); ++i) {
    const Grid& grid = work.shape->grids[i];
    const Part& part = work.variant->parts[i];
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) continue;  // no points, nothing to do
    arguments.resize(given);
    if (!part.blocks.empty()) {
      if (Result result = describe(work, i, memory, maps, arguments)) return result;
    }
    arguments.insert(arguments.end(), {&scratch, &profile});
    Result result;
    if (part.waits) {
      Config how = {{grid.x, grid.y, grid.z}, {part.threads, 1, 1}, part.shared, stream, &kEarly, 1};
      result = driver.launch_early(&how, part.function, arguments.data(), nullptr);
    } else {
      result = driver.launch(part.function, grid.x, grid.y, grid.z, part.threads, 1, 1, part.shared, stream,
                             arguments.data(), nullptr);
    }
    if (result) return result;
  }
  return 0;
}

// A fault that an earlier launch reported, and the index of its kernel among these, or -1.
bool reported(const std::vector<Work>& works, Py_ssize_t& at, int64_t& fault) {
  size_t used = std::min(places_given + 1, kPlaces);
  int64_t any = 0;
  asm volatile("" ::: "memory");  // the GPU writes this memory, which the compiler does not know
  for (size_t place = 0; place < used; ++place) any |= faults[place];
  for (size_t place = 0; any != 0 && place < used; ++place) {
    if (faults[place] == 0) continue;
    fault = faults[place];
    faults[place] = 0;
    at = -1;
    for (size_t i = 0; i < works.size(); ++i) {
      if (works[i].launch->kernel->place == place) at = Py_ssize_t(i);
    }
    return true;
  }
  return false;
}

// Launches all; false with a Python error. A fault that was reported before stops it, and is stored in `at` and `fault`.
bool execute(std::vector<Work>& works, Py_ssize_t& at, int64_t& fault) {
  if (faults == nullptr) return PyErr_SetString(PyExc_RuntimeError, "the driver is not open"), false;
  if (reported(works, at, fault)) return true;
  Owned index(PyObject_CallNoArgs(current_device));
  if (!index) return false;
  Owned queue(PyObject_CallOneArg(current_stream, index.get()));
  if (!queue) return false;
  int64_t device = PyLong_AsLongLong(index.get());
  Handle stream = PyLong_AsVoidPtr(queue.get());
  if (PyErr_Occurred() || !enter(int(device))) return false;

  for (Work& work : works) {
    if ((work.shape = shaped(work)) == nullptr) return false;
    work.facts = facts_of(work, device);
    work.variant = known(*work.launch->kernel, work.facts);
    // All missing variants are started before the first is waited for, so that they compile in parallel.
    if (work.variant == nullptr && !ask(work.launch->start, work.facts)) return false;
  }
  size_t bytes = 0;
  for (Work& work : works) {
    if (work.variant == nullptr && (work.variant = made(work.launch, work.facts)) == nullptr) return false;
    if (work.shape->grids.size() != work.variant->parts.size()) {
      return PyErr_SetString(PyExc_ValueError, "a shape has a grid for each part"), false;
    }
    for (size_t i = 0; i < work.variant->parts.size(); ++i) {
      for (const Block& block : work.variant->parts[i].blocks) {
        if (work.shape->tensors.size() <= i || block.number >= work.shape->tensors[i].size() ||
            block.sides.size() != work.shape->tensors[i][block.number].rank) {
          return PyErr_SetString(PyExc_ValueError, "a tensor map has a tensor of its rank"), false;
        }
      }
    }
    if (work.launch->kernel->signals) {
      Owned address(PyObject_CallFunctionObjArgs(flags, index.get(), queue.get(), nullptr));
      if (!address) return false;
      work.flags = PyLong_AsLongLong(address.get());
      if (work.flags == -1 && PyErr_Occurred()) return false;
    }
    work.scratch = scratch_of(work);
    bytes = std::max(bytes, work.shape->work + work.scratch);
  }
  int64_t memory = 0;
  if (bytes) {  // shared by all, since a stream runs them one after the other
    Owned address(PyObject_CallFunction(workspace, "OOn", index.get(), queue.get(), Py_ssize_t(bytes)));
    if (!address) return false;
    memory = PyLong_AsLongLong(address.get());
    if (memory == -1 && PyErr_Occurred()) return false;
  }
  Result result = 0;
  const Work* failed = nullptr;
  std::vector<void*> arguments;
  std::vector<Map> maps;
  Py_BEGIN_ALLOW_THREADS
  for (const Work& work : works) {
    result = start(work, stream, memory, arguments, maps);
    if (result) {
      failed = &work;
      break;
    }
  }
  Py_END_ALLOW_THREADS
  if (failed == nullptr) return true;
  return check(result, PyUnicode_AsUTF8(failed->launch->head.name));
}

PyObject* launch_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Works<Launch, Work> works;
  Py_ssize_t at = 0;
  int64_t fault = 0;
  if (!works.of_launch(self, args, nargsf, names) || !execute(works.all, at, fault)) return nullptr;
  return PyLong_FromLongLong(fault);
}

PyObject* launch_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *name, *shape, *start, *make, *maps = Py_None;
  int checks, cleared = 1, signals = 0;
  unsigned long long words = 0;
  if (!PyArg_ParseTuple(args, "UOOOp|KOpp", &name, &shape, &start, &make, &checks, &words, &maps, &cleared,
                        &signals)) {
    return nullptr;
  }
  Launch* self = PyObject_New(Launch, type);
  if (self == nullptr) return nullptr;
  self->head.call = launch_call;
  self->head.name = Py_NewRef(name);
  self->shape = Py_NewRef(shape);
  self->start = Py_NewRef(start);
  self->make = Py_NewRef(make);
  self->maps = Py_NewRef(maps);
  self->kernel = new Kernel();
  self->kernel->words = words;
  self->kernel->cleared = cleared != 0;
  self->kernel->signals = signals != 0;
  if (checks) self->kernel->place = 1 + places_given++ % (kPlaces - 1);
  return reinterpret_cast<PyObject*>(self);
}

void launch_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Launch* self = reinterpret_cast<Launch*>(object);
  for (PyObject* owned : {self->head.name, self->shape, self->start, self->make, self->maps}) Py_DECREF(owned);
  delete self->kernel;
  PyObject_Free(self);
  Py_DECREF(type);
}

// ------------------------------------------------------------------------------------------------------ Plan

PyObject* plan_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Works<Launch, Work> works;
  Py_ssize_t at = 0;
  int64_t fault = 0;
  if (!works.of_plan(self, args, nargsf, names) || !execute(works.all, at, fault)) return nullptr;
  if (fault == 0) Py_RETURN_NONE;
  return Py_BuildValue("(nL)", at, static_cast<long long>(fault));
}

PyMethodDef functions[] = {
    {"open", open_driver, METH_VARARGS, "open(path of the driver, current_device, current_stream, workspace, flags)"},
    {"load", load, METH_VARARGS, "load(machine code, name, shared bytes, device) -> address of the function"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "cuda_launcher", nullptr, -1, functions, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_cuda_launcher() { return make_module(module, sizeof(Launch)); }
