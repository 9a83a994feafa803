// Repeats what Python has decided (docs/design/deciding_once.md):
//
//   Table    calls of a function: finds the recording of a call by the layouts of all its
//            arguments, allocates, and launches
//   Layer    a linear layer, a gated MLP or a norm, with its node in the autograd graph
//   Kernel   a registered op, for compiled graphs, which call no Python
//
// A call that is not known goes to Python, which records it (record.py). Nothing here knows an op.
// Built at first use for the torch and Python that are installed (build_player.py).

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

namespace py = pybind11;

namespace {

using Word = int64_t;
using Words = c10::SmallVector<Word, 192>;
using Tensors = c10::SmallVector<at::Tensor, 24>;

// The driver's functions, as pointers: tests put their own here.
struct Driver {
  using Launch = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
  using Encode = CUresult (*)(
      CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
      const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  using ErrorName = CUresult (*)(CUresult, const char**);

  Launch launch = nullptr;
  Encode encode = nullptr;
  ErrorName error_name = nullptr;

  void load() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    TORCH_CHECK(library, "blocktensor: libcuda.so.1 cannot be opened: ", dlerror());
    launch = reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernelEx"));
    encode = reinterpret_cast<Encode>(dlsym(library, "cuTensorMapEncodeTiled"));
    error_name = reinterpret_cast<ErrorName>(dlsym(library, "cuGetErrorName"));
    TORCH_CHECK(launch && encode, "blocktensor: libcuda.so.1 lacks cuLaunchKernelEx");
  }
};

Driver driver;

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) {
    return;
  }
  const char* name = nullptr;
  if (driver.error_name) {
    driver.error_name(result, &name);
  }
  TORCH_CHECK(false, "blocktensor: ", what, " failed: ", name ? name : "error ", int(result));
}

// ---------------------------------------------------------------------------------------------
// Keys: everything that a call gets

constexpr Word kGroupStep = 1024;  // GROUP_STEP of ops/formats.py
constexpr Word kRowStep = 64;  // ROW_STEP of ops/formats.py
constexpr Word kRowsOfCall = -1;  // stands for a first size that is the number of rows of the call

enum Tag : Word { kTensor = 1, kTuple, kInt, kRowsInt, kFloat, kText, kObject };

bool is_tensor(PyObject* x) {
  return THPVariable_CheckExact(x) ||
      PyType_IsSubtype(Py_TYPE(x), reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

struct Call {
  Words words;
  Tensors tensors;  // in the order of a traversal of the arguments
  c10::SmallVector<PyObject*, 24> objects;  // whose identity is part of the key
  Word rows = -1;  // of the first argument or, if it is no tensor, the first integer
  bool in_groups = false;
  bool in_steps = false;  // other numbers of rows that round up to the same multiple have this key

  // Return false if an argument is a tensor without memory or of another type. The arguments of
  // which `with_rows` has a bit may have other numbers of rows in other calls of this kind.
  bool read(PyObject* const* args, size_t count, Word with_rows = 0) {
    const char* backend = std::getenv("BLOCKTENSOR_GEMM");
    add_text(backend ? backend : "", backend ? std::strlen(backend) : 0);
    for (size_t i = 0; i < count && rows < 0; ++i) {
      if (i == 0 && is_tensor(args[0])) {
        const auto& first = THPVariable_Unpack(args[0]);
        rows = !first.dim()                  ? 0
            : with_rows && first.dim() > 2 && is_matrix(first) ? first.numel() / first.size(-1)
                                                               : first.size(0);
      } else if (PyLong_CheckExact(args[i])) {
        rows = PyLong_AsLongLong(args[i]);
      }
    }
    for (size_t i = 0; i < count && !in_groups; ++i) {
      in_groups = is_tensor(args[i]) &&
          THPVariable_Unpack(args[i]).scalar_type() == at::kInt;
    }
    // Within the first step, more depends on the number of rows.
    in_steps = with_rows && !in_groups && rows > kRowStep && rows % kRowStep &&
        is_tensor(args[0]) && is_matrix(THPVariable_Unpack(args[0]));
    for (size_t i = 0; i < count && in_steps; ++i) {
      in_steps = (with_rows >> i & 1) || !has_size(args[i], rows);
    }
    words.append(
        {in_steps, in_groups ? (rows + kGroupStep - 1) / kGroupStep
             : in_steps      ? (rows + kRowStep - 1) / kRowStep
                             : -1});
    for (size_t i = 0; i < count; ++i) {
      if (!add(args[i], in_groups || (in_steps && (with_rows >> i & 1)))) {
        return false;
      }
    }
    return true;
  }

  // Return true if the rows of a tensor are contiguous, as in the matrix [rows, last size].
  static bool is_matrix(const at::Tensor& x) {
    return x.dim() == 2 || (x.dim() > 2 && x.numel() && x.is_contiguous());
  }

  // Return true if a tensor in `x` has a size that is not told apart from the number of rows.
  static bool has_size(PyObject* x, Word size) {
    if (is_tensor(x)) {
      for (Word each : THPVariable_Unpack(x).sizes()) {
        if (each == size) {
          return true;
        }
      }
    } else if (PyTuple_Check(x)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); ++i) {
        if (has_size(PyTuple_GET_ITEM(x, i), size)) {
          return true;
        }
      }
    }
    return false;
  }

  bool add(PyObject* x, bool by_rows) {
    if (is_tensor(x)) {
      return add_tensor(THPVariable_Unpack(x), by_rows);
    }
    if (PyTuple_Check(x)) {
      Py_ssize_t size = PyTuple_GET_SIZE(x);
      words.append({kTuple, size});
      objects.push_back(reinterpret_cast<PyObject*>(Py_TYPE(x)));
      words.push_back(reinterpret_cast<Word>(Py_TYPE(x)));
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (!add(PyTuple_GET_ITEM(x, i), in_steps && by_rows)) {
          return false;
        }
      }
      return true;
    }
    if (PyLong_CheckExact(x)) {
      Word value = PyLong_AsLongLong(x);
      if (value == -1 && PyErr_Occurred()) {
        throw python_error();
      }
      if (in_groups && by_rows && value == rows) {
        words.push_back(kRowsInt);
      } else {
        words.append({kInt, value});
      }
      return true;
    }
    if (PyFloat_CheckExact(x)) {
      add_float(PyFloat_AS_DOUBLE(x));
      return true;
    }
    if (PyUnicode_CheckExact(x)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(x, &size);
      if (!text) {
        throw python_error();
      }
      add_text(text, size_t(size));
      return true;
    }
    add_object(x);
    return true;
  }

  // Read the arguments of a registered op, each of which has a letter: see `letters` of ops/op.py.
  // The function that was recorded says which tensors have the number of rows.
  bool read(c10::ArrayRef<c10::IValue> args, const std::string& letters) {
    const char* backend = std::getenv("BLOCKTENSOR_GEMM");
    add_text(backend ? backend : "", backend ? std::strlen(backend) : 0);
    if (letters[0] == 't' && args[0].isTensor()) {
      const auto& first = args[0].toTensor();
      rows = first.dim() ? first.size(0) : 0;
    }
    for (size_t i = 0; i < args.size(); ++i) {
      if (rows < 0 && letters[i] == 'i' && args[i].isInt()) {
        rows = args[i].toInt();
      }
      in_groups |= letters[i] == 't' && args[i].isTensor() &&
          args[i].toTensor().scalar_type() == at::kInt;
    }
    words.append({0, in_groups ? (rows + kGroupStep - 1) / kGroupStep : -1});
    for (size_t i = 0; i < args.size(); ++i) {
      const auto& each = args[i];
      if (each.isTensor()) {
        if (!add_tensor(each.toTensor(), in_groups && letters[i] == 't')) {
          return false;
        }
      } else if (each.isNone()) {
        words.push_back(kObject);
      } else if (each.isBool()) {
        words.append({kObject, each.toBool()});
      } else if (each.isInt()) {
        bool is_rows = in_groups && letters[i] == 'i' && each.toInt() == rows;
        words.append({is_rows ? kRowsInt : kInt, is_rows ? 0 : each.toInt()});
      } else if (each.isDouble()) {
        add_float(each.toDouble());
      } else if (each.isString()) {
        add_text(each.toStringRef().data(), each.toStringRef().size());
      } else {
        return false;
      }
    }
    return true;
  }

  void add_float(double value) {
    Word bits;
    std::memcpy(&bits, &value, sizeof bits);
    words.append({kFloat, bits});
  }

  void add_object(PyObject* x) {
    words.append({kObject, reinterpret_cast<Word>(x)});
    objects.push_back(x);
  }

  void add_text(const char* text, size_t size) {
    words.append({kText, Word(size)});
    for (size_t i = 0; i < size; ++i) {
      words.push_back(text[i]);
    }
  }

  bool add_tensor(const at::Tensor& x, bool by_rows) {
    static const c10::DispatchKeySet of_wrappers(
        {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::Negative,
         c10::DispatchKey::Conjugate});
    bool is_wrapper = x.key_set().has_any(of_wrappers);
    if (is_wrapper || !x.has_storage() || x.is_meta()) {
      return false;
    }
    auto sizes = x.sizes();
    auto strides = x.strides();
    Word matrix[] = {rows, x.dim() ? x.size(-1) : 0}, of_matrix[] = {x.dim() ? x.size(-1) : 0, 1};
    if (in_steps && by_rows && x.dim() > 2 && is_matrix(x) && x.numel() == rows * matrix[1]) {
      sizes = matrix;  // functions flatten it
      strides = of_matrix;
    }
    bool has_rows = by_rows && sizes.size() == 2 && sizes[0] == rows;
    auto address = reinterpret_cast<Word>(x.const_data_ptr());
    words.append(
        {kTensor,
         Word(sizes.size()) | Word(x.scalar_type()) << 8 | (address & 15) << 16 |
             Word(x.device().type()) << 24 | Word(x.device().index()) << 32});
    words.append(sizes.begin(), sizes.end());
    words.append(strides.begin(), strides.end());
    if (has_rows) {
      words[words.size() - 4] = kRowsOfCall;
    }
    tensors.push_back(x);
    return true;
  }

  uint64_t hash() const {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    for (Word word : words) {
      h = (h ^ uint64_t(word)) * 0xD6E8FEB86659FD93ull;
      h ^= h >> 32;
    }
    return h;
  }
};

