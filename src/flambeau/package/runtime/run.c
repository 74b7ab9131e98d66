/* Runs the program of a method: numbers of the run, memory, launches and copies. All that follows from the shapes of the
   inputs is found, and checked, once for each shape in a row; a call with the same ones only fills in addresses. */
#include "internal.h"

/* ---- properties of a model ---- */

int flam_method(const flam_model* m, const char* name) {
  for (int64_t k = 0; k < m->method_count; ++k) {
    if (!strcmp(m->methods[k].name, name)) return (int)k;
  }
  return -1;
}
static const method* method_of(const flam_model* m, int k) {
  return k >= 0 && k < m->method_count ? m->methods + k : NULL;
}
static const port* input_of(const flam_model* m, int k, int input) {
  const method* one = method_of(m, k);
  return one && input >= 0 && input < one->input_count ? one->inputs + input : NULL;
}
const char* flam_method_name(const flam_model* m, int k) { return method_of(m, k) ? m->methods[k].name : NULL; }
int flam_input_count(const flam_model* m, int k) { return method_of(m, k) ? (int)m->methods[k].input_count : 0; }
int flam_output_count(const flam_model* m, int k) { return method_of(m, k) ? (int)m->methods[k].output_count : 0; }
const char* flam_input_name(const flam_model* m, int k, int i) { return input_of(m, k, i) ? input_of(m, k, i)->name : NULL; }
const char* flam_input_type(const flam_model* m, int k, int i) { return input_of(m, k, i) ? input_of(m, k, i)->type : NULL; }
const char* flam_metadata(const flam_model* m, const char* key) {
  for (int64_t k = 0; k < m->pair_count; ++k) {
    if (!strcmp(m->pairs[k].key, key)) return m->pairs[k].value;
  }
  return NULL;
}
void flam_free(void* data) { free(data); }
void flam_seed(flam_model* m, uint64_t seed) {
  pthread_mutex_lock(&m->lock);
  m->seed = seed;
  pthread_mutex_unlock(&m->lock);
}

/* ---- arguments ---- */

/* "float16 [1, 224, 224, 3]", with strides unless the tensor is contiguous. */
void fl_described(const flam_tensor* t, int strides, char* out, size_t size) {
  size_t at = (size_t)snprintf(out, size, "%s [", fl_dtype(t->dtype));
  int rank = t->rank < 0 || t->rank > FLAM_MAX_RANK ? 0 : t->rank;
  for (int pass = 0; pass <= strides; ++pass) {
    const int64_t* numbers = pass ? t->strides : t->sizes;
    if (pass && at < size) at += (size_t)snprintf(out + at, size - at, " with strides [");
    for (int k = 0; k < rank && at < size; ++k) {
      at += (size_t)snprintf(out + at, size - at, "%s%lld", k ? ", " : "", (long long)numbers[k]);
    }
    if (at < size) at += (size_t)snprintf(out + at, size - at, "]");
  }
}

static int refused(const port* p, const flam_tensor* t, int strides, flam_error* error) {
  char got[480];
  fl_described(t, strides, got, sizeof got);
  return fl_fail(error, FLAM_ARGUMENT, "input '%s': expected %s, got %s", p->name, p->type, got);
}

static int check_input(const port* p, const flam_tensor* t, flam_error* error) {
  if (t->dtype != p->dtype || t->rank != p->rank) return refused(p, t, 0, error);
  for (int64_t d = 0; d < p->rank; ++d) {
    if (t->sizes[d] < p->dims[2 * d] || t->sizes[d] > p->dims[2 * d + 1] || t->sizes[d] < 0) return refused(p, t, 0, error);
  }
  return 0;
}

/* The number of bytes from the first element of a tensor to its end; -1 if that overflows. */
int64_t fl_extent(const int64_t* sizes, const int64_t* strides, int64_t rank, int64_t itemsize) {
  int64_t top = 1, reach;
  for (int64_t k = 0; k < rank; ++k) {
    if (sizes[k] < 0 || (strides[k] < 0 && sizes[k] > 1)) return -1;
    if (sizes[k] == 0) return 0;
    if (__builtin_mul_overflow(sizes[k] - 1, strides[k], &reach) || __builtin_add_overflow(top, reach, &top)) return -1;
  }
  return __builtin_mul_overflow(top, itemsize, &top) ? -1 : top;
}

