/* Programs on a device: its code, its memory, and the launches of a call. The functions of drivers are in device.h. */
#include "internal.h"
#include "words.h"

/* ---- registered devices ---- */

#define MOST_DEVICES 8
static const flam_device* devices[MOST_DEVICES];
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;

int flam_add_device(const flam_device* d) {
  if (!d || d->version != FLAM_DEVICE_VERSION) return 0;
  int added = 0;
  pthread_mutex_lock(&devices_lock);
  for (int k = 0; !added && k < MOST_DEVICES; ++k) {
    if (devices[k] && strcmp(devices[k]->name, d->name)) continue;
    if (!devices[k]) devices[k] = d; /* the first one is kept: models may use it */
    added = 1;
  }
  pthread_mutex_unlock(&devices_lock);
  return added;
}

const flam_device* fl_device(const char* features, const char** rest) {
  size_t length = strcspn(features, " ");
  const flam_device* found = NULL;
  pthread_mutex_lock(&devices_lock);
  for (int k = 0; k < MOST_DEVICES && devices[k]; ++k) {
    if (strlen(devices[k]->name) == length && !memcmp(devices[k]->name, features, length)) found = devices[k];
  }
  pthread_mutex_unlock(&devices_lock);
  *rest = features + length + strspn(features + length, " ");
  return found;
}

const char* flam_device_name(const flam_model* m) { return m->device ? m->device->name : "cpu"; }

static int failed(const flam_model* m, const char* what, const char* said, flam_error* error) {
  return fl_fail(error, FLAM_MACHINE, "%s: %s failed: %s", m->device->name, what, said);
}

/* ---- code ---- */

/* Words, then the modules at multiples of 64: the number of words, a list of (text of, offset, bytes), a list of
   (module, text name, threads, shared, scratch). */
int fl_open_device(flam_model* m, const flam_device* d, const char* features, int number, const uint8_t* code, size_t size,
                   flam_error* error) {
  cursor c = {(const int64_t*)code, NULL, NULL};
  c.end = c.at + size / 8;
  int64_t length = count_of(&c);
  if (!c.wrong) c.end = c.at + length;
  int64_t modules = count_of(&c);
  flam_module* module = fl_kept(m, modules, sizeof *module);
  for (int64_t k = 0; module && !c.wrong && k < modules; ++k) {
    module[k].of = string(&c);
    int64_t at = word(&c), bytes = word(&c);
    if (at < 0 || bytes < 0 || at % 64 || (uint64_t)at > size || (uint64_t)bytes > size - (uint64_t)at) wrong(&c, "code lies outside of its section");
    module[k].data = code + at;
    module[k].size = (size_t)bytes;
  }
  m->function_count = count_of(&c);
  m->functions = fl_kept(m, m->function_count, sizeof *m->functions);
  if (!module || !m->functions) return fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  for (int64_t k = 0; !c.wrong && k < m->function_count; ++k) {
    flam_function* f = m->functions + k;
    f->module = below(&c, modules);
    f->name = string(&c);
    f->threads = below(&c, 1025);
    f->shared = below(&c, 1 << 24);
    f->scratch = below(&c, 1 << 24);
  }
  if (!c.wrong && c.at != c.end) wrong(&c, "there is something behind the functions");
  if (c.wrong) return fl_fail(error, FLAM_FILE, "the package is damaged: %s", c.wrong);
  char why[300] = "";
  m->opened = d->open(features, number, module, modules, m->functions, m->function_count, why, sizeof why);
  if (!m->opened) return fl_fail(error, FLAM_MACHINE, "%s", why);
  m->device = d;
  m->units = d->units(m->opened);
  return 0;
}

void fl_close_device(flam_model* m) {
  if (!m->opened) return;
  for (int64_t k = 0; m->states_there && k < m->weight_count; ++k) {
    if (m->states_there[k]) fl_release_there(m, m->states_there[k]);
  }
  m->device->close(m->opened);
}

/* ---- memory ---- */

void fl_release_there(const flam_model* m, uint64_t memory) {
  m->device->enter(m->opened);
  m->device->release(m->opened, memory);
  m->device->leave(m->opened);
}