// ---------------------------------------------------------------------------------------------
// Recordings

// Most bytes of an allocation that becomes a part of scratch. Larger ones are rare where the host is
// slow, and alone they fit into whatever block torch's allocator has.
constexpr size_t kMostScratch = 16 << 20;

struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool has_rows;  // the first size is the number of rows of the call
  bool is_scratch = false;  // a part of the memory that the call gives up at its end

  size_t bytes(Word rows) const {
    int64_t last = 0;  // element
    for (size_t i = 0; i < sizes.size(); ++i) {
      auto size = i == 0 && has_rows ? rows : sizes[i];
      if (size == 0) {
        return 0;
      }
      last += (size - 1) * strides[i];
    }
    return size_t(last + 1) * c10::elementSize(dtype);
  }
};

struct Place {  // a pointer: bytes behind a tensor of the call or an allocation
  int32_t base;
  int64_t offset;
};

struct Map {  // a tensor map, as Triton's fill_tma_descriptor encodes it
  Place at;
  CUtensorMapDataType dtype;
  CUtensorMapSwizzle swizzle;
  CUtensorMapFloatOOBfill fill;
  std::vector<cuuint64_t> sizes, strides;  // innermost first; strides in bytes
  std::vector<cuuint32_t> box;
  std::vector<int64_t> beyond_rows;  // of sizes that are the rows of the call and so many more

  static constexpr int64_t kFixed = -1;  // a size that is no number of rows
};

struct Parameter {
  enum Kind { kPointer, kNumber, kRows, kMap } kind;
  Place at;
  int64_t number;
  Map map;
};

struct Launch {
  CUfunction function;
  unsigned grid, threads, shared, cluster;
  bool cooperative, dependent;
  std::vector<Parameter> parameters;
  size_t maps = 0;
};

struct Result {  // nested as Python's result is
  enum Kind { kObject, kTensor, kView, kTuple } kind;
  py::object object;  // or the type of a tuple
  int32_t allocation = 0;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  std::vector<Result> parts;
};

std::atomic<int64_t> plays{0};  // of all recordings, for tests

struct Recording {
  at::Device device = at::kCPU;
  std::vector<Allocation> allocations;
  std::vector<Launch> launches;
  Result result;
  py::object compiled;  // kernels, to be held as long as they are launched
  Word with_rows = 0;  // see Call::read

  // Return the tensors that the call allocates; undefined ones for scratch. Append the addresses
  // of all allocations to `bases`, and hold the memory of scratch, one allocation, in `scratch`.
  std::vector<at::Tensor> allocate(
      Word rows, c10::SmallVectorImpl<char*>& bases, at::Tensor& scratch) const {
    constexpr size_t kAlign = 512;  // as torch's allocator aligns tensors
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<at::Tensor> made(allocations.size());
    size_t first = bases.size(), total = 0;
    for (size_t i = 0; i < allocations.size(); ++i) {
      const auto& each = allocations[i];
      if (each.is_scratch) {
        bases.push_back(reinterpret_cast<char*>(total));  // an offset, until there is memory
        total += (each.bytes(rows) + kAlign - 1) / kAlign * kAlign;
        continue;
      }
      auto options = at::TensorOptions().dtype(each.dtype).device(device);
      if (each.has_rows) {
        auto sizes = each.sizes;
        sizes[0] = rows;
        made[i] = at::empty_strided(sizes, each.strides, options);
      } else {
        made[i] = at::empty_strided(each.sizes, each.strides, options);
      }
      bases.push_back(static_cast<char*>(made[i].mutable_data_ptr()));
    }
    if (total) {
      scratch = at::empty_strided(
          {int64_t(total)}, {1}, at::TensorOptions().dtype(at::kByte).device(device));
      auto* begin = static_cast<char*>(scratch.mutable_data_ptr());
      for (size_t i = 0; i < allocations.size(); ++i) {
        if (allocations[i].is_scratch) {
          bases[first + i] = begin + reinterpret_cast<size_t>(bases[first + i]);
        }
      }
    }
    return made;
  }

