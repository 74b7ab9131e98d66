// Starts OpenCL kernels on device memory from Python: `Launch` one, `Plan` several in a row, on the current stream.
//
// OpenCL's functions come from the library that PyOpenCL has loaded; PyOpenCL itself takes ten times as long for a
// launch. Nothing waits for a kernel: errors that it finds in its data go to a record of the device, which is read
// whenever somebody waits.

#include "launcher.h"

#include <pthread.h>

#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace {

// ---------------------------------------------------------------------------------------------------- driver

using Handle = void*;

struct Driver {
  int (*set_argument)(Handle, unsigned, size_t, const void*);
  int (*enqueue)(Handle, Handle, unsigned, const size_t*, const size_t*, const size_t*, unsigned, const Handle*, Handle*);
  int (*flush)(Handle);
} driver;

struct Block {
  uint64_t bytes;
  Handle memory;
  uint64_t begin;  // in device memory
};

struct Queue {
  Handle handle;
  bool used, checked;  // whether kernels, and kernels that check data, were enqueued since the last query
};

std::mutex lock;  // guards everything below, and the kernels, whose arguments are state
std::map<uint64_t, Block> blocks;
std::map<std::pair<int64_t, int64_t>, Queue> queues;
std::map<int64_t, Handle> faults;
int64_t (*current_stream)(int) = nullptr;
PyObject* make_queue = nullptr;  // (device, stream): calls `add_queue`
bool forked = false;

bool find(uint64_t address, Handle& memory, int64_t& offset) {
  if (address == 0) {  // an empty tensor
    memory = nullptr;
    offset = 0;
    return true;
  }
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return false;
  const auto& [start, block] = *std::prev(after);
  memory = block.memory;
  offset = int64_t(block.begin + address - start);
  return address - start < block.bytes;
}

PyObject* open_driver(PyObject*, PyObject* args) {
  const char* path;
  PyObject* make;
  if (!PyArg_ParseTuple(args, "sO", &path, &make)) return nullptr;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // also finds the functions of libraries that PyOpenCL is linked to
  if (library == nullptr) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  const Symbol wanted[] = {
      {"clSetKernelArg", &driver.set_argument},
      {"clEnqueueNDRangeKernel", &driver.enqueue},
      {"clFlush", &driver.flush},
  };
  if (!find_symbols(library, path, wanted)) return nullptr;
  if (make_queue == nullptr) pthread_atfork(nullptr, nullptr, [] { forked = true; });
  Py_XSETREF(make_queue, Py_NewRef(make));
  Py_RETURN_NONE;
}

// follow(address of a C function that returns the current stream of a device)
PyObject* follow(PyObject*, PyObject* address) {
  void* function = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  std::memcpy(&current_stream, &function, sizeof function);
  Py_RETURN_NONE;
}

PyObject* add_block(PyObject*, PyObject* args) {
  unsigned long long address, bytes, memory, begin;
  if (!PyArg_ParseTuple(args, "KKKK", &address, &bytes, &memory, &begin)) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  blocks[address] = {bytes, reinterpret_cast<Handle>(memory), begin};
  Py_RETURN_NONE;
}

PyObject* remove_block(PyObject*, PyObject* address) {
  uint64_t start = PyLong_AsUnsignedLongLong(address);
  if (PyErr_Occurred()) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  blocks.erase(start);
  Py_RETURN_NONE;
}

// The start of the block that contains an address; None for other addresses.
PyObject* start_of(PyObject*, PyObject* given) {
  uint64_t address = PyLong_AsUnsignedLongLong(given);
  if (PyErr_Occurred()) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin() || address - std::prev(after)->first >= std::prev(after)->second.bytes) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(std::prev(after)->first);
}

// add_queue(device, stream, queue, faults)
PyObject* add_queue(PyObject*, PyObject* args) {
  long long device, stream;
  unsigned long long queue, word;
  if (!PyArg_ParseTuple(args, "LLKK", &device, &stream, &queue, &word)) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  queues[{device, stream}] = {reinterpret_cast<Handle>(queue), false, false};
  faults[device] = reinterpret_cast<Handle>(word);
  Py_RETURN_NONE;
}

// (device, stream) -> whether kernels were enqueued on its queue since the last call
PyObject* take_used(PyObject*, PyObject* args) {
  long long device, stream;
  if (!PyArg_ParseTuple(args, "LL", &device, &stream)) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  auto found = queues.find({device, stream});
  return PyBool_FromLong(found != queues.end() && std::exchange(found->second.used, false));
}