/* ---- run-time numbers ---- */

static double real(int64_t bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}
static int64_t bits_of(double x) {
  int64_t bits;
  memcpy(&bits, &x, 8);
  return bits;
}

static int evaluate(const program* p, const flam_tensor* inputs, int64_t units, int64_t* out, flam_error* error) {
  for (int64_t k = 0; k < p->number_count; ++k) {
    const number* n = p->numbers + k;
    int bad = 0;
    int64_t a = n->op > OP_STRIDE && n->op != OP_UNITS ? out[n->a] : 0, b = n->op > OP_STRIDE && n->op != OP_FLOAT && n->op != OP_SQRT && n->op != OP_UNITS ? out[n->b] : 0;
    int64_t* r = out + k;
    switch (n->op) {
      case OP_CONST: *r = n->a; break;
      case OP_SIZE: *r = inputs[n->a].sizes[n->b]; break;
      case OP_STRIDE: *r = inputs[n->a].strides[n->b]; break;
      case OP_ADD: bad = __builtin_add_overflow(a, b, r); break;
      case OP_SUB: bad = __builtin_sub_overflow(a, b, r); break;
      case OP_MUL: bad = __builtin_mul_overflow(a, b, r); break;
      case OP_DIV:
      case OP_MOD: /* as in Python: the remainder has the sign of the divisor */
        if (b == 0 || (a == INT64_MIN && b == -1)) bad = 1;
        else {
          int64_t rest = a % b, lower = rest && (rest < 0) != (b < 0);
          *r = n->op == OP_DIV ? a / b - lower : rest + (lower ? b : 0);
        }
        break;
      case OP_MIN: *r = a < b ? a : b; break;
      case OP_MAX: *r = a > b ? a : b; break;
      case OP_FLOAT: *r = bits_of((double)a); break;
      case OP_FADD: *r = bits_of(real(a) + real(b)); break;
      case OP_FSUB: *r = bits_of(real(a) - real(b)); break;
      case OP_FMUL: *r = bits_of(real(a) * real(b)); break;
      case OP_FDIV: *r = bits_of(real(a) / real(b)); break;
      case OP_SQRT: *r = bits_of(__builtin_sqrt(real(a))); break;
      case OP_UNITS: *r = units; break;
    }
    if (bad) return fl_fail(error, FLAM_ARGUMENT, "the sizes of the inputs are too large");
  }
  return 0;
}

/* ---- numbers that depend on shapes ---- */

/* First fit, among all that live at the same time. */
static int place_temporaries(const program* p, context* c, flam_error* error) {
  int64_t top = 0;
  for (int64_t k = 0; k < p->buffer_count; ++k) {
    const buffer* b = p->buffers + k;
    if (b->place != PLACE_TEMPORARY) continue;
    int64_t bytes = c->numbers[b->bytes], at = 0;
    if (bytes < 0 || bytes > INT64_MAX / 4) return fl_fail(error, FLAM_ARGUMENT, "the sizes of the inputs are too large");
    bytes = (bytes / 256 + 1) * 256;
    for (int64_t o = 0; o < k; ++o) {
      const buffer* other = p->buffers + o;
      if (other->place != PLACE_TEMPORARY || other->first > b->last || b->first > other->last) continue;
      int64_t begin = c->offsets[o], end = begin + (c->numbers[other->bytes] / 256 + 1) * 256;
      if (begin < at + bytes && at < end) at = end, o = -1; /* starts again: those before may overlap now */
    }
    c->offsets[k] = at;
    if (__builtin_add_overflow(at, bytes, &at)) return fl_fail(error, FLAM_ARGUMENT, "the sizes of the inputs are too large");
    if (at > top) top = at;
  }
  c->needed = (size_t)top;
  return 0;
}

