/* Reads a file into a model. Every count, offset and number is checked before it is used. */
#include "internal.h"
#include "words.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int fl_fail(flam_error* error, int code, const char* format, ...) {
  if (error) {
    va_list list;
    va_start(list, format);
    error->code = code;
    vsnprintf(error->message, sizeof error->message, format, list);
    va_end(list);
  }
  return code;
}

static const struct {
  const char* name;
  size_t size;
} dtypes[] = {{"", 0}, {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"uint16", 2}, {"int16", 2}, {"uint32", 4}, {"int32", 4},
              {"uint64", 8}, {"int64", 8}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};

size_t fl_itemsize(int64_t dtype) { return dtype < 1 || dtype > FLAM_FLOAT64 ? 0 : dtypes[dtype].size; }
const char* fl_dtype(int64_t dtype) { return fl_itemsize(dtype) ? dtypes[dtype].name : "an unknown dtype"; }

void* fl_aligned(size_t bytes) {
  void* found;
  return posix_memalign(&found, 64, bytes ? bytes : 64) ? NULL : found;
}

/* One thread at a time loads and unloads code: sanitizers do not see the C library's own lock. */
static pthread_mutex_t loader = PTHREAD_MUTEX_INITIALIZER;

/* ---- memory of a model ---- */

void* fl_kept(flam_model* m, int64_t count, size_t size) {
  void** found = calloc(1, sizeof(void*) * 2 + (size_t)count * size); /* counts are at most the words of the file */
  if (!found) return NULL;
  found[0] = m->allocations;
  m->allocations = found;
  return found + 2;
}

void fl_release_weights(flam_model* m, weight_set* s) {
  if (!s || atomic_fetch_sub(&s->uses, 1) != 1) return;
  for (int64_t k = 0; s->blocks && k < m->weight_count; ++k) {
    block* b = s->blocks[k];
    if (b && atomic_fetch_sub(&b->uses, 1) == 1) {
      if (b->owned) free(b->data);
      if (b->there) fl_release_there(m, b->there);
      free(b);
    }
  }
  free(s->blocks);
  free(s);
}

void fl_release(flam_model* m) {
  if (atomic_fetch_sub(&m->uses, 1) != 1) return;
  for (int64_t k = 0; m->programs && k < m->method_count; ++k) {
    while (m->programs[k].free) {
      context* c = m->programs[k].free;
      m->programs[k].free = c->next;
      if (m->opened) fl_drop_context(m, c);
      free(c->arena);
      free(c);
    }
  }
  fl_release_weights(m, m->weights);
  for (int64_t k = 0; m->states && k < m->weight_count; ++k) free(m->states[k]);
  fl_close_device(m);
  pthread_mutex_lock(&loader);
  if (m->library) dlclose(m->library);
  if (m->code_file >= 0) close(m->code_file);
  pthread_mutex_unlock(&loader);
  if (m->mapped) munmap((void*)m->file, m->size);
  while (m->allocations) {
    void** found = m->allocations;
    m->allocations = found[0];
    free(found);
  }
  pthread_mutex_destroy(&m->lock);
  pthread_mutex_destroy(&m->state_lock);
  pthread_mutex_destroy(&m->update_lock);
  free(m);
}

void flam_retain(flam_model* m) { atomic_fetch_add(&m->uses, 1); }
void flam_unload(flam_model* m) {
  if (m) fl_release(m);
}

/* ---- the index ---- */

static void read_ports(flam_model* m, cursor* c, int64_t* count, port** ports, int ranged) {
  *count = count_of(c);
  *ports = fl_kept(m, *count, sizeof(port));
  if (!*ports) wrong(c, "there is not enough memory");
  for (int64_t k = 0; !c->wrong && k < *count; ++k) {
    port* p = *ports + k;
    p->name = string(c);
    p->type = string(c);
    p->dtype = below(c, FLAM_FLOAT64 + 1);
    p->rank = below(c, FLAM_MAX_RANK + 1);
    if (!fl_itemsize(p->dtype)) wrong(c, "a dtype is unknown");
    if (ranged) p->dims = words(c, p->rank, 2);
  }
}