  static void launch_one(const Launch& of, char* const* bases, Word rows, CUstream stream) {
    constexpr size_t kMost = 64;
    alignas(128) CUtensorMap maps[8];
    Word numbers[kMost];
    void* parameters[kMost];
    size_t next_map = 0, count = 0;
    for (const auto& each : of.parameters) {
      char* address = each.at.base < 0 ? nullptr : bases[each.at.base] + each.at.offset;
      parameters[count] = &numbers[count];
      switch (each.kind) {
        case Parameter::kPointer:
          numbers[count] = reinterpret_cast<Word>(address);
          break;
        case Parameter::kNumber:
          numbers[count] = each.number;
          break;
        case Parameter::kRows:
          numbers[count] = rows + each.number;
          break;
        case Parameter::kMap:
          encode(each.map, address, rows, &maps[next_map]);
          parameters[count] = &maps[next_map++];
          break;
      }
      ++count;
    }
    CUlaunchAttribute attributes[4] = {};
    unsigned number = 0;
    if (of.dependent) {
      attributes[number].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attributes[number++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (of.cooperative) {
      attributes[number].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      attributes[number++].value.cooperative = 1;
    }
    if (of.cluster != 1) {
      attributes[number].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attributes[number++].value.clusterDim = {of.cluster, 1, 1};
      attributes[number].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
      attributes[number++].value.clusterSchedulingPolicyPreference =
          CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    }
    CUlaunchConfig config{};
    config.gridDimX = of.grid * of.cluster;
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = of.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = of.shared;
    config.hStream = stream;
    config.attrs = attributes;
    config.numAttrs = number;
    check(driver.launch(&config, of.function, parameters, nullptr), "cuLaunchKernelEx");
  }

  static void encode(const Map& of, char* address, Word rows, CUtensorMap* map) {
    static const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    cuuint64_t sizes[5];
    for (size_t i = 0; i < of.sizes.size(); ++i) {
      auto beyond = of.beyond_rows[i];
      sizes[i] = beyond == Map::kFixed ? of.sizes[i] : cuuint64_t(rows + beyond);
    }
    check(
        driver.encode(
            map, of.dtype, cuuint32_t(of.sizes.size()), address, sizes,
            of.strides.data(), of.box.data(), ones, CU_TENSOR_MAP_INTERLEAVE_NONE, of.swizzle,
            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, of.fill),
        "cuTensorMapEncodeTiled");
  }

  PyObject* wrap(const Result& of, const std::vector<at::Tensor>& made) const {
    switch (of.kind) {
      case Result::kObject:
        return Py_NewRef(of.object.ptr());
      case Result::kTensor:
        return THPVariable_Wrap(made[of.allocation]);
      case Result::kView:
        return THPVariable_Wrap(
            made[of.allocation].as_strided(of.sizes, of.strides, of.offset));
      case Result::kTuple:
        break;
    }
    auto* type = reinterpret_cast<PyTypeObject*>(of.object.ptr());
    auto size = Py_ssize_t(of.parts.size());
    PyObject* made_tuple = type == &PyTuple_Type ? PyTuple_New(size) : type->tp_alloc(type, size);
    if (!made_tuple) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyTuple_SET_ITEM(made_tuple, i, wrap(of.parts[i], made));
    }
    return made_tuple;
  }

  // Allocate and launch; return what was allocated. The caller may hold the GIL or not.
  std::vector<at::Tensor> run(const Call& call) const {
    ++plays;
    c10::OptionalDeviceGuard guard;
    CUstream stream = nullptr;
    if (!device.is_cpu()) {
      c10::impl::VirtualGuardImpl of_device(device.type());
      if (of_device.getDevice() != device) {
        guard.reset_device(device);
      }
      stream = static_cast<CUstream>(
          of_device.getStreamNativeHandle(of_device.getStream(device)));
    }
    c10::SmallVector<char*, 48> bases;
    for (const auto& x : call.tensors) {
      bases.push_back(static_cast<char*>(const_cast<void*>(x.const_data_ptr())));
    }
    at::Tensor scratch;
    auto made = allocate(call.rows, bases, scratch);
    for (const auto& each : launches) {
      launch_one(each, bases.data(), call.rows, stream);
    }
    return made;
  }

  PyObject* play(const Call& call) const {
    std::vector<at::Tensor> made;
    {
      pybind11::gil_scoped_release no_gil;
      made = run(call);
    }
    return wrap(result, made);
  }

  // Give each tensor of the result memory of its own.
  void keep(const Result& of) {
    if (of.kind == Result::kTensor || of.kind == Result::kView) {
      allocations.at(of.allocation).is_scratch = false;
    }
    for (const auto& part : of.parts) {
      keep(part);
    }
  }

  // Append the tensors of the result, in order, whatever tuples they are in.
  void flatten(
      const Result& of, const std::vector<at::Tensor>& made, std::vector<at::Tensor>& flat) const {
    if (of.kind == Result::kTensor) {
      flat.push_back(made[of.allocation]);
    } else if (of.kind == Result::kView) {
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      flat.push_back(made[of.allocation].as_strided(of.sizes, of.strides, of.offset));
    }
    for (const auto& part : of.parts) {
      flatten(part, made, flat);
    }
  }
};

// Return whether a launch hook of Triton is set, usually by a profiler.
py::object* hooks = nullptr;  // triton.knobs.runtime

bool hooked() {
  static PyObject* names[] = {
      PyUnicode_InternFromString("launch_enter_hook"),
      PyUnicode_InternFromString("launch_exit_hook")};
  static PyObject* calls = PyUnicode_InternFromString("calls");
  for (PyObject* name : hooks ? c10::ArrayRef<PyObject*>(names) : c10::ArrayRef<PyObject*>()) {
    auto hook = py::reinterpret_steal<py::object>(PyObject_GetAttr(hooks->ptr(), name));
    if (!hook) {
      throw python_error();
    }
    if (hook.is_none()) {
      continue;
    }
    auto listed = py::reinterpret_steal<py::object>(PyObject_GetAttr(hook.ptr(), calls));
    if (!listed) {  // a function in place of a chain of them
      PyErr_Clear();
      return true;
    }
    if (PyObject_IsTrue(listed.ptr()) != 0) {
      return true;
    }
  }
  return false;
}

// ---------------------------------------------------------------------------------------------
// Tables

// What is known of calls, by their keys; at most so many, the oldest is forgotten first.
template <class Value>
class Known {
 public:
  explicit Known(size_t most) : most_(most) {}

  // Return null if nothing is known of calls like this one.
  Value* find(const Call& call) {
    auto found = find(call, call.hash());
    return found == entries_.end() ? nullptr : &found->value;
  }

  void put(const Call& call, Value value) {
    auto hash = call.hash();
    auto known = find(call, hash);
    if (known != entries_.end()) {
      forget(known);
    }
    while (entries_.size() >= most_) {
      forget(entries_.begin());
    }
    Entry entry{{call.words.begin(), call.words.end()}, {}, hash, std::move(value)};
    for (PyObject* each : call.objects) {
      entry.held.push_back(py::reinterpret_borrow<py::object>(each));
    }
    entries_.push_back(std::move(entry));
    found_.emplace(hash, std::prev(entries_.end()));
  }

  void forget() {
    found_.clear();
    entries_.clear();
  }

  size_t size() const {
    return entries_.size();
  }