static int64_t bytes_of(const flam_model* m, const program* p, const method* of, const context* c, const flam_tensor* inputs,
                        int64_t k) {
  const buffer* b = p->buffers + k;
  int64_t sizes[FLAM_MAX_RANK], strides[FLAM_MAX_RANK];
  switch (b->place) {
    case PLACE_INPUT: {
      const flam_tensor* t = inputs + b->which;
      return fl_extent(t->sizes, t->strides, t->rank, (int64_t)fl_itemsize(t->dtype));
    }
    case PLACE_OUTPUT: {
      const port* o = of->outputs + b->which;
      for (int64_t d = 0; d < o->rank; ++d) {
        sizes[d] = c->numbers[p->output_dims[b->which][d]];
        strides[d] = c->numbers[p->output_strides[b->which][d]];
      }
      return fl_extent(sizes, strides, o->rank, (int64_t)fl_itemsize(o->dtype));
    }
    case PLACE_TEMPORARY: return c->numbers[b->bytes];
    case PLACE_SEED: return 16;
    default: return m->weights_known[b->which].bytes;
  }
}

/* Describes a tensor of a call by its words, without its address. */
static int find_tensor(const context* c, const int64_t* t, flam_tensor* out) {
  out->dtype = (int32_t)t[2];
  out->rank = (int32_t)t[3];
  for (int64_t d = 0; d < t[3]; ++d) {
    out->sizes[d] = c->numbers[t[4 + d]];
    out->strides[d] = c->numbers[t[4 + t[3] + d]];
    if (out->sizes[d] < 0 || out->strides[d] < 0) return 1;
  }
  return 0;
}

static int fits(const flam_model* m, const program* p, const method* of, const context* c, const flam_tensor* inputs, int64_t buffer,
                int64_t at, const flam_tensor* t) {
  int64_t bytes = fl_extent(t->sizes, t->strides, t->rank, (int64_t)fl_itemsize(t->dtype)), most = bytes_of(m, p, of, c, inputs, buffer);
  return bytes >= 0 && at >= 0 && (!bytes || (at <= most && bytes <= most - at));
}

static int check_steps(const flam_model* m, const program* p, const method* of, const context* c, const flam_tensor* inputs,
                       flam_error* error) {
  for (int64_t i = 0; i < p->step_count; ++i) {
    const step* s = p->steps + i;
    int bad = 0;
    int64_t each = s->kind == STEP_DEVICE ? 3 : 2;
    const int64_t* t = s->tensors;
    for (int64_t k = 0; s->kind == STEP_CALL && k < s->tensor_count; ++k, t += 4 + 2 * t[3]) {
      flam_tensor one;
      bad |= find_tensor(c, t, &one) || !fits(m, p, of, c, inputs, t[0], c->numbers[t[1]], &one);
    }
    for (int64_t k = 0; s->kind != STEP_COPY && k < s->pointer_count; ++k) {
      int64_t at = c->numbers[s->pointers[each * k + 1]];
      bad |= at < 0 || at > bytes_of(m, p, of, c, inputs, s->pointers[each * k]);
    }
    for (int side = 0; s->kind == STEP_COPY && side < 2; ++side) {
      int64_t sizes[FLAM_MAX_RANK], strides[FLAM_MAX_RANK];
      for (int64_t d = 0; d < s->rank; ++d) {
        sizes[d] = c->numbers[s->dims[d]];
        strides[d] = c->numbers[(side ? s->from_strides : s->to_strides)[d]];
      }
      int64_t bytes = fl_extent(sizes, strides, s->rank, s->itemsize), at = c->numbers[side ? s->from_offset : s->to_offset];
      int64_t most = bytes_of(m, p, of, c, inputs, side ? s->from : s->to);
      bad |= bytes < 0 || at < 0 || (bytes && (at > most || bytes > most - at));
    }
    if (bad) return fl_fail(error, FLAM_FILE, "the package is damaged: step %lld (%s) leaves its memory", (long long)i, s->origin);
  }
  return 0;
}