static flam_place place(uint64_t memory, int64_t offset) { return (flam_place){memory, offset, 1}; }

/* Weights are copied without a stream, so that all later work runs after it. */
int fl_block_there(const flam_model* m, block* b, size_t bytes, flam_error* error) {
  const flam_device* d = m->device;
  d->enter(m->opened);
  b->there = d->allocate(m->opened, bytes ? bytes : 1);
  const char* said = b->there && bytes ? d->upload(m->opened, NULL, place(b->there, 0), b->data, bytes) : NULL;
  d->leave(m->opened);
  if (!b->there) return fl_fail(error, FLAM_MEMORY, "%s: there is not enough memory for the weights", d->name);
  return said ? failed(m, "to bring a weight there", said, error) : 0;
}

int fl_state_there(const flam_model* m, int64_t k, flam_error* error) {
  const flam_device* d = m->device;
  size_t bytes = (size_t)m->weights_known[k].bytes;
  d->enter(m->opened);
  const char* said = bytes ? d->upload(m->opened, NULL, place(m->states_there[k], 0), m->states[k], bytes) : NULL;
  d->leave(m->opened);
  return said ? failed(m, "to bring a state there", said, error) : 0;
}

int fl_weights_there(flam_model* m, flam_error* error) {
  int code = 0;
  m->states_there = fl_kept(m, m->weight_count, sizeof(uint64_t));
  if (!m->states_there) return fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  for (int64_t k = 0; !code && k < m->weight_count; ++k) {
    const weight* w = m->weights_known + k;
    if (!w->mutable_) code = fl_block_there(m, m->weights->blocks[k], (size_t)w->bytes, error);
    else {
      m->device->enter(m->opened);
      m->states_there[k] = m->device->allocate(m->opened, w->bytes ? (size_t)w->bytes : 1);
      m->device->leave(m->opened);
      code = m->states_there[k] ? fl_state_there(m, k, error)
                                : fl_fail(error, FLAM_MEMORY, "%s: there is not enough memory for the states", m->device->name);
    }
  }
  return code;
}

/* ---- numbers that depend on shapes ---- */

static const int64_t* chosen(const step* s, const context* c) {
  const int64_t* at = s->choices;
  for (int64_t k = 0; k < s->choice_count; ++k, at += 2 + 4 * at[1]) {
    if (at[0] < 0 || c->numbers[at[0]] != 0) return at + 1;
  }
  return NULL;
}

static int64_t rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/* After the temporaries: workspaces of kernels, seeds, and staged inputs and outputs. */
int fl_lay_out(const flam_model* m, const program* p, const method* of, context* c, const flam_tensor* inputs, flam_error* error) {
  int64_t most = 0, at = rounded((int64_t)c->needed);
  for (int64_t i = 0; i < p->step_count; ++i) {
    const step* s = p->steps + i;
    if (s->kind != STEP_DEVICE) continue;
    int64_t bytes = s->work < 0 ? 0 : c->numbers[s->work];
    const int64_t* parts = chosen(s, c);
    int bad = !parts || bytes < 0 || bytes > INT64_MAX / 8;
    int64_t scratch = 0;
    for (int64_t k = 0; !bad && k < parts[0]; ++k) {
      const int64_t* part = parts + 1 + 4 * k;
      int64_t count = m->functions[part[0]].scratch;
      for (int d = 1; d < 4; ++d) {
        int64_t groups = c->numbers[part[d]];
        bad |= groups < 0 || groups > INT32_MAX || __builtin_mul_overflow(count, groups, &count) || count > INT64_MAX / 8;
      }
      if (count > scratch) scratch = count;
    }
    if (bad) return fl_fail(error, FLAM_ARGUMENT, "the sizes of the inputs are too large for the kernel of %s", s->origin);
    if (rounded(bytes) + scratch > most) most = rounded(bytes) + scratch;
  }
  c->there.work = at;
  at += rounded(most);
  c->there.seeds = at;
  at += rounded(p->seed_count * 16);
  c->needed = (size_t)at;
  int64_t sizes[FLAM_MAX_RANK], strides[FLAM_MAX_RANK];
  for (int64_t k = 0; k < of->input_count + of->output_count; ++k) {
    const port* o = k < of->input_count ? of->inputs + k : of->outputs + (k - of->input_count);
    for (int64_t d = 0; d < o->rank; ++d) {
      int64_t out = k - of->input_count;
      sizes[d] = out < 0 ? inputs[k].sizes[d] : c->numbers[p->output_dims[out][d]];
      strides[d] = out < 0 ? inputs[k].strides[d] : c->numbers[p->output_strides[out][d]];
    }
    int64_t bytes = fl_extent(sizes, strides, o->rank, (int64_t)fl_itemsize(o->dtype));
    if (bytes < 0 || bytes > INT64_MAX / 8 || at > INT64_MAX / 8) return fl_fail(error, FLAM_ARGUMENT, "the sizes of the inputs are too large");
    c->there.stage[k] = at;
    at += rounded(bytes);
  }
  c->there.staged = (size_t)at;
  return 0;
}

