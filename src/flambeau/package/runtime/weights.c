/* Replaces the weights of a model, all at once: a call sees the old ones or the new ones. */
#include "internal.h"

/* Whether a tensor is neither expanded nor has gaps. */
static int is_dense(const weight* w) {
  int64_t bytes = (int64_t)fl_itemsize(w->dtype);
  for (int64_t d = 0; d < w->rank; ++d) {
    if (__builtin_mul_overflow(bytes, w->sizes[d], &bytes)) return 0;
  }
  return bytes == w->bytes;
}

static int lies_alike(const weight* w, const flam_tensor* t) {
  int same = 1;
  for (int64_t d = 0; w->bytes && d < w->rank; ++d) same &= w->sizes[d] < 2 || t->strides[d] == w->strides[d];
  return same;
}

static int check_weight(const weight* w, const flam_tensor* t, flam_error* error) {
  size_t bytes = (size_t)w->rank * sizeof(int64_t);
  if ((t->data || !w->bytes) && t->dtype == w->dtype && t->rank == w->rank && !memcmp(t->sizes, w->sizes, bytes)
      && (is_dense(w) || lies_alike(w, t))) {
    return 0;
  }
  flam_tensor is = {NULL, (int32_t)w->dtype, (int32_t)w->rank, {0}, {0}};
  memcpy(is.sizes, w->sizes, bytes);
  memcpy(is.strides, w->strides, bytes);
  char expected[400], got[400];
  int strides = !is_dense(w); /* any memory order is converted to the model's */
  fl_described(&is, strides, expected, sizeof expected);
  fl_described(t, strides, got, sizeof got);
  return fl_fail(error, FLAM_ARGUMENT, "weight '%s': expected %s, got %s", w->name, expected, got);
}

static void lay(const weight* w, const flam_tensor* t, int64_t d, char* to, const char* from) {
  int64_t item = (int64_t)fl_itemsize(w->dtype);
  if (d == w->rank) memcpy(to, from, (size_t)item);
  for (int64_t k = 0; d < w->rank && k < w->sizes[d]; ++k) {
    lay(w, t, d + 1, to + k * w->strides[d] * item, from + k * t->strides[d] * item);
  }
}

/* Allocates a block with the new values. */
static block* new_block(const weight* w, const flam_tensor* t) {
  block* b = calloc(1, sizeof *b);
  void* data = fl_aligned((size_t)w->bytes);
  if (!b || !data) {
    free(b);
    free(data);
    return NULL;
  }
  if (!lies_alike(w, t)) lay(w, t, 0, data, t->data);
  else if (w->bytes) memcpy(data, t->data, (size_t)w->bytes);
  *b = (block){1, data, 1, 0};
  return b;
}

/* The weight with this name; metadata "also NAME" has the first name of tied weights. -1: there is none. */
static int64_t weight_called(const flam_model* m, const char* name) {
  char also[1024];
  snprintf(also, sizeof also, "also %s", name);
  const char* own = flam_metadata(m, also);
  for (int64_t k = 0; k < m->weight_count; ++k) {
    if (!strcmp(m->weights_known[k].name, own ? own : name)) return k;
  }
  return -1;
}

int flam_update_weights(flam_model* m, const char* const* names, const flam_tensor* values, int count, flam_error* error) {
  int code = 0;
  int64_t* places = calloc((size_t)count + 1, sizeof(int64_t));
  weight_set* made = calloc(1, sizeof *made);
  if (made) {
    made->uses = 1;
    made->blocks = calloc((size_t)m->weight_count + 1, sizeof(block*));
  }
  if (!places || !made || !made->blocks) code = fl_fail(error, FLAM_MEMORY, "there is not enough memory");
  for (int i = 0; !code && i < count; ++i) {
    places[i] = weight_called(m, names[i]);
    code = places[i] < 0 ? fl_fail(error, FLAM_ARGUMENT, "the package has no weight '%s'", names[i])
                         : check_weight(m->weights_known + places[i], values + i, error);
  }
  pthread_mutex_lock(&m->update_lock); /* of two simultaneous updates, the second starts from the first */
  for (int i = 0; !code && i < count; ++i) {
    const weight* w = m->weights_known + places[i];
    block *b = new_block(w, values + i), *before = made->blocks[places[i]];
    if (!b) {
      code = fl_fail(error, FLAM_MEMORY, "there is not enough memory for weight '%s'", w->name);
    } else if (before) { /* tied weights may be given by several names */
      if (memcmp(before->data, b->data, (size_t)w->bytes)) {
        code = fl_fail(error, FLAM_ARGUMENT, "weight '%s' is given two values", w->name);
      }
      free(b->data);
      free(b);
    } else {
      made->blocks[places[i]] = b;
      if (m->device) code = fl_block_there(m, b, (size_t)w->bytes, error);
    }
  }
  weight_set* old = NULL;
  if (!code) {
    pthread_mutex_lock(&m->state_lock);
    pthread_mutex_lock(&m->lock);
    for (int64_t k = 0; k < m->weight_count; ++k) {
      if (made->blocks[k]) {
        if (m->states[k]) memcpy(m->states[k], made->blocks[k]->data, (size_t)m->weights_known[k].bytes);
        if (m->states[k] && m->device) fl_state_there(m, k, NULL);
      } else {
        made->blocks[k] = m->weights->blocks[k];
        atomic_fetch_add(&made->blocks[k]->uses, 1);
      }
    }
    old = m->weights;
    m->weights = made;
    pthread_mutex_unlock(&m->lock);
    pthread_mutex_unlock(&m->state_lock);
  }
  pthread_mutex_unlock(&m->update_lock);
  if (old) fl_release_weights(m, old);
  if (code && made) fl_release_weights(m, made);
  free(places);
  return code;
}