static void read_weight(cursor* c, weight* w, int64_t section_bytes) {
  w->name = string(c);
  w->dtype = below(c, FLAM_FLOAT64 + 1);
  w->mutable_ = below(c, 2);
  w->offset = word(c);
  w->bytes = word(c);
  w->rank = below(c, FLAM_MAX_RANK + 1);
  w->sizes = words(c, w->rank, 1);
  w->strides = words(c, w->rank, 1);
  if (c->wrong) return;
  if (w->offset < 0 || w->bytes < 0 || w->offset % 64 || w->offset > section_bytes
      || w->bytes > section_bytes - w->offset) {
    wrong(c, "a weight lies outside of its section");
    return;
  }
  int64_t top = 1;
  int empty = 0;
  for (int64_t k = 0; k < w->rank; ++k) {
    int64_t reach;
    if (w->sizes[k] < 0 || w->strides[k] < 0) wrong(c, "a weight has a negative size");
    else if (w->sizes[k] == 0) empty = 1;
    else if (__builtin_mul_overflow(w->sizes[k] - 1, w->strides[k], &reach) || __builtin_add_overflow(top, reach, &top)) {
      wrong(c, "a weight is too large");
    }
  }
  if (__builtin_mul_overflow(top, (int64_t)fl_itemsize(w->dtype), &top)) wrong(c, "a weight is too large");
  if (!c->wrong && (!fl_itemsize(w->dtype) || w->bytes != (empty ? 0 : top))) wrong(c, "a weight has another size");
}

static void read_numbers(cursor* c, program* p, const method* of) {
  p->number_count = count_of(c);
  p->numbers = (const number*)words(c, p->number_count, 3);
  for (int64_t k = 0; !c->wrong && k < p->number_count; ++k) {
    const number* n = p->numbers + k;
    if (n->op < 0 || n->op >= OP_COUNT) wrong(c, "a number is of an unknown kind");
    else if (n->op == OP_UNITS) continue;
    else if (n->op == OP_SIZE || n->op == OP_STRIDE) {
      if (n->a < 0 || n->a >= of->input_count || n->b < 0 || n->b >= of->inputs[n->a].rank) {
        wrong(c, "a number is the size of no input");
      }
    } else if (n->op != OP_CONST) {
      int one = n->op == OP_FLOAT || n->op == OP_SQRT;
      if (n->a < 0 || n->a >= k || (!one && (n->b < 0 || n->b >= k))) wrong(c, "a number needs a later one");
    }
  }
}

/* For a launch on a device: functions, their conditions, and the numbers of groups. */
static void read_choices(cursor* c, program* p, step* s, int64_t functions) {
  s->checks = below(c, 2);
  s->record = s->checks ? p->record_count++ : 0;
  s->work = word(c);
  if (s->work < -1 || s->work >= p->number_count) wrong(c, "a number is out of its range");
  s->choice_count = count_of(c);
  s->choices = c->at;
  for (int64_t k = 0; !c->wrong && k < s->choice_count; ++k) {
    int64_t condition = word(c), count = count_of(c);
    if (condition < -1 || condition >= p->number_count) wrong(c, "a number is out of its range");
    const int64_t* parts = words(c, count, 4);
    for (int64_t i = 0; parts && i < 4 * count; ++i) {
      if (parts[i] < 0 || parts[i] >= (i % 4 ? p->number_count : functions)) wrong(c, "a kernel is not what it was");
    }
  }
}

/* For a call of torch: the operator, and its tensors. */
static void read_call(cursor* c, const program* p, step* s) {
  s->call = string(c);
  s->tensor_count = count_of(c);
  s->tensors = c->at;
  for (int64_t k = 0; !c->wrong && k < s->tensor_count; ++k) {
    below(c, p->buffer_count);
    below(c, p->number_count);
    if (!fl_itemsize(word(c))) wrong(c, "a dtype is unknown");
    int64_t rank = below(c, FLAM_MAX_RANK + 1);
    references(c, 2 * rank, 0, p->number_count);
  }
  s->result_count = below(c, s->tensor_count + 1);
  s->size_count = count_of(c);
  s->sizes = references(c, s->size_count, 0, p->number_count);
  if (s->tensor_count > INT32_MAX) wrong(c, "a count is larger than the file");
}