 private:
  struct Entry {
    std::vector<Word> words;
    std::vector<py::object> held;  // objects whose addresses are in the key
    uint64_t hash;
    Value value;
  };
  using Place = typename std::list<Entry>::iterator;

  Place find(const Call& call, uint64_t hash) {
    auto range = found_.equal_range(hash);
    for (auto it = range.first; it != range.second; ++it) {
      const auto& words = it->second->words;
      if (words.size() == call.words.size() &&
          std::memcmp(words.data(), call.words.data(), words.size() * sizeof(Word)) == 0) {
        return it->second;
      }
    }
    return entries_.end();
  }

  void forget(Place entry) {
    auto range = found_.equal_range(entry->hash);
    for (auto it = range.first; it != range.second; ++it) {
      if (it->second == entry) {
        found_.erase(it);
        break;
      }
    }
    entries_.erase(entry);
  }

  size_t most_;
  std::list<Entry> entries_;  // the oldest first
  std::unordered_multimap<uint64_t, Place> found_;
};

struct Way {  // how calls of one kind run
  std::shared_ptr<Recording> recording;
  py::object function;  // called where there is no recording, or a hook is set
};

struct Table {
  PyObject_HEAD
  vectorcallfunc call;
  Known<Way>* known;
  PyObject* miss;
  Word with_rows;  // see Call::read
};

PyObject* table_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  auto* self = reinterpret_cast<Table*>(object);
  HANDLE_TH_ERRORS
  size_t count = PyVectorcall_NARGS(flags);
  Call call;
  if (call.read(args, count, self->with_rows)) {
    if (Way* found = self->known->find(call)) {
      Way way = *found;  // held: another thread may forget the entry
      if (way.recording && !hooked()) {
        return way.recording->play(call);
      }
      return PyObject_Vectorcall(way.function.ptr(), args, count, nullptr);
    }
  }
  return PyObject_Vectorcall(self->miss, args, count, nullptr);
  END_HANDLE_TH_ERRORS
}

// table.put(args, function, recording): remember how calls like this one run
PyObject* table_put(PyObject* object, PyObject* given) {
  auto* self = reinterpret_cast<Table*>(object);
  HANDLE_TH_ERRORS
  PyObject *args, *function, *recording = Py_None;
  if (!PyArg_ParseTuple(given, "O!O|O", &PyTuple_Type, &args, &function, &recording)) {
    return nullptr;
  }
  Call call;
  if (!call.read(&PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), self->with_rows)) {
    Py_RETURN_FALSE;
  }
  Way way{nullptr, py::reinterpret_borrow<py::object>(function)};
  if (recording != Py_None) {
    way.recording = py::cast<std::shared_ptr<Recording>>(py::handle(recording));
  }
  self->known->put(call, std::move(way));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// table.recording(args): the recording that calls like this one repeat, or None
PyObject* table_recording(PyObject* object, PyObject* args) {
  auto* self = reinterpret_cast<Table*>(object);
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyTuple_Check(args), "expected a tuple of arguments");
  Call call;
  Way* found = call.read(&PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), self->with_rows)
      ? self->known->find(call)
      : nullptr;
  if (found && found->recording) {
    return py::cast(found->recording).release().ptr();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* table_forget(PyObject* object, PyObject*) {
  reinterpret_cast<Table*>(object)->known->forget();
  Py_RETURN_NONE;
}

Py_ssize_t table_length(PyObject* object) {
  return Py_ssize_t(reinterpret_cast<Table*>(object)->known->size());
}

PyObject* table_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* miss;
  Py_ssize_t most;
  long long with_rows = 0;
  if (!PyArg_ParseTuple(args, "On|L", &miss, &most, &with_rows)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Table*>(type->tp_alloc(type, 0));
  if (self) {
    self->call = table_call;
    self->known = new Known<Way>(size_t(most));
    self->miss = Py_NewRef(miss);
    self->with_rows = with_rows;
  }
  return reinterpret_cast<PyObject*>(self);
}

void table_free(PyObject* object) {
  auto* self = reinterpret_cast<Table*>(object);
  delete self->known;
  Py_XDECREF(self->miss);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef table_methods[] = {
    {"put", table_put, METH_VARARGS,
     "put(args, function, recording=None): remember how calls like this one run"},
    {"recording", table_recording, METH_O,
     "recording(args): the recording that calls like this one repeat, or None"},
    {"forget", table_forget, METH_NOARGS, "Forget everything."},
    {nullptr, nullptr, 0, nullptr}};

PySequenceMethods table_sequence{};
PyTypeObject TableType = {PyVarObject_HEAD_INIT(nullptr, 0) "blocktensor_player.Table"};

Result result_of(const py::handle& given) {
  // None or another object; ("tensor", i); ("view", i, sizes, strides, offset); ("tuple", type, …)
  auto parts = given.cast<py::tuple>();
  auto kind = parts[0].cast<std::string>();
  Result made;
  if (kind == "object") {
    made.kind = Result::kObject;
    made.object = parts[1];
  } else if (kind == "tensor") {
    made.kind = Result::kTensor;
    made.allocation = parts[1].cast<int32_t>();
  } else if (kind == "view") {
    made.kind = Result::kView;
    made.allocation = parts[1].cast<int32_t>();
    made.sizes = parts[2].cast<std::vector<int64_t>>();
    made.strides = parts[3].cast<std::vector<int64_t>>();
    made.offset = parts[4].cast<int64_t>();
  } else {
    made.kind = Result::kTuple;
    made.object = parts[1];
    for (const auto& part : parts[2].cast<py::tuple>()) {
      made.parts.push_back(result_of(part));
    }
  }
  return made;
}

Parameter parameter_of(const py::tuple& given) {
  auto kind = given[0].cast<std::string>();
  Parameter made{};
  made.at.base = -1;
  if (kind == "number") {
    made.kind = Parameter::kNumber;
    made.number = given[1].cast<int64_t>();
  } else if (kind == "rows") {
    made.kind = Parameter::kRows;
    made.number = given[2].cast<int64_t>();
  } else if (kind == "pointer") {
    made.kind = Parameter::kPointer;
    made.at = {given[1].cast<int32_t>(), given[2].cast<int64_t>()};
  } else {
    made.kind = Parameter::kMap;
    made.at = {given[1].cast<int32_t>(), given[2].cast<int64_t>()};
    made.map.dtype = CUtensorMapDataType(given[3].cast<int>());
    made.map.swizzle = CUtensorMapSwizzle(given[4].cast<int>());
    made.map.fill = CUtensorMapFloatOOBfill(given[5].cast<int>());
    made.map.strides = given[6].cast<std::vector<cuuint64_t>>();
    made.map.box = given[7].cast<std::vector<cuuint32_t>>();
    made.map.sizes = given[8].cast<std::vector<cuuint64_t>>();
    made.map.beyond_rows = given[9].cast<std::vector<int64_t>>();
    TORCH_CHECK_VALUE(
        made.map.sizes.size() <= 5 && made.map.sizes.size() == made.map.beyond_rows.size(),
        "sizes of a tensor map");
  }
  return made;
}

std::shared_ptr<Recording> record(
    const py::object& device,
    const py::list& allocations,
    const py::list& launches,
    const py::handle& result,
    const py::object& compiled,
    Word with_rows) {
  auto made = std::make_shared<Recording>();
  made->device = reinterpret_cast<THPDevice*>(device.ptr())->device;
  for (const auto& each : allocations) {
    auto parts = each.cast<py::tuple>();
    made->allocations.push_back(
        {parts[0].cast<std::vector<int64_t>>(), parts[1].cast<std::vector<int64_t>>(),
         reinterpret_cast<THPDtype*>(py::object(parts[2]).ptr())->scalar_type,
         parts[3].cast<bool>()});
  }
  for (const auto& each : launches) {
    auto parts = each.cast<py::tuple>();
    Launch one;
    one.function = reinterpret_cast<CUfunction>(parts[0].cast<uintptr_t>());
    one.grid = parts[1].cast<unsigned>();
    one.threads = parts[2].cast<unsigned>();
    one.shared = parts[3].cast<unsigned>();
    one.cluster = parts[4].cast<unsigned>();
    one.cooperative = parts[5].cast<bool>();
    one.dependent = parts[6].cast<bool>();
    for (const auto& parameter : parts[7].cast<py::list>()) {
      one.parameters.push_back(parameter_of(parameter.cast<py::tuple>()));
      one.maps += one.parameters.back().kind == Parameter::kMap;
    }
    TORCH_CHECK_VALUE(one.parameters.size() <= 64 && one.maps <= 8, "too many parameters");
    made->launches.push_back(std::move(one));
  }
  made->result = result_of(result);
  for (auto& each : made->allocations) {
    each.is_scratch = each.bytes(each.sizes.empty() ? 0 : each.sizes[0]) <= kMostScratch;
  }
  made->keep(made->result);
  made->compiled = compiled;
  made->with_rows = with_rows;
  return made;
}

// ---------------------------------------------------------------------------------------------
// Linear layers and their nodes in the autograd graph

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);

template <class T>
NodePointer owned(T* node) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {  // before torch 2.13
    return NodePointer(node, [](T* x) { deleteNode(x); });
  } else {
    return c10::intrusive_ptr<T>::unsafe_steal_from_new(node);
  }
}