static int prepare(const flam_model* m, const program* p, const method* of, context* c, const flam_tensor* inputs,
                   flam_error* error) {
  int64_t* shape = c->shape;
  int same = c->ready;
  for (int64_t k = 0; k < of->input_count; ++k) {
    const flam_tensor* t = inputs + k;
    int code = check_input(of->inputs + k, t, error);
    if (code) return code;
    size_t bytes = (size_t)t->rank * sizeof(int64_t);
    same = same && !memcmp(shape, t->sizes, bytes) && !memcmp(shape + t->rank, t->strides, bytes);
    shape += 2 * t->rank;
  }
  if (same) return 0;
  c->ready = 0;
  int code = evaluate(p, inputs, m->units, c->numbers, error);
  if (code) return code;
  for (int64_t k = 0; k < of->input_count; ++k) {
    const flam_tensor* t = inputs + k;
    int empty = 0;
    for (int64_t d = 0; d < t->rank; ++d) {
      int64_t size = p->input_dims[k][d];
      if (size >= 0 && t->sizes[d] != c->numbers[size]) return refused(of->inputs + k, t, 0, error);
      empty |= t->sizes[d] == 0;
    }
    for (int64_t d = 0; d < t->rank; ++d) {
      int64_t stride = p->input_strides[k][d];
      if (stride >= 0 && t->sizes[d] > 1 && !empty && t->strides[d] != c->numbers[stride]) {
        return refused(of->inputs + k, t, 1, error);
      }
    }
    if (fl_extent(t->sizes, t->strides, t->rank, 8) < 0) return refused(of->inputs + k, t, 1, error);
  }
  for (int64_t k = 0; k < of->output_count; ++k) {
    const port* o = of->outputs + k;
    for (int64_t d = 0; d < o->rank; ++d) {
      if (c->numbers[p->output_dims[k][d]] < 0) return fl_fail(error, FLAM_ARGUMENT, "output '%s' would have a negative size", o->name);
    }
  }
  code = place_temporaries(p, c, error);
  if (!code) code = check_steps(m, p, of, c, inputs, error);
  if (!code && m->device) code = fl_lay_out(m, p, of, c, inputs, error);
  if (code) return code;
  shape = c->shape;
  for (int64_t k = 0; k < of->input_count; ++k) {
    const flam_tensor* t = inputs + k;
    memcpy(shape, t->sizes, (size_t)t->rank * sizeof(int64_t));
    memcpy(shape + t->rank, t->strides, (size_t)t->rank * sizeof(int64_t));
    shape += 2 * t->rank;
  }
  c->ready = 1;
  return 0;
}

/* ---- a call ---- */

static context* new_context(const program* p, const method* of) {
  size_t count = (size_t)(p->number_count + 2 * p->buffer_count + p->shape_count + p->most_pointers + p->most_sizes);
  size_t ports = (size_t)(of->input_count + of->output_count), places = (size_t)(p->buffer_count + p->most_pointers);
  context* c = calloc(1, sizeof *c + (count + ports) * sizeof(int64_t) + places * sizeof(flam_place) + (size_t)p->seed_count * 16);
  if (!c) return NULL;
  c->numbers = (int64_t*)(c + 1);
  c->offsets = c->numbers + p->number_count;
  c->shape = c->offsets + p->buffer_count;
  c->words = c->shape + p->shape_count;
  c->pointers = (void**)(c->words + p->most_sizes);
  c->arguments = c->pointers + p->buffer_count;
  c->there.stage = (int64_t*)(c->arguments + p->most_pointers);
  c->there.buffers = (flam_place*)(c->there.stage + ports);
  c->there.arguments = c->there.buffers + p->buffer_count;
  return c;
}

/* The seeds come last. */
int64_t* fl_seeds(const program* p, const context* c) { return (int64_t*)(c->there.arguments + p->most_pointers); }

static context* take(flam_model* m, program* p, const method* of, weight_set** weights) {
  pthread_mutex_lock(&m->lock);
  context* c = p->free;
  if (c) p->free = c->next;
  if (weights) {
    *weights = m->weights;
    atomic_fetch_add(&m->weights->uses, 1);
  }
  uint64_t seed = m->seed;
  if (weights) m->seed += (uint64_t)p->seed_count * 2 * UINT64_C(0x9E3779B97F4A7C15);
  pthread_mutex_unlock(&m->lock);
  if (!c) c = new_context(p, of);
  for (int64_t k = 0; c && weights && k < 2 * p->seed_count; ++k) { /* splitmix64 */
    uint64_t x = seed + (uint64_t)k * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    fl_seeds(p, c)[k] = (int64_t)((x ^ x >> 31) >> 1);
  }
  return c;
}

