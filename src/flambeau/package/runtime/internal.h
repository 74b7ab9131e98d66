/* Declarations that the files of the runtime share. docs/reference/package-format.md describes the format. */
#ifndef FLAMBEAU_INTERNAL_H
#define FLAMBEAU_INTERNAL_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "flambeau.h"
#include "kernels.h"

int fl_member(void);
int fl_members(void);
void fl_parallel(void (*part)(void*), void* data, unsigned members);
void fl_sha256(const void* data, size_t size, uint8_t out[32]);
int fl_fail(flam_error* error, int code, const char* format, ...) __attribute__((format(printf, 3, 4)));
size_t fl_itemsize(int64_t dtype); /* 0: not a dtype */
const char* fl_dtype(int64_t dtype);
flam_caller fl_caller(void); /* NULL: there is none */
int fl_supports(const char* features, char* missing, size_t size); /* on this CPU */

/* ---- a program, as in the index: its numbers are computed at run time, each from those before it ---- */

enum {
  OP_CONST, OP_SIZE, OP_STRIDE, OP_ADD, OP_SUB, OP_MUL, OP_DIV, OP_MOD, OP_MIN, OP_MAX, /* integers */
  OP_FLOAT, OP_FADD, OP_FSUB, OP_FMUL, OP_FDIV, OP_SQRT, /* doubles, as bits */
  OP_UNITS,                                              /* cores of the device */
  OP_COUNT
};
enum { PLACE_INPUT, PLACE_WEIGHT, PLACE_STATE, PLACE_OUTPUT, PLACE_TEMPORARY, PLACE_SEED, PLACE_COUNT };
enum { STEP_LAUNCH, STEP_COPY, STEP_DEVICE, STEP_CALL, STEP_COUNT };

typedef struct {
  int64_t op, a, b;
} number;

typedef struct {
  int64_t place, which, bytes; /* bytes: index of a run-time number */
  int64_t first, last;         /* the first and last step that use a temporary */
} buffer;

typedef struct {
  int64_t kind;
  int64_t kernel, pointer_count, size_count, site_count; /* for a launch */
  const int64_t *pointers, *sizes, *sites;               /* (buffer, offset) and numbers; (code, number or -1) */
  int64_t to, to_offset, from, from_offset, itemsize, rank; /* for a copy */
  const int64_t *dims, *to_strides, *from_strides;
  int64_t checks, work, choice_count; /* for a launch on a device: its pointers are (buffer, offset, itemsize) */
  const int64_t* choices;             /* (number of a condition or -1, count, (function, three numbers of groups)...) */
  int64_t record;
  const char* call; /* for a call of torch */
  int64_t tensor_count, result_count;
  const int64_t* tensors; /* (buffer, number of the offset, dtype, rank, numbers of sizes, of strides) */
  const char* origin;
} step;

typedef struct {
  int64_t dtype, rank;
  const char *name, *type;
  const int64_t* dims; /* (lo, hi) for each */
} port;

typedef struct {
  const char* name;
  int64_t input_count, output_count;
  port *inputs, *outputs;
} method;

/* The memory of one call. Contexts are used again by later calls. */
typedef struct context {
  struct context* next;
  int64_t *numbers, *offsets; /* offsets: for the temporaries */
  void** pointers;
  int64_t* shape; /* shapes of the inputs for which numbers and offsets were computed */
  void** arguments;
  int64_t* words;
  void* arena;
  size_t arena_bytes, needed;
  int ready;
  struct {                      /* on a device */
    uint64_t arena, records;
    flam_place *buffers, *arguments;
    int64_t* stage;             /* offsets in the arena of inputs and outputs that are in host memory */
    int64_t work, seeds;        /* their offsets */
    size_t staged;              /* bytes of the arena with them */
    void *stream, *mark;
  } there;
} context;

typedef struct {
  int64_t number_count, buffer_count, step_count, shape_count, most_pointers, most_sizes, seed_count, record_count;
  const number* numbers;
  const buffer* buffers;
  step* steps;
  const int64_t **input_dims, **input_strides;   /* numbers that sizes and strides must be equal to, or -1 */
  const int64_t **output_dims, **output_strides; /* the numbers that are their sizes and strides */
  const flam_kernel* kernels;
  context* free;
  int has_state;
} program;

typedef struct {
  const char* name;
  int64_t dtype, mutable_, offset, bytes, rank;
  const int64_t *sizes, *strides;
} weight;

typedef struct {
  _Atomic int64_t uses;
  void* data;
  int owned;
  uint64_t there; /* memory on a device, always owned */
} block;

/* A value for each weight. A call uses those that were current when it started. */
typedef struct {
  _Atomic int64_t uses;
  block** blocks;
} weight_set;

typedef struct {
  const char *key, *value;
} pair;

struct flam_model {
  _Atomic int64_t uses;
  pthread_mutex_t lock;       /* guards `weights`, contexts and `seed` */
  pthread_mutex_t state_lock; /* held while a method runs that reads or writes state */
  pthread_mutex_t update_lock;
  const uint8_t* file;
  size_t size;
  int mapped, code_file;
  int64_t* index; /* a copy, with strings that end in zero */
  int64_t pair_count, weight_count, method_count, fault_count;
  pair* pairs;
  weight* weights_known;
  method* methods;
  program* programs;    /* one for each method */
  const char** faults;  /* by kind */
  weight_set* weights;
  void** states;
  uint64_t* states_there;
  void* library;
  const flam_device* device; /* NULL: it runs on the CPU */
  void* opened;
  flam_function* functions;
  int64_t function_count;
  int64_t units;
  uint64_t seed;
  void* allocations; /* a list of all allocations above */
};

void fl_release(flam_model*);
void fl_release_weights(flam_model*, weight_set*);
void* fl_aligned(size_t bytes);
void* fl_kept(flam_model* m, int64_t count, size_t size); /* memory that is freed with the model */

/* ---- device.c ---- */
const flam_device* fl_device(const char* features, const char** rest); /* by the first word, or NULL */
int fl_open_device(flam_model* m, const flam_device* d, const char* features, int number, const uint8_t* code, size_t size,
                   flam_error* error);
void fl_close_device(flam_model* m);
void fl_release_there(const flam_model* m, uint64_t memory);
int fl_weights_there(flam_model* m, flam_error* error);
int fl_block_there(const flam_model* m, block* b, size_t bytes, flam_error* error);
int fl_state_there(const flam_model* m, int64_t k, flam_error* error); /* as m->states has it */
int fl_lay_out(const flam_model* m, const program* p, const method* of, context* c, const flam_tensor* inputs, flam_error* error);
int fl_run_there(const flam_model* m, const program* p, const method* of, context* c, const flam_tensor* inputs,
                 const flam_tensor* outputs, const weight_set* weights, int on_device, void* stream, flam_error* error);
void fl_drop_context(const flam_model* m, context* c);

/* ---- run.c ---- */
void fl_described(const flam_tensor* t, int strides, char* out, size_t size);
int64_t fl_extent(const int64_t* sizes, const int64_t* strides, int64_t rank, int64_t itemsize);
int64_t* fl_seeds(const program* p, const context* c);
int fl_fault(const flam_model* m, const context* c, const step* s, int64_t code, flam_error* error);
#endif