// Return what a call of Python returned, or throw what it raised.
py::object returned(PyObject* made) {
  if (!made) {
    python_error error;
    error.persist();
    throw error;
  }
  return py::reinterpret_steal<py::object>(made);
}

// Call a Python function; the GIL is held.
template <class... Args>
py::object called(const py::object& function, const Args&... args) {
  PyObject* given[] = {args.ptr()...};
  return returned(PyObject_Vectorcall(function.ptr(), given, sizeof...(args), nullptr));
}

py::object wrapped(const at::Tensor& x) {
  return py::reinterpret_steal<py::object>(x.defined() ? THPVariable_Wrap(x) : Py_NewRef(Py_None));
}

at::Tensor tensor_or_none(const py::handle& x) {
  return x.is_none() ? at::Tensor() : THPVariable_Unpack(x.ptr());
}

// Return an item of a tuple or of a named tuple.
py::handle item(const py::object& tuple, Py_ssize_t i) {
  TORCH_INTERNAL_ASSERT(PyTuple_Check(tuple.ptr()) && i < PyTuple_GET_SIZE(tuple.ptr()));
  return PyTuple_GET_ITEM(tuple.ptr(), i);
}

// Switches the overrides of tensor subclasses off, as torch._C.DisableTorchFunctionSubclass does.
struct WithoutOverrides {
  at::impl::TorchFunctionDisabledState before = at::impl::PythonTorchFunctionTLS::get_disabled_state();

  WithoutOverrides() {
    if (before == at::impl::TorchFunctionDisabledState::ENABLED) {
      at::impl::PythonTorchFunctionTLS::set_disabled_state(
          at::impl::TorchFunctionDisabledState::SUBCLASSES_DISABLED);
    }
  }
  ~WithoutOverrides() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(before);
  }
};

// The functions and types of autograd/repeat.py, which all calls of a kind of layer share.
struct Functions {
  std::string name;       // of the node
  py::object weight;      // the type of trainable weights
  py::object frozen;      // the type of frozen and of gathered ones
  py::object forward;     // (plan, *operands) -> (y, tensors to save, state); None: linear layers
  py::object gradients;   // (plan, state, saved, grads, asked) -> gradients of the operands
  py::object thread;      // state of the calling thread (launch.py): whether ops are watched
  py::object sharing;     // state of the calling thread (shared_cast.py): the run that shares casts
  // of linear layers
  py::object quantized;   // the type of casts
  py::object hold_cast;   // (w, plan, columnwise) -> (tensors to save, state)
  py::object read_weight;  // (w, plan) -> (rowwise form, tensors to save, state)
  py::object shared_forms;  // (run, x, offs, plan) -> (rowwise, columnwise form of x), or None
  Word with_rows;  // operands that may have other numbers of rows in other calls of a kind

  bool is_linear() const {
    return forward.is_none();
  }

  bool is_weight(PyObject* x) const {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
    return type == weight.ptr() || type == frozen.ptr();
  }

  // Return true in surroundings that Python refuses, or handles by itself.
  bool is_special() const {
    static PyObject *watch = PyUnicode_InternFromString("watch"),
                    *launches = PyUnicode_InternFromString("launches");
    return c10::impl::TorchDispatchModeTLS::any_modes_set() || torch::jit::tracer::isTracing() ||
        c10::impl::tls_is_dispatch_key_included(
               c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
        !attribute(thread, watch).is_none() || !attribute(thread, launches).is_none();
  }

  // Return the run of a module that shares casts of inputs, or None.
  py::object sharing_run() const {
    static PyObject* running = PyUnicode_InternFromString("running");
    return attribute(sharing, running);
  }

 private:
  static py::object attribute(const py::object& of, PyObject* name) {
    return returned(PyObject_GetAttr(of.ptr(), name));
  }
};

struct Plan {  // Plan of autograd/plan.py, as far as it is read here; only `plan` if not linear
  py::object plan;
  py::object fprop;     // (x, None, w, bias, offs, plan) -> (y, columnwise x, columnwise w)
  py::object backward;  // (grad, x or None, w, offs, plan) -> (dx, dw); or None: call `gradients`
  py::object columnwise;  // the format of x that wgrad reads; None if it reads none
  bool casts_x = false, casts_weight = false, saves_x = false;
  at::ScalarType dtype{};  // of y
};

bool is_plain(const at::Tensor& x) {
  static const c10::DispatchKeySet special(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::Batched,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Negative,
       c10::DispatchKey::Conjugate, c10::DispatchKey::NestedTensor});
  return !x.key_set().has_any(special) && x.has_storage() && !x.is_meta();
}

// Return the value of a tensor that forward has saved; an empty one if it has saved none.
class Saved {
 public:
  explicit Saved(const at::Tensor& x) : is_any_(x.defined()) {
    if (is_any_) {
      variable_ = SavedVariable(x, /*is_output=*/false);
    }
  }
  at::Tensor value() const {
    return is_any_ ? variable_.unpack() : at::Tensor();
  }
  void release() {
    if (is_any_) {
      variable_.reset_data();
    }
  }

 private:
  bool is_any_;
  SavedVariable variable_;
};