// (device, stream) -> whether kernels that check data may have reported an error by now, on any queue of the device;
// those of this stream have finished.
PyObject* take_checked(PyObject*, PyObject* args) {
  long long device, stream;
  if (!PyArg_ParseTuple(args, "LL", &device, &stream)) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  bool any = false;
  for (auto& [where, queue] : queues) {
    if (where.first != device) continue;
    any = any || queue.checked;
    if (where.second == stream) queue.checked = false;
  }
  return PyBool_FromLong(any);
}

// ---------------------------------------------------------------------------------------------------- Launch

struct Part {
  Handle kernel;
  size_t group;
};

// The number of work-items of each part for these sizes.
struct Shape {
  std::vector<int64_t> sizes;
  std::vector<size_t> items;
};

struct Kernel {
  int64_t device;
  int64_t number;  // the number in its reports of errors in data; -1: it does not check data
  std::vector<int64_t> itemsizes;
  std::vector<Part> parts;
  Shapes<Shape> shapes;
};

struct Launch {
  LaunchHead head;
  PyObject* items;  // (*sizes) -> work-items of each part
  PyObject* owner;  // keeps the kernels alive
  Kernel* kernel;
};

struct Work : Given<Launch> {
  std::shared_ptr<const Shape> shape;
};

std::shared_ptr<const Shape> shaped(const Work& work) {
  Kernel& kernel = *work.launch->kernel;
  if (auto known = kernel.shapes.find(work)) return known;
  Words words;
  if (!kernel.shapes.ask(work.launch->items, work, words)) return nullptr;
  if (size_t(words.count) != kernel.parts.size()) {
    return PyErr_SetString(PyExc_ValueError, "there are not as many numbers of work-items as parts"), nullptr;
  }
  auto shape = std::make_shared<Shape>();
  for (size_t i = 0; i < kernel.parts.size(); ++i) {
    size_t group = kernel.parts[i].group, items = words.data[i] > 0 ? size_t(words.data[i]) : 0;
    shape->items.push_back((items + group - 1) / group * group);
  }
  return kernel.shapes.keep(work, std::move(shape));
}

// The error of a launch: one of OpenCL's, or an unknown address.
struct Trouble {
  int code = 0;
  int64_t address = 0, itemsize = 0;
};

bool start(const Work& work, Queue& queue, Trouble& trouble) {
  const Kernel& kernel = *work.launch->kernel;
  for (size_t k = 0; k < kernel.parts.size(); ++k) {
    size_t items = work.shape->items[k];
    if (items == 0) continue;
    const Part& part = kernel.parts[k];
    unsigned at = 0;
    auto set = [&](size_t size, const void* value) { trouble.code |= driver.set_argument(part.kernel, at++, size, value); };
    for (size_t i = 0; i < work.pointer_count; ++i) {
      Handle memory;
      int64_t offset;
      if (!find(uint64_t(work.p[i]), memory, offset) || offset % kernel.itemsizes[i] != 0) {
        trouble = {0, work.p[i], kernel.itemsizes[i]};
        return false;
      }
      offset /= kernel.itemsizes[i];
      set(sizeof memory, memory == nullptr ? nullptr : &memory);
      set(sizeof offset, &offset);
    }
    for (size_t i = 0; i < work.size_count; ++i) set(sizeof(int64_t), work.n + i);
    int64_t place = kernel.number < 0 ? 0 : kernel.number << 32;  // offset of the device's record, with the kernel's number
    set(sizeof(Handle), &faults[kernel.device]);
    set(sizeof place, &place);
    if (trouble.code == 0)
      trouble.code = driver.enqueue(queue.handle, part.kernel, 1, nullptr, &items, &part.group, 0, nullptr, nullptr);
    if (trouble.code != 0) return false;
    queue.used = true;
    queue.checked |= kernel.number >= 0;
  }
  return true;
}

bool explain(const Work& work, const Trouble& trouble) {
  const char* name = PyUnicode_AsUTF8(work.launch->head.name);
  if (trouble.code != 0)
    PyErr_Format(PyExc_RuntimeError, "the kernel %s was not launched: OpenCL error %d", name, trouble.code);
  else
    PyErr_Format(PyExc_RuntimeError, "the kernel %s was not launched: %p is not memory of the device, or not aligned "
                 "for elements of %lld bytes", name, reinterpret_cast<void*>(trouble.address), (long long)trouble.itemsize);
  return false;
}

