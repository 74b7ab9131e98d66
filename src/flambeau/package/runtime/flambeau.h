/* The runtime of Flambeau's packages: loads a .flam file and runs its methods on the CPU, without Python and torch.

     flam_error error;
     flam_model* model = flam_load("model.flam", NULL, &error);
     flam_tensor x = {data, FLAM_FLOAT32, 2, {4, 8}, {8, 1}}, y = {0};
     if (flam_run(model, 0, &x, 1, &y, 1, &error)) puts(error.message);
     flam_free(y.data);
     flam_unload(model);

   Any number of threads may use a model at once. No function ends the process or throws. A function that can fail
   returns a code, and writes the reason, a sentence, to `error`. */
#ifndef FLAMBEAU_H
#define FLAMBEAU_H
#include <stddef.h>
#include <stdint.h>

#define FLAM_MAJOR 1 /* of the format: files with a newer one are refused */
#define FLAM_MINOR 4
#define FLAM_MAX_RANK 16
#define FLAM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum {
  FLAM_OK = 0,
  FLAM_FILE = 1,     /* the file cannot be read, or is damaged */
  FLAM_VERSION = 2,  /* its format is newer than this runtime */
  FLAM_MACHINE = 3,  /* the file has no code for this machine */
  FLAM_ARGUMENT = 4, /* wrong arguments */
  FLAM_DATA = 5,     /* a kernel found an error in the data, such as an index out of bounds */
  FLAM_MEMORY = 6    /* there is not enough memory */
};

enum {
  FLAM_BOOL = 1, FLAM_UINT8, FLAM_INT8, FLAM_UINT16, FLAM_INT16, FLAM_UINT32, FLAM_INT32, FLAM_UINT64, FLAM_INT64,
  FLAM_FLOAT16, FLAM_BFLOAT16, FLAM_FLOAT32, FLAM_FLOAT64
};

typedef struct {
  int32_t code;
  char message[1020];
} flam_error;

typedef struct {
  void* data;
  int32_t dtype, rank;
  int64_t sizes[FLAM_MAX_RANK];
  int64_t strides[FLAM_MAX_RANK]; /* in elements */
} flam_tensor;

typedef struct flam_model flam_model;

/* `target`: one of those in the file, or NULL for the first that runs here. The file must not change while it is open. */
FLAM_API flam_model* flam_load(const char* path, const char* target, flam_error* error);
/* The same on the device with this number, for targets that are devices. */
FLAM_API flam_model* flam_load_on(const char* path, const char* target, int number, flam_error* error);
/* The same for a file in memory. The memory must start at a multiple of 64, and stay unchanged until flam_unload. */
FLAM_API flam_model* flam_load_memory(const void* data, size_t size, const char* target, flam_error* error);
/* Calls that are running finish normally; memory is freed after the last of them. */
FLAM_API void flam_unload(flam_model*);
/* Adds an owner, which has to call flam_unload too: for threads that do not know when the others are done. */
FLAM_API void flam_retain(flam_model*);

FLAM_API int flam_method(const flam_model*, const char* name); /* its number, or -1 */
FLAM_API const char* flam_method_name(const flam_model*, int method); /* NULL: there is no such method */
FLAM_API int flam_input_count(const flam_model*, int method);
FLAM_API int flam_output_count(const flam_model*, int method);
FLAM_API const char* flam_input_name(const flam_model*, int method, int input);
FLAM_API const char* flam_input_type(const flam_model*, int method, int input); /* "float32 [N, 3] contiguous" */
FLAM_API const char* flam_metadata(const flam_model*, const char* key); /* NULL: there is no such key */

/* Dtype, sizes and strides of the results for these inputs; their data is not read. */
FLAM_API int flam_shapes(flam_model*, int method, const flam_tensor* inputs, int input_count, flam_tensor* outputs,
                         int output_count, flam_error* error);
/* Outputs whose data is NULL are allocated and described, and the caller frees them with flam_free. Outputs with data
   must be described as by flam_shapes. Nothing is written unless all inputs and outputs are valid. */
FLAM_API int flam_run(flam_model*, int method, const flam_tensor* inputs, int input_count, flam_tensor* outputs,
                      int output_count, flam_error* error);
FLAM_API void flam_free(void* data);
/* The same with inputs and outputs on the model's GPU (by address, so only for CUDA), in a stream of the caller. It does
   not wait for the stream, unless kernels have indices to check. */
FLAM_API int flam_run_on(flam_model*, int method, const flam_tensor* inputs, int input_count, flam_tensor* outputs,
                         int output_count, void* stream, flam_error* error);

/* Both with a structure that is filled once and used again, for callers that pay for each argument. `on_device`: 1 for
   flam_run_on. */
typedef struct {
  flam_model* model;
  const flam_tensor* inputs;
  flam_tensor* outputs;
  flam_error* error;
  void* stream;
  int32_t method, input_count, output_count, on_device;
} flam_call;
FLAM_API int flam_run_call(const flam_call*);

/* Adds a device besides the CPU, before a package is loaded: flam_add_device(flam_cuda()), from device.h. */
struct flam_device;
FLAM_API int flam_add_device(const struct flam_device*); /* 0: it has another version */
FLAM_API const char* flam_device_name(const flam_model*); /* "cpu", "cuda", "opencl", "metal" */

/* Calls operators that a package leaves to torch; set it before such a package is loaded. `call` names the operator (see
   docs/reference/package-format.md), and the last `results` tensors are written. Returns 0, or a code with the reason. */
typedef int (*flam_caller)(const char* call, const flam_tensor* tensors, int count, int results, const int64_t* numbers,
                           flam_error* error);
FLAM_API void flam_set_caller(flam_caller);

/* Replaces weights, all at once: a call sees all old ones or all new ones. The values are copied. */
FLAM_API int flam_update_weights(flam_model*, const char* const* names, const flam_tensor* values, int count,
                                 flam_error* error);

FLAM_API void flam_set_threads(int count); /* of the process; the default is OMP_NUM_THREADS, or one for each core */
FLAM_API int flam_threads(void);
FLAM_API void flam_seed(flam_model*, uint64_t seed);     /* for the random numbers that methods draw */
FLAM_API uint64_t flam_hash(const void* data, size_t size); /* the quick checksum of the format */

#ifdef __cplusplus
}
#endif
#endif