struct FP8Backward : Node {
  std::shared_ptr<const Functions> functions;
  std::shared_ptr<const Plan> plan;
  py::object state;  // of a linear layer: SavedWeight, how this forward has read the weight
  std::vector<int64_t> x_sizes;
  std::vector<Saved> saved;  // of a linear layer: offs, data and scale of x, and of the weight
  bool releases = false;

  ~FP8Backward() override {
    if (!Py_IsInitialized()) {
      state.release();
      return;
    }
    pybind11::gil_scoped_acquire gil;
    state = py::object();
    functions.reset();
    plan.reset();
    saved.clear();
  }

  std::string name() const override {
    return functions->name;
  }

  void release_variables() override {
    for (auto& each : saved) {
      each.release();
    }
  }

  // Compiled autograd calls this first, and traces Python functions.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd of an FP8 layer that ran eagerly (", name(),
        "), whose node is made in C++: compile the layer with torch.compile too, or set "
        "BLOCKTENSOR_PLAYER=0 before its first call, at the cost of host time");
  }

  // The engine says so unless the graph is retained.
  void will_release_variables() override {
    releases = true;
  }

  variable_list apply(variable_list&& grads) override {
    pybind11::gil_scoped_acquire gil;
    at::Tensor grad = std::move(grads[0]);
    grads.clear();
    variable_list values;
    for (const auto& each : saved) {
      values.push_back(each.value());  // may run a checkpointed forward
    }
    if (releases) {
      release_variables();
    }
    std::vector<bool> asked;
    for (size_t i = 0; i < num_outputs(); ++i) {
      asked.push_back(next_edge(i).is_valid() && task_should_compute_output(i));
    }
    bool is_usual = functions->is_linear() && grad.defined() && asked[0] &&
        !(asked.size() > 2 && asked[2]) && !plan->backward.is_none() &&
        !at::GradMode::is_enabled() && is_plain(grad) && !functions->is_special();
    py::object made;
    if (is_usual) {
      made = gradients_of_weight(grad, values, asked.size() > 1 && asked[1]);
    }
    if (!is_usual) {
      made = gradients(std::move(grad), std::move(values), asked);
    }
    variable_list found;
    for (size_t i = 0; i < asked.size(); ++i) {
      found.push_back(i < size_t(PyTuple_GET_SIZE(made.ptr())) ? tensor_or_none(item(made, i))
                                                              : at::Tensor());
    }
    if (functions->is_linear() && found[0].defined() && x_sizes.size() != 2) {
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      found[0] = found[0].view(x_sizes);
    }
    return found;
  }

  static PyTypeObject* type(const py::object& x) {
    return reinterpret_cast<PyTypeObject*>(x.ptr());
  }

 private:
  py::object gradients_of_weight(
      const at::Tensor& grad, const variable_list& values, bool needs_dw) const {
    WithoutOverrides without;
    py::object x = needs_dw ? form(values[1], values[2], plan->columnwise) : py::none();
    py::tuple weight(values.size() - 3);
    for (size_t i = 3; i < values.size(); ++i) {
      weight[i - 3] = wrapped(values[i]);
    }
    static PyObject* columnwise = PyUnicode_InternFromString("columnwise");
    PyObject* given[] = {state.ptr(), weight.ptr(), Py_True};
    auto w_col = returned(PyObject_VectorcallMethod(columnwise, given, 3, nullptr));
    return called(plan->backward, wrapped(grad), x, w_col, wrapped(values[0]), plan->plan);
  }

  py::object gradients(
      at::Tensor grad, variable_list values, const std::vector<bool>& asked) const {
    py::list saved_list, grads;
    for (auto& each : values) {
      saved_list.append(wrapped(each));
    }
    values.clear();
    grads.append(wrapped(grad));
    grad.reset();  // Python frees it as soon as it is cast
    py::list wanted;
    for (bool each : asked) {
      wanted.append(py::bool_(each));
    }
    return called(functions->gradients, plan->plan, state, saved_list, grads, wanted);
  }

  py::object form(const at::Tensor& data, const at::Tensor& scale, const py::object& format) const {
    auto* made = type(functions->quantized)->tp_alloc(type(functions->quantized), 3);
    if (!made) {
      throw python_error();
    }
    PyTuple_SET_ITEM(made, 0, THPVariable_Wrap(data));
    PyTuple_SET_ITEM(made, 1, THPVariable_Wrap(scale));
    PyTuple_SET_ITEM(made, 2, Py_NewRef(format.ptr()));
    return py::reinterpret_steal<py::object>(made);
  }
};

struct Layer {
  PyObject_HEAD
  vectorcallfunc call;
  std::shared_ptr<const Functions>* functions;
  Known<std::shared_ptr<const Plan>>* plans;
};

// The operands of a call: tensors, weights, and other objects. The first is the input.
struct Operands {
  c10::SmallVector<at::Tensor, 12> tensors;  // not defined where an operand is no tensor
  bool needs_graph = false;

  // Return false if Python must run the call.
  bool read(PyObject* const* args, size_t count, const Functions& functions, Call& call) {
    if (count == 0 || !THPVariable_CheckExact(args[0]) || functions.is_special()) {
      return false;
    }
    c10::SmallVector<PyObject*, 12> others;  // without the weights
    for (size_t i = 0; i < count; ++i) {
      bool is_weight = functions.is_weight(args[i]);
      if (!is_weight && is_tensor(args[i]) && !THPVariable_CheckExact(args[i])) {
        return false;
      }
      others.push_back(is_weight ? Py_None : args[i]);
      tensors.push_back(is_tensor(args[i]) ? THPVariable_Unpack(args[i]) : at::Tensor());
    }
    if (!is_plain(tensors[0]) || tensors[0].dim() == 0 ||
        !call.read(others.data(), count, functions.with_rows)) {
      return false;
    }
    bool has_graph = at::GradMode::is_enabled();
    Word flags = has_graph;
    for (size_t i = 0; i < count; ++i) {
      const auto& each = tensors[i];
      bool requires_grad = each.defined() && each.requires_grad();
      needs_graph |= has_graph && requires_grad;
      flags = flags << 1 | requires_grad;
      if (each.defined() && each._fw_grad(0).defined()) {
        return false;
      }
      if (functions.is_weight(args[i]) && !add_weight(args[i], each, call)) {
        return false;
      }
    }
    auto device = tensors[0].device().type();
    bool is_autocast = at::autocast::is_autocast_enabled(device);
    call.words.append(
        {flags, is_autocast ? Word(at::autocast::get_autocast_dtype(device)) : -1});
    return true;
  }

  static bool add_weight(PyObject* object, const at::Tensor& w, Call& call) {
    static PyObject* kind_name = PyUnicode_InternFromString("kind");
    auto kind = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, kind_name));
    if (!kind) {
      throw python_error();
    }
    if (kind.is_none()) {
      return false;
    }
    call.add_object(reinterpret_cast<PyObject*>(Py_TYPE(object)));
    call.add_object(kind.ptr());  // held by all weights of this kind
    call.words.push_back(
        Word(w.dim()) | Word(w.scalar_type()) << 8 | Word(w.device().type()) << 24 |
        Word(w.device().index()) << 32);
    call.words.append(w.sizes().begin(), w.sizes().end());
    call.words.append(w.strides().begin(), w.strides().end());
    return true;
  }

  // Return the edges of the node up to the last operand that may have a gradient.
  torch::autograd::edge_list edges() const {
    torch::autograd::edge_list made;
    size_t count = tensors.size();
    while (count && !(tensors[count - 1].defined() && tensors[count - 1].is_floating_point())) {
      --count;
    }
    for (size_t i = 0; i < count; ++i) {
      made.push_back(
          tensors[i].defined() ? torch::autograd::impl::gradient_edge(tensors[i])
                               : torch::autograd::Edge());
    }
    return made;
  }
};