// Launches all; false with a Python error.
bool execute(std::vector<Work>& works) {
  if (forked) {
    PyErr_SetString(PyExc_RuntimeError, "this process was forked after OpenCL was used: start processes with "
                    "multiprocessing's \"spawn\" or \"forkserver\" method");
    return false;
  }
  for (Work& work : works) {
    const Kernel& kernel = *work.launch->kernel;
    if (work.pointer_count != kernel.itemsizes.size())
      return PyErr_Format(PyExc_ValueError, "the kernel takes %zu pointers", kernel.itemsizes.size()), false;
    if ((work.shape = shaped(work)) == nullptr) return false;
  }
  if (works.empty()) return true;
  int64_t device = works[0].launch->kernel->device;
  std::pair<int64_t, int64_t> where(device, current_stream == nullptr ? 0 : current_stream(int(device)));
  std::unique_lock<std::mutex> hold(lock);
  auto queue = queues.find(where);
  if (queue == queues.end()) {
    hold.unlock();
    Owned made(PyObject_CallFunction(make_queue, "LL", (long long)where.first, (long long)where.second));
    if (!made) return false;
    hold.lock();
    queue = queues.find(where);
    if (queue == queues.end()) return PyErr_SetString(PyExc_RuntimeError, "the stream has no queue"), false;
  }
  Trouble trouble;
  for (const Work& work : works) {
    if (!start(work, queue->second, trouble)) {
      hold.unlock();
      return explain(work, trouble);
    }
  }
  driver.flush(queue->second.handle);
  return true;
}

PyObject* launch_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Works<Launch, Work> works;
  return works.of_launch(self, args, nargsf, names) && execute(works.all) ? PyLong_FromLong(0) : nullptr;
}

// Launch(name, device, ((kernel, group), ...), itemsizes, items, number, owner)
PyObject* launch_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *name, *parts, *itemsizes, *items, *owner;
  int device, number;
  if (!PyArg_ParseTuple(args, "UiO!OOiO", &name, &device, &PyTuple_Type, &parts, &itemsizes, &items, &number, &owner))
    return nullptr;
  auto kernel = std::make_unique<Kernel>();
  kernel->device = device;
  kernel->number = number;
  Words bytes;
  if (!bytes.read(itemsizes)) return nullptr;
  kernel->itemsizes.assign(bytes.data, bytes.data + bytes.count);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); ++i) {
    Words part;
    if (!part.read(PyTuple_GET_ITEM(parts, i))) return nullptr;
    if (part.count != 2) return PyErr_SetString(PyExc_ValueError, "a part is (kernel, group)"), nullptr;
    kernel->parts.push_back({reinterpret_cast<Handle>(part.data[0]), size_t(part.data[1])});
  }
  Launch* self = PyObject_New(Launch, type);
  if (self == nullptr) return nullptr;
  self->head.call = launch_call;
  self->head.name = Py_NewRef(name);
  self->items = Py_NewRef(items);
  self->owner = Py_NewRef(owner);
  self->kernel = kernel.release();
  return reinterpret_cast<PyObject*>(self);
}

void launch_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Launch* self = reinterpret_cast<Launch*>(object);
  for (PyObject* owned : {self->head.name, self->items, self->owner}) Py_DECREF(owned);
  delete self->kernel;
  PyObject_Free(self);
  Py_DECREF(type);
}

// ------------------------------------------------------------------------------------------------------ Plan

PyObject* plan_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Works<Launch, Work> works;
  if (!works.of_plan(self, args, nargsf, names) || !execute(works.all)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"open", open_driver, METH_VARARGS, nullptr},   {"follow", follow, METH_O, nullptr},
    {"add_block", add_block, METH_VARARGS, nullptr}, {"remove_block", remove_block, METH_O, nullptr},
    {"start_of", start_of, METH_O, nullptr},        {"add_queue", add_queue, METH_VARARGS, nullptr},
    {"take_used", take_used, METH_VARARGS, nullptr},
    {"take_checked", take_checked, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "opencl_launcher", nullptr, -1, methods, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_opencl_launcher() { return make_module(module, sizeof(Launch)); }