static void read_step(cursor* c, program* p, step* s, int64_t functions) {
  int64_t numbers = p->number_count, buffers = p->buffer_count;
  s->kind = below(c, STEP_COUNT);
  s->origin = string(c);
  if (s->kind == STEP_COPY) {
    s->to = below(c, buffers), s->to_offset = below(c, numbers);
    s->from = below(c, buffers), s->from_offset = below(c, numbers);
    s->itemsize = below(c, 9);
    s->rank = below(c, FLAM_MAX_RANK + 1);
    s->dims = references(c, s->rank, 0, numbers);
    s->to_strides = references(c, s->rank, 0, numbers);
    s->from_strides = references(c, s->rank, 0, numbers);
    return;
  }
  if (s->kind == STEP_CALL) {
    read_call(c, p, s);
    if (s->size_count > p->most_sizes) p->most_sizes = s->size_count;
    return;
  }
  int64_t each = s->kind == STEP_DEVICE ? 3 : 2;
  if (s->kind == STEP_LAUNCH) s->kernel = word(c);
  s->pointer_count = count_of(c);
  s->pointers = words(c, s->pointer_count, each);
  for (int64_t k = 0; s->pointers && k < s->pointer_count; ++k) {
    const int64_t* pointer = s->pointers + each * k;
    if (each == 3 && (pointer[2] < 1 || pointer[2] > 16)) wrong(c, "an element has another size");
    if (pointer[0] < 0 || pointer[0] >= buffers || pointer[1] < 0 || pointer[1] >= numbers) {
      wrong(c, "a kernel is given no buffer");
    }
  }
  s->size_count = count_of(c);
  s->sizes = references(c, s->size_count, 0, numbers);
  s->site_count = count_of(c);
  s->sites = words(c, s->site_count, 2);
  for (int64_t k = 0; s->sites && k < s->site_count; ++k) {
    if (s->sites[2 * k + 1] < -1 || s->sites[2 * k + 1] >= numbers) wrong(c, "a number is out of its range");
  }
  if (s->kind == STEP_DEVICE) read_choices(c, p, s, functions);
  if (s->pointer_count > p->most_pointers) p->most_pointers = s->pointer_count;
  if (s->size_count > p->most_sizes) p->most_sizes = s->size_count;
}

static void read_program(flam_model* m, cursor* c, program* p, const method* of) {
  read_numbers(c, p, of);
  p->input_dims = fl_kept(m, of->input_count, 2 * sizeof(void*));
  p->output_dims = fl_kept(m, of->output_count, 2 * sizeof(void*));
  if (!p->input_dims || !p->output_dims) wrong(c, "there is not enough memory");
  if (c->wrong) return;
  p->input_strides = p->input_dims + of->input_count;
  p->output_strides = p->output_dims + of->output_count;
  for (int64_t k = 0; k < of->input_count; ++k) {
    p->input_dims[k] = references(c, of->inputs[k].rank, -1, p->number_count);
    p->input_strides[k] = references(c, of->inputs[k].rank, -1, p->number_count);
    p->shape_count += 2 * of->inputs[k].rank;
  }
  for (int64_t k = 0; k < of->output_count; ++k) {
    p->output_dims[k] = references(c, of->outputs[k].rank, 0, p->number_count);
    p->output_strides[k] = references(c, of->outputs[k].rank, 0, p->number_count);
  }
  p->buffer_count = count_of(c);
  p->buffers = (const buffer*)words(c, p->buffer_count, 5);
  int64_t most[PLACE_COUNT] = {of->input_count, m->weight_count, m->weight_count, of->output_count, 1, 1 << 20};
  for (int64_t k = 0; !c->wrong && k < p->buffer_count; ++k) {
    const buffer* b = p->buffers + k;
    if (b->place < 0 || b->place >= PLACE_COUNT || b->which < 0 || b->which >= most[b->place] || b->bytes < 0
        || b->bytes >= p->number_count || b->first < 0 || b->last < b->first) {
      wrong(c, "a buffer is nowhere");
    } else if (b->place == PLACE_WEIGHT || b->place == PLACE_STATE) {
      if (m->weights_known[b->which].mutable_ != (b->place == PLACE_STATE)) wrong(c, "a weight is not what it was");
      p->has_state |= b->place == PLACE_STATE;
    } else if (b->place == PLACE_SEED && b->which >= p->seed_count) {
      p->seed_count = b->which + 1;
    }
  }
  p->step_count = count_of(c);
  p->steps = fl_kept(m, p->step_count, sizeof(step));
  if (!p->steps) wrong(c, "there is not enough memory");
  for (int64_t k = 0; !c->wrong && k < p->step_count; ++k) read_step(c, p, p->steps + k, m->function_count);
}

/* ---- sections ---- */

enum { INDEX = 1, WEIGHTS = 2, CODE = 3, DEVICE = 7 };

typedef struct {
  uint64_t kind, offset, size, hash;
  uint8_t sha[32];
  char name[64];
} section;

typedef struct {
  char magic[8];
  uint32_t major, minor;
  uint64_t size, sections, zeros[4];
  uint8_t sha[32], more[32];
} header;