// The output of a layer, before it has a node, and what backward needs.
struct Forward {
  at::Tensor y;
  variable_list saved;
  py::object state;

  Forward(
      const Functions& functions, const Plan& plan, PyObject* const* args, size_t count,
      const Operands& of) {
    at::AutoGradMode no_grad(false);
    WithoutOverrides without;
    if (functions.is_linear()) {
      run_linear(functions, plan, args, of);
      return;
    }
    c10::SmallVector<PyObject*, 14> given{plan.plan.ptr()};
    given.append(args, args + count);
    auto made =
        returned(PyObject_Vectorcall(functions.forward.ptr(), given.data(), given.size(), nullptr));
    y = THPVariable_Unpack(item(made, 0).ptr());
    save(item(made, 1));
    state = py::reinterpret_borrow<py::object>(item(made, 2));
  }

 private:
  void run_linear(
      const Functions& functions, const Plan& plan, PyObject* const* args, const Operands& of) {
    auto w = py::reinterpret_borrow<py::object>(args[1]);
    auto bias = py::reinterpret_borrow<py::object>(args[2]);
    auto offs = py::reinterpret_borrow<py::object>(args[3]);
    const auto& x = of.tensors[0];
    py::object w_read, w_saved, none = py::none();
    if (plan.casts_weight) {
      w_read = w.attr("cache").attr("master");
    } else {
      auto found = called(functions.read_weight, w, plan.plan);
      w_read = py::reinterpret_borrow<py::object>(item(found, 0));
      w_saved = py::reinterpret_borrow<py::object>(item(found, 1));
      state = py::reinterpret_borrow<py::object>(item(found, 2));
    }
    py::object x_row = none, x_col, run = functions.sharing_run();
    if (!run.is_none()) {
      auto given = py::reinterpret_borrow<py::object>(args[0]);
      auto forms = called(functions.shared_forms, run, given, offs, plan.plan);
      if (!forms.is_none()) {
        x_row = py::reinterpret_borrow<py::object>(item(forms, 0));
        x_col = py::reinterpret_borrow<py::object>(item(forms, 1));
      }
    }
    auto made = called(plan.fprop, wrapped(x), x_row, w_read, bias, offs, plan.plan);
    y = THPVariable_Unpack(item(made, 0).ptr());
    if (plan.casts_weight) {
      auto w_col = py::reinterpret_borrow<py::object>(item(made, 2));
      auto found = called(functions.hold_cast, w, plan.plan, w_col);
      w_saved = py::reinterpret_borrow<py::object>(item(found, 0));
      state = py::reinterpret_borrow<py::object>(item(found, 1));
    }
    if (!of.needs_graph) {
      return;
    }
    saved.push_back(of.tensors[3]);
    if (!x_col) {
      x_col = py::reinterpret_borrow<py::object>(item(made, 1));
    }
    bool has_form = !plan.saves_x && !x_col.is_none();
    saved.push_back(plan.saves_x ? x : has_form ? tensor_or_none(item(x_col, 0)) : at::Tensor());
    saved.push_back(has_form ? tensor_or_none(item(x_col, 1)) : at::Tensor());
    save(w_saved);
  }

  void save(const py::handle& tensors) {
    for (const auto& each : tensors) {
      saved.push_back(tensor_or_none(each));
    }
  }
};

PyObject* layer_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  auto* self = reinterpret_cast<Layer*>(object);
  HANDLE_TH_ERRORS
  size_t count = PyVectorcall_NARGS(flags);
  Call call;
  Operands of;
  auto functions = *self->functions;
  std::shared_ptr<const Plan> plan;
  if (of.read(args, count, *functions, call)) {
    if (auto* found = self->plans->find(call)) {
      plan = *found;
    }
  }
  if (!plan) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  if (plan->casts_x) {
    of.tensors[0] = of.tensors[0].to(plan->dtype);
  }
  auto sizes = of.tensors[0].sizes().vec();
  Forward made(*functions, *plan, args, count, of);
  if (of.needs_graph) {
    auto* node = new FP8Backward();
    NodePointer pointer = owned(node);
    node->functions = functions;
    node->plan = plan;
    node->state = made.state;
    node->x_sizes = sizes;
    node->set_next_edges(of.edges());
    for (const auto& each : made.saved) {
      node->saved.emplace_back(each);
    }
    torch::autograd::set_history(made.y, pointer);
  }
  if (sizes.size() != 2 || !functions->is_linear()) {
    sizes.back() = made.y.size(-1);
    made.y = at::_unsafe_view(made.y, sizes);  // autograd/backward.py: a node for the caller
  }
  return THPVariable_Wrap(made.y);
  END_HANDLE_TH_ERRORS
}

// layer.put(operands, plan, fprop, backward): remember how calls like this one run
PyObject* layer_put(PyObject* object, PyObject* given) {
  auto* self = reinterpret_cast<Layer*>(object);
  HANDLE_TH_ERRORS
  PyObject *args, *plan, *fprop = Py_None, *backward = Py_None;
  if (!PyArg_ParseTuple(given, "O!O|OO", &PyTuple_Type, &args, &plan, &fprop, &backward)) {
    return nullptr;
  }
  const auto& functions = **self->functions;
  Call call;
  Operands of;
  if (!of.read(&PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), functions, call)) {
    Py_RETURN_FALSE;
  }
  Plan made{py::reinterpret_borrow<py::object>(plan)};
  if (functions.is_linear()) {
    TORCH_CHECK_TYPE(of.tensors.size() == 5, "expected x, w, bias, offs and recipe");
    made.fprop = py::reinterpret_borrow<py::object>(fprop);
    made.backward = py::reinterpret_borrow<py::object>(backward);
    made.columnwise = made.plan.attr("x_columnwise");
    made.casts_x = made.plan.attr("casts_x").cast<bool>();
    made.casts_weight = made.plan.attr("casts_weight").cast<bool>();
    made.saves_x = made.plan.attr("saves_x").cast<bool>();
    py::object dtype = made.plan.attr("out_dtype");
    made.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  }
  self->plans->put(call, std::make_shared<const Plan>(std::move(made)));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// layer.plan(operands): the plan of calls like this one, or None