static int make_room(const flam_model* m, const program* p, context* c, size_t bytes, flam_error* error) {
  const flam_device* d = m->device;
  if (!c->there.stream && !(c->there.stream = d->stream(m->opened))) return failed(m, "a stream", "there is none", error);
  if (c->arena_bytes < bytes || !c->there.arena) {
    if (c->there.mark) d->after(m->opened, c->there.stream, c->there.mark);
    if (c->there.arena) d->wait(m->opened, c->there.stream), d->release(m->opened, c->there.arena);
    c->there.arena = d->allocate(m->opened, bytes ? bytes : 1);
    c->arena_bytes = c->there.arena ? bytes : 0;
    if (!c->there.arena) return fl_fail(error, FLAM_MEMORY, "%s: there is not enough memory for %zu bytes", d->name, bytes);
  }
  if (!c->there.records && p->record_count) {
    size_t size = (size_t)(p->record_count * d->record_bytes);
    c->there.records = d->allocate(m->opened, size);
    if (!c->there.records) return fl_fail(error, FLAM_MEMORY, "%s: there is not enough memory", d->name);
    d->zero(m->opened, c->there.stream, place(c->there.records, 0), size);
    d->wait(m->opened, c->there.stream);
  }
  return 0;
}

void fl_drop_context(const flam_model* m, context* c) {
  const flam_device* d = m->device;
  d->enter(m->opened);
  if (c->there.mark && c->there.stream) d->after(m->opened, c->there.stream, c->there.mark), d->wait(m->opened, c->there.stream);
  if (c->there.mark) d->drop_mark(m->opened, c->there.mark);
  if (c->there.arena) d->release(m->opened, c->there.arena);
  if (c->there.records) d->release(m->opened, c->there.records);
  if (c->there.stream) d->drop_stream(m->opened, c->there.stream);
  d->leave(m->opened);
}

/* ---- a call ---- */

typedef struct {
  const flam_model* m;
  const program* p;
  const method* of;
  context* c;
  void* stream;
  const char* what; /* the operation, for errors */
} run;

#define TRY(r, doing, expression)          \
  do {                                     \
    (r)->what = doing;                     \
    const char* said_ = (expression);      \
    if (said_) return said_;               \
  } while (0)

static int64_t tensor_bytes(const flam_tensor* t) { return fl_extent(t->sizes, t->strides, t->rank, (int64_t)fl_itemsize(t->dtype)); }

static const char* copy_parts(run* r, const step* s, int64_t d, flam_place to, flam_place from) {
  const int64_t* n = r->c->numbers;
  /* If both sides have the same strides from here to the last dimension, it is one piece. */
  int64_t piece = s->itemsize;
  int alike = 1;
  for (int64_t k = s->rank; alike && k-- > d;) {
    alike = n[s->dims[k]] == 1 || (n[s->to_strides[k]] * s->itemsize == piece && n[s->from_strides[k]] * s->itemsize == piece);
    piece *= n[s->dims[k]];
  }
  if (alike) return r->m->device->copy(r->m->opened, r->stream, to, from, (size_t)piece);
  const char* said = NULL;
  for (int64_t k = 0; !said && k < n[s->dims[d]]; ++k) {
    said = copy_parts(r, s, d + 1, place(to.memory, to.offset + k * n[s->to_strides[d]] * s->itemsize),
                      place(from.memory, from.offset + k * n[s->from_strides[d]] * s->itemsize));
  }
  return said;
}