static void give(flam_model* m, program* p, context* c) {
  pthread_mutex_lock(&m->lock);
  c->next = p->free;
  p->free = c;
  pthread_mutex_unlock(&m->lock);
}

static int checked_call(const flam_model* m, int k, int inputs, int outputs, flam_error* error) {
  const method* of = method_of(m, k);
  if (!of) return fl_fail(error, FLAM_ARGUMENT, "the package has no method number %d", k);
  if (inputs != of->input_count) {
    return fl_fail(error, FLAM_ARGUMENT, "method '%s' takes %lld inputs, got %d", of->name, (long long)of->input_count, inputs);
  }
  if (outputs != of->output_count) {
    return fl_fail(error, FLAM_ARGUMENT, "method '%s' has %lld outputs, asked for %d", of->name, (long long)of->output_count,
                   outputs);
  }
  return 0;
}

static void describe(const program* p, const method* of, const context* c, int64_t k, flam_tensor* out) {
  const port* o = of->outputs + k;
  out->dtype = (int32_t)o->dtype;
  out->rank = (int32_t)o->rank;
  for (int64_t d = 0; d < o->rank; ++d) {
    out->sizes[d] = c->numbers[p->output_dims[k][d]];
    out->strides[d] = c->numbers[p->output_strides[k][d]];
  }
}

int flam_shapes(flam_model* m, int k, const flam_tensor* inputs, int input_count, flam_tensor* outputs, int output_count,
                flam_error* error) {
  int code = checked_call(m, k, input_count, output_count, error);
  if (code) return code;
  program* p = m->programs + k;
  context* c = take(m, p, m->methods + k, NULL);
  if (!c) return fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  code = prepare(m, p, m->methods + k, c, inputs, error);
  for (int i = 0; !code && i < output_count; ++i) describe(p, m->methods + k, c, i, outputs + i);
  give(m, p, c);
  return code;
}

/* Checks outputs that the caller passed, and allocates the others. */
static int take_outputs(const program* p, const method* of, const context* c, flam_tensor* outputs, uint8_t* made,
                        flam_error* error) {
  for (int64_t k = 0; k < of->output_count; ++k) {
    flam_tensor found, *given = outputs + k;
    describe(p, of, c, k, &found);
    size_t bytes = (size_t)found.rank * sizeof(int64_t);
    if (given->data) {
      if (given->dtype != found.dtype || given->rank != found.rank || memcmp(given->sizes, found.sizes, bytes)
          || memcmp(given->strides, found.strides, bytes)) {
        char is[400], got[400];
        fl_described(&found, 1, is, sizeof is);
        fl_described(given, 1, got, sizeof got);
        return fl_fail(error, FLAM_ARGUMENT, "output '%s': it is %s, got memory for %s", of->outputs[k].name, is, got);
      }
      continue;
    }
    int64_t size = fl_extent(found.sizes, found.strides, found.rank, (int64_t)fl_itemsize(found.dtype));
    found.data = size < 0 ? NULL : fl_aligned((size_t)size);
    if (!found.data) return fl_fail(error, FLAM_MEMORY, "there is not enough memory for output '%s'", of->outputs[k].name);
    memcpy(given, &found, offsetof(flam_tensor, sizes));
    memcpy(given->sizes, found.sizes, bytes);
    memcpy(given->strides, found.strides, bytes);
    made[k] = 1;
  }
  return 0;
}