PyObject* layer_plan(PyObject* object, PyObject* args) {
  auto* self = reinterpret_cast<Layer*>(object);
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyTuple_Check(args), "expected a tuple of operands");
  Call call;
  Operands of;
  if (of.read(&PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), **self->functions, call)) {
    if (auto* found = self->plans->find(call)) {
      return Py_NewRef((*found)->plan.ptr());
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* layer_new(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* name;
  PyObject *weight, *frozen, *forward, *gradients, *thread, *sharing;
  PyObject *quantized, *hold_cast, *read_weight, *shared_forms;
  Py_ssize_t most;
  long long with_rows;
  if (!PyArg_ParseTuple(
          args, "snOOOOOOOOOOL", &name, &most, &weight, &frozen, &forward, &gradients, &thread,
          &sharing, &quantized, &hold_cast, &read_weight, &shared_forms, &with_rows)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Layer*>(type->tp_alloc(type, 0));
  if (self) {
    auto object = [](PyObject* x) { return py::reinterpret_borrow<py::object>(x); };
    self->call = layer_call;
    self->functions = new std::shared_ptr<const Functions>(std::make_shared<const Functions>(
        Functions{name, object(weight), object(frozen), object(forward), object(gradients),
                  object(thread), object(sharing), object(quantized), object(hold_cast),
                  object(read_weight), object(shared_forms), with_rows}));
    self->plans = new Known<std::shared_ptr<const Plan>>(size_t(most));
  }
  return reinterpret_cast<PyObject*>(self);
}

void layer_free(PyObject* object) {
  auto* self = reinterpret_cast<Layer*>(object);
  delete self->plans;
  delete self->functions;
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef layer_methods[] = {
    {"put", layer_put, METH_VARARGS,
     "put(operands, plan, fprop=None, backward=None): remember how calls like this run"},
    {"plan", layer_plan, METH_O, "plan(operands): the plan of calls like this one, or None"},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject LayerType = {PyVarObject_HEAD_INIT(nullptr, 0) "blocktensor_player.Layer"};

// ---------------------------------------------------------------------------------------------
// Registered ops

// The latest call that Python has computed in this thread, to be repeated; see `remember`.
thread_local std::shared_ptr<Recording> latest;

struct Repeated {  // the calls of one op that are known; the GIL is held while they are used
  Known<std::shared_ptr<Recording>> known{4096};
};

// The kernel of a registered op for one dispatch key. It repeats known calls; others go to the
// kernel that it replaces.
struct Kernel : c10::OperatorKernel {
  Repeated* repeated;  // never freed: the dispatcher outlives Python
  c10::SafeKernelFunction otherwise;
  std::string letters;

  Kernel(Repeated* of, c10::SafeKernelFunction replaced, std::string of_arguments)
      : repeated(of), otherwise(std::move(replaced)), letters(std::move(of_arguments)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    size_t count = op.schema().arguments().size();
    auto args = c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - count, count);
    Call call;
    if (is_special(keys, args) || !call.read(args, letters)) {
      return otherwise.callBoxed(op, keys, stack);
    }
    std::shared_ptr<Recording> recording;
    {
      pybind11::gil_scoped_acquire gil;
      auto* found = hooked() ? nullptr : repeated->known.find(call);
      if (found) {
        recording = *found;
      }
    }
    if (!recording) {
      latest.reset();
      otherwise.callBoxed(op, keys, stack);
      if (auto made = std::move(latest)) {
        pybind11::gil_scoped_acquire gil;
        repeated->known.put(call, made);
      }
      return;
    }
    std::vector<at::Tensor> flat;
    recording->flatten(recording->result, recording->run(call), flat);
    torch::jit::drop(*stack, count);
    const auto& returns = op.schema().returns();
    if (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType) {
      stack->emplace_back(std::move(flat));
    } else {
      for (auto& each : flat) {
        stack->emplace_back(std::move(each));
      }
    }
  }

  // Return true if a mode, a subclass or autograd must see the call.
  static bool is_special(c10::DispatchKeySet keys, c10::ArrayRef<c10::IValue> args) {
    static const c10::DispatchKeySet of_modes(
        {c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
    if (keys.has_any(of_modes) || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      return true;
    }
    if (!keys.has_any(c10::autograd_dispatch_keyset)) {
      return false;
    }
    bool has_graph = at::GradMode::is_enabled();
    for (const auto& each : args) {
      if (!each.isTensor() || !each.toTensor().defined()) {
        continue;
      }
      const auto& tensor = each.toTensor();
      if ((has_graph && tensor.requires_grad()) || tensor._fw_grad(0).defined()) {
        return true;  // also for a tangent (forward-mode AD), which the op refuses
      }
    }
    return false;
  }
};

// Put kernels that repeat calls before the kernels of an op, for as long as the process runs.
void repeat_op(const std::string& name, const std::string& letters) {
  static auto* library = new std::vector<torch::Library>();
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("blocktensor::" + name).c_str(), "");
  TORCH_CHECK_VALUE(letters.size() == op.schema().arguments().size(), "a letter for each argument");
  auto* repeated = new Repeated();
  for (auto key : {c10::DispatchKey::AutogradCUDA, c10::DispatchKey::CUDA}) {
    auto kernel =
        std::make_unique<Kernel>(repeated, op.getComputedKernelForDispatchKey(key), letters);
    library->emplace_back(
        torch::Library::IMPL, "blocktensor", c10::make_optional(key), __FILE__, __LINE__);
    library->back().impl(
        name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
}

// Add a type whose objects can be called.
template <class Object>
void add_type(
    py::module_& m, const char* name, PyTypeObject& type, newfunc make, destructor free,
    PyMethodDef* methods) {
  type.tp_basicsize = sizeof(Object);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(Object, call);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = make;
  type.tp_dealloc = free;
  type.tp_methods = methods;
  if (PyType_Ready(&type) < 0) {
    throw py::error_already_set();
  }
  m.attr(name) = py::handle(reinterpret_cast<PyObject*>(&type));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  table_sequence.sq_length = table_length;
  TableType.tp_as_sequence = &table_sequence;
  add_type<Table>(m, "Table", TableType, table_new, table_free, table_methods);
  add_type<Layer>(m, "Layer", LayerType, layer_new, layer_free, layer_methods);
  m.def("repeat_op", &repeat_op);
  m.def("remember", [](std::shared_ptr<Recording> recording) { latest = std::move(recording); });
  py::class_<Recording, std::shared_ptr<Recording>>(m, "Recording")
      .def(py::init(&record))
      .def_property_readonly("allocations", [](const Recording& self) {  // sizes and strides
        py::list listed;
        for (const auto& each : self.allocations) {
          listed.append(py::make_tuple(each.sizes, each.strides));
        }
        return listed;
      })
      .def("__call__", [](const Recording& self, const py::args& args) {
        Call call;
        TORCH_CHECK_TYPE(
            call.read(&PyTuple_GET_ITEM(args.ptr(), 0), args.size(), self.with_rows),
            "tensors without memory");
        return py::reinterpret_steal<py::object>(self.play(call));
      });
  m.def("plays", [] { return plays.load(); });
  // The number of rows that may differ between calls of this kind; -1 if there is none.
  m.def("rows_of", [](const py::tuple& args, Word with_rows) {
    Call call;
    bool is_known = call.read(&PyTuple_GET_ITEM(args.ptr(), 0), args.size(), with_rows);
    return is_known && (call.in_groups || call.in_steps) ? call.rows : -1;
  });
  m.def("load", [](const py::object& runtime) {
    driver.load();
    hooks = new py::object(runtime);
  });
  m.def("use_driver", [](uintptr_t launch, uintptr_t encode, const py::object& runtime) {
    driver.launch = reinterpret_cast<Driver::Launch>(launch);
    driver.encode = reinterpret_cast<Driver::Encode>(encode);
    hooks = new py::object(runtime);
  });
}