static const char* copy_step(run* r, const step* s) {
  for (int64_t d = 0; d < s->rank; ++d) {
    if (r->c->numbers[s->dims[d]] == 0) return NULL;
  }
  const flam_place *to = r->c->there.buffers + s->to, *from = r->c->there.buffers + s->from;
  return copy_parts(r, s, 0, place(to->memory, to->offset + r->c->numbers[s->to_offset]),
                    place(from->memory, from->offset + r->c->numbers[s->from_offset]));
}

static const char* launch_step(run* r, const step* s) {
  context* c = r->c;
  const flam_device* d = r->m->device;
  for (int64_t k = 0; k < s->pointer_count; ++k) {
    const int64_t* pointer = s->pointers + 3 * k;
    flam_place at = c->there.buffers[pointer[0]];
    at.offset += c->numbers[pointer[1]];
    at.itemsize = pointer[2];
    c->there.arguments[k] = at;
  }
  for (int64_t k = 0; k < s->size_count; ++k) c->words[k] = c->numbers[s->sizes[k]];
  flam_launch l = {0, {0, 0, 0}, c->there.arguments, s->pointer_count, c->words, s->size_count, {0, 0, 1}, {0, 0, 1}, {0, 0, 1}, s->record};
  int64_t work = s->work < 0 ? 0 : c->numbers[s->work];
  if (s->work >= 0) l.work = place(c->there.arena, c->there.work);
  if (work) TRY(r, s->origin, d->zero(r->m->opened, r->stream, l.work, (size_t)work));
  l.faults = place(c->there.records ? c->there.records : c->there.arena, 0);
  const int64_t* parts = chosen(s, c);
  for (int64_t k = 0; k < parts[0]; ++k) {
    const int64_t* part = parts + 1 + 4 * k;
    l.function = part[0];
    int empty = 0;
    for (int i = 0; i < 3; ++i) empty |= (l.groups[i] = c->numbers[part[1 + i]]) == 0;
    if (empty) continue;
    l.scratch = r->m->functions[part[0]].scratch ? place(c->there.arena, c->there.work + rounded(work)) : place(0, 0);
    TRY(r, s->origin, d->launch(r->m->opened, r->stream, &l));
  }
  return NULL;
}

/* Waits for kernels, and returns the error that they found. */
static const char* read_faults(run* r, int* code, flam_error* error) {
  const flam_device* d = r->m->device;
  size_t size = (size_t)(r->p->record_count * d->record_bytes);
  uint8_t few[512], *records = size <= sizeof few ? few : malloc(size);
  if (!records) return "there is not enough memory";
  r->what = "to read what kernels found";
  const char* said = d->download(r->m->opened, r->stream, records, place(r->c->there.records, 0), size);
  for (int64_t i = 0; !said && !*code && i < r->p->step_count; ++i) {
    const step* s = r->p->steps + i;
    int64_t fault = 0;
    if (s->kind == STEP_DEVICE && s->checks) memcpy(&fault, records + s->record * d->record_bytes + d->fault_at, 8);
    if (fault) *code = fl_fault(r->m, r->c, s, fault, error);
  }
  if (*code && !said) said = d->zero(r->m->opened, r->stream, place(r->c->there.records, 0), size);
  if (*code && !said) said = d->wait(r->m->opened, r->stream);
  if (records != few) free(records);
  return said;
}

static const char* steps(run* r, int* code, flam_error* error) {
  for (int64_t i = 0; i < r->p->step_count; ++i) {
    const step* s = r->p->steps + i;
    r->what = s->origin;
    const char* said = s->kind == STEP_COPY ? copy_step(r, s) : launch_step(r, s);
    /* States are not written after an error. */
    if (!said && r->p->has_state && s->kind == STEP_DEVICE && s->checks) said = read_faults(r, code, error);
    if (said || *code) return said;
  }
  return r->p->record_count && !r->p->has_state ? read_faults(r, code, error) : NULL;
}

