// Repeats recorded calls: finds the recording of a call by the layouts of all its arguments,
// allocates, and launches. Python decides and records (record.py); nothing here knows an op.
//
// Built at first use for the torch and Python that are installed (build_player.py).

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
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

constexpr Word kGroupStep = 256;  // GROUP_STEP of ops/formats.py
constexpr Word kRowsOfCall = -1;  // stands for a first size that is the number of rows in groups

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

  // Return false if an argument is a tensor without memory or of another type.
  bool read(PyObject* const* args, size_t count) {
    const char* backend = std::getenv("BLOCKTENSOR_GEMM");
    add_text(backend ? backend : "", backend ? std::strlen(backend) : 0);
    for (size_t i = 0; i < count && rows < 0; ++i) {
      if (i == 0 && is_tensor(args[0])) {
        const auto& first = THPVariable_Unpack(args[0]);
        rows = first.dim() ? first.size(0) : 0;
      } else if (PyLong_CheckExact(args[i])) {
        rows = PyLong_AsLongLong(args[i]);
      }
    }
    for (size_t i = 0; i < count && !in_groups; ++i) {
      in_groups = is_tensor(args[i]) &&
          THPVariable_Unpack(args[i]).scalar_type() == at::kInt;
    }
    words.push_back(in_groups ? (rows + kGroupStep - 1) / kGroupStep : -1);
    for (size_t i = 0; i < count; ++i) {
      if (!add(args[i], in_groups)) {
        return false;
      }
    }
    return true;
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
        if (!add(PyTuple_GET_ITEM(x, i), false)) {
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
      if (by_rows && value == rows) {
        words.push_back(kRowsInt);
      } else {
        words.append({kInt, value});
      }
      return true;
    }
    if (PyFloat_CheckExact(x)) {
      double value = PyFloat_AS_DOUBLE(x);
      Word bits;
      std::memcpy(&bits, &value, sizeof bits);
      words.append({kFloat, bits});
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
    words.append({kObject, reinterpret_cast<Word>(x)});
    objects.push_back(x);
    return true;
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

struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool has_rows;  // the first size is the number of rows of the call
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

  // Return the tensors that the call allocates.
  std::vector<at::Tensor> allocate(Word rows) const {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<at::Tensor> made;
    made.reserve(allocations.size());
    for (const auto& each : allocations) {
      auto options = at::TensorOptions().dtype(each.dtype).device(device);
      if (each.has_rows) {
        auto sizes = each.sizes;
        sizes[0] = rows;
        made.push_back(at::empty_strided(sizes, each.strides, options));
      } else {
        made.push_back(at::empty_strided(each.sizes, each.strides, options));
      }
    }
    return made;
  }

  void launch(const Call& call, const std::vector<at::Tensor>& made, CUstream stream) const {
    c10::SmallVector<char*, 48> bases;
    for (const auto& x : call.tensors) {
      bases.push_back(static_cast<char*>(const_cast<void*>(x.const_data_ptr())));
    }
    for (const auto& x : made) {
      bases.push_back(static_cast<char*>(x.mutable_data_ptr()));
    }
    for (const auto& each : launches) {
      launch_one(each, bases.data(), call.rows, stream);
    }
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
          numbers[count] = rows;
          break;
        case Parameter::kMap:
          encode(each.map, address, &maps[next_map]);
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

  static void encode(const Map& of, char* address, CUtensorMap* map) {
    static const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    check(
        driver.encode(
            map, of.dtype, cuuint32_t(of.sizes.size()), address, of.sizes.data(),
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

  PyObject* play(const Call& call) const {
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
    auto made = allocate(call.rows);
    {
      pybind11::gil_scoped_release no_gil;
      launch(call, made, stream);
    }
    return wrap(result, made);
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

struct Entry {
  std::vector<Word> words;
  std::vector<py::object> held;  // objects whose addresses are in the key
  uint64_t hash;
  std::shared_ptr<Recording> recording;
  py::object function;  // called where there is no recording, or a hook is set
};

struct Table {
  PyObject_HEAD
  vectorcallfunc call;
  std::list<Entry>* entries;  // the oldest first
  std::unordered_multimap<uint64_t, std::list<Entry>::iterator>* found;
  PyObject* miss;
  size_t most;
};

std::list<Entry>::iterator find(Table* self, const Call& call, uint64_t hash) {
  auto range = self->found->equal_range(hash);
  for (auto it = range.first; it != range.second; ++it) {
    const auto& words = it->second->words;
    if (words.size() == call.words.size() &&
        std::memcmp(words.data(), call.words.data(), words.size() * sizeof(Word)) == 0) {
      return it->second;
    }
  }
  return self->entries->end();
}

void forget(Table* self, std::list<Entry>::iterator entry) {
  auto range = self->found->equal_range(entry->hash);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second == entry) {
      self->found->erase(it);
      break;
    }
  }
  self->entries->erase(entry);
}

PyObject* table_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  auto* self = reinterpret_cast<Table*>(object);
  HANDLE_TH_ERRORS
  size_t count = PyVectorcall_NARGS(flags);
  Call call;
  if (call.read(args, count)) {
    auto entry = find(self, call, call.hash());
    if (entry != self->entries->end()) {
      auto recording = entry->recording;  // held: another thread may forget the entry
      py::object function = entry->function;
      if (recording && !hooked()) {
        return recording->play(call);
      }
      return PyObject_Vectorcall(function.ptr(), args, count, nullptr);
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
  if (!call.read(&PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args))) {
    Py_RETURN_FALSE;
  }
  auto hash = call.hash();
  auto known = find(self, call, hash);
  if (known != self->entries->end()) {
    forget(self, known);
  }
  while (self->entries->size() >= self->most) {
    forget(self, self->entries->begin());
  }
  Entry entry;
  entry.words.assign(call.words.begin(), call.words.end());
  for (PyObject* each : call.objects) {
    entry.held.push_back(py::reinterpret_borrow<py::object>(each));
  }
  entry.hash = hash;
  entry.function = py::reinterpret_borrow<py::object>(function);
  if (recording != Py_None) {
    entry.recording = py::cast<std::shared_ptr<Recording>>(py::handle(recording));
  }
  self->entries->push_back(std::move(entry));
  self->found->emplace(hash, std::prev(self->entries->end()));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* table_forget(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Table*>(object);
  self->found->clear();
  self->entries->clear();
  Py_RETURN_NONE;
}

Py_ssize_t table_length(PyObject* object) {
  return Py_ssize_t(reinterpret_cast<Table*>(object)->entries->size());
}

PyObject* table_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* miss;
  Py_ssize_t most;
  if (!PyArg_ParseTuple(args, "On", &miss, &most)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Table*>(type->tp_alloc(type, 0));
  if (self) {
    self->call = table_call;
    self->entries = new std::list<Entry>();
    self->found = new std::unordered_multimap<uint64_t, std::list<Entry>::iterator>();
    self->miss = Py_NewRef(miss);
    self->most = size_t(most);
  }
  return reinterpret_cast<PyObject*>(self);
}

void table_free(PyObject* object) {
  auto* self = reinterpret_cast<Table*>(object);
  delete self->found;
  delete self->entries;
  Py_XDECREF(self->miss);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef table_methods[] = {
    {"put", table_put, METH_VARARGS,
     "put(args, function, recording=None): remember how calls like this one run"},
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
  } else if (kind == "pointer") {
    made.kind = Parameter::kPointer;
    made.at = {given[1].cast<int32_t>(), given[2].cast<int64_t>()};
  } else {
    made.kind = Parameter::kMap;
    made.at = {given[1].cast<int32_t>(), given[2].cast<int64_t>()};
    made.map.dtype = CUtensorMapDataType(given[3].cast<int>());
    made.map.swizzle = CUtensorMapSwizzle(given[4].cast<int>());
    made.map.fill = CUtensorMapFloatOOBfill(given[5].cast<int>());
    made.map.sizes = given[6].cast<std::vector<cuuint64_t>>();
    made.map.strides = given[7].cast<std::vector<cuuint64_t>>();
    made.map.box = given[8].cast<std::vector<cuuint32_t>>();
  }
  return made;
}

std::shared_ptr<Recording> record(
    const py::object& device,
    const py::list& allocations,
    const py::list& launches,
    const py::handle& result,
    const py::object& compiled) {
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
  made->compiled = compiled;
  return made;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  TableType.tp_basicsize = sizeof(Table);
  TableType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  TableType.tp_vectorcall_offset = offsetof(Table, call);
  TableType.tp_call = PyVectorcall_Call;
  TableType.tp_new = table_new;
  TableType.tp_dealloc = table_free;
  TableType.tp_methods = table_methods;
  table_sequence.sq_length = table_length;
  TableType.tp_as_sequence = &table_sequence;
  if (PyType_Ready(&TableType) < 0) {
    throw py::error_already_set();
  }
  m.attr("Table") = py::handle(reinterpret_cast<PyObject*>(&TableType));
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
            call.read(&PyTuple_GET_ITEM(args.ptr(), 0), args.size()), "tensors without memory");
        return py::reinterpret_steal<py::object>(self.play(call));
      });
  m.def("plays", [] { return plays.load(); });
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