int fl_fault(const flam_model* m, const context* c, const step* s, int64_t code, flam_error* error) {
  int64_t kind = code >> 58, low = (INT64_C(1) << 50) - 1, index = code & low, size = -1;
  if (index >> 49) index -= INT64_C(1) << 50;
  for (int64_t k = 0; k < s->site_count; ++k) {
    if (s->sites[2 * k] == (code & ~low) && s->sites[2 * k + 1] >= 0) size = c->numbers[s->sites[2 * k + 1]];
  }
  const char* text = kind > 0 && kind < m->fault_count && m->faults[kind][0] ? m->faults[kind] : " something is wrong with the data";
  if (text[0] == '-' && index < 0 && size >= 0) index -= size; /* the index counted from the end */
  if (text[0] == '~') index = ~index;
  char message[600];
  size_t at = 0;
  for (++text; *text && at + 32 < sizeof message;) {
    static const char* const names[] = {"{index}", "{dim}", "{size}"};
    const int64_t values[] = {index, code >> 54 & 15, size};
    int found = -1;
    for (int k = 0; k < 3; ++k) {
      if (!strncmp(text, names[k], strlen(names[k]))) found = k;
    }
    if (found < 0) message[at++] = *text++;
    else {
      if (found == 2 && size < 0) at += (size_t)snprintf(message + at, sizeof message - at, "unknown");
      else at += (size_t)snprintf(message + at, sizeof message - at, "%lld", (long long)values[found]);
      text += strlen(names[found]);
    }
  }
  message[at] = 0;
  return fl_fail(error, FLAM_DATA, "%s (in %s)", message, s->origin);
}

static void copy(const step* s, const context* c, int64_t d, char* to, const char* from) {
  if (d == s->rank) {
    memcpy(to, from, (size_t)s->itemsize);
    return;
  }
  int64_t count = c->numbers[s->dims[d]], there = c->numbers[s->to_strides[d]], here = c->numbers[s->from_strides[d]];
  if (d + 1 == s->rank && there == 1 && here == 1) {
    memcpy(to, from, (size_t)(count * s->itemsize));
    return;
  }
  for (int64_t k = 0; k < count; ++k) copy(s, c, d + 1, to + k * there * s->itemsize, from + k * here * s->itemsize);
}

static int call_torch(const context* c, const step* s, flam_error* error) {
  flam_caller caller = fl_caller();
  flam_tensor* tensors = malloc((size_t)(s->tensor_count + 1) * sizeof *tensors);
  if (!tensors) return fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  const int64_t* t = s->tensors;
  for (int64_t k = 0; k < s->tensor_count; ++k, t += 4 + 2 * t[3]) {
    find_tensor(c, t, tensors + k);
    tensors[k].data = (char*)c->pointers[t[0]] + c->numbers[t[1]];
  }
  for (int64_t k = 0; k < s->size_count; ++k) c->words[k] = c->numbers[s->sizes[k]];
  int code = caller ? caller(s->call, tensors, (int)s->tensor_count, (int)s->result_count, c->words, error)
                    : fl_fail(error, FLAM_MACHINE, "%s needs torch", s->origin);
  free(tensors);
  return code;
}

static int run_steps(const flam_model* m, const program* p, context* c, flam_error* error) {
  for (int64_t i = 0; i < p->step_count; ++i) {
    const step* s = p->steps + i;
    if (s->kind == STEP_COPY) {
      int empty = 0;
      for (int64_t d = 0; d < s->rank; ++d) empty |= c->numbers[s->dims[d]] == 0;
      if (!empty) {
        copy(s, c, 0, (char*)c->pointers[s->to] + c->numbers[s->to_offset],
             (const char*)c->pointers[s->from] + c->numbers[s->from_offset]);
      }
      continue;
    }
    if (s->kind == STEP_CALL) {
      int code = call_torch(c, s, error);
      if (code) return code;
      continue;
    }
    for (int64_t k = 0; k < s->pointer_count; ++k) {
      c->arguments[k] = (char*)c->pointers[s->pointers[2 * k]] + c->numbers[s->pointers[2 * k + 1]];
    }
    for (int64_t k = 0; k < s->size_count; ++k) c->words[k] = c->numbers[s->sizes[k]];
    int64_t code = p->kernels[s->kernel].run(c->arguments, c->words);
    if (code) return fl_fault(m, c, s, code, error);
  }
  return 0;
}