static const char* all(run* r, const flam_tensor* inputs, const flam_tensor* outputs, const weight_set* weights, int there, int staged,
                       int* code, flam_error* error) {
  const flam_model* m = r->m;
  const flam_device* d = m->device;
  context* c = r->c;
  for (int64_t k = 0; k < r->p->buffer_count; ++k) {
    const buffer* b = r->p->buffers + k;
    flam_place* at = c->there.buffers + k;
    switch (b->place) {
      case PLACE_INPUT:
        *at = staged ? place(c->there.arena, c->there.stage[b->which]) : place((uint64_t)(uintptr_t)inputs[b->which].data, 0);
        break;
      case PLACE_OUTPUT:
        *at = staged ? place(c->there.arena, c->there.stage[r->of->input_count + b->which])
                     : place((uint64_t)(uintptr_t)outputs[b->which].data, 0);
        break;
      case PLACE_WEIGHT: *at = place(weights->blocks[b->which]->there, 0); break;
      case PLACE_STATE: *at = place(m->states_there[b->which], 0); break;
      case PLACE_TEMPORARY: *at = place(c->there.arena, c->offsets[k]); break;
      case PLACE_SEED: *at = place(c->there.arena, c->there.seeds + 16 * b->which); break;
    }
  }
  if (r->p->seed_count) {
    TRY(r, "the seeds", d->upload(m->opened, r->stream, place(c->there.arena, c->there.seeds), fl_seeds(r->p, c), (size_t)r->p->seed_count * 16));
  }
  for (int64_t k = 0; staged && k < r->of->input_count; ++k) {
    flam_place to = place(c->there.arena, c->there.stage[k]);
    size_t size = (size_t)tensor_bytes(inputs + k);
    if (size && !there) TRY(r, r->of->inputs[k].name, d->upload(m->opened, r->stream, to, inputs[k].data, size));
    if (size && there) TRY(r, r->of->inputs[k].name, d->copy(m->opened, r->stream, to, place((uint64_t)(uintptr_t)inputs[k].data, 0), size));
  }
  const char* said = steps(r, code, error);
  if (said || *code) return said;
  for (int64_t k = 0; staged && k < r->of->output_count; ++k) {
    flam_place from = place(c->there.arena, c->there.stage[r->of->input_count + k]);
    size_t size = (size_t)tensor_bytes(outputs + k);
    if (size && !there) TRY(r, r->of->outputs[k].name, d->download(m->opened, r->stream, outputs[k].data, from, size));
    if (size && there) TRY(r, r->of->outputs[k].name, d->copy(m->opened, r->stream, place((uint64_t)(uintptr_t)outputs[k].data, 0), from, size));
  }
  return NULL;
}

int fl_run_there(const flam_model* m, const program* p, const method* of, context* c, const flam_tensor* inputs,
                 const flam_tensor* outputs, const weight_set* weights, int there, void* stream, flam_error* error) {
  const flam_device* d = m->device;
  int staged = !there; /* kernels rely on aligned addresses */
  for (int64_t k = 0; d->alignment && k < of->input_count; ++k) staged |= (uintptr_t)inputs[k].data % (uintptr_t)d->alignment != 0;
  for (int64_t k = 0; d->alignment && k < of->output_count; ++k) staged |= (uintptr_t)outputs[k].data % (uintptr_t)d->alignment != 0;
  if (there && !d->alignment) return fl_fail(error, FLAM_ARGUMENT, "%s: memory is the runtime's own, and not given", d->name);
  d->enter(m->opened);
  int code = make_room(m, p, c, staged ? c->there.staged : c->needed, error);
  if (!code) {
    run r = {m, p, of, c, there ? stream : c->there.stream, "a call"};
    if (c->there.mark) d->after(m->opened, r.stream, c->there.mark); /* the last call's kernels use this memory */
    const char* said = all(&r, inputs, outputs, weights, there, staged, &code, error);
    if (said) code = failed(m, r.what, said, error);
    if (there) c->there.mark = d->mark(m->opened, r.stream, c->there.mark);
    else if (!said) said = d->wait(m->opened, r.stream);
    if (!code && said) code = failed(m, "to wait", said, error);
  }
  d->leave(m->opened);
  return code;
}