_Static_assert(sizeof(header) == 128 && sizeof(section) == 128, "as the format says");

static int all_zero(const uint8_t* at, size_t size) {
  for (size_t k = 0; k < size; ++k) {
    if (at[k]) return 0;
  }
  return 1;
}

static int same_sha(const uint8_t* file, const section* s) {
  uint8_t sha[32];
  fl_sha256(file + s->offset, s->size, sha);
  return memcmp(sha, s->sha, sizeof sha) == 0;
}

#define DAMAGED(...) fl_fail(error, FLAM_FILE, "the package is damaged: " __VA_ARGS__)

static int check_file(const uint8_t* data, size_t size, flam_error* error) {
  const header* h = (const header*)data;
  if (size < 8 || memcmp(data, "FLAMBEAU", 8)) return fl_fail(error, FLAM_FILE, "this is no package of Flambeau's");
  if (size < sizeof *h) return DAMAGED("it ends too early");
  if (h->major > FLAM_MAJOR) {
    return fl_fail(error, FLAM_VERSION, "the package has format %u.%u, and this runtime reads up to %d: it takes a newer "
                   "flambeau", h->major, h->minor, FLAM_MAJOR);
  }
  if (h->major < 1) return DAMAGED("it has no version");
  if (h->size != size) {
    return DAMAGED("it has %llu bytes and should have %llu", (unsigned long long)size, (unsigned long long)h->size);
  }
  if (h->sections > (size - sizeof *h) / sizeof(section)) return DAMAGED("its table of sections is cut off");
  const section* sections = (const section*)(data + sizeof *h);
  size_t end = sizeof *h + h->sections * sizeof(section);
  uint8_t sha[32], both[64];
  fl_sha256(data, 64, both);
  fl_sha256(data + sizeof *h, h->sections * sizeof(section), both + 32);
  fl_sha256(both, sizeof both, sha);
  if (memcmp(sha, h->sha, sizeof sha) || !all_zero(h->more, sizeof h->more)) {
    return DAMAGED("the checksum of its table of sections is wrong");
  }
  for (uint64_t k = 0; k < h->sections; ++k) {
    const section* s = sections + k;
    size_t begin = (end + 63) / 64 * 64;
    if (s->offset != begin || begin > size || s->size > size - begin || s->name[63]) {
      return DAMAGED("section %llu is not where it should be", (unsigned long long)k);
    }
    if (!all_zero(data + end, begin - end)) return DAMAGED("there is something between its sections");
    end = begin + s->size;
    if (flam_hash(data + begin, s->size) != s->hash) return DAMAGED("the checksum of its section '%s' is wrong", s->name);
    /* Sections that are executed or followed have this checksum; those for people have the other one. */
    if ((s->kind == INDEX || s->kind == CODE || s->kind == DEVICE) && !same_sha(data, s)) {
      return DAMAGED("the checksum of its section '%s' is wrong", s->name);
    }
  }
  if (end != size) return DAMAGED("there is something behind its sections");
  return 0;
}

static const section* section_of(const uint8_t* file, uint64_t kind) {
  const header* h = (const header*)file;
  const section* s = (const section*)(file + sizeof *h);
  for (uint64_t k = 0; k < h->sections; ++k) {
    if (s[k].kind == kind) return s + k;
  }
  return NULL;
}

/* ---- machine code ---- */

static const flam_host host = {fl_parallel, fl_member, fl_members, flam_threads};