static void find_memory(const flam_model* m, const program* p, context* c, const flam_tensor* inputs, const flam_tensor* outputs,
                        const weight_set* weights) {
  for (int64_t k = 0; k < p->buffer_count; ++k) {
    const buffer* b = p->buffers + k;
    switch (b->place) {
      case PLACE_INPUT: c->pointers[k] = inputs[b->which].data; break;
      case PLACE_WEIGHT: c->pointers[k] = weights->blocks[b->which]->data; break;
      case PLACE_STATE: c->pointers[k] = m->states[b->which]; break;
      case PLACE_OUTPUT: c->pointers[k] = outputs[b->which].data; break;
      case PLACE_TEMPORARY: c->pointers[k] = (char*)c->arena + c->offsets[k]; break;
      case PLACE_SEED: c->pointers[k] = fl_seeds(p, c) + 2 * b->which; break;
    }
  }
}

/* `there`: inputs and outputs are on the device, and work goes into this stream. */
static int call(flam_model* m, int k, const flam_tensor* inputs, int input_count, flam_tensor* outputs, int output_count, int there,
                void* stream, flam_error* error) {
  int code = checked_call(m, k, input_count, output_count, error);
  if (there && !m->device) return fl_fail(error, FLAM_ARGUMENT, "the package runs on the CPU, and was given memory of a device");
  for (int i = 0; !code && there && i < output_count; ++i) {
    if (!outputs[i].data) code = fl_fail(error, FLAM_ARGUMENT, "output %d has no memory on the device", i);
  }
  if (code) return code;
  program* p = m->programs + k;
  const method* of = m->methods + k;
  weight_set* weights;
  atomic_fetch_add(&m->uses, 1);
  context* c = take(m, p, of, &weights);
  uint8_t few[64] = {0}, *made = output_count > 64 ? calloc((size_t)output_count, 1) : few;
  if (!c || !made) code = fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  if (!code) code = prepare(m, p, of, c, inputs, error);
  if (!code && !m->device && c->arena_bytes < c->needed) {
    free(c->arena);
    c->arena = fl_aligned(c->needed);
    c->arena_bytes = c->arena ? c->needed : 0;
    if (!c->arena) code = fl_fail(error, FLAM_MEMORY, "there is not enough memory for %zu bytes of intermediates", c->needed);
  }
  for (int i = 0; !code && i < input_count; ++i) {
    if (inputs[i].data || !fl_extent(inputs[i].sizes, inputs[i].strides, inputs[i].rank, 1)) continue;
    code = fl_fail(error, FLAM_ARGUMENT, "input '%s': expected %s, got no memory", of->inputs[i].name, of->inputs[i].type);
  }
  if (!code) code = take_outputs(p, of, c, outputs, made, error);
  if (!code) {
    if (!m->device) find_memory(m, p, c, inputs, outputs, weights);
    if (p->has_state) pthread_mutex_lock(&m->state_lock);
    code = m->device ? fl_run_there(m, p, of, c, inputs, outputs, weights, there, stream, error) : run_steps(m, p, c, error);
    if (p->has_state) pthread_mutex_unlock(&m->state_lock);
  }
  for (int i = 0; code && made && i < output_count; ++i) {
    if (made[i]) {
      free(outputs[i].data);
      outputs[i].data = NULL;
    }
  }
  if (made != few) free(made);
  if (c) give(m, p, c);
  fl_release_weights(m, weights);
  fl_release(m);
  return code;
}

int flam_run(flam_model* m, int k, const flam_tensor* inputs, int input_count, flam_tensor* outputs, int output_count,
             flam_error* error) {
  return call(m, k, inputs, input_count, outputs, output_count, 0, NULL, error);
}

int flam_run_on(flam_model* m, int k, const flam_tensor* inputs, int input_count, flam_tensor* outputs, int output_count,
                void* stream, flam_error* error) {
  return call(m, k, inputs, input_count, outputs, output_count, 1, stream, error);
}

int flam_run_call(const flam_call* c) {
  return call(c->model, c->method, c->inputs, c->input_count, c->outputs, c->output_count, c->on_device, c->stream, c->error);
}