/* Loads code through a file in memory. The file stays open, because the loader takes files of one name as the same. */
static const flam_code* load_code(flam_model* m, const section* s, flam_error* error) {
  m->code_file = memfd_create("flambeau", MFD_CLOEXEC);
  for (size_t done = 0; m->code_file >= 0 && done < s->size;) {
    ssize_t count = write(m->code_file, m->file + s->offset + done, s->size - done);
    if (count <= 0) {
      fl_fail(error, FLAM_MEMORY, "there is not enough memory for the machine code");
      return NULL;
    }
    done += (size_t)count;
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", m->code_file);
  const flam_code* (*bind)(const flam_host*) = NULL;
  pthread_mutex_lock(&loader);
  m->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (m->library) *(void**)&bind = dlsym(m->library, "flam_bind");
  if (!bind) fl_fail(error, FLAM_MACHINE, "the machine code of the package does not load here: %s", dlerror());
  pthread_mutex_unlock(&loader);
  return bind ? bind(&host) : NULL;
}

/* Whether a target runs here, with its code loaded; if not, the reason. */
static int begin_target(flam_model* m, const section* s, const char* features, int number, const flam_code** kernels, char* why,
                        size_t room, flam_error* error) {
  flam_error said = {0};
  if (s->kind == CODE) {
    char missing[64];
    if (!fl_supports(features, missing, sizeof missing)) {
      const char* operators = strcmp(missing, "torch") ? NULL : flam_metadata(m, "torch");
      return snprintf(why, room, "needs %s%s%.200s", missing, operators ? " for " : "", operators ? operators : ""), 0;
    }
    return (*kernels = load_code(m, s, error)) != NULL;
  }
  const char* rest = "";
  const flam_device* d = s->kind == DEVICE ? fl_device(features, &rest) : NULL;
  if (!d) return snprintf(why, room, "needs a runtime for %.60s", features), 0;
  if (fl_open_device(m, d, rest, number, m->file + s->offset, s->size, &said)) {
    if (said.code == FLAM_FILE && error) *error = said;
    return snprintf(why, room, "%.300s", said.message), 0;
  }
  return 1;
}

/* "cuda" is the first target of that kind. */
static int is_wanted(const char* wanted, const char* name) {
  size_t length = strlen(wanted);
  return !strncmp(wanted, name, length) && (name[length] == 0 || name[length] == ':');
}

static int read_target(flam_model* m, cursor* c, const char* wanted, int number, flam_error* error) {
  const header* h = (const header*)m->file;
  const section* sections = (const section*)(m->file + sizeof *h);
  char reasons[800] = "";
  int64_t count = count_of(c), found = 0;
  for (int64_t t = 0; !c->wrong && t < count; ++t) {
    const char *name = string(c), *features = string(c);
    int64_t code = below(c, (int64_t)h->sections);
    if (c->wrong) break;
    char why[320] = "";
    size_t used = strlen(reasons);
    const flam_code* kernels = NULL;
    int runs = 0;
    flam_error said = {0};
    if (!found && (!wanted || is_wanted(wanted, name))) {
      runs = begin_target(m, sections + code, features, number, &kernels, why, sizeof why, &said);
      if (!runs && said.code) return fl_fail(error, said.code, "%s", said.message);
    }
    if (!runs) snprintf(reasons + used, sizeof reasons - used, " %.60s%s%s;", name, why[0] ? " " : "", why);
    found |= runs;
    for (int64_t k = 0; !c->wrong && k < m->method_count; ++k) {
      int64_t length = count_of(c);
      cursor inside = {c->at, c->at + length, NULL};
      c->at += length;
      program* p = m->programs + k;
      if (!runs || c->wrong) continue;
      read_program(m, &inside, p, m->methods + k);
      if (!inside.wrong && inside.at != inside.end) inside.wrong = "a program goes on behind its end";
      p->kernels = kernels ? kernels->kernels : NULL;
      for (int64_t i = 0; !inside.wrong && i < p->step_count; ++i) {
        const step* s = p->steps + i;
        if (s->kind == STEP_DEVICE && !m->device) inside.wrong = "a kernel is for a device";
        if (s->kind == STEP_CALL && m->device) inside.wrong = "a call of torch is on a device";
        if (s->kind != STEP_LAUNCH) continue;
        if (!kernels || s->kernel < 0 || s->kernel >= kernels->count
            || kernels->kernels[s->kernel].pointers != s->pointer_count || kernels->kernels[s->kernel].sizes != s->size_count) {
          inside.wrong = "a kernel is not what it was";
        }
      }
      if (inside.wrong) wrong(c, inside.wrong);
    }
  }
  if (!c->wrong && !found) {
    return fl_fail(error, FLAM_MACHINE, "nothing in the package runs here (%s): of its targets,%s",
                   wanted ? wanted : "first of all", reasons);
  }
  return 0;
}

static int read_index(flam_model* m, const char* target, int number, flam_error* error) {
  const section *index = section_of(m->file, INDEX), *weights = section_of(m->file, WEIGHTS);
  if (!index || !weights || index->size % 8) return DAMAGED("it has no index");
  cursor c = {(const int64_t*)(m->file + index->offset), NULL, NULL};
  c.end = c.at + index->size / 8;
  m->pair_count = count_of(&c);
  m->pairs = fl_kept(m, m->pair_count, sizeof(pair));
  for (int64_t k = 0; m->pairs && !c.wrong && k < m->pair_count; ++k) {
    m->pairs[k].key = string(&c);
    m->pairs[k].value = string(&c);
  }
  m->weight_count = count_of(&c);
  m->weights_known = fl_kept(m, m->weight_count, sizeof(weight));
  for (int64_t k = 0; m->weights_known && !c.wrong && k < m->weight_count; ++k) {
    read_weight(&c, m->weights_known + k, (int64_t)weights->size);
  }
  m->method_count = count_of(&c);
  m->methods = fl_kept(m, m->method_count, sizeof(method));
  m->programs = fl_kept(m, m->method_count, sizeof(program));
  if (!m->pairs || !m->weights_known || !m->methods || !m->programs) {
    return fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  }
  for (int64_t k = 0; !c.wrong && k < m->method_count; ++k) {
    method* one = m->methods + k;
    one->name = string(&c);
    read_ports(m, &c, &one->input_count, &one->inputs, 1);
    read_ports(m, &c, &one->output_count, &one->outputs, 0);
  }
  m->fault_count = count_of(&c);
  m->faults = fl_kept(m, m->fault_count, sizeof(char*));
  for (int64_t k = 0; m->faults && !c.wrong && k < m->fault_count; ++k) m->faults[k] = string(&c);
  int code = c.wrong ? 0 : read_target(m, &c, target, number, error);
  if (code) return code;
  if (!c.wrong && c.at != c.end) wrong(&c, "there is something behind its index");
  return c.wrong ? DAMAGED("%s", c.wrong) : 0;
}

static int take_weights(flam_model* m, flam_error* error) {
  const uint8_t* data = m->file + section_of(m->file, WEIGHTS)->offset;
  m->states = fl_kept(m, m->weight_count, sizeof(void*));
  m->weights = calloc(1, sizeof *m->weights);
  if (m->weights) {
    m->weights->uses = 1;
    m->weights->blocks = calloc((size_t)m->weight_count + 1, sizeof(block*));
  }
  if (!m->states || !m->weights || !m->weights->blocks) return fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  for (int64_t k = 0; k < m->weight_count; ++k) {
    const weight* w = m->weights_known + k;
    block* b = m->weights->blocks[k] = calloc(1, sizeof *b);
    if (w->mutable_) m->states[k] = fl_aligned((size_t)w->bytes);
    if (!b || (w->mutable_ && !m->states[k])) return fl_fail(error, FLAM_MEMORY, "there is not enough memory");
    b->uses = 1;
    b->data = (void*)(data + w->offset);
    if (w->mutable_) memcpy(m->states[k], b->data, (size_t)w->bytes);
  }
  return m->device ? fl_weights_there(m, error) : 0;
}

static flam_model* read_model(const uint8_t* data, size_t size, int mapped, const char* target, int number, flam_error* error) {
  flam_model* m = calloc(1, sizeof *m);
  if (!m) {
    fl_fail(error, FLAM_MEMORY, "there is not enough memory");
    if (mapped) munmap((void*)data, size);
    return NULL;
  }
  m->uses = 1;
  m->file = data;
  m->size = size;
  m->mapped = mapped;
  m->code_file = -1;
  m->seed = UINT64_C(0x9E3779B97F4A7C15);
  pthread_mutex_init(&m->lock, NULL);
  pthread_mutex_init(&m->state_lock, NULL);
  pthread_mutex_init(&m->update_lock, NULL);
  if (check_file(data, size, error) || read_index(m, target, number, error) || take_weights(m, error)) {
    fl_release(m);
    return NULL;
  }
  return m;
}

flam_model* flam_load_memory(const void* data, size_t size, const char* target, flam_error* error) {
  if ((uintptr_t)data % 64) {
    fl_fail(error, FLAM_ARGUMENT, "a package in memory must begin at a multiple of 64");
    return NULL;
  }
  return read_model(data, size, 0, target, 0, error);
}

flam_model* flam_load(const char* path, const char* target, flam_error* error) { return flam_load_on(path, target, 0, error); }

flam_model* flam_load_on(const char* path, const char* target, int number, flam_error* error) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (file < 0 || fstat(file, &status)) {
    fl_fail(error, FLAM_FILE, "%s cannot be opened", path);
    if (file >= 0) close(file);
    return NULL;
  }
  size_t size = (size_t)status.st_size;
  /* Each thread reads the pages that it checks; requested at once, one thread would read all of them. */
  void* data = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  if (data == MAP_FAILED) {
    fl_fail(error, FLAM_FILE, size ? "%s cannot be read" : "%s is empty", path);
    return NULL;
  }
  return read_model(data, size, 1, target, number, error);
}
